"""Simulated active learning: labels come in batches that the library or a strategy of the literature chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.real_data.sets import load_real
from protonet import solve
from protonet.fit.active import suggest_rows
from protonet.fit.search import EFFORTS, Search
from protonet.network import PrototypeNetwork

#: Maximum number of classes, of test rows (a third of all), and of candidates per class.
MAX_CLASSES, MAX_TEST_ROWS, MAX_POOL_PER_CLASS = 10, 1000, 60
#: Target: accuracy of this many random rows per class, in this many draws; and maximum number of batches.
SHOTS, DRAWS, BATCHES = 10, 3, 10
#: Search spaces for a thousand fits: linear views alone, in a third of the time of "fast", or "fast".
FITTED = {"linear": Search((EFFORTS["fast"].kinds[0],), folds=3, shifts=False), "fast": EFFORTS["fast"]}
#: Name of the run that measures the target accuracy.
TARGET = "target"
#: Number of nearest rows whose mean distance defines typicality, as in the paper.
NEIGHBOURS = 20


class Run(NamedTuple):
    """One strategy on one split."""

    dataset: str
    seed: int
    strategy: str
    effort: str = "linear"  #: Key of `FITTED`.


class Pool(NamedTuple):
    """Unlabelled rows from which a strategy chooses."""

    network: PrototypeNetwork  #: Fitted to the labelled rows.
    x: Tensor  #: (n, dim) unlabelled rows.
    labelled: Tensor  #: (m, dim) labelled rows.

    @property
    def rows(self) -> Tensor:
        """Embeddings (n, embedding_dim) of the unlabelled rows."""
        return self.network.embed(self.x)

    @property
    def known(self) -> Tensor:
        """Embeddings (m, embedding_dim) of the labelled rows."""
        return self.network.embed(self.labelled)

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities (n, num_classes) of the unlabelled rows."""
        logits: Tensor = self.network(self.x)
        return logits.softmax(dim=1)


#: A function that chooses n rows of a pool, (n,) int64.
Strategy = Callable[[Pool, int, torch.Generator], Tensor]


def choose_ours(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose as ``protonet suggest`` does."""
    return torch.tensor(
        [suggestion.row for suggestion in suggest_rows(pool.network, pool.x, n, range(len(pool.network.counts)))]
    )


def choose_random(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose at random."""
    return torch.randperm(len(pool.x), generator=generator)[:n]


def choose_margin(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose the rows with the smallest margin between the two most probable classes.

    Source: Scheffer, Decomain and Wrobel, "Active hidden Markov models for information extraction" (2001).
    """
    best = pool.probabilities.topk(2, dim=1).values
    return (best[:, 0] - best[:, 1]).argsort(stable=True)[:n]


def choose_entropy(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose the rows with the largest entropy of the class probabilities.

    Source: Settles, "Active learning literature survey" (2009), sec. 3.1.
    """
    entropies: Tensor = torch.special.entr(pool.probabilities).sum(dim=1)
    return entropies.argsort(descending=True, stable=True)[:n]


def choose_far(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose one row after the other, the farthest from all labelled or chosen rows: the core-set.

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
    """Choose the most typical row of each of the largest clusters without a label.

    Source: Hacohen, Dekel and Weinshall, "Active learning on a budget: opposite strategies suit high and low budgets"
        (2022), alg. 1: TypiClust.
    """
    from sklearn.cluster import KMeans  # noqa: PLC0415 - optional

    rows, known = pool.rows, pool.known
    everything = torch.cat([rows, known]).numpy()
    clusters = min(len(known) + n, len(everything))
    cluster_of = KMeans(clusters, n_init=1, random_state=0).fit_predict(everything)
    sizes, labelled_per_cluster = (
        np.bincount(cluster_of, minlength=clusters),
        np.bincount(cluster_of[len(rows) :], minlength=clusters),
    )
    chosen: list[int] = []
    left = np.ones(len(rows), bool)
    while len(chosen) < n:  # a cluster without a label first, then the largest; clusters of fewer rows come again
        for cluster in np.lexsort((-sizes, labelled_per_cluster)).tolist():
            members = np.flatnonzero((cluster_of[: len(rows)] == cluster) & left)
            if len(members) and len(chosen) < n:
                members_of_cluster = rows[torch.from_numpy(members)]
                near = torch.cdist(members_of_cluster, members_of_cluster).sort(dim=1).values[:, 1 : NEIGHBOURS + 1]
                chosen.append(int(members[int(near.mean(dim=1).argmin())]) if near.shape[1] else int(members[0]))
                left[chosen[-1]] = False
    return torch.tensor(chosen)


def choose_badge(pool: Pool, n: int, generator: torch.Generator) -> Tensor:
    """Choose by k-means++ among the gradients with respect to the prototypes, for the predicted class.

    A row's gradient is the outer product of its error of the probabilities and its embedding, so that inner products of
    gradients factorize.

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


#: Strategies by name: ours, and the baselines.
STRATEGIES: dict[str, Strategy] = {
    "ours": choose_ours,
    "random": choose_random,
    "margin": choose_margin,
    "entropy": choose_entropy,
    "k-centre": choose_far,
    "typiclust": choose_typical,
    "badge": choose_badge,
}


def split_pool(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Split into candidate rows and their classes, test rows and theirs, and the number of classes."""
    data = load_real(name)
    if data.num_classes > MAX_CLASSES:
        data = data.select_classes(range(MAX_CLASSES))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data.y)))
    tests = min(MAX_TEST_ROWS, len(order) // 3)
    test, candidates = order[:tests], order[tests:][: MAX_POOL_PER_CLASS * data.num_classes]
    return data.x[candidates], data.y[candidates], data.x[test], data.y[test], data.num_classes


def draw_shots(y: Tensor, shots: int, generator: torch.Generator) -> list[int]:
    """Sample this many rows of each class (n,), or all if there are fewer."""
    order = torch.randperm(len(y), generator=generator)
    return torch.cat([order[y[order] == c][:shots] for c in y.unique()]).tolist()


@torch.no_grad()
def run_strategy(run: Run) -> list[float]:
    """Compute the test accuracy after each batch, or, for the target, of each draw."""
    x, y, test_x, test_y, num_classes = split_pool(run.dataset, run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    labelled = draw_shots(y, 1, generator)

    def fit(rows: list[int]) -> tuple[PrototypeNetwork, float]:
        network = solve([(x[rows], y[rows])], None, {"num_classes": num_classes}, effort=FITTED[run.effort])
        return network, float((network(test_x).argmax(dim=1) == test_y).double().mean())

    if run.strategy == TARGET:
        return [fit(draw_shots(y, SHOTS, generator))[1] for _ in range(DRAWS)]
    curve = []
    for batch in range(BATCHES + 1):
        network, accuracy = fit(labelled)
        curve.append(accuracy)
        left = torch.ones(len(y), dtype=torch.bool)
        left[labelled] = False
        rows = left.nonzero().flatten()
        n = min(num_classes, len(rows))
        if batch < BATCHES and n:
            chosen = STRATEGIES[run.strategy](Pool(network, x[rows], x[labelled]), n, generator)
            labelled = labelled + rows[chosen].tolist()
    return curve
