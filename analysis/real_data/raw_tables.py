"""Compare the commands ``fit`` and ``evaluate`` with pipelines of skrub, on raw tables of public repositories.

All CSV and TSV files of a folder are tasks if they have a column that looks like a label: of texts, booleans or few
integers, with two to eight classes of at least 25 rows. A name such as "type" decides among several columns; without
one, the last is used. Rows are passed to the commands as the file holds them. skrub's `TableVectorizer` reads the same
rows for a random forest, logistic regression and three boosters.

Baselines: pip install skrub lightgbm catboost xgboost.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.shared.runner import JournalOptions, StudyReport, run_all
from analysis.shared.tables import format_mean, mean_by_group
from protonet.__main__ import main
from protonet.errors import optional_packages, raise_input_error
from protonet.tables.table import list_number_like_names
from protonet.ui.options import positional
from protonet.ui.text import format_table

SHOTS = (5, 20)  #: Labelled rows per class; a hash of the path determines which of both a table has.
MAX_FILE_BYTES, MAX_TEST_ROWS, MIN_CLASS_ROWS, MAX_CLASSES = 2_000_000, 400, 25, 8
LABEL_WORDS = ("class", "species", "type", "target", "label", "outcome", "survived", "status", "category", "result")
OURS, REFUSED = "ours", "refused"  #: Keys of a table's result: the commands' accuracy, or their error.
TABLE_NOTE = """
Mean accuracy in percent on up to {rows} test rows of each table, with their natural class frequencies. Pipelines of
skrub are untuned; "best in hindsight" is the best of them for each table. The leads of protonet and their standard
errors are means over repositories, each with equal weight; ahead and behind count repositories.
"""


def _make_logistic() -> list[Any]:
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415 - optional

    return [StandardScaler(), LogisticRegression(max_iter=2000)]


def _make(module: str, name: str, **settings: Any) -> list[Any]:
    """Import a module of an optional package, and make a classifier."""
    return [getattr(import_module(module), name)(**settings)]


#: Classifiers behind skrub's `TableVectorizer`, untuned. Boosters may split the few rows: their leaves are small.
SKRUB_MODELS: dict[str, Callable[[], list[Any]]] = {
    "forest": partial(_make, "sklearn.ensemble", "RandomForestClassifier", n_estimators=300, random_state=0),
    "logistic": _make_logistic,
    "lightgbm": partial(_make, "lightgbm", "LGBMClassifier", min_child_samples=2, n_jobs=1, random_state=0, verbose=-1),
    "catboost": partial(
        _make,
        "catboost",
        "CatBoostClassifier",
        iterations=200,
        thread_count=1,
        random_seed=0,
        verbose=False,
        allow_writing_files=False,
    ),
    "xgboost": partial(_make, "xgboost", "XGBClassifier", min_child_weight=0.1, n_jobs=1, random_state=0),
}


class RawTable(NamedTuple):
    """A run: a table file, its label column and the number of labelled rows per class."""

    path: str  #: The path below the folder of the study.
    label_column: str
    labelled_per_class: int  #: Number of labelled rows per class.
    no_header: bool  #: Whether the file has no header.

    def to_json(self) -> dict[str, Any]:
        """Return the fields by their keys in JSON."""
        return dict(zip(("path", "label", "per_class", "no_header"), self, strict=True))


@dataclass(frozen=True, kw_only=True)
class Options(JournalOptions):
    """The options of the study."""

    folder: Path = positional("a folder whose subfolders hold CSV and TSV files")


def run(options: Options) -> StudyReport:
    """Evaluate all methods on all tables."""
    tables = find_tables(options.folder)
    if not tables:
        raise_input_error("folder", "hold tables with a label", options.folder, "Clone a repository of data there.")
    results = run_all(tables, lambda table: evaluate_table(options.folder, table), options.state, unit="table")
    rows = [table.to_json() | result for table, result in results.items()]
    table = tabulate(rows) + TABLE_NOTE.format(rows=MAX_TEST_ROWS)
    return StudyReport(rows, table)


def find_tables(folder: Path) -> list[RawTable]:
    """List the tables with a label column in a folder and its subfolders; tables with the same columns count once."""
    tables, seen = list[RawTable](), set[tuple[str, ...]]()
    for path in sorted(folder.rglob("*.[ct]sv")):
        table = read_raw_table(path) if path.stat().st_size < MAX_FILE_BYTES else None
        if table is None:
            continue
        _, frame, no_header = table
        label, columns = choose_label_column(frame), (str(len(frame)) * no_header, *frame.columns)
        if label is not None and columns not in seen:
            seen.add(columns)
            name = path.relative_to(folder).as_posix()
            tables.append(RawTable(name, label, SHOTS[zlib.crc32(name.encode()) % 2], no_header))
    return tables


def read_raw_table(path: Path) -> tuple[list[str], Any, bool] | None:
    """Read a file: lines, data frame, and whether there is no header; None if it is not a table with a line per row.

    The lines are those of the file, with the header if it has one.
    """
    import pandas as pd  # noqa: PLC0415 - optional

    raw = path.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    lines, separator = text.splitlines(), "\t" if path.suffix == ".tsv" else ","
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            names = list(pd.read_csv(io.StringIO("\n".join(lines[:1])), sep=separator).columns)
            no_header = bool(list_number_like_names(names))
            frame = pd.read_csv(io.StringIO(text), sep=separator, header=None if no_header else 0)
        except (ValueError, pd.errors.ParserError):
            return None
    if no_header:
        frame.columns = [str(1 + column) for column in range(frame.shape[1])]
    plain = len(lines) == len(frame) + (not no_header) and len(frame) >= 2 * MIN_CLASS_ROWS and frame.shape[1] > 2
    return (lines, frame, no_header) if plain else None


def choose_label_column(frame: Any) -> str | None:
    """Choose the label column of a data frame, by ``LABEL_WORDS`` or else the last one; None if there is none."""
    candidates = []
    for name in frame.columns:
        counts = count_large_classes(frame[name])
        is_text = frame[name].dtype.kind in "ObU" or str(frame[name].dtype).startswith("str")
        is_code = frame[name].dtype.kind == "i" and frame[name].nunique() <= MAX_CLASSES
        if (is_text or is_code) and 2 <= len(counts) <= MAX_CLASSES and counts.sum() > 0.6 * len(frame):
            candidates += [str(name)] * (not str(name).startswith("Unnamed"))
    named = [name for name in candidates if any(word in name.lower() for word in LABEL_WORDS)]
    return next(iter([*named, *candidates[-1:]]), None)


def count_large_classes(column: Any) -> Any:
    """Count the rows of each class in a column, as a pandas Series; classes with too few rows are left out."""
    counts = column.astype(str)[column.notna()].str.strip().value_counts()
    return counts[(counts >= MIN_CLASS_ROWS) & (counts.index != "")]


def evaluate_table(
    folder: Path, table: RawTable, models: Sequence[str] = tuple(SKRUB_MODELS)
) -> dict[str, float | str]:
    """Compute the accuracy in [0, 1] of each method on the test rows of a table, and their number (``test_rows``).

    If the commands refuse the table, their error is the result (``refused``).
    """
    raw = read_raw_table(folder / table.path)
    assert raw is not None
    lines, frame, _ = raw
    labels = frame[table.label_column].astype(str).str.strip().to_numpy()
    classes = list(count_large_classes(frame[table.label_column]).index[:MAX_CLASSES])
    order = np.random.default_rng(zlib.crc32(table.path.encode())).permutation(len(frame))
    train = np.concatenate([order[labels[order] == name][: table.labelled_per_class] for name in classes])
    train = np.random.default_rng(0).permutation(train)
    test = order[np.isin(labels[order], classes) & ~np.isin(order, train)][:MAX_TEST_ROWS]
    scores: dict[str, float | str] = {"test_rows": float(len(test))}
    try:
        scores[OURS] = score_commands(lines, train, test, table)
    except RuntimeError as error:
        return scores | {REFUSED: str(error)}
    baselines = score_skrub(frame.drop(columns=table.label_column), labels, train, test, models) if models else {}
    return scores | baselines


def score_commands(lines: Sequence[str], train: np.ndarray, test: np.ndarray, table: RawTable) -> float:
    """Compute the accuracy in [0, 1] by the commands ``fit`` and ``evaluate``; raise a RuntimeError if one fails.

    The commands read the ``lines`` of the table's file that hold the rows with the indices ``train`` and ``test``.
    """
    header, output = ["--no-header"] * table.no_header, io.StringIO()
    with tempfile.TemporaryDirectory() as build:
        paths = [Path(build, f"{name}{Path(table.path).suffix}") for name in ("train", "test")]
        for path, rows in zip(paths, (train, test), strict=True):
            kept = [*lines[: not table.no_header], *(lines[row + (not table.no_header)] for row in rows.tolist())]
            path.write_text("\n".join(kept) + "\n", encoding="utf-8")
        model, metrics = Path(build, "m.protonet"), Path(build, "metrics.json")
        with redirect_stdout(output), redirect_stderr(output):
            code = main(["fit", str(paths[0]), "--label", table.label_column, "-o", str(model), *header])
            code = code or main(["evaluate", str(model), str(paths[1]), "--json", str(metrics), *header])
        if code:
            raise RuntimeError(f"{table.path}: {output.getvalue().splitlines()[-1]}")
        return float(json.loads(metrics.read_text(encoding="utf-8"))["accuracy"])


def score_skrub(
    frame: Any, labels: np.ndarray, train: np.ndarray, test: np.ndarray, models: Sequence[str]
) -> dict[str, float]:
    """Compute the accuracy in [0, 1] of skrub's pipelines with classifiers of `SKRUB_MODELS`."""
    with optional_packages(install="pip install skrub"):
        from sklearn.impute import SimpleImputer  # noqa: PLC0415 - optional
        from sklearn.pipeline import make_pipeline  # noqa: PLC0415 - optional
        from skrub import StringEncoder, TableVectorizer  # noqa: PLC0415 - optional

    scores = {}
    codes = np.unique(labels.astype(str), return_inverse=True)[1]  # some rows have no label
    train_codes, trained = np.unique(codes[train], return_inverse=True)  # XGBoost needs 0, 1, ...
    for name in models:
        texts = StringEncoder(min(30, len(train) - 1), random_state=0)
        reading = TableVectorizer(high_cardinality=texts), SimpleImputer(keep_empty_features=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make_pipeline(*reading, *SKRUB_MODELS[name]()).fit(frame.iloc[train], trained)
            predicted = train_codes[np.asarray(model.predict(frame.iloc[test])).ravel().astype(int)]
            scores[name] = float((predicted == codes[test]).mean())
    return scores


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Format means by the number of labelled rows, leads by repository, the ten worst tables, and refused ones."""
    read = [row for row in rows if REFUSED not in row]
    baselines = [name for name in SKRUB_MODELS if all(name in row for row in read)]
    single = max(baselines, key=lambda name: statistics.fmean(row[name] for row in read))
    parts = {"all": read} | {f"{n} rows per class": [row for row in read if row["per_class"] == n] for n in SHOTS}
    lines = []
    for name, part in parts.items():
        if not part:
            continue
        best = [max(row[method] for method in baselines) for row in part]
        repositories = [row["path"].partition("/")[0] for row in part]
        cells = [f"{100 * statistics.fmean(row[method] for row in part):.1f}" for method in (OURS, *baselines)]
        cells.append(f"{100 * statistics.fmean(best):.1f}")
        for tops in ([row[single] for row in part], best):
            leads = [100 * (row[OURS] - top) for row, top in zip(part, tops, strict=True)]
            means = mean_by_group(leads, repositories)
            signs = np.sign(np.round(means, 9)).tolist()
            cells += [format_mean(means, digits=1, sign=True), f"{signs.count(1)}, {signs.count(-1)}"]
        lines.append([name, str(len(part)), *cells])
    head = ["tables", "number", "protonet", *baselines, "best in hindsight"]
    for top in (single, "best"):
        head += [f"lead over {top}", "ahead, behind"]
    worst = sorted((row[OURS] - max(row[name] for name in baselines), row["path"], row["per_class"]) for row in read)
    named = [[path, str(shots), f"{100 * lead:+.1f}"] for lead, path, shots in worst[:10]]
    text = format_table(head, lines) + "\nThe ten worst, beside the best baseline in hindsight:\n\n"
    text += format_table(["table", "rows per class", "points"], named)
    refused = [f"- {row[REFUSED]}" for row in rows if REFUSED in row]
    return text + "\n".join(["", "Refused, and left out:", "", *refused, ""] * bool(refused))
