"""The studies' one command: its list, the old names, options, and what is written."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.__main__ import STUDIES, main
from analysis.shared import runner
from analysis.shared.runner import Report, StudyParser, call_alone, run_study
from solution.pack import ROOT


class Squares:
    """Squares of numbers."""

    @staticmethod
    def add_options(parser: StudyParser) -> None:
        parser.add_whole("--most", 3, "the largest")
        parser.add_names("--names", ["a", "b"])
        parser.add_state()

    @staticmethod
    def run(options: argparse.Namespace) -> Report:
        return Report([n**2 for n in range(options.most)], f"squares of {options.names}\n")


def run(*arguments: str) -> None:
    run_study("analysis squares", Squares, arguments)  # type: ignore[arg-type]


def test_studies_are_listed_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from analysis.__main__ import main; sys.exit(main([]))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    for name, (_, text) in STUDIES.items():
        assert f"  {name} " in ended.stdout
        assert text in ended.stdout


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: analysis {name} " in capsys.readouterr().out


def test_an_unknown_study_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contests"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("analysis: `study` must be one of contest, ")
    assert captured.err.endswith("got 'contests'. Did you mean contest?\n")


def test_results_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md"), "--state", str(tmp_path / "s")]
    (tmp_path / "s").touch()
    run("--most", "4", "--names", "b,a,b", "--fresh", *outputs)
    assert json.loads((tmp_path / "a.json").read_text()) == [0, 1, 4, 9]
    printed = capsys.readouterr().out
    assert printed == "squares of ['b', 'a']\n"
    made = "python -m analysis squares --most 4 --names b,a,b --fresh"
    assert (tmp_path / "a.md").read_text() == f"{printed}\nMade by `{made}`.\n"
    assert not (tmp_path / "s").exists()


def test_arguments_without_a_name_are_told_too() -> None:
    parser = StudyParser("analysis sums", "")
    parser.add_argument("files", nargs="+")
    parser.add_whole("--most", 3, "the largest")
    assert parser.parse_study(["a", "b", "--most", "4"]).made == "python -m analysis sums a b --most 4"


def test_without_names_all_are_meant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "BUILD", tmp_path)
    run()
    assert capsys.readouterr().out == "squares of None\n"


def test_a_call_alone_is_another_process() -> None:
    assert call_alone(divmod, 17, 5) == [3, 2]
    with pytest.raises(ChildProcessError, match=r"^exit code 1, ZeroDivisionError: "):
        call_alone(divmod, 1, 0)
