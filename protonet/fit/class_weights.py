"""Classes that count alike, however many rows each has."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.fit.crossfit import Crossfit
from protonet.network import PrototypeNetwork


def balance_classes(labels: Tensor) -> Tensor:
    """Return weights (n,) float64 of mean 1 by which all classes of labels (n,) int64 weigh alike.

    Source: King and Zeng, "Logistic regression in rare events data" (2001), eq. 8.
    """
    rows = torch.bincount(labels)
    return (len(labels) / (int((rows > 0).sum()) * rows.double()))[labels]


def count_rows(crossed: Crossfit, labels: Tensor, weights: Tensor, beside: Tensor | None = None) -> Crossfit:
    """Make a crossfit that was fitted by weights of classes count rows again.

    The weights are for learning alone: figures are of the rows as they are, and samples that are added later move a
    prototype by as much as they are more.

    Args:
        crossed: Its networks are changed.
        labels: (n,) int64 of all rows that came.
        weights: (n,) of mean 1, the same for all rows of a class.
        beside: (num_classes,) int64, the samples that the classes' names count as, which no fold is without.

    Returns:
        The crossfit, whose weights count equal rows again.
    """
    class_weights = torch.ones(len(crossed.whole.counts), dtype=torch.float64).scatter_(0, labels, weights)
    counts = (crossed.weights / class_weights[crossed.labels]).round()
    rows = torch.bincount(labels, minlength=len(class_weights))
    rows = rows if beside is None else rows + beside
    count_samples(crossed.whole, rows)
    for fold, network in enumerate(crossed.folds):
        judged = crossed.fold == fold
        left = torch.bincount(crossed.labels[judged], counts[judged], minlength=len(rows)).long()
        count_samples(network, rows - left)
    return crossed._replace(weights=counts)


def count_samples(network: PrototypeNetwork, counts: Tensor) -> None:
    """Make the classes of a network count as so many samples (num_classes,) int64; its prototypes stay."""
    network.set_sums(network.sums * (counts / network.counts.clamp_min(1))[:, None], counts)
