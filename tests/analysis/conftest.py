"""Short runs of the studies, each made once per session."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from analysis.__main__ import STUDIES, main
from analysis.incontext.real import Column


def make_tables() -> list[tuple[str, list[Column]]]:
    """Return tables as `analysis.incontext.real.load_tables` does, of numbers with gaps and of categories."""
    tables = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        level = rng.integers(4, size=90)
        numeric = rng.normal(size=(90, 3)) + level[:, None]
        numeric[rng.random(90) < 0.2, 0] = np.nan
        columns = [Column(values, is_category=False) for values in numeric.T]
        columns += [Column(values, is_category=True) for values in (level, (level + rng.integers(2, size=90)) % 4)]
        tables.append((f"table {seed}", columns))
    return tables


#: Arguments of short runs of studies; other studies take minutes, or need packages or files of others.
SMALL = {
    "curves": " --plot plot.svg",
    "contest-draws": "--draws 1 --family isotropic,class_noise --classes 4 --dim 16 --shots 2+1 --limits 0",
    "incontext": "--tables 8",
    "lines": "",
    "robustness": "--datasets iris --methods ours,cosine,knn --shots 1,2 --splits 1 --plot plot.png",
}
#: Values that replace constants of modules, so that a run is short.
LESS: dict[str, dict[str, object]] = {
    "incontext": {
        "analysis.incontext.real.load_tables": make_tables,
        "analysis.incontext.train.CELLS_PER_STEP": {"cpu": 300},
        "analysis.incontext.study.COMPARISON_SIZES": ((6, 3, 3),),
        "analysis.incontext.study.N_COMPARISON_TABLES": 4,
        "analysis.incontext.study.REAL_TASK_SIZES": ((6, 3),),
        "analysis.incontext.study.SYNTHETIC_TASK_SIZES": ((6, 3, 3),),
        "analysis.incontext.study.TABLES_PER_SYNTHETIC_SIZE": 8,
    }
}


class Made(NamedTuple):
    """The output of a study that ran in an empty folder."""

    folder: Path
    table: str
    rows: Any

    @property
    def command(self) -> list[str]:
        """The arguments that the report says it was made by."""
        text = (self.folder / "table.md").read_text(encoding="utf-8")
        assert text.startswith(self.table)
        line = text.removeprefix(self.table).strip()
        return line.removeprefix("Made by `python -m analysis ").removesuffix("`.").split()


def read_cells(text: str) -> list[list[str]]:
    """Return the cells of all lines of tables in a text, headers and rules included."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def load_study(name: str) -> ModuleType:
    """Import a study's module."""
    return import_module(f"analysis.{STUDIES[name][0]}")


def run_study(folder: Path, arguments: list[str], less: Mapping[str, object]) -> str:
    """Run a study in a folder with replaced constants; return its stdout."""
    output, wrong = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), contextlib.redirect_stderr(wrong):
        patch.chdir(folder)
        for name, value in less.items():
            patch.setattr(name, value)
        assert main(arguments) == 0, wrong.getvalue()
    return output.getvalue()


@pytest.fixture(scope="session")
def make_report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a function that runs a study of ``SMALL`` once per session, and returns its output."""

    @cache
    def make(name: str) -> Made:
        folder = tmp_path_factory.mktemp(name)
        (folder / "build").mkdir()
        outputs = ["--json", "rows.json", "--markdown", "table.md"]
        table = run_study(folder, [name, *SMALL[name].split(), *outputs], LESS.get(name, {}))
        return Made(folder, table, json.loads((folder / "rows.json").read_text(encoding="utf-8")))

    return make
