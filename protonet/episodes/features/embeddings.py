"""Files of embeddings: finished rows are kept in a file beside them until all rows are done."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from protonet._io import progress_bar, write_atomically
from protonet.datasets.mapped import write_npz
from protonet.errors import raise_input_error

ROWS_PER_COPY = 1024  #: Rows that are copied at a time.


@dataclass(frozen=True, kw_only=True)
class Job:
    """Rows to embed."""

    labels: Sequence[str]  #: The name of each one's class.
    sides: Sequence[str] | None = None  #: The side of each, of a split by class; None without one.
    files: Sequence[str] | None = None  #: What each is an embedding of, or None.
    #: From the number of the first row that is not there yet, a multiple of ``step``, to blocks of ``step`` embeddings
    #: (step, dim) float32, the last one perhaps smaller.
    embed: Callable[[int], Iterator[np.ndarray]]
    step: int  #: Rows of a block: an interrupted run goes on where a block begins, so that not a bit is another.
    made: dict[str, Any]  #: What decides the embeddings, in a form that JSON can write.
    state: str  #: A text that changes with the data.
    shape: tuple[int, int, int] | None = None  #: Channels, height and width, where embeddings are maps.

    def hash(self) -> str:
        """Compute a hash that identifies the rows of this job."""
        identity = [self.made, self.state, self.step, list(self.labels), list(self.sides or ())]
        identity += [] if self.shape is None else [self.shape]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def write_embeddings(output: Path, job: Job, *, resume: bool) -> int:
    """Embed rows and write them to an NPZ file, whole or not at all.

    It holds ``x`` (n, dim) float32, ``y`` and perhaps ``split`` and ``files`` (n,) strings, of maps their shape
    ``maps`` (3,), and ``made``, JSON. Until it is whole, what is done lies beside it, in a file whose name ends in
    ``.part``; only one block is in memory.

    Args:
        output: The file.
        job: The rows to embed.
        resume: Go on with the part, if there is one; a file of the same job that is whole is left as it is.

    Returns:
        The features of a row.

    Raises:
        KeyboardInterrupt: After Ctrl-C, with a line that says how much is done.
        InputError: The file or its part is of another job, or there and not to be continued; embeddings are not finite.
    """
    key, n = job.hash(), len(job.labels)
    part = output.with_name(f"{output.name}.part")
    if output.exists():
        finished = _read_key(output)
        if not resume or finished is None or finished[0] != key:
            _refuse(output, resume=resume)
        return finished[1]
    if part.exists() and not resume:
        _refuse(part, resume=False)
    with part.open("a+b") as file:
        header = f"protonet extract {key}\n".encode()
        dim, done = _open_part(file, part, header, n, job.step)
        try:
            with progress_bar(total=n, initial=done, unit="row") as bar:
                for block in job.embed(done) if done < n else ():
                    if not dim:
                        dim = block.shape[1]
                        file.write(header + dim.to_bytes(4, "little"))
                    bad = ~np.isfinite(block).all(axis=1)
                    if bad.any():
                        got = f"others for row {done + int(bad.argmax())}"
                        raise_input_error(
                            "backbone", "give finite numbers", got, "Pass another one, or mend that picture."
                        )
                    file.write(np.ascontiguousarray(block, "<f4").data)
                    file.flush()
                    done += len(block)
                    bar.update(len(block))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped after {done:,} of {n:,} rows; run again with --resume") from None
        more = {"y": np.array(job.labels, str), "made": np.array(json.dumps(job.made)), "key": np.array(key)}
        more["dim"] = np.array(dim)
        more |= {} if job.sides is None else {"split": np.array(job.sides, str)}
        more |= {} if job.files is None else {"files": np.array(job.files, str)}
        more |= {} if job.shape is None else {"maps": np.array(job.shape)}
        rows = _read_rows(file, len(header) + 4, dim, n)
        write_atomically(output, lambda opened: write_npz(opened, (n, dim), "float32", rows, more))
    part.unlink()
    return dim


def _open_part(file: BinaryIO, part: Path, header: bytes, n: int, step: int) -> tuple[int, int]:
    """Return the features of a part's rows, 0 without any, and how many there are; cut off what is not whole."""
    file.seek(0)
    content = file.read(len(header) + 4)
    if content[: len(header)] != header[: len(content)]:
        _refuse(part, resume=True)
    dim = int.from_bytes(content[len(header) :], "little") if len(content) == len(header) + 4 else 0
    if not dim:
        file.truncate(0)
        return 0, 0
    done = min(n, (file.seek(0, os.SEEK_END) - len(content)) // (4 * dim))
    done -= 0 if done == n else done % step
    file.truncate(len(content) + 4 * dim * done)
    return dim, done


def _read_rows(file: BinaryIO, start: int, dim: int, n: int) -> Iterator[np.ndarray]:
    """Yield the rows of a part, some at a time."""
    file.seek(start)
    for first in range(0, n, ROWS_PER_COPY):
        count = min(ROWS_PER_COPY, n - first)
        yield np.frombuffer(file.read(4 * dim * count), "<f4").reshape(count, dim)


def _read_key(path: Path) -> tuple[str, int] | None:
    """Return the hash of a finished file's job, and the features of its rows; None where it is another file."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            return str(file["key"]), int(file["dim"])
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile):
        return None


def _refuse(path: Path, *, resume: bool) -> NoReturn:
    """Raise an InputError: there is a file, of something else or of a run that should not go on."""
    if resume:
        got, remedy = f"{path}, of other data, settings or another network", "Pass another path, or remove it."
        raise_input_error("resume", "continue a run of the same arguments", got, remedy)
    remedy = "Go on with --resume, or pass another path."
    raise_input_error("output", "be a new file", f"{path}, which exists", remedy)
