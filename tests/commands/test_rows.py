"""The rows that commands read and write, and those that ``suggest`` names, with and without a model."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet._text import escape_control_chars, escape_formula, unescape_formula
from protonet.estimator import ProtoNetClassifier
from protonet.files import load_model
from protonet.fit.active import Suggestion, suggest_rows
from protonet.tables.formats import source as table_source
from protonet.tables.table import ReadSpec, read_table
from tests.commands.cases import FAST, Run, fit_model, read_lines
from tests.strategies import blobs, write_columns

RNG = np.random.default_rng(0)
CLASSES = ("=cmd|' /C calc'!A0", "-x", "@sum", "'+1", "-3.5", "plain")


def write(path: Path, lines: list[list[str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose class names look like spreadsheet formulas."""
    rows = [[f"{index % 6 + RNG.normal() / 9:.3f}", escape_formula(CLASSES[index % 6])] for index in range(36)]
    return fit_model(write(tmp_path_factory.mktemp("rows") / "train.csv", [["x", "kind"], *rows]))


@given(st.text(st.sampled_from("'=+-@1.5%a \t\x1b") | st.characters(exclude_categories=["Cs"]), max_size=6))
def test_an_escaped_cell_is_restored_and_is_no_formula(cell: str) -> None:
    written = escape_formula(cell)
    assert unescape_formula(written) == escape_control_chars(cell)
    assert escape_formula(unescape_formula(written)) == written
    assert not any((sign < " " and sign not in "\t\n") or "\x7f" <= sign <= "\x9f" for sign in written)
    if written[:1] in {"=", "@", "+", "-"}:
        assert not any(map(str.isalpha, written.replace("e", "").replace("E", "")))


def test_plain_cells_are_not_escaped() -> None:
    cases: list[str] = ["-3.5", "+1", "-1,234.5", "-5 %", "-1e-05", "a=b", "", "isn't", "2-3"]
    for cell in cases:
        assert escape_formula(cell) == cell, cell


def test_escaped_classes_are_restored(model: Path, tmp_path: Path, run: Run) -> None:
    assert set(load_model(model).classes) == set(CLASSES)
    cells = [["=1+1", "0", ""], ["\x1b[2J", "1.5", "NA"], ["-2", "3", "x, y"], ["", "", ""]]
    table = write(tmp_path / "new.csv", [["@note", "x", "kind"], *cells])
    header, *rows = read_lines(run("predict", model, table, "--keep-columns", "--row-numbers"))
    assert header == ["row", "'@note", "x", "kind", "class", "probability"]
    expected = [["2", "'=1+1", "0", ""], ["3", "\\x1b[2J", "1.5", "NA"], ["4", "-2", "3", "x, y"], ["5", "", "", ""]]
    assert [row[:4] for row in rows] == expected
    assert {unescape_formula(row[4]) for row in rows} <= set(CLASSES)
    again = write(tmp_path / "again.csv", [["x", "kind"], *([row[2], row[4]] for row in rows)])
    run("evaluate", model, again)  # as new rows with classes
    for index in range(4):  # our output is a table like any other
        output = tmp_path / f"p{index}.csv"
        run("predict", model, table, "--keep-columns", "--row-numbers", "-o", output)
        table = output
    header, *_ = read_lines(table.read_text(encoding="utf-8"))
    assert header[:7] == ["row (predicted 3)", "row (predicted 2)", "row (predicted)", "row", "'@note", "x", "kind"]
    assert header[7::2] == ["class", "class (predicted)", "class (predicted 2)", "class (predicted 3)"]


def test_a_numeric_header_gets_a_warning(tmp_path: Path, run: Run) -> None:
    rows = [[f"{value:.2f}", f"{10 * value:.1f}", "ab"[index % 2]] for index, value in enumerate(RNG.normal(size=20))]
    table = write(tmp_path / "rows.csv", [["23.99", "1340.9", "a"], *rows])
    assert "looks like a row: if it is one, pass `--no-header`" in run("fit", table, *FAST, code=2)
    model = tmp_path / "m.protonet"
    run("fit", table, "--no-header", "--label", "3", *FAST[2:], "-o", model)
    assert load_model(model).columns == ("1", "2")
    assert "on 21 rows" in run("evaluate", model, table, "--no-header")
    assert "pass `--no-header`" in run("evaluate", model, table, code=2)
    output = run("fit", table, "--label", "a", *FAST[2:])
    assert "warning: columns are named '23.99', '1340.9'. The first line looks like a row" in output


def test_sheets_and_blank_rows(tmp_path: Path, run: Run) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.title = "Notes"
    book.active.append(["by hand"])
    rows: list[list[object]] = [["x", "kind"], *([n % 2 + n / 99, "ab"[n % 2]] for n in range(1, 21))]
    rows[7] = []
    sheet = book.create_sheet("Rows")
    for row in rows:
        sheet.append(row)
    table, model = tmp_path / "x.xlsx", tmp_path / "m.safetensors"
    book.save(table)
    fit = ["fit", table, *FAST, "-o", model]
    assert "x.xlsx (sheet 'Notes'; `--sheet` names another one: 'Rows') has 'by hand'" in run(*fit, code=2)
    output = run(*fit, "--sheet", "Rows")
    assert "2 classes, 19 samples" in output
    assert "1 blank row dropped" in output
    assert len(run.read_rows("predict", model, table, "--sheet", "Rows")) == 20
    assert "on 19 rows" in run("evaluate", model, table, "--sheet", "Rows")


def test_a_prediction_for_every_row_of_separators(model: Path, tmp_path: Path, run: Run) -> None:
    cases: list[str] = [",", ";", "\t", "|"]
    for delimiter in cases:
        blank = ["", "", ""]
        lines = [["x", "note", "kind"], ["1", "a", "plain"], blank, ["4", "b", "-x"], blank, blank]
        text = "\n".join(map(delimiter.join, lines))
        (tmp_path / "new.csv").write_text(f"{text}\n\n\n", encoding="utf-8")
        assert run("predict", model, tmp_path / "new.csv").count("\n") == len(lines), delimiter
        assert "on 2 rows" in run("evaluate", model, tmp_path / "new.csv"), delimiter
        run("predict", model, tmp_path / "new.csv", quiet=False)
        assert "2 empty lines below the header skipped" in run.notes, delimiter


def test_a_non_numeric_cell_is_reported(model: Path, tmp_path: Path, run: Run) -> None:
    cases: list[tuple[list[str], str]] = [
        (["bad"], "not a number, treated as missing: 'bad' in x, line 2, the only one of 7"),
        (["bad", "odd"], "not a number, treated as missing: 'bad' in x, line 2, and 1 more of 8"),
        (["#GETTING_DATA", "#BLOCKED!"], ""),
    ]
    for cells, output in cases:
        table = tmp_path / "new.csv"
        table.write_text("\n".join(["x", *cells, *"123456"]), encoding="utf-8")
        run("predict", model, table, quiet=False)
        assert output in run.notes, cells
        assert ("treated as missing" in run.notes) == bool(output), cells


def test_missing_values_are_one_list_for_labels_and_cells(tmp_path: Path, run: Run) -> None:
    lines = [["x", "c", "kind"]]
    for index in range(36):
        kind = ("NA", "red", "blue")[index % 3]
        lines.append([f"{index % 3 + RNG.normal() / 9:.3f}", ["p", "?", "none"][index % 3], kind])
    lines[1][2], lines[2][2], lines[3][0] = "n.a.", "?", "missing"
    table, model = write(tmp_path / "train.csv", lines), tmp_path / "m.safetensors"
    output = run("fit", table, *FAST, "-o", model, "--drop-unlabelled")
    assert "2 classes, 23 samples" in output
    result = "read as missing: 13 labels ('NA' 11, 'n.a.' 1, '?' 1) and 25 cells ('?' 12, 'none' 12, 'missing' 1)"
    assert result in output
    assert "--missing-values" in output
    output = run("fit", table, *FAST, "-o", model, "--missing-values", "n.a.,?,missing", "--drop-unlabelled")
    assert "3 classes, 34 samples" in output
    assert set(load_model(model).classes) == {"NA", "red", "blue"}
    assert load_model(model).encoding.columns[1].levels == ("", "none", "p")  # type: ignore[union-attr]
    rows = write(tmp_path / "new.csv", [["x", "c"], ["0", "none"], ["0", "missing"]])
    run("predict", model, rows, quiet=False)
    assert "never saw" not in run.notes
    assert "on 34 rows" in run("evaluate", model, write(tmp_path / "test.csv", [lines[0], *lines[3:]]))


def test_the_error_of_a_single_class_names_labels_read_as_missing(tmp_path: Path, run: Run) -> None:
    rows = [[str(index % 7), ("EU", "NA")[index % 2]] for index in range(20)]
    table = write(tmp_path / "regions.csv", [["x", "kind"], *rows])
    message = run("fit", table, *FAST, code=2)
    assert "got EU alone in kind" in message
    assert "10 labels ('NA' 10); `--missing-values` changes the list" in message
    assert "2 classes" in run("fit", table, *FAST, "--missing-values", "")


@pytest.mark.parametrize("names", [("+", "-"), ("mild", "none"), ("found", "Missing")])
def test_classes_may_be_called_none_missing_or_minus(names: tuple[str, str], tmp_path: Path, run: Run) -> None:
    rows = [[f"{index % 2 + RNG.normal() / 9:.3f}", names[index % 2]] for index in range(20)]
    table, model = write(tmp_path / "t.csv", [["x", "kind"], *rows]), tmp_path / "m.protonet"
    assert "2 classes, 20 samples" in run("fit", table, *FAST, "-o", model)
    one_class = write(tmp_path / "new.csv", [["x", "kind"], *rows[1::2], ["1", ""]])
    assert "on 10 rows" in run("evaluate", model, one_class, "--drop-unlabelled")
    alone = write(tmp_path / "alone.csv", [["x", "kind"], ["1", names[1]]])
    assert "on 1 row" in run("evaluate", model, alone)
    output = run("fit", table, *FAST, "--missing-values", f"NA,{names[1]}", code=2)
    assert "alone in kind" in output


def test_evaluate_drops_unlabelled_rows_on_request(model: Path, tmp_path: Path, run: Run) -> None:
    table = write(tmp_path / "test.csv", [["x", "kind"], ["1", "plain"], ["2", ""], ["3", "NA"], ["4", "-x"]])
    output = run("evaluate", model, table, code=2)
    assert "none in line 3, line 4. Fill it in, or leave the row out: `--drop-unlabelled`" in output
    assert "on 2 rows" in run("evaluate", model, table, "--drop-unlabelled", quiet=False)
    assert "2 rows without a class dropped" in run.notes
    for command in (["update", "--in-place"], ["explain"]):
        error = run(command[0], model, table, *command[1:], code=2)
        assert "none in line 3, line 4. Fill it in, or remove the row." in error
        assert "drop-unlabelled" not in error
    none = write(tmp_path / "none.csv", [["x", "kind"], ["1", ""], ["2", ""]])
    error = run("evaluate", model, none, "--drop-unlabelled", code=2)
    assert "have labels in kind; got none in 2 rows" in error


def test_white_space_around_column_names_does_not_count(tmp_path: Path, run: Run) -> None:
    rows = "".join(f"{row % 2 + row / 9},{row},{'ab'[row % 2]}\n" for row in range(12))
    (tmp_path / "a.csv").write_text(f"x, number , kind \n{rows}")
    options = ("--label", "kind ", "--drop", " number ", "--column-type", " x=number", *FAST)
    assert "1 feature" in run("fit", tmp_path / "a.csv", *options)


def test_a_similar_column_name_is_suggested(tmp_path: Path, run: Run) -> None:
    lines = [["w", "h", "kind"], *([f"{n % 2 + n / 99:.3f}", f"{n / 7:.3f}", "ab"[n % 2]] for n in range(20))]
    model = fit_model(write(tmp_path / "train.csv", lines))
    output = run("predict", model, write(tmp_path / "new.csv", [["W ", "H", "Z"], ["1", "2", "3"]]), code=2)
    assert "without w, h. Did you mean W for w, H for h?" in output
    output = run("predict", model, write(tmp_path / "new.csv", [["w", "zzz"], ["1", "2"]]), code=2)
    assert "Did you mean" not in output


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
    model = ProtoNetClassifier().fit(X[:12].numpy(), np.array(NAMES)[Y[:12]])
    chosen = model.suggest(X[12:].numpy(), 5)
    assert chosen == suggest_rows(model.network_, X[12:].double(), 5, model.classes_.tolist())
    with pytest.raises(ValueError, match=r"`n` must be a whole number in \[1, 30\]; got 31\. Ask for at most 30"):
        model.suggest(X[12:].numpy(), 31)
    with pytest.raises(ValueError, match="must have no gaps"):
        model.suggest(np.full((3, 4), np.nan), 1)


def test_labels_of_all_blocks_decide_whether_none_is_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 32)
    lines = [["x", "kind"], *([str(row), "mild" if row < 20 else "none"] for row in range(40))]
    spec = ReadSpec(label_column="kind", drop_unlabelled=True)
    _, block = read_table(write(tmp_path / "sorted.csv", lines), spec)
    assert Counter(block.labels.tolist()) == {"mild": 20, "none": 20}
