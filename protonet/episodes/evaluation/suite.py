"""Several evaluations in one run: of several data sets, and with several shots; their means and the methods' ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from protonet._io import write_json
from protonet.episodes.evaluation.distributed import join_group
from protonet.episodes.evaluation.prepare import EvaluationPlan, prepare_data, prepare_tuning
from protonet.episodes.evaluation.report import TextTable, accuracy_heading, percent, write_tables
from protonet.episodes.evaluation.run import run_evaluation
from protonet.episodes.evaluation.statistics import INTERVAL_KINDS, Evaluation, Rate, compare_pairs
from protonet.episodes.features.sources import load_data
from protonet.errors import raise_input_error
from protonet.ui.text import format_table

SIGNIFICANT = 0.05  #: Methods share a rank whose paired t test has this p-value or a higher one.
SUITE_OUTPUTS = ("json", "latex", "markdown")  #: The files of a run of several evaluations.


@dataclass(frozen=True)
class Member:
    """One of the evaluations."""

    dataset: str  #: As it was given.
    shot: str  #: Likewise; "" where the protocol draws it.
    plan: EvaluationPlan  #: Its settings.
    outputs: Mapping[str, Path] = field(default_factory=dict)  #: The files of this one alone, see `run_evaluation`.

    @property
    def name(self) -> str:
        """The data set and the shots, which identify it."""
        return f"{self.dataset} {self.shot}-shot" if self.shot else self.dataset


#: Called with the members and their evaluations.
ReportCallback = Callable[[Sequence[Member], Sequence[Evaluation]], None]


@dataclass(frozen=True)
class Average:
    """A method's mean accuracy over several data sets, and its ranks there."""

    rate: Rate  #: Its intervals are over these same data sets, from those of each, which are independent.
    ranks: Sequence[float]  #: On each data set.

    @property
    def rank(self) -> float:
        """The mean rank."""
        return sum(self.ranks) / len(self.ranks)

    def describe(self) -> dict[str, object]:
        """Convert it to a form that JSON can write."""
        return {**self.rate.describe(), "ranks": list(self.ranks), "rank": self.rank}


def run_suite(members: Sequence[Member], report: ReportCallback, *, state: Path | None, resume: bool) -> None:
    """Evaluate all, print the report of each, and report all, or the finished ones after Ctrl-C.

    Each evaluation keeps its own state beside ``state``, with a number. The KeyboardInterrupt names those that are not
    finished.
    """
    states = [state and state.with_name(f"{state.stem}-{index + 1}{state.suffix}") for index in range(len(members))]
    is_main = os.environ.get("RANK", "0") == "0"
    for path in states if is_main and not resume else ():
        if path is not None and path.exists():
            remedy = "Continue its run with `resume`, or pass another path."
            raise_input_error("state", "be new files", f"{path}, which exists", remedy)
    for member in members:  # all are looked at before the first is evaluated
        if member.plan.rows.encoder is None:  # which would embed all rows
            loaded = load_data(member.plan.rows, member.plan.sampler)
            prepare_data(member.plan, *loaded)
            if member.plan.methods.tune:
                prepare_tuning(member.plan, *loaded)
    finished: list[Evaluation] = []
    try:
        with join_group():
            for member, path in zip(members, states, strict=True):
                evaluation = run_evaluation(member.plan, member.outputs, state=path, resume=resume)
                if evaluation is not None:  # in the first process
                    finished.append(evaluation)
                    print(flush=True)
    except KeyboardInterrupt as interrupt:
        if finished:
            print()
            report(members[: len(finished)], finished)
        missing = ", ".join(member.name for member in members[len(finished) :])
        raise KeyboardInterrupt(f"{str(interrupt) or 'interrupted'}; not finished: {missing}") from None
    if is_main:
        report(members, finished)


def report_suite(outputs: Mapping[str, Path], members: Sequence[Member], evaluations: Sequence[Evaluation]) -> None:
    """Print tables of evaluations, one or more, and write the outputs, by ``SUITE_OUTPUTS``."""
    of_shot: dict[str, list[Evaluation]] = {}
    for member, evaluation in zip(members, evaluations, strict=True):
        of_shot.setdefault(member.shot, []).append(evaluation)
    averages = {shot: average(group) for shot, group in of_shot.items()}
    tables = list(tabulate_suite(members, evaluations, averages))
    print("\n".join(format_table(*table) for table in tables), end="")
    print(explain_ranks(members, evaluations), end="", flush=True)
    write_tables(outputs, tables)
    if "json" in outputs:
        runs = {member.name: evaluation.describe() for member, evaluation in zip(members, evaluations, strict=True)}
        means = {shot: {name: mean.describe() for name, mean in methods.items()} for shot, methods in averages.items()}
        write_json(outputs["json"], {"runs": runs, "averages": means})
    for path in outputs.values():
        print(f"wrote {path}", file=sys.stderr)


def average(evaluations: Sequence[Evaluation]) -> dict[str, Average]:
    """Average each method that all evaluations have, one of each data set."""
    ranks = [rank_methods(evaluation.accuracies) for evaluation in evaluations]
    averages: dict[str, Average] = {}
    for name in evaluations[0].methods:
        if all(name in evaluation.methods for evaluation in evaluations):
            rates = [evaluation.methods[name].accuracy for evaluation in evaluations]
            mean = sum(rate.mean for rate in rates) / len(rates)
            squares = (sum(rate.half_width(over) ** 2 for rate in rates) for over in INTERVAL_KINDS)
            halves = (square**0.5 / len(rates) for square in squares)
            averages[name] = Average(Rate(mean, *halves), [ranked[name] for ranked in ranks])
    return averages


def rank_methods(accuracies: Mapping[str, Tensor]) -> dict[str, float]:
    """Rank methods by their mean accuracy (episodes,), from 1 on; those that share some ranks have their mean.

    Methods share a rank if they are not surely behind the best of the rest.

    Source: Triantafillou et al., "Meta-Dataset" (2020), sec. 4; as its code (Leaderboard.ipynb, ``compute_ranks``), but
        with a paired test, because all methods have the same episodes.
    """
    p_values = {(pair.first, pair.second): pair.p_value_episodes for pair in compare_pairs(accuracies)}
    left = sorted(accuracies, key=lambda name: -float(accuracies[name].mean()))
    ranks: dict[str, float] = {}
    while left:
        best = left[0]
        tied = [name for name in left if p_values.get((best, name), p_values.get((name, best), 1.0)) >= SIGNIFICANT]
        ranks |= dict.fromkeys(tied, len(ranks) + (len(tied) + 1) / 2)
        left = [name for name in left if name not in tied]
    return ranks


def tabulate_suite(
    members: Sequence[Member], evaluations: Sequence[Evaluation], averages: Mapping[str, Mapping[str, Average]]
) -> Iterator[TextTable]:
    """Yield a table of the data sets for each number of shots, and of the means, or the accuracies of one, by shots.

    There are no means by shots where Ctrl-C left some shots without a data set that others have.
    """
    datasets = {member.dataset for member in members}
    is_complete = len(members) == len(averages) * len(datasets)
    head = accuracy_heading(m.accuracy for evaluation in evaluations for m in evaluation.methods.values())
    for shot, means in averages.items():
        columns = {
            member.dataset: evaluation.methods
            for member, evaluation in zip(members, evaluations, strict=True)
            if member.shot == shot
        }
        if len(datasets) > 1 or len(members) == 1:
            rows = []
            names = dict.fromkeys(name for methods in columns.values() for name in methods)
            for name in sorted(names, key=lambda name: means[name].rank if name in means else torch.inf):
                cells = [percent(methods[name].accuracy) if name in methods else "" for methods in columns.values()]
                if name in means and len(means) > 1:
                    cells = [f"{cell} ({rank:g})" for cell, rank in zip(cells, means[name].ranks, strict=True)]
                average = [percent(means[name].rate), f"{means[name].rank:g}"] if name in means else ["", ""]
                rows.append([name, *cells, *average])
            header = f"{shot}-shot " * bool(shot) + f"{head} (rank)"
            yield [header, *columns, "mean", "average rank"], rows
    if len(averages) > 1 and is_complete:
        names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.methods)
        columns_of = [
            [percent(means[name].rate) if name in means else "" for name in names] for means in averages.values()
        ]
        rows = [list(row) for row in zip(names, *columns_of, strict=True)]
        yield ["mean " * (len(datasets) > 1) + head, *(f"{shot}-shot" for shot in averages)], rows


def explain_ranks(members: Sequence[Member], evaluations: Sequence[Evaluation]) -> str:
    """Explain what means and ranks refer to, in one line; "" where there are none."""
    if len({member.dataset for member in members}) < 2:
        return ""
    text = "Intervals of means speak of these same data sets."
    if len(evaluations[0].methods) > 1:
        text += " As Meta-Dataset's, ranks speak of these same classes: methods share one where a paired t test over"
        text += " episodes finds no difference to the best of them (p >= 0.05)."
    return f"\n{text}\n"
