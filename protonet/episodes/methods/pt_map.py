"""PT-MAP: a power transform makes features more Gaussian, and optimal transport assigns classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import one_hot


@dataclass(frozen=True)
class Sinkhorn:
    """The limits of Sinkhorn's iterations."""

    tolerance: float = 1e-4  #: The iterations end once no class's scale changes by this share. Our own choice.
    most_iterations: int = 1000  #: The authors' code (test_standard.py).
    least_exponent: float = -60  #: Of the kernel's entries: exp(-60) does not underflow in float32. Our own choice.


SINKHORN = Sinkhorn()
OFFSET = 1e-6  #: Added to the absolute features before the power, as in eq. 1 of the paper.


def pt_map(
    episodes: Episodes, *, beta: float = 0.5, lambda_: float = 10.0, alpha: float = 0.2, n_epochs: int = 20
) -> Tensor:
    """Classify by prototypes that move, step by step, towards the means of balanced assignments of the queries.

    After the transform everything depends only on inner products. So the rows are represented by their Gram matrix (the
    paper's QR decomposition keeps inner products as well), and prototypes by the shares of the rows in them. All
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
    rows = torch.cat([transform(episodes.support, beta), transform(episodes.query, beta)], dim=1)
    gram = rows @ rows.transpose(1, 2)
    n_support, n_queries = episodes.support.shape[1], episodes.query.shape[1]
    hot = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)  # (episodes, n_way, n_support)
    shares = F.normalize(F.pad(hot, (0, n_queries)), p=1, dim=2)  # (episodes, n_way, rows): prototypes, as shares
    mass, quota = rows.new_ones(1), rows.new_tensor(n_queries / episodes.n_way)
    scale = torch.ones_like(shares[..., :1])
    for epoch in range(n_epochs + 1):
        products = shares @ gram  # (episodes, n_way, rows)
        squares = (shares * products).sum(dim=2, keepdim=True)
        logits = lambda_ * (2 * products[..., n_support:] - squares)  # -lambda_ * d^2, plus a constant for all classes
        kernel = (logits - logits.amax(dim=1, keepdim=True)).clamp_min(SINKHORN.least_exponent).exp()
        scale = balance(kernel, mass, quota, scale)  # continues from the last epoch: far fewer iterations
        logits += scale.log()
        if epoch < n_epochs:
            estimate = F.normalize(torch.cat([hot, logits.softmax(dim=1)], dim=2), p=1, dim=2)
            shares = torch.lerp(shares, estimate, alpha)
    return logits.log_softmax(dim=1).transpose(1, 2)


def transform(rows: Tensor, beta: float) -> Tensor:
    """Apply the power transform to rows (episodes, n, dim), then scale to unit norm, centre, and scale again.

    The exponent ``beta`` is > 0; negative features keep their sign.

    Source: Hu, Gripon and Pateux (2020), eq. 1.
    """
    rows = rows.abs().add_(OFFSET).pow_(beta).copysign_(rows)
    rows /= rows.norm(dim=2, keepdim=True)
    rows -= rows.mean(dim=1, keepdim=True)
    return F.normalize(rows, dim=2)


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
    for _ in range(SINKHORN.most_iterations):
        row_scale = mass / (kernel * scale).sum(dim=1, keepdim=True)
        following = quota / (kernel * row_scale).sum(dim=2, keepdim=True)
        moving = ((following - scale).abs() > SINKHORN.tolerance * following).any(dim=1, keepdim=True)
        scale = torch.where(moving, following, scale)
        if not bool(moving.any()):
            break
    return scale
