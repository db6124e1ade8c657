"""The report's figures as SVG: drawn here, coloured by the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from protonet.ui.page.markup import Markup, percent, tag

#: Width and height of a chart with axes, and what its left and lower margins take, in pixels at a width of its own.
WIDE, HIGH, LEFT, BELOW, EDGE = 340, 260, 46, 42, 12
#: Side of the map, and the margin in it.
MAP_WIDE, MAP_HIGH, MAP_EDGE = 480, 360, 12
#: Width of a bar in a table.
BAR_WIDE, BAR_HIGH = 120, 14
#: Width, height and number of the bars of a distribution in a table.
SPREAD_WIDE, SPREAD_HIGH, SPREAD_BARS = 240, 40, 40
#: Colours and shapes of classes; colours come first.
COLOURS = 10
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.8L4.6,3.6H-4.6z",
    "M0,-5L5,0L0,5L-5,0z",
    "M-1.5,-4.6h3v3.1h3.1v3h-3.1v3.1h-3v-3.1h-3.1v-3h3.1z",
)


def colour(number: int) -> str:
    """Return the style class of a class's colour."""
    return f"c{number % COLOURS}"


def shape(number: int) -> str:
    """Return the outline of a class's mark."""
    return SHAPES[number // COLOURS % len(SHAPES)]


def draw_mark(number: int) -> Markup:
    """Return a class's mark alone, for the legend."""
    return tag(
        "svg", tag("path", d=shape(number)), class_=f"mark {colour(number)}", viewBox="-6 -6 12 12", aria_hidden="true"
    )


def draw_interval(value: float, interval: Sequence[float], low: float, high: float) -> Markup:
    """Return a value with its interval between two ends of a scale, for a cell of a table; 0 is marked if within."""

    def place(x: float) -> float:
        return round(5 + (BAR_WIDE - 10) * (min(max(x, low), high) - low) / max(high - low, 1e-12), 1)

    middle = BAR_HIGH / 2
    zero = place(0.0)
    parts = [tag("path", d=f"M{zero},0V{BAR_HIGH}", class_="zero")] if low < 0 < high else []
    parts += [
        tag("path", d=f"M{place(low)},{middle}H{place(high)}", class_="grid"),
        tag("path", d=f"M{place(interval[0])},{middle}H{place(interval[1])}", class_="interval"),
        tag("circle", cx=place(value), cy=middle, r=4, class_="value"),
    ]
    return tag("svg", *parts, class_="bar", viewBox=f"0 0 {BAR_WIDE} {BAR_HIGH}", aria_hidden="true")


def draw_share(share: float) -> Markup:
    """Return a share of 1 as a bar, for a cell of a table."""
    full = tag("rect", x=0, y=3, width=BAR_WIDE, height=8, class_="track")
    part = tag("rect", x=0, y=3, width=round(BAR_WIDE * share, 1), height=8, class_="part")
    return tag("svg", full, part, class_="bar", viewBox=f"0 0 {BAR_WIDE} {BAR_HIGH}", aria_hidden="true")


def draw_spread(shares: Sequence[float], mean: float) -> Markup:
    """Return how often each of some shares of 1 occurs, as bars from 0 to 1, and their mean, for a cell of a table."""
    counts = [0] * SPREAD_BARS
    for share in shares:
        counts[min(int(share * SPREAD_BARS), SPREAD_BARS - 1)] += 1
    step, high = SPREAD_WIDE / SPREAD_BARS, SPREAD_HIGH - 4
    most = max(counts)
    parts = [tag("path", d=f"M0,{SPREAD_HIGH - 1}H{SPREAD_WIDE}", class_="grid")]
    for at, number in enumerate(counts):
        if number:
            tall = max(1.0, round(high * number / most, 1))
            place = {"x": round(at * step + 0.5, 1), "y": SPREAD_HIGH - 1 - tall}
            parts.append(tag("rect", **place, width=round(step - 1, 1), height=tall, class_="part"))
    parts.append(tag("path", d=f"M{round(SPREAD_WIDE * mean, 1)},0V{SPREAD_HIGH}", class_="mean"))
    return tag("svg", *parts, class_="spread", viewBox=f"0 0 {SPREAD_WIDE} {SPREAD_HIGH}", aria_hidden="true")


def _frame(
    across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]], titles: tuple[str, str]
) -> list[Markup]:
    """Return the grid, the ticks and the titles of axes; places are shares of the plot's width and height."""
    parts = []
    for share, text in up:
        y = _y(share)
        parts.append(tag("path", d=f"M{LEFT},{y}H{WIDE - EDGE}", class_="grid"))
        parts.append(tag("text", text, x=LEFT - 6, y=y + 4, class_="tick end"))
    for share, text in across:
        parts.append(tag("text", text, x=_x(share), y=HIGH - BELOW + 16, class_="tick middle"))
    parts.append(tag("text", titles[0], x=_x(0.5), y=HIGH - 6, class_="tick middle"))
    parts.append(tag("text", titles[1], class_="tick middle", transform=f"translate(11 {_y(0.5)}) rotate(-90)"))
    return parts


def _x(share: float) -> float:
    return round(LEFT + share * (WIDE - LEFT - EDGE), 1)


def _y(share: float) -> float:
    return round(HIGH - BELOW - share * (HIGH - BELOW - EDGE), 1)


def _chart(parts: Sequence[Markup], label: str) -> Markup:
    """Return parts as a chart that says what it is."""
    return tag("svg", *parts, class_="chart", viewBox=f"0 0 {WIDE} {HIGH}", role="img", aria_label=label)


def draw_reliability(bins: Sequence[Mapping[str, Any]]) -> Markup:
    """Return how often predictions are right, by how sure they are: on the line where probabilities are honest."""
    ticks = [(share / 4, f"{25 * share}") for share in range(5)]
    parts = _frame(ticks, ticks, ("probability of the predicted class, %", "right, %"))
    parts.append(tag("path", d=f"M{_x(0)},{_y(0)}L{_x(1)},{_y(1)}", class_="ideal"))
    most = max(each["rows"] for each in bins)
    for each in bins:
        low, high = each["interval"]
        x = _x(each["confidence"])
        said = f"{each['rows']} rows believed to {percent(each['confidence'])}: {percent(each['accuracy'])} right"
        size = round(3 + 5 * math.sqrt(each["rows"] / most), 1)
        parts.append(tag("path", d=f"M{x},{_y(low)}V{_y(high)}", class_="interval"))
        parts.append(tag("circle", tag("title", said), cx=x, cy=_y(each["accuracy"]), r=size, class_="value"))
    return _chart(parts, "Share of right predictions by their probability; the table below has the numbers.")


def draw_learning(learning: Mapping[str, Any]) -> Markup:
    """Return accuracies by rows per class, on a logarithmic scale, and what is expected of twice as many."""
    points, twice = learning["points"], learning["twice"]
    sizes = [float(point["per_class"]) for point in points]
    if twice is not None:
        sizes.append(float(twice["per_class"]))
    bottom = math.floor(10 * min(float(point["interval"][0]) for point in points)) / 10
    first, last = math.log(sizes[0]), math.log(sizes[-1])

    def across(size: float) -> float:
        return 0.5 if first == last else 0.04 + 0.92 * (math.log(size) - first) / (last - first)

    def up(share: float) -> float:
        return (share - bottom) / (1 - bottom)

    ticks = [
        (up(bottom + (1 - bottom) * part / 4), f"{100 * (bottom + (1 - bottom) * part / 4):.3g}") for part in range(5)
    ]
    parts = _frame([(across(size), f"{size:.3g}") for size in sizes], ticks, ("rows per class", "right, %"))
    places = [(_x(across(point["per_class"])), _y(up(point["accuracy"]))) for point in points]
    parts.append(tag("path", d="M" + "L".join(f"{x},{y}" for x, y in places), class_="line"))
    if twice is not None:
        end = _x(across(sizes[-1])), _y(up(max(bottom, twice["accuracy"])))
        parts.append(tag("path", d=f"M{places[-1][0]},{places[-1][1]}L{end[0]},{end[1]}", class_="line expected"))
        low, high = (_y(up(max(bottom, bound))) for bound in twice["interval"])
        parts.append(tag("path", d=f"M{end[0]},{low}V{high}", class_="interval"))
        parts.append(tag("circle", cx=end[0], cy=end[1], r=5, class_="open"))
    for (x, y), point in zip(places, points, strict=True):
        low, high = (_y(up(bound)) for bound in point["interval"])
        parts.append(tag("path", d=f"M{x},{low}V{high}", class_="interval"))
        parts.append(tag("circle", cx=x, cy=y, r=5, class_="value"))
    return _chart(parts, "Share of right predictions by rows per class; the table below has the numbers.")


def draw_map(rows: Mapping[str, Any]) -> Markup:
    """Return every row as a mark; those that are taken for another class are ringed, and on top."""
    x, y = rows["x"], rows["y"]
    left, wide = min(x), max(max(x) - min(x), 1e-9)
    top, high = max(y), max(max(y) - min(y), 1e-9)
    scale = min((MAP_WIDE - 2 * MAP_EDGE) / wide, (MAP_HIGH - 2 * MAP_EDGE) / high)
    shift = (MAP_WIDE - scale * wide) / 2, (MAP_HIGH - scale * high) / 2
    wrong = [a != b for a, b in zip(rows["label"], rows["predicted"], strict=True)]
    parts = []
    for at in sorted(range(len(x)), key=lambda at: wrong[at]):
        place = f"translate({shift[0] + scale * (x[at] - left):.1f} {shift[1] + scale * (top - y[at]):.1f})"
        look = f"{colour(rows['label'][at])}{' wrong' * wrong[at]}"
        parts.append(tag("path", d=shape(rows["label"][at]), transform=place, class_=look, data_row=at))
    label = "Map of the rows. With the keyboard: arrow keys go from row to row, and the row is told below."
    view = f"0 0 {MAP_WIDE} {MAP_HIGH}"
    return tag("svg", *parts, id="points", class_="map", viewBox=view, role="application", aria_label=label, tabindex=0)
