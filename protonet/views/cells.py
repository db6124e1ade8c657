"""Encoding of the cells of a table for the tabular transformer: a few numbers per cell, relative to labelled rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from protonet.losses import class_means
from protonet.views.transformer import CELL_CHANNELS
from protonet.views.view import Graph

MAX_Z = 5.0  #: Standardized values are clipped to this magnitude.
RANK_SCALE = 1.7  #: Factor on ranks in [-1, 1], so that they vary about as much as standardized values.
NUMERIC_CHANNELS = 3  #: Value, rank and second feature, such as "is missing". The other channels encode categories.
TIE = 1e-6  #: Relative difference below which values are equal: float32 and float64 rows then have the same ranks.
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)  #: Their square roots generate the quasi-random codes of categories.


class Cells:
    """An encoder of cells that is fitted to labelled rows.

    A column of one feature is numeric. A column of two features is numeric with an indicator, such as "is missing". A
    column of more features is a one-hot category, whose levels get codes. The encoding depends neither on units nor on
    the names of levels.

    Args:
        rows: (n, features) float32: the labelled rows.
        blocks: (features,) int64, ascending: the column of each feature.
    """

    def __init__(self, rows: Tensor, blocks: Tensor) -> None:
        width = torch.bincount(blocks)
        first = width.cumsum(0) - width
        self.columns = len(width)
        self.numeric, self.pairs, self.categories = (
            mask.nonzero().flatten() for mask in (width <= 2, width == 2, width > 2)
        )
        self.first, self.second = first[self.numeric], first[self.pairs] + 1
        values = rows[:, self.first]  # (n, numeric columns)
        self.low, self.high = values - TIE * values.abs(), values + TIE * values.abs()
        self.mean, deviation = rows.mean(dim=0), rows.std(dim=0, correction=0)
        varies = deviation > 1e-6 * rows.abs().amax(dim=0)
        self.inverse = torch.where(varies, 1 / deviation.clamp_min(1e-30), 0.0)
        self.codes = rows.new_zeros(len(self.categories), rows.shape[1], CELL_CHANNELS - NUMERIC_CHANNELS)
        ranks = rank_rows(rows)
        for index, column in enumerate(self.categories.tolist()):
            features = slice(int(first[column]), int(first[column] + width[column]))
            level = (rows[:, features] - rows[:, features].amin(dim=0)).argmax(dim=1)
            codes = _make_codes(int(width[column])).to(rows)[order_groups(ranks, level, int(width[column]))]
            spread = deviation[features].square().sum().sqrt().clamp_min(1e-6)
            self.codes[index, features] = codes / spread

    def encode(self, x: Tensor) -> Tensor:
        """Encode rows x (m, features) as cells (m, columns, CELL_CHANNELS)."""
        cells = x.new_zeros(x.shape[0], self.columns, CELL_CHANNELS)
        centred = x - self.mean
        z = (centred * self.inverse).clamp(-MAX_Z, MAX_Z)
        cells[:, self.numeric, 0], cells[:, self.pairs, 2] = z[:, self.first], z[:, self.second]
        values = x[:, None, self.first]  # (m, 1, numeric columns)
        above, below = (values > self.high).to(x.dtype), (values < self.low).to(x.dtype)
        cells[:, self.numeric, 1] = RANK_SCALE * (above - below).mean(dim=1)
        if len(self.categories):
            cells[:, self.categories, NUMERIC_CHANNELS:] = torch.einsum("md,kdc->mkc", centred, self.codes)
        return cells

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add the cells (m, columns, CELL_CHANNELS) of the value ``x`` to an ONNX graph, and return the name."""
        centred = graph.add("Sub", x, graph.array(self.mean))
        z = graph.add("Mul", centred, graph.array(self.inverse))
        z = graph.add("Clip", z, np.float32(-MAX_Z), np.float32(MAX_Z))
        values = graph.add("Unsqueeze", graph.add("Gather", x, graph.array(self.first), axis=1), np.array([1]))
        above, below = (
            graph.add("ReduceMean", graph.cast(graph.add(operator, values, graph.array(bound)), "FLOAT"), axes=[1])
            for operator, bound in (("Greater", self.high), ("Less", self.low))
        )
        rank = graph.add("Squeeze", graph.add("Sub", above, below), np.array([1]))
        codes = graph.add("MatMul", centred, graph.array(self.codes.transpose(0, 1).flatten(1)))
        parts = [z, graph.add("Mul", rank, np.float32(RANK_SCALE)), codes]
        width = [len(self.mean), len(self.first), len(self.categories) * (CELL_CHANNELS - NUMERIC_CHANNELS)]
        padded = graph.pad(graph.add("Concat", *parts, axis=1), 1, 0.0)
        index = np.full(
            (self.columns, CELL_CHANNELS), sum(width)
        )  # the column of ``padded`` for each channel; the last is 0
        numeric, pairs, categories = map(graph.array, (self.numeric, self.pairs, self.categories))
        index[numeric, 0], index[pairs, 2] = graph.array(self.first), graph.array(self.second)
        index[numeric, 1] = width[0] + np.arange(width[1])
        codes_index = width[0] + width[1] + np.arange(width[2])
        index[categories, NUMERIC_CHANNELS:] = codes_index.reshape(-1, CELL_CHANNELS - NUMERIC_CHANNELS)
        return graph.add("Gather", padded, index, axis=1)


def rank_rows(rows: Tensor) -> Tensor:
    """Compute the mean over features of the ranks of rows (n, features), scaled to (-1, 1): (n,)."""
    columns = rows.T.contiguous()
    ordered = columns.sort(dim=1).values
    below, up_to = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    return ((below + up_to).to(rows.dtype) / len(rows) - 1).mean(dim=0)


def order_groups(ranks: Tensor, groups: Tensor, count: int) -> Tensor:
    """Number groups by the mean rank of their rows, so that the numbers do not depend on the groups' names.

    Args:
        ranks: (n,) ranks of the rows, from `rank_rows`.
        groups: (n,) int64 in [0, count): the group of each row.
        count: The number of groups.

    Returns:
        (count,) int64: the position of each group in this order. Groups without rows come last.
    """
    means, sizes = class_means(ranks[:, None], groups, count)
    return torch.where(sizes > 0, means[:, 0], math.inf).argsort(stable=True).argsort()


def _make_codes(levels: int) -> Tensor:
    """Compute quasi-random codes (levels, CELL_CHANNELS - NUMERIC_CHANNELS) with a normal distribution."""
    index = torch.arange(1, levels + 1, dtype=torch.float64)[:, None]
    uniform = (index * torch.tensor(PRIMES, dtype=torch.float64).sqrt()).frac()
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)
