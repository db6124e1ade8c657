"""Batches of episodes of equal sizes: the features that methods get, and records of rows and predictions for JSON."""

from __future__ import annotations

import base64
import copy
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.names import TrainingPlan
from protonet.episodes.samplers.sampler import RowPool, RowReader, SampledEpisodes, Sampler, Stream, sample_uniform
from protonet.sampling import ClassIndex, index_pieces, list_pieces

SIZE_FACTORS = torch.tensor([1, 2**15, 2**30, 2**46])  #: Factors that pack an episode's four sizes into one int64.
ROWS_PER_SUM = 8192  #: Rows that are summed or hashed at a time.


class BaseClasses(NamedTuple):
    """The base classes: labelled rows of other classes than the episode's, which a method may use."""

    take: RowReader  #: Returns base rows by index; it has no other rows.
    by_class: ClassIndex  #: The indices of the base rows, by class.
    mean: Tensor  #: (dim,) float32, of all base rows.
    class_means: Tensor  #: (base classes, dim) float32.


class TrainedEncoder(NamedTuple):
    """A meta-trained encoder with its head, and the rows of the episodes before the encoder embeds them."""

    encoder: nn.Module  #: Maps rows (n, dim) float32 to embeddings, in evaluation mode, without gradients.
    head: nn.Module  #: The module that was trained beside the encoder, from `make_head`.
    plan: TrainingPlan  #: The settings of its training.
    take: RowReader  #: Returns rows that are not embedded, by index.
    support: Tensor | None = None  #: (episodes, n_support) int64 row indices, on the CPU; None outside of episodes.
    query: Tensor | None = None  #: (episodes, n_queries) int64 row indices, on the CPU; None outside of episodes.

    def gather(self) -> tuple[Tensor, Tensor]:
        """Gather the episodes' support and query rows, (episodes, rows, dim) float32, on the encoder's device."""
        assert self.support is not None
        assert self.query is not None
        indices = torch.cat([self.support, self.query], dim=1)
        rows = self.take(indices.flatten()).to(next(self.encoder.parameters()).device).float()
        support, query = rows.unflatten(0, indices.shape).tensor_split([self.support.shape[1]], dim=1)
        return support, query

    def send(self, device: torch.device) -> TrainedEncoder:
        """Copy encoder and head to a device."""
        return self._replace(encoder=self.encoder.to(device), head=self.head.to(device))

    def hide_row_indices(self, order: Tensor) -> TrainedEncoder:
        """Copy the encoder with queries in an ``order`` (episodes, n_queries), and row indices of the batch alone."""
        copied = self._replace(encoder=copy.deepcopy(self.encoder), head=copy.deepcopy(self.head))
        if self.support is None or self.query is None:
            return copied
        rows = torch.cat([self.support, self.query.gather(1, order)], dim=1)  # (episodes, rows)
        support, query = torch.arange(rows.numel()).view_as(rows).tensor_split([self.support.shape[1]], dim=1)
        take, known = self.take, rows.flatten()
        return copied._replace(take=lambda indices: take(known[indices]), support=support, query=query)


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """A batch of episodes of equal sizes, without the queries' labels."""

    support: Tensor  #: (episodes, n_support, dim) float32 or float64, the support rows of all classes.
    support_labels: Tensor  #: (episodes, n_support) int64 in [0, n_way), each class at least once, in any order.
    query: Tensor  #: (episodes, n_queries, dim), the dtype of ``support``, the query rows of all classes.
    n_way: int  #: Classes per episode.
    base: BaseClasses | None = None  #: The base classes, if there are any.
    #: (episodes, n_way, dim), the dtype of ``support``: the embedding of a text that names each class, or None.
    texts: Tensor | None = None
    #: (episodes, n_unlabelled, dim), the dtype of ``support``: rows to learn from, of the episode's classes and perhaps
    #: of distractor classes, or None.
    unlabelled: Tensor | None = None
    trained: TrainedEncoder | None = None  #: The encoder whose embeddings the rows are, or None.
    #: (channels, height, width) of pictures and feature maps, which are flattened to features in this order, or None.
    shape: tuple[int, int, int] | None = None

    def select_queries(self, queries: slice) -> Episodes:
        """Copy the episodes with some of their queries."""
        trained = self.trained
        if trained is not None and trained.query is not None:
            trained = trained._replace(query=trained.query[:, queries])
        return replace(self, query=self.query[:, queries], trained=trained)

    def shuffle_rows(self, episode_ids: Tensor, seed: int) -> tuple[Episodes, Tensor]:
        """Copy the episodes with queries and unlabelled rows in random order, for a method from outside the package.

        They are sampled class by class, so that their positions and their row indices would reveal their labels.

        Args:
            episode_ids: (episodes,) int64, increasing: with the seed they determine the order.
            seed: Seed of the episodes.

        Returns:
            episodes: A copy, which a method may change.
            positions: (episodes, n_queries) int64, the new position of each query, on the device of the episodes.
        """
        first, device = int(episode_ids[0]), self.query.device

        def draw_order(stream: Stream, n_rows: int) -> Tensor:
            """Draw a random order of the rows of each episode: (episodes, n_rows) int64."""
            shape = (int(episode_ids[-1]) - first + 1, n_rows)
            return sample_uniform(seed, stream, first, shape)[episode_ids - first].argsort(dim=1)

        def reorder(rows: Tensor, order: Tensor) -> Tensor:
            return rows.gather(1, order[..., None].expand_as(rows))

        order, base = draw_order(Stream.QUERY_ORDER, self.query.shape[1]), self.base
        unlabelled = self.unlabelled
        if unlabelled is not None:
            unlabelled = reorder(unlabelled, draw_order(Stream.UNLABELLED_ORDER, unlabelled.shape[1]).to(device))
        hidden = replace(
            self,
            support=self.support.clone(),
            support_labels=self.support_labels.clone(),
            query=reorder(self.query, order.to(device)),
            base=base and base._replace(mean=base.mean.clone(), class_means=base.class_means.clone()),
            texts=None if self.texts is None else self.texts.clone(),
            unlabelled=unlabelled,
            trained=self.trained and self.trained.hide_row_indices(order),
        )
        return hidden, order.argsort(dim=1).to(device)


@dataclass(frozen=True, kw_only=True)
class EpisodeBatch:
    """Row indices of sampled episodes with equal numbers of classes, support rows, queries and open queries."""

    positions: Tensor  #: (episodes,) int64 positions among the sampled episodes.
    support: Tensor  #: (episodes, n_support) int64 row indices.
    support_labels: Tensor  #: (episodes, n_support) int64.
    query: Tensor  #: (episodes, n_queries) int64 row indices; queries of open classes come last.
    query_labels: Tensor  #: (episodes, n_queries) int64, -1 for queries of open classes.
    query_shots: Tensor  #: (episodes, n_queries) int64, support rows of the query's class, 0 for open classes.
    unlabelled: Tensor  #: (episodes, n_unlabelled) int64 row indices.
    n_way: int  #: Classes per episode.

    def select(self, episodes: slice) -> EpisodeBatch:
        """Select some episodes of the batch."""
        tensors = {name: value[episodes] for name, value in vars(self).items() if name != "n_way"}
        return replace(self, **tensors)


def split_by_size(sampled: SampledEpisodes) -> Iterator[EpisodeBatch]:
    """Split sampled episodes into batches with equal numbers of classes, support rows and queries."""
    query = torch.cat([sampled.query.flatten(1), sampled.open_query.flatten(1)], dim=1)
    support = sampled.support.flatten(1)
    _, max_way, max_query = sampled.query.shape
    n_open_queries = query.shape[1] - max_way * max_query  # open queries per episode, at most
    shots = (sampled.support >= 0).sum(dim=2)  # (episodes, max_way)
    labels = torch.arange(max_way).expand(len(shots), -1)
    support_labels = labels.repeat_interleave(sampled.support.shape[2], dim=1)
    query_labels = F.pad(labels.repeat_interleave(max_query, dim=1), (0, n_open_queries), value=-1)
    query_shots = F.pad(shots.repeat_interleave(max_query, dim=1), (0, n_open_queries))
    counts = (shots > 0).sum(dim=1), shots.sum(dim=1), (sampled.query >= 0).sum(dim=(1, 2)), (query >= 0).sum(dim=1)
    sizes = torch.stack(counts, dim=1)  # (episodes, 4)
    _, kinds = torch.unique(sizes @ SIZE_FACTORS, return_inverse=True)  # far faster than unique rows
    for kind in range(int(kinds.max()) + 1 if len(kinds) else 0):
        positions = (kinds == kind).nonzero().flatten()
        n_way, n_support, _, n_query = sizes[positions[0]].tolist()
        unlabelled = sampled.unlabelled[positions].flatten(1)  # equally many rows, as the number of classes is equal
        support_slots = _list_filled_slots(support[positions], n_support)
        query_slots = _list_filled_slots(query[positions], n_query)
        yield EpisodeBatch(
            positions=positions,
            support=support[positions].gather(1, support_slots),
            support_labels=support_labels[positions].gather(1, support_slots),
            query=query[positions].gather(1, query_slots),
            query_labels=query_labels[positions].gather(1, query_slots),
            query_shots=query_shots[positions].gather(1, query_slots),
            unlabelled=unlabelled.gather(1, _list_filled_slots(unlabelled, int((unlabelled[0] >= 0).sum()))),
            n_way=n_way,
        )


def _list_filled_slots(rows: Tensor, count: int) -> Tensor:
    """List the ``count`` slots of each episode that have a row index: (episodes, slots) -> (episodes, count)."""
    if count == rows.shape[1]:
        return torch.arange(count).expand(len(rows), -1)
    return (rows >= 0).nonzero()[:, 1].reshape(len(rows), count)


def make_row_reader(x: Tensor) -> RowReader:
    """Make a function that copies rows of ``x`` (n, dim) by index into memory that each call reuses, for speed."""
    memory = x.new_empty(0)

    def take(rows: Tensor) -> Tensor:
        nonlocal memory
        size = len(rows) * x.shape[1]
        if size > len(memory):
            memory = x.new_empty(size)
        return torch.index_select(x, 0, rows.to(x.device), out=memory[:size].view(len(rows), x.shape[1]))

    return take


class ClassTexts(NamedTuple):
    """The embeddings of texts that name the classes, such as CLIP's."""

    embeddings: Tensor  #: (classes, dim) floating.
    class_of: Tensor  #: (rows of the data,) int64, the class of each row; -1 for other classes.

    def gather(self, batch: EpisodeBatch, dtype: torch.dtype) -> Tensor:
        """Look up the embeddings of each episode's classes: (episodes, n_way, dim)."""
        classes = torch.zeros(len(batch.support), batch.n_way, dtype=torch.int64)
        classes.scatter_(1, batch.support_labels, self.class_of[batch.support])
        return self.embeddings[classes.to(self.embeddings.device)].to(dtype)


def gather_episodes(
    take: RowReader,
    batch: EpisodeBatch,
    base: BaseClasses | None = None,
    texts: ClassTexts | None = None,
    trained: TrainedEncoder | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Episodes:
    """Gather the features of episodes with ``take``, on its device: float64 if its rows are, otherwise float32."""
    rows = torch.cat([batch.support, batch.query, batch.unlabelled], dim=1)
    features = take(rows.flatten()).unflatten(0, rows.shape)
    features = features if features.dtype == torch.float64 else features.float()
    n_support = batch.support.shape[1]
    support, query, unlabelled = features.tensor_split([n_support, n_support + batch.query.shape[1]], dim=1)
    return Episodes(
        support=support,
        support_labels=batch.support_labels.to(features.device),
        query=query,
        n_way=batch.n_way,
        base=base,
        texts=None if texts is None else texts.gather(batch, features.dtype),
        unlabelled=unlabelled if unlabelled.shape[1] else None,
        trained=trained and trained._replace(support=batch.support, query=batch.query),
        shape=shape,
    )


def summarize_base(take: RowReader, by_class: ClassIndex) -> BaseClasses:
    """Compute the means of base classes, on the device of their rows.

    The rows get new indices, class by class: with the indices of the data set, a method could read any other row.
    """
    means, pieces = [], list_pieces(by_class)
    for rows in pieces:
        sums = [take(some).to(torch.float64).sum(dim=0) for some in rows.split(ROWS_PER_SUM)]
        means.append(torch.stack(sums).sum(dim=0) / len(rows))
    class_means = torch.stack(means)  # (base classes, dim)
    fraction, device = by_class.size.double() / by_class.size.sum(), class_means.device
    rows_of_base, *bounds = (tensor.to(device) for tensor in index_pieces(pieces))
    new_index = ClassIndex(torch.arange(len(rows_of_base), device=device), *bounds)
    mean = (fraction.to(device) @ class_means).float()
    return BaseClasses(lambda indices: take(rows_of_base[indices]), new_index, mean, class_means.float())


def hash_rows(take: RowReader, by_class: ClassIndex) -> str:
    """Compute the SHA-256 of all rows, class by class."""
    digest = hashlib.sha256(by_class.size.numpy().tobytes())
    for rows_of_class in list_pieces(by_class):
        for rows in rows_of_class.split(ROWS_PER_SUM):
            digest.update(take(rows).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Records:
    """The rows and predictions of episodes of equal sizes, without open classes."""

    support: Tensor  #: (episodes, n_support) int64 indices into the data set, class by class.
    query: Tensor  #: (episodes, n_queries) int64 indices into the data set.
    labels: Tensor  #: (episodes, n_queries) int64 in [0, n_way), the true class of each query in its episode.
    classes: Tensor  #: (episodes, n_way) int64 indices into ``class_names``.
    class_names: tuple[str, ...]  #: Names of the data set's classes.
    predicted: Mapping[str, Tensor]  #: For each method (episodes, n_queries) in [0, n_way), the predicted classes.

    def describe(self) -> dict[str, object]:
        """Convert the records to JSON; `unpack_integers` reads the arrays."""
        arrays = {name: pack_integers(getattr(self, name)) for name in ("support", "query", "labels", "classes")}
        predicted = {name: pack_integers(values) for name, values in self.predicted.items()}
        return {**arrays, "class_names": list(self.class_names), "predicted": predicted}


def record_episodes(
    sampler: Sampler, pool: RowPool, y: Tensor, class_names: tuple[str, ...], predicted: Mapping[str, Tensor], seed: int
) -> Records:
    """Draw the first episodes of a seed again, and record their rows beside the predictions.

    ``y`` (rows,) int64 and ``class_names`` are of the data set; ``predicted`` has (episodes, n_queries) of each method.
    """
    n_episodes = len(next(iter(predicted.values())))
    (batch,) = split_by_size(sampler.sample(pool.by_class, seed=seed, first=0, n_episodes=n_episodes))
    row_of = torch.zeros(len(pool.x), dtype=torch.int64)
    row_of[pool.by_class.rows] = pool.dataset_rows.rows
    support = row_of[batch.support]
    classes = y[support].view(n_episodes, batch.n_way, -1)[:, :, 0]
    return Records(support, row_of[batch.query], batch.query_labels, classes, class_names, predicted)


def pack_integers(values: Tensor) -> dict[str, object]:
    """Convert integers >= 0 to JSON: the bytes of the smallest dtype, compressed, as base64."""
    array = values.cpu().numpy()
    dtype = np.min_scalar_type(int(array.max(initial=0))).newbyteorder("<")
    content = base64.b64encode(zlib.compress(array.astype(dtype).tobytes(), 9)).decode()
    return {"dtype": dtype.str, "shape": list(array.shape), "data": content}


def unpack_integers(packed: Mapping[str, Any]) -> np.ndarray:
    """Read an array that `pack_integers` wrote."""
    content = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(content, packed["dtype"]).reshape(packed["shape"])
