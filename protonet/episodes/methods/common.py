"""What methods share: one-hot labels, prototypes, distances and cosines of whole batches of episodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes

#: Squared distances below so many rounding errors of the squared lengths are computed from differences, row by row.
LOST = 4096.0


def one_hot(labels: Tensor, n_way: int, dtype: torch.dtype) -> Tensor:
    """Return labels (episodes, rows) as (episodes, rows, n_way) of zeros and ones."""
    return (labels[..., None] == torch.arange(n_way)).to(dtype)


def support_means(episodes: Episodes) -> Tensor:
    """Return the class prototypes (episodes, n_way, dim): the means of the support rows.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 1.
    """
    hot = one_hot(episodes.support_labels, episodes.n_way, episodes.support.dtype)
    return (hot / hot.sum(dim=1, keepdim=True)).transpose(1, 2) @ episodes.support


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return squared Euclidean distances (episodes, n, m) of rows (episodes, n, dim) and, few, (episodes, m, dim)."""
    lengths = squared_norms(a)
    squares = squared_norms(b)[:, :, None] + lengths[:, None, :]
    distances = torch.baddbmm(squares, b, a.transpose(1, 2), alpha=-2).clamp_min_(0)  # (episodes, m, n)
    lost = distances.amin(dim=1) < LOST * torch.finfo(a.dtype).eps * lengths
    if bool(lost.any()):  # rows far from zero but close together
        exact = torch.cdist(b, a, compute_mode="donot_use_mm_for_euclid_dist").square()
        distances = exact.where(lost[:, None], distances)
    return distances.transpose(1, 2)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return cosines (episodes, n, m) of rows (episodes, n, dim) and, few, (episodes, m, dim); 0 of rows of zeros."""
    least = torch.finfo(a.dtype).tiny ** 0.5
    norms: Tensor = torch.linalg.vector_norm(a, dim=2).clamp_min(least)  # divided out last: rows are many, products few
    products = F.normalize(b, dim=2, eps=least) @ a.transpose(
        1, 2
    )  # (episodes, m, n): half as fast the other way round
    return products.div_(norms[:, None, :]).transpose(1, 2)


def squared_norms(rows: Tensor) -> Tensor:
    """Return the squared lengths (episodes, n) of rows (episodes, n, dim)."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=2)
    return lengths.square()


def reduce_to_span(rows: Tensor) -> Tensor:
    """Return rows with the same inner products and as few coordinates as there are rows.

    What hangs on inner products alone (distances, angles, gradients of linear layers) is the same in these coordinates
    and costs far less than in hundreds of features.

    Args:
        rows: (episodes, n, dim).

    Returns:
        (episodes, n, min(n, dim)): the Cholesky factor of the Gram matrix, or the rows themselves where dim <= n.
    """
    n, dim = rows.shape[1:]
    if dim <= n:
        return rows
    gram = rows @ rows.transpose(1, 2)  # (episodes, n, n)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    jitter = (
        8 * torch.finfo(rows.dtype).eps * diagonal.mean(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    )
    while True:
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.expand(-1, n)))
        if not bool(failed.any()):
            return factor
        jitter = torch.where(failed[:, None] > 0, 10 * jitter, jitter)  # rows that depend on each other
