"""Mislabelled rows: how well a list of suspicious rows finds labels that were flipped, beside confident learning.

Of real data, 20 rows per class, 5 % of the labels are those of another class, drawn at random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.real_data.robustness import DATA
from analysis.real_data.sets import DATASETS, load_real, split_shots
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import Report, StudyParser, load_sets
from analysis.shared.tables import format_mean
from protonet._checks import refuse
from protonet.fit.crossfit import REPEATS, crossfit, number_held, predict_held, repeat_held
from protonet.fit.search import EFFORTS
from protonet.fit.solver import solve_problem
from protonet.metrics import suspect_labels
from protonet.ui.command_line import check_name
from protonet.ui.text import count, format_table
from solution.pack import library_files

SHOTS, FLIPPED = 20, 0.05
#: The sets that the list was chosen on; the others chose nothing.
CHOSEN_ON = ("digits", "wine", "breast_cancer", "iris", "glyphs", "text")
OURS, ONCE = f"ours: mean of {REPEATS} crossfits", "ours: one crossfit"
#: What the peers' Python runs: scores, higher for suspicious rows, from probabilities (n, classes) and labels (n,).
PEERS = """
import json, sys, warnings
import numpy as np
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
warnings.filterwarnings("ignore")
data, found = np.load(sys.argv[1]), {}
for name, times in (("once", "one crossfit"), ("mean", "mean of REPEATS crossfits")):
    p, y = data[name], data["y"]
    for method in ("self_confidence", "normalized_margin"):
        score = -get_label_quality_scores(y, p, method=method)
        found[f"cleanlab's scores, {method}: {times}"] = score.tolist()
    score = -get_label_quality_scores(y, p, method="self_confidence")
    for rule in ("prune_by_noise_rate", "confident_learning"):
        listed = find_label_issues(y, p, filter_by=rule, n_jobs=1)
        found[f"cleanlab's list, {rule}: {times}"] = (10.0 * listed + score).tolist()
print(json.dumps(found))
""".replace("REPEATS", str(REPEATS))
NOTE = """
Average precision of the list in percent, mean over {splits} ± one standard error: {shots} rows per class,
{flipped:g} % of the labels flipped, effort {effort}. All lists are made of the same held-out probabilities of `fit`, of
one crossfit or of the mean of {repeats}. What ours is was chosen on {chosen}; the other sets chose nothing.
"""
CLEANLAB = """
Confident learning is that of Northcutt, Jiang and Chuang (2021), the package cleanlab. What its list holds comes first,
the least self-confident ahead, and then the other rows likewise.
"""


class Run(NamedTuple):
    """One split."""

    dataset: str
    seed: int
    effort: str
    peers: str | None  #: The Python that has cleanlab.


def add_options(parser: StudyParser) -> None:
    """Add what to measure."""
    parser.add_names("--datasets", DATASETS)
    parser.add_whole("--splits", 3, "splits of each data set")
    parser.add("--effort", "fast", "of the fit", partial(check_name, known=EFFORTS))
    parser.add_argument("--peers", metavar="PYTHON", help="a Python that has cleanlab, to compare with")
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Do every run, and average by data set."""
    if options.peers is not None:
        check_peers(options.peers)
    runs = list(list_runs(options.datasets or list(DATASETS), options.splits, options.effort, options.peers))
    if not runs:
        refuse("--datasets", f"have {SHOTS} rows per class and some more", "none", "Pass other data sets.")
    sources = ("analysis/real_data/mislabelled.py", *DATA, "protonet/fit/crossfit.py", "protonet/metrics.py")
    code = hash_sources(*sources, *library_files())
    results = run_all(runs, measure_run, options.state, lambda _: code)
    rows: dict[str, dict[str, list[float]]] = {}
    for each, result in results.items():
        for name, value in result.items():
            rows.setdefault(each.dataset, {}).setdefault(name, []).append(100 * value)
    return Report([{"dataset": name, "percent": own} for name, own in rows.items()], tabulate(rows, options))


def list_runs(datasets: Sequence[str], splits: int, effort: str, peers: str | None) -> Iterator[Run]:
    """Yield every run that there are rows for; on stderr, name the sets whose package is missing."""
    for name, data in load_sets(datasets, load_real):
        if split_shots(data, SHOTS, 0) is not None:
            yield from (Run(name, seed, effort, peers) for seed in range(splits))


def flip_labels(labels: Tensor, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return labels (n,) of which a share is that of another class, and which those are (n,) bool."""
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.randperm(len(labels), generator=generator)[: max(1, round(FLIPPED * len(labels)))]
    noisy, wrong = labels.clone(), torch.zeros(len(labels), dtype=torch.bool)
    noisy[flipped] += torch.randint(1, num_classes, (len(flipped),), generator=generator)
    wrong[flipped] = True
    return noisy % num_classes, wrong


def measure_run(run: Run) -> dict[str, float]:
    """Return the average precision of each list."""
    split = split_shots(load_real(run.dataset), SHOTS, run.seed)
    assert split is not None, "list_runs leaves these out"
    labels, wrong = flip_labels(split.train_y, split.num_classes, run.seed)
    solution = solve_problem([(split.train_x, labels)], effort=run.effort)
    crossed, held = crossfit(solution), number_held(solution.problem)
    judged = held >= 0
    once, mean = predict_held(crossed)[held[judged]], repeat_held(solution, crossed)[held[judged]]
    labels, wrong = labels[judged], wrong[judged]
    scores = {OURS: suspect_labels(mean, labels), ONCE: suspect_labels(once, labels)}
    if run.peers is not None:
        scores |= ask_peers(run.peers, once, mean, labels)
    return {name: average_precision(score, wrong) for name, score in scores.items()}


def check_peers(python: str) -> None:
    """Raise an InputError, before the work, unless a Python has cleanlab."""
    try:
        ended = subprocess.run([python, "-c", "import cleanlab"], capture_output=True, text=True, check=False)
        got = (ended.stderr.splitlines() or ["nothing"])[-1] if ended.returncode else None
    except OSError as error:
        got = f"{python} ({error.strerror})"
    if got is not None:
        refuse("--peers", "be a Python that has cleanlab", got, "Run pip install cleanlab there.")


def ask_peers(python: str, once: Tensor, mean: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the scores (n,) that cleanlab gives rows, by name, given their logits (n, classes) and labels (n,)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "held.npz")
        shares = [each.double().softmax(dim=1).numpy() for each in (once, mean)]
        np.savez(path, y=labels.numpy(), once=shares[0], mean=shares[1])
        ended = subprocess.run([python, "-c", PEERS, path], capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    return {name: torch.tensor(score, dtype=torch.float64) for name, score in found.items()}


def average_precision(scores: Tensor, wrong: Tensor) -> float:
    """Return the mean, over the wrong rows (n,) bool, of the precision down to each; ties in the worst order.

    Source: Manning, Raghavan and Schütze, "Introduction to information retrieval" (2008), sec. 8.4.
    """
    order = np.lexsort((wrong.numpy(), -scores.numpy()))
    hits = wrong[torch.from_numpy(order)].double()
    precision = hits.cumsum(dim=0) / torch.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / hits.sum())


def tabulate(rows: Mapping[str, Mapping[str, Sequence[float]]], options: Any) -> str:
    """Return a table of the lists, down, by data set, and the means of the sets that chose and of the others."""
    sets = [*(name for name in rows if name in CHOSEN_ON), *(name for name in rows if name not in CHOSEN_ON)]
    halves = [[name for name in sets if (name in CHOSEN_ON) == chosen] for chosen in (True, False)]
    lines = []
    for method in next(iter(rows.values())):
        means = {name: statistics.fmean(rows[name][method]) for name in sets}
        both = [f"{statistics.fmean(means[name] for name in half):.2f}" if half else "" for half in halves]
        lines.append([method, *both, *(format_mean(rows[name][method]) for name in sets)])
    splits, chosen = count(options.splits, "split"), ", ".join(halves[0]) or "other sets"
    settings = {"shots": SHOTS, "flipped": 100 * FLIPPED, "effort": options.effort, "repeats": REPEATS}
    note = NOTE.format(splits=splits, chosen=chosen, **settings) + (CLEANLAB if options.peers else "")
    return format_table(["list", "sets that chose", "other sets", *sets], lines) + note
