"""Pictures in folders: the solver on our own features, on raw pixels, and HOG with a support vector machine.

The features and their sizes were chosen on the first half of the sets; the other half was looked at for the table.
"""

from __future__ import annotations

import argparse
import statistics
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from analysis.pictures.sets import SETS, TUNED, Pictures, write_set
from analysis.shared.baselines import BASELINES
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import BUILD, Report, StudyParser, load_sets, parse_wholes
from analysis.shared.tables import format_mean, mean_and_error, subtract
from protonet.fit.search import EFFORTS
from protonet.fit.solver import solve_problem
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.picture import Picture
from protonet.ui.command_line import check_name
from protonet.ui.text import count, format_table
from solution.pack import library_files

METHODS = {"ours": "ours", "pixels": "our solver, pixels", "hog": "HOG, RBF SVM"}
#: Rows of a class that are judged, at the most; pixels per side of raw pixels, of pictures that are larger in colour.
MOST_TESTS, RAW_SIDE = 20, 24
NOTE = """
Test accuracy in percent, mean over {splits} ± one standard error. The pictures were written as PNG in a folder per
class, and read again. Raw pixels are grey where the set is, and as large as the pictures, in colour 24 x 24. HOG has
nine orientations, cells of 8 x 8 and blocks of 2 x 2 of 64 x 64 pixels; the SVM's penalty and bandwidth are chosen by
folds. Features were chosen on the first half of the sets alone.
"""


class Run(NamedTuple):
    """One method on one split."""

    dataset: str
    shots: int
    seed: int
    method: str
    effort: str  #: Of the solver.


def add_options(parser: StudyParser) -> None:
    """Add what to measure."""
    parser.add_names("--sets", SETS)
    parser.add("--shots", "5,20", "labelled pictures per class", partial(parse_wholes, low=2))
    parser.add_whole("--splits", 3, "splits of each set")
    parser.add("--effort", "default", f"of {', '.join(EFFORTS)}", partial(check_name, known=EFFORTS))
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Do every run, and compare the methods by set."""
    names = [name for name, _ in load_sets(options.sets or SETS, lambda name: write_set(name, BUILD / "pictures"))]
    numbers = range(options.splits)
    runs = [
        Run(name, shots, seed, method, options.effort)
        for seed in numbers
        for name in names
        for shots in options.shots
        for method in METHODS
    ]
    sources = ("analysis/pictures/sets.py", "protonet/representations/pictures/descriptors.py", *library_files())
    results = run_all(runs, run_method, options.state, lambda run: hash_sources(*sources))
    rows = []
    for name in names:
        for shots in options.shots:
            keys = {each: [Run(name, shots, seed, each, options.effort) for seed in numbers] for each in METHODS}
            own = {each: [100 * results[key] for key in own] for each, own in keys.items()}
            rows.append({"set": name, "shots": shots, "tuned": name in TUNED, "percent": own})
    return Report(rows, tabulate(rows, options.splits))


def split(pictures: Pictures, shots: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the labelled pictures and of those to be judged."""
    generator = np.random.default_rng([seed, shots])
    orders = [
        generator.permutation(np.flatnonzero(pictures.labels == c)) for c in range(int(pictures.labels.max()) + 1)
    ]
    chosen, judged = zip(*((order[:shots], order[shots:][-MOST_TESTS:]) for order in orders), strict=True)
    return np.concatenate(chosen), np.concatenate(judged)


def run_method(run: Run) -> float:
    """Return a method's accuracy on a split."""
    pictures = write_set(run.dataset, BUILD / "pictures")
    chosen, judged = split(pictures, run.shots, run.seed)
    labels = pictures.labels
    x = read_features(run.dataset, run.method)
    if run.method == "hog":
        outcome = BASELINES["svm"].fit(x[chosen], labels[chosen])(x[judged])
        return float((outcome.predicted == labels[judged]).mean())
    blocks, spans = None, list[tuple[int, int]]()
    if run.method == "ours":
        encoding = Encoding((Picture(),))
        blocks, spans = encoding.blocks, encoding.spans
    rows = torch.from_numpy(x)
    given = (rows[torch.from_numpy(chosen)], torch.from_numpy(labels[chosen]))
    network = solve_problem(given, effort=run.effort, blocks=blocks, spans=spans).network
    with torch.no_grad():
        found = network(rows[torch.from_numpy(judged)]).argmax(dim=1).numpy()
    return float((found == labels[judged]).mean())


@cache
def read_features(dataset: str, method: str) -> np.ndarray:
    """Return what a method reads of each picture of a set, (n, features) float32."""
    paths = write_set(dataset, BUILD / "pictures").paths
    if method == "hog":
        return np.stack([find_hog(path) for path in paths])
    if method == "pixels":
        return read_raw(paths)
    return Encoding((Picture(),)).encode([np.array(list(map(str, paths)), object)])


def read_raw(paths: list[Path]) -> np.ndarray:
    """Return pixels (n, dim) float32 in [0, 1]: grey ones as they are, coloured ones in planes, made smaller."""
    rows = []
    for path in paths:
        with Image.open(path) as image:
            side = min(image.width, 28 if image.mode == "L" else RAW_SIDE)
            pixels = np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float32) / 255
        rows.append(pixels.reshape(-1) if pixels.ndim == 2 else pixels.transpose(2, 0, 1).reshape(-1))
    return np.stack(rows)


def find_hog(path: Path, *, side: int = 64, cell: int = 8, bins: int = 9) -> np.ndarray:
    """Return histograms of oriented gradients (features,) of a picture.

    Source: Dalal and Triggs, "Histograms of oriented gradients for human detection" (2005): unsigned orientations,
        L2-Hys over blocks of 2 x 2 cells, the gradient of the strongest channel.
    """
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC), np.float32) / 255
    along, across = np.gradient(pixels, axis=1), np.gradient(pixels, axis=0)
    strongest = (along**2 + across**2).argmax(axis=2)[..., None]
    along, across = (np.take_along_axis(each, strongest, axis=2)[..., 0] for each in (along, across))
    length, angle = np.hypot(along, across), np.arctan2(across, along) % np.pi * (bins / np.pi)
    lower = np.floor(angle)
    maps = np.zeros((bins, side, side), np.float32)
    lines, columns = np.indices((side, side))
    np.add.at(maps, (lower.astype(int) % bins, lines, columns), length * (1 - (angle - lower)))
    np.add.at(maps, ((lower.astype(int) + 1) % bins, lines, columns), length * (angle - lower))
    cells = maps.reshape(bins, side // cell, cell, side // cell, cell).sum(axis=(2, 4))
    shifted = [cells[:, y : y + side // cell - 1, x : x + side // cell - 1] for y in (0, 1) for x in (0, 1)]
    blocks = np.concatenate(shifted).reshape(4 * bins, -1)
    for most in (0.2, 1.0):
        blocks = np.minimum(blocks / np.sqrt((blocks**2).sum(axis=0) + 1e-4), most)
    return blocks.reshape(-1)


def tabulate(rows: list[dict[str, object]], splits: int) -> str:
    """Return the Markdown of all rows, and of the means of both halves."""
    lines = []
    for row in rows:
        own: dict[str, list[float]] = row["percent"]  # type: ignore[assignment]
        leads = [format_mean(subtract(own["ours"], own[each]), sign=True) for each in METHODS if each != "ours"]
        half = "first" if row["tuned"] else "other"
        lines.append([half, str(row["set"]), str(row["shots"]), *(format_mean(own[each]) for each in METHODS), *leads])
    leads = [f"ours less {title}" for name, title in METHODS.items() if name != "ours"]
    text = format_table(["half", "set", "per class", *METHODS.values(), *leads], lines)
    for half, tuned in (("first", True), ("other", False)):
        chosen = [row["percent"] for row in rows if row["tuned"] is tuned]
        if not chosen:
            continue
        means = {each: [statistics.fmean(own[each]) for own in chosen] for each in METHODS}  # type: ignore[index]
        summary = []
        for each, title in METHODS.items():
            apart = subtract(means["ours"], means[each])
            lead, error = mean_and_error(apart)
            ends = f"[{lead - 1.96 * error:+.1f}, {lead + 1.96 * error:+.1f}]"
            own_lead = ["", "", ""] if each == "ours" else [f"{lead:+.1f}", ends, f"{min(apart):+.1f}"]
            summary.append([title, f"{statistics.fmean(means[each]):.1f}", *own_lead])
        header = ["method", "mean", "ours less it", "95 % interval over sets", "at worst"]
        text += f"\nThe {half} half, {count(len(chosen), 'row')}:\n\n{format_table(header, summary)}"
    return text + NOTE.format(splits=count(splits, "split"))
