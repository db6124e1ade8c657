"""The report of an evaluation in the browser: one file without network, whose figures are those of ``--json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protonet._writing import write_text
from protonet.episodes.evaluation.evaluate import Scores
from protonet.episodes.evaluation.report import SIDES, list_halves, list_over, show_p, tell_intervals
from protonet.ui.page.charts import draw_interval, draw_spread
from protonet.ui.page.document import Section, Tile, format_document
from protonet.ui.page.markup import Markup, join, name_class, percent, span, table, tag
from protonet.ui.page.sections import LONG, say
from protonet.ui.text import count

#: Classes that are shown, at the most, the hardest first; the JSON has all.
MOST_CLASSES = 100
#: In fewer episodes a class is told from others by chance.
LEAST_EPISODES = 20
#: The shares of episodes below which the told accuracies lie.
QUANTILES = (0.05, 0.5, 0.95)

Figures = Mapping[str, Any]


def write_page(path: Path, title: str, notes: Sequence[str], figures: Figures) -> None:
    """Write the report.

    Args:
        path: Of the file.
        title: What was evaluated.
        notes: What a person should know of it.
        figures: Those of ``--json`` with ``--report``.

    Raises:
        OSError: The file cannot be written.
    """
    write_text(path, format_page(title, notes, figures))


def format_page(title: str, notes: Sequence[str], figures: Figures) -> str:
    """Return the report as HTML."""
    several = len(next(iter(figures["methods"].values()))["by_shot"]) > 1
    sections = [
        ("methods", "How often each method is right", format_methods(figures)),
        ("pairs", "Which method is ahead", format_pairs(figures)) if figures["comparisons"] else None,
        ("episodes", "From episode to episode", format_episodes(figures)),
        ("shots", "By the number of shots", format_shots(figures)) if several else None,
        ("classes", "Which classes are hard", format_classes(figures)),
        ("sampled", "How episodes were sampled", format_sampling(figures)),
        ("data", "Data, settings and versions", format_data(notes, figures)),
    ]
    shown: list[Section] = [each for each in sections if each is not None]
    return format_document(title, list_tiles(figures), shown, figures, "protonet.episodes")


def list_classes(scores: Mapping[str, Scores], members: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return, of each class, how right each method is in the episodes that it takes part in.

    Args:
        scores: Of each method, on the same episodes.
        members: (episodes, classes) bool, the classes of each episode.
        names: Of the classes.
    """
    inside = members.double()
    counts = inside.sum(dim=0)  # (classes,)
    means = {name: (inside.T @ own.accuracy / counts).tolist() for name, own in scores.items()}
    return [
        {"name": name, "episodes": int(counts[at]), "accuracy": {method: each[at] for method, each in means.items()}}
        for at, name in enumerate(names)
        if counts[at]
    ]


def list_tiles(figures: Figures) -> list[Tile]:
    """Return the figures that people ask for first."""
    settings, best = figures["settings"], order_methods(figures)[0]
    own = figures["methods"][best]
    return [
        ("most often right", percent(own["accuracy"], 2), f"{best}{tell_halves(own)}"),
        ("methods", f"{len(figures['methods'])}", None),
        ("episodes", f"{figures['episodes']:,}", f"{tell_kind(settings)}"),
        ("classes", f"{figures['classes']:,}", f"the {settings['side']} side"),
    ]


def tell_kind(settings: Figures) -> str:
    """Return the kind of episodes in a few words."""
    way, shot = ("-".join(map(str, dict.fromkeys(settings[name]))) for name in ("way", "shot"))
    return f"{way}-way {shot}-shot"


def tell_halves(own: Figures, measure: str = "") -> str:
    """Return half the widths of a share's intervals in points, over classes first."""
    return "".join(f", ±{100 * half:.2f}" for half in list_halves(own, measure))


def order_methods(figures: Figures) -> list[str]:
    """Return the names of the methods, the most accurate first."""
    methods = figures["methods"]
    return sorted(methods, key=lambda name: -float(methods[name]["accuracy"]))


def draw_half(value: float, half: float, low: float, high: float) -> Markup:
    """Return a value with its interval, for a cell of a table."""
    return draw_interval(value, (value - half, value + half), low, high)


def format_methods(figures: Figures) -> Markup:
    """Return accuracy, calibration and open classes of each method."""
    methods, opened = figures["methods"], bool(figures["settings"]["open"])
    sides = [side for side in SIDES if side in next(iter(methods.values()))]
    over = list_over([figures])
    ends = [(own["accuracy"], max(list_halves(own), default=0.0)) for own in methods.values()]
    low, high = max(0.0, min(a - half for a, half in ends)), min(1.0, max(a + half for a, half in ends))
    rows = []
    for name in order_methods(figures):
        own = methods[name]
        row = [name_class(name, longest=LONG), percent(own["accuracy"], 2)]
        row += [_tell_interval(own["accuracy"], own[f"half_width_{each}"]) for each in over]
        widest = max(list_halves(own), default=0.0)
        row += [draw_half(own["accuracy"], widest, low, high), percent(own["calibration_error"])]
        told = ["auroc"] * opened + sides
        rows.append(row + [percent(own[each], 2) + tell_halves(own, each) for each in told])
    header = ["method", "right", *(f"95 % interval over {each}" for each in over)]
    header += [f"{percent(low)} to {percent(high)}", "calibration error"]
    header += ["AUROC of open classes"] * opened + [SIDES[side].removesuffix(", %") for side in sides]
    said = [
        "The share of queries that each method has right, the mean over episodes, the most accurate method first.",
        "The calibration error is that of the method's own probabilities, the softmax of its logits.",
    ]
    parts = [say(" ".join(said)), table(header, rows, "Methods", numbers=1)]
    return join([*parts, say(tell_intervals(figures), soft=True)] if over else parts)


def _tell_interval(share: float, half: float | None) -> str:
    """Return the interval of a share in per cent, "" where it is not known."""
    return "" if half is None else span((share - half, share + half), 2)


def format_pairs(figures: Figures) -> Markup:
    """Return the paired differences, the largest first; who is ahead is named first, or the one compared with all."""
    pairs, against = figures["comparisons"], figures["settings"]["against"]
    over = list_over([figures])
    reach = max(abs(each["difference"]) + max(list_halves(each), default=0.0) for each in pairs) or 1e-9
    rows = []
    for each in sorted(pairs, key=lambda each: -abs(float(each["difference"]))):
        turned = against is None and each["difference"] < 0
        first, second = (each[name] for name in (("second", "first") if turned else ("first", "second")))
        lead = -each["difference"] if turned else each["difference"]
        named = join([name_class(first, longest=LONG), " over ", name_class(second, longest=LONG)])
        halves = [each[f"half_width_{kind}"] for kind in over]
        told: list[Markup | str] = ["" if half is None else f"±{100 * half:.2f}" for half in halves]
        told.append(draw_half(lead, max(list_halves(each), default=0.0), -reach, reach))
        p_values = [show_p(each[f"p_holm_{kind}"]) for kind in over]
        rows.append([named, f"{100 * lead:+.2f}", *told, *p_values])
    family = count(len(pairs), "pair") if against is None else f"{count(len(pairs), 'comparison')} of {against}"
    said = [
        "Differences are paired by episode, in points: all methods are judged on the same rows.",
        "Where an interval holds 0, chance may have made the difference.",
        f"p-values are of paired t tests, adjusted by Holm for {family}.",
    ]
    header = ["", "points", *(f"95 % interval over {kind}" for kind in over), "around 0"]
    header += [f"p over {kind} (Holm)" for kind in over]
    parts = [say(" ".join(said)), table(header, rows, "Paired differences", numbers=1)]
    return join([*parts, say(tell_intervals(figures), soft=True)] if over else parts)


def format_episodes(figures: Figures) -> Markup:
    """Return how accuracies are distributed over episodes."""
    queries = torch.as_tensor(figures["queries"], dtype=torch.float64)
    rows = []
    for name in order_methods(figures):
        shares = torch.tensor(figures["right"][name], dtype=torch.float64) / queries
        spread = f"{100 * float(shares.std()):.1f}" if len(shares) > 1 else ""
        marks = torch.quantile(shares, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
        drawn = draw_spread(shares.tolist(), float(shares.mean()))
        rows.append([name_class(name, longest=LONG), drawn, *map(percent, marks), spread])
    said = [
        "How many episodes have which share of their queries right; the line across is the mean.",
        "One episode in twenty is below the 5 % column, and one in twenty above the 95 % one.",
        "The intervals above are of the mean, and much narrower.",
    ]
    header = ["method", "0 to 100 %", "5 %", "median", "95 %", "standard deviation, points"]
    return join([say(" ".join(said)), table(header, rows, "Episodes", numbers=2)])


def format_shots(figures: Figures) -> Markup:
    """Return the accuracy on classes of each number of shots."""
    methods = figures["methods"]
    shots = list(next(iter(methods.values()))["by_shot"])
    rows = [
        [
            name_class(name, longest=LONG),
            *(
                "" if each["accuracy"] is None else percent(each["accuracy"], 2) + tell_halves(each)
                for each in methods[name]["by_shot"].values()
            ),
        ]
        for name in order_methods(figures)
    ]
    header = ["method", *(f"{shot}-shot" for shot in shots)]
    told = table(header, rows, "By shots", numbers=1)
    return join([say("How often queries of classes with so many support rows are right, with 95 % intervals."), told])


def format_classes(figures: Figures) -> Markup:
    """Return the episodes of each class, the hardest first."""
    best, most = order_methods(figures)[0], figures["by_class"]
    classes = [each for each in most if each["episodes"] >= LEAST_EPISODES]
    if not classes:
        return say(f"None of {count(len(most), 'class')} is in {LEAST_EPISODES} episodes: too few to tell.")
    shown = sorted(classes, key=lambda each: float(each["accuracy"][best]))[:MOST_CLASSES]
    ends = [each["accuracy"][best] for each in shown]
    mean = figures["methods"][best]["accuracy"]
    low, high = min([*ends, mean]), max([*ends, mean])
    rows = [
        [
            name_class(each["name"], longest=LONG),
            percent(each["accuracy"][best]),
            f"{100 * (each['accuracy'][best] - mean):+.1f}",
            draw_half(each["accuracy"][best], 0.0, low, high),
            f"{each['episodes']:,}",
        ]
        for each in shown
    ]
    said = [
        f"How often {best} is right in the episodes that a class takes part in, whatever the class of the query;",
        "the hardest first. Episodes are of several classes: a class is harder than its own row says.",
    ]
    header = ["class", "right", "to all episodes, points", f"{percent(low)} to {percent(high)}", "episodes"]
    parts = [say(" ".join(said)), table(header, rows, "Classes", numbers=1)]
    if len(shown) < len(most):
        few = f"those in {LEAST_EPISODES} episodes or more" if len(classes) < len(most) else "the hardest"
        parts.append(say(f"{len(shown)} of {count(len(most), 'class')}, {few}; --json has all.", soft=True))
    return join(parts)


def format_sampling(figures: Figures) -> Markup:
    """Return how episodes were drawn, in words."""
    settings = figures["settings"]
    if "kind" in settings:
        lines = [
            f"{figures['episodes']:,} episodes are drawn with the seed {settings['seed']}: {settings['kind']}.",
            "They are the same for all methods, and again with the same seed, data and setting.",
        ]
        return tag("ul", *(tag("li", line) for line in lines), class_="notes")
    shared = "as many of each" if settings["imbalance"] is None else f"by Dirichlet shares of {settings['imbalance']:g}"
    queries, (least, most) = figures["queries"], settings["shot"]
    told = f"{queries}" if isinstance(queries, int) else f"{min(queries)} to {max(queries)}"
    lines = [
        f"{figures['episodes']:,} episodes, {tell_kind(settings)}, are drawn with the seed {settings['seed']}.",
        "They are the same for all methods, and again with the same seed, data and setting.",
        f"An episode's classes are different ones of {figures['classes']:,}, those of the {settings['side']} side.",
        "The rows of a class in an episode are different ones: no query is a support row.",
        f"Queries: {told} an episode, {settings['query']} a class on average, {shared}.",
    ]
    if least < most:
        each = "each class alone" if settings["unequal"] else "all classes of an episode"
        lines.append(f"From {least} to {most} shots, all as likely, are drawn for {each}.")
    if settings["open"]:
        lines.append(f"Queries of {count(settings['open'], 'class')} outside each episode are to be told apart.")
    if settings["until"]:
        lines.append(f"It was to stop once all intervals over episodes were within {settings['until']:g} points.")
    return tag("ul", *(tag("li", line) for line in lines), class_="notes")


def format_data(notes: Sequence[str], figures: Figures) -> Markup:
    """Return what the figures depend on."""
    named = {
        **{f"setting {name.replace('_', '-')}": value for name, value in figures["settings"].items()},
        "SHA-256 of the rows, class by class": figures["data"],
        **{f"version of {name}": value for name, value in figures["versions"].items()},
        **{f"SHA-256 of {name}": value for name, value in figures["plugins"].items()},
    }
    rows = [[name_class(name, longest=LONG), tag("span", tell_value(value))] for name, value in named.items()]
    parts = [say("Runs that share all of these have the same episodes, and give the same figures.")]
    if notes:
        parts.append(tag("ul", *(tag("li", note) for note in notes), class_="notes"))
    for each in figures["tuning"]:
        parts.append(say("Tuned on validation classes: ", tell_value(each)))
    return join([*parts, table(["", "value"], rows, "Settings")])


def tell_value(value: Any) -> str:
    """Return a setting as a person reads it."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {tell_value(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(tell_value, dict.fromkeys(map(str, value)))) or "none"
    return {"True": "yes", "False": "no"}.get(str(value), str(value))
