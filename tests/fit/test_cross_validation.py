"""Held-out rows of cross-validation, its repeats, and learning curves."""

from __future__ import annotations

import copy
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from torch import Tensor

from protonet.fit import diagnostics
from protonet.fit.cross_validation import (
    CROSS_VALIDATION_TENSORS,
    CrossValidation,
    add_samples_to_folds,
    cross_validate,
    cross_validation_tensors,
    held_out_indices,
    make_folds,
    predict_baselines,
    predict_held_out,
    repeat_cross_validation,
    restore_cross_validation,
    score_cosine_to_means,
    score_lda,
)
from protonet.fit.networks import fit_selected_model
from protonet.fit.solver import Solution, fit_solution
from protonet.losses import class_means
from protonet.metrics import EvaluationSample, compute_metrics, effective_sample_size, wilson_interval
from protonet.views.linear import shrink_covariance
from protonet.views.view import TrainingRows
from tests.strategies import PLAIN, blobs, seeds, solve_with

X, Y = blobs(0, rows=8, noise=0.8)
SOLUTION = fit_solution([(X, Y)], search=PLAIN)
CROSSED = cross_validate(SOLUTION)


def copy_and_update(cv: CrossValidation, features: Tensor, labels: Tensor, num_classes: int) -> CrossValidation:
    """Copy a cross-validation, and add samples to the copy."""
    cv = copy.deepcopy(cv)
    add_samples_to_folds(cv, features, labels, num_classes)
    return cv


def test_every_row_is_held_out_once_and_classified_by_a_network_of_the_other_rows() -> None:
    logits, problem = predict_held_out(CROSSED), SOLUTION.training_set
    all_rows = problem.rows.features * problem.scale
    assert sorted(map(tuple, CROSSED.features.tolist())) == sorted(map(tuple, all_rows.tolist()))
    for index, fitted in enumerate(CROSSED.fold_models):
        rows = CROSSED.fold_index == index
        features, labels = problem.rows.features, problem.rows.labels
        others = (features[:, None] * problem.scale != CROSSED.features[rows]).any(dim=2).all(dim=1)
        part = replace(problem.rows, features=features[others], labels=labels[others])
        choice = SOLUTION.select_without_rows((~others).nonzero().flatten())
        network = fit_selected_model(replace(problem, rows=part), choice)
        torch.testing.assert_close(logits[rows], network(CROSSED.features[rows]))
        assert fitted.counts.tolist() == torch.bincount(part.labels).tolist()


def test_held_out_accuracy_estimates_accuracy_on_fresh_rows() -> None:
    held_out, fresh = [], []
    for seed in range(4):
        x, y = blobs(seed, rows=40, noise=1.2)
        solution = fit_solution([(x[:100], y[:100])], search=PLAIN)
        cv = cross_validate(solution)
        held_out.append(compute_metrics(predict_held_out(cv), cv.labels).accuracy)
        fresh.append(compute_metrics(solution.network(x[100:]), y[100:]).accuracy)
    assert abs(np.mean(held_out) - np.mean(fresh)) < 3 * np.sqrt(0.25 / 400 + 0.25 / 400)


def test_baselines_classify_held_out_rows_and_take_constant_features_and_single_rows() -> None:
    for scores in predict_baselines(SOLUTION.training_set).values():
        assert scores.shape == (len(CROSSED.labels), 5)
        assert compute_metrics(scores, CROSSED.labels).accuracy > 0.6
    x, y = blobs(0)
    flat = torch.cat([x, torch.ones(len(x), 3)], dim=1)  # constant features, single rows, a class without any
    rows, flat_rows = TrainingRows(x, y, 5), TrainingRows(flat, y, 5)
    torch.testing.assert_close(score_lda(flat_rows, flat), score_lda(rows, x), atol=1e-3, rtol=1e-3)
    single = torch.stack([x[y == label][0] for label in range(5)])
    assert score_lda(TrainingRows(single, torch.arange(5), 6), single).argmax(dim=1).tolist() == [0, 1, 2, 3, 4]
    means = [(x[y == label] / x[y == label].norm(dim=1, keepdim=True)).mean(dim=0) for label in range(5)]
    expected = torch.cosine_similarity(x[:, None], torch.stack(means)[None], dim=2)
    torch.testing.assert_close(score_cosine_to_means(rows, x).float(), expected)


def test_an_update_equals_prototypes_of_all_rows() -> None:
    more, labels = blobs(9, classes=6)
    known = labels < 5
    cv = copy_and_update(CROSSED, more[known], labels[known], 5)
    network = solve_with([(X, Y)], search=PLAIN)
    network.set_prototypes(torch.cat([X, more[known]]), torch.cat([Y, labels[known]]))
    torch.testing.assert_close(cv.network(X), network(X), atol=1e-4, rtol=1e-4)
    add_samples_to_folds(cv, more[~known], labels[~known], 6)
    network.add_class(more[~known])
    torch.testing.assert_close(cv.network(X), network(X), atol=1e-4, rtol=1e-4)
    assert cv.network.counts.tolist() == [14] * 5 + [6]
    for fitted, before in zip(cv.fold_models, CROSSED.fold_models, strict=True):
        assert fitted.counts.tolist() == [count + 6 for count in before.counts.tolist()] + [6]
    assert torch.equal(cv.features, CROSSED.features)


def test_with_one_sample_per_class_no_row_is_held_out_and_samples_can_be_added() -> None:
    cv = cross_validate(fit_solution([(X[:5], torch.arange(5))], search=PLAIN))
    assert not cv.fold_models
    assert predict_held_out(cv).shape == (0, len(cv.network.counts))
    single = replace(SOLUTION.training_set.rows, labels=torch.arange(len(Y)), num_classes=len(Y))
    assert predict_baselines(replace(SOLUTION.training_set, rows=single)) == {}
    cv = restore_cross_validation(cv.network, cv.fold_models, cross_validation_tensors(cv))
    assert len(copy_and_update(cv, X, Y, 8).network.counts) == 8


def test_the_offset_and_the_gain_are_positive_for_few_rows_and_the_offset_is_zero_for_many() -> None:
    few, labels = blobs(1, classes=8, rows=5, dim=20, noise=0.8)
    cv = cross_validate(fit_solution([(few, labels)], search=PLAIN))
    assert float(cv.known_score_offset) > 0
    assert [cv.evaluation_sample.accuracy_gain, cv.evaluation_sample.accuracy_gain_error] == cv.accuracy_gain.tolist()
    assert float(cv.accuracy_gain.min()) > 0
    for rows in (20, 2):  # many rows, or only two folds
        assert float(cross_validate(fit_solution([blobs(1, rows=rows)], search=PLAIN)).known_score_offset) == 0


def test_pairs_of_folds_that_end_after_the_deadline_do_not_count() -> None:
    few, labels = blobs(1, classes=8, rows=5, dim=20, noise=0.8)
    solution = fit_solution([(few, labels)], search=PLAIN)
    deadline = time.monotonic() + 1

    def wait(stage: str, fraction: float) -> None:
        if stage == "pairs of folds":
            time.sleep(max(0.0, deadline - time.monotonic()))

    late = cross_validate(solution, deadline=deadline, progress=wait)
    assert [float(late.known_score_offset), *late.accuracy_gain.tolist()] == [0.0, 0.0, 0.0]


def test_progress_is_reported_and_global_state_is_unchanged() -> None:
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    reported: list[float] = []
    solution: Solution = SOLUTION._replace(network=copy.deepcopy(SOLUTION.network))
    cross_validate(solution, progress=lambda stage, fraction: reported.append(fraction), deadline=0.0)
    assert reported == sorted(reported)
    assert reported[0] == 0
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())


def test_lda_scores_are_the_gaussian_log_posterior() -> None:
    x, y = blobs(0, rows=7)
    queries, _ = blobs(1)
    means = class_means(x.double(), y, 5)[0]
    basis, variances, remaining = shrink_covariance(x.double() - means[y], len(x) - 5)
    off = torch.eye(8, dtype=torch.float64) - basis @ basis.T
    covariance = (basis * variances) @ basis.T + remaining * off
    densities = [multivariate_normal(mean.numpy(), covariance.numpy()) for mean in means]
    expected = np.stack([density.logpdf(queries.numpy()) for density in densities], axis=1)
    scores = score_lda(TrainingRows(x, y, 5), queries).softmax(dim=1)
    torch.testing.assert_close(scores, torch.from_numpy(expected).softmax(dim=1), atol=1e-8, rtol=1e-6)


def test_tensors_of_a_crossfit_are_restored_and_validated() -> None:
    tensors = cross_validation_tensors(CROSSED)
    restored = restore_cross_validation(CROSSED.network, CROSSED.fold_models, tensors)
    names = CROSS_VALIDATION_TENSORS.values()
    assert all(torch.equal(getattr(restored, name), getattr(CROSSED, name)) for name in names)
    features = "rows" if "rows" in tensors else "features"
    changes = {
        features: [tensors[features][:, 1:], tensors[features] / 0, tensors[features].half()],
        "labels": [tensors["labels"] - 1, tensors["labels"] + 99, tensors["labels"].int(), tensors["labels"][1:]],
        "weights": [-tensors["weights"], tensors["weights"].float()],
        "fold": [tensors["fold"] + 99],
        "offset": [tensors["offset"] / 0, tensors["offset"][None]],
    }
    for name, values in changes.items():
        for value in values:
            with pytest.raises(ValueError, match="held-out rows"):
                restore_cross_validation(CROSSED.network, CROSSED.fold_models, tensors | {name: value})
        with pytest.raises(ValueError, match="no held-out rows"):
            restore_cross_validation(
                CROSSED.network, CROSSED.fold_models, {key: item for key, item in tensors.items() if key != name}
            )


SolutionAndCrossfit = tuple[Solution, CrossValidation]


@pytest.fixture(scope="module")
def solved() -> SolutionAndCrossfit:
    x, y = blobs(0, classes=3, rows=12, dim=4, noise=2.0)
    solution = fit_solution([(x, y)], search=PLAIN)
    return solution, cross_validate(solution)


@pytest.mark.parametrize("copies", [0, 7])
def test_held_out_index_identifies_each_row(copies: int) -> None:
    x, y = blobs(0, classes=3, rows=8, dim=4)
    x, y = torch.cat([x, x[:copies], torch.randn(1, 4)]), torch.cat([y, y[:copies], torch.tensor([3])])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    solution = fit_solution([(x[order], y[order])], search=PLAIN)
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
    some = diagnostics.subsample_rows(labels, rows, fraction, generator)
    assert torch.isin(some, rows).all()
    assert some.tolist() == sorted(set(some.tolist()))
    before, after = (torch.bincount(labels[indices], minlength=4) for indices in (rows, some))
    assert after.tolist() == [math.ceil(fraction * n) for n in before.tolist()]


def test_the_last_point_of_a_learning_curve_is_the_crossfit(solved: SolutionAndCrossfit) -> None:
    solution, cv = solved
    curve = diagnostics.measure_learning_curve(solution, cv)
    assert curve.rows_per_class == sorted(curve.rows_per_class)
    n_rows = sum(len(fold.train) for fold in make_folds(solution.training_set))
    assert curve.rows_per_class[-1] == pytest.approx(n_rows / 15)
    assert curve.rows_per_class[-2] == pytest.approx(curve.rows_per_class[-1] / 2, abs=0.5)
    assert curve.is_correct.shape == (len(curve.rows_per_class), len(cv.labels))
    assert (curve.is_correct[-1] == (predict_held_out(cv).argmax(dim=1) == cv.labels)).all()
    assert len(diagnostics.measure_learning_curve(solution, cv, deadline=-math.inf).rows_per_class) == 1


SIZES = [4.0, 8.0, 16.0]  #: Training rows per class.


def extrapolate(
    correct: Tensor, per_class: float = 64.0, weights: Tensor | None = None
) -> diagnostics.ExpectedAccuracy:
    """Extrapolate a curve of three sizes from the correctness (3, rows) of held-out rows."""
    expected = diagnostics.extrapolate_accuracy(
        diagnostics.LearningCurve(SIZES, correct), EvaluationSample.with_defaults(correct.shape[1], weights), per_class
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
    short = diagnostics.LearningCurve(SIZES[1:], correct[1:, :9])
    assert diagnostics.extrapolate_accuracy(short, EvaluationSample.with_defaults(9), 64.0) is None
    rising = extrapolate(correct.flip(0))  # errors that rise are not expected to rise further
    assert rising.accuracy == pytest.approx(float(correct[0].double().mean()))
    assert extrapolate(torch.ones(3, 9, dtype=torch.bool)).accuracy == 1


@pytest.mark.parametrize("wrong", [(0, 0, 0), (2, 1, 0), (1, 1, 1), (5, 3, 1), (12, 8, 5)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_interval_contains_the_binomial_interval_of_held_out_rows(wrong: tuple[int, ...], weighted: bool) -> None:
    correct = torch.stack([torch.arange(30) >= index for index in wrong])
    weights = torch.ones(30, dtype=torch.float64) + weighted * (torch.arange(30) % 3)
    expected = extrapolate(correct, 36.0, weights)
    low, high = wilson_interval(expected.accuracy, effective_sample_size(weights))
    assert expected.interval[0] <= low < high <= expected.interval[1] <= 1
