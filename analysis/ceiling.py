"""How far covariance estimates can reach on correlated noise: ``python -m analysis.ceiling``.

An estimate that treats all rotations alike can only correct the variances along the sample's own directions. Here
those corrections are given by an oracle that knows the true covariance, so its accuracy bounds every such estimate.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.ceiling"))

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis.bayes import predict_bayes, predict_true_whitening
from analysis.options import write_results
from analysis.tables import format_mean
from protonet.commands.common import Parser, check_outputs, count, format_table, parse_whole, run_command
from protonet.datasets.synthetic import Split, sample_family
from protonet.losses import class_means
from protonet.views.linear import fit_view, shrink_covariance

PROG = "analysis.ceiling"
FAMILIES = ("correlated", "nuisance")


def measure_draw(split: Split) -> dict[str, float]:
    """Return the test accuracy in percent of each rule on one draw."""
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    covariance = split.noise_covariance
    if covariance is None:
        raise ValueError("measure_draw: `split` must have a noise covariance; got None. Pass another family.")

    def cosine(train: Tensor, test: Tensor) -> Tensor:
        means, _ = class_means(F.normalize(train, dim=1), y, split.num_classes)
        return (test @ F.normalize(means, dim=1).T).argmax(dim=1)

    means, counts = class_means(x.double(), y, split.num_classes)
    basis, shrunken, _ = shrink_covariance(x.double() - means[y], len(x) - split.num_classes)
    within = basis.T @ covariance @ basis  # the truth along the sample's directions
    prior = split.radius**2 / x.shape[1]
    shots = float(counts.mean())
    # The gains g that maximise the mean margin of x' diag(g) m over its standard deviation, given the truth.
    spread = torch.diag(prior * within.diagonal() * (1 + 1 / shots) + prior**2) + within.square() / shots
    best = torch.linalg.solve(spread, torch.ones_like(shrunken)).clamp_min(1e-9)
    turned, tested = (part.double() @ basis for part in (x - x.mean(dim=0), split.test_x - x.mean(dim=0)))

    def directions(variances: Tensor) -> Tensor:
        gains = (1 / (variances * (variances + (shots + 1) * prior))).sqrt()
        return cosine(turned * gains, tested * gains)

    view = fit_view("whitened", x / x.std(), y, split.num_classes)
    rules = {
        "Bayes, true covariance": predict_bayes(split),
        "true whitening": predict_true_whitening(
            x, y, split.test_x, num_classes=split.num_classes, covariance=covariance
        ),
        "sample directions, oracle gains": cosine(turned * best.sqrt(), tested * best.sqrt()),
        "sample directions, true variances": directions(within.diagonal()),
        "sample directions, shrunken variances": directions(shrunken),
        "our whitened view": cosine(view(x / x.std()), view(split.test_x / x.std())),
    }
    return {name: 100 * float((predicted == split.test_y).double().mean()) for name, predicted in rules.items()}


def command(arguments: Sequence[str] | None) -> None:
    """Measure every rule on every draw and print, or write, the table."""
    parser = Parser(PROG, "Measure how far covariance estimates can reach on correlated noise.")
    parser.add_argument("--draws", default="12", metavar="N", help="number of draws (default: 12)")
    parser.add_argument("--markdown", metavar="PATH", help="write the table there, too")
    options = parser.parse_args(arguments)
    draws = parse_whole(PROG, "--draws", options.draws, low=1)
    outputs = check_outputs(PROG, options, ("markdown",))
    torch.set_num_threads(1)
    columns: dict[str, list[dict[str, float]]] = {family: [] for family in FAMILIES}
    for seed in tqdm(range(draws), desc=PROG, unit="draw", file=sys.stderr):
        for family in FAMILIES:
            columns[family].append(measure_draw(sample_family(family, seed=seed)))
    names = columns[FAMILIES[0]][0]
    rows = [[name, *(format_mean([draw[name] for draw in columns[family]]) for family in FAMILIES)] for name in names]
    note = f"16+4 samples a class, {count(draws, 'draw')}. Mean test accuracy ± one standard error, percent."
    text = f"{format_table(['rule', *FAMILIES], rows)}\n{note}\n"
    write_results(outputs, rows, f"{text}\nMade by `python -m {PROG} --draws {draws}`.\n")


def main() -> int:
    """Run the command line's command and return its exit code."""
    return run_command(PROG, command)
