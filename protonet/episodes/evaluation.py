"""Evaluate methods on the same numbered episodes: accuracy, also by shot, calibration, and open classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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

ROUND = 256  #: Episodes that one process draws and scores between two exchanges with the others.
#: Features of episodes that are processed at a time: enough for few calls, and still within the processor's caches.
FEATURES_AT_ONCE = 2**21
#: Floats in just under 32 MiB. Freeing an array of this size once makes glibc keep later arrays instead of returning
#: them to the system.
KEPT = 2**23 - 2**12


class Scores(NamedTuple):
    """The scores of one method, in the order of the episodes' numbers."""

    accuracy: Tensor  #: (episodes,) float64 in [0, 1], the share of right queries, without those of open classes.
    by_shot: Tensor  #: (episodes, shots) float64, the accuracy on classes of each number of shots, NaN without such.
    #: (episodes,) float64 in [0, 1], the area under the ROC curve of known against open queries by their highest logit;
    #: NaN without open queries.
    auroc: Tensor
    bins: Tensor  #: (n_bins, 3) float64, queries by confidence, from `protonet.metrics.fill_bins`.


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

    def score_round(first: int, count: int) -> dict[str, Scores]:
        """Score the episodes ``first`` to ``first + count - 1``."""
        numbers: list[Tensor] = []
        scored: dict[str, list[Scores]] = {name: [] for name in methods}
        for part in split_draw(draw_episodes(index, setting, seed=seed, first=first, n_episodes=count)):
            features = (part.support.shape[1] + part.query.shape[1]) * x.shape[1]  # of one episode
            size = max(1, FEATURES_AT_ONCE // features)
            for start in range(0, len(part.numbers), size):
                block = Part._make([*(tensor[start : start + size] for tensor in part[:-1]), part.n_way])
                numbers.append(block.numbers)
                episodes = gather_episodes(take, block, base)
                for name, method in methods.items():
                    logits = method(episodes)
                    if not bool(torch.isfinite(logits.sum())):
                        number = first + int(block.numbers[(~torch.isfinite(logits)).flatten(1).any(dim=1)][0])
                        got = f"others of {name} in episode {number}"
                        remedy = "Scale the features, or leave the method out."
                        fail("evaluate", "method", "give finite logits", got, remedy)
                    scored[name].append(_score_logits(logits, block, setting.shot))
        order = torch.cat(numbers).argsort()
        return {name: join_scores(parts, order) for name, parts in scored.items()}

    with ExitStack() as stack, torch.inference_mode():
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        torch.empty(KEPT)  # freed at once, see KEPT: results reuse memory, and no new pages have to be zeroed
        for first in range(0, n_episodes, ROUND * group.world_size):
            begin = first + ROUND * group.rank
            count = max(0, min(ROUND, n_episodes - begin))
            rounds = group.gather(score_round(begin, count) if count else {})
            # In the order of their numbers: any number of processes stops at the same round.
            for scores in rounds:
                for name, score in scores.items():
                    gathered[name].append(score)
                if until and all(_is_within(parts, until) for parts in gathered.values()):
                    return {name: join_scores(parts) for name, parts in gathered.items()}
            if progress is not None:
                progress(min(n_episodes, first + ROUND * group.world_size), gathered)
    return {name: join_scores(parts) for name, parts in gathered.items()}


def _score_logits(logits: Tensor, part: Part, shot: tuple[int, int]) -> Scores:
    """Score the logits (episodes, n_queries, n_way) of a part's episodes; ``shot`` is the range of scores by shot."""
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


def join_scores(parts: Sequence[Scores], order: Tensor | slice = slice(None)) -> Scores:
    """Join the scores of several batches of episodes, then put the episodes into ``order``."""
    accuracy, by_shot, auroc, bins = zip(*parts, strict=True)
    joined = [torch.cat(each)[order] for each in (accuracy, by_shot, auroc)]
    return Scores._make([*joined, torch.stack(bins).sum(dim=0)])
