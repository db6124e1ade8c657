"""Fixed convolution views: class scores by ridge regression on responses of a series or image to 84 fixed kernels.

Rows are convolved with fixed kernels at several dilations. A *pooled feature* is the fraction of positions at which the
response exceeds a threshold. *Global pooling* is over the whole row, *local pooling* over each of several parts of it.
Class indicators are predicted from the pooled features by ridge regression. Thresholds are quantiles of the responses.

Source: Dempster, Schmidt and Webb, "MiniRocket" (2021): kernels, quantiles as thresholds, and ridge regression.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet._compat import is_compiling
from protonet.losses import class_means
from protonet.views.config import Config, bounded_field, raise_unless
from protonet.views.evaluation import Candidate, CandidateEvaluator, ViewFamily
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.view import InputMap, TrainingRows, View, ViewSpec

#: The ridge penalties that are evaluated by default.
CONVOLUTION_RIDGE_PENALTIES = (1e-2, 1e-1, 1.0)
#: The ridge penalty if no row can be held out.
DEFAULT_CONVOLUTION_RIDGE_PENALTY = 1e-1
#: Number of parts for local pooling: of a series, or along each side of an image.
LOCAL_POOLING_PARTS = {"series": 4, "image": 3}


@dataclass(frozen=True)
class ConvolutionFeaturesSpec:
    """The spec (hyperparameters) of the pooled features, which are the input of all fixed convolution views."""

    line_width: int  #: Pixels per line of an image, or length of a series.
    source: ClassVar[ViewSpec | None] = None
    use_shifts: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False
    name: ClassVar[str] = "convolution features"
    tags: ClassVar[frozenset[str]] = frozenset({"convolution", "local"})

    def fit(self, rows: TrainingRows, source: InputMap | None = None) -> View:
        """Fit the thresholds above which responses are counted; return a view that computes pooled features."""
        return ConvolutionFeaturesView(Config(), KernelBank.fit(rows.features, self.line_width))


@dataclass(frozen=True)
class FixedConvolutionSpec:
    """The spec (hyperparameters) of a fixed convolution view."""

    line_width: int  #: Pixels per line of an image, or length of a series.
    local_pooling: bool
    """Whether responses are pooled over each part of the row (local pooling), not over the whole row."""
    ridge: float  #: Ridge penalty > 0, in units of the mean squared norm of a row's pooled features.
    use_shifts: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False

    @property
    def source(self) -> ConvolutionFeaturesSpec:
        """The spec of the pooled features, which are the input of the view."""
        return ConvolutionFeaturesSpec(self.line_width)

    @property
    def tags(self) -> frozenset[str]:
        """Properties by which the prior predicts the view's weight: "convolution", and "local" for local pooling."""
        return frozenset({"convolution", "local"} if self.local_pooling else {"convolution"})

    @property
    def name(self) -> str:
        """The name in reports: "local convolution" or "convolution"."""
        return "local convolution" if self.local_pooling else "convolution"

    def fit(self, rows: TrainingRows, source: InputMap | None) -> FixedConvolutionView:
        """Fit the ridge regression in closed form; the view's output is ``num_classes`` scores."""
        assert isinstance(source, KernelBank)  # of `ConvolutionFeaturesSpec`
        bank, rows = source, rows.select(_select_fitted_rows(rows.features))
        regression = _RidgeRegression(bank.pool(bank(rows.features), local=self.local_pooling), rows)
        readout, offset = regression.solve(self.ridge)
        config = FixedConvolutionConfig(len(offset), self.local_pooling)
        return FixedConvolutionView(config, bank, {"readout": readout, "offset": offset})


@dataclass(frozen=True)
class FixedConvolutionFamily(ViewFamily):
    """Fixed convolution views of series and images: one with global and one with local pooling.

    The ridge penalty of each view is chosen by its held-out log-loss.
    """

    ridge_penalties: tuple[float, ...] = CONVOLUTION_RIDGE_PENALTIES
    progress_name: ClassVar[str] = "convolution views"

    def without_validation(self) -> FixedConvolutionFamily:
        """Return a family with the default ridge penalty alone."""
        return FixedConvolutionFamily((DEFAULT_CONVOLUTION_RIDGE_PENALTY,))

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate global and local pooling, each at its best ridge penalty; yield two candidates.

        Nothing is yielded if rows are neither series nor images, or if there are too many responses.
        """
        # Maximum number of responses of all rows; with more, the view is not evaluated.
        max_responses = 1e9
        # Number of multiplications that take as long as a response at one position.
        flops_per_response = 30.0
        rows = evaluator.rows
        n, dim = rows.features.shape
        if not rows.line_width:
            return
        row_responses = dim * count_kernels() * len(list_dilations(rows.line_width, dim))
        if n * row_responses > max_responses:
            return
        cosines: dict[FixedConvolutionSpec, list[Tensor]] = {}
        for fold in evaluator.folds:
            if evaluator.is_past_deadline():
                return
            training_rows = evaluator.rows.select(fold.train)
            bank = KernelBank.fit(training_rows.features, rows.line_width)
            features, queries = bank(training_rows.features), bank(rows.features[fold.held_out])
            for local in (False, True):
                pooled, pooled_queries = bank.pool(features, local=local), bank.pool(queries, local=local)
                regression = _RidgeRegression(pooled, training_rows, pooled_queries)
                for ridge in self.ridge_penalties:
                    view = FixedConvolutionSpec(rows.line_width, local, ridge)
                    cosines.setdefault(view, []).append(regression.cosines(ridge))
        for local in (False, True):
            views = [FixedConvolutionSpec(rows.line_width, local, ridge) for ridge in self.ridge_penalties]
            flops = flops_per_response * row_responses / 2  # both views share the responses
            scored = [evaluator.make_candidate(view, torch.cat(cosines[view]), flops) for view in views]
            yield min(scored, key=lambda candidate: candidate.mean_loss)


#: Number of weights of a kernel, for 9 values of a series or 3 x 3 pixels of an image.
KERNEL_SIZE = 9
#: Number of weights of a kernel that are 2; the other weights are -1.
N_POSITIVE_WEIGHTS = 3


def count_kernels() -> int:
    """Compute the number of kernels: 84."""
    return math.comb(KERNEL_SIZE, N_POSITIVE_WEIGHTS)


@cache
def fixed_kernels() -> Tensor:
    """Compute all kernels (84, 9) with three weights of 2 and six weights of -1; the weights of a kernel sum to 0."""
    kernels = torch.full((count_kernels(), KERNEL_SIZE), -1.0)
    for index, high_taps in enumerate(itertools.combinations(range(KERNEL_SIZE), N_POSITIVE_WEIGHTS)):
        kernels[index, list(high_taps)] = 2.0
    return kernels


#: Maximum number of dilations of a series, which are powers of two up to its length.
MAX_DILATIONS = 5


def list_dilations(width: int, dim: int) -> list[int]:
    """List the dilations of the kernels for series (``width == dim``), or for images of ``dim`` pixels."""
    # An image has 1 dilation, and one more for each of these numbers that its shorter side reaches, in pixels.
    dilation_image_sides = (7, 14)
    if width == dim:
        max_power = max(0, int(math.log2(max(1, (dim - 1) / (KERNEL_SIZE - 1)))))
        count = min(max_power + 1, MAX_DILATIONS)
        return sorted({2 ** round(power) for power in torch.linspace(0, max_power, count, device="cpu").tolist()})
    side = min(width, dim // width)
    n_steps = 1 + sum(side >= threshold for threshold in dilation_image_sides)
    return [2**power for power in range(n_steps)]


@cache
def kernel_feature_indices(width: int, dim: int, dilation: int, parts: int) -> Tensor:
    """Compute the feature index that each kernel weight multiplies at each position: (dim, 9), ``dim`` for padding."""
    line_reach = range(-(KERNEL_SIZE // 2), KERNEL_SIZE // 2 + 1)
    side = range(-(math.isqrt(KERNEL_SIZE) // 2), math.isqrt(KERNEL_SIZE) // 2 + 1)
    steps = [(0, step) for step in line_reach] if width == dim else [(down, right) for down in side for right in side]
    line, column = torch.arange(dim)[:, None] // width, torch.arange(dim)[:, None] % width
    down, right = (dilation * torch.tensor(step) for step in zip(*steps, strict=True))
    inside = (line + down >= 0) & (line + down < dim // width) & (column + right >= 0) & (column + right < width)
    order = sort_positions_by_part(width, dim, parts)[0]
    return torch.where(inside, (line + down) * width + column + right, dim)[order]


@cache
def sort_positions_by_part(width: int, dim: int, parts: int) -> tuple[Tensor, list[int]]:
    """Sort the positions (dim,) of a row by the part in which they are pooled; also list the sizes of the parts."""
    index = torch.arange(dim, device="cpu")  # sizes of parts are also known on the meta device
    line, column = index // width, index % width
    parts_down, parts_across = min(parts, dim // width), min(parts, width)
    part = (line * parts_down // (dim // width)) * parts_across + column * parts_across // width
    return part.argsort(stable=True), part.bincount().tolist()


@dataclass(frozen=True)
class KernelBankConfig(Config):
    """The sizes from which a `KernelBank` is built."""

    input_dim: int = bounded_field()  #: Number of features.
    width: int = bounded_field(3)  #: Pixels per line of an image, or length of a series.
    parts: int = bounded_field()  #: Number of parts of a series, or along each side of an image.

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_unless(self.input_dim % self.width == 0, "images of no integer number of lines")
        raise_unless(self.parts <= self.input_dim, "more parts than features")


#: Quantiles of a kernel's responses that are its thresholds.
THRESHOLD_QUANTILES = (0.3, 0.7)


class KernelBank(InputMap):
    """A feature map from rows to pooled features: the fractions of positions with a response above a threshold.

    There is one pooled feature for each dilation, kernel, threshold and part of the row.

    Attributes:
        counts: The number of positions in each part.
        n_responses: The number of pooled features of each part.
    """

    kind = "kernel_bank"
    config_type = KernelBankConfig
    config: KernelBankConfig
    thresholds: Tensor  #: (dilations, kernels, quantiles) buffer.
    kernels: Tensor  #: (kernels, kernel_size): the weights of each kernel.
    taps: Tensor  #: (dilations, dim, kernel_size) int64: the features that kernel weights multiply.

    def __init__(self, config: Config, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(config, tensors)
        self.counts = sort_positions_by_part(self.config.width, self.config.input_dim, self.config.parts)[1]
        self.n_responses = self.thresholds.numel()

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        dilations = list_dilations(self.config.width, self.config.input_dim)
        return {"thresholds": (len(dilations), count_kernels(), len(THRESHOLD_QUANTILES))}

    def derive_constants(self) -> None:
        """Compute the kernels, and the indices of the features that they multiply, on the device of the thresholds."""
        shape = self.config.width, self.config.input_dim
        indices = [kernel_feature_indices(*shape, dilation, self.config.parts) for dilation in list_dilations(*shape)]
        for name, value in (("kernels", fixed_kernels().to(self.thresholds)), ("taps", torch.stack(indices))):
            self.register_buffer(name, value.to(self.thresholds.device), persistent=False)

    @property
    def size(self) -> int:
        """The number of pooled features of a row."""
        return self.n_responses * len(self.counts)

    @classmethod
    def fit(cls, x: Tensor, width: int) -> KernelBank:
        """Fit the thresholds to rows x (n, dim), images or series of ``width``; many rows are sampled."""
        # Added to thresholds so that equal responses do not exceed them, in standard deviations of the responses.
        threshold_margin = 1e-4
        # Number of responses of each kernel from which thresholds are computed.
        max_sampled_responses = 2**14
        dim = x.shape[1]
        x = x[_select_fitted_rows(x)]
        sample = x[:: max(1, math.ceil(x.numel() / max_sampled_responses))]
        thresholds, kernels = [], fixed_kernels().to(x)
        for dilation in list_dilations(width, dim):
            taps = kernel_feature_indices(width, dim, dilation, 1).to(x.device)
            responses = _convolve(sample, taps, kernels).flatten(0, 1).T  # (kernels, rows * positions)
            margin = threshold_margin * responses.std(dim=1, correction=0)
            ordered = responses.sort(dim=1).values
            ranks = [round(quantile * (responses.shape[1] - 1)) for quantile in THRESHOLD_QUANTILES]
            thresholds.append(ordered[:, ranks] + margin[:, None])
        config = KernelBankConfig(dim, width, LOCAL_POOLING_PARTS["series" if width == dim else "image"])
        return cls(config, {"thresholds": torch.stack(thresholds)})

    def forward(self, x: Tensor) -> Tensor:
        """Compute the locally pooled features (n, dilations * quantiles * kernels * parts) of rows (n, dim)."""
        # Number of responses that are computed at once, so that they fit in the cache of a core.
        responses_per_chunk = 2**19
        if is_compiling():
            return self._pool_for_export(x)
        chunk_rows = max(1, int(responses_per_chunk / (self.config.input_dim * count_kernels())))
        return torch.cat([self._pool_chunk(rows) for rows in x.split(chunk_rows)])

    def _pool_for_export(self, x: Tensor) -> Tensor:
        """Compute the pooled features as `forward` does, by operators that `torch.export` can trace."""
        kernels, columns = self.kernels.to(x.dtype), []
        for taps, thresholds in zip(self.taps.unbind(0), self.thresholds.unbind(0), strict=True):
            responses = _convolve(x, taps, kernels)
            for threshold in thresholds.unbind(1):
                above = (responses > threshold).to(x.dtype)
                columns.append(torch.stack([part.mean(dim=1) for part in above.split(self.counts, dim=1)], dim=2))
        return torch.stack(columns, dim=1).flatten(1)

    def _pool_chunk(self, x: Tensor) -> Tensor:
        """Compute the pooled features of rows x (n, dim) at once; memory grows with n."""
        above = x.new_empty(len(x), self.config.input_dim, count_kernels())
        # (dilations, quantiles, parts, n, kernels)
        sums = x.new_empty(*self.thresholds.shape[::2], len(self.counts), len(x), count_kernels())
        kernels = self.kernels.to(x.dtype)
        for dilation, taps in enumerate(self.taps):
            responses = _convolve(x, taps, kernels)
            for quantile, threshold in enumerate(self.thresholds[dilation].T.contiguous()):
                torch.gt(responses, threshold, out=above)
                for part, out in zip(above.split(self.counts, dim=1), sums[dilation, quantile], strict=True):
                    torch.sum(part, dim=1, out=out)
        for count, part in zip(self.counts, sums.unbind(2), strict=True):
            part.div_(count)
        return sums.permute(3, 0, 1, 4, 2).flatten(1)

    def pool(self, features: Tensor, *, local: bool) -> Tensor:
        """Convert locally pooled features to globally pooled ones (n, n_responses), unless ``local``.

        Global pooling is the mean over the parts, weighted by their numbers of positions. If ``local``, the features
        are returned unchanged.
        """
        if local:
            return features
        parts, dim = features.view(-1, self.n_responses, len(self.counts)).unbind(2), self.config.input_dim
        return torch.stack([count / dim * part for count, part in zip(self.counts, parts, strict=True)]).sum(dim=0)

    def add_to_graph(self, graph: OnnxGraph, x: str) -> str:
        """Add the pooled features of rows ``x`` to an ONNX graph; return the name of their value."""
        kernels, columns = graph.constant(fixed_kernels().T), []
        members = F.one_hot(torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))).float().T
        means = graph.constant(members / members.sum(dim=1, keepdim=True))  # (parts, positions)
        padded = graph.pad(x, 1, 0.0)
        for dilation, taps in enumerate(self.taps):
            responses = graph.add("MatMul", graph.add("Gather", padded, taps, axis=1), kernels)
            for threshold in self.thresholds[dilation].T:
                above = graph.cast(graph.add("Greater", responses, threshold), "FLOAT")
                pooled = graph.add("Transpose", graph.add("MatMul", means, above), perm=[0, 2, 1])
                columns.append(graph.add("Flatten", pooled))
        return graph.add("Concat", *columns, axis=1)


#: Maximum number of rows that the regression is fitted to.
MAX_FITTED_ROWS = 2048


def _select_fitted_rows(x: Tensor) -> Tensor:
    """Compute the indices of at most ``MAX_FITTED_ROWS`` evenly spaced rows of x."""
    n = len(x)
    return torch.linspace(0, n - 1, min(n, MAX_FITTED_ROWS)).round().long().to(x.device)


def _convolve(x: Tensor, taps: Tensor, kernels: Tensor) -> Tensor:
    """Convolve zero-padded rows x (n, dim) with kernels, at the feature indices ``taps``: (n, positions, kernels)."""
    values = F.pad(x, (0, 1)).index_select(1, taps.flatten()).view(-1, KERNEL_SIZE)
    return (values @ kernels.T).view(-1, len(taps), len(kernels))


class _RidgeRegression:
    """Ridge regression of class indicators on pooled features (n, features), for several ridge penalties."""

    def __init__(self, features: Tensor, rows: TrainingRows, queries: Tensor | None = None) -> None:
        # Pooled features are divided by their standard deviation, but at least by this.
        min_feature_scale = 0.05
        # Pooled features with a smaller standard deviation are ignored.
        min_varying_std = 1e-3
        self.rows = rows
        weights = rows.class_balanced_weights
        self.weights = (torch.ones_like(rows.labels, dtype=torch.float64) if weights is None else weights)[:, None]
        features = features.double()
        self.mean = (self.weights * features).mean(dim=0)
        deviation = (self.weights * (features - self.mean).square()).mean(dim=0).sqrt()
        varies = deviation > min_varying_std
        self.gain = torch.where(varies, 1 / deviation.clamp_min(min_feature_scale), 0.0)
        self.z = (features - self.mean) * self.gain
        scale = float(self.z.square().sum(dim=1).mean()) or 1.0
        self.gain, self.z = self.gain / math.sqrt(scale), self.z / math.sqrt(scale)
        self.gram = self.z @ self.z.T
        indicators = F.one_hot(rows.labels, rows.num_classes).double()
        self.targets = indicators - (self.weights * indicators).mean(dim=0)
        self.query_gram = None if queries is None else ((queries.double() - self.mean) * self.gain) @ self.z.T

    def _solve_dual(self, ridge: float) -> Tensor:
        """Compute the dual coefficients (n, num_classes) of the regression at a ridge penalty."""
        penalty = torch.diag(ridge / self.weights[:, 0])
        dual: Tensor = torch.linalg.solve(self.gram + penalty, self.targets)
        return dual

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Compute the coefficients (features, num_classes) and the intercept (num_classes,) of the regression."""
        readout = self.gain[:, None] * (self.z.T @ self._solve_dual(ridge))
        return readout, -self.mean @ readout

    def cosines(self, ridge: float) -> Tensor:
        """Compute the cosines (m, num_classes) float32 of the queries to the class prototypes, on the CPU."""
        assert self.query_gram is not None
        dual = self._solve_dual(ridge)
        unit = F.normalize(self.gram @ dual, dim=1)
        means, _ = class_means(unit, self.rows.labels, self.rows.num_classes, self.rows.class_balanced_weights)
        return (F.normalize(self.query_gram @ dual, dim=1) @ F.normalize(means, dim=1).T).float().cpu()


class ConvolutionFeaturesView(View):
    """A view that only provides the pooled features as the input of other views; it is no part of an embedding."""

    kind = "convolution_features"
    input_map_type = KernelBank
    source: KernelBank

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The number of pooled features."""
        return (self.source.size,)


@dataclass(frozen=True)
class FixedConvolutionConfig(Config):
    """The number of classes of a `FixedConvolutionView`, and how it pools responses."""

    classes: int = bounded_field()  #: Number of classes.
    local: bool = True  #: Whether responses are pooled over each part of the row, not over the whole row.


class FixedConvolutionView(View):
    """Class scores by ridge regression on pooled features."""

    kind = "fixed_convolution"
    config_type, input_map_type = FixedConvolutionConfig, KernelBank
    config: FixedConvolutionConfig
    source: KernelBank
    readout: Tensor  #: (features, classes) buffer, the coefficients.
    offset: Tensor  #: (classes,) buffer, the intercept.

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        features = self.source.size if self.config.local else self.source.n_responses
        return {"readout": (features, self.config.classes), "offset": (self.config.classes,)}

    def forward(self, z: Tensor) -> Tensor:
        """Compute class scores (n, num_classes) of locally pooled features z (n, source.size)."""
        features = self.source.pool(z, local=self.config.local)
        # Scores are small compared with their terms: float32 rounding would depend on the batch.
        return F.linear(features.double(), self.readout.double().T.contiguous(), self.offset.double()).to(z.dtype)

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the class scores to an ONNX graph; return the name of their value, in a list.

        Global pooling is linear in the locally pooled features and becomes a part of the coefficients.
        """
        fractions = self.readout.new_tensor(self.source.counts) / self.input_dim  # (parts,)
        readout = self.readout
        if not self.config.local:
            readout = torch.einsum("fc,p->fpc", readout, fractions).flatten(0, 1)  # (features * parts, classes)
        return [graph.add("Gemm", rows, readout, self.offset)]
