"""Several evaluations in one run: of several data sets, and with several shots; their means and the methods' ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protonet._checks import fail
from protonet._writing import write_json, write_text
from protonet.episodes.evaluation.distributed import join_group
from protonet.episodes.evaluation.experiment import run_experiment
from protonet.episodes.evaluation.material import PROG, Experiment, load_data, prepare
from protonet.episodes.evaluation.report import Table, format_latex, head_accuracy, list_halves, percent
from protonet.episodes.evaluation.statistics import OVER, compare_pairs
from protonet.ui.text import format_table

SIGNIFICANT = 0.05  #: Methods share a rank whose paired t test has this p-value or a higher one.
OUTPUTS = ("json", "latex", "markdown")  #: The files of a run of several evaluations.


class Run(NamedTuple):
    """One of the evaluations."""

    dataset: str  #: As it was given.
    shot: str  #: Likewise; "" where the protocol draws it.
    experiment: Experiment  #: Its settings.


def run_suite(runs: Sequence[Run], outputs: Mapping[str, Path], *, state: Path | None, resume: bool) -> None:
    """Evaluate all, print the report of each and tables of all, and write the outputs.

    Args:
        runs: The evaluations, at least two.
        outputs: The paths of the files to write, of all together, under some of ``OUTPUTS``.
        state: The path of a file, beside which each evaluation keeps its own state, with a number; None for none.
        resume: Continue from the states that are there.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the tables and the files of the finished evaluations are written; it names
            the others.
        InputError: As of one evaluation, a state is there without ``resume``, or a file cannot be of several.
    """
    for name in outputs:
        if name not in OUTPUTS:
            remedy = f"Leave it out, or run them one by one; {', '.join(f'--{each}' for each in OUTPUTS)} are of all."
            fail(PROG, f"--{name}", "be of one data set and one --shot", f"{len(runs)} evaluations", remedy)
    states = [None if state is None else number_path(state, number) for number in range(1, len(runs) + 1)]
    is_main = os.environ.get("RANK", "0") == "0"
    for path in states if is_main and not resume else ():
        if path is not None and path.exists():
            remedy = "Continue its run with --resume, or pass another path."
            fail(PROG, "--state", "be new files", f"{path}, which exists", remedy)
    for run in runs:  # all are looked at before the first is evaluated
        if run.experiment.encoder is None:  # which would embed all rows
            prepare(*load_data(run.experiment._replace(tune=())))
    found: list[Mapping[str, Any]] = []
    try:
        with join_group():
            for run, path in zip(runs, states, strict=True):
                found.append(run_experiment(run.experiment, {}, state=path, resume=resume))
                if is_main:
                    print(flush=True)
    except KeyboardInterrupt as interrupt:
        if found and is_main:
            print()
            report_suite(runs[: len(found)], found, outputs)
        missing = ", ".join(map(name_run, runs[len(found) :]))
        raise KeyboardInterrupt(f"{str(interrupt) or 'interrupted'}; not finished: {missing}") from None
    if is_main:
        report_suite(runs, found, outputs)


def report_suite(runs: Sequence[Run], found: Sequence[Mapping[str, Any]], outputs: Mapping[str, Path]) -> None:
    """Print tables of evaluations, one or more, and write the outputs.

    Args:
        runs: The evaluations.
        found: Of each, what ``--json`` holds.
        outputs: The paths of the files to write, see `run_suite`.
    """
    shots = list(dict.fromkeys(run.shot for run in runs))
    averages = {shot: average([found[at] for at, run in enumerate(runs) if run.shot == shot]) for shot in shots}
    tables = list(tabulate_suite(runs, found, averages))
    print("\n".join(format_table(*table) for table in tables), end="")
    print(tell_ranks(runs, found), end="", flush=True)
    for name, form in (("latex", format_latex), ("markdown", format_table)):
        if name in outputs:
            write_text(outputs[name], "\n".join(form(*table) for table in tables))
    if "json" in outputs:
        named = {name_run(run): each for run, each in zip(runs, found, strict=True)}
        write_json(outputs["json"], {"runs": named, "averages": averages})
    for path in outputs.values():
        print(f"wrote {path}", file=sys.stderr)


def number_path(path: Path, number: int) -> Path:
    """Return a path with a number before its suffix: ``run.npz`` becomes ``run-1.npz``."""
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def name_run(run: Run) -> str:
    """Return what tells an evaluation from the others of its run."""
    return f"{run.dataset} {run.shot}-shot" if run.shot else run.dataset


def average(figures: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, of each method, its mean accuracy over evaluations of several data sets, and its ranks.

    Args:
        figures: Of each evaluation, what ``--json`` holds.

    Returns:
        For each method that all have, ``accuracy``, the mean; ``half_width_classes`` and ``half_width_episodes``, those
        of the 95 % intervals of the mean over these same data sets, from those of each, which are independent;
        ``ranks``, in each, and ``rank``, their mean.
    """
    ranks = [rank_methods(find_accuracies(each)) for each in figures]
    methods = [name for name in figures[0]["methods"] if all(name in each["methods"] for each in figures)]
    averages: dict[str, dict[str, Any]] = {}
    for name in methods:
        rates = [each["methods"][name] for each in figures]
        own = [each[name] for each in ranks]
        averages[name] = {"accuracy": sum(each["accuracy"] for each in rates) / len(rates)}
        for width in (f"half_width_{over}" for over in OVER):
            halves = [each[width] for each in rates]
            averages[name][width] = None if None in halves else sum(half**2 for half in halves) ** 0.5 / len(halves)
        averages[name] |= {"ranks": own, "rank": sum(own) / len(own)}
    return averages


def find_accuracies(figures: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the accuracies of each method by episode, of what ``--json`` holds."""
    queries = torch.tensor(figures["queries"], dtype=torch.float64)
    return {name: torch.tensor(own, dtype=torch.float64) / queries for name, own in figures["right"].items()}


def rank_methods(accuracies: Mapping[str, Tensor]) -> dict[str, float]:
    """Rank methods by their mean accuracy; those that are not surely behind the best of the rest share its rank.

    Args:
        accuracies: For each method's name (episodes,) float64, of the same episodes.

    Returns:
        Ranks from 1 on; those that share some have their mean.

    Source: Triantafillou et al., "Meta-Dataset" (2020), sec. 4; as its code (Leaderboard.ipynb, ``compute_ranks``), but
        with a paired test, as the episodes are the same.
    """
    p_values = {(each.first, each.second): each.p_value_episodes for each in compare_pairs(accuracies)}
    left = sorted(accuracies, key=lambda name: -float(accuracies[name].mean()))
    ranks: dict[str, float] = {}
    while left:
        best = left[0]
        tied = [name for name in left if p_values.get((best, name), p_values.get((name, best), 1.0)) >= SIGNIFICANT]
        ranks |= dict.fromkeys(tied, len(ranks) + (len(tied) + 1) / 2)
        left = [name for name in left if name not in tied]
    return ranks


def tabulate_suite(
    runs: Sequence[Run], figures: Sequence[Mapping[str, Any]], averages: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> Iterator[Table]:
    """Yield a table of the data sets for each number of shots, and of the means, or the accuracies of one, by shots.

    There are no means by shots where Ctrl-C left some shots without a data set that others have.
    """
    several = len({run.dataset for run in runs}) > 1
    whole = len(runs) == len(averages) * len({run.dataset for run in runs})
    for shot, means in averages.items():
        own = [(run, each) for run, each in zip(runs, figures, strict=True) if run.shot == shot]
        if several or len(runs) == 1:
            names = [name for _, each in own for name in each["methods"]]
            rows = [
                [name, *(_show(each, means, name, at) for at, (_, each) in enumerate(own)), *_show_mean(means, name)]
                for name in sorted(dict.fromkeys(names), key=lambda name: means.get(name, {"rank": torch.inf})["rank"])
            ]
            header = f"{shot}-shot " * bool(shot) + f"{head_accuracy(figures)} (rank)"
            yield [header, *(run.dataset for run, _ in own), "mean", "average rank"], rows
    if len(averages) > 1 and whole:
        methods = dict.fromkeys(name for each in figures for name in each["methods"])
        rows = [[name, *(_show_mean(means, name)[0] for means in averages.values())] for name in methods]
        yield ["mean " * several + head_accuracy(figures), *(f"{shot}-shot" for shot in averages)], rows


def _show(figures: Mapping[str, Any], means: Mapping[str, Mapping[str, Any]], name: str, at: int) -> str:
    """Return a method's accuracy on the data set number ``at``, with its rank."""
    own = figures["methods"].get(name)
    if own is None:
        return ""
    rank = f" ({means[name]['ranks'][at]:g})" if name in means and len(means) > 1 else ""
    return percent(own["accuracy"], *list_halves(own)) + rank


def _show_mean(means: Mapping[str, Mapping[str, Any]], name: str) -> tuple[str, str]:
    """Return a method's mean accuracy and its average rank."""
    own = means.get(name)
    return ("", "") if own is None else (percent(own["accuracy"], *list_halves(own)), f"{own['rank']:g}")


def tell_ranks(runs: Sequence[Run], figures: Sequence[Mapping[str, Any]]) -> str:
    """Return what means and ranks are, in a line for people; "" where there are none."""
    if len({run.dataset for run in runs}) < 2:
        return ""
    text = "Intervals of means speak of these same data sets."
    if len(figures[0]["methods"]) > 1:
        text += " As Meta-Dataset's, ranks speak of these same classes: methods share one where a paired t test over"
        text += " episodes tells them not apart from the best of them (p >= 0.05)."
    return f"\n{text}\n"
