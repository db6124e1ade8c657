"""The command ``python -m protonet.episodes compare``: compare the methods of several runs, by their JSON files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protonet._text import to_printable
from protonet.episodes.arguments import COMPARE_REMEDY, raise_unreadable_run
from protonet.episodes.evaluation.report import format_report, format_summary_tables, write_tables
from protonet.episodes.evaluation.statistics import (
    EvaluationSummary,
    MeasureMean,
    MethodSummary,
    compare_method_pairs,
    restore_class_mask,
)
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_known_name

#: Settings that determine the episodes of a data set. Runs can be compared if these settings are equal.
EPISODE_SETTING_NAMES = (
    *("way", "shot", "query", "unequal", "imbalance", "n_open_classes", "allow_small", "seed", "protocol"),
    *("unlabelled", "distractors", "hierarchy", "base_classes"),
)


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The results of an evaluation, read from a file that its option ``--json`` wrote."""

    run_path: Path  #: The file.
    settings: Mapping[str, object]  #: The values of the settings in ``EPISODE_SETTING_NAMES``.
    data_hash: str  #: A hash of the data set's rows, before encoder and normalisation.
    versions: Mapping[str, object]  #: The versions of packages by name.
    class_mask: Tensor  #: (episodes, classes) bool, whether each episode has each class.
    query_counts: Tensor  #: (episodes,) float64, the number of queries.
    correct_counts: dict[
        str, Tensor
    ]  #: For each method (episodes,) float64, the number of queries that it classifies correctly.


def run_compare(options: argparse.Namespace) -> None:
    """Run the command ``compare``: compare the runs that ``options`` name, print a table and write it to files."""
    runs = [read_run(Path(path)) for path in options.files]
    check_same_episodes(runs)
    summary, notes = compare_runs(runs, against=options.against)
    print("\n".join([*notes, "", format_report(summary)]), end="", flush=True)
    write_tables(options.outputs, format_summary_tables(summary))


def read_run(path: Path) -> StoredRun:
    """Read the results of an evaluation from a file that ``--json`` wrote.

    An InputError is raised for a file of something else, and for impossible numbers of correct queries.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        n = content["episodes"]
        queries = torch.tensor(content["queries"], dtype=torch.float64).expand(n)
        right = {name: torch.tensor(counts, dtype=torch.float64) for name, counts in content["right"].items()}
        run = StoredRun(
            run_path=path,
            settings={name: content["settings"].get(name) for name in EPISODE_SETTING_NAMES},
            data_hash=content["data"],
            versions=dict(content["versions"]),
            class_mask=restore_class_mask(content),
            query_counts=queries,
            correct_counts=right,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, KeyError) and "runs" in content:
            got = f"{path} of {', '.join(content['runs'])}"
            raise_input_error("FILE.json", "be of one evaluation", got, "Run them one by one.")
        raise_unreadable_run(path, error)
    for name, counts in right.items():
        if counts.shape != queries.shape or not bool(((counts >= 0) & (counts <= queries)).all()):
            got = f"others of {name} in {path}"
            raise_input_error("FILE.json", "hold right queries of every episode", got, COMPARE_REMEDY)
    if not right or not n:
        raise_input_error("FILE.json", "hold a method and an episode", f"none in {path}", COMPARE_REMEDY)
    return run


def check_same_episodes(runs: Sequence[StoredRun]) -> None:
    """Raise an InputError unless all runs are of the same episodes; the message names the first difference."""
    first = runs[0]
    for other in runs[1:]:
        for name in EPISODE_SETTING_NAMES:
            here, there = first.settings[name], other.settings[name]
            if here != there:
                got = f"{name} {to_printable(here)} in {first.run_path} and {to_printable(there)} in {other.run_path}"
                raise_input_error("FILE.json", "be of the same episodes", got, COMPARE_REMEDY)
        n = min(len(first.query_counts), len(other.query_counts))
        if first.data_hash != other.data_hash or not torch.equal(first.query_counts[:n], other.query_counts[:n]):
            got = f"others in {first.run_path} and {other.run_path}"
            raise_input_error("FILE.json", "be of the same data", got, COMPARE_REMEDY)


def compare_runs(runs: Sequence[StoredRun], *, against: str | None = None) -> tuple[EvaluationSummary, list[str]]:
    """Compare the methods of several runs on the episodes that all of them have.

    If runs have methods of the same name with different results, the paths of the files are added to the names.

    Args:
        runs: The results of the runs, of the same episodes.
        against: The method that all others are compared with; None to compare all pairs.

    Returns:
        The accuracies with intervals and paired tests; and lines of text to print above the table.

    Raises:
        InputError: No run has the method ``against``.
    """
    n = min(len(run.query_counts) for run in runs)
    accuracies: dict[str, Tensor] = {}
    for run in runs:
        for name, counts in run.correct_counts.items():
            alike = [
                torch.equal(counts[:n], other.correct_counts[name][:n])
                for other in runs
                if name in other.correct_counts
            ]
            shown = name if all(alike) else f"{name} ({run.run_path})"
            accuracies[shown] = counts[:n] / run.query_counts[:n]
    if against is not None:
        check_known_name("against", against, accuracies)
    settings = {**runs[0].settings, "against": against}
    class_mask = runs[0].class_mask[:n]
    methods = {name: MethodSummary(MeasureMean.from_values(values, class_mask)) for name, values in accuracies.items()}
    pairs = compare_method_pairs(accuracies, class_mask, against)
    notes = [f"{n:,} episodes of {class_mask.shape[1]} classes"]
    if any(len(run.query_counts) > n for run in runs):
        notes.append(f"The first {n:,} episodes are compared, which all files have.")
    for package, version in runs[0].versions.items():
        others = {str(run.versions.get(package)) for run in runs} - {str(version)}
        if others:
            notes.append(f"Versions of {package} differ: {version} and {', '.join(sorted(others))}.")
    return EvaluationSummary(settings, n, methods, pairs), notes
