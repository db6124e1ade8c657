"""Linear views: the features raw, centred, each divided by its standard deviation, clipped, or whitened.

A linear view is an affine map with a diagonal plus low-rank matrix. It is fitted to labelled samples in closed form and
stored in buffers. Only the clipped view limits its output: outliers then count as moderately large values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from protonet.losses import MAX_CHUNK_ROWS, class_means, multiply_by_weights
from protonet.selection.scoring import is_worse_by_one_error
from protonet.views.config import Config, bounded_field
from protonet.views.evaluation import Candidate, CandidateEvaluator, ViewFamily
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.view import InputMap, LinearMap, LinearMapConfig, TrainingRows, View, ViewSpec


class EigenCovariance(NamedTuple):
    """A covariance matrix (dim, dim), stored as eigenvectors and the variances along them."""

    eigenvectors: Tensor  #: (dim, rank): eigenvectors as orthonormal columns.
    variances: Tensor  #: (rank,): variances along the eigenvectors.
    orthogonal_variance: Tensor  #: 0-d: variance along every direction orthogonal to the eigenvectors.


#: An eigenvalue below this times the largest one is a rounding error.
MAX_NULL_EIGENVALUE = 1e-14


def shrink_covariance(residuals: Tensor, degrees_of_freedom: int) -> EigenCovariance:
    """Estimate a covariance matrix by quadratic-inverse shrinkage of the eigenvalues of the sample covariance.

    Every eigenvalue gets its own correction. Linear shrinkage towards the identity would increase all small eigenvalues
    if a few are huge.

    Args:
        residuals: (n, dim) rows minus their class means.
        degrees_of_freedom: The degrees of freedom of the residuals: n minus the number of classes. If 0, the covariance
            is zero.

    Source: Ledoit and Wolf, "Quadratic shrinkage for large covariance matrices", Bernoulli 28 (2022), sec. 4.
    """
    # Fraction of the eigenvalues that are replaced by a common value, the smallest ones, if there are as many degrees
    # of freedom as features. The fraction is lower otherwise.
    max_pooled_fraction = 0.2
    # Power of the dimension in the bandwidth of the shrinkage; Ledoit and Wolf 2022.
    bandwidth_power = 0.35
    n, dim = residuals.shape
    if n < dim:  # the Gram matrix has the same positive spectrum and is smaller
        residuals = residuals.to(torch.float64)
        gram = residuals @ residuals.T
    else:
        chunks = (chunk.to(torch.float64) for chunk in residuals.split(MAX_CHUNK_ROWS))
        gram = cast(Tensor, sum(chunk.T @ chunk for chunk in chunks))
    spectrum, left = torch.linalg.eigh(gram / max(1, degrees_of_freedom))
    rank = min(degrees_of_freedom, dim, int((spectrum > spectrum[-1] * MAX_NULL_EIGENVALUE).sum()))
    if rank == 0:
        return EigenCovariance(spectrum.new_zeros(dim, 0), spectrum.new_zeros(0), spectrum.new_zeros(()))
    sample = spectrum[-rank:]  # (rank,) ascending
    basis = left[:, -rank:]
    if n < dim:
        basis = torch.nn.functional.normalize(residuals.T @ basis, dim=0)  # (dim, rank)

    # Constant features and linear combinations of other features add no dimension.
    dimension = dim if rank == min(dim, degrees_of_freedom) else rank
    ratio = dimension / degrees_of_freedom
    power = bandwidth_power
    bandwidth = min(ratio**2, ratio**-2) ** power / dimension**power
    inverse = 1 / sample
    gap = inverse[:, None] - inverse[None, :]
    kernel = inverse[:, None] / (gap**2 + (bandwidth * inverse[:, None]) ** 2)
    stein = (kernel * gap).mean(dim=0)  # the smoothed Stein shrinker
    conjugate = (kernel * bandwidth * inverse[:, None]).mean(dim=0)
    amplitude = stein**2 + conjugate**2
    if rank == dimension:
        quadratic = (1 - ratio) ** 2 + 2 * ratio * (1 - ratio) * stein + ratio**2 * amplitude
        variances = 1 / (inverse * quadratic)
        orthogonal_variance = variances.min() if rank < dim else sample.new_zeros(())
    else:
        variances = 1 / (inverse * amplitude)
        orthogonal_variance = 1 / ((dim / rank - 1) * inverse.mean())
    # If there are about as many rows as features, the smallest eigenvalues are still far too small: pool them.
    pooled = int(max_pooled_fraction * min(ratio, 1 / ratio) * rank)
    variances = variances.clamp_min(variances[pooled])
    keep_trace = sample.sum() / (variances.sum() + (dimension - rank) * orthogonal_variance)
    return EigenCovariance(basis, variances * keep_trace, orthogonal_variance * keep_trace)


def discriminant_gains(
    within_variances: Tensor, between_variances: Tensor, multiplicity: Tensor, rows_per_class: float
) -> Tensor:
    """Compute gains of directions, after which the dot product of a row and a class mean is a Gaussian log-density.

    The model has a Gaussian prior on class means, with the variance ``b = strength * w**power`` along each direction,
    where w are the within-class variances. Strength and power are fitted by maximum likelihood to the variances of
    class means. The part of the log predictive density of a row x that is linear in a class mean m is ``x' diag(g) m``
    with ``g = n b / (w (w + (n + 1) b))``, where n is the number of rows per class. A gain is ``sqrt(g)``.

    Args:
        within_variances: (directions,) > 0: variance of rows around their class means.
        between_variances: (directions,) variance of class means around the overall mean.
        multiplicity: (directions,) number of equal directions that an entry represents.
        rows_per_class: Number of samples per class mean.

    Returns:
        (directions,) gains.

    Source: Ioffe, "Probabilistic linear discriminant analysis" (2006), with a power-law prior.
    """
    # Number of values of ``power`` in [0, 1] that `discriminant_gains` evaluates.
    n_prior_powers = 5
    # Grid of ``strength`` in `discriminant_gains`: the base-10 logarithms of the smallest and of the largest value, and
    # the number of values.
    prior_strength_grid = (-6.0, 3.0, 91)
    dtype, device = within_variances.dtype, within_variances.device
    power = torch.linspace(0, 1, n_prior_powers, dtype=dtype, device=device)[:, None, None]
    unit = (between_variances * multiplicity).sum() / multiplicity.sum()
    strength = torch.logspace(*prior_strength_grid, dtype=dtype, device=device)[None, :, None]
    scaled = within_variances / ((within_variances * multiplicity).sum() / multiplicity.sum())
    prior = strength * unit * scaled**power  # (power, strength, direction)
    spread = prior + within_variances / rows_per_class
    loss = ((spread.log() + between_variances / spread) * multiplicity).sum(dim=-1)  # (power, strength)
    best = int(loss.argmin())
    b = prior[best // loss.shape[1], best % loss.shape[1]]
    return (rows_per_class * b / (within_variances * (within_variances + (rows_per_class + 1) * b))).sqrt()


#: The scalings of features by linear views, in the order of increasing complexity.
FEATURE_SCALINGS = ("raw", "centred", "standardised", "relevant", "whitened", "clipped")


#: Constant that scaled and whitened views append to rows, whose other values have unit scale.
BIAS = 3.0
#: The smallest divisor.
MIN_DIVISOR = 1e-30


@dataclass(frozen=True)
class LinearSpec:
    """The spec (hyperparameters) of a linear view."""

    scaling: str  #: One of ``FEATURE_SCALINGS``.
    feature_span: tuple[int, int] | None = None
    """The range [start, stop) of the features that the view reads. If None, it reads all features."""
    source: ClassVar[ViewSpec | None] = None
    use_shifts: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False

    @property
    def tags(self) -> frozenset[str]:
        """Properties by which the prior predicts the view's weight: the scaling of the features."""
        return frozenset({"standardised" if self.scaling == "clipped" else self.scaling})

    @property
    def name(self) -> str:
        """The name in reports: the scaling, and the range of features if the view does not read all of them."""
        if self.feature_span is None:
            return self.scaling
        return f"{self.scaling} {self.feature_span[0]}-{self.feature_span[1] - 1}"

    @property
    def min_degrees_of_freedom(self) -> int:
        """The minimum number of training rows minus the number of classes with which the view can be fitted."""
        return 2 if self.scaling in {"relevant", "whitened", "clipped"} else 0

    def fit(self, rows: TrainingRows, source: InputMap | None = None) -> LinearView:
        """Fit the affine map to labelled rows; the mean square of its output is 1."""
        # A feature is constant if its standard deviation is below this times its root mean square.
        max_constant_std = 1e-6
        all_features = rows.features
        if self.feature_span is not None:
            rows = rows.select_features(*self.feature_span)
        features, weights = rows.features, rows.class_balanced_weights
        dim, scaling = features.shape[1], self.scaling
        shift = features.new_zeros(dim, dtype=torch.float64)
        gain = torch.ones_like(shift)
        basis, coefficient = shift.new_zeros(dim, 0), shift.new_zeros(0)
        if scaling != "raw":
            shift = _weighted_mean(features, weights)
        if scaling in {"standardised", "relevant"}:
            deviation = _weighted_mean((features - shift.to(features.dtype)).square(), weights).sqrt()
            varies = deviation > max_constant_std * _weighted_mean(features.square(), weights).sqrt()
            if rows.column_indices is not None:
                variances = torch.bincount(rows.column_indices, deviation.square() * varies)
                deviation = variances[rows.column_indices].sqrt()
            gain = torch.where(varies, 1 / deviation.clamp_min(MIN_DIVISOR), 0.0)
            if scaling == "relevant":
                gain *= _relevance_factors(rows)
        if scaling == "clipped":
            shift, gain = _fit_robust_scaling(rows)
        if scaling == "whitened":
            gain, basis, coefficient = _fit_whitening(rows)
        start = 0 if self.feature_span is None else self.feature_span[0]
        limit = float(scaling == "clipped")
        config = LinearMapConfig(all_features.shape[1], dim, basis.shape[1], start, limit)
        affine = LinearMap(config, {"shift": shift, "gain": gain, "basis": basis, "coefficient": coefficient})
        squares = [affine(part).square().sum(dtype=torch.float64) for part in all_features.split(MAX_CHUNK_ROWS)]
        scale = (torch.stack(squares).sum() / (len(all_features) * dim)).sqrt().to(features.dtype)
        scale = torch.where(scale > MIN_DIVISOR, scale, 1.0)  # constant rows are not scaled
        affine.gain /= scale
        affine.coefficient /= scale
        affine.config = replace(config, limit=limit / float(scale))
        return LinearView(LinearConfig(0.0 if scaling in {"raw", "centred"} else BIAS), affine)


@dataclass(frozen=True)
class LinearFamily(ViewFamily):
    """Linear views of all scalings for which there are enough training rows, the simplest first.

    The clipped view is tried if features have heavy tails, and used if it is better than the others by one standard
    error.
    """

    scalings: tuple[str, ...] = FEATURE_SCALINGS
    progress_name: ClassVar[str] = "linear views"

    def without_validation(self) -> LinearFamily:
        """Return a family of the scalings that can be fitted to one row per class."""
        return LinearFamily(tuple(name for name in self.scalings if not LinearSpec(name).min_degrees_of_freedom))

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate and yield a candidate for each scaling; other views share the input maps of the cached views."""
        best: Candidate | None = None
        for spec in map(LinearSpec, self.scalings):
            if evaluator.degrees_of_freedom < spec.min_degrees_of_freedom:
                continue
            if spec.scaling == "clipped" and not _have_heavy_tails(evaluator.rows):
                continue
            candidate = evaluator.evaluate_and_cache(spec)
            if spec.scaling != "clipped" or best is None or is_worse_by_one_error(best.losses, candidate.losses):
                yield candidate
            if best is None or candidate.mean_loss < best.mean_loss:
                best = candidate
            if evaluator.is_past_deadline():
                return


#: The largest bias coordinate that is read from a file.
MAX_BIAS = 1e6


@dataclass(frozen=True)
class LinearConfig(Config):
    """The bias coordinate of a `LinearView`.

    With a constant coordinate, the cosine also depends on a row's distance from the mean. If there are few features,
    the direction alone is not informative enough.
    """

    bias: float = bounded_field(0.0, MAX_BIAS)
    """Constant that is appended to rows; if 0, none is appended."""


class LinearView(View):
    """A view that applies an affine map to the features, and appends a constant (bias coordinate)."""

    kind = "linear"
    config_type, input_map_type = LinearConfig, LinearMap
    config: LinearConfig
    source: LinearMap

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The width of the output."""
        return (self.source.config.dim + bool(self.config.bias),)

    def forward(self, z: Tensor) -> Tensor:
        """Append the bias coordinate to rows z (n, dim): (n, dim + 1); return z if there is no bias."""
        return nn.functional.pad(z, (0, 1), value=self.config.bias) if self.config.bias else z

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the bias coordinate to an ONNX graph; return the name of the value with it, in a list."""
        return [graph.pad(rows, int(self.config.bias > 0), self.config.bias)]


def _weighted_mean(features: Tensor, weights: Tensor | None) -> Tensor:
    """Compute the weighted mean (dim,) float64 of features (n, dim)."""
    return multiply_by_weights(features, weights).mean(dim=0, dtype=torch.float64)


def _fit_robust_scaling(rows: TrainingRows) -> tuple[Tensor, Tensor]:
    """Compute shift and gain (dim,) float64: the median of a feature, and the inverse of its robust deviation.

    The robust deviation is the interquartile range divided by that of the standard normal distribution. A feature
    whose range is 0 has its standard deviation instead, and a constant one the gain 0.
    """
    normal_range = 1.349
    weights = rows.class_balanced_weights
    if weights is None:
        weights = torch.ones_like(rows.labels, dtype=torch.float64)
    values, order = rows.features.double().sort(dim=0)
    below = weights[order].cumsum(dim=0) / weights.sum()  # (n, dim)
    rounding = 1e-9  # a row of weight 2 is two rows
    low, shift, high = (
        values.gather(0, (below < part - rounding).sum(dim=0, keepdim=True))[0] for part in (0.25, 0.5, 0.75)
    )
    deviation = (weights @ (rows.features - shift).square() / weights.sum()).sqrt()
    deviation = torch.where(high > low, (high - low) / normal_range, deviation)
    return shift, torch.where(deviation > MIN_DIVISOR, 1 / deviation.clamp_min(MIN_DIVISOR), 0.0)


def _have_heavy_tails(rows: TrainingRows) -> bool:
    """Test whether half of the features have heavier tails within classes than a Laplace distribution."""
    laplace_kurtosis = 6.0
    means = class_means(rows.features, rows.labels, rows.num_classes, rows.class_balanced_weights)[0]
    squares = (rows.features - means[rows.labels]).square()
    variances, fourth = (_weighted_mean(part, rows.class_balanced_weights) for part in (squares, squares.square()))
    return bool((fourth / variances.square().clamp_min(MIN_DIVISOR)).median() > laplace_kurtosis)


def _relevance_factors(rows: TrainingRows) -> Tensor:
    """Compute a factor in (0, 1) for each feature (dim,) from the excess of its F statistic over 1."""
    # Excess of the F statistic over 1 at which half of a feature is assumed to be signal.
    half_relevance_excess = 5.0
    # A smaller excess of the F statistic over 1 is replaced by this.
    min_relevance_excess = 0.05
    features, labels, weights = rows.features, rows.labels, rows.class_balanced_weights
    num_classes = rows.num_classes
    means, counts = class_means(features, labels, num_classes, weights)
    n_seen = int((counts > 0).sum())
    residuals = multiply_by_weights((features - means[labels]).square(), weights)
    within = residuals.sum(dim=0, dtype=torch.float64) / max(1, len(features) - n_seen)
    mean = multiply_by_weights(features, weights).mean(dim=0)
    between = (counts[:, None] * (means - mean).square()).sum(dim=0, dtype=torch.float64)
    excess = (between / max(1, n_seen - 1) / within.clamp_min(MIN_DIVISOR) - 1).clamp_min(min_relevance_excess)
    return (excess / (excess + half_relevance_excess)).sqrt()


def _fit_whitening(rows: TrainingRows) -> tuple[Tensor, Tensor, Tensor]:
    """Fit the whitening map: its ``gain`` (dim,), ``basis`` (dim, rank) and ``coefficient`` (rank,)."""
    x, labels, weights = rows.features, rows.labels, rows.class_balanced_weights
    num_classes = rows.num_classes
    means, counts = class_means(x, labels, num_classes, weights)
    if weights is not None:  # the effective sample size of weighted rows; Kish, "Survey sampling" (1965), sec. 8.2
        squares = torch.bincount(labels, weights.square(), minlength=num_classes)
        counts = counts.square() / squares.clamp_min(MIN_DIVISOR)
    seen = counts > 0
    degrees = len(x) - int(seen.sum())
    shots = float(1 / (1 / counts[seen]).mean())
    dim = x.shape[1]
    root_weights = None if weights is None else weights.sqrt()
    covariance = shrink_covariance(multiply_by_weights(x - means[labels], root_weights), degrees)
    rank = len(covariance.variances)
    deviations = means[seen].to(torch.float64) - _weighted_mean(x, weights)
    within, between = covariance.variances, (deviations @ covariance.eigenvectors).square().mean(dim=0)  # (rank,)
    multiplicity = torch.ones_like(within)
    if rank < dim:  # one more entry for all directions orthogonal to the basis
        orthogonal = (deviations.square().sum(dim=1).mean() - between.sum()).clamp_min(0) / (dim - rank)
        within = torch.cat([within, covariance.orthogonal_variance[None]])
        between = torch.cat([between, orthogonal[None]])
        multiplicity = torch.cat([multiplicity, multiplicity.new_full((1,), dim - rank)])
    floor = within.max() * MAX_NULL_EIGENVALUE
    gains = discriminant_gains(within.clamp_min(floor.clamp_min(MIN_DIVISOR)), between, multiplicity, shots)
    orthogonal_gain = gains[rank] if rank < dim else gains.new_zeros(())
    return orthogonal_gain.expand(dim).clone(), covariance.eigenvectors, gains[:rank] - orthogonal_gain
