"""The HTML report of ``fit`` and ``evaluate``, made from the metrics that ``--json`` writes."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protonet._io import write_json, write_text
from protonet._text import to_printable
from protonet.ui.page.html import MAX_NAME, format_document
from protonet.ui.text import format_csv, order_naturally

#: Maximal numbers of columns, of possible label issues, and of their cells; the JSON has more.
MAX_COLUMNS, MAX_SUSPECTS, MAX_SHOWN_COLUMNS = 100, 50, 4
#: Shades of the cells of the confusion matrix.
SHADES = 5

ReportData = Mapping[str, Any]


def write_outputs(outputs: Mapping[str, Path], metrics: ReportData) -> None:
    """Write metrics to the files of the options ``json`` and ``report``.

    Raises:
        OSError: A file cannot be written.
    """
    if "json" in outputs:
        write_json(outputs["json"], metrics)
    if "report" in outputs:
        write_text(outputs["report"], format_report(metrics))


def format_report(metrics: ReportData) -> str:
    """Format the report of ``fit`` or ``evaluate``."""
    title = f"{metrics['table']}: {'fit' if metrics['command'] == 'fit' else 'evaluation'}"
    values: dict[str, object] = {
        "max_columns": MAX_COLUMNS,
        "max_name": MAX_NAME,
        "max_suspects": MAX_SUSPECTS,
        "shades": SHADES,
        "data_order": order_naturally([entry["name"] for entry in metrics["data"]["classes"]]),
    }
    if "predictions" in metrics:
        names = [entry["name"] for entry in metrics["classes"]]
        values |= {
            "names": names,
            "order": order_naturally(names),
            "occurring": [entry for entry in metrics["classes"] if entry["rows"] + entry["predicted"]],
            "errors": metrics["rows"] - sum(metrics["confusion"][label][label] for label in range(len(names))),
            "suspect_cells": list_suspect_cells(metrics),
            "suspects_link": encode_suspects(metrics["suspects"], names),
        }
    return format_document("report.html", title, metrics, f"protonet {metrics['command']}", values)


def list_suspect_cells(metrics: ReportData) -> list[list[str]]:
    """Format the first cells of each listed suspect; none for rows that ``predictions`` leaves out."""
    rows = metrics["predictions"]
    position = {index: at for at, index in enumerate(rows["index"])}
    columns = list(zip(map(to_printable, rows["columns"]), rows["cells"], strict=True))[:MAX_SHOWN_COLUMNS]
    positions = [position.get(suspect["index"]) for suspect in metrics["suspects"][:MAX_SUSPECTS]]
    return [
        [] if at is None else [f"{name} = {to_printable(cells[at]) or '(missing)'}" for name, cells in columns]
        for at in positions
    ]


def encode_suspects(suspects: Sequence[ReportData], names: list[str]) -> str:
    """Encode all possible label issues as a link to a CSV file that it contains."""
    header = ["index", "location", "id", "label", "probability of label", "suggested", "probability of suggested"]
    rows = [
        [
            str(row["index"]),
            row["location"],
            row["id"] or "",
            str(names[row["label"]]),
            f"{row['label_probability']:.6g}",
            str(names[row["suggested"]]),
            f"{row['suggested_probability']:.6g}",
        ]
        for row in suspects
    ]
    data = base64.b64encode(format_csv([header, *rows]).encode("utf-8", "backslashreplace")).decode()
    return f"data:text/csv;charset=utf-8;base64,{data}"
