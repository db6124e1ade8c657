"""Configs and tensors of files that are not trusted: whatever is read is checked, and a ValueError says what is odd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

ConfigT = TypeVar("ConfigT", bound="Config")


def number(low: float, high: float) -> Any:
    """Declare a field of a `Config` that lies in [low, high]."""
    return field(metadata={"range": (low, high)})


def size(low: int = 1, high: int = 2**31) -> Any:
    """Declare a field of a `Config` that is a size in [low, high]."""
    return number(low, high)


@dataclass(frozen=True)
class Config:
    """Sizes and settings that a module is built from: int, float and bool fields, which JSON can hold.

    Raises:
        ValueError: A value of another type than its field's, not finite or out of range; the reason in a few words.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value, (low, high) = getattr(self, each.name), each.metadata.get("range", (-math.inf, math.inf))
            expect(type(value).__name__ == each.type, f"no usable entry {each.name}")
            expect(math.isfinite(value) and low <= value <= high, f"an entry {each.name} out of range")

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls: type[ConfigT], entries: Any) -> ConfigT:
        """Return the config that `to_json` wrote.

        Raises:
            ValueError: No mapping, other names than the fields', or values that do not fit.
        """
        names = {each.name for each in fields(cls)}
        expect(isinstance(entries, dict) and entries.keys() == names, f"entries other than {sorted(names)}")
        return cls(**entries)


def expect(holds: bool, otherwise: str) -> None:
    """Raise a ValueError that says what there is otherwise."""
    if not holds:
        raise ValueError(otherwise)


def expect_sound(name: str, tensor: Tensor, *, infinite: bool = False) -> None:
    """Raise a ValueError where a tensor has NaN, an infinity, or a bool beyond 0 and 1."""
    if tensor.dtype == torch.bool:
        expect(bool((tensor.view(torch.uint8) <= 1).all()), f"a tensor {name} that is not of yes and no")
    finite = tensor > -torch.inf if infinite else torch.isfinite(tensor)
    expect(bool(finite.all()), f"a tensor {name} that is not finite")


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    prefix: str = "",
    infinite: frozenset[str] = frozenset(),
) -> None:
    """Raise a ValueError unless tensors have the names, shapes and types of others, and finite values."""
    for name, like in expected.items():
        expect(name in tensors, f"no tensor {prefix}{name}")
        tensor = tensors[name]
        same = tensor.shape == like.shape and tensor.dtype == like.dtype
        expect(same, f"a tensor {prefix}{name} of another shape or type")
        expect_sound(prefix + name, tensor, infinite=name in infinite)
    expect(len(tensors) == len(expected), "tensors that belong to no part of the network")


class Stored:
    """A part of a model file, which may say anything: whatever is taken from it is checked.

    Args:
        description: What should be a mapping, from JSON.
        tensors: By name, on the CPU. What is taken is removed.
        prefix: What the names of this part's tensors begin with.
    """

    def __init__(self, description: Any, tensors: dict[str, Tensor], prefix: str = "") -> None:
        self.description, self.tensors, self.prefix = description, tensors, prefix

    def entry(self, name: str, kind: type) -> Any:
        """Return an entry of the description, of this very type."""
        usable = isinstance(self.description, dict) and type(self.description.get(name)) is kind
        expect(usable, f"no usable entry {name}")
        return self.description[name]

    def whole(self, name: str, high: int, low: int = 0) -> int:
        """Return an entry that is a whole number in [low, high]."""
        number: int = self.entry(name, int)
        expect(low <= number <= high, f"an entry {name} out of range")
        return number

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Return an entry that is a finite float in [low, high]."""
        number: float = self.entry(name, float)
        expect(math.isfinite(number) and low <= number <= high, f"an entry {name} out of range")
        return number

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return an entry that is a list of so many finite floats."""
        numbers = self.entry(name, list)
        sound = all(type(each) is float and math.isfinite(each) for each in numbers) and len(numbers) == count
        expect(sound, f"no usable entry {name}")
        return tuple(numbers)

    def names(self, name: str) -> tuple[str, ...]:
        """Return an entry that is a list of different strings."""
        names = self.entry(name, list)
        expect(all(type(each) is str for each in names) and len(set(names)) == len(names), f"no usable entry {name}")
        return tuple(names)

    def take(self, name: str, *shape: int | None, dtype: torch.dtype = torch.float32, infinite: bool = False) -> Tensor:
        """Take a tensor out.

        Args:
            name: Without the prefix.
            shape: What it must have; None for any size.
            dtype: What it must have.
            infinite: Whether it may hold positive infinities.
        """
        name = self.prefix + name
        expect(name in self.tensors, f"no tensor {name}")
        tensor = self.tensors.pop(name)
        fits = tensor.ndim == len(shape) and all(
            asked in {None, size} for size, asked in zip(tensor.shape, shape, strict=True)
        )
        expect(fits and tensor.dtype == dtype, f"a tensor {name} of another shape or type")
        expect_sound(name, tensor, infinite=infinite)
        return tensor
