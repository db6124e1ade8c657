"""PT-MAP: features made Gaussian-like by a power transform, classes by optimal transport."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import one_hot

#: Added to features before the power, as in eq. 1 of the paper.
OFFSET = 1e-6
#: Sinkhorn's iterations end when each class has its quota but for this share of it; by then the plan is as exact.
TOLERANCE = 1e-4
MOST_ITERATIONS = 1000


def pt_map(
    episodes: Episodes, *, beta: float = 0.5, lam: float = 10.0, alpha: float = 0.2, n_epochs: int = 20
) -> Tensor:
    """Move prototypes towards the means that a balanced assignment of the queries gives them.

    All that follows the transform hangs on inner products alone. So the rows' Gram matrix stands for the rows (the
    paper's QR decomposition is another such isometry), and shares of the rows stand for prototypes.

    Args:
        episodes: Supports and queries, (episodes, rows, dim).
        beta: The power.
        lam: > 0, the inverse of the transport's entropy regularization.
        alpha: In (0, 1], the prototypes' step.
        n_epochs: Steps, >= 0.

    Returns:
        Logits (episodes, n_queries, n_way): logarithms of the transport plan's rows, all classes having equally many
        queries, n_queries / n_way.

    Source: Hu, Gripon and Pateux, "Leveraging the feature distribution in transfer-based few-shot learning" (2020),
        eqs. 1, 3 and 6, alg. 1. https://arxiv.org/abs/2006.03806. The centring of each set, and the sign for negative
        features, which the paper has none of, follow the authors' code and Lazarou et al. (2021).
    """
    rows = torch.cat([transform(episodes.support, beta), transform(episodes.query, beta)], dim=1)
    gram = rows @ rows.transpose(1, 2)
    n_support, n_queries = episodes.support.shape[1], episodes.query.shape[1]
    hot = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)  # (episodes, way, n_support)
    shares = F.normalize(F.pad(hot, (0, n_queries)), p=1, dim=2)  # (episodes, way, rows): prototypes are shares @ rows
    mass, quota = rows.new_ones(1), rows.new_tensor(n_queries / episodes.n_way)
    scale = torch.ones_like(shares[..., :1])
    for epoch in range(n_epochs + 1):
        products = shares @ gram  # (episodes, way, rows)
        squares = (shares * products).sum(dim=2, keepdim=True)
        logits = lam * (2 * products[..., n_support:] - squares)  # -lam d^2, plus what is the same for all classes
        kernel = (logits - logits.amax(dim=1, keepdim=True)).clamp_min(-60).exp()  # no underflow in float32
        scale = balance(kernel, mass, quota, scale)  # begins where the last epoch's ended: far fewer iterations
        logits += scale.log()
        if epoch < n_epochs:
            estimate = F.normalize(torch.cat([hot, logits.softmax(dim=1)], dim=2), p=1, dim=2)
            shares = torch.lerp(shares, estimate, alpha)
    return logits.log_softmax(dim=1).transpose(1, 2)


def transform(rows: Tensor, beta: float) -> Tensor:
    """Return rows (episodes, n, dim) by the power transform, of unit norm, centred, and of unit norm again."""
    rows = rows.abs().add_(OFFSET).pow_(beta).copysign_(rows)
    rows /= rows.norm(dim=2, keepdim=True)
    rows -= rows.mean(dim=1, keepdim=True)
    return F.normalize(rows, dim=2)


def balance(kernel: Tensor, mass: Tensor, quota: Tensor, scale: Tensor) -> Tensor:
    """Scale the classes of a transport plan such that each has its quota of the rows' mass.

    An episode whose scales have converged stays as it is, whatever others do.

    Args:
        kernel: (episodes, n_way, rows), >= 0.
        mass: (episodes, 1, rows), >= 0, of the rows, or one that broadcasts.
        quota: (episodes, n_way, 1), >= 0, of the same sum, or one that broadcasts.
        scale: (episodes, n_way, 1), > 0, to begin with.

    Returns:
        (episodes, n_way, 1): the plan is ``kernel * scale``, each row scaled to its mass.

    Source: Cuturi, "Sinkhorn distances" (2013), alg. 1. https://arxiv.org/abs/1306.0895
    """
    for _ in range(MOST_ITERATIONS):
        row_scale = mass / (kernel * scale).sum(dim=1, keepdim=True)
        following = quota / (kernel * row_scale).sum(dim=2, keepdim=True)
        moving = ((following - scale).abs() > TOLERANCE * following).any(dim=1, keepdim=True)
        scale = torch.where(moving, following, scale)
        if not bool(moving.any()):
            break
    return scale
