"""What each part of the training recipe is worth: ``python -m analysis.training``.

Trains the same MLP with one part of the recipe changed at a time, on few-shot splits of real data, and compares the
accuracy of its prototypes with the default's, paired by split; then trains for several numbers of steps, with the
shared optimizer and with AdamW.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.training"))

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis.options import write_results
from analysis.realdata import load_real, split_shots
from analysis.tables import format_mean
from protonet.commands.common import Parser, check_outputs, format_table, parse_whole, run_command
from protonet.datasets import Split
from protonet.encoder import ResidualMLPs, plan_encoder
from protonet.losses import class_means
from protonet.views.linear import fit_view
from protonet.views.mlp import Recipe, Task, train

PROG = "analysis.training"
DATASETS = ("digits", "wine", "iris", "breast_cancer")
SHOTS, WIDTH = 10, 64
#: How long variants train, and when the two optimizers are compared.
LENGTH, STEPS = 60, (10, 30, 60, 100, 200, 300)
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
#: AdamW with the rates that suit it here.
OPTIMIZERS = {
    "CustomOptimizer": DEFAULT,
    "AdamW": DEFAULT._replace(optimizer=torch.optim.AdamW, learning_rate=3e-3, weight_decay=1e-2),
}


def measure(recipe: Recipe, split: Split, seed: int, steps: Sequence[int]) -> list[float]:
    """Train on one split, all its labelled samples, and return the test accuracy in percent after each step count."""
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    view = fit_view("standardised", x, y, split.num_classes)
    generator = torch.Generator().manual_seed(seed)
    dim = plan_encoder(x.shape[1], split.num_classes, 10**9).embedding_dim
    stack = ResidualMLPs(1, x.shape[1], WIDTH, dim, generator)
    task = Task(view(x), y)

    def embed(average: ResidualMLPs, rows: Tensor) -> Tensor:
        return F.normalize(average(view(rows))[0], dim=1)

    accuracies = []
    for _, average in train(stack, [task], split.num_classes, steps=steps, generator=generator, recipe=recipe):
        prototypes = F.normalize(class_means(embed(average, x), y, split.num_classes)[0], dim=1)
        predicted = (embed(average, split.test_x) @ prototypes.T).argmax(dim=1)
        accuracies.append(100 * float((predicted == split.test_y).double().mean()))
    return accuracies


def command(arguments: Sequence[str] | None) -> None:
    """Measure every variant and print, or write, the table."""
    parser = Parser(PROG, "Measure what each part of the training recipe is worth.")
    parser.add_argument("--splits", default="5", metavar="N", help="splits of each data set (default: 5)")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables there, too")
    options = parser.parse_args(arguments)
    n_splits = parse_whole(PROG, "splits", options.splits, low=1)
    outputs = check_outputs(PROG, options, ("markdown",))
    torch.set_num_threads(1)
    accuracy: dict[str, list[float]] = {name: [] for name in VARIANTS}
    by_steps: dict[str, list[list[float]]] = {name: [] for name in OPTIMIZERS}
    cases = [(load_real(name), seed) for name in DATASETS for seed in range(n_splits)]
    for data, seed in tqdm(cases, desc=PROG, unit="split", file=sys.stderr):
        split = split_shots(data, SHOTS, seed)
        if split is not None:
            for name, recipe in VARIANTS.items():
                accuracy[name].extend(measure(recipe, split, seed, [LENGTH]))
            for name, recipe in OPTIMIZERS.items():
                by_steps[name].append(measure(recipe, split, seed, STEPS))
    rows = []
    for name, values in accuracy.items():
        paired = [value - default for value, default in zip(values, accuracy["default"], strict=True)]
        rows.append([name, format_mean(values), "" if name == "default" else format_mean(paired, sign=True)])
    table = format_table(["recipe", "accuracy", "against the default, paired"], rows)
    note = f"{SHOTS} shots, {n_splits} splits each of {', '.join(DATASETS)}; one MLP of {WIDTH} units, {LENGTH} steps."
    text = f"{table}\n\n{note} Mean ± one standard error, percent.\n"
    lines = [[name, *map(format_mean, zip(*runs, strict=True))] for name, runs in by_steps.items()]
    text += f"\n{format_table(['accuracy after', *(f'{steps} steps' for steps in STEPS)], lines)}\n"
    write_results(outputs, rows, f"{text}\nMade by `python -m {PROG} --splits {n_splits}`.\n")


def main() -> int:
    """Run the command line's command and return its exit code."""
    return run_command(PROG, command)
