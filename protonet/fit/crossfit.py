"""Cross-fitting: the choice made on all rows, fitted again without each fold, and what that says of unseen rows.

A network cannot be judged on rows that it was fitted to. Its twins, each fitted without one fold, can be judged on that
fold: how often they are right, what rows of a known class look like to them, and what new samples cost.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protonet.files.structure import expect, put_together, take_apart
from protonet.fit.baselines import score_cosine, score_lda
from protonet.fit.search import Choice, Progress
from protonet.fit.solver import Problem, Solution, fit_choice, untouched_globals
from protonet.metrics import score_known
from protonet.network import PrototypeNetwork
from protonet.scoring import Fold, split_folds
from protonet.views.linear import CHUNK

#: With fewer rows a class, a fold more or less is felt.
FEW_ROWS = 20


class Fitted(NamedTuple):
    """A network, and what its prototypes are the means of, so that samples can be added."""

    network: PrototypeNetwork
    sums: Tensor  # (num_classes, embedding_dim): of each class's embeddings
    counts: Tensor  # (num_classes,) int64: its rows


class Crossfit(NamedTuple):
    """The network of all rows, its twins without each fold, and the rows that these did not see."""

    whole: Fitted
    folds: tuple[Fitted, ...]  # none where no class has two rows
    features: Tensor  # (judged, dim) float32, as they came
    labels: Tensor  # (judged,) int64
    fold: Tensor  # (judged,) int64: which of the folds' networks did not see the row
    gain: Tensor  # 0-d float64: by how much the network of all rows scores such rows higher; see protonet.metrics


def crossfit(
    solution: Solution, *, deadline: float = math.inf, progress: Progress = lambda stage, share: None
) -> Crossfit:
    """Fit what was chosen on all rows again without each fold.

    The folds are others than those that the choice was made on.

    Args:
        solution: Of `protonet.fit.solver.solve_problem`. Its network, put on the CPU, is part of the result.
        deadline: ``time.monotonic()`` after which training takes no further step.
        progress: Told which fold begins, and the share of them that is over.

    Returns:
        The networks, and every row that some network did not see.

    Source: cross-fitting, Stone, "Cross-validatory choice and assessment of statistical predictions" (1974).
    """
    problem = solution.problem
    x = problem.features * problem.scale
    folds = _make_folds(problem)
    fitted: list[Fitted] = []
    with untouched_globals():
        for number, (rows, _) in enumerate(folds):
            progress(f"fold {number + 1} of {len(folds)}", number / (len(folds) + 1))
            part = problem._replace(features=problem.features[rows], labels=problem.labels[rows])
            network = fit_choice(part, solution.choice, deadline)
            fitted.append(count_rows(network, x[rows], part.labels))
        whole = count_rows(solution.network.cpu(), x, problem.labels)
        progress("pairs of folds", len(folds) / (len(folds) + 1))
        gain = _measure_gain(problem, solution.choice, folds, fitted, deadline)
    judged = torch.cat([problem.labels[:0], *(judge for _, judge in folds)])
    fold = torch.cat([judged[:0], *(torch.full_like(judge, number) for number, (_, judge) in enumerate(folds))])
    return Crossfit(whole, tuple(fitted), x[judged], problem.labels[judged], fold, gain)


def _make_folds(problem: Problem) -> list[Fold]:
    """Return the folds of a problem."""
    generator = torch.Generator().manual_seed(problem.seed + 1)
    return split_folds(problem.labels, problem.num_classes, generator)


def _measure_gain(problem: Problem, choice: Choice, folds: list[Fold], fitted: list[Fitted], deadline: float) -> Tensor:
    """Return by how much a network of all rows scores unseen rows higher than one without a fold does, 0-d float64.

    Without two folds they score lower than without one. What that difference says of the step to all rows is
    extrapolated, scores being a linear function of one over the number of rows.
    """
    few = len(problem.labels) < FEW_ROWS * len(problem.labels.unique())
    gains = [torch.zeros(0, dtype=torch.float64)]
    for one in range(0, len(folds) - 1, 2) if few and len(folds) > 2 else ():
        left = torch.ones_like(problem.labels, dtype=torch.bool)
        left[torch.cat([folds[one].judge, folds[one + 1].judge])] = False
        fewer = problem._replace(features=problem.features[left], labels=problem.labels[left])
        network = fit_choice(fewer, choice, deadline)
        for number in (one, one + 1):
            rows = folds[number].judge[network.seen[problem.labels[folds[number].judge]]]
            x = problem.features[rows] * problem.scale
            gains.append(score_known(fitted[number].network(x).detach()) - score_known(network(x).detach()))
    measured = torch.cat(gains)
    return measured.mean() * (1 - 2 / len(folds)) if len(measured) else measured.sum()


@torch.no_grad()
def predict_held(crossed: Crossfit) -> Tensor:
    """Return the logits (judged, num_classes) of each row by the network that did not see it."""
    logits = crossed.features.new_empty(len(crossed.labels), len(crossed.whole.counts))
    for number, (network, _, _) in enumerate(crossed.folds):
        rows = crossed.fold == number
        logits[rows] = network(crossed.features[rows])
    return logits


def predict_rivals(problem: Problem) -> dict[str, Tensor]:
    """Classify each held-out row by two classics that are fitted to the other folds.

    Args:
        problem: As it was solved.

    Returns:
        By name, "raw cosine" and "LDA" (of a shrunken covariance), class scores (judged, num_classes) float64 in the
        order of `Crossfit.labels`. They have no temperature: only their order means anything.
    """
    rivals = {"raw cosine": score_cosine, "LDA": score_lda}
    x, y, folds = problem.features, problem.labels, _make_folds(problem)
    return {
        name: torch.cat([score(x[fit], y[fit], x[judge], problem.num_classes) for fit, judge in folds])
        for name, score in rivals.items()
        if folds
    }


def count_rows(network: PrototypeNetwork, features: Tensor, labels: Tensor) -> Fitted:
    """Return a network with the sums and counts (num_classes, ...) of the rows (n, dim) that it was fitted to."""
    sums = torch.zeros_like(network.prototypes)
    empty = Fitted(network, sums, torch.zeros(len(sums), dtype=torch.int64))
    return add_rows(empty, features, labels, len(sums))


@torch.no_grad()
def add_rows(fitted: Fitted, features: Tensor, labels: Tensor, num_classes: int) -> Fitted:
    """Add samples to a network, of its own and of new classes, without training.

    Args:
        fitted: The network, and what its prototypes are means of.
        features: (n, dim) real, on the network's device.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Classes from now on, at least as many as before.

    Returns:
        A network of the same encoder, with the new sums and counts.
    """
    network, sums, counts = fitted
    more = num_classes - len(counts)
    sums = torch.cat([sums, sums.new_zeros(more, sums.shape[1])])
    for rows, targets in zip(features.split(CHUNK), labels.split(CHUNK), strict=True):
        sums.index_add_(0, targets, network.embed(rows))
    counts = torch.cat([counts, counts.new_zeros(more)]) + torch.bincount(labels, minlength=num_classes)
    means = sums / counts.clamp_min(1)[:, None]
    network = copy.copy(network)
    network._buffers = dict(network._buffers)
    with torch.inference_mode(False):  # a buffer made in inference mode could never be used in training again
        network.prototypes = network.encoder.normalize(means)  # type: ignore[operator]
        network.seen = counts > 0
    return Fitted(network, sums, counts)


def update(crossed: Crossfit, features: Tensor, labels: Tensor, num_classes: int) -> Crossfit:
    """Add samples to the network and to all its twins: `predict_held` then tells what that costs the known classes.

    Args:
        crossed: The networks.
        features: (n, dim) real, finite.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Classes from now on, at least as many as before.

    Returns:
        The networks with the samples; the rows that are held out stay as they were.
    """
    whole, *folds = (add_rows(each, features, labels, num_classes) for each in (crossed.whole, *crossed.folds))
    return crossed._replace(whole=whole, folds=tuple(folds))


def pack(crossed: Crossfit) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return all but the network of all rows for a model file: what JSON holds, and tensors by name."""
    structures: list[dict[str, Any]] = []
    tensors = {name: getattr(crossed, name) for name in ("features", "labels", "fold")}
    tensors |= {"sums": crossed.whole.sums, "counts": crossed.whole.counts, "gain": crossed.gain}
    for number, (network, sums, counts) in enumerate(crossed.folds):
        structure, own = take_apart(network)
        structures.append(structure)
        own = {name: tensor.detach() for name, tensor in own.items()} | {"sums": sums, "counts": counts}
        tensors |= {f"{number}.{name}": tensor for name, tensor in own.items()}
    return structures, tensors


def unpack(network: PrototypeNetwork, structures: Any, tensors: Mapping[str, Tensor]) -> Crossfit:
    """Return what `pack` packed, given the network of all rows.

    Raises:
        ValueError: It is not what `pack` packs; the reason in a few words.
    """
    expect(isinstance(structures, list), "no list of folds")
    whole = _unpack_fitted(network, tensors)
    folds = []
    for number, structure in enumerate(structures):
        prefix = f"{number}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        parts = {name: tensor for name, tensor in own.items() if name not in {"sums", "counts"}}
        folds.append(_unpack_fitted(put_together(structure, parts), own))
        expect(len(folds[-1].counts) == len(whole.counts), "folds of other classes")
    expect({"features", "labels", "fold", "gain"} <= tensors.keys(), "no rows that were held out")
    x, labels, fold, gain = (tensors[name] for name in ("features", "labels", "fold", "gain"))
    expect(gain.shape == () and gain.dtype == torch.float64 and bool(torch.isfinite(gain)), "a gain that is no number")
    shapes = x.shape == (len(labels), network.encoder.input_dim) and labels.ndim == 1 and labels.shape == fold.shape
    kinds = x.dtype == torch.float32 and labels.dtype == fold.dtype == torch.int64 and bool(torch.isfinite(x).all())
    expect(shapes and kinds, "rows held out of another shape or type")
    for values, high in ((labels, len(whole.counts)), (fold, len(folds))):
        expect(bool(((values >= 0) & (values < high)).all()), "rows held out of no class or no fold")
    return Crossfit(whole, tuple(folds), x, labels, fold, gain)


def _unpack_fitted(network: PrototypeNetwork, tensors: Mapping[str, Tensor]) -> Fitted:
    """Return a network with its sums and counts."""
    expect({"sums", "counts"} <= tensors.keys(), "a network without its sums")
    sums, counts = tensors["sums"], tensors["counts"]
    shapes = sums.shape == network.prototypes.shape and counts.shape == sums.shape[:1]
    kinds = sums.dtype == torch.float32 and counts.dtype == torch.int64 and bool(torch.isfinite(sums).all())
    expect(shapes and kinds and bool((counts >= 0).all()), "sums of another shape or type")
    return Fitted(network, sums, counts)
