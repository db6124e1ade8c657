"""The HTML report of ``fit`` and ``evaluate``, made from the metrics that ``--json`` writes."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protonet._text import to_printable
from protonet._writing import write_json, write_text
from protonet.ui.page.charts import draw_fraction, draw_interval, draw_learning, draw_map, draw_mark, draw_reliability
from protonet.ui.page.html import (
    Markup,
    Section,
    Tile,
    format_document,
    join,
    name_class,
    paragraph,
    percent,
    span,
    table,
    tag,
)
from protonet.ui.text import count, format_csv, order_naturally

#: Maximal numbers of columns, of possible label issues, and of their cells; the JSON has more.
MAX_COLUMNS, MAX_SUSPECTS, MAX_SHOWN_COLUMNS = 100, 50, 4
#: Maximal length of a name in the confusion matrix, and in a list.
MAX_HEADING, MAX_NAME = 18, 60
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
    sections = [section for section in format_sections(metrics) if section is not None]
    return format_document(title, format_tiles(metrics), sections, metrics, f"protonet {metrics['command']}")


def format_sections(metrics: ReportData) -> list[Section | None]:
    """Format the sections; None for one without metrics."""
    data, fitted = ("data", "Data", format_data(metrics)), metrics["command"] == "fit"
    if "predictions" not in metrics:
        return [data]
    return [
        ("accuracy", "Accuracy", format_accuracy(metrics)),
        ("suspects", "Possible label issues", format_suspects(metrics)),
        ("confusion", "Confusion matrix", format_confusion(metrics)),
        ("classes", "Metrics by class", format_classes(metrics)),
        ("map", "Map of the rows", format_map(metrics)),
        ("reliability", "Calibration", format_reliability(metrics)),
        ("columns", "Importance of columns", format_importance(metrics["importance"])),
        ("learning", "Learning curve", format_learning(metrics["learning"])) if fitted else None,
        ("views", "Views of the embedding", format_views(metrics["views"])) if fitted else None,
        data,
    ]


def format_tiles(metrics: ReportData) -> list[Tile]:
    """Format the metrics at the top."""
    data = metrics["data"]
    tiles: list[Tile] = [
        ("rows", f"{data['rows']:,}", count(len(data["columns"]), "column")),
        ("classes", f"{len(data['classes']):,}", None),
    ]
    if "predictions" not in metrics:
        return tiles
    error, ends = 100 * metrics["calibration_error"], [100 * end for end in metrics["calibration_interval"]]
    losses = "nats, 95 %: {:.3f} to {:.3f}".format(*metrics["log_loss_interval"])
    return [
        ("accuracy", percent(metrics["accuracy"]), f"95 %: {span(metrics['interval'])}"),
        ("balanced accuracy", percent(metrics["balanced_accuracy"]), "mean over classes"),
        ("log-loss", f"{metrics['log_loss']:.3f}", losses),
        ("calibration error", f"{error:.1f}", f"points, 95 %: {ends[0]:.1f} to {ends[1]:.1f}"),
        ("possible label issues", f"{metrics['wrong_labels']:,}", "rows predicted as another class"),
        *tiles,
    ]


def describe_rows(metrics: ReportData) -> str:
    """Describe the rows of the metrics."""
    rows = count(metrics["rows"], "row")
    return f"{rows}, by cross-validation" if metrics["command"] == "fit" else f"{rows} of the table with a known class"


def format_accuracy(metrics: ReportData) -> Markup:
    """Format the accuracy with its interval, and the baselines on the same rows."""
    shown, rows = metrics["baselines"], []
    balance = "balanced " * (shown[0]["compared_by"] == "balanced_accuracy")
    for result in shown:
        difference = ""
        if "difference" in result:
            difference = f"{100 * result['difference']:+.1f} ±{100 * result['half_width']:.1f}"
        bar = draw_interval(result["accuracy"], result["interval"], 0.0, 1.0)
        balanced = percent(result["balanced_accuracy"])
        rows.append([result["name"], percent(result["accuracy"]), span(result["interval"]), bar, balanced, difference])
    header = ["", "accuracy", "95 % interval", "0 to 100 %", "balanced accuracy"]
    header.append(f"{balance}difference to baseline, points")
    text = f"Accuracy on {describe_rows(metrics)}; the bar is the 95 % interval."
    paired = "Differences are paired by rows; if the interval contains 0, the difference may be chance."
    mean = "Balanced accuracy is the mean recall over classes: rare classes count as much as frequent ones."
    parts = [paragraph(text), table(header, rows, "Accuracy", numbers=1), paragraph(f"{paired} {mean}", soft=True)]
    unknown = metrics.get("unknown")
    if unknown and unknown["rows"]:
        novel = f"{count(unknown['rows'], 'further row')} of {count(len(unknown['classes']), 'unknown class')} ("
        auroc = f"). AUROC of known against unknown rows: {percent(unknown['auroc'])}."
        parts.append(paragraph(novel, *_list_names(unknown["classes"]), auroc))
    return join(parts)


def _list_names(names: Sequence[str] | Mapping[str, Any], limit: int = 10) -> list[object]:
    """List the first names, separated by commas."""
    parts: list[object] = []
    for name in list(names)[:limit]:
        parts += [", "] * bool(parts) + [name_class(name, longest=MAX_NAME)]
    return [*parts, f" and {len(names) - limit} more"] if len(names) > limit else parts


def format_views(views: Mapping[str, float]) -> Markup:
    """Format a table of the views and their weights."""
    text = "The embedding concatenates these views of a row; the logit is the weighted sum of their cosines."
    rows = [[name, percent(weight)] for name, weight in views.items()]
    return join([paragraph(text), table(["view", "weight"], rows, "Views", numbers=1)])


def format_suspects(metrics: ReportData) -> Markup:
    """Format the list of possible label issues, with a link that saves it as CSV."""
    names, suspects, rows = _get_names(metrics), metrics["suspects"], metrics["predictions"]
    position = {index: at for at, index in enumerate(rows["index"])}
    lines = []
    for row in suspects[:MAX_SUSPECTS]:
        cells: list[str] = []
        if row["index"] in position:
            columns = list(zip(rows["columns"], rows["cells"], strict=True))[:MAX_SHOWN_COLUMNS]
            texts = [(name, to_printable(column[position[row["index"]]])) for name, column in columns]
            cells = [f"{to_printable(name)} = {text or '(missing)'}" for name, text in texts]
        location: list[object] = [row["location"]]
        if row["id"] is not None:
            location = [name_class(row["id"], longest=MAX_NAME), tag("span", f" ({row['location']})", class_="unit")]
        suggested = name_class(names[row["suggested"]], longest=MAX_NAME)
        lines.append(
            [
                join(location),
                name_class(names[row["label"]], longest=MAX_NAME),
                percent(row["label_probability"]),
                tag("span", suggested, class_="wrongly" if row["score"] > 0 else None),
                percent(row["suggested_probability"]),
                tag("span", "; ".join(cells), class_="cells"),
            ]
        )
    header = ["index", "location", "id", "label", "probability of label", "suggested", "probability of suggested"]
    values = [
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
    data = base64.b64encode(format_csv([header, *values]).encode("utf-8", "backslashreplace")).decode()
    href = f"data:text/csv;charset=utf-8;base64,{data}"
    link = tag("a", f"Save this list ({count(len(suspects), 'row')}) as CSV", href=href, download="label-issues.csv")
    text = "Rows with another predicted class come first (in colour), then those with the least probable labels."
    errors = metrics["rows"] - sum(metrics["confusion"][label][label] for label in range(len(names)))
    caution = f"The model misclassifies {errors:,} of {count(metrics['rows'], 'row')}: its own errors are listed too."
    columns_ = ["row", "label", "probability", "predicted", "probability", "cells"]
    return join(
        [
            paragraph(text if metrics["wrong_labels"] else "No label issues found. Least probable labels first:"),
            table(columns_, lines, "Possible label issues"),
            paragraph(link),
            paragraph(caution, soft=True),
        ]
    )


def _get_names(metrics: ReportData) -> list[str | int]:
    """Return the names of the classes."""
    return [entry["name"] for entry in metrics["classes"]]


def format_confusion(metrics: ReportData) -> Markup:
    """Format the confusion matrix; the page's script lists the rows of a cell."""
    names, confusion = _get_names(metrics), metrics["confusion"]
    order = order_naturally(names)
    columns = (tag("span", name_class(names[label], longest=MAX_HEADING)) for label in order)
    head = tag("tr", *(tag("th", text, scope="col") for text in ["label ↓ prediction →", *columns]))
    lines = []
    for label in order:
        cells = []
        for predicted in order:
            rows, button = confusion[label][predicted], None
            if rows:
                button = tag(
                    "button",
                    rows,
                    type="button",
                    class_=f"h{max(1, round(SHADES * rows / sum(confusion[label])))}",
                    data_given=label,
                    data_taken=predicted,
                    aria_label=f"{rows} of {to_printable(names[label])} predicted as {to_printable(names[predicted])}",
                    aria_pressed="false",
                )
            cells.append(tag("td", button))
        lines.append(tag("tr", tag("th", name_class(names[label], longest=MAX_HEADING), scope="row"), *cells))
    content = tag("table", tag("thead", head), tag("tbody", *lines))
    text = "Each row is a class, each column a prediction; a stronger colour is a larger fraction of the class."
    keys = "Select a cell to list its rows: click it, or reach it with Tab and the arrow keys and press Enter."
    rows_of_cell = tag(
        "div", paragraph("No cell is selected.", soft=True), id="behind", class_="told", aria_live="polite"
    )
    grid = tag("div", content, class_="scroll confusion", role="region", aria_label="Confusion matrix")
    return join([paragraph(f"{text} {keys}"), grid, rows_of_cell])


def format_classes(metrics: ReportData) -> Markup:
    """Format recall, precision and F1 of each class, the lowest F1 first."""
    classes = [entry for entry in metrics["classes"] if entry["rows"] + entry["predicted"]]
    classes.sort(key=lambda entry: float(entry["f1"]))
    mean = {**metrics["mean"], "rows": metrics["rows"], "predicted": metrics["rows"]}
    headings = [*(name_class(entry["name"], longest=MAX_NAME) for entry in classes), f"mean of {len(classes)}"]
    rows = [
        [
            heading,
            *(percent(entry[name]) for name in ("f1", "recall", "precision")),
            f"{entry['rows']:,}",
            f"{entry['predicted']:,}",
            draw_fraction(entry["f1"]),
        ]
        for heading, entry in zip(headings, [*classes, mean], strict=True)
    ]
    text = "Recall is the fraction of a class that is predicted as it. Precision is the fraction of the rows predicted"
    text += " as a class that are of it. F1 is their harmonic mean."
    header = ["class", "F1", "recall", "precision", "rows", "predicted", "F1"]
    return join([paragraph(text), table(header, rows, "Metrics by class", numbers=1)])


def format_map(metrics: ReportData) -> Markup:
    """Format the map of the rows and its legend; the page's script describes the row that is selected."""
    rows, names = metrics["predictions"], _get_names(metrics)
    text = "Each mark is a row; rows that are close to each other are similar to the same classes."
    text += " Misclassified rows have a ring. Point at a mark, or go there with Tab and the arrow keys."
    if len(rows["index"]) < rows["total"]:
        text += f" {len(rows['index']):,} of {rows['total']:,} rows are drawn, the most doubtful ones included."
    legend = []
    for label in order_naturally(names):
        content = draw_mark(label), name_class(names[label], longest=MAX_NAME)
        legend.append(tag("li", tag("button", *content, type="button", data_number=label, aria_pressed="false")))
    method = "The axes are the two directions in which the logits of the rows vary most."
    if len(names) < 3:
        method = "The horizontal axis is the difference of the logits; rows are stacked, as in a histogram."
    return join(
        [
            paragraph(text),
            draw_map(rows),
            tag("div", paragraph("No row is selected.", soft=True), id="told", class_="told", aria_live="polite"),
            tag("ul", *legend, class_="legend", aria_label="Classes"),
            paragraph(method, soft=True),
        ]
    )


def format_reliability(metrics: ReportData) -> Markup:
    """Format the reliability diagram and its numbers."""
    bins = metrics["reliability"]
    text = (
        "Accuracy of predictions of about the same probability, with 95 % intervals. Dots lie on the dashed line if the"
    )
    text += " probabilities are calibrated, and below it if they are overconfident. Larger dots have more rows."
    error = f" The mean calibration error is {100 * metrics['calibration_error']:.1f} points (15 bins, chance removed)."
    rows = [
        [
            f"{100 * entry['low']:.0f} to {100 * entry['high']:.0f} %",
            f"{entry['rows']:,}",
            percent(entry["confidence"]),
            percent(entry["accuracy"]),
            span(entry["interval"]),
        ]
        for entry in bins
    ]
    content = table(["probability", "rows", "mean", "accuracy", "95 % interval"], rows, "Reliability", numbers=1)
    return join([paragraph(text + error), draw_reliability(bins), _fold(content)])


def _fold(content: Markup) -> Markup:
    """Fold the numbers of a chart."""
    return tag("details", tag("summary", "The numbers"), content)


def format_importance(importance: ReportData | None) -> Markup:
    """Format the permutation importance of the columns."""
    if importance is None:
        return paragraph("The time limit was reached before this was measured: protonet explain measures it.")
    columns, shown = importance["columns"], importance["columns"][:MAX_COLUMNS]
    rows, shuffles = count(importance["rows"], "row"), count(importance["shuffles"], "shuffle")
    text = f"The increase of the log-loss, and the decrease of the accuracy, if a column is shuffled among {rows}: the"
    text += f" mean of {shuffles}, with 95 % intervals. If an interval contains 0, the column is noise or redundant."
    if importance["rows"] < importance["total_rows"]:
        text += f" The rows are a random sample of {importance['total_rows']:,}."
    low = min(0.0, *(column["log_loss_interval"][0] for column in shown))
    high = max(1e-9, *(column["log_loss_interval"][1] for column in shown))
    lines = [
        [
            name_class(column["name"], longest=MAX_NAME),
            f"{column['log_loss_rise']:+.3f}",
            "{:+.3f} to {:+.3f}".format(*column["log_loss_interval"]),
            f"{100 * column['accuracy_fall']:+.1f}",
            draw_interval(column["log_loss_rise"], column["log_loss_interval"], low, high),
        ]
        for column in shown
    ]
    header = ["column", "increase of log-loss", "95 % interval", "decrease of accuracy, points", "log-loss"]
    parts = [paragraph(text), table(header, lines, "Importance of columns", numbers=1)]
    return join([*parts, _note_limit(len(shown), len(columns), "largest")])


def _note_limit(shown: int, total: int, order: str) -> Markup | None:
    """Format a note with the number of columns shown, if not all."""
    text = f"The {order} {shown} of {count(total, 'column')}; --json has all."
    return paragraph(text, soft=True) if shown < total else None


def format_learning(learning: ReportData) -> Markup:
    """Format the learning curve, and the accuracy predicted for twice the labels."""
    points, twice = learning["points"], learning["twice"]
    if len(points) < 2:
        return paragraph("Too few rows per class, or too little time, for a learning curve.")
    text = "Accuracy by cross-validation if the selected views are fitted to fewer rows of each class."
    if twice is None:
        text += " There are fewer than three sizes: nothing is predicted for more rows."
    parts = [paragraph(text)]
    rows = [[f"{point['per_class']:.3g}", percent(point["accuracy"]), span(point["interval"])] for point in points]
    if twice is not None:
        size, accuracy, interval = f"{twice['per_class']:.3g}", percent(twice["accuracy"]), span(twice["interval"])
        prediction = f"With twice as many labels, {size} distinct rows per class, the predicted accuracy is about"
        prediction += f" {accuracy} ({interval}), if errors decrease at the same rate."
        parts.append(paragraph(tag("strong", prediction)))
        rows.append([f"{size}, predicted", accuracy, interval])
    content = table(["rows per class", "accuracy", "95 % interval"], rows, "Learning curve", numbers=1)
    return join([*parts, draw_learning(learning), _fold(content)])


def format_data(metrics: ReportData) -> Markup:
    """Format the columns, missing values and classes of the table."""
    data, shown = metrics["data"], metrics["data"]["columns"][:MAX_COLUMNS]
    counts = count(data["rows"], "row"), count(len(data["columns"]), "column"), count(len(data["classes"]), "class")
    columns = [
        [
            name_class(column["name"], longest=MAX_NAME),
            name_class(column["type"], longest=200),
            f"{column['missing']:,}",
            percent(column["missing"] / max(1, data["rows"])),
        ]
        for column in shown
    ]
    parts: list[object] = [paragraph(f"{', '.join(counts)}.")]
    if "predictions" not in metrics:
        parts.append(paragraph("No class has two distinct rows: cross-validation is not possible."))
    if data["notes"]:
        parts.append(tag("ul", *(tag("li", note) for note in data["notes"]), class_="notes"))
    parts.append(table(["column", "type", "missing values", "of rows"], columns, "Columns", numbers=2))
    parts.append(_note_limit(len(shown), len(data["columns"]), "first"))
    classes = [data["classes"][label] for label in order_naturally([entry["name"] for entry in data["classes"]])]
    largest = max(1, *(entry["rows"] for entry in classes))
    sizes = [
        [name_class(entry["name"], longest=MAX_NAME), f"{entry['rows']:,}", draw_fraction(entry["rows"] / largest)]
        for entry in classes
    ]
    return join([*parts, table(["class", "rows", ""], sizes, "Classes", numbers=1)])
