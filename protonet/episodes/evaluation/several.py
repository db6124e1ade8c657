"""The command that evaluates methods, on one data set or several with ranks of methods; and the command ``compare``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from protonet._io import write_json
from protonet._text import to_printable
from protonet.episodes.evaluation.evaluate import join_process_group
from protonet.episodes.evaluation.prepare import (
    EvaluationPlan,
    load_data_sources,
    make_plan,
    prepare_evaluation,
    prepare_tuning,
)
from protonet.episodes.evaluation.report import (
    TextTable,
    format_accuracy_heading,
    format_mean,
    format_report,
    format_summary_tables,
    write_tables,
)
from protonet.episodes.evaluation.run import run_evaluation
from protonet.episodes.evaluation.statistics import (
    INTERVAL_KINDS,
    Evaluation,
    EvaluationSummary,
    MeasureMean,
    MethodSummary,
    compare_method_pairs,
)
from protonet.episodes.options import COMPARE_FILE_REMEDY, CompareOptions, raise_unreadable_run
from protonet.episodes.settings import EvaluationSettings
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_known_name
from protonet.ui.text import format_table

#: Settings that determine the episodes of a data set. Runs can be compared if these settings are equal.
EPISODE_SETTING_NAMES = (
    *("way", "shot", "query", "unequal", "imbalance", "n_open_classes", "allow_small", "seed", "protocol"),
    *("unlabelled", "distractors", "hierarchy", "base_classes", "n_effective_classes", "multinomial"),
)


#: A function that is called with the plans of several evaluations and the results of each, in the same order.
ReportCallback = Callable[[Sequence[EvaluationPlan], Sequence[Evaluation]], None]


@dataclass(frozen=True)
class AverageOverDatasets:
    """A method's mean accuracy over several data sets, and its rank on each of them."""

    mean_accuracy: MeasureMean
    """The mean accuracy. Its intervals apply to the same data sets, and take their errors as independent."""
    ranks: Sequence[float]  #: The rank of the method on each data set, 1 being the best.

    @property
    def mean_rank(self) -> float:
        """The mean of the ranks over the data sets."""
        return sum(self.ranks) / len(self.ranks)

    def to_dict(self) -> dict[str, object]:
        """Convert the mean accuracy and the ranks to a dictionary for JSON."""
        return {**self.mean_accuracy.to_dict(), "ranks": list(self.ranks), "rank": self.mean_rank}


def run_evaluations(
    evaluations: Sequence[EvaluationSettings], outputs: Mapping[str, Path], *, state: Path | None, resume: bool
) -> None:
    """Run evaluations that differ in the data set or the number of shots, and write reports to ``outputs`` by option.

    All processes read the state from ``state``; in the first one, it is among the ``outputs`` as well.
    """
    plans = [make_plan(settings) for settings in evaluations]
    new_state = outputs.get("state")
    outputs = {name: path for name, path in outputs.items() if name != "state"}
    if len(plans) == 1:
        if new_state is not None and new_state.exists() and not resume:
            remedy = "Continue its run with `resume`, or pass another path."
            raise_input_error("state", "be a new file", f"{state}, which exists", remedy)
        run_evaluation(plans[0], outputs, state=state, resume=resume)
        return
    suite_formats = ("json", "latex", "markdown")
    for name in [name for name in outputs if name not in suite_formats]:
        remedy = f"Leave it out, or run them one by one; {', '.join(f'`{kind}`' for kind in suite_formats)} are of all."
        raise_input_error(name, "be of one data set and one `shot`", f"{len(plans)} evaluations", remedy)
    run_suite(plans, partial(report_suite, outputs), state=state, resume=resume)


def run_suite(
    plans: Sequence[EvaluationPlan],
    report: ReportCallback,
    *,
    state: Path | None,
    resume: bool,
    output_folder: Path | None = None,
) -> None:
    """Run evaluations one after another, print the report of each, and call ``report`` with all results.

    All plans are checked first. Each state file has the name ``state`` and a number. The results of each evaluation are
    also written to a JSON file in ``output_folder``, if there is one. ``report`` is called in the first process, after
    the last evaluation or after Ctrl-C, with the finished ones.
    """
    states = [state and state.with_name(f"{state.stem}-{index + 1}{state.suffix}") for index in range(len(plans))]
    is_main = os.environ.get("RANK", "0") == "0"
    for path in states if is_main and not resume else ():
        if path is not None and path.exists():
            remedy = "Continue its run with `resume`, or pass another path."
            raise_input_error("state", "be new files", f"{path}, which exists", remedy)
    for plan in plans:  # an error in any plan comes before the work
        if plan.settings.encoder is None:  # an encoder would have to embed all rows
            sources = load_data_sources(plan)
            prepare_evaluation(plan, sources)
            if plan.tuning_grids:
                prepare_tuning(plan, sources)
    finished: list[Evaluation] = []
    try:
        with join_process_group():
            for plan, path in zip(plans, states, strict=True):
                outputs = {"json": output_folder / f"{plan.sampler.shot_title}-shot.json"} if output_folder else {}
                evaluation = run_evaluation(plan, outputs, state=path, resume=resume)
                if evaluation is not None:  # in the first process
                    finished.append(evaluation)
                    print(flush=True)
    except KeyboardInterrupt as interrupt:
        if finished:
            print()
            report(plans[: len(finished)], finished)
        missing = ", ".join(plan.name for plan in plans[len(finished) :])
        raise KeyboardInterrupt(f"{str(interrupt) or 'interrupted'}; not finished: {missing}") from None
    if is_main:
        report(plans, finished)


def report_suite(paths: Mapping[str, Path], plans: Sequence[EvaluationPlan], evaluations: Sequence[Evaluation]) -> None:
    """Print the results of several evaluations as tables, and write them to files; ``paths`` maps formats to paths."""
    by_shot: dict[str, list[Evaluation]] = {}
    for plan, evaluation in zip(plans, evaluations, strict=True):
        by_shot.setdefault(plan.sampler.shot_title, []).append(evaluation)
    averages = {shot: average_methods(group) for shot, group in by_shot.items()}
    tables = list(format_suite_tables(plans, evaluations, averages))
    print("\n".join(format_table(*table) for table in tables), end="")
    print(explain_ranks(plans, evaluations), end="", flush=True)
    write_tables(paths, tables)
    if "json" in paths:
        runs = {plan.name: evaluation.to_dict() for plan, evaluation in zip(plans, evaluations, strict=True)}
        means = {shot: {name: mean.to_dict() for name, mean in methods.items()} for shot, methods in averages.items()}
        write_json(paths["json"], {"runs": runs, "averages": means})
    for path in paths.values():
        print(f"wrote {path}", file=sys.stderr)


def average_methods(evaluations: Sequence[Evaluation]) -> dict[str, AverageOverDatasets]:
    """Average the accuracy and the rank of each method over evaluations of several data sets, by the method's name.

    Methods that are missing in one of the evaluations are left out.
    """
    ranks = [rank_methods(evaluation.accuracies) for evaluation in evaluations]
    averages: dict[str, AverageOverDatasets] = {}
    for name in evaluations[0].methods:
        if all(name in evaluation.methods for evaluation in evaluations):
            rates = [evaluation.methods[name].accuracy for evaluation in evaluations]
            mean = sum(rate.mean for rate in rates) / len(rates)
            squares = (sum(rate.get_half_width(kind) ** 2 for rate in rates) for kind in INTERVAL_KINDS)
            halves = (square**0.5 / len(rates) for square in squares)
            averages[name] = AverageOverDatasets(MeasureMean(mean, *halves), [ranked[name] for ranked in ranks])
    return averages


def rank_methods(accuracies: Mapping[str, Tensor]) -> dict[str, float]:
    """Rank methods on one data set, 1 being the best, from the accuracies (episodes,) of each on the same episodes.

    The best method shares its rank with all methods that a paired t test finds not significantly less accurate; then
    the next methods are ranked likewise. Methods that share ranks get the mean of these ranks. Returns ranks by name.

    Source: Triantafillou et al., "Meta-Dataset" (2020), sec. 4; like its code (compute_ranks in Leaderboard.ipynb),
        but with a paired test, because all methods have the same episodes.
    """
    p_values = {(pair.first, pair.second): pair.p_value_episodes for pair in compare_method_pairs(accuracies)}
    left = sorted(accuracies, key=lambda name: -float(accuracies[name].mean()))
    ranks: dict[str, float] = {}
    # Two methods share a rank if the p-value of their paired t test is at least this.
    significance_level = 0.05
    while left:
        best = left[0]
        chances = {name: p_values.get((best, name), p_values.get((name, best), 1.0)) for name in left}
        tied = [name for name, chance in chances.items() if chance >= significance_level]
        ranks |= dict.fromkeys(tied, len(ranks) + (len(tied) + 1) / 2)
        left = [name for name in left if name not in tied]
    return ranks


def format_suite_tables(
    plans: Sequence[EvaluationPlan],
    evaluations: Sequence[Evaluation],
    averages: Mapping[str, Mapping[str, AverageOverDatasets]],
) -> Iterator[TextTable]:
    """Yield the tables of a suite: for each number of shots a table with a column per data set, then a table of means.

    The table of means is left out if Ctrl-C stopped the suite before all shots of a data set were evaluated.
    """
    datasets = {plan.dataset_name for plan in plans}
    is_complete = len(plans) == len(averages) * len(datasets)
    head = format_accuracy_heading(m.accuracy for evaluation in evaluations for m in evaluation.methods.values())
    methods = {name: method for evaluation in evaluations for name, method in evaluation.methods.items()}
    shown = {name: method.mark_name(name) for name, method in methods.items()}
    for shot, means in averages.items():
        columns = {
            plan.dataset_name: evaluation.methods
            for plan, evaluation in zip(plans, evaluations, strict=True)
            if plan.sampler.shot_title == shot
        }
        if len(datasets) > 1 or len(plans) == 1:
            rows = []
            names = dict.fromkeys(name for methods in columns.values() for name in methods)
            for name in sorted(names, key=lambda name: means[name].mean_rank if name in means else torch.inf):
                cells = [format_mean(methods[name].accuracy) if name in methods else "" for methods in columns.values()]
                if name in means and len(means) > 1:
                    cells = [f"{cell} ({rank:g})" for cell, rank in zip(cells, means[name].ranks, strict=True)]
                average = ["", ""]
                if name in means:
                    average = [format_mean(means[name].mean_accuracy), f"{means[name].mean_rank:g}"]
                rows.append([shown[name], *cells, *average])
            header = f"{shot}-shot " * bool(shot) + f"{head} (rank)"
            yield [header, *columns, "mean", "average rank"], rows
    if len(averages) > 1 and is_complete:
        names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.methods)
        columns_of = [
            [format_mean(means[name].mean_accuracy) if name in means else "" for name in names]
            for means in averages.values()
        ]
        rows = [[shown[name], *cells] for name, *cells in zip(names, *columns_of, strict=True)]
        yield ["mean " * (len(datasets) > 1) + head, *(f"{shot}-shot" for shot in averages)], rows


def explain_ranks(plans: Sequence[EvaluationPlan], evaluations: Sequence[Evaluation]) -> str:
    """Return a text that explains the means and ranks over data sets in the tables; "" if there is one data set."""
    if len({plan.dataset_name for plan in plans}) < 2:
        return ""
    text = "Intervals of means speak of these same data sets."
    if len(evaluations[0].methods) > 1:
        text += " As Meta-Dataset's, ranks speak of these same classes: methods share one where a paired t test over"
        text += " episodes finds no difference to the best of them (p >= 0.05)."
    return f"\n{text}\n"


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The results of an evaluation, read from a file that its option ``--json`` wrote."""

    path: Path  #: The file.
    settings: Mapping[str, object]  #: The values of the settings in ``EPISODE_SETTING_NAMES``.
    data_hash: str  #: A hash of the data set's rows, before encoder and normalisation.
    versions: Mapping[str, object]  #: The versions of packages by name.
    class_mask: Tensor  #: (episodes, classes) bool, whether each episode has each class.
    query_counts: Tensor  #: (episodes,) float64, the number of queries.
    correct_counts: dict[str, Tensor]
    """For each method (episodes,) float64, the number of queries that it classifies correctly."""
    method_settings: Mapping[str, str | None]  #: For each method how it takes queries, see `MethodSummary`.


def run_compare(options: CompareOptions) -> None:
    """Run the command ``compare``: compare evaluations from their JSON files, print a table and write it to files."""
    runs = list(map(read_run, options.files))
    check_same_episodes(runs)
    summary, notes = compare_runs(runs, against=options.against)
    print("\n".join([*notes, "", format_report(summary)]), end="", flush=True)
    outputs = {"latex": options.latex, "markdown": options.markdown}
    write_tables({kind: path for kind, path in outputs.items() if path}, format_summary_tables(summary))


def read_run(path: Path) -> StoredRun:
    """Read the results of an evaluation from a file that ``--json`` wrote; raise an InputError for other files."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        n = content["episodes"]
        queries = torch.tensor(content["queries"], dtype=torch.float64).expand(n)
        right = {name: torch.tensor(counts, dtype=torch.float64) for name, counts in content["right"].items()}
        ways = torch.tensor(content["ways"]).expand(n)
        class_mask = torch.zeros(n, int(content["classes"]), dtype=torch.bool)
        classes = torch.tensor(content["class_indices"]).view(int(ways.sum()))
        class_mask[torch.arange(n).repeat_interleave(ways), classes] = True
        run = StoredRun(
            path=path,
            settings={name: content["settings"].get(name) for name in EPISODE_SETTING_NAMES},
            data_hash=content["data"],
            versions=dict(content["versions"]),
            class_mask=class_mask,
            query_counts=queries,
            correct_counts=right,
            method_settings={name: method.get("setting") for name, method in content["methods"].items()},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, KeyError) and "runs" in content:
            got = f"{path} of {', '.join(content['runs'])}"
            raise_input_error("files", "be of one evaluation", got, "Run them one by one.")
        raise_unreadable_run(path, error)
    for name, counts in right.items():
        if counts.shape != queries.shape or not bool(((counts >= 0) & (counts <= queries)).all()):
            got = f"others of {name} in {path}"
            raise_input_error("files", "hold right queries of every episode", got, COMPARE_FILE_REMEDY)
    if not right or not n:
        raise_input_error("files", "hold a method and an episode", f"none in {path}", COMPARE_FILE_REMEDY)
    return run


def check_same_episodes(runs: Sequence[StoredRun]) -> None:
    """Raise an InputError unless all runs evaluated the same episodes; the message names the first difference."""
    first = runs[0]
    for other in runs[1:]:
        for name in EPISODE_SETTING_NAMES:
            here, there = first.settings[name], other.settings[name]
            if here != there:
                got = f"{name} {to_printable(here)} in {first.path} and {to_printable(there)} in {other.path}"
                raise_input_error("files", "be of the same episodes", got, COMPARE_FILE_REMEDY)
        n = min(len(first.query_counts), len(other.query_counts))
        if first.data_hash != other.data_hash or not torch.equal(first.query_counts[:n], other.query_counts[:n]):
            got = f"others in {first.path} and {other.path}"
            raise_input_error("files", "be of the same data", got, COMPARE_FILE_REMEDY)


def compare_runs(runs: Sequence[StoredRun], *, against: str | None = None) -> tuple[EvaluationSummary, list[str]]:
    """Compare the methods of several runs on the episodes that all runs evaluated; also return notes for the report.

    If runs have methods of the same name with different results, the paths of the files are added to the names.
    """
    n = min(len(run.query_counts) for run in runs)
    accuracies: dict[str, Tensor] = {}
    taken: dict[str, str | None] = {}
    for run in runs:
        for name, counts in run.correct_counts.items():
            counted = [other.correct_counts[name][:n] for other in runs if name in other.correct_counts]
            alike = [torch.equal(counts[:n], other) for other in counted]
            shown = name if all(alike) else f"{name} ({run.path})"
            accuracies[shown] = counts[:n] / run.query_counts[:n]
            taken[shown] = run.method_settings.get(name)
    if against is not None:
        check_known_name("against", against, accuracies)
    settings = {**runs[0].settings, "against": against}
    class_mask = runs[0].class_mask[:n]
    methods = {
        name: MethodSummary(MeasureMean.from_values(values, class_mask), setting=taken[name])
        for name, values in accuracies.items()
    }
    pairs = compare_method_pairs(accuracies, class_mask, against)
    notes = [f"{n:,} episodes of {class_mask.shape[1]} classes"]
    if any(len(run.query_counts) > n for run in runs):
        notes.append(f"The first {n:,} episodes are compared, which all files have.")
    for package, version in runs[0].versions.items():
        others = {str(run.versions.get(package)) for run in runs} - {str(version)}
        if others:
            notes.append(f"Versions of {package} differ: {version} and {', '.join(sorted(others))}.")
    return EvaluationSummary(settings, n, methods, pairs), notes
