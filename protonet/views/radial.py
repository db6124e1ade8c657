"""Radial views: a hidden layer of radial units at labelled samples, with a read-out in closed form.

Kernel ridge regression of the class indicators: the view of a row is its score for each class, and the prototypes
of such a view are near one-hot. Nothing in it is trained by gradient, so all of it are buffers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.losses import class_means
from protonet.views.linear import CHUNK, LinearView
from protonet.views.shifts import move_rows

#: Widths in units of the median distance, and ridges, that folds choose from.
GRID = tuple((width, ridge) for width in (0.5, 1.0, 2.0, 4.0, 8.0) for ridge in (1e-3, 1e-2, 1e-1, 1.0))
#: Most radial units of a view, and most multiplications that one fit may spend on distances or on products.
MAX_UNITS, DISTANCE_WORK, PRODUCT_WORK = 1024, 2e8, 1.5e9

#: Read-outs of a class that sum to more, in absolute value, are worked with in float64.
SINGLE = 600.0


class RadialKind(NamedTuple):
    """What a radial view reads, and how it measures distance."""

    name: str
    reads: str  # the linear view
    norm: int  # 1: sum of absolute differences, 2: squared Euclidean
    squash: bool = False  # tanh of the linear view, feature by feature
    moved: bool = False  # fitted to moved rows, too


RADIAL_KINDS = (
    RadialKind("gaussian centred", "centred", 2),
    RadialKind("gaussian standardised", "standardised", 2),
    RadialKind("gaussian relevant", "relevant", 2),
    RadialKind("gaussian whitened", "whitened", 2),
    RadialKind("gaussian squashed", "robust", 2, squash=True),
    RadialKind("laplacian standardised", "standardised", 1),
    RadialKind("laplacian relevant", "relevant", 1),
    RadialKind("laplacian squashed", "robust", 1, squash=True),
    RadialKind("moved gaussian centred", "centred", 2, moved=True),
    RadialKind("moved gaussian squashed", "robust", 2, squash=True, moved=True),
    RadialKind("moved laplacian standardised", "standardised", 1, moved=True),
)


class RadialView(nn.Module):
    """Class scores ``sum_j readout_j exp(-distance(z, landmark_j) / width)`` of a linear view z.

    Args:
        view: The linear view that is read.
        kind: The distance.
        landmarks: (units, input_dim) in the (squashed) linear view.
        readout: (units, num_classes).
        width: > 0, in units of the distance.
    """

    landmarks: Tensor
    readout: Tensor
    width: Tensor

    def __init__(self, view: LinearView, kind: RadialKind, landmarks: Tensor, readout: Tensor, width: float) -> None:
        super().__init__()
        self.view = view
        self.norm, self.squash = kind.norm, kind.squash
        self.embedding_dim = readout.shape[1]
        self.register_buffer("landmarks", landmarks.to(torch.float32))
        self.register_buffer("readout", readout.to(torch.float32))
        self.register_buffer("width", torch.tensor(width, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, input_dim) to class scores (n, num_classes)."""
        return self.score(self.view(x))

    def score(self, z: Tensor) -> Tensor:
        """Map the linear view (n, dim) of features to class scores (n, num_classes)."""
        # Large read-outs cancel: in float32 a near-zero score would hang on the batch's rounding.
        large = bool(self.readout.abs().sum(dim=0).max() > SINGLE)
        dtype = torch.float64 if large else torch.promote_types(z.dtype, torch.float32)
        given, z = z.dtype, (torch.tanh(z) if self.squash else z).to(dtype)
        landmarks, readout, width = (each.to(dtype) for each in (self.landmarks, self.readout, self.width))
        return (torch.exp(distances(z, landmarks, self.norm) / -width) @ readout).to(given)


def read(view: LinearView, x: Tensor, *, squash: bool) -> Tensor:
    """Return the linear view (n, dim) of features, squashed feature by feature if asked for."""
    z: Tensor = view(x)
    return torch.tanh(z) if squash else z


def distances(z: Tensor, landmarks: Tensor, norm: int) -> Tensor:
    """Return (n, units): sums of absolute differences for norm 1, squared Euclidean distances for norm 2."""
    if norm == 1:
        return torch.cdist(z, landmarks, p=1.0)
    squares = landmarks.square().sum(dim=1) - 2 * (z @ landmarks.T)
    return (squares + z.square().sum(dim=1, keepdim=True)).clamp_min(0)


def count_units(kind: RadialKind, n: int, dim: int) -> int:
    """Return how many of n samples become radial units: all, unless that is too much work."""
    limits = [n, MAX_UNITS, math.isqrt(int(PRODUCT_WORK / n))]
    if kind.norm == 1:
        limits.append(int(DISTANCE_WORK / (n * dim)))
    return max(1, min(limits))


class _Problem:
    """Kernel ridge regression of class indicators on the rows of one linear view, for any width and ridge."""

    def __init__(
        self, kind: RadialKind, view: LinearView, x: Tensor, labels: Tensor, num_classes: int, moves: tuple[int, ...]
    ) -> None:
        if kind.moved:
            x, labels = move_rows(x, moves), labels.repeat(len(moves))
        z = torch.cat([read(view, rows, squash=kind.squash) for rows in x.split(CHUNK)])
        units = count_units(kind, *z.shape)
        self.chosen = torch.linspace(0, len(z) - 1, units, dtype=torch.float64).round().long()
        self.landmarks = z[self.chosen]
        units64 = self.landmarks.to(torch.float64)
        self.between = torch.cat([distances(rows.to(torch.float64), units64, kind.norm) for rows in z.split(CHUNK)])
        apart = self.between[: 4 * CHUNK]
        apart = apart[apart > 1e-12]  # a unit is no distance away from its own sample
        self.median = float(apart.median()) if len(apart) else 1.0
        indicators = F.one_hot(labels, num_classes).to(torch.float64)
        self.targets = indicators - indicators.mean(dim=0)  # (n, num_classes)

    def solve(self, width: float, ridges: list[float]) -> tuple[Tensor, list[Tensor]]:
        """Return the kernel (n, units) float64 and the read-out (units, num_classes) for each ridge."""
        kernel = torch.exp(-self.between / (width * self.median))
        gram, right, penalty = kernel, self.targets, torch.eye(len(self.landmarks), dtype=torch.float64)
        if len(self.landmarks) < len(kernel):  # a subset of regressors: normal equations, with a hair of jitter
            penalty = kernel[self.chosen] + 1e-6 * penalty
            gram, right = kernel.T @ kernel, kernel.T @ self.targets
        readouts = []
        for ridge in ridges:
            factor, failed = torch.linalg.cholesky_ex(gram + ridge * penalty)
            usable = not bool(failed) and bool(torch.isfinite(factor).all())
            readouts.append(torch.cholesky_solve(right, factor) if usable else torch.zeros_like(right))
        return kernel, readouts


def fit_radial(
    kind: RadialKind,
    setting: tuple[float, float],
    view: LinearView,
    x: Tensor,
    labels: Tensor,
    num_classes: int,
    moves: tuple[int, ...] = (0,),
) -> RadialView:
    """Fit one radial view in closed form.

    Args:
        kind: What it reads and how it measures distance.
        setting: Width, in units of the median distance between samples and units, and ridge.
        view: The linear view of ``kind.reads``, fitted to the same samples.
        x: (n, dim) float32 features.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        moves: Offsets of the copies that a moved kind is fitted to; see `protonet.views.shifts`.

    Returns:
        The view, of ``num_classes`` dimensions.

    Source: kernel ridge regression (Saunders et al. 1998); with more samples than units, the subset of regressors
        (Smola and Schoelkopf 2000).
    """
    problem = _Problem(kind, view, x, labels, num_classes, moves)
    _, (readout,) = problem.solve(setting[0], [setting[1]])
    return RadialView(view, kind, problem.landmarks, readout, setting[0] * problem.median)


def radial_cosines(
    kind: RadialKind,
    view: LinearView,
    x: Tensor,
    labels: Tensor,
    queries: Tensor,
    num_classes: int,
    settings: tuple[tuple[float, float], ...],
    moves: tuple[int, ...] = (0,),
) -> Tensor:
    """Fit on labelled samples with each of the settings and classify queries by cosine.

    Args:
        kind: What the view reads and how it measures distance.
        view: The linear view of ``kind.reads``, fitted to the same samples.
        x: (n, dim) float32 features.
        labels: (n,) int64.
        queries: (m, dim) float32 features.
        num_classes: Number of classes.
        settings: Widths and ridges; the ridges of one width share its work.
        moves: As in `fit_radial`.

    Returns:
        (len(settings), m, num_classes) float32: the cosines of the queries to the class prototypes.
    """
    problem = _Problem(kind, view, x, labels, num_classes, moves)
    asked = read(view, queries, squash=kind.squash).to(torch.float64)
    to_queries = distances(asked, problem.landmarks.to(torch.float64), kind.norm)
    cosines = torch.empty(len(settings), len(queries), num_classes, dtype=torch.float32)
    for width in dict.fromkeys(width for width, _ in settings):
        places = [place for place, setting in enumerate(settings) if setting[0] == width]
        kernel, readouts = problem.solve(width, [settings[place][1] for place in places])
        query_kernel = torch.exp(-to_queries / (width * problem.median))
        for place, readout in zip(places, readouts, strict=True):
            means, _ = class_means(F.normalize(kernel[: len(x)] @ readout, dim=1), labels, num_classes)
            scores = F.normalize(query_kernel @ readout, dim=1)
            cosines[place] = scores @ F.normalize(means, dim=1).T
    return cosines
