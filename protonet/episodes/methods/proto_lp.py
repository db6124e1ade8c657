"""protoLP: labels propagate over a graph of rows and prototypes, and the prototypes move with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances
from protonet.episodes.methods.keywords import Count, Fraction, Positive, PositiveCount, PositiveFraction
from protonet.episodes.methods.pt_map import OFFSET, SINKHORN, balance
from protonet.episodes.samplers.batch import Episodes


def proto_lp(
    episodes: Episodes,
    *,
    beta: Positive = 0.5,
    n_dims: PositiveCount = 40,
    lambda_: Positive = 10.0,
    gamma: Positive = 1.0,
    mixing_weight: Fraction = 0.6,
    alpha: PositiveFraction = 0.2,
    n_epochs: Count = 100,
    balanced: bool = True,
    paper: bool = False,
) -> Tensor:
    """Classify by prototypes that move towards the means of propagated labels.

    Defaults are those of the authors' code for mini-ImageNet (test_standard_GSSL_lapshot.py).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        beta: The exponent of the power transform, > 0; negative features keep their sign.
        n_dims: Dimensions that are kept of the rows' singular vectors, >= 1.
        lambda_: The factor on the squared distances to prototypes, > 0.
        gamma: The weight of the graph's Laplacian, > 0.
        mixing_weight: Weight of the propagated labels in the update of prototypes, in [0, 1]; the rest is the weight of
            the assignments that the graph is made of.
        alpha: Share of the way to the new means that prototypes move per step, in (0, 1].
        n_epochs: Steps, >= 0.
        balanced: Each class has as many queries; false leaves assignments and labels as they are, for other queries.
        paper: Take the Laplacian of the paper, as the authors' test_standard_GSSL_lapshot_full.py does with
            gamma 0.05, mixing weight 0.7 and 50 steps.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: logarithms of the last assignments.

    Source: Zhu and Koniusz, "Transductive few-shot learning with prototype-based label propagation by iterative graph
        refinement" (2023), sec. 3. https://arxiv.org/abs/2304.11598. From the authors' code alone: the
        transform, the singular vectors, the Laplacian I - W of prototypes, and the weight of both kinds of labels.
    """
    rows = _transform(torch.cat([episodes.support, episodes.query], dim=1), beta, n_dims)
    n_support, n_queries, n_way = episodes.support.shape[1], episodes.query.shape[1], episodes.n_way
    hot = one_hot(episodes.support_labels, n_way, rows.dtype).transpose(1, 2)  # (episodes, n_way, n_support)
    count = hot.sum(dim=2, keepdim=True)
    prototypes = F.normalize(hot @ rows[:, :n_support] / count, dim=2)
    mass, quota = rows.new_ones(1), rows.new_full((), n_queries / n_way)
    scales = [torch.ones_like(count), torch.ones_like(count)]  # of the last assignments and labels: fewer iterations
    for epoch in range(n_epochs + 1):
        logits = -lambda_ * squared_distances(rows[:, n_support:], prototypes).transpose(1, 2)
        if balanced:
            kernel = (logits - logits.amax(dim=1, keepdim=True)).clamp_min(SINKHORN.min_exponent).exp()
            scales[0] = balance(kernel, mass, quota, scales[0])
            logits += scales[0].log()
        if epoch == n_epochs:
            break
        assigned = logits.softmax(dim=1)  # (episodes, n_way, n_queries)
        label = _propagate(torch.cat([hot, assigned], dim=2), count, gamma, paper=paper)[..., n_support:]
        label = label.clamp_min(torch.finfo(rows.dtype).tiny)
        if balanced:
            scales[1] = balance(label, mass, quota, scales[1])
            label = label * scales[1]
        label = label / label.sum(dim=1, keepdim=True)
        joined = torch.cat([hot, mixing_weight * label + (1 - mixing_weight) * assigned], dim=2)
        prototypes = prototypes.lerp(joined @ rows / joined.sum(dim=2, keepdim=True), alpha)
    return logits.log_softmax(dim=1).transpose(1, 2).to(episodes.query.dtype)


def _transform(rows: Tensor, beta: float, n_dims: int) -> Tensor:
    """Return rows (episodes, n, dim) after power transform and unit norm, in few dimensions, centred and of unit norm.

    Coordinates are those of the first singular vectors: eigenvectors of the rows' inner products, in float64.
    """
    rows = rows.double()
    rows = F.normalize(rows.abs().add_(OFFSET).pow_(beta).copysign_(rows), dim=2)
    values, vectors = torch.linalg.eigh(rows @ rows.transpose(1, 2))
    n_singular = min(n_dims, *rows.shape[1:])
    rows = vectors[..., -n_singular:] * values[:, None, -n_singular:].clamp_min(0).sqrt()
    return F.normalize(rows - rows.mean(dim=1, keepdim=True), dim=2)


def _propagate(assigned: Tensor, count: Tensor, gamma: float, *, paper: bool) -> Tensor:
    """Propagate labels (episodes, n_way, rows) to rows, from their assignments to prototypes of the same shape.

    The first rows, ``count`` (episodes, n_way, 1) of each class, are the support's, which belong to their own.
    """
    total = assigned @ assigned.transpose(1, 2)  # (episodes, n_way, n_way), Z^T Z
    walk = total / assigned.sum(dim=2)[:, None]
    identity = torch.eye(total.shape[1], dtype=total.dtype, device=total.device)
    laplacian = total - walk @ total if paper else identity - walk
    degree = torch.diag_embed(count[..., 0])
    labels: Tensor = torch.linalg.solve(degree + gamma * laplacian, degree)  # of the prototypes, those of the classes
    return labels.transpose(1, 2) @ assigned
