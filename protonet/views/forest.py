"""Forest views: the votes of extremely randomised trees, all of them grown at once, level by level.

A tree is a partition of the space into boxes with one class each: a closed form of the samples and of chance, so
all of it are buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.losses import CHUNK
from protonet.views.config import Config, expect, size
from protonet.views.judge import PRUNING, Candidate, Judge, Kind, embed_fold
from protonet.views.shifts import shift_rows
from protonet.views.view import Graph, Rows, Source, Specification, View


@dataclass(frozen=True)
class ForestRules:
    """Bounds of the work, by which a forest of the default effort takes 0.03 to 0.6 s, and the seed."""

    most_rows: int = 4096  #: Rows that trees are grown from, at the most.
    forest_work: float = 2e6  #: Triples of row, tree and tried split in a forest, at the most.
    batch_work: float = 1e6  #: The same in the trees that are grown at a time.
    most_depth: int = 64  #: No tree is deeper.
    first_share: int = 8  #: One tree in so many is grown first, on a fold that settles what is clearly worse ...
    hope: float = 0.25  #: ... and the whole forest may be expected to leave this share of their log-loss.
    tiny: float = 1e-30  #: What is divided by instead of zero.
    levels: int = 3  #: After so many levels, what has come to a leaf is put aside, where rows are classified.
    step_cost: float = 250.0  #: Multiplications that take as long as a row's step down a tree.
    whole: float = 0.2  #: The share of the weight from which on all trees are grown in the end; fewer for less, ...
    least_trees: int = 50  #: ... but so many at the least.
    seed: int = 0  #: Of the features and thresholds that are tried: the same in every fold and in the end.


FOREST = ForestRules()


@dataclass(frozen=True)
class Forest:
    """A forest view.

    Args:
        trees: Trees, at the most; see `count_trees`.
        shifted: Grow them from shifted copies of the rows, too.
    """

    trees: int
    shifted: bool = False
    source: ClassVar[Specification | None] = None
    trained: ClassVar[bool] = False

    @property
    def traits(self) -> frozenset[str]:
        """That it is a forest, and whether of shifted rows."""
        return frozenset({"forest", "shifted"} if self.shifted else {"forest"})

    @property
    def name(self) -> str:
        """What it is grown from."""
        return "shifted forest" if self.shifted else "forest"

    def fit(self, rows: Rows, source: Source | None = None) -> ForestView:
        """Grow a forest; of more than ``FOREST.most_rows`` rows, that many spread over them are used.

        Trees grow on the CPU, wherever the rows are: their levels are hundreds of small steps, each of a size of its
        own.

        Source: Geurts, Ernst and Wehenkel, "Extremely randomized trees" (2006): every tree sees all rows, a node tries
            sqrt(dim) features with one random threshold each and takes the one of least Gini impurity.
        """
        device, rows = rows.features.device, rows.to(torch.device("cpu"))
        shifts = rows.shifts if self.shifted else (0,)
        x, labels = shift_rows(rows.features, shifts), rows.labels.repeat(len(shifts))
        shares = (
            torch.ones_like(labels, dtype=x.dtype) if rows.shares is None else rows.shares.to(x).repeat(len(shifts))
        )
        generator = torch.Generator().manual_seed(FOREST.seed)
        chosen = torch.linspace(0, len(x) - 1, min(len(x), FOREST.most_rows), dtype=torch.float64).round().long()
        x, labels, shares = x[chosen], labels[chosen], shares[chosen]
        trees = count_trees(len(x), x.shape[1], self.trees)
        at_once = max(1, int(FOREST.batch_work / (len(x) * _count_splits(x.shape[1]))))
        nodes, depth = Nodes(*(labels[:0],) * 2, x.new_zeros(0), *(labels[:0],) * 2), 0
        for first in range(0, trees, at_once):
            more, levels = _grow(x, labels, shares, rows, min(at_once, trees - first), generator)
            before = len(nodes.child)
            more = more._replace(root=more.root + before, child=more.child + before)
            nodes = Nodes(*(torch.cat(pair) for pair in zip(nodes, more, strict=True)))
            depth = max(depth, levels)
        nodes = _sort_nodes(nodes)
        config = ForestConfig(x.shape[1], len(nodes.child), len(nodes.root), depth, rows.num_classes)
        return ForestView(config, None, nodes._asdict()).to(device)


@dataclass(frozen=True)
class ForestKind(Kind):
    """One forest of the rows and, where features are in an order, one of the shifted rows."""

    trees: int = 200
    stage: ClassVar[str] = "forests"

    @classmethod
    def for_effort(cls, effort: str) -> ForestKind:
        """Return fewer or more trees."""
        return cls({"fast": 50, "best": 500}.get(effort, 200))

    def settle(self, specification: Specification, share: float) -> Specification:
        """Return a forest of fewer trees where its share of the weight is small: so is what its noise does."""
        if not isinstance(specification, Forest):
            return specification
        trees = math.ceil(specification.trees * min(1.0, share / FOREST.whole))
        return replace(specification, trees=min(specification.trees, max(FOREST.least_trees, trees)))

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Judge the forests, where rows and classes allow one."""
        if not self.trees or 2 * int(judge.seen.sum()) > FOREST.most_rows:
            return
        for shifted in (False, True) if judge.rows.shifts != (0,) else (False,):
            forest = Forest(self.trees, shifted)
            candidate = None if _prunes_few(judge, forest) else judge.try_out(forest)
            if candidate is not None:
                yield candidate
            if judge.late():
                return


def _prunes_few(judge: Judge, forest: Forest) -> bool:
    """Return whether a few of the trees show, on the first fold, that the forest would get no weight."""
    fold = judge.folds[0]
    if len(fold.judge) < PRUNING.settled:
        return False
    rows = judge.take(fold)
    n = len(rows.labels) * (len(rows.shifts) if forest.shifted else 1)
    trees = count_trees(n, rows.features.shape[1], forest.trees) // FOREST.first_share
    few = replace(forest, trees=trees).fit(rows) if trees else None
    return few is not None and judge.prunes(judge.fold_cosines(partial(embed_fold, {0: few}), 0), hope=FOREST.hope)


class Nodes(NamedTuple):
    """The nodes of many trees."""

    root: Tensor  #: (trees,) node numbers; (nodes,) all others
    feature: Tensor  #: what an inner node looks at
    threshold: Tensor  #: above it a row goes to the right; infinite for a leaf
    child: Tensor  #: the left child, the right one follows; a leaf's is itself
    label: Tensor  #: a leaf's class


def _sort_nodes(nodes: Nodes) -> Nodes:
    """Return the nodes level by level, as `_find_children` wants them."""
    levels, inner = [nodes.root], torch.isfinite(nodes.threshold)
    while len(levels[-1]):
        first = nodes.child[levels[-1][inner[levels[-1]]]]
        levels.append(torch.stack([first, first + 1], dim=1).flatten())
    order, trees = torch.cat(levels), len(nodes.root)
    feature, threshold, inner, label = (each[order] for each in (nodes.feature, nodes.threshold, inner, nodes.label))
    label = torch.where(inner, 0, label)  # what an inner node would say as a leaf says nothing any more
    return Nodes(torch.arange(trees), feature, threshold, _find_children(inner, trees), label)


def _find_children(inner: Tensor, trees: int) -> Tensor:
    """Return the left child (nodes,) of each node, itself for a leaf, where roots come first, then level by level.

    Args:
        inner: (nodes,) bool: which nodes have children, which stand in the order of their parents.
        trees: How many roots there are.
    """
    return torch.where(inner, trees + 2 * (inner.cumsum(dim=0) - 1), torch.arange(len(inner), device=inner.device))


@dataclass(frozen=True)
class ForestConfig(Config):
    """Features, nodes of all trees, trees, edges from a root to the farthest leaf, and classes."""

    input_dim: int = size()
    nodes: int = size()
    trees: int = size()
    depth: int = size(0, FOREST.most_depth)
    classes: int = size()


class ForestView(View):
    """Votes for each class: the share of the trees whose box a row falls into belongs to it.

    Buffers are those of `Nodes`, in the order of `_sort_nodes`; the roots and children follow from the thresholds.
    """

    kind = "forest"
    config_type = ForestConfig
    dtypes: ClassVar = {"feature": torch.int64, "label": torch.int64}
    infinite: ClassVar = frozenset({"threshold"})
    config: ForestConfig
    root: Tensor
    feature: Tensor
    threshold: Tensor
    child: Tensor
    label: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each buffer by name."""
        return dict.fromkeys(("feature", "threshold", "label"), (self.config.nodes,))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of classes."""
        return (self.config.classes,)

    def derive(self) -> None:
        """Find the roots and the children."""
        root = torch.arange(self.config.trees, device=self.threshold.device)
        child = _find_children(torch.isfinite(self.threshold), len(root))
        for name, value in (("root", root), ("child", child)):
            self.register_buffer(name, value, persistent=False)

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Check that all numbers are in range and every way from a root ends at a leaf, too."""
        super().check(tensors, prefix)
        config, inner = self.config, torch.isfinite(tensors["threshold"])
        for name, high in (("feature", config.input_dim), ("label", config.classes)):
            value = tensors[name]
            expect(bool(((value >= 0) & (value < high)).all()), f"a tensor {prefix}{name} out of range")
        later = _find_children(inner, config.trees)[inner] > inner.nonzero().flatten()
        expect(config.nodes == config.trees + 2 * int(inner.sum()) and bool(later.all()), "nodes that make no trees")

    def forward(self, z: Tensor) -> Tensor:
        """Map features (n, input_dim) to votes (n, num_classes)."""
        if torch.compiler.is_compiling():
            return self._vote_traced(z)
        return torch.cat([self._vote(rows) for rows in z.split(CHUNK)])

    def _vote_traced(self, x: Tensor) -> Tensor:
        """Return the votes in operators whose sizes do not depend on the values; eagerly it takes longer."""
        at = self.root.expand(x.shape[0], -1)  # (n, trees)
        for _ in range(self.config.depth):
            at = self.child[at] + (x.gather(1, self.feature[at]) > self.threshold[at]).to(at.dtype)
        votes = x.new_zeros(x.shape[0], self.config.classes)
        return votes.scatter_add(1, self.label[at], x.new_full((), 1 / self.config.trees).expand(at.shape))

    def _vote(self, x: Tensor) -> Tensor:
        n, trees = len(x), len(self.root)
        values = x.T.reshape(-1)  # feature by feature: pairs of a tree come together, and look at few of them
        at, row = self.root.repeat_interleave(n), torch.arange(n, device=x.device).repeat(trees)  # (pairs,)
        leaf, pair = torch.empty_like(at), torch.arange(n * trees, device=x.device)
        for level in range(self.config.depth):
            at = self.child[at] + (values[self.feature[at] * n + row] > self.threshold[at])
            if level % FOREST.levels == FOREST.levels - 1:  # pairs that have come to a leaf are done
                leaf[pair] = at
                going = torch.isfinite(self.threshold[at]).nonzero().flatten()
                at, row, pair = at[going], row[going], pair[going]
        leaf[pair] = at
        votes = x.new_zeros(self.config.classes, n)
        share = x.new_full((), 1 / trees).expand(trees, n)
        return votes.scatter_add_(0, self.label[leaf].view(trees, n), share).T

    def cost(self) -> float:
        """Return what the ways down the trees take."""
        return FOREST.step_cost * self.config.trees * self.config.depth

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add all trees' nodes, level by level."""
        count, trees = graph.add("Shape", rows, end=1), self.config.trees
        feature, threshold, child = (
            graph.constant(graph.array(each)) for each in (self.feature, self.threshold, self.child)
        )
        shape = graph.add("Concat", count, np.array([trees]), axis=0)
        at = graph.add("Expand", graph.array(self.root), shape)  # (n, trees)
        for _ in range(self.config.depth):
            value = graph.add("GatherElements", rows, graph.add("Gather", feature, at), axis=1)
            right = graph.add("Greater", value, graph.add("Gather", threshold, at))
            at = graph.add("Add", graph.add("Gather", child, at), graph.cast(right, "INT64"))
        none = graph.add("Expand", np.float32(0), graph.add("Concat", count, np.array([self.sizes[0]]), axis=0))
        share = graph.add("Expand", np.float32(1 / trees), graph.add("Shape", at))
        label = graph.add("Gather", graph.array(self.label), at)
        return [graph.add("ScatterElements", none, label, share, axis=1, reduction="add")]


def count_trees(n: int, dim: int, most: int) -> int:
    """Return how many trees to grow from n rows of dim features: at most ``most``, fewer where that is much work."""
    return max(1, min(most, int(FOREST.forest_work / (min(n, FOREST.most_rows) * _count_splits(dim)))))


def _count_splits(dim: int) -> int:
    """Return how many splits a node tries, out of dim features."""
    return max(1, round(math.sqrt(dim)))


def _grow(
    x: Tensor, labels: Tensor, shares: Tensor, whole: Rows, trees: int, generator: torch.Generator
) -> tuple[Nodes, int]:
    """Grow trees on rows (n, dim) of weights (n,), of those given; return nodes, and the levels below the roots."""
    n, num_classes = len(x), whole.num_classes
    splits = _count_splits(x.shape[1] if whole.blocks is None else int(whole.blocks[-1]) + 1)
    varying = (x.amax(dim=0) > x.amin(dim=0)).nonzero().flatten()
    nodes = _append_leaves(None, trees)
    kinds, kind = torch.unique(x, dim=0, return_inverse=True)  # kind (n,): equal rows cannot be split
    repeated = len(kinds) < n
    row, at = torch.arange(n).repeat(trees), nodes.root.repeat_interleave(n)  # (pairs,): each row in each tree
    depth = 0
    for _ in range(FOREST.most_depth):
        node, group = _number(at, len(nodes.child))
        present, member = _number(group * num_classes + labels.index_select(0, row), len(node) * num_classes)
        weight = shares.index_select(0, row)
        count = torch.zeros(len(present), dtype=x.dtype).index_add_(0, member, weight)
        owner, label = present // num_classes, present % num_classes  # (present,): the classes of each node
        most = torch.zeros(len(node), dtype=x.dtype).scatter_reduce_(0, owner, count, "amax")
        majority = torch.where(count == most[owner], label, num_classes)  # the first of equals
        nodes.label[node] = torch.full_like(node, num_classes).scatter_reduce_(0, owner, majority, "amin")
        mixed = owner.bincount(minlength=len(node)) > 1
        if repeated:
            own = kind.index_select(0, row)
            least = torch.full_like(node, n).scatter_reduce_(0, group, own, "amin")
            mixed &= torch.zeros_like(node).scatter_reduce_(0, group, own, "amax") > least
        if not bool(mixed.any()):
            break
        number, place = mixed.cumsum(dim=0) - 1, mixed[owner].cumsum(dim=0) - 1
        open_pair, open_class = mixed.index_select(0, group), mixed[owner]
        row, group, member, weight = (each[open_pair] for each in (row, group, member, weight))
        group, member = number.index_select(0, group), place.index_select(0, member)
        node, owner, count = node[mixed], number[owner[open_class]], count[open_class]

        feature = _draw_features(x, varying, whole.blocks, (len(node), splits), generator)  # (nodes, splits)
        share = torch.rand(feature.shape, generator=generator, dtype=x.dtype)
        values = x.take(row[:, None] * x.shape[1] + feature.index_select(0, group))  # (pairs, splits)
        threshold, right, score = _try_splits(values, weight, group, member, owner, count, share)
        score, best = score.max(dim=1)
        split = score > 0  # else all tried features are constant here: others are tried at the next level
        first = len(nodes.child) + 2 * (split.cumsum(dim=0) - 1)
        nodes = _append_leaves(nodes, 2 * int(split.sum()))
        nodes.feature[node[split]] = feature[split].gather(1, best[split, None])[:, 0]
        nodes.threshold[node[split]] = threshold[split].gather(1, best[split, None])[:, 0]
        nodes.child[node[split]] = first[split]
        goes_right = right.gather(1, best.index_select(0, group)[:, None])[:, 0]
        at = torch.where(split, first, node).index_select(0, group) + (goes_right & split.index_select(0, group))
        depth += bool(split.any())
    return nodes, depth


def _number(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the different ones of whole numbers (n,) in [0, most), ascending, and the place (n,) of each in them."""
    if most > 4 * len(values):  # a table of all numbers would cost more than sorting
        present, place = values.unique(return_inverse=True)
        return present, place
    there = torch.zeros(most, dtype=torch.bool)
    there[values] = True
    return there.nonzero().flatten(), (there.cumsum(dim=0) - 1).index_select(0, values)


def _draw_features(
    x: Tensor, varying: Tensor, blocks: Tensor | None, shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Return some of the varying features (m,), in ascending order: blocks are alike, features in one by variance."""
    if blocks is None:
        return varying[torch.randint(len(varying), shape, generator=generator)]
    block = blocks[varying].unique_consecutive(return_inverse=True)[1]
    variance = x[:, varying].var(dim=0, correction=0)
    shares = (variance / torch.zeros_like(variance).index_add_(0, block, variance)[block]).double()
    ends = torch.cumsum(shares, dim=0)  # one unit for each block
    place = torch.rand(shape, generator=generator, dtype=torch.float64) * (int(block[-1]) + 1)
    return varying[torch.searchsorted(ends, place).clamp_max(len(varying) - 1)]


def _append_leaves(nodes: Nodes | None, more: int) -> Nodes:
    """Return the nodes and ``more`` leaves, which are the roots if there are no nodes yet."""
    zeros, before = torch.zeros(more, dtype=torch.int64), 0 if nodes is None else len(nodes.child)
    leaves = Nodes(
        torch.arange(more),
        zeros,
        torch.full((more,), math.inf, dtype=torch.float32),
        torch.arange(more) + before,
        zeros.clone(),
    )
    if nodes is None:
        return leaves
    return Nodes(nodes.root, *(torch.cat(pair) for pair in zip(nodes[1:], leaves[1:], strict=True)))


def _try_splits(
    values: Tensor, weights: Tensor, group: Tensor, member: Tensor, owner: Tensor, count: Tensor, share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Judge thresholds that lie at a share (nodes, splits) in [0, 1) of the way between a node's extreme values.

    Of each pair of row and tree come the values (pairs, splits) of the tried features, its weight, its node, its class
    among those of all nodes; of each such class its node and the weight of its pairs. Returned are the thresholds
    (nodes, splits), what lies above them (pairs, splits), and the scores (nodes, splits): the weight of the pairs less
    their Gini impurity, 0 where one side would be empty.
    """
    index = group[:, None].expand(values.shape)
    low = torch.full_like(share, math.inf).scatter_reduce_(0, index, values, "amin")
    high = torch.full_like(share, -math.inf).scatter_reduce_(0, index, values, "amax")
    threshold = low + share * (high - low)
    right = values > threshold.index_select(0, group)
    counts = values.new_zeros(len(count), share.shape[1]).index_add_(0, member, weights[:, None] * right)
    score = torch.zeros_like(share)
    for side in (counts, count[:, None] - counts):
        size = torch.zeros_like(share).index_add_(0, owner, side)
        score += torch.zeros_like(share).index_add_(0, owner, side.square()) / size.clamp_min(FOREST.tiny)
    return threshold, right, torch.where(threshold < high, score, 0.0)  # the least value is never above it
