"""The base class of samplers, and their counter-based random numbers.

An episode depends only on the seed and its number: not on the machine, the batch or the other episodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.datasets.dataset import Dataset
from protonet.sampling import ClassIndex, list_pieces

#: Maps row numbers (k,) int64, on any device, to features (k, dim) of any floating dtype, which the next call may
#: overwrite. Episodes, and all that methods do, are on the device of these features; draws are made on the CPU.
Take = Callable[[Tensor], Tensor]
#: Independent streams of random numbers, so that for example more queries do not change which classes are drawn.
(
    WAY_STREAM,
    CLASS_STREAM,
    SHOT_STREAM,
    QUERY_STREAM,
    ROW_STREAM,
    DISTRACTOR_STREAM,
    UNLABELLED_STREAM,
    GROUP_STREAM,
    SIZE_STREAM,
    QUERY_ORDER,
    UNLABELLED_ORDER,
) = range(11)
NO_ROW = -1  #: Stands in a `SampledEpisodes` where there is no row.
EPISODES_PER_COUNT = 256  #: Episodes that are sampled at a time to count their queries, as in an evaluation.


class SampledEpisodes(NamedTuple):
    """Row numbers of a batch of episodes, int64, with ``NO_ROW`` in slots without a row."""

    support: Tensor  #: (episodes, most classes, most shots).
    query: Tensor  #: (episodes, most classes, most queries).
    open_query: Tensor  #: (episodes, n_open_classes, n_query), of classes outside the episode.
    unlabelled: Tensor  #: (episodes, most classes + n_distractors, n_unlabelled), distractor classes last.


class RowPool(NamedTuple):
    """Rows that episodes are drawn from."""

    x: Tensor  #: (n, dim) floating; methods see the rows that ``take`` returns.
    take: Take  #: Returns rows of ``x``, normalised, by number.
    by_class: ClassIndex  #: Rows by class, of the classes to draw from.
    sources: ClassIndex  #: The same rows, by their numbers in the data set.


class Sampler(ABC):
    """A protocol: how episodes are sampled from rows by class, such as `EpisodeConfig`.

    Methods that a protocol does not need have a default here.
    """

    @property
    @abstractmethod
    def shot(self) -> tuple[int, int]:
        """Least and most support rows per class."""

    @property
    @abstractmethod
    def n_drawn(self) -> int:
        """How many classes there must be: where that is all there are, each episode has all of them."""

    @property
    def way(self) -> tuple[int, int] | None:
        """Least and most classes per episode; None where base classes come to them."""
        return None

    @property
    def n_base(self) -> int:
        """Base classes, which are the first of each episode's; 0 where there are none."""
        return 0

    @property
    def n_unlabelled(self) -> int:
        """Unlabelled rows of each class, which methods may learn from."""
        return 0

    @property
    def adds_base(self) -> bool:
        """Whether base classes stand beside the others, known by their means alone."""
        return False

    @property
    def hidden(self) -> list[Tensor]:
        """Tensors that determine the episodes, but are not part of `describe`, for hashes."""
        return []

    def join_test(self, data: Dataset, test: Dataset | None, names: tuple[str, str]) -> tuple[Sampler, Dataset]:
        """Adapt this protocol to a data set and its test split, which become one; ``names`` are for messages."""
        del test, names
        return self, data

    def choose_classes(self, index: ClassIndex, class_names: tuple[str, ...]) -> tuple[Sampler, ClassIndex, list[str]]:
        """Adapt this protocol to those classes that can be drawn; return them, and lines for the report."""
        return self, self.validate(index, class_names), []

    def hold_out(self, base: ClassIndex, class_names: tuple[str, ...]) -> tuple[ClassIndex, ClassIndex | None]:
        """Split the rows of base classes into those that methods may see, and those to draw; None for none of them."""
        del class_names
        return base, None

    def join_base(self, pool: RowPool, base: RowPool | None, means: Tensor | None) -> tuple[Sampler, RowPool]:
        """Adapt this protocol to base classes beside others, and join the rows of both.

        ``base`` has the rows to draw, of `hold_out`; ``means`` (base classes, dim) are of those that methods see.
        """
        del base, means
        return self, pool

    @abstractmethod
    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that the data fit, and return the classes that can be drawn.

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
            The row numbers. A row's label within its episode is its position along the axis of classes.
        """

    def count(self, index: ClassIndex, *, seed: int, n_episodes: int) -> tuple[Tensor, Tensor]:
        """Find the classes of the first episodes, and count their queries.

        Returns:
            class_mask: (n_episodes, classes of the index) bool, the classes of which an episode has a row.
            queries: (n_episodes,) int64, without those of open classes.
        """
        n_classes, masks, queries = len(index.size), [], []
        class_of = label_rows(index, int(index.rows.max()) + 2)  # the last one is NO_ROW's
        for first in range(0, n_episodes, EPISODES_PER_COUNT):
            n = min(EPISODES_PER_COUNT, n_episodes - first)
            sampled = self.sample(index, seed=seed, first=first, n_episodes=n)
            rows = [some.flatten(1) for some in (sampled.support, sampled.open_query, sampled.unlabelled)]
            classes = class_of[torch.cat(rows, dim=1)] % (n_classes + 1)  # n_classes where there is no row
            masks.append(torch.zeros(n, n_classes + 1, dtype=torch.bool).scatter_(1, classes, value=True)[:, :-1])
            queries.append((sampled.query >= 0).sum(dim=(1, 2)))
        return torch.cat(masks), torch.cat(queries)

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Describe the settings under the names of the command line, in a form that JSON can write."""

    @abstractmethod
    def title(self) -> str:
        """Describe the settings in a few words."""


def label_rows(index: ClassIndex, n_rows: int) -> Tensor:
    """Find the class of each of ``n_rows`` rows, (n_rows,) int64; -1 for those that are not in the index."""
    classes = torch.full((n_rows,), -1)
    for c, rows in enumerate(list_pieces(index)):
        classes[rows] = c
    return classes


def sample_uniform(seed: int, stream: int, first: int, shape: tuple[int, ...]) -> Tensor:
    """Sample float64 numbers in [0, 1) of ``shape`` (episodes, ...), those of ``first`` and after.

    Each episode has counters of its own in each ``stream``, which is one of ``WAY_STREAM``, ``CLASS_STREAM`` and so on.

    Source: counter-based random numbers, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
        https://doi.org/10.1145/2063384.2063405
    """
    per_episode = math.prod(shape[1:])
    blocks = -(-per_episode // 4)  # each counter gives four numbers
    source = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=first * blocks)
    raw = source.random_raw(shape[0] * blocks * 4).reshape(shape[0], blocks * 4)[:, :per_episode]
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)  # (episodes, ...)
