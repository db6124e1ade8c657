"""Rows from loaders, their order, and the sample that replaces many rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from protonet import solve
from protonet.errors import InputError, InputTypeError
from protonet.fit import training_set
from protonet.fit.cross_validation import cross_validate, held_out_indices, measure_cross_validation
from protonet.fit.solver import fit_solution
from protonet.fit.training_set import (
    ROW_SAMPLE,
    canonical_row_order,
    centre_columns,
    read_labelled_samples,
    sample_training_rows,
)
from protonet.views.view import TrainingRows
from tests.strategies import PLAIN, blobs, seeds

N = ROW_SAMPLE.max_rows + 9000
MANY = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
#: Two large classes, and a rare one whose rows all stay.
CLASSES = (MANY[:, 0] > 0).long()
CLASSES[MANY[:, 1] > MANY[:, 1].sort().values[-301]] = 2


def test_a_sample_keeps_rare_rows_and_the_weight_of_each_class() -> None:
    order = CLASSES.argsort(stable=True)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    rows = TrainingRows(MANY[order], CLASSES[order], 3, weights=weights)
    sample, indices = sample_training_rows(rows)
    assert ROW_SAMPLE.max_rows - 3 <= len(sample.labels) <= ROW_SAMPLE.max_rows
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
    sample, _ = sample_training_rows(TrainingRows(MANY, labels, 2000))
    counts = torch.bincount(sample.labels)
    assert len(sample.labels) <= ROW_SAMPLE.max_rows
    assert int(counts.max() - counts.min()) <= 1


def test_a_network_of_a_sample_counts_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_set, "ROW_SAMPLE", replace(ROW_SAMPLE, max_rows=400, max_per_class=50))
    x, y = MANY[:1500], CLASSES[:1500]
    solution = fit_solution([(x, y)], effort=PLAIN)
    assert len(solution.training_set.rows.labels) <= 400
    torch.testing.assert_close(solution.network.counts.float(), torch.bincount(y).float(), rtol=0, atol=1)
    indices, cv = held_out_indices(solution.training_set), cross_validate(solution)
    assert torch.equal(indices[indices >= 0].sort().values, torch.arange(len(cv.labels)))
    held_out = (indices >= 0).nonzero().flatten()
    torch.testing.assert_close(cv.features[indices[held_out]], x[held_out])
    metrics = measure_cross_validation(cv)
    assert abs(int(metrics.confusion.sum()) / len(cv.labels) - 1) < 0.05
    with torch.no_grad():
        accuracy = float((solution.network(MANY).argmax(dim=1) == CLASSES).float().mean())
    assert metrics.interval[0] <= accuracy <= metrics.interval[1]


X, Y = blobs(0)


@given(seed=seeds, cuts=st.lists(st.integers(0, 30), max_size=4), numpy=st.booleans())
def test_batches_are_concatenated(seed: int, cuts: list[int], numpy: bool) -> None:
    x, y = blobs(seed)
    bounds = [0, *sorted(cuts), 30]
    batches: list[Any] = [(x[a:b].reshape(-1, 2, 4), y[a:b]) for a, b in itertools.pairwise(bounds)]
    if numpy:
        batches = [(inputs.numpy(), labels.numpy()) for inputs, labels in batches]
    features, labels, num_classes = read_labelled_samples(batches, [(X, Y)], {})
    assert torch.equal(features, torch.cat([x, X]))
    assert torch.equal(labels, torch.cat([y, Y]))
    assert (features.dtype, labels.dtype, num_classes) == (torch.float32, torch.int64, 5)


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
        features, labels, _ = read_labelled_samples(train, val, {})
        assert torch.equal(features[-30:], X)
        assert torch.equal(labels[-30:], Y)


def test_the_metadata_set_the_number_of_classes() -> None:
    assert read_labelled_samples([(X, Y)], None, {"num_classes": 9})[2] == 9
    assert read_labelled_samples([(X, Y * 0)], None, {})[2] == 2


@given(seed=seeds)
def test_the_canonical_order_does_not_depend_on_the_order_of_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (20, 3), generator=generator).float()
    x[0] = -0.0
    y = torch.randint(3, (20,), generator=generator)
    sorting = canonical_row_order(x.clone(), y)
    features, labels = (x + 0.0)[sorting], y[sorting]
    assert sorting.sort().values.tolist() == list(range(20))
    assert len(labels.unique_consecutive()) == len(y.unique())
    for label in y.unique():
        row = features[labels == label]
        assert len(row.unique_consecutive(dim=0)) == len(row.unique(dim=0))  # equal rows are neighbours
    order = torch.randperm(20, generator=generator)
    again = order[canonical_row_order(x[order], y[order])]
    assert torch.equal((x + 0.0)[again], features)
    assert torch.equal(y[again], labels)


def test_the_canonical_order_does_not_depend_on_units_columns_class_indices_and_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.arange(60) % 3
    order = canonical_row_order(x.clone(), y)
    assert torch.equal(canonical_row_order(x * torch.tensor([2.54, 0.1, 7.0, 1e4]) + 3.0, y), order)
    assert torch.equal(canonical_row_order(x[:, [2, 0, 3, 1]].contiguous(), y), order)
    assert torch.equal(canonical_row_order(x.clone(), (y + 1) % 3), order)
    weights = torch.ones(60)
    weights[7] = 2
    twice = canonical_row_order(torch.cat([x, x[7:8]]), torch.cat([y, y[7:8]]))
    assert torch.equal(twice[twice < 60], canonical_row_order(x.clone(), y, weights))


def test_columns_far_from_zero_are_centred_and_no_others() -> None:
    x = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x += torch.tensor([0.0, 1e2, 1e5, 1.7e9, 0.0])
    x[:, 4] = 1 / 3
    centred, origin = centre_columns(x)
    assert (origin != 0).tolist() == [False, False, True, True, False]
    assert centred.dtype == origin.dtype == torch.float32
    torch.testing.assert_close(centred.double() + origin, x, atol=1e-4, rtol=0)
    same, none = centre_columns(x[:, :2].float())
    assert torch.equal(same, x[:, :2].float())
    assert not bool(none.any())
    exact, _, _ = read_labelled_samples([(x, torch.arange(50) % 2)], None, {})
    assert torch.equal(exact, x)


def test_invalid_samples_are_errors() -> None:
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (None, None, None, InputTypeError, "`train_loader` must be a loader; got None"),
        (5, None, None, InputTypeError, "`train_loader` must be iterable; got int"),
        (Dataset(), None, None, InputTypeError, "must be a dataset that has a length; got Dataset"),
        (Samples([], []), None, None, InputError, "`train_loader` must have at least one sample; got none"),
        (
            Samples([None, None], [0, 1]),
            None,
            None,
            InputTypeError,
            r"must hold samples \(inputs, label\) of numbers, of one",
        ),
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
