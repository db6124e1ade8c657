"""What tests of commands share: a command run in this process, and what it printed, read again."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from protonet.__main__ import main

#: The least that a fit does, of a table whose classes are in the column `kind`.
FAST = ("--label", "kind", "--effort", "fast")


class Run:
    """Runs commands in this process; ``notes`` is the standard error of the last one."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder, self.notes = capsys, folder, ""

    def __call__(self, *arguments: object, code: int = 0, quiet: bool = True) -> str:
        """Run a command; return its output or, for exit code 2, its one-line error."""
        self.capsys.readouterr()
        result = main([*map(str, arguments), *["-q"] * quiet])
        out, self.notes = self.capsys.readouterr()
        assert result == code, self.notes
        if code == 2:
            assert re.fullmatch(r"protonet( \w+)?: .*\n", self.notes), self.notes
            assert self.notes[:-1].isprintable()
            assert not out
            return self.notes
        assert code or not (quiet and self.notes)
        return out

    def read_json(self, *arguments: object) -> tuple[dict[str, Any], str]:
        """Return the figures that a command writes, and what it printed."""
        path = self.folder / "new" / "figures.json"
        output = self(*arguments, "--json", path)
        return json.loads(path.read_text(encoding="utf-8")), output

    def read_rows(self, *arguments: object) -> list[dict[str, str]]:
        """Return the rows of CSV that a command printed, by the names of their columns."""
        return read_table(self(*arguments))

    def count_samples(self, model: Path) -> list[int]:
        """Count the samples of each class of a model, as info does."""
        return [item["samples"] for item in json.loads(self("info", model, "--json"))["classes"]]


def read_table(text: str) -> list[dict[str, str]]:
    """Return the rows of CSV, by the names of its columns."""
    return list(csv.DictReader(io.StringIO(text)))


def read_lines(text: str) -> list[list[str]]:
    """Return the rows of CSV, its header the first."""
    return list(csv.reader(text.splitlines()))


def parse_accuracy(output: str) -> float:
    """Parse the cross-validation accuracy, in percent, from the output of fit."""
    result = re.search(r"this model +\| ([\d.]+)", output)
    assert result
    return float(result[1])


def do(*arguments: object) -> None:
    """Run a command quietly, for a fixture of many tests."""
    assert main([*map(str, arguments), "-q"]) == 0


def fit_model(table: str | Path, *options: object) -> Path:
    """Fit a model to a table with little effort, for a fixture; it lies beside the table."""
    model = Path(table).with_name("model.safetensors")
    do("fit", table, *FAST, *options, "-o", model)
    return model
