"""A column that names the sources of rows, and rows that look as if they had one, are told of, with the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from protonet.__main__ import main
from tests.strategies import write_columns

FAST = ("--label", "kind", "--effort", "fast", "-q")


def right(said: str) -> float:
    found = re.search(r"this model +\| ([\d.]+)", said)
    assert found
    return float(found[1])


@pytest.mark.parametrize("noise", [0.05, 1.0])
@pytest.mark.parametrize("form", ["S{}", "{}"])
def test_a_column_of_subjects(form: str, noise: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(30), 4)
    x = rng.normal(size=(30, 4))[subject] * (noise < 1) + noise * rng.normal(size=(120, 4))
    kind = np.array(["a", "b"])[rng.integers(2, size=30)][subject]
    columns = {f"x{number}": column.tolist() for number, column in enumerate(x.T)}
    columns |= {"subject": [form.format(number) for number in subject], "kind": kind.tolist()}
    table, told = write_columns(tmp_path / "t.csv", columns), tmp_path / "t.json"
    assert main(["fit", table, *FAST, "--json", str(told)]) == 0
    said = capsys.readouterr().out
    line = "look at: 30 values of subject come again, nearly always with the same class; if rows of one value have one "
    line += "source, --group subject holds them out together"
    assert [each for each in said.splitlines() if "look at" in each] == [line]  # one cause, one line
    assert line in json.loads(told.read_text())["data"]["notes"]
    assert main(["fit", table, *FAST, "--group", "subject"]) == 0
    held = capsys.readouterr().out
    assert "look at" not in held
    assert right(held) < 75


def test_rows_with_twins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    of = np.repeat(np.arange(30), 4)
    x, kind = rng.normal(size=(30, 10))[of] + 0.2 * rng.normal(size=(120, 10)), np.arange(30)[of] % 3
    columns = {f"x{number}": column.tolist() for number, column in enumerate(x.T)}
    columns |= {"source": [f"file {number} here" for number in of], "kind": [f"k{number}" for number in kind]}
    table = write_columns(tmp_path / "t.csv", columns)
    assert main(["fit", table, *FAST, "--drop", "source"]) == 0
    said = capsys.readouterr().out
    assert right(said) > 90
    (line,) = [line for line in said.splitlines() if "look at" in line]
    assert line.endswith("; if such have one source, name the column that tells it with --group NAME")
    assert main(["fit", table, *FAST, "--group", "source"]) == 0
    said = capsys.readouterr().out
    assert right(said) < 60
    assert "look at" not in said


def test_a_date_and_cities_that_tell_the_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    day, city = (
        rng.integers(40, size=200),
        np.array(["Rome", "Oslo", "Bern"] + [f"{chr(65 + k)}wick" for k in range(9)]),
    )
    for name, values, of in (("date", np.datetime64("2024-01-01") + day, day), ("city", city[day % 12], day % 12)):
        kind = np.array(["a", "b"])[rng.integers(2, size=40)][of]
        columns = {name: values.astype(str).tolist(), "x": rng.normal(size=200).tolist(), "kind": kind.tolist()}
        assert main(["fit", write_columns(tmp_path / "t.csv", columns), *FAST]) == 0
        assert "look at" not in capsys.readouterr().out


def test_running_numbers_of_equally_many_rows_are_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    number = rng.permutation(np.arange(120) % 24)
    columns = {"v": number.tolist(), "x": rng.normal(size=120).tolist(), "kind": [f"k{each % 3}" for each in number]}
    assert main(["fit", write_columns(tmp_path / "t.csv", columns), *FAST]) == 0
    line = "look at: values of v come again, nearly always with the same class; do rows of one v have one source? "
    assert line + "If so, --group v" in capsys.readouterr().out.splitlines()
