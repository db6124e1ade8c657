"""info and --version: what a model file holds, said to people and to programs; and the script's name for it all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet import PrototypeNetwork, solve
from protonet.__main__ import main
from protonet.commands.report import MOST_CLASSES
from protonet.files import Model, load_model, save_model
from protonet.files.model import VERSION
from tests.strategies import blobs

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = {"rows": 12, "accuracy": 0.75, "interval": [0.5, 0.875], "log_loss": 0.5, "calibration_error": 0.125}


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    return blobs(0, classes=3, rows=4, dim=3)


@pytest.fixture(scope="module")
def network(data: tuple[Tensor, Tensor]) -> PrototypeNetwork:
    return solve([data], effort="fast")


def write_model(path: Path, network: PrototypeNetwork, facts: dict[str, Any], names: Any = ("a", "b", "c")) -> str:
    save_model(path, Model(network, tuple(names), ("w", "x", "\x1b[31mz"), facts, {}))
    return str(path)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["info", *arguments]) == 0
    return capsys.readouterr().out


def test_what_fit_says_is_told(tmp_path: Path, data: tuple[Tensor, Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    x, y = data
    groups = [f"owner {row % 5}" for row in range(len(y))]
    rows = zip(x.tolist(), y.tolist(), groups, strict=True)
    lines = [f"{a},{b},{c},class {label},{group},r{number},0" for number, ((a, b, c), label, group) in enumerate(rows)]
    table, path = tmp_path / "t.csv", tmp_path / "m.safetensors"
    table.write_text("\n".join(["a,b,c,kind,owner,name,note", *lines]))
    options = ["--label", "kind", "--group", "owner", "--id", "name", "--drop", "note", "--seed", "7", "-q"]
    assert (
        main(["fit", str(table), *options, "--effort", "fast", "--time-limit", "900", "--details", "-o", str(path)])
        == 0
    )
    summary = capsys.readouterr().out
    assert "the time was over" not in summary
    model, facts = load_model(path), json.loads(ask(capsys, str(path), "--json"))
    assert facts["classes"] == [{"name": f"class {number}", "samples": 4} for number in range(3)]
    assert (facts["samples"], facts["features"], facts["columns"]) == (12, 3, ["a", "b", "c"])
    assert facts["left_out"] == ["owner", "name", "note"]
    fitted = [facts[name] for name in ("label", "effort", "seed", "time_limit", "group", "groups", "id")]
    assert fitted == ["kind", "fast", 7, 900, "owner", len(set(groups)), "name"]
    assert facts["parameters"] == model.network.count_parameters()
    assert facts["buffer_elements"] == model.network.count_buffer_elements()
    assert (facts["bytes"], facts["version"]) == (path.stat().st_size, VERSION)
    assert facts["library"] == metadata.version("protonet")
    assert sum(facts["views"].values()) == pytest.approx(1)
    assert facts["held_out"]["confusion"] == model.metadata["held_out"]["confusion"]
    said = ask(capsys, str(path))
    assert said.startswith("m.safetensors: 3 classes, 12 samples, 3 features, 5 groups\n")
    for heading, value in (("label", "kind"), ("seed", "7"), ("groups by", "owner"), ("time limit, s", "900.0")):
        assert re.search(rf"^  {heading} +{value}$", said, re.MULTILINE)
    assert re.search(r"^  left out +owner, name, note$", said, re.MULTILINE)
    assert "| class 0 | 4       |" in said
    assert summary.split("\n\n")[1] in said  # the views
    assert f"held out: {100 * facts['held_out']['accuracy']:.2f} % of 12 rows right, 95 % interval [" in said


def test_names_are_printed_without_control_characters(
    tmp_path: Path, network: PrototypeNetwork, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"label": "\x1b]0;x\x07", "views": {"\x1b[1m": 1.0}, "left_out": ["\r"], "id": "\x08", "held_out": HELD_OUT}
    path = write_model(tmp_path / "m.safetensors", network, facts, ("a\x1b", "b\nc", "d"))
    said = ask(capsys, path)
    assert all(each.isprintable() for each in said.replace("\n", ""))
    assert "| b\\nc " in said
    assert "held out: 75.00 % of 12 rows right, 95 % interval [50.00, 87.50], log-loss 0.500, calibration " in said
    assert [each["name"] for each in json.loads(ask(capsys, path, "--json"))["classes"]] == ["a\x1b", "b\nc", "d"]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"views": [1], "held_out": 3, "left_out": "x", "groups": 1, "folds": {}},
        {"views": {"a": "b"}, "held_out": {**HELD_OUT, "rows": "x"}, "seed": [1], "effort": {}},
        {"held_out": {**HELD_OUT, "interval": [0.5]}},
    ],
)
def test_odd_metadata_are_no_error(
    facts: dict[str, Any], tmp_path: Path, network: PrototypeNetwork, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "m.safetensors", network, facts)
    said = ask(capsys, path)
    assert said.startswith("m.safetensors: 3 classes, 12 samples, 3 features\n")
    assert said.endswith("held out: no row\n")
    read = json.loads(ask(capsys, path, "--json"))
    assert [read[name] for name in ("views", "held_out", "left_out", "groups", "fold_models")] == [None] * 5


def test_many_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.eye(30)[:, :3] + torch.arange(30.0)[:, None], torch.arange(30)
    said = ask(capsys, write_model(tmp_path / "m.safetensors", solve([(x, y)], effort="fast"), {}, range(30)))
    assert len(re.findall(r"^\| \d", said, re.MULTILINE)) == MOST_CLASSES
    assert "the first 20 of 30 classes; --json has all\n" in said


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    for name in ("t.csv", "none.safetensors"):
        assert main(["info", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert re.fullmatch(
            r"protonet info: `model` must be a (file that exists|model, which comes before a table"
            r"|model file of version \d+); got .*\n",
            said.err,
        )
    assert main(["info"]) == 2
    assert capsys.readouterr().err.startswith("protonet info: `arguments` must be as --help lists them; got ")


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_version_and_the_script() -> None:
    entry = re.search(r'^\[project\.scripts\]\nprotonet = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert entry is not None
    module, name = entry.groups()
    assert callable(getattr(import_module(module), name))
    as_script = f"import sys, {module}; sys.argv[0] = 'protonet'; sys.exit({module}.{name}())"
    for way in (["-m", "protonet"], ["-c", as_script]):
        said = start(*way, "--version")
        assert (said.returncode, said.stdout, said.stderr) == (0, f"protonet {metadata.version('protonet')}\n", "")
