"""Columns that are far from the training rows are named by every command that takes a model and a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from protonet.files import load_model, save_model
from tests.commands.cases import FAST, Run, fit_model
from tests.strategies import write_columns

LINE = "note: warning: x1 is far from the training rows: most rows are outside "


def make(seed: int, unit: float = 1.0) -> dict[str, list[object]]:
    rng = np.random.default_rng(seed)
    y = np.arange(60) % 3
    x = rng.normal(size=(60, 3)) + 4 * np.eye(3)[y]
    x[:, 1] *= unit
    return {f"x{index}": column.tolist() for index, column in enumerate(x.T)} | {"kind": [f"k{k}" for k in y]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_model(write_columns(tmp_path_factory.mktemp("drift") / "t.csv", make(0)))


@pytest.mark.parametrize("command", ["predict", "evaluate", "update", "explain"])
def test_a_changed_unit_is_reported(command: str, model: Path, tmp_path: Path, run: Run) -> None:
    more = ["-o", tmp_path / "copy.safetensors"] if command == "update" else []
    for unit, lines in ((1000.0, 1), (1.0, 0)):
        table = write_columns(tmp_path / "new.csv", make(1, unit))
        run(command, model, table, *more, quiet=False)
        assert run.notes.count(LINE) == run.notes.count("warning: ") == lines
        run(command, model, table, *more)  # which says nothing


def test_a_model_without_drift_statistics_predicts_without_a_warning(model: Path, tmp_path: Path, run: Run) -> None:
    far, old = write_columns(tmp_path / "far.csv", make(1, 1000.0)), tmp_path / "old.safetensors"
    result = load_model(model, for_update=True)
    assert len(result.metadata.pop("seen")["columns"]) == 3
    save_model(old, result)
    assert run("predict", old, far, quiet=False) == run("predict", model, far)
    run("predict", old, far, quiet=False)
    assert run.notes == ""


def test_arrays(tmp_path: Path, run: Run) -> None:
    columns, path = make(0), tmp_path / "m.safetensors"
    x = np.array([columns[name] for name in ("x0", "x1", "x2")], np.float32).T
    np.savez(tmp_path / "t.npz", x=x, y=np.array(columns["kind"]))
    np.save(tmp_path / "u.npy", x * np.array([1, 1, 1000], np.float32))
    run("fit", tmp_path / "t.npz", *FAST[2:], "-o", path)
    run("predict", path, tmp_path / "u.npy", quiet=False)
    assert "note: warning: column 2 is far from the training rows: " in run.notes
