"""Rows from loaders, their order and sample; duplicates and groups are never on both sides of a fold."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from protonet import solve
from protonet.errors import InputError, InputTypeError
from protonet.fit import cross_validation, training_set
from protonet.fit.duplicates import MIN_NEAR_DUPLICATE_FRACTION, group_duplicates, near_duplicate_fraction
from protonet.fit.solver import fit_solution
from protonet.metrics import compute_metrics
from protonet.selection.folds import split_folds
from protonet.views.view import TrainingRows
from tests.strategies import PLAIN, blobs, seeds

G = torch.Generator().manual_seed(0)
NOISE, COINS = torch.randn(40, 6, generator=G), torch.randint(2, (40,), generator=G)


@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-3])
def test_random_labels_of_repeated_rows_are_not_predicted(apart: float) -> None:
    x = torch.cat([NOISE, NOISE + apart * torch.randn(NOISE.shape, generator=torch.Generator().manual_seed(1))])
    solution = fit_solution([(x, COINS.repeat(2))], search=PLAIN)
    assert solution.training_set.n_duplicates == 40
    cv = cross_validation.cross_validate(solution)
    accuracy = compute_metrics(cross_validation.predict_held_out(cv), cv.labels, cv.weights).accuracy
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
def test_groups_stay_together_and_folds_are_of_all_classes(seed: int, n_groups: int, classes: int, many: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (60,), generator=generator)
    groups = torch.randint(n_groups, (60,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr("protonet.selection.folds.MAX_FOLDED_ROWS", 50)
            patch.setattr("protonet.selection.folds.MAX_HELD_OUT_ROWS", 20)
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
    solution = fit_solution([(NOISE, COINS)], search=PLAIN, groups=groups)
    cv = cross_validation.cross_validate(solution)
    assert solution.merged_groups is not None
    no_groups = torch.full((40,), -1)
    merged = solution.merged_groups[groups]
    for apart, new_groups, known in ((1e-4, None, True), (0.5, merged, True), (0.5, no_groups, False)):
        updated = copy.deepcopy(cv)
        cross_validation.add_samples_to_folds(updated, NOISE + apart, COINS, 2, new_groups)
        assert updated.network.counts.sum() == 80
        for index, network in enumerate(updated.fold_models):
            judged = int((cv.fold_index == index).sum()) * known
            assert network.counts.sum() == cv.fold_models[index].counts.sum() + 40 - judged
        assert cross_validation.predict_held_out(updated).shape == cross_validation.predict_held_out(cv).shape


def detect_near_duplicates(
    x: np.ndarray, y: np.ndarray, groups: np.ndarray | None = None, blocks: torch.Tensor | None = None
) -> float:
    group_ids, features = None if groups is None else torch.from_numpy(groups), torch.from_numpy(x).float()
    labels = torch.from_numpy(y)
    problem, _ = training_set.prepare_training_set(
        features, labels, int(y.max()) + 1, groups=group_ids, column_indices=blocks
    )
    return near_duplicate_fraction(problem.rows)


def test_near_duplicates_are_detected_unless_they_are_grouped() -> None:
    for copies in (1, 3):
        for dim, noise in ((4, 0.03), (10, 0.03), (10, 0.1), (10, 0.3), (30, 0.3)):
            rng = np.random.default_rng(0)
            of = np.repeat(np.arange(40), copies + 1)
            x = rng.normal(size=(40, dim))[of] + noise * rng.normal(size=(len(of), dim))
            y = rng.integers(3, size=40)[of]
            assert detect_near_duplicates(x, y) > MIN_NEAR_DUPLICATE_FRACTION, dim
            assert detect_near_duplicates(x, y, of) < MIN_NEAR_DUPLICATE_FRACTION, dim


def test_noisy_copies_of_few_rows_with_random_labels_are_detected() -> None:
    for dim in (5, 10, 30):
        for copies in (2, 3, 5, 8, 15):
            detected = 0
            for seed in range(4):
                rng = np.random.default_rng(seed)
                of = np.repeat(np.arange(30), copies)
                x = rng.normal(size=(30, dim))[of] + 0.3 * rng.normal(size=(len(of), dim))
                detected += detect_near_duplicates(x, rng.integers(2, size=30)[of]) >= MIN_NEAR_DUPLICATE_FRACTION
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
            assert detect_near_duplicates(x, y) < MIN_NEAR_DUPLICATE_FRACTION


def test_ties_in_a_column_are_not_near_duplicates() -> None:
    """Rows of one day or category are equal in its column, and have one class, but are not copies."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n, many = 150, int(rng.integers(25, 60))
        day, other = rng.integers(many, size=n), rng.integers(12, size=n)
        y = rng.integers(2, size=many)[day]
        compute_metrics = rng.normal(size=(n, 1))
        later = np.stack([day / 10, np.cos(day), np.sin(day)], axis=1)
        for x, blocks in (
            (np.hstack([later, compute_metrics]), [0, 0, 0, 1]),
            (np.hstack([np.eye(many)[day], compute_metrics]), [0] * many + [1]),
            (np.hstack([np.eye(many)[day], np.eye(12)[other], compute_metrics]), [0] * many + [1] * 12 + [2]),
        ):
            assert detect_near_duplicates(x, y, blocks=torch.tensor(blocks)) < MIN_NEAR_DUPLICATE_FRACTION
    of = np.repeat(np.arange(40), 4)  # beside a column that they share, rows with noise are twins still
    x = np.hstack([np.eye(2)[of % 2], rng.normal(size=(40, 6))[of] + 0.03 * rng.normal(size=(160, 6))])
    assert detect_near_duplicates(x, rng.integers(3, size=40)[of]) > MIN_NEAR_DUPLICATE_FRACTION


def test_tight_classes_of_few_rows_are_not_near_duplicates() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(20), 5)
    assert detect_near_duplicates(rng.normal(size=(20, 8))[y] + 0.03 * rng.normal(size=(100, 8)), y) == 0
    assert detect_near_duplicates(rng.normal(size=(6, 8)), y[:6]) == 0


N = training_set.MAX_SAMPLED_ROWS + 9000
MANY = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
#: Two large classes, and a rare one whose rows all stay.
CLASSES = (MANY[:, 0] > 0).long()
CLASSES[MANY[:, 1] > MANY[:, 1].sort().values[-301]] = 2


def test_a_sample_keeps_rare_rows_and_the_weight_of_each_class() -> None:
    order = CLASSES.argsort(stable=True)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    rows = TrainingRows(MANY[order], CLASSES[order], 3, weights=weights)
    sample, indices = training_set.sample_training_rows(rows)
    assert training_set.MAX_SAMPLED_ROWS - 3 <= len(sample.labels) <= training_set.MAX_SAMPLED_ROWS
    assert sample.weights is not None
    assert sample.row_fraction == 1.0
    torch.testing.assert_close(torch.bincount(sample.labels, sample.weights), torch.bincount(CLASSES[order], weights))
    assert int((sample.labels == 2).sum()) == 300
    kept = indices >= 0
    assert torch.equal(sample.features[indices[kept]], rows.features[kept])
    gaps = kept.nonzero().flatten().diff()
    assert int(gaps.max()) <= 2  # evenly spaced


def test_many_classes_share_the_sample() -> None:
    labels = (torch.arange(N) % 2000).sort().values
    sample, _ = training_set.sample_training_rows(TrainingRows(MANY, labels, 2000))
    counts = torch.bincount(sample.labels)
    assert len(sample.labels) <= training_set.MAX_SAMPLED_ROWS
    assert int(counts.max() - counts.min()) <= 1


def test_a_network_of_a_sample_counts_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_set, "MAX_SAMPLED_ROWS", 400)
    monkeypatch.setattr(training_set, "MAX_FULL_CLASS_ROWS", 50)
    x, y = MANY[:1500], CLASSES[:1500]
    solution = fit_solution([(x, y)], search=PLAIN)
    assert len(solution.training_set.rows.labels) <= 400
    torch.testing.assert_close(solution.network.counts.float(), torch.bincount(y).float(), rtol=0, atol=1)
    indices, cv = cross_validation.held_out_indices(solution.training_set), cross_validation.cross_validate(solution)
    assert torch.equal(indices[indices >= 0].sort().values, torch.arange(len(cv.labels)))
    held_out = (indices >= 0).nonzero().flatten()
    torch.testing.assert_close(cv.features[indices[held_out]], x[held_out])
    metrics = cross_validation.measure_cross_validation(cv)
    assert abs(int(metrics.confusion.sum()) / len(cv.labels) - 1) < 0.05
    with torch.no_grad():
        accuracy = float((solution.network(MANY).argmax(dim=1) == CLASSES).float().mean())
    assert metrics.interval[0] <= accuracy <= metrics.interval[1]


X, Y = blobs(0)


class Samples(Dataset[Any]):
    """A dataset of samples, each an array and a number."""

    def __init__(self, inputs: list[Any], labels: list[Any]) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row], self.labels[row]


class Stream(IterableDataset[Any]):
    """A dataset of batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[:9], Y[:9]), (X[9:], Y[9:])])


@pytest.mark.parametrize(
    "source",
    [
        *[(X, Y), [X, Y], (X.numpy(), Y.numpy()), (X.numpy(), Y), TensorDataset(X, Y), Stream()],
        Samples(list(X.numpy()), Y.tolist()),
    ],
    ids=lambda source: type(source).__name__,
)
def test_datasets_and_pairs_are_read_like_batches(source: Any) -> None:
    for train, val in ((source, None), ([(X[:0], Y[:0]), (X, Y)], source)):
        features, labels, _ = training_set.read_labelled_samples(train, val, {})
        assert torch.equal(features[-30:], X)
        assert torch.equal(labels[-30:], Y)


def test_the_metadata_set_the_number_of_classes() -> None:
    assert training_set.read_labelled_samples([(X, Y)], None, {"num_classes": 9})[2] == 9
    assert training_set.read_labelled_samples([(X, Y * 0)], None, {})[2] == 2


@given(seed=seeds)
def test_the_canonical_order_does_not_depend_on_the_order_of_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (20, 3), generator=generator).float()
    x[0] = -0.0
    y = torch.randint(3, (20,), generator=generator)
    sorting = training_set.canonical_row_order(x.clone(), y)
    features, labels = (x + 0.0)[sorting], y[sorting]
    assert sorting.sort().values.tolist() == list(range(20))
    assert len(labels.unique_consecutive()) == len(y.unique())
    for label in y.unique():
        row = features[labels == label]
        assert len(row.unique_consecutive(dim=0)) == len(row.unique(dim=0))  # equal rows are neighbours
    order = torch.randperm(20, generator=generator)
    again = order[training_set.canonical_row_order(x[order], y[order])]
    assert torch.equal((x + 0.0)[again], features)
    assert torch.equal(y[again], labels)


def test_the_canonical_order_does_not_depend_on_units_columns_class_indices_and_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.arange(60) % 3
    order = training_set.canonical_row_order(x.clone(), y)
    assert torch.equal(training_set.canonical_row_order(x * torch.tensor([2.54, 0.1, 7.0, 1e4]) + 3.0, y), order)
    assert torch.equal(training_set.canonical_row_order(x[:, [2, 0, 3, 1]].contiguous(), y), order)
    assert torch.equal(training_set.canonical_row_order(x.clone(), (y + 1) % 3), order)
    weights = torch.ones(60)
    weights[7] = 2
    twice = training_set.canonical_row_order(torch.cat([x, x[7:8]]), torch.cat([y, y[7:8]]))
    assert torch.equal(twice[twice < 60], training_set.canonical_row_order(x.clone(), y, weights))


def test_columns_far_from_zero_are_centred_and_no_others() -> None:
    x = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x += torch.tensor([0.0, 1e2, 1e5, 1.7e9, 0.0])
    x[:, 4] = 1 / 3
    centred, origin = training_set.centre_columns(x)
    assert (origin != 0).tolist() == [False, False, True, True, False]
    assert centred.dtype == origin.dtype == torch.float32
    torch.testing.assert_close(centred.double() + origin, x, atol=1e-4, rtol=0)
    same, none = training_set.centre_columns(x[:, :2].float())
    assert torch.equal(same, x[:, :2].float())
    assert not bool(none.any())
    exact, _, _ = training_set.read_labelled_samples([(x, torch.arange(50) % 2)], None, {})
    assert torch.equal(exact, x)


def test_invalid_samples_are_errors() -> None:
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (None, None, None, InputTypeError, "`train_loader` must be a loader; got None"),
        (5, None, None, InputTypeError, "`train_loader` must be iterable; got int"),
        (Dataset(), None, None, InputTypeError, "must be a dataset that has a length; got Dataset"),
        (Samples([], []), None, None, InputError, "`train_loader` must have at least one sample; got none"),
        (Samples([None, None], [0, 1]), None, None, InputTypeError, r"must hold samples \(inputs, label\) of numbers"),
        ([(X, Y)], Samples([X[0], X[1, :3]], [0, 1]), None, InputTypeError, "`val_loader` must hold samples .* shape"),
        (Samples([X, X], ["a", "b"]), None, None, InputTypeError, r"batches of real tensors; got \(Tensor, tuple\)"),
        ((X, [0, 1]), None, None, InputTypeError, r"batches of real tensors; got \(Tensor, list\) in batch 0"),
        ([], None, None, InputError, "`train_loader` must have at least one sample; got none"),
        ([(X[:, :0], Y)], None, None, InputError, "must have at least one feature; got none in batch 0"),
        ([X], None, None, InputTypeError, r"must give \(inputs, labels\) batches; got Tensor in batch 0"),
        ([(X, Y, Y)], None, None, InputTypeError, "batches; got tuple in batch 0 of 3 items"),
        ([(X, Y), (X, "a")], None, None, InputTypeError, r"batches of real tensors; got \(Tensor, str\) in batch 1"),
        ([(np.array([["a"]]), Y[:1])], None, None, InputTypeError, r"batches of real tensors; got \(ndarray, Tensor\)"),
        ([(X + 1j, Y)], None, None, InputTypeError, r"batches of real tensors; got \(Tensor, Tensor\) in batch 0"),
        ([(X, Y[:3])], None, None, InputError, r"got shapes \(30, 8\) and \(3,\) in batch 0"),
        ([(X, Y.float())], None, None, InputTypeError, "`train_loader labels` must be a tensor of integer labels"),
        ([(X, Y)], [(X, Y - 1)], None, InputError, r"`val_loader labels` must be >= 0; got -1 \(6 such"),
        ([(X, Y)], None, {"num_classes": 4}, InputError, r"`train_loader labels` must be in \[0, 4\); got 4"),
        ([(X * math.nan, Y)], None, None, InputError, "`train_loader` must be finite; got NaN or inf.* in 30 of 30"),
        ([(X, Y)], [(X / 0, Y)], None, InputError, "`val_loader` must be finite; got NaN or infinity in 30 of 30"),
        ([(X, Y)], None, {"input_dim": 9}, InputError, "must have 9 features per sample; got 8 in batch 0"),
        ([(X, Y)], [(X[:, :5], Y)], None, InputError, "`val_loader` must have 8 features per sample; got 5 in batch 0"),
        ([(X.double() * 1e60, Y)], None, None, InputError, "`train_loader` must lie within the range of float32"),
        ([(X.double() * 1e-60, Y)], None, None, InputError, "`train_loader` must lie within the range of float32"),
        ([(X, Y * 10**7)], None, None, InputError, "labels` must be class indices; got 40000000 as the largest"),
    ]
    for train, val, metadata, error, message in cases:
        with pytest.raises(error, match=message):
            solve(train, val, metadata)
