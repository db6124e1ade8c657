"""Renamed."""

raise ImportError("protonet.training is now protonet.views.mlp; see CHANGELOG.md")
