"""Methods of our own: `protonet.solve` on each episode, and a fast mixture of closed-form classifiers.

`solver` fits a network to each episode. `adaptive` is similar, for batches of episodes. Each of its classifiers is
on one feature map (view) of the rows. The weights of the mixture depend on leave-one-out losses of the support rows,
which need no further fits for class means and kernel ridge regression. If most classes have a single support row, the
weights of the mixture are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances
from protonet.episodes.samplers.batch import Episodes
from protonet.fit.solver import fit_solution
from protonet.selection.scoring import LOGIT_PRIOR_STD, LOSS_SCALE, MIN_TOTAL_LOSS_SCALE
from protonet.views.kernel_ridge import DEFAULT_BANDWIDTH, DEFAULT_KERNEL_RIDGE_PENALTY
from protonet.views.linear import BIAS

MAX_FLOATS_IN_CACHE = 2**18  #: Number of floats that are changed in place at a time, to fit into a core's cache.


def solver(episodes: Episodes, *, seed: int = 0) -> Tensor:
    """Classify by the network that `protonet.solve` fits to the support rows.

    Each episode is fitted separately, thousands of times slower than other methods. `adaptive` is a faster mixture of
    closed-form classifiers for whole batches. Logits are cosines to the prototypes over the temperature that was fitted
    to held-out rows.

    Args:
        seed: The seed of cross-validation folds and initial weights, the same in every episode.

    Source: this package, docs/explanation/how-it-works.md.
    """
    metadata = {"num_classes": episodes.n_way, "device": episodes.support.device}
    logits = []
    for support, labels, query in zip(episodes.support, episodes.support_labels, episodes.query, strict=True):
        network = fit_solution((support.clone(), labels), None, metadata, seed=seed).network
        logits.append(network(query).to(query.dtype))
    return torch.stack(logits)


class AdaptiveView(NamedTuple):
    """The class scores of one classifier of the mixture (a view), and the weights that it gets in the mixture."""

    leave_one_out_scores: Tensor  #: (episodes, n_support, n_way), scores of each support row by a fit without this row.
    query_scores: Tensor  #: (episodes, n_queries, n_way), scores of the queries.
    prior_weight: float  #: The weight, > 0, before the leave-one-out losses are considered.
    fixed_weight: float = 0.0  #: The weight, >= 0, in a mixture with fixed weights.


MIN_POSITIVE_VALUE = 1e-6  #: Norms, standard deviations and weights are at least this.


def adaptive(episodes: Episodes) -> Tensor:
    """Classify by a mixture of cosine prototypes and ridge regressions, weighted by leave-one-out support losses.

    Source: exponential weights, Dalalyan and Tsybakov, "Aggregation by exponential weighting" (2008); leave-one-out
        residuals in closed form, Rifkin and Lippert, "Notes on regularized least squares" (2007), sec. 4.
    """
    # All hyperparameters and bounds of this method are our own choice.
    # This fraction of the features' mean standard deviation is added to the standard deviation of each feature.
    shrinkage = 0.1
    # The mixture has fitted weights if this many support rows per class, on average, can be left out: a class needs
    # another row. Otherwise it has fixed weights.
    min_loo_rows_per_class = 0.5
    # The fixed weight of cosines between features that are not centred. The default kernels have the fixed weight 1.
    fixed_prototype_weight = 3.0
    fixed_logit_std = 1.5  # standard deviation of the logits of a mixture with fixed weights
    support, labels, query, n_way = episodes.support, episodes.support_labels, episodes.query, episodes.n_way
    hot = one_hot(labels, n_way, support.dtype)
    scale = torch.linalg.vector_norm(support, dim=(1, 2), keepdim=True) / support[0].numel() ** 0.5
    scale = scale.where(scale > 0, 1.0)
    support, query = support / scale, query / scale
    shift = support.mean(dim=1, keepdim=True)
    deviation = support.std(dim=1, keepdim=True)
    deviation = deviation + shrinkage * deviation.mean(dim=2, keepdim=True)
    inverse = 1 / deviation.clamp_min(MIN_POSITIVE_VALUE)
    centred = support - shift, query - shift
    scaled = centred[0] * inverse, centred[1] * inverse
    with_bias = [F.pad(rows, (0, 1), value=BIAS) for rows in scaled]
    gaussian = [squared_distances(scaled[0], rows) for rows in scaled]
    laplacian = [city_block_distances(scaled[0], rows) for rows in scaled]
    views = [_fit_prototype_view((support, query), hot, fixed_weight=fixed_prototype_weight)]
    views += [_fit_prototype_view(centred, hot), _fit_prototype_view(with_bias, hot)]
    views += _fit_kernel_views(gaussian, hot) + _fit_kernel_views(laplacian, hot)
    views += _fit_linear_views(centred, hot) + _fit_linear_views(scaled, hot)
    # 1 for the support rows (episodes, n_support) whose class has another one: these can be left out.
    can_leave_out = (hot.sum(dim=1, keepdim=True) > 1).to(hot.dtype).mul(hot).sum(dim=2)
    # Classes come before rows: sums over a short last axis take many times as long.
    left_out = torch.stack([view.leave_one_out_scores.transpose(1, 2) for view in views], dim=1)
    true = hot.transpose(1, 2)[:, None]  # (episodes, 1, n_way, n_support); left_out has views in place of the 1
    # A class without its only row has no score.
    spread = _compute_score_std(left_out, 1 - true * (1 - can_leave_out)[:, None, None])
    factor, losses = _fit_temperature(left_out / spread, true, can_leave_out[:, None])
    count = can_leave_out.sum(dim=1, keepdim=True)
    softness = (MIN_TOTAL_LOSS_SCALE / count.clamp_min(1)).clamp_min(LOSS_SCALE)
    prior = hot.new_tensor([view.prior_weight for view in views])
    fitted = ((losses.amin(dim=1, keepdim=True) - losses) / softness).exp() * prior  # (episodes, views)
    fixed = hot.new_tensor([view.fixed_weight for view in views])
    enough = count >= min_loo_rows_per_class * n_way
    weights = torch.where(enough, fitted, fixed)
    weights = (weights / weights.sum(dim=1, keepdim=True))[:, :, None, None] / spread
    mixed = (weights * left_out).sum(dim=1, keepdim=True)
    factor, _ = _fit_temperature(mixed, true, can_leave_out[:, None])
    factor = torch.where(enough, factor, fixed_logit_std)[:, :, None]
    scores = (weights * torch.stack([view.query_scores for view in views], dim=1)).sum(dim=1)
    return factor * scores


def _fit_prototype_view(rows: Sequence[Tensor], hot: Tensor, *, fixed_weight: float = 0.0) -> AdaptiveView:
    """Compute cosines of queries to class means, and leave-one-out cosines of support rows to class means."""
    support, query = (F.normalize(part, dim=2, eps=MIN_POSITIVE_VALUE) for part in rows)
    sums = hot.transpose(1, 2) @ support  # (episodes, n_way, dim)
    norms = torch.linalg.vector_norm(sums, dim=2)[:, None].clamp_min(MIN_POSITIVE_VALUE)  # (episodes, 1, n_way)
    products = support @ sums.transpose(1, 2)  # (episodes, n_support, n_way)
    without = (products - hot) / (norms.square() - hot * (2 * products - 1)).clamp_min(MIN_POSITIVE_VALUE).sqrt()
    return AdaptiveView(without, query @ sums.transpose(1, 2) / norms, 1.0, fixed_weight)


MIN_SQUARED_VALUE = 1e-9  #: Distances up to this are between equal rows; mean squares are at least this.


def _fit_kernel_views(distances: Sequence[Tensor], hot: Tensor) -> list[AdaptiveView]:
    """Fit a kernel ridge regression for each bandwidth and ridge, by distances from the support to all rows."""
    bandwidths = (1.0, 2.0, 4.0)  # kernel bandwidths, in median distances between support rows
    ridges = (1e-2, 1e-1, 1.0)  # ridges of the Gaussian and Laplacian kernel regressions
    between = distances[0]
    positive = between.masked_fill(between <= MIN_SQUARED_VALUE, torch.nan).flatten(1)
    median = positive.nanmedian(dim=1).values.nan_to_num(1.0)[:, None, None]
    views, prior = [], 1 / (len(bandwidths) * len(ridges))
    for bandwidth in bandwidths:
        kernel, query_kernel = ((part / (-bandwidth * median)).exp() for part in distances)
        for ridge in ridges:
            is_default = (bandwidth, ridge) == (DEFAULT_BANDWIDTH, DEFAULT_KERNEL_RIDGE_PENALTY)
            views.append(_fit_ridge_view(kernel, query_kernel, ridge, hot, prior, float(is_default)))
    return views


def _fit_linear_views(rows: Sequence[Tensor], hot: Tensor) -> list[AdaptiveView]:
    """Fit one linear ridge regression with a bias for each ridge; ``rows`` has the support rows, then the queries."""
    ridges = (1e-1, 1.0, 10.0)  # in mean squared norms of the support rows
    support, query = rows
    gram = support @ support.transpose(1, 2)
    size = gram.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None].clamp_min(MIN_SQUARED_VALUE)
    kernel, query_kernel = gram / size + 1, support @ query.transpose(1, 2) / size + 1
    return [_fit_ridge_view(kernel, query_kernel, ridge, hot, 1 / len(ridges)) for ridge in ridges]


def _fit_ridge_view(
    kernel: Tensor, query_kernel: Tensor, ridge: float, hot: Tensor, prior: float, fixed_weight: float = 0.0
) -> AdaptiveView:
    """Fit kernel ridge regression to one-hot labels; compute scores of queries and left-out support rows."""
    targets = hot - 1 / hot.shape[2]
    eye = torch.eye(kernel.shape[1], dtype=kernel.dtype, device=kernel.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel + ridge * eye))
    coefficients = inverse @ targets  # (episodes, n_support, n_way)
    left_out = targets - coefficients / inverse.diagonal(dim1=1, dim2=2)[..., None]
    return AdaptiveView(left_out, query_kernel.transpose(1, 2) @ coefficients, prior, fixed_weight)


def _compute_score_std(scores: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted standard deviation (..., 1, 1) of scores (..., n_way, n) around the mean score of a row."""
    count = weights.sum(dim=-2, keepdim=True)  # (..., 1, n)
    centred = scores - (weights * scores).sum(dim=-2, keepdim=True) / count
    variance = (weights * centred.square()).sum(dim=(-2, -1)) / weights.sum(dim=(-2, -1))
    return variance.sqrt().clamp_min(MIN_POSITIVE_VALUE)[..., None, None]


def _fit_temperature(scores: Tensor, hot: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Fit inverse temperatures (...) to scores (..., n_way, n), weighted by ``rows``; return them and mean losses."""
    newton_steps = 12  # number of Newton steps in the fit of the temperature
    max_log_step = 1.0  # largest change of the temperature's logarithm in one Newton step
    min_curvature = 1e-12  # second derivatives in Newton steps are at least this
    # As `protonet.selection.scoring.fit_temperature` does.
    count = rows.sum(dim=-1).clamp_min(1)
    row_weights = rows.clamp_min(MIN_POSITIVE_VALUE)[..., None, :].expand_as(scores)
    spread = _compute_score_std(scores, row_weights)[..., 0, 0]
    ridge = spread.square() / (LOGIT_PRIOR_STD**2 * count)
    true = (scores * hot).sum(dim=-2)

    def mean(values: Tensor) -> Tensor:
        return (values * rows).sum(dim=-1) / count

    log_factor = -spread.log()
    for _ in range(newton_steps):  # in the logarithm, with limited steps, on a convex problem
        factor = log_factor.exp()
        p = (factor[..., None, None] * scores).softmax(dim=-2)
        weighted = p * scores
        average = weighted.sum(dim=-2)
        slope = mean(average - true) + ridge * factor
        curvature = mean(weighted.mul_(scores).sum(dim=-2) - average.square()) + ridge
        change = slope / (curvature * factor).clamp_min(min_curvature)
        log_factor = log_factor - change.clamp(-max_log_step, max_log_step)
    factor = log_factor.exp()
    losses = -((factor[..., None, None] * scores).log_softmax(dim=-2) * hot).sum(dim=-2)
    return factor, mean(losses)


def city_block_distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute city-block distances (episodes, n, m) between rows (episodes, n, dim) and (episodes, m, dim).

    It takes less than half the time of `torch.cdist` if the smaller set of rows is ``a``.
    """
    distances = b.new_empty(len(b), a.shape[1], b.shape[1])
    size = max(1, MAX_FLOATS_IN_CACHE // max(1, b[0].numel()))
    for start in range(0, len(b), size):
        some = slice(start, start + size)
        for row in range(a.shape[1]):
            distances[some, row] = (b[some] - a[some, row, None]).abs_().sum(dim=2)
    return distances
