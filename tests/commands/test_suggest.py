"""The command ``suggest``: rows to label next, from a model and from nothing, and what can go wrong."""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet.__main__ import main
from protonet.commands.data import read_cells
from protonet.estimator import ProtoNetClassifier
from protonet.files import load_model
from protonet.fit.active import Suggestion, suggest_rows
from tests.strategies import blobs, write_columns

NAMES = ("ant", "bee", "cat")


def read_printed(text: str) -> list[Suggestion]:
    """Return the rows and reasons that a table on the screen has."""
    return [Suggestion(int(row), reason) for row, reason in re.findall(r"^\| (\d+) +\| (.*?) +\|$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and a table of rows without classes."""
    folder = tmp_path_factory.mktemp("suggest")
    x, y = blobs(0, classes=3, rows=14, dim=4, noise=1.0)
    columns = {f"c{number}": [f"{value:.3f}" for value in x[:, number].tolist()] for number in range(4)}
    train = {name: cells[:12] for name, cells in columns.items()}
    table = write_columns(folder / "train.csv", train | {"kind": [NAMES[c] for c in y[:12].tolist()]})
    assert main(["fit", table, "--label", "kind", "--effort", "fast", "-o", str(folder / "model.safetensors")]) == 0
    rest = {name: cells[12:] for name, cells in columns.items()}
    write_columns(folder / "rest.csv", {"note": [f"no. {number}" for number in range(30)]} | rest)
    return folder


def test_the_rows_are_the_librarys_and_update_takes_them_once_labelled(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, asked = folder / "model.safetensors", tmp_path / "ask.csv"
    assert main(["suggest", str(model), str(folder / "rest.csv"), "-n", "4", "-o", str(asked)]) == 0
    said = capsys.readouterr()
    header, *rows = csv.reader(asked.read_text(encoding="utf-8").splitlines())
    assert header == ["note", "c0", "c1", "c2", "c3", "kind"]
    with (folder / "rest.csv").open(encoding="utf-8") as file:
        rest = list(csv.reader(file))[1:]
    x = torch.tensor([[float(cell) for cell in row[1:]] for row in rest])
    expected = suggest_rows(load_model(model).network, x, 4, NAMES)
    assert rows == [[*rest[each.row], ""] for each in expected]
    assert read_printed(said.out) == expected
    assert "note: 1 column of the table not used: note" in said.err
    asked.write_text(asked.read_text(encoding="utf-8").replace(",\n", ",bee\n"), encoding="utf-8")
    assert main(["update", str(model), str(asked), "-o", str(tmp_path / "new.safetensors")]) == 0
    assert "4 samples more, 0 new classes" in capsys.readouterr().out


def test_without_a_model_the_first_rows_are_typical_and_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    colours = ["red"] * 12 + ["green"] * 8 + ["blue"] * 4
    sizes = [["1", "2", "3"][colour == "green"] if number % 5 else "" for number, colour in enumerate(colours)]
    table = write_columns(tmp_path / "rest.csv", {"colour": colours, "size": sizes, "kind": [""] * 24})
    assert main(["suggest", table, "-n", "3", "--label", "kind", "-o", str(tmp_path / "ask.csv")]) == 0
    lines = list(csv.reader((tmp_path / "ask.csv").read_text(encoding="utf-8").splitlines()))
    assert lines[0] == ["colour", "size", "kind"]
    assert {line[0] for line in lines[1:]} == set(colours)
    assert "that nobody labelled" in capsys.readouterr().out


def test_what_is_filled_in_has_no_column_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = blobs(0, classes=2, rows=10, dim=2)
    np.savez(tmp_path / "train.npz", x=x[:12].numpy(), y=y[:12].numpy())
    model, asked = str(tmp_path / "model.safetensors"), tmp_path / "ask.csv"
    assert main(["fit", str(tmp_path / "train.npz"), "--effort", "fast", "-o", model]) == 0
    table = write_columns(tmp_path / "new.csv", {"row": x[12:, 0].tolist(), "width": x[12:, 1].tolist()})
    assert main(["suggest", model, table, "-n", "6", "-o", str(asked)]) == 0
    rows = [each.row for each in read_printed(capsys.readouterr().out)]
    header, *lines = asked.read_text(encoding="utf-8").splitlines()
    assert header == "row,width,label"
    filled = [header, *(f"{line}{int(y[12 + row])}" for line, row in zip(lines, rows, strict=True))]
    asked.write_text("\n".join(filled), encoding="utf-8")
    assert main(["update", model, str(asked), "--in-place"]) == 0
    assert main(["fit", str(asked), "--effort", "fast"]) == 0
    assert "2 classes, 6 samples, 2 features" in capsys.readouterr().out


@pytest.mark.parametrize("known", [True, False])
def test_rows_with_a_class_are_not_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], known: bool
) -> None:
    with (folder / "rest.csv").open(encoding="utf-8") as file:
        header, *rest = csv.reader(file)
    kinds = [["ant", "NA", " "][number % 3] for number in range(30)]
    left = [number for number in range(30) if number % 3]
    columns = {name: [row[place] for row in rest] for place, name in enumerate(header) if name != "note"}
    table, asked = write_columns(tmp_path / "part.csv", {"kind": kinds} | columns), tmp_path / "ask.csv"
    words = [str(folder / "model.safetensors"), table] if known else [table, "--label", "kind"]
    assert main(["suggest", *words, "-n", "8", "-o", str(asked)]) == 0
    said = capsys.readouterr()
    assert said.err == "note: 10 rows have a class in kind already: not asked for\n"
    printed = read_printed(said.out)
    assert {each.row for each in printed} <= set(left)
    x = torch.tensor([[float(cell) for cell in row[1:]] for row in rest])
    if known:
        expected = suggest_rows(load_model(folder / "model.safetensors").network, x[left], 8, NAMES)
        assert printed == [each._replace(row=left[each.row]) for each in expected]
    cells = [row.split(",") for row in asked.read_text(encoding="utf-8").splitlines()]
    assert cells == [["c0", "c1", "c2", "c3", "kind"], *([*rest[each.row][1:], ""] for each in printed)]
    assert main(["suggest", *words, "-n", "21"]) == 2
    assert "Ask for at most 20 of 20 rows at once" in capsys.readouterr().err


def test_without_a_model_what_is_labelled_is_as_good_as_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [f"{10 * (number % 4 == 0) + number / 100:.2f}" for number in range(40)]  # few large ones
    kinds = ["small" if number % 4 and number % 3 else "" for number in range(40)]
    assert main(["suggest", write_columns(tmp_path / "a.csv", {"size": sizes}), "-n", "1"]) == 0
    assert float(sizes[read_printed(capsys.readouterr().out)[0].row]) < 5
    assert main(["suggest", write_columns(tmp_path / "b.csv", {"size": sizes, "label": kinds}), "-n", "1"]) == 0
    assert float(sizes[read_printed(capsys.readouterr().out)[0].row]) > 5


def test_a_column_that_may_hold_the_classes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write_columns(tmp_path / "part.csv", {"size": [1.5, 2.5, 9.5], "Class": ["ant", "bee", ""]})
    note = "there is no column label; if Class holds the classes, name it with --label\n"
    assert main(["suggest", table, "-n", "1"]) == 0
    assert note in capsys.readouterr().err
    assert main(["suggest", table, "-n", "1", "--label", "Class"]) == 0
    assert note not in capsys.readouterr().err


def test_cells_are_found_in_any_block(tmp_path: Path) -> None:
    table = tmp_path / "rest.npy"
    np.save(table, np.arange(6.0).reshape(3, 2))
    options = argparse.Namespace(table=str(table), skip_broken=False, sheet=None)
    assert read_cells(options, None, "label", [2, 0]) == (["column 0", "column 1"], [["4", "5"], ["0", "1"]])
    assert read_cells(options, None, "label")[1] == [["0", "1"], ["2", "3"], ["4", "5"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.safetensors", "rest.csv", "-n", "31"],
            "protonet suggest: `-n` must be .*; got 31. Ask for at most 30",
        ),
        (["model.safetensors", "rest.csv", "-n", "0"], "`-n` must be a whole number >= 1"),
        (["model.safetensors"], "`arguments` must end in a table; got the model "),
        (["model.safetensors", "-"], "`table` must be a file"),
        (["model.safetensors", "other.csv"], "`table` must have the model's columns; got .* without c3"),
        (["model.safetensors", "far.csv"], "`table` must have finite numbers; got 'inf' in c1, line 2"),
        (["model.safetensors", "rest.csv", "-o", "ask.txt"], "`--output` must end in .csv"),
        (["rest.csv", "-o", "rest.csv"], "`--output` must be another file than what is read"),
        (["row.csv", "--label", "c", "-o", "ask.csv"], "`table` must have rows without a class; got one in c for each"),
        (
            ["model.safetensors", "all.csv"],
            "`table` must have rows without a class; got one in kind for each of 2 rows",
        ),
        (["none.csv"], "`table` must be a file that exists"),
    ],
)
def test_errors(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    for name in ("model.safetensors", "rest.csv"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    write_columns(tmp_path / "other.csv", {name: [1, 2] for name in ("c0", "c1", "c2")})
    write_columns(tmp_path / "far.csv", {name: ["inf" if name == "c1" else 1, 2] for name in ("c0", "c1", "c2", "c3")})
    write_columns(tmp_path / "row.csv", {"row": [3, 1, 3], "c": [1.5, 2.5, 9.5]})
    write_columns(tmp_path / "all.csv", {name: [1, 2] for name in ("c0", "c1", "c2", "c3", "kind")})
    assert main(["suggest", *words]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err), said.err
    assert said.err.count("\n") == 1
    assert not said.out
    assert not (tmp_path / "ask.csv").exists()


def test_the_estimator_suggests_what_the_library_does() -> None:
    x, y = blobs(0, classes=3, rows=14, dim=4, noise=1.0)
    model = ProtoNetClassifier(effort="fast").fit(x[:12].numpy(), np.array(NAMES)[y[:12]])
    chosen = model.suggest(x[12:].numpy(), 5)
    assert chosen == suggest_rows(model.network_, x[12:].double(), 5, model.classes_.tolist())
    with pytest.raises(ValueError, match=r"`n` must be a whole number in \[1, 30\]; got 31\. Ask for at most 30"):
        model.suggest(x[12:].numpy(), 31)
    with pytest.raises(ValueError, match="must have no gaps"):
        model.suggest(np.full((3, 4), np.nan), 1)
