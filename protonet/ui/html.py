"""Format HTML pages and reports from templates, with escaped text and a content security policy."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from protonet._io import JsonDict, write_json, write_text
from protonet._text import plural, to_printable
from protonet.ui.text import format_csv, format_interval, format_percent, natural_sort_indices

if TYPE_CHECKING:
    from jinja2 import Environment

#: Variables of all templates: maximal numbers of columns, of possible label errors and of their cells on a page, the
#: maximal length of a name in a list, and the number of shades in the confusion matrix.
TEMPLATE_CONSTANTS = {"max_columns": 100, "max_suspects": 50, "max_cells": 4, "max_name": 60, "shades": 5}


def format_html_name(name: object, max_length: int | None = None) -> Markup:
    """Format the name of a class, column or file as HTML, truncated to ``max_length`` characters, if given.

    The name is isolated from the text around it, because it may be written from right to left.
    """
    text = to_printable(name)
    if max_length is not None and len(text) > max_length:
        return Markup('<bdi title="{}">{}…</bdi>').format(text, text[: max_length - 1])
    return Markup("<bdi>{}</bdi>").format(text)


def encode_script_json(metrics: Mapping[str, object]) -> Markup:
    """Encode metrics as JSON without the characters that would end an HTML script element."""
    text = json.dumps(metrics, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


@cache
def make_template_environment() -> Environment:
    """Create the Jinja environment of the templates; it escapes markup and control characters in all texts."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - slow to import

    environment = Environment(
        loader=PackageLoader("protonet.ui", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else to_printable(value),
    )
    environment.filters |= {
        "count": plural,
        "ends": lambda interval, spec, scale=1: " to ".join(format(scale * bound, spec) for bound in interval),
        "fmt": format,
        "json": encode_script_json,
        "name": format_html_name,
        "order": natural_sort_indices,
        "percent": format_percent,
        "points": lambda fraction, spec: format(100 * fraction, spec),
        "span": format_interval,
    }
    environment.globals |= {"dumps": json.dumps, "log": math.log, **TEMPLATE_CONSTANTS}
    return environment


def format_page(
    template: str,
    title: str,
    values: Mapping[str, object],
    styles: Sequence[str] = ("page.css",),
    script: str = "",
    rules: str = "",
) -> tuple[str, str]:
    """Format an HTML page from a template, style sheets and a script in the folder ``assets``.

    Args:
        template: File name of the template.
        title: Title of the page.
        values: Variables of the template.
        styles: File names of style sheets, which are embedded.
        script: File name of a script, which is embedded; "" for no script.
        rules: Further rules of the content security policy, which otherwise allows the embedded styles and script only.

    Returns:
        The page, and its content security policy.
    """
    environment = make_template_environment()
    assert environment.loader is not None
    style, run = (
        Markup("".join(environment.loader.get_source(environment, name)[0] for name in names if name))
        for names in (styles, [script])
    )
    policy = f"default-src 'none'; style-src '{_hash_for_security_policy(style)}'; base-uri 'none'; form-action 'none'"
    policy += f"; script-src '{_hash_for_security_policy(run)}'" * bool(run) + f"; {rules}" * bool(rules)
    page = {**values, "title": title, "style": style, "script": run, "rules": rules, "policy": policy}
    return environment.get_template(template).render(page) + "\n", policy


def format_document(
    template: str, title: str, metrics: Mapping[str, object], command: str, values: Mapping[str, object]
) -> str:
    """Format a self-contained HTML report, which embeds the metrics as JSON and can neither load nor send anything.

    ``command`` computed the metrics, for the reader of the report; ``values`` are further variables of the template.
    """
    values = {**values, "metrics": metrics, "command": command}
    return format_page(template, title, values, script="page.js")[0]


def _hash_for_security_policy(text: str) -> str:
    """Compute the hash by which a content security policy allows an embedded style sheet or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def write_results(metrics: JsonDict, *, json_path: Path | None, report_path: Path | None) -> None:
    """Write the results of ``fit`` or ``evaluate`` as JSON, as an HTML report, or both; None means no such file."""
    if json_path is not None:
        write_json(json_path, metrics)
    if report_path is not None:
        write_text(report_path, format_report(metrics))


def format_report(metrics: JsonDict) -> str:
    """Format the HTML report of ``fit`` or ``evaluate``, given the metrics of the command."""
    title = f"{metrics['table']}: {'fit' if metrics['command'] == 'fit' else 'evaluation'}"
    values: dict[str, object] = {}
    if "predictions" in metrics:
        classes, confusion = metrics["classes"], metrics["confusion"]
        values = {
            "occurring": [entry for entry in classes if entry["rows"] + entry["predicted"]],
            "errors": metrics["rows"] - sum(confusion[label][label] for label in range(len(classes))),
            "suspects_link": encode_label_errors(metrics["suspects"], [entry["name"] for entry in classes]),
        }
    return format_document("report.html", title, metrics, f"protonet {metrics['command']}", values)


def encode_label_errors(label_errors: Sequence[JsonDict], names: list[str]) -> str:
    """Encode the rows whose labels are probably wrong as a CSV file in a data URL, for a link in the report."""
    header = ["index", "location", "id", "label", "probability of label", "suggested", "probability of suggested"]
    rows = []
    for row in label_errors:
        pairs = ((names[row[key]], f"{row[f'{key}_probability']:.6g}") for key in ("label", "suggested"))
        rows.append([str(row["index"]), row["location"], row["id"] or "", *map(str, chain(*pairs))])
    data = base64.b64encode(format_csv([header, *rows]).encode("utf-8", "backslashreplace")).decode()
    return f"data:text/csv;charset=utf-8;base64,{data}"
