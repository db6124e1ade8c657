"""Interfaces of views: feature maps whose outputs are concatenated to the embedding.

Each file of this package defines three classes:

- A *spec* (`ViewSpec`) is a frozen dataclass of hyperparameters. ``spec.fit(rows, source)`` returns a fitted view.
- A *view* (`View`) is a module that maps rows to its part of the embedding. Its `Config` holds the sizes from which the
  module is built again before ``load_state_dict`` restores its buffers.
- A *family* (`protonet.views.evaluation.ViewFamily`) yields the specs that model selection evaluates.

A new family is one file with these three classes, and one line in `protonet.views.VIEW_FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from protonet.views.columns import ColumnSelection
from protonet.views.config import Config, bounded_field, raise_unless, validate_tensors
from protonet.views.distances import batch_invariant_matmul
from protonet.views.onnx_graph import OnnxGraph

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Labelled rows that a view is fitted to."""

    features: Tensor  #: (n, dim) float32, of about unit scale.
    labels: Tensor  #: (n,) int64 in [0, num_classes).
    num_classes: int  #: Number of classes.
    _: KW_ONLY
    shifts: tuple[int, ...] = (0,)
    """Numbers of features by which the copies of rows are shifted that data augmentation adds, 0 first; see
    `protonet.views.shifts`."""
    line_width: int = 0  #: Pixels per line of an image, or length of a series; 0 if features are neither.
    seed: int = 0  #: Seed of initial weights and training episodes.
    deadline: float = math.inf  #: Value of ``time.monotonic()`` after which training takes no further step.
    weights: Tensor | None = None  #: (n,) float64, > 0: sample weights. If None, they are equal.
    groups: Tensor | None = None  #: (n,) int64: rows of a group are held out together. If None, rows are independent.
    column_indices: Tensor | None = None
    """(dim,) int64, ascending from 0: the table column that each feature encodes. The features of one column, such as
    its one-hot categories, are scaled together. None if each feature is a column."""
    columns: ColumnSelection | None = None
    """The features that views read, and their signs; None if views read all of them. See `for_views`."""
    is_class_name: Tensor | None = None
    """(n,) bool: whether a row is the embedding of a class name. Views are fitted to such rows too, but they are never
    held out. If None, no row is."""
    sample_scale: float = 1.0  #: Number of original samples that a row of weight 1 represents; see `sample_counts`.
    row_fraction: float = 1.0  #: Number of these rows divided by that of all training rows; below 1 for a fold.

    @property
    def sample_counts(self) -> Tensor:
        """The number of original samples of each row, (n,) float64, since equal samples are stored as one row."""
        ones = torch.ones_like(self.labels, dtype=torch.float64)
        return self.sample_scale * (ones if self.weights is None else self.weights)

    @property
    def class_balanced_weights(self) -> Tensor | None:
        """The sample weights (n,) float64, scaled to a mean of 1 within each class; None if all weights are equal.

        Views are fitted with these weights, since prototypes treat all classes alike. The summed weight of a class
        affects only the evaluation of views.
        """
        if self.weights is None:
            return None
        counts = torch.bincount(self.labels)
        class_weights = torch.bincount(self.labels, self.weights)
        return self.weights * (counts / class_weights)[self.labels]

    def to(self, device: torch.device) -> TrainingRows:
        """Return the rows with all tensors on a device."""
        kinds = Tensor, ColumnSelection
        tensors: Any = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, kinds)}
        return replace(self, **tensors)

    def select(self, indices: Tensor) -> TrainingRows:
        """Return the rows with the given indices (m,) int64, or the rows of a mask (n,) bool."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        per_row: Any = {name: value[indices] for name, value in tensors.items() if name != "column_indices"}
        fraction = self.row_fraction * len(per_row["labels"]) / max(1, len(self.labels))
        return replace(self, **per_row, row_fraction=fraction)

    def scale_row_limit(self, limit: int) -> int:
        """Compute the maximum number of rows that a view may store when it is fitted to these rows, at least 1.

        It is ``limit``, the maximum for all training rows, times ``row_fraction``. A stored row is embedded near
        its class, so prototypes depend on the fraction of stored rows. This fraction must be the same in a fold and in
        the final view: otherwise, a temperature that is fitted to held-out rows would not suit the final view.
        """
        return max(1, round(self.row_fraction * limit))

    def for_views(self) -> TrainingRows:
        """Return the rows with the features that views read, which are those of ``columns``."""
        if self.columns is None:
            return self
        blocks = self.column_indices
        if blocks is not None:
            blocks = blocks[self.columns.indices].unique_consecutive(return_inverse=True)[1]
        return replace(self, features=self.columns.apply(self.features), column_indices=blocks, columns=None)

    def select_features(self, start: int, stop: int) -> TrainingRows:
        """Select the features with an index in [start, stop), of all rows."""
        blocks = None if self.column_indices is None else self.column_indices[start:stop] - self.column_indices[start]
        return replace(self, features=self.features[:, start:stop], column_indices=blocks)


def select_evenly(n: int, count: int) -> Tensor:
    """Compute at most ``count`` evenly spaced indices of n rows: (min(n, count),) int64, ascending."""
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).round().long()


def require_linear_map(source: InputMap | None) -> LinearMap:
    """Return ``source`` itself if it is a `LinearMap`; otherwise raise a ValueError."""
    if not isinstance(source, LinearMap):
        raise ValueError("a view without a linear map")
    return source


class RestorableModule(nn.Module):
    """A module that can be rebuilt from a config and a state dict: the config determines shapes and types of buffers.

    Constants that can be computed from the buffers are not part of the state: `derive_constants` computes them.

    Args:
        config: An instance of ``config_type`` of the subclass.
        tensors: The buffers by name, which are copied. If None, all buffers are zero until ``load_state_dict`` is
            called.
    """

    kind: ClassVar[str] = ""  #: The name of the class in model files.
    config_type: ClassVar[type[Config]] = Config
    buffer_dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  #: Types of the buffers that are not float32.
    infinite_buffers: ClassVar[frozenset[str]] = frozenset()  #: Buffers that may hold positive infinities.
    config: Config

    def __init__(self, config: Config, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        for name, shape in self.buffer_shapes().items():
            dtype = self.buffer_dtypes.get(name, torch.float32)
            # Rounding of matrix products depends on the memory layout: one layout gives the same digits after loading.
            value = torch.zeros(shape, dtype=dtype) if tensors is None else _copy_contiguous(tensors[name], dtype)
            self.register_buffer(name, value)
        if tensors is not None:
            self.derive_constants()

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        return {}

    def derive_constants(self) -> None:
        """Compute the constants that depend on the buffers; called whenever the buffers were set or loaded."""

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Validate tensors of an untrusted file before they are loaded; subclasses also check the ranges of indices.

        Args:
            tensors: The tensors by name, on the CPU.
            prefix: Prefix of the names in error messages.

        Raises:
            ValueError: A name, shape or type differs from the state's, or a value is not finite.
        """
        validate_tensors(tensors, self.state_dict(), prefix, self.infinite_buffers)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.derive_constants()


def _copy_contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a detached copy of a tensor, of the given type and in contiguous memory."""
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


class InputMap(RestorableModule):
    """A feature map whose output several views take as input; the encoder evaluates it once for all these views."""

    def add_to_graph(self, graph: OnnxGraph, x: str) -> str:
        """Add the feature map to an ONNX graph, applied to the value named ``x``; return the name of its output."""
        raise NotImplementedError


#: The largest limit of a linear map that is read from a file.
MAX_LIMIT = 1e6


@dataclass(frozen=True)
class LinearMapConfig(Config):
    """The sizes from which a `LinearMap` is built."""

    input_dim: int = bounded_field()  #: Number of all features.
    dim: int = bounded_field()  #: Number of adjacent features that the map reads.
    rank: int = bounded_field(0)  #: Rank of the low-rank part of the matrix.
    first: int = bounded_field(0)  #: Index of the first feature that the map reads.
    limit: float = bounded_field(0.0, MAX_LIMIT)  #: Outputs are clipped at plus and minus this; if 0, they are not.

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_unless(self.first + self.dim <= self.input_dim, "a map of columns that are not there")


class LinearMap(InputMap):
    """An affine map with a diagonal plus low-rank matrix, the input of linear views and of most other views.

    It computes ``z = gain * (x - shift) + ((x - shift) @ basis * coefficient) @ basis.T``, which may be clipped.
    """

    kind = "linear"
    config_type = LinearMapConfig
    config: LinearMapConfig
    shift: Tensor  #: (dim,) buffer, subtracted from the features.
    gain: Tensor  #: (dim,) buffer, the diagonal.
    basis: Tensor  #: (dim, rank) buffer with orthonormal columns, rank >= 0.
    coefficient: Tensor  #: (rank,) buffer, the additional gain along each column of the basis.

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        dim, rank = self.config.dim, self.config.rank
        return {"shift": (dim,), "gain": (dim,), "basis": (dim, rank), "coefficient": (rank,)}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the affine map to features (n, input_dim): (n, dim)."""
        config = self.config
        if config.dim < config.input_dim:
            x = x[:, config.first : config.first + config.dim]
        centred = x - self.shift  # (n, dim)
        if config.rank:
            low = batch_invariant_matmul(centred, self.basis) * self.coefficient
            z = centred * self.gain + batch_invariant_matmul(low, self.basis.T)
        else:
            z = centred.mul_(self.gain)
        return z.clamp_(-config.limit, config.limit) if config.limit else z

    def add_to_graph(self, graph: OnnxGraph, x: str) -> str:
        """Add the affine map to an ONNX graph, applied to the value named ``x``; return the name of its output."""
        config = self.config
        if config.dim < config.input_dim:
            start, stop, axis = (np.array([value]) for value in (config.first, config.first + config.dim, 1))
            x = graph.add("Slice", x, start, stop, axis)
        centred = graph.add("Sub", x, self.shift)
        z = graph.add("Mul", centred, self.gain)
        if config.rank:
            low = graph.add("Mul", graph.add("MatMul", centred, self.basis), self.coefficient)
            z = graph.add("Add", z, graph.add("MatMul", low, self.basis.T))
        return graph.add("Clip", z, np.float32(-config.limit), np.float32(config.limit)) if config.limit else z


class View(RestorableModule):
    """A fitted view: a feature map whose output is one or more parts (blocks of columns) of the embedding.

    Args:
        config: An instance of ``config_type`` of the subclass.
        source: A module that maps features (n, input_dim) to the input of the view. If None, the view reads the
            features. Views with the same input share one source, which the encoder evaluates once.
        tensors: The buffers by name, which are copied. If None, all buffers are zero until ``load_state_dict`` is
            called.

    Raises:
        ValueError: The source is not an instance of ``input_map_type``.
    """

    input_map_type: ClassVar[type[InputMap] | None] = None  #: None if the view reads the features.
    source: InputMap | None

    def __init__(
        self, config: Config, source: InputMap | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        expected_type = self.input_map_type or type(None)
        raise_unless(type(source) is expected_type, f"a view of kind {self.kind} with another source")
        self.__dict__["source"] = source  # not a submodule: its state is stored once, by the encoder
        super().__init__(config, tensors)

    @property
    def input_dim(self) -> int:
        """The number of features of a row, before the input map is applied."""
        config: Any = self.config if self.source is None else self.source.config
        return int(config.input_dim)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The number of columns of each part of the output; the encoder normalizes each part.

        By default, the output is a single part with one score for each class.
        """
        config: Any = self.config
        return (int(config.classes),)

    def forward(self, z: Tensor) -> Tensor:
        """Map the output (n, dim) of the input map to the concatenated parts of the view (n, sum of ``part_sizes``).

        The result for a row must not depend on the other rows of the batch, to the last digits in float64; see
        `protonet.views.distances`. The input is float32 or float64, and so is the output. Many rows may be processed in
        chunks, but not if `protonet._compat.is_compiling`: the batch size is then unknown.
        """
        raise NotImplementedError

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the view to an ONNX graph.

        Args:
            graph: The graph to which nodes are added.
            rows: The name of the value with the input of the view: the output of its source, or the features.

        Returns:
            For each part of the output, the name of its value.
        """
        raise NotImplementedError

    def flops(self) -> float:
        """Estimate the time to embed a row, without the input map, as a number of multiplications; 0 if negligible."""
        return 0.0


class ViewSpec(Protocol):
    """The hyperparameters of a view, from which `fit` makes a fitted `View`; implementations are frozen dataclasses."""

    @property
    def name(self) -> str:
        """The name of the view in reports."""

    @property
    def tags(self) -> frozenset[str]:
        """Properties of the view by which it is weighted and evaluated.

        The pretrained prior predicts the weight from those in `protonet.fit.prior.VIEW_TAGS`, and ignores others.
        """

    @property
    def source(self) -> ViewSpec | None:
        """The spec of the view that provides the input map (`InputMap`); None if this view reads the features."""

    @property
    def use_shifts(self) -> bool:
        """Whether the view is also fitted to shifted copies of the rows; see `protonet.views.shifts`."""

    @property
    def is_trained(self) -> bool:
        """Whether the view is trained by gradient descent; a network has at most one such view."""

    def fit(self, rows: TrainingRows, source: InputMap | None) -> View:
        """Fit a view to labelled rows.

        Args:
            rows: The training rows.
            source: The `View.source` of a view with the spec ``self.source``, fitted to the same rows; None if
                ``self.source`` is None.
        """


def canonical_feature_order(x: Tensor, blocks: Tensor) -> Tensor:
    """Compute an order of the features that depends neither on their present order nor on their units.

    ``blocks`` (dim,), ascending from 0, is the table column of each feature; the features of a column stay together.
    Returns the index (dim,) of the feature at each position. It depends on the order of the rows x (n, dim).
    """
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = x.double() - x.double().mean(dim=0)
    key = noise @ centred / torch.linalg.vector_norm(centred, dim=0).clamp_min(1e-30)
    block_key = key.new_full((int(blocks[-1]) + 1,), -math.inf).scatter_reduce_(0, blocks, key, "amax")
    by_key = key.argsort(stable=True)
    by_block = by_key[blocks[by_key].argsort(stable=True)]
    order: Tensor = by_block[block_key[blocks[by_block]].argsort(stable=True)]
    return order


def renumber_by_first_row(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber labels (n,) from 0 in the order of first rows; return new labels (n,) and the old ones (classes,)."""
    classes, index = labels.unique(return_inverse=True)
    first_row = torch.full_like(classes, len(labels)).scatter_reduce_(
        0, index, torch.arange(len(labels), device=labels.device), "amin"
    )
    order = first_row.argsort()
    return order.argsort()[index], classes[order]
