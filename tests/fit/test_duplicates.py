"""Duplicates, nearly equal rows and groups are never both in the training and the held-out rows of a fold."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine

from protonet.fit.cross_validation import add_samples_to_folds, cross_validate, predict_held_out
from protonet.fit.duplicates import NEAR_DUPLICATES, group_duplicates, near_duplicate_fraction
from protonet.fit.solver import fit_solution
from protonet.fit.training_set import prepare_training_set
from protonet.metrics import measure
from protonet.selection.folds import FoldLimits, split_folds
from tests.strategies import PLAIN, accuracy, seeds

G = torch.Generator().manual_seed(0)
NOISE, COINS = torch.randn(40, 6, generator=G), torch.randint(2, (40,), generator=G)


@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-3])
def test_random_labels_of_repeated_rows_are_not_predicted(apart: float) -> None:
    x = torch.cat([NOISE, NOISE + apart * torch.randn(NOISE.shape, generator=torch.Generator().manual_seed(1))])
    solution = fit_solution([(x, COINS.repeat(2))], effort=PLAIN)
    assert solution.training_set.n_duplicates == 40
    cv = cross_validate(solution)
    accuracy = measure(predict_held_out(cv), cv.labels, cv.weights).accuracy
    assert accuracy < 0.5 + 3 * np.sqrt(0.25 / 40)
    assert float(cv.weights.sum()) == 80


def test_rows_that_are_equal_by_chance_are_not_duplicates() -> None:
    coins = torch.randint(2, (200, 4), generator=torch.Generator().manual_seed(0)).float()
    assert group_duplicates(coins) is None
    line = torch.rand(3000, 1, generator=torch.Generator().manual_seed(0))
    assert group_duplicates(line) is None
    assert group_duplicates(torch.cat([NOISE, NOISE[:1]])).unique().tolist() == list(range(40))  # type: ignore[union-attr]
    assert group_duplicates(NOISE) is None
    assert group_duplicates(torch.ones(1, 3)) is None


def test_a_few_equal_rows_of_continuous_columns_are_duplicates() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        for name, load in (("wine", load_wine), ("breast cancer", load_breast_cancer), ("digits", load_digits)):
            x, y = load(return_X_y=True)
            some = np.concatenate([rng.choice(np.flatnonzero(y == k), 8, replace=False) for k in np.unique(y)])
            again = rng.choice(some, len(some) // 8, replace=False)
            groups = group_duplicates(torch.from_numpy(x[np.concatenate([some, again])]).float())
            assert groups is not None, name
            assert len(groups.unique()) == len(some), name
        for dim, decimals in ((1, 5), (2, 3), (10, 3)):
            clusters = 3 * rng.normal(size=(3, dim))[np.arange(42) % 3] + rng.normal(size=(42, dim))
            x = np.concatenate([clusters, clusters[:1]]).round(decimals)
            groups = group_duplicates(torch.from_numpy(x).float())
            assert groups is not None, dim
            assert groups[0] == groups[-1], dim


def dependent_columns(kind: str, n: int) -> torch.Tensor:
    rng = np.random.default_rng(0)
    celsius, hour, price = rng.normal(15, 10, n).round(2), 24 * rng.random(n), rng.lognormal(3, 1, n).round(2)
    answers = np.clip((rng.normal(size=(n, 1)) + 0.5 * rng.normal(size=(n, 6))).round(), -2, 2)
    clock = [(np.sin(np.pi / 12 * t), np.cos(np.pi / 12 * t)) for t in (hour, np.floor(hour))]
    columns = {
        "linear": [celsius, (1.8 * celsius + 32).round(2)],
        "square": [celsius, celsius**2],
        "log": [price, np.log(price)],
        "hour": clock[0],
        "whole hour": clock[1],
        "categories": np.eye(100)[rng.integers(100, size=n)].T,
        "answers": answers.T,
    }[kind]
    x = torch.from_numpy(np.column_stack(list(columns))).float()
    return x - x.mean(dim=0)


def test_dependent_columns_do_not_make_duplicates() -> None:
    for n in (500, 3000):
        for kind in ("linear", "square", "log", "hour", "whole hour", "categories", "answers"):
            groups = group_duplicates(dependent_columns(kind, n))
            if groups is not None:  # a few pairs may be close by chance
                _, size = groups.unique(return_counts=True)
                assert size.max() <= 3, kind
                assert size[size > 1].sum() < 0.05 * n, kind


def test_a_table_with_each_row_twice_has_duplicates_for_any_columns() -> None:
    for kind in ("linear", "square", "answers"):
        groups = group_duplicates(dependent_columns(kind, 500).repeat(2, 1))
        assert groups is not None, kind
        assert torch.equal(groups[:500], groups[500:]), kind


def test_groups_are_not_chained_and_frequent_values_are_not_grouped() -> None:
    chain = 0.004 * torch.arange(200)[:, None] + torch.zeros(200, 3)
    far = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))
    groups = group_duplicates(torch.cat([far, chain]))
    assert groups is None or int(groups.unique(return_counts=True)[1].max()) <= 10
    sparse = far * (torch.rand(2000, 1, generator=torch.Generator().manual_seed(1)) < 0.7)
    assert group_duplicates(sparse) is None


@given(seed=seeds, n_groups=st.integers(2, 30), classes=st.integers(1, 4), many=st.booleans())
def test_groups_stay_together_and_every_fold_is_fitted_to_all_classes(
    seed: int, n_groups: int, classes: int, many: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (60,), generator=generator)
    groups = torch.randint(n_groups, (60,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr("protonet.selection.folds.FOLDS", FoldLimits(max_rows=50, max_held_out_rows=20))
        folds = split_folds(labels, classes, partition=seed, groups=groups)
    judged = torch.cat([labels[:0], *(fold.held_out for fold in folds)])
    assert len(judged.unique()) == len(judged)
    for fold in folds:
        assert len(fold.held_out)
        assert sorted(torch.cat([fold.train, fold.held_out]).tolist()) == list(range(60))
        assert not set(groups[fold.train].tolist()) & set(groups[fold.held_out].tolist())
        assert set(labels[fold.train].tolist()) == set(labels.tolist())


def test_an_update_with_copies_or_the_same_groups_does_not_leak_into_held_out_rows() -> None:
    groups = torch.arange(40) // 2
    solution = fit_solution([(NOISE, COINS)], effort=PLAIN, groups=groups)
    cv = cross_validate(solution)
    assert solution.merged_groups is not None
    no_groups = torch.full((40,), -1)
    for apart, new_groups, known in (
        (1e-4, None, True),
        (0.5, solution.merged_groups[groups], True),
        (0.5, no_groups, False),
    ):
        updated = copy.deepcopy(cv)
        add_samples_to_folds(updated, NOISE + apart, COINS, 2, new_groups)
        assert updated.network.counts.sum() == 80
        for index, network in enumerate(updated.folds):
            judged = int((cv.fold == index).sum()) * known
            assert network.counts.sum() == cv.folds[index].counts.sum() + 40 - judged
        assert predict_held_out(updated).shape == predict_held_out(cv).shape


def test_a_redundant_column_costs_no_accuracy() -> None:
    rng = np.random.default_rng(1)
    celsius = rng.normal(15, 10, 1200)
    labels = torch.from_numpy((np.sin(celsius / 2) > 0).astype(np.int64))
    x = torch.from_numpy(np.stack([celsius, 1.8 * celsius + 32], axis=1)).float()
    one, both = (fit_solution([(z[:600], labels[:600])], effort="fast") for z in (x[:, :1], x))
    with torch.no_grad():
        single, double = accuracy(one.network(x[600:, :1]), labels[600:]), accuracy(both.network(x[600:]), labels[600:])
    assert double > max(0.9, single - 0.03)


def detect_near_duplicates(
    x: np.ndarray, y: np.ndarray, groups: np.ndarray | None = None, blocks: torch.Tensor | None = None
) -> float:
    group_ids, features = None if groups is None else torch.from_numpy(groups), torch.from_numpy(x).float()
    labels = torch.from_numpy(y)
    problem, _ = prepare_training_set(features, labels, int(y.max()) + 1, groups=group_ids, column_indices=blocks)
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
    for seed in range(8):
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
