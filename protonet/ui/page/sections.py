"""The report's sections: each says in a sentence what it shows."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from protonet._text import to_printable
from protonet.ui.page.charts import draw_interval, draw_learning, draw_map, draw_mark, draw_reliability, draw_share
from protonet.ui.page.markup import Markup, join, name_class, percent, span, table, tag
from protonet.ui.text import count, format_csv, order_naturally

#: Columns, suspicious rows and cells of such a row that are shown, at the most; the JSON has more.
MOST_COLUMNS, MAX_SUSPECTS, MAX_SHOWN_COLUMNS = 100, 50, 4
#: Most characters of a class's name beside the confusion.
LONGEST = 18
#: Most characters of a name in a list.
LONG = 60
#: Shades of the confusion's cells.
SHADES = 5

Figures = Mapping[str, Any]


def say(*parts: object, soft: bool = False) -> Markup:
    """Return a paragraph."""
    return tag("p", *parts, class_="soft" if soft else None)


def describe_rows(figures: Figures) -> str:
    """Return which rows the figures are of."""
    rows = count(figures["rows"], "row")
    held = f"{rows} held out, each judged by a fit without its fold"
    return held if figures["command"] == "fit" else f"{rows} of the table that have a known class"


def format_accuracy(figures: Figures) -> Markup:
    """Format the accuracy with its interval, and the baselines on the same rows."""
    shown, rows = figures["baselines"], []
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
    said = f"Accuracy on {describe_rows(figures)}; the bar is the 95 % interval."
    paired = "Differences are paired by rows; if the interval contains 0, the difference may be chance."
    mean = "Balanced accuracy is the mean recall over classes: rare classes count as much as frequent ones."
    parts = [say(said), table(header, rows, "Accuracy", numbers=1), say(f"{paired} {mean}", soft=True)]
    unknown = figures.get("unknown")
    if unknown and unknown["rows"]:
        strange = f"{count(unknown['rows'], 'row')} more of {count(len(unknown['classes']), 'class')}"
        nearer = f"A known row is more like a class than such a one in {percent(unknown['auroc'])} of pairs."
        parts.append(
            say(f"The model does not know the classes of {strange} (", *_commas(unknown["classes"]), f"). {nearer}")
        )
    return join(parts)


def _commas(names: Sequence[str] | Mapping[str, Any], most: int = 10) -> list[object]:
    """Return the first names with commas between them."""
    parts: list[object] = []
    for name in list(names)[:most]:
        parts += [", "] * bool(parts) + [name_class(name, longest=LONG)]
    return [*parts, f" and {len(names) - most} more"] if len(names) > most else parts


def format_views(views: Mapping[str, float]) -> Markup:
    """Return a table of the views and their weights."""
    said = "The embedding has these views of a row side by side; the weights are of their cosines."
    rows = [[name, percent(weight)] for name, weight in views.items()]
    return join([say(said), table(["view", "weight"], rows, "Views", numbers=1)])


def format_suspects(figures: Figures) -> Markup:
    """Return the list of rows that people should look at."""
    names = [each["name"] for each in figures["classes"]]
    rows, every = figures["suspects"], figures["predictions"]
    place = {row: at for at, row in enumerate(every["index"])}
    shown = []
    for each in rows[:MAX_SUSPECTS]:
        at = place.get(each["index"])
        cells = [] if at is None else zip(every["columns"], every["cells"], strict=True)
        texts = [f"{to_printable(name)} = {to_printable(column[at]) or '(gap)'}" for name, column in cells]
        believed, where = name_class(names[each["suggested"]], longest=LONG), [each["location"]]
        if each["id"] is not None:
            where = [name_class(each["id"], longest=LONG), tag("span", f" ({each['location']})", class_="unit")]
        shown.append(
            [
                join(where),
                name_class(names[each["label"]], longest=LONG),
                percent(each["label_probability"]),
                tag("span", believed, class_="wrongly" if each["score"] > 0 else None),
                percent(each["suggested_probability"]),
                tag("span", "; ".join(texts[:MAX_SHOWN_COLUMNS]), class_="cells"),
            ]
        )
    unseen = "which did not see them" if figures["command"] == "fit" else "if it was not fitted to them"
    said = [
        f"These are the rows whose label the model, {unseen}, doubts most.",
        "First come those that it believes to be of another class (in colour), then the hardest of the others.",
        *["None is believed to be of another class."] * (not figures["wrong_labels"]),
        "A label may be wrong, or the model: look at them in this order.",
    ]
    wrong = figures["rows"] - sum(figures["confusion"][at][at] for at in range(len(names)))
    caution = [
        f"By the labels, the model is wrong in {wrong:,} of {count(figures['rows'], 'row')}.",
        "The more these are, the more of its own mistakes are listed here.",
    ]
    listed = [["index", "location", "id", "label", "probability of label", "suggested", "probability of suggested"]]
    for each in rows:
        given, other = f"{each['label_probability']:.6g}", f"{each['suggested_probability']:.6g}"
        row = [each["index"], each["location"], each["id"]]
        row += [names[each["label"]], given, names[each["suggested"]], other]
        listed.append(["" if cell is None else str(cell) for cell in row])
    data = base64.b64encode(format_csv(listed).encode("utf-8", "backslashreplace")).decode()
    link = tag(
        "a",
        f"Save this list ({count(len(rows), 'row')}) as CSV",
        href=f"data:text/csv;charset=utf-8;base64,{data}",
        download="rows-to-look-at.csv",
    )
    header = ["row", "label", "probability of it", "rather", "probability of that", "cells"]
    told = table(header, shown, "Rows to look at")
    return join([say(" ".join(said)), told, say(link), say(" ".join(caution), soft=True)])


def format_confusion(figures: Figures) -> Markup:
    """Return the confusion, of which each cell tells its rows."""
    names, confusion = [each["name"] for each in figures["classes"]], figures["confusion"]
    order = order_naturally(names)
    heads = (tag("span", name_class(names[number], longest=LONGEST)) for number in order)
    head = tag("tr", tag("th", "label ↓ taken for →", scope="col"), *(tag("th", each, scope="col") for each in heads))
    body = []
    for given in order:
        cells, taken = [], confusion[given]
        for number in order:
            rows = taken[number]
            if rows:
                shade = f"h{max(1, round(SHADES * rows / sum(taken)))}"
                label = f"{rows} of {to_printable(names[given])} taken for {to_printable(names[number])}"
                button = tag(
                    "button",
                    rows,
                    type="button",
                    class_=shade,
                    data_given=given,
                    data_taken=number,
                    aria_label=label,
                    aria_pressed="false",
                )
                cells.append(tag("td", button))
            else:
                cells.append(tag("td"))
        body.append(tag("tr", tag("th", name_class(names[given], longest=LONGEST), scope="row"), *cells))
    content = tag("table", tag("thead", head), tag("tbody", *body))
    said = [
        "How many rows of each class (down) are taken for which (across).",
        "A stronger colour is a larger share of a class.",
        "A cell tells the rows behind it: click on it, or reach it with Tab and the arrow keys and press Enter.",
    ]
    behind = tag("div", say("No cell is chosen.", soft=True), id="behind", class_="told", aria_live="polite")
    grid = tag("div", content, class_="scroll confusion", role="region", aria_label="Confusion")
    return join([say(" ".join(said)), grid, behind])


def format_classes(figures: Figures) -> Markup:
    """Return recall, precision and F1 of each class, the lowest F1 first."""
    there = [each for each in figures["classes"] if each["rows"] + each["predicted"]]
    rows = [
        [
            name_class(each["name"], longest=LONG),
            *(percent(each[name]) for name in ("f1", "recall", "precision")),
            f"{each['rows']:,}",
            f"{each['predicted']:,}",
            draw_share(each["f1"]),
        ]
        for each in sorted(there, key=lambda each: float(each["f1"]))
    ]
    mean = figures["mean"]
    rows.append(
        [
            f"mean of {len(there)}",
            *(percent(mean[name]) for name in ("f1", "recall", "precision")),
            f"{figures['rows']:,}",
            f"{figures['rows']:,}",
            draw_share(mean["f1"]),
        ]
    )
    said = [
        "Recall is the share of a class's rows that are taken for it.",
        "Precision is the share of the rows taken for it that are of it.",
        "F1 is their harmonic mean, the lowest first.",
    ]
    header = ["class", "F1", "recall", "precision", "rows", "predicted", "F1"]
    return join([say(" ".join(said)), table(header, rows, "Each class", numbers=1)])


def format_map(figures: Figures) -> Markup:
    """Return the map, its legend, and where a row is told."""
    rows = figures["predictions"]
    told, total, names = len(rows["index"]), rows["total"], [each["name"] for each in figures["classes"]]
    said = [
        "Each mark is a row: near each other are rows that are about as near to the same classes.",
        "A ring is around those that are taken for another class.",
        "Point at a mark, or go there with Tab and the arrow keys; a class below shows its rows alone.",
    ]
    if told < total:
        said.append(f"{told:,} of {total:,} rows are drawn, the doubtful ones among them.")
    legend = (
        tag(
            "li",
            tag(
                "button",
                draw_mark(number),
                name_class(names[number], longest=LONG),
                type="button",
                data_number=number,
                aria_pressed="false",
            ),
        )
        for number in order_naturally(names)
    )
    box = tag("div", say("No row is chosen.", soft=True), id="told", class_="told", aria_live="polite")
    method = "The two directions in which the rows' logits vary most; the axes mean nothing by themselves."
    return join(
        [
            say(" ".join(said)),
            draw_map(rows),
            box,
            tag("ul", *legend, class_="legend", aria_label="Classes"),
            say(method, soft=True),
        ]
    )


def format_reliability(figures: Figures) -> Markup:
    """Return the diagram of reliability, and its numbers."""
    bins = figures["reliability"]
    said = [
        "How often predictions of about the same probability are right, with 95 % intervals.",
        "Dots are on the dashed line where probabilities are honest, and below it where they are too sure.",
        "A larger dot is of more rows.",
        f"On average probabilities are {100 * figures['calibration_error']:.1f} points off (in 15 bins, less chance).",
    ]
    rows = [
        [
            f"{100 * each['low']:.0f} to {100 * each['high']:.0f} %",
            f"{each['rows']:,}",
            percent(each["confidence"]),
            percent(each["accuracy"]),
            span(each["interval"]),
        ]
        for each in bins
    ]
    numbers = table(["probability", "rows", "mean", "right", "95 % interval"], rows, "Reliability", numbers=1)
    return join([say(" ".join(said)), draw_reliability(bins), tag("details", tag("summary", "The numbers"), numbers)])


def format_importance(importance: Figures | None) -> Markup:
    """Return what is lost where each column is shuffled."""
    if importance is None:
        return say("The time was over before this was measured: protonet explain does it.")
    columns = importance["columns"]
    rows, shuffles = count(importance["rows"], "row"), count(importance["shuffles"], "shuffle")
    said = [
        "By how much the log-loss rises, and how many points fewer rows are right, where one column is shuffled.",
        f"Its cells are shuffled among {rows}; the figures are the mean of {shuffles}, with 95 % intervals.",
        "A column whose interval holds 0 may be noise, or say what another one says too.",
    ]
    if importance["rows"] < importance["total_rows"]:
        said.append(f"The rows are drawn at random from {importance['total_rows']:,}.")
    shown = columns[:MOST_COLUMNS]
    low = min(0.0, *(each["log_loss_interval"][0] for each in shown))
    high = max(1e-9, *(each["log_loss_interval"][1] for each in shown))
    cells = [
        [
            name_class(each["name"], longest=LONG),
            f"{each['log_loss_rise']:+.3f}",
            "{:+.3f} to {:+.3f}".format(*each["log_loss_interval"]),
            f"{100 * each['accuracy_fall']:+.1f}",
            draw_interval(each["log_loss_rise"], each["log_loss_interval"], low, high),
        ]
        for each in shown
    ]
    header = ["column", "log-loss rises by", "95 % interval", "right falls by, points", "log-loss"]
    parts = [say(" ".join(said)), table(header, cells, "Which columns matter", numbers=1)]
    if len(shown) < len(columns):
        parts.append(
            say(f"{len(shown)} of {count(len(columns), 'column')}, the largest first; --json has all.", soft=True)
        )
    return join(parts)


def format_learning(learning: Figures) -> Markup:
    """Return the learning curve, and what is expected of twice the rows."""
    points, twice = learning["points"], learning["twice"]
    if len(points) < 2:
        return say("Too few rows per class, or too little time, to fit to fewer of them: nothing is known of more.")
    parts = [
        say("How often held-out rows are right where what was chosen is fitted again to fewer rows of each class.")
    ]
    rows = [[f"{each['per_class']:.3g}", percent(each["accuracy"]), span(each["interval"])] for each in points]
    if twice is not None:
        size, right, interval = f"{twice['per_class']:.3g}", percent(twice["accuracy"]), span(twice["interval"])
        labels = f"With twice as many labels, {size} rows per class where equal rows count once"
        expected = (
            f"{labels}, about {right} are expected to be right ({interval}), if errors go on to fall as they did."
        )
        parts.append(say(tag("strong", expected)))
        rows.append([f"{size}, expected", right, interval])
    else:
        parts.append(say("Of fewer than three sizes, nothing is said of more rows.", soft=True))
    numbers = table(["rows per class", "right", "95 % interval"], rows, "Learning curve", numbers=1)
    return join([*parts, draw_learning(learning), tag("details", tag("summary", "The numbers"), numbers)])


def format_data(figures: Figures) -> Markup:
    """Return what the table is: its columns, what they were taken for, their gaps, and its classes."""
    data = figures["data"]
    counts = count(data["rows"], "row"), count(len(data["columns"]), "column"), count(len(data["classes"]), "class")
    told = "what each column was taken for, how many of its cells are gaps, and how many rows each class has"
    shown = data["columns"][:MOST_COLUMNS]
    columns = [
        [
            name_class(each["name"], longest=LONG),
            name_class(each["type"], longest=200),
            f"{each['missing']:,}",
            percent(each["missing"] / max(1, data["rows"])),
        ]
        for each in shown
    ]
    parts = [say(f"{', '.join(counts)}: {told}.")]
    if "predictions" not in figures:
        parts.append(say("No class has two rows, copies aside: none could be held out, and no more can be told."))
    if data["notes"]:
        parts.append(tag("ul", *(tag("li", note) for note in data["notes"]), class_="notes"))
    parts.append(table(["column", "taken for", "gaps", "of rows"], columns, "Columns", numbers=2))
    if len(shown) < len(data["columns"]):
        parts.append(
            say(f"The first {len(shown)} of {count(len(data['columns']), 'column')}; --json has all.", soft=True)
        )
    most, classes = max(1, *(each["rows"] for each in data["classes"])), data["classes"]
    sizes = [
        [name_class(each["name"], longest=LONG), f"{each['rows']:,}", draw_share(each["rows"] / most)]
        for each in (classes[number] for number in order_naturally([each["name"] for each in classes]))
    ]
    parts.append(table(["class", "rows", ""], sizes, "Classes", numbers=1))
    return join(parts)
