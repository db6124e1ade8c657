"""Evaluate few-shot methods on the same numbered episodes: accuracy, calibration, and detection of open classes.

Processes can share the episodes: ``torchrun --nproc-per-node 2 -m protonet.episodes ...``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from protonet._validation import check_int, check_type
from protonet.datasets.dataset import Dataset
from protonet.episodes.evaluation.statistics import GENERALIZED_MEASURES, OPEN_SET_MEASURES
from protonet.episodes.methods import Method, MethodSpec
from protonet.episodes.methods.choice import ChosenMethod
from protonet.episodes.samplers.batch import (
    BaseClasses,
    ClassTextEmbeddings,
    EpisodeBatch,
    Episodes,
    TrainedEncoder,
    gather_episodes,
    make_row_reader,
    split_by_size,
)
from protonet.episodes.samplers.sampler import RowReader, SampledEpisodes, Sampler, compute_row_classes
from protonet.errors import InputTypeError, raise_input_error
from protonet.metrics import sum_confidence_bins
from protonet.sampling import ClassIndex

EPISODES_PER_SYNC = 256  #: Episodes that one process samples and scores before it exchanges scores with the others.
#: The first batches end after these numbers of episodes. They are smaller, so that slow methods show progress early.
FIRST_EPISODE_BATCH_ENDS = (1, 4, 16, 64)
#: The largest number of dot products (of queries with class means or support rows) that an inductive method computes at
#: a time, to limit the memory.
MAX_DOT_PRODUCTS_PER_CALL = 2**27
MIN_QUERIES_PER_CALL = 1024  #: Inductive methods classify at least this many queries at a time.
QUERY_COUNT_TOLERANCE = 1e-9  #: A tolerance for rounding errors in numbers of queries.


Gathered = TypeVar("Gathered")


class ProcessGroup(NamedTuple):
    """The processes of torchrun that share the work of a run, and the index of this process among them."""

    rank: int = 0  #: The index of this process, in [0, world_size).
    world_size: int = 1  #: The number of processes.

    def all_gather(self, value: Gathered) -> list[Gathered]:
        """Send a value to all processes, and return the values of all processes in the order of their ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Gathered] = [value] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values


def get_process_group() -> ProcessGroup:
    """Return the group of processes inside `join_process_group`; otherwise a group of one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ProcessGroup()
    return ProcessGroup(torch.distributed.get_rank(), torch.distributed.get_world_size())


@contextmanager
def join_process_group(device: str = "cpu") -> Iterator[None]:
    """Join the group of processes that torchrun started, and leave it on exit; without torchrun, do nothing.

    A context manager. The processes communicate by nccl if ``device`` is a GPU, otherwise by gloo. Inside another
    `join_process_group`, nothing is done: to leave and join again would fail while other processes still use the group.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or torch.distributed.is_initialized():
        yield
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def get_process_device(name: str) -> torch.device:
    """Return the torch device of a name; for "cuda", the processes of torchrun are distributed over the GPUs."""
    rank = os.environ.get("LOCAL_RANK")
    return torch.device(f"cuda:{int(rank) % torch.cuda.device_count()}" if name == "cuda" and rank else name)


@dataclass(frozen=True, kw_only=True)
class EpisodeScores:
    """The scores of one method in each episode, in the order of the episodes' numbers.

    Known queries are those of the episode's classes; open queries are of other classes, and should be detected as such.
    Tensors are (episodes,) float64 in [0, 1] unless stated otherwise. ``base_accuracy``, ``novel_accuracy`` and
    ``harmonic_mean`` are NaN if episodes have no base classes; ``auroc``, ``fpr95`` and ``oscr`` are NaN if they have
    no open queries.

    Source: Ye, Hu and Zhan, "Learning adaptive classifiers synthesis for generalized few-shot learning" (2021), sec. 5,
        for base and novel classes. https://arxiv.org/abs/1906.02944
    """

    accuracy: Tensor  #: The fraction of known queries that are classified correctly.
    accuracy_by_shot: Tensor
    """(episodes, shots), the accuracy on the classes with each number of shots; NaN if an episode has no such class."""
    auroc: Tensor  #: The area under the ROC curve of known against open queries, scored by their highest logit.
    fpr95: Tensor  #: The fraction of open queries above the threshold that 95 % of the known queries reach.
    oscr: Tensor
    """The open-set classification rate: the area under the curve of the fraction of known queries that are accepted and
    classified correctly against the fraction of open queries that are accepted as known."""
    base_accuracy: Tensor  #: The accuracy on queries of base classes.
    novel_accuracy: Tensor  #: The accuracy on queries of novel classes.
    harmonic_mean: Tensor  #: The harmonic mean of the accuracies on base and novel classes, 0 if one accuracy is 0.
    predicted_classes: Tensor
    """(episodes, n_known) int16, the predicted class of each known query; (episodes, 0) if predictions are not kept."""
    confidence_bins: Tensor
    """(n_bins, 3) float64, known queries by confidence, from `protonet.metrics.sum_confidence_bins`."""


#: A function that is called with the scores of all finished episodes: a list of batches in the order of the episodes.
#: A batch maps the name of each method to the method's scores.
ProgressCallback = Callable[[Sequence[Mapping[str, EpisodeScores]]], None]


def evaluate(
    x: Tensor,
    index: ClassIndex,
    methods: Mapping[str, Method],
    config: Sampler,
    *,
    seed: int = 0,
    episodes: int = 2000,
    base: BaseClasses | None = None,
    texts: Tensor | None = None,
    trained: TrainedEncoder | None = None,
    shape: tuple[int, int, int] | None = None,
    group: ProcessGroup | None = None,
    progress: ProgressCallback | None = None,
    take: RowReader | None = None,
    earlier: Mapping[str, EpisodeScores] | None = None,
    keep_predictions: bool = False,
) -> dict[str, EpisodeScores]:
    """Score several few-shot methods on the same episodes.

    Episodes are drawn on the CPU, and gathered, classified and scored on the device of the rows. The scores depend only
    on the data, the config, the seed and the device. The number of processes that share the episodes does not matter,
    nor the number of threads: one thread is used, because the matrices are small.

    Args:
        x: (n, dim) rows of any floating dtype.
        index: The row indices of each class, from `protonet.sampling.index_classes`.
        methods: Methods by name: those of `protonet.episodes.methods`, with settings from `choose_methods`, or any
            function from a batch of episodes to logits. Functions of your own get a copy of each batch, which they may
            change, with the queries in random order, and may use gradients.
        config: The protocol: an `EpisodeConfig` or another sampler.
        seed: Seed of the episodes, in [0, 2**63).
        episodes: Largest number of episodes, >= 1.
        base: The base classes, for methods that use them.
        texts: (classes of ``index``, dim) floating, the embedding of a text that names each class, on the device of the
            rows, for methods that use texts.
        trained: The encoder whose embeddings the rows are, for methods that adapt it. Its ``take`` reads rows before
            their embedding by the same indices.
        shape: (channels, height, width) if rows are flattened feature maps, for methods that use positions.
        group: The processes that share the work, including this one; None if this process does all.
        progress: Called after each batch of episodes; with several processes, after each exchange of scores.
        take: Reads rows of ``x`` by index, such as `protonet.datasets.Dataset.get_rows` of a memory-mapped file; None
            to index ``x``.
        earlier: Scores that ``progress`` got in an earlier call with the same arguments, joined by
            `concatenate_batches`. Their episodes are not scored again, which does not change the result.
        keep_predictions: Whether to keep the predicted class of each query. All episodes must then have the same number
            of queries.

    Returns:
        The scores of each method by name, equal in every process.

    Raises:
        InputTypeError: An argument has the wrong type, or a method does not return a tensor of floats.
        InputError: A number is outside its range, there are too few classes, a class is too small, texts have another
            shape than (classes, dim), or a method's logits have the wrong shape or are not finite.
    """
    seed = check_int("seed", seed, low=0, high=2**63 - 1)
    n_episodes = check_int("episodes", episodes, low=1)
    _check_types(x, index, methods, config, has_take=take is not None)
    expected = (len(index.class_counts), x.shape[1])
    if texts is not None and (texts.shape != expected or not texts.is_floating_point()):
        got, remedy = f"{texts.dtype} of shape {tuple(texts.shape)}", "Pass one row per class."
        raise_input_error("texts", f"be floats of shape (classes, dim), {expected} here", got, remedy)
    class_texts = None if texts is None else ClassTextEmbeddings(texts, compute_row_classes(index, len(x)))
    index = config.validate(index, tuple(map(str, range(len(index.class_counts)))))
    group, take = group or ProcessGroup(), take or make_row_reader(x)
    batch_size = choose_batch_size(methods, x)
    finished: list[dict[str, EpisodeScores]] = [] if earlier is None else [dict(earlier)]
    done = count_episodes(finished)

    # The number of feature values of episodes (rows times features) that a method gets at a time: most methods are
    # fastest while these fit into the processor's caches. With twice as many, methods with many small steps are 15 %
    # faster and the others slower.
    feature_values_per_call = 2**21

    def score_episodes(sampled: SampledEpisodes, first: int) -> dict[str, EpisodeScores]:
        """Score all methods on sampled episodes, which are numbered from ``first`` on."""
        positions: list[Tensor] = []
        scored: dict[str, list[EpisodeScores]] = {name: [] for name in methods}
        for batch in split_by_size(sampled):
            rows = (batch.support_ids, batch.query_ids, batch.unlabelled_ids)
            features_per_episode = sum(indices.shape[1] for indices in rows) * x.shape[1]
            size = max(1, feature_values_per_call // features_per_episode)
            positions.append(batch.episode_positions)
            predictions: dict[str, list[QueryPredictions]] = {name: [] for name in methods}
            for start in range(0, len(batch.episode_positions), size):
                block = batch.select_episodes(slice(start, start + size))
                gathered = gather_episodes(take, block, base, class_texts, trained, shape)
                n_known = int((block.query_labels[0] >= 0).sum())  # queries of open classes come last
                for name, method in methods.items():
                    logits = _classify_batch(name, method, gathered, first + block.episode_positions, seed)
                    predictions[name].append(predict_queries(logits, n_known))
            for name, blocks in predictions.items():
                joined = QueryPredictions(*map(torch.cat, zip(*blocks, strict=True)))
                scored[name].append(_score_predictions(joined, batch, config, keep=keep_predictions))
        order = torch.cat(positions).argsort()
        return {name: concatenate_scores(scores, order) for name, scores in scored.items()}

    with ExitStack() as stack, torch.no_grad():
        # One thread, because the matrices are small; the scores then do not depend on the number of threads.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        # Processes take turns with blocks of numbered episodes, so that their number does not change the scores.
        for first in range(done // EPISODES_PER_SYNC, -(-n_episodes // EPISODES_PER_SYNC), group.world_size):
            begin = max(done, (first + group.rank) * EPISODES_PER_SYNC)
            end = min((first + group.rank + 1) * EPISODES_PER_SYNC, n_episodes)
            batches: list[dict[str, EpisodeScores]] = []
            sampled = config.sample(index, seed=seed, first=begin, n_episodes=max(0, end - begin))
            ends = [n for n in range(begin + 1, end + 1) if n == end or is_batch_end(n, batch_size)]
            for start, stop in pairwise([begin, *ends]):
                some = SampledEpisodes(*(rows[start - begin : stop - begin] for rows in sampled))
                batches.append(score_episodes(some, start))
                if progress is not None and group.world_size == 1:
                    progress([*finished, *batches])
            for scores in group.all_gather(batches):  # in the order of the episodes' numbers
                finished += scores
            if progress is not None and group.world_size > 1:
                progress([*finished])
    return concatenate_batches(finished)


def _check_types(x: object, index: object, methods: object, config: object, *, has_take: bool) -> None:
    """Raise an InputTypeError for arguments of `evaluate` of wrong type; if ``has_take``, rows may have any dtype."""
    if isinstance(x, Dataset):
        remedy = "Pass it to evaluate_dataset, which uses its split, or pass its x."
        raise_input_error("x", "be a tensor of rows", "a Dataset", remedy, kind=InputTypeError)
    if not isinstance(x, Tensor) or x.ndim != 2 or not (x.is_floating_point() or has_take):
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        remedy = "Use torch.as_tensor(x).float()."
        raise_input_error("x", "be a tensor of floats of shape (n, dim)", got, remedy, kind=InputTypeError)
    if not isinstance(index, ClassIndex):
        remedy = "Pass index_classes(labels)."
        raise_input_error("index", "be a ClassIndex, rows by class", type(index).__name__, remedy, kind=InputTypeError)
    check_methods(methods)
    check_type("config", config, Sampler, "an EpisodeConfig, or another sampler")
    max_row = int(index.row_indices.max()) if len(index.row_indices) else -1
    if not has_take and max_row >= len(x):
        remedy = "Pass the index of these rows' labels."
        raise_input_error("index", f"have numbers of the {len(x)} rows of x", f"row {max_row}", remedy)


def check_methods(methods: object, argument: str = "methods") -> None:
    """Raise an InputTypeError about ``argument`` unless the methods are a mapping from names to functions."""
    if not isinstance(methods, Mapping) or not methods:
        got = "none" if isinstance(methods, Mapping) else type(methods).__name__
        remedy = "Pass choose_methods([...]), or a dict."
        raise_input_error(argument, "be a mapping from names to methods", got, remedy, kind=InputTypeError)
    for name, method in methods.items():
        if not callable(method):
            remedy = "Pass a function from episodes to logits."
            got = f"{type(method).__name__} as {name!r}"
            raise_input_error(argument, "hold functions", got, remedy, kind=InputTypeError)


def choose_batch_size(methods: Mapping[str, Method], x: Tensor) -> int:
    """Choose how many episodes `evaluate` scores per batch, that is, between two calls of its argument ``progress``.

    The number is larger for fast methods on rows ``x`` (n, dim) of few features.
    """
    ours = [method for method in methods.values() if isinstance(method, ChosenMethod) and method.plugin_version is None]
    fast = len(ours) == len(methods) and not any(method.spec.is_slow for method in ours)
    # Largest number of episodes that are scored between two calls of ``progress``. Batch sizes are fixed, because
    # batches of other sizes could round differently.
    max_episodes_per_batch = 64
    # If rows have fewer features than this, fast methods score ``EPISODES_PER_SYNC`` episodes per batch: the overhead
    # per batch would take most of the time.
    max_features_for_large_batches = 160
    return EPISODES_PER_SYNC if fast and x.shape[1] < max_features_for_large_batches else max_episodes_per_batch


def is_batch_end(n_episodes: int, batch_size: int) -> bool:
    """Test whether a batch of scores ends after the first ``n_episodes`` episodes, see ``FIRST_EPISODE_BATCH_ENDS``."""
    return n_episodes in FIRST_EPISODE_BATCH_ENDS or n_episodes % batch_size == 0


def _classify_batch(name: str, method: Method, episodes: Episodes, episode_ids: Tensor, seed: int) -> Tensor:
    """Run a method on a batch of episodes; check and return its logits (episodes, n_queries, n_way)."""
    spec = method.spec if isinstance(method, ChosenMethod) and method.plugin_version is None else method
    if not isinstance(spec, MethodSpec):  # from outside the package
        # A function from outside must not read the labels off the order of the queries.
        hidden, positions = episodes.shuffle_rows(episode_ids, seed)
        with torch.enable_grad():
            logits = _convert_logits(name, method(hidden), episodes, episode_ids)
        return logits.gather(1, positions[..., None].expand_as(logits))
    n_episodes, n_queries = episodes.query.shape[:2]
    products_per_query = episodes.n_way + (0 if spec.needs_only_means else episodes.support.shape[1])
    # Inductive methods get many queries block by block, to save memory.
    max_queries = max(MIN_QUERIES_PER_CALL, MAX_DOT_PRODUCTS_PER_CALL // (n_episodes * products_per_query))
    if n_queries <= max_queries or spec.transductive:
        return _convert_logits(name, method(episodes), episodes, episode_ids)
    blocks = (method(episodes.select_queries(slice(at, at + max_queries))) for at in range(0, n_queries, max_queries))
    logits = torch.cat([block.transpose(1, 2) for block in blocks], dim=2).transpose(1, 2)
    return _convert_logits(name, logits, episodes, episode_ids)


def _convert_logits(name: str, logits: object, episodes: Episodes, episode_ids: Tensor) -> Tensor:
    """Convert a method's logits to float32 unless they are float64; raise an InputError for wrong shapes or values."""
    shape = (*episodes.query.shape[:2], episodes.n_way)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = f"{logits.dtype if isinstance(logits, Tensor) else type(logits).__name__} of {name}"
        remedy = "Return logits, such as minus distances."
        raise_input_error("method", "give a tensor of floats", got, remedy, kind=InputTypeError)
    if logits.shape != shape:
        constraint = f"give logits of shape (episodes, n_queries, n_way), {shape} here"
        remedy = "Return one logit per query and class."
        raise_input_error("method", constraint, f"{tuple(logits.shape)} of {name}", remedy)
    logits = logits.detach().to(episodes.query.device)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # The smallest and the largest logit show infinite values and NaN; a mask of all logits would take much longer.
    bad = ~torch.isfinite(logits.amin(dim=(1, 2)) - logits.amax(dim=(1, 2))).cpu()
    if bool(bad.any()):
        got = f"others of {name} in episode {int(episode_ids[bad][0])}"
        raise_input_error("method", "give finite logits", got, "Scale the features, or leave the method out.")
    return logits


class QueryPredictions(NamedTuple):
    """Predictions for each query of a batch of episodes, from which scores follow; queries of open classes are last."""

    predicted: Tensor  #: (episodes, n_known) int64 in [0, n_way), the class of each known query.
    confidence: Tensor  #: (episodes, n_known), the probability of this class.
    highest: Tensor  #: (episodes, n_queries), the highest logit of each query, also of open classes.


def predict_queries(logits: Tensor, n_known: int) -> QueryPredictions:
    """Predict the class of each query from logits (episodes, n_queries, n_way), of which ``n_known`` are known."""
    logits = logits.transpose(1, 2)  # (episodes, n_way, n_queries): ten times as fast, as classes are few
    n_episodes, n_way, n_queries = logits.shape
    # The number of logits that are scored at a time: they fit into the processor's cache, where they are read several
    # times.
    logits_per_block = 2**18
    # A multiple of the numbers of floats in a vector register of any processor.
    queries_per_register = 64
    # Whole vector registers: torch's softmax would round the queries behind the last register differently.
    size = max(1, logits_per_block // (n_episodes * n_way * queries_per_register)) * queries_per_register
    blocks: list[QueryPredictions] = []
    for start in range(0, n_queries, size):
        block = logits[..., start : start + size].contiguous()
        known = block[..., : max(0, n_known - start)]
        highest, predicted = known.max(dim=1)
        confidence = known.softmax(dim=1).gather(1, predicted[:, None])[:, 0]
        blocks.append(QueryPredictions(predicted, confidence, block.amax(dim=1) if n_known < n_queries else highest))
    return QueryPredictions(*(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)))


def _score_predictions(
    predictions: QueryPredictions, batch: EpisodeBatch, config: Sampler, *, keep: bool
) -> EpisodeScores:
    """Compute scores, on the CPU, from a method's predictions; if ``keep``, with the predicted class of each query."""
    shot, (predicted, confidence, highest) = config.shot, predictions
    query_labels, query_shots = (tensor.to(predicted.device) for tensor in (batch.query_labels, batch.query_shots))
    n_known = predicted.shape[1]
    right = predicted == query_labels[:, :n_known]
    predicted = predicted[:, : n_known if keep else 0].short()
    accuracy = right.double().mean(dim=1)
    by_shot = accuracy[:, None]
    if shot[0] < shot[1]:
        shots = torch.arange(shot[0], shot[1] + 1, device=right.device)
        counts = (query_shots[:, :n_known, None] == shots).double()  # (episodes, n_known, shots)
        by_shot = (counts * right[..., None]).sum(dim=1) / counts.sum(dim=1)
    scores = dict.fromkeys((*OPEN_SET_MEASURES, *GENERALIZED_MEASURES.values()), torch.full_like(accuracy, math.nan))
    if n_known < highest.shape[1]:
        scores["auroc"] = open_set_auroc(highest, n_known)
        scores["fpr95"] = open_set_fpr95(highest, n_known)
        scores["oscr"] = open_set_auroc(highest, n_known, right)
    if config.n_base_classes:  # base classes come first
        is_base = query_labels[:, :n_known] < config.n_base_classes
        base, novel = ((right & side).sum(dim=1).double() / side.sum(dim=1) for side in (is_base, ~is_base))
        harmonic = 2 * base * novel / (base + novel).clamp_min(QUERY_COUNT_TOLERANCE)
        scores |= {"base_accuracy": base, "novel_accuracy": novel, "harmonic_mean": harmonic}
    scores |= {"accuracy": accuracy, "accuracy_by_shot": by_shot, "predicted_classes": predicted}
    scores["confidence_bins"] = sum_confidence_bins(confidence, right)
    for name, values in scores.items():
        scores[name] = values.cpu()
    return EpisodeScores(**scores)


def open_set_auroc(scores: Tensor, n_known: int, correct: Tensor | None = None) -> Tensor:
    """Compute how well scores separate known from open queries: the area under the ROC curve, or the OSCR.

    The area is the fraction of pairs of a known and an open query in which the known one has the higher score; ties
    count half. For the open-set classification rate (OSCR), pairs with a wrongly classified known query count 0.

    Args:
        scores: (episodes, n_queries), known queries first.
        n_known: The number of known queries in each episode.
        correct: (episodes, n_known) bool, whether known queries are classified correctly, for the OSCR; None for the
            ROC curve.

    Returns:
        The area in each episode, (episodes,) float64 in [0, 1].

    Source: Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC) curve"
        (1982), which equates the area with Mann and Whitney's statistic; for ``correct`` Dhamija, Günther and Boult,
        "Reducing network agnostophobia" (2018). https://arxiv.org/abs/1811.04110
    """
    # Ties count half, as the sign of their difference is 0.
    difference = scores[:, :n_known, None] - scores[:, None, n_known:]  # (episodes, n_known, n_open_queries)
    if correct is None:
        return 0.5 + 0.5 * difference.sign().mean(dim=(1, 2), dtype=torch.float64)
    return 0.5 * ((1 + difference.sign()) * correct[..., None]).mean(dim=(1, 2), dtype=torch.float64)


def open_set_fpr95(scores: Tensor, n_known: int) -> Tensor:
    """Compute the false positive rate of open queries at a true positive rate of 95 %, (episodes,) float64.

    It is the fraction of open queries whose score reaches the threshold that 95 % of the known queries reach. Arguments
    are as in `open_set_auroc`.

    Source: Liang, Li and Srikant, "Enhancing the reliability of out-of-distribution image detection" (2018).
        https://arxiv.org/abs/1706.02690
    """
    # The fraction of known queries above the threshold at which ``fpr95`` is measured.
    true_positive_rate = 0.95
    position = math.ceil(true_positive_rate * n_known - QUERY_COUNT_TOLERANCE) - 1
    threshold = scores[:, :n_known].sort(dim=1, descending=True).values[:, position, None]
    return (scores[:, n_known:] >= threshold).double().mean(dim=1)


def count_episodes(batches: Sequence[Mapping[str, EpisodeScores]]) -> int:
    """Count the episodes in all batches; each batch maps the name of each method to its scores."""
    return sum(len(next(iter(batch.values())).accuracy) for batch in batches)


def concatenate_scores(batches: Sequence[EpisodeScores], order: Tensor | slice = slice(None)) -> EpisodeScores:
    """Join the scores of one method on several batches of episodes.

    ``order`` has the index of each episode of the result among the joined episodes; by default they keep their order.
    """
    by_episode = [name for name in vars(batches[0]) if name != "confidence_bins"]
    joined = {name: torch.cat([getattr(batch, name) for batch in batches])[order] for name in by_episode}
    # One after another, so that sums of sums are the same numbers.
    return EpisodeScores(**joined, confidence_bins=reduce(torch.add, [batch.confidence_bins for batch in batches]))


def concatenate_batches(batches: Sequence[Mapping[str, EpisodeScores]]) -> dict[str, EpisodeScores]:
    """Concatenate the scores of all batches of episodes; each batch and the result map a method's name to scores."""
    return {name: concatenate_scores([batch[name] for batch in batches]) for name in batches[0]}
