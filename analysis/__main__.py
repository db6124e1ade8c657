"""Command line of the studies: ``python -m analysis`` lists them, ``python -m analysis NAME`` runs one."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start_command

    sys.exit(start_command("analysis.__main__"))

import argparse
import importlib
from collections.abc import Sequence

from protonet.ui.command_line import CommandParser, check_known_name, run_command

PROG = "analysis"
#: By name of a study: its module below ``analysis``, and its description in the list of studies.
STUDIES = {
    "contest": ("contest.trial", "pack the submission and evaluate it as the contest does"),
    "promises": ("promises.study", "what README and the guides promise, beside limits; fails if one does not hold"),
    "lines": ("lines", "lines of code, documentation and comments of each package"),
    "contest-draws": ("contest.draws", "the solver, baselines and the Bayes rule on new draws of the contest's data"),
    "robustness": ("real_data.robustness", "the solver, its parts and baselines on few-shot splits of real data"),
    "curves": (
        "real_data.curves",
        "README's figure: accuracy against labels per class, from the results of robustness",
    ),
    "raw-tables": ("real_data.raw_tables", "the commands on raw tables of public repositories, beside skrub"),
    "sealed": ("real_data.sealed", "unread tables, texts, pictures and series, measured once"),
    "mixed": ("real_data.mixed", "the solver, pipelines and boosters on few rows of mixed tables"),
    "parts": ("real_data.parts", "what each part of the search brings in accuracy, log-loss and time"),
    "prior": ("prior.study", "train the weighting prior on thousands of tasks, and evaluate it on others"),
    "incontext": ("incontext.study", "train the tabular transformer, and evaluate it on new tables"),
    "pretrained": ("pretrained.study", "texts, pictures and class names on your own data sets, beside baselines"),
    "prototypical": ("prototypical.study", "prototypical training by the command, beside a plain loop"),
    "optimizer-tune": ("optimizer_bench.tune", "tune AdamW on each workload: the bench's baselines"),
    "optimizer-bench": ("optimizer_bench.bench", "the steps that optimizers need to the loss of tuned AdamW"),
    "optimizer-time": ("optimizer_bench.step_time", "the time of an optimizer's step beside AdamW's"),
}


def print_studies(arguments: Sequence[str] | None) -> None:
    """Print the list of studies; raise an InputError if ``arguments`` has the name of an unknown study."""
    parser = CommandParser(PROG, "Studies of the library: each prints a table.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, STUDIES)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in STUDIES.items()]
    parser.epilog = "\n".join(["studies, each with --help:", *lines])
    parser.add_argument("study", nargs="?")
    name = parser.parse_args(arguments).study
    if name is not None:
        check_known_name("study", name, STUDIES)
    parser.print_help()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study that the first argument names; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if name not in STUDIES:
        return run_command(PROG, print_studies, arguments[:1])

    def run_named_study(remaining: Sequence[str] | None) -> None:
        from analysis.shared.runner import run_study  # noqa: PLC0415 - with torch, which takes a second

        run_study(f"{PROG} {name}", importlib.import_module(f"{PROG}.{STUDIES[name][0]}"), remaining)

    return run_command(f"{PROG} {name}", run_named_study, arguments[1:])
