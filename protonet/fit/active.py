"""Active learning: rows to label next, and clusters of rows that look like novel classes.

The next ones are those that doubtful rows are like, each far from the others and from what is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet._validation import check_features, check_int
from protonet.errors import raise_input_error
from protonet.fit.networks import fit_rows, leave_out
from protonet.fit.solver import Solution, untouched_globals
from protonet.losses import CHUNK
from protonet.network import PrototypeNetwork


@dataclass(frozen=True)
class AskRules:
    """Rules for queries and their reasons; set on the developing half of analysis/results/ask.md."""

    bandwidth: float = 0.1
    """Rows whose cosine is lower than 1 by this much are alike to exp(-1), or by more where rows have fewer than ..."""
    neighbours: int = 10  #: ... so many that are as near, in the median.
    most_rows: int = 4096
    """Rows that are compared with each other, all pairs of them: of more, so many are drawn, in proportion to their
    doubt."""
    between: float = 0.5  #: A row is between two classes where the likelier is so little ahead, in probability.
    far: float = 0.05  #: A row is an outlier if at most this fraction of rows is farther from all classes.


@dataclass(frozen=True)
class GroupRules:
    """Which rows make a group; analysis/results/unlabelled.md has how often they are one."""

    most: int = 2048  #: Labelled rows that are looked at: all pairs of rows are compared.
    smallest: int = 8  #: Rows of a group.
    apart: float = 0.8  #: The quantile of the distances between labelled rows of one class that cuts groups apart.
    least: float = (
        0.1  #: The median rank of a group's rows, of `protonet.fit.networks.PseudoLabelResult`, below which it is one.
    )


RULES, GROUPS = AskRules(), GroupRules()


class Suggestion(NamedTuple):
    """A row to be labelled."""

    row: int  #: Its number, from 0.
    reason: str  #: Why, in words.


class ClassPredictions(NamedTuple):
    """Class probabilities of rows by a network."""

    first: Tensor  #: (n,) int64, the likeliest class.
    second: Tensor  #: (n,) int64, the next one; the first again where there is one class alone.
    probabilities: Tensor  #: (n, 2) the probabilities of both.
    nearness: Tensor  #: (n,) the highest logit.
    by_name: Tensor | None = None  #: (n,) int64, the class whose name is nearest, if names say something.

    @property
    def doubt(self) -> Tensor:
        """How near the two likeliest classes are, (n,) in [0, 1]: 1 less the margin between their probabilities."""
        return 1 - (self.probabilities[:, 0] - self.probabilities[:, 1])


def suggest_rows(
    network: PrototypeNetwork | None,
    x: Tensor,
    n: int,
    names: Sequence[object] = (),
    *,
    known: Tensor | None = None,
    by_name: Tensor | None = None,
    seed: int = 0,
) -> list[Suggestion]:
    """Say which rows to label next, a batch of them at once, and why.

    A row's doubt is how near its two likeliest classes are. Rows are alike as exp((cosine - 1) / bandwidth) of their
    embeddings; those that are chosen are so that every row, as far as it is in doubt, is like one of them or like a
    prototype. Without a network all rows are in doubt: then representative ones are chosen, spread over the data.

    Args:
        network: Fitted to the labels so far; None without labels.
        x: (rows, dim) real, finite: rows without a label.
        n: How many to choose, at least 1, and at most as there are and as ``AskRules.most_rows``.
        names: Of the network's classes, for the reasons.
        known: (k, dim) rows with a label that no network has learned from: as good as chosen already.
        by_name: (rows,) int64, the class whose name each row is nearest to: where that is another one than the
            network's, the row is in full doubt. None if names are uninformative.
        seed: Of the rows that are drawn where there are more than ``AskRules.most_rows``.

    Returns:
        The rows, the one to label first first; each once.

    Raises:
        InputTypeError: Not a tensor, or a number that is none.
        InputError: Features that are not finite, of another width or too far out; more rows asked for than there are.

    Source: generalised coverage, Bae et al., "Generalized coverage for more robust low-budget active learning" (2024),
        with each row weighted by its doubt, as in Bae et al., "Uncertainty herding" (2025), eq. 3. Sampling in
        proportion to weights without replacement: Efraimidis and Spirakis, "Weighted random sampling with a reservoir"
        (2006).
    """
    width = None if network is None else getattr(network.encoder, "input_dim", None)
    x = check_features("x", x, dim=width)
    labelled = x[:0] if known is None else check_features("known", known, dim=x.shape[1])
    if not len(x):
        raise_input_error("x", "have at least one row", "none", "Pass rows without a label.")
    max_rows = min(len(x), RULES.most_rows)
    n = check_int("n", n, low=1, high=max_rows, remedy=f"Ask for at most {max_rows} of {len(x)} rows at once.")
    with torch.no_grad():
        space = Standardised(torch.cat([x, labelled]) if len(labelled) else x) if network is None else network
        predictions = None if network is None else predict_classes(network, x)
        doubt = (
            torch.ones(len(x)) if predictions is None else predictions.doubt.clamp_min(torch.finfo(torch.float32).tiny)
        )
        if predictions is not None and by_name is not None:
            predictions = predictions._replace(by_name=by_name)
            doubt = torch.where(by_name == predictions.first, doubt, 1.0)
        sample = draw_rows(doubt, RULES.most_rows, seed)
        rows, drawn = space.embed(x[sample]).float(), len(sample) < len(x)
        weights = torch.ones(len(rows)) if drawn else doubt.float()  # those that are drawn have been weighed already
        parts = [] if network is None else [network.prototypes[network.seen].float()]
        parts += [space.embed(block).float() for block in labelled.split(CHUNK) if len(block)]
        if network is None:  # each represents its fraction of the rows
            bandwidth = median_bandwidth(rows, math.ceil(len(rows) / n))
        else:
            bandwidth = max(RULES.bandwidth, median_bandwidth(rows, RULES.neighbours))
        chosen = sample[choose_covering(rows, weights, torch.cat([rows[:0], *parts]), n, bandwidth)]
        return [
            Suggestion(row, reason)
            for row, reason in zip(
                chosen.tolist(), _explain(space, x, chosen, predictions, names, bandwidth), strict=True
            )
        ]


def predict_classes(network: PrototypeNetwork, x: Tensor) -> ClassPredictions:
    """Compute the class probabilities of rows (n, dim) by a network, a block at a time.

    Raises:
        InputError: A row is so far out that its embedding overflows.
    """
    parts: list[tuple[Tensor, ...]] = []
    for block in x.split(CHUNK):
        logits = network(block)
        if not bool(logits.isfinite().all()):
            remedy = "Mend or drop the row."
            raise_input_error("x", "hold numbers of the size that the network was fitted to", "larger ones", remedy)
        probabilities, classes = logits.softmax(dim=1).topk(min(2, logits.shape[1]), dim=1)
        if probabilities.shape[1] == 1:  # one class is all that is known: nothing is certain
            probabilities, classes = probabilities.expand(-1, 2), classes.expand(-1, 2)
        parts.append((classes[:, 0], classes[:, 1], probabilities.float(), logits.amax(dim=1)))
    first, second, probabilities, nearness = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return ClassPredictions(first, second, probabilities, nearness)


def draw_rows(weights: Tensor, most: int, seed: int) -> Tensor:
    """Draw rows in proportion to their weights (n,) > 0, each at most once: (min(n, most),) int64, in their order."""
    if len(weights) <= most:
        return torch.arange(len(weights))
    noise = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))
    return (weights.double().log() - noise.log()).topk(most).indices.sort().values


def measure_likeness(rows: Tensor, others: Tensor, bandwidth: float) -> Tensor:
    """Return how alike rows (n, dim) are to others (m, dim): (n, m), exp(-squared distance / (2 bandwidth)).

    For unit rows this is exp((cosine - 1) / bandwidth).
    """
    squares = rows.square().sum(dim=1)[:, None] + others.square().sum(dim=1)
    return torch.addmm(squares, rows, others.T, alpha=-2).clamp_(min=0).div_(-2 * bandwidth).exp_()


def choose_covering(rows: Tensor, weights: Tensor, known: Tensor, n: int, bandwidth: float) -> Tensor:
    """Choose rows, one after the other, so that what rows have in common with the nearest chosen one adds up to most.

    Args:
        rows: (m, dim) embeddings.
        weights: (m,) >= 0: how much each row counts.
        known: (k, dim) embeddings of what is as good as chosen already.
        n: In [1, m].
        bandwidth: > 0, of `measure_likeness`.

    Returns:
        (n,) int64, in the order of the choice. Their sum is at least 1 - 1/e of the maximum for n rows.

    Source: Nemhauser, Wolsey and Fisher, "An analysis of approximations for maximizing submodular set functions"
        (1978), sec. 4.
    """
    alike = measure_likeness(rows, rows, bandwidth)
    covered = torch.zeros(len(rows))
    for block in known.split(CHUNK // 16) if len(known) else ():
        covered = torch.maximum(covered, measure_likeness(rows, block, bandwidth).amax(dim=1))
    chosen: list[int] = []
    free = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(n):
        gains = torch.cat([(block - covered).clamp_(min=0) @ weights for block in alike.split(CHUNK // 16)])
        best = int(gains.masked_fill(~free, -1.0).argmax())
        chosen.append(best)
        free[best] = False
        covered = torch.maximum(covered, alike[best])
    return torch.tensor(chosen)


def median_bandwidth(rows: Tensor, neighbours: int) -> float:
    """Return the bandwidth at which rows (m, dim) are alike to exp(-1) to so many others, or all, in the median.

    The median is over up to 1,024 rows.
    """
    few = rows[:: math.ceil(len(rows) / 1024)]
    nearest = torch.cdist(few, rows).kthvalue(min(len(rows), neighbours + 1), dim=1).values  # itself among them
    return max(float(nearest.square().median()) / 2, torch.finfo(torch.float32).eps)


class Standardised:
    """An embedding without labels: columns less their mean, of equal variance, rows of a mean square of 1."""

    def __init__(self, x: Tensor) -> None:
        self.mean = x.mean(dim=0, dtype=torch.float64)
        squares = sum((block - self.mean).square().sum(dim=0) for block in x.split(CHUNK))
        deviation = torch.as_tensor(squares / len(x)).sqrt()
        varies = deviation > 1e-12 * self.mean.abs()
        self.scale = torch.where(varies, deviation * math.sqrt(max(1, int(varies.sum()))), math.inf)

    def embed(self, x: Tensor) -> Tensor:
        """Return embeddings (n, dim) float32 of rows (n, dim)."""
        return ((x - self.mean) / self.scale).float()


def _explain(
    space: Standardised | PrototypeNetwork,
    x: Tensor,
    chosen: Tensor,
    predictions: ClassPredictions | None,
    names: Sequence[object],
    bandwidth: float,
) -> Iterator[str]:
    """Yield why each chosen row (n,) is, in words."""
    counts = _count_alike(space, x, chosen, bandwidth)
    farther = None if predictions is None else predictions.nearness.sort().values
    for row, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        reason = f"representative of {count:,} unlabelled rows" if count > 1 else "no similar rows"
        if predictions is None or farther is None:
            yield reason
            continue
        (more, less), first, second = (
            predictions.probabilities[row].tolist(),
            int(predictions.first[row]),
            int(predictions.second[row]),
        )
        nearer = 1 - float(torch.searchsorted(farther, predictions.nearness[row], right=True)) / len(x)
        if predictions.by_name is not None and int(predictions.by_name[row]) != first:
            yield f"{names[first]} by its rows, {names[int(predictions.by_name[row])]} by its name"
        elif nearer > 1 - RULES.far:
            yield f"outlier: {100 * nearer:.0f} % of the rows are closer to a class"
        elif first != second and more - less < RULES.between:
            yield f"between {names[first]} and {names[second]}: {100 * more:.0f} % and {100 * less:.0f} %"
        else:
            yield reason


def _count_alike(space: Standardised | PrototypeNetwork, x: Tensor, chosen: Tensor, bandwidth: float) -> Tensor:
    """Return for how many rows (n, dim) each chosen one (m,) is the nearest of them, and alike to exp(-1) or more."""
    picked = space.embed(x[chosen]).float()
    counts = torch.zeros(len(chosen), dtype=torch.int64)
    for block in x.split(CHUNK):
        alike, nearest = measure_likeness(space.embed(block).float(), picked, bandwidth).max(dim=1)
        counts += torch.bincount(nearest[alike >= math.exp(-1)], minlength=len(chosen))
    return counts


def cluster_unknown(solution: Solution) -> list[list[int]]:
    """Group the rows without a label that look like classes of their own.

    All rows are clustered, in what the labels make of them and in standardised features, side by side: the labels do
    not show which features separate other classes. A cluster without a labelled row, whose rows are less like a class
    than most rows of known classes are, is a group.

    Returns:
        Of each group, the largest first, the numbers of its rows among those that came, in ascending order.

    Source: average linkage, Sokal and Michener, "A statistical method for evaluating systematic relationships" (1958).
    """
    problem, pooled = solution.problem, solution.pooled
    if pooled is None or problem.pool is None or pooled.losses is None:
        return []
    n = len(problem.rows.labels)
    some = problem.rows.select(torch.arange(0, n, -(-n // GROUPS.most)))  # rows are in the order of their labels
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
        ranks: (m,) as `protonet.fit.networks.PseudoLabelResult` has them.

    Returns:
        Numbers among the others of the rows of each group, the largest first.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # noqa: PLC0415 - slow to import, and seldom wanted

    n = len(labels)
    same = (labels[:, None] == labels).triu(diagonal=1)
    if not bool(same.any()):
        return []
    reach = float(torch.cdist(embedding[:n], embedding[:n])[same].quantile(GROUPS.apart))
    clusters = fcluster(linkage(embedding.double().numpy(), "average"), reach, "distance")
    labelled_clusters = set(clusters[:n].tolist())
    groups = []
    for cluster in np.unique(clusters[n:]).tolist():
        rows = np.flatnonzero(clusters[n:] == cluster)
        is_novel = cluster not in labelled_clusters and float(ranks[torch.from_numpy(rows)].median()) < GROUPS.least
        if is_novel and len(rows) >= GROUPS.smallest:
            groups.append(rows.tolist())
    return sorted(groups, key=lambda group: (-len(group), group))
