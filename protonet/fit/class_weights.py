"""Balanced class weights, with which all classes have the same total weight in a fit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protonet.fit.cross_validation import CrossValidation
from protonet.network import PrototypeNetwork


def balanced_class_weights(labels: Tensor) -> Tensor:
    """Compute sample weights (n,) float64 that sum to the same number in each class, for labels (n,) int64.

    The mean weight is 1.

    Source: King and Zeng, "Logistic regression in rare events data" (2001), eq. 8.
    """
    rows = torch.bincount(labels)
    return (len(labels) / (int((rows > 0).sum()) * rows.double()))[labels]


def restore_row_counts(
    cv: CrossValidation, labels: Tensor, weights: Tensor, name_counts: Tensor | None = None
) -> CrossValidation:
    """Undo the class weights of a cross-validation after training: weights become numbers of rows again.

    Metrics are then computed for unweighted rows. A sample that is added to a prototype later counts as much as a
    training row.

    Args:
        cv: The cross-validation, with networks that were trained with class weights. Its networks are changed in
            place.
        labels: (n,) int64 labels of all input rows.
        weights: (n,) class weights of all input rows, from `balanced_class_weights`.
        name_counts: (num_classes,) number of samples that the name of each class counts as; None if names are not used.

    Returns:
        The cross-validation with numbers of rows as weights of its held-out rows.
    """
    class_weights = torch.ones(len(cv.network.counts), dtype=torch.float64).scatter_(0, labels, weights)
    counts = (cv.weights / class_weights[cv.labels]).round()
    rows = torch.bincount(labels, minlength=len(class_weights))
    rows = rows if name_counts is None else rows + name_counts
    set_sample_counts(cv.network, rows)
    for fold, network in enumerate(cv.folds):
        held_out = cv.fold == fold
        n_held_out = torch.bincount(cv.labels[held_out], counts[held_out], minlength=len(rows)).long()
        set_sample_counts(network, rows - n_held_out)
    return replace(cv, weights=counts)


def set_sample_counts(network: PrototypeNetwork, counts: Tensor) -> None:
    """Set the number of samples (num_classes,) int64 of each prototype of a network, in place.

    The prototypes do not change; a larger count makes the effect of later samples smaller.
    """
    network.set_sums(network.sums * (counts / network.counts.clamp_min(1))[:, None], counts)
