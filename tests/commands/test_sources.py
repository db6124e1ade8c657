"""A column that names the sources of rows, and rows that look as if they had one, are told of, with the remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands.cases import FAST, Run, find_right
from tests.strategies import write_columns


def name_columns(x: np.ndarray) -> dict[str, list[object]]:
    return {f"x{number}": column.tolist() for number, column in enumerate(x.T)}


def list_notes(said: str) -> list[str]:
    return [line for line in said.splitlines() if "look at" in line]


@pytest.mark.parametrize("noise", [0.05, 1.0])
@pytest.mark.parametrize("form", ["S{}", "{}"])
def test_a_column_of_subjects(form: str, noise: float, tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(30), 4)
    x = rng.normal(size=(30, 4))[subject] * (noise < 1) + noise * rng.normal(size=(120, 4))
    kind = np.array(["a", "b"])[rng.integers(2, size=30)][subject]
    columns = name_columns(x) | {"subject": [form.format(number) for number in subject], "kind": kind.tolist()}
    table = write_columns(tmp_path / "t.csv", columns)
    told, said = run.read_json("fit", table, *FAST)
    line = "look at: 30 values of subject come again, nearly always with the same class; if rows of one value have one "
    line += "source, --group subject holds them out together"
    assert list_notes(said) == [line]  # one cause, one line
    assert line in told["data"]["notes"]
    held = run("fit", table, *FAST, "--group", "subject")
    assert not list_notes(held)
    assert find_right(held) < 75


def test_rows_with_twins(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    of = np.repeat(np.arange(30), 4)
    x, kind = rng.normal(size=(30, 10))[of] + 0.2 * rng.normal(size=(120, 10)), np.arange(30)[of] % 3
    columns = name_columns(x) | {"source": [f"file {number} here" for number in of]}
    table = write_columns(tmp_path / "t.csv", columns | {"kind": [f"k{number}" for number in kind]})
    said = run("fit", table, *FAST, "--drop", "source")
    assert find_right(said) > 90
    (line,) = list_notes(said)
    assert line.endswith("; if such have one source, name the column that tells it with --group NAME")
    said = run("fit", table, *FAST, "--group", "source")
    assert find_right(said) < 60
    assert not list_notes(said)


def test_a_date_and_cities_that_tell_the_class(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    day = rng.integers(40, size=200)
    cities = np.array(["Rome", "Oslo", "Bern"] + [f"{chr(65 + k)}wick" for k in range(9)])
    for name, values, of in (("date", np.datetime64("2024-01-01") + day, day), ("city", cities[day % 12], day % 12)):
        kind = np.array(["a", "b"])[rng.integers(2, size=40)][of]
        columns = {name: values.astype(str).tolist(), "x": rng.normal(size=200).tolist(), "kind": kind.tolist()}
        assert not list_notes(run("fit", write_columns(tmp_path / "t.csv", columns), *FAST))


def test_running_numbers_of_equally_many_rows_are_asked_about(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    number = rng.permutation(np.arange(120) % 24)
    columns = {"v": number.tolist(), "x": rng.normal(size=120).tolist(), "kind": [f"k{each % 3}" for each in number]}
    line = "look at: values of v come again, nearly always with the same class; do rows of one v have one source? "
    assert line + "If so, --group v" in list_notes(run("fit", write_columns(tmp_path / "t.csv", columns), *FAST))
