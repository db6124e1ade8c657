"""Balanced class weights: all classes count equally, however many rows each has."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.fit.crossfit import Crossfit
from protonet.network import PrototypeNetwork


def balance_classes(labels: Tensor) -> Tensor:
    """Compute weights (n,) float64 of mean 1 that give all classes of labels (n,) int64 the same total.

    Source: King and Zeng, "Logistic regression in rare events data" (2001), eq. 8.
    """
    rows = torch.bincount(labels)
    return (len(labels) / (int((rows > 0).sum()) * rows.double()))[labels]


def count_rows(crossed: Crossfit, labels: Tensor, weights: Tensor, name_counts: Tensor | None = None) -> Crossfit:
    """Restore the row counts of a crossfit that was fitted with class weights, and of its networks.

    The weights (n,), of mean 1 and equal within a class, apply to training alone. Metrics are of the unweighted rows,
    and samples that are added later move a prototype by the number of rows. ``labels`` (n,) are of all input rows;
    ``name_counts`` (num_classes,) are the samples that the class names count as, which are part of every fold.
    """
    class_weights = torch.ones(len(crossed.whole.counts), dtype=torch.float64).scatter_(0, labels, weights)
    counts = (crossed.weights / class_weights[crossed.labels]).round()
    rows = torch.bincount(labels, minlength=len(class_weights))
    rows = rows if name_counts is None else rows + name_counts
    count_samples(crossed.whole, rows)
    for fold, network in enumerate(crossed.folds):
        held_out = crossed.fold == fold
        n_held_out = torch.bincount(crossed.labels[held_out], counts[held_out], minlength=len(rows)).long()
        count_samples(network, rows - n_held_out)
    return replace(crossed, weights=counts)


def count_samples(network: PrototypeNetwork, counts: Tensor) -> None:
    """Set the sample counts (num_classes,) int64 of a network's classes, with unchanged prototypes."""
    network.set_sums(network.sums * (counts / network.counts.clamp_min(1))[:, None], counts)
