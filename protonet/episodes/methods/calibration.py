"""Distribution calibration: features sampled about the support rows, with the covariances of base classes near them."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet._checks import fail
from protonet.episodes.batch import Base, Episodes
from protonet.episodes.methods.common import one_hot, squared_distances
from protonet.episodes.methods.logistic import fit_logistic

#: Where the logistic regression ends, in nats of all samples together: far below what sampling leaves to chance.
DECREMENT = 1e-2


def distribution_calibration(
    episodes: Episodes,
    *,
    power: float = 0.5,
    n_nearest: int = 2,
    spread: float = 0.21,
    n_samples: int = 100,
    seed: int = 0,
) -> Tensor:
    """Classify by logistic regression on the support rows and on features sampled from calibrated Gaussians.

    Two things differ from the paper. The base classes' features are raised to the power, too: the means averaged would
    else be of different scales, unless features are of the order of one. And 100 samples a class are drawn, not 750: an
    eighth of the time for about the same accuracy, unless classes vary much more in a few directions than in others.

    Args:
        episodes: Supports and queries, (episodes, rows, dim), and the base classes.
        power: Tukey's, > 0; negative features keep their sign.
        n_nearest: The paper's k, base classes about each support row, in [1, base classes].
        spread: Its alpha, >= 0, added to every entry of the covariances.
        n_samples: Features sampled a class, >= 1, shared out among its support rows.
        seed: Of the samples, the same normal numbers for every episode and class.

    Returns:
        Logits (episodes, n_queries, n_way).

    Raises:
        ValueError: No base classes are known, or fewer than ``n_nearest``.

    Source: Yang, Liu and Xu, "Free lunch for few-shot learning: distribution calibration" (2021), eqs. 3 to 7.
        https://arxiv.org/abs/2101.06395
    """
    name, base = "distribution_calibration", episodes.base
    if base is None:
        fail(name, "base", "be known", None, "Give the experiment base classes, or leave this method out.")
    if n_nearest > len(base.by_class.size):
        limit = f"be at most the number of base classes ({len(base.by_class.size)})"
        fail(name, "n_nearest", limit, n_nearest, "Ask for fewer.")
    support, query = _tukey(episodes.support, power), _tukey(episodes.query, power)
    means, deviations = _base_statistics(base, power, support.dtype)
    distances = squared_distances(support, means.expand(len(support), -1, -1))
    nearest = distances.topk(n_nearest, dim=2, largest=False).indices  # (episodes, n_support, n_nearest): eq. 5
    centres = (means[nearest].sum(dim=2) + support) / (n_nearest + 1)  # eq. 6

    members = one_hot(episodes.support_labels, episodes.n_way, torch.int64).transpose(1, 2)
    own_first = members.argsort(dim=2, descending=True, stable=True)  # (episodes, n_way, n_support)
    turns = torch.arange(n_samples) % members.sum(dim=2, keepdim=True)
    source = own_first.gather(2, turns)  # (episodes, n_way, n_samples): the support row that each sample starts from
    episode = torch.arange(len(support)).reshape(-1, 1, 1)

    generator = torch.Generator().manual_seed(seed)
    shape = (n_nearest, n_samples, deviations.shape[1])
    normal = torch.randn(shape, generator=generator, dtype=torch.float64).to(support.dtype)
    common = torch.randn(n_samples, 1, generator=generator, dtype=torch.float64).to(support.dtype)
    samples = centres[episode, source] + spread**0.5 * common  # (episodes, n_way, n_samples, dim)
    for rank in range(n_nearest):
        noise = normal[rank] @ deviations  # (base classes, n_samples, dim)
        chosen = nearest[episode, source, rank]  # (episodes, n_way, n_samples)
        samples += noise[chosen, torch.arange(n_samples)] / n_nearest**0.5

    rows = torch.cat([support, samples.flatten(1, 2)], dim=1)
    sampled = torch.arange(episodes.n_way).repeat_interleave(n_samples).expand(len(support), -1)
    target = one_hot(torch.cat([episodes.support_labels, sampled], dim=1), episodes.n_way, support.dtype)
    weight, intercept = fit_logistic(rows, target, decrement=DECREMENT)
    return query @ weight + intercept


def _tukey(x: Tensor, power: float) -> Tensor:
    """Return the power of the features' size, with their sign (eq. 3)."""
    return x.sign() * x.abs() ** power


def _base_statistics(base: Base, power: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return means (base classes, dim) and deviations (base classes, most rows, dim), zero where a class has no row.

    Normal numbers times a class's deviations have its covariance, of eq. 2, that is never formed.
    """
    index = base.by_class
    number, size = torch.arange(int(index.size.max())), index.size[:, None]
    there = (number < size)[..., None]
    slots = index.rows[index.start[:, None] + number.where(there[..., 0], 0)]  # (base classes, most rows)
    taken = base.take(slots.flatten()).unflatten(0, slots.shape).to(dtype)
    rows = _tukey(taken, power) * there  # (base classes, most rows, dim)
    means = rows.sum(dim=1) / size
    return means, (rows - means[:, None]) * there / (size[..., None] - 1).clamp_min(1).sqrt()
