"""Metrics of logits with confidence intervals, and scores that reject rows of no known class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from protonet._validation import check_number
from protonet.errors import raise_input_error
from protonet.selection.scoring import row_slices

#: Number of confidence bins of the calibration error, as in the paper.
N_CALIBRATION_BINS = 15
#: The normal quantile of a 95 % interval.
NORMAL_QUANTILE = 1.96


@dataclass(frozen=True, kw_only=True, eq=False)
class Metrics:
    """Metrics of logits, with 95 % confidence intervals."""

    accuracy: float  #: In [0, 1].
    interval: tuple[float, float]  #: Confidence interval of the accuracy.
    log_loss: float  #: In nats per row.
    calibration_error: float  #: In [0, 1], minus the bias that it has if the predicted probabilities are correct.
    confusion: Tensor  #: (num_classes, num_classes) int64: numbers of rows by true class (row) and predicted (column).
    log_loss_interval: tuple[float, float]  #: Confidence interval of the log-loss.
    calibration_interval: tuple[float, float]  #: Confidence interval of the calibration error.


class EvaluationSample(NamedTuple):
    """The weights and groups of evaluated rows, from which confidence intervals are computed."""

    weights: Tensor  #: (n,) float64, > 0: the number of original rows that each row represents.
    groups: Tensor  #: (n,) int64: the group of each row; all numbers from 0 to the maximum occur.
    variance_factor: float = 1.0  #: Factor on variances, for rows that were evaluated by several networks.
    accuracy_gain: float = 0.0
    """Estimated accuracy of the final network minus that of the evaluated networks, which are fitted to fewer rows. If
    positive, the gain is added to the upper end of the accuracy's confidence interval."""
    accuracy_gain_error: float = 0.0  #: The standard error of the gain, which widens the upper part of the interval.

    @classmethod
    def with_defaults(
        cls, n: int, weights: Tensor | None = None, groups: Tensor | None = None, variance_factor: float = 1.0
    ) -> EvaluationSample:
        """Build an `EvaluationSample` of n rows, with default weights and groups.

        Args:
            n: The number of rows.
            weights: (n,) float64, > 0. If None, all weights are 1.
            groups: (n,) int64, the group of each row. A row with a negative number is a group by itself. If None, every
                row is a group by itself.
            variance_factor: Factor on variances, for rows that were evaluated by several networks.
        """
        weights = torch.ones(n, dtype=torch.float64) if weights is None else weights
        if groups is None:
            return cls(weights, torch.arange(n, device=weights.device), variance_factor)
        single = groups.max().clamp_min(-1) + 1 + torch.arange(n, device=groups.device)
        return cls(weights, torch.where(groups < 0, single, groups).unique(return_inverse=True)[1], variance_factor)

    def sum_by_group(self, values: Tensor) -> Tensor:
        """Sum the values (n,) of the rows of each group: (groups,) float64."""
        return self.weights.new_zeros(int(self.groups.max()) + 1).index_add_(0, self.groups, values)

    @property
    def n_effective_groups(self) -> float:
        """The effective number of groups: the `effective_sample_size` of the sums of their weights."""
        return effective_sample_size(self.sum_by_group(self.weights))

    @property
    def interval_quantile(self) -> float:
        """The factor by which a standard error is multiplied for a 95 % interval; it is larger if groups are few."""
        return student_quantile(self.n_effective_groups - 1)

    def weighted_accuracy(self, correct: Tensor) -> float:
        """Compute the weighted fraction of correct rows, from ``correct`` (n,) float64, 0 or 1."""
        return float((self.weights * correct).sum() / self.weights.sum())

    def count_effective_rows(self, correct: Tensor) -> float:
        """Compute the number of independent rows of equal weight whose accuracy would be as uncertain.

        Args:
            correct: (n,) float64: 1 if the prediction is correct, else 0.

        Source: the design effect of groups of unequal sizes and weights, Kish, "Survey sampling" (1965), sec. 8.2, and
            Gabler, Haeder and Lahiri, "A model based justification of Kish's formula for design effects for weighting
            and clustering" (1999); the intraclass correlation is estimated by moments.
        """
        # Number of hypothetical groups, with rows that are all correct or all wrong, that are added before the
        # intraclass correlation is estimated. Without them, it could not be estimated if no row is wrong.
        n_pseudo_groups = 2.0
        squares, sums = float(self.weights.square().sum()), self.sum_by_group(self.weights)
        pairs = float(sums.square().sum()) - squares  # total weight of pairs of rows of one group
        if pairs < squares * 1e-9:
            return effective_sample_size(self.weights)
        total, groups = float(self.weights.sum()), self.n_effective_groups
        proportion = self.weighted_accuracy(correct)
        errors = self.weights * (correct - proportion)
        covariance = float(self.sum_by_group(errors).square().sum() - errors.square().sum())
        smoothed = (proportion * groups + 1) / (groups + 2)
        prior = n_pseudo_groups / groups * pairs * smoothed * (1 - smoothed)
        correlation = (covariance + prior) / (pairs * proportion * (1 - proportion) + prior)
        return total**2 / (squares + min(1.0, max(0.0, correlation)) * pairs)

    def accuracy_interval(self, correct: Tensor, proportion: float | None = None) -> tuple[float, float]:
        """Compute the 95 % confidence interval of a proportion of rows.

        Args:
            correct: (n,) float64, 0 or 1, from which the uncertainty is estimated.
            proportion: The centre of the interval, in [0, 1]. If None, it is the weighted mean of ``correct``.

        Returns:
            The lower and the upper end, in [0, 1].
        """
        proportion = self.weighted_accuracy(correct) if proportion is None else proportion
        ungrouped = len(self.groups) == int(self.groups.max()) + 1  # then the proportion determines the variance
        quantile = NORMAL_QUANTILE if ungrouped else self.interval_quantile
        return wilson_interval(proportion, self.count_effective_rows(correct) / self.variance_factor, quantile)

    def mean_half_width(self, values: Tensor) -> float:
        """Compute half the width of the 95 % confidence interval of the weighted mean of values (n,) float64.

        Source: the variance over clusters, Liang and Zeger, "Longitudinal data analysis using generalized linear
            models" (1986), with the quantile of Student's t for the number of groups.
        """
        return self.interval_quantile * math.sqrt(self.variance_of_mean(values))

    def variance_of_mean(self, values: Tensor) -> float:
        """Compute the variance of the weighted mean of values (n,) float64, whose groups are independent."""
        weights = self.weights / self.weights.sum()
        sums = self.sum_by_group(weights * (values - (weights * values).sum()))
        groups = len(sums)
        return self.variance_factor * float(sums.square().sum()) * groups / max(1, groups - 1)


def effective_sample_size(weights: Tensor) -> float:
    """Compute the effective sample size of rows with weights (n,): ``sum(weights)**2 / sum(weights**2)``.

    Source: Kish, "Survey sampling" (1965), sec. 8.2.
    """
    return float(weights.sum().square() / weights.square().sum())


def student_quantile(degrees_of_freedom: float) -> float:
    """Compute the 97.5 % quantile of Student's t distribution.

    The degrees of freedom may be fractional. Fewer than 2 count as 2.

    Source: the expansion of Abramowitz and Stegun, "Handbook of mathematical functions" (1964), 26.7.5, right to 1 %.
    """
    z, degrees_of_freedom = NORMAL_QUANTILE, max(2.0, degrees_of_freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees_of_freedom**power for power, term in enumerate(terms, start=1))


def wilson_interval(proportion: float, n_rows: float, quantile: float = NORMAL_QUANTILE) -> tuple[float, float]:
    """Compute Wilson's 95 % confidence interval of a proportion: its lower and upper end.

    Args:
        proportion: The observed proportion, in [0, 1].
        n_rows: The number of rows, > 0, or their effective number from `EvaluationSample.count_effective_rows`.
        quantile: The factor on a standard error: `EvaluationSample.interval_quantile` if the rows are in groups, else
            the default.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927), with the quantile of
        Student's t, as Korn and Graubard, "Confidence intervals for proportions with small expected number of
        positive counts estimated from survey data" (1998), do for groups.
    """
    scale = quantile**2 / n_rows
    middle = (proportion + scale / 2) / (1 + scale)
    half = math.sqrt(proportion * (1 - proportion) * scale + scale**2 / 4) / (1 + scale)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return min(proportion, low), max(proportion, high)  # rounding must not exclude 0 or 1


def refit_variance_factor(n_groups: float, n_classes: int) -> float:
    """Compute the factor > 1 on variances, because cross-validation evaluates other networks than the final one."""
    # Increase of the variance by cross-validation, which evaluates other networks than the final one. With m groups per
    # class, the variance is ``1 + refit_variance / (1 + m)`` times that of a single evaluated network.
    refit_variance_increase = 5.0
    # The variance is at least ``1 + min_refit_variance`` times that of a single network. With many rows, the final
    # accuracy of 92 development problems was 1.1 standard errors from the cross-validated one, in root mean square.
    min_refit_variance_increase = 0.2
    return 1 + max(min_refit_variance_increase, refit_variance_increase / (1 + n_groups / n_classes))


def compute_metrics(logits: Tensor, labels: Tensor, sample: Tensor | EvaluationSample | None = None) -> Metrics:
    """Compute accuracy, log-loss, calibration error and confusion matrix of logits.

    Args:
        logits: (n, num_classes) floating, n >= 1.
        labels: (n,) int64.
        sample: The weights and groups of the rows, or their weights alone, (n,) float64, > 0. If None, all weights
            are 1 and rows are independent.

    Returns:
        The metrics. Confidence intervals take into account that the rows of a group are correlated. The variance of the
        log-loss is at least the variance that the predicted probabilities imply, since a small sample seldom contains
        the rare rows with large losses. The calibration error is that of Guo et al., minus the bias that it has if the
        predicted probabilities are correct.

    Raises:
        InputError: Logits that give no probabilities.
    """
    n, num_classes = logits.shape
    losses, confidence, implied = (torch.empty_like(labels, dtype=torch.float64) for _ in range(3))
    for block in row_slices(n, num_classes):
        log_p = logits[block].double().log_softmax(dim=1)
        losses[block] = -log_p.gather(1, labels[block, None])[:, 0]
        confidence[block] = log_p.amax(dim=1).exp()
        p = log_p.exp()
        finite = torch.where(p > 0, log_p, 0.0)  # p log p is 0 for p = 0
        implied[block] = (p * finite.square()).sum(dim=1) - (p * finite).sum(dim=1).square()  # variance of the loss
    invalid = int(confidence.isnan().sum())
    if invalid:
        got = f"NaN in {invalid} of {n} rows"
        raise_input_error("logits", "give probabilities", got, "Correct or drop the rows that they come from.")
    predicted = logits.argmax(dim=1)
    correct = (predicted == labels).double()
    sample = torch.ones_like(labels, dtype=torch.float64) if sample is None else sample
    sample = sample if isinstance(sample, EvaluationSample) else EvaluationSample.with_defaults(n, sample)
    weights, variance_factor = sample.weights, sample.variance_factor
    normalized = weights / weights.sum()
    log_loss = float((normalized * losses).sum())
    rows = sample.count_effective_rows(correct)
    implied_variance = variance_factor * float((normalized * implied).sum()) / rows
    half = sample.interval_quantile * math.sqrt(max(sample.variance_of_mean(losses), implied_variance))
    centre = math.hypot(log_loss, half)
    error, excess, deviation = _estimate_calibration_error(confidence, correct, normalized, rows)
    error_half = sample.interval_quantile * math.sqrt(variance_factor) * deviation
    pairs, index = (labels * num_classes + predicted).unique(return_inverse=True)
    confusion = labels.new_zeros(num_classes**2)  # with many classes, only few values are written
    confusion[pairs] = torch.bincount(index, weights, minlength=len(pairs)).round().long()
    accuracy, (low, high) = sample.weighted_accuracy(correct), sample.accuracy_interval(correct)
    upper = math.hypot(high - accuracy, sample.interval_quantile * sample.accuracy_gain_error)
    return Metrics(
        accuracy=accuracy,
        interval=(low, min(1.0, accuracy + max(0.0, sample.accuracy_gain) + upper)),
        log_loss=log_loss,
        calibration_error=error,
        confusion=confusion.reshape(num_classes, num_classes),
        log_loss_interval=(centre - half, centre + half),
        calibration_interval=(max(0.0, min(error, excess - error_half)), min(1.0, error + error_half)),
    )


def _estimate_calibration_error(
    confidence: Tensor, correct: Tensor, weights: Tensor, n_effective_rows: float
) -> tuple[float, float, float]:
    """Estimate the calibration error without bias, the excess of absolute gaps over chance, and a standard error.

    The gap of a bin is its mean confidence minus its accuracy. Its expectation, if confidences are correct
    probabilities, is subtracted: from each squared gap, but not below 0, and from the sum of absolute gaps, which may
    become negative.

    Source: the error of Guo et al., "On calibration of modern neural networks" (2017), eq. 3; its bias and the remedy,
        for squares, Kumar, Liang and Ma, "Verified uncertainty calibration" (2019), sec. 4.1.
    """
    design_effect = effective_sample_size(weights) / n_effective_rows
    gaps = confidence - correct
    values = torch.stack([weights * gaps, weights.square() * confidence * (1 - confidence), (weights * gaps).square()])
    bins = _confidence_bins(confidence, N_CALIBRATION_BINS)
    gap, honest, observed = values.new_zeros(3, N_CALIBRATION_BINS).index_add_(1, bins, values)
    error = float((gap.square() - design_effect * honest).clamp_min(0).sqrt().sum())
    excess = float(gap.abs().sum() - (2 / math.pi * design_effect * honest).sqrt().sum())
    variance = (1 - 2 / math.pi) * design_effect * float(torch.maximum(honest, observed).sum())
    return error, excess, math.sqrt(variance)


class ClassMetrics(NamedTuple):
    """Recall, precision and F1 of each class, 0 if undefined, and the numbers of rows and predictions of each class."""

    recall: Tensor  #: (num_classes,) float64.
    precision: Tensor  #: (num_classes,) float64.
    f1: Tensor  #: (num_classes,) float64: the harmonic mean of recall and precision.
    rows: Tensor  #: (num_classes,) int64: the number of rows of each class.
    predicted: Tensor  #: (num_classes,) int64: the number of predictions of each class.

    @property
    def macro_averages(self) -> dict[str, float]:
        """The macro averages: mean recall, precision and F1 of the classes that have a row or are predicted."""
        occurs = (self.rows + self.predicted) > 0
        return {name: float(getattr(self, name)[occurs].mean()) for name in ("recall", "precision", "f1")}

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have a row."""
        return float(self.recall[self.rows > 0].mean())


def compute_class_metrics(confusion: Tensor) -> ClassMetrics:
    """Compute recall, precision and F1 of each class from a confusion matrix.

    Args:
        confusion: (num_classes, num_classes) int64: numbers of rows by true class (row) and predicted class (column).

    Source: van Rijsbergen, "Information retrieval" (1979), ch. 7.
    """
    correct, rows, predicted = confusion.diagonal().double(), confusion.sum(dim=1), confusion.sum(dim=0)
    either = (rows + predicted).clamp_min(1)
    recall, precision = correct / rows.clamp_min(1), correct / predicted.clamp_min(1)
    return ClassMetrics(recall, precision, 2 * correct / either, rows, predicted)


def compute_auroc(known_scores: Tensor, unknown_scores: Tensor) -> float:
    """Compute the area under the ROC curve of scores that separate rows of known classes from rows of no known class.

    It is the probability that a row of a known class scores higher than a row of no known class. Ties count half.

    Args:
        known_scores: (n,) floating, n >= 1: scores of rows of known classes, such as those of `score_known_class`.
        unknown_scores: (m,) floating, m >= 1: scores of rows of no known class.

    Source: Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC) curve"
        (1982).
    """
    ordered = unknown_scores.sort().values
    below, not_above = (torch.searchsorted(ordered, known_scores, right=right) for right in (False, True))
    return float((below + not_above).double().mean()) / (2 * len(unknown_scores))


def score_label_errors(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute a score of each row that is higher if its label is more likely to be wrong.

    Args:
        logits: (n, num_classes) floating, of networks that were not fitted to these rows.
        labels: (n,) int64, the labels to be checked.

    Returns:
        (n,) float64, in nats: the largest log-probability of another class than the label, minus the log-probability of
        the label. A score is positive if another class is predicted.

    Source: the normalised margin of Northcutt, Jiang and Chuang, "Confident learning: estimating uncertainty in
        dataset labels" (2021), sec. 3.2, as a ratio of probabilities.
    """
    scores = torch.empty_like(labels, dtype=torch.float64)
    for block in row_slices(*logits.shape):
        given, log_p = labels[block, None], logits[block].double().log_softmax(dim=1)
        scores[block] = log_p.scatter(1, given, -math.inf).amax(dim=1) - log_p.gather(1, given)[:, 0]
    return scores


#: Maximum number of scores that are stored to compute rejection thresholds.
MAX_STORED_KNOWN_CLASS_SCORES = 2000


def score_known_class(logits: Tensor) -> Tensor:
    """Compute a score of each row that is higher if the row more likely belongs to one of the known classes.

    The score is the log-sum-exp of the logits. Unlike the largest probability, it is also low if a row is far from all
    classes.

    Args:
        logits: (n, num_classes) floating.

    Returns:
        (n,) float64, in nats.

    Source: Liu, Wang, Owens and Li, "Energy-based out-of-distribution detection" (2020), eq. 4.
    """
    scores = logits.new_empty(len(logits), dtype=torch.float64)
    for block in row_slices(*logits.shape):
        scores[block] = logits[block].double().logsumexp(dim=1)
    return scores


def calibrate_known_scores(scores: Tensor, offset: float = 0.0) -> Tensor:
    """Estimate the distribution of `score_known_class` for new rows of known classes under the final network.

    Args:
        scores: (n,) float64: scores of held-out rows by cross-validation networks, from
            `protonet.fit.cross_validation.score_known_class_of_held_out_rows`.
        offset: The mean score by the final network minus the mean score by the cross-validation networks, from
            `protonet.fit.cross_validation.CrossValidation.known_score_offset`. It is added to all scores.

    Returns:
        (min(n, MAX_STORED_KNOWN_CLASS_SCORES),) float64: evenly spaced quantiles of the scores, ascending, for
        `rejection_threshold`.
    """
    scores = scores.sort().values + offset
    indices = torch.linspace(0, len(scores) - 1, min(len(scores), MAX_STORED_KNOWN_CLASS_SCORES), dtype=torch.float64)
    return scores[indices.round().long().to(scores.device)]


def rejection_threshold(scores: Tensor, false_rejection_rate: float) -> float:
    """Compute the threshold on scores of `score_known_class` at which a given fraction of known rows is rejected.

    Rows whose score is at or below the threshold are to be rejected as rows of no known class.

    Args:
        scores: (n,) ascending scores of rows of known classes, from `calibrate_known_scores`.
        false_rejection_rate: The fraction of rows of known classes that may be rejected, in (0, 1).

    Raises:
        InputTypeError: The rate is not a number.
        InputError: The rate is not below 1, or too small for the number of scores.

    Source: conformal p-values, Vovk, Gammerman and Shafer, "Algorithmic learning in a random world" (2005), sec. 2.2.
    """
    fraction = "Pass a fraction, such as 0.05 for 5 %."
    false_rejection_rate = check_number("rate", false_rejection_rate, low=0, strict=True, remedy=fraction)
    if not len(scores):
        remedy = "Fit to two samples or more of some classes."
        raise_input_error("scores", "come from rows that were held out", "none", remedy)
    rank = math.floor(false_rejection_rate * (len(scores) + 1) + 1e-9)
    if not 0 < rank <= len(scores):
        bounds = f"be in [{1 / (len(scores) + 1):.2g}, 1)"
        remedy = fraction if rank else f"There are {len(scores)} held-out rows, too few for this rate."
        raise_input_error("rate", bounds, false_rejection_rate, remedy)
    return float(scores[rank - 1])


def sum_confidence_bins(confidence: Tensor, correct: Tensor, n_bins: int = N_CALIBRATION_BINS) -> Tensor:
    """Sum predictions, confidences and correct predictions by confidence bin, for `calibration_error`.

    Bin b holds the confidences in (b / n_bins, (b + 1) / n_bins]; the first bin also holds 0. The results of several
    batches can be added.

    Args:
        confidence: Floating, of any shape, in [0, 1]: the probability of the predicted class.
        correct: Of the same shape, bool or 0 and 1: whether the prediction is correct.
        n_bins: >= 1.

    Returns:
        (n_bins, 3) float64, for each bin: the number of predictions, the sum of their confidences, and the number of
        correct predictions.

    Source: Guo et al., "On calibration of modern neural networks" (2017), sec. 2. https://arxiv.org/abs/1706.04599
    """
    confidence = confidence.flatten().double()  # (n,)
    values = torch.stack([torch.ones_like(confidence), confidence, correct.flatten().double()], dim=1)  # (n, 3)
    return values.new_zeros(n_bins, 3).index_add_(0, _confidence_bins(confidence, n_bins), values)


def _confidence_bins(confidence: Tensor, n_bins: int) -> Tensor:
    """Compute the index (n,) int64 of the bin of each confidence (n,), as in `sum_confidence_bins`."""
    return (confidence * n_bins).ceil().long().sub_(1).clamp_(0, n_bins - 1)


def calibration_error(bins: Tensor) -> float:
    """Compute the expected calibration error: the mean over predictions of ``|confidence - accuracy|`` of their bin.

    Args:
        bins: (n_bins, 3) float64 from `sum_confidence_bins`, or the sum of such results.

    Returns:
        The error in [0, 1]; NaN for bins without predictions.

    Source: Guo et al., "On calibration of modern neural networks" (2017), eq. 3. https://arxiv.org/abs/1706.04599
    """
    return float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())
