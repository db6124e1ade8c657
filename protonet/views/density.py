"""Density views: class probabilities by Bayes' rule from a density of each class in the output of a linear view.

The density of a class has a component at each labelled row (for classes with several modes), or is one Gaussian whose
variance is that of the class (for classes of different noise). Its width is chosen by the log-loss of rows that are
left out one at a time, in closed form. The prototypes of the view are nearly one-hot vectors; all is stored in buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import class_means
from protonet.selection.scoring import fit_temperatures, is_worse_by_one_error
from protonet.views.config import Config, bounded_field, raise_unless
from protonet.views.distances import batch_invariant_matmul
from protonet.views.evaluation import Candidate, CandidateEvaluator, ViewFamily
from protonet.views.linear import LinearSpec
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.view import InputMap, LinearMap, TrainingRows, View, require_linear_map, select_evenly

#: Densities and variances below this count as this.
MIN_DENSITY = 1e-30
#: Maximum number of rows that are components: the cosines of all pairs of them take 64 MB.
MAX_COMPONENTS = 4096


class FittedDensities(NamedTuple):
    """The components of the densities of all classes, and how well they predict rows that are left out."""

    tensors: dict[str, Tensor]  #: The buffers of a `DensityView`.
    loss: float  #: Mean log-loss of the rows that are left out one at a time, in nats; infinite if there are none.


@dataclass(frozen=True)
class DensitySpec:
    """The spec (hyperparameters) of a density view."""

    source: LinearSpec  #: The spec of the linear view whose affine map is the input.
    per_row: bool  #: Whether each labelled row is a component of its class; otherwise, each class is one Gaussian.
    use_shifts: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False

    @property
    def tags(self) -> frozenset[str]:
        """Properties by which the prior predicts the view's weight: the density, and the scaling of the input."""
        return self.source.tags | {"rows" if self.per_row else "variances"}

    @property
    def name(self) -> str:
        """The name in reports: "nearest rows" or "class variances", and the scaling of the input."""
        return f"{'nearest rows' if self.per_row else 'class variances'} {self.source.name}"

    def fit(self, rows: TrainingRows, source: InputMap | None) -> DensityView:
        """Fit the densities in closed form; the output of the view is ``num_classes`` probabilities."""
        source = require_linear_map(source)
        tensors = self.fit_densities(rows, source).tensors
        count, dim = tensors["centres"].shape
        config = DensityConfig(count, dim, rows.num_classes, self.per_row)
        return DensityView(config, source, tensors)

    def fit_densities(self, rows: TrainingRows, source: LinearMap) -> FittedDensities:
        """Fit the densities to the output of a linear map."""
        return _fit_kernels(rows, source) if self.per_row else _fit_gaussians(rows, source)


def _fit_kernels(rows: TrainingRows, source: LinearMap) -> FittedDensities:
    """Fit a von Mises-Fisher kernel density of each class: a component at each row, all of one concentration.

    Source: Vinyals et al., "Matching networks for one shot learning" (2016), eq. 1; the concentration as in Hall,
        Watson and Cabrera, "Kernel density estimation with spherical data" (1987).
    """
    # Inverse concentrations, in units of the cosine: with the smallest, the nearest row of each class decides.
    widths = (0.02, 0.05, 0.1, 0.2)
    by_class = rows.labels.argsort(stable=True)
    by_class = by_class[select_evenly(len(by_class), rows.scale_row_limit(MAX_COMPONENTS)).to(by_class.device)]
    labels = rows.labels[by_class]
    centres = F.normalize(source(rows.features[by_class]), dim=1)
    counts = torch.bincount(labels, minlength=rows.num_classes)
    others = (counts.expand(len(labels), -1) - F.one_hot(labels, rows.num_classes)).clamp_min(1)
    cosines = centres @ centres.T

    def leave_one_out(width: float) -> Tensor:
        kernels = torch.exp((cosines - 1) / width).fill_diagonal_(0.0)
        sums = kernels.new_zeros(len(labels), rows.num_classes).index_add_(1, labels, kernels)
        return (sums / others).clamp_min(MIN_DENSITY).log().double()

    best, exponent, loss = _choose(map(leave_one_out, widths), labels, counts)
    slope = centres.new_full((len(labels),), 1 / widths[best])
    offset = -slope - counts[labels].log()
    tensors = {"slope": slope, "curvature": torch.zeros_like(slope), "offset": offset}
    return FittedDensities({"centres": centres, "classes": labels, "exponent": exponent, **tensors}, loss)


def _fit_gaussians(rows: TrainingRows, source: LinearMap) -> FittedDensities:
    """Fit one isotropic Gaussian per class, whose variance is shrunk to the mean variance of all classes.

    Class means are those of the rows, or are shrunk to the mean of all classes: what predicts better.

    Source: Friedman, "Regularized discriminant analysis" (1989), with one variance per class; means as in Efron and
        Morris, "Stein's estimation rule and its competitors" (1973).
    """
    # Numbers of squared deviations that the mean variance of all classes counts as. Of a class of 20 rows of 384
    # independent features, 7,296 are known, but features may be dependent.
    pseudo_counts = (4.0, 64.0, 1024.0)
    z, labels = source(rows.features).double(), rows.labels
    means, counts = class_means(z, labels, rows.num_classes, rows.class_balanced_weights)
    classes, dim = (counts > 0).nonzero().flatten(), z.shape[1]
    centre = means[classes].mean(dim=0)
    z, means = z - centre, means - centre
    n = counts[labels]
    deviations = z - means[labels]
    squares = deviations.square().sum(dim=1)
    sums = torch.zeros_like(means[:, 0]).index_add_(0, labels, squares)
    pooled = sums.sum() / ((counts - 1).clamp_min(0).sum() * dim)
    between = means[classes].square().sum() / (max(1, len(classes) - 1) * dim) - (pooled / counts[classes]).mean()
    # Statistics of each row's class without the row; of a class with a single row, they are not used.
    left = (n - 1).clamp_min(1)
    means_left = means[labels] - deviations / left[:, None]
    sums_left = (sums[labels] - squares * n / left).clamp_min(0)

    def predict(sums: Tensor, counts: Tensor, pseudo: float, shrink: bool) -> tuple[Tensor, Tensor]:
        """Compute the factors on class means, and the variances of a new row, for statistics of any shape."""
        variance = (sums + pseudo * pooled) / ((counts - 1).clamp_min(0) * dim + pseudo)
        error = variance.clamp_min(MIN_DENSITY) / counts.clamp_min(1)
        factor = between.clamp_min(MIN_DENSITY) / (between.clamp_min(MIN_DENSITY) + error)
        factor = factor if shrink else torch.ones_like(factor)
        return factor, (variance + factor * error).clamp_min(MIN_DENSITY)

    def leave_one_out(pseudo: float, shrink: bool) -> Tensor:
        factor, variance = predict(sums, counts, pseudo, shrink)
        logits = -torch.cdist(z, factor[:, None] * means).square() / (2 * variance) - dim / 2 * variance.log()
        factor, variance = predict(sums_left, n - 1, pseudo, shrink)
        distance = (z - factor[:, None] * means_left).square().sum(dim=1)
        own = -distance / (2 * variance) - dim / 2 * variance.log()
        densities: Tensor = logits.scatter_(1, labels[:, None], own[:, None])
        return densities

    settings = [(pseudo, shrink) for pseudo in pseudo_counts for shrink in (False, True)]
    best, exponent, loss = _choose((leave_one_out(*setting) for setting in settings), labels, counts)
    factor, variance = (statistic[classes] for statistic in predict(sums, counts, *settings[best]))
    centres = centre + factor[:, None] * means[classes]
    offset = -centres.square().sum(dim=1) / (2 * variance) - dim / 2 * variance.log()
    tensors = {"slope": 1 / variance, "curvature": -0.5 / variance, "offset": offset}
    return FittedDensities({"centres": centres, "classes": classes, "exponent": exponent, **tensors}, loss)


def _choose(settings: Iterator[Tensor], labels: Tensor, counts: Tensor) -> tuple[int, Tensor, float]:
    """Choose the setting of least log-loss, from log-densities (n, num_classes) of rows that are left out.

    Log-densities are multiplied by an exponent, since features are dependent and the densities are too sharp. Returns
    the index of the setting, its exponent (0-d), and its loss.
    """
    usable = counts[labels] > 1  # a single row of a class cannot be left out
    logits = torch.stack([densities[usable] for densities in settings]).cpu()
    exponents, losses = fit_temperatures(logits, labels[usable].cpu(), (counts > 0).cpu())
    best = int(losses.mean(dim=1).argmin())
    return best, exponents[best].to(counts.device), float(losses[best].mean())


@dataclass(frozen=True)
class DensityFamily(ViewFamily):
    """Density views, which are used if they are better than all views before: other classes have no such shape."""

    view_specs: tuple[DensitySpec, ...] = (
        DensitySpec(LinearSpec("standardised"), per_row=True),
        DensitySpec(LinearSpec("standardised"), per_row=False),
    )
    progress_name: ClassVar[str] = "density views"

    def without_validation(self) -> None:
        """Return None: with one row per class, there is no width to choose."""

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate the views until the deadline; yield those that are better than all candidates before."""
        # Maximum number of log-densities of all settings of a view, which are held at once: 400 MB.
        max_densities = 5e7
        rows = evaluator.rows
        if evaluator.degrees_of_freedom < 2:
            return
        best = min(evaluator.candidates, key=lambda candidate: candidate.mean_loss)
        for spec in self.view_specs:
            n = min(len(rows.labels), MAX_COMPONENTS) if spec.per_row else len(rows.labels)
            if 6 * n * rows.num_classes > max_densities:  # six settings at the most
                continue
            # A cheap look: all rows at once, each left out, instead of folds.
            source = require_linear_map(spec.source.fit(rows).source)
            if evaluator.is_past_deadline() or not spec.fit_densities(rows, source).loss < best.mean_loss:
                continue
            candidate = evaluator.evaluate(spec)
            if candidate is not None and is_worse_by_one_error(best.losses, candidate.losses):
                yield candidate


@dataclass(frozen=True)
class DensityConfig(Config):
    """The sizes and settings from which a `DensityView` is built."""

    components: int = bounded_field()  #: Number of components of all classes.
    dim: int = bounded_field()  #: Number of mapped features.
    classes: int = bounded_field()  #: Number of classes.
    per_row: bool = False  #: Whether rows are scaled to unit norm, and a class is a sum of components.


class DensityView(View):
    """Class probabilities proportional to ``density_c(z) ** exponent``, where a density is a sum of components.

    The logarithm of a component at a mapped row z is ``slope * z @ centre + curvature * z @ z + offset``.
    """

    kind = "density"
    config_type, input_map_type = DensityConfig, LinearMap
    buffer_dtypes: ClassVar = {"classes": torch.int64}
    config: DensityConfig
    source: LinearMap
    centres: Tensor  #: (components, dim) buffer.
    classes: Tensor  #: (components,) int64 buffer, the class of each component.
    slope: Tensor  #: (components,) buffer.
    curvature: Tensor  #: (components,) buffer.
    offset: Tensor  #: (components,) buffer.
    exponent: Tensor  #: 0-d buffer, >= 0.
    indicators: Tensor  #: (components, classes), 1 for the class of a component, else 0.
    missing: Tensor  #: (classes,) bool: whether a class has no component.

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        count = self.config.components
        per_component = dict.fromkeys(("classes", "slope", "curvature", "offset"), (count,))
        return {"centres": (count, self.config.dim), **per_component, "exponent": ()}

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Validate the tensors of a file: classes must be in range, and the exponent not negative."""
        super().check(tensors, prefix)
        classes = tensors["classes"]
        raise_unless(bool(((classes >= 0) & (classes < self.config.classes)).all()), "components of no class")
        raise_unless(bool(tensors["exponent"] >= 0), "a negative exponent")

    @torch.no_grad()
    def derive_constants(self) -> None:
        """Compute the class indicators of the components, and the mask of classes without one."""
        indicators = F.one_hot(self.classes, self.config.classes).to(self.slope.dtype)  # (components, classes)
        self.register_buffer("indicators", indicators, persistent=False)
        self.register_buffer("missing", ~indicators.any(dim=0), persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        """Compute class probabilities (n, num_classes) of mapped rows z (n, dim)."""
        dtype = torch.promote_types(z.dtype, torch.float32)
        z = F.normalize(z.to(dtype), dim=1) if self.config.per_row else z.to(dtype)
        logs = batch_invariant_matmul(z, self.centres.to(dtype).T) * self.slope.to(dtype) + self.offset.to(dtype)
        if self.config.per_row:
            sums = batch_invariant_matmul(logs.exp(), self.indicators.to(dtype))
            scores = sums.clamp_min(MIN_DENSITY).log()
        else:
            logs = logs + z.square().sum(dim=1, keepdim=True) * self.curvature.to(dtype)
            scores = batch_invariant_matmul(logs - logs.amax(dim=1, keepdim=True), self.indicators.to(dtype))
        scores = (scores * self.exponent.to(dtype)).masked_fill(self.missing, -torch.inf)
        return scores.softmax(dim=1)

    def flops(self) -> float:
        """Estimate the prediction time per row, as a number of multiplications; an exponential takes as long as 20."""
        return float(self.config.components * (self.config.dim + self.config.classes + 20 * self.config.per_row))

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the probabilities to an ONNX graph; return the name of their value, in a list."""
        if self.config.per_row:
            norm = graph.add("Max", graph.add("ReduceL2", rows, axes=[1]), np.float32(1e-12))
            rows = graph.add("Div", rows, norm)
        logs = graph.add("Add", graph.add("MatMul", rows, (self.centres * self.slope[:, None]).T), self.offset)
        if self.config.per_row:
            sums = graph.add("MatMul", graph.add("Exp", logs), self.indicators)
            scores = graph.add("Log", graph.add("Max", sums, np.float32(MIN_DENSITY)))
        else:
            squares = graph.add("ReduceSumSquare", rows, axes=[1])
            logs = graph.add("Add", logs, graph.add("MatMul", squares, self.curvature[None]))
            logs = graph.add("Sub", logs, graph.add("ReduceMax", logs, axes=[1]))
            scores = graph.add("MatMul", logs, self.indicators)
        scores = graph.add("Mul", scores, self.exponent)
        bias = torch.where(self.missing, -torch.inf, 0.0).to(torch.float32)
        return [graph.add("Softmax", graph.add("Add", scores, bias), axis=1)]
