"""Batches of episodes of equal sizes: the features that methods get, and records of rows and predictions for JSON."""

from __future__ import annotations

import base64
import copy
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.samplers.sampler import (
    RandomStream,
    RowPool,
    RowReader,
    SampledEpisodes,
    Sampler,
    sample_uniform_by_episode,
)
from protonet.episodes.settings import TrainingPlan
from protonet.sampling import ClassIndex, index_class_rows, list_class_rows

ROWS_PER_CHUNK = 8192  #: Number of rows that are summed or hashed at a time.


class BaseClasses(NamedTuple):
    """Base classes: labelled rows of classes that are not in the episodes. Methods may learn from these rows."""

    take: RowReader  #: Maps indices (k,) of base rows to features (k, dim). It gives access to base rows only.
    rows_by_class: ClassIndex  #: The indices of the base rows, grouped by class.
    mean: Tensor  #: (dim,) float32, the mean of all base rows.
    class_means: Tensor  #: (base classes, dim) float32, the mean of each base class.


class TrainedEncoder(NamedTuple):
    """A meta-trained encoder with its head, and access to the encoder's inputs for a batch of episodes."""

    encoder: nn.Module  #: Maps rows (n, dim) float32 to embeddings, in evaluation mode, without gradients.
    head: nn.Module  #: The module on top of the encoder that was trained together with it, from `make_head`.
    plan: TrainingPlan  #: The settings with which encoder and head were trained.
    take: RowReader  #: Maps row indices (k,) to inputs (k, dim) of the encoder, such as pixels.
    support_ids: Tensor | None = None
    """(episodes, n_support) int64 row indices for ``take``, on the CPU; None until `gather_episodes` sets them."""
    query_ids: Tensor | None = None
    """(episodes, n_queries) int64 row indices for ``take``, on the CPU; None until `gather_episodes` sets them."""
    beats_raw_features: bool = True  #: Whether it was more accurate than raw features on its validation classes.

    def gather_inputs(self) -> tuple[Tensor, Tensor]:
        """Gather the encoder's inputs for the episodes, on the encoder's device.

        Returns:
            support: (episodes, n_support, dim) float32.
            query: (episodes, n_queries, dim) float32.
        """
        assert self.support_ids is not None
        assert self.query_ids is not None
        indices = torch.cat([self.support_ids, self.query_ids], dim=1)
        rows = self.take(indices.flatten()).to(next(self.encoder.parameters()).device).float()
        support, query = rows.unflatten(0, indices.shape).tensor_split([self.support_ids.shape[1]], dim=1)
        return support, query

    def hide_row_indices(self, order: Tensor) -> TrainedEncoder:
        """Copy encoder, head and row indices, so that the indices do not reveal the classes of the queries.

        The copy has the queries in the given ``order`` (episodes, n_queries) int64. Its row indices number the rows of
        this batch from 0, and its function ``take`` reads only these rows.
        """
        copied = self._replace(encoder=copy.deepcopy(self.encoder), head=copy.deepcopy(self.head))
        if self.support_ids is None or self.query_ids is None:
            return copied
        rows = torch.cat([self.support_ids, self.query_ids.gather(1, order)], dim=1)  # (episodes, rows)
        support, query = torch.arange(rows.numel()).view_as(rows).tensor_split([self.support_ids.shape[1]], dim=1)
        take, known = self.take, rows.flatten()
        return copied._replace(take=lambda indices: take(known[indices]), support_ids=support, query_ids=query)


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The input of a method: the features of a batch of episodes of equal sizes, without the queries' labels."""

    support: Tensor  #: (episodes, n_support, dim) float32 or float64, the support rows of all classes.
    support_labels: Tensor  #: (episodes, n_support) int64 in [0, n_way), each class at least once, in any order.
    query: Tensor  #: (episodes, n_queries, dim), the dtype of ``support``, the query rows of all classes.
    n_way: int  #: Classes per episode.
    base: BaseClasses | None = None  #: The base classes, or None.
    texts: Tensor | None = None
    """(episodes, n_way, dim), the dtype of ``support``: the embedding of a text that names each class, or None."""
    unlabelled: Tensor | None = None
    """(episodes, n_unlabelled, dim), the dtype of ``support``: rows to learn from, of the episode's classes and perhaps
    of distractor classes, or None."""
    trained: TrainedEncoder | None = None  #: The meta-trained encoder that embedded the rows, or None.
    shape: tuple[int, int, int] | None = None
    """(channels, height, width) if rows are pictures or feature maps, flattened in this order of axes; otherwise None.
    """

    def select_queries(self, queries: slice) -> Episodes:
        """Select a range of the queries of every episode; the support and all other inputs stay the same."""
        trained = self.trained
        if trained is not None and trained.query_ids is not None:
            trained = trained._replace(query_ids=trained.query_ids[:, queries])
        return replace(self, query=self.query[:, queries], trained=trained)

    def shuffle_rows(self, episode_ids: Tensor, seed: int) -> tuple[Episodes, Tensor]:
        """Copy the episodes with queries and unlabelled rows in random order, for a method from outside the package.

        Samplers draw queries and unlabelled rows class by class, so positions and row indices would reveal the labels.
        The order depends only on the seed and on the number of the episode.

        Args:
            episode_ids: (episodes,) int64, increasing: the number of each episode.
            seed: Seed of the episodes.

        Returns:
            The copy, which a method may change in place; and the position (episodes, n_queries) int64 of each original
            query in the copy, on the device of the episodes.
        """
        first, device = int(episode_ids[0]), self.query.device

        def draw_order(stream: RandomStream, n_rows: int) -> Tensor:
            """Draw a random order of the rows of each episode: (episodes, n_rows) int64."""
            shape = (int(episode_ids[-1]) - first + 1, n_rows)
            return sample_uniform_by_episode(seed, stream, first, shape)[episode_ids - first].argsort(dim=1)

        def reorder(rows: Tensor, order: Tensor) -> Tensor:
            return rows.gather(1, order[..., None].expand_as(rows))

        order, base = draw_order(RandomStream.QUERY_ORDER, self.query.shape[1]), self.base
        unlabelled = self.unlabelled
        if unlabelled is not None:
            unlabelled = reorder(unlabelled, draw_order(RandomStream.UNLABELLED_ORDER, unlabelled.shape[1]).to(device))
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
    """Row indices and labels of sampled episodes with equal numbers of classes, support rows and queries.

    Open queries are queries of open classes, which have no support rows; all episodes have equally many of them.
    """

    episode_positions: Tensor  #: (episodes,) int64, the position of each episode in its `SampledEpisodes`.
    support_ids: Tensor  #: (episodes, n_support) int64.
    support_labels: Tensor  #: (episodes, n_support) int64 in [0, n_way), the class of each row in its episode.
    query_ids: Tensor  #: (episodes, n_queries) int64; queries of open classes come last.
    query_labels: Tensor  #: (episodes, n_queries) int64 in [0, n_way), or -1 for queries of open classes.
    query_shots: Tensor
    """(episodes, n_queries) int64, the number of support rows of the query's class; 0 for open classes."""
    unlabelled_ids: Tensor  #: (episodes, n_unlabelled) int64.
    n_way: int  #: Classes per episode.

    def select_episodes(self, episodes: slice) -> EpisodeBatch:
        """Select a range of the episodes of the batch."""
        tensors = {name: value[episodes] for name, value in vars(self).items() if name != "n_way"}
        return replace(self, **tensors)


def split_by_size(sampled: SampledEpisodes) -> Iterator[EpisodeBatch]:
    """Split sampled episodes into batches of episodes with equal numbers of classes, support rows and queries.

    Empty entries of the sampled arrays are removed.
    """
    query = torch.cat([sampled.query_ids.flatten(1), sampled.open_query_ids.flatten(1)], dim=1)
    support = sampled.support_ids.flatten(1)
    _, max_way, max_query = sampled.query_ids.shape
    n_open_queries = query.shape[1] - max_way * max_query  # open queries per episode, at most
    shots = (sampled.support_ids >= 0).sum(dim=2)  # (episodes, max_way)
    labels = torch.arange(max_way).expand(len(shots), -1)
    support_labels = labels.repeat_interleave(sampled.support_ids.shape[2], dim=1)
    query_labels = F.pad(labels.repeat_interleave(max_query, dim=1), (0, n_open_queries), value=-1)
    query_shots = F.pad(shots.repeat_interleave(max_query, dim=1), (0, n_open_queries))
    counts = (query >= 0).sum(dim=1), (sampled.query_ids >= 0).sum(dim=(1, 2)), shots.sum(dim=1), (shots > 0).sum(dim=1)
    sizes, kinds = torch.stack(counts, dim=1).unique(dim=0, return_inverse=True)  # (kinds, 4), (episodes,)
    for kind, (n_query, _, n_support, n_way) in enumerate(sizes.tolist()):
        positions = (kinds == kind).nonzero().flatten()
        unlabelled = sampled.unlabelled_ids[positions].flatten(1)  # equally many, as the number of classes is equal
        support_slots = _list_filled_slots(support[positions], n_support)
        query_slots = _list_filled_slots(query[positions], n_query)
        yield EpisodeBatch(
            episode_positions=positions,
            support_ids=support[positions].gather(1, support_slots),
            support_labels=support_labels[positions].gather(1, support_slots),
            query_ids=query[positions].gather(1, query_slots),
            query_labels=query_labels[positions].gather(1, query_slots),
            query_shots=query_shots[positions].gather(1, query_slots),
            unlabelled_ids=unlabelled.gather(1, _list_filled_slots(unlabelled, int((unlabelled[0] >= 0).sum()))),
            n_way=n_way,
        )


def _list_filled_slots(rows: Tensor, count: int) -> Tensor:
    """List the positions (episodes, count) of the ``count`` entries of ``rows`` (episodes, slots) that are filled."""
    return (rows >= 0).nonzero()[:, 1].reshape(len(rows), count)


def make_row_reader(x: Tensor) -> RowReader:
    """Create a function that copies the rows (k, dim) of ``x`` (n, dim) that have the indices (k,), on its device."""
    return lambda rows: x.index_select(0, rows.to(x.device))


class ClassTextEmbeddings(NamedTuple):
    """Embeddings of texts that name the classes, one text per class, such as from CLIP."""

    embeddings: Tensor  #: (classes, dim) floating, the embedding of the text of each class.
    row_classes: Tensor  #: (rows of the data,) int64, the class of each row; -1 for rows of classes without a text.

    def gather(self, batch: EpisodeBatch, dtype: torch.dtype) -> Tensor:
        """Look up the text embeddings of each episode's classes: (episodes, n_way, dim) of ``dtype``."""
        classes = torch.zeros(len(batch.support_ids), batch.n_way, dtype=torch.int64)
        classes.scatter_(1, batch.support_labels, self.row_classes[batch.support_ids])
        return self.embeddings[classes.to(self.embeddings.device)].to(dtype)


def gather_episodes(
    read_rows: RowReader,
    batch: EpisodeBatch,
    base: BaseClasses | None = None,
    texts: ClassTextEmbeddings | None = None,
    trained: TrainedEncoder | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Episodes:
    """Gather the features of a batch of episodes, and combine them with the other inputs of methods.

    Args:
        read_rows: Maps row indices (k,) to features (k, dim).
        batch: The row indices and labels of the episodes.
        base: The base classes, or None.
        texts: The embeddings of texts that name the classes, or None.
        trained: The encoder that embedded the features, or None. It gets the row indices of these episodes.
        shape: (channels, height, width) if the features are flattened pictures or feature maps; otherwise None.

    Returns:
        The episodes, on the device of the features: float64 if the features are, otherwise float32.
    """
    rows = torch.cat([batch.support_ids, batch.query_ids, batch.unlabelled_ids], dim=1)
    features = read_rows(rows.flatten()).unflatten(0, rows.shape)
    features = features if features.dtype == torch.float64 else features.float()
    n_support = batch.support_ids.shape[1]
    support, query, unlabelled = features.tensor_split([n_support, n_support + batch.query_ids.shape[1]], dim=1)
    return Episodes(
        support=support,
        support_labels=batch.support_labels.to(features.device),
        query=query,
        n_way=batch.n_way,
        base=base,
        texts=None if texts is None else texts.gather(batch, features.dtype),
        unlabelled=unlabelled if unlabelled.shape[1] else None,
        trained=trained and trained._replace(support_ids=batch.support_ids, query_ids=batch.query_ids),
        shape=shape,
    )


def summarize_base_classes(read_rows: RowReader, by_class: ClassIndex) -> BaseClasses:
    """Compute the mean of each base class and of all base rows, on the device of the rows.

    ``read_rows`` maps row indices of the data set to features, and ``by_class`` has the indices of the base rows. The
    result numbers the base rows from 0, class by class: with the indices of the data set, a method could read any row.
    """
    means, pieces = [], list_class_rows(by_class)
    for rows in pieces:
        sums = [read_rows(some).to(torch.float64).sum(dim=0) for some in rows.split(ROWS_PER_CHUNK)]
        means.append(torch.stack(sums).sum(dim=0) / len(rows))
    class_means = torch.stack(means)  # (base classes, dim)
    fraction, device = by_class.class_counts.double() / by_class.class_counts.sum(), class_means.device
    rows_of_base, *bounds = (tensor.to(device) for tensor in index_class_rows(pieces))
    new_index = ClassIndex(torch.arange(len(rows_of_base), device=device), *bounds)
    mean = (fraction.to(device) @ class_means).float()
    return BaseClasses(lambda indices: read_rows(rows_of_base[indices]), new_index, mean, class_means.float())


def hash_class_rows(read_rows: RowReader, by_class: ClassIndex) -> str:
    """Compute the SHA-256 of the class sizes and of the features of all rows, class by class, in hexadecimal."""
    digest = hashlib.sha256(by_class.class_counts.numpy().tobytes())
    for rows_of_class in list_class_rows(by_class):
        for rows in rows_of_class.split(ROWS_PER_CHUNK):
            digest.update(read_rows(rows).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def record_episodes(
    sampler: Sampler, pool: RowPool, y: Tensor, class_names: tuple[str, ...], predicted: Mapping[str, Tensor], seed: int
) -> dict[str, object]:
    """Draw the first episodes of a seed again, and return their rows, labels and predictions as a dictionary for JSON.

    Args:
        sampler: The sampler of the episodes, which have equal sizes and no open classes.
        pool: The rows that the episodes were drawn from.
        y: (rows of the data set,) int64 labels.
        class_names: The names of the data set's classes.
        predicted: For the name of each method, the predicted classes (episodes, n_queries) of the first episodes.
        seed: Seed of the episodes.

    Returns:
        Arrays from `pack_integers`: ``support`` and ``query`` (episodes, rows) are indices into the data set,
        ``labels`` and ``predicted`` (episodes, n_queries) in [0, n_way), ``classes`` (episodes, n_way) into
        ``class_names``.
    """
    n_episodes = len(next(iter(predicted.values())))
    (batch,) = split_by_size(sampler.sample(pool.rows_by_class, seed=seed, first=0, n_episodes=n_episodes))
    row_of = torch.zeros(len(pool.x), dtype=torch.int64)
    row_of[pool.rows_by_class.row_indices] = pool.dataset_rows.row_indices
    support = row_of[batch.support_ids]
    classes = y[support].view(n_episodes, batch.n_way, -1)[:, :, 0]
    arrays = {"support": support, "query": row_of[batch.query_ids], "labels": batch.query_labels, "classes": classes}
    packed = {name: pack_integers(values) for name, values in predicted.items()}
    records = {name: pack_integers(values) for name, values in arrays.items()}
    return {**records, "class_names": list(class_names), "predicted": packed}


def pack_integers(values: Tensor) -> dict[str, object]:
    """Encode integers >= 0 for JSON: the smallest unsigned ``dtype``, and ``data`` compressed by zlib, as base64."""
    array = values.cpu().numpy()
    dtype = np.min_scalar_type(int(array.max(initial=0))).newbyteorder("<")
    content = base64.b64encode(zlib.compress(array.astype(dtype).tobytes(), 9)).decode()
    return {"dtype": dtype.str, "shape": list(array.shape), "data": content}
