"""Validate arguments of public functions: return the value converted to one type, or raise an error that names it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex

from protonet._text import to_printable
from protonet.errors import InputTypeError, raise_input_error

if TYPE_CHECKING:  # commands check their options before torch is imported
    import torch
    from torch import Tensor


def check_int(argument: str, value: object, *, low: int, high: int | None = None, remedy: str = "") -> int:
    """Convert ``value``, such as 5 or 5.0, to an int in [low, high], or raise an error about ``argument``."""
    bounds = f"be a whole number >= {low}" if high is None else f"be a whole number in [{low}, {high}]"
    remedy = remedy or f"Pass an int such as {low}."
    if isinstance(value, bool) or not isinstance(value, (SupportsIndex, SupportsFloat)):
        raise_input_error(argument, bounds, repr(value), remedy, kind=InputTypeError)
    if isinstance(value, SupportsIndex):
        integer = operator.index(value)
    else:
        real = float(value)
        if not math.isfinite(real) or real != math.floor(real):
            raise_input_error(argument, bounds, repr(value), remedy)
        integer = int(real)
    if integer < low or (high is not None and integer > high):
        raise_input_error(argument, bounds, repr(value), remedy)
    return integer


def check_number(argument: str, value: object, *, low: float, strict: bool = False, remedy: str = "") -> float:
    """Convert ``value`` to a finite float >= ``low``, > ``low`` if ``strict``, or raise an error about ``argument``."""
    bounds = f"be a finite number {'>' if strict else '>='} {low:g}"
    remedy = remedy or "Pass a finite float."
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise_input_error(argument, bounds, repr(value), remedy, kind=InputTypeError)
    real = float(value)
    if not math.isfinite(real) or real < low or (strict and real == low):
        raise_input_error(argument, bounds, repr(value), remedy)
    return real


def check_type(argument: str, value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Raise an InputTypeError unless ``value`` has the type ``kind``, which the message calls ``name``."""
    if not isinstance(value, kind):
        raise_input_error(argument, f"be {name}", type(value).__name__, "Pass another object.", kind=InputTypeError)


def check_device(argument: str, value: str | int | torch.device) -> torch.device:
    """Convert ``value`` to a torch device; raise an InputError unless this machine can store tensors on it."""
    import torch  # noqa: PLC0415 - slow to import

    try:
        device = torch.device(value)
        torch.zeros(1, device=device).cpu()
    except (AssertionError, RuntimeError, TypeError) as error:
        got = f"{str(value)!r} ({str(error).splitlines()[0]})"
        raise_input_error(argument, "be a device of this machine", got, "Pass 'cpu'.")
    return device


def check_features(argument: str, value: object, *, dim: int | None = None) -> Tensor:
    """Flatten a tensor (n, ...) of any real dtype to rows (n, dim); raise an error unless all values are finite.

    The result is float64 if the tensor is float64, and float32 otherwise.
    """
    import torch  # noqa: PLC0415 - slow to import

    if not isinstance(value, torch.Tensor):
        must, got = "be a tensor of shape (n, dim)", type(value).__name__
        raise_input_error(argument, must, got, "Use torch.as_tensor.", kind=InputTypeError)
    if value.is_complex():
        remedy = "Split real and imaginary parts into columns."
        raise_input_error(argument, "be real", str(value.dtype), remedy, kind=InputTypeError)
    if value.ndim < 2:
        remedy = "Add the missing axis, e.g. x[None] for a single row."
        raise_input_error(argument, "have shape (n, dim)", f"shape {tuple(value.shape)}", remedy)
    width = math.prod(value.shape[1:])
    rows = value.detach().reshape(value.shape[0], width)  # (n, dim)
    if dim is not None and width != dim:
        raise_input_error(argument, f"have {dim} features per row", f"{width}", "Flatten or select the same features.")
    if rows.dtype != torch.float64:
        rows = rows.to(torch.float32)
    bad = int((~torch.isfinite(rows)).any(dim=1).sum())
    if bad:
        remedy = "Drop or impute those rows."
        raise_input_error(argument, "be finite", f"NaN or infinity in {bad} of {len(rows)} rows", remedy)
    return rows


def check_weights(argument: str, value: object, *, n: int) -> Tensor:
    """Convert a tensor of n sample weights to shape (n,), float64; raise an error unless each is finite and > 0."""
    import torch  # noqa: PLC0415 - slow to import

    if not isinstance(value, torch.Tensor) or value.is_complex():
        got, remedy = type(value).__name__, "Use torch.as_tensor(weights)."
        raise_input_error(argument, "be a tensor of numbers", got, remedy, kind=InputTypeError)
    weights = value.detach().reshape(-1).to(torch.float64)  # (n,)
    bad = int((~(torch.isfinite(weights) & (weights > 0))).sum())
    if len(weights) != n or bad:
        got = f"{bad} that are not" if bad else f"{len(weights)} of them"
        raise_input_error(argument, f"be {n} finite numbers > 0", got, "Leave rows without weight out.")
    return weights


def check_groups(argument: str, groups: Sequence[object], labels: Sequence[object]) -> None:
    """Raise an InputError about ``argument`` if all rows of a class, two or more, are in one group."""
    groups_of_class: dict[object, list[object]] = {}
    for group, label in zip(groups, labels, strict=True):
        groups_of_class.setdefault(label, []).append(group)
    for label, (first, *others) in groups_of_class.items():
        if others and all(group == first for group in others):
            got = f"all {1 + len(others)} rows of class {to_printable(label)} in group {to_printable(first)}"
            raise_input_error(argument, "hold no class whole", got, "Add another group of that class, or leave it out.")


def check_labels(argument: str, value: object, *, n: int, num_classes: int | None = None) -> Tensor:
    """Convert a tensor of n integer labels, (n,) or (n, 1), to class indices (n,) int64.

    Raises:
        InputError: A label is below 0 or, unless ``num_classes`` is None, not below ``num_classes``; or the tensor does
            not have n labels.
        InputTypeError: The value is not a tensor of integers.
    """
    import torch  # noqa: PLC0415 - slow to import

    constraint = "be a tensor of integer labels"
    if not isinstance(value, torch.Tensor):
        got, remedy = type(value).__name__, "Use torch.as_tensor(labels)."
        raise_input_error(argument, constraint, got, remedy, kind=InputTypeError)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        got, remedy = str(value.dtype), "Convert class ids with labels.long()."
        raise_input_error(argument, constraint, got, remedy, kind=InputTypeError)
    if value.numel() != n:
        raise_input_error(argument, f"have one label per row ({n})", f"{value.numel()}", "Pass a label for every row.")
    labels = value.detach().reshape(-1).to(torch.int64)  # (n,)
    outside = labels < 0 if num_classes is None else (labels < 0) | (labels >= num_classes)
    if bool(outside.any()):
        must = "be >= 0" if num_classes is None else f"be in [0, {num_classes})"
        got = f"{labels[outside][0].item()} ({int(outside.sum())} such labels)"
        raise_input_error(argument, must, got, "Number the classes 0..num_classes-1.")
    return labels
