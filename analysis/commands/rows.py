"""Made tables through fit, predict, evaluate and update: as many predictions as rows, in their order, and no refusal.

Each table is written as people's programs write them: with any separator, encoding or format, with titles, comments and
blank rows, gaps in many spellings, and cells that look like comments, formulas or separators. Its rows are predicted
again from a plain file: what they are called must not depend on how they were written.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_columns
from protonet.__main__ import main

PROG = "analysis rows"
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
    "press",
    "town",
    "chalk",
    "oil",
    "ink",
    "water",
    "page",
    "red;",
    "&lt;",
    "|x|",
    "#tag",
    "1,5",
    "=sum",
    "-5%",
    "@me",
)
COLUMNS = {
    "tables": "{name}",
    "fitted": "{fitted} of {tables}",
    "rows to predict": "{rows:,}",
    "predictions": "{predictions:,}",
    "in order, as from a plain file": "{same} of {fitted}",
    "evaluated, all rows": "{evaluated} of {fitted}",
    "updated, all rows": "{updated} of {fitted}",
    "refused": "{refused}",
}


class Dress(NamedTuple):
    """How rows are written."""

    suffix: str  #: Of the file's name, which says the format.
    delimiter: str = ","
    encoding: str = "utf-8"
    end: str = "\n"
    quoted: bool = False  #: Are all cells in quotes?
    above: tuple[str, ...] = ()  #: Lines above the header.
    bare: bool = False  #: Are blank rows lines without anything?
    below: int = 0  #: Blank rows below the last one.


class Rows(NamedTuple):
    """A table's cells, as text."""

    header: Cells
    cells: list[Cells]

    def leave(self, column: str) -> Rows:
        """Return the rows without a column."""
        at = self.header.index(column)
        return Rows(self.header[:at] + self.header[at + 1 :], [row[:at] + row[at + 1 :] for row in self.cells])


class Found(NamedTuple):
    """What the commands made of one table."""

    kind: str
    fitted: bool
    rows: int
    predictions: int
    same: bool
    evaluated: bool
    updated: bool
    refused: str  #: The first message, or "".


PLAIN = Dress(".csv", quoted=True)


def add_options(parser: StudyParser) -> None:
    """Add how many tables are made, and from which seed on."""
    parser.add_whole("--tables", 200, "how many")
    parser.add_whole("--seed", 0, "of the first one", low=0)


def run(options: Any) -> Report:
    """Run the commands on each table."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.tables):
            found.append(try_table(seed, Path(folder)))
            if found[-1].refused:
                print(f"table {seed}: {found[-1].refused}", file=sys.stderr)
    rows = tabulate(found)
    refused = "".join(f"- {each.refused}\n" for each in found if each.refused)
    return Report(rows, format_columns(COLUMNS, rows) + (f"\nRefused:\n\n{refused}" if refused else ""))


def tabulate(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return what the table shows: a line for each way of writing, and one for all."""
    kinds = [*sorted({each.kind for each in found}), "all"]
    lines = []
    for kind in kinds:
        own = [each for each in found if kind in {each.kind, "all"}]
        sums = {name: sum(getattr(each, name) for each in own) for name in Found._fields[1:-1]}
        lines.append({"name": kind, "tables": len(own), **sums, "refused": sum(bool(each.refused) for each in own)})
    return lines


def try_table(seed: int, folder: Path) -> Found:
    """Make a table from a seed, and run the commands on it."""
    rng = np.random.default_rng(seed)
    rows, alone = make_rows(rng)
    dress = choose_dress(rng, alone=alone)
    shuffled = [rows.cells[number] for number in rng.permutation(len(rows.cells))]
    at = rows.header.index("label")
    few: list[int] = []
    for name in sorted({row[at] for row in shuffled}):
        few += [number for number, row in enumerate(shuffled) if row[at] == name][: rng.integers(2, 7)]
    train = Rows(rows.header, [shuffled[number] for number in sorted(few)])
    rest = Rows(rows.header, [row for number, row in enumerate(shuffled) if number not in few])
    new = rest.leave("label")
    for some in (train, rest, new):  # blank rows between others are rows, but for where classes are learned
        for place in (len(some.cells) // 2, len(some.cells) // 3, 0)[: 2 + dress.bare]:
            some.cells.insert(place, [""] * len(some.header))
    paths = {name: folder / f"{name}{dress.suffix}" for name in ("train", "new", "test")}
    write_rows(paths["train"], train, dress)
    write_rows(paths["new"], new, dress)
    write_rows(paths["test"], rest, dress)
    write_rows(folder / "plain.csv", new, PLAIN)
    model, kind = str(folder / "m.safetensors"), name_dress(dress, alone=alone)
    refused: list[str] = []

    def call(*arguments: str) -> str:
        code, printed, said = run_command(arguments)
        if code:
            refused.append(said.strip())
        return printed

    def predict(path: Path) -> list[list[str]]:
        output = folder / "p.csv"
        output.unlink(missing_ok=True)
        call("predict", model, str(path), "-o", str(output))
        return list(csv.reader(io.StringIO(output.read_text("utf-8"))))[1:] if output.exists() else []

    Path(model).unlink(missing_ok=True)
    text = call("fit", str(paths["train"]), "--label", "label", "--effort", "fast", "-o", model, "-q")
    n_train, n_rest = (sum(map(any, some.cells)) for some in (train, rest))
    fitted = Path(model).exists() and f" {n_train} samples" in text
    if not fitted:
        return Found(kind, False, len(new.cells), 0, False, False, False, refused[0] if refused else "rows lost in fit")
    predicted, plain = predict(paths["new"]), predict(folder / "plain.csv")
    evaluated = f" of {n_rest} rows" in call("evaluate", model, str(paths["test"]), "-q")
    updated = f" {n_rest} samples more" in call("update", model, str(paths["test"]), "--in-place", "-q")
    same = predicted == plain and len(predicted) == len(new.cells)
    return Found(kind, True, len(new.cells), len(predicted), same, evaluated, updated, (refused or [""])[0])


def run_command(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, and what it printed on both."""
    printed, said = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        code = main(list(arguments))
    return code, printed.getvalue(), said.getvalue()


def make_rows(rng: np.random.Generator) -> tuple[Rows, bool]:
    """Return rows with classes, and whether they are texts in one column."""
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
        own = [rng.permutation(WORDS)[:8] for _ in range(n_classes)]
        return [" ".join(rng.choice(own[label], rng.integers(3, 9))) for label in labels]

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
            columns = {"#": [f"#{number}" for number in rng.permutation(n)], **columns}
    cells = [list(row) for row in zip(*columns.values(), [names[label] for label in labels], strict=True)]
    return Rows([*columns, "label"], cells), alone


def choose_dress(rng: np.random.Generator, *, alone: bool) -> Dress:
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
        bool(rng.random() < 0.3) and end != "\r\r\n",
        # A cell of quotes alone in one column is a row, at the end too.
        int(rng.integers(1, 4)) if rng.random() < 0.3 and not (alone and end == "\r\r\n") else 0,
    )


def name_dress(dress: Dress, *, alone: bool) -> str:
    """Return the line of the table that a way to write rows belongs to."""
    return f"{dress.suffix.removesuffix('.gz')[1:]}{', texts in one column' if alone else ''}"


def write_rows(path: Path, rows: Rows, dress: Dress) -> None:
    """Write rows as a file."""
    blank = [[""] * len(rows.header)] * dress.below
    if dress.suffix == ".parquet":
        import pyarrow as pa  # noqa: PLC0415 - optional
        from pyarrow import parquet  # noqa: PLC0415

        parquet.write_table(pa.table([list(each) for each in zip(*rows.cells, strict=True)], rows.header), path)
        return
    if dress.suffix == ".xlsx":
        from openpyxl import Workbook  # noqa: PLC0415 - optional

        book = Workbook()
        for line in [*([line] for line in dress.above), rows.header, *rows.cells, *blank]:
            book.active.append([None if cell == "" else _as_number(cell) for cell in line])
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
        if not any(row) and (dress.bare or (alone and dress.end != "\r\r\n")):
            text.write(dress.end)  # of one column, what a spreadsheet writes
        else:
            writer.writerow(row)
    data = text.getvalue().encode(dress.encoding)
    path.write_bytes(gzip.compress(data, mtime=0) if dress.suffix.endswith(".gz") else data)


def _as_number(cell: str) -> str | float:
    """Return a cell as Excel keeps it: a plain number as one."""
    return float(cell) if re.fullmatch(r"-?\d+(\.\d+)?", cell) else cell
