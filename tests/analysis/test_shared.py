"""What studies share: the journal, the one loop over runs, tables and outputs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from analysis.shared.runner import (
    StudyParser,
    StudyReport,
    append_journal,
    hash_sources,
    read_journal,
    run_all,
    run_study,
)
from analysis.shared.tables import format_mean, mean_and_error, subtract_pairs


class Squares:
    """Squares of numbers."""

    @staticmethod
    def add_options(parser: StudyParser) -> None:
        parser.add_argument("--peers", action="store_true")
        parser.add_argument("--jobs")
        parser.add_int_option("--most", 3, "the largest")
        parser.add_names_option("--names", ["a", "b"])
        parser.add_state_options()

    @staticmethod
    def run(options: argparse.Namespace) -> StudyReport:
        return StudyReport([n**2 for n in range(options.most)], f"squares of {options.names}\n")


def test_the_reported_command_has_no_paths_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s").touch()
    outputs = ["--json", "a.json", "--markdown", "a.md", "--state", "s", "--jobs", "8"]
    words = ["--peers", "--most", "4", "--names", "b,a,b", "--fresh"]
    run_study("analysis squares", Squares, [*words, *outputs])  # type: ignore[arg-type]
    assert json.loads(Path("a.json").read_text()) == [0, 1, 4, 9]
    printed = capsys.readouterr().out
    assert printed == "squares of ['b', 'a']\n"
    assert Path("a.md").read_text() == f"{printed}\nMade by `python -m analysis squares {' '.join(words)}`.\n"
    assert not Path("s").exists()


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


def test_finished_runs_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, done = tmp_path / "journal", list[int]()

    def square(n: int) -> dict[str, tuple[int, int]]:
        done.append(n)
        assert torch.get_num_threads() == 1
        if n == 4:
            raise KeyboardInterrupt
        return {"square": (n, n**2)}

    assert run_all([2, 1], square, path, lambda n: "code") == {2: {"square": [2, 4]}, 1: {"square": [1, 1]}}
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted; 3 of 5 runs are kept in .*The same command continues"):
        run_all([1, 3, 4, 5, 2], square, path, lambda n: "code")
    assert done == [2, 1, 3, 4]
    run_all([1, 2, 3], square, path, lambda n: "other" if n == 2 else "code")
    assert done == [2, 1, 3, 4, 2]


def test_processes_give_the_same(tmp_path: Path) -> None:
    runs = [-3, 2, -1]
    assert run_all(runs, abs, tmp_path / "journal", jobs=2) == dict(zip(runs, map(abs, runs), strict=True))
    assert len(list(read_journal(tmp_path / "journal"))) == 3


def test_a_hash_is_of_the_texts_and_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("2")
    paths = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    before = hash_sources(*paths)
    assert before == hash_sources(str(tmp_path)) != hash_sources(*paths[::-1])
    monkeypatch.setattr("analysis.shared.runner.installed_version", lambda package: "another")
    hash_sources.cache_clear()
    assert hash_sources(*paths) != before
    hash_sources.cache_clear()


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_mean_and_error_are_numpys(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)


def test_texts() -> None:
    assert math.isnan(mean_and_error([2.0])[1])
    assert format_mean([]) == ""
    assert format_mean([1.0]) == "1.00"
    assert format_mean([1.0, 2.0]) == "1.50 ±0.50"
    assert format_mean([1.0, 2.0], digits=1, sign=True) == "+1.5 ±0.5"
    assert format_mean([-0.001]) == "0.00"
    assert subtract_pairs([1.0, 2.0], [0.5, 3.0]) == [0.5, -1.0]
    assert subtract_pairs([], [1.0]) == subtract_pairs([1.0], []) == []
