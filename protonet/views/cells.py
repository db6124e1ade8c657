"""The cells of a table as a transformer reads them: a few numbers for each column, next to those of labelled rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from protonet.losses import class_means
from protonet.views.transformer import CHANNELS
from protonet.views.view import Graph

FARTHEST = 5.0  #: Standard deviations from the mean, beyond which cells are not told apart.
RANKS = 1.7  #: What ranks, of -1 to 1, are multiplied with: then they vary about as much as numbers do.
TOLD = 3  #: Channels of numbers: the number, its rank, and what is told beside it. The others are of categories.
TIE = 1e-6  #: Numbers whose ratio is nearer to 1 are equal: of rows in another precision, too.
ROOTS = (2, 3, 5, 7, 11, 13, 17, 19)  #: Their square roots give the levels of categories codes that are alike nowhere.


class Cells:
    """What is known of columns from labelled rows.

    A column of one feature is a number; one of two is a number and what is told beside it, such as that it is missing;
    one of more is a category, whose levels have codes. Neither units nor the names of levels matter.

    Args:
        rows: (n, features) float32: the labelled rows.
        blocks: (features,) int64, ascending: the column of each feature.
    """

    def __init__(self, rows: Tensor, blocks: Tensor) -> None:
        width = torch.bincount(blocks)
        first = width.cumsum(0) - width
        self.columns = len(width)
        self.numbers, self.pairs = (rule.nonzero().flatten() for rule in (width <= 2, width == 2))
        self.categories = (width > 2).nonzero().flatten()
        self.first, self.second = first[self.numbers], first[self.pairs] + 1
        values = rows[:, self.first]  # (n, numbers)
        self.least, self.most = values - TIE * values.abs(), values + TIE * values.abs()
        self.mean, deviation = rows.mean(dim=0), rows.std(dim=0, correction=0)
        varies = deviation > 1e-6 * rows.abs().amax(dim=0)
        self.inverse = torch.where(varies, 1 / deviation.clamp_min(1e-30), 0.0)
        self.codes = rows.new_zeros(len(self.categories), rows.shape[1], CHANNELS - TOLD)
        ranks = rank_rows(rows)
        for number, column in enumerate(self.categories.tolist()):
            part = slice(int(first[column]), int(first[column] + width[column]))
            level = (rows[:, part] - rows[:, part].amin(dim=0)).argmax(dim=1)
            codes = _draw_codes(int(width[column])).to(rows)[order_groups(ranks, level, int(width[column]))]
            spread = deviation[part].square().sum().sqrt().clamp_min(1e-6)
            self.codes[number, part] = codes / spread

    def read(self, x: Tensor) -> Tensor:
        """Return the cells (m, columns, CHANNELS) of rows x (m, features)."""
        cells = x.new_zeros(x.shape[0], self.columns, CHANNELS)
        centred = x - self.mean
        z = (centred * self.inverse).clamp(-FARTHEST, FARTHEST)
        cells[:, self.numbers, 0], cells[:, self.pairs, 2] = z[:, self.first], z[:, self.second]
        values = x[:, None, self.first]  # (m, 1, numbers)
        above, below = (values > self.most).to(x.dtype), (values < self.least).to(x.dtype)
        cells[:, self.numbers, 1] = RANKS * (above - below).mean(dim=1)
        if len(self.categories):
            cells[:, self.categories, TOLD:] = torch.einsum("md,kdc->mkc", centred, self.codes)
        return cells

    def add_to_graph(self, graph: Graph, x: str) -> str:
        """Add the cells (m, columns, CHANNELS) of the value ``x`` to an ONNX graph, and return the name."""
        centred = graph.add("Sub", x, graph.array(self.mean))
        z = graph.add("Mul", centred, graph.array(self.inverse))
        z = graph.add("Clip", z, np.float32(-FARTHEST), np.float32(FARTHEST))
        values = graph.add("Unsqueeze", graph.add("Gather", x, graph.array(self.first), axis=1), np.array([1]))
        above, below = (
            graph.add("ReduceMean", graph.cast(graph.add(way, values, graph.array(bound)), "FLOAT"), axes=[1])
            for way, bound in (("Greater", self.most), ("Less", self.least))
        )
        rank = graph.add("Squeeze", graph.add("Sub", above, below), np.array([1]))
        codes = graph.add("MatMul", centred, graph.array(self.codes.transpose(0, 1).flatten(1)))
        parts = [z, graph.add("Mul", rank, np.float32(RANKS)), codes]
        width = [len(self.mean), len(self.first), len(self.categories) * (CHANNELS - TOLD)]
        every = graph.pad(graph.add("Concat", *parts, axis=1), 1, 0.0)
        place = np.full((self.columns, CHANNELS), sum(width))  # of each cell among these; what is not there is 0
        numbers, pairs, categories = map(graph.array, (self.numbers, self.pairs, self.categories))
        place[numbers, 0], place[pairs, 2] = graph.array(self.first), graph.array(self.second)
        place[numbers, 1] = width[0] + np.arange(width[1])
        place[categories, TOLD:] = width[0] + width[1] + np.arange(width[2]).reshape(-1, CHANNELS - TOLD)
        return graph.add("Gather", every, place, axis=1)


def rank_rows(rows: Tensor) -> Tensor:
    """Return how rows (n, features) rank in all columns together, (n,) in (-1, 1): the mean of their ranks."""
    columns = rows.T.contiguous()
    ordered = columns.sort(dim=1).values
    below, up_to = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    return ((below + up_to).to(rows.dtype) / len(rows) - 1).mean(dim=0)


def order_groups(ranks: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return a number below ``count`` for each group, (count,), in the order of the mean ranks of its rows.

    Whatever the groups are called, each has the same number; those without a row come last.

    Args:
        ranks: (n,) of the rows, from `rank_rows`.
        groups: (n,) int64 in [0, count): of the rows.
        count: How many groups there are.
    """
    means, sizes = class_means(ranks[:, None], groups, count)
    return torch.where(sizes > 0, means[:, 0], math.inf).argsort(stable=True).argsort()


def _draw_codes(levels: int) -> Tensor:
    """Return a code for each level, (levels, CHANNELS - TOLD), as if drawn from a normal distribution."""
    number = torch.arange(1, levels + 1, dtype=torch.float64)[:, None]
    uniform = (number * torch.tensor(ROOTS, dtype=torch.float64).sqrt()).frac()
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)
