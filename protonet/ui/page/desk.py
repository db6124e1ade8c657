"""The page to label, look and try: what stands still; its script fills it in."""

from __future__ import annotations

from protonet.ui.page.document import make_page
from protonet.ui.page.markup import Markup, name_class, tag

#: The rooms of the page: their names, what they are called, and the key that leads there.
ROOMS = (("label", "Label"), ("look", "Look"), ("try", "Try"), ("take", "Take"))


def format_desk(title: str) -> tuple[str, str]:
    """Return the page, and its policy."""
    tabs = (
        tag("button", text, role="tab", id=f"to-{name}", aria_controls=name, aria_selected="false", tabindex=-1)
        for name, text in ROOMS
    )
    body = [
        tag("a", "To the question", href="#label", class_="skip"),
        tag(
            "header",
            tag("h1", name_class(title)),
            tag("p", id="far", class_="soft"),
            tag("div", *tabs, role="tablist", aria_label="What to do"),
        ),
        tag("p", id="error", role="alert", hidden=True),
        tag("main", *(_make_room(name) for name, _ in ROOMS), id="main"),
    ]
    return make_page(title, body, ["page.css", "desk.css"], "desk.js", "connect-src 'self'; img-src 'self' data:")


def _make_room(name: str) -> Markup:
    """Return one room of the page."""
    content = {"label": _label, "look": _look, "try": _try, "take": _take}[name]()
    return tag("section", *content, id=name, role="tabpanel", aria_labelledby=f"to-{name}", tabindex=-1, hidden=True)


def _label() -> list[Markup]:
    """Return where rows are labelled."""
    add = tag(
        "form",
        tag("label", "Another class (n)", for_="new"),
        tag("input", id="new", autocomplete="off", maxlength=100),
        tag("button", "Give it"),
        id="add",
    )
    keys = (
        tag("button", text, id=name, type="button")
        for name, text in (("skip", "Skip (s)"), ("undo", "Undo (u)"), ("flag", "Flag (f)"))
    )
    return [
        tag("p", id="reason", class_="soft", aria_live="polite"),
        tag("div", id="question"),
        tag("ol", id="keys", aria_label="Classes"),
        add,
        tag("div", *keys, class_="row"),
        tag("div", tag("h2", "Labelled rows that are like it"), tag("ul", id="near", class_="cards"), id="beside"),
    ]


def _look() -> list[Markup]:
    """Return where figures are looked at."""
    return [
        tag(
            "div",
            tag("button", "Work the figures out", id="work", type="button"),
            tag("span", id="working", role="status"),
            class_="row",
        ),
        tag("dl", id="tiles", class_="tiles"),
        tag("h2", "What is taken for what"),
        tag("div", id="matrix", class_="confusion scroll", role="region", aria_label="Confusion", tabindex=0),
        tag("ul", id="behind", class_="cards", aria_live="polite"),
        tag("h2", "Rows that look mislabelled"),
        tag("p", "A button, or its number's key, gives the row another class at once.", class_="soft"),
        tag("ul", id="suspects", class_="cards"),
        tag("h2", "Map of all rows"),
        tag("div", tag("button", "Draw it", id="draw", type="button"), class_="row"),
        tag("ul", id="legend", class_="legend"),
        tag(
            "canvas",
            id="map",
            width=880,
            height=600,
            tabindex=0,
            role="img",
            aria_label="Map of all rows: arrow keys go from one to the next",
        ),
        tag("div", id="told", class_="told", role="status"),
        tag("h2", "Columns as they were understood"),
        tag("ul", id="notes", class_="notes"),
        tag("div", id="columns", class_="scroll", role="region", aria_label="Columns", tabindex=0),
    ]


def _try() -> list[Markup]:
    """Return where a row is tried."""
    return [
        tag("form", tag("div", id="fields"), tag("button", "Try it"), id="attempt"),
        tag("div", id="judged", aria_live="polite"),
        tag("ul", id="like", class_="cards"),
    ]


def _take() -> list[Markup]:
    """Return where all of it is taken."""
    return [
        tag(
            "div",
            tag("button", "Make the model, its report and predictions", id="make", type="button"),
            tag("span", id="making", role="status"),
            class_="row",
        ),
        tag("ul", id="files"),
        tag("h2", "Commands that do the same"),
        tag("div", id="commands"),
    ]
