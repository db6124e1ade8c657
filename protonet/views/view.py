"""Interfaces of views, which are feature maps whose outputs are concatenated to the embedding.

Each file of this package defines three classes:

- A *spec* (`ViewSpec`) is a frozen dataclass of hyperparameters. ``spec.fit(rows, source)`` returns a fitted view.
- A *view* (`View`) is a module that maps rows to its part of the embedding. Its `Config` holds the sizes from which the
  module is built again before ``load_state_dict`` restores its buffers.
- A *family* (`protonet.views.evaluation.ViewFamily`) yields the specs that model selection evaluates.

A new family is one file with these three classes, and one line in `protonet.views.VIEW_FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protonet.views.config import Config, bounded_field, check_tensors, expect
from protonet.views.distances import row_matmul

Array = NDArray[Any]

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Labelled rows that a view is fitted to."""

    features: Tensor  #: (n, dim) float32, of about unit scale.
    labels: Tensor  #: (n,) int64 in [0, num_classes).
    num_classes: int  #: Number of classes.
    _: KW_ONLY
    shifts: tuple[int, ...] = (0,)
    """Offsets of the shifted copies that shifted views are fitted to, 0 first; see `protonet.views.shifts`."""
    width: int = 0  #: Pixels per line of an image, or length of a series; 0 if the order of features has no meaning.
    seed: int = 0  #: Seed of initial weights and training episodes.
    deadline: float = math.inf  #: Value of ``time.monotonic()`` after which training takes no further step.
    weights: Tensor | None = None  #: (n,) float64, > 0: sample weights; None for equal weights.
    groups: Tensor | None = None  #: (n,) int64: rows of one group are held out together; None for no groups.
    blocks: Tensor | None = None
    """(dim,) int64, ascending from 0: the table column that each feature encodes. The features of one column, such as
    its one-hot categories, are scaled together. None if each feature is a column."""
    is_class_name: Tensor | None = None
    """(n,) bool: whether a row is the embedded name of a class, which is fitted to but never held out."""
    sample_scale: float = 1.0  #: Number of original samples that a row of weight 1 represents; see `sample_counts`.
    selected: float = 1.0  #: Number of rows as a fraction of all training rows; below 1 for the rows of a fold.

    @property
    def sample_counts(self) -> Tensor:
        """The number (n,) float64 of original samples that each row represents, since equal rows are stored once."""
        ones = torch.ones_like(self.labels, dtype=torch.float64)
        return self.sample_scale * (ones if self.weights is None else self.weights)

    @property
    def class_balanced_weights(self) -> Tensor | None:
        """The weights (n,) float64, scaled to a mean of 1 within each class; None for equal weights.

        Views are fitted with these, since prototypes treat all classes alike. The total weight of a class matters to
        the evaluation of a view only.
        """
        if self.weights is None:
            return None
        counts = torch.bincount(self.labels)
        class_weights = torch.bincount(self.labels, self.weights)
        return self.weights * (counts / class_weights)[self.labels]

    def to(self, device: torch.device) -> TrainingRows:
        """Move the rows to a device."""
        tensors: Any = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def select(self, indices: Tensor) -> TrainingRows:
        """Select rows by indices (m,) int64 or by a mask (n,) bool."""
        per_row = {name: getattr(self, name) for name in ("weights", "groups", "is_class_name")}
        per_row = {name: None if value is None else value[indices] for name, value in per_row.items()}
        labels = self.labels[indices]
        selected = self.selected * len(labels) / max(1, len(self.labels))
        return replace(self, features=self.features[indices], labels=labels, selected=selected, **per_row)

    def scale_limit(self, limit: int) -> int:
        """Scale a maximum number of rows of a view by `selected`, to at least 1.

        Some views store rows and embed these near their class, so that prototypes depend on the fraction of stored
        rows. The fraction must be the same in a fold and in the final view: otherwise, the temperature and the offsets
        that are fitted to held-out rows do not suit the final view.
        """
        return max(1, round(self.selected * limit))

    def select_columns(self, start: int, stop: int) -> TrainingRows:
        """Select the features in [start, stop)."""
        blocks = None if self.blocks is None else self.blocks[start:stop] - self.blocks[start]
        return replace(self, features=self.features[:, start:stop], blocks=blocks)


def select_evenly(n: int, count: int) -> Tensor:
    """Select at most ``count`` of the indices 0 to n - 1, evenly spaced: (min(n, count),) int64."""
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).round().long()


def require_linear_map(source: Source | None) -> LinearMap:
    """Return a source that is a `LinearMap`; raise a ValueError for any other object."""
    if not isinstance(source, LinearMap):
        raise ValueError("a view without a linear map")
    return source


class Graph(Protocol):
    """A builder of an ONNX graph, implemented by `protonet.files.export`, whose methods return names of values."""

    def add(self, operator: str, *inputs: str | Array | np.generic, output: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output; arrays among its inputs become constants."""

    def constant(self, value: Array | np.generic) -> str:
        """Add a constant and return its name."""

    def cast(self, value: str, dtype: str) -> str:
        """Convert a value to "FLOAT", "DOUBLE" or "INT64"."""

    def pad(self, rows: str, columns: int, value: float) -> str:
        """Append constant columns to rows; return ``rows`` itself if there are none to append."""

    def l1_distances(self, z: str, landmarks: Array) -> str:
        """Add the L1 distances (n, units) of rows ``z`` (n, dim) to landmarks (units, dim)."""

    def look_up(self, texts: str, keys: Sequence[str], values: Sequence[int], default: int) -> str:
        """Replace each text by the INT64 value of the equal key, or by ``default`` if no key is equal."""

    def array(self, tensor: Tensor) -> Array:
        """Convert a tensor of any device to an array."""


class Component(nn.Module):
    """A module whose config determines the names, shapes and types of its buffers.

    Without ``tensors`` all buffers are zero until ``load_state_dict`` fills them. Constants that can be computed from
    the buffers are not part of the state: `derive_constants` computes them.

    Args:
        config: An instance of ``config_type`` of the subclass.
        tensors: The buffers by name, in any memory layout; copied.
    """

    kind: ClassVar[str] = ""  #: The name of the class in model files.
    config_type: ClassVar[type[Config]] = Config
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  #: Types of the buffers that are not float32.
    infinite: ClassVar[frozenset[str]] = frozenset()  #: Buffers that may hold positive infinities.
    config: Config

    def __init__(self, config: Config, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        for name, shape in self.shapes().items():
            dtype = self.dtypes.get(name, torch.float32)
            # Rounding of matrix products depends on the memory layout: one layout gives the same digits after loading.
            value = torch.zeros(shape, dtype=dtype) if tensors is None else _copy(tensors[name], dtype)
            self.register_buffer(name, value)
        if tensors is not None:
            self.derive_constants()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        return {}

    def derive_constants(self) -> None:
        """Compute constants from the buffers; called after the buffers are set or loaded."""

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Validate the tensors of a file before they are loaded; subclasses also check the ranges of indices.

        Args:
            tensors: The tensors by name, on the CPU.
            prefix: Prefix of the names in error messages.

        Raises:
            ValueError: A name, shape or type differs from the state's, or a value is not finite.
        """
        check_tensors(tensors, self.state_dict(), prefix, self.infinite)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.derive_constants()


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor to contiguous memory, in a dtype."""
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


class Source(Component):
    """A map of the features that several views take as input: the encoder evaluates it once for all of them."""

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add the map of a value with the name ``x`` to an ONNX graph; return the name of its output."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearMapConfig(Config):
    """Sizes of a `LinearMap`."""

    input_dim: int = bounded_field()  #: Number of all features.
    dim: int = bounded_field()  #: Number of features that are read.
    rank: int = bounded_field(0)  #: Rank of the low-rank part.
    first: int = bounded_field(0)  #: Index of the first feature that is read.

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
        """Compute the shape of each buffer by name."""
        dim, rank = self.config.dim, self.config.rank
        return {"shift": (dim,), "gain": (dim,), "basis": (dim, rank), "coefficient": (rank,)}

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, input_dim) to (n, dim)."""
        config = self.config
        if config.dim < config.input_dim:
            x = x[:, config.first : config.first + config.dim]
        centred = x - self.shift  # (n, dim)
        if not config.rank:
            return centred.mul_(self.gain)
        return centred * self.gain + row_matmul(row_matmul(centred, self.basis) * self.coefficient, self.basis.T)

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add the affine map of a value with the name ``x`` to an ONNX graph; return the name of its output."""
        config = self.config
        if config.dim < config.input_dim:
            start, stop, axis = (np.array([value]) for value in (config.first, config.first + config.dim, 1))
            x = graph.add("Slice", x, start, stop, axis)
        centred = graph.add("Sub", x, graph.array(self.shift))
        z = graph.add("Mul", centred, graph.array(self.gain))
        if not config.rank:
            return z
        low = graph.add("MatMul", centred, graph.array(self.basis))
        low = graph.add("Mul", low, graph.array(self.coefficient))
        return graph.add("Add", z, graph.add("MatMul", low, graph.array(self.basis.T)))


class View(Component):
    """A fitted view: a map of its input rows to one or more parts of the embedding.

    Args:
        config: An instance of ``config_type`` of the subclass.
        source: Maps features (n, input_dim) to the input of the view; None if the view reads the features. Views with
            the same input share one source, which the encoder holds and evaluates once.
        tensors: The buffers by name; None for zeros.

    Raises:
        ValueError: The source is not an instance of ``source_type``.
    """

    source_type: ClassVar[type[Source] | None] = None  #: The class of the source.
    source: Source | None

    def __init__(
        self, config: Config, source: Source | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        expected_type = self.source_type or type(None)
        expect(type(source) is expected_type, f"a view of kind {self.kind} with another source")
        self.__dict__["source"] = source  # not a submodule: its state is stored once, by the encoder
        super().__init__(config, tensors)

    @property
    def input_dim(self) -> int:
        """The number of features of the rows that the network classifies."""
        config: Any = self.config if self.source is None else self.source.config
        return int(config.input_dim)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The width of each part of the output, which the encoder normalizes; by default, one score for each class."""
        config: Any = self.config
        return (int(config.classes),)

    def forward(self, z: Tensor) -> Tensor:
        """Map input rows (n, dim) to the concatenated parts (n, sum of ``sizes``)."""
        raise NotImplementedError

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the view to an ONNX graph; return the names of the values of its parts.

        Args:
            graph: The graph to which nodes are added.
            rows: The name of the value with the input rows of the view.
        """
        raise NotImplementedError

    def flops(self) -> float:
        """Estimate the prediction time per row without the source, as a number of multiplications; 0 for fast views."""
        return 0.0


class ViewSpec(Protocol):
    """The hyperparameters of a view: a frozen dataclass."""

    @property
    def name(self) -> str:
        """The name in reports."""

    @property
    def traits(self) -> frozenset[str]:
        """A subset of `protonet.fit.prior.TRAITS`, from which the learned prior predicts the weight of a view."""

    @property
    def source(self) -> ViewSpec | None:
        """The spec of the view with the same source, or None if the view reads the features."""

    @property
    def shifted(self) -> bool:
        """Whether the view is also fitted to shifted copies of the rows."""

    @property
    def trained(self) -> bool:
        """Whether the view is trained by gradient descent; a network has at most one such view."""

    def fit(self, rows: TrainingRows, source: Source | None) -> View:
        """Fit a view to labelled rows.

        Args:
            rows: The training rows.
            source: The source of the view ``self.source``, fitted to the same rows; None if ``self.source`` is None.
        """


def order_columns(x: Tensor, blocks: Tensor) -> Tensor:
    """Compute a canonical order (dim,) of features, which does not depend on their original order and units.

    Args:
        x: (n, dim) rows in canonical order.
        blocks: (dim,) int64, ascending: the column of each feature. The features of a column stay together.
    """
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = x.double() - x.double().mean(dim=0)
    key = noise @ centred / torch.linalg.vector_norm(centred, dim=0).clamp_min(1e-30)
    block_key = key.new_full((int(blocks[-1]) + 1,), -math.inf).scatter_reduce_(0, blocks, key, "amax")
    by_key = key.argsort(stable=True)
    by_block = by_key[blocks[by_key].argsort(stable=True)]
    order: Tensor = by_block[block_key[blocks[by_block]].argsort(stable=True)]
    return order
