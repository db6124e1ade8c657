"""A folder of Parquet files: what is done to one of them is done to all, by processes here or on a Dask cluster.

Every file has one output, which is written whole. So what is there is finished: whoever is killed, or stopped, loses
the files in work alone, and doing one twice gives the same file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from protonet._progress import progress_bar
from protonet._writing import write_whole
from protonet.errors import DISTRIBUTION, UserError, installed_version, optional_packages, raise_input_error
from protonet.tables.table import format_names
from protonet.ui.text import count

#: Of the output folder, the file that says what its files were made with.
MADE = "_predict.json"
#: What the names of files and folders begin with that hold no rows, as Hadoop has it.
HIDDEN = (".", "_")
#: Seconds that a cluster may take to answer, and between two looks at the processes here.
PATIENCE, LOOK = 10, 0.5
#: What a process of a pool was begun with: the rows that all of them have done, and whether the command ends.
_SHARED: dict[str, Any] = {}


class Part(NamedTuple):
    """One file of the folder."""

    table: Path  #: Absolute: another machine sees the same folder.
    output: Path  #: The same.
    rows: int

    @property
    def done(self) -> bool:
        """Whether there is an output, of the file as it is now."""
        return self.output.exists() and self.output.stat().st_mtime_ns >= self.table.stat().st_mtime_ns


#: Told how many rows are done further; what it raises ends the work.
Tick = Callable[[int], None]
#: Makes the output of a file, and returns what a person should be told.
Work = Callable[[Part, Tick], Sequence[str]]


class StoppedError(Exception):
    """The command ends: a file in work is left."""


def list_parts(folder: Path, output: Path) -> list[Part]:
    """Return the Parquet files of a folder and of those in it, in the order of their names.

    Args:
        folder: Which exists.
        output: Where the output of each is to be, under the same name with .csv.

    Raises:
        MissingPackageError: pyarrow is missing.
        InputError: There is no file, one cannot be read, or has other columns than the first; the message names it.
    """
    with optional_packages("parquet"):
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - optional

    folder, output = folder.resolve(), output.resolve()
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.parquet"))
    names = [name for name in names if not any(part.startswith(HIDDEN) for part in name.parts)]
    if not names:
        raise_input_error(
            "table", "be a folder of Parquet files", f"none in {folder}", "Pass one with files *.parquet."
        )
    parts: list[Part] = []
    first: set[str] = set()
    for name in names:
        try:
            metadata = parquet.read_metadata(folder / name)
            columns = set(metadata.schema.to_arrow_schema().names)
        except (OSError, ValueError, ArrowException) as error:
            got = f"{name} ({type(error).__name__})"
            raise_input_error(
                "table", "be a folder of Parquet files that can be read", got, "Mend or remove that file."
            )
        first = first or columns
        if columns != first:
            missing, more = sorted(first - columns), sorted(columns - first)
            said = [f"without {format_names(missing)}"] * bool(missing) + [f"with {format_names(more)}"] * bool(more)
            got = f"{name} {' and '.join(said)}, unlike {names[0]}"
            raise_input_error(
                "table", "be a folder of files with the same columns", got, "Move it to a folder of its own."
            )
        parts.append(Part(folder / name, (output / name).with_suffix(".csv"), metadata.num_rows))
    return parts


def claim_folder(output: Path, made: Mapping[str, Any]) -> None:
    """Write what a folder's outputs are made with, or raise an InputError where it holds any of something else."""
    path, text = output / MADE, json.dumps(made, indent=1, sort_keys=True) + "\n"
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == text:
        return
    if path.exists() or next(output.rglob("*.csv"), None) is not None:
        must, got = "be a new folder, or one of this model and these options", f"{output} of others"
        raise_input_error("--output", must, got, "Pass another folder, or remove that one.")
    write_whole(path, lambda file: file.write(text.encode()))


def run_parts(work: Work, parts: Sequence[Part], *, workers: int | str, quiet: bool) -> list[str]:
    """Do the work of all files that are not done, and show on stderr how many rows are, if it takes long.

    Args:
        work: A function of a module with arguments that can be pickled.
        parts: All files.
        workers: How many processes on this machine, or the address of a Dask scheduler whose workers do it instead.
        quiet: Show no progress.

    Returns:
        What a person should be told, each line once.

    Raises:
        MissingPackageError: Dask is wanted, and missing.
        InputError: A file that does not fit, a process that was killed, a cluster that does not answer.
    """
    left = [part for part in parts if not part.done]
    total = sum(part.rows for part in parts)
    for part in left:
        part.output.parent.mkdir(parents=True, exist_ok=True)
    notes: dict[str, None] = {}
    if len(left) < len(parts):
        notes[f"{count(len(parts) - len(left), 'file')} of {len(parts):,} had been finished before"] = None
    initial = total - sum(part.rows for part in left)
    bar = progress_bar(
        total=total, initial=initial, unit="row", unit_scale=True, leave=False, smoothing=0, shown=not quiet
    )
    with bar:
        if isinstance(workers, int):
            done = _run_here(work, left, min(workers, len(left)), bar.update)
        else:
            done = _run_dask(work, left, workers, bar.update) if left else iter(())
        for told in done:
            notes |= dict.fromkeys(told)
    return list(notes)


def _run_here(work: Work, parts: Sequence[Part], n_processes: int, tick: Tick) -> Iterator[Sequence[str]]:
    """Yield what the work of each file says, done by so many processes of one thread each."""
    if not parts:
        return
    context = multiprocessing.get_context("spawn")
    rows, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(n_processes, context, _begin_process, (rows, stop))
    try:
        waiting, seen = {pool.submit(_work_here, work, part) for part in parts}, 0
        while waiting:
            done, waiting = wait(waiting, LOOK, FIRST_COMPLETED)
            now = rows.value
            tick(now - seen)
            seen = now
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        must, remedy = "be no more than there is memory for", "Run it again with fewer: finished files are kept."
        raise_input_error("--workers", must, f"{n_processes}, of which one was killed", remedy)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _begin_process(rows: Any, stop: Any) -> None:
    """Prepare a process: one thread; Ctrl-C is for the command, which says when to stop; it ends with the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import pyarrow  # noqa: PLC0415 - optional
    import torch  # noqa: PLC0415 - with the work

    _SHARED.update(rows=rows, stop=stop)
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that began it has ended, be it killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_here(work: Work, part: Part) -> Sequence[str]:
    """Do the work of one file in a process of the pool."""
    return work(part, _tick_here)


def _tick_here(rows: int) -> None:
    """Add to the rows that all processes have done; raise a StoppedError where the command ends."""
    if _SHARED["stop"].is_set():
        raise StoppedError
    with _SHARED["rows"].get_lock():
        _SHARED["rows"].value += rows


def _run_dask(work: Work, parts: Sequence[Part], address: str, tick: Tick) -> Iterator[Sequence[str]]:
    """Yield what the work of each file says, done by the workers of a Dask cluster.

    A file whose worker is killed goes to another one.
    """
    with optional_packages("dask"):
        from distributed import KilledWorker, as_completed  # noqa: PLC0415 - optional

    with _connect(address) as client:
        futures = client.map(partial(_work_there, work), parts, pure=False)
        rows = {future.key: part.rows for future, part in zip(futures, parts, strict=True)}
        try:
            for future in as_completed(futures, loop=client.loop):
                told = future.result()
                tick(rows[future.key])
                yield told
        except (KilledWorker, CancelledError) as error:
            got = "a lost scheduler" if isinstance(error, CancelledError) else "several that were killed at one file"
            remedy = "Give them more memory; run it again: finished files are kept."
            raise_input_error("--workers", "have workers that live", got, remedy)
        finally:
            client.cancel(futures)


def _work_there(work: Work, part: Part) -> Sequence[str]:
    """Do the work of one file on a worker, unless one that was killed had done it."""
    return [] if part.done else work(part, lambda rows: None)


@contextmanager
def _connect(address: str) -> Iterator[Any]:
    """Yield a client of a Dask cluster whose workers have this protonet."""
    from distributed import Client  # noqa: PLC0415 - optional

    logger = logging.getLogger("distributed")  # what it says of a cluster that is not there is many lines
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        try:
            client = Client(address, timeout=PATIENCE, set_as_default=False)
        except (OSError, ValueError) as error:
            got = f"{address} ({type(error).__name__})"
            remedy = "Start it with dask scheduler, and workers with dask worker ADDRESS."
            raise_input_error("--workers", "be the address of a Dask scheduler that answers", got, remedy)
        with client:
            own = installed_version(DISTRIBUTION)
            try:
                client.wait_for_workers(1, timeout=PATIENCE)
                found = client.run(installed_version, DISTRIBUTION)
            except asyncio.TimeoutError:  # before Python 3.11 another one than TimeoutError
                raise_input_error(
                    "--workers", "have a worker", f"none at {address}", f"Start some with dask worker {address}."
                )
            except Exception as error:  # whatever its import raises there
                found = {"some": type(error).__name__}
            strange = sorted({str(each) for each in found.values() if each != own})
            if strange:
                remedy = "Install it there."
                raise_input_error("--workers", f"have workers with protonet {own}", format_names(strange), remedy)
            yield client
    finally:
        logger.setLevel(level)


def name_file(error: UserError, part: Part) -> UserError:
    """Return an error that says which file it is of."""
    if part.table.name in str(error):
        return error
    return type(error)(f"{error} In {part.table.name}.", argument=error.argument)
