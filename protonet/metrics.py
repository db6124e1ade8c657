"""How good logits are, and how much a row is like any class at all."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from protonet._checks import check_number, fail

#: Bins of confidence for the calibration error, as in the paper.
BINS = 15
#: The normal quantile of a 95 % interval.
NORMAL = 1.96


class Metrics(NamedTuple):
    """How good logits are: shares of 1, and nats per row."""

    accuracy: float  #: The share of rows that are right.
    interval: tuple[float, float]  #: Of the accuracy, 95 %.
    log_loss: float  #: In nats per row.
    calibration_error: float  #: In [0, 1].
    confusion: Tensor  #: (num_classes, num_classes) int64: rows of each class (down), by prediction (across)


def count_equal_rows(weights: Tensor) -> float:
    """Return how many rows of equal weight say as much as rows of weights (n,).

    Source: Kish, "Survey sampling" (1965), sec. 8.2.
    """
    return float(weights.sum().square() / weights.square().sum())


def find_interval(share: float, rows: float) -> tuple[float, float]:
    """Return the 95 % interval of a share in [0, 1] of some rows of equal weight, > 0.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    spread = NORMAL**2 / rows
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def measure(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Metrics:
    """Judge logits.

    Args:
        logits: (n, num_classes) floating, n >= 1.
        labels: (n,) int64.
        weights: (n,) float64, > 0: how many rows each stands for; None for one.

    Returns:
        The metrics, the accuracy's interval after Wilson: of a row's repetitions none makes it narrower.

    Raises:
        InputError: Logits that give no probabilities.

    Source: calibration error, Guo et al., "On calibration of modern neural networks" (2017), eq. 3.
    """
    n, num_classes = logits.shape
    log_p = logits.double().log_softmax(dim=1)
    if bool(log_p.isnan().any()):
        got = f"NaN in {int(log_p.isnan().any(dim=1).sum())} of {n} rows"
        fail("measure", "logits", "give probabilities", got, "Mend or drop the rows that they come from.")
    predicted = logits.argmax(dim=1)
    right = (predicted == labels).double()
    confidence = log_p.amax(dim=1).exp()
    weights = torch.ones(n, dtype=torch.float64) if weights is None else weights
    shares = weights / weights.mean()
    accuracy = float((shares * right).mean())
    confusion = torch.bincount(labels * num_classes + predicted, weights, minlength=num_classes**2).round().long()
    return Metrics(
        accuracy,
        find_interval(accuracy, count_equal_rows(weights)),
        -float((shares * log_p.gather(1, labels[:, None])[:, 0]).mean()),
        calibration_error(fill_bins(confidence, right, weights=shares)),
        confusion.reshape(num_classes, num_classes),
    )


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


def calibrate(logits: Tensor, offset: float = 0.0) -> Tensor:
    """Return the scores that fresh rows of known classes have, in ascending order, for `find_threshold`.

    Args:
        logits: (n, num_classes) of rows by networks that did not see them, from `protonet.fit.crossfit.predict_held`.
        offset: What a network of all rows adds to such a row's score: `protonet.fit.crossfit.Crossfit.offset`.

    Returns:
        (min(n, MOST_SCORES),) float64.
    """
    scores = score_known(logits).sort().values + offset
    places = torch.linspace(0, len(scores) - 1, min(len(scores), MOST_SCORES), dtype=torch.float64)
    return scores[places.round().long()]


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
    rate = check_number("find_threshold", "rate", rate, low=0, strict=True)
    if not len(scores):
        remedy = "Fit to two samples or more of some classes."
        fail("find_threshold", "scores", "come from rows that were held out", "none", remedy)
    place = math.floor(rate * (len(scores) + 1) + 1e-9)
    if not 0 < place <= len(scores):
        bounds = f"be in [{1 / (len(scores) + 1):.2g}, 1)"
        remedy = f"{len(scores)} held-out rows tell no more than that."
        fail("find_threshold", "rate", bounds, rate, remedy)
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
    return torch.zeros(n_bins, 3, dtype=torch.float64).index_add_(0, position, values)


def calibration_error(bins: Tensor) -> float:
    """Compute the expected calibration error: the gap between confidence and accuracy, averaged over predictions.

    Args:
        bins: (n_bins, 3) float64 from `fill_bins`, or the sum of several.

    Returns:
        The error in [0, 1]; NaN for bins without predictions.

    Source: Guo et al., "On calibration of modern neural networks" (2017), eq. 3. https://arxiv.org/abs/1706.04599
    """
    return float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())
