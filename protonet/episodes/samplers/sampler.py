"""The base class of samplers, and their counter-based random numbers.

An episode depends only on the seed and its number: not on the machine, the batch or the other episodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.datasets.dataset import Dataset
from protonet.sampling import ClassIndex, list_pieces

#: Maps row indices (k,) int64, on any device, to features (k, dim) of any floating dtype, which the next call may
#: overwrite. Methods compute on the device of these features; episodes are drawn on the CPU.
RowReader = Callable[[Tensor], Tensor]
NO_ROW = -1  #: The row index in empty slots of `SampledEpisodes`.
EPISODES_PER_COUNT = 256  #: Episodes that `Sampler.count` samples at a time, as many as an evaluation does.


class Stream(IntEnum):
    """Independent streams of random numbers, so that for example more queries do not change which classes are drawn."""

    WAY = 0
    CLASS = 1
    SHOT = 2
    QUERY = 3
    ROW = 4
    DISTRACTOR = 5
    UNLABELLED = 6
    GROUP = 7
    SIZE = 8
    QUERY_ORDER = 9
    UNLABELLED_ORDER = 10


class SampledEpisodes(NamedTuple):
    """Row indices of a batch of episodes, int64, with ``NO_ROW`` in empty slots."""

    support: Tensor  #: (episodes, most classes, most shots).
    query: Tensor  #: (episodes, most classes, most queries).
    open_query: Tensor  #: (episodes, n_open_classes, n_query), of classes outside the episode.
    unlabelled: Tensor  #: (episodes, most classes + n_distractors, n_unlabelled), distractor classes last.


class RowPool(NamedTuple):
    """Rows that episodes are drawn from."""

    x: Tensor  #: (n, dim) floating; methods get the rows that ``take`` returns.
    take: RowReader  #: Returns rows of ``x``, normalised, by index.
    by_class: ClassIndex  #: Indices into ``x``, by class, of the classes to draw from.
    dataset_rows: ClassIndex  #: The same rows, as indices into the data set.


class Sampler(ABC):
    """A protocol that samples episodes from rows by class, such as `EpisodeConfig`.

    The abstract methods define a protocol. The others have defaults for protocols without base classes and test split.
    """

    n_base: int = 0  #: Base classes in each episode, numbered before the other classes.
    n_unlabelled: int = 0  #: Unlabelled rows of each class, which methods may learn from.
    adds_base_classes: bool = False  #: Whether each episode has all base classes, known by their means.

    @property
    @abstractmethod
    def shot(self) -> tuple[int, int]:
        """Least and most support rows per class."""

    @property
    @abstractmethod
    def n_required_classes(self) -> int:
        """The number of classes that the data must have."""

    @property
    def way(self) -> tuple[int, int] | None:
        """Least and most classes per episode; None if base classes are added to them."""
        return None

    @property
    def hashed_tensors(self) -> list[Tensor]:
        """Tensors that determine the episodes but are not part of `describe`."""
        return []

    def join_test(self, data: Dataset, test: Dataset | None, names: tuple[str, str]) -> tuple[Sampler, Dataset]:
        """Adapt this protocol to a data set and its test split, and join both; ``names`` are for messages."""
        del test, names
        return self, data

    def choose_classes(self, index: ClassIndex, class_names: tuple[str, ...]) -> tuple[Sampler, ClassIndex, list[str]]:
        """Adapt this protocol to the classes that can be drawn; return both, and notes for the report."""
        return self, self.validate(index, class_names), []

    def hold_out(self, base: ClassIndex, class_names: tuple[str, ...]) -> tuple[ClassIndex, ClassIndex | None]:
        """Split the rows of base classes into those that methods may use, and queries, if the protocol has any."""
        del class_names
        return base, None

    def join_base(self, pool: RowPool, base: RowPool | None, means: Tensor | None) -> tuple[Sampler, RowPool]:
        """Add base classes to this protocol and to the pool of rows.

        ``base`` has their queries, from `hold_out`, and ``means`` (base classes, dim) are of their other rows.
        """
        del base, means
        return self, pool

    @abstractmethod
    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check the settings and the sizes of the classes, and select the classes that can be drawn.

        Args:
            index: Rows by class, from `protonet.sampling.index_classes`.
            class_names: One name per class, for messages.

        Raises:
            InputTypeError: A count is not a number.
            InputError: A count is outside its range, there are too few classes, or a class has too few rows.
        """

    @abstractmethod
    def sample(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw the episodes numbered ``first`` to ``first + n_episodes - 1``.

        Args:
            index: Rows by class, from `validate`.
            seed: In [0, 2**63).
            first: The first episode's number, >= 0.
            n_episodes: >= 0.

        Returns:
            The row indices. A row's label within its episode is its position along the axis of classes.
        """

    def count(self, index: ClassIndex, *, seed: int, n_episodes: int) -> tuple[Tensor, Tensor]:
        """Find the classes of the first episodes, and count their queries.

        Returns:
            class_mask: (n_episodes, classes of the index) bool, whether an episode has a row of a class.
            queries: (n_episodes,) int64, without queries of open classes.
        """
        n_classes, masks, queries = len(index.size), [], []
        class_of = label_rows(index, int(index.rows.max()) + 2)  # the last entry is for NO_ROW
        for first in range(0, n_episodes, EPISODES_PER_COUNT):
            n = min(EPISODES_PER_COUNT, n_episodes - first)
            sampled = self.sample(index, seed=seed, first=first, n_episodes=n)
            rows = [some.flatten(1) for some in (sampled.support, sampled.open_query, sampled.unlabelled)]
            classes = class_of[torch.cat(rows, dim=1)] % (n_classes + 1)  # n_classes in empty slots
            masks.append(torch.zeros(n, n_classes + 1, dtype=torch.bool).scatter_(1, classes, value=True)[:, :-1])
            queries.append((sampled.query >= 0).sum(dim=(1, 2)))
        return torch.cat(masks), torch.cat(queries)

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Describe the settings as JSON, under the names of the command line."""

    @abstractmethod
    def title(self) -> str:
        """Describe the settings in a few words."""


def label_rows(index: ClassIndex, n_rows: int) -> Tensor:
    """Look up the class of each of ``n_rows`` rows, (n_rows,) int64; -1 for rows outside the index."""
    classes = torch.full((n_rows,), -1)
    for c, rows in enumerate(list_pieces(index)):
        classes[rows] = c
    return classes


def sample_uniform(seed: int, stream: Stream, first: int, shape: tuple[int, ...]) -> Tensor:
    """Sample float64 numbers in [0, 1) of shape (episodes, ...), for the episodes numbered ``first`` and after.

    Each episode has its own counters in each stream.

    Source: counter-based random numbers, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
        https://doi.org/10.1145/2063384.2063405
    """
    per_episode = math.prod(shape[1:])
    blocks = -(-per_episode // 4)  # each counter gives four numbers
    source = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=first * blocks)
    raw = source.random_raw(shape[0] * blocks * 4).reshape(shape[0], blocks * 4)[:, :per_episode]
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)  # (episodes, ...)
