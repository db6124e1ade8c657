"""Functions shared by methods: prototypes, distances, cosines, coordinates of few dimensions, and Adam."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.samplers.batch import Episodes


def one_hot(labels: Tensor, n_way: int, dtype: torch.dtype) -> Tensor:
    """Encode labels (episodes, rows) int64 in [0, n_way) as one-hot vectors (episodes, rows, n_way) of ``dtype``."""
    return (labels[..., None] == torch.arange(n_way, device=labels.device)).to(dtype)


def draw_row_orders(n_epochs: int, n: int, generator: torch.Generator) -> Tensor:
    """Draw a random order of n rows for each epoch: (n_epochs, n) int64, on the CPU."""
    orders = torch.empty(n_epochs, n, dtype=torch.int64)
    for order in orders:
        torch.randperm(n, generator=generator, out=order)
    return orders


def support_means(episodes: Episodes) -> Tensor:
    """Compute the class prototypes (episodes, n_way, dim), the means of the support rows of each class.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eq. 1.
        https://arxiv.org/abs/1703.05175
    """
    hot = one_hot(episodes.support_labels, episodes.n_way, episodes.support.dtype)
    return hot.div_(hot.sum(dim=1, keepdim=True)).transpose(1, 2) @ episodes.support


def compute_episode_centre(episodes: Episodes) -> Tensor:
    """Compute the mean that a method subtracts from all rows of an episode to centre them: (episodes, 1, dim).

    It is the mean of the base rows or, without base classes, of the episode's support rows. Without centring,
    cosines between rows are nearly equal if features have a common mean.

    Source: Wang et al., "SimpleShot" (2019), "Centering" below eq. 2, for the base classes' mean; the support's is our
        own choice. https://arxiv.org/abs/1911.04623
    """
    support, base = episodes.support, episodes.base
    if base is None:
        return support.mean(dim=1, keepdim=True)
    return base.mean.to(support.dtype).expand(len(support), 1, -1)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute squared Euclidean distances (episodes, n, m) between rows (episodes, n, dim) and (episodes, m, dim).

    It is faster if the smaller set comes second.
    """
    # Squared distances below this fraction of a row's squared norm are computed from differences of rows instead of
    # inner products.
    min_distance = 4096.0
    norms = squared_norms(a)
    squares = squared_norms(b)[:, :, None] + norms[:, None, :]  # (episodes, m, n)
    distances = squares.baddbmm_(b, a.transpose(1, 2), alpha=-2)  # (episodes, m, n)
    lost = distances.amin(dim=1) < min_distance * torch.finfo(a.dtype).eps * norms  # (episodes, n)
    if bool(lost.any()):  # rows far from zero but close together; only these can have distances below zero
        exact = torch.cdist(b, a, compute_mode="donot_use_mm_for_euclid_dist").square()
        distances = exact.where(lost[:, None], distances)
    return distances.transpose(1, 2)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Compute cosines (episodes, n, m) between rows (episodes, n, dim) and (episodes, m, dim); 0 for rows of zeros.

    It is faster if the smaller set comes second.
    """
    min_norm = torch.finfo(a.dtype).tiny ** 0.5
    # Norms are divided out last: products are fewer than ``a``.
    norms: Tensor = torch.linalg.vector_norm(a, dim=2).clamp_min(min_norm)
    unit = F.normalize(b, dim=2, eps=min_norm)
    products = unit @ a.transpose(1, 2)  # (episodes, m, n), twice as fast as (episodes, n, m)
    return products.div_(norms[:, None, :]).transpose(1, 2)


def squared_norms(rows: Tensor) -> Tensor:
    """Compute the squared norms (episodes, n) of rows (episodes, n, dim)."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2)
    return norms.square()


def reduce_to_span(rows: Tensor) -> Tensor:
    """Express rows (episodes, n, dim) in min(n, dim) coordinates with the same inner products, for speed.

    The coordinates are the Cholesky factor of the Gram matrix, or the rows themselves if dim <= n.
    """
    # The jitter that is added to a Gram matrix's diagonal before its Cholesky factorisation, as a fraction of the
    # diagonal's mean.
    cholesky_jitter = 8
    cholesky_jitter_growth = 10  # the factor (not in epsilons) on the jitter after each failed factorisation
    n, dim = rows.shape[1:]
    if dim <= n:
        return rows
    gram = rows @ rows.transpose(1, 2)  # (episodes, n, n)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    limits = torch.finfo(rows.dtype)
    jitter = cholesky_jitter * limits.eps * diagonal.mean(dim=1, keepdim=True).clamp_min(limits.tiny)
    while True:
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.expand(-1, n)))
        if not bool(failed.any()):
            return factor
        # Linearly dependent rows need more.
        jitter = torch.where(failed[:, None] > 0, cholesky_jitter_growth * jitter, jitter)


def minimize_by_adam(
    weights: Tensor, gradient: Callable[[Tensor], Tensor], *, learning_rate: float, steps: int
) -> Tensor:
    """Compute the weights after a number of steps of Adam that minimise a loss.

    Args:
        weights: The initial weights, of any shape. They are not changed.
        gradient: Maps weights to the gradient of the loss, of the same shape.
        learning_rate: > 0.
        steps: The number of steps, >= 0.

    Returns:
        The final weights, of the shape of the initial ones.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1, with its settings.
        https://arxiv.org/abs/1412.6980
    """
    beta1 = 0.9  # decay of the average gradient per step
    # The differences to 1 are numbers of their own, because 1 - 0.9 is not exactly 0.1 in floating point.
    one_minus_beta1 = 0.1
    beta2 = 0.999  # decay of the average squared gradient per step
    one_minus_beta2 = 0.001
    epsilon = 1e-8  # added to the root of the average squared gradient
    weights, first, second = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(1, steps + 1):
        g = gradient(weights)
        first.lerp_(g, one_minus_beta1)
        second.mul_(beta2).addcmul_(g, g, value=one_minus_beta2)
        spread = (second / (1 - beta2**step)).sqrt_().add_(epsilon)
        weights.addcdiv_(first, spread, value=-learning_rate / (1 - beta1**step))
    return weights
