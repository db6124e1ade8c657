"""Selection without regret: what is switched on, decided on held-out folds.

Each candidate is judged by the log-loss of its out-of-fold cosines. Whatever is within one standard error of the
best goes to the simplest, so a view or a wider MLP has to earn its place; untrained raw cosine is always there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.encoder import Plan, ResidualMLPs, count_mlp_parameters
from protonet.folds import Fold, split_folds
from protonet.stacking import fit_weights, simplest_within_one_error, worse_by_one_error
from protonet.training import Task, train
from protonet.views import CHUNK, LinearView, available_kinds, fit_view

#: Step counts at which training is judged; a run that gets worse is not continued.
STEPS = (10, 30, 100, 300)
#: Most parameters times steps that one rung may cost, over all folds: about ten seconds at the most.
WORK = 2e8


class Candidate(NamedTuple):
    """One way to embed: its out-of-fold cosines (judged, num_classes) and their log-losses (judged,)."""

    name: str
    cosines: Tensor
    losses: Tensor
    rung: tuple[int, int] = (0, 0)
    steps: int = 0


class Choice(NamedTuple):
    """What the folds decided."""

    reads: str  # the linear view that the learned view reads
    linear: dict[str, float]  # weight of each linear view in use
    learned: float  # weight of the learned view
    rung: tuple[int, int]  # members and hidden width of the learned view, (0, 0) for none
    steps: int  # how long it trains
    temperature: float
    losses: dict[str, float]  # mean out-of-fold log-loss of each candidate, best temperature


class _Judge:
    """Out-of-fold cosines of anything that embeds, on the rows that some fold holds out."""

    def __init__(self, features: Tensor, labels: Tensor, num_classes: int, folds: Sequence[Fold]) -> None:
        self.features, self.labels, self.num_classes, self.folds = features, labels, num_classes, folds
        self.judged = torch.cat([fold.judge for fold in folds])
        self.seen = torch.bincount(labels, minlength=num_classes) > 0

    def cosines(self, embed: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return (judged, num_classes), mean over the views that ``embed(fold, x)`` gives: (views, n, dim)."""
        parts = []
        for number, fold in enumerate(self.folds):
            sums: Tensor | float = 0.0
            for rows in fold.fit.split(CHUNK):
                unit = F.normalize(embed(number, self.features[rows]), dim=2)
                index = self.labels[rows]
                shape = (len(unit), self.num_classes, unit.shape[2])
                sums = sums + unit.new_zeros(shape).index_add_(1, index, unit)
            prototypes = F.normalize(torch.as_tensor(sums), dim=2)
            for rows in fold.judge.split(CHUNK):
                unit = F.normalize(embed(number, self.features[rows]), dim=2)
                parts.append((unit @ prototypes.transpose(1, 2)).mean(dim=0))
        return torch.cat(parts)

    def candidate(self, name: str, cosines: Tensor, rung: tuple[int, int] = (0, 0), steps: int = 0) -> Candidate:
        """Judge cosines at their best temperature."""
        losses = fit_weights(cosines[None], self.labels[self.judged], self.seen)[1]
        return Candidate(name, cosines, losses, rung, steps)


def select(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    plan: Plan,
    *,
    seed: int = 0,
    deadline: float = math.inf,
) -> Choice:
    """Decide views, the learned view's size and training length, weights and temperature on held-out folds.

    Args:
        features: (n, dim) float32 of about unit scale, in canonical order.
        labels: (n,) int64.
        num_classes: Number of classes.
        plan: What the parameter budget affords.
        seed: Of folds, initial weights and episodes.
        deadline: ``time.monotonic()`` after which no further candidate is tried.

    Returns:
        The choice. Without folds (no class with two rows) or time: raw features and the smallest MLP.
    """
    generator = torch.Generator().manual_seed(seed)
    folds = split_folds(labels, num_classes, generator)
    rung = plan.ladder[0] if plan.ladder else (0, 0)
    raw = Choice("raw", {} if plan.ladder else {"raw": 1.0}, float(bool(plan.ladder)), rung, STEPS[0], 0.1, {})
    if not folds or time.monotonic() > deadline:
        return raw
    judge = _Judge(features, labels, num_classes, folds)
    views: dict[str, list[LinearView]] = {}
    linear: list[Candidate] = []
    for kind in available_kinds(labels[folds[0].fit]) if plan.ladder else ("raw",):
        views[kind] = [fit_view(kind, features[fold.fit], labels[fold.fit], num_classes) for fold in folds]
        linear.append(judge.candidate(kind, judge.cosines(partial(_embed_linear, views[kind]))))
        if time.monotonic() > deadline:
            break
    pieces, factors = _weigh(judge, linear)
    losses = {candidate.name: float(candidate.losses.mean()) for candidate in linear}
    if not float(factors.sum()) > 0:  # nothing tells the classes apart: the simplest model, at a flat temperature
        return raw._replace(temperature=1.0, losses=losses)
    if not plan.ladder:
        return raw._replace(temperature=1 / float(factors.sum()), losses=losses)

    base = pieces[simplest_within_one_error([piece.losses for piece in pieces])]
    learned = list(_learned_candidates(judge, views[base.name], base, plan, generator, deadline))
    losses.update((candidate.name, float(candidate.losses.mean())) for candidate in learned)
    learned = learned or [base._replace(rung=rung, steps=STEPS[0])]  # no time left: as good as untrained
    chosen = learned[simplest_within_one_error([candidate.losses for candidate in learned])]
    others = [piece for piece in pieces if piece is not base]  # the learned view holds the base as its skip
    pieces, factors = _weigh(judge, [chosen, *others], keep_first=True)
    total = float(factors.sum())
    if not total > 0:
        return raw._replace(temperature=1.0, losses=losses)
    shares = (factors / total).tolist()
    weights = {piece.name: share for piece, share in zip(pieces[1:], shares[1:], strict=True) if share > 0}
    return Choice(base.name, weights, shares[0], chosen.rung, chosen.steps, 1 / total, losses)


def _embed_linear(fitted: Sequence[LinearView], fold: int, x: Tensor) -> Tensor:
    """Return one fold's linear view of features (n, dim): (1, n, dim)."""
    z: Tensor = fitted[fold](x)
    return z[None]


def _embed_learned(fitted: Sequence[LinearView], stack: ResidualMLPs, members: int, fold: int, x: Tensor) -> Tensor:
    """Return one fold's learned views of features (n, dim): (members, n, embedding_dim)."""
    z: Tensor = stack(fitted[fold](x), slice(fold * members, (fold + 1) * members))
    return z


def _learned_candidates(
    judge: _Judge,
    fitted: Sequence[LinearView],
    untrained: Candidate,
    plan: Plan,
    generator: torch.Generator,
    deadline: float,
) -> Iterator[Candidate]:
    """Climb the ladder of stacks, each trained on all folds at once, for as long as more steps do not hurt."""
    tasks = [
        Task(torch.cat([view(part) for part in judge.features[fold.fit].split(CHUNK)]), judge.labels[fold.fit])
        for view, fold in zip(fitted, judge.folds, strict=True)
    ]
    best = untrained
    for members, width in plan.ladder:
        if members > 1 and best.rung != (1, width):
            break  # every width is tried, but copies only of a width that beat the others
        stack = ResidualMLPs(members * len(tasks), tasks[0].z.shape[1], width, plan.embedding_dim, generator)
        repeated = [task for task in tasks for _ in range(members)]
        rung_best = untrained
        cost = len(repeated) * count_mlp_parameters(tasks[0].z.shape[1], width, plan.embedding_dim)
        affordable = [steps for steps in STEPS if steps * cost <= WORK] or STEPS[:1]
        for steps, average in train(
            stack, repeated, judge.num_classes, steps=affordable, generator=generator, deadline=deadline
        ):
            name = f"{members}x{width} MLP, {steps} steps"
            cosines = judge.cosines(partial(_embed_learned, fitted, average, members))
            candidate = judge.candidate(name, cosines, (members, width), steps)
            yield candidate
            if worse_by_one_error(candidate.losses, rung_best.losses):
                break
            rung_best = min(rung_best, candidate, key=lambda c: float(c.losses.mean()))
        best = min(best, rung_best, key=lambda c: float(c.losses.mean()))


def _weigh(judge: _Judge, pieces: list[Candidate], *, keep_first: bool = False) -> tuple[list[Candidate], Tensor]:
    """Weigh the pieces' cosines, dropping from the last to the first each that is not missed.

    A piece is missed if the log-loss without it is worse than that of all by more than one standard error.
    """
    labels = judge.labels[judge.judged]
    factors, full = fit_weights(torch.stack([piece.cosines for piece in pieces]), labels, judge.seen)
    for dropped in reversed(pieces[1:] if keep_first else pieces):
        fewer = [piece for piece in pieces if piece is not dropped]
        if not fewer:
            break
        trial, losses = fit_weights(torch.stack([piece.cosines for piece in fewer]), labels, judge.seen)
        kept = not keep_first or float(trial[0]) > 0
        if kept and not worse_by_one_error(losses, full):
            pieces, factors = fewer, trial
    return pieces, factors
