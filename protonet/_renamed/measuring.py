"""Renamed."""

raise ImportError("protonet.measuring is now protonet.metrics and protonet.fit.baselines; see CHANGELOG.md")
