"""The report of an evaluation: one summary, as tables, JSON, CSV or a plot."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from protonet._checks import optional_packages
from protonet._writing import write_text
from protonet.episodes.draws.batch import Episodes
from protonet.episodes.evaluation.evaluate import Scores
from protonet.episodes.evaluation.statistics import OVER, compare_pairs, half_width, mean_of
from protonet.episodes.methods.common import support_means
from protonet.metrics import calibration_error
from protonet.ui.text import format_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = 4.6  #: Inches, the side of a plot.
Summary = Mapping[str, Any]  #: An evaluation, from `summarize`.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  #: A header and rows, of texts.
#: How LaTeX writes characters that mean something else to it.
LATEX = {each: rf"\{each}" for each in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    "±": r"$\pm$",
}
#: A cell that is a number: with a sign, an exponent, half-widths or a rank in brackets, perhaps.
NUMBER = re.compile(
    r"(?P<value>[<+-]?[\d.]+)(e(?P<sign>[+-])0*(?P<exponent>\d+))?(?P<halves>( ±[\d.]+)*)(?P<rank> \([\d.]+\))?"
)
#: How well queries of open classes are told: the fields of `Scores`, and the headings of their columns.
OPEN = {"auroc": "AUROC of open classes, %", "fpr95": "FPR at 95 %, %", "oscr": "OSCR, %"}
#: Likewise, of queries of base and of novel classes beside each other.
SIDES = {"base": "of base classes, %", "novel": "of novel classes, %", "harmonic": "harmonic mean, %"}
MEASURES = OPEN | SIDES
MOST_SHOTS = 20  #: Columns of a table by shot; there is none of more.
#: What intervals and p-values speak of: where both are known, where each episode has all classes, of a fixed split.
SPEAKS = {
    "both": "95 % intervals (±) and p-values over classes, which come first, speak of other classes of the same kind "
    "(jackknife over classes); those over episodes speak of other episodes of these same classes alone.",
    "episodes": "95 % intervals (±) and p-values speak of other episodes of these same classes alone: those over other "
    "classes need episodes that leave each class out.",
    "supports": "95 % intervals (±) and p-values speak of other draws of the support, of the same test split.",
}


def summarize(
    scores: Mapping[str, Scores],
    shot: tuple[int, int],
    settings: Mapping[str, Any] = MappingProxyType({}),
    members: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Summarise an evaluation in a form that JSON can write; all metrics are in [0, 1].

    Args:
        scores: Of each method, on the same episodes.
        shot: Least and most shots per class.
        settings: The settings of the evaluation, passed on; ``against`` names the method to compare with each other.
        members: (episodes, classes) bool, for intervals over classes, see `statistics`; None where they are not known.

    Returns:
        ``settings``; ``episodes``, their number; ``methods``, for each the accuracy, the calibration error and how well
        open classes (``OPEN``) and, where there are some, base and novel ones (``SIDES``) are told, with half-widths of
        95 % intervals over classes and over episodes, and the accuracy by shot; and ``comparisons``, one per pair of
        methods. None stands for what does not exist.
    """
    methods = {}
    for name, own in scores.items():
        measures = MEASURES if not own.harmonic.isnan().any() else OPEN
        told = {measure: rate(getattr(own, measure), members) for measure in measures}
        methods[name] = {
            **rate(own.accuracy, members),
            "calibration_error": calibration_error(own.bins),
            **{measure: found.pop("accuracy") for measure, found in told.items()},
            **{f"{measure}_{name}": half for measure, found in told.items() for name, half in found.items()},
            "by_shot": {
                str(n_shot): {**rate(column, members), "episodes": int((~column.isnan()).sum())}
                for n_shot, column in zip(range(shot[0], shot[1] + 1), own.by_shot.unbind(1), strict=True)
            },
        }
    accuracies = {name: each.accuracy for name, each in scores.items()}
    comparisons = compare(accuracies, members, settings.get("against"))
    n_episodes = len(next(iter(scores.values())).accuracy)
    return {"settings": dict(settings), "episodes": n_episodes, "methods": methods, "comparisons": comparisons}


def compare(
    accuracies: Mapping[str, torch.Tensor], members: torch.Tensor | None, against: str | None
) -> list[dict[str, Any]]:
    """Return the comparisons of `compare_pairs` in a form that JSON can write."""
    told = []
    for pair in compare_pairs(accuracies, members, against):
        unknown = {over for over in OVER if math.isnan(getattr(pair, f"half_width_{over}"))}
        fields = pair._asdict().items()
        told.append({name: None if name.rpartition("_")[2] in unknown else value for name, value in fields})
    return told


def rate(values: torch.Tensor, members: torch.Tensor | None) -> dict[str, float | None]:
    """Return the mean of those values that are not NaN and its half-widths; None where there are too few."""
    over_classes = math.nan if members is None else half_width(values, members)
    return {
        "accuracy": _known(mean_of(values)),
        "half_width_classes": _known(over_classes),
        "half_width_episodes": _known(half_width(values)),
    }


def _known(value: float) -> Any:
    """Return a number, or None for NaN, which JSON cannot write."""
    return None if math.isnan(value) else value


def list_halves(own: Mapping[str, Any], measure: str = "") -> list[float]:
    """Return those half-widths that are known, over classes first, of an accuracy, a measure or a difference."""
    begin = f"{measure}_" if measure else ""
    halves = (own.get(f"{begin}half_width_{over}") for over in OVER)
    return [half for half in halves if half is not None]


def list_over(summaries: Iterable[Summary]) -> list[str]:
    """Return what the intervals of the methods of some summaries are over, in their order."""
    rates = [own for summary in summaries for own in summary["methods"].values()]
    return [over for over in OVER if any(own[f"half_width_{over}"] is not None for own in rates)]


def head_accuracy(summaries: Iterable[Summary]) -> str:
    """Return the heading of a column of accuracies with their half-widths."""
    return " ".join(["accuracy, %", *(f"±{over}" for over in list_over(summaries))])


def format_report(summary: Summary) -> str:
    """Format a summary as Markdown tables for people, with notes on what the numbers mean.

    Args:
        summary: From `summarize`.
    """
    text = "\n".join(format_table(*table) for table in tabulate(summary))
    pairs, against = len(summary["comparisons"]), summary["settings"].get("against")
    if pairs:
        family = f"{pairs} pair{'s' * (pairs > 1)} of methods"
        family = family if against is None else f"{pairs} comparison{'s' * (pairs > 1)} of {against} with another"
        text += f"\nDifferences are paired by episode; p-values are of paired t tests, adjusted by Holm for {family}.\n"
    until, methods = summary["settings"].get("until", 0), summary["methods"].values()
    halves = [own["half_width_episodes"] for own in methods]
    if until and any(half is None or 100 * half >= until for half in halves):
        text += f"Intervals over episodes are not within {until:g} points yet: more episodes are needed.\n"
    if list_over([summary]):
        text += f"{tell_intervals(summary)}\n"
    if not all("calibration_error" in own for own in methods):
        return text
    return text + "The calibration error is that of the method's own probabilities, the softmax of its logits.\n"


def tell_intervals(summary: Summary) -> str:
    """Return what the intervals of a summary speak of."""
    if summary["settings"].get("protocol") == "fixed-split":
        return SPEAKS["supports"]
    return SPEAKS["both" if "classes" in list_over([summary]) else "episodes"]


def tabulate(summary: Summary) -> list[Table]:
    """Return the tables of a summary: the methods in percent, the best first; their accuracy by shot where shots vary.

    Differences are those to the best method; with ``against`` among the settings, what that one is ahead by. Without
    ``calibration_error`` of the methods, there is no column of it, and without ``by_shot``, no second table.
    """
    methods = summary["methods"]
    order = sorted(methods, key=lambda name: -methods[name]["accuracy"])
    settings, best = summary["settings"], order[0]
    against = settings.get("against")
    several = len(order) > 1
    calibrated = all("calibration_error" in own for own in methods.values())
    told = [measure for measure in MEASURES if methods[best].get(measure) is not None]
    over = list_over([summary])
    header = ["method", head_accuracy([summary])]
    if several:
        header += [f"behind {best}" if against is None else f"{against} is ahead by"]
        header += [f"p over {each} (Holm)" for each in over]
    header += ["calibration error, %"] if calibrated else []
    header += [MEASURES[measure] for measure in told]
    rows = []
    for name in order:
        own = methods[name]
        row = [name, percent(own["accuracy"], *list_halves(own))]
        row += _compare(summary, against or best, name, over, signed=against is not None) if several else []
        row += [f"{100 * own['calibration_error']:.1f}"] if calibrated else []
        rows.append(row + [percent(own[measure], *list_halves(own, measure)) for measure in told])
    tables: list[Table] = [(header, rows)]
    shots = list(methods[best].get("by_shot", ()))
    if 1 < len(shots) <= MOST_SHOTS:
        rows = [[name] for name in order]
        for row in rows:
            row += [percent(each["accuracy"], *list_halves(each)) for each in methods[row[0]]["by_shot"].values()]
        tables.append(([head_accuracy([summary]), *(f"{count}-shot" for count in shots)], rows))
    return tables


def format_latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as LaTeX's ``tabular``, with the rules of the package booktabs, ending in a newline."""

    def line(cells: Sequence[str]) -> str:
        return "  " + " & ".join(map(_write_latex, cells)) + r" \\" + "\n"

    begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}" + "\n  \\toprule\n"
    body = "".join(map(line, rows))
    return f"{begin}{line(header)}  \\midrule\n{body}  \\bottomrule\n\\end{{tabular}}\n"


def _write_latex(cell: str) -> str:
    """Return a table's cell as LaTeX writes it, numbers as mathematics."""
    found = NUMBER.fullmatch(cell)
    if found is None:
        return "".join(LATEX.get(each, each) for each in cell)
    power = "" if found["sign"] is None else rf" \times 10^{{{found['sign'].strip('+')}{found['exponent']}}}"
    halves = found["halves"].replace("±", r"\pm ")
    return f"${found['value']}{power}{halves}${found['rank'] or ''}"


def write_tables(outputs: Mapping[str, Path], summary: Summary) -> None:
    """Write the tables of a summary to those paths of ``outputs`` that are under ``latex`` and ``markdown``."""
    for kind, form in (("latex", format_latex), ("markdown", format_table)):
        if kind in outputs:
            write_text(outputs[kind], "\n".join(form(*table) for table in tabulate(summary)))


def percent(share: float | None, *halves: float) -> str:
    """Format a share and its half-widths in percent, such as ``71.23 ±2.10 ±0.40``; None becomes an empty text."""
    return "" if share is None else " ±".join(f"{100 * each:.2f}" for each in (share, *halves))


def _compare(summary: Summary, best: str, name: str, over: Sequence[str], *, signed: bool) -> list[str]:
    """Format how much less accurate a method is than another, paired, and the adjusted p-values."""
    for pair in summary["comparisons"]:
        if {pair["first"], pair["second"]} == {best, name} and best != name:
            difference = pair["difference"] if signed else abs(pair["difference"])
            text = ("+" if signed and difference >= 0 else "") + percent(difference, *list_halves(pair))
            return [text, *(show_p(pair[f"p_holm_{each}"]) for each in over)]
    return [""] * (1 + len(over))


def show_p(p_value: float | None) -> str:
    """Format a p-value; None becomes an empty text."""
    if p_value is None:
        return ""
    return "<1e-300" if p_value < 1e-300 else f"{p_value:.2g}"


def list_right(scores: Mapping[str, Scores], queries: torch.Tensor) -> dict[str, list[int]]:
    """Return how many queries each method has right in each episode, of ``queries`` (episodes,) int64."""
    return {name: (own.accuracy * queries).round().long().tolist() for name, own in scores.items()}


def list_members(members: torch.Tensor) -> dict[str, Any]:
    """Return the classes of each episode, of ``members`` (episodes, classes) bool, in a form that JSON can write.

    Returns:
        ``ways``, of each episode, or of all if they are as many; ``members``, the classes of one episode after another.
    """
    ways = members.sum(dim=1)
    same = len(ways.unique()) == 1
    return {"ways": int(ways[0]) if same else ways.tolist(), "members": members.nonzero()[:, 1].tolist()}


def read_members(held: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what `list_members` listed, (episodes, classes) bool; None of files of earlier versions."""
    if "members" not in held:
        return None
    ways = torch.tensor(held["ways"]).expand(held["episodes"])
    members = torch.zeros(len(ways), int(held["classes"]), dtype=torch.bool)
    classes = torch.tensor(held["members"]).view(int(ways.sum()))
    members[torch.arange(len(ways)).repeat_interleave(ways), classes] = True
    return members


def write_csv(path: Path, summary: Summary) -> None:
    """Write a summary to ``path``, one line per metric: method, measure, shot ("" for all), value and half-widths."""
    halves = [f"half_width_{over}" for over in OVER]
    nothing = [""] * len(OVER)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "measure", "shot", "value", *halves])
        for name, own in summary["methods"].items():
            writer.writerow([name, "accuracy", "", own["accuracy"], *(own[half] for half in halves)])
            writer.writerow([name, "calibration_error", "", own["calibration_error"], *nothing])
            for measure in MEASURES:
                if own.get(measure) is not None:
                    writer.writerow([name, measure, "", own[measure], *(own[f"{measure}_{half}"] for half in halves)])
            for n_shot, each in own["by_shot"].items():
                writer.writerow([name, "accuracy", n_shot, each["accuracy"], *(each[half] for half in halves)])
        for pair in summary["comparisons"]:
            first, second = pair["first"], pair["second"]
            measure = f"accuracy less {second}'s"
            writer.writerow([first, measure, "", pair["difference"], *(pair[half] for half in halves)])
            for over in OVER:
                measure = f"p over {over} (Holm) against {second}"
                writer.writerow([first, measure, "", pair[f"p_holm_{over}"], *nothing])


def write_plot(path: Path, summary: Summary, episode: Episodes, query_labels: torch.Tensor) -> None:
    """Plot accuracies, by shot where shots vary; paired differences, if there are several methods; and one episode.

    Args:
        path: Of the file, with a suffix that matplotlib knows, such as .png, .pdf or .svg.
        summary: From `summarize`.
        episode: A batch of one episode.
        query_labels: (1, n_queries) int64, -1 for queries of open classes.

    Raises:
        MissingPackageError: matplotlib is missing; the message says how to install it.
    """
    with optional_packages("protonet.episodes"):
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    several = len(summary["methods"]) > 1
    size = max(PANEL, 0.42 * len(summary["methods"]))  # inches: one line of text per method
    widths = [PANEL, *([size] if several else []), PANEL]  # the differences alone need room for more methods
    figure = Figure(figsize=(sum(widths) + 0.6 * len(widths), size), layout="constrained")
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    _plot_accuracies(axes[0], summary["methods"])
    if several:
        _plot_differences(axes[1], summary)
    _plot_episode(axes[-1], episode, query_labels[0])
    figure.savefig(path, dpi=120)


def _plot_accuracies(axes: Axes, methods: Mapping[str, Any]) -> None:
    """Plot accuracy by shot with bands, or one bar per method where there is a single number of shots."""
    shots = [int(count) for count in next(iter(methods.values()))["by_shot"]]
    over = [f"over {first}" for first in list_over([{"methods": methods}])[:1]]
    if len(shots) > 1:
        for number, (name, own) in enumerate(methods.items()):
            rates = own["by_shot"].values()
            values = [math.nan if rate["accuracy"] is None else 100 * rate["accuracy"] for rate in rates]
            halves = [100 * next(iter(list_halves(rate)), 0.0) for rate in rates]
            dash = ("-", "--", ":")[number // 10 % 3]  # there are ten colours
            axes.plot(shots, values, label=name, marker="o", markersize=3, linestyle=dash)
            low = [max(0.0, value - half) for value, half in zip(values, halves, strict=True)]
            high = [min(100.0, value + half) for value, half in zip(values, halves, strict=True)]
            axes.fill_between(shots, low, high, alpha=0.2)
        axes.set(
            xlabel="shots", ylabel="accuracy, %", title=" ".join(["accuracy by shot, 95 % bands", *over]), xticks=shots
        )
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
        return
    names = sorted(methods, key=lambda name: float(methods[name]["accuracy"]))
    values = [100 * methods[name]["accuracy"] for name in names]
    halves = [100 * next(iter(list_halves(methods[name])), 0.0) for name in names]
    axes.errorbar(values, range(len(names)), xerr=halves, fmt="o", capsize=3)
    axes.set(
        xlabel="accuracy, %",
        title=" ".join(["accuracy, 95 % intervals", *over]),
        yticks=range(len(names)),
        yticklabels=names,
    )
    axes.grid(axis="x", alpha=0.3)


def _plot_differences(axes: Axes, summary: Summary) -> None:
    """Plot a heat map of paired differences, the row's accuracy minus the column's; stars where p (Holm) < 0.05.

    That is the p-value over classes where it is known.
    """
    names = sorted(summary["methods"], key=lambda name: -float(summary["methods"][name]["accuracy"]))
    grid = torch.zeros(len(names), len(names), dtype=torch.float64)
    significant = torch.zeros(len(names), len(names), dtype=torch.bool)
    for pair in summary["comparisons"]:
        row, column = names.index(pair["first"]), names.index(pair["second"])
        grid[row, column], grid[column, row] = 100 * pair["difference"], -100 * pair["difference"]
        p_value = next((pair[f"p_holm_{over}"] for over in OVER if pair[f"p_holm_{over}"] is not None), 1.0)
        significant[row, column] = significant[column, row] = p_value < 0.05
    most = max(1.0, float(grid.abs().max()))
    image = axes.imshow(grid.numpy(), cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label="points")
    known = {frozenset((pair["first"], pair["second"])) for pair in summary["comparisons"]}
    for row, column in permutations(range(len(names)), 2):
        if {names[row], names[column]} not in known:  # --against compares one with each
            continue
        text = f"{float(grid[row, column]):+.1f}{'*' * int(significant[row, column])}"
        dark = abs(float(grid[row, column])) > 0.6 * most
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title("row minus column (* p < 0.05, Holm)")


def _plot_episode(axes: Axes, episode: Episodes, query_labels: torch.Tensor) -> None:
    """Plot an episode's rows and prototypes along the two directions of most variance between prototypes."""
    prototypes = support_means(episode)[0].double()
    centre = prototypes.mean(dim=0)
    directions = torch.linalg.svd(prototypes - centre, full_matrices=False).Vh[:2]  # (at most 2, dim)
    if len(directions) < 2:  # a single feature
        directions = torch.cat([directions, torch.zeros_like(directions)])

    def place(rows: torch.Tensor) -> Any:
        return (directions @ (rows.double() - centre).T).numpy()  # (2, n)

    colours = [f"C{label}" if label >= 0 else "grey" for label in query_labels.tolist()]
    x, y = place(episode.query[0])
    axes.scatter(x, y, c=colours, s=14, alpha=0.6, label="query" + ", open ones grey" * ("grey" in colours))
    x, y = place(episode.support[0])
    colours = [f"C{label}" for label in episode.support_labels[0].tolist()]
    # On top of the prototypes: a class's only support row is its prototype.
    axes.scatter(x, y, c=colours, marker="s", s=30, edgecolors="white", linewidths=0.6, zorder=3, label="support")
    x, y = place(prototypes)
    axes.scatter(x, y, c=[f"C{c}" for c in range(len(x))], marker="*", s=220, edgecolors="black", label="prototype")
    axes.set(title="the first episode, along its prototypes", xticks=[], yticks=[])
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3)  # below, where no row lies
