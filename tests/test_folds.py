from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet.scoring import HELD_OUT, split_folds
from tests.strategies import seeds


@given(seed=seeds, counts=st.lists(st.integers(0, 9), min_size=2, max_size=8))
def test_folds_are_stratified_and_never_leave_a_class_without_rows_to_fit_on(seed: int, counts: list[int]) -> None:
    labels = torch.cat([torch.full((count,), c) for c, count in enumerate(counts)])
    folds = split_folds(labels, len(counts), torch.Generator().manual_seed(seed))
    assert len(folds) == (min(5, max(counts)) if max(counts) > 1 else 0)
    judged = torch.cat([fold.judge for fold in folds]) if folds else torch.empty(0, dtype=torch.int64)
    several = torch.tensor([count > 1 for count in counts])
    assert torch.equal(judged.sort().values, several[labels].nonzero().flatten() if folds else judged)
    for fold in folds:
        assert torch.equal(torch.cat(fold).sort().values, torch.arange(len(labels)))
        assert torch.equal(labels[fold.fit].unique(), labels.unique())
        share = torch.bincount(labels[fold.judge], minlength=len(counts))
        assert bool((share <= (torch.tensor(counts) + len(folds) - 1) // len(folds)).all())


def test_many_rows_are_judged_on_one_held_out_part() -> None:
    labels = torch.arange(40_000) % 100
    (fold,) = split_folds(labels, 100, torch.Generator().manual_seed(0))
    assert len(fold.judge) <= HELD_OUT
    assert torch.equal(torch.cat(fold).sort().values, torch.arange(40_000))
    assert int(torch.bincount(labels[fold.judge]).min()) > 0


def test_every_row_is_never_judged_at_once_however_many_classes_there_are() -> None:
    (fold,) = split_folds(torch.arange(100) % 20, 400_000, torch.Generator().manual_seed(0))
    assert len(fold.fit) > 0
    assert len(fold.judge) > 0
    assert sorted([*fold.fit.tolist(), *fold.judge.tolist()]) == list(range(100))


def test_no_folds_where_none_are_asked_for() -> None:
    assert split_folds(torch.arange(10) % 2, 2, torch.Generator(), most=0) == []
