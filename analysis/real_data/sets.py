"""Real data sets that are available offline: tables, pixels, series, spectra and text; few-shot splits of them.

Nothing is downloaded: the sets come with scikit-learn, with matplotlib's fonts, with Python itself, or with
the PyPI package aeon, whose ``.ts`` files are read where they were installed, without importing it.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from protonet._validation import check_int
from protonet.datasets import Dataset, Split, load_digits, load_glyphs
from protonet.datasets.dataset import make_dataset
from protonet.errors import MissingPackageError, optional_packages, raise_input_error

GLYPH_CLASSES, GLYPH_COPIES = 60, 3
TEXT_FEATURES, N_HASHED_NGRAMS = 384, 2**14
SERIES_DATASETS = ("ACSF1", "OSULeaf", "ArrowHead", "GunPoint", "ItalyPowerDemand", "BasicMotions")
MODULE_DOCSTRINGS = (40, 60)  #: Minimal and maximal number of docstrings of a module; further ones are left out.
MIN_DOCSTRING_LENGTH = 40  #: Minimal number of characters of a docstring.
#: Minimum test rows per class, minimum test rows per split, and maximum test rows per split.
MIN_SPARE_ROWS, MIN_TEST_ROWS, MAX_TEST_ROWS = 3, 20, 2000


def load_table(name: str) -> Dataset:
    """Load a table of scikit-learn: "wine", "breast_cancer" or "iris"."""
    with optional_packages():
        from sklearn import datasets  # noqa: PLC0415 - optional
    bunch = getattr(datasets, f"load_{name}")()
    return make_dataset(name, torch.from_numpy(bunch.data), bunch.target_names[bunch.target])


def load_glyph_subset() -> Dataset:
    """Load images of 60 lower-case letters, Greek, Cyrillic and Armenian, in three typefaces."""
    letters = map(chr, chain(range(0x3B1, 0x3CA), range(0x430, 0x450), range(0x561, 0x587)))
    data = load_glyphs(characters=list(letters), copies=GLYPH_COPIES)
    return data.select_classes(range(min(GLYPH_CLASSES, data.num_classes)))


def read_series(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """Read a ``.ts`` file: each case, (channels, length) float32, and its class.

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
    """Read both parts of a data set that aeon ships."""
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
    """Load series of equal length that aeon ships: a row is a case, its channels one after another."""
    cases, labels = load_series_arrays(folder, name or folder)
    return make_dataset(folder, torch.from_numpy(np.stack(cases)), labels)


def load_spectra() -> Dataset:
    """Load the frames of the Japanese vowels: 12 linear-prediction cepstrum coefficients, 9 speakers."""
    cases, labels = load_series_arrays("JapaneseVowels", "JapaneseVowels")
    frames = np.concatenate([case.T for case in cases])  # (n, 12)
    speakers = np.repeat(labels, [case.shape[1] for case in cases])  # (n,)
    return make_dataset("JapaneseVowels", torch.from_numpy(frames), speakers)


def load_text(library: Path | None = None) -> Dataset:
    """Load docstrings: a class is a module of Python's standard library, a row 384 features of hashed n-grams.

    Words and pairs of words are hashed, and the counts reduced by a truncated SVD. ``library`` is the folder to read
    modules from, or None for the running Python's.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    modules: list[str] = []
    for path in sorted(chain(library.glob("*.py"), library.glob("*/*.py"))):
        name = path.relative_to(library).with_suffix("").as_posix()
        if name.split("/")[0] in {"test", "site-packages", "dist-packages", "idlelib", "lib2to3"}:
            continue
        matches = _read_docstrings(path)[: MODULE_DOCSTRINGS[1]]
        if len(matches) >= MODULE_DOCSTRINGS[0]:
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
    svd = TruncatedSVD(min(TEXT_FEATURES, len(texts) - 1), random_state=0)
    return make_dataset("library", torch.from_numpy(svd.fit_transform(hashed)), modules)


def _read_docstrings(path: Path) -> list[str]:
    """Read a module's docstrings of at least 40 characters, of functions and classes."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    matches = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in matches if len(text) > MIN_DOCSTRING_LENGTH]


#: Loaders of all data sets by name; a loader raises a MissingPackageError that says what to install.
DATASETS: dict[str, Callable[[], Dataset]] = {
    "digits": load_digits,
    **{name: partial(load_table, name) for name in ("wine", "breast_cancer", "iris")},
    "glyphs": load_glyph_subset,
    "text": load_text,
    "spectra": load_spectra,
    **{name: partial(load_series, name) for name in SERIES_DATASETS},
    "JapaneseVowels": partial(load_series, "JapaneseVowels", "JapaneseVowels_eq"),
    "PickupGesture": partial(load_series, "PickupGestureWiimoteZ", "PickupGestureWiimoteZ_eq"),
}


@cache
def load_real(name: str) -> Dataset:
    """Load a data set by its name in ``DATASETS``, once per process."""
    if name not in DATASETS:
        raise_input_error("name", f"be one of {', '.join(DATASETS)}", repr(name), "Pick a listed one.")
    return DATASETS[name]()


def split_shots(data: Dataset, shots: int, seed: int) -> Split | None:
    """Split a data set into ``shots`` >= 1 labelled rows per class, none for validation, and at most 2,000 for testing.

    A seed >= 0 puts the rows in one order for all shots: those of fewer shots are among those of more. Classes of fewer
    than ``shots + 3`` rows are left out; if fewer than two classes or 20 test rows remain, there is no split.
    """
    shots = check_int("shots", shots, low=1)
    order = np.random.default_rng(check_int("seed", seed, low=0)).permutation(len(data.y))
    counts = torch.bincount(data.y, minlength=data.num_classes)
    classes = (counts >= shots + MIN_SPARE_ROWS).nonzero().flatten()  # class ids
    renumbered = torch.full((data.num_classes,), -1).index_copy_(0, classes, torch.arange(len(classes)))
    x, y = data.x[order], renumbered[data.y[order]]
    labelled = torch.zeros(len(y), dtype=torch.bool)
    for c in range(len(classes)):
        labelled[(y == c).nonzero().flatten()[:shots]] = True
    train, test = labelled.nonzero().flatten(), ((y >= 0) & ~labelled).nonzero().flatten()[:MAX_TEST_ROWS]
    if len(classes) < 2 or len(test) < MIN_TEST_ROWS:
        return None
    return Split(x[train], y[train], x[:0], y[:0], x[test], y[test], len(classes))
