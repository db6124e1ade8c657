"""The protocol of views: all that a kind of view has to say for itself.

A *specification* is a frozen dataclass: what a view is made of, before it has seen a row. Fitted to rows it gives a
*view*, a module that maps rows to its part of the embedding; the view's `Config` holds the sizes from which the module
can be built again, so that ``load_state_dict`` restores it. A *kind* (`protonet.views.judge.Kind`) tells the search
which specifications to try. A new kind is one file with these three, and one line in `protonet.views.KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protonet.views.config import Config, check_tensors, expect, size
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


def need_map(source: Source | None) -> LinearMap:
    """Return the source of a view that has to read a linear map; raise a ValueError if it is none."""
    if not isinstance(source, LinearMap):
        raise ValueError("a view without a linear map")
    return source


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


class Component(nn.Module):
    """A module whose state has the names, shapes and types that follow from a config.

    Without ``tensors`` all buffers are zero until ``load_state_dict`` fills them. What can be computed from them is not
    part of the state: `derive` computes it.

    Args:
        config: Of the type ``config_type`` of the subclass.
        tensors: The buffers by name, in any layout; copied.
    """

    kind: ClassVar[str] = ""  #: The name in model files.
    config_type: ClassVar[type[Config]] = Config
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  #: Of the buffers that are not float32.
    infinite: ClassVar[frozenset[str]] = frozenset()  #: Buffers that may hold positive infinities.
    config: Config

    def __init__(self, config: Config, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        for name, shape in self.shapes().items():
            dtype = self.dtypes.get(name, torch.float32)
            # The layout decides how products round: one layout gives the same digits after loading.
            value = torch.zeros(shape, dtype=dtype) if tensors is None else _copy(tensors[name], dtype)
            self.register_buffer(name, value)
        if tensors is not None:
            self.derive()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        return {}

    def derive(self) -> None:
        """Compute what follows from the buffers; called once they are given or loaded."""

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Check tensors that are not trusted before they are loaded. Subclasses add the ranges of indices.

        Args:
            tensors: By name, on the CPU.
            prefix: Of the names in messages.

        Raises:
            ValueError: Other names, shapes or types than the state's, or values that are not finite.
        """
        check_tensors(tensors, self.state_dict(), prefix, self.infinite)

    def products(self) -> list[tuple[int, int]]:
        """Return the shapes (in, out) of the matrices that one row is multiplied with."""
        return []

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.derive()


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy."""
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


class Source(Component):
    """What views may read in place of the features: the encoder evaluates it once for all of them."""

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add what is done to the value ``x`` to an ONNX graph, and return the name of what it gives."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearMapConfig(Config):
    """Features, the first column that is read and how many are, and the rank."""

    input_dim: int = size()
    dim: int = size()
    rank: int = size(0)
    first: int = size(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.first + self.dim <= self.input_dim, "a map of columns that are not there")


class LinearMap(Source):
    """The affine map ``z = gain * (x - shift) + ((x - shift) @ basis * coefficient) @ basis.T``.

    Buffers: ``shift`` (dim,) is subtracted; ``gain`` (dim,) is the diagonal part; ``basis`` (dim, rank) has orthonormal
    columns, rank >= 0; ``coefficient`` (rank,) is added to the diagonal along each column.
    """

    kind = "linear"
    config_type = LinearMapConfig
    config: LinearMapConfig
    shift: Tensor
    gain: Tensor
    basis: Tensor
    coefficient: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        dim, rank = self.config.dim, self.config.rank
        return {"shift": (dim,), "gain": (dim,), "basis": (dim, rank), "coefficient": (rank,)}

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, input_dim) to (n, dim)."""
        config = self.config
        some = config.dim < config.input_dim
        centred = (x[:, config.first : config.first + config.dim] if some else x) - self.shift  # (n, dim)
        if not config.rank:
            return centred.mul_(self.gain)
        return centred * self.gain + row_matmul(row_matmul(centred, self.basis) * self.coefficient, self.basis.T)

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add the map."""
        config = self.config
        if config.dim < config.input_dim:
            x = graph.add("Slice", x, *(np.array([each]) for each in (config.first, config.first + config.dim, 1)))
        centred = graph.add("Sub", x, graph.array(self.shift))
        z = graph.add("Mul", centred, graph.array(self.gain))
        if not config.rank:
            return z
        low = graph.add("MatMul", centred, graph.array(self.basis))
        low = graph.add("Mul", low, graph.array(self.coefficient))
        return graph.add("Add", z, graph.add("MatMul", low, graph.array(self.basis.T)))

    def products(self) -> list[tuple[int, int]]:
        """Return the shapes (in, out) of the matrices that a row is multiplied with."""
        dim, rank = self.config.dim, self.config.rank
        return [(dim, rank), (rank, dim)] if rank else []


class View(Component):
    """A fitted view: what it reads goes in, its part of the embedding comes out.

    Args:
        config: Of the type ``config_type`` of the subclass.
        source: Maps features (n, input_dim) to the rows that the view reads; None for the features themselves. Views
            that read the same share one module, which the encoder holds and evaluates once.
        tensors: The buffers by name; None for zeros.

    Raises:
        ValueError: The source is not of the class ``reads``.
    """

    reads: ClassVar[type[Source] | None] = None  #: The class of the source.
    source: Source | None

    def __init__(
        self, config: Config, source: Source | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        expect(type(source) is (self.reads or type(None)), f"a view of kind {self.kind} with another source")
        self.__dict__["source"] = source  # not registered: its state is the encoder's, once for all views
        super().__init__(config, tensors)

    @property
    def input_dim(self) -> int:
        """Features of the rows that the network reads; that of the source, unless the config says it."""
        config: Any = self.config if self.source is None else self.source.config
        return int(config.input_dim)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The widths of the view's parts, most have one; the encoder brings each of them to a norm of its own."""
        raise NotImplementedError

    def forward(self, z: Tensor) -> Tensor:
        """Map the rows that the view reads (n, dim) to its parts, side by side: (n, sum of ``sizes``)."""
        raise NotImplementedError

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the view to an ONNX graph, and return the name of each of its parts' values.

        Args:
            graph: Where to.
            rows: The value that holds the rows that the view reads.
        """
        raise NotImplementedError

    def cost(self) -> float:
        """Return about how many multiplications take as long as one row does, without the source.

        A kind that knows better tells the judge so itself.
        """
        return float(sum(inputs * outputs for inputs, outputs in self.products()))


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
