"""Commands on tables of text, booleans, dates, money and missing values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protonet.__main__ import main
from protonet.tables.formats import source as table_source
from protonet.tables.table import ReadSpec, open_table
from tests.commands.cases import FAST, Run, fit_model, parse_accuracy, read_lines
from tests.strategies import EXAMPLES
from tests.strategies import write_columns as write

CLASSES = ("cheap", "dear", "odd")
NOTES = {
    "cheap": ("sold at the market", "a bargain from the market", "market stall, last day"),
    "dear": ("gallery piece, signed", "from a gallery in town", "signed by the painter"),
    "odd": ("of unknown origin", "found in the attic", "attic, dusty and old"),
}


def make_columns(n: int = 45, seed: int = 0) -> dict[str, list[str]]:
    """Make the columns of a table whose classes depend on several columns."""
    rng = np.random.default_rng(seed)
    kinds = [CLASSES[index % 3] for index in range(n)]
    price = {"cheap": 800, "dear": 4000, "odd": 2000}
    columns: dict[str, list[str]] = {
        "width": [f"{rng.normal(30, 5):.3f}" for _ in kinds],
        "price": [f"${rng.normal(price[kind], 400):,.2f}" for kind in kinds],
        "framed": [str(bool(rng.random() < (0.8 if kind == "dear" else 0.2))) for kind in kinds],
        "style": [str(rng.choice(["oil", "ink", "chalk"] if kind == "odd" else ["oil", "print"])) for kind in kinds],
        "sold": [str(np.datetime64("2019-03-01") + int(rng.integers(0, 900))) for _ in kinds],
        "note": [f"{rng.choice(NOTES[kind])} {rng.integers(100)}" for kind in kinds],
        "kind": kinds,
    }
    for name in ("width", "price", "style", "sold"):
        for row in rng.permutation(n)[:4].tolist():
            columns[name][row] = "" if name != "price" else "NA"
    order = rng.permutation(n).tolist()
    return {name: [cells[row] for row in order] for name, cells in columns.items()}


def widen(columns: dict[str, list[str]]) -> dict[str, list[str]]:
    """Spread the widths of a table over several orders of magnitude."""
    return columns | {"width": [cell and f"{10 ** (float(cell) / 5):.8g}" for cell in columns["width"]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the folder of its training table."""
    return fit_model(write(tmp_path_factory.mktemp("mixed") / "train.csv", make_columns()))


def test_fit_prints_the_types_of_columns(model: Path, run: Run) -> None:
    output = run("fit", model.with_name("train.csv"), *FAST)
    assert re.match(r"train\.csv: 3 classes, 45 samples, \d+ features from 6 columns, 15 per class\n", output)
    for line in (
        r"  width: number, \d\.\d % missing",
        r"  price: number, as 1,234\.5, in \$, \d\.\d % missing",
        r"  framed: category: False, True",
        r"  style: category: missing, chalk, ink, oil, \.\.\.",
        r"  sold: date, in week, year, \d\.\d % missing",
        r"  note: text: \d+ components of \d+ words and character n-grams",
    ):
        assert re.search(f"^{line}$", output, re.MULTILINE), line
    assert parse_accuracy(output) > 80


def test_new_rows_may_have_missing_cells(model: Path, tmp_path: Path, run: Run) -> None:
    columns = make_columns(9, seed=1)
    for name, cell in {"style": "never seen", "sold": "", "price": "n/a", "more": "beside"}.items():
        columns[name] = [cell] * 9
    columns["note"] = ["\N{SNOWMAN}"] * 8 + [""]
    rows = read_lines(run("predict", model, write(tmp_path / "new.csv", columns), quiet=False))
    assert "note: 1 column of the table not used: more" in run.notes
    assert len(rows) == 10
    assert all(0 < float(row[1]) <= 1 for row in rows[1:])
    del columns["width"]
    error = run("predict", model, write(tmp_path / "less.csv", columns), code=2)
    assert "must have the model's columns; got " in error


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_invalid_cells_of_the_last_block_are_missing_values(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    columns = make_columns(9, seed=1)
    columns["width"][8] = "broken"
    table = write(tmp_path / "new.csv", columns)
    full = run(command, model, table)
    monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 4 * len(columns))  # the last block has one row
    assert run(command, model, table) == full
    columns["width"][:3] = ["a", "b", "c"]  # most of the first block: said at once
    error = run(command, model, write(tmp_path / "odd.csv", columns), code=2)
    assert "got 'a' in width, line 2, which held number" in error


def test_missing_values_are_alike_in_all_types_of_files(tmp_path: Path, run: Run) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    openpyxl = pytest.importorskip("openpyxl")
    rng = np.random.default_rng(0)
    kinds = [-1 if row % 8 == 7 else row % 2 for row in range(32)]
    widths = [-999 if row % 5 == 0 else round(float(rng.normal(2 * kind)), 3) for row, kind in enumerate(kinds)]
    heights = [round(float(value), 3) for value in rng.normal(size=32)]
    columns: dict[str, list[Any]] = {"width": widths, "height": heights, "kind": kinds}
    write(tmp_path / "t.csv", {name: [*map(str, cells)] for name, cells in columns.items()})
    floats = {name: list(map(float, cells)) if name == "width" else cells for name, cells in columns.items()}
    parquet.write_table(pa.table(floats), tmp_path / "t.parquet")
    book = openpyxl.Workbook()
    for line in [list(columns), *zip(*columns.values(), strict=True)]:
        book.active.append(line)
    book.save(tmp_path / "t.xlsx")
    results = []
    for suffix in ("csv", "parquet", "xlsx"):
        table, path = tmp_path / f"t.{suffix}", tmp_path / f"{suffix}.protonet"
        output = run("fit", table, *FAST, "--missing-values=-999,-1", "-o", path)
        assert "read as missing: 4 labels ('-1' 4) and 7 cells ('-999' 7)" in output, suffix
        assert run.count_samples(path) == [16, 12], suffix
        results.append([run("predict", path, tmp_path / f"t.{other}", "--proba") for other in ("csv", "parquet")])
    assert all(result == results[0] for result in results)
    assert results[0][0] == results[0][1]


def test_onnx_of_numeric_and_categorical_columns(model: Path, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    trained, graph, columns = tmp_path / "m.safetensors", tmp_path / "m.onnx", ["width", "price", "framed", "style"]
    table = write(tmp_path / "train.csv", widen(make_columns()))
    assert "width: number, on a logarithmic scale" in run("fit", table, *FAST, "--columns", *columns, "-o", trained)
    assert "m.onnx: 4 columns (n, 1) to logits and probabilities (n, 3)" in run("export", trained, "--onnx", graph)
    new = widen(make_columns(12, seed=5))
    new["style"][:5] = ["never seen", "", "NA", "", "never seen"]
    for row, framed in ((3, ""), (4, "maybe")):  # without an informative cell
        new["width"][row], new["price"][row], new["framed"][row] = "", "NA", framed
    _, *rows = read_lines(run("predict", trained, write(tmp_path / "new.csv", new), "--proba"))
    money = [cell.replace("$", "").replace(",", "") for cell in new["price"]]
    feeds: dict[str, np.ndarray] = {
        "width": np.array([[float(cell or "nan")] for cell in new["width"]]),
        "price": np.array([[float(cell if cell != "NA" else "nan")] for cell in money]),
        "framed": np.array(new["framed"], object)[:, None],
        "style": np.array(new["style"], object)[:, None],
    }
    session = runtime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    probabilities = session.run(["probabilities"], feeds)[0]
    expected = np.array([[float(cell) for cell in row[2:]] for row in rows])
    np.testing.assert_allclose(probabilities, expected, atol=1e-4)
    np.testing.assert_allclose(probabilities[3:5], 1 / 3, atol=0.01)  # the class frequencies


def test_onnx_has_no_dates(model: Path, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("onnx")
    error = run("export", model, "--onnx", tmp_path / "m.onnx", code=2)
    assert "sold" in error
    assert "note" in error
    assert list(tmp_path.iterdir()) == []


def test_invalid_tables_leave_no_output(tmp_path: Path, run: Run) -> None:
    table = tmp_path / "t.csv"
    for cells, options, message in (
        ([(n, "ab"[n % 2]) for n in range(30)], ["--column-type", "x"], "`--column-type` must be NAME=TYPE; got 'x'"),
        ([(n, "a") for n in range(30)], [], "`table` must have at least 2 classes; got a alone in kind"),
        ([(n, n + 0.25) for n in range(30)], [], "`--label` must name .*; got 30 classes in kind, 1 row per"),
        ([(n, n % 30 + 0.25) for n in range(60)], [], "`--label` must name .*; got 30 numbers, such as"),
    ):
        write(table, dict(zip(("x", "kind"), zip(*cells, strict=True), strict=True)))
        error = run("fit", table, *FAST, "-o", tmp_path / "m.safetensors", *options, code=2)
        assert re.fullmatch(f"protonet fit: {message}.*\n", error), error
        assert list(tmp_path.iterdir()) == [table]


PUT = st.sampled_from(
    ["", "NA", "red", "1e999", "-inf", "$", "2020-99-99", '"', ",", "\n", "\0", "\N{SNOWMAN}", "9" * 400, "1 %"]
)


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), PUT), min_size=1, max_size=6))
def test_damaged_cells_give_an_error_or_the_complete_output(
    model: Path, damages: list[tuple[int, int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    columns = make_columns(9, seed=6)
    rows = [list(row) for row in zip(*(columns[name] for name in list(columns)[:6]), strict=True)]
    for row, column, put in damages:
        rows[row][column] = put
    path, output = model.with_name("damaged.csv"), model.with_name("predicted.csv")
    lines = [",".join(f'"{c}"' if "," in c and c != "," else c for c in row) for row in rows]
    path.write_text("\n".join([",".join(list(columns)[:6]), *lines]))
    output.unlink(missing_ok=True)
    capsys.readouterr()
    code = main(["predict", str(model), str(path), "-o", str(output), "-q"])
    error = capsys.readouterr().err
    if code == 0:
        full = open_table(path, ReadSpec(label_column="kind", require_labels=False))
        assert len(output.read_text().splitlines()) == 1 + sum(len(block.positions) for block in full.blocks)
    else:
        assert code == 2, error
        assert not output.exists()
        assert len(error.splitlines()) == 1
        assert error.startswith("protonet predict: `table` must ")
    assert not list(path.parent.glob(".*"))
