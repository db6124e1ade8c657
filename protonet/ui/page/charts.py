"""SVG charts of the reports, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from protonet._text import to_printable
from protonet.ui.text import percent

#: Size and margins of a chart with axes, in pixels.
WIDE, HIGH, LEFT, BELOW, EDGE = 340, 260, 46, 42, 12
#: Size and margin of the map.
MAP_WIDE, MAP_HIGH, MAP_EDGE = 480, 360, 12
#: Size of a bar in a table.
BAR_WIDE, BAR_HIGH = 120, 14
#: Size of a histogram in a table, and the number of its bars.
SPREAD_WIDE, SPREAD_HIGH, SPREAD_BARS = 240, 40, 40
#: Colours and shapes of classes; shapes differ once the colours are used up.
COLOURS = 10
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.8L4.6,3.6H-4.6z",
    "M0,-5L5,0L0,5L-5,0z",
    "M-1.5,-4.6h3v3.1h3.1v3h-3.1v3.1h-3v-3.1h-3.1v-3h3.1z",
)


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Format an element; text that is not `Markup` is escaped, and ``_`` in names of attributes becomes ``-``."""
    pairs = ((key.rstrip("_").replace("_", "-"), escape(to_printable(value))) for key, value in attributes.items())
    text = "".join(f' {key}="{value}"' for key, value in pairs)
    content = "".join(child if isinstance(child, Markup) else escape(to_printable(child)) for child in children)
    return Markup(f"<{name}{text}>{content}</{name}>")


def colour(label: int) -> str:
    """Get the style class of the colour of a class."""
    return f"c{label % COLOURS}"


def shape(label: int) -> str:
    """Get the outline of the mark of a class."""
    return SHAPES[label // COLOURS % len(SHAPES)]


def draw_mark(label: int) -> Markup:
    """Draw the mark of a class, for a legend."""
    mark = tag("path", d=shape(label))
    return tag("svg", mark, class_=f"mark {colour(label)}", viewBox="-6 -6 12 12", aria_hidden="true")


def draw_interval(value: float, interval: Sequence[float], low: float, high: float) -> Markup:
    """Draw a value and its interval on a scale, for a cell of a table; 0 is marked if it is on the scale."""

    def to_x(x: float) -> float:
        return round(5 + (BAR_WIDE - 10) * (min(max(x, low), high) - low) / max(high - low, 1e-12), 1)

    middle = BAR_HIGH / 2
    zero = to_x(0.0)
    parts = [tag("path", d=f"M{zero},0V{BAR_HIGH}", class_="zero")] if low < 0 < high else []
    parts += [
        tag("path", d=f"M{to_x(low)},{middle}H{to_x(high)}", class_="grid"),
        tag("path", d=f"M{to_x(interval[0])},{middle}H{to_x(interval[1])}", class_="interval"),
        tag("circle", cx=to_x(value), cy=middle, r=4, class_="value"),
    ]
    return tag("svg", *parts, class_="bar", viewBox=f"0 0 {BAR_WIDE} {BAR_HIGH}", aria_hidden="true")


def draw_fraction(fraction: float) -> Markup:
    """Draw a fraction as a bar, for a cell of a table."""
    full = tag("rect", x=0, y=3, width=BAR_WIDE, height=8, class_="track")
    part = tag("rect", x=0, y=3, width=round(BAR_WIDE * fraction, 1), height=8, class_="part")
    return tag("svg", full, part, class_="bar", viewBox=f"0 0 {BAR_WIDE} {BAR_HIGH}", aria_hidden="true")


def draw_spread(values: Sequence[float], mean: float) -> Markup:
    """Draw a histogram of values in [0, 1] and their mean, for a cell of a table."""
    counts = [0] * SPREAD_BARS
    for value in values:
        counts[min(int(value * SPREAD_BARS), SPREAD_BARS - 1)] += 1
    step, scale = SPREAD_WIDE / SPREAD_BARS, (SPREAD_HIGH - 4) / max(counts)
    parts = [tag("path", d=f"M0,{SPREAD_HIGH - 1}H{SPREAD_WIDE}", class_="grid")]
    for index, rows in enumerate(counts):
        if rows:
            height = max(1.0, round(scale * rows, 1))
            corner = {"x": round(index * step + 0.5, 1), "y": SPREAD_HIGH - 1 - height}
            parts.append(tag("rect", **corner, width=round(step - 1, 1), height=height, class_="part"))
    parts.append(tag("path", d=f"M{round(SPREAD_WIDE * mean, 1)},0V{SPREAD_HIGH}", class_="mean"))
    return tag("svg", *parts, class_="spread", viewBox=f"0 0 {SPREAD_WIDE} {SPREAD_HIGH}", aria_hidden="true")


def _frame(
    across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]], titles: tuple[str, str]
) -> list[Markup]:
    """Draw grid, ticks and titles of axes; positions are fractions of the plot's width and height."""
    parts = []
    for position, text in up:
        y = _y(position)
        parts.append(tag("path", d=f"M{LEFT},{y}H{WIDE - EDGE}", class_="grid"))
        parts.append(tag("text", text, x=LEFT - 6, y=y + 4, class_="tick end"))
    for position, text in across:
        parts.append(tag("text", text, x=_x(position), y=HIGH - BELOW + 16, class_="tick middle"))
    parts.append(tag("text", titles[0], x=_x(0.5), y=HIGH - 6, class_="tick middle"))
    parts.append(tag("text", titles[1], class_="tick middle", transform=f"translate(11 {_y(0.5)}) rotate(-90)"))
    return parts


def _x(position: float) -> float:
    return round(LEFT + position * (WIDE - LEFT - EDGE), 1)


def _y(position: float) -> float:
    return round(HIGH - BELOW - position * (HIGH - BELOW - EDGE), 1)


def _chart(parts: Sequence[Markup], label: str) -> Markup:
    """Combine parts to a chart with a label for screen readers."""
    return tag("svg", *parts, class_="chart", viewBox=f"0 0 {WIDE} {HIGH}", role="img", aria_label=label)


def draw_reliability(bins: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw accuracy by predicted probability; calibrated predictions lie on the diagonal."""
    ticks = [(tick / 4, f"{25 * tick}") for tick in range(5)]
    parts = _frame(ticks, ticks, ("probability of the predicted class, %", "accuracy, %"))
    parts.append(tag("path", d=f"M{_x(0)},{_y(0)}L{_x(1)},{_y(1)}", class_="ideal"))
    largest = max(entry["rows"] for entry in bins)
    for entry in bins:
        low, high = entry["interval"]
        x = _x(entry["confidence"])
        title = f"{entry['rows']} rows, mean probability {percent(entry['confidence'])}, accuracy "
        title += percent(entry["accuracy"])
        size = round(3 + 5 * math.sqrt(entry["rows"] / largest), 1)
        parts.append(tag("path", d=f"M{x},{_y(low)}V{_y(high)}", class_="interval"))
        parts.append(tag("circle", tag("title", title), cx=x, cy=_y(entry["accuracy"]), r=size, class_="value"))
    return _chart(parts, "Accuracy by predicted probability; the table below has the numbers.")


def draw_learning(learning: Mapping[str, Any]) -> Markup:
    """Draw accuracies by rows per class, on a logarithmic scale, and the prediction for twice as many."""
    points, twice = learning["points"], learning["twice"]
    sizes = [float(point["per_class"]) for point in points]
    if twice is not None:
        sizes.append(float(twice["per_class"]))
    bottom = math.floor(10 * min(float(point["interval"][0]) for point in points)) / 10
    first, last = math.log(sizes[0]), math.log(sizes[-1])

    def across(size: float) -> float:
        return 0.5 if first == last else 0.04 + 0.92 * (math.log(size) - first) / (last - first)

    def up(accuracy: float) -> float:
        return (accuracy - bottom) / (1 - bottom)

    ticks = [
        (up(bottom + (1 - bottom) * part / 4), f"{100 * (bottom + (1 - bottom) * part / 4):.3g}") for part in range(5)
    ]
    parts = _frame([(across(size), f"{size:.3g}") for size in sizes], ticks, ("rows per class", "accuracy, %"))
    positions = [(_x(across(point["per_class"])), _y(up(point["accuracy"]))) for point in points]
    parts.append(tag("path", d="M" + "L".join(f"{x},{y}" for x, y in positions), class_="line"))
    if twice is not None:
        end = _x(across(sizes[-1])), _y(up(max(bottom, twice["accuracy"])))
        parts.append(tag("path", d=f"M{positions[-1][0]},{positions[-1][1]}L{end[0]},{end[1]}", class_="line expected"))
        low, high = (_y(up(max(bottom, bound))) for bound in twice["interval"])
        parts.append(tag("path", d=f"M{end[0]},{low}V{high}", class_="interval"))
        parts.append(tag("circle", cx=end[0], cy=end[1], r=5, class_="open"))
    for (x, y), point in zip(positions, points, strict=True):
        low, high = (_y(up(bound)) for bound in point["interval"])
        parts.append(tag("path", d=f"M{x},{low}V{high}", class_="interval"))
        parts.append(tag("circle", cx=x, cy=y, r=5, class_="value"))
    return _chart(parts, "Accuracy by rows per class; the table below has the numbers.")


def draw_map(rows: Mapping[str, Any]) -> Markup:
    """Draw a mark for each row; misclassified ones have a ring and are on top."""
    x, y = rows["x"], rows["y"]
    left, wide = min(x), max(max(x) - min(x), 1e-9)
    top, high = max(y), max(max(y) - min(y), 1e-9)
    scale = min((MAP_WIDE - 2 * MAP_EDGE) / wide, (MAP_HIGH - 2 * MAP_EDGE) / high)
    shift = (MAP_WIDE - scale * wide) / 2, (MAP_HIGH - scale * high) / 2
    wrong = [a != b for a, b in zip(rows["label"], rows["predicted"], strict=True)]
    parts = []
    for row in sorted(range(len(x)), key=lambda row: wrong[row]):
        move = f"translate({shift[0] + scale * (x[row] - left):.1f} {shift[1] + scale * (top - y[row]):.1f})"
        style = f"{colour(rows['label'][row])}{' wrong' * wrong[row]}"
        parts.append(tag("path", d=shape(rows["label"][row]), transform=move, class_=style, data_row=row))
    label = "Map of the rows. Arrow keys go from row to row; the row is described below."
    view = f"0 0 {MAP_WIDE} {MAP_HIGH}"
    return tag("svg", *parts, id="points", class_="map", viewBox=view, role="application", aria_label=label, tabindex=0)
