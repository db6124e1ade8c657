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
from protonet.radial import GRID, RADIAL_KINDS, count_units, radial_cosines
from protonet.stacking import MOST, PRIOR, fit_temperature, simplest_within_one_error, soft_weights, worse_by_one_error
from protonet.training import Task, train
from protonet.views import CHUNK, LinearView, available_kinds, fit_view

#: Step counts at which training is judged; a run that gets worse is not continued.
STEPS = (10, 30, 100, 300)
#: Most parameters times steps that one rung may cost, over all folds: about ten seconds at the most.
WORK = 1e8
#: A fold with this many judged rows settles a radial view's width and ridge alone.
SETTING_ROWS = 256


class Candidate(NamedTuple):
    """One way to embed: its out-of-fold cosines (judged, num_classes) and their log-losses (judged,)."""

    name: str
    cosines: Tensor
    losses: Tensor
    rung: tuple[int, int] = (0, 0)
    steps: int = 0
    setting: tuple[float, float] = (0.0, 0.0)


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
        _, losses = fit_temperature(cosines, self.labels[self.judged], self.seen)
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
        The choice. Where fewer than half of the classes have two rows, or without time: raw features and the
        smallest MLP.
    """
    generator = torch.Generator().manual_seed(seed)
    folds = split_folds(labels, num_classes, generator)
    rung = plan.ladder[0] if plan.ladder else (0, 0)
    simplest = Choice("raw", {} if rung[0] else {"raw": 1.0}, {}, float(bool(rung[0])), rung, STEPS[0], 0.1, {})
    seen = int((torch.bincount(labels) > 0).sum())
    judged = len(labels[torch.cat([fold.judge for fold in folds])].unique()) if folds else 0
    if seen < 2 or 2 * judged < seen or time.monotonic() > deadline:  # most classes would have no say
        return simplest
    judge = _Judge(features, labels, num_classes, folds)
    views: dict[str, list[LinearView]] = {}
    linear: list[Candidate] = []
    fewest = min((labels[fold.fit] for fold in folds), key=len)  # every fold has all classes: the fewest degrees
    for kind in available_kinds(fewest) if plan.ladder else ("raw",):
        views[kind] = [fit_view(kind, features[fold.fit], labels[fold.fit], num_classes) for fold in folds]
        linear.append(judge.candidate(kind, judge.cosines(partial(_embed_linear, views[kind]))))
        if time.monotonic() > deadline:
            break
    raw, rows = linear[0], labels[judge.judged]
    simplest = simplest._replace(temperature=_temperature(fit_temperature(raw.cosines, rows, judge.seen)[0]))
    if not plan.ladder:
        return simplest
    radial = list(_radial_candidates(judge, views, deadline))
    base = linear[simplest_within_one_error([each.losses for each in linear])]
    learned = list(_learned_candidates(judge, views[base.name], base, plan, generator, deadline))
    learned = learned or [base._replace(rung=rung, steps=STEPS[0])]  # no time left: as good as untrained
    chosen = learned[simplest_within_one_error([each.losses for each in learned])]

    pieces = [*linear, *radial, chosen]
    weights = soft_weights([piece.cosines for piece in pieces], [piece.losses for piece in pieces]).tolist()
    mixed = torch.stack([weight * piece.cosines for weight, piece in zip(weights, pieces, strict=True)]).sum(dim=0)
    factor, mixed_losses = fit_temperature(mixed, rows, judge.seen)
    losses = {each.name: float(each.losses.mean()) for each in [*linear, *radial, *learned]}
    losses["mixed"] = float(mixed_losses.mean())
    if not worse_by_one_error(raw.losses, mixed_losses, most=MOST, margin=-PRIOR):
        return simplest._replace(losses=losses)
    if worse_by_one_error(mixed_losses, chosen.losses, margin=PRIOR):
        alone = _temperature(fit_temperature(chosen.cosines, rows, judge.seen)[0])
        return Choice(base.name, {}, {}, 1.0, chosen.rung, chosen.steps, alone, losses)
    used = {piece.name: share for piece, share in zip(pieces[:-1], weights, strict=False) if share > 0}
    settings = {each.name: each.setting for each in radial if each.name in used}
    return Choice(base.name, used, settings, weights[-1], chosen.rung, chosen.steps, _temperature(factor), losses)


def _temperature(factor: float) -> float:
    """Return the temperature for a factor on the cosines; where nothing tells the classes apart, a flat one."""
    return 1 / max(factor, 1.0)


def _embed_linear(fitted: Sequence[LinearView], fold: int, x: Tensor) -> Tensor:
    """Return one fold's linear view of features (n, dim): (1, n, dim)."""
    z: Tensor = fitted[fold](x)
    return z[None]


def _embed_learned(fitted: Sequence[LinearView], stack: ResidualMLPs, members: int, fold: int, x: Tensor) -> Tensor:
    """Return one fold's learned views of features (n, dim): (members, n, embedding_dim)."""
    z: Tensor = stack(fitted[fold](x), slice(fold * members, (fold + 1) * members))
    return z


def _radial_candidates(judge: _Judge, views: dict[str, list[LinearView]], deadline: float) -> Iterator[Candidate]:
    """Judge each kind of radial view at its best width and ridge, where the work allows two units a class."""
    x, labels, folds = judge.features, judge.labels, judge.folds
    rows = labels[judge.judged]
    for kind in RADIAL_KINDS:
        n = min(len(fold.fit) for fold in folds)
        if kind.reads not in views or count_units(kind, n, x.shape[1]) < min(n, 2 * int(judge.seen.sum())):
            continue
        settings = GRID
        parts: list[Tensor] = []  # of each fold: (settings, judged, num_classes)
        for view, fold in zip(views[kind.reads], folds, strict=True):
            if time.monotonic() > deadline:
                return
            arguments = (x[fold.fit], labels[fold.fit], x[fold.judge], judge.num_classes)
            parts.append(radial_cosines(kind, view, *arguments, settings))
            if len(settings) > 1 and len(fold.judge) >= SETTING_ROWS:  # one fold is enough to settle them
                best = _best_setting(parts[0], rows[: len(fold.judge)], judge.seen)
                settings, parts = (settings[best],), [parts[0][best : best + 1]]
        cosines = torch.cat(parts, dim=1)
        best = _best_setting(cosines, rows, judge.seen) if len(settings) > 1 else 0
        yield judge.candidate(kind.name, cosines[best])._replace(setting=settings[best])


def _best_setting(cosines: Tensor, labels: Tensor, seen: Tensor) -> int:
    """Return which of (settings, judged, num_classes) cosines have the least log-loss."""
    trials = [float(fit_temperature(each, labels, seen)[1].mean()) for each in cosines]
    return trials.index(min(trials))


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
        if time.monotonic() > deadline:
            return
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
