"""Renamed."""

raise ImportError("protonet.episodes.sampling is now protonet.sampling; see CHANGELOG.md")
