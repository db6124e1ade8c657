"""The runner of all studies: it parses options, checks output paths first, executes runs, and writes results.

A study is a module with a docstring, `Options` (a dataclass) and `run(options)`, which returns a `StudyReport`. Each
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
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from protonet.errors import install_command, installed_version, raise_input_error
from protonet.ui.command_line import CommandParser, parse_integer
from protonet.ui.options import (
    add_options,
    check_output_paths,
    get_option_name,
    is_positional,
    list_options,
    make_options,
    option,
    parse_options,
)
from solution.pack import ROOT

BUILD_FOLDER = Path("build")
DatasetT = TypeVar("DatasetT")
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
RunT = TypeVar("RunT")


class StudyReport(NamedTuple):
    """The result of a study: the rows for JSON, and the Markdown table."""

    rows: object  #: Content of ``--json``.
    table: str  #: Markdown, printed and written by ``--markdown`` with the command that made it.
    failures: Sequence[str] = ()  #: Lines for stderr; the exit status is 1 if there are any.


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of every study. A study adds its own in a dataclass ``Options``."""

    json: Path | None = option("write the results there", metavar="PATH", suffixes=("",))
    markdown: Path | None = option("write the table there, too", metavar="PATH", suffixes=("",))


@dataclass(frozen=True, kw_only=True)
class JournalOptions(StudyOptions):
    """The options of studies that resume from a journal."""

    state: Path = option("journal of finished runs (default: build/STUDY.jsonl)", metavar="PATH", suffixes=("",))
    fresh: bool = option("forget the finished runs", False)


def int_option(help_text: str, default: int, *, low: int = 1) -> Any:
    """Declare an option whose value is an integer >= ``low``."""
    return option(f"{help_text} (default: {default})", default, parse=partial(parse_integer, low=low))


def list_option(help_text: str, default: str, parse: Callable[[str, str], object]) -> Any:
    """Declare an option whose value is a list that ``parse`` reads from a text with commas, such as the default."""
    return option(f"{help_text} (default: {default})", default, parse=parse, nargs=None, metavar="A,B")


def names_option(known: Collection[str], default: str | None = None, known_text: str = "") -> Any:
    """Declare an option whose value is a list of names of ``known``; None, the default, stands for all of them."""
    text = f"of {', '.join(known)} (default: {known_text or default or 'all'})"
    return option(text, default, parse=partial(parse_names, known=known), nargs=None, metavar="A,B")


def plot_option(plotted: str) -> Any:
    """Declare an option for the path of a figure; the help names what is ``plotted``."""
    text = f"draw {plotted} there ({', '.join(PLOT_SUFFIXES)})"
    return option(text, metavar="PATH", suffixes=PLOT_SUFFIXES, parse=_parse_plot_path)


def run_study(prog: str, study: ModuleType, words: Sequence[str] | None) -> None:
    """Parse the options of a study, run it, and print and write its report."""
    options_type: type[StudyOptions] = study.Options
    parser = CommandParser(prog, inspect.getdoc(study) or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser, options_type)
    command_line = format_command(prog, options_type, parser.parse_args(words))
    parsed = parse_options(parser, options_type, words)
    if getattr(parsed, "state", "") is None:
        parsed.state = BUILD_FOLDER / f"{prog.rsplit(maxsplit=1)[-1]}.jsonl"
    check_output_paths(parsed, options_type, ())
    if getattr(parsed, "fresh", False):
        parsed.state.unlink(missing_ok=True)
    options = make_options(options_type, parsed)
    report = study.run(options)
    if options.json is not None:
        write_rows(options.json, report.rows)
    if options.markdown is not None:
        options.markdown.write_text(f"{report.table}\nMade by `{command_line}`.\n", encoding="utf-8")
    print(report.table, end="")
    if report.failures:
        print(*report.failures, sep="\n", file=sys.stderr)
        sys.exit(1)


def format_command(prog: str, options_type: type, texts: object) -> str:
    """Format the command that makes a report: with all values of ``texts``, but without output paths."""
    local = {"baselines", "jobs", "python"}  # values that depend on the machine
    command_line = f"python -m {prog}"
    for declared in list_options(options_type):
        value = getattr(texts, declared.name)
        if is_positional(declared):
            command_line += f" {declared.name.upper()}"
        elif value is True:
            command_line += f" {get_option_name(declared)}"
        elif value not in {None, False} and declared.name not in local and not declared.metadata["suffixes"]:
            command_line += f" {get_option_name(declared)} {shlex.quote(str(value))}"
    return command_line


def write_rows(path: Path, rows: object) -> None:
    """Write the rows of a study as JSON."""
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


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


def _parse_plot_path(option: str, path: str) -> Path:
    """Convert the path of a figure; raise an InputError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise_input_error(option, "have matplotlib", "none installed", f"Run {install_command('analysis')}.")
    return Path(path)


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
    """Hash the Python files at paths of the repository, or in folders, and versions of packages that affect results."""
    files = [file for path in paths for file in (sorted((ROOT / path).rglob("*.py")) or [ROOT / path])]
    texts = [file.read_text(encoding="utf-8") for file in files]
    packages = ("numpy", "scipy", "scikit-learn", "torch")
    versions = {package: installed_version(package) for package in packages}
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
