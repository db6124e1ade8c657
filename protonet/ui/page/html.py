"""HTML documents: markup with escaped text, tables, and pages with a content security policy."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from protonet._text import to_printable

#: Elements without content and end tag.
EMPTY = frozenset({"input", "link", "meta"})


class Markup(str):
    """Text that is markup: it is not escaped again."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Format an element.

    Args:
        name: The name of the element.
        children: Its content; all text that is not `Markup` is escaped, None is left out.
        attributes: A final ``_`` of a name is removed, others become ``-``. None and False are left out; True is "".
    """
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{"" if value is True else _escape(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{text}>" if name in EMPTY else f"<{name}{text}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Concatenate children of `tag`."""
    return Markup(
        "".join(child if isinstance(child, Markup) else _escape(child) for child in children if child is not None)
    )


def _escape(value: object) -> str:
    """Escape markup and control characters."""
    return html.escape(to_printable(value))


def name_class(name: object, *, longest: int | None = None) -> Markup:
    """Isolate a name, which may be written in either direction, and truncate it to a maximal length."""
    text = to_printable(name)
    if longest is not None and len(text) > longest:
        return tag("bdi", text[: longest - 1] + "…", title=text)
    return tag("bdi", text)


def table(header: Sequence[object], rows: Iterable[Sequence[object]], label: str, *, numbers: int = 0) -> Markup:
    """Format a table that scrolls.

    Args:
        header: The headings of the columns.
        rows: The cells; the first one of each row is its heading.
        label: The name of the table for screen readers.
        numbers: The first column of numbers, which are aligned to the right; 0 for none.
    """

    def align(column: int) -> str | None:
        return "number" if numbers and column >= numbers else None

    head = tag("tr", *(tag("th", text, scope="col", class_=align(column)) for column, text in enumerate(header)))
    body = (
        tag(
            "tr",
            tag("th", cells[0], scope="row"),
            *(tag("td", cell, class_=align(column)) for column, cell in enumerate(cells[1:], 1)),
        )
        for cells in rows
    )
    content = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", content, class_="scroll", role="region", aria_label=label, tabindex=0)


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction in per cent."""
    return f"{100 * fraction:.{digits}f} %"


def span(interval: Sequence[float], digits: int = 1) -> str:
    """Format an interval of fractions in per cent."""
    low, high = (100 * bound for bound in interval)
    return f"{low:.{digits}f} to {high:.{digits}f} %"


def paragraph(*parts: object, soft: bool = False) -> Markup:
    """Format a paragraph; a soft one has a lighter colour."""
    return tag("p", *parts, class_="soft" if soft else None)


#: The name, the value and an explanation of a metric at the top of a report.
Tile = tuple[str, str, str | None]
#: The identifier, the heading and the content of a section.
Section = tuple[str, str, Markup]


def format_document(
    title: str, tiles: Sequence[Tile], sections: Sequence[Section], metrics: Mapping[str, Any], command: str
) -> str:
    """Format a self-contained report, which may not load or send anything.

    Args:
        title: The title.
        tiles: The metrics at the top.
        sections: The sections, in order.
        metrics: The content of the embedded JSON.
        command: The command that wrote the report.
    """
    links = (tag("li", tag("a", heading, href=f"#{name}")) for name, heading, _ in sections)
    shown = (
        tag("div", tag("dt", name), tag("dd", value), more and tag("dd", more, class_="more"))
        for name, value, more in tiles
    )
    body = [
        tag("a", "To the results", href="#main", class_="skip"),
        tag(
            "header",
            tag("h1", name_class(title)),
            tag("dl", *shown, class_="tiles"),
            tag("nav", tag("ul", *links), aria_label="Sections"),
        ),
        tag(
            "main",
            *(
                tag(
                    "section", tag("h2", heading, id=f"{name}-title"), content, id=name, aria_labelledby=f"{name}-title"
                )
                for name, heading, content in sections
            ),
            id="main",
        ),
        tag("footer", tag("p", f"Made by {command}. This file needs no network; its metrics are embedded as JSON.")),
        tag("script", embed(metrics), type="application/json", id="metrics"),
    ]
    return make_page(title, body, ["page.css"], "page.js")[0]


def make_page(
    title: str, body: Sequence[Markup], styles: Sequence[str], script: str | None, rules: str = ""
) -> tuple[str, str]:
    """Format a page and its content security policy, which allows its own script and style only.

    Args:
        title: The title.
        body: The content, without the script.
        styles: The names of style sheets of this package.
        script: The name of a script of this package, or None.
        rules: Further rules of the policy.
    """
    style = Markup("".join(_read(name) for name in styles))
    run = Markup("" if script is None else _read(script))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    policy += f"; script-src '{_hash(run)}'" * bool(run) + f"; {rules}" * bool(rules)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,") if rules else None,
        tag("style", style),
    )
    document = tag("html", head, tag("body", *body, *[tag("script", run)] * bool(run)), lang="en")
    return f"<!DOCTYPE html>\n{document}\n", policy


def format_served(models: Sequence[tuple[str, Sequence[object], Sequence[tuple[str, str]], str]]) -> tuple[str, str]:
    """Format the start page of ``serve``, and its policy.

    Args:
        models: The name, the classes, the columns and their types, and an example request of each model.
    """
    intro = tag(
        "p",
        "Rows come as JSON, CSV, NPY or a picture. ",
        tag("code", "/openapi.json"),
        " describes it all, ",
        tag("code", "/docs"),
        " shows it.",
    )
    sections = [
        tag(
            "section",
            tag("h2", name_class(name)),
            tag("p", "Classes:"),
            tag("ul", *(tag("li", name_class(label)) for label in classes), class_="legend"),
            table(["column", "type"], [(name_class(column), kind) for column, kind in columns], "Columns"),
            tag("p", tag("code", example)),
        )
        for name, classes, columns, example in models
    ]
    body = [tag("header", tag("h1", "protonet serve")), tag("main", tag("section", intro), *sections)]
    return make_page("protonet serve", body, ["page.css"], None)


def format_api(document: Mapping[str, Any]) -> tuple[str, str]:
    """Format an OpenAPI document as a page without a script, and its policy."""
    sections = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method == "parameters":
                continue
            parameters = [*operations.get("parameters", []), *operation.get("parameters", [])]
            body = operation.get("requestBody", {}).get("content", {})
            responses = operation["responses"].items()
            token = "needs a token" if operation["security"] else "needs no token"
            sections.append(
                tag(
                    "section",
                    tag("h2", tag("code", f"{method.upper()} {path}"), id=operation["operationId"]),
                    tag("p", f"{operation['summary']}; {token}."),
                    tag("p", "Parameters: ", ", ".join(item["name"] for item in parameters)) if parameters else None,
                    *(_schema(f"Body, {media}", content["schema"]) for media, content in body.items()),
                    *(
                        _schema(f"200, {media}", content["schema"])
                        for media, content in dict(responses)["200"]["content"].items()
                    ),
                    table(
                        ["status", "meaning"], [(status, item["description"]) for status, item in responses], "Statuses"
                    ),
                )
            )
    schemas = [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    intro = tag("p", "Each request but for health needs ", tag("code", "Authorization: Bearer TOKEN"), ".")
    body_ = [tag("header", tag("h1", "protonet serve: API"), intro)]
    return make_page(
        "API", [*body_, tag("main", *sections, tag("section", tag("h2", "Schemas"), *schemas))], ["page.css"], None
    )


def _schema(title: str, schema: object) -> Markup:
    """Show a schema as JSON, folded."""
    return tag("details", tag("summary", title), tag("pre", json.dumps(schema, indent=2, ensure_ascii=False)))


def format_label_page(title: str) -> tuple[str, str]:
    """Format the labelling page, which its script fills in, and its policy: requests go to its own server only."""
    body, rules = Markup(_read("label.html")), "connect-src 'self'; img-src 'self' blob: data:"
    return make_page(title, [body], ["page.css", "label.css"], "label.js", rules)


def _read(name: str) -> str:
    """Read a file of this package."""
    return (resources.files("protonet.ui.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Compute the hash of a style or script for a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embed(metrics: Mapping[str, Any]) -> Markup:
    """Encode metrics as JSON without characters of markup."""
    text = json.dumps(metrics, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
