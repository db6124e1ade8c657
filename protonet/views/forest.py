"""Forest views: class votes of extremely randomised trees. All trees are grown together, level by level.

Nothing is trained by gradient descent: the nodes of the trees are stored in buffers.
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

from protonet._compat import is_compiling
from protonet.losses import MAX_CHUNK_ROWS
from protonet.views import view
from protonet.views.config import Config, bounded_field, raise_unless
from protonet.views.evaluation import MIN_DECISIVE_ROWS, Candidate, CandidateEvaluator, ViewFamily, map_features
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.shifts import shift_rows

#: Maximum number of rows from which trees are grown.
MAX_TREE_ROWS = 4096
#: Maximum of the same product for the trees that are grown at once.
MAX_BATCH_WORK = 1e6
#: Seed of the features and thresholds, the same in every fold and in the final fit.
FOREST_SEED = 0


@dataclass(frozen=True)
class ForestSpec:
    """The spec (hyperparameters) of a forest view."""

    max_trees: int  #: Maximum number of trees.
    use_shifts: bool = False  #: Whether trees are also grown from shifted copies of the rows; see `shift_rows`.
    source: ClassVar[view.ViewSpec | None] = None
    is_trained: ClassVar[bool] = False

    @property
    def tags(self) -> frozenset[str]:
        """Properties by which the prior predicts the view's weight: "forest", and "shifted" if rows are shifted."""
        return frozenset({"forest", "shifted"} if self.use_shifts else {"forest"})

    @property
    def name(self) -> str:
        """The name in reports: "forest" or "shifted forest"."""
        return "shifted forest" if self.use_shifts else "forest"

    def fit(self, rows: view.TrainingRows, source: view.InputMap | None = None) -> ForestView:
        """Grow a forest from the rows, or from evenly spaced rows if they are many.

        The maximum number of rows is ``MAX_TREE_ROWS`` for all training rows, and the same fraction of a fold.

        Trees are grown on the CPU, whatever the device of the rows: a level takes hundreds of small operations.

        Source: Geurts, Ernst and Wehenkel, "Extremely randomized trees" (2006): every tree sees all rows, a node tries
            sqrt(dim) features with one random threshold each and takes the one of least Gini impurity.
        """
        device, rows = rows.features.device, rows.to(torch.device("cpu"))
        shifts = rows.shifts if self.use_shifts else (0,)
        class_ids, classes = view.renumber_by_first_row(rows.labels)  # the first class wins ties
        x, labels = shift_rows(rows.features, shifts), class_ids.repeat(len(shifts))
        weights = rows.class_balanced_weights
        weights = torch.ones_like(labels, dtype=x.dtype) if weights is None else weights.to(x).repeat(len(shifts))
        generator = torch.Generator().manual_seed(FOREST_SEED)
        chosen = view.select_evenly(len(x), rows.scale_row_limit(MAX_TREE_ROWS))
        x, labels, weights = x[chosen], labels[chosen], weights[chosen]
        blocks = torch.arange(x.shape[1]) if rows.column_indices is None else rows.column_indices
        columns = view.canonical_feature_order(x, blocks)  # features are drawn by their position
        x, blocks = x[:, columns], blocks[columns].unique_consecutive(return_inverse=True)[1]
        trees = max_tree_count(len(x), x.shape[1], self.max_trees)
        batch = max(1, int(MAX_BATCH_WORK / (len(x) * _splits_per_node(x.shape[1]))))
        batches, n_nodes, depth = list[TreeNodes](), 0, 0
        for first in range(0, trees, batch):
            n_trees = min(batch, trees - first)
            grown, levels = _grow_trees(x, labels, weights, blocks, len(classes), n_trees, generator)
            batches.append(grown._replace(root=grown.root + n_nodes, child=grown.child + n_nodes))
            n_nodes, depth = n_nodes + len(grown.child), max(depth, levels)
        nodes = TreeNodes(*map(torch.cat, zip(*batches, strict=True)))
        nodes = _sort_nodes(nodes._replace(feature=columns[nodes.feature], label=classes[nodes.label]))
        config = ForestConfig(x.shape[1], len(nodes.child), len(nodes.root), depth, rows.num_classes)
        return ForestView(config, None, nodes._asdict()).to(device)


#: A forest with less weight than this in the mixture gets proportionally fewer trees.
FULL_FOREST_WEIGHT = 0.2
#: Minimum number of trees of such a forest, and the number of those that are evaluated.
MIN_TREES = 50


@dataclass(frozen=True)
class ForestFamily(ViewFamily):
    """A forest grown from the rows and, for series and images, a forest grown from shifted copies, too.

    Forests of ``MIN_TREES`` are evaluated; the final one has up to ``max_trees``.
    """

    max_trees: int = 200
    progress_name: ClassVar[str] = "forests"

    def final_spec(self, spec: view.ViewSpec, weight: float) -> view.ViewSpec:
        """Return the spec with fewer trees if the forest has little weight, so that its noise matters less.

        The number is ``MIN_TREES`` times a power of two, since any other number of trees draws other splits: a
        rounding error of the weight would change the forest.
        """
        if not isinstance(spec, ForestSpec):
            return spec
        ratio = self.max_trees * weight / (FULL_FOREST_WEIGHT * MIN_TREES)
        trees = MIN_TREES * 2 ** math.ceil(math.log2(max(1.0, ratio)))
        return replace(spec, max_trees=min(self.max_trees, trees))

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate the forests and yield their candidates; nothing is yielded if there are too many classes."""
        if not self.max_trees or 2 * int(evaluator.seen.sum()) > MAX_TREE_ROWS:
            return
        for use_shifts in (False, True) if evaluator.rows.shifts != (0,) else (False,):
            forest = ForestSpec(min(self.max_trees, MIN_TREES), use_shifts)
            candidate = None if _is_pilot_pruned(evaluator, forest) else evaluator.evaluate(forest)
            if candidate is not None:
                yield candidate
            if evaluator.is_past_deadline():
                return


def _is_pilot_pruned(evaluator: CandidateEvaluator, forest: ForestSpec) -> bool:
    """Test, by a smaller forest on the first fold, whether the forest would get no weight; False if rows are few."""
    # A pilot forest, which decides about pruning, has this many times fewer trees.
    pilot_divisor = 8
    # The log-loss of the full forest is assumed to be this fraction of that of the pilot.
    expected_loss_ratio = 0.25
    fold = evaluator.folds[0]
    if len(fold.held_out) < MIN_DECISIVE_ROWS:
        return False
    rows = evaluator.rows.select(fold.train)
    n = len(rows.labels) * (len(rows.shifts) if forest.use_shifts else 1)
    trees = max_tree_count(n, rows.features.shape[1], forest.max_trees) // pilot_divisor
    if not trees:
        return False
    pilot = replace(forest, max_trees=trees).fit(rows)
    cosines = evaluator.compute_fold_cosines(partial(map_features, pilot), 0)
    return evaluator.should_prune(cosines, expected_loss_ratio=expected_loss_ratio)


class TreeNodes(NamedTuple):
    """The nodes of all trees of a forest, numbered together. A leaf is a node with an infinite threshold."""

    root: Tensor  #: (trees,) int64: index of the root of each tree.
    feature: Tensor  #: (nodes,) int64: index of the feature that an inner node compares with its threshold.
    threshold: Tensor  #: (nodes,) float32: rows with a larger feature go to the right child; infinite for a leaf.
    child: Tensor  #: (nodes,) int64: index of the left child; the right child follows it. A leaf has its own index.
    label: Tensor  #: (nodes,) int64: the class that a leaf predicts.


def _sort_nodes(nodes: TreeNodes) -> TreeNodes:
    """Renumber nodes by level, and within a level in the order of their parents, as `_locate_children` requires."""
    levels, inner = [nodes.root], torch.isfinite(nodes.threshold)
    while len(levels[-1]):
        first = nodes.child[levels[-1][inner[levels[-1]]]]
        levels.append(torch.stack([first, first + 1], dim=1).flatten())
    order, trees = torch.cat(levels), len(nodes.root)
    parts = (nodes.feature, nodes.threshold, inner, nodes.label)
    feature, threshold, inner, label = (values[order] for values in parts)
    label = torch.where(inner, 0, label)  # the class of an inner node is not used
    return TreeNodes(torch.arange(trees), feature, threshold, _locate_children(inner, trees), label)


def _locate_children(inner: Tensor, trees: int) -> Tensor:
    """Compute the index (nodes,) of each node's left child after `_sort_nodes`, from a mask of the inner nodes."""
    return torch.where(inner, trees + 2 * (inner.cumsum(dim=0) - 1), torch.arange(len(inner), device=inner.device))


#: Maximum depth of a tree.
MAX_DEPTH = 64


@dataclass(frozen=True)
class ForestConfig(Config):
    """The sizes from which a `ForestView` is built."""

    input_dim: int = bounded_field()  #: Number of features.
    nodes: int = bounded_field()  #: Number of nodes of all trees.
    trees: int = bounded_field()  #: Number of trees.
    depth: int = bounded_field(0, MAX_DEPTH)  #: Number of levels below the roots.
    classes: int = bounded_field()  #: Number of classes.


class ForestView(view.View):
    """A fitted forest. Its output for a row is, for each class, the fraction of trees that predict the class.

    Buffers are the tensors of `TreeNodes`, in the order of `_sort_nodes`. Roots and children are not stored, since
    they can be computed from the thresholds.
    """

    kind = "forest"
    config_type = ForestConfig
    buffer_dtypes: ClassVar = {"feature": torch.int64, "label": torch.int64}
    infinite_buffers: ClassVar = frozenset({"threshold"})
    config: ForestConfig
    root: Tensor
    feature: Tensor
    threshold: Tensor
    child: Tensor
    label: Tensor

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the shape of each buffer by name."""
        return dict.fromkeys(("feature", "threshold", "label"), (self.config.nodes,))

    def derive_constants(self) -> None:
        """Compute the indices of roots and left children from the thresholds."""
        root = torch.arange(self.config.trees, device=self.threshold.device)
        child = _locate_children(torch.isfinite(self.threshold), len(root))
        for name, value in (("root", root), ("child", child)):
            self.register_buffer(name, value, persistent=False)

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Validate the tensors of a file: indices must be in range, and every path from a root must end at a leaf."""
        super().check(tensors, prefix)
        config, inner = self.config, torch.isfinite(tensors["threshold"])
        for name, high in (("feature", config.input_dim), ("label", config.classes)):
            value = tensors[name]
            raise_unless(bool(((value >= 0) & (value < high)).all()), f"a tensor {prefix}{name} out of range")
        descending = _locate_children(inner, config.trees)[inner] > inner.nonzero().flatten()
        complete = config.nodes == config.trees + 2 * int(inner.sum())
        raise_unless(complete and bool(descending.all()), "nodes that make no trees")

    def forward(self, z: Tensor) -> Tensor:
        """Compute the votes of rows z (n, input_dim): the fraction of trees for each class (n, num_classes)."""
        if is_compiling():
            return self._vote_for_export(z)
        return torch.cat([self._vote(rows) for rows in z.split(MAX_CHUNK_ROWS)])

    def _vote_for_export(self, x: Tensor) -> Tensor:
        """Compute the votes (n, num_classes) as `_vote` does, by operators that `torch.export` can trace."""
        node = self.root.expand(x.shape[0], -1)  # (n, trees)
        for _ in range(self.config.depth):
            node = self.child[node] + (x.gather(1, self.feature[node]) > self.threshold[node]).to(node.dtype)
        votes = x.new_zeros(x.shape[0], self.config.classes)
        return votes.scatter_add(1, self.label[node], x.new_full((), 1 / self.config.trees).expand(node.shape))

    def _vote(self, x: Tensor) -> Tensor:
        """Compute the fraction of trees that vote for each class (n, num_classes), for rows x (n, input_dim)."""
        # In prediction, pairs of row and tree at a leaf are removed each time after this many levels.
        levels_per_compaction = 3
        n, trees = len(x), len(self.root)
        values = x.T.reshape(-1)  # sorted by feature: neighbouring pairs are of one tree, and read few features
        node, row = self.root.repeat_interleave(n), torch.arange(n, device=x.device).repeat(trees)  # (pairs,)
        leaf, pair = torch.empty_like(node), torch.arange(n * trees, device=x.device)
        for level in range(self.config.depth):
            node = self.child[node] + (values[self.feature[node] * n + row] > self.threshold[node])
            if (level + 1) % levels_per_compaction == 0:  # remove the pairs that have reached a leaf
                leaf[pair] = node
                inner = torch.isfinite(self.threshold[node]).nonzero().flatten()
                node, row, pair = node[inner], row[inner], pair[inner]
        leaf[pair] = node
        votes = x.new_zeros(self.config.classes, n)
        vote = x.new_full((), 1 / trees).expand(trees, n)
        return votes.scatter_add_(0, self.label[leaf].view(trees, n), vote).T

    def flops(self) -> float:
        """Estimate the prediction time per row, as a number of multiplications."""
        # Number of multiplications that take as long as a row's step from a node to its child.
        flops_per_node = 250.0
        return flops_per_node * self.config.trees * self.config.depth

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the votes to an ONNX graph; return the name of their value, in a list."""
        n_rows, trees = graph.add("Shape", rows, end=1), self.config.trees
        feature, threshold, child = (graph.constant(values) for values in (self.feature, self.threshold, self.child))
        shape = graph.add("Concat", n_rows, np.array([trees]), axis=0)
        node = graph.add("Expand", self.root, shape)  # (n, trees)
        for _ in range(self.config.depth):
            value = graph.add("GatherElements", rows, graph.add("Gather", feature, node), axis=1)
            right = graph.add("Greater", value, graph.add("Gather", threshold, node))
            node = graph.add("Add", graph.add("Gather", child, node), graph.cast(right, "INT64"))
        zeros = graph.add("Expand", np.float32(0), graph.add("Concat", n_rows, np.array([self.part_sizes[0]]), axis=0))
        vote = graph.add("Expand", np.float32(1 / trees), graph.add("Shape", node))
        label = graph.add("Gather", self.label, node)
        return [graph.add("ScatterElements", zeros, label, vote, axis=1, reduction="add")]


#: Maximum number of rows times trees times evaluated splits per node, in a forest.
MAX_FOREST_WORK = 2e6


def max_tree_count(n: int, dim: int, max_trees: int) -> int:
    """Compute the number of trees in [1, max_trees] that the work limit allows, for n rows of ``dim`` features."""
    tree_work = min(n, MAX_TREE_ROWS) * _splits_per_node(dim)
    return max(1, min(max_trees, int(MAX_FOREST_WORK / tree_work)))


def _splits_per_node(dim: int) -> int:
    """Compute the number of random splits that are evaluated at each node: the square root of ``dim``, rounded."""
    return max(1, round(math.sqrt(dim)))


def _grow_trees(
    x: Tensor, labels: Tensor, weights: Tensor, blocks: Tensor, num_classes: int, trees: int, generator: torch.Generator
) -> tuple[TreeNodes, int]:
    """Grow trees from rows x (n, dim), with features in table columns ``blocks`` (dim,); return nodes and depth."""
    n, splits = len(x), _splits_per_node(int(blocks[-1]) + 1)
    varying = (x.amax(dim=0) > x.amin(dim=0)).nonzero().flatten()
    nodes = _append_leaves(None, trees)
    distinct, distinct_index = torch.unique(x, dim=0, return_inverse=True)  # equal rows cannot be split
    has_duplicates = len(distinct) < n
    row, at = torch.arange(n).repeat(trees), nodes.root.repeat_interleave(n)  # (pairs,): each row in each tree
    depth = 0
    for _ in range(MAX_DEPTH):
        # node (nodes,): the nodes of this level; group (pairs,): index of a pair's node in `node`
        node, group = _unique_integers(at, len(nodes.child))
        # class_of_node: the (node, class) combinations that occur; member (pairs,): index of a pair's combination
        pairs = group * num_classes + labels.index_select(0, row)
        class_of_node, member = _unique_integers(pairs, len(node) * num_classes)
        weight = weights.index_select(0, row)
        count = torch.zeros(len(class_of_node), dtype=x.dtype).index_add_(0, member, weight)
        owner, label = class_of_node // num_classes, class_of_node % num_classes
        max_count = torch.zeros(len(node), dtype=x.dtype).scatter_reduce_(0, owner, count, "amax")
        majority = torch.where(count == max_count[owner], label, num_classes)  # ties go to the first class
        nodes.label[node] = torch.full_like(node, num_classes).scatter_reduce_(0, owner, majority, "amin")
        mixed = owner.bincount(minlength=len(node)) > 1
        if has_duplicates:  # a node is split only if its rows differ
            index = distinct_index.index_select(0, row)
            smallest = torch.full_like(node, n).scatter_reduce_(0, group, index, "amin")
            mixed &= torch.zeros_like(node).scatter_reduce_(0, group, index, "amax") > smallest
        if not bool(mixed.any()):
            break
        # Keep the nodes that are split, and renumber groups and members.
        new_group, new_member = mixed.cumsum(dim=0) - 1, mixed[owner].cumsum(dim=0) - 1
        open_pair, open_class = mixed.index_select(0, group), mixed[owner]
        row, group, member, weight = (values[open_pair] for values in (row, group, member, weight))
        group, member = new_group.index_select(0, group), new_member.index_select(0, member)
        node, owner, count = node[mixed], new_group[owner[open_class]], count[open_class]

        feature = _draw_varying_features(x, varying, blocks, (len(node), splits), generator)  # (nodes, splits)
        fraction = torch.rand(feature.shape, generator=generator, dtype=x.dtype)
        values = x.take(row[:, None] * x.shape[1] + feature.index_select(0, group))  # (pairs, splits)
        threshold, right, score = _evaluate_random_splits(values, weight, group, member, owner, count, fraction)
        score, best = score.max(dim=1)
        split = score > 0  # otherwise all drawn features are constant: others are drawn at the next level
        first = len(nodes.child) + 2 * (split.cumsum(dim=0) - 1)
        nodes = _append_leaves(nodes, 2 * int(split.sum()))
        nodes.feature[node[split]] = feature[split].gather(1, best[split, None])[:, 0]
        nodes.threshold[node[split]] = threshold[split].gather(1, best[split, None])[:, 0]
        nodes.child[node[split]] = first[split]
        goes_right = right.gather(1, best.index_select(0, group)[:, None])[:, 0]
        at = torch.where(split, first, node).index_select(0, group) + (goes_right & split.index_select(0, group))
        depth += bool(split.any())
    return nodes, depth


def _unique_integers(values: Tensor, stop: int) -> tuple[Tensor, Tensor]:
    """Compute `torch.unique` of integers (n,) in [0, stop): the sorted distinct values, and the index (n,) of each."""
    if stop > 4 * len(values):  # a table of all integers would cost more than sorting
        distinct, index = values.unique(return_inverse=True)
        return distinct, index
    occurs = torch.zeros(stop, dtype=torch.bool)
    occurs[values] = True
    return occurs.nonzero().flatten(), (occurs.cumsum(dim=0) - 1).index_select(0, values)


def _draw_varying_features(
    x: Tensor, varying: Tensor, blocks: Tensor, shape: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """Draw candidate split features: a random table column, then one of its features in proportion to variance."""
    if int(blocks[-1]) + 1 == len(blocks):  # blocks of one feature
        return varying[torch.randint(len(varying), shape, generator=generator)]
    block = blocks[varying].unique_consecutive(return_inverse=True)[1]
    variance = x[:, varying].var(dim=0, correction=0)
    probability = (variance / torch.zeros_like(variance).index_add_(0, block, variance)[block]).double()
    cumulative = torch.cumsum(probability, dim=0)  # rises by 1 in each block
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (int(block[-1]) + 1)
    return varying[torch.searchsorted(cumulative, drawn).clamp_max(len(varying) - 1)]


def _append_leaves(nodes: TreeNodes | None, count: int) -> TreeNodes:
    """Return the nodes with ``count`` leaves appended; if ``nodes`` is None, the leaves are the roots of new trees."""
    zeros, offset = torch.zeros(count, dtype=torch.int64), 0 if nodes is None else len(nodes.child)
    leaves = TreeNodes(
        torch.arange(count),
        zeros,
        torch.full((count,), math.inf, dtype=torch.float32),
        torch.arange(count) + offset,
        zeros.clone(),
    )
    if nodes is None:
        return leaves
    return TreeNodes(nodes.root, *(torch.cat(pair) for pair in zip(nodes[1:], leaves[1:], strict=True)))


def _evaluate_random_splits(
    values: Tensor, weights: Tensor, group: Tensor, member: Tensor, owner: Tensor, count: Tensor, fraction: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate a random threshold for each node and each feature that was drawn for it.

    A *pair* is a row in a tree; it is at one node. A *combination* is a node and a class that occurs at it. ``group``
    and ``member`` (pairs,) are the node and the combination of each pair, ``owner`` (combinations,) the node of each
    combination, and ``count`` its summed weight. ``fraction`` (nodes, splits) in [0, 1) is the position of the
    threshold between the extreme ``values`` (pairs, splits) at the node. Returns the thresholds (nodes, splits); a mask
    (pairs, splits) of values above them; and scores (nodes, splits): the summed weight minus the weighted Gini impurity
    of both sides, or 0 if one side is empty.
    """
    # The smallest divisor.
    min_divisor = 1e-30
    index = group[:, None].expand(values.shape)
    low = torch.full_like(fraction, math.inf).scatter_reduce_(0, index, values, "amin")
    high = torch.full_like(fraction, -math.inf).scatter_reduce_(0, index, values, "amax")
    threshold = low + fraction * (high - low)
    right = values > threshold.index_select(0, group)
    counts = values.new_zeros(len(count), fraction.shape[1]).index_add_(0, member, weights[:, None] * right)
    score = torch.zeros_like(fraction)
    for side in (counts, count[:, None] - counts):
        size = torch.zeros_like(fraction).index_add_(0, owner, side)
        score += torch.zeros_like(fraction).index_add_(0, owner, side.square()) / size.clamp_min(min_divisor)
    return threshold, right, torch.where(threshold < high, score, 0.0)  # the smallest value never exceeds it
