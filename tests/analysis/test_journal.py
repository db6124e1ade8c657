"""The one loop over runs: what the journal keeps, and what is left out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from analysis.shared.journal import append_journal, hash_sources, read_journal, run_all


def test_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert list(read_journal(path)) == []
    append_journal(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"cut o')
    append_journal(path, {"b": [2]})
    with path.open("a") as file:
        file.write("5\n")
    assert list(read_journal(path)) == [{"a": 1}, {"b": [2]}]


def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, done = tmp_path / "journal", list[int]()

    def square(n: int) -> dict[str, tuple[int, int]]:
        done.append(n)
        assert torch.get_num_threads() == 1
        return {"square": (n, n**2)}

    assert run_all([2, 1], square, path, lambda n: "code") == {2: {"square": [2, 4]}, 1: {"square": [1, 1]}}
    assert "2/2" in capsys.readouterr().err
    assert list(run_all([1, 3, 2], square, path, lambda n: "code")) == [1, 3, 2]
    assert done == [2, 1, 3]
    run_all([1, 2, 3], square, path, lambda n: "other" if n == 2 else "code")
    assert done == [2, 1, 3, 2]


def test_processes_give_the_same(tmp_path: Path) -> None:
    runs = [-3, 2, -1]
    assert run_all(runs, abs, tmp_path / "journal", jobs=2) == dict(zip(runs, map(abs, runs), strict=True))
    assert len(list(read_journal(tmp_path / "journal"))) == 3


def test_hash_is_of_the_texts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("2")
    paths = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    assert hash_sources(*paths) == hash_sources(str(tmp_path)) != hash_sources(*paths[::-1])
