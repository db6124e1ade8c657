"""The command: what it writes and prints, and one line for every wrong argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.contest import draws, trial
from protonet.datasets import Split


def test_public_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["contest", "--config", "agentics", "--json", str(tmp_path / "new" / "out.json")]) == 0
    result = json.loads((tmp_path / "new" / "out.json").read_text())
    assert 0.3 < result["accuracy"] < 0.6
    assert result["parameters"] <= 500_000
    assert result["submission"] == "ZIP"
    line = capsys.readouterr().out
    assert line.startswith(f"accuracy {result['accuracy']:.4f}  score ")
    assert line.count("\n") == 1


def test_command_judges_the_single_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []
    result = {"accuracy": 1.0, "score": 100.0, "parameters": 0, "seconds": 1.0, "peak_memory_mib": 1.0}

    def judge_nothing(data: bytes, split: Split, *, python: str) -> dict[str, float]:
        given.append(data)
        return result

    monkeypatch.setattr(trial, "judge", judge_nothing)
    monkeypatch.setattr(trial, "BUILD", tmp_path)
    assert main(["contest", "--single-file"]) == 0
    assert main(["contest"]) == 0
    assert given[0].startswith(b'"""The submission in a single file')
    assert given[1].startswith(b"PK")
    found = {path.name: json.loads(path.read_text())["submission"] for path in tmp_path.iterdir()}
    assert found == {"contest.json": "ZIP", "contest_single_file.json": "single file"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("contest --bogus", "`arguments` must be as --help lists them; got unrecognized arguments: --bogus."),
        ("contest --conf official", "`arguments` must be as --help lists them; got unrecognized arguments"),
        ("contest --limits 5", "`arguments` must be as --help lists them; got unrecognized arguments: --limits 5."),
        ("contest --draws 2", "`arguments` must be as --help lists them; got unrecognized arguments: --draws 2."),
        ("contest --config other", "`--config` must be one of official, agentics; got 'other'."),
        ("contest --python /no/python", "`--python` must be an interpreter; got '/no/python'."),
        ("contest --json /dev/null/x", "`--json` must be a file that can be written; got /dev/null/x"),
        ("contest-draws --config official", "`arguments` must be as --help lists them; got unrecognized arguments"),
        ("contest-draws --draws x", "`--draws` must be a whole number >= 1; got 'x'."),
        ("contest-draws --draws 0", "`--draws` must be a whole number >= 1; got '0'."),
        ("contest-draws --draws", "`arguments` must be as --help lists them; got argument --draws: expected one"),
        ("contest-draws --shots 3", "`--shots` must be train+val samples per class; got '3'."),
        ("contest-draws --shots 0+3", "`--shots` must be train+val samples per class; got '0+3'."),
        ("contest-draws --limits 1e3", "`--limits` must be a whole number >= 0; got '1e3'."),
        ("contest-draws --family f", "`--family` must be of isotropic, "),
        ("contest-draws --methods f", "`--methods` must be of nearest_mean, "),
        ("contest-draws --classes 1", "`--classes` must be a whole number >= 2; got '1'."),
        ("contest-draws --state /", "`--state` must be a file that can be written; got / (Is a directory)."),
        (
            "contest-draws --state /dev/null --json /dev/null",
            "`--state` must be another file than --json; got /dev/null",
        ),
        ("contest-draws --json build/x --markdown build/../build/x", "`--markdown` must be another file than --json"),
    ],
)
def test_command_errors(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"analysis {arguments.split(maxsplit=1)[0]}: {message}")
    assert captured.err.count("\n") == 1


def test_missing_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draws, "find_spec", lambda name: None)
    assert main(["contest-draws", "--draws", "1", "--state", str(tmp_path / "s")]) == 2
    expected = "analysis contest-draws: `--methods` must have scikit-learn for lda and logistic; got none installed. "
    expected += 'Run pip install "protonet[analysis]", or leave out lda and logistic.\n'
    assert capsys.readouterr().err == expected


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["contest", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "New draws of the data: python -m analysis contest-draws." in text
    assert "Without --json, the results are in build/contest*.json." in text


def test_relative_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    commands: list[str] = []

    def run(command: list[str], **_: object) -> None:
        commands.extend(command)
        raise KeyboardInterrupt

    monkeypatch.setattr("analysis.contest.trial.subprocess.run", run)
    assert main(["contest", "--config", "agentics", "--python", "bin/python"]) == 130
    assert commands[0] == str(tmp_path / "bin" / "python")  # the link itself: it is what knows its environment
