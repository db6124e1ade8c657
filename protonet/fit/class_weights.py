"""Balanced class weights, with which all classes have the same total weight in a fit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.fit.crossfit import Crossfit
from protonet.network import PrototypeNetwork


def balance_classes(labels: Tensor) -> Tensor:
    """Compute sample weights (n,) float64 that sum to the same number in each class, for labels (n,) int64.

    The mean weight is 1.

    Source: King and Zeng, "Logistic regression in rare events data" (2001), eq. 8.
    """
    rows = torch.bincount(labels)
    return (len(labels) / (int((rows > 0).sum()) * rows.double()))[labels]


def count_rows(crossed: Crossfit, labels: Tensor, weights: Tensor, name_counts: Tensor | None = None) -> Crossfit:
    """Undo the class weights of a cross-validation after training: weights become numbers of rows again.

    Metrics are then computed for unweighted rows. A sample that is added to a prototype later counts as much as a
    training row.

    Args:
        crossed: The cross-validation, with networks that were trained with class weights. Its networks are changed in
            place.
        labels: (n,) int64 labels of all input rows.
        weights: (n,) class weights of all input rows, from `balance_classes`.
        name_counts: (num_classes,) number of samples that the name of each class counts as; None if names are not used.

    Returns:
        The cross-validation with numbers of rows as weights of its held-out rows.
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
    """Set the number of samples (num_classes,) int64 of each prototype of a network, in place.

    The prototypes do not change; a larger count makes the effect of later samples smaller.
    """
    network.set_sums(network.sums * (counts / network.counts.clamp_min(1))[:, None], counts)
