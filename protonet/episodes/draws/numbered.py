"""Draw numbered episodes of many kinds: ranges of ways and shots, unequal shots, unbalanced queries, open classes.

Other protocols are a `Sampler` of their own: `fixed_split`, `meta_dataset` and `generalized`.

An episode depends only on the seed and its number: not on the machine, the batch or the other episodes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet._checks import check_int, check_number, fail
from protonet.sampling import ClassIndex, draw_distinct

#: Independent streams of random numbers, so that for example more queries do not change which classes are drawn.
WAYS, CLASSES, SHOTS, QUERIES, ROWS, DISTRACTORS, UNLABELLED, GROUPS, SIZES, QUERY_ORDER, UNLABELLED_ORDER = range(11)
NO_ROW = -1  #: Stands in a `Draw` where there is no row.
COUNTED = 1024  #: Episodes that are drawn at a time to count their queries.
MOST = 10**6  #: The largest number of classes, and of rows per class: far beyond any use, far below any overflow.


class Draw(NamedTuple):
    """Row numbers of a batch of episodes, int64, with ``NO_ROW`` in slots without a row."""

    support: Tensor  #: (episodes, most classes, most shots).
    query: Tensor  #: (episodes, most classes, most queries).
    open_query: Tensor  #: (episodes, n_open, n_query), of classes outside the episode.
    unlabelled: Tensor  #: (episodes, most classes + n_distractors, n_unlabelled), distractor classes last.


class Sampler(Protocol):
    """How episodes are drawn from rows by class: `Setting`, or another protocol."""

    @property
    def shot(self) -> tuple[int, int]:
        """Least and most support rows per class."""

    @property
    def n_drawn(self) -> int:
        """How many classes there must be: where that is all there are, each episode has all of them."""

    @property
    def n_base(self) -> int:
        """Base classes, which are the first of each episode's; 0 where there are none."""

    def check(self, name: str, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that the data fit, and return the classes that can be drawn, see `check_setting`."""

    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> Draw:
        """Draw the episodes numbered ``first`` and after; each depends on the seed and its number alone."""

    def find_members(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Find which classes the first episodes have: (n_episodes, classes of the index) bool."""

    def count_queries(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Count the queries of the first episodes: (n_episodes,) int64, without those of open classes."""

    def describe(self) -> dict[str, Any]:
        """Return the settings under the names of the command line, in a form that JSON can write."""

    def title(self) -> str:
        """Return the settings as a few words for people."""


class Setting(NamedTuple):
    """The kind of episodes to draw.

    Source: imbalance as in Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), sec. 3.
        https://arxiv.org/abs/2204.11181
    """

    way: tuple[int, int] = (5, 5)  #: Least and most classes per episode (n_way), >= 2; all between are equally likely.
    shot: tuple[int, int] = (1, 1)  #: Least and most support rows per class (n_shot), >= 1, likewise.
    n_query: int = 15  #: Query rows per class, >= 1; the average over classes if ``imbalance`` is given.
    unequal: bool = False  #: Draw the number of shots for each class alone, not once per episode.
    #: None for equally many queries of each class. Otherwise the classes share ``way * n_query`` queries by a Dirichlet
    #: distribution of this concentration, > 0: 2 in the literature, less for more imbalance.
    imbalance: float | None = None
    n_open: int = 0  #: Open classes: classes outside the episode that add ``n_query`` queries each, >= 0.
    #: Accept classes with fewer rows than shots and queries, with fewer queries. Classes without a single row for a
    #: query are left out.
    allow_small: bool = False
    #: Unlabelled rows of each class of the episode and of each distractor class, which methods may learn from, >= 0.
    n_unlabelled: int = 0
    n_distractors: int = 0  #: Distractor classes: classes outside the episode that add unlabelled rows, >= 0.

    @property
    def n_drawn(self) -> int:
        """The most classes that an episode has something of, open ones and distractors too."""
        return self.way[1] + self.n_open + self.n_distractors

    @property
    def n_base(self) -> int:
        """None of an episode's classes are base classes."""
        return 0

    def check(self, name: str, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that the data fit, see `check_setting`."""
        return check_setting(name, index, self, class_names)

    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> Draw:
        """Draw episodes, see `draw_episodes`."""
        return draw_episodes(index, self, seed=seed, first=first, n_episodes=n_episodes)

    def find_members(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Find the classes of episodes, see `find_members`."""
        return find_members(index, self, seed=seed, n_episodes=n_episodes)

    def count_queries(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Count the queries of episodes, see `count_queries`."""
        return count_queries(index, self, seed=seed, n_episodes=n_episodes)

    def describe(self) -> dict[str, Any]:
        """Return the settings under the names of the command line."""
        return {"protocol": "episodes"} | {name.removeprefix("n_"): value for name, value in self._asdict().items()}

    def title(self) -> str:
        """Return the settings as a few words, such as ``5-way 1-shot 15-query``."""
        way, shot = ("-".join(map(str, dict.fromkeys(span))) for span in (self.way, self.shot))
        kind = "" if self.imbalance is None else f", queries by Dirichlet shares of {self.imbalance:g}"
        kind += f", {self.n_open} open classes" if self.n_open else ""
        if self.n_unlabelled:
            others = f" and of {self.n_distractors} distractor classes" if self.n_distractors else ""
            kind += f", {self.n_unlabelled} unlabelled rows of each class{others}"
        return f"{way}-way {shot}-shot {self.n_query}-query{kind}"


def check_setting(name: str, index: ClassIndex, setting: Setting, class_names: tuple[str, ...]) -> ClassIndex:
    """Check that a setting fits the data, and return the classes that can be drawn.

    Args:
        name: The public function's or command's name, for messages.
        index: Rows by class, from `protonet.sampling.index_classes`.
        setting: The kind of episodes.
        class_names: One name per class, for messages.

    Returns:
        The index; with ``allow_small``, without the classes that are too small.

    Raises:
        InputTypeError: A count is not a number.
        InputError: A count is outside its range, there are fewer classes than asked for, or a class has too few rows.
    """
    for argument, (low, high), least in (("way", setting.way, 2), ("shot", setting.shot, 1)):
        check_int(name, argument, low, low=least, high=MOST)
        check_int(name, argument, high, low=low, high=MOST, remedy="Write the smaller number first, such as 1-10.")
    n_query = check_int(name, "n_query", setting.n_query, low=1, high=MOST)
    n_open = check_int(name, "n_open", setting.n_open, low=0, high=MOST)
    n_unlabelled = check_int(name, "n_unlabelled", setting.n_unlabelled, low=0, high=MOST)
    n_distractors = check_int(name, "n_distractors", setting.n_distractors, low=0, high=MOST)
    if n_distractors and not n_unlabelled:
        remedy = "Ask for unlabelled rows (--unlabelled), or for no distractors."
        fail(name, "n_distractors", "be 0 where there are no unlabelled rows", n_distractors, remedy)
    if setting.imbalance is not None:
        check_number(name, "imbalance", setting.imbalance, low=0, strict=True)
    most_query = n_query if setting.imbalance is None else n_query * setting.way[1]
    needed = setting.shot[1] + (1 if setting.allow_small else most_query) + n_unlabelled
    if setting.allow_small:
        index = index.take((index.size >= needed).nonzero().flatten())
    n_classes = f"{len(index.size)}{f' beside {n_open} open ones' if n_open else ''}"
    n_classes += f" beside {n_distractors} distractors" if n_distractors else ""
    if setting.n_drawn > len(index.size):
        remedy = f"Ask for fewer classes{' or open classes' if n_open else ''}, or another side of the split."
        fail(name, "way", f"be at most the number of classes ({n_classes})", setting.way[1], remedy)
    if bool((index.size < needed).any()):
        worst = int(index.size.argmin())
        got = f"class {class_names[worst]!r} with {int(index.size[worst])}"
        rows = "shot + query" + (" + unlabelled" if n_unlabelled else "")
        limit = f"have {needed} rows ({rows}{'' if setting.imbalance is None else ', were all of one class'})"
        fail(name, "classes", limit, got, "Ask for fewer rows, or allow small classes (--allow-small).")
    return index


def draw_episodes(index: ClassIndex, setting: Setting, *, seed: int, first: int, n_episodes: int) -> Draw:
    """Draw the episodes numbered ``first`` to ``first + n_episodes - 1``.

    Args:
        index: Rows by class, from `check_setting`.
        setting: The kind of episodes.
        seed: In [0, 2**63).
        first: The first episode's number, >= 0.
        n_episodes: >= 0.

    Returns:
        The row numbers. A row's label within its episode is its position along the axis of classes.

    Source: counter-based random numbers, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
        https://doi.org/10.1145/2063384.2063405
    """
    most_way, most_shot, n_open = setting.way[1], setting.shot[1], setting.n_open

    def uniform(stream: int, *shape: int) -> Tensor:
        return draw_uniform(seed, stream, first, (n_episodes, *shape))

    way, classes = _draw_classes(index, setting, seed, first, n_episodes)
    size, start = index.size[classes], index.start[classes]  # (episodes, most_way + n_open)
    drawn = torch.arange(most_way) < way[:, None]  # (episodes, most_way), the classes that the episode has
    shots = _spread(uniform(SHOTS, most_way), *setting.shot)
    shots = (shots if setting.unequal else shots[:, :1].expand(-1, most_way)).where(drawn, 0)
    queries = torch.full_like(shots, setting.n_query).where(drawn, 0)
    if setting.imbalance is not None:
        queries = _share_queries(uniform(QUERIES, most_way), setting.imbalance, drawn, way * setting.n_query)
    most_query = min(setting.n_query * (1 if setting.imbalance is None else most_way), int(index.size.max()))
    queries = torch.minimum(queries, size[:, :most_way] - shots - setting.n_unlabelled)
    open_queries = torch.full((n_episodes, n_open), setting.n_query).minimum(size[:, most_way : most_way + n_open])
    counts = torch.cat([queries.flatten(), open_queries.flatten(), torch.zeros(1, dtype=torch.int64)])
    slots = most_shot + int(counts.max())  # those that are used
    numbers = uniform(ROWS, most_way + n_open, most_shot + most_query)[..., :slots]
    unlabelled = torch.empty(n_episodes, most_way + setting.n_distractors, 0, dtype=torch.int64)
    if setting.n_unlabelled:
        numbers_more = uniform(UNLABELLED, most_way + setting.n_distractors, setting.n_unlabelled)
        unlabelled = _draw_unlabelled(index, numbers[:, :most_way], numbers_more, shots + queries, size, start)
        unlabelled[:, :most_way].masked_fill_(~drawn[..., None], NO_ROW)
    size, start = size[:, : most_way + n_open], start[:, : most_way + n_open]
    rows = index.rows[start[..., None] + draw_distinct(numbers, size)]  # (episodes, most_way + n_open, slots)
    inside, outside, position = rows[:, :most_way], rows[:, most_way:], torch.arange(slots)
    is_support = position < shots[..., None]
    is_query = ~is_support & (position < (shots + queries)[..., None])
    return Draw(
        inside.where(is_support, NO_ROW)[..., :most_shot],
        inside.where(is_query, NO_ROW)[..., setting.shot[0] :],
        outside.where(position < open_queries[..., None], NO_ROW)[..., : setting.n_query],
        unlabelled,
    )


def _draw_unlabelled(
    index: ClassIndex, numbers: Tensor, more: Tensor, taken: Tensor, size: Tensor, start: Tensor
) -> Tensor:
    """Draw rows that are none of an episode's support and queries.

    Args:
        index: Rows by class.
        numbers: (episodes, classes, slots) that support and queries are drawn by.
        more: (episodes, classes + distractors, n_unlabelled) uniform numbers.
        taken: (episodes, classes) int64, how many rows support and queries have.
        size: (episodes, at least classes + distractors) int64, rows of each class, distractors last.
        start: As ``size``, where the rows of each class begin.

    Returns:
        (episodes, classes + distractors, n_unlabelled) int64 row numbers.
    """
    n_classes, n_distractors, n_more = numbers.shape[1], more.shape[1] - numbers.shape[1], more.shape[2]
    wide = F.pad(numbers, (0, n_more))
    position = torch.arange(wide.shape[2])
    own = (position >= taken[..., None]) & (position < taken[..., None] + n_more)  # right after those that are taken
    wide[own] = more[:, :n_classes].flatten()
    inside = draw_distinct(wide, size[:, :n_classes])[own].view(len(wide), n_classes, n_more)
    last = slice(size.shape[1] - n_distractors, None)
    places = torch.cat([inside, draw_distinct(more[:, n_classes:], size[:, last])], dim=1)
    return index.rows[torch.cat([start[:, :n_classes], start[:, last]], dim=1)[..., None] + places]


def find_members(index: ClassIndex, setting: Setting, *, seed: int, n_episodes: int) -> Tensor:
    """Find which classes the first episodes have, of those of `draw_episodes` with the same arguments.

    Returns:
        (n_episodes, classes of the index) bool, open classes included.
    """
    way, classes = _draw_classes(index, setting, seed, 0, n_episodes)
    position = torch.arange(classes.shape[1])
    drawn = (position < way[:, None]) | (position >= setting.way[1])
    return torch.zeros(n_episodes, len(index.size), dtype=torch.bool).scatter_(1, classes, drawn)


def count_queries(index: ClassIndex, setting: Setting, *, seed: int, n_episodes: int) -> Tensor:
    """Count the queries of the first episodes of `draw_episodes` with the same arguments.

    Returns:
        (n_episodes,) int64, without the queries of open classes.
    """
    if not setting.allow_small:  # then no class has too few rows
        return setting.n_query * _draw_classes(index, setting, seed, 0, n_episodes)[0]
    counts = [torch.empty(0, dtype=torch.int64)]
    for first in range(0, n_episodes, COUNTED):
        some = min(COUNTED, n_episodes - first)
        draw = draw_episodes(index, setting, seed=seed, first=first, n_episodes=some)
        counts.append((draw.query >= 0).sum(dim=(1, 2)))
    return torch.cat(counts)


def _draw_classes(index: ClassIndex, setting: Setting, seed: int, first: int, n_episodes: int) -> tuple[Tensor, Tensor]:
    """Draw the classes of episodes, ``first`` and after.

    Returns:
        way: (episodes,) int64, the number of classes of each.
        classes: (episodes, most classes + open classes + distractors) int64, of which the episode has the first
            ``way``; then come open ones, then distractors.
    """
    way = _spread(draw_uniform(seed, WAYS, first, (n_episodes,)), *setting.way)
    numbers = draw_uniform(seed, CLASSES, first, (n_episodes, setting.way[1] + setting.n_open))
    if setting.n_distractors:
        more = draw_uniform(seed, DISTRACTORS, first, (n_episodes, setting.n_distractors))
        numbers = torch.cat([numbers, more], dim=1)
    return way, draw_distinct(numbers, torch.tensor(len(index.size)).expand(n_episodes))


def _spread(uniform: Tensor, low: int, high: int) -> Tensor:
    """Return whole numbers from ``low`` to ``high``, equally likely, from uniform ones in [0, 1)."""
    return low + (uniform * (high - low + 1)).long()


def _share_queries(uniform: Tensor, concentration: float, drawn: Tensor, total: Tensor) -> Tensor:
    """Share ``total`` (episodes,) queries by a Dirichlet distribution: (episodes, classes) int64, 0 if not ``drawn``.

    The shares are gamma variates, made by inversion of ``uniform`` (episodes, classes), divided by their sum. Counts
    are rounded down; the queries that this leaves go to the classes with the largest fractions.

    Source: gamma variates over their sum, Devroye, "Non-uniform random variate generation" (1986), ch. XI, sec. 4.
    """
    from scipy.special import gammaincinv  # noqa: PLC0415 - slow to import

    gamma = torch.from_numpy(gammaincinv(concentration, uniform.numpy())).where(drawn, 0.0)
    gamma = gamma.where(gamma.sum(dim=1, keepdim=True) > 0, drawn.double())  # where all underflowed
    exact = gamma / gamma.sum(dim=1, keepdim=True) * total[:, None]
    whole = exact.floor()
    rank = (exact - whole).where(drawn, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (whole + (rank < (total - whole.sum(dim=1))[:, None])).long()


def draw_uniform(seed: int, stream: int, first: int, shape: tuple[int, ...]) -> Tensor:
    """Return float64 numbers in [0, 1) of ``shape`` (episodes, ...), those of ``first`` and after.

    Each episode has counters of its own in each ``stream``, which is one of ``WAYS``, ``CLASSES`` and so on.
    """
    per_episode = math.prod(shape[1:])
    blocks = -(-per_episode // 4)  # each counter gives four numbers
    source = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=first * blocks)
    raw = source.random_raw(shape[0] * blocks * 4).reshape(shape[0], blocks * 4)[:, :per_episode]
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)  # (episodes, ...)
