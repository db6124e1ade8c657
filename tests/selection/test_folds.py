from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet.selection.folds import FOLDS, split_folds
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
    assert len(fold.held_out) <= FOLDS.max_held_out_rows
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
    assert len(fold.held_out) * 3000 <= FOLDS.max_cosines
    assert len(labels[fold.train].unique()) == 3000


@pytest.mark.parametrize("grouped", [False, True])
def test_folds_do_not_depend_on_the_indices_of_classes(grouped: bool) -> None:
    labels = torch.tensor([0] * 7 + [1] * 5 + [2] * 9)
    groups = torch.arange(21) // 2 if grouped else None
    folds = [split_folds(indices[labels], 4, groups=groups) for indices in (torch.arange(3), torch.tensor([3, 0, 1]))]
    for one, other in zip(*folds, strict=True):
        assert torch.equal(one.held_out, other.held_out)
        assert torch.equal(one.train, other.train)
