"""Records of episodes for JSON: the rows of each episode, and the predicted class of each query."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet.episodes.samplers.batch import split_by_size
from protonet.episodes.samplers.sampler import RowPool, Sampler


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
        """Return it in a form that JSON can write; `unpack` reads its arrays."""
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
    """Return the records of the first episodes of a seed.

    Args:
        sampler: Draws episodes of equal sizes, without open classes.
        pool: The rows that it samples from.
        classes: Of the data set: (rows,) int64, the class of each row, and the names of the classes.
        predicted: For each method (episodes, n_queries), at least one.
        seed: Of the episodes.
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
    """Return the array that `pack` packed."""
    content = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(content, packed["dtype"]).reshape(packed["shape"])
