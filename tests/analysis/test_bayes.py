"""The Bayes rules against SciPy, brute force over the sphere, and slow loops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.special import ive, logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor

from analysis.contest.draws import log_vmf_integral, predict_bayes, predict_bayes_gaussian, predict_bayes_sphere
from protonet.datasets import sample_family

RULES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (predict_bayes_sphere, predict_bayes_gaussian)}
KAPPAS = torch.tensor([1e-9, 1e-4, 0.3, 0.999, 1, 1.5, 7, 50, 300, 2e3, 1e4, 1e5, 1e6]).double()


def sample_covariance(dim: int) -> Tensor:
    root = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    return 0.1 * root @ root.T + 0.05 * torch.eye(dim, dtype=torch.float64)


def sample_task(seed: int, dim: int, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return support, labels and queries around prototypes of norm 2.5, with any count a class."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, dtype=torch.float64, generator=generator)
    prototypes = 2.5 * torch.nn.functional.normalize(normal(len(counts), dim), dim=1)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    queries = torch.randint(len(counts), (60,), generator=generator)
    support = prototypes[labels] + 0.8 * normal(len(labels), dim)
    return support, labels, prototypes[queries] + 0.8 * normal(60, dim)


def test_the_integral_is_scipys_where_that_does_not_underflow() -> None:
    for dim in (2, 3, 5, 10, 61, 62, 63, 100, 384, 1000):
        order = dim / 2 - 1
        kappa = KAPPAS.numpy()
        scaled = ive(order, kappa)
        seen = scaled > 1e-250
        expected = np.log(scaled[seen]) + kappa[seen] - order * np.log(kappa[seen])
        result = log_vmf_integral(KAPPAS, dim).numpy()[seen]
        assert seen.sum() >= 4, dim
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-10)


def test_the_integral_follows_the_recurrence() -> None:
    for dim in (4, 60, 61, 62, 63, 64, 384, 4000):
        higher = log_vmf_integral(KAPPAS, dim + 2) + 2 * KAPPAS.log()
        same = log_vmf_integral(KAPPAS, dim) + np.log(dim - 2)
        expected = log_vmf_integral(KAPPAS, dim - 2)
        torch.testing.assert_close(torch.logaddexp(higher, same), expected, rtol=1e-13, atol=1e-10)


def test_brute_force_over_the_sphere() -> None:
    dim = 4
    support, labels, query = sample_task(dim, dim, [1, 4, 0, 2, 3])
    rng = np.random.default_rng(dim)
    centres = rng.normal(size=(40_000, dim))
    centres *= 2.5 / np.linalg.norm(centres, axis=1, keepdims=True)

    def log_likelihood(x: Tensor) -> Any:
        return -cdist(x.numpy(), centres, "sqeuclidean") / (2 * 0.8**2)  # (rows, centres)

    at_query = log_likelihood(query)
    scores = []
    for c in range(5):
        weight = log_likelihood(support[labels == c]).sum(axis=0)  # (centres,)
        scores.append(logsumexp(at_query + weight, axis=1) - logsumexp(weight))
    table = np.stack(scores, axis=1)  # (n_queries, classes)
    lead = np.diff(np.sort(table, axis=1)[:, -2:], axis=1)[:, 0]
    sure = lead > 0.05  # far beyond the error of the sampling
    result = predict_bayes_sphere(support, labels, query, num_classes=5, noise=0.8).numpy()
    assert sure.mean() > 0.8
    assert set(table[sure].argmax(axis=1)) == set(range(5))
    np.testing.assert_array_equal(result[sure], table[sure].argmax(axis=1))


@pytest.mark.parametrize("isotropic", [True, False])
def test_slow_loop(isotropic: bool) -> None:
    dim, counts = 6, [1, 5, 0, 2]
    support, labels, query = sample_task(1, dim, counts)
    covariance = sample_covariance(dim)
    noise = 0.64 * np.eye(dim) if isotropic else covariance.numpy()
    prior = 2.5**2 / dim * np.eye(dim)
    scores = []
    for c, n in enumerate(counts):
        posterior = np.linalg.inv(np.linalg.inv(prior) + n * np.linalg.inv(noise))
        mean = posterior @ np.linalg.inv(noise) @ support[labels == c].sum(0).numpy()
        scores.append(multivariate_normal(mean, noise + posterior).logpdf(query.numpy()))
    expected = np.stack(scores, axis=1).argmax(axis=1)
    result = predict_bayes_gaussian(support, labels, query, num_classes=4, covariance=torch.tensor(noise))
    assert set(expected) == set(range(4))
    np.testing.assert_array_equal(result.numpy(), expected)


@settings(deadline=None, derandomize=True, max_examples=10)
@given(st.integers(0, 9999), st.integers(2, 80), st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_relabelling_row_order_and_chunks(seed: int, dim: int, counts: list[int]) -> None:
    support, labels, query = sample_task(seed, dim, counts)
    generator = torch.Generator().manual_seed(seed)
    names = torch.randperm(len(counts), generator=generator)
    order, rows = torch.randperm(len(labels), generator=generator), torch.randperm(60, generator=generator)
    for name, predict in RULES.items():
        population = {} if name == "predict_bayes_sphere" else {"covariance": sample_covariance(dim)}
        rule = partial(predict, **population)
        result = rule(support, labels, query, num_classes=len(counts))
        assert (tuple(result.shape), result.dtype) == ((60,), torch.int64)
        shuffled = rule(support[order], names[labels][order], query[rows], num_classes=len(counts))
        assert torch.equal(shuffled, names[result][rows])
        many = rule(support, labels, query.repeat(20, 1), num_classes=len(counts))
        assert torch.equal(many, result.repeat(20))


def test_the_rule_is_that_of_the_noise() -> None:
    for name in ("isotropic", "correlated", "nuisance"):
        split = sample_family(name, seed=0, n_train=2, n_val=1, num_classes=10, dim=70)
        x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
        anisotropic = partial(predict_bayes_gaussian, covariance=split.noise_covariance)  # type: ignore[arg-type]
        rule = predict_bayes_sphere if name == "isotropic" else anisotropic
        assert torch.equal(predict_bayes(split), rule(x, y, split.test_x, num_classes=10))
    with pytest.raises(ValueError, match=r"^`split` must know its noise_covariance; got"):
        predict_bayes(sample_family("warped", seed=0, num_classes=2, dim=4))
