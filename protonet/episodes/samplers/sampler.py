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
from protonet.sampling import ClassIndex

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
        """Return this protocol of the rows of a data set and its test split, and both as one data set.

        Args:
            data: The rows.
            test: The test split; None without one.
            names: What messages call the two.

        Raises:
            InputError: They do not fit together.
        """
        del test, names
        return self, data

    def choose_classes(self, index: ClassIndex, class_names: tuple[str, ...]) -> tuple[Sampler, ClassIndex, list[str]]:
        """Return this protocol of some classes, those that can be drawn, and lines that a person should read.

        Raises:
            InputError: The classes do not fit.
        """
        return self, self.validate(index, class_names), []

    def hold_out(self, base: ClassIndex, class_names: tuple[str, ...]) -> tuple[ClassIndex, ClassIndex | None]:
        """Split the rows of base classes into those that methods may see, and those to draw; None for none of them.

        Raises:
            InputError: A base class is too small.
        """
        del class_names
        return base, None

    def join_base(self, pool: RowPool, base: RowPool | None, means: Tensor | None) -> tuple[Sampler, RowPool]:
        """Return this protocol of base classes beside others, and the rows of both.

        Args:
            pool: The rows of the other classes.
            base: The rows to draw of base classes, those that `hold_out` returned.
            means: (base classes, dim) float32, of the rows that methods may see.

        Raises:
            InputError: They do not fit together.
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

    @abstractmethod
    def classes_of(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Find which classes the first episodes have: (n_episodes, classes of the index) bool, open ones included."""

    @abstractmethod
    def count_queries(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Count the queries of the first episodes: (n_episodes,) int64, without those of open classes."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Return the settings under the names of the command line, in a form that JSON can write."""

    @abstractmethod
    def title(self) -> str:
        """Return the settings as a few words for people."""


def sample_uniform(seed: int, stream: int, first: int, shape: tuple[int, ...]) -> Tensor:
    """Return float64 numbers in [0, 1) of ``shape`` (episodes, ...), those of ``first`` and after.

    Each episode has counters of its own in each ``stream``, which is one of ``WAY_STREAM``, ``CLASS_STREAM`` and so on.

    Source: counter-based random numbers, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
        https://doi.org/10.1145/2063384.2063405
    """
    per_episode = math.prod(shape[1:])
    blocks = -(-per_episode // 4)  # each counter gives four numbers
    source = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=first * blocks)
    raw = source.random_raw(shape[0] * blocks * 4).reshape(shape[0], blocks * 4)[:, :per_episode]
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)  # (episodes, ...)
