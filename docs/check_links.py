"""Check the links of the built site: every page, file and anchor that a page of it names is there.

``python docs/check_links.py docs/_build/html``. Links to other sites are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the tag's identifier and what it leads to."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in {"href", "src"}:
                self.links.add(value)


def find_broken(root: Path) -> list[str]:
    """Return a line for each link of a site that leads nowhere."""
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
    lines = find_broken(Path(sys.argv[1]))
    print("\n".join([*lines, f"{len(lines)} broken links"]))
    sys.exit(bool(lines))
