from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import binomtest
from scipy.stats import t as student
from sklearn.metrics import balanced_accuracy_score, classification_report, confusion_matrix, log_loss, roc_auc_score

from protonet.errors import InputError, InputTypeError
from protonet.fit.cross_validation import cross_validate, score_known_class_of_held_out_rows
from protonet.fit.solver import fit_solution
from protonet.metrics import (
    MAX_STORED_KNOWN_CLASS_SCORES,
    EvaluationSample,
    calibrate_known_scores,
    calibration_error,
    compute_auroc,
    compute_class_metrics,
    compute_metrics,
    refit_variance_factor,
    rejection_threshold,
    score_known_class,
    score_label_errors,
    student_quantile,
    sum_confidence_bins,
    wilson_interval,
)
from tests.strategies import PLAIN, blobs, seeds

BINS = 15  #: Of confidence.


def predictions(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(n, generator=generator, dtype=torch.float64)
    return confidence, torch.rand(n, generator=generator) < confidence


def test_calibration_error() -> None:
    bins = torch.tensor([[0.0, 0.0, 0.0], [10.0, 6.0, 5.0], [30.0, 27.0, 30.0]], dtype=torch.float64)
    assert calibration_error(bins) == pytest.approx(0.25 * abs(0.6 - 0.5) + 0.75 * abs(0.9 - 1.0))
    assert math.isnan(calibration_error(torch.zeros(15, 3, dtype=torch.float64)))


@given(seeds, st.integers(2, 6), st.integers(1, 40))
def test_metrics_of_classes_equal_scikit_learn(seed: int, num_classes: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    labels, predicted = rng.integers(num_classes, size=(2, n))
    confusion = torch.from_numpy(confusion_matrix(labels, predicted, labels=range(num_classes)))
    ours = compute_class_metrics(confusion)
    theirs = classification_report(labels, predicted, output_dict=True, zero_division=0)
    for index in range(num_classes):
        results = theirs.get(str(index), {"recall": 0, "precision": 0, "f1-score": 0, "support": 0})
        actual = [float(item[index]) for item in (ours.recall, ours.precision, ours.f1, ours.rows)]
        assert actual == pytest.approx([results[name] for name in ("recall", "precision", "f1-score", "support")])
    means = [theirs["macro avg"][name] for name in ("recall", "precision", "f1-score")]
    assert list(ours.macro_averages.values()) == pytest.approx(means)
    present = labels[:, None] == np.unique(labels)
    recalls = [np.mean(predicted[rows] == labels[rows]) for rows in present.T]
    assert ours.balanced_accuracy == pytest.approx(np.mean(recalls))
    if set(predicted) <= set(labels) and len(set(labels)) > 1:
        assert ours.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted))


@given(seeds, st.integers(1, 30), st.integers(1, 30), st.booleans())
def test_auroc_is_that_of_scikit_learn(seed: int, n: int, m: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(4, size=n + m).astype(float) if ties else rng.normal(size=n + m)
    known = np.arange(n + m) < n
    ours = compute_auroc(torch.from_numpy(scores[:n]), torch.from_numpy(scores[n:]))
    assert ours == pytest.approx(roc_auc_score(known, scores))


@given(seed=seeds)
def test_label_error_scores_equal_a_slow_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, labels = 3 * torch.randn(8, 4, generator=generator), torch.randint(4, (8,), generator=generator)
    result = score_label_errors(logits, labels)
    for row, label, score in zip(logits.double(), labels.tolist(), result.tolist(), strict=True):
        p = row.softmax(dim=0).tolist()
        others = [fraction for index, fraction in enumerate(p) if index != label]
        assert score == pytest.approx(math.log(max(others) / p[label]))
        assert (score > 0) == (int(row.argmax()) != label)
    order = torch.randperm(4, generator=generator)
    renamed = torch.empty_like(order).index_copy_(0, order, torch.arange(4))
    torch.testing.assert_close(score_label_errors(logits[:, order].double() + 7, renamed[labels]), result)


def test_an_interval_contains_its_fraction() -> None:
    for rows in range(1, 200):  # of 1, rounding took the end off
        assert wilson_interval(1.0, rows)[1] == 1
        assert wilson_interval(0.0, rows)[0] == 0
        metrics = compute_metrics(torch.eye(2).repeat(rows, 1), torch.arange(2).repeat(rows))
        assert metrics.accuracy == metrics.interval[1] == 1


def test_quantile_is_scipys() -> None:
    cases: list[float] = [2, 3, 4.5, 10, 100, 1e6]
    for degrees in cases:
        assert student_quantile(degrees) == pytest.approx(student.ppf(0.975, degrees), rel=0.01), degrees


@pytest.mark.parametrize(
    ("fraction", "correlation", "groups", "uneven"),
    [(0.5, 0.0, 40, False), (0.85, 0.9, 40, True), (0.97, 0.3, 12, True), (0.85, 0.3, 6, False), (0.97, 0.9, 6, True)],
)
def test_intervals_cover_the_accuracy_with_correlated_groups(
    fraction: float, correlation: float, groups: int, uneven: bool
) -> None:
    rng = np.random.default_rng(0)
    covered, width, trials = 0, 0.0, 300
    for _ in range(trials):
        sizes = 1 + rng.poisson(4 * rng.exponential(size=groups)) if uneven else np.full(groups, 5)
        of_group = np.repeat(
            rng.random(groups) < fraction, sizes
        )  # of rows that are alike, all are what their group is
        group = np.repeat(np.arange(groups), sizes)
        alone = rng.random(len(of_group)) < fraction
        right = torch.from_numpy(np.where(rng.random(len(of_group)) < math.sqrt(correlation), of_group, alone)).double()
        low, high = EvaluationSample.with_defaults(len(right), None, torch.from_numpy(group)).accuracy_interval(right)
        covered += low <= fraction <= high
        width += (high - low) / trials
    error = math.sqrt(0.95 * 0.05 / trials)
    assert covered / trials >= 0.93 - 3 * error
    if groups == 40 and correlation in {0, 0.9}:  # and no wider than they have to be
        rows = groups * (5 if correlation == 0 else 1)
        low, high = wilson_interval(fraction, rows)
        assert width < 2 * (high - low)


@given(seeds)
def test_uninformative_groups_have_no_effect_and_repeated_rows_count_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    right = (torch.rand(12, generator=generator) < 0.7).double()
    weights = torch.rand(12, generator=generator, dtype=torch.float64) + 0.5
    alone = EvaluationSample.with_defaults(12, weights, torch.full((12,), -1))
    assert alone.accuracy_interval(right) == EvaluationSample.with_defaults(12, weights).accuracy_interval(right)
    thrice = EvaluationSample.with_defaults(36, weights.repeat(3), torch.arange(12).repeat(3))
    equal = EvaluationSample.with_defaults(36, None, torch.arange(12).repeat(3))
    assert equal.count_effective_rows(right.repeat(3)) == pytest.approx(12)  # all three are alike: they are one
    values = torch.randn(12, generator=generator, dtype=torch.float64)
    assert thrice.mean_half_width(values.repeat(3)) == pytest.approx(alone.mean_half_width(values))


def test_loss_intervals_cover_the_loss_of_calibrated_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    holds, errors, trials = torch.zeros(2), [], 300
    for _ in range(trials):
        logits = 2 * torch.randn(40, 3, generator=generator, dtype=torch.float64)
        log_p = logits.log_softmax(dim=1)
        labels = torch.multinomial(log_p.exp(), 1, generator=generator)[:, 0]
        metrics = compute_metrics(logits, labels)
        truth = 0.6  # the entropy of these logits: see below
        ends = metrics.log_loss_interval
        holds += torch.tensor([ends[0] <= truth <= ends[1], metrics.calibration_interval[0] == 0])
        bins = sum_confidence_bins(log_p.amax(1).exp(), log_p.argmax(1) == labels)
        errors.append((metrics.calibration_error, calibration_error(bins)))
    logits = 2 * torch.randn(200_000, 3, generator=generator, dtype=torch.float64)
    entropy = -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1).mean()
    assert float(entropy) == pytest.approx(0.6, abs=0.02)
    assert bool((holds / trials > 0.92).all())
    ours, plain = np.mean(errors, axis=0)
    assert ours < 0.5 * plain  # which is nothing but chance


def loop_calibration_error(log_p: np.ndarray, labels: list[int]) -> float:
    """Sum over bins: the rows' share, times how far confidence and accuracy are apart, beyond what chance gives."""
    rows: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for scores, label in zip(log_p, labels, strict=True):
        confidence = float(np.exp(scores.max()))
        last = BINS - 1
        index = next(at for at in range(BINS) if confidence <= (at + 1) / BINS or at == last)
        rows[index].append((confidence, int(scores.argmax()) == label))
    filled = [np.array(item, dtype=float) for item in rows if item]
    total = 0.0
    for confidences, right in (item.T for item in filled):
        honest = (confidences * (1 - confidences)).sum() / len(right) ** 2
        gap = (confidences.mean() - right.mean()) ** 2 - honest
        total += len(right) / len(labels) * math.sqrt(max(0.0, gap))
    return total


@settings(max_examples=20)
@given(seed=seeds, n=st.integers(1, 60), num_classes=st.integers(2, 6), size=st.sampled_from([0.1, 3.0, 100.0]))
def test_the_metrics_are_scikit_learns_and_scipys(seed: int, n: int, num_classes: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(n, num_classes, generator=generator)
    labels = torch.randint(num_classes, (n,), generator=generator)
    metrics = compute_metrics(logits, labels)
    log_p = logits.double().log_softmax(dim=1).numpy()
    right = int((logits.argmax(dim=1) == labels).sum())
    assert math.isclose(metrics.accuracy, right / n)
    np.testing.assert_allclose(metrics.interval, binomtest(right, n).proportion_ci(method="wilson"), atol=1e-4)
    classes = list(range(num_classes))
    if size < 100:  # it clips probabilities
        np.testing.assert_allclose(metrics.log_loss, log_loss(labels.numpy(), np.exp(log_p), labels=classes), rtol=1e-9)
    np.testing.assert_allclose(metrics.calibration_error, loop_calibration_error(log_p, labels.tolist()), atol=1e-12)
    expected = confusion_matrix(labels.numpy(), logits.argmax(dim=1).numpy(), labels=classes)
    assert metrics.confusion.tolist() == expected.tolist()


@pytest.mark.parametrize("n", [20, 200, 20_000])
def test_intervals_of_cross_validation_are_wider_than_those_of_one_network(n: int) -> None:
    labels = torch.arange(n) % 2
    logits = torch.eye(2)[torch.where(torch.arange(n) % 10 == 0, 1 - labels, labels)]
    alone = compute_metrics(logits, labels)
    cv = compute_metrics(logits, labels, EvaluationSample.with_defaults(n, variance_factor=refit_variance_factor(n, 2)))
    for name in ("interval", "log_loss_interval"):
        (low, high), (crossed_low, crossed_high) = getattr(alone, name), getattr(cv, name)
        assert crossed_high - crossed_low > 1.08 * (high - low)


def test_invalid_logits_are_errors() -> None:
    logits = torch.tensor([[1.0, -torch.inf], [torch.nan, 0.0], [torch.inf, 0.0]])
    assert compute_metrics(logits[:1], torch.tensor([0])).accuracy == 1
    with pytest.raises(InputError, match="`logits` must give probabilities; got NaN in 2 of 3 rows"):
        compute_metrics(logits, torch.tensor([0, 1, 0]))


@settings(max_examples=20)
@given(seed=seeds, size=st.sampled_from([0.0, 1.0, 1e4]))
def test_the_score_is_the_logarithm_of_the_sum_of_exponentials(seed: int, size: float) -> None:
    logits = size * torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    expected = logsumexp(logits.double().numpy(), axis=1)
    np.testing.assert_allclose(score_known_class(logits).numpy(), expected, rtol=1e-12)


@settings(max_examples=30)
@given(n=st.integers(1, 3000), rate=st.floats(0.001, 0.999))
def test_at_most_the_rate_of_exchangeable_rows_is_rejected(n: int, rate: float) -> None:
    scores = calibrate_known_scores(torch.randn(n, generator=torch.Generator().manual_seed(n)))
    assert len(scores) == min(n, MAX_STORED_KNOWN_CLASS_SCORES)
    if 1 <= rate * (len(scores) + 1) < len(scores) + 1:
        rejected = int((scores <= rejection_threshold(scores, rate)).sum())
        assert rejected / (len(scores) + 1) <= rate + 1e-9  # the share of ranks of one more such row
        assert (rejected + 1) / (len(scores) + 1) > rate - 1e-9


def test_a_rate_below_the_resolution_of_the_rows_is_an_error() -> None:
    cases: list[tuple[torch.Tensor, Any, type[Exception], str]] = [
        (torch.zeros(99), 0.001, InputError, r"`rate` must be in \[0.01, 1\); got 0.001. There are 99 held-out rows"),
        (torch.zeros(99), 1.0, InputError, r"`rate` must be in \[0.01, 1\); got 1.0"),
        (torch.zeros(24), 5, InputError, r"`rate` must be in \[0.04, 1\); got 5.0"),
        (torch.zeros(99), 0, InputError, "`rate` must be a finite number > 0; got 0"),
        (torch.zeros(99), "few", InputTypeError, "`rate` must be a finite number > 0; got 'few'"),
        (torch.zeros(0), 0.1, InputError, "`scores` must come from rows that were held out; got none"),
    ]
    for scores, rate, error, message in cases:
        with pytest.raises(error, match=f"{message}") as caught:
            rejection_threshold(scores, rate)
        assert ("too few" in str(caught.value)) == (rate == 0.001)


def test_the_requested_rate_holds_on_fresh_rows() -> None:
    rates = []
    for seed in range(4):
        x, y = blobs(seed, rows=60, noise=0.8)
        solution = fit_solution([(x[:50], y[:50])], search=PLAIN)
        cv = cross_validate(solution)
        scores = calibrate_known_scores(score_known_class_of_held_out_rows(cv), float(cv.known_score_offset))
        threshold = rejection_threshold(scores, 0.1)
        rates.append(float((score_known_class(solution.network(x[50:])) <= threshold).double().mean()))
    assert abs(np.mean(rates) - 0.1) < 3 * np.std(rates, ddof=1) / np.sqrt(len(rates)) + 0.02


@pytest.mark.parametrize(("gain", "rise"), [(0.02, 0.02), (-0.02, 0.0), (1.0, None)])
def test_a_gain_from_more_rows_raises_the_upper_end_alone(gain: float, rise: float | None) -> None:
    logits, labels = torch.eye(2).repeat(20, 1), torch.arange(40) % 3 % 2
    before = compute_metrics(logits, labels, EvaluationSample.with_defaults(40))
    after = compute_metrics(logits, labels, EvaluationSample.with_defaults(40)._replace(accuracy_gain=gain))
    low, high = before.interval
    assert (after.accuracy, after.log_loss, after.interval[0]) == (before.accuracy, before.log_loss, low)
    assert after.interval[1] == pytest.approx(1.0 if rise is None else high + rise)


def test_the_error_of_the_gain_widens_the_upper_part() -> None:
    logits, labels = torch.eye(2).repeat(500, 1), torch.arange(1000) % 3 % 2
    before, after = (
        compute_metrics(logits, labels, EvaluationSample.with_defaults(1000)._replace(accuracy_gain_error=error))
        for error in (0.0, 0.03)
    )
    parts = [metrics.interval[1] - metrics.accuracy for metrics in (before, after)]
    assert after.interval[0] == before.interval[0]
    assert parts[1] ** 2 - parts[0] ** 2 == pytest.approx((1.96 * 0.03) ** 2, rel=0.01)
