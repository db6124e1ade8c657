"""Validation of configs and tensors that are read from files: anything unexpected raises a ValueError."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

ConfigT = TypeVar("ConfigT", bound="Config")


def bounded_field(low: float = 1, high: float = 2**31) -> Any:
    """Declare a dataclass field whose value must be in [low, high]; `Config` checks it."""
    return field(metadata={"range": (low, high)})


@dataclass(frozen=True)
class Config:
    """Sizes and settings from which a module is built: int, float and bool fields, which JSON can hold.

    Raises:
        ValueError: A value is of another type than its field, not finite, or out of range.
    """

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, (low, high) = getattr(self, entry.name), entry.metadata.get("range", (-math.inf, math.inf))
            raise_unless(type(value).__name__ == entry.type, f"no usable entry {entry.name}")
            raise_unless(abs(value) < math.inf and low <= value <= high, f"an entry {entry.name} out of range")

    def to_json(self) -> dict[str, Any]:
        """Convert to a mapping of field names to values."""
        return asdict(self)

    @classmethod
    def from_json(cls: type[ConfigT], entries: Any) -> ConfigT:
        """Build a config from a mapping as `to_json` returns it; raise a ValueError if names or values are invalid."""
        names = {entry.name for entry in fields(cls)}
        raise_unless(isinstance(entries, dict) and entries.keys() == names, f"entries other than {sorted(names)}")
        return cls(**entries)


def raise_unless(condition: bool, message: str) -> None:
    """Raise a ValueError with the message ``message`` if the condition is false."""
    if not condition:
        raise ValueError(message)


def require_finite(name: str, tensor: Tensor, *, allow_infinity: bool = False) -> None:
    """Raise a ValueError for NaN, infinity unless ``allow_infinity``, or bytes other than 0 and 1 in a bool tensor."""
    if tensor.dtype == torch.bool:
        raise_unless(bool((tensor.view(torch.uint8) <= 1).all()), f"a tensor {name} that is not of yes and no")
    finite = tensor > -torch.inf if allow_infinity else torch.isfinite(tensor)
    raise_unless(bool(finite.all()), f"a tensor {name} that is not finite")


def validate_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    prefix: str = "",
    infinite_tensors: frozenset[str] = frozenset(),
) -> None:
    """Raise a ValueError unless tensors have the names, shapes and types of ``expected``, and finite values.

    Tensors with the names ``infinite_tensors`` may hold positive infinities. ``prefix`` precedes names in messages.
    """
    for name, reference in expected.items():
        raise_unless(name in tensors, f"no tensor {prefix}{name}")
        tensor = tensors[name]
        same_type = tensor.shape == reference.shape and tensor.dtype == reference.dtype
        raise_unless(same_type, f"a tensor {prefix}{name} of another shape or type")
        require_finite(prefix + name, tensor, allow_infinity=name in infinite_tensors)
    raise_unless(len(tensors) == len(expected), "tensors that belong to no part of the network")


class UntrustedComponent:
    """The JSON entries and tensors of one component of an untrusted model file; each is validated when it is read.

    Args:
        description: Parsed JSON, which should be a mapping.
        tensors: The tensors of the file by name, on the CPU. The method `pop` removes a tensor.
        prefix: Prefix of the names of the component's tensors.

    All methods raise a ValueError if an entry or a tensor is missing or invalid.
    """

    def __init__(self, description: Any, tensors: dict[str, Tensor], prefix: str = "") -> None:
        self.description, self.tensors, self.prefix = description, tensors, prefix

    def get_entry(self, name: str, entry_type: type) -> Any:
        """Get the entry ``name`` of the description, whose type must be exactly ``entry_type``, such as int or str."""
        usable = isinstance(self.description, dict) and type(self.description.get(name)) is entry_type
        raise_unless(usable, f"no usable entry {name}")
        return self.description[name]

    def get_int(self, name: str, high: int, low: int = 0) -> int:
        """Get the entry ``name``, which must be an int in [low, high]."""
        value: int = self.get_entry(name, int)
        raise_unless(low <= value <= high, f"an entry {name} out of range")
        return value

    def get_float(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Get the entry ``name``, which must be a finite float in [low, high]."""
        value: float = self.get_entry(name, float)
        raise_unless(abs(value) < math.inf and low <= value <= high, f"an entry {name} out of range")
        return value

    def get_strings(self, name: str) -> tuple[str, ...]:
        """Get the entry ``name``, which must be a list of distinct strings."""
        values = self.get_entry(name, list)
        distinct = all(type(value) is str for value in values) and len(set(values)) == len(values)
        raise_unless(distinct, f"no usable entry {name}")
        return tuple(values)

    def pop_tensor(self, name: str, *shape: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Remove a tensor from ``tensors`` and return it; it must be finite and of the given shape and type.

        A None in the shape allows any size.
        """
        name = self.prefix + name
        raise_unless(name in self.tensors, f"no tensor {name}")
        tensor = self.tensors.pop(name)
        same_shape = tensor.ndim == len(shape) and all(
            required in {None, size} for size, required in zip(tensor.shape, shape, strict=True)
        )
        raise_unless(same_shape and tensor.dtype == dtype, f"a tensor {name} of another shape or type")
        require_finite(name, tensor)
        return tensor
