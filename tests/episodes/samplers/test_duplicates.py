"""Exactly equal rows are detected, counted, and reported with an evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet.datasets import Dataset
from protonet.episodes.__main__ import main
from protonet.episodes.samplers.fixed_split import describe_duplicates, group_equal_rows


@given(
    rows=st.lists(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 1.0]), min_size=3, max_size=3), max_size=12),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64]),
)
def test_equal_rows_have_the_same_group(rows: list[list[float]], dtype: torch.dtype) -> None:
    x = torch.tensor(rows).view(-1, 3)
    x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
    indices = group_equal_rows(x)
    assert torch.equal(indices[:, None] == indices, (x[:, None] == x).all(dim=2))


def test_lines_are_a_slow_count() -> None:
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


def test_an_evaluation_reports_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    y = np.repeat(np.arange(9), 20)
    x = np.random.default_rng(0).normal(size=(180, 4)).astype(np.float32)
    x[145], x[165], x[3] = x[144], x[146], x[150]  # of classes 7 and 7, 8 and 7, 0 and 7
    split = np.repeat(["base"] * 3 + ["validation"] * 2 + ["novel"] * 4, 20)
    np.savez(tmp_path / "x.npz", x=x, y=y, split=split)
    arguments = ["--way", "3", "--query", "4", "--episodes", "5", "--method", "protonet"]
    assert main(["--dataset", str(tmp_path / "x.npz"), *arguments]) == 0
    out = capsys.readouterr().out
    assert "Equal to another row of its class, so queries may be" in out
    assert "copies of support rows: 2 rows of 1 class (7).\n" in out
    assert "Exactly equal to a row of another evaluated class: 2 rows of 2 classes (7, 8).\n" in out
    assert "Exactly equal to a row that is not evaluated, of 1 class (0): 1 row of 1 class (7).\n" in out
    assert main(["--dataset", "digits", *arguments]) == 0
    assert "Exactly equal" not in capsys.readouterr().out
