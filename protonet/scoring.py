"""Scores on held-out rows: folds, temperatures, the weights of views, and the one-standard-error rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class FoldRules:
    """How rows are held out. The numbers bound time and memory; see analysis/results/scale.md."""

    count: int = 5  #: Folds by default.
    many_rows: int = 16384  #: Above this many rows, one held-out part stands for all folds ...
    many_cosines: int = 1 << 25  #: ... and above this many cosines of rows and classes.
    held_out: int = 4096  #: Rows of that part, at the most.


@dataclass(frozen=True)
class WeightRules:
    """How evidence becomes weights.

    The numbers were set on three of the five splits of analysis/results/robustness.md; analysis/results/ablations.md
    shows what selection as a whole is worth.
    """

    logit_scale: float = 3.0  # of 5, 3 and 2 on 240 development tasks, confirmed on 200 others
    """Standard deviation of the prior on the logits' size when a temperature is fitted, in nats."""
    offset_scale: float = 1.0
    """Prior standard deviation of a class's offset, as a multiple of its distance from the mean log frequency."""
    equal_classes: float = 0.1  #: Classes nearer to the mean log frequency have no offset, in nats.
    tie: float = 2e-3  #: Log-loss that nobody would notice, in nats per row.
    softness: float = 0.15  #: Excess log-loss that divides a view's weight by e, in nats per row ...
    softness_in_all: float = 4.0  #: ... or in nats over all rows, where that is more.
    held_back: float = 10.0  #: Nats, over all rows, that hold jointly fitted weights back to where they start.
    most_cosines: int = 2**22  #: Cosines that joint weights are fitted to, at the most.
    least_share: float = 0.01  #: A view with a smaller share of the weight is left out.
    never_forgiven: float = 0.02
    """Log-loss that is never forgiven as chance when raw cosine stands against the mixture, in nats per row."""
    mixture_prior: float = 1.0
    """Nats, over all rows, by which the evidence has to speak for leaving the mixture: it hedges."""


@dataclass(frozen=True)
class NewtonRules:
    """How the temperature's one convex problem is solved; it takes some five steps."""

    steps: int = 50  #: Newton steps, at the most.
    shrinks: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1, 0.01, 0.001)
    """Shares of a step that are tried until the loss falls."""
    settled: float = 1e-7  #: A step that lowers the loss by less is the last, in nats per row.
    flat: float = 1e-12
    """Variance of a row's cosines below which nothing tells the classes apart; the least curvature, too."""


@dataclass(frozen=True)
class LBFGSRules:
    """How L-BFGS goes along a step, and when it is done, as `torch.optim.LBFGS` does and decides it."""

    steps: int = 60  #: Steps, at the most.
    trials: int = 25  #: Sizes of a step, at the most.
    decrease: float = 1e-4  #: Of the decrease that the slope promises, what a step has to bring ...
    flatter: float = 0.9  #: ... and of the slope, what may be left at its end.
    longer: tuple[float, float] = (0.01, 10.0)
    """How far the next size is beyond the last one at the least, as a share of the last growth, and at most how many
    times it ..."""
    inside: float = 0.1  #: ... or how far, as a share of two sizes' distance, one between them is from both.
    least: float = 1e-7  #: Largest derivative at which nothing more is done.
    tolerance: float = 1e-9  #: Change of the value, or of every variable, below which a step was the last.
    curved: float = 1e-10  #: Least curvature along a step that is learned from.


FOLDS, WEIGHTS, NEWTON, LBFGS = FoldRules(), WeightRules(), NewtonRules(), LBFGSRules()


def fit_temperature(
    cosines: Tensor, labels: Tensor, seen: Tensor, weights: Tensor | None = None, repeats: int = 1
) -> tuple[float, Tensor]:
    """Fit the factor on the cosines, the inverse temperature, for which their softmax has the least log-loss.

    A Gaussian prior on the size of the logits keeps few or separable rows from driving the factor to infinity. The
    problem is convex in one variable; Newton steps with backtracking solve it.

    Args:
        cosines: (n, num_classes) float32.
        labels: (n,) int64.
        seen: (num_classes,) bool, the classes that can win.
        weights: (n,) float64 of the rows, > 0 and about 1; None for 1.
        repeats: How often each row occurs among the n, as in repeated cross-validation.

    Returns:
        factor: >= 0.
        losses: (n,) float64, the log-loss of each row times its weight: their mean is the weighted one.

    Source: temperature scaling, Guo et al., "On calibration of modern neural networks" (2017), sec. 4.2.
    """
    cosines = cosines[:, seen]
    targets = (seen.cumsum(dim=0) - 1)[labels][:, None]
    true = cosines.gather(1, targets)[:, 0]
    weights = torch.ones(len(cosines), dtype=torch.float64) if weights is None else weights
    spread = float(cosines.var(dim=1, correction=0).mean())
    if spread < NEWTON.flat:  # nothing tells the classes apart
        return 0.0, weights * math.log(max(1, cosines.shape[1]))
    ridge = spread * repeats / (WEIGHTS.logit_scale**2 * len(cosines))

    def evaluate(factor: float) -> tuple[float, Tensor, Tensor]:
        log_p = (factor * cosines).log_softmax(dim=1)
        losses = weights * -log_p.gather(1, targets)[:, 0].to(torch.float64)
        return float(losses.mean()) + ridge * factor**2 / 2, losses, log_p

    factor = 1 / math.sqrt(spread)
    value, losses, log_p = evaluate(factor)
    for _ in range(NEWTON.steps):
        p = log_p.exp()
        mean = (p * cosines).sum(dim=1)
        slope = float((weights * (mean - true)).mean()) + ridge * factor
        curvature = float((weights * ((p * cosines.square()).sum(dim=1) - mean.square())).mean()) + ridge
        step = slope / max(curvature, NEWTON.flat)
        for shrink in NEWTON.shrinks:
            trial = max(0.0, factor - shrink * step)
            trial_value, trial_losses, trial_log_p = evaluate(trial)
            if trial_value < value:
                break
        drop = value - trial_value
        if drop > 0:
            factor, value, losses, log_p = trial, trial_value, trial_losses, trial_log_p
        if drop < NEWTON.settled:
            break
    return factor, losses


def fit_scale_and_offsets(
    cosines: Tensor, labels: Tensor, sizes: Tensor, weights: Tensor | None = None, repeats: int = 1
) -> tuple[float, Tensor | None, Tensor]:
    """Fit the factor on the cosines jointly with an offset of each class's logits, by the log-loss.

    Offsets correct how frequent classes are predicted to be. They have a Gaussian prior of mean zero; its standard
    deviation is a class's distance, in nats, from the mean frequency. Classes of equal size thus have no offset, and
    few rows of a class leave its offset near zero.

    Args:
        cosines: (repeats * n, num_classes) float32.
        labels: (repeats * n,) int64.
        sizes: (num_classes,) float64: the weight of each class's labelled rows. Balanced weights mean no offsets.
        weights: (repeats * n,) float64 of the rows, > 0 and about 1; None for 1.
        repeats: How often each row occurs.

    Returns:
        factor: >= 0.
        offsets: (num_classes,) float64 that sum to zero, zero for a class without rows; None if all are.
        losses: (repeats * n,) float64, the log-loss of each row times its weight.

    Source: vector scaling, Guo et al., "On calibration of modern neural networks" (2017), sec. 4.2.
    """
    seen = sizes > 0
    factor, losses = fit_temperature(cosines, labels, seen, weights, repeats)
    logs = sizes[seen].log()
    deviation = WEIGHTS.offset_scale * (logs - logs.mean())
    free = deviation.abs() > WEIGHTS.offset_scale * WEIGHTS.equal_classes
    spread = float(cosines[:, seen].var(dim=1, correction=0).mean())
    if not factor or not bool(free.any()) or cosines[:, seen].numel() > WEIGHTS.most_cosines:
        return factor, None, losses
    inputs = cosines[:, seen].double()
    targets = (seen.cumsum(dim=0) - 1)[labels]
    importance = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights
    n = len(labels) / repeats

    def compute_losses(x: Tensor) -> Tensor:
        offsets = torch.zeros_like(logs).masked_scatter(free, x[1:] * deviation[free])
        log_p = (factor * x[0].exp() * inputs + offsets).log_softmax(dim=1)
        return -importance * log_p.gather(1, targets[:, None])[:, 0]

    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        size = spread * (factor * x[0].exp()).square() / WEIGHTS.logit_scale**2
        loss = compute_losses(x).mean() + (size + x[1:].square().sum()) / (2 * n)
        return float(loss.detach()), torch.autograd.grad(loss, x)[0]

    fitted = _minimize(evaluate, logs.new_zeros(1 + int(free.sum())))
    offsets = torch.zeros(len(sizes), dtype=torch.float64)
    offsets[seen.nonzero().flatten()[free]] = fitted[1:] * deviation[free]
    offsets[seen] -= offsets[seen].mean()
    return factor * math.exp(float(fitted[0])), offsets, compute_losses(fitted)


def soft_weights(cosines: Sequence[Tensor], losses: Sequence[Tensor]) -> Tensor:
    """Weigh views by how well each does alone: ``exp(-excess loss / softness)``, in units of its own spread.

    Weights fitted to few out-of-fold rows over-fit them; these have nothing to fit but the scores.

    Args:
        cosines: Of each view, (n, num_classes), out of fold.
        losses: Of each view, (n,), at its own best temperature, from `fit_temperature`.

    Returns:
        (views,) float64, summing to 1. Views under ``WEIGHTS.least_share`` of the influence get 0.

    Source: exponential weights, as in Dalalyan and Tsybakov, "Aggregation by exponential weighting" (2008).
    """
    means = torch.stack([loss.mean() for loss in losses])
    softness = max(WEIGHTS.softness, WEIGHTS.softness_in_all / len(losses[0]))
    influence = torch.exp((means.min() - means) / softness)
    least = WEIGHTS.least_share * influence.sum()
    influence = torch.where(influence >= least, influence, 0.0)
    spread = torch.stack([each.var(dim=1, correction=0).mean(dtype=torch.float64).sqrt() for each in cosines])
    weights = torch.where(spread > 1e-9, influence / spread.clamp_min(1e-9), 0.0)
    if not bool(weights.sum() > 0):  # no view tells rows apart
        weights[-1] = 1.0
    return weights / weights.sum()


def fit_weights(
    cosines: Sequence[Tensor], labels: Tensor, seen: Tensor, start: Tensor, row_weights: Tensor | None = None
) -> Tensor:
    """Fit the weights of views jointly to out-of-fold rows, held back to where they start.

    The log-loss of the mixture, plus ``WEIGHTS.held_back`` nats over all rows for each nat of Kullback-Leibler
    divergence between the influences and those of the start, so that few rows hardly move them.

    Args:
        cosines: Of each view, (n, num_classes), out of fold.
        labels: (n,) int64.
        seen: (num_classes,) bool, the classes that can win.
        start: (views,) float64 weights, summing to 1, from `soft_weights`.
        row_weights: (n,) float64, > 0 and about 1; None for 1.

    Returns:
        (views,) float64, summing to 1; 0 where the start is 0, and ``WEIGHTS.least_share`` of the influence at the
        least where it is not.

    Source: stacking, Wolpert, "Stacked generalization" (1992), with non-negative weights as in Breiman (1996).
    """
    used = start.nonzero().flatten()
    most = max(1, int(WEIGHTS.most_cosines / (len(used) * int(seen.sum()))))
    rows = slice(None, None, math.ceil(len(labels) / most))
    targets = (seen.cumsum(dim=0) - 1)[labels[rows]]
    importance = torch.ones(len(labels), dtype=torch.float64) if row_weights is None else row_weights
    importance = importance[rows, None]
    stacked = torch.stack([cosines[int(view)][rows][:, seen] for view in used]).to(torch.float64)
    spread = stacked.var(dim=2, correction=0).mean(dim=1).sqrt().clamp_min(1e-9)  # (views,)
    stacked = stacked / spread[:, None, None]
    prior = start[used] * spread
    prior = prior / prior.sum()

    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        share = x[:-1].log_softmax(dim=0)
        logits = x[-1].exp() * torch.tensordot(share.exp(), stacked, dims=1)  # (rows, seen classes)
        size = logits.var(dim=1, correction=0).mean() / WEIGHTS.logit_scale**2
        divergence = WEIGHTS.held_back * (share.exp() * (share - prior.log())).sum()
        log_p = importance * logits.log_softmax(dim=1)
        loss: Tensor = torch.nn.functional.nll_loss(log_p, targets) + (divergence + size / 2) / len(targets)
        return float(loss.detach()), torch.autograd.grad(loss, x)[0]

    fitted = _minimize(evaluate, torch.cat([prior.log(), prior.new_zeros(1)]))  # logarithms of shares and of the scale
    influence = fitted[:-1].softmax(dim=0).clamp_min(WEIGHTS.least_share)
    weights = torch.zeros_like(start)
    weights[used] = influence / spread
    return weights / weights.sum()


def _minimize(evaluate: Callable[[Tensor], tuple[float, Tensor]], x: Tensor) -> Tensor:
    """Minimise a smooth function from x (n,) float64, given its value and its gradient (n,); return (n,).

    These are the steps of `torch.optim.LBFGS`, the first use of which imports torch's compiler.

    Source: Nocedal and Wright, "Numerical optimization" (2006), algorithms 7.4 and 7.5.
    """
    value, gradient = evaluate(x)
    pairs: list[tuple[Tensor, Tensor]] = []  # steps, and the changes of the gradient along them
    step = -gradient
    size = min(1.0, 1 / max(float(gradient.abs().sum()), LBFGS.least))
    for _ in range(LBFGS.steps):
        start = Trial(0.0, value, float(gradient @ step), gradient)
        if float(gradient.abs().max()) <= LBFGS.least or start.slope > -LBFGS.tolerance:
            break
        end = _search_line(evaluate, x, step, start, size)
        moved, change, drop = end.size * step, end.gradient - gradient, value - end.value
        x, value, gradient, size = x + moved, end.value, end.gradient, 1.0
        if float(moved.abs().max()) <= LBFGS.tolerance or abs(drop) < LBFGS.tolerance:
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


class Trial(NamedTuple):
    """What a function is at some size of a step."""

    size: float
    value: float
    slope: float  #: Along the step.
    gradient: Tensor  #: (n,)


def _search_line(
    evaluate: Callable[[Tensor], tuple[float, Tensor]], x: Tensor, step: Tensor, start: Trial, size: float
) -> Trial:
    """Return a size of a step (n,) from x (n,) at which the function is low enough and flat enough along the step.

    Args:
        evaluate: As in `_minimize`.
        x: Where the step starts.
        step: Down the function.
        start: At size 0.
        size: The first one that is tried.

    Source: Nocedal and Wright, "Numerical optimization" (2006), algorithms 3.5 and 3.6.
    """
    low, high = start, None  # the lowest one so far; once there is one, a minimum lies between it and the high one
    for _ in range(LBFGS.trials):
        value, gradient = evaluate(x + size * step)
        trial, last = Trial(size, value, float(gradient @ step), gradient), low
        if value > start.value + LBFGS.decrease * size * start.slope or value >= low.value:
            high = trial
        elif abs(trial.slope) <= -LBFGS.flatter * start.slope:
            return trial
        else:
            if trial.slope * (math.inf if high is None else high.size - low.size) >= 0:
                high = low
            low = trial
        if high is None:
            least, most = LBFGS.longer
            size = _find_minimum(last, low, low.size + least * (low.size - last.size), most * low.size)
            continue
        first, second = sorted((low.size, high.size))
        margin = LBFGS.inside * (second - first)
        if second - first < LBFGS.tolerance / max(float(step.abs().max()), LBFGS.least):
            break
        size = _find_minimum(low, high, first + margin, second - margin)
    return low


def _find_minimum(one: Trial, other: Trial, least: float, most: float) -> float:
    """Return, within bounds, the size at which the cubic of two trials' values and slopes is least; eq. 3.59."""
    first, second = sorted((one, other), key=lambda trial: trial.size)
    width = second.size - first.size
    bend = first.slope + second.slope + 3 * (first.value - second.value) / width
    square = bend * bend - first.slope * second.slope
    turn = second.slope - first.slope + 2 * math.sqrt(max(square, 0.0))
    if square < 0 or turn <= 0:  # it has none
        return (least + most) / 2
    size = second.size - width * (second.slope + math.sqrt(square) - bend) / turn
    return min(max(size, least), most)


def worse_by_one_error(losses: Tensor, reference: Tensor, *, most: float = math.inf, margin: float = 0.0) -> bool:
    """Return whether ``losses`` (n,) exceed ``reference`` (n,) by more than one standard error of the difference.

    A difference below ``WEIGHTS.tie`` is none: two fits of the same kind differ systematically, if by next to
    nothing. One above ``most`` always
    counts: of few rows the standard error alone would forgive anything. ``margin`` is a prior: nats, over all
    rows, that are added to what is forgiven.

    Source: the one-standard-error rule of Breiman et al., "Classification and regression trees" (1984), sec. 3.4.3.
    """
    excess = losses - reference
    error = float(excess.std(correction=0)) / math.sqrt(len(excess))
    return float(excess.mean()) > min(most, max(WEIGHTS.tie, error)) + margin / len(excess)


def simplest_within_one_error(losses: list[Tensor]) -> int:
    """Return the position of the first candidate that is not worse than the best by one error, simplest first.

    Args:
        losses: One tensor (n,) per candidate, all on the same rows.
    """
    best = min(losses, key=lambda loss: float(loss.mean()))
    return next(position for position, loss in enumerate(losses) if not worse_by_one_error(loss, best))


class Fold(NamedTuple):
    """Row numbers to fit on and to judge on."""

    train: Tensor  #: (n,) int64.
    held_out: Tensor  #: (m,) int64, none of the others.

    def to(self, device: torch.device) -> Fold:
        """Return the numbers on a device."""
        return Fold(self.train.to(device), self.held_out.to(device))


def split_folds(
    labels: Tensor,
    num_classes: int,
    generator: torch.Generator,
    *,
    most: int = FOLDS.count,
    groups: Tensor | None = None,
    is_class_name: Tensor | None = None,
) -> list[Fold]:
    """Split rows into folds stratified by class.

    Args:
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        generator: Shuffles the rows of each class.
        most: Folds, where rows and classes are few enough.
        groups: (n,) int64: rows of one group are in one fold; None for rows that are each alone.
        is_class_name: (n,) bool: rows that are no samples: every fold is fitted to them, and none is judged on them.

    Returns:
        Up to ``most`` folds; one held-out part where rows or classes are many; none if no class has two rows, or if
        none are asked for.
        A class with a single row is always fitted on and never judged, and so is one of a single group, with all rows
        of that group.
    """
    if is_class_name is not None:
        samples, others = (~is_class_name).nonzero().flatten(), is_class_name.nonzero().flatten()
        own = None if groups is None else groups[samples]
        split = split_folds(labels[samples], num_classes, generator, most=most, groups=own)
        return [Fold(torch.cat([samples[fold.train], others]).sort().values, samples[fold.held_out]) for fold in split]
    if not len(labels):
        return []
    first = torch.full((num_classes,), len(labels)).scatter_reduce_(0, labels, torch.arange(len(labels)), "amin")
    labels = first.argsort(stable=True).argsort()[labels]  # by first appearance: names of classes decide nothing
    if groups is not None:
        return _split_groups(labels, num_classes, groups, generator, most)
    n = len(labels)
    order = torch.randperm(n, generator=generator)
    order = order[labels[order].argsort(stable=True)]
    count = torch.bincount(labels, minlength=num_classes)
    start = (count.cumsum(0) - count)[labels[order]]
    rank = torch.arange(n) - start  # (n,) position within the class
    several = count[labels[order]] > 1
    if not most or not bool(several.any()):
        return []
    if n > FOLDS.many_rows or n * num_classes > FOLDS.many_cosines:
        held_out = max(256, min(FOLDS.held_out, FOLDS.many_cosines // num_classes))
        judged = several & (rank % max(2, math.ceil(n / held_out)) == 0)
        extra = judged.nonzero().flatten()
        judged[extra[torch.randperm(len(extra), generator=generator)[held_out:]]] = False
        return [Fold(order[~judged].sort().values, order[judged].sort().values)]
    folds = min(most, int(count.max()))
    part = torch.where(several, (rank + start) % folds, -1)  # the offset spreads remainders over the folds
    return [Fold(order[part != k].sort().values, order[part == k].sort().values) for k in range(folds)]


def _split_groups(
    labels: Tensor, num_classes: int, groups: Tensor, generator: torch.Generator, most: int
) -> list[Fold]:
    """Do what `split_folds` does with groups (n,): the largest first, each where its classes are fewest so far."""
    n, (_, group, size) = len(labels), groups.unique(return_inverse=True, return_counts=True)
    pairs, count = (group * num_classes + labels).unique(return_counts=True)  # of a group and a class in it
    owner, label = pairs // num_classes, pairs % num_classes
    folds = min(most, int(torch.bincount(label).max()))
    if folds < 2:
        return []
    order = torch.randperm(len(size), generator=generator)
    part = torch.full_like(size, -1)  # (groups,): the fold that holds it out
    if n > FOLDS.many_rows or n * num_classes > FOLDS.many_cosines:
        held_out = max(256, min(FOLDS.held_out, FOLDS.many_cosines // num_classes, n // 2))
        part[order[size[order].cumsum(dim=0) <= held_out]] = 0
    else:
        order = order[size[order].argsort(descending=True, stable=True)]
        share = (count / torch.bincount(labels)[label]).tolist()
        inside: list[list[tuple[int, float]]] = [[] for _ in size]
        for own, name, weight in zip(owner.tolist(), label.tolist(), share, strict=True):
            inside[own].append((name, weight))
        filled = [[0.0] * num_classes for _ in range(folds)]
        rows = [0] * folds
        for own in order.tolist():
            alike = [sum(weight * each[name] for name, weight in inside[own]) for each in filled]
            fold = min(range(folds), key=lambda k: (alike[k], rows[k]))
            part[own], rows[fold] = fold, rows[fold] + int(size[own])
            for name, weight in inside[own]:
                filled[fold][name] += weight
    # Every fold is fitted to all classes: of one that a single fold would hold out whole, a group stays.
    low, high = (
        torch.full((num_classes,), start).scatter_reduce_(0, label, part[owner], how)
        for start, how in ((folds, "amin"), (-1, "amax"))
    )
    whole = (low == high)[label] & (part[owner] >= 0)
    first = torch.full((num_classes,), len(size)).scatter_reduce_(0, label[whole], owner[whole], "amin")
    part[first[first < len(size)]] = -1
    numbers = [k for k in range(folds) if bool((part == k).any())]
    return [Fold((part[group] != k).nonzero().flatten(), (part[group] == k).nonzero().flatten()) for k in numbers]
