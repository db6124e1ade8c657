"""Renamed."""

raise ImportError("protonet.rejection is now protonet.metrics; see CHANGELOG.md")
