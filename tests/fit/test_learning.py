"""Learning curves, repeated cross-validation, and the indices of held-out rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protonet.fit.cross_validation import (
    CrossValidation,
    cross_validate,
    held_out_indices,
    make_folds,
    predict_held_out,
    repeat_cross_validation,
)
from protonet.fit.diagnostics import (
    ExpectedAccuracy,
    LearningCurve,
    extrapolate_accuracy,
    measure_learning_curve,
    subsample_rows,
)
from protonet.fit.solver import Solution, fit_solution
from protonet.metrics import EvaluationSample, effective_sample_size, wilson_interval
from tests.strategies import PLAIN, blobs, seeds

SolutionAndCrossfit = tuple[Solution, CrossValidation]


@pytest.fixture(scope="module")
def solved() -> SolutionAndCrossfit:
    x, y = blobs(0, classes=3, rows=12, dim=4, noise=2.0)
    solution = fit_solution([(x, y)], effort=PLAIN)
    return solution, cross_validate(solution)


@pytest.mark.parametrize("copies", [0, 7])
def test_held_out_index_identifies_each_row(copies: int) -> None:
    x, y = blobs(0, classes=3, rows=8, dim=4)
    x, y = torch.cat([x, x[:copies], torch.randn(1, 4)]), torch.cat([y, y[:copies], torch.tensor([3])])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    solution = fit_solution([(x[order], y[order])], effort=PLAIN)
    cv, indices = cross_validate(solution), held_out_indices(solution.training_set)
    alone = y[order] == 3  # a class of one row is never held out
    assert (indices[alone] == -1).all()
    assert (cv.labels[indices[~alone]] == y[order][~alone]).all()
    torch.testing.assert_close(cv.features[indices[~alone]].float(), x[order][~alone])
    assert torch.bincount(indices[~alone]).tolist() == cv.weights.tolist()


def test_repeats_are_the_mean_of_crossfits(solved: SolutionAndCrossfit) -> None:
    solution, cv = solved
    once = repeat_cross_validation(solution, cv, 1).exp()
    torch.testing.assert_close(once, predict_held_out(cv).double().softmax(dim=1))
    twice = repeat_cross_validation(solution, cv, 2).exp()
    torch.testing.assert_close(twice.sum(dim=1), torch.ones(len(twice), dtype=torch.float64))
    second = 2 * twice - once  # the probabilities of the second cross-validation alone
    assert second.min() > -1e-9
    assert not torch.allclose(second, once, atol=1e-3)
    first, other = make_folds(solution.training_set), make_folds(solution.training_set, 1)
    assert [fold.held_out.tolist() for fold in first] != [fold.held_out.tolist() for fold in other]
    torch.testing.assert_close(repeat_cross_validation(solution, cv, 3, deadline=-math.inf).exp(), once)


@given(seeds, st.sampled_from([0.125, 0.3, 0.5, 1.0]))
def test_subsampled_rows_are_a_fraction_of_each_class(seed: int, fraction: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (40,), generator=generator)
    rows = torch.randperm(40, generator=generator)[:30]
    some = subsample_rows(labels, rows, fraction, generator)
    assert torch.isin(some, rows).all()
    assert some.tolist() == sorted(set(some.tolist()))
    before, after = (torch.bincount(labels[indices], minlength=4) for indices in (rows, some))
    assert after.tolist() == [math.ceil(fraction * n) for n in before.tolist()]


def test_the_last_point_of_a_learning_curve_is_the_crossfit(solved: SolutionAndCrossfit) -> None:
    solution, cv = solved
    curve = measure_learning_curve(solution, cv)
    assert curve.rows_per_class == sorted(curve.rows_per_class)
    assert curve.rows_per_class[-1] == pytest.approx(
        sum(len(fold.train) for fold in make_folds(solution.training_set)) / 15
    )
    assert curve.rows_per_class[-2] == pytest.approx(curve.rows_per_class[-1] / 2, abs=0.5)
    assert curve.correct.shape == (len(curve.rows_per_class), len(cv.labels))
    assert (curve.correct[-1] == (predict_held_out(cv).argmax(dim=1) == cv.labels)).all()
    assert len(measure_learning_curve(solution, cv, deadline=-math.inf).rows_per_class) == 1


SIZES = [4.0, 8.0, 16.0]  #: Training rows per class.


def extrapolate(correct: Tensor, per_class: float = 64.0, weights: Tensor | None = None) -> ExpectedAccuracy:
    """Extrapolate a curve of three sizes from the correctness (3, rows) of held-out rows."""
    expected = extrapolate_accuracy(
        LearningCurve(SIZES, correct), EvaluationSample.with_defaults(correct.shape[1], weights), per_class
    )
    assert expected is not None
    return expected


def test_expected_accuracy_follows_the_power_law_of_the_curve() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = [0.4 * (size / 4) ** -0.5 for size in SIZES]
    correct = torch.stack([torch.rand(8000, generator=generator) > error for error in errors])
    expected = extrapolate(correct)
    low, high = expected.interval
    assert expected.accuracy == pytest.approx(1 - 0.1, abs=0.01)
    assert low < expected.accuracy < high < low + 0.03
    assert (
        extrapolate_accuracy(LearningCurve(SIZES[1:], correct[1:, :9]), EvaluationSample.with_defaults(9), 64.0) is None
    )
    rising = extrapolate(correct.flip(0))  # errors that rise are not expected to rise further
    assert rising.accuracy == pytest.approx(float(correct[0].double().mean()))
    assert extrapolate(torch.ones(3, 9, dtype=torch.bool)).accuracy == 1


@pytest.mark.parametrize("wrong", [(0, 0, 0), (2, 1, 0), (1, 1, 1), (5, 3, 1), (12, 8, 5)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_interval_contains_the_binomial_interval_of_the_held_out_rows(
    wrong: tuple[int, ...], weighted: bool
) -> None:
    correct = torch.stack([torch.arange(30) >= index for index in wrong])
    weights = torch.ones(30, dtype=torch.float64) + weighted * (torch.arange(30) % 3)
    expected = extrapolate(correct, 36.0, weights)
    low, high = wilson_interval(expected.accuracy, effective_sample_size(weights))
    assert expected.interval[0] <= low < high <= expected.interval[1] <= 1
