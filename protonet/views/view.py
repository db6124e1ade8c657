"""The protocol of views: all that a kind of view has to say for itself.

A *specification* is a frozen dataclass: what a view is made of, before it has seen a row. Fitted to rows it gives a
*view*, a module that maps rows to its part of the embedding. A *kind* (`protonet.views.judge.Kind`) tells the search
which specifications to try. A new kind is one file with these three, and one line in `protonet.views.KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protonet.views.distances import row_matmul

Array = NDArray[Any]


class Rows(NamedTuple):
    """Labelled rows that a view is fitted to."""

    features: Tensor  #: (n, dim) float32, of about unit scale.
    labels: Tensor  #: (n,) int64 in [0, num_classes).
    num_classes: int  #: Number of classes.
    shifts: tuple[int, ...] = (0,)
    """Offsets of the copies that shifted views are fitted to, 0 first; see `protonet.views.shifts`."""
    width: int = 0  #: Features of a line of a picture, or of a whole series; 0 where they are in no order.
    seed: int = 0  #: Of first weights and episodes.
    deadline: float = math.inf  #: ``time.monotonic()`` after which training takes no further step.
    weights: Tensor | None = None
    """(n,) float64, > 0: how much each row counts next to the others; None for all alike."""
    groups: Tensor | None = None  #: (n,) int64: rows of one group are held out together; None for each alone.
    blocks: Tensor | None = None
    """(dim,) int64, ascending from 0: features of one block tell of one thing, such as the categories of a column, and
    count as one where features are made alike; None for each alone."""
    described: Tensor | None = None
    """(n,) bool: rows that are no samples, but what a class is called; they are fitted to, and never judged."""
    unit: float = 1.0  #: How many of the rows that came a weight of 1 stands for.

    @property
    def times(self) -> Tensor:
        """How many of the rows that came each one stands for, (n,) float64."""
        ones = torch.ones_like(self.labels, dtype=torch.float64)
        return self.unit * (ones if self.weights is None else self.weights)

    @property
    def shares(self) -> Tensor | None:
        """The weights (n,) float64 at a mean of 1 within each class; None where all are one.

        What views are fitted with: prototypes make the classes alike. What a whole class weighs is for the judge.
        """
        if self.weights is None:
            return None
        counts, sums = (torch.bincount(self.labels, each) for each in (None, self.weights))
        return self.weights * (counts / sums)[self.labels]

    def to(self, device: torch.device) -> Rows:
        """Return the rows on a device."""
        tensors: Any = {name: each.to(device) for name, each in self._asdict().items() if isinstance(each, Tensor)}
        return self._replace(**tensors)

    def take(self, places: Tensor) -> Rows:
        """Return some of the rows, given their numbers (m,) int64 or which they are (n,) bool."""
        x, labels = self.features[places], self.labels[places]
        more = {name: getattr(self, name) for name in ("weights", "groups", "described")}
        more = {name: None if each is None else each[places] for name, each in more.items()}
        return self._replace(features=x, labels=labels, **more)

    def take_columns(self, first: int, stop: int) -> Rows:
        """Return the rows with some neighbouring features alone."""
        blocks = None if self.blocks is None else self.blocks[first:stop] - self.blocks[first]
        return self._replace(features=self.features[:, first:stop], blocks=blocks)


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


def need_map(source: Source | None) -> LinearMap:
    """Return the source of a view that has to read a linear map; raise a ValueError if it is none."""
    if not isinstance(source, LinearMap):
        raise ValueError("a view without a linear map")
    return source


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


class Graph(Protocol):
    """An ONNX graph that grows, node after node; `protonet.files.onnx` has it. Values go by their names."""

    def add(self, operator: str, *inputs: str | Array | np.generic, output: str = "", **attributes: Any) -> str:
        """Add a node and return its output's name; arrays among its inputs become constants."""

    def constant(self, value: Array | np.generic) -> str:
        """Add a constant and return its name."""

    def cast(self, value: str, dtype: str) -> str:
        """Convert a value to "FLOAT", "DOUBLE" or "INT64"."""

    def pad(self, rows: str, columns: int, value: float) -> str:
        """Add constant columns to rows, if any, and return what they are then."""

    def city_blocks(self, z: str, landmarks: Array) -> str:
        """Add the sums of absolute differences (n, units) of rows and landmarks (units, dim)."""

    def look_up(self, texts: str, keys: Sequence[str], values: Sequence[int], otherwise: int) -> str:
        """Add the value, INT64, of each of some texts among the keys, or another one for texts that are none."""

    def array(self, tensor: Tensor) -> Array:
        """Return a tensor of any device as an array."""


class Source(nn.Module):
    """What views may read in place of the features: the encoder evaluates it once for all of them."""

    kind: ClassVar[str]  #: The name in model files.

    def describe(self) -> dict[str, Any]:
        """Return what the tensors do not tell, as JSON can hold it."""
        return {}

    @classmethod
    def restore(cls, stored: Stored, input_dim: int) -> Source:
        """Build the source again from tensors that may be anything, for ``input_dim`` features; else a ValueError."""
        raise NotImplementedError

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add what is done to the value ``x`` to an ONNX graph, and return the name of what it gives."""
        raise NotImplementedError

    def products(self) -> list[tuple[int, int]]:
        """Return the shapes (in, out) of the matrices that a row is multiplied with."""
        return []


class LinearMap(Source):
    """The affine map ``z = gain * (x - shift) + ((x - shift) @ basis * coefficient) @ basis.T``.

    Args:
        shift: (dim,) what is subtracted.
        gain: (dim,) the diagonal part.
        basis: (dim, rank) orthonormal columns; rank may be 0.
        coefficient: (rank,) what is added to the diagonal along each column.
        first: The first of the ``dim`` columns that are read; None where these are all that there are.
    """

    kind = "linear"
    shift: Tensor
    gain: Tensor
    basis: Tensor
    coefficient: Tensor

    def __init__(
        self, shift: Tensor, gain: Tensor, basis: Tensor, coefficient: Tensor, first: int | None = None
    ) -> None:
        super().__init__()
        self.dim = len(shift)
        for name, value in (("shift", shift), ("gain", gain), ("basis", basis), ("coefficient", coefficient)):
            self.register_buffer(name, value.to(torch.float32).clone())
        self.columns = None if first is None else slice(first, first + self.dim)
        if first is not None:
            self.register_buffer("first", torch.tensor(first, device=shift.device))

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, input_dim) to (n, dim)."""
        centred = (x if self.columns is None else x[:, self.columns]) - self.shift  # (n, dim)
        if not self.basis.shape[1]:
            return centred.mul_(self.gain)
        return centred * self.gain + row_matmul(row_matmul(centred, self.basis) * self.coefficient, self.basis.T)

    @classmethod
    def restore(cls, stored: Stored, input_dim: int) -> LinearMap:
        """Build the map again."""
        first = int(stored.take("first", dtype=torch.int64)) if stored.prefix + "first" in stored.tensors else None
        shift = stored.take("shift", input_dim if first is None else None)
        expect(first is None or 0 <= first <= input_dim - len(shift), "a map of columns that are not there")
        coefficient, gain = stored.take("coefficient", None), stored.take("gain", len(shift))
        return cls(shift, gain, stored.take("basis", len(shift), len(coefficient)), coefficient, first)

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add the map."""
        if self.columns is not None:
            ends = (np.array([each]) for each in (self.columns.start, self.columns.stop, 1))
            x = graph.add("Slice", x, *ends)
        centred = graph.add("Sub", x, graph.array(self.shift))
        z = graph.add("Mul", centred, graph.array(self.gain))
        if not self.basis.shape[1]:
            return z
        low = graph.add("MatMul", centred, graph.array(self.basis))
        low = graph.add("Mul", low, graph.array(self.coefficient))
        return graph.add("Add", z, graph.add("MatMul", low, graph.array(self.basis.T)))

    def products(self) -> list[tuple[int, int]]:
        """Return the shapes (in, out) of the matrices that a row is multiplied with."""
        dim, rank = self.basis.shape
        return [(dim, rank), (rank, dim)] if rank else []


class View(nn.Module):
    """A fitted view: what it reads goes in, its part of the embedding comes out.

    Args:
        source: Maps features (n, input_dim) to the rows that the view reads; None for the features themselves. Views
            that read the same share one module, which the encoder evaluates once.
        sizes: The widths of the view's parts; the encoder brings each of them to a norm of its own. Most have one.
    """

    kind: ClassVar[str]  #: The kind's name in model files.
    source: Source | None

    def __init__(self, source: Source | None, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.source, self.sizes = source, sizes

    def forward(self, z: Tensor) -> Tensor:
        """Map the rows that the view reads (n, dim) to its parts, side by side: (n, sum of ``sizes``)."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return what the view's own tensors do not tell, as JSON can hold it."""
        return {}

    @classmethod
    def restore(cls, stored: Stored, source: Source | None, input_dim: int) -> View:
        """Build a view again from a description and tensors that may say anything.

        Args:
            stored: What a file holds of the view: `describe`'s entries, and tensors named as in ``state_dict``.
            source: As in the constructor.
            input_dim: Columns of the features.

        Raises:
            ValueError: They are no view; the reason in a few words.
        """
        raise NotImplementedError

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the view to an ONNX graph, and return the name of each of its parts' values.

        Args:
            graph: Where to.
            rows: The value that holds the rows that the view reads.
        """
        raise NotImplementedError

    def products(self) -> list[tuple[int, int]]:
        """Return the shapes (in, out) of all matrices that one row is multiplied with: what the view costs."""
        return []

    def cost(self) -> float:
        """Return about how many multiplications take as long as one row does, without the source.

        A kind that knows better tells the judge so itself.
        """
        return float(sum(inputs * outputs for inputs, outputs in self.products()))

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the view's parameters and buffers by name, without those of its source."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("source.")}


class Specification(Protocol):
    """What a view is made of: a frozen dataclass of settings."""

    @property
    def name(self) -> str:
        """What people read."""

    @property
    def traits(self) -> frozenset[str]:
        """What it is, of `protonet.fit.prior.TRAITS`: the learned prior weighs a view by these, and by what it does."""

    @property
    def source(self) -> Specification | None:
        """The view whose linear map is read, or None for the features."""

    @property
    def shifted(self) -> bool:
        """Whether it is fitted to shifted copies of the rows, too."""

    @property
    def trained(self) -> bool:
        """Whether it is trained by gradient: of such views, one at most is switched on."""

    def fit(self, rows: Rows, source: Source | None) -> View:
        """Fit to labelled rows.

        Args:
            rows: The rows.
            source: The map of the view of ``source``, fitted to the same rows; None if there is none.
        """
