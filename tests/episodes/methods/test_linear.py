"""Linear classifiers, distribution calibration and `adaptive` equal scikit-learn, SciPy, torch and slow loops."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.svm import LinearSVC
from torch import Tensor, nn

from protonet.episodes.methods import linear
from protonet.episodes.methods.common import one_hot
from protonet.episodes.methods.svm import linear_svm, metaopt_svm
from protonet.episodes.samplers.batch import BaseClasses, Episodes
from protonet.sampling import list_class_rows
from protonet.selection.scoring import fit_temperature
from tests.episodes.cases import agree, core_rows, make_base, make_episodes, unit

Array = NDArray[np.float64]


def fit_logistic_slowly(support: Tensor, labels: Tensor, query: Tensor, penalty: float) -> Any:
    oracle = LogisticRegression(C=penalty, tol=1e-9, max_iter=10_000).fit(support, labels)
    return oracle.predict_proba(query.numpy())


@pytest.mark.parametrize("dim", [5, 40])
def test_logistic_regressions_equal_scikit_learns(dim: int) -> None:
    episodes, _ = make_episodes(dim=dim)
    ours = linear.linear_probe(episodes).softmax(dim=2)
    assert agree(ours, episodes, partial(fit_logistic_slowly, penalty=0.316), atol=1e-5)
    rows = replace(episodes, support=F.normalize(episodes.support, dim=2), query=F.normalize(episodes.query, dim=2))
    for penalty in (1.0, 30.0):
        ours = linear.logistic_regression(episodes, inverse_penalty=penalty).softmax(dim=2)
        assert agree(ours, rows, partial(fit_logistic_slowly, penalty=penalty), atol=1e-5)


def test_single_precision_and_rows_without_direction() -> None:
    episodes, _ = make_episodes(n_episodes=8, dim=300)
    single = replace(episodes, support=episodes.support.float(), query=episodes.query.float())
    both = [linear.logistic_regression(made).double() for made in (single, episodes)]
    torch.testing.assert_close(*both, atol=1e-3, rtol=0)
    for dtype in (torch.float32, torch.float64):
        episodes, _ = make_episodes(dtype=dtype, shots=(2, 2, 2, 2), dim=40)
        support = episodes.support.clone()
        support[0] = 0
        support[1, 1:] = support[1, :1]
        logits = linear.logistic_regression(replace(episodes, support=support))
        assert torch.allclose(logits[:2].softmax(dim=2), torch.tensor(0.25, dtype=dtype), atol=1e-4)


def test_ridge_regression_equals_scikit_learns() -> None:
    def biased(rows: Tensor) -> Tensor:
        return F.pad(unit(rows), (0, 1), value=1.0)

    def fit(support: Tensor, labels: Tensor, query: Tensor) -> Any:
        oracle = Ridge(alpha=0.3, fit_intercept=False).fit(biased(support), F.one_hot(labels))
        return 7 * oracle.predict(biased(query).numpy()) - 2

    episodes, _ = make_episodes()
    assert agree(linear.ridge_regression(episodes, penalty=0.3, scale=7.0, shift=-2.0), episodes, fit)


@pytest.mark.parametrize(("dim", "inverse_penalty"), [(5, 100.0), (40, 0.01)])
def test_support_vector_machines_equal_scikit_learns(dim: int, inverse_penalty: float) -> None:
    def fit(support: Tensor, labels: Tensor, query: Tensor) -> Any:
        oracle = LinearSVC(C=inverse_penalty, tol=1e-10, max_iter=100_000, dual=True).fit(unit(support), labels)
        return oracle.decision_function(unit(query).numpy())

    episodes, _ = make_episodes(dim=dim, shots=(5, 4, 6, 5), noise=1.0)
    assert agree(linear_svm(episodes, inverse_penalty=inverse_penalty), episodes, fit, atol=1e-5)


def train(
    parameters: list[nn.Parameter],
    classify: Callable[[Tensor], Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    generator: torch.Generator,
    *,
    n_epochs: int,
    batch_size: int,
    **settings: Any,
) -> Tensor:
    """Train by torch's own SGD on the support, in batches of an order that a generator draws; return query logits."""
    support, labels, query = rows
    optimizer = torch.optim.SGD(parameters, momentum=0.9, **settings)
    for _ in range(n_epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(classify(support[batch]), labels[batch]).backward()
            optimizer.step()
    return classify(query).detach()


@pytest.mark.parametrize(("dampening", "zero"), [(0.9, False), (0.0, True)])
def test_a_linear_layer_is_trained_as_by_torch(dampening: float, zero: bool) -> None:
    changed: dict[str, Any] = {"n_epochs": 8, "batch_size": 3, "dampening": dampening, "weight_decay": 0.1}

    def slow(*rows: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        start = 2 * torch.rand(4, 31, generator=generator, dtype=torch.float64) - 1
        start = start * (not zero) / 30**0.5
        layer = nn.Linear(30, 4, dtype=torch.float64)
        layer.load_state_dict({"weight": start[:, :-1], "bias": start[:, -1]})
        return train([*layer.parameters()], layer, rows, generator, lr=0.05, **changed)  # type: ignore[arg-type]

    episodes, _ = make_episodes(dim=30)
    ours = linear.linear_finetune(episodes, learning_rate=0.05, seed=5, zero=zero, **changed)
    assert agree(ours, episodes, slow, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dim", [6, 40])
def test_directions_and_lengths_are_trained_as_by_torch(dim: int) -> None:
    def slow(*rows: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        v = nn.Parameter((2 * torch.rand(4, dim, generator=generator, dtype=torch.float64) - 1) / dim**0.5)
        g = nn.Parameter(v.detach().norm(dim=1))

        def classify(x: Tensor) -> Tensor:
            return 2 * g * F.cosine_similarity(x[:, None], v, dim=2)

        settings = {"lr": 0.01, "dampening": 0.9, "weight_decay": 0.001}
        return train([v, g], classify, rows, generator, n_epochs=20, batch_size=4, **settings)  # type: ignore[arg-type]

    episodes, _ = make_episodes(dim=dim)
    ours = linear.baseline_pp(episodes, n_epochs=20, seed=3)
    assert agree(ours, episodes, slow)
    assert not torch.allclose(ours, linear.baseline_pp(episodes, n_epochs=20, seed=4), atol=1e-2)


def solve_slowly(support: Array, labels: Array, limit: float, ridge: float) -> Array:
    """Solve the paper's quadratic program by SciPy's sequential quadratic programming: weights (n_way, dim)."""
    n, n_way = len(support), int(labels.max()) + 1
    hot = np.eye(n_way)[labels]
    kernel = support @ support.T + ridge * np.eye(n)

    def lose(flat: Array) -> tuple[float, Array]:
        fraction = flat.reshape(n, n_way)
        smoothed = kernel @ fraction
        return float(0.5 * np.sum(fraction * smoothed) - np.sum(hot * fraction)), (smoothed - hot).ravel()

    sums = {"type": "eq", "fun": lambda flat: flat.reshape(n, n_way).sum(axis=1)}
    bounds = [(None, limit if part else 0.0) for part in hot.ravel()]
    options = {"maxiter": 2000, "ftol": 1e-15}
    solved = minimize(lose, np.zeros(n * n_way), jac=True, bounds=bounds, constraints=[sums], options=options)
    return np.asarray(solved.x.reshape(n, n_way).T @ support)


@pytest.mark.parametrize(("limit", "ridge"), [(0.1, 1.0), (10.0, 1.0), (0.01, 0.1)])
def test_metaopt_equals_a_slow_program(limit: float, ridge: float) -> None:
    episodes, _ = make_episodes(n_episodes=2, noise=1.0)

    def slow(support: Tensor, labels: Tensor, query: Tensor) -> Array:
        return np.asarray(3 * query.numpy() @ solve_slowly(support.numpy(), labels.numpy(), limit, ridge).T)

    assert agree(metaopt_svm(episodes, inverse_penalty=limit, ridge=ridge, scale=3.0), episodes, slow, atol=1e-4)


def covariance(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(dim=0)
    return centred.T @ centred / max(len(rows) - 1, 1)


@pytest.mark.parametrize("dim", [6, 50])
def test_mahalanobis_equals_a_slow_loop(dim: int) -> None:
    def slow(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        logits = torch.zeros(len(query), 4, dtype=torch.float64)
        for c in range(4):
            rows = support[labels == c]
            fraction = len(rows) / (len(rows) + 1)
            matrix = fraction * covariance(rows) + (1 - fraction) * covariance(support) + 0.4 * torch.eye(dim)
            for position, row in enumerate(query):
                away = row - rows.mean(dim=0)
                logits[position, c] = -0.5 * away @ torch.linalg.inv(matrix) @ away
        return logits.log_softmax(dim=1)

    episodes, _ = make_episodes(dim=dim)
    assert agree(linear.mahalanobis(episodes, ridge=0.4).log_softmax(dim=2), episodes, slow, rtol=1e-7, atol=1e-7)


def base_classes(base: BaseClasses) -> list[torch.Tensor]:
    return [base.take(rows).clone() for rows in list_class_rows(base.rows_by_class)]


def nearest_two(classes: list[torch.Tensor], row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and covariance that the paper calibrates from the two base classes nearest to a row."""
    distances = torch.stack([torch.dist(rows.mean(dim=0), row) for rows in classes])
    near = [classes[index] for index in distances.argsort()[:2].tolist()]
    mean = torch.stack([near[0].mean(dim=0), near[1].mean(dim=0), row]).mean(dim=0)
    return mean, (torch.cov(near[0].T) + torch.cov(near[1].T)) / 2 + 0.21


def sampled_rows(episodes: Episodes, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> torch.Tensor:
    """Return the rows (episodes, n_way, n_samples, dim) that distribution calibration samples."""
    seen: list[torch.Tensor] = []

    def spy(rows: torch.Tensor, target: torch.Tensor, **_: float) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(rows[:, episodes.support.shape[1] :].unflatten(1, (episodes.n_way, -1)))
        return rows.new_zeros(len(rows), rows.shape[2], target.shape[2]), rows.new_zeros(len(rows), 1, target.shape[2])

    monkeypatch.setattr(linear, "fit_logistic", spy)
    linear.distribution_calibration(episodes, **settings)
    return seen[0]


def test_samples_have_the_calibrated_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(dim=5)
    episodes, _ = make_episodes(n_episodes=2, shots=(1, 1, 1), n_way=3, dim=5, base=base)
    n_samples = 20_000
    samples = sampled_rows(episodes, monkeypatch, n_samples=n_samples)
    classes = base_classes(base)
    for index, (support, labels) in enumerate(zip(episodes.support.sqrt(), episodes.support_labels, strict=True)):
        for row, label in zip(support, labels.tolist(), strict=True):
            mean, covariance = nearest_two(classes, row)
            drawn = samples[index, label]
            deviation = covariance.diagonal().sqrt()
            # Five standard errors: sqrt(1 / n) of a mean, at most sqrt(2 / n) of a covariance, in standard deviations.
            assert float(((drawn.mean(dim=0) - mean) / deviation).abs().max()) < 5 / n_samples**0.5
            error = (torch.cov(drawn.T) - covariance) / torch.outer(deviation, deviation)
            assert float(error.abs().max()) < 5 * (2 / n_samples) ** 0.5


def test_equal_to_a_slow_loop() -> None:
    """The authors' program gives the same probabilities, but for the random samples."""
    base = make_base()
    episodes, _ = make_episodes(n_episodes=2, n_way=3, shots=(2, 2, 2), base=base)
    ours = linear.distribution_calibration(episodes, n_samples=3000).softmax(dim=2)
    random = np.random.default_rng(0)
    classes = base_classes(base)
    for index, (support, labels, query) in enumerate(zip(*core_rows(episodes), strict=True)):
        rows, targets = [support.sqrt().numpy()], [labels.numpy()]
        for row, label in zip(support.sqrt(), labels.tolist(), strict=True):
            mean, covariance = nearest_two(classes, row)
            rows.append(random.multivariate_normal(mean.numpy(), covariance.numpy(), 1500))
            targets.append(np.full(1500, label))
        oracle = LogisticRegression(max_iter=1000).fit(np.concatenate(rows), np.concatenate(targets))
        theirs = torch.from_numpy(oracle.predict_proba(query.sqrt().numpy()))
        assert float((ours[index] - theirs).abs().mean()) < 0.03


def test_no_more_neighbours_than_base_classes() -> None:
    episodes, _ = make_episodes(base=make_base())
    with pytest.raises(ValueError, match="`n_nearest` must be at most the number of base classes"):
        linear.distribution_calibration(episodes, n_nearest=7)


module = importlib.import_module("protonet.episodes.methods.adaptive")  # the package has a function of the same name


def hot_of(labels: Tensor, n_way: int = 4) -> Tensor:
    return one_hot(labels, n_way, torch.float64)


def test_prototypes_leave_a_row_out() -> None:
    episodes, _ = make_episodes()
    view = module._fit_prototype_view((episodes.support, episodes.query), hot_of(episodes.support_labels))
    for index, (support, labels, query) in enumerate(zip(*core_rows(episodes), strict=True)):
        unit = F.normalize(support, dim=1)
        for position in range(len(labels)):
            others = torch.arange(len(labels)) != position
            for c in range(4):
                rows = unit[others & (labels == c)]
                expected = F.cosine_similarity(unit[position], rows.mean(dim=0), dim=0) if len(rows) else 0.0
                assert abs(float(view.leave_one_out_scores[index, position, c] - expected)) < 1e-6
        means = torch.stack([unit[labels == c].mean(dim=0) for c in range(4)])
        assert torch.allclose(view.query_scores[index], F.normalize(query, dim=1) @ F.normalize(means, dim=1).T)


def test_ridge_regression_leaves_a_row_out() -> None:
    episodes, _ = make_episodes()
    hot = hot_of(episodes.support_labels)
    kernel = (-torch.cdist(episodes.support, episodes.support)).exp()
    right = (-torch.cdist(episodes.support, episodes.query)).exp()
    view = module._fit_ridge_view(kernel, right, 0.3, hot, 1.0)
    n = kernel.shape[1]
    targets = hot - 0.25
    for index in range(len(kernel)):
        for position in range(n):
            others = [row for row in range(n) if row != position]
            gram = kernel[index][others][:, others] + 0.3 * torch.eye(n - 1)
            readout = torch.linalg.solve(gram, targets[index][others])
            assert torch.allclose(view.leave_one_out_scores[index, position], kernel[index, position, others] @ readout)
        readout = torch.linalg.solve(kernel[index] + 0.3 * torch.eye(n), targets[index])
        assert torch.allclose(view.query_scores[index], right[index].T @ readout)


def test_the_temperature_equals_the_solvers() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 30, 4, generator=generator, dtype=torch.float64)
    guesses, right = torch.randint(4, (5, 30), generator=generator), torch.rand(5, 30, generator=generator) < 0.5
    labels = torch.where(right, scores.argmax(dim=2), guesses)
    factors, losses = module._fit_temperature(scores.mT, hot_of(labels).mT, torch.ones(5, 30, dtype=torch.float64))
    for rows, target, factor, loss in zip(scores, labels, factors, losses, strict=True):
        expected, row_losses = fit_temperature(rows, target, torch.ones(4, dtype=torch.bool))
        assert abs(float(factor) - expected) < 1e-2 * expected
        assert abs(float(loss - row_losses.mean())) < 1e-4


@pytest.mark.parametrize("dim", [3, module.MAX_FLOATS_IN_CACHE // 8])
def test_city_block_distances_equal_torchs(dim: int) -> None:
    """Distances are computed in several blocks if there are many features; those of equal rows are 0."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, n, dim, generator=generator, dtype=torch.float64) for n in (2, 5))
    b[:, 1] = a[:, 0]
    distances = module.city_block_distances(a, b)
    assert torch.allclose(distances, torch.cdist(a, b, p=1.0))
    assert torch.equal(distances[:, 0, 1], torch.zeros(3, dtype=torch.float64))
    assert torch.allclose(module.city_block_distances(2 * b, 2 * a), 2 * distances.transpose(1, 2))


@pytest.mark.parametrize("shots", [(1, 1, 1, 1), (1, 1, 1, 2)])
def test_a_single_row_a_class_gets_the_fixed_mixture(shots: tuple[int, ...]) -> None:
    episodes, _ = make_episodes(shots=shots)
    logits = module.adaptive(episodes)
    spread = logits.std(dim=2, correction=0).mean()
    assert 0.5 < float(spread) < 3.0  # about that of fixed weights
