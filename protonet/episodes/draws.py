"""Draw numbered episodes of many kinds: ranges of ways and shots, unequal shots, unbalanced queries, open classes.

What is drawn hangs on the seed and the episode's number alone, not on the machine, the batch or what else is drawn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._checks import check_int, check_number, fail
from protonet.sampling import ClassIndex, draw_distinct

#: Streams of random numbers of `draw_episodes`, so that more queries, say, do not change which classes are drawn.
WAYS, CLASSES, SHOTS, QUERIES, ROWS = range(5)
NO_ROW = -1
#: No number of classes or of rows a class may be larger: far beyond any use, far below any overflow.
MOST = 10**6


class Setting(NamedTuple):
    """What kind of episodes to draw.

    Attributes:
        way: Least and most classes an episode, each number equally likely.
        shot: Least and most support rows a class, likewise.
        n_query: Query rows a class; with ``imbalance``, on average.
        unequal: Does each class of an episode draw its own number of shots?
        imbalance: None for equal classes; otherwise the concentration, > 0, of the Dirichlet distribution of their
            shares in ``way * n_query`` queries: 2 in the literature, less for more imbalance.
        n_open: Classes outside the episode that add ``n_query`` queries each.
        allow_small: May classes have fewer queries than that? Those without one row more than the shots are left out.

    Source: imbalance as in Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), sec. 3.
    """

    way: tuple[int, int] = (5, 5)
    shot: tuple[int, int] = (1, 1)
    n_query: int = 15
    unequal: bool = False
    imbalance: float | None = None
    n_open: int = 0
    allow_small: bool = False


class Draw(NamedTuple):
    """Row numbers of a batch of episodes, int64, ``NO_ROW`` where there is none."""

    support: Tensor  # (episodes, most ways, most shots)
    query: Tensor  # (episodes, most ways, most queries)
    open_query: Tensor  # (episodes, n_open, n_query), of classes outside the episode


def check_setting(name: str, index: ClassIndex, setting: Setting, class_names: tuple[str, ...]) -> ClassIndex:
    """Return the index of the classes that can be drawn from; ``name`` and ``class_names`` are for messages.

    Raises:
        TypeError: A number is not one.
        ValueError: A number outside its range, more ways than classes, a class with too few rows.
    """
    for argument, (low, high), least in (("way", setting.way, 2), ("shot", setting.shot, 1)):
        check_int(name, argument, low, low=least, high=MOST)
        check_int(name, argument, high, low=low, high=MOST, remedy="Write the smaller number first, such as 1-10.")
    n_query = check_int(name, "n_query", setting.n_query, low=1, high=MOST)
    n_open = check_int(name, "n_open", setting.n_open, low=0, high=MOST)
    if setting.imbalance is not None:
        check_number(name, "imbalance", setting.imbalance, low=0, strict=True)
    most_query = n_query if setting.imbalance is None else n_query * setting.way[1]
    needed = setting.shot[1] + (1 if setting.allow_small else most_query)
    if setting.allow_small:
        index = index.take((index.size >= needed).nonzero().flatten())
    n_classes = f"{len(index.size)}{f' beside {n_open} open ones' if n_open else ''}"
    if setting.way[1] + n_open > len(index.size):
        remedy = f"Ask for fewer ways{' or open classes' if n_open else ''}, or another side of the split."
        fail(name, "way", f"be at most the number of classes ({n_classes})", setting.way[1], remedy)
    if bool((index.size < needed).any()):
        worst = int(index.size.argmin())
        got = f"class {class_names[worst]!r} with {int(index.size[worst])}"
        limit = f"have {needed} rows (shot + query{'' if setting.imbalance is None else ', were all of one class'})"
        fail(name, "classes", limit, got, "Ask for fewer, or allow small classes (--allow-small).")
    return index


def draw_episodes(index: ClassIndex, setting: Setting, *, seed: int, first: int, n_episodes: int) -> Draw:
    """Draw the episodes of numbers ``first`` to ``first + n_episodes - 1``.

    Args:
        index: Rows by class, from `check_setting`.
        setting: The kind of episodes.
        seed: In [0, 2**63).
        first: The first episode's number, >= 0.
        n_episodes: >= 0.

    Returns:
        The row numbers; an episode's own label of a row is its position along the axis of ways.

    Source: counter-based random numbers, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    most_way, most_shot, n_open = setting.way[1], setting.shot[1], setting.n_open

    def uniform(stream: int, *shape: int) -> Tensor:
        return _uniform(seed, stream, first, (n_episodes, *shape))

    def spread(uniform: Tensor, low: int, high: int) -> Tensor:
        return low + (uniform * (high - low + 1)).long()

    way = spread(uniform(WAYS), *setting.way)  # (episodes,)
    n_classes = torch.tensor(len(index.size)).expand(n_episodes)
    classes = draw_distinct(uniform(CLASSES, most_way + n_open), n_classes)
    size, start = index.size[classes], index.start[classes]  # (episodes, most_way + n_open)
    drawn = torch.arange(most_way) < way[:, None]  # (episodes, most_way)
    shots = spread(uniform(SHOTS, most_way), *setting.shot)
    shots = (shots if setting.unequal else shots[:, :1].expand(-1, most_way)).where(drawn, 0)
    queries = torch.full_like(shots, setting.n_query).where(drawn, 0)
    if setting.imbalance is not None:
        queries = _share_queries(uniform(QUERIES, most_way), setting.imbalance, drawn, way * setting.n_query)
    most_query = min(setting.n_query * (1 if setting.imbalance is None else most_way), int(index.size.max()))
    queries = torch.minimum(queries, size[:, :most_way] - shots)
    of_open = torch.full((n_episodes, n_open), setting.n_query).minimum(size[:, most_way:])
    slots = most_shot + int(torch.cat([queries.flatten(), of_open.flatten(), torch.zeros(1, dtype=torch.int64)]).max())
    numbers = uniform(ROWS, most_way + n_open, most_shot + most_query)[..., :slots]  # of the slots that are used
    rows = index.rows[start[..., None] + draw_distinct(numbers, size)]  # (episodes, most_way + n_open, slots)
    inside, outside, position = rows[:, :most_way], rows[:, most_way:], torch.arange(slots)
    is_support = position < shots[..., None]
    is_query = ~is_support & (position < (shots + queries)[..., None])
    return Draw(
        inside.where(is_support, NO_ROW)[..., :most_shot],
        inside.where(is_query, NO_ROW)[..., setting.shot[0] :],
        outside.where(position < of_open[..., None], NO_ROW)[..., : setting.n_query],
    )


def _share_queries(uniform: Tensor, concentration: float, drawn: Tensor, total: Tensor) -> Tensor:
    """Return how many of ``total`` (episodes,) queries each drawn class has, (episodes, ways): Dirichlet shares.

    The shares are gamma variates, by inversion, over their sum; what rounding down leaves goes to the largest rests.
    """
    from scipy.special import gammaincinv  # noqa: PLC0415 - slow to import

    gamma = torch.from_numpy(gammaincinv(concentration, uniform.numpy())).where(drawn, 0.0)
    gamma = gamma.where(gamma.sum(dim=1, keepdim=True) > 0, drawn.double())  # all underflowed
    exact = gamma / gamma.sum(dim=1, keepdim=True) * total[:, None]
    whole = exact.floor()
    rank = (exact - whole).where(drawn, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (whole + (rank < (total - whole.sum(dim=1))[:, None])).long()


def _uniform(seed: int, stream: int, first: int, shape: tuple[int, ...]) -> Tensor:
    """Return float64 numbers in [0, 1), of ``shape`` (episodes, ...), each episode's from counters of its own."""
    width = math.prod(shape[1:])
    blocks = -(-width // 4)  # each counter gives four numbers
    source = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=first * blocks)
    raw = source.random_raw(shape[0] * blocks * 4).reshape(shape[0], blocks * 4)[:, :width]
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)
