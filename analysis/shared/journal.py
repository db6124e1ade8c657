"""Execution of the runs of a study, with a journal from which an interrupted study resumes.

Each finished run is appended to the journal as a JSON line with a hash of the code. Results of other code are ignored.
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

HASHED_PACKAGES = ("numpy", "scipy", "scikit-learn", "torch")  #: Packages whose versions affect results.
Run = TypeVar("Run")


def run_all(
    runs: Sequence[Run],
    execute: Callable[[Run], Any],
    state: Path,
    code: Callable[[Run], object] | None = None,
    *,
    unit: str = "run",
    jobs: int = 1,
    quiet: bool = False,
) -> dict[Run, Any]:
    """Execute the runs that the journal lacks, on one thread, with a progress bar on stderr; return all results.

    Results are in the order of the runs and decoded from JSON (lists in place of tuples).

    Args:
        runs: Hashable tuples; the JSON of a run identifies it in the journal.
        execute: Maps a run to a result that JSON can hold. With several jobs, it must be a function of a module.
        state: Path of the journal, a JSON-lines file, which is created or appended to.
        code: Maps a run to a hash of the code that its result depends on; by default all code of library and studies.
        unit: Name of a run in the progress bar.
        jobs: Number of processes, of one thread each.
        quiet: Whether to show no bar, and no count if interrupted, because the runs are part of a longer study.
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
            for run, result in _execute_all(missing, execute, jobs, bar):
                append_journal(state, {"run": run, "code": code(run), "result": result})
                results[run] = json.loads(json.dumps(result))
                bar.update()
    except KeyboardInterrupt:
        saved = "the finished runs are" if quiet else f"{len(results)} of {len(runs)} {unit}s are"
        raise KeyboardInterrupt(f"interrupted; {saved} kept in {state}. The same command continues.") from None
    return {run: results[run] for run in runs}


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal in order, without invalid lines; none if the file is missing."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # an interrupted write
            continue
        if isinstance(entry, dict):
            yield entry


def append_journal(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to a journal on a new line, also after an incomplete last line."""
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(entry, default=str).encode() + b"\n")


@functools.cache
def hash_sources(*paths: str) -> str:
    """Hash Python files, or all files in a folder, by paths in the repository, and the versions of packages."""
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


def _execute_all(runs: Sequence[Run], execute: Callable[[Run], Any], jobs: int, bar: Any) -> Iterator[tuple[Run, Any]]:
    """Yield each run with its result as it finishes; the bar shows the current or the last finished run."""
    if min(jobs, len(runs)) < 2:
        for run in runs:
            bar.set_postfix_str(_format_run(run))
            yield run, execute(run)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(runs)), _start_worker) as pool:
        for run, result in pool.imap_unordered(functools.partial(_execute_one, execute), runs):
            bar.set_postfix_str(_format_run(run))
            yield run, result


def _execute_one(execute: Callable[[Run], Any], run: Run) -> tuple[Run, Any]:
    """Execute a run; return both the run and its result."""
    return run, execute(run)


def _start_worker() -> None:
    """Set up a worker process: one thread, and Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _format_run(run: object) -> str:
    """Format a run for the progress bar."""
    return " ".join(str(part) for part in run if part is not None) if isinstance(run, tuple) else str(run)
