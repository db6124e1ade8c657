"""Candidates for the embedding, each judged by its out-of-fold cosines: linear, radial, forest and learned views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.encoder import Plan, ResidualMLPs, count_mlp_parameters
from protonet.scoring import FOLDS, SETTING_ROWS, Candidate, Judge, worse_by_one_error
from protonet.views.forest import MAX_ROWS, ForestView, fit_forest
from protonet.views.linear import CHUNK, LinearView
from protonet.views.mlp import Recipe, Task, train
from protonet.views.radial import GRID, RADIAL_KINDS, RadialKind, count_units, radial_cosines
from protonet.views.shifts import move_rows

#: A fold with this many judged rows halves the widths and ridges that are tried.
HALVING_ROWS = 16
#: Seed of forests.
FOREST_SEED = 0
FORESTS = {"forest": False, "moved forest": True}  # is it grown from moved rows, too?


class Search(NamedTuple):
    """What selection tries."""

    folds: int = FOLDS
    radial: tuple[RadialKind, ...] = RADIAL_KINDS
    grid: tuple[tuple[float, float], ...] = GRID  # widths and ridges of radial views
    trees: int = 200
    moves: bool = True  # are rows moved, where their features allow it?
    rungs: int = 4  # of the ladder of learned views
    steps: tuple[int, ...] = (3, 10, 30, 60)  # at which training is judged; one that gets worse is not continued
    work: float = 2e8  # most parameters times steps that one rung may cost, over all folds
    recipe: Recipe = Recipe()


def linear_candidate(judge: Judge, kind: str, fitted: Sequence[LinearView], *, lifted: bool = True) -> Candidate:
    """Judge a linear view, one fitted to each fold, with its constant coordinate or, as MLPs read it, without."""

    def embed(fold: int, x: Tensor) -> Tensor:
        z: Tensor = fitted[fold](x)
        return fitted[fold].embed(z)[None] if lifted else z[None]

    return judge.candidate(kind, judge.cosines(embed))


def radial_candidates(judge: Judge, views: dict[str, list[LinearView]], search: Search) -> Iterator[Candidate]:
    """Judge each kind of radial view at its best width and ridge, where the work allows two units a class.

    Args:
        judge: The rows, folds and moves.
        views: Of each linear kind that may be read, one view a fold.
        search: Which kinds, widths and ridges.

    Yields:
        A candidate a kind, unless it is hopeless; nothing more once it is late.
    """
    for kind in search.radial:
        n = min(len(fold.fit) for fold in judge.folds) * (len(judge.moves) if kind.moved else 1)
        enough = min(n, 2 * int(judge.seen.sum()))
        if kind.reads not in views or count_units(kind, n, judge.features.shape[1]) < enough:
            continue
        if kind.moved and judge.moves == (0,):
            continue
        found = _judge_radial(judge, kind, views[kind.reads], search.grid)
        if judge.late():
            return
        if found is not None:
            yield judge.candidate(kind.name, found[0])._replace(setting=found[1])


def _judge_radial(
    judge: Judge, kind: RadialKind, views: Sequence[LinearView], settings: tuple[tuple[float, float], ...]
) -> tuple[Tensor, tuple[float, float]] | None:
    """Return the cosines (judged, num_classes) at the best setting, and that; None if it is late or hopeless."""
    x, labels = judge.features, judge.labels
    cosines = judge.features.new_zeros(len(settings), 0, judge.num_classes)
    for view, fold in zip(views, judge.folds, strict=True):
        if judge.late():
            return None
        arguments = (x[fold.fit], labels[fold.fit], x[fold.judge], judge.num_classes)
        cosines = torch.cat([cosines, radial_cosines(kind, view, *arguments, settings, judge.moves)], dim=1)
        best = _rank_settings(judge, cosines)
        if judge.hopeless(cosines[best[0]]):
            return None
        if len(fold.judge) >= HALVING_ROWS:  # successive halving: the worse half is not tried on the next fold
            kept = sorted(best[: 1 if len(fold.judge) >= SETTING_ROWS else math.ceil(len(best) / 2)])
            cosines, settings = cosines[kept], tuple(settings[number] for number in kept)
    best = _rank_settings(judge, cosines)
    return cosines[best[0]], settings[best[0]]


def _rank_settings(judge: Judge, cosines: Tensor) -> list[int]:
    """Return the numbers of (settings, n, num_classes) cosines of the first n judged rows by log-loss, least first."""
    trials = [float(judge.losses(each).mean()) for each in cosines] if len(cosines) > 1 else [0.0]
    return sorted(range(len(trials)), key=lambda number: trials[number])


def grow_forest(
    name: str, x: Tensor, labels: Tensor, num_classes: int, search: Search, moves: tuple[int, ...]
) -> ForestView:
    """Grow one of ``FORESTS`` from rows (n, dim) and labels (n,), the same in folds and in the end."""
    moves = moves if FORESTS[name] else (0,)
    generator = torch.Generator().manual_seed(FOREST_SEED)
    repeated = labels.repeat(len(moves))
    return fit_forest(move_rows(x, moves), repeated, num_classes, trees=search.trees, generator=generator)


def forest_candidates(judge: Judge, search: Search) -> Iterator[Candidate]:
    """Yield the forests, judged: one of the rows and, if there are moves, one of the moved rows, unless hopeless."""
    for name, moved in FORESTS.items():
        if not search.trees or (moved and judge.moves == (0,)) or 2 * int(judge.seen.sum()) > MAX_ROWS:
            continue
        parts: list[Tensor] = []
        for number, fold in enumerate(judge.folds):
            arguments = (judge.features[fold.fit], judge.labels[fold.fit], judge.num_classes)
            forest = grow_forest(name, *arguments, search, judge.moves)
            parts.append(judge.fold_cosines(partial(_embed_alone, forest), number))
            if judge.late():
                return
            if number == 0 and judge.hopeless(parts[0]):
                break
        else:
            yield judge.candidate(name, torch.cat(parts))


def _embed_alone(view: Callable[[Tensor], Tensor], fold: int, x: Tensor) -> Tensor:
    """Return a view of one fold's features (n, dim): (1, n, dim)."""
    return view(x)[None]


def _embed_learned(fitted: Sequence[LinearView], stack: ResidualMLPs, members: int, fold: int, x: Tensor) -> Tensor:
    """Return one fold's learned views of features (n, dim): (members, n, embedding_dim)."""
    z: Tensor = stack(fitted[fold](x), slice(fold * members, (fold + 1) * members))
    return z


def make_task(view: LinearView, x: Tensor, labels: Tensor, moves: tuple[int, ...]) -> Task:
    """Return what a learned view learns from: a linear view of the rows (n, dim), moved ones included."""
    z = torch.cat([view(part) for part in move_rows(x, moves).split(CHUNK)])
    return Task(z, labels.repeat(len(moves)))


def learned_candidates(
    judge: Judge,
    fitted: Sequence[LinearView],
    untrained: Candidate,
    plan: Plan,
    search: Search,
    moves: tuple[int, ...],
    generator: torch.Generator,
) -> Iterator[Candidate]:
    """Climb the ladder of stacks, each trained on all folds at once, for as long as more steps do not hurt.

    Args:
        judge: The rows and folds.
        fitted: The linear view that the stacks read, one a fold.
        untrained: That view, judged as the stacks read it.
        plan: The rungs that the budget affords.
        search: How many of them, how many steps, and the recipe.
        moves: Offsets of the copies that they train on.
        generator: Of first layers and episodes.

    Yields:
        A candidate for each rung and number of steps.
    """
    x, labels = judge.features, judge.labels
    tasks = [
        make_task(view, x[fold.fit], labels[fold.fit], moves) for view, fold in zip(fitted, judge.folds, strict=True)
    ]
    best = untrained
    for members, width in plan.ladder[: search.rungs]:
        if judge.late():
            return
        if members > 1 and best.rung != (1, width):
            break  # every width is tried, but copies only of a width that beat the others
        stack = ResidualMLPs(members * len(tasks), tasks[0].z.shape[1], width, plan.embedding_dim, generator)
        repeated = [task for task in tasks for _ in range(members)]
        rung_best = untrained
        cost = len(repeated) * count_mlp_parameters(tasks[0].z.shape[1], width, plan.embedding_dim)
        affordable = [steps for steps in search.steps if steps * cost <= search.work] or search.steps[:1]
        for steps, average in train(
            stack,
            repeated,
            judge.num_classes,
            steps=affordable,
            generator=generator,
            deadline=judge.deadline,
            recipe=search.recipe,
        ):
            name = f"{members}x{width} MLP, {steps} steps"
            cosines = judge.cosines(partial(_embed_learned, fitted, average, members))
            candidate = judge.candidate(name, cosines, (members, width), steps)
            yield candidate
            if worse_by_one_error(candidate.losses, rung_best.losses):
                break
            rung_best = min(rung_best, candidate, key=lambda c: float(c.losses.mean()))
        best = min(best, rung_best, key=lambda c: float(c.losses.mean()))
