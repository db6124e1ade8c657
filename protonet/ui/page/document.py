"""The report as one file of HTML, made of nothing but the figures that ``--json`` writes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from protonet._writing import write_json, write_text
from protonet.ui.page.markup import Markup, name_class, percent, span, table, tag
from protonet.ui.page.sections import (
    Figures,
    format_accuracy,
    format_classes,
    format_confusion,
    format_data,
    format_importance,
    format_learning,
    format_map,
    format_reliability,
    format_suspects,
    format_views,
)
from protonet.ui.text import count

#: A figure that people ask for first: its name, its value, and what it is of.
Tile = tuple[str, str, str | None]
#: The name, the heading and the content of a section.
Section = tuple[str, str, Markup]


def write_outputs(outputs: Mapping[str, Path], figures: Figures) -> None:
    """Write figures where the options ``json`` and ``report`` say.

    Raises:
        OSError: A file cannot be written.
    """
    if "json" in outputs:
        write_json(outputs["json"], figures)
    if "report" in outputs:
        write_page(outputs["report"], figures)


def write_page(path: Path, figures: Figures) -> None:
    """Write the report.

    Args:
        path: Of the file.
        figures: Of ``fit --json`` or ``evaluate --json`` with ``--report``.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(path, format_page(figures))


def format_page(figures: Figures) -> str:
    """Return the report of a fit or an evaluation."""
    title = f"{figures['table']}: {'a fit' if figures['command'] == 'fit' else 'an evaluation'}"
    sections = [each for each in compute_report_sections(figures) if each is not None]
    return format_document(title, list_tiles(figures), sections, figures, f"protonet {figures['command']}")


def format_document(
    title: str, tiles: Sequence[Tile], sections: Sequence[Section], figures: Figures, maker: str
) -> str:
    """Return a page: no text of the figures is taken for markup, and it may load nothing and send nothing.

    Args:
        title: Of the page.
        tiles: What people ask for first.
        sections: In their order.
        figures: What the page holds as JSON.
        maker: The command.
    """
    links = (tag("li", tag("a", heading, href=f"#{name}")) for name, heading, _ in sections)
    shown = (
        tag("div", tag("dt", name), tag("dd", value), more and tag("dd", more, class_="more"))
        for name, value, more in tiles
    )
    body = [
        tag("a", "To the figures", href="#main", class_="skip"),
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
        tag("footer", tag("p", f"Made by {maker}. This file needs no network, and holds its figures as JSON.")),
        tag("script", embed(figures), type="application/json", id="figures"),
    ]
    return make_page(title, body, ["page.css"], "page.js")[0]


def make_page(
    title: str, body: Sequence[Markup], styles: Sequence[str], script: str | None, rules: str = ""
) -> tuple[str, str]:
    """Return a page, and its policy: it may run one script and use one style, and load nothing but what rules say.

    Args:
        title: Of the page.
        body: What is in it, the script aside.
        styles: The names of files of this room, one after the other.
        script: The name of another one, or None.
        rules: More of the policy.
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
    whole = tag("html", head, tag("body", *body, *[tag("script", run)] * bool(run)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n", policy


def format_served(models: Sequence[tuple[str, Sequence[object], Sequence[tuple[str, str]], str]]) -> tuple[str, str]:
    """Return the page of ``serve``, and its policy.

    Args:
        models: Of each its name, its classes, the names and the kinds of its columns, and a command that asks it.
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
            tag("ul", *(tag("li", name_class(each)) for each in classes), class_="legend"),
            table(["column", "kind"], [(name_class(own), kind) for own, kind in columns], "Columns"),
            tag("p", tag("code", example)),
        )
        for name, classes, columns, example in models
    ]
    body = [tag("header", tag("h1", "protonet serve")), tag("main", tag("section", intro), *sections)]
    return make_page("protonet serve", body, ["page.css"], None)


def format_api(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return an OpenAPI document as a page without a script, and its policy."""
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
                    tag("p", "Parameters: ", ", ".join(each["name"] for each in parameters)) if parameters else None,
                    *(_schema(f"Body, {media}", each["schema"]) for media, each in body.items()),
                    *(
                        _schema(f"200, {media}", each["schema"])
                        for media, each in dict(responses)["200"]["content"].items()
                    ),
                    table(
                        ["status", "meaning"], [(status, each["description"]) for status, each in responses], "Statuses"
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
    body, rules = Markup(_read("desk.html")), "connect-src 'self'; img-src 'self' blob: data:"
    return make_page(title, [body], ["page.css", "desk.css"], "desk.js", rules)


def _read(name: str) -> str:
    """Return a file of this room."""
    return (resources.files("protonet.ui.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return what a content security policy calls a style or a script of this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embed(figures: Figures) -> Markup:
    """Return figures as JSON that no HTML reader takes for markup."""
    text = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    for each in "<>&":
        text = text.replace(each, f"\\u{ord(each):04x}")
    return Markup(text)


def compute_report_sections(figures: Figures) -> list[Section | None]:
    """Return the name, the heading and the content of each section; None for one that there are no figures for."""
    judged, fitted = "predictions" in figures, figures["command"] == "fit"
    if not judged:
        return [("data", "The data", format_data(figures))]
    learning = ("learning", "What more labels may give", format_learning(figures["learning"])) if fitted else None
    return [
        ("sure", "How sure the figures are", format_accuracy(figures)),
        ("suspects", "Rows to look at", format_suspects(figures)),
        ("confusion", "What is taken for what", format_confusion(figures)),
        ("classes", "Each class", format_classes(figures)),
        ("map", "Map of the embedding", format_map(figures)),
        ("reliability", "Reliability of the probabilities", format_reliability(figures)),
        ("columns", "Which columns matter", format_importance(figures["importance"])),
        learning,
        ("views", "What the embedding is made of", format_views(figures["views"])) if fitted else None,
        ("data", "The data", format_data(figures)),
    ]


def list_tiles(figures: Figures) -> list[Tile]:
    """Return the figures that people ask for first."""
    data = figures["data"]
    tiles: list[Tile] = [
        ("rows", f"{data['rows']:,}", count(len(data["columns"]), "column")),
        ("classes", f"{len(data['classes']):,}", None),
    ]
    if "predictions" not in figures:
        return tiles
    off = "{:.1f} to {:.1f}".format(*(100 * end for end in figures["calibration_interval"]))
    return [
        ("right", percent(figures["accuracy"]), f"95 %: {span(figures['interval'])}"),
        ("balanced accuracy", percent(figures["balanced_accuracy"]), "the mean over classes"),
        (
            "log-loss",
            f"{figures['log_loss']:.3f}",
            "nats, 95 %: {:.3f} to {:.3f}".format(*figures["log_loss_interval"]),
        ),
        ("calibration error", f"{100 * figures['calibration_error']:.1f}", f"points, 95 %: {off}"),
        ("rows to look at", f"{figures['wrong_labels']:,}", "believed to be of another class"),
        *tiles,
    ]
