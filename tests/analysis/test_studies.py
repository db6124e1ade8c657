"""What every study keeps to, and what studies share: options, reports, the journal, the loop over runs, tables."""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from analysis.__main__ import STUDIES, main
from analysis.shared import runner
from analysis.shared.tables import format_mean, mean_and_error, paired_differences
from protonet.ui.options import get_option_name, list_options, option
from solution.pack import ROOT
from tests.analysis import conftest
from tests.analysis.conftest import LESS, SMALL, Made, load_study


def test_studies_are_listed_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from analysis.__main__ import main; sys.exit(main([]))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    for name, (_, text) in STUDIES.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", ended.stdout, re.MULTILINE)


def test_an_unknown_study_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contests"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("analysis: `study` must be one of contest, ")
    assert captured.err.endswith("got 'contests'. Did you mean contest?\n")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_describes_itself_and_wrong_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    study = load_study(name)
    text = inspect.getdoc(study)
    assert text
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    output = capsys.readouterr().out
    assert output.startswith(f"usage: analysis {name} ")
    assert " ".join(text.split()) in " ".join(output.split())
    needed = ["x"] * (name in {"pretrained", "sealed"})
    needed += ["--optimizer", "x"] * (name in {"optimizer-bench", "optimizer-time"})
    checked = [field for field in list_options(study.Options) if field.metadata.get("parse")]
    for word in ("--unknown", *map(get_option_name, checked)):
        assert main([name, *needed, word, "?"]) == 2
        captured = capsys.readouterr()
        message = "unknown option: --unknown" if word == "--unknown" else f"`{word}` must "
        assert captured.err.startswith(f"analysis {name}: {message}")
        assert captured.err.count("\n") == 1
        assert not captured.out


#: Arguments of studies that do not fit, and what the one line on stderr says behind the study's name.
ERRORS = {
    "pretrained .": "`folder` must hold tables",
    "optimizer-bench": "missing argument: --optimizer ",
    "optimizer-bench --optimizer x --roles tuning --workloads gpt": "`--roles` must come without --workloads",
    "optimizer-time --optimizer OPTIMIZER --case large": "`--case` must be",
    "robustness --plot x.png --methods svm": "`--plot` must come with ours and a baseline",
    "robustness --datasets iris --shots 60": "`--datasets` must have rows enough for a split",
    "robustness --json /proc/x.json": "`--json` must be a file that can be written; got /proc/x.json",
    "robustness --json build/x --markdown build/../build/x": "`--markdown` must be another file than --json",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_wrong_arguments_are_one_line(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    assert main(arguments.replace("OPTIMIZER", str(ROOT / "protonet/optimizer/optimizer.py")).split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"analysis {arguments.split(maxsplit=1)[0]}: {ERRORS[arguments]}")
    assert not captured.out


@pytest.mark.parametrize("name", SMALL)
def test_the_command_of_a_report_makes_it_again_and_nothing_twice(
    name: str, make_report: Callable[[str], Made]
) -> None:
    report = make_report(name)
    assert report.table.count("\n|") >= 2
    assert report.rows
    assert report.command[0] == name
    assert all(word in report.command for word in SMALL[name].partition(" --plot")[0].split())
    journals = list((report.folder / "build").glob("*.jsonl"))
    contents = [path.read_bytes() for path in journals]
    if contents:
        assert conftest.run_study(report.folder, report.command, LESS.get(name, {})) == report.table
        assert [path.read_bytes() for path in journals] == contents


class Squares:
    """Squares of numbers."""

    @dataclass(frozen=True, kw_only=True)
    class Options(runner.JournalOptions):
        peers: bool = option("others", False)
        jobs: int = runner.int_option("processes", 1)
        most: int = runner.int_option("the largest", 3)
        names: Sequence[str] | None = runner.names_option(["a", "b"])

    @staticmethod
    def run(options: Options) -> runner.StudyReport:
        return runner.StudyReport([n**2 for n in range(options.most)], f"squares of {options.names}\n")


def test_the_reported_command_has_no_paths_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s").touch()
    outputs = ["--json", "a.json", "--markdown", "a.md", "--state", "s", "--jobs", "8"]
    words = ["--fresh", "--peers", "--most", "4", "--names", "b,a,b"]
    runner.run_study("analysis squares", Squares, [*words, *outputs])  # type: ignore[arg-type]
    assert json.loads(Path("a.json").read_text()) == [0, 1, 4, 9]
    printed = capsys.readouterr().out
    assert printed == "squares of ['b', 'a']\n"
    assert Path("a.md").read_text() == f"{printed}\nMade by `python -m analysis squares {' '.join(words)}`.\n"
    assert not Path("s").exists()


def test_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert list(runner.read_journal(path)) == []
    runner.append_journal(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"cut o')
    runner.append_journal(path, {"b": [2]})
    with path.open("a") as file:
        file.write("5\n")
    assert list(runner.read_journal(path)) == [{"a": 1}, {"b": [2]}]


def test_finished_runs_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, done = tmp_path / "journal", list[int]()

    def square(n: int) -> dict[str, tuple[int, int]]:
        done.append(n)
        assert torch.get_num_threads() == 1
        if n == 4:
            raise KeyboardInterrupt
        return {"square": (n, n**2)}

    assert runner.run_all([2, 1], square, path, lambda n: "code") == {2: {"square": [2, 4]}, 1: {"square": [1, 1]}}
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted; 3 of 5 runs are kept in .*The same command continues"):
        runner.run_all([1, 3, 4, 5, 2], square, path, lambda n: "code")
    assert done == [2, 1, 3, 4]
    runner.run_all([1, 2, 3], square, path, lambda n: "other" if n == 2 else "code")
    assert done == [2, 1, 3, 4, 2]


def test_processes_give_the_same(tmp_path: Path) -> None:
    runs = [-3, 2, -1]
    assert runner.run_all(runs, abs, tmp_path / "journal", jobs=2) == dict(zip(runs, map(abs, runs), strict=True))
    assert len(list(runner.read_journal(tmp_path / "journal"))) == 3


def test_a_hash_is_of_the_texts_and_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("2")
    paths = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    before = runner.hash_sources(*paths)
    assert before == runner.hash_sources(str(tmp_path)) != runner.hash_sources(*paths[::-1])
    monkeypatch.setattr("analysis.shared.runner.installed_version", lambda package: "another")
    runner.hash_sources.cache_clear()
    assert runner.hash_sources(*paths) != before
    runner.hash_sources.cache_clear()


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
    assert paired_differences([1.0, 2.0], [0.5, 3.0]) == [0.5, -1.0]
    assert paired_differences([], [1.0]) == paired_differences([1.0], []) == []
