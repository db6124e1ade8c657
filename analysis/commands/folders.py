"""Throughput and memory of ``python -m protonet predict`` over a folder of Parquet files: one process, two, and Dask.

The files are made block by block, and one process predicts the first of them alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.commands.speed import FITTED, measure, sample_table
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_columns
from protonet._checks import optional_packages

CLASSES, GROUP = 20, 20_000  #: Of the rows, and rows of a row group.
#: Starts a cluster of two workers, each a process of one thread, and predicts by it; fails where one takes 1.5 GiB.
CLUSTER = """
import resource, sys
from distributed import LocalCluster, Client
from protonet.__main__ import main
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        code = main([*sys.argv[1:], "--workers", cluster.scheduler_address])
        with Client(cluster) as client:
            assert max(client.run(peak).values()) <= 1536
    sys.exit(code)
"""
COLUMNS = {
    "predict by": "{name}",
    "rows": "{rows:,}",
    "seconds": "{seconds:,.1f}",
    "of the CPU": "{cpu:,.1f}",
    "rows a second and process": "{pace:,.0f}",
    "rows a second of the CPU": "{thrift:,.0f}",
    "to one process, %": "{share:.0f}",
    "peak MiB of a process": "{mebibytes:,.0f}",
}
NOTE = """
{rows:,} rows of {dim} features in {files} files of {each:,}, of {gibibytes:.1f} GiB in all; a model of {fitted} rows of
{classes} classes. Every process has one thread. Of a second of the CPU, not of the clock, as other processes shared the
machine's {cores} cores (load {load}); the start of the processes is included. All files of one
process and of several are the same, byte by byte.
"""


class Timed(NamedTuple):
    """A run."""

    name: str
    processes: int
    rows: int
    seconds: float
    cpu: float  #: Seconds.
    mebibytes: float  #: The peak of the largest process.


def add_options(parser: StudyParser) -> None:
    """Add the sizes."""
    parser.add_whole("--rows", 10_000_000, "rows, in whole files")
    parser.add_whole("--file-rows", 200_000, "rows of a file")
    parser.add_whole("--alone", 5, "files that one process predicts")
    parser.add_whole("--dim", 384, "features", low=2)


def run(options: argparse.Namespace) -> Report:
    """Measure one process, two processes and, where it is installed, Dask."""
    load = os.getloadavg()[0]
    files = -(-options.rows // options.file_rows)
    few = min(options.alone, files)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_folder(folder, files, few, options.file_rows, options.dim)
        model = str(folder / "m.safetensors")
        measure(["-m", "protonet", "fit", str(folder / "train.parquet"), "-o", model])
        predict = ["predict", model, "-q", "-o"]
        one, two = ([f"{name}/{jobs}", "--workers", jobs] for jobs in ("1", "2"))
        counts = few * options.file_rows, files * options.file_rows
        timed = [
            _time("one process", 1, counts[0], ["-m", "protonet", *predict, *one, f"{name}/few"]),
            _time("two processes", 2, counts[1], ["-m", "protonet", *predict, *two, f"{name}/all"]),
        ]
        same_files(folder / "1", folder / "2")
        if find_spec("distributed") is not None:
            script = folder / "cluster.py"
            script.write_text(CLUSTER, encoding="utf-8")
            timed.append(_time("Dask, two workers", 2, counts[1], [f"{script}", *predict, f"{name}/3", f"{name}/all"]))
            same_files(folder / "2", folder / "3")
    rows = tabulate(timed)
    about = {"files": files, "each": options.file_rows, "gibibytes": size / 2**30, "cores": os.cpu_count()}
    shown = {"rows": files * options.file_rows, "dim": options.dim, "fitted": FITTED, "classes": CLASSES}
    note = NOTE.format(load=f"{load:.1f} before, {os.getloadavg()[0]:.1f} after", **about, **shown)
    return Report(rows, format_columns(COLUMNS, rows) + note)


def same_files(some: Path, more: Path) -> None:
    """Stop the study where a file of a folder is not the same in another one."""
    for path in some.glob("*.csv"):
        assert path.read_bytes() == (more / path.name).read_bytes(), f"{path.name} differs"


def _time(name: str, processes: int, rows: int, arguments: Sequence[str]) -> Timed:
    """Run ``python`` with arguments that predict so many rows."""
    print(name, file=sys.stderr)
    return Timed(name, processes, rows, *measure(arguments))


def tabulate(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """Return what the table shows of each run, of which the first is the one of one process."""
    first = timed[0].rows / timed[0].cpu
    return [
        {
            **each._asdict(),
            "pace": each.rows / each.seconds / each.processes,
            "thrift": each.rows / each.cpu,
            "share": 100 * each.rows / each.cpu / first,
        }
        for each in timed
    ]


def write_folder(folder: Path, files: int, few: int, rows: int, dim: int) -> int:
    """Write a table to fit to, a folder ``all`` and, as links, its first files in ``few``; return the bytes of all."""
    with optional_packages("", 'pip install "protonet[parquet]"'):
        import pyarrow as pa  # noqa: PLC0415 - optional
        from pyarrow import parquet  # noqa: PLC0415

    names = [f"x{column}" for column in range(dim)]
    x, labels = sample_table(FITTED, dim, CLASSES)
    parquet.write_table(pa.table([*x.T, labels], [*names, "label"]), folder / "train.parquet")
    generator = np.random.default_rng(1)
    size = 0
    for part in ("all", "few"):
        (folder / part).mkdir()
    for number in range(files):
        path = folder / "all" / f"part-{number:05}.parquet"
        with parquet.ParquetWriter(path, pa.schema([(name, pa.float32()) for name in names])) as writer:
            for start in range(0, rows, GROUP):
                block = generator.standard_normal((min(GROUP, rows - start), dim), dtype=np.float32)
                writer.write_table(pa.table(list(block.T), names))
        size += path.stat().st_size
        if number < few:
            (folder / "few" / path.name).hardlink_to(path)
    return size
