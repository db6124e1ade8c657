"""Meta-Dataset's sampler: ways and shots vary, and the classes of an episode may be from one node of a hierarchy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

import torch
from torch import Tensor

from protonet.datasets.benchmarks import read_class_lists
from protonet.episodes.samplers.sampler import (
    EMPTY_SLOT,
    RandomStream,
    SampledEpisodes,
    Sampler,
    sample_uniform_by_episode,
)
from protonet.errors import raise_input_error
from protonet.sampling import ClassIndex, draw_without_replacement

META_DATASET_MIN_WAY, META_DATASET_MAX_WAY = 5, 50  #: Minimum and maximum number of classes per episode.
MAX_QUERIES_PER_CLASS = 10  #: Maximum number of query rows per class.
MAX_SUPPORT_ROWS = 500  #: Maximum number of support rows per episode.
#: A class counts as having at most this many rows when the number of support rows of an episode is drawn.
MAX_COUNTED_CLASS_SIZE = 100
#: Logarithm of the largest random factor on the fraction of support rows of a class.
MAX_LOG_CLASS_WEIGHT = math.log(2)
MAX_NODE_CLASSES = 392  #: Maximum number of classes below a node of a hierarchy; nodes with more are not used.


@dataclass(frozen=True)
class MetaDataset(Sampler):
    """The sampler of Meta-Dataset: 5 to 50 ways, shots that depend on the class sizes, up to 10 queries per class.

    Source: Triantafillou et al., "Meta-Dataset: a dataset of datasets for learning to learn from few examples" (2020),
        sec. 3.2 and appendix A; numbers of its code (sampling.py, data_config_common.gin).
        https://arxiv.org/abs/1903.03096
    """

    class_groups: tuple[tuple[int, ...], ...] = ()
    """Groups of class indices. All classes of an episode are from one group. If empty, all classes are one group."""
    use_whole_group: bool = False
    """Whether an episode has all classes of its group, up to ``META_DATASET_MAX_WAY``, instead of a random number of
    them."""
    hierarchy: str | None = None
    """The hierarchy from which `choose_classes` sets ``class_groups``, in a form of `read_class_groups`; None to keep
    ``class_groups``."""

    shot = (1, MAX_COUNTED_CLASS_SIZE)
    """Support rows per class, from and to, in the report's table of accuracy by shots. Large classes may have more."""
    shot_title = ""
    way = (META_DATASET_MIN_WAY, META_DATASET_MAX_WAY)
    n_required_classes = META_DATASET_MIN_WAY

    @property
    def hashed_tensors(self) -> list[Tensor]:
        """The class indices (classes of the group,) int64 of each group; `to_dict` has only the number of groups."""
        return list(map(torch.tensor, self.class_groups))

    def choose_classes(
        self, index: ClassIndex, class_names: tuple[str, ...]
    ) -> tuple[MetaDataset, ClassIndex, list[str]]:
        """Select all classes, and read their groups from the hierarchy, if one is set."""
        sampler = self
        if self.hierarchy is not None:
            groups, use_whole_group = read_class_groups(self.hierarchy, class_names)
            sampler = replace(self, class_groups=groups, use_whole_group=use_whole_group)
        return sampler, sampler.validate(index, class_names), []

    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that the data and each group have at least 5 classes, and that each class has at least two rows."""
        if len(index.class_counts) < META_DATASET_MIN_WAY:
            remedy = "Add classes, or choose another protocol."
            constraint = f"be {META_DATASET_MIN_WAY} or more, as Meta-Dataset's episodes have"
            raise_input_error("classes", constraint, len(index.class_counts), remedy)
        smallest = int(index.class_counts.argmin())
        if index.class_counts[smallest] < 2:
            got = f"class {class_names[smallest]!r} with {int(index.class_counts[smallest])}"
            raise_input_error("classes", "have 2 rows (shot + query)", got, "Leave small classes out.")
        if any(
            len(set(group)) < META_DATASET_MIN_WAY or not set(group) <= set(range(len(index.class_counts)))
            for group in self.class_groups
        ):
            remedy = "Pass those of `read_class_groups`."
            raise_input_error("class_groups", f"be of {META_DATASET_MIN_WAY} known classes or more", "others", remedy)
        return index

    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw the episodes, see `Sampler.sample`."""
        classes, queries, shots = self._draw_classes_and_shots(index, seed, first, n_episodes)
        size, start, drawn = index.class_counts[classes], index.class_starts[classes], shots > 0
        slots = int((queries + shots).max()) if n_episodes else 0
        shape = (n_episodes, META_DATASET_MAX_WAY, MAX_SUPPORT_ROWS + MAX_QUERIES_PER_CLASS)
        uniform_rows = sample_uniform_by_episode(seed, RandomStream.ROW, first, shape)[..., :slots]
        rows = torch.full((n_episodes, META_DATASET_MAX_WAY, slots), EMPTY_SLOT)
        offsets = draw_without_replacement(uniform_rows[drawn], size[drawn])
        rows[drawn] = index.row_indices[start[drawn][:, None] + offsets]
        position = torch.arange(slots)
        is_support = position < shots[..., None]
        is_query = ~is_support & (position < (shots + queries)[..., None])
        nothing = torch.empty(n_episodes, META_DATASET_MAX_WAY, 0, dtype=torch.int64)
        support, query = rows.where(is_support, EMPTY_SLOT), rows.where(is_query, EMPTY_SLOT)
        return SampledEpisodes(support, query, nothing[:, :0], nothing)

    def count_classes_and_queries(self, index: ClassIndex, *, seed: int, n_episodes: int) -> tuple[Tensor, Tensor]:
        """Compute the results of `Sampler.count_classes_and_queries` without drawing rows."""
        classes, queries, _ = self._draw_classes_and_shots(index, seed, 0, n_episodes)
        n_classes = len(index.class_counts)
        class_mask = torch.zeros(n_episodes, n_classes + 1, dtype=torch.bool)
        class_mask.scatter_(1, classes.where(queries > 0, n_classes), value=True)
        return class_mask[:, :-1], queries.sum(dim=1)

    def _draw_classes_and_shots(
        self, index: ClassIndex, seed: int, first: int, n_episodes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw each episode's classes from one group; return them with their numbers of queries and support rows."""

        def uniform(stream: RandomStream, *shape: int) -> Tensor:
            return sample_uniform_by_episode(seed, stream, first, (n_episodes, *shape))

        groups = self.class_groups or (tuple(range(len(index.class_counts))),)
        table = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, groups)), batch_first=True)  # (groups, classes)
        sizes = torch.tensor(list(map(len, groups)))
        group = (uniform(RandomStream.GROUP) * len(groups)).long()
        way = max_way = sizes[group].clamp_max(META_DATASET_MAX_WAY)
        if not self.use_whole_group:
            way = META_DATASET_MIN_WAY + (uniform(RandomStream.WAY) * (max_way - META_DATASET_MIN_WAY + 1)).long()
        order = draw_without_replacement(uniform(RandomStream.CLASS, META_DATASET_MAX_WAY), sizes[group])
        classes = table[group[:, None], order]
        drawn = torch.arange(META_DATASET_MAX_WAY) < way[:, None]
        uniform_shots, uniform_sizes = uniform(RandomStream.SHOT, 1), uniform(RandomStream.SIZE, META_DATASET_MAX_WAY)
        queries, shots = _count_queries_and_shots(index.class_counts[classes], drawn, uniform_shots, uniform_sizes)
        return classes, queries, shots

    def to_dict(self) -> dict[str, object]:
        """Convert the settings to a JSON object, whose keys are the names of the command-line options."""
        return {
            "hierarchy": self.hierarchy,
            "protocol": "meta-dataset",
            "way": list(self.way),
            "shot": list(self.shot),
            "n_open_classes": 0,
            "groups": len(self.class_groups),
            "kind": self.format_title(),
        }

    def format_title(self) -> str:
        """Format the settings as a short title of the protocol, for reports and logs."""
        kind = "nodes of a hierarchy" if self.use_whole_group else "superclasses"
        return "Meta-Dataset's ways and shots" + (f", {len(self.class_groups)} {kind}" if self.class_groups else "")


def _count_queries_and_shots(size: Tensor, drawn: Tensor, beta: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the numbers of queries and of shots (episodes, classes) from class sizes and uniform random numbers.

    ``beta`` is the fraction of the rows that become support rows; ``alpha`` varies this fraction between classes.

    Source: Triantafillou et al. (2020), appendix A, equations of the sizes of query set, support set and K_c.
    """
    smallest = size.masked_fill(~drawn, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
    queries = (smallest // 2).clamp_max(MAX_QUERIES_PER_CLASS).expand_as(size).where(drawn, 0)
    left = (size - queries).where(drawn, 0)
    row_counts = (beta * left.clamp_max(MAX_COUNTED_CLASS_SIZE) + 1).floor().where(drawn, 0.0)
    total = _sum_in_order(row_counts).clamp_max(MAX_SUPPORT_ROWS) - drawn.sum(
        dim=1, keepdim=True
    )  # less one of each class
    weights = (size * ((2 * alpha - 1) * MAX_LOG_CLASS_WEIGHT).exp()).where(drawn, 0.0)
    shots = (weights / _sum_in_order(weights) * total).floor().long() + 1
    return queries, shots.minimum(left).where(drawn, 0)


def _sum_in_order(values: Tensor) -> Tensor:
    """Sum values (episodes, classes) over the classes, with the same rounding for any batch size: (episodes, 1)."""
    return values.cumsum(dim=1)[:, -1:]


def read_class_groups(hierarchy: str, names: Sequence[str]) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Group classes by their superclasses, or by the nodes of a hierarchy.

    Args:
        hierarchy: ``names``, if the text before the last ``/`` of a class's name is its superclass, such as an
            alphabet; or ``meta-ilsvrc-2012``, the hierarchy of this class list.
        names: The names of the classes.

    Returns:
        groups: The class indices of each superclass with at least 5 classes, or of each node with several branches and
            5 to 392 classes below it.
        use_whole_group: Whether an episode has all classes of its group: False for superclasses, True for nodes.

    Raises:
        InputError: The hierarchy is unknown, lacks a class, or has no group of 5 classes.
    """
    use_whole_group = hierarchy != "names"
    if use_whole_group:
        nodes, max_classes = _read_nodes(hierarchy, names), MAX_NODE_CLASSES
    else:
        nodes, max_classes = {}, len(names)
        for class_id, name in enumerate(names):
            superclass, slash, _ = name.rpartition("/")
            if not slash:
                remedy = "Name classes SUPERCLASS/CLASS, or leave it out."
                got = f"{name!r} without a superclass"
                raise_input_error("hierarchy", "be in the names of all classes", got, remedy)
            nodes.setdefault(superclass, set()).add(class_id)
    groups = tuple(
        tuple(sorted(nodes[name])) for name in sorted(nodes) if META_DATASET_MIN_WAY <= len(nodes[name]) <= max_classes
    )
    if not groups:
        sizes = f"{max(map(len, nodes.values()), default=0)} at most"
        raise_input_error("hierarchy", f"have a group of {META_DATASET_MIN_WAY} classes", sizes, "Leave it out.")
    return groups, use_whole_group


def _read_nodes(hierarchy: str, names: Sequence[str]) -> dict[str, set[int]]:
    """List the class indices below each node of a class list's hierarchy that has classes in several branches."""
    listed = {name: classes.children for name, classes in read_class_lists().items() if classes.children}
    if hierarchy not in listed:
        remedy = "Pass one of these, or names."
        raise_input_error("hierarchy", f"be names or one of {', '.join(listed)}", repr(hierarchy), remedy)
    children = {node: below.split() for node, below in listed[hierarchy].items()}
    known = {*children, *(child for nodes in children.values() for child in nodes)}
    for name in names:
        if name not in known:
            remedy = "Pass its data, or names."
            raise_input_error("hierarchy", "have all classes, by name", f"none for {name!r}", remedy)
    class_ids = {name: {class_id} for class_id, name in enumerate(names)}
    below: dict[str, set[int]] = {}  # the classes at and below each node
    for node in TopologicalSorter(children).static_order():  # children come first
        below[node] = class_ids.get(node, set()).union(*(below[child] for child in children.get(node, ())))
    return {node: below[node] for node, nodes in children.items() if len({c for c in nodes if below[c]}) > 1}
