"""Kernel ridge views: class scores by kernel ridge regression of class indicators on the output of a linear view.

Kernels are centred at labelled samples, the *units*. The prototypes of the view are nearly one-hot vectors. The fit has
a closed form without gradient descent, and is stored in buffers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import MAX_CHUNK_ROWS
from protonet.selection.scoring import compute_fitted_losses
from protonet.views.config import Config, bounded_field, raise_unless
from protonet.views.distances import batch_invariant_distances, quantization_grid, quantized_l1_distances
from protonet.views.evaluation import Candidate, CandidateEvaluator, ViewFamily
from protonet.views.linear import LinearSpec
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.shifts import shift_rows
from protonet.views.view import InputMap, LinearMap, TrainingRows, View, require_linear_map, select_evenly

#: Maximum number of units of a view.
MAX_KERNEL_UNITS = 1024
#: Maximum number of subtractions for L1 distances in one fit.
MAX_DISTANCE_WORK = 2e8
#: Maximum number of multiplications for products of kernel matrices in one fit.
MAX_PRODUCT_WORK = 1.5e9


@dataclass(frozen=True)
class KernelRidgeSpec:
    """The spec (hyperparameters) of a kernel ridge view."""

    source: LinearSpec  #: The spec of the linear view whose affine map is the input of the kernel.
    norm: int  #: 1 for L1 distances (a Laplacian kernel), 2 for squared Euclidean distances (a Gaussian kernel).
    use_shifts: bool = False  #: Whether the view is also fitted to shifted copies of the rows.
    bandwidth: float = 2.0  #: Bandwidth > 0 of the kernel, in units of the median distance between samples and units.
    ridge: float = 0.1  #: Ridge penalty > 0.
    is_trained: ClassVar[bool] = False

    @property
    def kernel_name(self) -> str:
        """The name of the kernel: "laplacian" for L1 distances, "gaussian" for squared Euclidean distances."""
        return "laplacian" if self.norm == 1 else "gaussian"

    @property
    def tags(self) -> frozenset[str]:
        """Properties by which the prior predicts the view's weight: kernel, scaling of the input, perhaps "shifted"."""
        return self.source.tags | ({self.kernel_name, "shifted"} if self.use_shifts else {self.kernel_name})

    @property
    def name(self) -> str:
        """The name in reports: the kernel and the scaling of its input, such as "gaussian whitened"."""
        name = f"{self.kernel_name} {self.source.name}"
        return f"shifted {name}" if self.use_shifts else name

    def fit(self, rows: TrainingRows, source: InputMap | None) -> KernelRidgeView:
        """Fit the regression in closed form; the output of the view is ``num_classes`` scores.

        Source: kernel ridge regression (Saunders et al. 1998); with more samples than units, the subset of regressors
            (Smola and Schoelkopf 2000).
        """
        regression = _KernelRegression(self, require_linear_map(source), rows)
        _, (readout,) = regression.solve(self.bandwidth, [self.ridge])
        config = KernelRidgeConfig(len(readout), readout.shape[1], self.norm)
        bandwidth = readout.new_tensor(self.bandwidth * regression.median)
        tensors = {"units": regression.units, "readout": readout, "bandwidth": bandwidth}
        return KernelRidgeView(config, regression.map, tensors)

    def count_units(self, n: int, dim: int) -> int:
        """Compute how many of n samples of ``dim`` features become centres of kernels: all if the work allows it."""
        limits = [n, MAX_KERNEL_UNITS, math.isqrt(int(MAX_PRODUCT_WORK / n))]
        if self.norm == 1:
            limits.append(int(MAX_DISTANCE_WORK / (n * dim)))
        return max(1, min(limits))


CENTRED_LINEAR_SPEC, STANDARDISED_LINEAR_SPEC, RELEVANT_LINEAR_SPEC, WHITENED_LINEAR_SPEC = map(
    LinearSpec, ("centred", "standardised", "relevant", "whitened")
)
#: The kernel ridge views that are evaluated by default, without their bandwidth and ridge.
KERNEL_RIDGE_SPECS = (
    KernelRidgeSpec(CENTRED_LINEAR_SPEC, 2),
    KernelRidgeSpec(RELEVANT_LINEAR_SPEC, 2),
    KernelRidgeSpec(WHITENED_LINEAR_SPEC, 2),
    KernelRidgeSpec(STANDARDISED_LINEAR_SPEC, 1),
    KernelRidgeSpec(RELEVANT_LINEAR_SPEC, 1),
    KernelRidgeSpec(CENTRED_LINEAR_SPEC, 2, use_shifts=True),
)
#: Bandwidth and ridge if no row can be held out.
DEFAULT_BANDWIDTH, DEFAULT_KERNEL_RIDGE_PENALTY = 2.0, 0.1


@dataclass(frozen=True)
class KernelRidgeFamily(ViewFamily):
    """Kernel ridge views; bandwidth and ridge penalty are chosen by the log-loss of rows that are left out singly."""

    view_specs: tuple[KernelRidgeSpec, ...] = KERNEL_RIDGE_SPECS
    bandwidths: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    ridge_penalties: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    progress_name: ClassVar[str] = "kernel ridge views"
    relative_time: ClassVar[float] = 3.0

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> KernelRidgeFamily:
        """Return the family with an additional Gaussian kernel view of each span [start, stop) of features."""
        span_views = [KernelRidgeSpec(LinearSpec("standardised", span), 2) for span in spans]
        return replace(self, view_specs=(*self.view_specs, *span_views))

    def without_validation(self) -> KernelRidgeFamily:
        """Return a family with the same views and only the default bandwidth and ridge penalty."""
        return KernelRidgeFamily(self.view_specs, (DEFAULT_BANDWIDTH,), (DEFAULT_KERNEL_RIDGE_PENALTY,))

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate each view, at the bandwidth and ridge penalty that suit the rows best, until the deadline.

        Views for which the limits of work allow fewer than two units per class are left out.
        """
        rows = evaluator.rows
        for view in self.view_specs:
            if evaluator.is_past_deadline():
                return
            n = min(len(fold.train) for fold in evaluator.folds) * (len(rows.shifts) if view.use_shifts else 1)
            min_units = min(n, 2 * int(evaluator.seen.sum()))
            too_few_rows = evaluator.degrees_of_freedom < view.source.min_degrees_of_freedom
            if too_few_rows or view.count_units(n, rows.features.shape[1]) < min_units:
                continue
            if view.use_shifts and rows.shifts == (0,):
                continue
            candidate = evaluator.evaluate(self._choose_hyperparameters(view, evaluator))
            if candidate is not None:
                yield candidate

    def _choose_hyperparameters(self, view: KernelRidgeSpec, evaluator: CandidateEvaluator) -> KernelRidgeSpec:
        """Choose the bandwidth, then the ridge penalty, of least log-loss of rows that are left out one at a time."""
        # Maximum number of rows for this choice, from all classes, of which each is a unit. A matrix of this size is
        # inverted for each setting.
        max_rows = 512
        if view.norm == 1:
            max_rows = min(max_rows, math.isqrt(int(MAX_DISTANCE_WORK / evaluator.rows.features.shape[1])))
        if len(self.bandwidths) == len(self.ridge_penalties) == 1:
            return replace(view, bandwidth=self.bandwidths[0], ridge=self.ridge_penalties[0])
        by_class = evaluator.rows.labels.argsort(stable=True)
        rows = evaluator.rows.select(by_class[select_evenly(len(by_class), max_rows).to(by_class.device)])
        # The rows without shifted copies: these would have to be left out together.
        source = require_linear_map(view.source.fit(rows).source)
        regression = _KernelRegression(replace(view, use_shifts=False), source, rows)
        weights = None if rows.weights is None else (rows.weights / rows.weights.mean()).cpu()

        def find_best(bandwidths: Sequence[float], ridges: Sequence[float]) -> int:
            cosines = regression.leave_one_out_cosines(bandwidths, ridges)
            losses = compute_fitted_losses(cosines, rows.labels.cpu(), evaluator.sizes, weights)
            return int(losses.mean(dim=1).argmin())

        small_ridge = self.ridge_penalties[(len(self.ridge_penalties) - 1) // 2]
        bandwidth = self.bandwidths[find_best(self.bandwidths, [small_ridge])]
        ridge = self.ridge_penalties[find_best([bandwidth], self.ridge_penalties)]
        return replace(view, bandwidth=bandwidth, ridge=ridge)


@dataclass(frozen=True)
class KernelRidgeConfig(Config):
    """The sizes and settings from which a `KernelRidgeView` is built."""

    units: int = bounded_field()  #: Number of units: labelled samples at which kernels are centred.
    classes: int = bounded_field()  #: Number of classes.
    norm: int = bounded_field(1, 2)  #: 1 for L1 distances, 2 for squared Euclidean distances.


#: L1 distances are quantized if the units have more coordinates than this.
MAX_EXACT_COORDINATES = 2**14
#: Candidate numbers of quantized coordinates whose sum must fit in 16 bits; fewer allow a finer quantization.
QUANTIZED_TERM_COUNTS = (16, 8, 4)
#: Largest standard error of class scores that quantization may cause.
MAX_QUANTIZATION_ERROR = 0.002


class KernelRidgeView(View):
    """Class scores ``sum_j readout_j exp(-distance(z, landmark_j) / bandwidth)`` of the mapped features z of a row."""

    kind = "kernel_ridge"
    config_type, input_map_type = KernelRidgeConfig, LinearMap
    config: KernelRidgeConfig
    source: LinearMap
    units: Tensor  #: (units, input_dim) buffer, the features of the samples at which kernels are centred.
    landmarks: Tensor  #: (units, dim), the mapped features of the units.
    readout: Tensor  #: (units, classes) buffer, the coefficients.
    bandwidth: Tensor  #: 0-d buffer, > 0.

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        units = self.config.units
        return {"units": (units, self.input_dim), "readout": (units, self.config.classes), "bandwidth": ()}

    @torch.no_grad()
    def derive_constants(self) -> None:
        """Compute the landmarks (kernel centres in the input of the kernel), and choose the precision."""
        # Scores are computed in float64 if the absolute coefficients of a class sum to more than this.
        max_float32_coefficient_sum = 600.0
        self.register_buffer("landmarks", self.source(self.units), persistent=False)
        # Large weights cancel: in float32, a score near zero would depend on how the batch is rounded.
        self.use_float64 = bool(self.readout.abs().sum(dim=0).max() > max_float32_coefficient_sum)
        self.terms = self._choose_quantization()

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Validate the tensors of a file as `RestorableModule.check` does, and check that the bandwidth is positive."""
        super().check(tensors, prefix)
        raise_unless(bool(tensors["bandwidth"] > 0), "a bandwidth that is not positive")

    def forward(self, z: Tensor) -> Tensor:
        """Compute class scores (n, num_classes) of mapped rows z (n, dim)."""
        dtype = torch.float64 if self.use_float64 else torch.promote_types(z.dtype, torch.float32)
        input_dtype = z.dtype
        if self.terms is None or z.dtype == torch.float64 or z.requires_grad:
            distance = batch_invariant_distances(z.to(dtype), self.landmarks.to(dtype), self.config.norm)
        else:
            distance = quantized_l1_distances(z.to(torch.float32), self.landmarks, self.terms).to(dtype)
        bandwidth = self.bandwidth.to(dtype)
        in_place = not distance.requires_grad
        kernel = distance.div_(-bandwidth).exp_() if in_place else torch.exp(distance / -bandwidth)
        # Scores are small compared with their terms: float32 rounding would depend on the batch. This layout is fast.
        return F.linear(kernel.double(), self.readout.double().T.contiguous()).to(input_dtype)

    def flops(self) -> float:
        """Estimate the prediction time per row, as a number of multiplications."""
        # An absolute difference takes as long as 4 multiplications, an exponential as 20.
        units, dim = self.landmarks.shape
        return float(units * (dim * (4 if self.config.norm == 1 else 1) + 20))

    def _choose_quantization(self) -> int | None:
        """Choose the argument ``n_terms`` of `quantized_l1_distances`; None if distances are not quantized."""
        if self.config.norm != 1 or self.landmarks.numel() <= MAX_EXACT_COORDINATES:
            return None
        noise = math.sqrt(self.landmarks.shape[1] / 6) / float(self.bandwidth)  # of a kernel value, in steps
        noise *= float(torch.linalg.vector_norm(self.readout, dim=0).max())
        counts = QUANTIZED_TERM_COUNTS
        steps = {terms: float(quantization_grid(self.landmarks, terms)[2]) for terms in counts}
        limit = MAX_QUANTIZATION_ERROR
        return next((terms for terms, step in steps.items() if noise * step <= limit), None)

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the class scores to an ONNX graph; return the name of their value, in a list.

        They are computed in float64, since large coefficients cancel.
        """
        z, terms = graph.cast(rows, "DOUBLE"), self.terms
        landmarks, readout = self.landmarks.double(), self.readout.double()
        if terms is not None:
            low, high, step = quantization_grid(self.landmarks, terms)
            inside = graph.add("Min", graph.add("Max", rows, low), high)
            integers = graph.cast(graph.add("Round", graph.add("Div", graph.add("Sub", inside, low), step)), "DOUBLE")
            units = ((self.landmarks - low) / step).round().double()
            outside = graph.cast(graph.add("ReduceL1", graph.add("Sub", rows, inside), axes=[1]), "DOUBLE")
            distance = graph.add("Mul", graph.l1_distances(integers, units), step.double())
            distance = graph.add("Add", distance, outside)
        elif self.config.norm == 1:
            distance = graph.l1_distances(z, landmarks)
        else:
            squares = graph.add("ReduceSumSquare", z, axes=[1])
            products = graph.add("MatMul", z, -2 * landmarks.T)
            distance = graph.add("Add", graph.add("Add", products, landmarks.square().sum(dim=1)), squares)
            distance = graph.add("Max", distance, np.float64(0))
        kernel = graph.add("Exp", graph.add("Div", distance, -self.bandwidth.double()))
        return [graph.cast(graph.add("MatMul", kernel, readout), "FLOAT")]


class _KernelRegression:
    """Kernel ridge regression of class indicators, with distances that are computed once for several settings."""

    def __init__(self, view: KernelRidgeSpec, source: LinearMap, rows: TrainingRows) -> None:
        # Maximum number of rows from which the median distance is computed.
        max_median_rows = 4 * MAX_CHUNK_ROWS
        # A squared distance below this times the mean is a rounding error, or the distance of a unit to itself.
        max_rounding_distance = 1e-6
        x, labels, self.num_classes = rows.features, rows.labels, rows.num_classes
        self.labels, self.map, self.row_weights = labels, source, rows.class_balanced_weights
        weights = torch.ones_like(labels, dtype=torch.float64) if self.row_weights is None else self.row_weights
        if view.use_shifts:
            copies = len(rows.shifts)
            x, labels, weights = shift_rows(x, rows.shifts), labels.repeat(copies), weights.repeat(copies)
        self.weights = weights[:, None]  # (n, 1), with shifted copies
        z = torch.cat([source(part) for part in x.split(MAX_CHUNK_ROWS)])
        count = view.count_units(*z.shape)
        self.unit_index = select_evenly(len(z), count).to(z.device)
        self.units = x if len(self.unit_index) == len(x) else x[self.unit_index]
        self.landmarks = z[self.unit_index]
        dtype = torch.float64 if view.norm == 2 else z.dtype  # squares cancel
        units = self.landmarks.to(dtype)
        self.distances = torch.cat(
            [batch_invariant_distances(part.to(dtype), units, view.norm).double() for part in z.split(MAX_CHUNK_ROWS)]
        )
        sample = self.distances[:: math.ceil(len(self.distances) / max_median_rows)]
        sample = sample[sample > max_rounding_distance ** (view.norm / 2) * sample.mean()]
        self.median = float(sample.median()) if len(sample) else 1.0
        self.target_labels = labels  # (n,), with shifted copies
        self.target_means = torch.bincount(labels, self.weights[:, 0], minlength=self.num_classes) / len(labels)

    def solve(self, bandwidth: float, ridges: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Fit at a bandwidth: the kernel matrix (n, units) and coefficients (ridges, units, classes), both float64.

        If every row is a unit, weights of squared errors are equivalent to a ridge penalty for each row, divided by its
        weight.
        """
        # Added to the diagonal of the kernel matrix of the units, which is singular for equal rows.
        jitter = 1e-6
        kernel = torch.exp(-self.distances / (bandwidth * self.median))
        if len(self.landmarks) < len(kernel):  # subset of regressors: normal equations, with jitter
            eye = torch.eye(len(self.landmarks), dtype=torch.float64, device=kernel.device)
            penalty = kernel[self.unit_index] + jitter * eye
            gram, right = kernel.T @ (self.weights * kernel), self._multiply_by_targets(kernel)
        else:
            gram, penalty = kernel, torch.diag(1 / self.weights[self.unit_index, 0])
            right = self._class_indicators(torch.arange(len(kernel), device=kernel.device))
        factors, failed = torch.linalg.cholesky_ex(gram + gram.new_tensor(ridges)[:, None, None] * penalty)
        usable = (failed == 0) & factors.isfinite().all(dim=2).all(dim=1)
        return kernel, torch.where(usable[:, None, None], torch.cholesky_solve(right, factors), 0.0)

    def _class_indicators(self, rows: Tensor) -> Tensor:
        """Compute the centred class indicators (m, num_classes) of the rows with these indices (m,)."""
        return F.one_hot(self.target_labels[rows], self.num_classes).to(torch.float64) - self.target_means

    def _multiply_by_targets(self, kernel: Tensor) -> Tensor:
        """Compute ``kernel.T @ (weights * targets)`` (units, num_classes) in blocks, since classes may be many."""
        blocks = torch.arange(len(kernel), device=kernel.device).split(MAX_CHUNK_ROWS)
        parts = (kernel[rows].T @ (self.weights[rows] * self._class_indicators(rows)) for rows in blocks)
        return functools.reduce(torch.add, parts)

    def leave_one_out_cosines(self, bandwidths: Sequence[float], ridges: Sequence[float]) -> Tensor:
        """Compute cosines (settings, n, num_classes) float32 of the scores of each row without it, to class indicators.

        Every row is a unit. There is a setting for each bandwidth and ridge penalty, in this order.

        Source: Allen, "The relationship between variable selection and data augmentation" (1974): the residual of a
            row that is left out is its residual divided by one minus its leverage.
        """
        # Smallest diagonal of an inverse: a row with equal rows of another class may have less by rounding.
        min_diagonal = 1e-6
        widths = self.median * self.distances.new_tensor(bandwidths)[:, None, None]
        n, kernels = len(self.distances), torch.exp(-self.distances / widths)
        penalty = torch.diag(1 / self.weights[:, 0]).to(kernels)
        systems = (kernels[:, None] + kernels.new_tensor(ridges)[:, None, None] * penalty).flatten(0, 1)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(systems)[0])
        targets = self._class_indicators(torch.arange(n, device=kernels.device))
        scores = targets - inverse @ targets / inverse.diagonal(dim1=1, dim2=2)[:, :, None].clamp_min(min_diagonal)
        ideal = torch.eye(self.num_classes, dtype=torch.float64, device=kernels.device) - self.target_means
        return (F.normalize(scores.nan_to_num(), dim=2) @ F.normalize(ideal, dim=1).T).to("cpu", torch.float32)
