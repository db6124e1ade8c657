"""Folds, temperatures, weights of views, class offsets and the minimizer, against SciPy and torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch import Tensor

from protonet.selection import scoring
from protonet.selection.folds import MAX_COSINES, MAX_HELD_OUT_ROWS, split_folds
from tests.strategies import seeds


@given(seed=seeds, counts=st.lists(st.integers(0, 9), min_size=2, max_size=8))
def test_folds_are_stratified_and_never_leave_a_class_without_rows_to_fit_on(seed: int, counts: list[int]) -> None:
    labels = torch.cat([torch.full((count,), c) for c, count in enumerate(counts)])
    folds = split_folds(labels, len(counts), partition=seed)
    assert len(folds) == (min(5, max(counts)) if max(counts) > 1 else 0)
    held_out = torch.cat([fold.held_out for fold in folds]) if folds else torch.empty(0, dtype=torch.int64)
    several = torch.tensor([count > 1 for count in counts])
    assert torch.equal(held_out.sort().values, several[labels].nonzero().flatten() if folds else held_out)
    for fold in folds:
        assert torch.equal(torch.cat(fold).sort().values, torch.arange(len(labels)))
        assert torch.equal(labels[fold.train].unique(), labels.unique())
        counted = torch.bincount(labels[fold.held_out], minlength=len(counts))
        assert bool((counted <= (torch.tensor(counts) + len(folds) - 1) // len(folds)).all())


def test_many_rows_have_one_held_out_part() -> None:
    labels = torch.arange(40_000) % 100
    (fold,) = split_folds(labels, 100)
    assert len(fold.held_out) <= MAX_HELD_OUT_ROWS
    assert torch.equal(torch.cat(fold).sort().values, torch.arange(40_000))
    assert int(torch.bincount(labels[fold.held_out]).min()) > 0
    (fold,) = split_folds(torch.arange(100) % 20, 400_000)
    assert len(fold.train) > 0
    assert len(fold.held_out) > 0
    assert sorted([*fold.train.tolist(), *fold.held_out.tolist()]) == list(range(100))
    assert split_folds(torch.arange(10) % 2, 2, max_folds=0) == []


@pytest.mark.parametrize("grouped", [False, True])
def test_with_many_classes_at_most_a_fold_is_held_out(grouped: bool) -> None:
    labels = torch.arange(9000) % 3000
    groups = torch.arange(9000) if grouped else None
    (fold,) = split_folds(labels, 3000, groups=groups)
    assert 0 < len(fold.held_out) <= 9000 // (5 if grouped else 3)  # one of three rows at most, of each class
    assert len(fold.held_out) * 3000 <= MAX_COSINES
    assert len(labels[fold.train].unique()) == 3000


@pytest.mark.parametrize("grouped", [False, True])
def test_folds_do_not_depend_on_the_indices_of_classes(grouped: bool) -> None:
    labels = torch.tensor([0] * 7 + [1] * 5 + [2] * 9)
    groups = torch.arange(21) // 2 if grouped else None
    folds = [split_folds(indices[labels], 4, groups=groups) for indices in (torch.arange(3), torch.tensor([3, 0, 1]))]
    for one, other in zip(*folds, strict=True):
        assert torch.equal(one.held_out, other.held_out)
        assert torch.equal(one.train, other.train)


@pytest.mark.parametrize("signal", [0.0, 0.3, 3.0])
def test_the_temperature_minimizes_the_objective_as_scipy_does(signal: float) -> None:
    cosines = torch.rand(60, 5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = torch.arange(60) % 5
    cosines[torch.arange(60), labels] += signal
    factor, losses = scoring.fit_temperature(cosines, labels, torch.ones(5, dtype=torch.bool))
    array = cosines.double().numpy()
    ridge = np.var(array, axis=1).mean() / (scoring.LOGIT_PRIOR_STD**2 * 60)

    def objective(beta: float) -> float:
        return float(-log_softmax(beta * array, axis=1)[np.arange(60), labels.numpy()].mean() + ridge * beta**2 / 2)

    best = minimize_scalar(objective, bounds=(0, 1000), method="bounded", options={"xatol": 1e-9})
    assert objective(factor) <= best.fun + 1e-6
    assert float(losses.mean()) <= objective(factor) + 1e-6


def test_many_cosines_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "VALUES_PER_BLOCK", 2**16)
    n, classes = 1500, 101
    generator = torch.Generator().manual_seed(0)
    cosines, labels = torch.randn(n, classes, generator=generator), torch.arange(n) % 100
    cosines[torch.arange(n), labels] += 4
    seen = torch.arange(classes) < 100
    blocks = list(scoring.row_slices(n, classes))
    assert len(blocks) > 1
    assert torch.equal(torch.cat([torch.arange(n)[block] for block in blocks]), torch.arange(n))
    factor, losses = scoring.fit_temperature(cosines, labels, seen)
    expected = torch.nn.functional.cross_entropy(factor * cosines[:, seen], labels, reduction="none")
    torch.testing.assert_close(losses, expected.double())
    for other in (0.99 * factor, 1.01 * factor):
        assert torch.nn.functional.cross_entropy(other * cosines[:, seen], labels) > losses.mean()


@pytest.mark.parametrize("sizes", [[10.0, 10.0, 10.0, 10.0], [4.0, 8.0, 18.0, 10.0]])
@given(seed=seeds)
def test_neither_the_order_of_rows_nor_other_views_change_a_fit(sizes: list[float], seed: int) -> None:
    """Near the minimum, rounding errors hide whether a step decreases the loss, and must not decide about it."""
    generator = torch.Generator().manual_seed(seed)
    labels, class_sizes = torch.arange(4).repeat_interleave(10), torch.tensor(sizes, dtype=torch.float64)
    views = torch.rand(6, 40, 4, generator=generator)
    views[:, torch.arange(40), labels] += torch.linspace(-0.2, 1.0, 6)[:, None]
    views[0] = 0.5
    together = scoring.compute_fitted_losses(views, labels, class_sizes)
    order = torch.randperm(40, generator=generator)
    for view, losses in zip(views, together, strict=True):
        factor, offsets, alone = scoring.fit_scale_and_offsets(view, labels, class_sizes)
        other_factor, other_offsets, _ = scoring.fit_scale_and_offsets(view[order], labels[order], class_sizes)
        torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)
        assert other_factor == pytest.approx(factor, rel=1e-5, abs=1e-5)
        assert (offsets is None) == (len(set(sizes)) == 1)
        if offsets is not None and other_offsets is not None:
            torch.testing.assert_close(other_offsets, offsets, rtol=1e-5, atol=1e-5)


def test_a_class_without_samples_gets_no_probability() -> None:
    cosines, labels = torch.zeros(4, 3), torch.tensor([0, 2, 0, 2])
    _, losses = scoring.fit_temperature(cosines, labels, torch.tensor([True, False, True]))
    torch.testing.assert_close(losses, torch.full((4,), 2.0, dtype=torch.float64).log())


def test_soft_weights_follow_losses_rows_and_spread() -> None:
    losses = [torch.full((4,), value, dtype=torch.float64) for value in (0.1, 9.0, 9.0)]  # far worse: left out
    assert scoring.weights_from_losses([torch.eye(4)] * 3, losses).tolist() == [1.0, 0.0, 0.0]
    losses = [torch.full((4,), value, dtype=torch.float64) for value in (0.0, 1.0)]  # of few rows they differ less
    weights = scoring.weights_from_losses([torch.eye(4)] * 2, losses)
    assert float(weights[0] / weights[1]) == pytest.approx(math.exp(4 / scoring.MIN_TOTAL_LOSS_SCALE))
    losses = [torch.ones(4, dtype=torch.float64)] * 2  # small cosines get a larger weight for the same influence
    weights = scoring.weights_from_losses([torch.eye(4), 0.1 * torch.eye(4)], losses)
    torch.testing.assert_close(weights[1] / weights[0], torch.tensor(10.0, dtype=torch.float64))


def draw_cosines(n: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw cosines (n, 4) of three views, each worse than the last and of different spread, and labels (n,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 4
    views = [torch.randn(n, 4, generator=generator) for _ in range(3)]
    for view, signal in zip(views, (1.5, 1.0, 0.0), strict=True):
        view[torch.arange(n), labels] += signal
    return [view * size for view, size in zip(views, (0.1, 0.02, 0.3), strict=True)], labels


def test_fitted_weights_minimize_the_objective_as_scipy_does() -> None:
    cosines, labels = draw_cosines(60)
    start = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    weights = scoring.fit_view_weights(cosines, labels, torch.ones(4, dtype=torch.float64), start)
    views = torch.stack(cosines).double().numpy()
    spread = np.sqrt(views.var(axis=2).mean(axis=1))
    views = views / spread[:, None, None]
    prior = start.numpy() * spread / (start.numpy() * spread).sum()

    def objective(point: np.ndarray) -> float:
        fraction = np.exp(log_softmax(np.append(point[:2], 0.0)))
        logits = np.exp(point[2]) * np.tensordot(fraction, views, axes=1)
        held_out = (
            scoring.WEIGHT_SHRINKAGE * (fraction * np.log(fraction / prior)).sum()
            + logits.var(axis=1).mean() / scoring.LOGIT_PRIOR_STD**2 / 2
        )
        return float(-log_softmax(logits, axis=1)[np.arange(60), labels.numpy()].mean() + held_out / 60)

    best = scipy.optimize.minimize(objective, np.zeros(3))
    expected = np.exp(log_softmax(np.append(best.x[:2], 0.0))) / spread
    np.testing.assert_allclose(weights.numpy(), expected / expected.sum(), atol=1e-3)


def test_few_rows_hardly_move_the_weights_and_many_do() -> None:
    start = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    moved = []
    for n in (8, 4000):
        cosines, labels = draw_cosines(n)
        weights = scoring.fit_view_weights(cosines, labels, torch.ones(4, dtype=torch.float64), start)
        assert weights[0] == 0  # left out it stays
        assert float(weights.sum()) == pytest.approx(1)
        moved.append(float(weights[2]))
    assert moved[0] > 0.3
    assert moved[1] < 0.02


@given(seed=seeds)
def test_the_simplest_within_one_error(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = list(torch.rand(5, 30, generator=generator, dtype=torch.float64))
    best = min(losses, key=lambda loss: float(loss.mean()))
    chosen = scoring.select_simplest_within_one_error(losses)
    assert not scoring.is_worse_by_one_error(losses[chosen], best)
    assert all(scoring.is_worse_by_one_error(loss, best) for loss in losses[:chosen])


def test_losses_are_worse_beyond_one_error_the_tie_and_the_margin() -> None:
    zero = torch.zeros(100, dtype=torch.float64)
    noisy = torch.tensor([1.0, -0.9] * 50, dtype=torch.float64)  # mean 0.05, standard error 0.095
    assert not scoring.is_worse_by_one_error(noisy, zero)
    assert scoring.is_worse_by_one_error(noisy, zero, max_tolerated=0.02)
    assert not scoring.is_worse_by_one_error(noisy, zero, max_tolerated=0.02, margin=4.0)
    assert scoring.is_worse_by_one_error(noisy, zero, max_tolerated=0.02, margin=2.0)
    assert not scoring.is_worse_by_one_error(zero + 1e-3, zero)
    assert scoring.is_worse_by_one_error(zero + 3e-3, zero)


def test_offsets_agree_with_a_general_minimizer_and_correct_the_class_frequencies() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 180 + [1] * 20)
    cosines = torch.randn(200, 2, generator=generator) * 0.3
    cosines[torch.arange(200), labels] += 0.4
    sizes = torch.tensor([180.0, 20.0], dtype=torch.float64)
    factor, offsets, losses = scoring.fit_scale_and_offsets(cosines, labels, sizes)
    assert offsets is not None
    logs, spread = sizes.log().numpy() - sizes.log().mean().item(), float(cosines.var(dim=1, correction=0).mean())

    def objective(x: np.ndarray) -> float:
        log_p = log_softmax(x[0] * cosines.double().numpy() + x[1] * logs, axis=1)
        prior = spread * (x[0] / scoring.LOGIT_PRIOR_STD) ** 2
        prior += ((x[1] - scoring.FREQUENCY_FACTOR_MEAN) / scoring.FREQUENCY_FACTOR_STD) ** 2
        return float(-log_p[np.arange(200), labels.numpy()].mean() + prior / 400)

    best = scipy.optimize.minimize(objective, [1.0, 0.5], tol=1e-10).x
    assert factor == pytest.approx(best[0], rel=1e-3)
    assert offsets.numpy() == pytest.approx(best[1] * logs, abs=1e-3)
    plain, before = scoring.fit_temperature(cosines, labels, sizes > 0)
    assert float(losses.mean()) < float(before.mean())
    predicted = (factor * cosines.double() + offsets).softmax(dim=1)[:, 1].mean()
    uncorrected = (plain * cosines.double()).softmax(dim=1)[:, 1].mean()
    assert abs(float(predicted) - 0.1) < 0.02 < abs(float(uncorrected) - 0.1)


@given(seed=seeds)
def test_offsets_are_optimal_if_the_cosines_are_misleading(seed: int) -> None:
    """The factor is then 0, and the exponent of the class frequencies has to be the best one there."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([30.0, 9.0, 3.0], dtype=torch.float64)
    labels = torch.multinomial(sizes, 40, replacement=True, generator=generator)
    cosines = 0.3 * torch.randn(40, 3, generator=generator) - 0.5 * F.one_hot(labels, 3)
    factor, offsets, _ = scoring.fit_scale_and_offsets(cosines, labels, sizes)
    assert offsets is not None
    logs = sizes.log() - sizes.log().mean()

    def objective(exponent: float) -> float:
        log_p = log_softmax(np.broadcast_to(exponent * logs.numpy(), (40, 3)), axis=1)
        prior = ((exponent - scoring.FREQUENCY_FACTOR_MEAN) / scoring.FREQUENCY_FACTOR_STD) ** 2
        return float(-log_p[np.arange(40), labels.numpy()].mean() + prior / 80)

    assert factor == 0
    assert offsets.numpy() == pytest.approx(minimize_scalar(objective).x * logs.numpy(), abs=1e-3)


def test_joint_weights_are_fitted_with_the_offsets() -> None:
    """Without class offsets, a view that only predicts the frequent class would be useful."""
    n, generator = 2000, torch.Generator().manual_seed(0)
    labels = (torch.arange(n) % 10 == 0).long()
    useful = torch.randn(n, 2, generator=generator)
    useful[torch.arange(n), labels] += 1.5
    frequent = torch.tensor([1.0, -1.0]) + torch.randn(n, 2, generator=generator)
    start = torch.tensor([0.5, 0.5], dtype=torch.float64)
    with_offsets, without = (
        float(scoring.fit_view_weights([useful, frequent], labels, torch.tensor(sizes, dtype=torch.float64), start)[0])
        for sizes in ([1800.0, 200.0], [1.0, 1.0])
    )
    assert with_offsets > 0.9
    assert without < 0.7


def test_classes_of_equal_weight_have_no_offsets() -> None:
    cosines = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    labels, sizes = torch.arange(40) % 4, torch.tensor([10.0, 10.0, 10.0, 10.0], dtype=torch.float64)
    factor, offsets, losses = scoring.fit_scale_and_offsets(cosines, labels, sizes)
    expected, row = scoring.fit_temperature(cosines, labels, sizes > 0)
    assert offsets is None
    assert factor == expected
    assert torch.equal(losses, row)


def with_gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[float, Tensor]]:
    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_(True)
        value = function(x)
        return float(value.detach()), torch.autograd.grad(value, x)[0]

    return evaluate


def draw_regression(seed: int, features: int) -> Callable[[Tensor], Tensor]:
    """Make the loss of a logistic regression with a ridge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, features, generator=generator, dtype=torch.float64)
    signs = torch.randn(40, generator=generator, dtype=torch.float64).sign()
    return lambda w: torch.nn.functional.softplus(-signs * (x @ w)).mean() + 0.01 * w.square().sum()


@pytest.mark.parametrize("seed", range(3))
def test_the_minimum_is_that_of_torch(seed: int) -> None:
    loss = draw_regression(seed, 12)
    w = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(w)
        value.backward()
        return value

    optimizer.step(closure)
    result = scoring.minimize(with_gradient(loss), torch.zeros(12, dtype=torch.float64))
    torch.testing.assert_close(result, w.detach(), rtol=0, atol=1e-6)
    assert float(loss(result)) <= float(loss(w.detach())) + 1e-10


def test_curved_valley() -> None:
    """Rosenbrock's function, whose minimum is at (1, 1)."""
    for start in ((-1.2, 1.0), (0.0, 0.0), (3.0, -2.0)):
        rosenbrock = with_gradient(lambda x: (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)
        result = scoring.minimize(rosenbrock, torch.tensor(start, dtype=torch.float64))
        torch.testing.assert_close(result, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-3)


def test_start_at_the_minimum_and_unbounded_function() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(scoring.minimize(with_gradient(lambda w: w.square().sum()), x), x)
    result = scoring.minimize(with_gradient(lambda x: -x.sum()), torch.zeros(2, dtype=torch.float64))
    assert all(map(math.isfinite, result.tolist()))
