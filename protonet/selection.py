"""Selection without regret: what is switched on, decided on held-out folds.

Each candidate is judged by the log-loss of its out-of-fold cosines. Whatever is within one standard error of the
best goes to the simplest, so a view or a wider MLP has to earn its place; untrained raw cosine is always there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from protonet.encoder import Plan, ResidualMLPs
from protonet.training import Task, train
from protonet.views import LinearView, available_kinds, fit_view

#: Step counts at which training is judged; a run that gets worse is not continued.
STEPS = (10, 30, 100, 300, 1000)
#: Folds, where rows and classes are few enough; else one held-out part.
FOLDS = 5
#: Above this many rows, or (row, class) cosines, one held-out part stands for all folds ...
MANY_ROWS, MANY_COSINES = 16384, 1 << 25
#: ... of at most this many rows.
HELD_OUT = 4096
CHUNK = 8192


class Fold(NamedTuple):
    """Row numbers to fit on and to judge on."""

    fit: Tensor
    judge: Tensor


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


def split_folds(labels: Tensor, num_classes: int, generator: torch.Generator) -> list[Fold]:
    """Split rows into folds stratified by class.

    Args:
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        generator: Shuffles the rows of each class.

    Returns:
        Up to ``FOLDS`` folds; one held-out part where rows or classes are many; none if no class has two rows.
        A class with a single row is always fitted on and never judged.
    """
    n = len(labels)
    order = torch.randperm(n, generator=generator)
    order = order[labels[order].argsort(stable=True)]
    count = torch.bincount(labels, minlength=num_classes)
    start = (count.cumsum(0) - count)[labels[order]]
    rank = torch.arange(n) - start  # (n,) position within the class
    several = count[labels[order]] > 1
    if not bool(several.any()):
        return []
    if n > MANY_ROWS or n * num_classes > MANY_COSINES:
        held_out = max(256, min(HELD_OUT, MANY_COSINES // num_classes))
        judged = several & (rank % math.ceil(n / held_out) == 0)
        extra = judged.nonzero().flatten()
        judged[extra[torch.randperm(len(extra), generator=generator)[held_out:]]] = False
        return [Fold(order[~judged].sort().values, order[judged].sort().values)]
    folds = min(FOLDS, int(count.max()))
    part = torch.where(several, (rank + start) % folds, -1)  # the offset spreads remainders over the folds
    return [Fold(order[part != k].sort().values, order[part == k].sort().values) for k in range(folds)]


def fit_weights(cosines: Tensor, labels: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Fit one non-negative factor a view, so that the softmax of the weighted cosines has the least log-loss.

    The factors' sum is the inverse temperature, their shares are the views' weights. The problem is convex;
    projected Newton steps with backtracking solve it.

    Args:
        cosines: (views, n, num_classes) float32.
        labels: (n,) int64.
        seen: (num_classes,) bool, the classes that can win.

    Returns:
        factors: (views,) float64, >= 0.
        losses: (n,) float64, the log-loss of each row.
    """
    views = len(cosines)
    hidden = torch.where(seen, 0.0, -torch.inf)

    def evaluate(factors: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.tensordot(factors.float(), cosines, dims=1).add_(hidden).log_softmax(dim=1)
        return -log_p.gather(1, labels[:, None])[:, 0].double(), log_p

    factors = torch.full((views,), 10.0 / views, dtype=torch.float64)
    losses, log_p = evaluate(factors)
    for _ in range(50):
        p = log_p.exp()  # (n, num_classes)
        mean = torch.stack([(p * view).sum(dim=1) for view in cosines])  # (views, n)
        true = cosines.gather(2, labels.expand(views, -1)[..., None])[..., 0]
        gradient = (mean - true).mean(dim=1, dtype=torch.float64)
        second = torch.stack([torch.stack([(p * a * b).sum(dim=1) for b in cosines]) for a in cosines])
        hessian = (second - mean[:, None] * mean[None, :]).mean(dim=2, dtype=torch.float64)
        free = (factors > 0) | (gradient < 0)
        if not bool(free.any()) or float(gradient[free].abs().max()) < 1e-6:
            break
        ridge = 1e-9 * torch.eye(int(free.sum()), dtype=torch.float64) * (1 + hessian.diagonal().max())
        step = torch.zeros_like(factors)
        step[free] = torch.linalg.solve(hessian[free][:, free] + ridge, gradient[free])
        step = step.clamp(-50, 50)
        for shrink in (1.0, 0.5, 0.25, 0.1, 0.01, 0.001):
            trial = (factors - shrink * step).clamp_min(0)
            trial_losses, trial_log_p = evaluate(trial)
            if float(trial_losses.mean()) < float(losses.mean()):
                break
        else:
            break
        gain = float(losses.mean() - trial_losses.mean())
        factors, losses, log_p = trial, trial_losses, trial_log_p
        if gain < 1e-7:
            break
    return factors, losses


def simplest_within_one_error(losses: Sequence[Tensor]) -> int:
    """Return the first candidate whose paired mean loss is within one standard error of the best.

    Args:
        losses: One tensor (n,) a candidate, simplest candidate first, all on the same rows.

    Returns:
        Its position.

    Source: the one-standard-error rule of Breiman et al., "Classification and regression trees" (1984), sec. 3.4.3.
    """
    best = min(losses, key=lambda loss: float(loss.mean()))
    for position, loss in enumerate(losses):
        if not worse_by_one_error(loss, best):
            return position
    raise AssertionError("the best candidate is within one error of itself")


def worse_by_one_error(losses: Tensor, reference: Tensor) -> bool:
    """Return whether ``losses`` (n,) exceed ``reference`` (n,) by more than one standard error of the difference."""
    excess = losses - reference
    return float(excess.mean()) > float(excess.std(correction=0)) / math.sqrt(len(excess))


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

    def candidate(
        self, name: str, cosines: Tensor, rung: tuple[int, int] = (0, 0), steps: int = 0
    ) -> Candidate:
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
    raw = Choice(
        "raw", {} if plan.ladder else {"raw": 1.0}, float(bool(plan.ladder)), rung, STEPS[0], 0.1, {}
    )
    if not folds or time.monotonic() > deadline:
        return raw
    judge = _Judge(features, labels, num_classes, folds)
    views: dict[str, list[LinearView]] = {}
    linear: list[Candidate] = []
    for kind in available_kinds(labels[folds[0].fit]) if plan.ladder else ("raw",):
        views[kind] = [fit_view(kind, features[fold.fit], labels[fold.fit], num_classes) for fold in folds]
        linear.append(
            judge.candidate(
                kind, judge.cosines(lambda number, x, fitted=views[kind]: fitted[number](x)[None])
            )
        )
        if time.monotonic() > deadline:
            break
    base = linear[simplest_within_one_error([candidate.losses for candidate in linear])]
    learned = list(_learned_candidates(judge, views[base.name], base, plan, generator, deadline))
    if learned:
        chosen = learned[simplest_within_one_error([candidate.losses for candidate in learned])]
    else:
        chosen = base._replace(name="untrained", rung=rung, steps=STEPS[0])
    others = [] if not plan.ladder else [candidate for candidate in linear if candidate is not base]
    pieces, factors = _weigh(judge, [*others, chosen])
    total = float(factors.sum())
    if (
        total <= 0
    ):  # nothing tells the classes apart: keep the simplest model, at the flattest temperature tried
        return raw._replace(temperature=1.0)
    shares = (factors / total).tolist()
    weights = {piece.name: share for piece, share in zip(pieces[:-1], shares[:-1], strict=True) if share > 0}
    losses = {candidate.name: float(candidate.losses.mean()) for candidate in [*linear, *learned]}
    if not plan.ladder:
        return raw._replace(temperature=1 / total, losses=losses)
    return Choice(base.name, weights, shares[-1], chosen.rung, chosen.steps, 1 / total, losses)


def _learned_candidates(
    judge: _Judge,
    fitted: Sequence[LinearView],
    untrained: Candidate,
    plan: Plan,
    generator: torch.Generator,
    deadline: float,
) -> Iterator[Candidate]:
    """Climb the ladder of stacks, each trained on all folds at once, while a rung is better than the last."""
    tasks = [
        Task(
            torch.cat([view(part) for part in judge.features[fold.fit].split(CHUNK)]), judge.labels[fold.fit]
        )
        for view, fold in zip(fitted, judge.folds, strict=True)
    ]
    best = untrained
    for members, width in plan.ladder:
        stack = ResidualMLPs(members * len(tasks), tasks[0].z.shape[1], width, plan.embedding_dim, generator)
        repeated = [task for task in tasks for _ in range(members)]
        rung_best = best
        for steps, average in train(
            stack, repeated, judge.num_classes, steps=STEPS, generator=generator, deadline=deadline
        ):

            def embed(
                number: int, x: Tensor, average: ResidualMLPs = average, members: int = members
            ) -> Tensor:
                return average(fitted[number](x), slice(number * members, (number + 1) * members))

            name = f"{members}x{width} MLP, {steps} steps"
            candidate = judge.candidate(name, judge.cosines(embed), (members, width), steps)
            yield candidate
            if worse_by_one_error(candidate.losses, rung_best.losses):
                break
            rung_best = min(rung_best, candidate, key=lambda c: float(c.losses.mean()))
        if not worse_by_one_error(best.losses, rung_best.losses):
            break
        best = rung_best


def _weigh(judge: _Judge, pieces: list[Candidate]) -> tuple[list[Candidate], Tensor]:
    """Weigh the pieces' cosines, dropping each that is not missed by more than one standard error.

    The last piece is kept: it is the learned view. The others are tried from the most fitted to the simplest.
    """
    labels = judge.labels[judge.judged]
    factors, full = fit_weights(torch.stack([piece.cosines for piece in pieces]), labels, judge.seen)
    for dropped in reversed(pieces[:-1]):
        fewer = [piece for piece in pieces if piece is not dropped]
        trial, losses = fit_weights(torch.stack([piece.cosines for piece in fewer]), labels, judge.seen)
        if trial[-1] > 0 and not worse_by_one_error(losses, full):
            pieces, factors = fewer, trial
    return pieces, factors
