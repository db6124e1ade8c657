"""Temperature and weights of views from their out-of-fold cosines, and the one-standard-error rule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.views.linear import CHUNK

#: Standard deviation of the prior on the logits' size when a temperature is fitted.
LOGIT_SCALE = 5.0
#: Log-loss, in nats a row, that nobody would notice.
TIE = 2e-3
#: Excess log-loss that divides a view's weight by e: in nats a row, or over all rows where that is more.
SOFTNESS, SOFTNESS_IN_ALL = 0.15, 4.0
#: Nats, over all rows, that hold weights back to where they start, and most cosines that they are fitted to.
HELD_BACK, MOST_COSINES = 10.0, 2**22


@dataclass(frozen=True)
class _Minimizer:
    """When L-BFGS is done, as `torch.optim.LBFGS` decides it."""

    #: Steps, and trials of a step's size, at the most.
    steps: int = 60
    trials: int = 25
    #: Largest derivative at which nothing more is done.
    least: float = 1e-7
    #: Change of the value, or of every variable, below which a step was the last.
    tolerance: float = 1e-9
    #: Wolfe's conditions: decrease per unit of slope, and the share of the slope that may be left.
    decrease: float = 1e-4
    flatter: float = 0.9
    #: Least curvature along a step that is learned from.
    curved: float = 1e-10


LBFGS = _Minimizer()
#: A view with a smaller share of the weight is left out.
LEAST_SHARE = 0.01
#: Log-loss, in nats a row, that is never forgiven as chance when a simple model stands against a mixture of many.
MOST = 0.02
#: Nats, over all rows, by which the evidence has to speak for leaving a mixture of many: it hedges.
PRIOR = 1.0


def fit_temperature(cosines: Tensor, labels: Tensor, seen: Tensor) -> tuple[float, Tensor]:
    """Fit the factor on the cosines, the inverse temperature, for which their softmax has the least log-loss.

    A Gaussian prior on the size of the logits keeps few or separable rows from driving the factor to infinity. The
    problem is convex in one variable; Newton steps with backtracking solve it.

    Args:
        cosines: (n, num_classes) float32.
        labels: (n,) int64.
        seen: (num_classes,) bool, the classes that can win.

    Returns:
        factor: >= 0.
        losses: (n,) float64, the log-loss of each row.

    Source: temperature scaling, Guo et al., "On calibration of modern neural networks" (2017), sec. 4.2.
    """
    cosines = cosines[:, seen]
    targets = (seen.cumsum(dim=0) - 1)[labels][:, None]
    true = cosines.gather(1, targets)[:, 0]
    spread = float(cosines.var(dim=1, correction=0).mean())
    if spread < 1e-12:  # nothing tells the classes apart
        return 0.0, torch.full((len(cosines),), math.log(max(1, cosines.shape[1])), dtype=torch.float64)
    ridge = spread / (LOGIT_SCALE**2 * len(cosines))

    def evaluate(factor: float) -> tuple[float, Tensor, Tensor]:
        log_p = (factor * cosines).log_softmax(dim=1)
        losses = -log_p.gather(1, targets)[:, 0].to(torch.float64)
        return float(losses.mean()) + ridge * factor**2 / 2, losses, log_p

    factor = 1 / math.sqrt(spread)
    value, losses, log_p = evaluate(factor)
    for _ in range(50):
        p = log_p.exp()
        mean = (p * cosines).sum(dim=1)
        slope = float((mean - true).mean(dtype=torch.float64)) + ridge * factor
        curvature = float(((p * cosines.square()).sum(dim=1) - mean.square()).mean(dtype=torch.float64)) + ridge
        step = slope / max(curvature, 1e-12)
        for shrink in (1.0, 0.5, 0.25, 0.1, 0.01, 0.001):
            trial = max(0.0, factor - shrink * step)
            trial_value, trial_losses, trial_log_p = evaluate(trial)
            if trial_value < value:
                break
        gain = value - trial_value
        if gain > 0:
            factor, value, losses, log_p = trial, trial_value, trial_losses, trial_log_p
        if gain < 1e-7:
            break
    return factor, losses


def soft_weights(cosines: list[Tensor], losses: list[Tensor], prior: list[float], *, keep_last: bool) -> Tensor:
    """Weigh views by how well each does alone: ``exp(-excess loss / softness)``, in units of its own spread.

    Weights fitted to few out-of-fold rows over-fit them; these have nothing to fit but the scores.

    Args:
        cosines: Of each view, (n, num_classes), out of fold.
        losses: Of each view, (n,), at its own best temperature.
        prior: Of each view, > 0, how much it is trusted before any row is seen.
        keep_last: Leave the last one, the learned view, a share in any case.

    Returns:
        (views,) float64, summing to 1. Views under ``LEAST_SHARE`` of the influence get 0, or, for one that is kept,
        that share.

    Source: exponential weights, as in Dalalyan and Tsybakov, "Aggregation by exponential weighting" (2008).
    """
    means = torch.stack([loss.mean() for loss in losses])
    softness = max(SOFTNESS, SOFTNESS_IN_ALL / len(losses[0]))
    influence = torch.exp((means.min() - means) / softness) * means.new_tensor(prior)
    least = LEAST_SHARE * influence.sum()
    influence = torch.where(influence >= least, influence, 0.0)
    if keep_last:
        influence[-1] = influence[-1].clamp_min(least)
    spread = torch.stack([each.var(dim=1, correction=0).mean(dtype=torch.float64).sqrt() for each in cosines])
    weights = torch.where(spread > 1e-9, influence / spread.clamp_min(1e-9), 0.0)
    if not bool(weights.sum() > 0):  # no view tells rows apart
        weights[-1] = 1.0
    return weights / weights.sum()


def fit_weights(cosines: list[Tensor], labels: Tensor, seen: Tensor, start: Tensor) -> Tensor:
    """Fit the weights of views jointly to out-of-fold rows, held back to where they start.

    The log-loss of the mixture, plus ``HELD_BACK`` nats over all rows for each nat of Kullback-Leibler divergence
    between the influences and those of the start, so that few rows hardly move them.

    Args:
        cosines: Of each view, (n, num_classes), out of fold.
        labels: (n,) int64.
        seen: (num_classes,) bool, the classes that can win.
        start: (views,) float64 weights, summing to 1, as of `soft_weights`.

    Returns:
        (views,) float64, summing to 1; 0 where the start is 0, and ``LEAST_SHARE`` of the influence at the least
        where it is not.

    Source: stacking, Wolpert, "Stacked generalization" (1992), with non-negative weights as in Breiman (1996).
    """
    used = start.nonzero().flatten()
    most = max(1, int(MOST_COSINES / (len(used) * int(seen.sum()))))
    rows = slice(None, None, math.ceil(len(labels) / most))
    targets = (seen.cumsum(dim=0) - 1)[labels[rows]]
    stacked = torch.stack([cosines[int(view)][rows][:, seen] for view in used]).to(torch.float64)
    spread = stacked.var(dim=2, correction=0).mean(dim=1).sqrt().clamp_min(1e-9)  # (views,)
    stacked = stacked / spread[:, None, None]
    prior = start[used] * spread
    prior = prior / prior.sum()

    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        share = x[:-1].log_softmax(dim=0)
        logits = x[-1].exp() * torch.tensordot(share.exp(), stacked, dims=1)  # (rows, seen classes)
        size = logits.var(dim=1, correction=0).mean() / LOGIT_SCALE**2
        held = HELD_BACK * (share.exp() * (share - prior.log())).sum()
        loss: Tensor = torch.nn.functional.cross_entropy(logits, targets) + (held + size / 2) / len(targets)
        return float(loss.detach()), torch.autograd.grad(loss, x)[0]

    found = _minimize(evaluate, torch.cat([prior.log(), prior.new_zeros(1)]))  # logarithms of shares and of the scale
    influence = found[:-1].softmax(dim=0).clamp_min(LEAST_SHARE)
    weights = torch.zeros_like(start)
    weights[used] = influence / spread
    return weights / weights.sum()


def _minimize(evaluate: Callable[[Tensor], tuple[float, Tensor]], x: Tensor) -> Tensor:
    """Minimise a smooth function of a few variables by L-BFGS that keeps all its steps.

    It is written out because the first use of ``torch.optim`` imports torch's compiler.

    Args:
        evaluate: Returns the value and the gradient (n,) at a point (n,).
        x: (n,) float64, where to start.

    Returns:
        (n,) the minimum, to `LBFGS.tolerance`.

    Source: Nocedal and Wright, "Numerical optimization" (2006), algorithms 7.4 and 7.5; the step sizes by bisection
        until the strong Wolfe conditions (3.7) hold.
    """
    value, gradient = evaluate(x)
    pairs: list[tuple[Tensor, Tensor]] = []  # steps, and the changes of the gradient along them
    step = -gradient
    size = min(1.0, 1 / max(float(gradient.abs().sum()), LBFGS.least))
    for _ in range(LBFGS.steps):
        slope = float(gradient @ step)
        if float(gradient.abs().max()) <= LBFGS.least or slope > -LBFGS.tolerance:
            break
        low, high = 0.0, math.inf
        for _ in range(LBFGS.trials):
            new_value, new_gradient = evaluate(x + size * step)
            new_slope = float(new_gradient @ step)
            if abs(new_slope) <= -LBFGS.flatter * slope and new_value <= value + LBFGS.decrease * size * slope:
                break
            too_long = new_slope > 0 or not new_value <= value + LBFGS.decrease * size * slope  # NaN is too long
            low, high = (low, size) if too_long else (size, high)
            size = (low + high) / 2 if high < math.inf else 2 * size
        if not new_value <= value:
            break
        moved, change, gain = size * step, new_gradient - gradient, value - new_value
        x, value, gradient, size = x + moved, new_value, new_gradient, 1.0
        if float(moved.abs().max()) <= LBFGS.tolerance or gain < LBFGS.tolerance:
            break
        if float(change @ moved) > LBFGS.curved:
            pairs.append((moved, change))
        step = -gradient
        parts = []
        for own, along in reversed(pairs):
            parts.append(own @ step / (along @ own))
            step = step - parts[-1] * along
        if pairs:
            own, along = pairs[-1]
            step = step * ((along @ own) / (along @ along))
        for (own, along), part in zip(pairs, reversed(parts), strict=True):
            step = step + (part - along @ step / (along @ own)) * own
    return x


def worse_by_one_error(losses: Tensor, reference: Tensor, *, most: float = math.inf, margin: float = 0.0) -> bool:
    """Return whether ``losses`` (n,) exceed ``reference`` (n,) by more than one standard error of the difference.

    A difference below ``TIE`` is none: twins differ systematically, if by next to nothing. One above ``most`` always
    counts: of few rows the standard error alone would forgive anything. ``margin`` is a prior's say: nats, over all
    rows, that are added to what is forgiven.

    Source: the one-standard-error rule of Breiman et al., "Classification and regression trees" (1984), sec. 3.4.3.
    """
    excess = losses - reference
    error = float(excess.std(correction=0)) / math.sqrt(len(excess))
    return float(excess.mean()) > min(most, max(TIE, error)) + margin / len(excess)


def simplest_within_one_error(losses: list[Tensor]) -> int:
    """Return the position of the first candidate that is not worse than the best by one error, simplest first.

    Args:
        losses: One tensor (n,) a candidate, all on the same rows.
    """
    best = min(losses, key=lambda loss: float(loss.mean()))
    return next(position for position, loss in enumerate(losses) if not worse_by_one_error(loss, best))


#: Folds by default.
FOLDS = 5
#: Above this many rows, or (row, class) cosines, one held-out part stands for all folds ...
MANY_ROWS, MANY_COSINES = 16384, 1 << 25
#: ... of at most this many rows.
HELD_OUT = 4096


class Fold(NamedTuple):
    """Row numbers to fit on and to judge on."""

    fit: Tensor
    judge: Tensor


def split_folds(labels: Tensor, num_classes: int, generator: torch.Generator, *, most: int = FOLDS) -> list[Fold]:
    """Split rows into folds stratified by class.

    Args:
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        generator: Shuffles the rows of each class.
        most: Folds, where rows and classes are few enough.

    Returns:
        Up to ``most`` folds; one held-out part where rows or classes are many; none if no class has two rows, or if
        none are asked for.
        A class with a single row is always fitted on and never judged.
    """
    n = len(labels)
    order = torch.randperm(n, generator=generator)
    order = order[labels[order].argsort(stable=True)]
    count = torch.bincount(labels, minlength=num_classes)
    start = (count.cumsum(0) - count)[labels[order]]
    rank = torch.arange(n) - start  # (n,) position within the class
    several = count[labels[order]] > 1
    if not most or not bool(several.any()):
        return []
    if n > MANY_ROWS or n * num_classes > MANY_COSINES:
        held_out = max(256, min(HELD_OUT, MANY_COSINES // num_classes))
        judged = several & (rank % max(2, math.ceil(n / held_out)) == 0)
        extra = judged.nonzero().flatten()
        judged[extra[torch.randperm(len(extra), generator=generator)[held_out:]]] = False
        return [Fold(order[~judged].sort().values, order[judged].sort().values)]
    folds = min(most, int(count.max()))
    part = torch.where(several, (rank + start) % folds, -1)  # the offset spreads remainders over the folds
    return [Fold(order[part != k].sort().values, order[part == k].sort().values) for k in range(folds)]


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
