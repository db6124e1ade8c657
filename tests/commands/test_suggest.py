"""``suggest`` with and without a model, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet.estimator import ProtoNetClassifier
from protonet.files import load_model
from protonet.fit.active import Suggestion, suggest_rows
from tests.commands.cases import Run, fit_model, read_lines
from tests.strategies import blobs, write_columns

NAMES = ("ant", "bee", "cat")


def read_printed(text: str) -> list[Suggestion]:
    """Parse printed suggestions: the index of each row in the table, from 0, and its reason."""
    assert re.match(r"\| line of .*\.csv +\| reason", text)
    result = re.findall(r"^\| (\d+) +\| (.*?) +\|$", text, re.MULTILINE)
    return [Suggestion(int(line) - 2, reason) for line, reason in result]


X, Y = blobs(0, classes=3, rows=14, dim=4, noise=1.0)
CELLS = [[f"{value:.3f}" for value in row] for row in X.tolist()]
COLUMNS = ("c0", "c1", "c2", "c3")
#: The rows to which the model is not fitted.
REST = [[f"no. {index}", *row] for index, row in enumerate(CELLS[12:])]
REST_X = torch.tensor([[float(cell) for cell in row[1:]] for row in REST])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a table of unlabelled rows."""
    folder = tmp_path_factory.mktemp("suggest")
    train = dict(zip(COLUMNS, zip(*CELLS[:12], strict=True), strict=True))
    fit_model(write_columns(folder / "train.csv", train | {"kind": [NAMES[c] for c in Y[:12].tolist()]}))
    write_columns(folder / "rest.csv", dict(zip(["note", *COLUMNS], zip(*REST, strict=True), strict=True)))
    return folder


def read_suggested(path: Path) -> list[list[str]]:
    return read_lines(path.read_text(encoding="utf-8"))


def test_suggestions_equal_the_library_and_update_accepts_them(folder: Path, tmp_path: Path, run: Run) -> None:
    model, suggested = folder / "model.safetensors", tmp_path / "ask.csv"
    output = run("suggest", model, folder / "rest.csv", "-n", "4", "-o", suggested, quiet=False)
    assert "note: 1 column of the table not used: note" in run.notes
    expected = suggest_rows(load_model(model).network, REST_X, 4, NAMES)
    assert read_suggested(suggested) == [["note", *COLUMNS, "kind"], *([*REST[item.row], ""] for item in expected)]
    assert read_printed(output) == expected
    suggested.write_text(suggested.read_text(encoding="utf-8").replace(",\n", ",bee\n"), encoding="utf-8")
    assert "4 samples added, 0 new classes" in run("update", model, suggested, "-o", tmp_path / "new.safetensors")


def test_without_a_model_the_first_rows_are_typical_and_spread(tmp_path: Path, run: Run) -> None:
    colours = ["red"] * 12 + ["green"] * 8 + ["blue"] * 4
    sizes = [["1", "2", "3"][colour == "green"] if index % 5 else "" for index, colour in enumerate(colours)]
    table = write_columns(tmp_path / "rest.csv", {"colour": colours, "size": sizes, "kind": [""] * 24})
    output = run("suggest", table, "-n", "3", "--label", "kind", "-o", tmp_path / "ask.csv")
    header, *lines = read_suggested(tmp_path / "ask.csv")
    assert header == ["colour", "size", "kind"]
    assert {line[0] for line in lines} == set(colours)
    assert "unlabelled rows" in output


@pytest.mark.parametrize("known", [True, False])
def test_labelled_rows_are_not_suggested(folder: Path, tmp_path: Path, run: Run, known: bool) -> None:
    kinds = [["ant", "NA", " "][index % 3] for index in range(30)]
    left = [index for index in range(30) if index % 3]
    columns = dict(zip(COLUMNS, zip(*CELLS[12:], strict=True), strict=True))
    table, suggested = write_columns(tmp_path / "part.csv", {"kind": kinds} | columns), tmp_path / "ask.csv"
    words = ["suggest", *([folder / "model.safetensors", table] if known else [table, "--label", "kind"])]
    printed = read_printed(run(*words, "-n", "8", "-o", suggested, quiet=False))
    assert run.notes == "note: 10 rows already labelled in kind: not suggested\n"
    assert {item.row for item in printed} <= set(left)
    if known:
        expected = suggest_rows(load_model(folder / "model.safetensors").network, REST_X[left], 8, NAMES)
        assert printed == [item._replace(row=left[item.row]) for item in expected]
    assert read_suggested(suggested) == [[*COLUMNS, "kind"], *([*REST[item.row][1:], ""] for item in printed)]
    assert "Ask for at most 20 of 20 rows at once" in run(*words, "-n", "21", code=2)
    few = write_columns(tmp_path / "few.csv", {name: cells[:3] for name, cells in columns.items()})
    assert len(read_printed(run(*words[: 1 + known], few))) == 3  # fewer than the default


def test_without_a_model_labelled_rows_count_as_selected(tmp_path: Path, run: Run) -> None:
    sizes = [f"{10 * (index % 4 == 0) + index / 100:.2f}" for index in range(40)]  # few large ones
    kinds = ["small" if index % 4 and index % 3 else "" for index in range(40)]
    chosen = []
    for labels in ({}, {"label": kinds}):
        table = write_columns(tmp_path / "t.csv", {"size": sizes} | labels)
        (suggested,) = read_printed(run("suggest", table, "-n", "1"))
        chosen.append(float(sizes[suggested.row]))
    assert chosen[0] < 5 < chosen[1]


@pytest.mark.parametrize("known", [True, False])
def test_rows_without_information_are_not_suggested(folder: Path, tmp_path: Path, run: Run, known: bool) -> None:
    columns = {name: ["", "?", *cells[:3]] for name, cells in zip(COLUMNS, zip(*CELLS, strict=True), strict=True)}
    words = ["suggest", *([folder / "model.safetensors"] if known else []), tmp_path / "table.csv"]
    write_columns(tmp_path / "table.csv", columns | {"note": ["", "-", "", "", ""]})
    assert {item.row for item in read_printed(run(*words, "-n", "3"))} == {2, 3, 4}
    assert "Ask for at most 3 of 3 rows at once" in run(*words, "-n", "4", code=2)
    write_columns(tmp_path / "table.csv", columns | {"kind": ["", "", *NAMES]})
    message = "`table` must have unlabelled rows; got a label in kind or no information in each of 5 rows"
    assert message in run(*words, "-n", "1", "--label", "kind", code=2)


def test_a_column_that_may_hold_the_classes_is_named(tmp_path: Path, run: Run) -> None:
    table = write_columns(tmp_path / "part.csv", {"size": [1.5, 2.5, 9.5], "Class": ["ant", "bee", ""]})
    note = "no column label; if Class holds the labels, pass it with --label\n"
    for more, there in (([], True), (["--label", "Class"], False)):
        run("suggest", table, "-n", "1", *more, quiet=False)
        assert (note in run.notes) == there


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.safetensors rest.csv -n 31", "`-n` must be .*; got 31. Ask for at most 30"),
        ("model.safetensors", "`arguments` must end with a table; got the model "),
        ("model.safetensors -", "`table` must be a file"),
        ("row.csv --label c -o ask.csv", "`table` must have unlabelled rows; got a label in c in each"),
        ("model.safetensors all.csv", "`table` must have unlabelled rows; got a label in kind in each of 2 rows"),
    ],
)
def test_errors(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, words: str, message: str
) -> None:
    for name in ("model.safetensors", "rest.csv"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    write_columns(tmp_path / "row.csv", {"row": [3, 1, 3], "c": [1.5, 2.5, 9.5]})
    write_columns(tmp_path / "all.csv", {name: [1, 2] for name in (*COLUMNS, "kind")})
    assert re.match(f"protonet suggest: {message}", run("suggest", *words.split(), code=2))
    assert not (tmp_path / "ask.csv").exists()


def test_the_estimator_suggests_the_same_rows() -> None:
    model = ProtoNetClassifier(effort="fast").fit(X[:12].numpy(), np.array(NAMES)[Y[:12]])
    chosen = model.suggest(X[12:].numpy(), 5)
    assert chosen == suggest_rows(model.network_, X[12:].double(), 5, model.classes_.tolist())
    with pytest.raises(ValueError, match=r"`n` must be a whole number in \[1, 30\]; got 31\. Ask for at most 30"):
        model.suggest(X[12:].numpy(), 31)
    with pytest.raises(ValueError, match="must have no gaps"):
        model.suggest(np.full((3, 4), np.nan), 1)
