"""Classify all Parquet files of a folder, by local processes or on a Dask cluster.

Each file has one output file, which is written atomically: an output that exists is complete. A run that is stopped or
killed loses only the work on unfinished files, and the next run continues with them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from protonet._io import JsonDict, progress_bar, write_text
from protonet._text import plural
from protonet.errors import DISTRIBUTION_NAME, UserError, installed_version, optional_packages, raise_input_error
from protonet.tables.table import format_names

#: Name of the file in the output folder that records the model and options of its predictions.
PREDICTION_SETTINGS_FILE = "_predict.json"
#: Prefixes of the names of files and folders that hold no rows, by a convention of Hadoop.
HIDDEN_PREFIXES = (".", "_")
#: Time limit for a response of the Dask cluster, and time between two checks of local processes, in seconds.
CLUSTER_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS = 10, 0.5
#: State of a worker process: "rows", the shared number of finished rows, and "stop", an event that ends the work.
_WORKER_PROCESS_STATE: JsonDict = {}


class FileTask(NamedTuple):
    """A Parquet file to be classified, and the file to which its predictions are written."""

    parquet_path: Path  #: The absolute path of the Parquet file, since workers may be on other machines.
    output_path: Path  #: The absolute path of the CSV file of its predictions.
    n_rows: int  #: The number of rows of the Parquet file.

    @property
    def is_done(self) -> bool:
        """Whether the output exists and is not older than the Parquet file."""
        return self.output_path.exists() and self.output_path.stat().st_mtime_ns >= self.parquet_path.stat().st_mtime_ns


#: A callback that gets the number of rows that were finished since its last call; its exception ends the work.
CountFinishedRows = Callable[[int], None]
#: A function that writes the output of one file, calls `CountFinishedRows` on the way, and returns notes for the user.
ProcessFile = Callable[[FileTask, CountFinishedRows], Sequence[str]]


class StoppedError(Exception):
    """Raised to end the work on a file, because the command is stopping; the file's output is not written."""


def list_file_tasks(folder: Path, output: Path) -> list[FileTask]:
    """List the Parquet files of a folder and its subfolders, sorted by name, with their output paths.

    The output of a file has the same path below ``output`` as the file has below ``folder``.
    """
    with optional_packages("parquet"):
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - optional

    folder, output = folder.resolve(), output.resolve()
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.parquet"))
    names = [name for name in names if not any(part.startswith(HIDDEN_PREFIXES) for part in name.parts)]
    if not names:
        got, remedy = f"none in {folder}", "Pass one with files *.parquet."
        raise_input_error("table", "be a folder of Parquet files", got, remedy)
    tasks, columns_of = list[FileTask](), dict[Path, frozenset[str]]()
    for name in names:
        try:
            metadata = parquet.read_metadata(folder / name)
            columns_of[name] = frozenset(metadata.schema.to_arrow_schema().names)
        except (OSError, ValueError, ArrowException) as error:
            got = f"{name} ({type(error).__name__})"
            must, remedy = "be a folder of Parquet files that can be read", "Mend or remove that file."
            raise_input_error("table", must, got, remedy)
        tasks.append(FileTask(folder / name, (output / name).with_suffix(".csv"), metadata.num_rows))
    # Most files are right; of two different files, that with more columns.
    counts = Counter(columns_of.values())
    right = max(names, key=lambda name: (counts[columns_of[name]], len(columns_of[name])))
    for name, columns in columns_of.items():
        if columns != columns_of[right]:
            missing, more = sorted(columns_of[right] - columns), sorted(columns - columns_of[right])
            differences = [f"without {format_names(missing)}"] * bool(missing)
            differences += [f"with {format_names(more)}"] * bool(more)
            got, remedy = f"{name} {' and '.join(differences)}, unlike {right}", "Move it to a folder of its own."
            raise_input_error("table", "be a folder of files with the same columns", got, remedy)
    return tasks


def check_or_record_settings(output: Path, settings: JsonDict) -> None:
    """Record the model file's hash and the options in the output folder; raise an InputError if it has others."""
    path, text = output / PREDICTION_SETTINGS_FILE, json.dumps(settings, indent=1, sort_keys=True) + "\n"
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == text:
        return
    if path.exists() or next(output.rglob("*.csv"), None) is not None:
        must, got = "be a new folder, or one of this model and these options", f"{output} of others"
        raise_input_error("output", must, got, "Pass another folder, or remove that one.")
    write_text(path, text)


def run_file_tasks(process: ProcessFile, tasks: Sequence[FileTask], *, workers: int | str, quiet: bool) -> list[str]:
    """Process all files without a complete output, and return the distinct notes for the user.

    ``workers`` is the number of local processes, or the address of a Dask scheduler.
    """
    left = [task for task in tasks if not task.is_done]
    total = sum(task.n_rows for task in tasks)
    for task in left:
        task.output_path.parent.mkdir(parents=True, exist_ok=True)
    notes: dict[str, None] = {}
    if len(left) < len(tasks):
        notes[f"{plural(len(tasks) - len(left), 'file')} of {len(tasks):,} were finished earlier"] = None
    initial = total - sum(task.n_rows for task in left)
    bar = progress_bar(
        total=total, initial=initial, unit="row", unit_scale=True, leave=False, smoothing=0, shown=not quiet
    )
    with bar:
        if isinstance(workers, int):
            done = _run_in_processes(process, left, min(workers, len(left)), bar.update)
        else:
            done = _run_on_dask(process, left, workers, bar.update) if left else iter(())
        for lines in done:
            notes |= dict.fromkeys(lines)
    return list(notes)


def _run_in_processes(
    process: ProcessFile, tasks: Sequence[FileTask], n_processes: int, count_rows: CountFinishedRows
) -> Iterator[Sequence[str]]:
    """Process files by ``n_processes`` local processes of one thread, and yield the notes of each finished file."""
    if not tasks:
        return
    context = multiprocessing.get_context("spawn")
    rows, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(n_processes, context, _initialize_process, (rows, stop))
    try:
        waiting, seen = {pool.submit(_process_in_worker_process, process, task) for task in tasks}, 0
        while waiting:
            done, waiting = wait(waiting, POLL_INTERVAL_SECONDS, FIRST_COMPLETED)
            now = rows.value
            count_rows(now - seen)
            seen = now
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        must, remedy = "fit into memory", "Run it again with fewer; finished files are kept."
        raise_input_error("workers", must, f"{n_processes}, and one was killed", remedy)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _initialize_process(rows: object, stop: object) -> None:
    """Initialize a worker process, which uses one thread, ignores Ctrl-C and exits with its parent.

    `_WORKER_PROCESS_STATE` keeps ``rows``, the shared number of predicted rows, and ``stop``, the event that ends all
    workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import pyarrow  # noqa: PLC0415 - optional
    import torch  # noqa: PLC0415 - with the work

    _WORKER_PROCESS_STATE.update(rows=rows, stop=stop)
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _process_in_worker_process(process: ProcessFile, task: FileTask) -> Sequence[str]:
    """Process a file in a local process, add its rows to the shared count, and return its notes."""

    def count_rows(rows: int) -> None:
        if _WORKER_PROCESS_STATE["stop"].is_set():
            raise StoppedError
        with _WORKER_PROCESS_STATE["rows"].get_lock():
            _WORKER_PROCESS_STATE["rows"].value += rows

    return process(task, count_rows)


def _run_on_dask(
    process: ProcessFile, tasks: Sequence[FileTask], address: str, count_rows: CountFinishedRows
) -> Iterator[Sequence[str]]:
    """Process files on the Dask cluster at ``address``, and yield the notes of each finished file."""
    with optional_packages("dask"):
        from distributed import KilledWorker, as_completed  # noqa: PLC0415 - optional

    with _connect_to_dask(address) as client:
        futures = client.map(partial(_process_on_worker, process), tasks, pure=False)
        rows = {future.key: task.n_rows for future, task in zip(futures, tasks, strict=True)}
        try:
            for future in as_completed(futures, loop=client.loop):
                notes = future.result()
                count_rows(rows[future.key])
                yield notes
        except (KilledWorker, CancelledError) as error:
            is_lost = isinstance(error, CancelledError)
            got = "a lost scheduler" if is_lost else "several that were killed at the same file"
            remedy = "Give them more memory and run it again; finished files are kept."
            raise_input_error("workers", "have live workers", got, remedy)
        finally:
            client.cancel(futures)


def _process_on_worker(process_file: ProcessFile, task: FileTask) -> Sequence[str]:
    """Process a file on a Dask worker and return its notes; skip it if a worker had finished it before it crashed."""
    return [] if task.is_done else process_file(task, lambda rows: None)


@contextmanager
def _connect_to_dask(address: str) -> Iterator[Any]:
    """Connect to a Dask cluster: a context manager, which yields the ``distributed.Client``.

    Raises:
        InputError: The scheduler does not answer, or its workers have another version of protonet than this process.
    """
    from distributed import Client  # noqa: PLC0415 - optional

    logger = logging.getLogger("distributed")  # silences long messages about a missing cluster
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        try:
            client = Client(address, timeout=CLUSTER_TIMEOUT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            got = f"{address} ({type(error).__name__})"
            remedy = "Start it with dask scheduler, and workers with dask worker ADDRESS."
            raise_input_error("workers", "be the address of a Dask scheduler that answers", got, remedy)
        with client:
            version = installed_version(DISTRIBUTION_NAME)
            try:
                client.wait_for_workers(1, timeout=CLUSTER_TIMEOUT_SECONDS)
                versions = client.run(installed_version, DISTRIBUTION_NAME)
            except asyncio.TimeoutError:  # differs from TimeoutError before Python 3.11
                remedy = f"Start some with dask worker {address}."
                raise_input_error("workers", "have a worker", f"none at {address}", remedy)
            except Exception as error:  # any error of its import
                versions = {"some": type(error).__name__}
            others = sorted({str(other) for other in versions.values() if other != version})
            if others:
                remedy = "Install it there."
                raise_input_error("workers", f"have workers with protonet {version}", format_names(others), remedy)
            yield client
    finally:
        logger.setLevel(level)


def add_file_name_to_error(error: UserError, task: FileTask) -> UserError:
    """Copy an error and add the name of the Parquet file of a task to its message, unless the message has it."""
    if task.parquet_path.name in str(error):
        return error
    return type(error)(f"{error} In {task.parquet_path.name}.", argument=error.argument)
