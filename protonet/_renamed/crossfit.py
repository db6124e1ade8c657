"""Renamed."""

raise ImportError("protonet.crossfit is now protonet.fit.crossfit; see CHANGELOG.md")
