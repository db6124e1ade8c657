"""Studies: many evaluations from one TOML file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from protonet.episodes.evaluation.statistics import Rate
from protonet.episodes.evaluation.study import plan_runs, tabulate_runs
from tests.episodes.command_cases import Command

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


@pytest.fixture(autouse=True)
def _(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12)
    x = generator.normal(size=(10, 5))[y] + 0.9 * generator.normal(size=(120, 5))
    split = np.repeat(np.array(["novel", "validation"] * 5), 12)
    np.savez("x.npz", x=x.astype(np.float32), y=y, split=split)
    Path("study.toml").write_text(STUDY, encoding="utf-8")


def test_a_study_is_its_runs(command: Command) -> None:
    out, folder = command("study study.toml --seed 3"), Path("out")
    names = ["way=2 shot=1", "way=2 shot=2", "way=2-3 shot=1", "way=2-3 shot=2"]
    places = [name.replace(" ", "_") for name in names]
    assert {path.stem for path in folder.glob("*.json")} == set(places)
    alone = "--dataset x.npz --query 4 --episodes 30 --unequal --seed 3 --json a.json --way 2-3 --shot 2"
    command(alone, "--method protonet tim:steps=3 --tune ridge:penalty=0.1,1")
    assert Path("a.json").read_bytes() == (folder / f"{places[3]}.json").read_bytes()
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert out.endswith(table)
    header = [cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]]
    assert header == ["accuracy, % ±classes ±episodes", *names]
    rates = json.loads(Path("a.json").read_text(encoding="utf-8"))["methods"]["protonet"]
    row = next(line for line in table.splitlines() if line.startswith("| protonet ")).split("|")
    assert row[-2].strip() == " ±".join(f"{100 * rates[name]:.2f}" for name in RATE)
    assert (folder / "table.tex").read_text(encoding="utf-8").startswith(r"\begin{tabular}{lrrrr}")


def test_a_study_goes_on_and_notices_other_settings(command: Command) -> None:
    command("study study.toml")
    folder = Path("out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for suffix in ("json", "npz"):
        (folder / f"way=2_shot=2.{suffix}").unlink()
    command("study study.toml")
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")}.items() <= before.items()
    command("study study.toml --seed 9", code=2)
    assert "`--resume` must continue the same run; got seed 9" in command.error
    assert command.error.endswith(
        "Pass the same arguments, or another --state; for a study or a paper, another --output.\n"
    )
    command("study study.toml --seed 9 --output more")  # what the message says works
    assert {path.name for path in Path("more").iterdir()} == before.keys()
    table = (folder / "table.md").read_bytes()
    assert table == before["table.md"] != Path("more", "table.md").read_bytes()


@pytest.mark.parametrize("option", ["json", "csv", "plot", "latex", "markdown", "state"])
def test_no_run_writes_over_the_file_of_another(command: Command, option: str) -> None:
    said = "must be one of (tests?, |texts, )*dataset, "
    command.refuses(f"`an option of a study` {said}.*got '{option}'", f"study study.toml --{option} one.png")
    Path("study.toml").write_text(f'{STUDY}{option} = "one.png"\n', encoding="utf-8")
    command.refuses(f"`a key of study.toml` {said}", "study study.toml")
    assert not Path("one.png").exists()
    assert not Path("out").exists()


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
def test_errors(command: Command, content: str, message: str) -> None:
    Path("study.toml").write_text(content, encoding="utf-8")
    command("study study.toml", code=2)  # it may have told what it runs
    assert command.error.count("\n") == 1
    assert re.search(message, command.error)


def test_no_file_and_python_3_10_without_tomli(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command.refuses("must be a TOML file; got absent.toml", "study absent.toml")
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    said = "`tomli` must be installed. Run pip install tomli"
    command.refuses(said, "study study.toml")
