"""Generalised few-shot classification: queries of base and of novel classes, told apart in one space of labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from protonet._checks import fail
from protonet.episodes.draws.batch import Take, summarize_base
from protonet.episodes.draws.numbered import NO_ROW, QUERIES, Draw, Setting, draw_uniform
from protonet.sampling import ClassIndex, draw_distinct, index_pieces, list_pieces

HELD_OUT = 5  #: Every fifth row of a base class is a query and not part of its mean. Our own choice.


class Generalized(NamedTuple):
    """Draw episodes of novel classes, to which all base classes are added: their support row is their mean.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), sec. 4.1, joint
        accuracies; Ye, Hu and Zhan, "Learning adaptive classifiers synthesis for generalized few-shot learning" (2021),
        sec. 3.3, harmonic means. https://arxiv.org/abs/1804.09458, https://arxiv.org/abs/1906.02944
    """

    novel: Setting  #: The kind of the episodes of novel classes, without open classes and unlabelled rows.
    n_base: int = 0  #: Base classes: the first ones of the index, of which the first row is the mean.

    @property
    def shot(self) -> tuple[int, int]:
        """Least and most support rows per novel class."""
        return self.novel.shot

    @property
    def n_drawn(self) -> int:
        """The most classes of an episode."""
        return self.n_base + self.novel.n_drawn

    def check(self, name: str, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that the novel classes fit, and that each base class has a query beside its mean.

        Raises:
            InputError: They do not.
        """
        if not 0 < self.n_base < len(index.size) or bool((index.size[: self.n_base] < 2).any()):
            fail(
                name, "n_base", "be classes of a mean and a query or more", self.n_base, "Add rows to the base classes."
            )
        self.novel.check(name, self._take_novel(index), class_names[self.n_base :])
        return index

    def _take_novel(self, index: ClassIndex) -> ClassIndex:
        """Return the novel classes of an index."""
        return index.take(torch.arange(self.n_base, len(index.size)))

    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> Draw:
        """Draw the episodes numbered ``first`` and after; base classes come first."""
        novel = self.novel.draw(self._take_novel(index), seed=seed, first=first, n_episodes=n_episodes)
        shape = (n_episodes, self.n_base, self.novel.n_query)
        start, size = index.start[: self.n_base], index.size[: self.n_base] - 1
        places = draw_distinct(draw_uniform(seed, QUERIES, first, shape), size.expand(shape[:2]))
        drawn = torch.arange(shape[2]) < size[:, None]
        query = index.rows[start[:, None] + 1 + places].where(drawn, NO_ROW)
        support = torch.full((n_episodes, self.n_base, novel.support.shape[2]), NO_ROW)
        support[:, :, 0] = index.rows[start]
        most = max(query.shape[2], novel.query.shape[2])
        widths = (
            torch.nn.functional.pad(each, (0, most - each.shape[2]), value=NO_ROW) for each in (query, novel.query)
        )
        none = torch.empty(n_episodes, self.n_base + novel.support.shape[1], 0, dtype=torch.int64)
        return Draw(torch.cat([support, novel.support], dim=1), torch.cat(list(widths), dim=1), novel.open_query, none)

    def find_members(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Find which classes the first episodes have: (n_episodes, classes of the index) bool, all base classes."""
        members = self.novel.find_members(self._take_novel(index), seed=seed, n_episodes=n_episodes)
        return torch.cat([members.new_ones(n_episodes, self.n_base), members], dim=1)

    def count_queries(self, index: ClassIndex, *, seed: int, n_episodes: int) -> Tensor:
        """Count the queries of the first episodes, those of base classes too: (n_episodes,) int64."""
        counts = self.novel.count_queries(self._take_novel(index), seed=seed, n_episodes=n_episodes)
        return counts + int((index.size[: self.n_base] - 1).clamp_max(self.novel.n_query).sum())

    def describe(self) -> dict[str, Any]:
        """Return the settings under the names of the command line."""
        more = {"protocol": "generalized", "base_classes": self.n_base, "kind": self.title()}
        return {**self.novel.describe(), **more}

    def title(self) -> str:
        """Return the settings as a few words."""
        return f"{self.novel.title()} beside {self.n_base} base classes"


def join_base(
    function: str, take: Take, base: ClassIndex, novel: ClassIndex, names: tuple[str, ...]
) -> tuple[Tensor, ClassIndex, ClassIndex]:
    """Put the means of base classes, their queries and the rows of novel classes together.

    Every fifth row of a base class, in the order of the data, is a query; its mean is of the others.

    Args:
        function: Who asks, for messages.
        take: Returns rows by number.
        base: The base classes.
        novel: The novel classes.
        names: Of the base classes, for messages.

    Returns:
        x: (rows, dim) floating.
        index: Of ``x``, the base classes first; the first row of each is its mean.
        sources: The same classes, with the numbers that ``take`` knows the rows by, for a mean that of its first row.

    Raises:
        InputError: A base class has fewer than two rows.
    """
    learned, asked = hold_out(function, base, names)
    means = summarize_base(take, learned).class_means
    pieces = [torch.cat([first[:1], own]) for first, own in zip(list_pieces(learned), list_pieces(asked), strict=True)]
    sources = index_pieces([*pieces, *list_pieces(novel)])
    x = take(sources.rows).clone()
    x[sources.start[: len(means)]] = means.to(x.dtype)
    return x, sources._replace(rows=torch.arange(len(x))), sources


def hold_out(function: str, base: ClassIndex, names: tuple[str, ...]) -> tuple[ClassIndex, ClassIndex]:
    """Split the rows of base classes into those to learn from, and the queries: every fifth, in the order of the data.

    Arguments and errors are as in `join_base`.
    """
    if int(base.size.min()) < 2:
        got = f"class {names[int(base.size.argmin())]!r} with one"
        fail(function, "base classes", "have 2 rows, to learn from and to ask for", got, "Leave it out.")
    learned, asked = [], []
    for own in list_pieces(base):
        held_out = torch.arange(len(own)) % HELD_OUT == min(HELD_OUT, len(own)) - 1
        learned.append(own[~held_out])
        asked.append(own[held_out])
    return index_pieces(learned), index_pieces(asked)
