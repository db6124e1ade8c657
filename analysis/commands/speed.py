"""Time and memory of the commands for a person's own file, start-up included."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.shared.runner import Report, StudyParser
from analysis.solver.scale import list_products, time_products
from protonet.files.model import load_model
from protonet.ui.text import format_table

#: Rows, features and classes of the small table, of the large CSV, and of the rows that are predicted in blocks.
SMALL, LARGE, STREAMED = (520, 16, 4), (100_000, 100, 10), (1_000_000, 384, 20)
MIXED = 20  #: Columns of the table of mixed columns.
FITTED, MULTIPLIED = 400, 65_536  #: Rows of the model that predicts in blocks, and of the bare products.
#: Runs a command and prints its seconds and the peak of its memory, in a process that has no other child.
MEASURE = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
seconds = time.perf_counter() - started
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]))
"""
NOTE = """
Time and peak memory of a process for each command, its start (the first line) included, on {threads} of torch's
threads; load {load}, of other processes as well. The table that is fitted, predicted and added has {small} rows. Bare
products: float32 products of random matrices of all the shapes that a row is multiplied with
({products}), {multiplied:,} rows at a time: {bare:.1f} s of the CPU for {rows:,} rows. Predicting them takes
{ratio:.2f} times as long, the start and what is written included; {net:.2f} times without the start.
"""


def sample_table(rows: int, dim: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features (rows, dim) float32 of overlapping classes with correlated noise, and labels (rows,)."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((classes, dim), dtype=np.float32)
    mixing = generator.standard_normal((dim, dim), dtype=np.float32) / dim**0.5
    labels = np.arange(rows) % classes
    noise = generator.standard_normal((rows, dim), dtype=np.float32)
    return 0.3 * centres[labels] + noise @ mixing, labels


def write_csv(path: Path, x: np.ndarray, labels: np.ndarray) -> None:
    """Write a table with a column of labels."""
    with path.open("w", encoding="utf-8") as file:
        file.write(",".join([*(f"x{column}" for column in range(x.shape[1])), "label"]) + "\n")
        for row, label in zip(x.tolist(), labels.tolist(), strict=True):
            file.write(",".join([*map("{:.6g}".format, row), f"class {label}"]) + "\n")


def sample_columns(rows: int, seed: int, *, mixed: bool) -> dict[str, np.ndarray]:
    """Return columns of four overlapping classes, and ``label``: numbers, or also categories, dates, money and gaps."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, rows)
    columns: dict[str, np.ndarray] = {}
    for number in range(MIXED):
        z = generator.standard_normal(rows) + 0.7 * ((labels + number) % 4 == 0)
        kind = number % 10 if mixed else 0
        if kind in {1, 2}:
            columns[f"gaps {number}"] = np.where(generator.random(rows) < 0.05, np.nan, z)
        elif kind in {3, 4, 5}:
            columns[f"category {number}"] = np.array([f"level {at}" for at in range(12)])[
                (z * 2 + 6).clip(0, 11).astype(int)
            ]
        elif kind == 6:
            columns[f"yes or no {number}"] = np.array(["no", "yes"])[(z > 0).astype(int)]
        elif kind == 7:
            columns[f"date {number}"] = np.datetime64("2020-01-01", "s") + (z * 1e7).astype(np.int64)
        elif kind == 8:
            columns[f"money {number}"] = np.array([f"${value:,.2f}" for value in 1000 * np.exp(z)])
        else:
            columns[f"number {number}"] = z
    return columns | {"label": np.array(["ant", "bee", "cat", "dog"])[labels]}


def write_parquet(path: Path, rows: int, seed: int = 0, *, mixed: bool) -> None:
    """Write such columns."""
    import pyarrow  # noqa: PLC0415 - optional
    from pyarrow import parquet  # noqa: PLC0415 - optional

    parquet.write_table(pyarrow.table(sample_columns(rows, seed, mixed=mixed)), path)


def write_rows(path: Path, rows: int, dim: int) -> None:
    """Write rows (rows, dim) float32 as NPY, some at a time."""
    generator = np.random.default_rng(1)
    array = np.lib.format.open_memmap(path, "w+", np.float32, (rows, dim))
    for start in range(0, rows, MULTIPLIED):
        part = array[start : start + MULTIPLIED]
        part[:] = generator.standard_normal(part.shape, dtype=np.float32)


def measure(command: Sequence[str]) -> tuple[float, float, float]:
    """Run ``python`` with arguments; return its seconds, those of the CPU, and the peak of its memory in MiB."""
    arguments = [sys.executable, "-c", MEASURE, sys.executable, *command]
    seconds, cpu, mebibytes = json.loads(subprocess.run(arguments, capture_output=True, check=True).stdout)
    return seconds, cpu, mebibytes


def run_commands(folder: Path, rows: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the seconds and mebibytes of each command, and those of bare products."""
    results: dict[str, Any] = {}

    def note(name: str, *arguments: str | Path, start: Sequence[str] = ("-m", "protonet")) -> None:
        tell(name)
        results[name] = measure([*start, *map(str, arguments)])

    note("import torch", start=("-c", "import torch"))
    write_csv(folder / "small.csv", *sample_table(*SMALL))
    for effort in ("fast", "default"):
        model = folder / f"{effort}.safetensors"
        note(f"fit, --effort {effort}", "fit", folder / "small.csv", "-o", model, "--effort", effort)
        note(f"predict, --effort {effort}", "predict", model, folder / "small.csv", "-o", folder / "small_out.csv")
    note("update", "update", folder / "fast.safetensors", folder / "small.csv", "--in-place")
    write_csv(folder / "large.csv", *sample_table(*LARGE))
    write_csv(folder / "part.csv", *sample_table(FITTED, *LARGE[1:]))
    model = folder / "large.safetensors"
    note("fit, 400 rows x 100", "fit", folder / "part.csv", "-o", model, "--effort", "fast")
    note(f"predict, CSV of {LARGE[0]:,} x {LARGE[1]}", "predict", model, folder / "large.csv", "-o", folder / "out.csv")
    if find_spec("pyarrow") is not None:
        for what in ("numbers", "mixed"):
            write_parquet(folder / f"{what}.parquet", FITTED, mixed=what == "mixed")
            model = folder / f"{what}.safetensors"
            note(f"fit, {FITTED} rows x {MIXED} {what}", "fit", folder / f"{what}.parquet", "-o", model)
        write_parquet(folder / "many.parquet", rows, 1, mixed=True)
        name = f"predict, Parquet of {rows:,} x {MIXED} mixed"
        note(name, "predict", folder / "mixed.safetensors", folder / "many.parquet", "-o", folder / "out.csv")
    x, labels = sample_table(FITTED, *STREAMED[1:])
    np.savez(folder / "fit.npz", x=x, y=labels)
    write_rows(folder / "rows.npy", rows, STREAMED[1])
    model = folder / "wide.safetensors"
    note("fit, 400 rows x 384", "fit", folder / "fit.npz", "-o", model)
    name = f"predict, NPY of {rows:,} x {STREAMED[1]}"
    note(name, "predict", model, folder / "rows.npy", "-o", folder / "out.csv")
    tell("bare products")
    shapes = results["products"] = list_products(load_model(model).network)
    seconds = time_products(shapes, MULTIPLIED, 3)
    results["a row's products"] = sum(seconds[shape] for shape in shapes)
    results["rows"], results["streamed"] = rows, name
    return results


def tabulate(results: dict[str, Any]) -> str:
    """Return the table in Markdown, with what explains it."""
    timed = {name: value for name, value in results.items() if isinstance(value, tuple)}
    lines = [[name, f"{seconds:.1f}", f"{cpu:.1f}", f"{peak:,.0f}"] for name, (seconds, cpu, peak) in timed.items()]
    bare = results["rows"] * results["a row's products"]
    start, cpu = timed["import torch"][1], timed[results["streamed"]][1]
    products = ", ".join(f"{into}x{out}" for into, out in results["products"])
    sizes = {"rows": results["rows"], "small": SMALL[0], "multiplied": MULTIPLIED, "products": products}
    costs = {"bare": bare, "ratio": cpu / bare, "net": (cpu - start) / bare}
    note = NOTE.format(threads=torch.get_num_threads(), load=results["load"], **sizes, **costs)
    return format_table(["command", "seconds", "of the CPU", "peak MiB"], lines) + note


def add_options(parser: StudyParser) -> None:
    """Add how many rows are predicted in blocks."""
    parser.add_whole("--rows", STREAMED[0], "rows that are predicted from NPY")


def run(options: argparse.Namespace) -> Report:
    """Measure every command."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        results = run_commands(Path(folder), options.rows, lambda name: print(name, file=sys.stderr))
    results["load"] = f"{load:.1f} before, {os.getloadavg()[0]:.1f} after"
    return Report(results, tabulate(results))
