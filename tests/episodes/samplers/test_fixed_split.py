from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from protonet.datasets.dataset import Dataset
from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS
from protonet.episodes.samplers.fixed_split import FixedSplit, describe_duplicates, group_equal_rows
from protonet.episodes.samplers.sampler import EMPTY_SLOT
from protonet.errors import InputError
from protonet.sampling import index_classes
from tests.strategies import seeds

GENERATOR = torch.Generator().manual_seed(0)
TRAIN = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0])
TEST = torch.tensor([1, 0, 2, 1, 1])
COUNTS = (4, 3, 2)
X = torch.randn(14, 5, generator=GENERATOR)
INDEX = index_classes(torch.cat([TRAIN, TEST]))


def dataset(x: torch.Tensor, y: torch.Tensor, names: tuple[str, ...] = ("a", "b", "c")) -> Dataset:
    return Dataset(x, y, names)


@given(seed=seeds)
def test_the_support_is_of_training_rows_and_the_queries_are_the_test_split(seed: int) -> None:
    draw = FixedSplit(2, COUNTS).sample(INDEX, seed=seed, first=5, n_episodes=6)
    assert draw.support.shape == (6, 3, 2)
    for support, query in zip(draw.support, draw.query, strict=True):
        assert bool((TRAIN[support] == torch.arange(3)[:, None]).all())
        assert all(len(part.unique()) == 2 for part in support)
        assert [[row for row in part.tolist() if row != EMPTY_SLOT] for part in query] == [[10], [9, 12, 13], [11]]


def test_every_training_row_is_as_likely() -> None:
    draw = FixedSplit(2, COUNTS).sample(INDEX, seed=1, first=0, n_episodes=3000)
    for part, rows in enumerate(([0, 3, 6, 8], [1, 4, 7], [2, 5])):
        counts = torch.bincount(draw.support[:, part].flatten(), minlength=9)
        assert counts.nonzero().flatten().tolist() == rows
        assert chisquare(counts[rows].numpy()).pvalue > 1e-3


def test_settings_that_do_not_fit_the_split_are_refused() -> None:
    for setting, message in [
        (FixedSplit(0, COUNTS), r"`shot` must be a whole number in \[1, 1000000\]; got 0"),
        (FixedSplit(3, COUNTS), "`classes` must have 3 training rows; got class 'c' with 2. Ask for fewer shots, or"),
        (FixedSplit(1, (4, 3)), "`n_train` must be one count for each"),
        (FixedSplit(1, (4, 6, 2)), "`classes` must have a test row; got class 'b' without any"),
    ]:
        with pytest.raises(InputError, match=message):
            setting.validate(INDEX, ("a", "b", "c"))


@pytest.mark.parametrize("name", ["protonet", "knn"])
def test_many_queries_come_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    methods, config = {name: METHODS[name]}, FixedSplit(2, COUNTS)
    full = evaluate(X, INDEX, methods, config, n_episodes=3)[name]
    monkeypatch.setattr("protonet.episodes.evaluation.evaluate.MAX_AUROC_COMPARISONS", 1)
    monkeypatch.setattr("protonet.episodes.evaluation.evaluate.MIN_QUERIES_PER_BLOCK", 2)
    blocks = evaluate(X, INDEX, methods, config, n_episodes=3)[name]
    assert torch.equal(full.accuracy, blocks.accuracy)
    assert torch.allclose(full.bins, blocks.bins, atol=1e-5)


def test_splits_are_joined_by_name() -> None:
    train, test = dataset(X[:9], TRAIN), dataset(X[9:], (TEST + 1) % 3, ("c", "a", "b"))
    sampler, data = FixedSplit(2).join_test(train, test, ("x", "y"))
    assert torch.equal(data.x, X)
    assert data.y.tolist() == [*TRAIN.tolist(), *TEST.tolist()]
    assert sampler == FixedSplit(2, COUNTS)
    _, half = FixedSplit(2).join_test(train, dataset(X[9:].half(), TEST), ("x", "y"))
    assert half.x.dtype == torch.float32
    pixels = dataset((2 * torch.arange(45)).view(9, 5).to(torch.uint8), TRAIN)
    _, grey = FixedSplit(2).join_test(pixels, pixels._replace(x=pixels.x + 1), ("x", "y"))
    assert torch.equal(grey.x[:9], pixels.x)
    _, mixed = FixedSplit(2).join_test(pixels, test, ("x", "y"))
    assert torch.equal(mixed.x, torch.cat([pixels.x / 255, X[9:]]))


def test_splits_that_do_not_fit_together_are_refused() -> None:
    for test, message in [
        (dataset(X[9:, :4], TEST), "have 5 features per row, as x.npz; got 4 of y.npz. Embed both alike"),
        (dataset(X[9:], TEST, ("a", "b", "d")), "have the classes of x.npz, by name; got 'd' in y.npz alone"),
        (dataset(X[9:11], TEST[:2], ("a", "b")), "got 'c' in x.npz alone. Rename them, or leave them out"),
        *(
            (dataset(X[8:13].to(dtype), TEST), "share no row with x.npz; got 1, such as row 0 of y.npz and row 8 of x")
            for dtype in (torch.float16, torch.float32, torch.float64)
        ),
    ]:
        with pytest.raises(InputError, match=message):
            FixedSplit(2).join_test(dataset(X[:9], TRAIN), test, ("x.npz", "y.npz"))


@given(
    rows=st.lists(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 1.0]), min_size=3, max_size=3), max_size=12),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64]),
)
def test_equal_rows_have_the_same_group(rows: list[list[float]], dtype: torch.dtype) -> None:
    x = torch.tensor(rows).view(-1, 3)
    x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
    indices = group_equal_rows(x)
    assert torch.equal(indices[:, None] == indices, (x[:, None] == x).all(dim=2))


def test_lines_about_duplicates_equal_a_slow_count() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 12, (60, 1), generator=generator).float()
    y = torch.arange(60) % 6
    data = Dataset(x, y, tuple("abcdef"), ("novel", "novel", "novel", "base", "base", "validation"))
    equal = (x == x.T).fill_diagonal_(fill_value=False)
    evaluated = y < 3
    expected = [
        evaluated & (equal & (y[:, None] == y)).any(dim=1),
        evaluated & (equal & (y[:, None] != y) & evaluated).any(dim=1),
        evaluated & (equal & ~evaluated).any(dim=1),
    ]
    lines = list(describe_duplicates(data, torch.arange(3)))
    assert [int(line.partition(": ")[2].split()[0]) for line in lines] == [int(rows.sum()) for rows in expected]
    assert all("(a, b, c)" in line for line in lines)
    assert "not evaluated, of 3 classes (d, e, f): " in lines[2]
    assert list(describe_duplicates(data._replace(x=torch.arange(60.0)[:, None]), torch.arange(3))) == []


def test_small_classes_give_all_that_they_have() -> None:
    setting = FixedSplit(3, COUNTS, allow_small=True)
    draw = setting.sample(setting.validate(INDEX, ("a", "b", "c")), seed=0, first=0, n_episodes=9)
    assert ((draw.support >= 0).sum(dim=2) == torch.tensor([3, 3, 2])).all()
    assert (draw.support[:, 2, :2].sort().values == torch.tensor([2, 5])).all()
