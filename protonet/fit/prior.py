"""The weighting prior: a network that weights feature maps (views), trained on thousands of small data sets.

The input of the network are statistics of the training rows and of the held-out predictions of each view. The output
are the weights of the views and a correction of the temperature. The network corrects the weights that the held-out
rows alone suggest. In the training of the network (`python -m analysis prior`), an example is a whole data set, and the
loss is the log-loss of test rows. The parameters are constants: nothing is fitted to a user's data.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.fit.prior_numbers import PRIOR_PARAMETERS
from protonet.selection import scoring
from protonet.views.view import TrainingRows, ViewSpec, canonical_feature_order, select_evenly

#: All tags that a feature map (view) may have, inputs of the prior; see `protonet.views.view.ViewSpec.tags`.
VIEW_TAGS = (
    "raw",
    "centred",
    "standardised",
    "relevant",
    "variances",
    "whitened",
    "rows",
    "gaussian",
    "laplacian",
    "shifted",
    "convolution",
    "local",
    "forest",
    "learned",
    "transformer",
)
#: Statistics of a data set that follow from its rows, in the order in which the prior was trained.
ROW_STATISTICS = (
    *("log_rows", "log_features", "log_classes", "mean_log_class_size", "log_smallest_class", "log_rows_per_feature"),
    *("has_columns", "log_columns_per_feature", "log_shifts", "log_effective_dimension"),
    *("log_effective_dimension_of_standardised", "std_of_log_deviations", "log_offset", "log_kurtosis"),
    *("distinct_values", "zeros", "nonnegative_features", "mean_correlation"),
)
#: Statistics of a data set that follow from its held-out rows; all are 0 if no row can be held out.
HELD_OUT_STATISTICS = ("has_held_out_rows", "log_held_out_rows", "mixture_loss", "mixture_accuracy", "log_sharpness")
#: Statistics of a view. Those from the third on follow from held-out rows; all are 0 if no row can be held out.
VIEW_STATISTICS = (
    *("log_relative_spread", "is_constant", "excess_loss", "excess_loss_in_errors", "relative_loss"),
    *("accuracy_below_best", "log_influence_by_loss", "log_influence", "gradient", "correlation_with_mixture"),
)
N_VIEW_STATISTICS, N_DATASET_STATISTICS = len(VIEW_STATISTICS), len(ROW_STATISTICS) + len(HELD_OUT_STATISTICS)
#: Indices of the statistics of a data set from which the temperature is predicted: counts, and held-out results. The
#: other statistics are not used for the temperature, since their effect differs between data sets.
TEMPERATURE_STATISTIC_INDICES = [
    (*ROW_STATISTICS, *HELD_OUT_STATISTICS).index(name)
    for name in ("log_rows", "log_classes", "mean_log_class_size", "log_smallest_class", *HELD_OUT_STATISTICS)
]
N_HIDDEN_UNITS = 32  #: Number of units of each hidden layer of the prior.
#: Minimum spread of a view that separates rows. The spread is the standard deviation of its cosines over the classes.
MIN_VIEW_SPREAD = 1e-6
#: Lower limit of the logarithm of a view's influence, which is its weight times its spread, as a fraction of the sum.
MIN_LOG_VIEW_INFLUENCE = -9.0
COSINE_TIE_TOLERANCE = 1e-6  #: Cosines whose difference is smaller count as equal.
MAX_ROWS_FOR_CORRELATION = 512  #: Maximum rows, and features in no order, for the mean correlation.
#: Lower limit of the inverse temperature of cosines that are divided by their spread.
MIN_PRIOR_INVERSE_TEMPERATURE = 0.05
#: Standard deviation of the logits if no row can be held out, before the prior corrects the temperature.
DEFAULT_LOGIT_STD = 1.5
#: Number of held-out rows at which the temperature depends on the rows and on the prior in equal parts.
TEMPERATURE_PRIOR_PSEUDO_COUNT = 8


class PriorInput(NamedTuple):
    """The input of the prior: statistics of a data set and of the views that are evaluated on it.

    The influence of a view is its weight times its spread, as a fraction of the sum over all views.
    """

    view_statistics: Tensor  #: (views, N_VIEW_STATISTICS) float32: statistics of each view.
    view_tags: Tensor  #: (views, tags) float32, 0 or 1: the tags of each view.
    dataset_statistics: Tensor  #: (N_DATASET_STATISTICS,) float32: statistics of the data set.
    #: (views,) float32: logarithm of the influence of each view that the held-out rows alone suggest.
    initial_log_influence: Tensor
    view_spreads: Tensor  #: (views,) float64: standard deviation of each view's cosines over the classes.
    #: Inverse temperature that the held-out rows alone suggest, for cosines divided by their spread.
    initial_inverse_temperature: float


def encode_tags(specs: Sequence[ViewSpec]) -> Tensor:
    """Encode the tags of views as indicators (views, tags) float32: 1 if a view has this one of ``VIEW_TAGS``."""
    rows = [[float(tag in spec.tags) for tag in VIEW_TAGS] for spec in specs]
    return torch.tensor(rows, dtype=torch.float32)


def compute_row_statistics(rows: TrainingRows) -> Tensor:
    """Compute the ``ROW_STATISTICS`` (18,) float32 of labelled rows, such as the logarithm of their number.

    The statistics do not depend on the unit of the features. They are inputs of the prior.
    """
    x = rows.features
    n, dim = x.shape
    counts = torch.bincount(rows.labels, minlength=rows.num_classes)
    counts = counts[counts > 0].double()
    centred = (x - x.mean(dim=0)).double()
    deviation = centred.square().mean(dim=0).sqrt()
    varies = deviation > 1e-6 * deviation.max().clamp_min(1e-30)
    deviation, centred = deviation[varies].clamp_min(1e-30), centred[:, varies]
    if not len(deviation):
        deviation, centred = torch.ones(1, dtype=torch.float64), centred.new_zeros(n, 1)
    unit = centred / deviation
    values = x[:, varies] if bool(varies.any()) else x
    ascending = values.sort(dim=0).values
    distinct = (ascending[1:] > ascending[:-1]).double().mean() if n > 1 else torch.tensor(1.0)
    blocks = dim if rows.column_indices is None else int(rows.column_indices.max()) + 1
    statistics = {
        "log_rows": math.log(n),
        "log_features": math.log(dim),
        "log_classes": math.log(len(counts)),
        "mean_log_class_size": float(counts.log().mean()),
        "log_smallest_class": float(counts.min().log()),
        "log_rows_per_feature": math.log(n / dim),
        "has_columns": float(rows.column_indices is not None),
        "log_columns_per_feature": math.log(blocks / dim),
        "log_shifts": math.log(len(rows.shifts)),
        "log_effective_dimension": math.log(_effective_dimension(centred) / min(n, dim)),
        "log_effective_dimension_of_standardised": math.log(_effective_dimension(unit) / min(n, dim)),
        "std_of_log_deviations": float(deviation.log().std(correction=0)),
        "log_offset": math.log1p(float(x.mean(dim=0).double().square().sum() / deviation.square().sum())),
        "log_kurtosis": math.log(float(unit.pow(4).mean()) + 0.1),  # a constant unit has the kurtosis 0
        "distinct_values": float(distinct),
        "zeros": float((x == 0).double().mean()),
        "nonnegative_features": float((x.amin(dim=0) >= 0).double().mean()),
        "mean_correlation": _mean_absolute_correlation(unit, ordered=rows.shifts != (0,)),
    }
    # Logarithms of degenerate rows, such as a single one far from 0, would be far outside of the training data.
    return torch.tensor([statistics[name] for name in ROW_STATISTICS], dtype=torch.float32).clamp(-12, 12)


def _accuracy_with_ties(cosines: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean accuracy of cosines (n, classes) if ties for the largest one are broken at random."""
    largest = cosines >= cosines.amax(dim=1, keepdim=True) - COSINE_TIE_TOLERANCE
    return (largest.gather(1, labels[:, None])[:, 0].double() / largest.sum(dim=1)).mean()


def _mean_absolute_correlation(unit: Tensor, *, ordered: bool) -> float:
    """Compute the mean absolute correlation of standardized features (n, dim), of adjacent ones only if ``ordered``."""
    n, dim = unit.shape
    if dim < 2:
        return 0.0
    if ordered:
        return float((unit[:, 1:] * unit[:, :-1]).mean(dim=0).abs().mean())
    columns = canonical_feature_order(unit, torch.arange(dim))[select_evenly(dim, MAX_ROWS_FOR_CORRELATION)]
    part = unit[select_evenly(n, MAX_ROWS_FOR_CORRELATION)][:, columns]
    correlation = (part.T @ part / len(part)).abs()
    return float((correlation.sum() - correlation.trace()) / (len(columns) * (len(columns) - 1)))


def _effective_dimension(x: Tensor) -> float:
    """Compute the effective dimension >= 1 of rows x (n, dim): the participation ratio of the eigenvalues of x^T x."""
    gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
    square = float(gram.square().sum())
    return max(1.0, float(gram.trace()) ** 2 / square) if square > 0 else 1.0


def build_prior_input(
    rows: TrainingRows,
    tags: Tensor,
    cosines: Sequence[Tensor],
    labels: Tensor | None,
    weights: Tensor | None = None,
    losses: Sequence[Tensor] | None = None,
    row_statistics: Tensor | None = None,
) -> PriorInput:
    """Compute the input of the prior from the training rows and the held-out cosines of each view.

    Args:
        rows: The training rows.
        tags: (views, tags) result of `encode_tags`.
        cosines: For each view, the cosines (n, num_classes) of the held-out rows to the prototypes. If ``labels`` is
            None, cosines of the training rows; only their spread is used then.
        labels: (n,) int64 labels of the held-out rows; None if no row can be held out.
        weights: (n,) sample weights of the held-out rows; None for equal weights.
        losses: For each view, the log-losses (n,) of the held-out rows from `fit_scale_and_offsets`. If None,
            they are computed.
        row_statistics: The result of `compute_row_statistics`. If None, it is computed.
    """
    sizes = torch.bincount(rows.labels, rows.sample_counts, minlength=rows.num_classes)
    seen = sizes > 0
    views = ViewCosines([scoring.select_by_class_mask(view, seen) for view in cosines])
    spread = views.spreads
    relative = (spread.clamp_min(MIN_VIEW_SPREAD) / spread.max().clamp_min(MIN_VIEW_SPREAD)).log()
    statistics = {
        "log_relative_spread": relative.clamp_min(MIN_LOG_VIEW_INFLUENCE),
        "is_constant": (spread < MIN_VIEW_SPREAD).double(),
    }
    dataset = dict.fromkeys(HELD_OUT_STATISTICS, 0.0)
    if labels is None:
        start, factor = torch.where(spread > MIN_VIEW_SPREAD, 0.0, MIN_LOG_VIEW_INFLUENCE), DEFAULT_LOGIT_STD
    else:
        if losses is None:
            losses = [scoring.fit_scale_and_offsets(view, labels, sizes, weights)[2] for view in cosines]
        soft = scoring.weights_from_losses(cosines, losses)
        joint = scoring.fit_view_weights(cosines, labels, sizes, soft, weights)
        by_loss, influence = ((view * spread / (view * spread).sum().clamp_min(1e-30)) for view in (soft, joint))
        start = _log_influence(influence)
        targets = (seen.cumsum(dim=0) - 1)[labels]  # classes are numbered without those that have no row
        mixed = views.mix(influence)
        factor, offsets, mixture_losses = scoring.fit_scale_and_offsets(mixed, targets, sizes[seen], weights)
        gradient, alike = views.compare_with_mixture(mixed, targets, factor, offsets)
        statistics |= _compare_losses(torch.stack(list(losses)), len(sizes[seen]))
        right = torch.stack([_accuracy_with_ties(view, labels) for view in cosines])
        statistics |= {
            "accuracy_below_best": right - right.max(),
            "log_influence_by_loss": _log_influence(by_loss),
            "log_influence": start,
            # The sum is that of the constraint that influences sum to 1.
            "gradient": (gradient - (influence * gradient).sum()).clamp(-3, 3),
            "correlation_with_mixture": alike,
        }
        dataset = {
            "has_held_out_rows": 1.0,
            "log_held_out_rows": math.log(len(labels)),
            "mixture_loss": float(mixture_losses.mean()) / _max_loss(len(sizes[seen])),
            "mixture_accuracy": float(_accuracy_with_ties(mixed, targets)),
            "log_sharpness": math.log(max(factor, MIN_PRIOR_INVERSE_TEMPERATURE)),
        }
    missing = torch.zeros_like(spread)
    per_view = torch.stack([statistics.get(name, missing) for name in VIEW_STATISTICS], dim=1)
    of_rows = compute_row_statistics(rows) if row_statistics is None else row_statistics
    of_dataset = torch.cat([of_rows, torch.tensor([dataset[name] for name in HELD_OUT_STATISTICS])])
    sharpness = max(factor, MIN_PRIOR_INVERSE_TEMPERATURE)
    return PriorInput(per_view.float(), tags, of_dataset.float(), start.float(), spread, sharpness)


class ViewCosines:
    """The cosines of all views for the same rows, which are processed in blocks of rows to bound the memory.

    Args:
        cosines: For each view, (n, classes) cosines of rows to the prototypes of the classes that have rows.
    """

    def __init__(self, cosines: Sequence[Tensor]) -> None:
        self.cosines = cosines
        self.shape = cosines[0].shape
        self.blocks = list(scoring.row_slices(self.shape[0], len(cosines) * self.shape[1]))
        variance = torch.empty(len(cosines), self.shape[0], dtype=torch.float64)
        for block in self.blocks:
            variance[:, block] = self.stack(block).var(dim=2, correction=0)
        #: (views,) the spread of each view: the root mean variance of its cosines over the classes.
        self.spreads = variance.mean(dim=1).sqrt()

    def stack(self, block: slice) -> Tensor:
        """Stack the cosines of all views for a block of m rows: (views, m, classes) float64."""
        return torch.stack([view[block] for view in self.cosines]).double()

    def standardize(self, block: slice) -> Tensor:
        """Divide the cosines of a block of m rows by the spreads of the views: (views, m, classes) float64."""
        return self.stack(block) / self.spreads.clamp_min(MIN_VIEW_SPREAD)[:, None, None]

    def mix(self, influence: Tensor) -> Tensor:
        """Compute the sum (n, classes) float64 of the standardized cosines, weighted by influences (views,)."""
        mixed = torch.empty(self.shape, dtype=torch.float64)
        for block in self.blocks:
            mixed[block] = torch.tensordot(influence, self.standardize(block), dims=1)
        return mixed

    def compare_with_mixture(
        self, mixed: Tensor, targets: Tensor, factor: float, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute how the mixture's log-loss depends on each view, and how similar each view is to the mixture.

        Args:
            mixed: (n, classes) result of `mix`.
            targets: (n,) int64 classes of the rows.
            factor: Inverse temperature of the mixture.
            offsets: (classes,) offsets of the mixture's logits, or None.

        Returns:
            The derivative (views,) of the mean log-loss with respect to each influence, and the correlation (views,) of
            each view's centred cosines with the mixture's.
        """
        gradient, inner, squares = (torch.zeros_like(self.spreads) for _ in range(3))
        mixed_square = 0.0
        for block in self.blocks:
            scaled, part = self.standardize(block), mixed[block]
            logits = factor * part if offsets is None else factor * part + offsets
            wrong = logits.softmax(dim=1) - F.one_hot(targets[block], self.shape[1])
            gradient += factor * torch.einsum("nc,vnc->v", wrong, scaled) / self.shape[0]
            flat = scaled - scaled.mean(dim=2, keepdim=True)
            common = part - part.mean(dim=1, keepdim=True)
            inner += torch.einsum("vnc,nc->v", flat, common)
            squares += flat.square().sum(dim=(1, 2))
            mixed_square += float(common.square().sum())
        return gradient, inner / (squares.sqrt() * math.sqrt(mixed_square)).clamp_min(MIN_VIEW_SPREAD)


def _max_loss(n_classes: int) -> float:
    """Compute the log-loss of equal probabilities, for two classes at least: the unit of relative losses."""
    return math.log(max(2, n_classes))


def _log_influence(influence: Tensor) -> Tensor:
    """Compute the logarithms (views,) of influences, from ``MIN_LOG_VIEW_INFLUENCE`` on."""
    return influence.clamp_min(math.exp(MIN_LOG_VIEW_INFLUENCE)).log()


def _compare_losses(losses: Tensor, n_classes: int) -> dict[str, Tensor]:
    """Compare the log-losses (views, n) of views with those of the best one; return statistics by name."""
    means = losses.mean(dim=1)
    best = int(means.argmin())
    error = (losses - losses[best]).std(dim=1, correction=0) / math.sqrt(losses.shape[1])
    excess = means - means[best]
    return {
        "excess_loss": excess.clamp_max(3.0),  # beyond these limits, a view is hopeless, however bad it is
        "excess_loss_in_errors": (excess / error.clamp_min(1e-3)).clamp_max(6.0),
        "relative_loss": means / _max_loss(n_classes),
    }


class ZeroInitializedLinear(nn.Module):
    """A linear layer whose parameters are initialized with zeros.

    `torch.nn.Linear` would draw from the global random state, and `torch.nn.utils.skip_init`, which avoids this,
    imports five hundred modules in 0.7 s.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return F.linear(x, self.weight, self.bias)


class WeightingPrior(nn.Module):
    """A network that maps the statistics `PriorInput` to weights of views and a correction of the inverse temperature.

    An untrained prior returns the weights that the held-out rows alone suggest, and the correction 1.
    """

    view_mean: Tensor
    view_std: Tensor
    dataset_mean: Tensor
    dataset_std: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("view", N_VIEW_STATISTICS), ("dataset", N_DATASET_STATISTICS)):
            self.register_buffer(f"{name}_mean", torch.zeros(size, dtype=torch.float32))
            self.register_buffer(f"{name}_std", torch.ones(size, dtype=torch.float32))
        self.first = ZeroInitializedLinear(N_VIEW_STATISTICS + len(VIEW_TAGS) + N_DATASET_STATISTICS, N_HIDDEN_UNITS)
        self.second = ZeroInitializedLinear(2 * N_HIDDEN_UNITS, N_HIDDEN_UNITS)
        self.score = ZeroInitializedLinear(N_HIDDEN_UNITS, 1)
        self.belief = ZeroInitializedLinear(len(TEMPERATURE_STATISTIC_INDICES), N_HIDDEN_UNITS)
        self.size = ZeroInitializedLinear(N_HIDDEN_UNITS, 1)
        self.trust = nn.Parameter(torch.zeros(1, dtype=torch.float32))  # log factor on initial_log_influence

    def forward(
        self, views: Tensor, tags: Tensor, dataset: Tensor, initial_log_influence: Tensor, present: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Predict the influence of each view and the correction of the inverse temperature, for a batch of data sets.

        Args:
            views: (tasks, views, N_VIEW_STATISTICS) statistics of the views.
            tags: (tasks, views, tags) indicators, 0 or 1.
            dataset: (tasks, N_DATASET_STATISTICS) statistics of the data sets.
            initial_log_influence: (tasks, views) logarithms of the influences that the held-out rows alone suggest.
            present: (tasks, views) mask of the views that each data set has, at least one. The other views are padding.

        Returns:
            The logarithms (tasks, views) of the influences, which sum to 1 in each data set, and the logarithms
            (tasks,) of the corrections, which are factors.
        """
        views = (views - self.view_mean) / self.view_std
        dataset = (dataset - self.dataset_mean) / self.dataset_std
        wide = dataset[:, None].expand(-1, views.shape[1], -1)
        hidden = F.gelu(self.first(torch.cat([views, tags, wide], dim=2)))
        influence = initial_log_influence.masked_fill(~present, -torch.inf).softmax(dim=1)
        context = (influence[..., None] * hidden).sum(dim=1)  # (tasks, hidden)
        both = torch.cat([hidden, context[:, None].expand_as(hidden)], dim=2)
        second = F.gelu(self.second(both))
        score = initial_log_influence * self.trust.exp() + self.score(second)[..., 0]
        log_influence = score.masked_fill(~present, -torch.inf).log_softmax(dim=1)
        size = self.size(F.gelu(self.belief(dataset[:, TEMPERATURE_STATISTIC_INDICES])))[:, 0]
        return log_influence, size

    @torch.no_grad()
    def predict_view_weights(self, evidence: PriorInput) -> tuple[Tensor, float]:
        """Compute the weight of each view, and the factor that corrects the inverse temperature, for one data set.

        The weights (views,) float64 multiply the cosines of the views, and sum to 1. A view has weight 0 if its
        influence is below ``MIN_INFLUENCE``, or if it does not separate rows. If no view separates rows,
        all weights are 0.
        """
        separates = evidence.view_spreads > MIN_VIEW_SPREAD
        if not bool(separates.any()):
            return torch.zeros_like(evidence.view_spreads), 1.0
        inputs = (
            evidence.view_statistics,
            evidence.view_tags,
            evidence.dataset_statistics,
            evidence.initial_log_influence,
            separates,
        )
        log_influence, size = self(*(tensor[None] for tensor in inputs))
        influence = drop_small_influences(log_influence[0].double().exp())
        weights = torch.where(separates, influence / evidence.view_spreads.clamp_min(MIN_VIEW_SPREAD), 0.0)
        return weights / weights.sum(), float(size.exp())


def drop_small_influences(influence: Tensor) -> Tensor:
    """Set influences (views,) below ``MIN_INFLUENCE`` to 0, except the largest one."""
    return torch.where(influence >= min(scoring.MIN_INFLUENCE, float(influence.max())), influence, 0.0)


def serialize_prior(prior: WeightingPrior) -> str:
    """Encode the parameters of a prior as text: base64 of little-endian float16."""
    parameters = torch.cat([value.flatten() for value in prior.state_dict().values()])
    return base64.b64encode(parameters.to(torch.float16).numpy().astype("<f2").tobytes()).decode()


def deserialize_prior(text: str) -> WeightingPrior:
    """Build a prior from the text that `serialize_prior` returns; gradients are disabled."""
    prior = WeightingPrior()
    values = torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32))
    state = prior.state_dict()
    parts = values.split([value.numel() for value in state.values()])
    prior.load_state_dict({name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)})
    return prior.requires_grad_(False)


@functools.cache
def load_published_prior() -> WeightingPrior:
    """Load the pretrained prior of the library."""
    return deserialize_prior("".join(PRIOR_PARAMETERS))
