"""alpha-AM: class centroids and a nearest-neighbour graph, both adapted to the queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import join_unit_rows, minimize_by_adam, one_hot
from protonet.episodes.methods.keywords import BelowOne, NonNegative, Positive, PositiveCount
from protonet.episodes.methods.transport import POWER_TRANSFORM_OFFSET
from protonet.episodes.samplers.batch import Episodes


@dataclass(frozen=True)
class AlphaAmDefaults:
    """Default settings of `alpha_am` by the number of support rows per class, from the authors' code (AM.py).

    Each pair has the value for fewer than ``min_many`` support rows, then the value for more. For two to four rows the
    code has an alpha of 1, which divides by zero in its formula; here they have the values of one row.
    """

    min_many: int = 5  #: The minimum number of support rows per class for the second value of each pair.
    alpha: tuple[float, float] = (2.0, 5.0)  #: The parameter alpha of the marginal and the conditional entropy.
    n_neighbours: tuple[int, int] = (20, 10)  #: Number of neighbours of a row in the graph.
    spread: tuple[float, float] = (0.8, 0.9)  #: How far labels spread over the graph, in [0, 1).


DEFAULTS_BY_SHOTS = AlphaAmDefaults()
MIN_NODE_DEGREE = 1e-12  #: Added to the sum of the edge weights of each row, as in the authors' code.
#: Edges to centroids count as larger by this fraction when neighbours are selected, to break ties. Our own choice.
CENTROID_BONUS = 1e-5
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
    """Classify by labels that spread from class centroids over a graph of all rows, both adapted to the queries.

    Adam trains the centroids, and a bandwidth and an edge weight for each pair of rows. Each step inverts a matrix of
    all rows of an episode, so 1,000 steps take seconds per episode. Defaults are those of the authors' code for
    unbalanced queries (dirichlet/alpha_am.yaml). For balanced queries, the method AM of the code has weights 1,10,1,
    alpha 5, 10 neighbours and a spread of 0.9.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        alpha: The parameter alpha of the marginal and the conditional entropy, > 0; 1 gives Shannon's entropies. None
            takes the value of `AlphaAmDefaults`.
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            >= 0.
        n_neighbours: Number of neighbours of a row in the graph, >= 1; all other rows if there are fewer. None takes
            the value of `AlphaAmDefaults`.
        spread: How far labels spread over the graph, in [0, 1). None takes the value of `AlphaAmDefaults`.
        temperature: > 0, divides the labels that reach a row.
        learning_rate: The learning rate of Adam, > 0.
        steps: How often labels are spread, >= 1. Adam takes one step between two times.
        plc: Whether to preprocess rows: square root of the features, unit norm, subtraction of the mean of all rows,
            unit norm again. The paper has results with and without it.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Lazarou, Avrithis and Stathaki, "Adaptive manifold for imbalanced transductive few-shot learning" (2024),
        sec. 3. https://arxiv.org/abs/2304.14281. Only the authors' code has distances in
        units of their standard deviation, and centroids that select no neighbours.
    """
    many = episodes.support.shape[1] / episodes.n_way >= DEFAULTS_BY_SHOTS.min_many
    alpha = DEFAULTS_BY_SHOTS.alpha[many] if alpha is None else alpha
    n_neighbours = DEFAULTS_BY_SHOTS.n_neighbours[many] if n_neighbours is None else n_neighbours
    spread = DEFAULTS_BY_SHOTS.spread[many] if spread is None else spread
    n_support, n_way = episodes.support.shape[1], episodes.n_way
    rows = _power_transform(episodes) if plc else join_unit_rows(episodes)
    row_distances = torch.cdist(rows, rows)
    hot = one_hot(episodes.support_labels, n_way, rows.dtype).transpose(1, 2)
    centroids = hot / hot.sum(dim=2, keepdim=True) @ rows[:, :n_support]
    n = n_way + rows.shape[1]
    edges = rows.new_ones(len(rows), n * n)
    start = torch.cat([centroids.flatten(1), edges, spread * edges], dim=1)
    sizes = (centroids[0].numel(), n * n, n * n)

    def logits(parameters: Tensor) -> Tensor:
        moved, *of_pairs = parameters.split(sizes, dim=1)
        bandwidth, weight = (tensor.view(len(rows), n, n) for tensor in of_pairs)
        graph = _build_graph(row_distances, rows, moved.view_as(centroids), bandwidth, weight, n_neighbours)
        eye = torch.eye(n, dtype=rows.dtype, device=rows.device)
        reached: Tensor = torch.linalg.solve(eye - spread * graph, eye[:, :n_way])  # (episodes, n, n_way)
        return reached[:, n_way:] / temperature

    def gradient(parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            parameters = parameters.detach().requires_grad_()
            loss = _compute_loss(logits(parameters), hot.transpose(1, 2), weights, alpha)
            return torch.autograd.grad(loss, parameters)[0]

    parameters = minimize_by_adam(start, gradient, learning_rate=learning_rate, steps=steps - 1)
    return logits(parameters)[:, n_support:]


def _power_transform(episodes: Episodes) -> Tensor:
    """Apply the power transform to support and query rows, centre them on their mean, and scale them to unit norm."""
    rows = torch.cat([episodes.support, episodes.query], dim=1)
    rows = F.normalize((rows.abs() + POWER_TRANSFORM_OFFSET).sqrt().copysign(rows), dim=2)
    return F.normalize(rows - rows.mean(dim=1, keepdim=True), dim=2)


def _build_graph(
    row_distances: Tensor, rows: Tensor, centroids: Tensor, bandwidth: Tensor, weight: Tensor, n_neighbours: int
) -> Tensor:
    """Build the normalised nearest-neighbour graph (episodes, n, n) of n nodes: the centroids, then the rows.

    ``bandwidth`` and ``weight`` (episodes, n, n) are factors on distances and on edges. ``row_distances`` (episodes,
    n_rows, n_rows) are between rows.
    """
    n_way = centroids.shape[1]
    tiny = torch.finfo(rows.dtype).eps  # where a centroid is a row, the slope of their distance would be noise
    among, towards = ((torch.cdist(centroids, points).square() + tiny).sqrt() for points in (centroids, rows))
    upper, lower = torch.cat([among, towards], dim=2), torch.cat([towards.transpose(1, 2), row_distances], dim=2)
    distances = torch.cat([upper, lower], dim=1)
    variance = distances.flatten(1).var(dim=1)[:, None, None].clamp_min(MIN_VARIANCE)
    affinity = (-(distances / variance.sqrt() * bandwidth)[:, n_way:]).exp()  # of the rows alone
    itself = torch.eye(distances.shape[1], dtype=torch.bool, device=rows.device)[n_way:]
    affinity = affinity.masked_fill(itself, 0)
    # A centroid comes before a support row that equals it: the order of ties would be arbitrary.
    bonus = F.pad(affinity.new_full((n_way,), 1 + CENTROID_BONUS), (0, distances.shape[1] - n_way), value=1)
    near = (affinity * bonus).topk(min(n_neighbours, distances.shape[1] - 1), dim=2).indices
    affinity = torch.zeros_like(affinity).scatter(2, near, affinity.gather(2, near))
    affinity = F.pad(affinity, (0, 0, n_way, 0))
    graph = weight * (affinity + affinity.transpose(1, 2)) / 2
    root = (graph.sum(dim=2) + MIN_NODE_DEGREE).rsqrt()
    return root[:, :, None] * graph * root[:, None]


def _compute_loss(logits: Tensor, hot: Tensor, weights: tuple[float, float, float], alpha: float) -> Tensor:
    """Compute the sum over episodes of cross * CE - marginal * H(Y) + conditional * H(Y|X), in nats.

    CE is the mean cross-entropy of support rows, H(Y) the alpha-entropy of the queries' mean probabilities, and H(Y|X)
    the mean alpha-entropy of the queries. ``weights`` are cross, marginal and conditional. Logits are (episodes,
    n_support + n_queries, n_way), one-hot labels ``hot`` (episodes, n_support, n_way).
    """
    cross, marginal, conditional = weights
    n_support = hot.shape[1]
    log_p = logits.log_softmax(dim=2)
    entropy = -(hot * log_p[:, :n_support]).sum() / n_support
    log_p = log_p[:, n_support:]
    mean = log_p.exp().mean(dim=1)
    entropies = _alpha_entropy(log_p, alpha).mean(dim=1)
    return cross * entropy + (conditional * entropies - marginal * _alpha_entropy(mean.log(), alpha)).sum()


def _alpha_entropy(log_p: Tensor, alpha: float) -> Tensor:
    """Compute the alpha-entropy (1 - sum p^alpha) / (alpha - 1) over the last dimension; Shannon's if alpha is 1."""
    if alpha == 1:
        return -(log_p.exp() * log_p).sum(dim=-1)
    return (1 - (alpha * log_p).exp().sum(dim=-1)) / (alpha - 1)
