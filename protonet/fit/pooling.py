"""Whether rows without a label are learned from, decided on held-out rows that have one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.fit.problem import Problem, believe, fit_pooled, fit_rows
from protonet.fit.search import Choice, Pooling, Progress, ignore
from protonet.fit.unlabelled import find_unlike, rank_scores
from protonet.metrics import score_known
from protonet.scoring import fit_temperature, split_folds, worse_by_one_error


@dataclass(frozen=True)
class PoolingRules:
    """How the decision is made."""

    folds: int = 3  #: Folds to judge on: each takes two fits.


POOLING = PoolingRules()


class Pooled(NamedTuple):
    """What was made of rows without a label."""

    learned: bool  #: Are they learned from?
    losses: tuple[float, float] | None  #: Mean log-loss of held-out rows without them and with them, if judged.
    ranks: Tensor
    """(m,) float64: of each row of the problem's pool, which share of rows of known classes, held out, is less like a
    class; 0 where none could be held out."""


def decide_pooling(
    problem: Problem, choice: Choice, deadline: float = math.inf, progress: Progress = ignore
) -> tuple[Choice, Pooled]:
    """Decide on held-out labelled rows whether the rows without a label are learned from.

    Rows that are unlike every class do not count. The others do, unless what is fitted to them is worse by one standard
    error.

    Args:
        problem: With a pool.
        choice: What was chosen on the labelled rows.
        deadline: ``time.monotonic()`` after which nothing more is fitted, and nothing is learned from the pool.
        progress: Told which fold begins.

    Returns:
        The choice, with its pooling if there is to be one, and what was found.
    """
    rows, pool = problem.rows, problem.pool
    assert pool is not None
    generator = torch.Generator().manual_seed(rows.seed + 1)
    folds = split_folds(rows.labels, rows.num_classes, generator, most=POOLING.folds, groups=rows.groups)
    beliefs, alone = [], [torch.zeros(0, rows.num_classes, dtype=torch.float32)]
    scores = torch.zeros(len(pool.features), dtype=torch.float64)
    given_up = choice, Pooled(False, None, torch.zeros_like(scores))
    for number, fold in enumerate(folds):
        progress(f"unlabelled rows, fold {number + 1} of {len(folds)}", number / (2 * len(folds)))
        part = problem._replace(rows=rows.take(fold.fit))
        network = fit_rows(part.rows, choice, deadline)
        if time.monotonic() >= deadline:
            return given_up
        alone.append(network(rows.features[fold.judge]).detach())
        likely, logits = believe(part, network)
        beliefs.append(likely)
        scores += score_known(logits) / len(folds)
    without = torch.cat(alone)
    ranks = rank_scores(score_known(without), scores)
    pooling = Pooling((~find_unlike(ranks, len(without))).double(), choice.temperature)
    if not folds:  # with one row per class nobody can judge
        return choice._replace(pooling=pooling), Pooled(True, None, ranks)
    pooled = []
    for number, (fold, likely) in enumerate(zip(folds, beliefs, strict=True)):
        progress(f"unlabelled rows, fold {number + 1} of {len(folds)}", 0.5 + number / (2 * len(folds)))
        part = problem._replace(rows=rows.take(fold.fit))
        network = fit_pooled(part, choice, pooling, likely, deadline)
        if time.monotonic() >= deadline:
            return given_up
        pooled.append(network(rows.features[fold.judge]).detach())
    judged = torch.cat([fold.judge for fold in folds])
    labels, seen = rows.labels[judged], torch.bincount(rows.labels, minlength=rows.num_classes) > 0
    weights = None if rows.weights is None else rows.weights[judged] / rows.weights[judged].mean()
    own, before = fit_temperature(without, labels, seen, weights)
    factor, after = fit_temperature(torch.cat(pooled), labels, seen, weights)
    learned = own > 0 and factor > 0 and bool(pooling.known.any()) and not worse_by_one_error(after, before)
    found = Pooled(learned, (float(before.mean()), float(after.mean())), ranks)
    if learned:
        choice = choice._replace(pooling=pooling._replace(temperature=choice.temperature * own / factor))
    return choice, found
