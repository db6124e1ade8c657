"""Distribution calibration: features sampled around the support rows, with covariances of nearby base classes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances
from protonet.episodes.methods.keywords import NonNegative, Positive, PositiveCount
from protonet.episodes.methods.linear import fit_logistic
from protonet.episodes.samplers.batch import BaseClasses, Episodes
from protonet.errors import raise_input_error

#: The fit of the logistic regression ends at this ``decrement`` (see `fit_logistic`), in nats. The effect is far below
#: the sampling error.
NEWTON_DECREMENT = 1e-2
BASE_CLASSES_PER_BLOCK = 8  #: Number of base classes whose noise is computed at a time.
MAX_SAMPLED_FEATURES = 2**24  #: Maximum number of sampled features in memory, but at least one episode's.


def distribution_calibration(
    episodes: Episodes,
    *,
    power: Positive = 0.5,
    n_nearest: PositiveCount = 2,
    spread: NonNegative = 0.21,
    n_samples: PositiveCount = 750,
    seed: int = 0,
) -> Tensor:
    """Classify by logistic regression on the support rows and on features sampled from calibrated Gaussians.

    As in the authors' code (evaluate_DC.py), the features of base classes are not transformed by ``power``. The method
    therefore works badly on features whose size is far from one.

    Args:
        power: The exponent of Tukey's transform, > 0; negative features keep their sign. The authors' code
            uses 0.5.
        n_nearest: The paper's k: number of nearest base classes used for each support row, in [1, base classes].
            The authors' code uses 2.
        spread: The paper's alpha, >= 0, added to every entry of the covariances. The authors' code uses 0.21.
        n_samples: Features sampled per class, >= 1, shared equally among its support rows. The paper uses 750. With
            100, the method takes an eighth of the time and loses 5 points of accuracy at 1-shot on 640 ReLU features.
        seed: The seed of the samples; every episode and class uses the same normal numbers.

    Source: Yang, Liu and Xu, "Free lunch for few-shot learning: distribution calibration" (2021), eqs. 3 to 7.
        https://arxiv.org/abs/2101.06395
    """
    base = episodes.base
    if base is None:
        raise_input_error("base", "be known", None, "Give the experiment base classes, or leave this method out.")
    if n_nearest > len(base.rows_by_class.class_counts):
        limit = f"be at most the number of base classes ({len(base.rows_by_class.class_counts)})"
        raise_input_error("n_nearest", limit, n_nearest, "Ask for fewer.")
    max_episodes = max(1, MAX_SAMPLED_FEATURES // (episodes.n_way * n_samples * episodes.support.shape[2]))
    rows = (episodes.support, episodes.support_labels, episodes.query)
    logits = []
    for support, labels, query in zip(*(part.split(max_episodes) for part in rows), strict=True):
        some = replace(episodes, support=support, support_labels=labels, query=query)
        logits.append(_classify_by_calibration(some, base, power, n_nearest, spread, n_samples, seed))
    return torch.cat(logits)


def _classify_by_calibration(
    episodes: Episodes, base: BaseClasses, power: float, n_nearest: int, spread: float, n_samples: int, seed: int
) -> Tensor:
    """Compute logits (episodes, n_queries, n_way) of a batch of episodes whose sampled features fit into memory."""
    support, query = _apply_tukey_transform(episodes.support, power), _apply_tukey_transform(episodes.query, power)
    means = base.class_means.to(support.dtype)
    distances = squared_distances(support, means.expand(len(support), -1, -1))
    nearest = distances.topk(n_nearest, dim=2, largest=False).indices  # (episodes, n_support, n_nearest): eq. 5
    centres = (means[nearest].sum(dim=2) + support) / (n_nearest + 1)  # eq. 6

    members = one_hot(episodes.support_labels, episodes.n_way, torch.int64).transpose(1, 2)
    class_rows_first = members.argsort(dim=2, descending=True, stable=True)  # (episodes, n_way, n_support)
    turns = torch.arange(n_samples, device=support.device) % members.sum(dim=2, keepdim=True)
    source = class_rows_first.gather(2, turns)  # (episodes, n_way, n_samples): the support row of each sample
    episode = torch.arange(len(support), device=support.device).reshape(-1, 1, 1)

    generator = torch.Generator().manual_seed(seed)
    shape = (n_nearest, n_samples, int(base.rows_by_class.class_counts.max()))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64).to(support)
    common = torch.randn(n_samples, 1, generator=generator, dtype=torch.float64).to(support)
    samples = centres[episode, source] + spread**0.5 * common  # (episodes, n_way, n_samples, dim)
    # ``chosen`` (episodes, n_way, n_samples, n_nearest) are positions in ``used``, the base classes near any row.
    used, chosen = nearest[episode, source].unique(return_inverse=True)
    for first in range(0, len(used), BASE_CLASSES_PER_BLOCK):
        deviations = _compute_scaled_deviations(base, used[first : first + BASE_CLASSES_PER_BLOCK], support.dtype)
        for rank in range(n_nearest):
            noise = normal[rank] @ deviations / n_nearest**0.5  # (classes, n_samples, dim)
            position = chosen[..., rank] - first
            in_block = ((position >= 0) & (position < len(noise))).nonzero(as_tuple=True)
            samples[in_block] += noise[position[in_block], in_block[2]]

    rows = torch.cat([support, samples.flatten(1, 2)], dim=1)
    sampled = torch.arange(episodes.n_way, device=support.device).repeat_interleave(n_samples).expand(len(support), -1)
    target = one_hot(torch.cat([episodes.support_labels, sampled], dim=1), episodes.n_way, support.dtype)
    weight, intercept = fit_logistic(rows, target, decrement=NEWTON_DECREMENT)
    return query @ weight + intercept


def _apply_tukey_transform(x: Tensor, power: float) -> Tensor:
    """Raise the absolute values of features to a power and keep the signs of the features (eq. 3)."""
    return x.sign() * x.abs() ** power


def _compute_scaled_deviations(base: BaseClasses, classes: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale deviations (classes, rows, dim) of base rows: products with normal noise have the class covariance."""
    # They are divided by the root of the number of rows minus 1, and padded with zeros. Covariances (eq. 2) are never
    # computed themselves.
    start, size = base.rows_by_class.class_starts[classes, None], base.rows_by_class.class_counts[classes, None]
    position = torch.arange(int(base.rows_by_class.class_counts.max()), device=size.device)
    present = position < size  # (k, most rows)
    rows = base.take(base.rows_by_class.row_indices[start + position.where(present, 0)].flatten())
    rows = rows.unflatten(0, present.shape).to(dtype)  # (k, most rows, dim)
    means = base.class_means[classes].to(dtype)
    weight: Tensor = present / (size - 1).clamp_min(1).sqrt()
    deviations: Tensor = (rows - means[:, None]) * weight[..., None].to(dtype)
    return deviations
