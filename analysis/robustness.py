"""No regret on real data: ``python -m analysis.robustness``.

The prototype network and the classifiers that people reach for, on few-shot splits of real data, with regret
against the best of them in hindsight.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.robustness"))

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch

from analysis.classics import CLASSICS
from analysis.options import parse_names, parse_wholes, write_results
from analysis.realdata import DATASETS
from analysis.robustness_runs import METHODS, OURS, list_runs, measure
from analysis.robustness_table import plot, summarise, tabulate
from protonet._checks import fail
from protonet.commands.common import Parser, check_outputs, parse_whole, run_command

PROG = "analysis.robustness"
STATE = Path("build/robustness.jsonl")
SHOTS = "1,2,5,10,20"
FORMATS = (".png", ".pdf", ".svg")


def _run(arguments: Sequence[str] | None) -> None:
    """Check the options, measure what is missing, and print the tables."""
    parser = Parser(PROG, "Compare the prototype network with the classics on few-shot splits of real data.")
    add = parser.add_argument
    add("--datasets", default=",".join(DATASETS), help=f"of {', '.join(DATASETS)} (default: all)")
    add("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)} (default: all)")
    add("--shots", default=SHOTS, help=f"labelled samples a class (default: {SHOTS})")
    add("--splits", default="5", metavar="N", help="splits of each data set (default: 5)")
    add("--state", default=str(STATE), metavar="PATH", help=f"journal of finished runs (default: {STATE})")
    add("--json", metavar="PATH", help="write the results there")
    add("--markdown", metavar="PATH", help="write the tables there, too")
    add("--plot", metavar="PATH", help="draw ours minus the best classic there (.png, .pdf or .svg)")
    options = parser.parse_args(arguments)
    datasets = parse_names(PROG, "--datasets", options.datasets, DATASETS)
    methods = parse_names(PROG, "--methods", options.methods, METHODS)
    shots = parse_wholes(PROG, "--shots", options.shots, low=1)
    n_splits = parse_whole(PROG, "--splits", options.splits, low=1)
    ours = [method for method in methods if method in OURS]
    classics = [method for method in methods if method in CLASSICS]
    if {*classics} - {"cosine"} and find_spec("sklearn") is None:
        remedy = 'Run pip install "protonet[analysis]", or pass --methods ours,cosine.'
        fail(PROG, "--methods", "have scikit-learn for the classics", "none installed", remedy)
    if options.plot is not None:
        _check_plot(options.plot, ours, classics)
    outputs = check_outputs(PROG, options, ("state", "json", "markdown", "plot"))
    runs = list(list_runs(datasets, shots, n_splits, methods))
    if not runs:
        got = f"none in {options.datasets} at {options.shots} shots"
        fail(PROG, "--datasets", "have rows enough for a split", got, "Pass fewer shots or other data sets.")
    torch.set_num_threads(1)  # the matrices are small: a second thread costs more than it brings
    with _one_thread():
        results = measure(runs, outputs["state"])
    rows = summarise(results)
    if "plot" in outputs:
        plot(rows, ours[0], outputs["plot"])
    write_results(outputs, rows, tabulate(rows))


def _check_plot(path: str, ours: Sequence[str], classics: Sequence[str]) -> None:
    """Raise a ValueError unless the figure can be drawn."""
    if Path(path).suffix.lower() not in FORMATS:
        fail(PROG, "--plot", f"end in {', '.join(FORMATS)}", repr(path), "Rename the file.")
    if not ours or not classics:
        fail(PROG, "--plot", "come with ours and a classic", f"{[*ours, *classics]}", "Add to --methods.")
    if find_spec("matplotlib") is None:
        fail(PROG, "--plot", "have matplotlib", "none installed", 'Run pip install "protonet[analysis]".')


def _one_thread() -> AbstractContextManager[object]:
    """Return a context in which linear algebra uses one thread, so that seconds can be compared."""
    if find_spec("threadpoolctl") is None:  # it comes with scikit-learn
        return nullcontext()
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415 - optional

    limits: AbstractContextManager[object] = threadpool_limits(1)
    return limits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(PROG, _run, arguments)
