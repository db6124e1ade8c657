"""Evaluate methods on the same numbered episodes: accuracy, also by shot, calibration, and open classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from protonet._checks import check_int, check_number, fail
from protonet.episodes.batch import Base, Part, Take, gather_episodes, split_draw, take_from
from protonet.episodes.distributed import Group
from protonet.episodes.draws import Setting, check_setting, draw_episodes
from protonet.episodes.methods import Method
from protonet.episodes.statistics import half_width
from protonet.metrics import fill_bins
from protonet.sampling import ClassIndex

#: Episodes that one process draws and scores between two exchanges with the others.
ROUND = 256
#: Features of episodes that are processed at a time: enough for few calls, and still within the processor's caches.
FEATURES_AT_ONCE = 2**21
#: Floats in just under 32 MiB. Freeing an array of this size once makes glibc keep later arrays instead of returning
#: them to the system.
KEPT = 2**23 - 2**12


class Scores(NamedTuple):
    """The scores of one method, in the order of the episodes' numbers.

    Attributes:
        accuracy: (episodes,) float64 in [0, 1], the share of an episode's queries that are right, without those of open
            classes.
        by_shot: (episodes, shots) float64, the accuracy on classes with each number of shots, NaN where an episode has
            no such class.
        auroc: (episodes,) float64 in [0, 1], the area under the ROC curve of telling known from open queries by their
            highest logit; NaN without open queries.
        bins: (n_bins, 3) float64, queries by confidence, from `protonet.metrics.fill_bins`.
    """

    accuracy: Tensor
    by_shot: Tensor
    auroc: Tensor
    bins: Tensor


#: Called with the number of finished episodes and each method's scores so far, in parts.
Progress = Callable[[int, Mapping[str, Sequence[Scores]]], None]


def evaluate(
    x: Tensor,
    index: ClassIndex,
    methods: Mapping[str, Method],
    setting: Setting,
    *,
    seed: int = 0,
    n_episodes: int = 2000,
    until: float = 0.0,
    base: Base | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
    take: Take | None = None,
) -> dict[str, Scores]:
    """Score every method on the same episodes.

    The scores depend only on the data, the setting and the seed. Neither the number of processes that share the
    episodes matters, nor the number of threads: one is used, because the matrices are small.

    Args:
        x: (n, dim) rows of any floating dtype.
        index: Rows by class, from `protonet.sampling.index_classes`.
        methods: Methods by name, see `protonet.episodes.methods`.
        setting: The kind of episodes.
        seed: Of the episodes, in [0, 2**63).
        n_episodes: Most episodes, >= 1.
        until: Stop once the half-widths of all methods' 95 % intervals are below this many percentage points, >= 0;
            0 for never.
        base: The base classes, for methods that use them.
        group: The processes that share the work, including this one; None for this one alone.
        progress: Called after each round of episodes.
        take: Returns rows of ``x`` by number; `protonet.datasets.Dataset.take_rows` for a mapped file.

    Returns:
        The scores of each method by name, the same in every process.

    Raises:
        InputTypeError: ``seed``, ``n_episodes`` or ``until`` is not a number.
        InputError: A number is outside its range, there are too few classes, a class is too small, or a method's logits
            are not finite.
    """
    seed = check_int("evaluate", "seed", seed, low=0, high=2**63 - 1)
    n_episodes = check_int("evaluate", "n_episodes", n_episodes, low=1)
    until = check_number("evaluate", "until", until, low=0)
    index = check_setting("evaluate", index, setting, tuple(map(str, range(len(index.size)))))
    group, take = group or Group(), take or take_from(x)
    gathered: dict[str, list[Scores]] = {name: [] for name in methods}
    with one_thread(), torch.inference_mode():
        torch.empty(KEPT)  # freed at once, see KEPT: results reuse memory, and no new pages have to be zeroed
        for first in range(0, n_episodes, ROUND * group.world_size):
            begin = first + ROUND * group.rank
            count = max(0, min(ROUND, n_episodes - begin))
            rounds = group.gather(_score_round(take, x.shape[1], index, methods, setting, seed, begin, count, base))
            # In the order of their numbers: any number of processes stops at the same round.
            for scores in rounds:
                for name, score in scores.items():
                    gathered[name].append(score)
                if until and all(_is_within(parts, until) for parts in gathered.values()):
                    return {name: join_scores(parts) for name, parts in gathered.items()}
            if progress is not None:
                progress(min(n_episodes, first + ROUND * group.world_size), gathered)
    return {name: join_scores(parts) for name, parts in gathered.items()}


def _score_round(
    take: Take,
    dim: int,
    index: ClassIndex,
    methods: Mapping[str, Method],
    setting: Setting,
    seed: int,
    first: int,
    n_episodes: int,
    base: Base | None,
) -> dict[str, Scores]:
    """Score the episodes ``first`` to ``first + n_episodes - 1``; return an empty dict for no episodes."""
    if not n_episodes:
        return {}
    numbers: list[Tensor] = []
    scored: dict[str, list[Scores]] = {name: [] for name in methods}
    for part in split_draw(draw_episodes(index, setting, seed=seed, first=first, n_episodes=n_episodes)):
        features = (part.support.shape[1] + part.query.shape[1]) * dim  # of one episode
        for block in _split_part(part, max(1, FEATURES_AT_ONCE // features)):
            numbers.append(block.numbers)
            episodes = gather_episodes(take, block, base)
            for name, method in methods.items():
                logits = method(episodes)
                if not bool(torch.isfinite(logits.sum())):
                    number = first + int(block.numbers[(~torch.isfinite(logits)).flatten(1).any(dim=1)][0])
                    remedy = "Scale the features, or leave the method out."
                    fail("evaluate", "method", "give finite logits", f"others of {name} in episode {number}", remedy)
                scored[name].append(score_logits(logits, block, setting.shot))
    order = torch.cat(numbers).argsort()
    joined = {name: join_scores(parts) for name, parts in scored.items()}
    return {
        name: Scores(accuracy[order], by_shot[order], auroc[order], bins)
        for name, (accuracy, by_shot, auroc, bins) in joined.items()
    }


def _split_part(part: Part, size: int) -> Iterator[Part]:
    """Yield a part in blocks of at most ``size`` episodes."""
    for start in range(0, len(part.numbers), size):
        numbers, support, support_labels, query, query_labels, query_shots = (
            tensor[start : start + size] for tensor in part[:-1]
        )
        yield Part(numbers, support, support_labels, query, query_labels, query_shots, part.n_way)


def score_logits(logits: Tensor, part: Part, shot: tuple[int, int]) -> Scores:
    """Score the logits of a part's episodes.

    Args:
        logits: (episodes, n_queries, n_way) floating, higher is likelier.
        part: The episodes, with the queries' labels and numbers of shots.
        shot: Least and most shots per class: the range of the scores by shot.

    Returns:
        The scores, in the part's order.
    """
    n_known = int((part.query_labels[0] >= 0).sum())
    logits = logits.transpose(1, 2).contiguous()  # (episodes, n_way, n_queries): ten times as fast, as classes are few
    known = logits[..., :n_known]
    right = known.max(dim=1).indices == part.query_labels[:, :n_known]
    accuracy = right.double().mean(dim=1)
    by_shot = accuracy[:, None]
    if shot[0] < shot[1]:
        shots = torch.arange(shot[0], shot[1] + 1)
        counts = (part.query_shots[:, :n_known, None] == shots).double()  # (episodes, n_known, shots)
        by_shot = (counts * right[..., None]).sum(dim=1) / counts.sum(dim=1)
    none_open = n_known == logits.shape[2]
    auroc = torch.full_like(accuracy, math.nan) if none_open else rate_open(logits.amax(dim=1), n_known)
    return Scores(accuracy, by_shot, auroc, fill_bins(known.softmax(dim=1).amax(dim=1), right))


def rate_open(scores: Tensor, n_known: int) -> Tensor:
    """Compute how often a known query scores higher than an open one; ties count half.

    Args:
        scores: (episodes, n_queries) floating, known queries first.
        n_known: How many queries are known, >= 1; the others, at least one, are open.

    Returns:
        (episodes,) float64 in [0, 1], the area under the ROC curve.

    Source: Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC) curve"
        (1982), which equates the area with Mann and Whitney's statistic.
    """
    difference = scores[:, :n_known, None] - scores[:, None, n_known:]  # (episodes, n_known, n_open_queries)
    return 0.5 + 0.5 * difference.sign().mean(dim=(1, 2), dtype=torch.float64)


def _is_within(parts: Sequence[Scores], until: float) -> bool:
    """Return whether the half-width of the accuracy's 95 % interval is below ``until`` percentage points."""
    return 100 * half_width(torch.cat([part.accuracy for part in parts])) < until


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Join the scores of several batches of episodes, in their order."""
    accuracy, by_shot, auroc, bins = zip(*parts, strict=True)
    return Scores(torch.cat(accuracy), torch.cat(by_shot), torch.cat(auroc), torch.stack(bins).sum(dim=0))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, and restore the number of threads afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
