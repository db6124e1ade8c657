"""Context views: a table's labelled rows, read by a transformer that has seen many other tables.

What it learned elsewhere is constant, and nothing is trained on the rows: they are its memory, a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from protonet.views.cells import Cells, order_groups, rank_rows
from protonet.views.config import Config, expect, expect_sound, size
from protonet.views.judge import Candidate, Judge, Kind
from protonet.views.transformer import CODES, DIM, SIZE, Memory, add_to_graph, embed, list_products, memorise, unpack
from protonet.views.view import Graph, Rows, Source, Specification, View

#: What the transformer learned; not in what is handed in to the contest, whose features are no table's.
NUMBERS = Path(__file__).with_suffix(".npy")


@dataclass(frozen=True)
class ContextRules:
    """Bounds of the work."""

    most_columns: int = 64  #: Features of more are pixels or an embedding's, which other views read better.
    most_labelled: int = 1000  #: Of more labelled rows other views learn enough, and this one takes long.
    most_rows: int = 256  #: Rows that are remembered, at the most, spread over those of every class ...
    most_cells: int = 2**13  #: ... and of as many rows as have so many cells, at the most.
    most_classes: int = 60  #: More classes are not told apart by a few codes.
    chunk: int = 2**14  #: Cells that are read at a time.


CONTEXT = ContextRules()
#: Codes of classes are turned from pass to pass: these have no divisor in common with their number.
TURNS = (1, 3, 7, 9)


@dataclass(frozen=True)
class Context:
    """A context view.

    Args:
        passes: How often the rows are read, with other codes for the classes.
    """

    passes: int = 1
    source: ClassVar[Specification | None] = None
    shifted: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    traits: ClassVar[frozenset[str]] = frozenset({"context"})
    name: ClassVar[str] = "context"

    def fit(self, rows: Rows, source: Source | None = None) -> ContextView:
        """Remember the rows; of many, those that count most, or else some that are spread over them."""
        numbers = load_numbers()
        if numbers is None:
            raise ValueError("a context view without what it learned")
        device = rows.features.device
        blocks = torch.arange(rows.features.shape[1], device=device) if rows.blocks is None else rows.blocks
        n = len(rows.labels)
        size = min(n, _count_rows(blocks))
        spread = torch.linspace(0, n - 1, size, dtype=torch.float64).round().long().to(device)
        order = rows.labels.argsort(stable=True) if rows.weights is None else rows.weights.argsort(stable=True)
        chosen = order[spread if rows.weights is None else slice(n - size, n)].sort().values
        x, labels = rows.features[chosen], rows.labels[chosen]
        classes = order_groups(rank_rows(x), labels, rows.num_classes)[labels]
        tensors = {"rows": x, "classes": classes, "blocks": blocks, "numbers": numbers.to(device)}
        return ContextView(ContextConfig(x.shape[1], len(x), self.passes), None, tensors)


def _count_rows(blocks: Tensor) -> int:
    """Return how many rows of such columns are remembered, at the most."""
    return min(CONTEXT.most_rows, max(1, CONTEXT.most_cells // int(blocks[-1] + 2)))


@functools.cache
def load_numbers() -> Tensor | None:
    """Return what the transformer learned, (SIZE / DIM, DIM) int16, the bits of float16; None where there is none."""
    return torch.from_numpy(np.load(NUMBERS).view(np.int16)).view(-1, DIM) if NUMBERS.exists() else None


@dataclass(frozen=True)
class ContextKind(Kind):
    """One view of all rows, where they are those of a table."""

    passes: int = 2
    stage: ClassVar[str] = "context"

    @classmethod
    def for_effort(cls, effort: str) -> ContextKind:
        """Return no pass where predictions are to be fast, or more of them."""
        return cls({"fast": 0, "best": 4}.get(effort, 2))

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Judge the view, where there are columns in no order, few classes, and no rows that are names."""
        rows = judge.rows
        columns = rows.features.shape[1] if rows.blocks is None else int(rows.blocks[-1]) + 1
        classes = int(judge.seen.sum())
        table = columns <= CONTEXT.most_columns and rows.shifts == (0,) and rows.described is None
        alike = rows.weights is None or bool((rows.weights == rows.weights[0]).all())  # a row of weight 2 is not two
        few = classes <= CONTEXT.most_classes and len(rows.labels) <= CONTEXT.most_labelled
        if not self.passes or not (table and alike and few) or load_numbers() is None:
            return
        candidate = judge.try_out(Context(self.passes if classes <= CODES else len(TURNS)))
        if candidate is not None:
            yield candidate


@dataclass(frozen=True)
class ContextConfig(Config):
    """Features, labelled rows that are remembered, and passes."""

    input_dim: int = size()
    rows: int = size(high=CONTEXT.most_rows)
    passes: int = size(high=len(TURNS))


class ContextView(View):
    """Where a row comes to lie next to labelled ones, in as many passes.

    Buffers: ``rows`` (rows, input_dim), the labelled ones; ``classes`` (rows,) int64 >= 0, numbers of their classes;
    ``blocks`` (input_dim,) int64, ascending, the column of each feature; ``numbers`` from `load_numbers`: bits, which
    no change of precision may touch.
    """

    kind = "context"
    config_type = ContextConfig
    dtypes: ClassVar = {"classes": torch.int64, "blocks": torch.int64, "numbers": torch.int16}
    config: ContextConfig
    rows: Tensor
    classes: Tensor
    blocks: Tensor
    numbers: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        rows, dim = self.config.rows, self.config.input_dim
        return {"rows": (rows, dim), "classes": (rows,), "blocks": (dim,), "numbers": (SIZE // DIM, DIM)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The width of each pass."""
        return (DIM,) * self.config.passes

    def derive(self) -> None:
        """Forget what was read of other rows."""
        self._kept: tuple[tuple[torch.dtype, torch.device], tuple[dict[str, Tensor], Cells, Memory]] | None = None

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Check that classes and columns are numbered as they are in fit, too."""
        super().check(tensors, prefix)
        classes, blocks = tensors["classes"], tensors["blocks"]
        expect(bool(((classes >= 0) & (classes < 2**31)).all()), "a context without classes")
        step = blocks.diff(prepend=blocks.new_tensor([0]))
        expect(bool(((step == 0) | (step == 1)).all()), "columns in no order")
        expect(int(blocks[0]) == 0 and int(blocks[-1]) < CONTEXT.most_columns, "columns that no context has")
        expect(self.config.rows <= _count_rows(blocks), "a context of more rows than any has")
        expect_sound(f"{prefix}numbers", tensors["numbers"].view(torch.float16))

    @torch.no_grad()
    def _read(self) -> tuple[dict[str, Tensor], Cells, Memory]:
        """Return what every row is read with; it is kept for as long as precision and device stay."""
        rows = self.rows
        if self._kept is None or self._kept[0] != (rows.dtype, rows.device):
            numbers = unpack(self.numbers.view(torch.float16))
            weights = {name: value.to(rows, copy=True) for name, value in numbers.items()}
            cells = Cells(rows, self.blocks)
            turns = range(len(self.sizes))
            codes = torch.stack([TURNS[p] * (self.classes + p * (self.classes // CODES)) + p for p in turns]) % CODES
            memory = memorise(weights, cells.read(rows).expand(len(codes), -1, -1, -1), codes)
            attended = tuple((keys.contiguous(), values.contiguous()) for keys, values in memory.attended)
            memory = memory._replace(attended=attended)  # tensors of their own, as torch.export.save asks for
            self._kept = (rows.dtype, rows.device), (weights, cells, memory)
        return self._kept[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: what was read is read again."""
        return self.__dict__ | {"_kept": None}

    def forward(self, z: Tensor) -> Tensor:
        """Map features (n, input_dim) to (n, passes * DIM)."""
        with torch.no_grad():
            weights, cells, memory = self._read()
            size = max(1, CONTEXT.chunk // (cells.columns + 1) // len(self.sizes))
            parts = []
            for x in (z,) if torch.compiler.is_compiling() else z.split(size):
                read = cells.read(x).expand(len(self.sizes), -1, -1, -1)
                parts.append(embed(weights, read, memory).transpose(0, 1).flatten(1))
            return torch.cat(parts)

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the transformer, once for each pass, with what it remembers."""
        weights, cells, memory = self._read()
        read = cells.add_to_graph(graph, rows)
        return [add_to_graph(graph, weights, read, memory, number) for number in range(len(self.sizes))]

    def products(self) -> list[tuple[int, int]]:
        """Return those of the transformer, for each pass."""
        return list_products(int(self.blocks[-1]) + 1, self.config.rows) * self.config.passes
