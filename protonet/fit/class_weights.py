"""Balanced class weights, with which all classes have the same total weight in a fit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.fit.crossfit import Crossfit
from protonet.network import PrototypeNetwork


def balance_classes(labels: Tensor) -> Tensor:
    """Compute weights (n,) float64 of mean 1 for labels (n,) int64, with the same total weight for each class.

    Source: King and Zeng, "Logistic regression in rare events data" (2001), eq. 8.
    """
    rows = torch.bincount(labels)
    return (len(labels) / (int((rows > 0).sum()) * rows.double()))[labels]


def count_rows(crossed: Crossfit, labels: Tensor, weights: Tensor, name_counts: Tensor | None = None) -> Crossfit:
    """Replace class weights by numbers of rows in a crossfit and its networks, after training with class weights.

    Metrics then are of unweighted rows, and samples that are added later move a prototype as much as its training rows.
    ``labels`` and ``weights`` (n,) are those of all input rows; the weights have mean 1 and are equal within a class.
    ``name_counts`` (num_classes,) are the numbers of samples that class names count as, in every fold.
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
    """Set the sample counts (num_classes,) int64 of the classes of a network, without changing the prototypes."""
    network.set_sums(network.sums * (counts / network.counts.clamp_min(1))[:, None], counts)
