"""PT-MAP: a power transform makes features more Gaussian, and optimal transport assigns classes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, support_means
from protonet.episodes.methods.keywords import Count, Positive, PositiveFraction
from protonet.episodes.samplers.batch import Episodes


@dataclass(frozen=True)
class Sinkhorn:
    """The limits of Sinkhorn's iterations."""

    tolerance: float = 1e-4  #: The iterations end once no class's scale changes by this share. Our own choice.
    max_iterations: int = 1000  #: The authors' code (test_standard.py).
    #: They end as well once that share itself changes by no more than this, as 1e-6 of row sums in the authors' code:
    #: where classes are far apart, the scales drift on for hundreds of iterations and the plan stays as it is.
    drift: float = 1e-6
    min_exponent: float = -60  #: Smallest of the kernel: exp(-60) does not underflow in float32. Our own choice.


SINKHORN = Sinkhorn()
MIN_ROW_NORM = 1e-12  #: Rows are divided by this norm at least.
QUERY_FLOATS_IN_CACHE = 2**20  #: Floats of queries that are transformed and multiplied at a time.
OFFSET = 1e-6  #: Added to the absolute features before the power, as in eq. 1 of the paper.


def pt_map(
    episodes: Episodes,
    *,
    beta: Positive = 0.5,
    lambda_: Positive = 10.0,
    alpha: PositiveFraction = 0.2,
    n_epochs: Count = 20,
) -> Tensor:
    """Classify by prototypes that move, step by step, towards the means of balanced assignments of the queries.

    After the transform everything depends only on inner products. So support means and queries are represented by
    theirs (the paper's QR decomposition keeps inner products as well), and prototypes by their shares in them. All
    defaults are those of the authors' code (test_standard.py).

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        beta: The exponent of the power transform, > 0.
        lambda_: The inverse of the transport's entropy regularisation, > 0.
        alpha: The share of the way to the new means that prototypes move per step, in (0, 1].
        n_epochs: Steps, >= 0.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: logarithms of the rows of the transport plan,
        in which each class has n_queries / n_way queries.

    Source: Hu, Gripon and Pateux, "Leveraging the feature distribution in transfer-based few-shot learning" (2020),
        eqs. 1, 3 and 6, alg. 1. https://arxiv.org/abs/2006.03806. The paper says nothing of centring each set, and has
        no negative features: these follow the authors' code and Lazarou et al. (2021).
    """
    among, towards, squares = _multiply_rows(episodes, beta)
    count = one_hot(episodes.support_labels, episodes.n_way, among.dtype).sum(dim=1)[..., None]  # (episodes, n_way, 1)
    n_queries = among.shape[1]
    mass, quota = among.new_ones(1), among.new_full((), n_queries / episodes.n_way)
    # A prototype is ``rates`` times its support mean plus a share of each query.
    rates, probabilities = torch.ones_like(count), torch.zeros_like(towards)
    scale = torch.ones_like(count)
    for epoch in range(n_epochs + 1):
        products = torch.addcmul(probabilities @ among, rates, towards)  # (episodes, n_way, n_queries)
        cross = (probabilities * (products + rates * towards)).sum(dim=2, keepdim=True)
        logits = lambda_ * (2 * products - (rates.square() * squares + cross))  # -lambda_ * d^2, but for a constant
        kernel = (logits - logits.amax(dim=1, keepdim=True)).clamp_min_(SINKHORN.min_exponent).exp_()
        scale = balance(kernel, mass, quota, scale)  # continues from the last epoch: far fewer iterations
        if epoch < n_epochs:
            plan = kernel.mul_(scale)
            plan /= plan.sum(dim=1, keepdim=True)
            step = alpha / (count + plan.sum(dim=2, keepdim=True))
            rates = torch.addcmul((1 - alpha) * rates, step, count)
            probabilities.mul_(1 - alpha).addcmul_(step, plan)
    return (logits + scale.log()).log_softmax(dim=1).transpose(1, 2)


def _multiply_rows(episodes: Episodes, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return all inner products of transformed rows that matter.

    Returns:
        among: (episodes, n_queries, n_queries), of queries with each other.
        towards: (episodes, n_way, n_queries), of the support means with the queries.
        squares: (episodes, n_way, 1), of the support means with themselves.
    """
    n_queries, dim = episodes.query.shape[1:]
    size = max(1, QUERY_FLOATS_IN_CACHE // (n_queries * dim))
    parts = []
    for start in range(0, len(episodes.query), size):
        some = slice(start, start + size)
        support, query = transform(episodes.support[some], beta), transform(episodes.query[some], beta)
        means = support_means(replace(episodes, support=support, support_labels=episodes.support_labels[some]))
        turned = query.transpose(1, 2)
        parts.append((query @ turned, means @ turned, means.square().sum(dim=2, keepdim=True)))
    among, towards, squares = (torch.cat(column) for column in zip(*parts, strict=True))
    return among, towards, squares


def transform(rows: Tensor, beta: float) -> Tensor:
    """Apply the power transform to rows (episodes, n, dim), then scale to unit norm, centre, and scale again.

    The exponent ``beta`` is > 0; negative features keep their sign.

    Source: Hu, Gripon and Pateux (2020), eq. 1.
    """
    rows = rows.abs().add_(OFFSET).pow_(beta).copysign_(rows)
    rows /= rows.norm(dim=2, keepdim=True)
    rows -= rows.mean(dim=1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    return rows.div_(norms.clamp_min_(MIN_ROW_NORM))


def balance(kernel: Tensor, mass: Tensor, quota: Tensor, scale: Tensor) -> Tensor:
    """Find scales of the classes in a transport plan such that each class gets its quota of the rows' mass.

    An episode whose scales have converged stays as it is while others continue.

    Args:
        kernel: (episodes, n_way, rows), >= 0.
        mass: (episodes, 1, rows), >= 0, or a shape that broadcasts to it: the mass of each row.
        quota: (episodes, n_way, 1), >= 0, or a shape that broadcasts to it: the mass of each class, of the same sum.
        scale: (episodes, n_way, 1), > 0, the initial scales.

    Returns:
        (episodes, n_way, 1): the plan is ``kernel * scale`` with each row scaled to its mass.

    Source: Cuturi, "Sinkhorn distances" (2013), alg. 1. https://arxiv.org/abs/1306.0895
    """
    last = torch.zeros_like(scale)
    for _ in range(SINKHORN.max_iterations):
        row_scale = mass / (kernel * scale).sum(dim=1, keepdim=True)
        following = quota / (kernel * row_scale).sum(dim=2, keepdim=True)
        change = (following - scale) / following
        far = (change.abs() > SINKHORN.tolerance) & ((change - last).abs() > SINKHORN.drift)
        moving, last = far.any(dim=1, keepdim=True), change
        scale = torch.where(moving, following, scale)
        if not bool(moving.any()):
            break
    return scale
