"""Ways to choose the rows to label next, beside the library's: what the literature of active learning compares with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.active import choose_covering, find_beliefs, suggest_rows
from protonet.network import PrototypeNetwork

#: Rows whose mean distance makes a row typical, as in the paper.
NEIGHBOURS = 20


class Pool(NamedTuple):
    """What there is to choose from."""

    network: PrototypeNetwork  #: Fitted to the labelled rows.
    x: Tensor  #: (n, dim) the rows without a label.
    labelled: Tensor  #: (m, dim) those with one.

    @property
    def rows(self) -> Tensor:
        """The embeddings (n, embedding_dim) of the rows without a label."""
        return self.network.embed(self.x)

    @property
    def known(self) -> Tensor:
        """The embeddings (m, embedding_dim) of the labelled rows."""
        return self.network.embed(self.labelled)

    @property
    def probabilities(self) -> Tensor:
        """What the network gives the rows without a label, (n, num_classes)."""
        return self.network(self.x).softmax(dim=1)


#: Chooses n rows of a pool, (n,) int64.
Strategy = Callable[[Pool, int, torch.Generator], Tensor]


def choose_ours(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose as ``suggest`` does."""
    return torch.tensor([each.row for each in suggest_rows(pool.network, pool.x, n, range(len(pool.network.counts)))])


def choose_with(bandwidth: float, *, doubt: bool = True) -> Strategy:
    """Return what chooses as ours does, with another bandwidth, or with all rows in equal doubt."""

    def choose(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
        weights = find_beliefs(pool.network, pool.x).doubt if doubt else torch.ones(len(pool.x))
        return choose_covering(pool.rows, weights, pool.network.prototypes[pool.network.seen], n, bandwidth)

    return choose


def choose_random(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose at random."""
    return torch.randperm(len(pool.x), generator=generator)[:n]


def choose_margin(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose where the two likeliest classes are nearest to each other.

    Source: Scheffer, Decomain and Wrobel, "Active hidden Markov models for information extraction" (2001).
    """
    best = pool.probabilities.topk(2, dim=1).values
    return (best[:, 0] - best[:, 1]).argsort(stable=True)[:n]


def choose_entropy(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose where the classes' probabilities have most entropy.

    Source: Settles, "Active learning literature survey" (2009), sec. 3.1.
    """
    return torch.special.entr(pool.probabilities).sum(dim=1).argsort(descending=True, stable=True)[:n]


def choose_far(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose the row that is farthest from all that are labelled or chosen, one after the other: the core-set.

    Source: Sener and Savarese, "Active learning for convolutional neural networks: a core-set approach" (2018), alg. 1.
    """
    rows = pool.rows
    distances = torch.cdist(rows, pool.known).amin(dim=1)
    chosen: list[int] = []
    for _ in range(n):
        chosen.append(int(distances.argmax()))
        distances = torch.minimum(distances, torch.cdist(rows, rows[chosen[-1:]])[:, 0])
        distances[chosen] = -1.0
    return torch.tensor(chosen)


def choose_typical(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose the most typical row of the largest clusters without a label, of as many clusters as there will be labels.

    Source: Hacohen, Dekel and Weinshall, "Active learning on a budget: opposite strategies suit high and low budgets"
        (2022), alg. 1: TypiClust.
    """
    from sklearn.cluster import KMeans  # noqa: PLC0415 - optional

    rows, known = pool.rows, pool.known
    everything = torch.cat([rows, known]).numpy()
    clusters = min(len(known) + n, len(everything))
    found = KMeans(clusters, n_init=1, random_state=0).fit_predict(everything)
    sizes, taken = np.bincount(found, minlength=clusters), np.bincount(found[len(rows) :], minlength=clusters)
    chosen: list[int] = []
    left = np.ones(len(rows), bool)
    while len(chosen) < n:  # a cluster without a label first, then the largest; clusters of fewer rows come again
        for cluster in np.lexsort((-sizes, taken)).tolist():
            members = np.flatnonzero((found[: len(rows)] == cluster) & left)
            if len(members) and len(chosen) < n:
                own = rows[torch.from_numpy(members)]
                near = torch.cdist(own, own).sort(dim=1).values[:, 1 : NEIGHBOURS + 1]
                chosen.append(int(members[int(near.mean(dim=1).argmin())]) if near.shape[1] else int(members[0]))
                left[chosen[-1]] = False
    return torch.tensor(chosen)


def choose_badge(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose by k-means++ among the gradients of the prototypes, at the class that is thought likeliest.

    A row's gradient is the product of what its probabilities lack and its embedding, so that gradients' inner products
    are products of theirs.

    Source: Ash, Zhang, Krishnamurthy, Langford and Agarwal, "Deep batch active learning by diverse, uncertain gradient
        lower bounds" (2020), alg. 1: BADGE.
    """
    rows, errors = pool.rows, pool.probabilities.clone()
    errors[torch.arange(len(rows)), errors.argmax(dim=1)] -= 1
    squares = errors.square().sum(dim=1) * rows.square().sum(dim=1)
    chosen = [int(squares.argmax())]
    nearest = torch.full_like(squares, torch.inf)
    while len(chosen) < n:
        last = chosen[-1]
        distances = squares + squares[last] - 2 * (errors @ errors[last]) * (rows @ rows[last])
        nearest = torch.minimum(nearest, distances.clamp_min(1e-12))
        nearest[chosen] = 0.0
        chosen.append(int(torch.multinomial(nearest, 1, generator=generator)))
    return torch.tensor(chosen)


#: Every strategy by its name: ours, it with other settings, and the baselines.
STRATEGIES: dict[str, Strategy] = {
    "ours": choose_ours,
    "narrow": choose_with(0.05),
    "wide": choose_with(0.2),
    "no-doubt": choose_with(0.1, doubt=False),
    "random": choose_random,
    "margin": choose_margin,
    "entropy": choose_entropy,
    "k-centre": choose_far,
    "typiclust": choose_typical,
    "badge": choose_badge,
}
