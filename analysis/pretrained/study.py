"""Compare the commands with common baselines on your own data sets of texts and pictures, also with class names alone.

FOLDER holds tables NAME.csv with columns text and class, whose names are words, or folders of pictures by class.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from analysis.pretrained import measure
from analysis.shared import runner
from analysis.shared.tables import format_mean
from protonet._text import plural
from protonet.embeddings.loading import ENCODER_PACKAGES
from protonet.ui.options import option, positional
from protonet.ui.text import format_table

#: Titles of the methods that others are compared with; "{}" is the representation whose embeddings they use.
METHOD_TITLES = {
    measure.NO_ENCODER: "fit, none",
    measure.CLASS_CODES: "fit, {}, classes called c1, c2, ...",
    measure.NEAREST_NAME: "nearest name, {}",
    measure.LOGISTIC: "logistic regression, {}",
    measure.LOGISTIC_NAMES: "logistic regression, {} and class names",
    measure.TFIDF: "TF-IDF, logistic regression",
    measure.SETFIT: "SetFit's recipe",
}
DEFAULT_REPRESENTATIONS = "sentences,words,efficientnet,none"
TABLE_NOTE = """
Accuracy in percent of `predict` on at most {tests:,} rows of the half of each class that is not learned from, mean
over {splits} of each set, then over sets; ± one standard error of the sets' differences, in pairs. `fit` is run
as it is by default. Seconds of one core's CPU to learn, in a process that has opened its
network already and with the embeddings in the cache. Logistic regression has C = 10, on the embeddings as they are.
Class names are information: compare `fit` with logistic regression that has the embedded names as training rows, and
`fit` with classes called c1, c2, ... with logistic regression without names.
"""
#: Further notes, printed if there are runs without labels, with one label per class, or of a method.
OPTIONAL_NOTES = {
    "names": f"""\
At 0 per class `fit` has names alone (`--classes`), and at most {measure.MAX_UNLABELLED_ROWS:,} rows without a label.
""",
    "one": """\
At 1 per class `fit` has `--allow-many-classes`.
""",
    measure.TFIDF: """\
TF-IDF is sublinear, of words, pairs of words and parts of words of 2 to 5 letters; its logistic regression has C = 10.
""",
    measure.SETFIT: """\
SetFit's recipe fine-tunes the same sentence network for an epoch, by the cosines of 20 pairs of one class and 20 of two
for each labelled text (batches of 16, AdamW at 2e-5), then fits logistic regression.
""",
}


@dataclass(frozen=True, kw_only=True)
class Options(runner.JournalOptions):
    """The options of the study."""

    folder: Path = positional("tables .csv with columns text and class, folders of pictures", metavar="FOLDER")
    sets: str | None = option("their names, with commas (default: all of the folder)", metavar="NAMES")
    shots: Sequence[int] = runner.list_option(
        "labelled rows per class; 0: names alone", "0,1,5,20", partial(runner.parse_integers, low=0)
    )
    splits: int = runner.int_option("splits of each set", 3)
    tests: int = runner.int_option("rows that are judged, at the most", 600)
    representations: Sequence[str] = runner.names_option(
        [*ENCODER_PACKAGES, measure.NO_ENCODER], DEFAULT_REPRESENTATIONS
    )
    setfit: bool = option("run SetFit's recipe, too: minutes for each table", False)


def run(options: Options) -> runner.StudyReport:
    """Execute all runs, and compare the methods for each number of labels per class."""
    paths = measure.list_datasets(options.folder)
    chosen = list(paths) if options.sets is None else runner.parse_names("--sets", options.sets, paths)
    runs = []
    # Maximal number of classes for SetFit's recipe, whose number of pairs grows with the classes.
    max_setfit_classes = 8
    for seed in range(options.splits):
        for name in chosen:
            items = measure.read_dataset(paths[name])
            packaged = [other for other in options.representations if other != measure.NO_ENCODER]
            readers = [name for name in packaged if ENCODER_PACKAGES[name].modality == items.modality]
            reads = next(iter(readers), measure.NO_ENCODER)
            for shots in options.shots:
                setfit = options.setfit and len(items.classes) <= max_setfit_classes
                methods = measure.list_methods(items.modality, shots, options.representations, setfit=setfit)
                fixed = (reads, options.tests)
                runs += [measure.MethodRun(name, shots, seed, method, *fixed) for method in methods]
    source = runner.hash_sources("analysis/pretrained/measure.py", "protonet")
    read = {name: measure.read_dataset(paths[name]) for name in chosen}
    codes = {name: [source, items.sha256] for name, items in read.items()}
    results = runner.run_all(
        runs, lambda run: measure.measure_run(paths[run.dataset], run), options.state, lambda run: codes[run.dataset]
    )
    rows = [{"takes": read[run.dataset].modality, **run._asdict(), **result} for run, result in results.items()]
    sizes = {name: len(items.classes) for name, items in read.items()}
    note = TABLE_NOTE.format(tests=options.tests, splits=plural(options.splits, "split"))
    notes = {"names": 0 in options.shots, "one": 1 in options.shots}
    notes |= {method: any(run.method == method for run in runs) for method in (measure.TFIDF, measure.SETFIT)}
    note += "".join(text for name, text in OPTIONAL_NOTES.items() if notes[name])
    return runner.StudyReport(rows, tabulate(rows, sizes) + note)


def tabulate(rows: Sequence[Mapping[str, Any]], n_classes: Mapping[str, int]) -> str:
    """Format two tables for each modality and number of shots: means, and data sets with their numbers of classes."""
    parts = []
    for kind, items in (("text", "texts"), ("picture", "pictures")):
        for shots in dict.fromkeys(row["shots"] for row in rows if row["takes"] == kind):
            selected = [row for row in rows if row["takes"] == kind and row["shots"] == shots]
            sets, methods = (list(dict.fromkeys(row[name] for row in selected)) for name in ("dataset", "method"))
            head = f"{plural(len(sets), 'set')} of {items}, {shots} labelled per class"
            parts += [f"**{head}**\n", tabulate_means(selected, sets, methods)]
            means = [average_by_dataset(selected, method) for method in methods]
            cells = [[f"{mean[name]:.1f}" if name in mean else "" for mean in means] for name in sets]
            lines = [[name, str(n_classes[name]), *line] for name, line in zip(sets, cells, strict=True)]
            titles = (format_method_name(method, selected) for method in methods)
            parts.append(format_table(["set", "classes", *titles], lines))
    return "\n".join(parts)


def tabulate_means(rows: Sequence[Mapping[str, Any]], sets: Sequence[str], methods: Sequence[str]) -> str:
    """Format a table with a line per method: mean accuracy over data sets, mean differences to methods, CPU time."""
    means = {method: average_by_dataset(rows, method) for method in methods}
    lines = []
    for method, selected in means.items():
        mean = f"{statistics.fmean(selected.values()):.1f}" if len(selected) == len(sets) else ""
        line = [format_method_name(method, rows), mean]
        for other in methods:
            shared = [name for name in sets if name in selected and name in means[other]]
            leads = [selected[name] - means[other][name] for name in shared]
            line += ["" if other == method else format_mean(leads, sign=True)] * (other in METHOD_TITLES)
        seconds = statistics.fmean(row["seconds"] for row in rows if row["method"] == method)
        lines.append([*line, f"{seconds:.1f}"])
    headings = [f"less {format_method_name(other, rows)}" for other in methods if other in METHOD_TITLES]
    return format_table(["", "accuracy, %", *headings, "CPU s"], lines)


def average_by_dataset(rows: Sequence[Mapping[str, Any]], method: str) -> dict[str, float]:
    """Compute the mean accuracy of a method over splits, for each data set."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["method"] == method:
            scores.setdefault(row["dataset"], []).append(row["percent"])
    return {name: statistics.fmean(selected) for name, selected in scores.items()}


def format_method_name(method: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the title of a method in tables, with the name of its representation."""
    return METHOD_TITLES.get(method, f"fit, {method}").format(rows[0]["representation"])
