"""Kernel ridge views: class scores by kernel ridge regression of class indicators on the output of a linear view.

Kernels are centred at labelled samples, the *units*. The prototypes of the view are nearly one-hot vectors. The fit has
a closed form without gradient descent, and is stored in buffers.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import MAX_CHUNK_ROWS, add_to_class_sums
from protonet.views.config import Config, bounded_field, raise_unless
from protonet.views.distances import batch_invariant_distances, quantization_grid, quantized_l1_distances
from protonet.views.evaluation import MIN_DECISIVE_ROWS, MIN_EVALUATED_ROWS, Candidate, CandidateEvaluator, ViewFamily
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
    apply_tanh: bool = False  #: Whether the hyperbolic tangent of each input feature is taken.
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
        scaling = frozenset({"squashed"}) if self.apply_tanh else self.source.tags
        return scaling | ({self.kernel_name, "shifted"} if self.use_shifts else {self.kernel_name})

    @property
    def name(self) -> str:
        """The name in reports: the kernel and the scaling of its input, such as "gaussian whitened"."""
        name = f"{self.kernel_name} {'squashed' if self.apply_tanh else self.source.name}"
        return f"shifted {name}" if self.use_shifts else name

    def fit(self, rows: TrainingRows, source: InputMap | None) -> KernelRidgeView:
        """Fit the regression in closed form; the output of the view is ``num_classes`` scores.

        Source: kernel ridge regression (Saunders et al. 1998); with more samples than units, the subset of regressors
            (Smola and Schoelkopf 2000).
        """
        regression = _KernelRegression(self, require_linear_map(source), rows)
        _, (readout,) = regression.solve(self.bandwidth, [self.ridge])
        config = KernelRidgeConfig(len(readout), readout.shape[1], self.norm, self.apply_tanh)
        bandwidth = readout.new_tensor(self.bandwidth * regression.median)
        tensors = {"units": regression.units, "readout": readout, "bandwidth": bandwidth}
        return KernelRidgeView(config, regression.map, tensors)

    def count_units(self, n: int, dim: int) -> int:
        """Compute how many of n samples of ``dim`` features become centres of kernels: all if the work allows it."""
        limits = [n, MAX_KERNEL_UNITS, math.isqrt(int(MAX_PRODUCT_WORK / n))]
        if self.norm == 1:
            limits.append(int(MAX_DISTANCE_WORK / (n * dim)))
        return max(1, min(limits))


CENTRED_LINEAR_SPEC, STANDARDISED_LINEAR_SPEC, RELEVANT_LINEAR_SPEC, ROBUST_LINEAR_SPEC, WHITENED_LINEAR_SPEC = map(
    LinearSpec, ("centred", "standardised", "relevant", "robust", "whitened")
)
#: The kernel ridge views that are evaluated by default, without their bandwidth and ridge.
KERNEL_RIDGE_SPECS = (
    KernelRidgeSpec(CENTRED_LINEAR_SPEC, 2),
    KernelRidgeSpec(RELEVANT_LINEAR_SPEC, 2),
    KernelRidgeSpec(WHITENED_LINEAR_SPEC, 2),
    KernelRidgeSpec(STANDARDISED_LINEAR_SPEC, 1),
    KernelRidgeSpec(RELEVANT_LINEAR_SPEC, 1),
    KernelRidgeSpec(ROBUST_LINEAR_SPEC, 1, apply_tanh=True),
    KernelRidgeSpec(CENTRED_LINEAR_SPEC, 2, use_shifts=True),
)
#: The bandwidths and ridges that are evaluated for each view by default.
KERNEL_BANDWIDTHS, KERNEL_RIDGE_PENALTIES = (0.5, 1.0, 2.0, 4.0, 8.0), (1e-3, 1e-2, 1e-1, 1.0)
#: Bandwidth and ridge if no row can be held out.
DEFAULT_BANDWIDTH, DEFAULT_KERNEL_RIDGE_PENALTY = 2.0, 0.1


@dataclass(frozen=True)
class KernelRidgeFamily(ViewFamily):
    """Kernel ridge views; the bandwidth and the ridge penalty of each view are chosen by its held-out log-loss."""

    view_specs: tuple[KernelRidgeSpec, ...] = KERNEL_RIDGE_SPECS
    bandwidths: tuple[float, ...] = KERNEL_BANDWIDTHS
    ridge_penalties: tuple[float, ...] = KERNEL_RIDGE_PENALTIES
    progress_name: ClassVar[str] = "kernel ridge views"
    relative_time: ClassVar[float] = 3.0

    @classmethod
    def for_effort(cls, effort: str) -> KernelRidgeFamily:
        """Build the family: with fewer views, bandwidths and ridge penalties for the effort "fast"."""
        if effort == "fast":
            views = tuple(view for view in KERNEL_RIDGE_SPECS if view.source != RELEVANT_LINEAR_SPEC)
            return cls(views, (1.0, 4.0), (1e-2, 1e-1))
        return cls()

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> KernelRidgeFamily:
        """Return the family with an additional Gaussian kernel view of each span [start, stop) of features."""
        span_views = [KernelRidgeSpec(LinearSpec("standardised", span), 2) for span in spans]
        return replace(self, view_specs=(*self.view_specs, *span_views))

    def without_validation(self) -> KernelRidgeFamily:
        """Return a family with the same views and only the default bandwidth and ridge penalty."""
        return KernelRidgeFamily(self.view_specs, (DEFAULT_BANDWIDTH,), (DEFAULT_KERNEL_RIDGE_PENALTY,))

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate the views until the deadline; yield each at its best bandwidth and ridge penalty.

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
            settings = [
                replace(view, bandwidth=bandwidth, ridge=ridge)
                for bandwidth in self.bandwidths
                for ridge in self.ridge_penalties
            ]
            candidate = _choose_bandwidth_and_ridge(evaluator, settings)
            if candidate is not None and not evaluator.is_past_deadline():
                yield candidate


#: A fold that holds out this many rows halves the settings that the next fold evaluates.
MIN_HALVING_ROWS = 16


def _choose_bandwidth_and_ridge(evaluator: CandidateEvaluator, specs: Sequence[KernelRidgeSpec]) -> Candidate | None:
    """Evaluate a view with several settings; return the best candidate, None if it is pruned or time is over."""
    # Number of multiplications that take as long as an absolute difference.
    flops_per_difference = 4.0
    # Number of multiplications that take as long as an exponential.
    flops_per_exponential = 20.0
    # Maximum number of units in the search for a bandwidth on folds with many rows.
    max_search_units = 512
    cosines = torch.zeros(len(specs), 0, evaluator.rows.num_classes, dtype=torch.float32)
    for index, (source, fold) in enumerate(zip(evaluator.fit_input_maps(specs[0]), evaluator.folds, strict=True)):
        if evaluator.is_past_deadline():
            return None
        queries = evaluator.rows.features[fold.held_out]
        training_rows = evaluator.rows.select(fold.train)
        regression = _KernelRegression(specs[0], require_linear_map(source), training_rows, queries)
        decisive = len(fold.held_out) >= MIN_DECISIVE_ROWS
        if index == 0 and decisive and len(specs) > 1:
            specs = _choose_bandwidth(evaluator, regression.with_fewer_units(max_search_units), specs)
            if evaluator.is_past_deadline() or not specs:
                return None
            cosines = cosines[: len(specs)]
        fold_cosines: list[Tensor] = []
        for bandwidth in _list_bandwidths(specs):
            if evaluator.is_past_deadline():
                return None
            ridges = [view.ridge for view in specs if view.bandwidth == bandwidth]
            fold_cosines.append(regression.cosines(bandwidth, ridges))
        cosines = torch.cat([cosines, torch.cat(fold_cosines)], dim=1)
        halve = len(fold.held_out) >= MIN_HALVING_ROWS
        if not halve and cosines.shape[1] < MIN_EVALUATED_ROWS:
            continue  # too few rows to discard a setting or the view
        ranking = _rank_by_log_loss(evaluator, cosines)
        if evaluator.should_prune(cosines[ranking[0]]):
            return None
        if halve:  # successive halving: the worse half is not evaluated on the next fold
            better = sorted(ranking[: 1 if decisive else math.ceil(len(ranking) / 2)])
            cosines, specs = cosines[better], [specs[i] for i in better]
    best = _rank_by_log_loss(evaluator, cosines)[0]
    units, dim = regression.landmarks.shape
    distance_flops = dim * (flops_per_difference if specs[0].norm == 1 else 1)
    flops = units * (distance_flops + flops_per_exponential)
    return evaluator.make_candidate(specs[best], cosines[best], flops)


def _choose_bandwidth(
    evaluator: CandidateEvaluator, regression: _KernelRegression, specs: Sequence[KernelRidgeSpec]
) -> list[KernelRidgeSpec]:
    """Search the bandwidth of lowest log-loss, from the median on; return the better half of its specs, if any."""
    # With all units, the log-loss is assumed to be these fractions of that with ``max_search_units``: at the middle
    # bandwidth, and at the best bandwidth.
    expected_loss_ratios = (0.8, 0.9)
    bandwidths = _list_bandwidths(specs)

    @functools.cache
    def evaluate(index: int) -> tuple[float, list[KernelRidgeSpec], Tensor]:
        """Compute, for one bandwidth, the lowest log-loss, the half of the specs of low loss, and the best cosines."""
        candidates = [view for view in specs if view.bandwidth == bandwidths[index]]
        cosines = regression.cosines(bandwidths[index], [view.ridge for view in candidates])
        ranking = _rank_by_log_loss(evaluator, cosines)
        better = [candidates[i] for i in sorted(ranking[: math.ceil(len(ranking) / 2)])]
        return float(evaluator.compute_losses(cosines[ranking[0]]).mean()), better, cosines[ranking[0]]

    best = len(bandwidths) // 2
    if evaluator.should_prune(evaluate(best)[2], expected_loss_ratio=expected_loss_ratios[0]):
        return []
    for step in (-1, 1):
        while (
            0 <= best + step < len(bandwidths)
            and not evaluator.is_past_deadline()
            and evaluate(best + step)[0] < evaluate(best)[0]
        ):
            best += step
    _, better, cosines = evaluate(best)
    return [] if evaluator.should_prune(cosines, expected_loss_ratio=expected_loss_ratios[1]) else better


def _list_bandwidths(specs: Sequence[KernelRidgeSpec]) -> list[float]:
    """List the distinct bandwidths of views, in the order of the views."""
    return list(dict.fromkeys(view.bandwidth for view in specs))


def _rank_by_log_loss(evaluator: CandidateEvaluator, cosines: Tensor) -> list[int]:
    """Compute the indices of settings in the order of increasing log-loss, from cosines (settings, n, num_classes)."""
    if len(cosines) == 1:
        return [0]
    ranking: list[int] = evaluator.compute_losses(cosines).mean(dim=1).argsort(stable=True).tolist()
    return ranking


@dataclass(frozen=True)
class KernelRidgeConfig(Config):
    """The sizes and settings from which a `KernelRidgeView` is built."""

    units: int = bounded_field()  #: Number of units: labelled samples at which kernels are centred.
    classes: int = bounded_field()  #: Number of classes.
    norm: int = bounded_field(1, 2)  #: 1 for L1 distances, 2 for squared Euclidean distances.
    squash: bool = False  #: Whether the hyperbolic tangent of each input feature is taken.


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
    landmarks: Tensor  #: (units, dim), the mapped features of the units, after the hyperbolic tangent if ``squash``.
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
        z = self.source(self.units)
        self.register_buffer("landmarks", torch.tanh(z) if self.config.squash else z, persistent=False)
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
        input_dtype, z = z.dtype, torch.tanh(z) if self.config.squash else z
        if self.terms is None or z.dtype == torch.float64 or z.requires_grad:
            distance = batch_invariant_distances(z.to(dtype), self.landmarks.to(dtype), self.config.norm)
        else:
            distance = quantized_l1_distances(z.to(torch.float32), self.landmarks, self.terms).to(dtype)
        bandwidth = self.bandwidth.to(dtype)
        in_place = not distance.requires_grad
        kernel = distance.div_(-bandwidth).exp_() if in_place else torch.exp(distance / -bandwidth)
        # Scores are small compared with their terms: float32 rounding would depend on the batch. This layout is fast.
        return F.linear(kernel.double(), self.readout.double().T.contiguous()).to(input_dtype)

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
        rows = graph.add("Tanh", rows) if self.config.squash else rows
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

    def __init__(
        self, view: KernelRidgeSpec, source: LinearMap, rows: TrainingRows, queries: Tensor | None = None
    ) -> None:
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
        z = torch.cat([self._map_features(view, part) for part in x.split(MAX_CHUNK_ROWS)])
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
        if queries is not None:
            mapped = self._map_features(view, queries).to(dtype)
            self.query_distances = batch_invariant_distances(mapped, units, view.norm).double()

    def _map_features(self, view: KernelRidgeSpec, x: Tensor) -> Tensor:
        """Compute the input (n, dim) of the kernel from features x: affine map, then tanh if ``view.apply_tanh``."""
        z: Tensor = self.map(x)
        return torch.tanh(z) if view.apply_tanh else z

    def with_fewer_units(self, max_units: int) -> _KernelRegression:
        """Return a copy of the regression with at most ``max_units`` of its units (kernel centres), evenly spaced."""
        reduced = copy.copy(self)
        selected = select_evenly(len(self.unit_index), max_units).to(self.unit_index.device)
        reduced.unit_index, reduced.landmarks = self.unit_index[selected], self.landmarks[selected]
        reduced.units = self.units[selected]
        reduced.distances, reduced.query_distances = self.distances[:, selected], self.query_distances[:, selected]
        return reduced

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

    def cosines(self, bandwidth: float, ridges: Sequence[float]) -> Tensor:
        """Compute cosines (ridges, m, num_classes) float32 of the m queries to class prototypes, on the CPU."""
        n = len(self.labels)  # the rows themselves come first, before their shifted copies
        kernel, readouts = self.solve(bandwidth, ridges)
        block_rows = max(1, MAX_CHUNK_ROWS // len(ridges))
        blocks = (F.normalize(rows @ readouts, dim=2) for rows in kernel[:n].split(block_rows))
        sums = readouts.new_zeros(len(ridges), self.num_classes, self.num_classes)
        prototypes = F.normalize(add_to_class_sums(sums, blocks, self.labels, self.row_weights), dim=2)
        query_kernel = torch.exp(-self.query_distances / (bandwidth * self.median))
        blocks = (F.normalize(rows @ readouts, dim=2) for rows in query_kernel.split(block_rows))
        return torch.cat([(block @ prototypes.transpose(1, 2)).to("cpu", torch.float32) for block in blocks], dim=1)
