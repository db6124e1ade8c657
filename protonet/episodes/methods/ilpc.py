"""iLPC: rounds that propagate labels over a graph, balance them, and keep the cleanest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import one_hot
from protonet.episodes.methods.keywords import BelowOne, Positive, PositiveCount
from protonet.episodes.methods.pt_map import balance, transform
from protonet.episodes.samplers.batch import Episodes


@dataclass(frozen=True)
class LogisticSettings:
    """The gradient descent of the linear classifier that finds clean labels.

    All values are of the authors' code (iterative_graph_functions.py).
    """

    learning_rate: float = 0.1  #: Constant over all steps.
    momentum: float = 0.9  #: Share of the last step's velocity, in [0, 1).
    weight_decay: float = 5e-4  #: Share of the outputs added to their gradient.


CLASSIFIER = LogisticSettings()


def ilpc(
    episodes: Episodes,
    *,
    beta: Positive = 0.5,
    n_neighbours: PositiveCount = 15,
    gamma: Positive = 3.0,
    alpha: BelowOne = 0.8,
    tau: Positive = 3.0,
    n_clean: PositiveCount = 3,
    n_steps: PositiveCount = 1000,
) -> Tensor:
    """Label the queries in rounds: in each round, the queries with the cleanest labels join the support.

    A round propagates the support's labels, balances those that reach the remaining queries, trains a linear classifier
    on all rows and moves the queries whose labels it learns most easily. Everything depends only on inner products.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        beta: The exponent of the power transform, > 0.
        n_neighbours: Neighbours of a row in the graph, >= 1; all other rows where there are fewer.
        gamma: The exponent of the cosines in the graph, > 0.
        alpha: How far labels spread, in [0, 1).
        tau: The exponent of the propagated labels, > 0; larger values lower their entropy.
        n_clean: Most queries per class that move in a round, >= 1.
        n_steps: Steps of the classifier's gradient descent, >= 1.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: logarithms of a query's row of the balanced
        transport plan, in the round in which it moved.

    Source: Lazarou, Stathaki and Avrithis, "Iterative label cleaning for transductive and semi-supervised few-shot
        learning" (2021), sec. 3. https://arxiv.org/abs/2012.07962. From the authors' code alone: all settings
        (test_arguments.py, iterative_graph_functions.py); the constant learning rate; a class's quota, n_queries /
        n_way, minus the queries that moved. Their code starts the bias at random and stops when fewer than five queries
        move; here it starts at 0 and all queries move.
    """
    rows = transform(torch.cat([episodes.support, episodes.query], dim=1), beta)
    gram = rows @ rows.transpose(1, 2)
    n_way, n_support, n_queries = episodes.n_way, episodes.support.shape[1], episodes.query.shape[1]
    spread = _propagate(gram, n_neighbours, gamma, alpha)[..., n_support:]  # (episodes, rows, n_queries)
    hot = one_hot(episodes.support_labels, n_way, rows.dtype).transpose(1, 2)  # (episodes, n_way, n_support)
    labels = F.pad(hot, (0, n_queries))  # (episodes, n_way, rows), zeros for rows without a label
    logits = torch.zeros_like(labels[..., n_support:])
    moved = labels[..., n_support:]  # (episodes, n_way, n_queries), a view: writing to it writes to labels
    for _ in range(n_queries):
        left = 1 - moved.sum(dim=1, keepdim=True)  # (episodes, 1, n_queries)
        if not bool(left.any()):
            break
        reached = F.normalize((labels @ spread).clamp_min(0), p=1, dim=1)
        kernel = reached.clamp_min(torch.finfo(rows.dtype).eps) ** tau
        quota = (n_queries / n_way - moved.sum(dim=2, keepdim=True)).clamp_min(0)
        quota = quota * (left.sum(dim=2, keepdim=True) / quota.sum(dim=1, keepdim=True))
        plan = kernel * balance(kernel, left, quota, torch.ones_like(quota))  # up to the scale of its rows
        guess = one_hot(plan.argmax(dim=1), n_way, rows.dtype).transpose(1, 2) * left
        losses = _average_losses(gram, labels, torch.cat([hot, moved + guess], dim=2), n_steps)[:, None, n_support:]
        rank = losses.where(guess > 0, torch.inf).argsort(dim=2, stable=True).argsort(dim=2)
        clean = guess * (rank < n_clean)
        logits = logits.where(clean.sum(dim=1, keepdim=True) == 0, plan.clamp_min(torch.finfo(rows.dtype).tiny).log())
        moved += clean
    return logits.log_softmax(dim=1).transpose(1, 2)


def _propagate(gram: Tensor, n_neighbours: int, gamma: float, alpha: float) -> Tensor:
    """Return (I - alpha W)^-1 of the normalised nearest-neighbour graph W, (episodes, rows, rows), symmetric."""
    n = gram.shape[1]
    eye = torch.eye(n, dtype=gram.dtype, device=gram.device)
    others = gram.masked_fill(eye > 0, -1)
    nearest = others.topk(min(n_neighbours, n - 1), dim=2)
    affinity = torch.zeros_like(gram).scatter_(2, nearest.indices, nearest.values.clamp_min(0) ** gamma)
    affinity = affinity + affinity.transpose(1, 2)
    root = affinity.sum(dim=2, keepdim=True).clamp_min(torch.finfo(gram.dtype).eps).rsqrt()
    graph = root * affinity * root.transpose(1, 2)
    inverse: Tensor = torch.linalg.inv(eye - alpha * graph)
    return inverse


def _average_losses(gram: Tensor, known: Tensor, labels: Tensor, n_steps: int) -> Tensor:
    """Return each row's cross-entropy (episodes, rows), averaged over the training of a linear classifier, in nats.

    The classifier starts at the mean directions of the ``known`` rows' classes. Its gradients are combinations of the
    rows, so its outputs change by combinations of the rows of the Gram matrix, with ones added for the bias. Labels are
    one-hot (episodes, n_way, rows), zeros where they are not known.

    Source: Huang et al., "O2U-Net: a simple noisy label detection approach for deep neural networks" (2019), sec. 3.
    """
    products = known @ gram  # (episodes, n_way, rows), of the classes' sums of rows with each row
    norms = (known * products).sum(dim=2, keepdim=True).clamp_min(torch.finfo(gram.dtype).eps).sqrt()
    outputs, velocity = products / norms, torch.zeros_like(products)
    kernel = (gram + 1) / gram.shape[1]
    total = torch.zeros_like(products)
    for _ in range(n_steps):
        log_probabilities = outputs.log_softmax(dim=1)
        total += log_probabilities
        gradient = torch.baddbmm(outputs, log_probabilities.exp() - labels, kernel, beta=CLASSIFIER.weight_decay)
        velocity = gradient.add_(velocity, alpha=CLASSIFIER.momentum)
        outputs.sub_(velocity, alpha=CLASSIFIER.learning_rate)
    return -(labels * total).sum(dim=1) / n_steps
