"""From loaders to one set of rows in an order of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet._checks import check_labels, fail, fail_type


def read_loaders(
    train_loader: Iterable[Any], val_loader: Iterable[Any] | None, metadata: Mapping[str, Any]
) -> tuple[Tensor, Tensor, int]:
    """Read two loaders once.

    Args:
        train_loader: Batches ``(inputs, labels)``, at least one sample.
        val_loader: The same, or None.
        metadata: ``input_dim`` and ``num_classes`` hold where present.

    Returns:
        Features (n, dim) float32, labels (n,) int64 and the number of classes.

    Raises:
        InputTypeError: A batch is not ``(inputs, labels)`` of real tensors or arrays.
        InputError: No sample, non-finite features, labels or widths out of range.
    """
    if train_loader is None:
        fail_type("solve", "train_loader", "be a loader", "None", "Pass a DataLoader or a list of batches.")
    features: list[Tensor] = []
    labels: list[Tensor] = []
    dim = metadata.get("input_dim")
    for name, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
        if loader is not None and not isinstance(loader, Iterable):
            fail_type("solve", name, "be iterable", type(loader).__name__, "Pass a DataLoader or a list of batches.")
        rows = bad = wide = 0
        first = len(labels)
        for number, batch in enumerate(() if loader is None else loader):
            inputs, targets = _check_batch(name, number, batch)
            if not len(inputs):
                continue
            dim = dim or inputs.shape[1]
            if inputs.shape[1] != dim:
                remedy = "Check metadata['input_dim'] and that every batch has the same features."
                fail("solve", name, f"have {dim} features per sample", f"{inputs.shape[1]} in batch {number}", remedy)
            rows += len(inputs)
            single = inputs.to(torch.float32)
            bad += int((~torch.isfinite(inputs)).any(dim=1).sum())
            wide += int((~torch.isfinite(single)).any(dim=1).sum()) + int(bool(inputs.any()) and not bool(single.any()))
            features.append(single)
            labels.append(targets)
        if name == "train_loader" and not rows:
            fail("solve", name, "have at least one sample", "none", "Pass labelled samples.")
        if bad:
            fail("solve", name, "be finite", f"NaN or infinity in {bad} of {rows} rows", "Drop or impute those rows.")
        if wide:
            fail(
                "solve", name, "lie within the range of float32", f"values beyond it in {wide} places", "Rescale them."
            )
        if rows:
            targets = torch.cat(labels[first:])
            check_labels("solve", f"{name} labels", targets, n=rows, num_classes=metadata.get("num_classes"))
    y = torch.cat(labels).to(torch.int64)
    num_classes = metadata.get("num_classes") or max(2, int(y.max()) + 1)
    if "num_classes" not in metadata and num_classes > 1000 + 10 * len(y.unique()):
        remedy = "Number the classes 0, 1, ..., or pass metadata['num_classes'] if the gaps are meant."
        fail("solve", "train_loader labels", "be class numbers", f"{num_classes - 1} as the largest", remedy)
    return torch.cat(features), y, num_classes


def _check_batch(name: str, number: int, batch: object) -> tuple[Tensor, Tensor]:
    """Return the inputs (b, dim) and labels (b,) of one batch, on the CPU."""
    constraint, remedy = "give (inputs, labels) batches", "Wrap the data in a TensorDataset(inputs, labels)."
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = f"{type(batch).__name__} in batch {number}"
        got += f" of {len(batch)} items" if isinstance(batch, (tuple, list)) else ""
        fail_type("solve", name, constraint, got, remedy)
    inputs, labels = (_from_numpy(part) if isinstance(part, np.ndarray) else part for part in batch)
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor) or inputs.is_complex():
        got = f"({type(batch[0]).__name__}, {type(batch[1]).__name__}) in batch {number}"
        fail_type("solve", name, constraint + " of real tensors", got, remedy)
    if inputs.ndim < 2 or labels.numel() != len(inputs):
        got = f"shapes {tuple(inputs.shape)} and {tuple(labels.shape)} in batch {number}"
        fail("solve", name, constraint + " of shapes (b, ...) and (b,)", got, remedy)
    flat = inputs.detach().reshape(len(inputs), -1) if len(inputs) else inputs.detach()  # (b, dim)
    return flat.cpu(), labels.detach().cpu().reshape(-1)


def _from_numpy(part: np.ndarray[Any, Any]) -> Tensor | None:
    """Return a copy as a tensor, also of read-only and reversed arrays; None if it does not hold numbers."""
    return torch.from_numpy(np.array(part)) if part.dtype.kind in "biuf" else None


def sort_rows(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sort rows by label, then by their bytes: the order that the loaders gave them in leaves no trace."""
    rows = features.add_(0.0).numpy()  # -0.0 becomes 0.0
    keys = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    order = np.argsort(keys, kind="stable")
    order = order[np.argsort(labels.numpy()[order], kind="stable")]
    chosen = torch.from_numpy(order)
    return features[chosen], labels[chosen]
