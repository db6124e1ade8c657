"""Studies: many evaluations from one TOML file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from protonet.episodes.__main__ import main
from protonet.episodes.evaluation.statistics import Rate
from protonet.episodes.evaluation.study import plan_runs, tabulate_runs

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

RATE = ("accuracy", "half_width_classes", "half_width_episodes")
STUDY = """
dataset = "x.npz"
method = ["protonet", "tim:steps=3"]
tune = ["ridge:penalty=0.1,1"]
side = "novel"
query = 4
episodes = 30
unequal = true
allow-small = false
way = [2, "2-3"]
shot = [1, 2]
output = "out"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12)
    x = generator.normal(size=(10, 5))[y] + 0.9 * generator.normal(size=(120, 5))
    split = np.repeat(np.array(["novel", "validation"] * 5), 12)
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32), y=y, split=split)
    (tmp_path / "study.toml").write_text(STUDY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_study_is_its_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "study.toml", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    names = ["way=2 shot=1", "way=2 shot=2", "way=2-3 shot=1", "way=2-3 shot=2"]
    places = [name.replace(" ", "_") for name in names]
    assert {path.stem for path in (folder / "out").glob("*.json")} == set(places)
    alone = ["--dataset", "x.npz", "--query", "4", "--episodes", "30", "--unequal", "--seed", "3", "--json", "a.json"]
    alone += ["--way", "2-3", "--shot", "2", "--method", "protonet", "tim:steps=3", "--tune", "ridge:penalty=0.1,1"]
    assert main(alone) == 0
    assert (folder / "a.json").read_bytes() == (folder / "out" / f"{places[3]}.json").read_bytes()
    table = (folder / "out" / "table.md").read_text(encoding="utf-8")
    assert out.endswith(table)
    header = [cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]]
    assert header == ["accuracy, % ±classes ±episodes", *names]
    own = json.loads((folder / "a.json").read_text(encoding="utf-8"))["methods"]["protonet"]
    row = next(line for line in table.splitlines() if line.startswith("| protonet ")).split("|")
    assert row[-2].strip() == " ±".join(f"{100 * own[name]:.2f}" for name in RATE)
    assert (folder / "out" / "table.tex").read_text(encoding="utf-8").startswith(r"\begin{tabular}{lrrrr}")


def test_a_study_goes_on_and_notices_other_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "study.toml"]) == 0
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    (folder / "out" / "way=2_shot=2.json").unlink()
    (folder / "out" / "way=2_shot=2.npz").unlink()
    assert main(["study", "study.toml"]) == 0
    assert {path.name: path.read_bytes() for path in (folder / "out").glob("*.json")}.items() <= before.items()
    capsys.readouterr()
    assert main(["study", "study.toml", "--seed", "9"]) == 2
    error = capsys.readouterr().err
    assert "`--resume` must continue the same run; got seed 9" in error
    assert error.endswith("Pass the same arguments, or another --state; for a study, another --output.\n")
    assert main(["study", "study.toml", "--seed", "9", "--output", "more"]) == 0  # what the message says works
    assert {path.name for path in (folder / "more").iterdir()} == before.keys()
    assert (folder / "out" / "table.md").read_bytes() == before["table.md"] != (folder / "more/table.md").read_bytes()


@pytest.mark.parametrize("option", ["json", "csv", "plot", "latex", "markdown", "state"])
def test_no_run_writes_over_the_file_of_another(folder: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["study", "study.toml", f"--{option}", "one.png"]) == 2
    error = capsys.readouterr().err
    assert re.search("`an option of a study` must be one of (tests?, |texts, )*dataset, ", error)
    assert f"got '{option}'" in error
    (folder / "study.toml").write_text(f'{STUDY}{option} = "one.png"\n', encoding="utf-8")
    assert main(["study", "study.toml"]) == 2
    assert re.search("`a key of study.toml` must be one of (tests?, |texts, )*dataset, ", capsys.readouterr().err)
    assert not (folder / "one.png").exists()
    assert not (folder / "out").exists()


def test_arguments() -> None:
    settings = {"way": [5, "5-20"], "method": ["a", "b"], "unequal": True, "allow-small": False, "imbalance": 0.5}
    runs = plan_runs(settings, Path("out"))
    assert [run.name for run in runs] == ["way=5", "way=5-20"]
    assert runs[1].arguments == [
        *("--json", str(Path("out/way=5-20.json")), "--state", str(Path("out/way=5-20.npz")), "--resume"),
        *("--way=5-20", "--method", "a", "b", "--unequal", "--imbalance=0.5"),
    ]
    assert [run.path for run in plan_runs({"way": 5}, Path("out"))] == [Path("out/study.json")]


def test_a_method_that_some_runs_lack() -> None:
    rate = Rate.read(dict(zip(RATE, (0.5, None, 0.01), strict=True)))
    header, rows = tabulate_runs({"x": {"a": rate}, "y": {"a": rate, "b": rate}})
    assert header == ["accuracy, % ±episodes", "x", "y"]
    assert rows == [["a", "50.00 ±1.00", "50.00 ±1.00"], ["b", "", "50.00 ±1.00"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x", "`STUDY.toml` must be a TOML file; got study.toml"),
        ('output = "out"\nwayy = 5', "`a key of study.toml` must be one of way, .*Did you mean way"),
        ('output = "out"\njson = "a.json"', "`a key of study.toml` must be one of"),
        ("way = 5", 'must say output = "FOLDER"; got none in study.toml'),
        ('output = "out"\nway = []', "must have values that are texts, numbers or true; got way = "),
        ('output = "out"\n[way]\na = 5', "must have values that are texts"),
        ('output = "out"\ndataset = ["a/b", "a:b"]', "must sweep values that differ in letters and digits"),
        ('output = "out"\nway = "x"', "`--way` must be a whole number >= 2; got 'x'"),
        ('output = "/proc/none"\nway = 5', "`output` must be a folder that can be written"),
    ],
)
def test_errors(folder: Path, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    (folder / "study.toml").write_text(content, encoding="utf-8")
    assert main(["study", "study.toml"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del folder
    assert main(["study", "absent.toml"]) == 2
    assert "must be a TOML file; got absent.toml" in capsys.readouterr().err


def test_python_3_10_without_tomli(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del folder
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    assert main(["study", "study.toml"]) == 2
    assert "`tomli` must be installed; got none of that name. Run pip install tomli" in capsys.readouterr().err
