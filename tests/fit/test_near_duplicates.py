"""Near-duplicates are detected; clusters, classes, lattices and heavy tails are not reported as such."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine

from protonet.fit.duplicates import NEAR_DUPLICATES, near_duplicate_fraction
from protonet.fit.training_set import prepare_training_set


def detect_near_duplicates(
    x: np.ndarray, y: np.ndarray, groups: np.ndarray | None = None, blocks: torch.Tensor | None = None
) -> float:
    group_ids, features = None if groups is None else torch.from_numpy(groups), torch.from_numpy(x).float()
    problem, _ = prepare_training_set(features, torch.from_numpy(y), int(y.max()) + 1, groups=group_ids, blocks=blocks)
    return near_duplicate_fraction(problem.rows)


def test_near_duplicates_are_detected_unless_they_are_grouped() -> None:
    for copies in (1, 3):
        for dim, noise in ((4, 0.03), (10, 0.03), (10, 0.1), (10, 0.3), (30, 0.3)):
            rng = np.random.default_rng(0)
            of = np.repeat(np.arange(40), copies + 1)
            x = rng.normal(size=(40, dim))[of] + noise * rng.normal(size=(len(of), dim))
            y = rng.integers(3, size=40)[of]
            assert detect_near_duplicates(x, y) > NEAR_DUPLICATES.min_fraction, dim
            assert detect_near_duplicates(x, y, of) < NEAR_DUPLICATES.min_fraction, dim


def test_noisy_copies_of_few_rows_with_random_labels_are_detected() -> None:
    for dim in (5, 10, 30):
        for copies in (2, 3, 5, 8, 15):
            detected = 0
            for seed in range(4):
                rng = np.random.default_rng(seed)
                of = np.repeat(np.arange(30), copies)
                x = rng.normal(size=(30, dim))[of] + 0.3 * rng.normal(size=(len(of), dim))
                detected += detect_near_duplicates(x, rng.integers(2, size=30)[of]) >= NEAR_DUPLICATES.min_fraction
            assert detected >= (3 if dim == 5 else 4), copies


def test_real_tables_have_no_near_duplicates() -> None:
    for load in (load_iris, load_wine, load_breast_cancer, load_digits):
        assert detect_near_duplicates(*load(return_X_y=True)) < 0.1, load


def test_random_tables_have_no_near_duplicates() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n, dim = int(rng.integers(30, 300)), int(rng.integers(2, 20))
        y = np.arange(n) % int(rng.integers(2, 4))
        noise, clusters = rng.normal(size=(n, dim)), rng.integers(12, size=n)
        for x in (
            noise + 2 * y[:, None],
            rng.standard_cauchy(size=(n, dim)),
            rng.lognormal(size=(n, dim), sigma=2.0),
            20 * rng.normal(size=(12, dim))[clusters] + noise,
            np.hstack([np.eye(12)[clusters], noise[:, :2]]),
            np.hstack([noise[:, :1], rng.integers(0, 2, size=(n, dim))]),
            rng.integers(0, 4, size=(n, dim)).astype(float),
            np.round(noise, 1),
            np.cumsum(noise, axis=0),
            noise * (rng.random((n, dim)) < 0.3),
        ):
            assert detect_near_duplicates(x, y) < NEAR_DUPLICATES.min_fraction


def test_ties_in_a_column_are_not_near_duplicates() -> None:
    """Rows of one day or category are equal in its column, and have one class, but are not copies."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n, many = 150, int(rng.integers(25, 60))
        day, other = rng.integers(many, size=n), rng.integers(12, size=n)
        y = rng.integers(2, size=many)[day]
        measure = rng.normal(size=(n, 1))
        later = np.stack([day / 10, np.cos(day), np.sin(day)], axis=1)
        for x, blocks in (
            (np.hstack([later, measure]), [0, 0, 0, 1]),
            (np.hstack([np.eye(many)[day], measure]), [0] * many + [1]),
            (np.hstack([np.eye(many)[day], np.eye(12)[other], measure]), [0] * many + [1] * 12 + [2]),
        ):
            assert detect_near_duplicates(x, y, blocks=torch.tensor(blocks)) < NEAR_DUPLICATES.min_fraction
    of = np.repeat(np.arange(40), 4)  # beside a column that they share, rows with noise are twins still
    x = np.hstack([np.eye(2)[of % 2], rng.normal(size=(40, 6))[of] + 0.03 * rng.normal(size=(160, 6))])
    assert detect_near_duplicates(x, rng.integers(3, size=40)[of]) > NEAR_DUPLICATES.min_fraction


def test_tight_classes_of_few_rows_are_not_near_duplicates() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(20), 5)
    assert detect_near_duplicates(rng.normal(size=(20, 8))[y] + 0.03 * rng.normal(size=(100, 8)), y) == 0
    assert detect_near_duplicates(rng.normal(size=(6, 8)), y[:6]) == 0
