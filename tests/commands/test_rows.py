"""The rows that commands read and write: escaped formulas, copied columns, headers and missing values."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protonet._text import escape_control_chars, escape_formula, unescape_formula
from protonet.files import load_model
from tests.commands.cases import FAST, Run, fit_model, read_lines

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
    assert "x.xlsx, sheet 'Notes' of 'Notes', 'Rows' has 'by hand'" in run(*fit, code=2)
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
    table = write(tmp_path / "signs.csv", [["x", "kind"], *([str(index % 7), "+-"[index % 2]] for index in range(20))])
    message = run("fit", table, *FAST, code=2)
    assert "got '+' alone in kind" in message
    assert "10 labels ('-' 10); `--missing-values` changes the list" in message
    assert "2 classes" in run("fit", table, *FAST, "--missing-values", "")


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


def test_a_similar_column_name_is_suggested(tmp_path: Path, run: Run) -> None:
    lines = [["w", "h", "kind"], *([f"{n % 2 + n / 99:.3f}", f"{n / 7:.3f}", "ab"[n % 2]] for n in range(20))]
    model = fit_model(write(tmp_path / "train.csv", lines))
    output = run("predict", model, write(tmp_path / "new.csv", [["W ", "H", "Z"], ["1", "2", "3"]]), code=2)
    assert "without w, h. Did you mean W for w, H for h?" in output
    output = run("predict", model, write(tmp_path / "new.csv", [["w", "zzz"], ["1", "2"]]), code=2)
    assert "Did you mean" not in output
