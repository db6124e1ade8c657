"""Evaluate every few-shot method on photographs, with features of a pretrained network from a Python package.

FOLDER holds pictures at any depth; the name of the folder directly above a picture is its class. The table identifies
the pictures by a hash.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from analysis.shared.runner import BUILD_FOLDER, FOLDER_OPTION, StudyParser, StudyReport
from protonet.embeddings.pictures.reading import IMAGE_SUFFIXES
from protonet.embeddings.representation import hash_file
from protonet.episodes.__main__ import main
from protonet.episodes.evaluation.report import accuracy_heading, format_rate
from protonet.episodes.evaluation.statistics import MeasureMean
from protonet.episodes.methods import METHODS
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_output_path
from protonet.ui.text import format_table

#: Methods without further inputs, such as class names or a trained encoder, and faster than 0.1 s per episode.
EVALUATED_METHODS = tuple(name for name, spec in METHODS.items() if not spec.slow and not spec.needs)
EXIT_INTERRUPTED = 130  #: The exit code of a command after Ctrl-C.
#: Names of published data sets, by `hash_pictures` of their pictures.
KNOWN_DATASET_HASHES = {
    "ea90d7c80ab1409ad2b63cd0b117e5092afe8cd340c40151f2f5e6d4f1db7ec1": "GroceryStoreDataset, Klasson, Zhang and "
    "Kjellström (2019),\nhttps://github.com/marcusklasson/GroceryStoreDataset, `train`, `val` and `test` of `dataset`"
}
#: Options of ``python -m protonet.episodes`` for each column of the table.
COLUMN_OPTIONS: dict[str, tuple[str, ...]] = {
    "1-shot": ("--shot", "1", "--query", "15"),
    "5-shot": ("--shot", "5", "--query", "15"),
    "1-shot, Dirichlet": ("--shot", "1", "--query", "6", "--imbalance", "2.0"),
    "5-shot, Dirichlet": ("--shot", "5", "--query", "6", "--imbalance", "2.0"),
}
#: Accuracies in percent at 1 and 5 shots on mini-ImageNet, 1,000 episodes on features of a ResNet-12 of FEAT's authors.
PUBLISHED_ACCURACIES = {
    "protonet": (63.6, 80.4),
    "simpleshot": (63.6, 80.5),
    "linear-finetune": (63.3, 80.5),
    "bd-cspn": (69.8, 82.2),
    "laplacian-shot": (69.8, 82.3),
    "pt-map": (76.1, 84.2),
    "tim": (74.3, 84.2),
    "transductive-finetune": (63.0, 80.6),
}
PUBLISHED_SOURCE = "README.md of https://github.com/sicara/easy-few-shot-learning, commit 8023ff49a02a"
TABLE_TITLE = """# Few-shot methods on photographs

{n:,} photographs of {classes} classes: {known};
sha256 of all {sha}.

Features of `{backbone}`, {way}-way, classes split at random by seed 0 into 60 % base, 15 % validation and 25 % novel
ones, {episodes:,} episodes. 15 queries per class, or, by Dirichlet shares of concentration 2, 6 on average. Intervals
over classes come first.

"""
RANKS_NOTE = f"""
Ranks at 1 and 5 shots, with accuracies, here and as published on mini-ImageNet, each on features of one network
({PUBLISHED_SOURCE}):

"""


def add_options(parser: StudyParser) -> None:
    """Add the study's options: the folder of pictures, the methods and the settings of episodes."""
    parser.add_argument(FOLDER_OPTION, metavar="FOLDER", help="pictures in folders of their classes")
    text = "as of protonet.episodes extract (default: efficientnet:160)"
    parser.add_argument("--backbone", default="efficientnet:160", metavar="NET", help=text)
    parser.add_int_option("--way", 5, "classes of an episode", low=2)
    parser.add_int_option("--episodes", 1000, "episodes of each column", low=2)
    parser.add_names_option("--methods", EVALUATED_METHODS)


def run(options: argparse.Namespace) -> StudyReport:
    """Embed the pictures, and evaluate the methods in every setting of episodes; finished steps are skipped."""
    pictures = locate_pictures(Path(options.folder))
    digest = hash_pictures(pictures)
    build = check_output_path("build", BUILD_FOLDER / f"photographs-{digest[:8]}", folder=True)
    for path, label in pictures:
        unique = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]  # folders may hold files of one name
        link = build / "pictures" / label / f"{path.parent.parent.name}-{unique}{path.suffix}"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(path.resolve())
    features = build / f"{options.backbone.replace(':', '-').replace('/', '-')}.npz"
    run_command("extract", str(build / "pictures"), "--backbone", options.backbone, "-o", str(features), "--resume")
    names = EVALUATED_METHODS if options.methods is None else tuple(options.methods)
    shared = ("--dataset", str(features), "--split-seed", "0", "--way", str(options.way), "--method", *names)
    results: dict[str, Any] = {}
    for index, (title, arguments) in enumerate(COLUMN_OPTIONS.items()):
        run_digest = hashlib.sha256(json.dumps([shared, options.episodes]).encode()).hexdigest()[:8]
        out = build / f"{run_digest}-{index}.json"
        resumable = ("--json", str(out), "--state", str(out.with_suffix(".npz")), "--resume")
        run_command(*shared, *arguments, "--episodes", str(options.episodes), *resumable)
        results[title] = json.loads(out.read_text(encoding="utf-8"))
    classes, known = {label for _, label in pictures}, KNOWN_DATASET_HASHES.get(digest, "of no set that we know")
    settings = {"backbone": Path(options.backbone).name, "way": options.way, "episodes": options.episodes}
    head = TABLE_TITLE.format(n=len(pictures), classes=len(classes), known=known, sha=digest, **settings)
    return StudyReport(results, head + tabulate(results, names) + RANKS_NOTE + tabulate_ranks(results))


def run_command(*arguments: str) -> None:
    """Run ``python -m protonet.episodes`` in this process, without its stdout; raise an InputError if it fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise_input_error("protonet.episodes", "run", " ".join(arguments[:2]), "Its message is above.")


def locate_pictures(root: Path) -> list[tuple[Path, str]]:
    """List the path and the class of each picture below a folder, sorted by path."""
    paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if len({path.parent.name for path in paths}) < 2:
        must = "hold pictures in folders of two classes or more"
        raise_input_error(FOLDER_OPTION, must, root, "Pass the folder above them.")
    return [(path, path.parent.name) for path in paths]


def hash_pictures(pictures: Sequence[tuple[Path, str]]) -> str:
    """Hash the classes and contents of pictures; the names and the order of the files do not matter."""
    lines = sorted(f"{label}\t{hash_file(path)}\n" for path, label in pictures)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tabulate(results: Mapping[str, Any], names: Sequence[str]) -> str:
    """Format a table of accuracies in percent with both intervals: a line per method, a column per episode setting."""
    columns = [result["methods"] for result in results.values()]
    rates = [[MeasureMean.from_dict(methods[name]) for methods in columns] for name in names]
    lines = [[name, *map(format_rate, row)] for name, row in zip(names, rates, strict=True)]
    return format_table([accuracy_heading(chain.from_iterable(rates)), *results], lines)


def tabulate_ranks(results: Mapping[str, Any]) -> str:
    """Format a table of each method's measured and published rank and accuracy; ties share their mean rank."""
    names = [name for name in PUBLISHED_ACCURACIES if name in results["1-shot"]["methods"]]
    columns = []
    for index, title in enumerate(("1-shot", "5-shot")):
        methods = results[title]["methods"]
        columns.append([100 * methods[name]["accuracy"] for name in names])
        columns.append([PUBLISHED_ACCURACIES[name][index] for name in names])
    ranks = rankdata(np.negative(columns), axis=1)  # (columns, methods)
    lines = []
    for index, name in enumerate(names):
        pairs = zip(ranks[:, index], np.array(columns)[:, index], strict=True)
        lines.append([name, *(f"{rank:g} ({accuracy:.1f})" for rank, accuracy in pairs)])
    return format_table(["rank", "1-shot", "published", "5-shot", "published"], lines)
