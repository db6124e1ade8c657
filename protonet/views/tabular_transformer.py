"""Tabular transformer views: the labelled rows of a table are the context of a pretrained transformer.

The pretrained weights are constants of the library. Nothing is trained on the labelled rows, which are stored in a
buffer. `CellEncoder` encodes a row for the transformer: each cell by its deviation and rank among the labelled rows.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from protonet._compat import is_compiling
from protonet.losses import class_means
from protonet.views.config import Config, bounded_field, raise_unless
from protonet.views.evaluation import Candidate, CandidateEvaluator, ViewFamily
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.transformer import (
    DIM,
    N_CELL_CHANNELS,
    N_CLASS_CODES,
    EncodedContext,
    add_to_graph,
    count_multiplications,
    embed_rows,
    encode_labelled_rows,
    unpack_weights,
)
from protonet.views.view import InputMap, TrainingRows, View, ViewSpec, select_evenly

MAX_ABS_Z_SCORE = 5.0  #: Standardized values are clipped to this magnitude.
RANK_SCALE = 1.7  #: Factor on ranks in [-1, 1], so that they vary about as much as standardized values.
#: Number of values that encode a numeric cell: value, rank and indicator. The other channels encode categories.
N_NUMERIC_CHANNELS = 3
RANK_RESOLUTION = 1e-5  #: Mean ranks are rounded to multiples of this before `order_groups` sorts by them.
#: Values with a smaller relative difference count as equal, so that float32 and float64 rows have equal ranks.
EQUALITY_TOLERANCE = 1e-6
#: Their square roots generate the quasi-random codes of categories.
CATEGORY_CODE_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


class CellEncoder:
    """An encoder of each cell of a table as ``N_CELL_CHANNELS`` numbers (channels), fitted to labelled rows.

    A table column of one feature is numeric. A column of two features is numeric with an indicator, such as "is
    missing". A column of more features is a one-hot category; each category gets a fixed random-like code. The encoding
    depends neither on units of measurement nor on the order of categories.

    Args:
        rows: (n, features) float32: the labelled rows.
        blocks: (features,) int64, ascending from 0: the table column of each feature.
    """

    def __init__(self, rows: Tensor, blocks: Tensor) -> None:
        width = torch.bincount(blocks)
        first = width.cumsum(0) - width
        self.columns = len(width)
        masks = (width <= 2, width == 2, width > 2)
        self.numeric, self.pairs, self.categories = (mask.nonzero().flatten() for mask in masks)
        self.first, self.second = first[self.numeric], first[self.pairs] + 1
        values = rows[:, self.first]  # (n, numeric columns)
        self.low, self.high = values - EQUALITY_TOLERANCE * values.abs(), values + EQUALITY_TOLERANCE * values.abs()
        self.mean, deviation = rows.mean(dim=0), rows.std(dim=0, correction=0)
        varies = deviation > 1e-6 * rows.abs().amax(dim=0)
        self.inverse = torch.where(varies, 1 / deviation.clamp_min(1e-30), 0.0)
        self.codes = rows.new_zeros(len(self.categories), rows.shape[1], N_CELL_CHANNELS - N_NUMERIC_CHANNELS)
        ranks = rank_rows(rows)
        for index, column in enumerate(self.categories.tolist()):
            features = slice(int(first[column]), int(first[column] + width[column]))
            level = (rows[:, features] - rows[:, features].amin(dim=0)).argmax(dim=1)
            codes = _make_category_codes(int(width[column])).to(rows)[order_groups(ranks, level, int(width[column]))]
            spread = deviation[features].square().sum().sqrt().clamp_min(1e-6)
            self.codes[index, features] = codes / spread

    def encode(self, x: Tensor) -> Tensor:
        """Encode the cells of rows x (m, features) as numbers: (m, columns, N_CELL_CHANNELS)."""
        cells = x.new_zeros(x.shape[0], self.columns, N_CELL_CHANNELS)
        centred = x - self.mean
        z = (centred * self.inverse).clamp(-MAX_ABS_Z_SCORE, MAX_ABS_Z_SCORE)
        cells[:, self.numeric, 0], cells[:, self.pairs, 2] = z[:, self.first], z[:, self.second]
        values = x[:, None, self.first]  # (m, 1, numeric columns)
        above, below = (values > self.high).to(x.dtype), (values < self.low).to(x.dtype)
        cells[:, self.numeric, 1] = RANK_SCALE * (above - below).mean(dim=1)
        if len(self.categories):
            cells[:, self.categories, N_NUMERIC_CHANNELS:] = torch.einsum("md,kdc->mkc", centred, self.codes)
        return cells

    def add_to_graph(self, graph: OnnxGraph, x: str) -> str:
        """Add the encoding of rows to an ONNX graph.

        Returns the name of the value (m, columns, N_CELL_CHANNELS); ``x`` is the name of the rows (m, features).
        """
        centred = graph.add("Sub", x, self.mean)
        z = graph.add("Mul", centred, self.inverse)
        z = graph.add("Clip", z, np.float32(-MAX_ABS_Z_SCORE), np.float32(MAX_ABS_Z_SCORE))
        values = graph.add("Unsqueeze", graph.add("Gather", x, self.first, axis=1), np.array([1]))
        above, below = (
            graph.add("ReduceMean", graph.cast(graph.add(operator, values, bound), "FLOAT"), axes=[1])
            for operator, bound in (("Greater", self.high), ("Less", self.low))
        )
        rank = graph.add("Squeeze", graph.add("Sub", above, below), np.array([1]))
        codes = graph.add("MatMul", centred, self.codes.transpose(0, 1).flatten(1))
        parts = [z, graph.add("Mul", rank, np.float32(RANK_SCALE)), codes]
        width = [len(self.mean), len(self.first), len(self.categories) * (N_CELL_CHANNELS - N_NUMERIC_CHANNELS)]
        padded = graph.pad(graph.add("Concat", *parts, axis=1), 1, 0.0)
        # For each channel, the column of ``padded`` that it comes from; the last column is 0.
        source = torch.arange(sum(width), device=self.first.device).split(width)
        index = torch.full_like(source[0][:1], sum(width)).repeat(self.columns, N_CELL_CHANNELS)
        index[self.numeric, 0], index[self.pairs, 2], index[self.numeric, 1] = self.first, self.second, source[1]
        index[self.categories, N_NUMERIC_CHANNELS:] = source[2].view(-1, N_CELL_CHANNELS - N_NUMERIC_CHANNELS)
        return graph.add("Gather", padded, index, axis=1)


def rank_rows(rows: Tensor) -> Tensor:
    """Compute the mean rank of each row (n, features): its rank by each feature, scaled to (-1, 1), averaged: (n,)."""
    columns = rows.T.contiguous()
    ordered = columns.sort(dim=1).values
    below, up_to = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    return ((below + up_to).to(rows.dtype) / len(rows) - 1).mean(dim=0)


def order_groups(ranks: Tensor, groups: Tensor, count: int) -> Tensor:
    """Compute the position (count,) of each group (n,) if groups are sorted by the mean rank (n,) of their rows.

    The order thus does not depend on the numbers of the groups. Groups without rows come last.
    """
    means, sizes = class_means(ranks[:, None], groups, count)
    means = (means[:, 0] / RANK_RESOLUTION).round()  # a different order of columns changes the last digits
    return torch.where(sizes > 0, means, math.inf).argsort(stable=True).argsort()


def _make_category_codes(levels: int) -> Tensor:
    """Compute a fixed random-like code of each category of a column: (levels, N_CELL_CHANNELS - NUMERIC_CHANNELS)."""
    index = torch.arange(1, levels + 1, dtype=torch.float64)[:, None]
    uniform = (index * torch.tensor(CATEGORY_CODE_PRIMES, dtype=torch.float64).sqrt()).frac()
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)


#: The file of the pretrained weights. The contest entry does not contain it, since the contest has no tables.
WEIGHTS_FILE = Path(__file__).with_suffix(".npy")


@dataclass(frozen=True)
class TabularTransformerSpec:
    """The spec of a tabular transformer view, which has no hyperparameters."""

    source: ClassVar[ViewSpec | None] = None
    use_shifts: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False
    tags: ClassVar[frozenset[str]] = frozenset({"transformer"})
    name: ClassVar[str] = "tabular transformer"

    def fit(self, rows: TrainingRows, source: InputMap | None = None) -> TabularTransformerView:
        """Choose the context rows, which the transformer attends to, and build the view; nothing is trained.

        If there are too many rows, those of the largest weights are chosen. Rows of equal weight are chosen evenly from
        all classes.
        """
        checksum = compute_weights_checksum()
        load_checked_weights(checksum)
        device = rows.features.device
        blocks = rows.column_indices
        blocks = torch.arange(rows.features.shape[1], device=device) if blocks is None else blocks
        n = len(rows.labels)
        count = min(n, rows.scale_row_limit(_count_context_rows(blocks)))
        if rows.weights is None:
            chosen = rows.labels.argsort(stable=True)[select_evenly(n, count).to(device)]
        else:
            chosen = rows.weights.argsort(stable=True)[n - count :]
        chosen = chosen.sort().values
        x, labels = rows.features[chosen], rows.labels[chosen]
        classes = order_groups(rank_rows(x), labels, rows.num_classes)[labels]
        config = TabularTransformerConfig(x.shape[1], len(x), checksum)
        return TabularTransformerView(config, None, {"rows": x, "classes": classes, "blocks": blocks})


#: Maximum number of context rows.
MAX_CONTEXT_ROWS = 256


def _count_context_rows(blocks: Tensor) -> int:
    """Compute the maximum number of context rows of a table; ``blocks`` (dim,) is the column of each feature."""
    # Maximum number of cells of all context rows.
    max_context_cells = 2**13
    max_rows, max_cells = MAX_CONTEXT_ROWS, max_context_cells
    return min(max_rows, max(1, max_cells // int(blocks[-1] + 2)))


@functools.cache
def load_pretrained_weights() -> np.ndarray | None:
    """Load the pretrained weights (WEIGHT_COUNT,) float16; return None if there is no file.

    The result is cached. It is a NumPy array, since a tensor that is made while a network is traced could not be used
    later.
    """
    return np.load(WEIGHTS_FILE) if WEIGHTS_FILE.exists() else None


@functools.cache
def compute_weights_checksum() -> int:
    """Compute the CRC-32 of the pretrained weights, which identifies the weights that a view was fitted with."""
    pretrained = load_pretrained_weights()
    return 0 if pretrained is None else zlib.crc32(pretrained.astype("<f2").tobytes())


def load_checked_weights(checksum: int) -> np.ndarray:
    """Load the pretrained weights (WEIGHT_COUNT,) float16; raise a ValueError unless their CRC-32 is ``checksum``."""
    pretrained = load_pretrained_weights()
    if pretrained is None:
        raise ValueError(f"no file {WEIGHTS_FILE.name} of pretrained weights")
    is_same = checksum == compute_weights_checksum()
    raise_unless(is_same, "a tabular transformer of other weights than this version's; fit it again")
    return pretrained


#: Maximum number of columns: pixels and embeddings have more, and other views suit them.
MAX_COLUMNS = 64
#: Maximum number of labelled rows: with more, other views are as good and faster.
TABULAR_MAX_LABELLED_ROWS = 1000


@dataclass(frozen=True)
class TabularTransformerFamily(ViewFamily):
    """A tabular transformer view, which is evaluated if the rows are those of a small table with columns of categories.

    On numbers alone it gains nothing over kernels and forests, and takes most of the time of a prediction.
    """

    progress_name: ClassVar[str] = "tabular transformer"

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate the view and yield it, if the rows are those of a small table with few classes.

        Nothing is yielded for numbers alone, for embedded class names, or for unequal weights.
        """
        rows = evaluator.rows
        if rows.column_indices is None or int(rows.column_indices[-1]) >= MAX_COLUMNS or rows.is_class_name is not None:
            return
        # A context row of weight 2 does not count twice.
        equal_weights = rows.weights is None or bool((rows.weights == rows.weights[0]).all())
        # Each class has a code of its own.
        small = int(evaluator.seen.sum()) <= N_CLASS_CODES and len(rows.labels) <= TABULAR_MAX_LABELLED_ROWS
        if not (equal_weights and small) or load_pretrained_weights() is None:
            return
        candidate = evaluator.evaluate(TabularTransformerSpec())
        if candidate is not None:
            yield candidate


@dataclass(frozen=True)
class TabularTransformerConfig(Config):
    """Sizes of a `TabularTransformerView`, and the checksum of the pretrained weights that it was fitted with."""

    input_dim: int = bounded_field()  #: Number of features.
    rows: int = bounded_field(high=MAX_CONTEXT_ROWS)  #: Number of context rows.
    checksum: int = bounded_field(0, 2**32 - 1)  #: CRC-32 of the pretrained weights.


#: Number of cells that are embedded at once.
TABULAR_CELLS_PER_CHUNK = 2**14


class TabularTransformerView(View):
    """Embeddings of rows by a pretrained transformer that attends to labelled rows (context rows).

    The pretrained weights are not stored in the view, only their checksum. `check` raises an error if the view was
    fitted with other weights.
    """

    kind = "tabular_transformer"
    config_type = TabularTransformerConfig
    buffer_dtypes: ClassVar = {"classes": torch.int64, "blocks": torch.int64}
    config: TabularTransformerConfig
    rows: Tensor  #: (rows, input_dim) buffer, the context rows.
    classes: Tensor  #: (rows,) int64 buffer, the code of each context row's class.
    blocks: Tensor  #: (input_dim,) int64 buffer, ascending from 0: the table column of each feature.

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        rows, dim = self.config.rows, self.config.input_dim
        return {"rows": (rows, dim), "classes": (rows,), "blocks": (dim,)}

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The width of the embedding."""
        return (DIM,)

    def derive_constants(self) -> None:
        """Discard the cached encoding of the context rows; `forward` computes it again."""
        self._cache: (
            tuple[tuple[torch.dtype, torch.device], tuple[dict[str, Tensor], CellEncoder, EncodedContext]] | None
        ) = None

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Validate the tensors of a file, including class and column indices and the pretrained weights."""
        super().check(tensors, prefix)
        classes, blocks = tensors["classes"], tensors["blocks"]
        in_range = (classes >= 0) & (classes < N_CLASS_CODES)
        raise_unless(bool(in_range.all()), "a tabular transformer with invalid classes")
        step = blocks.diff(prepend=blocks.new_tensor([0]))
        raise_unless(bool(((step == 0) | (step == 1)).all()), "columns that are not ascending")
        raise_unless(int(blocks[0]) == 0 and int(blocks[-1]) < MAX_COLUMNS, "too many columns")
        raise_unless(self.config.rows <= _count_context_rows(blocks), "a tabular transformer with too many rows")
        load_checked_weights(self.config.checksum)

    @torch.no_grad()
    def _encode_context(self) -> tuple[dict[str, Tensor], CellEncoder, EncodedContext]:
        """Return the weights, the cell encoder and the encoded context rows, cached for one precision and device."""
        rows = self.rows
        if self._cache is None or self._cache[0] != (rows.dtype, rows.device):
            weights = unpack_weights(torch.from_numpy(load_checked_weights(self.config.checksum)))
            weights = {name: value.to(rows, copy=True) for name, value in weights.items()}  # no views of one tensor
            cells = CellEncoder(rows, self.blocks)
            context = encode_labelled_rows(weights, cells.encode(rows)[None], self.classes[None])
            attended = tuple((keys.contiguous(), values.contiguous()) for keys, values in context.keys_and_values)
            # No views of larger tensors, as torch.export.save requires.
            context = context._replace(keys_and_values=attended)
            self._cache = (rows.dtype, rows.device), (weights, cells, context)
        return self._cache[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TabularTransformerView:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._encode_context()  # here, since `torch.export` could not compute it while it traces `forward`
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the cached encoding of the context rows."""
        return self.__dict__ | {"_cache": None}

    def forward(self, z: Tensor) -> Tensor:
        """Compute the embeddings (n, DIM) of features z (n, input_dim)."""
        with torch.no_grad():
            weights, cells, context = self._encode_context()
            chunk_rows = max(1, TABULAR_CELLS_PER_CHUNK // (cells.columns + 1))
            chunks = (z,) if is_compiling() else z.split(chunk_rows)
            return torch.cat([embed_rows(weights, cells.encode(x)[None], context)[0] for x in chunks])

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the view to an ONNX graph, with the encoded context as constants; return the embedding's name."""
        weights, cells, context = self._encode_context()
        return [add_to_graph(graph, weights, cells.add_to_graph(graph, rows), context, 0)]

    def flops(self) -> float:
        """Estimate the prediction time per row, as a number of multiplications."""
        return float(count_multiplications(int(self.blocks[-1]) + 1, self.config.rows))
