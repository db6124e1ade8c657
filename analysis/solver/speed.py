"""Measure time, memory and file size of predictions, fits and start-up, of this version and another version.

Each measurement is the CPU time of its own process on one thread; both versions alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.real_data.sets import load_real_dataset, split_shots
from analysis.shared.runner import StudyParser, StudyReport
from analysis.shared.tables import write_csv
from protonet.datasets import load_glyphs
from protonet.ui.text import format_table
from solution.pack import ROOT

TIMED_SERIES = ("ArrowHead", "GunPoint", "JapaneseVowels", "ItalyPowerDemand")
TIMED_DATASETS = ("digits", "wine", "breast_cancer", "iris", *TIMED_SERIES, "text")
SHOTS = (5, 20)  #: Labelled rows per class of the real problems.
PEAKS_PER_SPECTRUM, SPECTRUM_LENGTH = 4, 200  #: Peaks and values of a synthetic spectrum.
#: Numbers of rows, classes and features of isotropic data.
SIZES_OF_LARGE_FITS = ((1000, 10, 384), (10_000, 128, 384), (100_000, 1000, 384))
ROW_TITLES = {
    "predict": "predict a row of {}, µs",
    "fit": "solve {}, s",
    "grow": "solve {}, s",
    "command": "protonet {}, s",
    "memory": "... its peak, MiB",
    "size": "... its model, MB",
}
TABLE_NOTE = """
CPU seconds, or microseconds, of one thread. Solve is the sum over {problems} real problems of {shots} rows per class;
right is the share of rows that are classified right there, in percent, and loss their mean log-loss. Pixels: 784 of
10 characters, 20 of each. Spectra: 200 values in an order, six classes of five. Text: 384 features, 39 classes of 20.
"""


class Measurement(NamedTuple):
    """A measurement to execute: its function, data and option."""

    kind: str  #: Of `analysis.solver.speed_worker.MEASUREMENTS`.
    name: str
    data: dict[str, Any]  #: Arrays by name.
    option: str  #: An effort, or the folder of a command.


def add_options(parser: StudyParser) -> None:
    """Add the study's option: the folder of another version of the library."""
    parser.add_argument("--folder", metavar="PATH", help="the checkout of another version, to measure before this one")


def run(options: argparse.Namespace) -> StudyReport:
    """Execute all measurements with this version and the other version alternately."""
    versions = {"now": ROOT, **({} if options.folder is None else {"before": Path(options.folder)})}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for measurement in tqdm(list(list_measurements(Path(folder))), unit="figure", dynamic_ncols=True):
            results = {name: measure(measurement, root, Path(folder)) for name, root in versions.items()}
            option = "" if measurement.kind == "command" else measurement.option
            rows.append({"kind": measurement.kind, "name": measurement.name, "option": option, **results})
    return StudyReport(rows, tabulate(rows))


def measure(measurement: Measurement, root: Path, folder: Path) -> dict[str, float]:
    """Execute a measurement in a process with the library at ``root``; return its results by name."""
    path = folder / "data.npz"
    np.savez(path, **measurement.data)
    paths = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    worker = str(Path(__file__).with_name("speed_worker.py"))
    command = [sys.executable, worker, measurement.kind, str(path), measurement.option]
    done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def list_measurements(folder: Path) -> Iterator[Measurement]:
    """Yield all measurements; the tables and pictures that commands read are written to ``folder``."""
    generator = np.random.default_rng(0)
    characters = load_glyphs(characters=list("abdeghknqr"), copies=3)
    predicted = {"784 pixels": split_rows(characters.x, characters.y, 20), "a spectrum": sample_spectra(generator)}
    text = load_real_dataset("text")
    predicted["a text"] = split_rows(text.x, text.y, 20)
    for name, data in predicted.items():
        yield from (Measurement("predict", name, data, effort) for effort in ("fast", "default"))
    for name in TIMED_DATASETS:
        for shots in SHOTS:
            split = split_shots(load_real_dataset(name), shots, 0)
            if split is not None:
                parts = {"x": split.train_x, "y": split.train_y, "new": split.test_x, "truth": split.test_y}
                arrays = {part: value.numpy() for part, value in parts.items()}
                yield from (Measurement("fit", f"{name}, {shots}", arrays, effort) for effort in ("fast", "default"))
    for sizes in SIZES_OF_LARGE_FITS:
        name = "{:,} rows of {:,} classes, {:,} features".format(*sizes)
        yield Measurement("grow", name, {"sizes": np.array(sizes)}, "default")
    for rows, columns in ((2000, 21), (60, 10_000)):
        path = folder / f"{rows}.csv"
        write_table(path, rows, columns, generator)
        arguments = np.array(["fit", path.name, "--label", "label", "-o", "model.safetensors"])
        yield Measurement("command", f"fit, {rows:,} x {columns:,}", {"arguments": arguments}, str(folder))
    pictures = folder / "pictures"
    write_pictures(pictures, predicted["784 pixels"])
    arguments = np.array(["fit", "pictures", "--representation", "none", "-o", "model.safetensors"])
    yield Measurement("command", "fit, 200 pictures", {"arguments": arguments}, str(folder))
    for command in ("fit --help", "fit --nothing", "info missing.safetensors"):
        yield Measurement("command", command, {"arguments": np.array(command.split())}, str(folder))


def split_rows(x: Tensor, y: Tensor, shots: int) -> dict[str, np.ndarray]:
    """Split rows into ``shots`` labelled rows per class and at most 512 test rows, as arrays by name."""
    order = np.random.default_rng(0).permutation(len(y))
    features, labels = x.numpy()[order], y.numpy()[order]
    few = np.concatenate([np.flatnonzero(labels == c)[:shots] for c in np.unique(labels)])
    others = np.setdiff1d(np.arange(len(labels)), few)[:512]
    return {"x": features[few], "y": labels[few], "new": features[others], "truth": labels[others]}


def sample_spectra(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Sample spectra of six classes, five labelled rows each: peaks of random heights at positions of the class."""
    y = np.arange(600) % 6
    centres = generator.random((6, PEAKS_PER_SPECTRUM))[y] + 0.01 * generator.standard_normal((600, PEAKS_PER_SPECTRUM))
    heights = 1 + 0.2 * generator.standard_normal((600, PEAKS_PER_SPECTRUM))
    distances = np.linspace(0, 1, SPECTRUM_LENGTH)[:, None] - centres[:, None]  # (n, length, peaks)
    peaks = np.exp(-((distances / 0.03) ** 2)) @ heights[:, :, None]
    x = peaks[:, :, 0] + 0.1 * generator.standard_normal((600, SPECTRUM_LENGTH))
    return split_rows(torch.from_numpy(x).float(), torch.from_numpy(y), 5)


def write_table(path: Path, rows: int, columns: int, generator: np.random.Generator) -> None:
    """Write a numeric CSV with three or four overlapping classes."""
    labels = np.arange(rows) % (3 if columns > rows else 4)
    x = generator.standard_normal((rows, columns)) + 0.5 * generator.standard_normal((4, columns))[labels]
    cells = [[*map("{:.5g}".format, row), f"c{label}"] for row, label in zip(x, labels, strict=True)]
    write_csv(path, [*(f"x{column}" for column in range(columns)), "label"], cells)


def write_pictures(folder: Path, data: dict[str, np.ndarray]) -> None:
    """Write the labelled rows as PNG files, one folder per class."""
    from PIL import Image  # noqa: PLC0415 - optional

    for index, (row, label) in enumerate(zip(data["x"], data["y"], strict=True)):
        path = folder / f"c{label}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = 255 * (row - row.min()) / max(1e-9, np.ptp(row))
        Image.fromarray(grey.reshape(28, 28).astype(np.uint8)).save(path)


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Format results as a Markdown table; the seconds of all solves of an effort are summed."""
    versions = [name for name in ("before", "now") if name in rows[0]]
    fits, lines = [row for row in rows if row["kind"] == "fit"], list[list[str]]()
    for row in (row for row in rows if row["kind"] != "fit"):
        title = ROW_TITLES[row["kind"]].format(f"{row['name']}, {row['option']}" if row["option"] else row["name"])
        lines.append([title, *(f"{row[version]['value']:.4g}" for version in versions)])
        for part in ("memory", "size"):
            if row["now"].get(part):
                lines.append([ROW_TITLES[part], *(f"{row[version][part]:.4g}" for version in versions)])
    for effort in ("fast", "default"):
        some = [[row[version] for row in fits if row["option"] == effort] for version in versions]
        lines += [
            [ROW_TITLES["fit"].format(effort), *(f"{sum(fit['value'] for fit in part):.1f}" for part in some)],
            ["... accuracy, %", *(f"{100 * statistics.fmean(fit['right'] for fit in part):.2f}" for part in some)],
            ["... loss", *(f"{statistics.fmean(fit['loss'] for fit in part):.4f}" for part in some)],
        ]
    note = TABLE_NOTE.format(problems=len(fits) // 2, shots=" and ".join(map(str, SHOTS)))
    return format_table(["", *versions], lines) + note
