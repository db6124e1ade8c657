"""Tables as people's programs write them keep every row through the commands, in order, and none is refused.

Rows are made with any separator, encoding or format, with titles, comments and blank rows, gaps in many spellings, and
cells that look like comments, formulas or separators. They are predicted again from a plain file: the class
must not depend on the format.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from protonet.__main__ import main
from protonet.errors import installed_version
from tests.commands.cases import read_table

Cells = list[str]
#: Names that classes have, a few of each kind.
CLASSES = (
    ("barolo", "grignolino", "barbera", "new"),
    ("1", "2", "10", "-1"),
    ("=A", "@b", "+c", "-d"),
    ("#1", "#2", "# 3", "#N"),
    ("größe", "café", "naïve", "être"),
    ("a; b", "a, b", "a|b", "a\tb"),
    ("it's", "'x", "'=y", '"z"'),
)
GAPS = ("", "NA", "n/a", "#N/A", "#DIV/0!", "unknown", "n.a.", "(none)", "--")
WORDS = (
    *("press", "town", "chalk", "oil", "ink", "water", "page"),
    *("red;", "&lt;", "|x|", "#tag", "1,5", "=sum", "-5%", "@me"),
)


class Dress(NamedTuple):
    """How rows are written."""

    suffix: str  #: The suffix of the file name, which sets the format.
    delimiter: str = ","
    encoding: str = "utf-8"
    end: str = "\n"
    quoted: bool = False  #: Are all cells in quotes?
    above: tuple[str, ...] = ()  #: Lines above the header.
    bare: bool = False  #: Are blank rows lines without anything? Then they are no rows in a table of text.
    below: int = 0  #: Blank rows below the last one.

    @property
    def counts_blank(self) -> bool:
        """Whether blank rows between others are rows."""
        return not self.bare or self.suffix in {".parquet", ".xlsx"}


class Rows(NamedTuple):
    """A table's cells, as text."""

    header: Cells
    cells: list[Cells]


def make_rows(rng: np.random.Generator) -> Rows:
    """Return rows with classes."""
    n_classes = int(rng.integers(2, 5))
    sizes = rng.integers(8, 22, n_classes)
    names = CLASSES[rng.integers(len(CLASSES))]
    labels = np.repeat(np.arange(n_classes), sizes)
    n = len(labels)
    alone = bool(rng.random() < 0.2)

    def shift(spread: float) -> np.ndarray:
        return np.asarray(rng.normal(size=n) + spread * labels)

    def gap(cells: Cells) -> Cells:
        some = rng.permutation(GAPS)[: rng.integers(1, 5)]
        return [str(rng.choice(some)) if rng.random() < 0.15 else cell for cell in cells]

    def days(form: str) -> Cells:
        return [(date(2020, 2, 1) + timedelta(int(30 * value))).strftime(form) for value in shift(2)]

    def texts() -> Cells:
        vocabularies = [rng.permutation(WORDS)[:8] for _ in range(n_classes)]
        return [" ".join(rng.choice(vocabularies[label], rng.integers(3, 9))) for label in labels]

    makers: dict[str, Callable[[], Cells]] = {
        "x": lambda: [f"{value:.3f}" for value in shift(3)],
        "count": lambda: gap([f"{value:.0f}" for value in 10 * shift(1)]),
        "price": lambda: gap([f"${1000 + 500 * value:,.2f}" for value in shift(1)]),
        "comma": lambda: [f"{value:.2f}".replace(".", ",") for value in shift(1)],
        "kind": lambda: gap([str(rng.choice(["a", "=b", "#c", "c d", "é"])) for _ in labels]),
        "day": lambda: gap(days("%Y-%m-%d")),
        "mixed": lambda: [
            one if rng.random() < 0.6 else two for one, two in zip(days("%Y-%m-%d"), days("%d.%m.%Y"), strict=True)
        ],
        "note": texts,
        "empty": lambda: [""] * n,
    }
    if alone:
        columns = {"note": texts()}
    else:
        chosen = ["x", *rng.permutation(list(makers)[1:])[: rng.integers(1, 6)].tolist()]
        columns = {name: makers[name]() for name in rng.permutation(chosen).tolist()}
        if rng.random() < 0.5:
            columns = {"#": [f"#{index}" for index in rng.permutation(n)], **columns}
    cells = [list(row) for row in zip(*columns.values(), [names[label] for label in labels], strict=True)]
    return Rows([*columns, "label"], cells)


def choose_dress(rng: np.random.Generator) -> Dress:
    """Return a way to write rows."""
    suffix = str(rng.choice([".csv", ".csv", ".csv", ".csv", ".txt", ".tsv", ".csv.gz", ".xlsx", ".parquet"]))
    above = [(), (), ("# made by hand, 2020", "#"), ("A title",), ("A title", "", "of two lines"), ("sep=",)]
    delimiter = str(rng.choice([",", ";", "\t", "|"]))
    lines = tuple(f"sep={delimiter}" if line == "sep=" else line for line in above[rng.integers(len(above))])
    if suffix in {".parquet", ".xlsx"}:
        lines = tuple(line for line in lines if line[:1] not in {"#", "s"}) if suffix == ".xlsx" else ()
    end = str(rng.choice(["\n", "\r\n", "\r\r\n"], p=[0.45, 0.45, 0.1]))
    return Dress(
        suffix,
        delimiter,
        str(rng.choice(["utf-8", "utf-8-sig", "utf-16", "cp1252"])),
        end,
        bool(rng.random() < 0.3),
        lines,
        bool(rng.random() < 0.3),
        int(rng.integers(1, 4)) if rng.random() < 0.3 else 0,
    )


def write_rows(path: Path, rows: Rows, dress: Dress) -> None:
    """Write rows as a file."""
    blank = [[""] * len(rows.header)] * dress.below
    if dress.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table([list(item) for item in zip(*rows.cells, strict=True)], rows.header), path)
        return
    if dress.suffix == ".xlsx":
        from openpyxl import Workbook

        book = Workbook()
        for line in [*([line] for line in dress.above), rows.header, *rows.cells, *blank]:
            book.active.append([None if cell == "" else _as_float(cell) for cell in line])
        for row in book.active.iter_rows():
            for cell in row:
                cell.data_type = "s" if isinstance(cell.value, str) else cell.data_type  # no formula
        book.save(path)
        return
    text = io.StringIO()
    quoting: Any = csv.QUOTE_ALL if dress.quoted else csv.QUOTE_MINIMAL
    alone = len(rows.header) == 1
    writer = csv.writer(text, delimiter="\x1f" if alone else dress.delimiter, lineterminator=dress.end, quoting=quoting)
    text.write("".join(line + dress.end for line in dress.above if not (alone and line.startswith("sep="))))
    writer.writerow(rows.header)
    for row in [*rows.cells, *blank]:
        if not any(row) and dress.bare:
            text.write(dress.end)
        else:
            writer.writerow(row)
    data = text.getvalue().encode(dress.encoding)
    path.write_bytes(gzip.compress(data, mtime=0) if dress.suffix.endswith(".gz") else data)


def _as_float(cell: str) -> str | float:
    """Return a cell as Excel keeps it: a plain number as one."""
    return float(cell) if re.fullmatch(r"-?\d+(\.\d+)?", cell) else cell


@pytest.mark.skipif(not all(map(installed_version, ("pyarrow", "openpyxl"))), reason="needs the extra files")
@pytest.mark.parametrize("seed", range(13))
def test_a_prediction_for_every_row_in_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(seed)
    rows = make_rows(rng)
    dress = choose_dress(rng)
    shuffled = [rows.cells[index] for index in rng.permutation(len(rows.cells))]
    few: list[int] = []
    for name in sorted({row[-1] for row in shuffled}):
        few += [index for index, row in enumerate(shuffled) if row[-1] == name][: rng.integers(2, 7)]
    train = Rows(rows.header, [shuffled[index] for index in sorted(few)])
    remaining = Rows(rows.header, [row for index, row in enumerate(shuffled) if index not in few])
    new = Rows(remaining.header[:-1], [row[:-1] for row in remaining.cells])
    n_train, n_remaining = len(train.cells), len(remaining.cells)
    for some in (train, remaining, new):  # blank rows between others are rows, but for where classes are learned
        for position in (len(some.cells) // 2, len(some.cells) // 3, 0)[: 2 + dress.bare]:
            some.cells.insert(position, [""] * len(some.header))
    cells = [row for row in new.cells if dress.counts_blank or any(row)]
    if dress.counts_blank and dress.suffix not in {".parquet", ".xlsx"}:
        cells += [[""] * len(new.header)] * dress.below
    monkeypatch.chdir(tmp_path)
    for file, some in (("train", train), ("new", new), ("test", remaining)):
        write_rows(Path(f"{file}{dress.suffix}"), some, dress)
    write_rows(Path("plain.csv"), new._replace(cells=cells), Dress(".csv", quoted=True))

    def call(*arguments: str) -> str:
        assert main([*arguments, "-q"]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    fitted = call("fit", f"train{dress.suffix}", "--label", "label", "--effort", "fast", "-o", "m.safetensors")
    assert f" {n_train} samples" in fitted
    predicted = call("predict", "m.safetensors", f"new{dress.suffix}")
    assert len(read_table(predicted)) == len(cells)
    assert predicted == call("predict", "m.safetensors", "plain.csv")
    assert f" on {n_remaining} rows" in call("evaluate", "m.safetensors", f"test{dress.suffix}")
    assert f" {n_remaining} samples added" in call("update", "m.safetensors", f"test{dress.suffix}", "--in-place")
