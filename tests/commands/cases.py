"""Helpers for tests of commands, which run them in this process and parse their output."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from protonet.__main__ import main

#: Options of the fastest fit to a table whose label column is `kind`.
FAST = ("--label", "kind")


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
        """Run a command with ``--json``; return the JSON that it writes, and its output."""
        path = self.folder / "new" / "figures.json"
        output = self(*arguments, "--json", path)
        return json.loads(path.read_text(encoding="utf-8")), output

    def read_rows(self, *arguments: object) -> list[dict[str, str]]:
        """Run a command that prints CSV; return a dict for each row."""
        return read_table(self(*arguments))

    def count_samples(self, model: Path) -> list[int]:
        """Return the number of samples of each class that ``info`` prints for a model."""
        return [item["samples"] for item in json.loads(self("info", model, "--json"))["classes"]]


def read_table(text: str) -> list[dict[str, str]]:
    """Parse CSV text to a dict for each row."""
    return list(csv.DictReader(io.StringIO(text)))


def read_lines(text: str) -> list[list[str]]:
    """Parse CSV text to lists of cells, beginning with the header."""
    return list(csv.reader(text.splitlines()))


def parse_accuracy(output: str) -> float:
    """Parse the cross-validation accuracy, in percent, from the output of fit."""
    result = re.search(r"this model +\| ([\d.]+)", output)
    assert result
    return float(result[1])


def do(*arguments: object) -> None:
    """Run a command without output, for fixtures of a module."""
    assert main([*map(str, arguments), "-q"]) == 0


def fit_model(table: str | Path, *options: object) -> Path:
    """Fit a model to a table with little effort, for fixtures of a module; it is saved beside the table."""
    model = Path(table).with_name("model.safetensors")
    do("fit", table, *FAST, *options, "-o", model)
    return model
