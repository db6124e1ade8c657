from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from protonet.fit.candidates import Search
from protonet.fit.crossfit import crossfit, predict_held
from protonet.fit.solver import solve_problem
from protonet.metrics import MOST_SCORES, calibrate, find_threshold, score_known
from tests.strategies import blobs, seeds

#: Linear views alone: what is tested here is not accuracy.
PLAIN = Search(folds=3, radial=(), trees=0, rungs=0)


@settings(max_examples=20)
@given(seed=seeds, size=st.sampled_from([0.0, 1.0, 1e4]))
def test_the_score_is_the_logarithm_of_the_sum_of_exponentials(seed: int, size: float) -> None:
    logits = size * torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    np.testing.assert_allclose(score_known(logits).numpy(), logsumexp(logits.double().numpy(), axis=1), rtol=1e-12)


@settings(max_examples=30)
@given(n=st.integers(1, 3000), rate=st.floats(0.001, 0.999))
def test_at_most_the_rate_of_exchangeable_rows_is_rejected(n: int, rate: float) -> None:
    scores = calibrate(torch.randn(n, 1, generator=torch.Generator().manual_seed(n)))
    assert len(scores) == min(n, MOST_SCORES)
    if 1 <= rate * (len(scores) + 1) < len(scores) + 1:
        rejected = int((scores <= find_threshold(scores, rate)).sum())
        assert rejected / (len(scores) + 1) <= rate + 1e-9  # the share of ranks of one more such row
        assert (rejected + 1) / (len(scores) + 1) > rate - 1e-9


def test_the_gain_moves_the_threshold() -> None:
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    plain, moved = (find_threshold(calibrate(logits, gain), 0.1) for gain in (0.0, 0.25))
    assert moved == plain + 0.25


@pytest.mark.parametrize(
    ("scores", "rate", "error", "message"),
    [
        (
            torch.zeros(99),
            0.001,
            ValueError,
            r"`rate` must be in \[0.01, 1\); got 0.001. 99 held-out rows tell no more",
        ),
        (torch.zeros(99), 1.0, ValueError, r"`rate` must be in \[0.01, 1\); got 1"),
        (torch.zeros(99), 0, ValueError, "`rate` must be a finite number > 0; got 0"),
        (torch.zeros(99), "few", TypeError, "`rate` must be a finite number > 0; got 'few'"),
        (torch.zeros(0), 0.1, ValueError, "`scores` must come from rows that were held out; got none"),
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
        threshold = find_threshold(calibrate(predict_held(crossed), float(crossed.gain)), 0.1)
        rates.append(float((score_known(solution.network(x[50:])) <= threshold).double().mean()))
    assert abs(np.mean(rates) - 0.1) < 3 * np.std(rates, ddof=1) / np.sqrt(len(rates)) + 0.02
