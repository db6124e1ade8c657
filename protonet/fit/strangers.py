"""Classes that have no label yet: rows that are unlike every class, and like each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

from protonet.fit.solver import Solution
from protonet.fit.unlabelled import UNLIKE_RATE
from protonet.losses import CHUNK


@dataclass(frozen=True)
class GroupRules:
    """Which rows make a group."""

    smallest: int = 5  #: Rows of a group.
    by_chance: float = 2.0  #: So many times the rows that chance takes for unlike ones make no group.


GROUPS = GroupRules()


@torch.no_grad()
def group_strangers(solution: Solution) -> list[list[int]]:
    """Group the rows without a label that are unlike every class.

    Returns:
        Of each group, the largest first, the numbers of its rows among those that came, in ascending order; rows that
        are like no others are in none.
    """
    problem, pooled = solution.problem, solution.pooled
    if pooled is None or problem.pool is None:
        return []
    rows = torch.cat([problem.features_as_they_came(torch.arange(len(problem.rows.labels))), problem.show_pool()])
    network = solution.network.cpu()
    embedding = torch.cat([network.embed(part) for part in rows.split(CHUNK)])
    groups = group_rows(embedding, problem.rows.labels, pooled.unlike)
    return [sorted(problem.pool.places[group].tolist()) for group in groups]


def group_rows(embedding: Tensor, labels: Tensor, unlike: Tensor) -> list[list[int]]:
    """Group rows that are unlike every class: those nearer to each other, on average, than rows of one class.

    Args:
        embedding: (n + m, dim) unit rows: n labelled ones, then m others.
        labels: (n,) int64.
        unlike: (m,) bool.

    Returns:
        Numbers among the others of the rows of each group, the largest first; of rows that expect to be taken for
        unlike ones by chance, none.

    Source: average linkage, Sokal and Michener, "A statistical method for evaluating systematic relationships" (1958).
    """
    n, m = len(labels), len(unlike)
    places = unlike.nonzero().flatten()
    same = labels[:, None] == labels
    same.fill_diagonal_(False)
    if len(places) <= max(GROUPS.smallest, GROUPS.by_chance * UNLIKE_RATE * m) or not bool(same.any()):
        return []
    own = embedding[:n]
    reach = float((1 - own @ own.T)[same].median())
    rows = embedding[n:][places].double().numpy()
    numbers = fcluster(linkage(rows, "average", "cosine"), reach, "distance")
    groups = [places[torch.from_numpy(numbers == number)].tolist() for number in np.unique(numbers)]
    return sorted((each for each in groups if len(each) >= GROUPS.smallest), key=lambda each: (-len(each), each))
