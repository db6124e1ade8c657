"""alpha-AM: class centroids and a graph of nearest neighbours, adapted together to the queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import adam, one_hot, unit_rows
from protonet.episodes.methods.keywords import BelowOne, NonNegative, Positive, PositiveCount
from protonet.episodes.methods.transport import OFFSET
from protonet.episodes.samplers.batch import Episodes


@dataclass(frozen=True)
class Tuned:
    """The settings that depend on the number of support rows per class, from the authors' code (AM.py).

    Their values for two to four are those for one; their alpha there is 1, where its formula divides by zero.
    """

    few: int = 5  #: Support rows per class from which on the second value is taken.
    alpha: tuple[float, float] = (2.0, 5.0)  #: Of both entropies.
    n_neighbours: tuple[int, int] = (20, 10)  #: Neighbours of a row in the graph.
    spread: tuple[float, float] = (0.8, 0.9)  #: How far labels spread.


TUNED = Tuned()
MIN_DEGREE = 1e-12  #: Added to sums of a row's edges, as in the authors' code.
FAVOUR = 1e-5  #: By this share an edge to a centroid counts more, where neighbours are chosen. Our own choice.
MIN_VARIANCE = 1e-12  #: Lower bound of the variance of distances, for equal rows. Our own choice.


def alpha_am(
    episodes: Episodes,
    *,
    alpha: Positive | None = None,
    weights: tuple[NonNegative, NonNegative, NonNegative] = (1.0, 1.0, 1.0),
    n_neighbours: PositiveCount | None = None,
    spread: BelowOne | None = None,
    temperature: Positive = 1 / 15,
    learning_rate: Positive = 1e-4,
    steps: PositiveCount = 1000,
    plc: bool = False,
) -> Tensor:
    """Classify by labels that spread from class centroids over a graph, all of whose parameters adapt to the queries.

    These are the centroids, a bandwidth and a weight for each pair of rows. A step inverts a matrix of all rows of an
    episode: 1,000 steps take seconds an episode. Defaults are those of the authors' code for unbalanced queries
    (dirichlet/alpha_am.yaml); weights 1,10,1 with alpha 5, 10 neighbours and a spread of 0.9 are its AM for balanced
    ones.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        alpha: Of both entropies, > 0; None for the value of `Tuned`, and so are the next two.
        weights: Of the support's cross-entropy (Shannon's), the queries' marginal and their conditional entropy, >= 0.
        n_neighbours: Of a row in the graph, >= 1; all other rows where there are fewer.
        spread: How far labels spread over the graph, in [0, 1).
        temperature: > 0, divides the labels that reach a row.
        learning_rate: Adam's, > 0.
        steps: Times that labels are spread, >= 1, with a step of Adam between two of them.
        plc: Transform rows before: their power of a half, unit norm, less the mean of all rows, unit norm again; the
            paper shows both.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Lazarou, Avrithis and Stathaki, "Adaptive manifold for imbalanced transductive few-shot learning" (2024),
        sec. 3. https://arxiv.org/abs/2304.14281. From the authors' code alone: distances in units of their
        standard deviation, and centroids that have no neighbours of their own.
    """
    late = episodes.support.shape[1] / episodes.n_way >= TUNED.few
    alpha = TUNED.alpha[late] if alpha is None else alpha
    n_neighbours = TUNED.n_neighbours[late] if n_neighbours is None else n_neighbours
    spread = TUNED.spread[late] if spread is None else spread
    n_support, n_way = episodes.support.shape[1], episodes.n_way
    rows = _transform(episodes) if plc else unit_rows(episodes)
    between = torch.cdist(rows, rows)
    hot = one_hot(episodes.support_labels, n_way, rows.dtype).transpose(1, 2)
    centroids = hot / hot.sum(dim=2, keepdim=True) @ rows[:, :n_support]
    n = n_way + rows.shape[1]
    edges = rows.new_ones(len(rows), n * n)
    start = torch.cat([centroids.flatten(1), edges, spread * edges], dim=1)
    sizes = (centroids[0].numel(), n * n, n * n)

    def logits(parameters: Tensor) -> Tensor:
        moved, bandwidth, weight = parameters.split(sizes, dim=1)
        shape = (len(rows), n, n)
        graph = _find_graph(
            between, rows, moved.view_as(centroids), bandwidth.view(shape), weight.view(shape), n_neighbours
        )
        eye = torch.eye(n, dtype=rows.dtype, device=rows.device)
        reached: Tensor = torch.linalg.solve(eye - spread * graph, eye[:, :n_way])  # (episodes, n, n_way)
        return reached[:, n_way:] / temperature

    def gradient(parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            parameters = parameters.detach().requires_grad_()
            loss = _lose(logits(parameters), hot.transpose(1, 2), weights, alpha)
            return torch.autograd.grad(loss, parameters)[0]

    parameters = adam(start, gradient, learning_rate=learning_rate, steps=steps - 1)
    return logits(parameters)[:, n_support:]


def _transform(episodes: Episodes) -> Tensor:
    """Return support and query rows after the power transform, centred on their mean and of unit norm."""
    rows = torch.cat([episodes.support, episodes.query], dim=1)
    rows = F.normalize((rows.abs() + OFFSET).sqrt().copysign(rows), dim=2)
    return F.normalize(rows - rows.mean(dim=1, keepdim=True), dim=2)


def _find_graph(
    between: Tensor, rows: Tensor, centroids: Tensor, bandwidth: Tensor, weight: Tensor, n_neighbours: int
) -> Tensor:
    """Return the normalised graph (episodes, n, n) of centroids and rows, from the rows' distances ``between``."""
    n_way = centroids.shape[1]
    tiny = torch.finfo(rows.dtype).eps  # where a centroid is a row, the slope of their distance would be noise
    among, towards = ((torch.cdist(centroids, points).square() + tiny).sqrt() for points in (centroids, rows))
    distances = torch.cat([torch.cat([among, towards], dim=2), torch.cat([towards.transpose(1, 2), between], dim=2)], 1)
    variance = distances.flatten(1).var(dim=1)[:, None, None].clamp_min(MIN_VARIANCE)
    affinity = (-(distances / variance.sqrt() * bandwidth)[:, n_way:]).exp()  # of the rows alone
    itself = torch.eye(distances.shape[1], dtype=torch.bool, device=rows.device)[n_way:]
    affinity = affinity.masked_fill(itself, 0)
    # A centroid comes before the one support row that it is at first: which of two equals comes first is chance.
    favour = F.pad(affinity.new_full((n_way,), 1 + FAVOUR), (0, distances.shape[1] - n_way), value=1)
    near = (affinity * favour).topk(min(n_neighbours, distances.shape[1] - 1), dim=2).indices
    affinity = torch.zeros_like(affinity).scatter(2, near, affinity.gather(2, near))
    affinity = F.pad(affinity, (0, 0, n_way, 0))
    graph = weight * (affinity + affinity.transpose(1, 2)) / 2
    root = (graph.sum(dim=2) + MIN_DEGREE).rsqrt()
    return root[:, :, None] * graph * root[:, None]


def _lose(logits: Tensor, hot: Tensor, weights: tuple[float, float, float], alpha: float) -> Tensor:
    """Return the sum over episodes of cross * CE - marginal * H(Y) + conditional * H(Y|X), in nats."""
    cross, marginal, conditional = weights
    n_support = hot.shape[1]
    log_p = logits.log_softmax(dim=2)
    entropy = -(hot * log_p[:, :n_support]).sum() / n_support
    log_p = log_p[:, n_support:]
    mean = log_p.exp().mean(dim=1)
    entropies = _entropy(log_p, alpha).mean(dim=1)
    return cross * entropy + (conditional * entropies - marginal * _entropy(mean.log(), alpha)).sum()


def _entropy(log_p: Tensor, alpha: float) -> Tensor:
    """Return the entropy (1 - sum p^alpha) / (alpha - 1) over the last dimension, Shannon's for an alpha of 1."""
    if alpha == 1:
        return -(log_p.exp() * log_p).sum(dim=-1)
    return (1 - (alpha * log_p).exp().sum(dim=-1)) / (alpha - 1)
