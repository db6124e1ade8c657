"""Selection without regret: what is switched on, decided on held-out folds.

Each candidate is judged by the log-loss of its out-of-fold cosines. Whatever is within one standard error of the
best goes to the simplest, so a view or a wider MLP has to earn its place; untrained raw cosine is always there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.encoder import Plan
from protonet.fit.candidates import Search, forest_candidates, learned_candidates, linear_candidate, radial_candidates
from protonet.scoring import (
    MOST,
    PRIOR,
    Candidate,
    Fold,
    Judge,
    fit_temperature,
    fit_weights,
    simplest_within_one_error,
    soft_weights,
    split_folds,
    worse_by_one_error,
)
from protonet.views.linear import LinearView, available_kinds, fit_view
from protonet.views.radial import RADIAL_KINDS
from protonet.views.shifts import find_moves

#: What ``solve(effort=...)`` may ask for: closed forms alone, or the whole, or more of it.
EFFORTS = {
    "fast": Search(
        folds=3,
        radial=tuple(kind for kind in RADIAL_KINDS if "relevant" not in kind.name),
        grid=tuple((width, ridge) for width in (1.0, 4.0) for ridge in (1e-2, 1e-1)),
        trees=50,
        rungs=0,
    ),
    "default": Search(),
    "best": Search(folds=10, trees=500, steps=(3, 10, 30, 100, 300), work=2e9),
}
#: How much more a view of moved rows is trusted before any row is seen: that there are moves is evidence already.
MOVED = 3.0
#: Without folds: these views, as they are, and how far apart the logits of the mixture are.
UNJUDGED = ("raw", "gaussian standardised", "laplacian standardised", "forest")
UNJUDGED_SETTING, UNJUDGED_SPREAD = (2.0, 0.1), 1.5
#: The say of raw cosine among them, others' being 1: it is what does not go wrong.
RAW = 3.0
#: Called with a stage and the share of the stages that are over, in [0, 1].
Progress = Callable[[str, float], None]


class Choice(NamedTuple):
    """What the folds decided."""

    reads: str  # the linear view that the learned view reads
    weights: dict[str, float]  # of each closed-form view in use, by name
    settings: dict[str, tuple[float, float]]  # width and ridge of each radial view in use
    learned: float  # weight of the learned view
    rung: tuple[int, int]  # members and hidden width of the learned view, (0, 0) for none
    steps: int  # how long it trains
    temperature: float
    losses: dict[str, float]  # mean out-of-fold log-loss of each candidate, best temperature
    moves: tuple[int, ...] = (0,)  # offsets of the copies that moved views are fitted to
    learns_moved: bool = False  # does the learned view train on them, too?


def select(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    plan: Plan,
    *,
    search: Search | None = None,
    seed: int = 0,
    deadline: float = math.inf,
    progress: Progress = lambda stage, share: None,
) -> Choice:
    """Decide views, the learned view's size and training length, weights and temperature on held-out folds.

    Args:
        features: (n, dim) float32 of about unit scale, in canonical order.
        labels: (n,) int64.
        num_classes: Number of classes.
        plan: What the parameter budget affords.
        search: What is tried.
        seed: Of folds, initial weights and episodes.
        deadline: ``time.monotonic()`` after which no further candidate is tried.
        progress: Told which stage begins.

    Returns:
        The choice. Where fewer than half of the classes have two rows, a fixed mixture; without time, raw features
        and the smallest MLP.
    """
    search = search or Search()
    generator = torch.Generator().manual_seed(seed)
    folds = split_folds(labels, num_classes, generator, most=search.folds)
    rung = plan.ladder[0] if plan.ladder and search.rungs else (0, 0)
    first = search.steps[0]
    simplest = Choice("raw", {} if rung[0] else {"raw": 1.0}, {}, float(bool(rung[0])), rung, first, 0.1, {})
    seen = int((torch.bincount(labels) > 0).sum())
    judged = len(labels[torch.cat([fold.judge for fold in folds])].unique()) if folds else 0
    unjudged = 2 * judged < seen  # most classes would have no say
    if seen < 2 or (unjudged and not plan.ladder) or time.monotonic() > deadline:
        return simplest
    progress("linear views", 0.0)
    moves = find_moves(features) if plan.ladder and search.moves else (0,)
    if unjudged:
        return _mix_unjudged(features, labels, num_classes, simplest, search, moves, deadline)
    judge = Judge(features, labels, num_classes, folds, moves=moves, deadline=deadline)
    views, linear = _linear(judge, plan)
    raw = linear[0]
    simplest = simplest._replace(temperature=_temperature(fit_temperature(raw.cosines, judge.rows, judge.seen)[0]))
    if not plan.ladder:
        return simplest
    base = linear[simplest_within_one_error([each.losses for each in linear])]
    judge.best = min((each.losses for each in linear), key=lambda losses: float(losses.mean()))
    progress("radial views", 0.1)
    radial = list(radial_candidates(judge, views, search))
    progress("forests", 0.4)
    closed = [*linear, *radial, *forest_candidates(judge, search)]
    progress("learned views", 0.5)
    best = min(closed, key=lambda each: float(each.losses.mean()))
    learns_moved = best.name.startswith("moved")
    learned: list[Candidate] = []
    if search.rungs:
        trained_on = moves if learns_moved else (0,)
        untrained = linear_candidate(judge, base.name, views[base.name], lifted=False)
        learned = list(learned_candidates(judge, views[base.name], untrained, plan, search, trained_on, generator))
        learned = learned or [untrained._replace(rung=rung, steps=first)]  # no time left: as good as untrained
    chosen = [learned[simplest_within_one_error([each.losses for each in learned])]] if learned else []

    pieces = [*closed, *chosen]
    cosines = [piece.cosines for piece in pieces]
    prior = [MOVED if piece.name.startswith("moved") else 1.0 for piece in pieces]
    weights = soft_weights(cosines, [piece.losses for piece in pieces], prior, keep_last=bool(chosen))
    if chosen:  # what takes no training takes no fitted weights either
        weights = fit_weights(cosines, judge.rows, judge.seen, weights)
    factor, mixed_losses = _mix(judge, cosines, weights)
    losses = {each.name: float(each.losses.mean()) for each in [*closed, *learned]}
    losses["mixed"] = float(mixed_losses.mean())
    if not worse_by_one_error(raw.losses, mixed_losses, most=MOST, margin=-PRIOR):
        return simplest._replace(losses=losses)
    simplest = simplest._replace(moves=moves, learns_moved=learns_moved, losses=losses)
    for each in chosen:
        simplest = simplest._replace(rung=each.rung, steps=each.steps)
        if worse_by_one_error(mixed_losses, each.losses, margin=PRIOR):
            alone = _temperature(fit_temperature(each.cosines, judge.rows, judge.seen)[0])
            return simplest._replace(reads=base.name, temperature=alone)
    used = {piece.name: share for piece, share in zip(closed, weights.tolist(), strict=False) if share > 0}
    return simplest._replace(
        reads=base.name,
        weights=used,
        settings={each.name: each.setting for each in radial if each.name in used},
        learned=float(weights[-1]) if chosen else 0.0,
        temperature=_temperature(factor),
    )


def _mix_unjudged(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    simplest: Choice,
    search: Search,
    moves: tuple[int, ...],
    deadline: float,
) -> Choice:
    """Return the mixture of ``UNJUDGED`` and of views of moved rows, where no row can judge."""
    everything = torch.arange(len(labels))
    judge = Judge(features, labels, num_classes, [Fold(everything, everything)], moves=moves, deadline=deadline)
    views = {
        kind: [fit_view(kind, features, labels, num_classes)] for kind in ("raw", "centred", "standardised", "robust")
    }
    search = search._replace(
        grid=(UNJUDGED_SETTING,),
        radial=tuple(kind for kind in search.radial if kind.moved or kind.name in UNJUDGED),
    )
    pieces = [*radial_candidates(judge, views, search), *forest_candidates(judge, search)]
    pieces.append(linear_candidate(judge, "raw", views["raw"]))
    spread = torch.stack([piece.cosines.var(dim=1, correction=0).mean().sqrt() for piece in pieces])
    say = torch.ones_like(spread)
    say[-1] = RAW
    weights = torch.where(spread > 1e-9, say / spread.clamp_min(1e-9), 0.0)
    if not bool(weights.sum() > 0):
        return simplest
    shares = (weights / weights.sum()).tolist()
    learned = shares.pop() if simplest.rung[0] else 0.0  # untrained, it is raw cosine
    used = {piece.name: share for piece, share in zip(pieces, shares, strict=False) if share > 0}
    factor = UNJUDGED_SPREAD * float(weights.sum() / say.sum())
    settings = {piece.name: piece.setting for piece in pieces if piece.name in used and piece.setting != (0.0, 0.0)}
    return simplest._replace(
        weights=used, settings=settings, learned=learned, temperature=_temperature(factor), moves=moves
    )


def _linear(judge: Judge, plan: Plan) -> tuple[dict[str, list[LinearView]], list[Candidate]]:
    """Fit the linear views to each fold, by kind, and judge them, the simplest first."""
    views: dict[str, list[LinearView]] = {}
    candidates: list[Candidate] = []
    fewest = min((judge.labels[fold.fit] for fold in judge.folds), key=len)  # each has all classes: fewest degrees
    for kind in available_kinds(fewest) if plan.ladder else ("raw",):
        views[kind] = [
            fit_view(kind, judge.features[fold.fit], judge.labels[fold.fit], judge.num_classes) for fold in judge.folds
        ]
        candidates.append(linear_candidate(judge, kind, views[kind]))
        if judge.late():
            break
    return views, candidates


def _mix(judge: Judge, cosines: list[Tensor], weights: Tensor) -> tuple[float, Tensor]:
    """Return the factor on, and the log-losses (judged,) of, the weighted sum of views' cosines."""
    mixed = torch.zeros_like(cosines[0])
    for each, weight in zip(cosines, weights.tolist(), strict=True):
        mixed += weight * each
    return fit_temperature(mixed, judge.rows, judge.seen)


def _temperature(factor: float) -> float:
    """Return the temperature for a factor on the cosines; where nothing tells the classes apart, a flat one."""
    return 1 / max(factor, 1.0)
