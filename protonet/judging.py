"""The judge of candidates for the embedding: log-losses of their out-of-fold cosines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.folds import Fold
from protonet.stacking import fit_temperature, worse_by_one_error
from protonet.views import CHUNK

#: A fold with this many judged rows is enough to settle what is tried.
SETTING_ROWS = 256
#: A view this many nats worse than the best linear one, on this many rows, would get no weight.
HOPELESS, HOPELESS_ROWS = 0.75, 32


class Candidate(NamedTuple):
    """One way to embed: its out-of-fold cosines (judged, num_classes) and their log-losses (judged,)."""

    name: str
    cosines: Tensor
    losses: Tensor
    rung: tuple[int, int] = (0, 0)
    steps: int = 0
    setting: tuple[float, float] = (0.0, 0.0)


class Judge:
    """Out-of-fold cosines of anything that embeds, on the rows that some fold holds out.

    Args:
        features: (n, dim) float32.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        folds: At least one.
        moves: Offsets of the copies that moved views are fitted to.
        deadline: ``time.monotonic()`` after which no further view is tried.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        num_classes: int,
        folds: Sequence[Fold],
        *,
        moves: tuple[int, ...] = (0,),
        deadline: float = float("inf"),
    ) -> None:
        self.features, self.labels, self.num_classes, self.folds = features, labels, num_classes, folds
        self.moves, self.deadline = moves, deadline
        self.judged = torch.cat([fold.judge for fold in folds])
        self.rows = labels[self.judged]  # (judged,) labels
        self.seen = torch.bincount(labels, minlength=num_classes) > 0
        self.best: Tensor | None = None  # (judged,) losses that a hopeless view is compared with

    def late(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() > self.deadline

    def cosines(self, embed: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return (judged, num_classes), mean over the views that ``embed(fold, x)`` gives: (views, n, dim)."""
        return torch.cat([self.fold_cosines(embed, number) for number in range(len(self.folds))])

    def fold_cosines(self, embed: Callable[[int, Tensor], Tensor], number: int) -> Tensor:
        """Return the cosines of one fold's judged rows, (judged in it, num_classes)."""
        fold = self.folds[number]
        sums: Tensor | float = 0.0
        for rows in fold.fit.split(CHUNK):
            unit = F.normalize(embed(number, self.features[rows]), dim=2)
            shape = (len(unit), self.num_classes, unit.shape[2])
            sums = sums + unit.new_zeros(shape).index_add_(1, self.labels[rows], unit)
        prototypes = F.normalize(torch.as_tensor(sums), dim=2)
        units = (F.normalize(embed(number, self.features[rows]), dim=2) for rows in fold.judge.split(CHUNK))
        return torch.cat([(unit @ prototypes.transpose(1, 2)).mean(dim=0) for unit in units])

    def candidate(self, name: str, cosines: Tensor, rung: tuple[int, int] = (0, 0), steps: int = 0) -> Candidate:
        """Judge cosines at their best temperature."""
        return Candidate(name, cosines, self.losses(cosines), rung, steps)

    def losses(self, cosines: Tensor) -> Tensor:
        """Return the log-losses (n,) of the first n judged rows at their best temperature."""
        return fit_temperature(cosines, self.rows[: len(cosines)], self.seen)[1]

    def hopeless(self, cosines: Tensor) -> bool:
        """Return whether a view with these cosines of the first rows would get no weight, or not enough to pay."""
        n = len(cosines)
        if self.best is None or n < HOPELESS_ROWS:
            return False
        losses, best = self.losses(cosines), self.best[:n]
        clearly = n >= SETTING_ROWS and worse_by_one_error(losses, best)
        return clearly or float((losses - best).mean()) > HOPELESS
