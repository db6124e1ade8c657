"""Real data: the parser of series, docstrings, what is missing, and splits."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.real_data.sets import (
    load_glyph_subset,
    load_real,
    load_series,
    load_series_arrays,
    load_spectra,
    load_text,
    read_series,
    split_shots,
)
from protonet.datasets import Dataset

HEADER = "# comment\n@problemName x\n@classLabel true a b\n@DATA\n"


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of aeon's layout that comes first on the path."""
    data = tmp_path / "aeon" / "datasets" / "data"
    for name, cases in {
        "Even": ("1,2,3:4,5,6:b\n0,0,0:1,1,1:a\n", "7,8,9:1,2,3:a\n"),
        "JapaneseVowels": ("1,2:3,4:1\n", "5:6:2\n7,8,9:1,2,3:1\n"),
    }.items():
        (data / name).mkdir(parents=True)
        for part, text in zip(("TRAIN", "TEST"), cases, strict=True):
            (data / name / f"{name}_{part}.ts").write_text(HEADER + text)
    (tmp_path / "aeon" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return data


def test_series(series: Path) -> None:
    data = load_series("Even")
    assert data.x.tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1], [7, 8, 9, 1, 2, 3]]
    assert (data.y.tolist(), data.class_names) == ([1, 0, 0], ("a", "b"))
    assert "aeon" not in sys.modules


def test_spectra_are_frames(series: Path) -> None:
    data = load_spectra()
    assert data.x.tolist() == [[1, 3], [2, 4], [5, 6], [7, 1], [8, 2], [9, 3]]
    assert data.y.tolist() == [0, 0, 1, 0, 0, 0]


def test_series_errors(series: Path, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"^`aeon` must be installed for Odd; .*pip install --no-deps"):
        load_series_arrays("Odd", "Odd")
    path = tmp_path / "x.ts"
    for text, message in (("1,2:3:a", "channels of equal length"), ("1,?:a", "numbers"), ("", "hold cases")):
        path.write_text(HEADER + text)
        with pytest.raises(ValueError, match=f"^`path` must .*{message}"):
            read_series(path)


def test_text(tmp_path: Path) -> None:
    for module, word in (("birds", "feather"), ("pkg/fish", "scale")):
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        functions = (f"def f{i}():\n    '''Return {word} number {i} of an animal that {word}s.'''\n" for i in range(70))
        path.write_text("".join(functions) + "def short():\n    '''Short.'''\n")
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x.py").write_text((tmp_path / "birds.py").read_text())
    data = load_text(tmp_path)
    assert data.class_names == ("birds", "pkg/fish")
    assert torch.bincount(data.y).tolist() == [60, 60]
    assert data.x.shape[1] == 119
    split = split_shots(data, 1, 0)
    assert split is not None
    nearest = torch.cdist(split.test_x, split.train_x).argmin(dim=1)
    assert torch.equal(split.train_y[nearest], split.test_y)
    with pytest.raises(ValueError, match=r"^`library` must hold 2 modules of 40 docstrings; got 1 in"):
        load_text(tmp_path / "test")


@pytest.mark.parametrize(("name", "shape"), [("wine", (178, 13)), ("iris", (150, 4)), ("breast_cancer", (569, 30))])
def test_tables(name: str, shape: tuple[int, int]) -> None:
    data = load_real(name)
    assert tuple(data.x.shape) == shape
    assert load_real(name) is data
    assert int(torch.bincount(data.y).min()) > 40


def test_glyph_subset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path))
    data = load_glyph_subset()
    assert data.num_classes == 60
    assert int(torch.bincount(data.y).min()) >= 20 + 3  # for 20 shots


def split_three(seed: int = 0, shots: int = 4) -> tuple[set[float], set[float]]:
    """Split classes of 30, 5 and 40 rows; return the labelled rows and the test rows, by their only feature."""
    y = torch.tensor([0] * 30 + [1] * 5 + [2] * 40)
    split = split_shots(Dataset(torch.arange(75.0)[:, None], y, ("a", "b", "c")), shots, seed)
    assert split is not None
    assert torch.bincount(split.train_y).tolist() == [shots] * split.num_classes
    assert len(split.val_y) == 0
    original = torch.tensor([0, 2]) if split.num_classes == 2 else torch.arange(3)
    for x, labels in ((split.train_x, split.train_y), (split.test_x, split.test_y)):
        assert torch.equal(y[x[:, 0].long()], original[labels])
    return set(split.train_x[:, 0].tolist()), set(split.test_x[:, 0].tolist())


def test_splits_leave_small_classes_out_and_are_nested() -> None:
    train, test = split_three()
    assert train | test == set(np.r_[:30, 35:75].astype(float).tolist())
    assert not train & test
    assert len(split_three(shots=2)[0]) == 6
    assert split_three(1) == split_three(1) != split_three(2)
    assert split_three(1, 4)[0] < split_three(1, 9)[0]


def test_splits_have_20_to_2000_test_rows() -> None:
    split = split_shots(Dataset(torch.randn(5000, 2), torch.arange(5000) % 2, ("a", "b")), 5, 0)
    assert split is not None
    assert len(split.test_y) == 2000
    assert 900 < int(split.test_y.sum()) < 1100
    data = Dataset(torch.randn(26, 2), torch.arange(26) % 2, ("a", "b"))
    splits = [split_shots(data, shots, 0) for shots in (3, 4, 11)]  # 20 and 18 test rows; no class is large enough
    assert [split is None for split in splits] == [False, True, True]
