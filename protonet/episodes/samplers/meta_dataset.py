"""Meta-Dataset's sampler: ways and shots that vary, classes of one node of a hierarchy, if there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import torch
from torch import Tensor

from protonet.datasets.benchmarks import read_class_lists
from protonet.episodes.samplers.sampler import (
    CLASS_STREAM,
    GROUP_STREAM,
    NO_ROW,
    ROW_STREAM,
    SHOT_STREAM,
    SIZE_STREAM,
    WAY_STREAM,
    SampledEpisodes,
    Sampler,
    sample_uniform,
)
from protonet.errors import raise_input_error
from protonet.sampling import ClassIndex, draw_distinct

MIN_WAY, MAX_WAY = 5, 50  #: Classes per episode.
MAX_QUERY = 10  #: Query rows per class.
MAX_SUPPORT = 500  #: Support rows per episode.
MAX_ROWS_COUNTED = 100  #: Rows per class that count where the size of the support is drawn.
LOG_WEIGHT = math.log(2)  #: Logarithm of the largest random factor on a class's fraction of the support.
HIERARCHY_REMEDY = "Pass lines 'parent child', such as wordnet.is_a.txt, or names."
MAX_LEAVES = 392  #: Classes below a node of a hierarchy that episodes are drawn from.


@dataclass(frozen=True)
class MetaDataset(Sampler):
    """Draw episodes as Meta-Dataset does.

    Source: Triantafillou et al., "Meta-Dataset: a dataset of datasets for learning to learn from few examples" (2020),
        sec. 3.2 and appendix A; numbers of its code (sampling.py, data_config_common.gin).
        https://arxiv.org/abs/1903.03096
    """

    #: Groups of class indices; an episode has classes of one group. Empty for one group of all classes.
    groups: tuple[tuple[int, ...], ...] = ()
    all_of_group: bool = False  #: Take all classes of a group, at most ``MAX_WAY``; otherwise a uniform number of them.
    #: Which classes belong together, see `read_groups`; None for all, or for ``groups``.
    hierarchy: str | None = None

    @property
    def shot(self) -> tuple[int, int]:
        """Least and most support rows per class in the table by shots; classes of many rows may have more."""
        return 1, MAX_ROWS_COUNTED

    @property
    def n_drawn(self) -> int:
        """How many classes there must be."""
        return MIN_WAY

    @property
    def way(self) -> tuple[int, int]:
        """Least and most classes per episode."""
        return MIN_WAY, MAX_WAY

    @property
    def hidden(self) -> list[Tensor]:
        """The classes of each group; `describe` has their number alone."""
        return list(map(torch.tensor, self.groups))

    def choose_classes(
        self, index: ClassIndex, class_names: tuple[str, ...]
    ) -> tuple[MetaDataset, ClassIndex, list[str]]:
        """Choose all classes, in the groups of the hierarchy."""
        sampler = self
        if self.hierarchy is not None:
            groups, all_of_group = read_groups(self.hierarchy, class_names)
            sampler = replace(self, groups=groups, all_of_group=all_of_group)
        return sampler, sampler.validate(index, class_names), []

    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that there are enough classes of at least two rows, and that groups are of enough of them."""
        if len(index.size) < MIN_WAY:
            remedy = "Add classes, or choose another protocol."
            got = str(len(index.size))
            raise_input_error("classes", f"be {MIN_WAY} or more, as Meta-Dataset's episodes have", got, remedy)
        smallest = int(index.size.argmin())
        if index.size[smallest] < 2:
            got = f"class {class_names[smallest]!r} with {int(index.size[smallest])}"
            raise_input_error("classes", "have 2 rows (shot + query)", got, "Leave small classes out.")
        if any(len(set(group)) < MIN_WAY or not set(group) <= set(range(len(index.size))) for group in self.groups):
            remedy = "Pass those of `read_groups`."
            raise_input_error("groups", f"be of {MIN_WAY} known classes or more", "others", remedy)
        return index

    def sample(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw the episodes numbered ``first`` and after."""
        classes, queries, shots = self._draw_sizes(index, seed, first, n_episodes)
        size, start, drawn = index.size[classes], index.start[classes], shots > 0
        slots = int((queries + shots).max()) if n_episodes else 0
        shape = (n_episodes, MAX_WAY, MAX_SUPPORT + MAX_QUERY)
        uniform_rows = sample_uniform(seed, ROW_STREAM, first, shape)[..., :slots]
        rows = torch.full((n_episodes, MAX_WAY, slots), NO_ROW)
        rows[drawn] = index.rows[start[drawn][:, None] + draw_distinct(uniform_rows[drawn], size[drawn])]
        position = torch.arange(slots)
        is_support = position < shots[..., None]
        is_query = ~is_support & (position < (shots + queries)[..., None])
        nothing = torch.empty(n_episodes, MAX_WAY, 0, dtype=torch.int64)
        return SampledEpisodes(rows.where(is_support, NO_ROW), rows.where(is_query, NO_ROW), nothing[:, :0], nothing)

    def count(self, index: ClassIndex, *, seed: int, n_episodes: int) -> tuple[Tensor, Tensor]:
        """Find the classes of the first episodes and count their queries, without drawing up to 500 rows of each."""
        classes, queries, _ = self._draw_sizes(index, seed, 0, n_episodes)
        n_classes = len(index.size)
        class_mask = torch.zeros(n_episodes, n_classes + 1, dtype=torch.bool)
        class_mask.scatter_(1, classes.where(queries > 0, n_classes), value=True)
        return class_mask[:, :-1], queries.sum(dim=1)

    def _draw_sizes(self, index: ClassIndex, seed: int, first: int, n_episodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw classes, their queries and shots, (episodes, MAX_WAY) int64 each; an episode has those with queries.

        The classes are of one group: of a hierarchy's nodes (``all_of_group``) all classes up to ``MAX_WAY``.
        """

        def uniform(stream: int, *shape: int) -> Tensor:
            return sample_uniform(seed, stream, first, (n_episodes, *shape))

        groups = self.groups or (tuple(range(len(index.size))),)
        table = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, groups)), batch_first=True)  # (groups, classes)
        sizes = torch.tensor(list(map(len, groups)))
        group = (uniform(GROUP_STREAM) * len(groups)).long()
        way = max_way = sizes[group].clamp_max(MAX_WAY)
        if not self.all_of_group:
            way = MIN_WAY + (uniform(WAY_STREAM) * (max_way - MIN_WAY + 1)).long()
        classes = table[group[:, None], draw_distinct(uniform(CLASS_STREAM, MAX_WAY), sizes[group])]
        drawn = torch.arange(MAX_WAY) < way[:, None]
        queries, shots = split_rows(index.size[classes], drawn, uniform(SHOT_STREAM, 1), uniform(SIZE_STREAM, MAX_WAY))
        return classes, queries, shots

    def describe(self) -> dict[str, object]:
        """Describe the settings under the names of the command line."""
        return {
            "hierarchy": self.hierarchy,
            "protocol": "meta-dataset",
            "way": list(self.way),
            "shot": list(self.shot),
            "n_open_classes": 0,
            "groups": len(self.groups),
            "kind": self.title(),
        }

    def title(self) -> str:
        """Describe the settings in a few words."""
        kind = "nodes of a hierarchy" if self.all_of_group else "superclasses"
        return "Meta-Dataset's ways and shots" + (f", {len(self.groups)} {kind}" if self.groups else "")


def split_rows(size: Tensor, drawn: Tensor, beta: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Split the rows of episodes' classes into equally many queries per class and a support of class sizes.

    Classes of ``size`` (episodes, classes), >= 2, get 0 rows where not ``drawn``. ``beta`` (episodes, 1) in [0, 1) is
    the fraction of rows in the support, ``alpha`` (episodes, classes) in [0, 1) a factor of each class's shots.

    Source: Triantafillou et al. (2020), appendix A, equations of the sizes of query set, support set and K_c.
    """
    smallest = size.masked_fill(~drawn, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
    queries = (smallest // 2).clamp_max(MAX_QUERY).expand_as(size).where(drawn, 0)
    left = (size - queries).where(drawn, 0)
    row_counts = (beta * left.clamp_max(MAX_ROWS_COUNTED) + 1).floor().where(drawn, 0.0)
    total = _add_up(row_counts).clamp_max(MAX_SUPPORT) - drawn.sum(dim=1, keepdim=True)  # less one of each class
    weights = (size * ((2 * alpha - 1) * LOG_WEIGHT).exp()).where(drawn, 0.0)
    shots = (weights / _add_up(weights) * total).floor().long() + 1
    return queries, shots.minimum(left).where(drawn, 0)


def _add_up(values: Tensor) -> Tensor:
    """Compute the sums (episodes, 1) of values (episodes, classes), added in order: equal in batches of any size."""
    return values.cumsum(dim=1)[:, -1:]


def read_groups(hierarchy: str, names: Sequence[str]) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Find the groups of classes of a hierarchy, and whether an episode has all classes of its group.

    Args:
        hierarchy: ``names``, if the text before the last ``/`` of a class's name is its superclass, such as an
            alphabet; the name of a list of classes that has one, ``meta-ilsvrc-2012``; or the path of a file of lines
            ``parent child``, such as WordNet's ``wordnet.is_a.txt``, whose leaves are the classes.
        names: Of the classes.

    Returns:
        The numbers of the classes of each superclass of at least 5, or of each node of 5 to 392 that has forks; and
        whether a node's are all in each of its episodes.
    """
    all_of_group = hierarchy != "names"
    if all_of_group:
        nodes, max_classes = _read_nodes(hierarchy, names), MAX_LEAVES
    else:
        nodes, max_classes = {}, len(names)
        for class_id, name in enumerate(names):
            superclass, slash, _ = name.rpartition("/")
            if not slash:
                remedy = "Name classes SUPERCLASS/CLASS, or pass a file of lines 'parent child'."
                got = f"{name!r} without a superclass"
                raise_input_error("hierarchy", "be in the names of all classes", got, remedy)
            nodes.setdefault(superclass, set()).add(class_id)
    groups = tuple(tuple(sorted(nodes[name])) for name in sorted(nodes) if MIN_WAY <= len(nodes[name]) <= max_classes)
    if not groups:
        sizes = f"{max(map(len, nodes.values()), default=0)} at most"
        raise_input_error("hierarchy", f"have a group of {MIN_WAY} classes", sizes, "Leave it out.")
    return groups, all_of_group


def _read_nodes(hierarchy: str, names: Sequence[str]) -> dict[str, set[int]]:
    """Find the classes below each node of a hierarchy that has several children with classes below them."""
    listed = read_class_lists().get(hierarchy)
    if listed is None:
        children = _read_edges(Path(hierarchy))
    else:
        children = {node: below.split() for node, below in listed.children.items()}
    known = {*children, *(child for nodes in children.values() for child in nodes)}
    for name in names:
        if name not in known:
            raise_input_error("hierarchy", "have all classes, by name", f"none for {name!r}", HIERARCHY_REMEDY)
    class_ids = {name: {class_id} for class_id, name in enumerate(names)}
    below: dict[str, set[int]] = {}  # the classes at and below each node
    try:
        for node in TopologicalSorter(children).static_order():  # children come first
            below[node] = class_ids.get(node, set()).union(*(below[child] for child in children.get(node, ())))
    except CycleError as error:
        got = f"one through {min(error.args[1])!r} in {hierarchy}"
        raise_input_error("hierarchy", "have no circles", got, "Correct the file.")
    return {node: below[node] for node, nodes in children.items() if len({c for c in nodes if below[c]}) > 1}


def _read_edges(path: Path) -> dict[str, list[str]]:
    """Read the nodes below each node of a file of lines ``parent child``."""
    children: dict[str, list[str]] = {}
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise_input_error("hierarchy", "be names, or a file that can be read", f"{path} ({error})", HIERARCHY_REMEDY)
    for line_index, words in enumerate(lines):
        if len(words) != 2:
            got = f"{' '.join(words)!r}, number {line_index + 1}"
            raise_input_error("hierarchy", "have lines 'parent child'", got, HIERARCHY_REMEDY)
        children.setdefault(words[0], []).append(words[1])
    return children
