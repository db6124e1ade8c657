"""Batches of episodes of equal sizes: the features that methods see, and records of rows and predictions for JSON."""

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
from protonet.episodes.samplers.sampler import (
    QUERY_ORDER,
    UNLABELLED_ORDER,
    RowPool,
    SampledEpisodes,
    Sampler,
    Take,
    sample_uniform,
)
from protonet.sampling import ClassIndex, index_pieces, list_pieces

SIZE_FACTORS = torch.tensor([1, 2**15, 2**30, 2**46])  #: Factors that pack an episode's four sizes into one int64.
ROWS_PER_SUM = 8192  #: Rows that are summed at a time.


class Base(NamedTuple):
    """The base classes: labelled rows of other classes than the episode's, which a method may use."""

    take: Take  #: Returns base rows by number; there are no other rows.
    by_class: ClassIndex  #: The base classes' rows, by class.
    mean: Tensor  #: (dim,) float32, of all base rows.
    class_means: Tensor  #: (base classes, dim) float32.


class Trained(NamedTuple):
    """A meta-trained encoder with its head, and the rows before the encoder embeds them."""

    encoder: nn.Module  #: Maps rows (n, dim) float32 to embeddings, in evaluation mode, without gradients.
    head: nn.Module  #: What its objective trained beside the encoder, see `protonet.episodes.networks.backbones`.
    plan: TrainingPlan  #: The settings of its training.
    take: Take  #: Returns rows that are not embedded, by number.
    #: (episodes, n_support) int64 row numbers, on the CPU, of the episodes that have it.
    support: Tensor | None = None
    query: Tensor | None = None  #: (episodes, n_queries) int64 row numbers, on the CPU.

    def gather(self) -> tuple[Tensor, Tensor]:
        """Gather the episodes' support and query rows, (episodes, rows, dim) float32, on the encoder's device."""
        assert self.support is not None
        assert self.query is not None
        indices = torch.cat([self.support, self.query], dim=1)
        rows = self.take(indices.flatten()).to(next(self.encoder.parameters()).device).float()
        n_support = self.support.shape[1]
        support, query = rows.unflatten(0, indices.shape).split([n_support, indices.shape[1] - n_support], dim=1)
        return support, query

    def send(self, device: torch.device) -> Trained:
        """Copy encoder and head to a device; rows before them are copied there as they are gathered."""
        return self._replace(encoder=self.encoder.to(device), head=self.head.to(device))

    def hide_row_indices(self, order: Tensor) -> Trained:
        """Copy it, with queries in an ``order`` (episodes, n_queries), and row indices within the batch."""
        copied = self._replace(encoder=copy.deepcopy(self.encoder), head=copy.deepcopy(self.head))
        if self.support is None or self.query is None:
            return copied
        rows = torch.cat([self.support, self.query.gather(1, order)], dim=1)  # (episodes, rows)
        positions = (
            torch.arange(rows.numel(), device=rows.device)
            .view_as(rows)
            .split([self.support.shape[1], order.shape[1]], dim=1)
        )
        take, known = self.take, rows.flatten()
        return copied._replace(take=lambda indices: take(known[indices]), support=positions[0], query=positions[1])


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """A batch of episodes of equal sizes, without the queries' labels."""

    support: Tensor  #: (episodes, n_support, dim) float32 or float64, the support rows of all classes.
    support_labels: Tensor  #: (episodes, n_support) int64 in [0, n_way), each class at least once, in any order.
    query: Tensor  #: (episodes, n_queries, dim), the dtype of ``support``, the query rows of all classes.
    n_way: int  #: Classes per episode.
    base: Base | None = None  #: The base classes, or None where there are none.
    #: (episodes, n_way, dim), the dtype of ``support``: a text's embedding of each class, or None where there is none.
    texts: Tensor | None = None
    #: (episodes, n_unlabelled, dim), the dtype of ``support``: rows to learn from, of the episode's classes and perhaps
    #: of others, the distractors; None where there are none.
    unlabelled: Tensor | None = None
    trained: Trained | None = None  #: The encoder whose embeddings the rows are, or None where there is none.
    #: Channels, height and width, where rows are pictures or maps of a network, in that order of their features.
    shape: tuple[int, int, int] | None = None

    def select_queries(self, queries: slice) -> Episodes:
        """Select some queries of the same episodes."""
        trained = self.trained
        if trained is not None and trained.query is not None:
            trained = trained._replace(query=trained.query[:, queries])
        return replace(self, query=self.query[:, queries], trained=trained)

    def hide_classes(self, episode_ids: Tensor, seed: int) -> tuple[Episodes, Tensor]:
        """Copy the episodes for a method from outside the package, with queries in a random order.

        Queries and unlabelled rows are sampled class by class, so that their positions and their row indices would
        reveal their labels.

        Args:
            episode_ids: (episodes,) int64, increasing: with the seed they determine the order.
            seed: Seed of the episodes.

        Returns:
            episodes: A copy, which a method may change.
            positions: (episodes, n_queries) int64, the new position of each query, on the device of the episodes.
        """
        first, device = int(episode_ids[0]), self.query.device

        def draw_order(stream: int, n_rows: int) -> Tensor:
            """Draw an order (episodes, n_rows) of the rows of each episode."""
            shape = (int(episode_ids[-1]) - first + 1, n_rows)
            return sample_uniform(seed, stream, first, shape)[episode_ids - first].argsort(dim=1)

        def reorder(rows: Tensor, order: Tensor) -> Tensor:
            return rows.gather(1, order[..., None].expand_as(rows))

        order, base = draw_order(QUERY_ORDER, self.query.shape[1]), self.base
        unlabelled = self.unlabelled
        if unlabelled is not None:
            unlabelled = reorder(unlabelled, draw_order(UNLABELLED_ORDER, unlabelled.shape[1]).to(device))
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
    support: Tensor  #: (episodes, n_support) int64 row numbers.
    support_labels: Tensor  #: (episodes, n_support) int64.
    query: Tensor  #: (episodes, n_queries) int64 row numbers; queries of open classes come last.
    query_labels: Tensor  #: (episodes, n_queries) int64, -1 for queries of open classes.
    query_shots: Tensor  #: (episodes, n_queries) int64, support rows of the query's class, 0 for open classes.
    unlabelled: Tensor  #: (episodes, n_unlabelled) int64 row numbers.
    n_way: int  #: Classes per episode.

    def select(self, episodes: slice) -> EpisodeBatch:
        """Select some of its episodes."""
        tensors = {name: value[episodes] for name, value in vars(self).items() if name != "n_way"}
        return replace(self, **tensors)


def split_by_size(sampled: SampledEpisodes) -> Iterator[EpisodeBatch]:
    """Yield sampled episodes in batches of equal sizes; ``positions`` says which episodes a batch has."""
    query = torch.cat([sampled.query.flatten(1), sampled.open_query.flatten(1)], dim=1)
    support = sampled.support.flatten(1)
    _, max_way, max_query = sampled.query.shape
    n_open_queries = query.shape[1] - max_way * max_query  # open queries per episode, at most
    shots = (sampled.support >= 0).sum(dim=2)  # (episodes, most_way)
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
        unlabelled = sampled.unlabelled[positions].flatten(1)  # as many as there are classes, in each
        of_support = _find_present(support[positions], n_support)
        of_query = _find_present(query[positions], n_query)
        yield EpisodeBatch(
            positions=positions,
            support=support[positions].gather(1, of_support),
            support_labels=support_labels[positions].gather(1, of_support),
            query=query[positions].gather(1, of_query),
            query_labels=query_labels[positions].gather(1, of_query),
            query_shots=query_shots[positions].gather(1, of_query),
            unlabelled=unlabelled.gather(1, _find_present(unlabelled, int((unlabelled[0] >= 0).sum()))),
            n_way=n_way,
        )


def _find_present(rows: Tensor, count: int) -> Tensor:
    """Find the positions (episodes, count) of those slots of ``rows`` (episodes, slots) that hold a row number."""
    if count == rows.shape[1]:
        return torch.arange(count).expand(len(rows), -1)
    return (rows >= 0).nonzero()[:, 1].reshape(len(rows), count)  # (episodes, count)


def make_row_reader(x: Tensor) -> Take:
    """Make a function that copies rows of ``x`` (n, dim), floating, into memory that its next call uses again.

    That is faster than new memory. It maps row numbers (k,) int64 to rows (k, dim) of the dtype and the device of
    ``x``; a copy of the numbers goes there.
    """
    memory = x.new_empty(0)

    def take(rows: Tensor) -> Tensor:
        nonlocal memory
        size = len(rows) * x.shape[1]
        if size > len(memory):
            memory = x.new_empty(size)
        return torch.index_select(x, 0, rows.to(x.device), out=memory[:size].view(len(rows), x.shape[1]))

    return take


class Texts(NamedTuple):
    """The embeddings of texts that name the classes, such as CLIP's."""

    rows: Tensor  #: (classes, dim) floating.
    class_of: Tensor  #: (rows of the data,) int64, which class each is of; -1 for those of other classes.

    def find(self, part: EpisodeBatch, dtype: torch.dtype) -> Tensor:
        """Look up the embeddings (episodes, n_way, dim) of the classes of a part's episodes."""
        classes = torch.zeros(len(part.support), part.n_way, dtype=torch.int64)
        classes.scatter_(1, part.support_labels, self.class_of[part.support])
        return self.rows[classes.to(self.rows.device)].to(dtype)


def gather_episodes(
    take: Take,
    part: EpisodeBatch,
    base: Base | None = None,
    texts: Texts | None = None,
    trained: Trained | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Episodes:
    """Gather the features of a part's episodes by ``take``: float64 if its rows are, otherwise float32.

    All is on the device of its rows; a copy of the labels goes there. Texts are there already.
    """
    rows = torch.cat([part.support, part.query, part.unlabelled], dim=1)
    features = take(rows.flatten()).unflatten(0, rows.shape)
    features = features if features.dtype == torch.float64 else features.float()
    n_support = part.support.shape[1]
    support, query, more = features.tensor_split([n_support, n_support + part.query.shape[1]], dim=1)
    return Episodes(
        support=support,
        support_labels=part.support_labels.to(features.device),
        query=query,
        n_way=part.n_way,
        base=base,
        texts=None if texts is None else texts.find(part, features.dtype),
        unlabelled=more if more.shape[1] else None,
        trained=trained and trained._replace(support=part.support, query=part.query),
        shape=shape,
    )


def summarize_base(take: Take, by_class: ClassIndex) -> Base:
    """Compute the means of base classes, summed in float64.

    They are numbered anew, class by class: by the indices of the data, all other rows could be taken, too. All is on
    the device of these rows.
    """
    means, pieces = [], list_pieces(by_class)
    for rows in pieces:
        sums = [take(some).to(torch.float64).sum(dim=0) for some in rows.split(ROWS_PER_SUM)]
        means.append(torch.stack(sums).sum(dim=0) / len(rows))
    class_means = torch.stack(means)  # (base classes, dim)
    fraction, device = by_class.size.double() / by_class.size.sum(), class_means.device
    rows_of_base, *bounds = (tensor.to(device) for tensor in index_pieces(pieces))
    numbered = ClassIndex(torch.arange(len(rows_of_base), device=device), *bounds)
    mean = (fraction.to(device) @ class_means).float()
    return Base(lambda indices: take(rows_of_base[indices]), numbered, mean, class_means.float())


def hash_rows(take: Take, by_class: ClassIndex) -> str:
    """Hash all rows, class by class: equal draws of equal hashes are episodes of the same rows."""
    digest = hashlib.sha256(by_class.size.numpy().tobytes())
    for rows_of_class in list_pieces(by_class):
        for rows in rows_of_class.split(ROWS_PER_SUM):
            digest.update(take(rows).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Records:
    """Episodes of as many classes, support rows and queries each; rows are given by their indices in the data set."""

    support: Tensor  #: (episodes, n_support) int64 row numbers, class by class.
    query: Tensor  #: (episodes, n_queries) int64 row numbers.
    labels: Tensor  #: (episodes, n_queries) int64 in [0, n_way), the class of each query among its episode's.
    classes: Tensor  #: (episodes, n_way) int64, the numbers of these classes among ``class_names``.
    class_names: tuple[str, ...]  #: Names of the data set's classes.
    predicted: Mapping[str, Tensor]  #: For each method (episodes, n_queries), as ``labels``.

    def describe(self) -> dict[str, object]:
        """Convert it to a form that JSON can write; `unpack` reads its arrays."""
        arrays = {name: pack(getattr(self, name)) for name in ("support", "query", "labels", "classes")}
        predicted = {name: pack(values) for name, values in self.predicted.items()}
        return {**arrays, "class_names": list(self.class_names), "predicted": predicted}


def record(
    sampler: Sampler,
    pool: RowPool,
    classes: tuple[Tensor, tuple[str, ...]],
    predicted: Mapping[str, Tensor],
    *,
    seed: int,
) -> Records:
    """Record the first episodes of a seed, which are of equal sizes and without open classes.

    ``classes`` of the data set are the class of each row, (rows,) int64, and their names; ``predicted`` (episodes,
    n_queries) are of each method.
    """
    n_episodes = len(next(iter(predicted.values())))
    (part,) = split_by_size(sampler.sample(pool.by_class, seed=seed, first=0, n_episodes=n_episodes))
    row_of = torch.zeros(len(pool.x), dtype=torch.int64)
    row_of[pool.by_class.rows] = pool.sources.rows
    support, (y, names) = row_of[part.support], classes
    first = y[support].view(n_episodes, part.n_way, -1)[:, :, 0]
    return Records(support, row_of[part.query], part.query_labels, first, names, predicted)


def pack(values: Tensor) -> dict[str, object]:
    """Pack whole numbers >= 0 for JSON: in as few bytes as hold them, compressed, as text."""
    array = values.cpu().numpy()
    kind = np.min_scalar_type(int(array.max(initial=0))).newbyteorder("<")
    content = base64.b64encode(zlib.compress(array.astype(kind).tobytes(), 9)).decode()
    return {"dtype": kind.str, "shape": list(array.shape), "data": content}


def unpack(packed: Mapping[str, Any]) -> np.ndarray:
    """Unpack an array of `pack`."""
    content = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(content, packed["dtype"]).reshape(packed["shape"])
