"""Classes that have no label yet: rows that are like each other, and unlike every class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.fit.active import Standardised
from protonet.fit.problem import fit_rows, leave_out
from protonet.fit.solver import Solution, untouched_globals
from protonet.losses import CHUNK


@dataclass(frozen=True)
class GroupRules:
    """Which rows make a group; analysis/results/unlabelled.md has how often they are one."""

    most: int = 2048  #: Labelled rows that are looked at: all pairs of rows are compared.
    smallest: int = 8  #: Rows of a group.
    apart: float = 0.8  #: The quantile of the distances between labelled rows of one class that cuts groups apart.
    least: float = 0.1  #: The median rank of a group's rows, of `protonet.fit.pooling.Pooled`, below which it is one.


GROUPS = GroupRules()


def group_strangers(solution: Solution) -> list[list[int]]:
    """Group the rows without a label that look like classes of their own.

    All rows are clustered, in what the labels make of them and in standardised features, side by side: the labels know
    nothing of what tells other classes apart. A cluster without a labelled row, whose rows are less like a class than
    most rows of known classes are, is a group.

    Returns:
        Of each group, the largest first, the numbers of its rows among those that came, in ascending order.

    Source: average linkage, Sokal and Michener, "A statistical method for evaluating systematic relationships" (1958).
    """
    problem, pooled = solution.problem, solution.pooled
    if pooled is None or problem.pool is None or pooled.losses is None:
        return []
    n = len(problem.rows.labels)
    some = problem.rows.take(torch.arange(0, n, -(-n // GROUPS.most)))  # rows are in the order of their labels
    rows = torch.cat([some.features, problem.pool.features])
    with untouched_globals():
        network = fit_rows(problem.rows, solution.choice._replace(views=leave_out(solution.choice.views, 1.0)))
    with torch.no_grad():
        embedding = torch.cat([network.embed(part) for part in rows.split(CHUNK)])
        plain = Standardised(rows).embed(rows)
        joint = torch.cat([embedding, F.normalize(plain - plain.mean(dim=0), dim=1)], dim=1)
    groups = group_rows(joint, some.labels, pooled.ranks)
    return [sorted(problem.pool.places[group].tolist()) for group in groups]


def group_rows(embedding: Tensor, labels: Tensor, ranks: Tensor) -> list[list[int]]:
    """Group rows.

    Args:
        embedding: (n + m, dim): n labelled ones, then m others.
        labels: (n,) int64.
        ranks: (m,) as `protonet.fit.pooling.Pooled` has them.

    Returns:
        Numbers among the others of the rows of each group, the largest first.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # noqa: PLC0415 - slow to import, and seldom wanted

    n = len(labels)
    same = (labels[:, None] == labels).triu(diagonal=1)
    if not bool(same.any()):
        return []
    reach = float(torch.cdist(embedding[:n], embedding[:n])[same].quantile(GROUPS.apart))
    numbers = fcluster(linkage(embedding.double().numpy(), "average"), reach, "distance")
    taken = set(numbers[:n].tolist())
    groups = []
    for number in np.unique(numbers[n:]).tolist():
        rows = np.flatnonzero(numbers[n:] == number)
        strange = number not in taken and float(ranks[torch.from_numpy(rows)].median()) < GROUPS.least
        if strange and len(rows) >= GROUPS.smallest:
            groups.append(rows.tolist())
    return sorted(groups, key=lambda group: (-len(group), group))
