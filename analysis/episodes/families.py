"""Every few-shot method against prototypes, on features that are not normal about zero, without base classes.

Features of networks are skewed or sparse (behind a ReLU), and have a common mean; measured ones have heavy tails.
Methods that scale rows to unit norm, or take steps of a fixed size, may fail there without a word.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from analysis.episodes.methods import EVALUATED
from analysis.shared.journal import run_all
from analysis.shared.runner import Report, StudyParser
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.evaluation.statistics import half_width, mean_of
from protonet.episodes.methods.choice import choose_methods
from protonet.sampling import index_classes
from protonet.ui.text import format_table

CLASSES, ROWS, DIM = 64, 60, 64
SETTINGS = Setting((5, 5), (1, 1)), Setting((10, 10), (10, 10))
FAR = 5.0  #: Points below prototypes from which on a difference stands in bold.


def skew(centres: Tensor, noise: Tensor, _: torch.Generator) -> Tensor:
    """Make log-normal features: most are small, some many times as large."""
    return (0.5 * centres + 0.8 * noise).exp()


def spread_tails(centres: Tensor, noise: Tensor, generator: torch.Generator) -> Tensor:
    """Make features of Student's t with 2 degrees of freedom, whose variance is infinite."""
    squares = torch.randn(2, *noise.shape, generator=generator).square()
    return 0.9 * centres + noise / squares.mean(dim=0).sqrt()


def shift(centres: Tensor, noise: Tensor, _: torch.Generator) -> Tensor:
    """Make normal features about 30: all cosines between rows are nearly 1."""
    return 30 + 0.6 * centres + noise


def thin(centres: Tensor, noise: Tensor, _: torch.Generator) -> Tensor:
    """Make features of which 88 % are zero, as behind a ReLU."""
    return (0.8 * centres + noise - 1.5).clamp_min(0)


FAMILIES: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    "skewed": skew,
    "heavy-tailed": spread_tails,
    "shifted": shift,
    "sparse": thin,
}


def make_features(family: str, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make the features (rows, DIM) float32 of a family, and their classes (rows,) int64."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, 1, DIM, generator=generator)
    noise = torch.randn(CLASSES, ROWS, DIM, generator=generator)
    x = FAMILIES[family](centres, noise, generator)
    return x.flatten(0, 1), torch.arange(CLASSES).repeat_interleave(ROWS)


def score_methods(family: str, setting: Setting, names: Sequence[str], n_episodes: int) -> dict[str, Tensor]:
    """Return the accuracy (n_episodes,) of each method, all on the same episodes of a family."""
    x, y = make_features(family)
    scores = evaluate(x, index_classes(y), choose_methods(names), setting, n_episodes=n_episodes)
    return {name: own.accuracy for name, own in scores.items()}


def add_options(parser: StudyParser) -> None:
    """Add how many episodes there are, and which methods."""
    parser.add_whole("--episodes", 200, "episodes of each family and setting", low=2)
    parser.add_names("--methods", EVALUATED)
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Run every family and setting."""
    rows = EVALUATED if options.methods is None else tuple(options.methods)
    cases = [(family, number, options.episodes, rows) for family in FAMILIES for number in range(len(SETTINGS))]
    results = run_all(cases, run_case, options.state, unit="case")
    columns = {f"{case[0]}, {SETTINGS[case[1]].title().rsplit(' ', 1)[0]}": found for case, found in results.items()}
    return Report(columns, tabulate(columns, rows))


def run_case(case: tuple[str, int, int, tuple[str, ...]]) -> dict[str, Any]:
    """Return the accuracy of prototypes, and each method's paired difference to it with its half-width, in points."""
    family, number, n_episodes, names = case
    accuracies = score_methods(family, SETTINGS[number], [*dict.fromkeys(("protonet", *names))], n_episodes)
    differences = {name: 100 * (own - accuracies["protonet"]) for name, own in accuracies.items()}
    found = {name: [mean_of(own), half_width(own)] for name, own in differences.items() if name != "protonet"}
    return {"protonet": 100 * mean_of(accuracies["protonet"]), "differences": found}


def tabulate(columns: dict[str, dict[str, Any]], rows: Sequence[str]) -> str:
    """Return the table in Markdown."""

    def show(found: dict[str, Any], name: str) -> str:
        if name == "protonet":
            return f"{found['protonet']:.1f}"
        mean, width = found["differences"][name]
        text = f"{mean:+.1f} ±{width:.1f}"
        return f"**{text}**" if mean < -FAR else text

    body = [[name, *(show(found, name) for found in columns.values())] for name in dict.fromkeys(("protonet", *rows))]
    return TITLE + format_table(["method", *columns], body)


TITLE = f"""# Few-shot methods on features that are not normal about zero

Accuracy of `protonet` in percent; of each other method the paired difference to it in points, on the same episodes,
with the half-width of its 95 % interval; in bold more than {FAR:g} points below. {DIM} features, {CLASSES} made
classes, 15 queries per class, no base classes.

"""
