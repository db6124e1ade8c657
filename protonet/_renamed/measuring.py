"""Renamed."""

raise ImportError("protonet.measuring is now protonet.metrics and protonet.fit.crossfit; see CHANGELOG.md")
