"""Renamed."""

raise ImportError("protonet.selection is now protonet.fit.search; see CHANGELOG.md")
