"""What prediction costs where Laplacian views take part, and what rounding their distances changes in the classes.

A model of every radial view, of equal weights, is fitted to each family. It predicts new rows as it is, with rounded
distances, and with exact ones.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import process_time
from timeit import repeat
from typing import Any

import torch
from torch import Tensor

from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_columns
from analysis.solver.scale import list_products, time_products
from protonet import PrototypeNetwork
from protonet.datasets import FAMILIES, sample_family
from protonet.encoder import Encoder
from protonet.fit.networks import fit_choice
from protonet.fit.problem import pose_problem
from protonet.fit.search import Choice
from protonet.fit.solver import untouched_globals
from protonet.views import radial
from protonet.views.linear import Linear
from protonet.views.radial import VIEWS, RadialView
from protonet.views.view import Specification

TEMPERATURE = 0.05  #: Of the model: classes do not depend on it.
EXACT_ROWS, REPEATS = 2048, 3  #: Rows that exact distances are timed on, and how often anything is; the best counts.
BLOCK = 65_536  #: Rows that are predicted at a time.
COLUMNS = {
    "family": "{family}",
    "bare of all but Laplacian": "{others:.1f}",
    "bare of all": "{bare:.1f}",
    "predict": "{rounded:.1f}",
    "ratio to all but Laplacian": "{ratio:.1f}",
    "ratio to all": "{ratio_all:.1f}",
    "with exact distances": "{exact:.1f}",
    "ratio to all, exact": "{ratio_exact:.1f}",
    "accuracy": "{accuracy:.2f}",
    "accuracy, exact": "{accuracy_exact:.2f}",
    "same class": "{same:.3f} %",
}
NOTE = """
Microseconds of the CPU per row of {dim} features, on one thread, and the ratios of predictions to bare float32 matrix
products of the shapes that the network has. {views} views ({laplacian} of them Laplacian, of at most {units:,} units),
fitted to {fitted:,} rows of {classes} classes. Predicted are {rows:,} rows, {block:,} at a time; exact ones {exact:,}.
Accuracy and same class, in percent, are of {held:,} rows that the model has not seen.
"""


def add_options(parser: StudyParser) -> None:
    """Add the sizes."""
    parser.add_names("--family", FAMILIES, "isotropic,heavy_tails,warped")
    parser.add_whole("--rows", 1_000_000, "rows that are predicted")
    parser.add_whole("--dim", 384, "features", low=2)
    parser.add_whole("--classes", 20, "classes", low=2)
    parser.add_whole("--shots", 32, "rows per class that the model is fitted to", low=2)
    parser.add_whole("--held", 200, "rows per class that it is judged on")


def run(options: argparse.Namespace) -> Report:
    """Measure each family."""
    torch.set_num_threads(1)
    rows = [measure(family, options) for family in options.family]
    about = {"views": rows[0]["views"], "laplacian": rows[0]["laplacian"], "units": max(row["units"] for row in rows)}
    sizes = {"fitted": options.shots * options.classes, "held": options.held * options.classes}
    shown = {"block": BLOCK, "exact": EXACT_ROWS, "rows": options.rows, "dim": options.dim, "classes": options.classes}
    return Report(rows, format_columns(COLUMNS, rows) + NOTE.format(**about, **sizes, **shown))


@torch.no_grad()
def measure(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what predictions of one family's model cost, and how many classes rounding changes."""
    sizes = {"n_train": options.shots, "n_val": 0, "n_test": options.held}
    split = sample_family(family, seed=0, num_classes=options.classes, dim=options.dim, **sizes)
    network = fit_all(split.train_x, split.train_y, options.classes)
    views = list(network.encoder.list_views()) if isinstance(network.encoder, Encoder) else []
    laplacian = [view for view in views if isinstance(view, RadialView) and view.norm == 1]
    classes = network(split.test_x).argmax(dim=1)
    with exact_distances():
        exact = network(split.test_x).argmax(dim=1)
        seconds = time_best(network, split.test_x[:EXACT_ROWS]) / min(EXACT_ROWS, len(split.test_x))
    costs = price(network, laplacian)
    rounded = time_rows(network, options.rows, options.dim) / options.rows
    return {
        "family": family,
        "views": len(views),
        "laplacian": len(laplacian),
        "units": max(len(view.landmarks) for view in laplacian),
        "others": 1e6 * costs["others"],
        "bare": 1e6 * costs["bare"],
        "rounded": 1e6 * rounded,
        "exact": 1e6 * seconds,
        "ratio": rounded / costs["others"],
        "ratio_all": rounded / costs["bare"],
        "ratio_exact": seconds / costs["bare"],
        "accuracy": percent(classes == split.test_y),
        "accuracy_exact": percent(exact == split.test_y),
        "same": percent(classes == exact),
    }


def fit_all(x: Tensor, y: Tensor, num_classes: int) -> PrototypeNetwork:
    """Return a network of every radial view, as by default at bandwidth 2 and ridge 0.1, and of what they read."""
    with untouched_globals():
        problem, _ = pose_problem(x, y, num_classes)
        unshifted: list[Specification] = [view for view in VIEWS if not view.shifted]
        sources: list[Specification] = [Linear(name) for name in ("raw", "whitened", "standardised")]
        views = tuple((view, 1.0) for view in (*sources, *unshifted))
        return fit_choice(problem, Choice(views, TEMPERATURE))


@contextmanager
def exact_distances() -> Iterator[None]:
    """Let no Laplacian view round its distances."""
    before = radial.RADIAL
    radial.RADIAL = replace(before, rounding=0.0)
    try:
        yield
    finally:
        radial.RADIAL = before


def price(network: PrototypeNetwork, laplacian: Sequence[RadialView]) -> Mapping[str, float]:
    """Return the seconds of the CPU that a row's bare products take: of all views, and of all but the Laplacian."""
    shapes = list_products(network)
    theirs = [shape for view in laplacian for shape in view.products()]
    seconds = time_products(shapes, BLOCK, REPEATS)
    bare = math.fsum(seconds[shape] for shape in shapes)
    return {"bare": bare, "others": bare - math.fsum(seconds[shape] for shape in theirs)}


def time_best(network: PrototypeNetwork, x: Tensor) -> float:
    """Return the seconds of the CPU that rows (n, dim) take."""
    return min(repeat(lambda: network(x), timer=process_time, number=1, repeat=REPEATS))


def time_rows(network: PrototypeNetwork, rows: int, dim: int) -> float:
    """Return the seconds of the CPU that many rows take, made block by block."""
    generator, seconds = torch.Generator().manual_seed(0), 0.0
    for first in range(0, rows, BLOCK):
        x = torch.randn(min(BLOCK, rows - first), dim, generator=generator)
        started = process_time()
        network(x)
        seconds += process_time() - started
    return seconds


def percent(hits: Tensor) -> float:
    """Return the share of hits (n,) bool, in percent."""
    return 100 * float(hits.double().mean())
