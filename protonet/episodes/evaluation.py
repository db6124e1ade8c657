"""Evaluate methods on the same numbered episodes: accuracy, by shot too, calibration, and open classes."""

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
from protonet.sampling import ClassIndex

#: Episodes that are drawn, dealt to a process and brought together at a time.
ROUND = 256
#: Features of episodes that are worked on at a time: few calls, and all of it in some level of the processor's cache.
FEATURES_AT_ONCE = 2**21
#: Floats of the largest piece of memory, just below 32 MiB, that glibc learns to keep instead of giving it back.
KEPT = 2**23 - 2**12
#: Bins of confidence for the calibration error.
BINS = 15


class Scores(NamedTuple):
    """What one method scored, in the order of the episodes' numbers.

    Attributes:
        accuracy: (episodes,) float64 share of an episode's queries that are right, those of open classes left out.
        by_shot: (episodes, shots) float64 the same of the classes of each number of shots, NaN where there is none.
        auroc: (episodes,) float64 area under the curve of known against open queries by their highest logit, NaN
            where there are no open ones.
        bins: (BINS, 3) float64 by confidence: queries, the sum of their confidences, and how many are right.
    """

    accuracy: Tensor
    by_shot: Tensor
    auroc: Tensor
    bins: Tensor


#: Called with the number of episodes so far and each method's scores so far, in parts.
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

    The scores hang on the data, the setting and the seed alone: neither on the number of threads (there is one, for the
    matrices are small) nor on how many processes share the episodes.

    Args:
        x: (n, dim) rows of any floating dtype.
        index: Rows by class, from `protonet.sampling.index_classes`.
        methods: By name.
        setting: The kind of episodes.
        seed: Of the episodes, in [0, 2**63).
        n_episodes: Most episodes, >= 1.
        until: Stop when 95 % intervals of all accuracies are within this many points of 100 to each side; 0 for never.
        base: The base classes, for methods that use them.
        group: The processes that share the work, this one among them; None for one.
        progress: Told what is done.
        take: Takes rows of ``x`` by number: `protonet.datasets.Dataset.take_rows` where a file is mapped.

    Returns:
        The scores of each method, the same in every process.

    Raises:
        TypeError: A number is not one.
        ValueError: A number outside its range; classes too few or too small; a method whose logits are not finite.
    """
    seed = check_int("evaluate", "seed", seed, low=0, high=2**63 - 1)
    n_episodes = check_int("evaluate", "n_episodes", n_episodes, low=1)
    until = check_number("evaluate", "until", until, low=0)
    index = check_setting("evaluate", index, setting, tuple(map(str, range(len(index.size)))))
    group, take = group or Group(), take or take_from(x)
    gathered: dict[str, list[Scores]] = {name: [] for name in methods}
    with one_thread(), torch.inference_mode():
        torch.empty(KEPT)  # freed at once: from now on results reuse memory, and no new pages have to be zeroed
        for first in range(0, n_episodes, ROUND * group.world_size):
            begin = first + ROUND * group.rank
            count = max(0, min(ROUND, n_episodes - begin))
            rounds = group.gather(_score_round(take, x.shape[1], index, methods, setting, seed, begin, count, base))
            # In the order of their numbers, and stopped at the same one by any number of processes.
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
    """Return the scores of consecutive episodes, an empty dict for no episode."""
    if not n_episodes:
        return {}
    numbers: list[Tensor] = []
    scored: dict[str, list[Scores]] = {name: [] for name in methods}
    for part in split_draw(draw_episodes(index, setting, seed=seed, first=first, n_episodes=n_episodes)):
        features = (part.support.shape[1] + part.query.shape[1]) * dim  # of an episode
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
    """Score logits (episodes, n_queries, n_way) of a part's episodes.

    Args:
        logits: Higher is likelier.
        part: With the queries' labels and numbers of shots.
        shot: Least and most shots a class, the columns of the scores by shot.
    """
    n_known = int((part.query_labels[0] >= 0).sum())
    logits = logits.transpose(1, 2).contiguous()  # (episodes, n_way, n_queries): ten times as fast, ways being few
    known = logits[..., :n_known]
    right = known.max(dim=1).indices == part.query_labels[:, :n_known]
    accuracy = right.double().mean(dim=1)
    by_shot = accuracy[:, None]
    if shot[0] < shot[1]:
        columns = torch.arange(shot[0], shot[1] + 1)
        counts = (part.query_shots[:, :n_known, None] == columns).double()  # (episodes, known, shots)
        by_shot = (counts * right[..., None]).sum(dim=1) / counts.sum(dim=1)
    nothing_open = n_known == logits.shape[2]
    auroc = torch.full_like(accuracy, math.nan) if nothing_open else rate_open(logits.amax(dim=1), n_known)
    return Scores(accuracy, by_shot, auroc, _fill_bins(known.softmax(dim=1).amax(dim=1), right))


def rate_open(scores: Tensor, n_known: int) -> Tensor:
    """Return how often a known query scores higher than an open one, ties counting half: (episodes,).

    Args:
        scores: (episodes, n_queries), known ones first.
        n_known: How many are known; the others, at least one, are not.

    Returns:
        float64 in [0, 1].

    Source: the area under the ROC curve as Mann and Whitney's statistic, Hanley and McNeil (1982).
    """
    difference = scores[:, :n_known, None] - scores[:, None, n_known:]  # (episodes, known, open)
    return 0.5 + 0.5 * difference.sign().mean(dim=(1, 2), dtype=torch.float64)


def _fill_bins(confidence: Tensor, right: Tensor) -> Tensor:
    """Return queries, confidence and hits, (BINS, 3) float64, of queries (episodes, known)."""
    confidence = confidence.flatten().double()
    position = (confidence * BINS).ceil().long().sub_(1).clamp_(0, BINS - 1)
    values = torch.stack([torch.ones_like(confidence), confidence, right.flatten().double()], dim=1)
    return torch.zeros(BINS, 3, dtype=torch.float64).index_add_(0, position, values)


def _is_within(parts: Sequence[Scores], until: float) -> bool:
    """Return whether the 95 % interval of the accuracy is within ``until`` points."""
    return 100 * half_width(torch.cat([part.accuracy for part in parts])) < until


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Return the scores of several batches of episodes as one."""
    accuracy, by_shot, auroc, bins = zip(*parts, strict=True)
    return Scores(torch.cat(accuracy), torch.cat(by_shot), torch.cat(auroc), torch.stack(bins).sum(dim=0))


@contextmanager
def one_thread() -> Iterator[None]:
    """Work on one thread, and put their number back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
