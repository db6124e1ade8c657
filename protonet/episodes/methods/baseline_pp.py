"""Baseline++: a cosine classifier on frozen features, trained by stochastic gradient descent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.batch import Episodes
from protonet.episodes.methods.common import one_hot


def baseline_pp(
    episodes: Episodes,
    *,
    scale: float = 2.0,
    n_epochs: int = 100,
    batch_size: int = 4,
    learning_rate: float = 0.01,
    momentum: float = 0.9,
    dampening: float = 0.9,
    weight_decay: float = 0.001,
    seed: int = 0,
) -> Tensor:
    """Classify by cosines to weights times their lengths, both trained on the support rows as in torch.optim.SGD.

    A class's weight is a direction v, of any norm, times a length g. Gradients of v are combinations of v and of the
    support rows, so that it stays in the span of these and of where it started: its coordinates there are trained
    instead, on the rows' inner products. Every episode uses the same mini-batches of row numbers and the same initial
    weights. All defaults are those of the authors' code; a scale of 2 is theirs for at most 200 classes.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        scale: > 0, the factor on the logits.
        n_epochs: Passes over the support rows, >= 1.
        batch_size: Rows per step, >= 1; the last step of an epoch has the rows that are left.
        learning_rate: > 0.
        momentum: In [0, 1).
        dampening: In [0, 1]; gradients enter the momentum times 1 - dampening.
        weight_decay: >= 0, of directions and lengths.
        seed: Of the initial weights and of the order of the rows in each epoch.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Chen, Liu, Kira, Wang and Huang, "A closer look at few-shot classification" (2019), Baseline++, sec. 3.2 and
        4.1, https://arxiv.org/abs/1904.04232, with the lengths of its code (backbone.py, issues 4 and 8), which takes
        weight normalisation: Salimans and Kingma (2016), eqs. 2 and 3, https://arxiv.org/abs/1602.07868
    """
    rows, query = (F.normalize(each, dim=2) for each in (episodes.support, episodes.query))
    n_support, n_way, dim = rows.shape[1], episodes.n_way, rows.shape[2]
    generator = torch.Generator().manual_seed(seed)
    drawn = 2 * torch.rand(n_way, dim, generator=generator, dtype=torch.float64) - 1  # as torch.nn.Linear starts
    start = (drawn / dim**0.5).to(rows.dtype).expand(len(rows), -1, -1)
    target = one_hot(episodes.support_labels, n_way, rows.dtype).transpose(1, 2)  # (episodes, n_way, n_support)
    basis = torch.cat([rows, start], dim=1)  # (episodes, n_support + n_way, dim): what directions are made of
    gram = basis @ basis.transpose(1, 2)
    direction = F.pad(torch.eye(n_way, dtype=rows.dtype), (n_support, 0)).expand(len(rows), -1, -1).clone()
    length = torch.linalg.vector_norm(start, dim=2, keepdim=True).clone()  # (episodes, n_way, 1)
    moved, changed = torch.zeros_like(direction), torch.zeros_like(length)  # velocities
    kept = 1.0  # share of the gradient that enters the momentum: all of the first one
    for _ in range(n_epochs):
        for batch in torch.randperm(n_support, generator=generator).split(batch_size):
            products = direction @ gram  # (episodes, n_way, n_support + n_way)
            norm = (direction * products).sum(dim=2, keepdim=True).sqrt()
            cosine = products[..., batch] / norm  # (episodes, n_way, rows)
            error = (scale * length * cosine).softmax(dim=1) - target[..., batch]
            error *= scale / len(batch)
            of_length = (error * cosine).sum(dim=2, keepdim=True)
            # What changes the direction is the gradient of the weight, less its part along the direction.
            of_direction = -of_length * direction / norm
            of_direction[..., batch] += error
            of_direction *= length / norm
            moved.mul_(momentum).add_(of_direction.add_(direction, alpha=weight_decay), alpha=kept)
            changed.mul_(momentum).add_(of_length.add_(length, alpha=weight_decay), alpha=kept)
            direction = direction - learning_rate * moved
            length = length - learning_rate * changed
            kept = 1 - dampening
    weight: Tensor = F.normalize(direction @ basis, dim=2) * (scale * length)
    return query @ weight.transpose(1, 2)
