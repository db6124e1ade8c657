"""The runner of all studies: it parses options, checks output paths first, executes runs, and writes results.

A study is a module with a docstring, `add_options(parser)` and `run(options)`, which returns a `StudyReport`. Each
finished run is appended to a journal as a JSON line with a hash of the code, from which an interrupted study resumes.
Results of other code are ignored.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import json
import multiprocessing
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from protonet.errors import install_command, installed_version, raise_input_error
from protonet.ui.command_line import CommandParser, check_output_options, parse_integer
from solution.pack import ROOT

BUILD_FOLDER = Path("build")
DatasetT = TypeVar("DatasetT")
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
#: Options that are left out of the command below a table, because their values depend on the machine.
MACHINE_DEPENDENT_OPTIONS = ("baselines", "jobs", "python")
FOLDER_OPTION = "folder"  #: Name of the folder argument, whose path depends on the machine.
HASHED_PACKAGES = ("numpy", "scipy", "scikit-learn", "torch")  #: Packages whose versions affect results.
RunT = TypeVar("RunT")


class StudyReport(NamedTuple):
    """The result of a study: the rows for JSON, and the Markdown table."""

    rows: object  #: Content of ``--json``.
    table: str  #: Markdown, printed and written by ``--markdown`` with the command that made it.
    failures: Sequence[str] = ()  #: Lines for stderr; the exit status is 1 if there are any.


class StudyParser(CommandParser):
    """The argument parser of a study, which checks values and output paths, and adds ``--json`` and ``--markdown``."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self._checks: dict[str, Callable[[str, str], Any]] = {}
        self._outputs: list[str] = []
        self.add_output_option("--json", "write the results there")
        self.add_output_option("--markdown", "write the table there, too")

    def add_option(self, option: str, default: str | None, help_text: str, check: Callable[[str, str], Any]) -> None:
        """Add an option; ``check(option, text)`` converts the text of the user, or the default, to a value."""
        metavar = "N" if default and default.isdecimal() else None
        help_text += "" if default is None else f" (default: {default})"
        self.add_argument(option, default=default, help=help_text, metavar=metavar)
        self._checks[option] = check

    def add_int_option(self, option: str, default: int, help_text: str, *, low: int = 1) -> None:
        """Add an option whose value is an integer >= ``low``."""
        self.add_option(option, str(default), help_text, partial(parse_integer, low=low))

    def add_names_option(self, option: str, known: Collection[str], default: str | None = None) -> None:
        """Add an option whose value is a list of names of ``known``; None, the default, stands for all of them."""
        text = f"of {', '.join(known)}{'' if default else ' (default: all)'}"
        self.add_option(option, default, text, partial(parse_names, known=known))

    def add_output_option(self, option: str, help_text: str, default: Path | None = None) -> None:
        """Add an option for the path of an output file, which is checked to be writable before the work begins."""
        help_text += "" if default is None else f" (default: {default})"
        self.add_argument(option, default=default and str(default), metavar="PATH", help=help_text)
        self._outputs.append(option.removeprefix("--"))

    def add_plot_option(self, plotted: str) -> None:
        """Add the option ``--plot``, the path of a figure; the help names what is ``plotted``."""
        self.add_output_option("--plot", f"draw {plotted} there ({', '.join(PLOT_SUFFIXES)})")
        self._checks["--plot"] = _parse_plot_path

    def add_state_options(self, name: str | None = None) -> None:
        """Add ``--state``, the journal from which an interrupted study resumes, and ``--fresh``, which deletes it."""
        name = name or self.prog.split()[-1]
        self.add_output_option("--state", "journal of finished runs", BUILD_FOLDER / f"{name}.jsonl")
        self.add_argument("--fresh", action="store_true", help="forget the finished runs")

    def parse_study(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse and check options; ``command_line`` of the result is the command without machine-dependent options."""
        options = self.parse_args(arguments)
        command_line = f"python -m {self.prog}"
        for name, value in vars(options).items():
            if name == FOLDER_OPTION:
                command_line += f" {name.upper()}"
            elif value is True or (
                value not in {None, False} and name not in (*self._outputs, *MACHINE_DEPENDENT_OPTIONS)
            ):
                command_line += f" --{name.replace('_', '-')}{'' if value is True else f' {shlex.quote(str(value))}'}"
        for option, check in self._checks.items():
            name = option.removeprefix("--").replace("-", "_")
            if getattr(options, name) is not None:
                setattr(options, name, check(option, getattr(options, name)))
        vars(options).update(check_output_options(options, self._outputs), command_line=command_line)
        if vars(options).get("fresh"):
            options.state.unlink(missing_ok=True)
        return options


def run_study(prog: str, study: ModuleType, arguments: Sequence[str] | None) -> None:
    """Parse the options of a study, run it, and print and write its report."""
    parser = StudyParser(prog, inspect.getdoc(study) or "")
    study.add_options(parser)
    options = parser.parse_study(arguments)
    report = study.run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(report.rows, indent=1) + "\n", encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(f"{report.table}\nMade by `{options.command_line}`.\n", encoding="utf-8")
    print(report.table, end="")
    if report.failures:
        print(*report.failures, sep="\n", file=sys.stderr)
        sys.exit(1)


def load_installed_sets(names: Iterable[str], load: Callable[[str], DatasetT]) -> Iterator[tuple[str, DatasetT]]:
    """Load data sets, and yield each with its name; skip those whose package is missing, with a line on stderr."""
    for name in names:
        try:
            loaded = load(name)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            yield name, loaded


def parse_names(option: str, text: str, known: Collection[str]) -> list[str]:
    """Parse a comma-separated list of names without repetition; raise an InputError for an unknown name."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise_input_error(option, f"be of {', '.join(known)}", repr(name), "Pick listed ones, with commas.")
    return names


def parse_integers(option: str, text: str, *, low: int) -> list[int]:
    """Parse a comma-separated list of different integers >= ``low``; raise an InputError for invalid values."""
    return list(dict.fromkeys(parse_integer(option, item, low=low) for item in text.split(",")))


def _parse_plot_path(option: str, path: str) -> str:
    """Return the path of a figure as it is; raise an InputError if matplotlib cannot write files with its suffix."""
    if Path(path).suffix.lower() not in PLOT_SUFFIXES:
        raise_input_error(option, f"end in {', '.join(PLOT_SUFFIXES)}", repr(path), "Rename the file.")
    if find_spec("matplotlib") is None:
        raise_input_error(option, "have matplotlib", "none installed", f"Run {install_command('analysis')}.")
    return path


def run_all(
    runs: Sequence[RunT],
    execute: Callable[[RunT], Any],
    journal: Path,
    hash_code: Callable[[RunT], object] | None = None,
    *,
    unit: str = "run",
    jobs: int = 1,
    quiet: bool = False,
) -> dict[RunT, Any]:
    """Execute the runs that the journal lacks, on one thread, with a progress bar on stderr; return all results.

    Results are in the order of the runs and decoded from JSON (lists in place of tuples).

    Args:
        runs: Hashable tuples; the JSON of a run identifies it in the journal.
        execute: Maps a run to a result that JSON can hold. With several jobs, a top-level function.
        journal: Path of the JSON-lines file with the results of finished runs, which is created or appended to.
        hash_code: Maps a run to a hash of the code that its result depends on; by default library and studies.
        unit: Word for one run in the progress bar.
        jobs: Number of processes, of one thread each.
        quiet: Whether to hide the progress bar, and the count of finished runs after Ctrl-C.
    """
    hash_code = hash_code or (lambda _: hash_sources("protonet", "analysis"))
    names = {json.dumps([run, hash_code(run)], default=str): run for run in runs}
    results: dict[RunT, Any] = {}
    for entry in read_journal(journal):
        name = json.dumps([entry.get("run"), entry.get("code")])
        if name in names and "result" in entry:
            results[names[name]] = entry["result"]
    missing = [run for run in runs if run not in results]
    bar = tqdm(total=len(runs), initial=len(results), unit=unit, dynamic_ncols=True, disable=quiet)
    try:
        with bar, use_one_thread():
            for run, result in _iterate_results(missing, execute, jobs, bar):
                append_journal(journal, {"run": run, "code": hash_code(run), "result": result})
                results[run] = json.loads(json.dumps(result))
                bar.update()
    except KeyboardInterrupt:
        saved = "the finished runs are" if quiet else f"{len(results)} of {len(runs)} {unit}s are"
        raise KeyboardInterrupt(f"interrupted; {saved} kept in {journal}. The same command continues.") from None
    return {run: results[run] for run in runs}


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a journal in order; invalid lines are skipped, a missing file has none."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # an interrupted write
            continue
        if isinstance(entry, dict):
            yield entry


def append_journal(path: Path, entry: dict[str, Any]) -> None:
    """Append a JSON object to a journal, on a new line even if an interrupted write left the last line incomplete."""
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(entry, default=str).encode() + b"\n")


@functools.cache
def hash_sources(*paths: str) -> str:
    """Hash the Python files at paths of the repository, or in folders, and the versions of ``HASHED_PACKAGES``."""
    files = [file for path in paths for file in (sorted((ROOT / path).rglob("*.py")) or [ROOT / path])]
    texts = [file.read_text(encoding="utf-8") for file in files]
    versions = {package: installed_version(package) for package in HASHED_PACKAGES}
    return hashlib.sha256(json.dumps([texts, versions], sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Limit torch and BLAS to one thread within the context: matrices are small, and times stay comparable."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        if find_spec("threadpoolctl") is not None:  # it comes with scikit-learn
            from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415 - optional

            stack.enter_context(threadpool_limits(1))
        yield


def _iterate_results(
    runs: Sequence[RunT], execute: Callable[[RunT], Any], jobs: int, bar: Any
) -> Iterator[tuple[RunT, Any]]:
    """Yield each run with its result as it finishes; the bar shows the current or the last finished run."""
    if min(jobs, len(runs)) < 2:
        for run in runs:
            bar.set_postfix_str(_format_run(run))
            yield run, execute(run)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(runs)), _initialize_worker) as pool:
        for run, result in pool.imap_unordered(functools.partial(_execute_with_run, execute), runs):
            bar.set_postfix_str(_format_run(run))
            yield run, result


def _execute_with_run(execute: Callable[[RunT], Any], run: RunT) -> tuple[RunT, Any]:
    """Execute a run; return the run and its result, because a pool yields results in any order."""
    return run, execute(run)


def _initialize_worker() -> None:
    """Set up a worker process: one thread, and Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _format_run(run: object) -> str:
    """Format a run as text for the progress bar."""
    return " ".join(str(part) for part in run if part is not None) if isinstance(run, tuple) else str(run)
