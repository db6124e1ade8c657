"""Generalised few-shot classification: queries of base and of novel classes in one label space."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.samplers.batch import make_row_reader
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.sampler import (
    EMPTY_SLOT,
    RandomStream,
    RowPool,
    SampledEpisodes,
    Sampler,
    sample_uniform_by_episode,
)
from protonet.errors import raise_input_error
from protonet.sampling import ClassIndex, draw_without_replacement, index_class_rows, list_class_rows

HELD_OUT_STRIDE = 5  #: Every fifth row of a base class is a query, and not part of its mean. Our choice.


@dataclass(frozen=True)
class GeneralizedSampler(Sampler):
    """The sampler of generalised few-shot classification: episodes have novel classes and all base classes.

    The support of a base class is a single row: the mean of its rows that are not held out as queries.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), sec. 4.1, joint
        accuracies; Ye, Hu and Zhan, "Learning adaptive classifiers synthesis for generalized few-shot learning" (2021),
        sec. 3.3, harmonic means. https://arxiv.org/abs/1804.09458, https://arxiv.org/abs/1906.02944
    """

    novel: EpisodeConfig  #: The sampler of the novel classes, without open classes and unlabelled rows.
    #: Number of base classes, set by `join_base`. They are the first classes of the index, and the first row of each is
    #: the class mean.
    n_base: int = 0

    adds_base_classes = True

    @property
    def shot(self) -> tuple[int, int]:
        """Minimum and maximum number of support rows per novel class."""
        return self.novel.shot

    @property
    def n_required_classes(self) -> int:
        """The maximum number of classes of an episode, base and novel."""
        return self.n_base + self.novel.n_required_classes

    def choose_classes(
        self, index: ClassIndex, class_names: tuple[str, ...]
    ) -> tuple[GeneralizedSampler, ClassIndex, list[str]]:
        """Select the novel classes with enough rows; return this sampler, their rows by class, and no notes."""
        return self, self.novel.validate(index, class_names), []

    def hold_out(self, base: ClassIndex, class_names: tuple[str, ...]) -> tuple[ClassIndex, ClassIndex]:
        """Hold out every fifth row of each base class as a query.

        Returns:
            seen: The other rows of each base class, whose mean represents the class.
            queries: For each base class a placeholder, which `join_base` overwrites with the mean, then the queries.

        Raises:
            InputError: A base class has only one row.
        """
        if int(base.size.min()) < 2:
            got = f"class {class_names[int(base.size.argmin())]!r} with one"
            constraint = "have 2 rows, to learn from and to ask for"
            raise_input_error("base classes", constraint, got, "Leave it out.")
        seen, queries = [], []
        for rows in list_class_rows(base):
            held_out = torch.arange(len(rows)) % HELD_OUT_STRIDE == min(HELD_OUT_STRIDE, len(rows)) - 1
            seen.append(rows[~held_out])
            queries.append(torch.cat([rows[~held_out][:1], rows[held_out]]))
        return index_class_rows(seen), index_class_rows(queries)

    def join_base(
        self, pool: RowPool, base: RowPool | None, means: Tensor | None
    ) -> tuple[GeneralizedSampler, RowPool]:
        """Join base classes and novel classes to one pool of rows, base classes first.

        Args:
            pool: The rows of the novel classes.
            base: For each base class a placeholder and the queries, from `hold_out`.
            means: (base classes, dim), the class means, which overwrite the placeholders.

        Returns:
            sampler: A copy of this sampler with the number of base classes.
            pool: The joined rows, copied to memory.
        """
        assert base is not None
        assert means is not None
        known, dataset_rows = (
            index_class_rows(list_class_rows(first) + list_class_rows(second))
            for first, second in ((base.by_class, pool.by_class), (base.dataset_rows, pool.dataset_rows))
        )
        x = pool.read_rows(known.rows).clone()
        x[known.start[: len(means)].to(x.device)] = means.to(x.dtype)
        by_class = known._replace(rows=torch.arange(len(x)))
        return replace(self, n_base=len(means)), RowPool(x, make_row_reader(x), by_class, dataset_rows)

    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that each base class has a mean and a query, and that the novel classes have enough rows.

        The index is returned unchanged.
        """
        if not 0 < self.n_base < len(index.size) or bool((index.size[: self.n_base] < 2).any()):
            remedy = "Add rows to the base classes."
            raise_input_error("n_base", "be classes of a mean and a query or more", self.n_base, remedy)
        self.novel.validate(
            index.select_classes(torch.arange(self.n_base, len(index.size))), class_names[self.n_base :]
        )
        return index

    def sample(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw the episodes numbered ``first`` to ``first + n_episodes - 1``, see `Sampler.sample`.

        The base classes come before the novel classes.
        """
        novel_index = index.select_classes(torch.arange(self.n_base, len(index.size)))
        novel = self.novel.sample(novel_index, seed=seed, first=first, n_episodes=n_episodes)
        shape = (n_episodes, self.n_base, self.novel.n_query)
        start, size = index.start[: self.n_base], index.size[: self.n_base] - 1
        offsets = draw_without_replacement(
            sample_uniform_by_episode(seed, RandomStream.QUERY, first, shape), size.expand(shape[:2])
        )
        drawn = torch.arange(shape[2]) < size[:, None]
        query = index.rows[start[:, None] + 1 + offsets].where(drawn, EMPTY_SLOT)
        support = torch.full((n_episodes, self.n_base, novel.support.shape[2]), EMPTY_SLOT)
        support[:, :, 0] = index.rows[start]
        max_query = max(query.shape[2], novel.query.shape[2])
        queries = [F.pad(rows, (0, max_query - rows.shape[2]), value=EMPTY_SLOT) for rows in (query, novel.query)]
        support = torch.cat([support, novel.support], dim=1)
        unlabelled = torch.empty(n_episodes, support.shape[1], 0, dtype=torch.int64)
        return SampledEpisodes(support, torch.cat(queries, dim=1), novel.open_query, unlabelled)

    def describe(self) -> dict[str, object]:
        """Convert the settings to a JSON object, whose keys are the names of the command-line options."""
        return self.novel.describe() | {"protocol": "generalized", "base_classes": self.n_base, "kind": self.title()}

    def title(self) -> str:
        """Describe the settings in a few words."""
        return f"{self.novel.title()} beside {self.n_base} base classes"
