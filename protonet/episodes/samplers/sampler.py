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

from protonet._validation import check_int, check_type
from protonet.sampling import ClassIndex, list_class_rows

#: A function from row indices (k,) int64, on any device, to a copy of features (k, dim) of any floating dtype. Methods
#: compute on the device of the features; episodes are drawn on the CPU.
RowReader = Callable[[Tensor], Tensor]
EMPTY_SLOT = -1  #: The row index in empty slots of `SampledEpisodes`.
EPISODES_PER_COUNT_BATCH = 256  #: Number of episodes that `Sampler.count_classes_and_queries` samples at a time.


class RandomStream(IntEnum):
    """Independent streams of random numbers, one for each quantity that a sampler draws.

    Drawing more queries, for example, does not change the classes of an episode.
    """

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
    EFFECTIVE = 11
    QUERY_CLASS = 12


class SampledEpisodes(NamedTuple):
    """Row indices of a batch of episodes, int64.

    Arrays are padded to the largest number of classes, support rows and queries; padding is ``EMPTY_SLOT``.
    """

    support_ids: Tensor  #: (episodes, max_way, max_shot), the support rows of each class.
    query_ids: Tensor  #: (episodes, max_way, max_query), the queries of each class.
    open_query_ids: Tensor  #: (episodes, n_open_classes, n_query), queries of classes without support rows.
    unlabelled_ids: Tensor
    """(episodes, max_way + n_distractors, n_unlabelled), the unlabelled rows of each class. Distractor classes, which
    have neither support rows nor queries, come last."""


class RowPool(NamedTuple):
    """The rows that episodes are drawn from, their indices by class, and a function that reads their features."""

    x: Tensor  #: (n, dim) floating, features before normalisation. Methods get the features from ``read_rows`` instead.
    read_rows: RowReader  #: Maps indices of rows of ``x`` to their normalised features.
    rows_by_class: ClassIndex  #: The rows of each class that episodes may have, as indices into ``x``.
    dataset_rows: ClassIndex  #: The rows of ``rows_by_class`` in the same order, as indices into the data set.


class Sampler(ABC):
    """The base class of samplers, such as `EpisodeConfig`: a protocol that draws numbered episodes.

    Subclasses implement the abstract methods.
    """

    n_base_classes: int = 0  #: Number of base classes in each episode. Their labels come before the other labels.
    unlabelled: int = 0  #: Number of unlabelled rows of each class. Methods may learn from them.

    @property
    @abstractmethod
    def shot(self) -> tuple[int, int]:
        """Minimum and maximum number of support rows per class."""

    @property
    @abstractmethod
    def n_required_classes(self) -> int:
        """The minimum number of classes that the data must have."""

    @property
    def way(self) -> tuple[int, int] | None:
        """Minimum and maximum number of classes per episode; None if base classes are added to each episode."""
        return None

    @property
    def shot_title(self) -> str:
        """The number of shots as text, such as "5" or "1-20"; "" if the protocol itself determines it."""
        return format_span(self.shot)

    @property
    def hashed_tensors(self) -> list[Tensor]:
        """Tensors that episodes depend on but `to_dict` does not include; they are part of the hash of a run."""
        return []

    def has_equal_queries(self, index: ClassIndex) -> bool:
        """Whether each class of every episode has the same number of queries, for classes from `validate`."""
        del index
        return True

    def choose_classes(self, index: ClassIndex, class_names: tuple[str, ...]) -> tuple[Sampler, ClassIndex, list[str]]:
        """Select the classes that episodes can have, and adapt this sampler to them.

        Returns the adapted sampler, the rows of the selected classes, and lines for the report.
        """
        return self, self.validate(index, class_names), []

    @abstractmethod
    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check the settings and the class sizes, and select the classes that can be drawn.

        Args:
            index: Rows by class, from `protonet.sampling.index_classes`.
            class_names: One name per class, for messages.

        Returns:
            The rows of the selected classes, by class.

        Raises:
            InputTypeError: A count is not a number.
            InputError: A count is outside its range, there are too few classes, or a class has too few rows.
        """

    def sample(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw the episodes numbered ``first`` to ``first + n_episodes - 1``.

        Args:
            index: Rows by class, from `protonet.sampling.index_classes`.
            seed: In [0, 2**63).
            first: The first episode's number, >= 0.
            n_episodes: >= 0.

        Returns:
            The row indices. The label of a row within its episode is its index along the axis of classes.

        Raises:
            InputTypeError: An argument has the wrong type.
            InputError: A number is outside its range, or as `validate` raises it.
        """
        check_type("index", index, ClassIndex, "a ClassIndex, from index_classes(labels)")
        seed = check_int("seed", seed, low=0, high=2**63 - 1)
        first, n_episodes = check_int("first", first, low=0), check_int("n_episodes", n_episodes, low=0)
        index = self.validate(index, tuple(map(str, range(len(index.class_counts)))))
        return self.draw(index, seed=seed, first=first, n_episodes=n_episodes)

    @abstractmethod
    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw episodes as `sample` does, from checked arguments and the classes that `validate` selected."""

    def count_classes_and_queries(self, index: ClassIndex, *, seed: int, n_episodes: int) -> tuple[Tensor, Tensor]:
        """Return the classes and the number of queries of each of the first ``n_episodes`` episodes.

        Returns:
            class_mask: (n_episodes, classes of the index) bool, whether the episode has a row of the class.
            queries: (n_episodes,) int64, the number of queries, without queries of open classes.
        """
        n_classes, masks, queries = len(index.class_counts), [], []
        class_of = compute_row_classes(index, int(index.row_indices.max()) + 2)  # the last entry is for EMPTY_SLOT
        for first in range(0, n_episodes, EPISODES_PER_COUNT_BATCH):
            n = min(EPISODES_PER_COUNT_BATCH, n_episodes - first)
            sampled = self.draw(index, seed=seed, first=first, n_episodes=n)
            rows = [some.flatten(1) for some in (sampled.support_ids, sampled.open_query_ids, sampled.unlabelled_ids)]
            classes = class_of[torch.cat(rows, dim=1)] % (n_classes + 1)  # n_classes in empty slots
            masks.append(torch.zeros(n, n_classes + 1, dtype=torch.bool).scatter_(1, classes, value=True)[:, :-1])
            queries.append((sampled.query_ids >= 0).sum(dim=(1, 2)))
        return torch.cat(masks), torch.cat(queries)

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Convert the settings to a JSON object, whose keys are the names of the command-line options."""

    @abstractmethod
    def format_title(self) -> str:
        """Format the settings as a short title of the protocol, such as "5-way 1-shot"."""


def format_span(span: tuple[int, int]) -> str:
    """Format a smallest and a largest number, such as "1-20"; a single number if they are equal."""
    return "-".join(map(str, dict.fromkeys(span)))


def compute_row_classes(index: ClassIndex, n_rows: int) -> Tensor:
    """Compute the class (n_rows,) int64 of each row 0 to ``n_rows - 1``; -1 for rows that are not in the index."""
    classes = torch.full((n_rows,), -1)
    for c, rows in enumerate(list_class_rows(index)):
        classes[rows] = c
    return classes


def sample_uniform_by_episode(seed: int, stream: RandomStream, first: int, shape: tuple[int, ...]) -> Tensor:
    """Sample uniform float64 numbers in [0, 1) of ``shape`` (episodes, ...), for episodes numbered from ``first`` on.

    The numbers of an episode depend only on the seed, the stream and the number of the episode, not on the batch.

    Source: counter-based random numbers, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
        https://doi.org/10.1145/2063384.2063405
    """
    per_episode = math.prod(shape[1:])
    blocks = -(-per_episode // 4)  # each counter gives four numbers
    source = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=first * blocks)
    raw = source.random_raw(shape[0] * blocks * 4).reshape(shape[0], blocks * 4)[:, :per_episode]
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)  # (episodes, ...)
