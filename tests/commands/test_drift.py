"""Columns that are far from what was fitted are named by every command that takes a model and a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protonet.__main__ import main
from protonet.files import load_model, save_model
from tests.strategies import write_columns

FAST = ("--label", "kind", "--effort", "fast", "-q")
LINE = "note: look at: x1 is far from what was fitted: most rows lie outside "


def make(seed: int, unit: float = 1.0) -> dict[str, list[object]]:
    rng = np.random.default_rng(seed)
    y = np.arange(60) % 3
    x = rng.normal(size=(60, 3)) + 4 * np.eye(3)[y]
    x[:, 1] *= unit
    return {f"x{number}": column.tolist() for number, column in enumerate(x.T)} | {"kind": [f"k{k}" for k in y]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drift")
    path = str(folder / "m.safetensors")
    assert main(["fit", write_columns(folder / "t.csv", make(0)), *FAST, "-o", path]) == 0
    return path


def test_another_unit_is_named(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far, near = write_columns(tmp_path / "far.csv", make(1, 1000.0)), write_columns(tmp_path / "near.csv", make(1))
    copy = str(tmp_path / "copy.safetensors")
    for command in (["predict", model], ["evaluate", model], ["update", model, "-o", copy], ["explain", model]):
        for table, lines in ((far, 1), (near, 0)):
            where = 2 if command[0] in {"update", "explain"} else len(command)
            assert main([*command[:where], table, *command[where:]]) == 0
            said = capsys.readouterr().err
            assert said.count(LINE) == said.count("look at: ") == lines
            assert main([*command[:where], table, *command[where:], "-q"]) == 0
            assert capsys.readouterr().err == ""


def test_a_file_without_what_was_seen_predicts_the_same_and_tells_nothing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far, old = write_columns(tmp_path / "far.csv", make(1, 1000.0)), str(tmp_path / "old.safetensors")
    found = load_model(model, held=True)
    assert len(found.metadata.pop("seen")["columns"]) == 3
    save_model(old, found)
    assert main(["predict", model, far]) == 0
    new = capsys.readouterr()
    assert LINE in new.err
    assert main(["predict", old, far]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (new.out, "")


def test_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = make(0)
    x = np.array([columns[name] for name in ("x0", "x1", "x2")], np.float32).T
    np.savez(tmp_path / "t.npz", x=x, y=np.array(columns["kind"]))
    np.save(tmp_path / "u.npy", x * np.array([1, 1, 1000], np.float32))
    path = str(tmp_path / "m.safetensors")
    assert main(["fit", str(tmp_path / "t.npz"), "--effort", "fast", "-q", "-o", path]) == 0
    assert main(["predict", path, str(tmp_path / "u.npy")]) == 0
    assert "note: look at: column 2 is far from what was fitted: " in capsys.readouterr().err
