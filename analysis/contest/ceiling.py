"""How far covariance estimates can reach on correlated noise.

An estimate that treats all rotations alike can only correct the variances along the sample's own directions. Here
those corrections are given by an oracle that knows the true covariance, so its accuracy bounds every such estimate.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from analysis.contest.bayes import predict_bayes, predict_true_whitening
from analysis.shared.baselines import pool_labelled
from analysis.shared.journal import run_all
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_mean
from protonet._checks import fail
from protonet.datasets import Split, sample_family
from protonet.fit.crossfit import score_cosine
from protonet.losses import class_means
from protonet.ui.text import count, format_table
from protonet.views.linear import Linear, shrink_covariance
from protonet.views.view import Rows

FAMILIES = ("correlated", "nuisance")


def add_options(parser: StudyParser) -> None:
    """Add how many draws there are."""
    parser.add_whole("--draws", 12, "number of draws")
    parser.add_state()


def measure_draw(split: Split) -> dict[str, float]:
    """Return the test accuracy in percent of each rule on one draw."""
    (x, y), k, covariance = pool_labelled(split), split.num_classes, split.noise_covariance
    if covariance is None:
        fail("measure_draw", "split", "have a noise covariance", "None", "Pass another family.")

    def cosine(train: Tensor, test: Tensor) -> Tensor:
        return score_cosine(train, y, test, k).argmax(dim=1)

    means, counts = class_means(x.double(), y, k)
    basis, shrunken, _ = shrink_covariance(x.double() - means[y], len(x) - k)
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

    view = Linear("whitened").fit(Rows(x / x.std(), y, k)).map
    rules = {
        "Bayes, true covariance": predict_bayes(split),
        "true whitening": predict_true_whitening(x, y, split.test_x, num_classes=k, covariance=covariance),
        "sample directions, oracle gains": cosine(turned * best.sqrt(), tested * best.sqrt()),
        "sample directions, true variances": directions(within.diagonal()),
        "sample directions, shrunken variances": directions(shrunken),
        "our whitened view": cosine(view(x / x.std()), view(split.test_x / x.std())),
    }
    return {name: 100 * float((predicted == split.test_y).double().mean()) for name, predicted in rules.items()}


def run(options: argparse.Namespace) -> Report:
    """Measure every rule on every draw."""
    runs = [(family, seed) for seed in range(options.draws) for family in FAMILIES]
    results = run_all(runs, lambda draw: measure_draw(sample_family(draw[0], seed=draw[1])), options.state, unit="draw")
    columns = {family: [results[run] for run in runs if run[0] == family] for family in FAMILIES}
    names = columns[FAMILIES[0]][0]
    rows = [[name, *(format_mean([draw[name] for draw in columns[family]]) for family in FAMILIES)] for name in names]
    note = f"16+4 samples per class, {count(options.draws, 'draw')}. Mean test accuracy ± one standard error, percent."
    return Report(rows, f"{format_table(['rule', *FAMILIES], rows)}\n{note}\n")
