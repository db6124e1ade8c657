"""Check that the internal links of the built site lead to existing pages, files and anchors.

Run ``python docs/check_links.py docs/_build/html``. Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the identifier and the links of a tag."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in {"href", "src"}:
                self.links.add(value)


def list_broken_links(root: Path) -> list[str]:
    """List the broken links of a built site, a line per link."""
    pages = {path.resolve(): Page(path) for path in sorted(root.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                broken.append(f"{path.relative_to(root.resolve())}: {link}: no such file")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{path.relative_to(root.resolve())}: {link}: no such anchor")
    return broken


if __name__ == "__main__":
    lines = list_broken_links(Path(sys.argv[1]))
    print("\n".join([*lines, f"{len(lines)} broken links"]))
    sys.exit(bool(lines))
