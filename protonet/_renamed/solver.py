"""Renamed."""

raise ImportError("protonet.solver is now protonet.fit.solver; see CHANGELOG.md")
