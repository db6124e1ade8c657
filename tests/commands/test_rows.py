"""What predict writes beside its predictions, what is safe in it, and how it is read again."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protonet.__main__ import main
from protonet._checks import clean, guard, unguard
from protonet.files import load_model

RNG = np.random.default_rng(0)
CLASSES = ("=cmd|' /C calc'!A0", "-x", "@sum", "'+1", "-3.5", "plain")


def write(path: Path, lines: list[list[str]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
    return str(path)


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of a table whose classes look like formulas."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [[f"{number % 6 + RNG.normal() / 9:.3f}", guard(CLASSES[number % 6])] for number in range(36)]
    table = write(folder / "train.csv", [["x", "class"], *rows])
    model = str(folder / "model.safetensors")
    assert main(["fit", table, "--label", "class", "--effort", "fast", "-o", model, "-q"]) == 0
    return folder


@given(st.text(st.sampled_from("'=+-@1.5%a \t\x1b") | st.characters(exclude_categories=["Cs"]), max_size=6))
def test_a_guarded_cell_comes_back_and_runs_nowhere(cell: str) -> None:
    written = guard(cell)
    assert unguard(written) == clean(cell)
    assert guard(unguard(written)) == written
    assert not any((sign < " " and sign not in "\t\n") or "\x7f" <= sign <= "\x9f" for sign in written)
    if written[:1] in {"=", "@", "+", "-"}:
        assert not any(map(str.isalpha, written.replace("e", "").replace("E", "")))


@pytest.mark.parametrize("cell", ["-3.5", "+1", "-1,234.5", "-5 %", "-1e-05", "a=b", "", "isn't", "2-3"])
def test_numbers_and_words_stay(cell: str) -> None:
    assert guard(cell) == cell


def test_classes_that_look_like_formulas_are_read_from_what_we_wrote(fitted: Path, tmp_path: Path) -> None:
    model = fitted / "model.safetensors"
    assert set(load_model(model).classes) == set(CLASSES)
    cells = [["=1+1", "0", ""], ["\x1b[2J", "1.5", "NA"], ["-2", "3", "x, y"], ["", "", ""]]
    table = write(tmp_path / "new.csv", [["@note", "x", "class"], *cells, ["", "", ""]])
    output = tmp_path / "p.csv"
    assert main(["predict", str(model), table, "--with-inputs", "--row-numbers", "-o", str(output)]) == 0
    header, *rows = read(output)
    assert header == ["row", "'@note", "x", "class", "class (predicted)", "probability"]
    assert [row[:4] for row in rows] == [
        ["0", "'=1+1", "0", ""],
        ["1", "\\x1b[2J", "1.5", "NA"],
        ["2", "-2", "3", "x, y"],
    ]
    assert {unguard(row[4]) for row in rows} <= set(CLASSES)
    ours = [str(output)]  # our output is a table like any other
    for number in range(3):
        ours.append(str(tmp_path / f"p{number}.csv"))
        assert main(["predict", str(model), ours[-2], "--with-inputs", "--row-numbers", "-o", ours[-1]]) == 0
    header, *_ = read(Path(ours[-1]))
    assert header[:4] == ["row (predicted 3)", "row (predicted 2)", "row (predicted)", "row"]
    assert len(set(header)) == len(header)
    again = tmp_path / "again.csv"  # as new rows with classes
    write(again, [["x", "class"], *([row[2], row[4]] for row in rows)])
    assert main(["evaluate", str(model), str(again), "-q"]) == 0


def test_every_column_of_an_array_is_repeated(tmp_path: Path, fitted: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[0.5], [2.0], [-1.25]]))
    output = tmp_path / "p.csv"
    model = str(fitted / "model.safetensors")
    assert main(["predict", model, str(tmp_path / "x.npy"), "--with-inputs", "-o", str(output)]) == 0
    header, *rows = read(output)
    assert header == ["column 0", "class", "probability"]
    assert [row[0] for row in rows] == ["0.5", "2.0", "-1.25"]


def test_a_line_of_numbers_as_the_header_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[f"{value:.2f}", f"{10 * value:.1f}", "ab"[number % 2]] for number, value in enumerate(RNG.normal(size=20))]
    table = write(tmp_path / "rows.csv", [["23.99", "1340.9", "a"], *rows])
    assert main(["fit", table, "--label", "kind"]) == 2
    assert "The first line looks like a row: if it is one, put a line of names above it." in capsys.readouterr().err
    assert main(["fit", table, "--label", "a", "--effort", "fast"]) == 0
    assert "look at: columns are named '23.99', '1340.9'. The first line looks like a row" in capsys.readouterr().out
    counted = write(tmp_path / "counted.csv", [["0", "1", "a"], *rows])
    assert main(["fit", counted, "--label", "a", "--effort", "fast"]) == 0
    assert "looks like a row" not in capsys.readouterr().out


def test_sheets_and_blank_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.title = "Notes"
    book.active.append(["by hand"])
    sheet = book.create_sheet("Rows")
    for number in range(21):
        sheet.append(
            ["x", "kind"] if not number else [] if number == 7 else [number % 2 + number / 99, "ab"[number % 2]]
        )
    table, model = str(tmp_path / "x.xlsx"), str(tmp_path / "m.safetensors")
    book.save(table)
    fit = ["fit", table, "--label", "kind", "--effort", "fast", "-o", model]
    assert main(fit) == 2
    assert "x.xlsx, sheet 'Notes' of 'Notes', 'Rows' with 'by hand'" in capsys.readouterr().err
    assert main([*fit, "--sheet", "Rows"]) == 0
    said = capsys.readouterr().out
    assert "2 classes, 19 samples" in said
    assert "1 blank row between others left out" in said
    output = tmp_path / "p.csv"
    assert main(["predict", model, table, "--sheet", "Rows", "-o", str(output)]) == 0
    assert len(read(output)) == 21
    assert main(["evaluate", model, table, "--sheet", "Rows"]) == 0
    assert "of 19 rows right" in capsys.readouterr().out


def test_texts_with_commas_are_one_column(tmp_path: Path) -> None:
    texts = [f"word{number} cheap, {number}" for number in range(20)]
    path, output = tmp_path / "t.csv", tmp_path / "out.csv"
    path.write_text("\n".join(["note", "good wine, but dear", *texts]), encoding="utf-8")
    assert main(["suggest", str(path), "-n", "3", "-q", "-o", str(output)]) == 0
    header, *rows = read(output)
    assert header == ["note", "label"]
    assert {row[0] for row in rows} < {"good wine, but dear", *texts}


def test_an_empty_line_between_rows_has_a_prediction(fitted: Path, tmp_path: Path) -> None:
    model, output = str(fitted / "model.safetensors"), tmp_path / "p.csv"
    places = {}
    for blank in ("", ","):
        (tmp_path / "new.csv").write_text(f"x,note\n1,a\n{blank}\n4,b\n", encoding="utf-8")
        assert main(["predict", model, str(tmp_path / "new.csv"), "-o", str(output), "-q"]) == 0
        places[blank] = read(output)[1:]
    assert places[""] == places[","]
    assert len(places[""]) == 3


def test_a_cell_that_is_no_number_is_told(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, table = str(fitted / "model.safetensors"), tmp_path / "new.csv"
    for cells, said in ((["bad"], "line 2, the only one of 7"), (["bad", "odd"], "line 2, and 1 more of 8")):
        table.write_text("\n".join(["x", *cells, *"123456"]), encoding="utf-8")
        assert main(["predict", model, str(table)]) == 0
        assert f"not a number, taken for a gap: 'bad' in x, {said}" in capsys.readouterr().err
    table.write_text("\n".join(["x", "#GETTING_DATA", "#BLOCKED!", *"123456"]), encoding="utf-8")
    assert main(["predict", model, str(table)]) == 0
    assert "taken for a gap" not in capsys.readouterr().err
