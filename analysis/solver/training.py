"""What each part of the training recipe is worth.

Trains the same MLP with one part of the recipe changed at a time, on few-shot splits of real data, and compares the
accuracy of its prototypes with the default's, paired by split; then trains for several numbers of steps, with the
shared optimizer and with AdamW.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from analysis.real_data.sets import load_real, split_shots
from analysis.shared.baselines import pool_labelled
from analysis.shared.journal import run_all
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_mean, subtract
from protonet.datasets import Split
from protonet.fit.crossfit import score_cosine
from protonet.ui.text import format_table
from protonet.views.budget import plan_encoder
from protonet.views.linear import Linear
from protonet.views.training import Recipe, ResidualMLPs, Task, train
from protonet.views.view import Rows

DATASETS = ("digits", "wine", "iris", "breast_cancer")
SHOTS, HIDDEN = 10, 64
LENGTH, STEPS = 60, (10, 30, 60, 100, 200, 300)  #: How long variants train, and when the two optimizers are compared.
DEFAULT = Recipe()
VARIANTS = {
    "default": DEFAULT,
    "no episodes": DEFAULT._replace(episodic=0.0),
    "no cross-entropy": DEFAULT._replace(cross_entropy=0.0),
    "no label smoothing": DEFAULT._replace(smoothing=0.0),
    "no input noise": DEFAULT._replace(noise=0.0),
    "twice the input noise": DEFAULT._replace(noise=2 * DEFAULT.noise),
    "no weight averaging": DEFAULT._replace(average=0.0),
    "a third of the learning rate": DEFAULT._replace(learning_rate=DEFAULT.learning_rate / 3),
}
ADAMW = DEFAULT._replace(optimizer=torch.optim.AdamW, learning_rate=3e-3, weight_decay=1e-2)  #: Its rates suit it.
OPTIMIZERS = {"CustomOptimizer": DEFAULT, "AdamW": ADAMW}


def measure(recipe: Recipe, split: Split, seed: int, steps: Sequence[int]) -> list[float]:
    """Train on one split, all its labelled samples, and return the test accuracy in percent after each step count."""
    x, y = pool_labelled(split)
    view = Linear("standardised").fit(Rows(x, y, split.num_classes)).map
    generator = torch.Generator().manual_seed(seed)
    dim = plan_encoder(x.shape[1], split.num_classes, 10**9).embedding_dim
    stack = ResidualMLPs(1, x.shape[1], HIDDEN, dim, generator)
    task = Task(view(x), y)

    accuracies = []
    for _, average in train(stack, [task], split.num_classes, steps=steps, generator=generator, recipe=recipe):
        labelled, queries = (average(view(rows))[0] for rows in (x, split.test_x))
        predicted = score_cosine(labelled, y, queries, split.num_classes).argmax(dim=1)
        accuracies.append(100 * float((predicted == split.test_y).double().mean()))
    return accuracies


def measure_split(run: tuple[str, int, int, Sequence[int]]) -> dict[str, list[float]]:
    """Return the percentages of every variant after ``LENGTH`` steps, and of both optimizers after each of ``STEPS``.

    ``run`` is the data set, its split's seed, ``LENGTH`` and ``STEPS``. Of a set with too few rows there are none.
    """
    name, seed, length, steps = run
    split = split_shots(load_real(name), SHOTS, seed)
    if split is None:
        return {}
    accuracies = {variant: measure(recipe, split, seed, [length]) for variant, recipe in VARIANTS.items()}
    return accuracies | {optimizer: measure(recipe, split, seed, steps) for optimizer, recipe in OPTIMIZERS.items()}


def add_options(parser: StudyParser) -> None:
    """Add how many splits there are."""
    parser.add_whole("--splits", 5, "splits of each data set")
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Measure every variant on every split."""
    runs = [(name, seed, LENGTH, STEPS) for name in DATASETS for seed in range(options.splits)]
    results = [result for result in run_all(runs, measure_split, options.state, unit="split").values() if result]
    default = [result["default"][0] for result in results]
    rows = []
    for name in VARIANTS:
        values = [result[name][0] for result in results]
        paired = [] if name == "default" else subtract(values, default)
        rows.append([name, format_mean(values), format_mean(paired, sign=True)])
    table = format_table(["recipe", "accuracy", "against the default, paired"], rows)
    text = f"{table}\n\n{SHOTS} shots, {options.splits} splits each of {', '.join(DATASETS)}; "
    text += f"one MLP of {HIDDEN} units, {LENGTH} steps. Mean ± one standard error, percent.\n"
    lines = [[name, *map(format_mean, zip(*(result[name] for result in results), strict=True))] for name in OPTIMIZERS]
    text += f"\n{format_table(['accuracy after', *(f'{steps} steps' for steps in STEPS)], lines)}"
    return Report(rows, text)
