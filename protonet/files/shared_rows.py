"""Rows that several tensors of a model file hold are written once: views and fold models read the same samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet.views.view import expect

#: What the names of the tensors of shared rows begin with.
SHARED = "shared."
#: The narrowest rows that are looked at, and the largest share of them that has to be written for it to pay.
NARROWEST, PAYS = 16, 0.75
#: Numbers of a matrix of shared rows, at the most: a small file may ask for any.
MOST = 2**28


def share_rows(tensors: dict[str, Tensor], held: str) -> tuple[dict[str, Tensor], dict[str, int | str]]:
    """Put each row of matrices, and each vector, of one width and precision into one tensor, once, where that pays.

    Args:
        tensors: By name, contiguous, on the CPU.
        held: What the names begin with of those that are not always read: no other needs rows of theirs.

    Returns:
        The tensors, with the numbers (n,) int32 of its rows in place of each matrix, and that of a vector, 0-d, in its
        place; and by name the width of each, with an "h" behind it for int16, and a "c" for a vector of one number,
        which stands for it.
    """
    alike: dict[int | str, list[str]] = {}
    found, shared = dict(tensors), dict[str, int | str]()
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[0].startswith(held), item[0])):
        if tensor.ndim in {1, 2} and len(tensor) and tensor.shape[-1] >= NARROWEST:
            if tensor.ndim == 1 and tensor.dtype == torch.float32 and _is_constant(tensor):
                found[name], shared[name] = tensor[:1].clone(), f"{len(tensor)}c"
            elif tensor.dtype == torch.float32:
                alike.setdefault(tensor.shape[-1], []).append(name)
            elif tensor.dtype == torch.int16:
                alike.setdefault(f"{tensor.shape[-1]}h", []).append(name)
    numbers: dict[str, list[int]] = {}
    for key, names in alike.items():
        parts = [np.atleast_2d(tensors[name].numpy()) for name in names]
        width, places, always = parts[0].shape[1], dict[bytes, int](), 0
        for name, part in zip(names, parts, strict=True):  # rows of what is always read come first
            numbers[name] = [places.setdefault(row.tobytes(), len(places)) for row in part]
            always = always if name.startswith(held) else len(places)
        if len(places) > PAYS * sum(map(len, parts)) or width * max(map(len, parts)) > MOST:
            continue
        unique = np.frombuffer(bytearray(b"".join(places)), parts[0].dtype).reshape(-1, width)
        for prefix, part in (("", unique[:always]), (held, unique[always:])):
            if len(part):
                found[f"{prefix}{SHARED}{key}"] = torch.from_numpy(part).clone()
        for name in names:
            found[name] = torch.tensor(numbers[name], dtype=torch.int32).view(tensors[name].shape[:-1])
        shared |= dict.fromkeys(names, key)
    return found, shared


def unshare_rows(tensors: Mapping[str, Tensor], shared: Any, held: str) -> dict[str, Tensor]:
    """Return the tensors that `share_rows` was given, those of them that were read.

    Args:
        tensors: By name; they may be anything.
        shared: What it returned beside them; it may be anything.
        held: As there.

    Raises:
        ValueError: There are no such rows.
    """
    expect(isinstance(shared, dict), "shared rows that are no mapping")
    found = {name: tensor for name, tensor in tensors.items() if not name.removeprefix(held).startswith(SHARED)}
    pools: dict[Any, Tensor] = {}
    repeated = 0
    for name, key in shared.items():
        if name not in found:
            continue
        marked = isinstance(key, str) and re.fullmatch("[0-9]{1,9}[ch]", key) is not None
        expect(marked or type(key) is int, "shared rows of no width")
        width, half = int(key[:-1]) if marked else key, marked and key[-1] == "h"
        if marked and not half:
            repeated += width
            sound = found[name].shape == (1,) and found[name].dtype == torch.float32 and repeated <= MOST
            expect(sound, "a vector of more than one number")
            found[name] = found[name].repeat(width)
            continue
        if key not in pools:
            parts = [tensors[stored] for prefix in ("", held) if (stored := f"{prefix}{SHARED}{key}") in tensors]
            sound = bool(parts) and all(part.ndim == 2 and part.shape[1] == width for part in parts)
            precision = torch.int16 if half else torch.float32
            expect(sound and {part.dtype for part in parts} == {precision}, "shared rows that are not there")
            pools[key] = torch.cat(parts)
        numbers, pool = found[name], pools[key]
        expect(numbers.ndim <= 1 and numbers.dtype == torch.int32, "numbers of shared rows that are none")
        expect(numbers.numel() * width <= MOST, "more shared rows than any view has")
        expect(bool(((numbers >= 0) & (numbers < len(pool))).all()), "numbers of shared rows that are not there")
        found[name] = pool[numbers.long()]
    return found


def _is_constant(vector: Tensor) -> bool:
    """Return whether all numbers of a vector are the same to the bit."""
    bits = vector.view(torch.int32)
    return bool((bits == bits[0]).all())
