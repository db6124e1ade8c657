"""Execution of runs with a journal: an interrupted study resumes from it.

A finished run is appended as one JSON line, with a hash of the code. Results of other code are ignored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from protonet.errors import installed_version
from solution.pack import ROOT

PACKAGES = ("numpy", "scipy", "scikit-learn", "torch")  #: Packages whose versions affect results.
Run = TypeVar("Run")


def run_all(
    runs: Sequence[Run],
    do: Callable[[Run], Any],
    state: Path,
    code: Callable[[Run], object] | None = None,
    *,
    unit: str = "run",
    jobs: int = 1,
    quiet: bool = False,
) -> dict[Run, Any]:
    """Execute all runs that the journal lacks, on one thread, with a progress bar on stderr.

    Args:
        runs: The runs; a hashable tuple each, whose JSON names it.
        do: Does one run and returns a result that JSON can hold.
        state: The JSON-lines file; made if need be, appended to.
        code: The hash, or more, of what else decides a run's result; by default of the library's and the studies' code.
        unit: Name of a run, for the progress bar.
        jobs: How many processes, of one thread each; with more than one, ``do`` has to be a module's function.
        quiet: No bar, and no count in the message of an interruption, for a part of a longer study.

    Returns:
        The results of all runs, in their order, as JSON has them: lists for tuples.
    """
    code = code or (lambda _: hash_sources("protonet", "analysis"))
    names = {json.dumps([run, code(run)], default=str): run for run in runs}
    results: dict[Run, Any] = {}
    for entry in read_journal(state):
        name = json.dumps([entry.get("run"), entry.get("code")])
        if name in names and "result" in entry:
            results[names[name]] = entry["result"]
    missing = [run for run in runs if run not in results]
    bar = tqdm(total=len(runs), initial=len(results), unit=unit, dynamic_ncols=True, disable=quiet)
    try:
        with bar, use_one_thread():
            for run, result in _do_all(missing, do, jobs, bar):
                append_journal(state, {"run": run, "code": code(run), "result": result})
                results[run] = json.loads(json.dumps(result))
                bar.update()
    except KeyboardInterrupt:
        saved = "the finished runs are" if quiet else f"{len(results)} of {len(runs)} {unit}s are"
        raise KeyboardInterrupt(f"interrupted; {saved} kept in {state}. The same command continues.") from None
    return {run: results[run] for run in runs}


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal in order; invalid lines are skipped, a missing file is empty."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # an interrupted write
            continue
        if isinstance(entry, dict):
            yield entry


def append_journal(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry on its own line, even if the last line is incomplete."""
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(entry, default=str).encode() + b"\n")


@functools.cache
def hash_sources(*paths: str) -> str:
    """Hash source files, or all files below a folder, with their paths in the repository, and package versions."""
    files = [file for path in paths for file in (sorted((ROOT / path).rglob("*.py")) or [ROOT / path])]
    texts = [file.read_text(encoding="utf-8") for file in files]
    versions = {package: installed_version(package) for package in PACKAGES}
    return hashlib.sha256(json.dumps([texts, versions], sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Limit torch and other linear algebra to one thread: matrices are small, and times stay comparable."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        if find_spec("threadpoolctl") is not None:  # it comes with scikit-learn
            from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415 - optional

            stack.enter_context(threadpool_limits(1))
        yield


def _do_all(runs: Sequence[Run], do: Callable[[Run], Any], jobs: int, bar: Any) -> Iterator[tuple[Run, Any]]:
    """Yield runs with their results as they finish; the bar shows the current run, or the last finished one."""
    if min(jobs, len(runs)) < 2:
        for run in runs:
            bar.set_postfix_str(_show(run))
            yield run, do(run)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(runs)), _start_worker) as pool:
        for run, result in pool.imap_unordered(functools.partial(_do_one, do), runs):
            bar.set_postfix_str(_show(run))
            yield run, result


def _do_one(do: Callable[[Run], Any], run: Run) -> tuple[Run, Any]:
    """Execute a run; return both the run and its result."""
    return run, do(run)


def _start_worker() -> None:
    """Use one thread, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _show(run: object) -> str:
    """Format a run for the progress bar."""
    return " ".join(str(part) for part in run if part is not None) if isinstance(run, tuple) else str(run)
