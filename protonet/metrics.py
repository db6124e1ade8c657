"""How good logits are, and how much a row is like any class at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from protonet._validation import check_number
from protonet.errors import raise_input_error

#: Bins of confidence for the calibration error, as in the paper.
BINS = 15
#: The normal quantile of a 95 % interval.
NORMAL = 1.96


@dataclass(frozen=True)
class IntervalRules:
    """How sure a mean over judged rows is. The numbers were set on made problems: analysis/results/coverage.md."""

    pseudo_groups: float = 2.0
    """Groups, of rows that are all right or all wrong, that are added to those that tell how alike a group's rows are:
    where none is wrong, nothing tells, and a group counts as one row."""
    refits: float = 5.0
    """Of rows held out, each network is another one than that which is told of. With m groups per class, that adds
    this many times 1 / (1 + m) to the variance, which is 1 of rows judged by one network."""


INTERVALS = IntervalRules()


class Metrics(NamedTuple):
    """How good logits are: shares of 1, and nats per row. Intervals are of 95 %."""

    accuracy: float  #: The share of rows that are right.
    interval: tuple[float, float]  #: Of the accuracy.
    log_loss: float  #: In nats per row.
    calibration_error: float  #: In [0, 1], less what chance gives.
    confusion: Tensor  #: (num_classes, num_classes) int64: rows of each class (down), by prediction (across)
    log_loss_interval: tuple[float, float]
    calibration_interval: tuple[float, float]


class Sample(NamedTuple):
    """Rows that something is judged on: how much each counts, and which are alike."""

    weights: Tensor  #: (n,) float64, > 0: how many rows each stands for.
    groups: Tensor  #: (n,) int64: the group of each row, from 0, each number there.
    spread: float = 1.0  #: The variance of a mean over them, in that of one over rows judged by one network.

    @classmethod
    def of(cls, n: int, weights: Tensor | None = None, groups: Tensor | None = None, spread: float = 1.0) -> Sample:
        """Return a sample of n rows, of weights (n,), None for 1, and groups (n,), None or below 0 for each alone."""
        weights = torch.ones(n, dtype=torch.float64) if weights is None else weights
        if groups is None:
            return cls(weights, torch.arange(n, device=weights.device), spread)
        alone = groups.max().clamp_min(-1) + 1 + torch.arange(n, device=groups.device)
        return cls(weights, torch.where(groups < 0, alone, groups).unique(return_inverse=True)[1], spread)

    def add_up(self, values: Tensor) -> Tensor:
        """Return the sum of values (n,) in each group, (groups,) float64."""
        return self.weights.new_zeros(int(self.groups.max()) + 1).index_add_(0, self.groups, values)

    @property
    def equal_groups(self) -> float:
        """How many groups of equal weight say as much as these."""
        return count_equal_rows(self.add_up(self.weights))

    @property
    def quantile(self) -> float:
        """The factor on a standard error for 95 %: few groups tell little of how much they vary."""
        return find_quantile(self.equal_groups - 1)

    def find_share(self, right: Tensor) -> float:
        """Return the share that is right (n,) float64, 0 or 1: of rows that all are, 1 exactly."""
        return float((self.weights * right).sum() / self.weights.sum())

    def count_rows(self, right: Tensor) -> float:
        """Return how many rows, of equal weight and each alone, say as much of a share as these do.

        Args:
            right: (n,) float64, 0 or 1.

        Source: the design effect of groups of unequal sizes and weights, Kish, "Survey sampling" (1965), sec. 8.2, and
            Gabler, Haeder and Lahiri, "A model based justification of Kish's formula for design effects for weighting
            and clustering" (1999); how alike the rows of a group are is their intraclass correlation, by moments.
        """
        squares, sums = float(self.weights.square().sum()), self.add_up(self.weights)
        pairs = float(sums.square().sum()) - squares  # of rows of one group, by weight
        if pairs < squares * 1e-9:
            return count_equal_rows(self.weights)
        total, groups = float(self.weights.sum()), self.equal_groups
        share = self.find_share(right)
        errors = self.weights * (right - share)
        alike = float(self.add_up(errors).square().sum() - errors.square().sum())
        smooth = (share * groups + 1) / (groups + 2)  # no group is right, and none is wrong, for good
        added = INTERVALS.pseudo_groups / groups * pairs * smooth * (1 - smooth)
        correlation = min(1.0, max(0.0, (alike + added) / (pairs * share * (1 - share) + added)))
        return total**2 / (squares + correlation * pairs)

    def find_interval(self, right: Tensor, share: float | None = None) -> tuple[float, float]:
        """Return the 95 % interval of a share: `find_interval` of as many rows, each alone, as say as much of it.

        Args:
            right: (n,) float64, 0 or 1: what there is a share of.
            share: Another one that is as uncertain; None for its own.
        """
        share = self.find_share(right) if share is None else share
        alone = len(self.groups) == int(self.groups.max()) + 1  # then the share itself says how it varies
        return find_interval(share, self.count_rows(right) / self.spread, NORMAL if alone else self.quantile)

    def find_half_width(self, values: Tensor) -> float:
        """Return half the width of the 95 % interval of the mean of values (n,) float64, groups counting as one each.

        Source: the variance over clusters, Liang and Zeger, "Longitudinal data analysis using generalized linear
            models" (1986), with the quantile of Student's t that many groups have.
        """
        return self.quantile * math.sqrt(self.find_variance(values))

    def find_variance(self, values: Tensor) -> float:
        """Return the variance of the mean of values (n,) float64."""
        shares = self.weights / self.weights.sum()
        sums = self.add_up(shares * (values - (shares * values).sum()))
        groups = len(sums)
        return self.spread * float(sums.square().sum()) * groups / max(1, groups - 1)


def count_equal_rows(weights: Tensor) -> float:
    """Return how many rows of equal weight say as much as rows of weights (n,).

    Source: Kish, "Survey sampling" (1965), sec. 8.2.
    """
    return float(weights.sum().square() / weights.square().sum())


def find_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t; below 2 degrees of freedom, which may be a fraction, that of 2.

    Source: the expansion of Abramowitz and Stegun, "Handbook of mathematical functions" (1964), 26.7.5, right to 1 %.
    """
    z, degrees = NORMAL, max(2.0, degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def find_interval(share: float, rows: float, quantile: float = NORMAL) -> tuple[float, float]:
    """Return the 95 % interval of a share in [0, 1] of some rows of equal weight, > 0.

    Args:
        share: The share.
        rows: How many there are, or how many say as much: `Sample.count_rows`.
        quantile: `Sample.quantile`, where the rows are in groups.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927), with the quantile of
        Student's t, as Korn and Graubard, "Confidence intervals for proportions with small expected number of
        positive counts estimated from survey data" (1998), do for groups.
    """
    spread = quantile**2 / rows
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))  # of 1, the end is not rounded off


def find_refit_spread(groups: float, classes: int) -> float:
    """Return `Sample.spread` of rows held out, given how many groups there are, and classes; see `IntervalRules`."""
    return 1 + INTERVALS.refits / (1 + groups / classes)


def measure(logits: Tensor, labels: Tensor, sample: Tensor | Sample | None = None) -> Metrics:
    """Judge logits.

    Args:
        logits: (n, num_classes) floating, n >= 1.
        labels: (n,) int64.
        sample: The rows; or their weights alone, (n,) float64, > 0: how many rows each stands for; None for one.

    Returns:
        The metrics. Intervals count groups, not rows, as far as their rows are alike, and of a row's repetitions none
        makes them narrower. That of the log-loss takes the variance that the probabilities themselves promise, where
        the rows show less: few rows seldom show the rare ones that cost most. The calibration error is that of Guo et
        al. without the part that chance gives where probabilities are honest.

    Raises:
        InputError: Logits that give no probabilities.
    """
    n, num_classes = logits.shape
    log_p = logits.double().log_softmax(dim=1)
    if bool(log_p.isnan().any()):
        got = f"NaN in {int(log_p.isnan().any(dim=1).sum())} of {n} rows"
        raise_input_error("logits", "give probabilities", got, "Mend or drop the rows that they come from.")
    predicted = logits.argmax(dim=1)
    right = (predicted == labels).double()
    sample = torch.ones_like(labels, dtype=torch.float64) if sample is None else sample
    sample = sample if isinstance(sample, Sample) else Sample.of(n, sample)
    weights, _, spread = sample
    shares = weights / weights.sum()
    losses = -log_p.gather(1, labels[:, None])[:, 0]
    log_loss = float((shares * losses).sum())
    p = log_p.exp()
    possible = torch.where(p > 0, log_p, 0.0)  # of a class that cannot be, p log p is 0
    promised = (p * possible.square()).sum(dim=1) - (p * possible).sum(dim=1).square()
    rows = sample.count_rows(right)
    variance = max(sample.find_variance(losses), spread * float((shares * promised).sum()) / rows)
    half = sample.quantile * math.sqrt(variance)
    around = math.hypot(log_loss, half)
    error, beyond, deviation = _find_calibration(log_p.amax(dim=1).exp(), right, shares, rows)
    error_half = sample.quantile * math.sqrt(spread) * deviation
    confusion = torch.bincount(labels * num_classes + predicted, weights, minlength=num_classes**2).round().long()
    return Metrics(
        sample.find_share(right),
        sample.find_interval(right),
        log_loss,
        error,
        confusion.reshape(num_classes, num_classes),
        (around - half, around + half),
        (max(0.0, min(error, beyond - error_half)), min(1.0, error + error_half)),
    )


def _find_calibration(confidence: Tensor, right: Tensor, shares: Tensor, rows: float) -> tuple[float, float, float]:
    """Return the calibration error without what chance gives.

    In each bin, the variance that the gap between confidence and accuracy has where confidences are honest is taken
    off the gap's square; what would be negative is 0. Of few rows, that is still more than 0 where they are.

    Args:
        confidence: (n,) float64.
        right: (n,) float64.
        shares: (n,) of the rows' weight, summing to 1.
        rows: How many rows, each alone, say as much: the variances are those of so many.

    Returns:
        The error; by how much the plain sum of gaps is more than its mean where confidences are honest; and the
        standard deviation of that sum, of halves of normal distributions, there.

    Source: the error of Guo et al., "On calibration of modern neural networks" (2017), eq. 3; its bias and the remedy,
        for squares, Kumar, Liang and Ma, "Verified uncertainty calibration" (2019), sec. 4.1.
    """
    alike = count_equal_rows(shares) / rows  # the design effect
    position = (confidence * BINS).ceil().long().sub_(1).clamp_(0, BINS - 1)
    gaps = confidence - right
    values = torch.stack([shares * gaps, shares.square() * confidence * (1 - confidence), (shares * gaps).square()])
    gap, honest, shown = values.new_zeros(3, BINS).index_add_(1, position, values)
    error = float((gap.square() - alike * honest).clamp_min(0).sqrt().sum())
    beyond = float(gap.abs().sum() - (2 / math.pi * alike * honest).sqrt().sum())
    return error, beyond, math.sqrt((1 - 2 / math.pi) * alike * float(torch.maximum(honest, shown).sum()))


class ClassMetrics(NamedTuple):
    """How good predictions are class by class: shares of 1, and 0 where there is nothing to take a share of."""

    recall: Tensor  #: (num_classes,) float64: of the rows of a class, those that are taken for it.
    precision: Tensor  #: (num_classes,) float64: of the rows that are taken for a class, those that are of it.
    f1: Tensor  #: (num_classes,) float64: the harmonic mean of both.
    rows: Tensor  #: (num_classes,) int64: of each class.
    predicted: Tensor  #: (num_classes,) int64: how many rows are taken for each class.

    @property
    def macro(self) -> dict[str, float]:
        """The plain means of recall, precision and F1 over the classes that have a row or are predicted."""
        there = (self.rows + self.predicted) > 0
        return {name: float(getattr(self, name)[there].mean()) for name in ("recall", "precision", "f1")}

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have a row."""
        return float(self.recall[self.rows > 0].mean())


def measure_classes(confusion: Tensor) -> ClassMetrics:
    """Judge predictions class by class.

    Args:
        confusion: (num_classes, num_classes) int64 of `measure`: rows of each class (down), by prediction (across).

    Source: van Rijsbergen, "Information retrieval" (1979), ch. 7.
    """
    right, rows, predicted = confusion.diagonal().double(), confusion.sum(dim=1), confusion.sum(dim=0)
    either = (rows + predicted).clamp_min(1)
    return ClassMetrics(right / rows.clamp_min(1), right / predicted.clamp_min(1), 2 * right / either, rows, predicted)


def find_auroc(known: Tensor, unknown: Tensor) -> float:
    """Return how often a known row scores higher than an unknown one, ties counting half: the area under the ROC curve.

    Args:
        known: (n,) floating, n >= 1: scores such as those of `score_known`.
        unknown: (m,) floating, m >= 1.

    Source: Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC) curve"
        (1982).
    """
    ordered = unknown.sort().values
    below, not_above = (torch.searchsorted(ordered, known, right=right) for right in (False, True))
    return float((below + not_above).double().mean()) / (2 * len(unknown))


def suspect_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Score how much each row looks as if its label were wrong.

    Args:
        logits: (n, num_classes) floating, by networks that did not see the rows.
        labels: (n,) int64, as given.

    Returns:
        (n,) float64, in nats: the log-probability of the most likely other class, less that of the given one; above 0
        where the other one is believed.

    Source: the normalised margin of Northcutt, Jiang and Chuang, "Confident learning: estimating uncertainty in
        dataset labels" (2021), sec. 3.2, as a ratio of probabilities.
    """
    given = labels[:, None]
    log_p = logits.double().log_softmax(dim=1)
    own = log_p.gather(1, given)[:, 0]
    return log_p.scatter(1, given, -math.inf).amax(dim=1) - own


#: Most scores that a threshold is found from.
MOST_SCORES = 2000


def score_known(logits: Tensor) -> Tensor:
    """Score how much each row is like some class: the logarithm of the sum of its classes' exponentials.

    The largest probability asks which class it is, given that it is one; this also asks how near the classes are.

    Args:
        logits: (n, num_classes) floating.

    Returns:
        (n,) float64, higher for rows that are more like a class.

    Source: Liu, Wang, Owens and Li, "Energy-based out-of-distribution detection" (2020), eq. 4.
    """
    return logits.double().logsumexp(dim=1)


def calibrate(scores: Tensor, offset: float = 0.0) -> Tensor:
    """Return the scores that fresh rows of known classes have, in ascending order, for `find_threshold`.

    Args:
        scores: (n,) float64 of rows by networks that did not see them, from `protonet.fit.crossfit.score_held`.
        offset: What a network of all rows adds to such a row's score: `protonet.fit.crossfit.Crossfit.offset`.

    Returns:
        (min(n, MOST_SCORES),) float64.
    """
    scores = scores.sort().values + offset
    places = torch.linspace(0, len(scores) - 1, min(len(scores), MOST_SCORES), dtype=torch.float64)
    return scores[places.round().long().to(scores.device)]


def find_threshold(scores: Tensor, rate: float) -> float:
    """Find the score at and below which a row is unknown, so that few rows of known classes are.

    Args:
        scores: (n,) of `calibrate`.
        rate: The share of the rows of known classes that may be called unknown, in (0, 1).

    Returns:
        The threshold.

    Raises:
        InputTypeError: The rate is not a number.
        InputError: A rate that is not below 1, or smaller than so few scores can tell.

    Source: conformal p-values, Vovk, Gammerman and Shafer, "Algorithmic learning in a random world" (2005), sec. 2.2.
    """
    rate = check_number("rate", rate, low=0, strict=True)
    if not len(scores):
        remedy = "Fit to two samples or more of some classes."
        raise_input_error("scores", "come from rows that were held out", "none", remedy)
    place = math.floor(rate * (len(scores) + 1) + 1e-9)
    if not 0 < place <= len(scores):
        bounds = f"be in [{1 / (len(scores) + 1):.2g}, 1)"
        remedy = f"{len(scores)} held-out rows tell no more than that."
        raise_input_error("rate", bounds, rate, remedy)
    return float(scores[place - 1])


def fill_bins(confidence: Tensor, right: Tensor, n_bins: int = BINS, *, weights: Tensor | None = None) -> Tensor:
    """Sort predictions into bins of equal width by confidence, for the calibration error.

    Bin b holds the confidences in (b / n_bins, (b + 1) / n_bins]; the first one also holds 0. Bins of several batches
    add up.

    Args:
        confidence: Floating, of any shape, in [0, 1]: the probability of the predicted class.
        right: Of the same shape, bool or 0 and 1: is the prediction right?
        n_bins: >= 1.
        weights: Of the same shape, > 0: how often each prediction counts; None for once.

    Returns:
        (n_bins, 3) float64: the number of predictions, the sum of their confidences, and how many are right.

    Source: Guo et al., "On calibration of modern neural networks" (2017), sec. 2. https://arxiv.org/abs/1706.04599
    """
    confidence = confidence.flatten().double()  # (n,)
    position = (confidence * n_bins).ceil().long().sub_(1).clamp_(0, n_bins - 1)
    values = torch.stack([torch.ones_like(confidence), confidence, right.flatten().double()], dim=1)  # (n, 3)
    values = values if weights is None else values * weights.flatten()[:, None]
    return values.new_zeros(n_bins, 3).index_add_(0, position, values)


def calibration_error(bins: Tensor) -> float:
    """Compute the expected calibration error: the gap between confidence and accuracy, averaged over predictions.

    Args:
        bins: (n_bins, 3) float64 from `fill_bins`, or the sum of several.

    Returns:
        The error in [0, 1]; NaN for bins without predictions.

    Source: Guo et al., "On calibration of modern neural networks" (2017), eq. 3. https://arxiv.org/abs/1706.04599
    """
    return float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())
