"""Renamed."""

raise ImportError(
    "protonet.candidates is now protonet.fit.search (Search) and protonet.views (the kinds of views); see CHANGELOG.md"
)
