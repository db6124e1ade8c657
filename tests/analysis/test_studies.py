"""What every study keeps to: it is listed, has options, prints and writes a report, and does nothing twice."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.__main__ import STUDIES, main
from analysis.shared.runner import StudyParser
from solution.pack import ROOT
from tests.analysis.conftest import LESS, SMALL, Made, load_study, run_study


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
    parser = StudyParser(f"analysis {name}", text)
    study.add_options(parser)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    output = capsys.readouterr().out
    assert output.startswith(f"usage: analysis {name} ")
    assert " ".join(text.split()) in " ".join(output.split())
    placed = {"pretrained", "episode-photographs"}
    needed = ["x"] if name in placed else ["--optimizer", "x"] if name == "optimizer-time" else []
    for option in ("--unknown", *parser._checks):
        assert main([name, *needed, option, "?"]) == 2
        captured = capsys.readouterr()
        message = "unknown option: --unknown" if option == "--unknown" else f"`{option}` must "
        assert captured.err.startswith(f"analysis {name}: {message}")
        assert captured.err.count("\n") == 1
        assert not captured.out


#: Arguments of studies that do not fit, and what the one line on stderr says behind the study's name.
ERRORS = {
    "pretrained .": "`folder` must hold tables",
    "optimizer-bench": "`--optimizer` must be a Python file; got none.",
    "optimizer-bench --compare --roles tuning --workloads gpt": "`--roles` must come without --workloads; got tuning.",
    "optimizer-bench --compare sgd": "`--compare` must be of adamw, ",
    "optimizer-time --optimizer OPTIMIZER --case large": "`--case` must be",
    "robustness --plot x.png --methods svm": "`--plot` must come with ours and a baseline",
    "robustness --datasets iris --shots 60": "`--datasets` must have rows enough for a split",
    "robustness --json /proc/x.json": "`--json` must be a file that can be written; got /proc/x.json",
    "robustness --json build/x --markdown build/../build/x": "`--markdown` must be another file than --json",
    "semi-supervised --datasets iris --shots 49": "`--datasets` must have rows enough for a split",
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
def test_the_command_of_a_report_makes_it_again_and_does_nothing_twice(
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
        assert run_study(report.folder, report.command, LESS.get(name, {})) == report.table
        assert [path.read_bytes() for path in journals] == contents
