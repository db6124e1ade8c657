"""The judge of what may be switched on, by log-losses of out-of-fold cosines; and the kinds of views that are tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.losses import CHUNK, weigh
from protonet.scoring import Fold, fit_temperature, worse_by_one_error
from protonet.views.budget import Plan
from protonet.views.view import Rows, Source, Specification, View


@dataclass(frozen=True)
class PruneRules:
    """When a view is not tried any further. The numbers save time; no table depends on them by more than its noise."""

    settled: int = 256
    """Rows of one fold that are enough to settle which settings are best, and what is clearly worse."""
    excess: float = 0.75  #: A view this much worse than the best linear one would get no weight, in nats per row ...
    least_rows: int = 32  #: ... where at least so many rows say so.


PRUNING = PruneRules()


class Candidate(NamedTuple):
    """A specification, and how well it classifies rows that it was not fitted to."""

    specification: Specification
    cosines: Tensor  #: (judged, num_classes) float32, out of fold.
    losses: Tensor  #: (judged,) float64 log-losses of these, at their best temperature, times the rows' weights.
    cost: float = 0.0  #: Of a row, as `protonet.views.view.View.cost` has it.

    @property
    def loss(self) -> float:
        """The mean log-loss, in nats per row."""
        return float(self.losses.mean())


@dataclass
class Judge:
    """Out-of-fold cosines of anything that embeds, on the rows that some fold holds out.

    Args:
        rows: All labelled rows; after their deadline nothing more is tried. Views are fitted where they are.
        folds: At least one, on the same device. What is held out is judged on the CPU, by many steps on few numbers.
        plan: What the parameter budget affords.
        generator: Of the first weights and episodes of learned candidates.
    """

    rows: Rows
    folds: Sequence[Fold]
    plan: Plan
    generator: torch.Generator = field(default_factory=torch.Generator)
    fitted: dict[Specification, list[View]] = field(default_factory=dict)
    """The views that others may read, one per fold."""
    candidates: list[Candidate] = field(default_factory=list)  #: Those so far, of all kinds.
    reference: Tensor | None = None
    """(judged,) losses that a view is compared with to be pruned; None as long as nothing is."""

    def __post_init__(self) -> None:
        judged = self.rows.take(torch.cat([fold.judge for fold in self.folds]))
        self.labels, weights = judged.labels.cpu(), judged.weights  # (judged,)
        self.weights = None if weights is None else (weights / weights.mean()).cpu()  # (judged,), whatever their size
        self.seen = (torch.bincount(self.rows.labels, minlength=self.rows.num_classes) > 0).cpu()
        fewest = min((self.rows.labels[fold.fit] for fold in self.folds), key=len)  # each has all classes
        self.degrees = len(fewest) - len(fewest.unique())  # of freedom within the classes

    def late(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() > self.rows.deadline

    def take(self, fold: Fold) -> Rows:
        """Return the rows that a fold is fitted to."""
        return self.rows.take(fold.fit)

    def fit(self, specification: Specification) -> list[View]:
        """Return a view that others may read, fitted to each fold."""
        if specification not in self.fitted:
            pairs = zip(self.folds, self.sources(specification), strict=True)
            self.fitted[specification] = [specification.fit(self.take(fold), source) for fold, source in pairs]
        return self.fitted[specification]

    def sources(self, specification: Specification) -> Sequence[Source | None]:
        """Return, for each fold, what a specification reads, fitted."""
        if specification.source is None:
            return [None] * len(self.folds)
        return [view.source for view in self.fit(specification.source)]

    def try_out(self, specification: Specification) -> Candidate | None:
        """Fit to each fold and judge; return None if it is late, or pruned after the first fold."""
        parts: list[Tensor] = []
        for number, (fold, source) in enumerate(zip(self.folds, self.sources(specification), strict=True)):
            view = specification.fit(self.take(fold), source)  # one at a time: what some remember is large
            cost = view.cost()
            parts.append(self.fold_cosines(partial(embed_fold, {number: view}), number))
            if self.late() or (number == 0 and self.prunes(parts[0])):
                return None
        return self.judge(specification, torch.cat(parts), cost)

    def cosines(self, embed: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return (judged, num_classes), the mean over the views that ``embed(fold, x)`` gives: (views, n, dim)."""
        return torch.cat([self.fold_cosines(embed, number) for number in range(len(self.folds))])

    def fold_cosines(self, embed: Callable[[int, Tensor], Tensor], number: int) -> Tensor:
        """Return the cosines of one fold's held-out rows, (held out, num_classes), on the CPU, to be judged."""
        fold, (features, labels, num_classes, *_), weights = self.folds[number], self.rows, self.rows.weights
        sums: Tensor | float = 0.0
        for rows in fold.fit.split(CHUNK):
            unit = F.normalize(embed(number, features[rows]), dim=2)
            unit = weigh(unit, None if weights is None else weights[rows])
            shape = (len(unit), num_classes, unit.shape[2])
            sums = sums + unit.new_zeros(shape).index_add_(1, labels[rows], unit)
        prototypes = F.normalize(torch.as_tensor(sums), dim=2)
        units = (F.normalize(embed(number, features[rows]), dim=2) for rows in fold.judge.split(CHUNK))
        return torch.cat([(unit @ prototypes.transpose(1, 2)).mean(dim=0) for unit in units]).cpu()

    def judge(self, specification: Specification, cosines: Tensor, cost: float = 0.0) -> Candidate:
        """Judge out-of-fold cosines (judged, num_classes) at their best temperature, of a view that costs that."""
        return Candidate(specification, cosines, self.losses(cosines), cost)

    def losses(self, cosines: Tensor) -> Tensor:
        """Return the log-losses (n,) of the first n held-out rows at their best temperature."""
        return self.fit_temperature(cosines)[1]

    def fit_temperature(self, cosines: Tensor) -> tuple[float, Tensor]:
        """Return the factor on the cosines (n, num_classes) of the first n held-out rows, and their log-losses (n,)."""
        n = len(cosines)
        weights = None if self.weights is None else self.weights[:n]
        return fit_temperature(cosines, self.labels[:n], self.seen, weights)

    def prunes(self, cosines: Tensor, *, hope: float = 1.0) -> bool:
        """Return whether a view would get no weight, or not enough to pay.

        Args:
            cosines: (n, num_classes) of the first held-out rows.
            hope: The share of the losses that might be left at settings that were not tried.
        """
        n = len(cosines)
        if self.reference is None or n < PRUNING.least_rows:
            return False
        losses, best = hope * self.losses(cosines), self.reference[:n]
        clearly = n >= PRUNING.settled and worse_by_one_error(losses, best)
        return clearly or float((losses - best).mean()) > PRUNING.excess


def embed_fold(views: Sequence[View] | Mapping[int, View], fold: int, x: Tensor) -> Tensor:
    """Return the part of the embedding (1, n, dim) that a fold's view makes of features (n, input_dim)."""
    view = views[fold]
    part: Tensor = view(x if view.source is None else view.source(x))
    return part[None]


class Kind(Protocol):
    """A kind of view as the search tries it: a frozen dataclass of what is tried."""

    stage: ClassVar[str]  #: What progress calls the trying of this kind.
    share: ClassVar[float] = 1.0  #: How much of the search's time it takes, next to the other kinds.

    @classmethod
    def for_effort(cls, effort: str) -> Kind:
        """Return what is tried at an effort: "fast", "default" or "best"; without another word, the same at all."""
        return cls()

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Yield what was tried and is worth a weight, each judged on rows held out."""

    def settle(self, specification: Specification, share: float) -> Specification:
        """Return what is fitted in the end of something that has a share of the weight, if it is of this kind."""
        return specification

    def unjudged(self) -> Kind | None:
        """Return what is used where no row can judge, one sample per class; None for nothing."""
        return self

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> Kind:
        """Return the same, and views of some spans of neighbouring features alone, (first, behind the last) each."""
        return self

    def smallest(self, plan: Plan, source: Specification) -> Specification | None:
        """Return the trained view that changes another one least; None where none is trained, or affordable."""
        return None
