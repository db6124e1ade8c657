"""What an evaluation says: one summary, as a table, JSON or CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protonet.commands.common import format_table
from protonet.episodes.evaluation import Scores
from protonet.episodes.statistics import calibration_error, compare_pairs, half_width, mean_of


def summarize(scores: Mapping[str, Scores], shot: tuple[int, int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of an evaluation, all figures in shares of 1, as JSON can write it.

    Args:
        scores: Of each method, on the same episodes.
        shot: Least and most shots a class.
        settings: What was asked for, passed on.

    Returns:
        ``settings``, ``episodes``, ``methods`` (for each the accuracy, calibration error and area under the ROC curve
        of open classes, with half-widths of 95 % intervals, and the accuracy by shot) and ``comparisons``, one for each
        pair. None stands for what does not exist.
    """
    methods = {}
    for name, (accuracy, by_shot, auroc, bins) in scores.items():
        methods[name] = {
            "accuracy": mean_of(accuracy),
            "half_width": _known(half_width(accuracy)),
            "calibration_error": calibration_error(bins),
            "auroc": _known(mean_of(auroc)),
            "auroc_half_width": _known(half_width(auroc)),
            "by_shot": {
                str(shots): {
                    "accuracy": _known(mean_of(column)),
                    "half_width": _known(half_width(column)),
                    "episodes": int((~column.isnan()).sum()),
                }
                for shots, column in zip(range(shot[0], shot[1] + 1), by_shot.unbind(1), strict=True)
            },
        }
    comparisons = [
        pair._replace(half_width=_known(pair.half_width))._asdict()
        for pair in compare_pairs({name: each.accuracy for name, each in scores.items()})
    ]
    n_episodes = len(next(iter(scores.values())).accuracy)
    return {"settings": dict(settings), "episodes": n_episodes, "methods": methods, "comparisons": comparisons}


def _known(value: float) -> Any:
    """Return a number, or None for NaN, which JSON has not."""
    return None if value != value else value  # noqa: PLR0124 - NaN alone differs from itself


def format_report(summary: Mapping[str, Any]) -> str:
    """Return the tables for people: methods in percent, the best first, and accuracy by shot where shots vary."""
    methods = summary["methods"]
    order = sorted(methods, key=lambda name: -methods[name]["accuracy"])
    best, n_open = order[0], summary["settings"].get("open", 0)
    header = [
        "method",
        "accuracy, %",
        f"behind {best}" if len(order) > 1 else "",
        "p (Holm)",
        "calibration error, %",
    ]
    rows = []
    for name in order:
        own = methods[name]
        row = [name, _percent(own["accuracy"], own["half_width"]), *_compare(summary, best, name)]
        row.append(f"{100 * own['calibration_error']:.1f}")
        row += [_percent(own["auroc"], own["auroc_half_width"])] if n_open else []
        rows.append(row)
    header += ["AUROC of open classes, %"] if n_open else []
    if len(order) == 1:
        header, rows = [header[0], header[1], *header[4:]], [[row[0], row[1], *row[4:]] for row in rows]
    text = format_table(header, rows)
    shots = list(methods[best]["by_shot"])
    if len(shots) > 1:
        by_shot = [
            [name, *(_percent(each["accuracy"], each["half_width"]) for each in methods[name]["by_shot"].values())]
            for name in order
        ]
        text += "\n" + format_table(["accuracy, %", *(f"{count}-shot" for count in shots)], by_shot)
    pairs = len(summary["comparisons"])
    if pairs:
        family = f"{pairs} pair{'s' * (pairs > 1)} of methods"
        text += f"\nDifferences are paired by episode; p of paired t tests, by Holm for {family}.\n"
    until = summary["settings"].get("until", 0)
    if until and any(own["half_width"] is None or 100 * own["half_width"] >= until for own in methods.values()):
        text += f"Intervals are not within {until:g} points yet: that takes more episodes.\n"
    return text + "Calibration is of the probabilities as each method defines them.\n"


def _percent(share: float | None, half: float | None) -> str:
    """Return ``71.23 ±0.40``, in percent; an empty text for None."""
    if share is None:
        return ""
    return f"{100 * share:.2f}" + ("" if half is None else f" ±{100 * half:.2f}")


def _compare(summary: Mapping[str, Any], best: str, name: str) -> tuple[str, str]:
    """Return how much less accurate a method is than the best one, paired, and the adjusted p-value."""
    for pair in summary["comparisons"]:
        if {pair["first"], pair["second"]} == {best, name} and best != name:
            p_value = "<1e-300" if pair["p_holm"] < 1e-300 else f"{pair['p_holm']:.2g}"
            return _percent(abs(pair["difference"]), pair["half_width"]), "" if pair["half_width"] is None else p_value
    return "", ""


def write_csv(path: Path, summary: Mapping[str, Any]) -> None:
    """Write one line a figure: method, measure, shot (empty for all), value and half-width, in shares of 1."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "measure", "shot", "value", "half_width"])
        for name, own in summary["methods"].items():
            writer.writerow([name, "accuracy", "", own["accuracy"], own["half_width"]])
            writer.writerow([name, "calibration_error", "", own["calibration_error"], ""])
            if own["auroc"] is not None:
                writer.writerow([name, "auroc", "", own["auroc"], own["auroc_half_width"]])
            for shots, each in own["by_shot"].items():
                writer.writerow([name, "accuracy", shots, each["accuracy"], each["half_width"]])
        for pair in summary["comparisons"]:
            measure = f"accuracy less {pair['second']}'s"
            writer.writerow([pair["first"], measure, "", pair["difference"], pair["half_width"]])
            writer.writerow([pair["first"], f"p (Holm) against {pair['second']}", "", pair["p_holm"], ""])


def write_json(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary as JSON, in a form that does not hang on how many processes made it."""
    path.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
