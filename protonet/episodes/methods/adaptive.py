"""The solver's closed forms for whole batches of episodes: views of the features, weighed by what they are worth.

Views are judged by leaving one support row out at a time, which for class means and for kernel ridge regression costs
no fit more. Where most classes have a single row nothing can be left out, and the mixture is a fixed one, as in
`protonet.fit.search`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import one_hot, squared_distances
from protonet.fit.search import MIXTURE
from protonet.scoring import WEIGHTS
from protonet.views.linear import LINEAR
from protonet.views.radial import UNJUDGED

WIDTHS, RIDGES = (1.0, 2.0, 4.0), (1e-2, 1e-1, 1.0)
LINEAR_RIDGES = (1e-1, 1.0, 10.0)  # in units of a row's mean square


class View(NamedTuple):
    """Class scores of the support rows, each without its own label, and of the queries; and its prior weight."""

    left_out: Tensor  # (episodes, n_support, n_way)
    query: Tensor  # (episodes, n_queries, n_way)
    prior: float
    unjudged: float = 0.0  # its weight where no row can judge


def adaptive(episodes: Episodes) -> Tensor:
    """Mix cosine prototypes and kernel ridge regressions, each by how well it foretells support rows left out.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).

    Returns:
        Logits (episodes, n_queries, n_way), their temperature fitted to the rows left out.

    Source: exponential weights, Dalalyan and Tsybakov (2008); leave-one-out residuals in closed form, as in Rifkin and
        Lippert, "Notes on regularized least squares" (2007), sec. 4.
    """
    support, labels, query, n_way, _ = episodes
    hot = one_hot(labels, n_way, support.dtype)
    scale = torch.linalg.vector_norm(support, dim=(1, 2), keepdim=True) / support[0].numel() ** 0.5
    scale = scale.where(scale > 0, 1.0)
    support, query = support / scale, query / scale
    shift = support.mean(dim=1, keepdim=True)
    gain = support.std(dim=1, keepdim=True)
    gain = 1 / (gain + 0.1 * gain.mean(dim=2, keepdim=True)).clamp_min(1e-6)
    centred = support - shift, query - shift
    scaled = centred[0] * gain, centred[1] * gain
    lifted = [F.pad(rows, (0, 1), value=LINEAR.bias) for rows in scaled]
    gaussian = [squared_distances(scaled[0], rows) for rows in scaled]
    laplacian = [torch.cdist(scaled[0], rows, p=1.0) for rows in scaled]
    views = [
        _prototype_view(support, query, hot, unjudged=MIXTURE.unjudged_raw),
        _prototype_view(centred[0], centred[1], hot),
        _prototype_view(lifted[0], lifted[1], hot),
        *_kernel_views(gaussian[0], gaussian[1], hot),
        *_kernel_views(laplacian[0], laplacian[1], hot),
        *_linear_views(centred[0], centred[1], hot),
        *_linear_views(scaled[0], scaled[1], hot),
    ]
    judged = (hot.sum(dim=1, keepdim=True) > 1).to(hot.dtype).mul(hot).sum(dim=2)  # (episodes, n_support)
    left_out = torch.stack([view.left_out for view in views], dim=1)  # (episodes, views, n_support, n_way)
    spread = _spread(left_out, torch.ones_like(judged)[:, None])
    factor, losses = _fit_temperature(left_out / spread, hot[:, None], judged[:, None])
    count = judged.sum(dim=1, keepdim=True)
    softness = (WEIGHTS.softness_in_all / count.clamp_min(1)).clamp_min(WEIGHTS.softness)
    prior = torch.tensor([view.prior for view in views], dtype=hot.dtype)
    influence = ((losses.amin(dim=1, keepdim=True) - losses) / softness).exp() * prior  # (episodes, views)
    unjudged = torch.tensor([view.unjudged for view in views], dtype=hot.dtype)
    enough = 2 * count >= n_way
    weights = torch.where(enough, influence, unjudged)
    weights = (weights / weights.sum(dim=1, keepdim=True))[:, :, None, None] / spread
    mixed = (weights * left_out).sum(dim=1, keepdim=True)
    factor, _ = _fit_temperature(mixed, hot[:, None], judged[:, None])
    factor = torch.where(enough, factor, MIXTURE.unjudged_spread)[:, :, None]
    scores = (weights * torch.stack([view.query for view in views], dim=1)).sum(dim=1)
    return factor * scores


def _prototype_view(support: Tensor, query: Tensor, hot: Tensor, *, unjudged: float = 0.0) -> View:
    """Return cosines to class means, those of the support rows to means without the row itself."""
    support, query = (F.normalize(rows, dim=2, eps=1e-6) for rows in (support, query))
    sums = hot.transpose(1, 2) @ support  # (episodes, way, dim)
    lengths = torch.linalg.vector_norm(sums, dim=2)[:, None].clamp_min(1e-6)  # (episodes, 1, way)
    products = support @ sums.transpose(1, 2)  # (episodes, n_support, way)
    without = (products - hot) / (lengths.square() - hot * (2 * products - 1)).clamp_min(1e-6).sqrt()
    return View(without, query @ sums.transpose(1, 2) / lengths, 1.0, unjudged)


def _kernel_views(between: Tensor, to_query: Tensor, hot: Tensor) -> list[View]:
    """Return kernel ridge regressions for each width and ridge, of distances of the support rows to both sets."""
    positive = between.masked_fill(between <= 1e-9, torch.nan).flatten(1)
    median = positive.nanmedian(dim=1).values.nan_to_num(1.0)[:, None, None]
    views = []
    for width in WIDTHS:
        kernel, right = ((each / (-width * median)).exp() for each in (between, to_query))
        for ridge in RIDGES:
            unjudged = float((width, ridge) == UNJUDGED)
            views.append(_ridge_view(kernel, right, ridge, hot, 1 / (len(WIDTHS) * len(RIDGES)), unjudged))
    return views


def _linear_views(support: Tensor, query: Tensor, hot: Tensor) -> list[View]:
    """Return ridge regressions with a constant feature."""
    gram = support @ support.transpose(1, 2)
    size = gram.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None].clamp_min(1e-9)
    kernel, right = gram / size + 1, support @ query.transpose(1, 2) / size + 1
    return [_ridge_view(kernel, right, ridge, hot, 1 / len(LINEAR_RIDGES)) for ridge in LINEAR_RIDGES]


def _ridge_view(kernel: Tensor, right: Tensor, ridge: float, hot: Tensor, prior: float, unjudged: float = 0.0) -> View:
    """Return kernel ridge regression of class indicators, and what it would be without each support row."""
    targets = hot - 1 / hot.shape[2]
    eye = torch.eye(kernel.shape[1], dtype=kernel.dtype)
    inverse = torch.linalg.inv(kernel + ridge * eye)
    readout = inverse @ targets  # (episodes, n_support, way)
    left_out = targets - readout / inverse.diagonal(dim1=1, dim2=2)[..., None]
    return View(left_out, right.transpose(1, 2) @ readout, prior, unjudged)


def _spread(scores: Tensor, rows: Tensor) -> Tensor:
    """Return how far apart a row's scores (..., n, n_way) are, (..., 1, 1), a mean over the rows that count."""
    variance = (scores.var(dim=-1, correction=0) * rows).sum(dim=-1) / rows.sum(dim=-1)
    return variance.sqrt().clamp_min(1e-6)[..., None, None]


def _fit_temperature(scores: Tensor, hot: Tensor, rows: Tensor, *, steps: int = 12) -> tuple[Tensor, Tensor]:
    """Fit the factor on scores (..., n, n_way) with the least log-loss, as `protonet.scoring.fit_temperature` does.

    Returns:
        The factor (...,) and the mean log-loss (...,) over the rows (..., n) that count.
    """
    count = rows.sum(dim=-1).clamp_min(1)
    spread = _spread(scores, rows.clamp_min(1e-6))[..., 0, 0]
    ridge = spread.square() / (WEIGHTS.logit_scale**2 * count)
    true = (scores * hot).sum(dim=-1)

    def mean(values: Tensor) -> Tensor:
        return (values * rows).sum(dim=-1) / count

    log_factor = -spread.log()
    for _ in range(steps):  # Newton in the logarithm, its steps cut, on a convex problem
        factor = log_factor.exp()
        p = (factor[..., None, None] * scores).softmax(dim=-1)
        average = (p * scores).sum(dim=-1)
        slope = mean(average - true) + ridge * factor
        curvature = mean((p * scores.square()).sum(dim=-1) - average.square()) + ridge
        log_factor = log_factor - (slope / (curvature * factor).clamp_min(1e-12)).clamp(-1, 1)
    factor = log_factor.exp()
    losses = -((factor[..., None, None] * scores).log_softmax(dim=-1) * hot).sum(dim=-1)
    return factor, mean(losses)
