"""A study: many evaluations from one TOML file, with a table of all of them.

Its keys are the options of ``python -m protonet.episodes``, and ``output``, a folder. An option with a list of values
is swept: there is a run for each value, or for each combination of several such options. ``method`` and ``tune`` take
lists anyway. A study that was stopped goes on where it was.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from protonet._writing import write_text
from protonet.episodes.evaluation.distributed import join_group
from protonet.episodes.evaluation.report import format_latex, head_accuracy, percent
from protonet.episodes.evaluation.statistics import Rate
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_writable_folder
from protonet.ui.text import format_table

PROG = "protonet.episodes study"
LISTS = ("method", "tune")  #: Options that take several values in one run.


class Run(NamedTuple):
    """A run of a study."""

    name: str  #: What tells it from the others, such as ``way=5 shot=1``.
    path: Path  #: Of its JSON file; its state lies beside it.
    arguments: list[str]  #: Of the command.


def run_study(
    settings: dict[str, Any],
    more: Sequence[str],
    run: Callable[[list[str]], None],
    output: str | None = None,
    *,
    reports: bool = False,
) -> None:
    """Run a study, print and write a table of the accuracies of all of its runs.

    Args:
        settings: Of its file, by `protonet.episodes.arguments.read_study`.
        more: Arguments of the command that are set for all runs, whatever the file says.
        run: Evaluates as arguments of the command say.
        output: The folder of the results; None for the file's.
        reports: Write a report for the browser beside each JSON file.

    Raises:
        MissingPackageError: As of the command.
        InputError: The same; or the folder cannot be written.
    """
    kept = settings.pop("output")
    folder = check_writable_folder("output", output or kept)
    runs = plan_runs(settings, folder)
    with join_group():
        for each in runs:
            if _is_main():
                print(f"\n{each.name}\n", flush=True)
            page = ["--report", str(each.path.with_suffix(".html"))] if reports else []
            run([*each.arguments, *page, *more])
    if _is_main():
        header, rows = tabulate_runs(read_runs(runs))
        for name, form in (("table.md", format_table), ("table.tex", format_latex)):
            write_text(folder / name, form(header, rows))
        print(f"\n{format_table(header, rows)}", end="")


def read_runs(runs: Sequence[Run]) -> dict[str, dict[str, Rate]]:
    """Return the accuracies that ``--json`` wrote of runs; of one of several evaluations, those of each."""
    accuracies: dict[str, dict[str, Rate]] = {}
    for run in runs:
        written = json.loads(run.path.read_text(encoding="utf-8"))
        several = {f"{run.name} {name}": one for name, one in written.get("runs", {}).items()}
        for name, one in (several or {run.name: written}).items():
            accuracies[name] = {method: Rate.read(rate) for method, rate in one["methods"].items()}
    return accuracies


def _is_main() -> bool:
    """Tell whether this process prints and writes, of those that torchrun starts."""
    return os.environ.get("RANK", "0") == "0"


def plan_runs(settings: Mapping[str, Any], folder: Path) -> list[Run]:
    """Return the runs of a study: all combinations of the values of options with several.

    Args:
        settings: Values by option, checked, without ``output``.
        folder: Where results lie.

    Raises:
        InputError: Two runs have one name.
    """
    swept = {name: value for name, value in settings.items() if isinstance(value, list) and name not in LISTS}
    runs: dict[str, Run] = {}
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        name = " ".join(f"{option}={value}" for option, value in chosen.items()) or "study"
        place = re.sub(r"[^\w.=-]+", "_", name)
        if place in runs:
            raise_input_error("STUDY.toml", "sweep values that differ in letters and digits", name, "Leave one out.")
        arguments = ["--json", str(folder / f"{place}.json"), "--state", str(folder / f"{place}.npz"), "--resume"]
        for option, value in {**settings, **chosen}.items():
            if isinstance(value, list):
                arguments += [f"--{option}", *map(str, value)]
            elif value is True:
                arguments.append(f"--{option}")
            elif value is not False:
                arguments.append(f"--{option}={value}")
        runs[place] = Run(name, folder / f"{place}.json", arguments)
    return list(runs.values())


def tabulate_runs(accuracies: Mapping[str, Mapping[str, Rate]]) -> tuple[list[str], list[list[str]]]:
    """Return a table of accuracies in percent: a method a row, a run a column, empty where it was not evaluated.

    Args:
        accuracies: Of the methods of each run, by its name.
    """
    runs = list(accuracies.values())
    methods = dict.fromkeys(name for run in runs for name in run)
    rows = [[name, *(percent(run[name]) if name in run else "" for run in runs)] for name in methods]
    return [head_accuracy(rate for run in runs for rate in run.values()), *accuracies], rows
