"""Commands that take a model and a table warn of drifted columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.commands.cases import Run, fit_model
from tests.strategies import write_columns

LINE = "warning: x1 is far from the training rows: most rows are outside "


def make(seed: int, unit: float = 1.0) -> dict[str, list[object]]:
    rng = np.random.default_rng(seed)
    y = np.arange(60) % 3
    x = rng.normal(size=(60, 3)) + 4 * np.eye(3)[y]
    x[:, 1] *= unit
    return {f"x{index}": column.tolist() for index, column in enumerate(x.T)} | {"kind": [f"k{k}" for k in y]}


def test_a_changed_unit_is_reported(tmp_path: Path, run: Run) -> None:
    model = fit_model(write_columns(tmp_path / "t.csv", make(0)))
    for unit, lines in ((1000.0, 1), (1.0, 0)):
        table = write_columns(tmp_path / "new.csv", make(1, unit))
        for command in ("predict", "evaluate", "update", "explain"):
            more = ["-o", tmp_path / "copy.safetensors"] if command == "update" else []
            run(command, model, table, *more, quiet=False)
            assert run.notes.count(LINE) == run.notes.count("warning: ") == lines, command
            run(command, model, table, *more)  # quiet: no notes
