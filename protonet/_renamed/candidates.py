"""Renamed."""

raise ImportError("protonet.candidates is now protonet.fit.search, protonet.views has its kinds; see CHANGELOG.md")
