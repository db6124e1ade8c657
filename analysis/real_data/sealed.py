"""Measure a sealed collection once: tables, texts, pictures and series of unread public repositories.

`sealed.csv` lists the sets: repository, commit, path, target. These rules were written before anything was measured:

- Repositories: unread ones of newsrooms, researchers and teachers. At most ten tables of each, 60 in all.
- Tables: files that the study `raw-tables` finds, with the target that its rule chooses, in the order of a hash of
  their path; first those with a word such as "type" or "status" in the target's name. Targets that are dates or
  identifiers, and files that have the name of a development set or of a textbook's table, are left out.
- Classes: the largest, eight at most, of at least 25 rows.
- Splits: half of each class may be training rows. 5 and 20 labelled rows per class (or that half), three splits, and
  at most 200 test rows of natural frequencies.
- Wins and losses: beyond the 95 % t interval of the splits. Means and errors are over repositories.

FOLDER holds a clone of each repository, OWNER+NAME. Finished runs are kept: baselines may be measured first.
"""

from __future__ import annotations

import csv
import functools
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import t

from analysis.pretrained import measure
from analysis.real_data import raw_tables
from analysis.real_data.robustness import fit_protonet
from analysis.shared.baselines import BASELINES
from analysis.shared.runner import (
    JournalOptions,
    StudyReport,
    hash_sources,
    int_option,
    list_option,
    names_option,
    parse_integers,
    run_all,
)
from analysis.shared.tables import format_mean, mean_by_group
from protonet._text import plural
from protonet.errors import raise_input_error
from protonet.ui.options import positional
from protonet.ui.text import format_table

LIST = Path(__file__).with_name("sealed.csv")
MAX_TEST_ROWS = 200
OURS = "ours"
#: The methods of each kind of set: protonet, then baselines.
METHODS = {
    "table": (OURS, *raw_tables.SKRUB_MODELS),
    "text": (OURS, measure.LOGISTIC, measure.LOGISTIC_NAMES, measure.TFIDF),
    "picture": (OURS, measure.LOGISTIC),
    "series": (OURS, "trees", "svm", "convolutions"),
}
TITLES = {"table": "Tables", "text": "Texts", "picture": "Pictures", "series": "Series"}
ENCODERS = {"text": "sentences", "picture": "efficientnet"}
TABLE_NOTE = """
Accuracy in percent, mean over {splits} of each set, then over sets. The lead is that of protonet in points, ± one
standard error over repositories, each with equal weight: over the best single baseline of the table, and over the best
baseline of each set in hindsight. Wins, ties and losses are against the best single baseline, beyond the 95 % t
interval of the splits. Baselines of tables read skrub's features and are untuned; those of texts and pictures read the
embedding that protonet reads, "logistic names" the embedded class names as well.
"""


class SealedSet(NamedTuple):
    """A set of the collection: a file or files of a repository at a commit."""

    kind: str  #: "table", "text", "picture" or "series".
    repository: str  #: The folder of its clone, OWNER+NAME.
    commit: str
    path: str
    """A table or a file of a text per line; a regular expression of pictures, whose group is the class; or the prefix
    of the files TRAIN and TEST of series."""
    target: str  #: The column, or the file, of classes; empty for pictures and series.
    text: str  #: The column of texts in a table of texts, otherwise empty.


class SealedRun(NamedTuple):
    """One run: a method on a split of a set."""

    repository: str
    path: str
    shots: int
    seed: int
    method: str


class SealedRows(NamedTuple):
    """The rows of a set: their labels, and the content that their kind of set needs."""

    items: measure.ItemDataset  #: Labels, and texts or paths of pictures.
    table: tuple[list[str], Any, bool] | None = None  #: A table's lines, data frame, and whether it has no header.
    rows: np.ndarray | None = None  #: The indices of a table's rows that have a class; or the values of series.


@dataclass(frozen=True, kw_only=True)
class Options(JournalOptions):
    """The options of the study."""

    folder: Path = positional("a folder with a clone of each repository, OWNER+NAME")
    kinds: Sequence[str] | None = names_option(METHODS)
    methods: Sequence[str] | None = names_option(
        list(dict.fromkeys(name for names in METHODS.values() for name in names))
    )
    shots: Sequence[int] = list_option("labelled rows per class", "5,20", functools.partial(parse_integers, low=1))
    splits: int = int_option("splits of each set", 3)


def run(options: Options) -> StudyReport:
    """Execute all runs, and compare the methods for each kind of set and number of labelled rows."""
    chosen = [item for item in read_list() if options.kinds is None or item.kind in options.kinds]
    missing = sorted({item.repository for item in chosen if not (options.folder / item.repository).exists()})
    if missing:
        raise_input_error("folder", f"hold {plural(len(missing), 'clone')} more", missing[0], "Clone it there.")
    kinds = {(item.repository, item.path): item for item in chosen}
    runs = [
        SealedRun(item.repository, item.path, shots, seed, method)
        for item in chosen
        for shots in options.shots
        for seed in range(options.splits)
        for method in METHODS[item.kind]
        if options.methods is None or method in options.methods
    ]
    data = hash_sources("analysis/real_data/sealed.py", "analysis/real_data/raw_tables.py", "analysis/pretrained")
    codes = {True: [data, hash_sources("protonet")], False: [data, hash_sources("analysis/shared/baselines.py")]}

    with tempfile.TemporaryDirectory() as build:
        load = functools.lru_cache(maxsize=1)(load_set)  # the runs of a set follow each other

        def execute(run: SealedRun) -> float:
            item = kinds[run[:2]]
            return measure_run(load(options.folder, item, Path(build)), item, run)

        results = run_all(runs, execute, options.state, lambda run: codes[run.method == OURS])
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for done, accuracy in results.items():
        kind = kinds[done[:2]].kind
        row = rows.setdefault(done[:3], {"kind": kind, **done._asdict(), "accuracy": {}})
        row["accuracy"].setdefault(done.method, []).append(accuracy)
    for row in rows.values():
        del row["seed"], row["method"]
    return StudyReport(list(rows.values()), tabulate(list(rows.values())))


def read_list() -> list[SealedSet]:
    """Read the list of sets."""
    with LIST.open(encoding="utf-8", newline="") as file:
        return [SealedSet(**row) for row in csv.DictReader(file)]


def measure_run(content: SealedRows, item: SealedSet, run: SealedRun) -> float:
    """Measure the accuracy in percent of a method on a split of a set."""
    split = measure.split_dataset(content.items, run.shots, run.seed, MAX_TEST_ROWS)
    return MEASURES[item.kind](content, item, split, run)


def load_set(folder: Path, item: SealedSet, build: Path) -> SealedRows:
    """Read a set from the clone of its repository; pictures are written to the folder ``build``."""
    read = functools.partial(read_file, folder / item.repository, item.commit)
    if item.kind == "picture":
        return SealedRows(_load_pictures(folder / item.repository, item, build))
    if item.kind == "series":
        lines = [
            line for part in ("TRAIN", "TEST") for line in read(item.path + part).decode().split("\n") if line.strip()
        ]
        values = np.array([re.split(r"[\s,]+", line.strip()) for line in lines], dtype=np.float64)
        return SealedRows(_make_items("series", [], values[:, 0].astype(int).astype(str).tolist()), None, values[:, 1:])
    if item.kind == "text" and not item.text:
        texts = [line.strip() for line in read(item.path).decode("utf-8", "replace").split("\n")]
        names = [line.strip() for line in read(item.target).decode().split("\n")]
        pairs = [pair for pair in zip(texts, names, strict=False) if all(pair)]
        return SealedRows(_keep_large_classes("text", *map(list, zip(*pairs, strict=True)))[0])
    path = build / f"set{Path(item.path).suffix}"
    path.write_bytes(read(item.path))
    if item.kind == "text":
        import pandas as pd  # noqa: PLC0415 - optional

        frame = pd.read_csv(path, encoding_errors="replace").dropna(subset=[item.text, item.target])
        cells = [frame[name].astype(str).str.strip().tolist() for name in (item.text, item.target)]
        return SealedRows(_keep_large_classes("text", *cells)[0])
    table = raw_tables.read_raw_table(path)
    assert table is not None, f"{item.repository}: {item.path}"
    names = table[1][item.target].astype(str).str.strip().tolist()
    items, rows = _keep_large_classes("table", names, names)
    return SealedRows(items, table, rows)


def read_file(clone: Path, commit: str, path: str) -> bytes:
    """Read a file of a repository at a commit."""
    return _call_git(clone, "show", f"{commit}:{path}")


def _call_git(clone: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(clone), *words], capture_output=True, check=True).stdout


def _load_pictures(clone: Path, item: SealedSet, build: Path) -> measure.ItemDataset:
    """Write the pictures of a set to a folder: the first ones of each class by their paths."""
    max_class_pictures = 60  # an embedding takes 0.2 s
    listed = _call_git(clone, "ls-tree", "-r", "-z", "--name-only", item.commit).decode().split("\0")
    matches = [(name, match[1]) for name in sorted(listed) if (match := re.fullmatch(item.path, name))]
    counts = dict.fromkeys((label for _, label in matches), 0)
    paths, names = [], []
    for index, (name, label) in enumerate(matches):
        counts[label] += 1
        if counts[label] <= max_class_pictures:
            path = build / f"{item.repository}-{index}{Path(name).suffix.lower()}"
            path.write_bytes(read_file(clone, item.commit, name))
            paths.append(str(path))
            names.append(label)
    return _make_items("picture", paths, names)


def _make_items(kind: str, contents: list[str], names: Sequence[str]) -> measure.ItemDataset:
    """Make a set of rows and their class names."""
    classes, labels = np.unique(names, return_inverse=True)
    return measure.ItemDataset(kind, contents, tuple(classes.tolist()), labels, "")


def _keep_large_classes(kind: str, contents: list[str], names: list[str]) -> tuple[measure.ItemDataset, np.ndarray]:
    """Keep the rows of the largest classes; return them and their indices."""
    import pandas as pd  # noqa: PLC0415 - optional

    column = pd.Series(names).where(lambda cells: ~cells.isin(["nan", ""]))
    classes = raw_tables.count_large_classes(column).index[: raw_tables.MAX_CLASSES]
    rows = np.flatnonzero(column.isin(classes))
    return _make_items(kind, [contents[row] for row in rows], [names[row] for row in rows]), rows


def measure_table(content: SealedRows, item: SealedSet, split: measure.RowSplit, run: SealedRun) -> float:
    """Measure the commands, or a pipeline of skrub, on a table."""
    assert content.table is not None
    assert content.rows is not None
    lines, frame, no_header = content.table
    names = np.full(len(frame), "", dtype=object)
    names[content.rows] = content.items.class_names
    train = np.random.default_rng(0).permutation(content.rows[split.labelled_rows])
    test = content.rows[split.test_rows]
    if run.method != OURS:
        scores = raw_tables.score_skrub(frame.drop(columns=item.target), names, train, test, [run.method])
        return 100 * scores[run.method]
    table = raw_tables.RawTable(run.path, item.target, run.shots, no_header)
    return 100 * raw_tables.score_commands(lines, train, test, table)


def measure_items(content: SealedRows, item: SealedSet, split: measure.RowSplit, run: SealedRun) -> float:
    """Measure the commands, or a baseline on the same embedding, on texts or pictures."""
    encoder = ENCODERS[content.items.modality]
    method = encoder if run.method == OURS else run.method
    of_encoder = measure.MethodRun(run.path, run.shots, run.seed, method, encoder, MAX_TEST_ROWS)
    return measure.measure_split(content.items, split, of_encoder)["percent"]


def measure_series(content: SealedRows, item: SealedSet, split: measure.RowSplit, run: SealedRun) -> float:
    """Measure the solver or a baseline on series."""
    assert content.rows is not None
    fit = fit_protonet if run.method == OURS else BASELINES[run.method].fit
    x, y = content.rows, content.items.labels
    with torch.random.fork_rng(devices=[]):
        predictor = fit(x[split.labelled_rows], y[split.labelled_rows])
    return 100 * float((predictor(x[split.test_rows]).predicted == y[split.test_rows]).mean())


MEASURES: dict[str, Callable[[SealedRows, SealedSet, measure.RowSplit, SealedRun], float]] = {
    "table": measure_table,
    "text": measure_items,
    "picture": measure_items,
    "series": measure_series,
}


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Format a table of means for each kind and number of labelled rows, and the ten worst sets by name."""
    parts, worst = [], []
    for kind, shots in dict.fromkeys((row["kind"], row["shots"]) for row in rows):
        group = [row for row in rows if (row["kind"], row["shots"]) == (kind, shots)]
        means = [{name: statistics.fmean(values) for name, values in row["accuracy"].items()} for row in group]
        methods = [name for name in METHODS[kind] if all(name in mean for mean in means)]
        lines = [[name, f"{statistics.fmean(mean[name] for mean in means):.1f}"] for name in methods]
        baselines = [name for name in methods if name != OURS]
        if OURS in methods and baselines:
            single = max(baselines, key=lambda name: statistics.fmean(mean[name] for mean in means))
            leads = {
                single: [mean[OURS] - mean[single] for mean in means],
                "best in hindsight": [mean[OURS] - max(mean[name] for name in baselines) for mean in means],
            }
            best = [max(mean[name] for name in baselines) for mean in means]
            lines.append(["best in hindsight", f"{statistics.fmean(best):.1f}"])
            repositories = [row["repository"] for row in group]
            outcomes = [compare(row["accuracy"][OURS], row["accuracy"][single]) for row in group]
            counts = [str(outcomes.count(sign)) for sign in (1, 0, -1)]
            cells_of = {
                name: [format_mean(mean_by_group(lead, repositories), digits=1, sign=True)]
                for name, lead in leads.items()
            }
            cells_of[single].append(", ".join(counts))
            lines = [[*line, *cells_of.get(line[0], [])] for line in lines]
            worst += [(lead, row) for lead, row in zip(leads["best in hindsight"], group, strict=True)]
        n_repositories = len({row["repository"] for row in group})
        title = f"{TITLES[kind]}: {plural(len(group), 'set')}, repositories: {n_repositories}"
        head = ["method", "accuracy, %", "lead of protonet", "wins, ties, losses"]
        cells = [line + [""] * (len(head) - len(line)) for line in lines]
        parts.append(f"**{title}, {shots} rows per class**\n\n{format_table(head, cells)}\n")
    splits = max(len(values) for row in rows for values in row["accuracy"].values())
    text = "\n".join(parts) + TABLE_NOTE.format(splits=plural(splits, "split"))
    if worst:
        worst.sort(key=lambda pair: pair[0])
        cells = [[row["repository"], row["path"], str(row["shots"]), f"{lead:+.1f}"] for lead, row in worst[:10]]
        text += "\nThe ten worst, beside the best baseline in hindsight:\n\n"
        text += format_table(["repository", "set", "rows per class", "points"], cells)
    return text


def compare(ours: Sequence[float], other: Sequence[float]) -> int:
    """Return 1 or -1 if ours is ahead or behind beyond the 95 % t interval of paired splits, otherwise 0."""
    leads = np.subtract(ours, other)
    if len(leads) < 2:
        return 0
    half_width = t.ppf(0.975, len(leads) - 1) * leads.std(ddof=1) / len(leads) ** 0.5
    return int(np.sign(leads.mean())) if abs(leads.mean()) > half_width else 0
