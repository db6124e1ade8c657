"""HTML and SVG of which every text is escaped, and numbers as people read them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from protonet._text import to_printable

#: Elements that have no content, and no end tag.
EMPTY = frozenset({"input", "link", "meta"})


class Markup(str):
    """Text that is markup already: it is not escaped again."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Of the element.
        children: What is in it: markup stays as it is, of anything else the text is escaped, None is nothing.
        attributes: Their names may end in ``_``; other ``_`` are ``-``. None and False leave one out; True is "".
    """
    own = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{"" if value is True else _escape(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{own}>" if name in EMPTY else f"<{name}{own}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Return children of `tag`, one after another."""
    return Markup("".join(each if isinstance(each, Markup) else _escape(each) for each in children if each is not None))


def _escape(value: object) -> str:
    """Return a text as one line without control characters, and without markup."""
    return html.escape(to_printable(value))


def name_class(name: object, *, longest: int | None = None) -> Markup:
    """Return a name that came from outside, which may run in either direction, cut where it is too long."""
    text = to_printable(name)
    if longest is not None and len(text) > longest:
        return tag("bdi", text[: longest - 1] + "…", title=text)
    return tag("bdi", text)


def table(header: Sequence[object], rows: Iterable[Sequence[object]], label: str, *, numbers: int = 0) -> Markup:
    """Return a table that can be scrolled by itself.

    Args:
        header: Of the columns.
        rows: Their cells. The first one of a row is its heading.
        label: What the table is, for those who do not see it.
        numbers: Columns from this one on, if not 0, are numbers, and stand to the right.
    """

    def align(at: int) -> str | None:
        return "number" if numbers and at >= numbers else None

    head = tag("tr", *(tag("th", text, scope="col", class_=align(at)) for at, text in enumerate(header)))
    body = (
        tag(
            "tr",
            tag("th", cells[0], scope="row"),
            *(tag("td", cell, class_=align(at)) for at, cell in enumerate(cells[1:], 1)),
        )
        for cells in rows
    )
    content = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", content, class_="scroll", role="region", aria_label=label, tabindex=0)


def percent(share: float, digits: int = 1) -> str:
    """Return a share of 1 in per cent."""
    return f"{100 * share:.{digits}f} %"


def span(interval: Sequence[float], digits: int = 1) -> str:
    """Return an interval of shares in per cent."""
    low, high = (100 * bound for bound in interval)
    return f"{low:.{digits}f} to {high:.{digits}f} %"
