from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import binomtest
from sklearn.metrics import confusion_matrix, log_loss

from protonet._checks import InputError, InputTypeError
from protonet.fit.crossfit import crossfit, score_held
from protonet.fit.search import Search
from protonet.fit.solver import solve_problem
from protonet.metrics import MOST_SCORES, calibrate, find_threshold, measure, score_known
from protonet.views.forest import ForestKind
from protonet.views.mlp import MLPKind
from protonet.views.radial import RadialKind
from tests.strategies import blobs, seeds

#: Bins of confidence.
BINS = 15
#: Linear views alone: what is tested here is not accuracy.
PLAIN = replace(Search(), folds=3).without(RadialKind).without(ForestKind).without(MLPKind)


def calibration_error(log_p: np.ndarray, labels: list[int]) -> float:
    """Sum over bins: the rows' share, times how far confidence and accuracy are apart, beyond what chance gives."""
    rows: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for scores, label in zip(log_p, labels, strict=True):
        confidence = float(np.exp(scores.max()))
        number = next(place for place in range(BINS) if confidence <= (place + 1) / BINS or place == BINS - 1)
        rows[number].append((confidence, int(scores.argmax()) == label))
    filled = [np.array(each, dtype=float) for each in rows if each]
    total = 0.0
    for confidences, right in (each.T for each in filled):
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
    metrics = measure(logits, labels)
    log_p = logits.double().log_softmax(dim=1).numpy()
    right = int((logits.argmax(dim=1) == labels).sum())
    assert math.isclose(metrics.accuracy, right / n)
    np.testing.assert_allclose(metrics.interval, binomtest(right, n).proportion_ci(method="wilson"), atol=1e-4)
    classes = list(range(num_classes))
    if size < 100:  # it clips probabilities
        np.testing.assert_allclose(metrics.log_loss, log_loss(labels.numpy(), np.exp(log_p), labels=classes), rtol=1e-9)
    np.testing.assert_allclose(metrics.calibration_error, calibration_error(log_p, labels.tolist()), atol=1e-12)
    expected = confusion_matrix(labels.numpy(), logits.argmax(dim=1).numpy(), labels=classes)
    assert metrics.confusion.tolist() == expected.tolist()


def test_logits_that_give_no_probabilities_get_one_line() -> None:
    logits = torch.tensor([[1.0, -torch.inf], [torch.nan, 0.0], [torch.inf, 0.0]])
    assert measure(logits[:1], torch.tensor([0])).accuracy == 1
    with pytest.raises(InputError, match="measure: `logits` must give probabilities; got NaN in 2 of 3 rows"):
        measure(logits, torch.tensor([0, 1, 0]))


@settings(max_examples=20)
@given(seed=seeds, size=st.sampled_from([0.0, 1.0, 1e4]))
def test_the_score_is_the_logarithm_of_the_sum_of_exponentials(seed: int, size: float) -> None:
    logits = size * torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    np.testing.assert_allclose(score_known(logits).numpy(), logsumexp(logits.double().numpy(), axis=1), rtol=1e-12)


@settings(max_examples=30)
@given(n=st.integers(1, 3000), rate=st.floats(0.001, 0.999))
def test_at_most_the_rate_of_exchangeable_rows_is_rejected(n: int, rate: float) -> None:
    scores = calibrate(torch.randn(n, generator=torch.Generator().manual_seed(n)))
    assert len(scores) == min(n, MOST_SCORES)
    if 1 <= rate * (len(scores) + 1) < len(scores) + 1:
        rejected = int((scores <= find_threshold(scores, rate)).sum())
        assert rejected / (len(scores) + 1) <= rate + 1e-9  # the share of ranks of one more such row
        assert (rejected + 1) / (len(scores) + 1) > rate - 1e-9


def test_the_offset_moves_the_threshold() -> None:
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    plain, moved = (find_threshold(calibrate(score_known(logits), offset), 0.1) for offset in (0.0, 0.25))
    assert moved == plain + 0.25


@pytest.mark.parametrize(
    ("scores", "rate", "error", "message"),
    [
        (
            torch.zeros(99),
            0.001,
            InputError,
            r"`rate` must be in \[0.01, 1\); got 0.001. 99 held-out rows tell no more",
        ),
        (torch.zeros(99), 1.0, InputError, r"`rate` must be in \[0.01, 1\); got 1"),
        (torch.zeros(99), 0, InputError, "`rate` must be a finite number > 0; got 0"),
        (torch.zeros(99), "few", InputTypeError, "`rate` must be a finite number > 0; got 'few'"),
        (torch.zeros(0), 0.1, InputError, "`scores` must come from rows that were held out; got none"),
    ],
)
def test_a_rate_that_rows_cannot_tell_is_an_error(
    scores: torch.Tensor, rate: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"find_threshold: {message}"):
        find_threshold(scores, rate)


def test_the_rate_asked_for_is_the_rate_on_fresh_rows() -> None:
    rates = []
    for seed in range(6):
        x, y = blobs(seed, rows=60, noise=0.8)
        solution = solve_problem([(x[:50], y[:50])], effort=PLAIN)
        crossed = crossfit(solution)
        threshold = find_threshold(calibrate(score_held(crossed), float(crossed.offset)), 0.1)
        rates.append(float((score_known(solution.network(x[50:])) <= threshold).double().mean()))
    assert abs(np.mean(rates) - 0.1) < 3 * np.std(rates, ddof=1) / np.sqrt(len(rates)) + 0.02
