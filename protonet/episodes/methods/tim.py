"""Methods that minimise losses of support labels and query entropies: TIM and its variants, alpha-AM, fine-tuning."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import minimize_by_adam, one_hot
from protonet.episodes.methods.keywords import (
    BelowOne,
    Count,
    NonNegative,
    Positive,
    PositiveCount,
    PositiveFraction,
    SearchSpace,
)
from protonet.episodes.methods.transport import power_transform
from protonet.episodes.samplers.batch import Episodes


def compute_tim_gradient(
    log_p: Tensor, labels: Tensor, weights: tuple[float, float, float], *, alpha: float = 1
) -> Tensor:
    """Compute the gradient, with respect to logits, of ``cross * CE - marginal * H(Y) + conditional * H(Y|X)``.

    CE is the mean cross-entropy of the support, H(Y) the entropy of the queries' mean probabilities, H(Y|X) the mean
    entropy of the queries. Entropies are (1 - sum p^alpha) / (alpha - 1), or Shannon's if alpha is 1.

    Args:
        log_p: (episodes, n_way, n_support + n_queries), log-probabilities, support first.
        labels: (episodes, n_way, n_support), one-hot.
        weights: The weights of the three terms: cross, marginal and conditional.
        alpha: The parameter alpha of both entropies, > 0.

    Returns:
        The gradient (episodes, n_way, n_support + n_queries).

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), eqs. 2 to 4,
        https://arxiv.org/abs/2008.11297; for alpha Veilleux et al., "Realistic evaluation of transductive few-shot
        learning" (2021), eqs. 5 to 8, https://arxiv.org/abs/2204.11181.
    """
    cross, marginal, conditional = weights
    n_support = labels.shape[2]
    p = log_p.exp()
    of_support, of_query, log_p = p[..., :n_support], p[..., n_support:], log_p[..., n_support:]
    mean = of_query.mean(dim=2, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    if alpha == 1:
        u = marginal * mean.log() - conditional * log_p
    else:
        u = (marginal * mean.pow(alpha - 1) - conditional * (log_p * (alpha - 1)).exp()) * (alpha / (alpha - 1))
    # With the derivative u by a query's probabilities p, the derivative by its logits is p (u - sum p u).
    pu = of_query * u / of_query.shape[2]
    by_query = torch.addcmul(pu, of_query, pu.sum(dim=1, keepdim=True), value=-1)
    return torch.cat([(of_support - labels) * (cross / n_support), by_query], dim=2)


def tim(
    episodes: Episodes,
    *,
    weights: tuple[NonNegative, NonNegative, NonNegative] = (0.1, 1.0, 0.1),
    temperature: Positive = 1 / 15,
    learning_rate: Positive = 1e-4,
    steps: Count = 1000,
) -> Tensor:
    """Classify by prototypes that maximise the mutual information of queries and labels (TIM-GD).

    Adam optimises the prototypes in the coordinates of the features. In coordinates of the rows' span, 1,000 steps take
    a quarter of the time, but on raw pixels 6 to 10 % of the predictions change and accuracy falls by up to 3 points.
    The defaults are those of the authors' code for balanced queries (src/tim.py, scripts/evaluate/tim_gd);
    `tim_dirichlet` is for unbalanced queries. Rows are scaled to unit norm. Logits are minus half the squared distances
    to the prototypes over the temperature, up to a common constant.

    Args:
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            >= 0.
        temperature: > 0, divides half the squared distances.
        learning_rate: The learning rate of Adam, > 0.
        steps: Steps of Adam, >= 0.

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), eqs. 1 to 4.
        https://arxiv.org/abs/2008.11297
    """
    return alpha_tim(
        episodes, alpha=1, weights=weights, temperature=temperature, learning_rate=learning_rate, steps=steps
    )


def tim_dirichlet(episodes: Episodes) -> Tensor:
    """Classify as `tim` does, with equal weights of all terms, for unbalanced queries.

    In `tim` the term for balanced predictions has ten times the weight of the others, which makes it far less accurate
    on unbalanced queries.

    Source: Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), the configuration
        dirichlet/tim.yaml of its code. https://arxiv.org/abs/2204.11181
    """
    return tim(episodes, weights=(1.0, 1.0, 1.0))


def alpha_tim(
    episodes: Episodes,
    *,
    alpha: Positive | None = None,
    weights: tuple[NonNegative, NonNegative, NonNegative] = (1.0, 1.0, 1.0),
    temperature: Positive = 1 / 15,
    learning_rate: Positive = 1e-4,
    steps: Count = 1000,
) -> Tensor:
    """Classify as `tim` does, with alpha-entropies, which favour balanced predictions less.

    The defaults are those of the authors' code, the same for balanced and unbalanced queries (alpha_tim.yaml).

    Args:
        alpha: The parameter alpha of the marginal and the conditional entropy, > 0; 1 gives Shannon's entropies. None
            takes 2, 5 or 7 for one, for fewer than five, and for more support rows per class.
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            >= 0.
        temperature: > 0, divides half the squared distances.
        learning_rate: The learning rate of Adam, > 0.
        steps: Steps of Adam, >= 0.

    Source: Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), eqs. 5 to 8.
        https://arxiv.org/abs/2204.11181
    """
    if alpha is None:
        shots = episodes.support.shape[1] / episodes.n_way
        alpha = 2.0 if shots <= 1 else 5.0 if shots < 5 else 7.0  # as in the authors' code
    rows, labels, means = _prepare_rows(episodes)

    def gradient(prototypes: Tensor) -> Tensor:
        log_p = _compute_logits(prototypes, rows, temperature).log_softmax(dim=1)
        g = compute_tim_gradient(log_p, labels, weights, alpha=alpha) / temperature
        return torch.baddbmm(g.sum(dim=2, keepdim=True) * prototypes, g, rows, beta=-1)

    prototypes = minimize_by_adam(means, gradient, learning_rate=learning_rate, steps=steps)
    return _compute_logits(prototypes, rows, temperature)[..., labels.shape[2] :].transpose(1, 2)


def _prepare_rows(episodes: Episodes, *, plc: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute unit rows (with ``plc``, by `power_transform`), one-hot labels of the support, and class means."""
    joined = torch.cat([episodes.support, episodes.query], dim=1)
    rows = power_transform(joined, 0.5) if plc else F.normalize(joined, dim=2)
    labels = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)
    return rows, labels, (labels / labels.sum(dim=2, keepdim=True)) @ rows[:, : labels.shape[2]]


def _compute_logits(prototypes: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Compute logits (episodes, n_way, rows) by TIM's eq. 1, without the squared norms of the rows, which are 1."""
    squares = prototypes.square().sum(dim=2, keepdim=True)
    return torch.baddbmm(squares, prototypes, rows.transpose(1, 2), beta=-0.5 / temperature, alpha=1 / temperature)


def tim_adm(
    episodes: Episodes,
    *,
    weights: Annotated[tuple[Positive, Positive, Positive], SearchSpace(((0.1, 1.0, 0.1), (1.0, 1.0, 1.0)))] = (
        0.1,
        1.0,
        0.1,
    ),
    temperature: Positive = 1 / 15,
    steps: Count = 150,
    step_size: PositiveFraction = 1.0,
) -> Tensor:
    """Classify by prototypes that maximise the mutual information of queries and labels, by alternating directions.

    A step assigns soft labels to the queries, then moves the prototypes. Defaults are those of the authors' code for
    balanced queries (src/tim.py, scripts/evaluate/tim_adm). Rows and logits are as in `tim`.

    Args:
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            > 0.
        temperature: > 0, divides half the squared distances.
        steps: The number of steps, >= 0.
        step_size: The fraction of the way to the new prototypes that a step takes, in (0, 1].

    Source: Boudiaf et al., "Transductive information maximization for few-shot learning" (2020), prop. 1,
        https://arxiv.org/abs/2008.11297, with the exponents of its code: 1 plus the conditional entropy's weight, and
        the marginal entropy's weight over 1 plus this weight.
    """
    cross, marginal, conditional = weights
    n_support, n_queries = episodes.support.shape[1], episodes.query.shape[1]
    rows, labels, prototypes = _prepare_rows(episodes)
    support_weight, query_weight = cross / (1 + conditional), n_support / n_queries
    for _ in range(steps):
        log_p = _compute_logits(prototypes, rows, temperature).log_softmax(dim=1)  # (episodes, n_way, rows)
        raised = (1 + conditional) * log_p[..., n_support:]
        total = raised.logsumexp(dim=2, keepdim=True)  # (episodes, n_way, 1)
        soft_labels = (raised - marginal / (marginal + 1) * total).softmax(dim=1)
        target = torch.cat([support_weight * labels, query_weight * soft_labels], dim=2)
        p = log_p.exp()
        p = torch.cat([support_weight * p[..., :n_support], query_weight * p[..., n_support:]], dim=2)
        numerator = (target - p) @ rows + p.sum(dim=2, keepdim=True) * prototypes
        prototypes = prototypes.lerp(numerator / target.sum(dim=2, keepdim=True), step_size)
    return _compute_logits(prototypes, rows, temperature)[..., n_support:].transpose(1, 2)


def transductive_finetune(
    episodes: Episodes, *, temperature: Positive = 1, learning_rate: Positive = 5e-5, steps: Count = 25
) -> Tensor:
    """Classify by a linear layer trained on the support's cross-entropy plus the queries' entropy.

    The paper trains the whole network. Here only the linear layer is trained, and it changes little at the paper's
    learning rate. If features have a common mean, cosines differ even less, and the method is hardly better than
    chance. Rows are scaled to unit norm.

    Args:
        temperature: > 0, divides the logits. The paper has no temperature.
        learning_rate: The learning rate of Adam, > 0. The paper uses 5e-5.
        steps: Steps of Adam, >= 0. The paper uses 25.

    Source: Dhillon et al., "A baseline for few-shot image classification" (2020), support-based initialisation and
        eq. 8. https://arxiv.org/abs/1909.02729
    """
    n_support = episodes.support.shape[1]
    rows, labels, means = _prepare_rows(episodes)
    imprinted = F.normalize(means, dim=2)
    # The bias is the weight of an added feature that is always 1.
    rows, imprinted = F.pad(rows, (0, 1), value=1), F.pad(imprinted, (0, 1))

    def logits(layer: Tensor) -> Tensor:
        return layer @ rows.transpose(1, 2) / temperature  # (episodes, n_way, rows)

    def gradient(layer: Tensor) -> Tensor:
        return compute_tim_gradient(logits(layer).log_softmax(dim=1), labels, (1, 0, 1)) @ rows / temperature

    layer = minimize_by_adam(imprinted, gradient, learning_rate=learning_rate, steps=steps)
    return logits(layer)[..., n_support:].transpose(1, 2)


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
    alpha 5, 10 neighbours and a spread of 0.9. Rows are scaled to unit norm.

    Args:
        alpha: The parameter alpha of the marginal and the conditional entropy, > 0; 1 gives Shannon's entropies. None
            takes 2, or 5 from five support rows per class on.
        weights: Weights of the support's cross-entropy, the queries' marginal entropy and their conditional entropy,
            >= 0.
        n_neighbours: Number of neighbours of a row in the graph, >= 1; all other rows if there are fewer. None takes
            20, or 10 from five support rows per class on.
        spread: How far labels spread over the graph, in [0, 1). None takes 0.8, or 0.9 from five support rows
            per class on.
        temperature: > 0, divides the labels that reach a row.
        learning_rate: The learning rate of Adam, > 0.
        steps: How often labels are spread over the graph, >= 1. Adam takes one step between two such spreads.
        plc: Whether to preprocess rows: square root of the features, unit norm, subtraction of the mean of all rows,
            unit norm again. The paper has results with and without it.

    Source: Lazarou, Avrithis and Stathaki, "Adaptive manifold for imbalanced transductive few-shot learning" (2024),
        sec. 3. https://arxiv.org/abs/2304.14281. Only the authors' code has distances in
        units of their standard deviation, and centroids that select no neighbours.
    """
    # Defaults are those of the authors' code (AM.py). For two to four support rows per class, it has an alpha of 1,
    # which divides by zero in its formula; here they have the values of one row.
    many = episodes.support.shape[1] / episodes.n_way >= 5
    alpha = (2.0, 5.0)[many] if alpha is None else alpha
    n_neighbours = (20, 10)[many] if n_neighbours is None else n_neighbours
    spread = (0.8, 0.9)[many] if spread is None else spread
    n_support, n_way = episodes.support.shape[1], episodes.n_way
    rows, hot, centroids = _prepare_rows(episodes, plc=plc)
    row_distances = torch.cdist(rows, rows)
    n = n_way + rows.shape[1]
    edges = rows.new_ones(len(rows), n * n)
    start = torch.cat([centroids.flatten(1), edges, spread * edges], dim=1)
    sizes = (centroids[0].numel(), n * n, n * n)

    def logits(parameters: Tensor) -> Tensor:
        moved, *of_pairs = parameters.split(sizes, dim=1)
        bandwidth, weight = (tensor.view(len(rows), n, n) for tensor in of_pairs)
        graph = _build_centroid_graph(row_distances, rows, moved.view_as(centroids), bandwidth, weight, n_neighbours)
        eye = torch.eye(n, dtype=rows.dtype, device=rows.device)
        reached: Tensor = torch.linalg.solve(eye - spread * graph, eye[:, :n_way])  # (episodes, n, n_way)
        return reached[:, n_way:] / temperature

    def gradient(parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            parameters = parameters.detach().requires_grad_()
            reached = logits(parameters).transpose(1, 2)
            slope = compute_tim_gradient(reached.detach().log_softmax(dim=1), hot, weights, alpha=alpha)
            return torch.autograd.grad(reached, parameters, slope)[0]

    parameters = minimize_by_adam(start, gradient, learning_rate=learning_rate, steps=steps - 1)
    return logits(parameters)[:, n_support:]


def _build_centroid_graph(
    row_distances: Tensor, rows: Tensor, centroids: Tensor, bandwidth: Tensor, weight: Tensor, n_neighbours: int
) -> Tensor:
    """Build the nearest-neighbour graph (episodes, n, n) of centroids and rows, given bandwidths and edge weights."""
    n_way = centroids.shape[1]
    tiny = torch.finfo(rows.dtype).eps  # where a centroid is a row, the slope of their distance would be noise
    among, towards = ((torch.cdist(centroids, points).square() + tiny).sqrt() for points in (centroids, rows))
    upper, lower = torch.cat([among, towards], dim=2), torch.cat([towards.transpose(1, 2), row_distances], dim=2)
    distances = torch.cat([upper, lower], dim=1)
    # Lower bound of the variance of distances, for equal rows. Our own choice.
    min_distance_variance = 1e-12
    variance = distances.flatten(1).var(dim=1)[:, None, None].clamp_min(min_distance_variance)
    affinity = (-(distances / variance.sqrt() * bandwidth)[:, n_way:]).exp()  # of the rows alone
    itself = torch.eye(distances.shape[1], dtype=torch.bool, device=rows.device)[n_way:]
    affinity = affinity.masked_fill(itself, 0)
    # Edges to centroids count as larger by this fraction when neighbours are selected, to break ties. Our own choice.
    centroid_edge_bonus = 1e-5
    # A centroid comes before a support row that equals it: the order of ties would be arbitrary.
    bonus = F.pad(affinity.new_full((n_way,), 1 + centroid_edge_bonus), (0, distances.shape[1] - n_way), value=1)
    near = (affinity * bonus).topk(min(n_neighbours, distances.shape[1] - 1), dim=2).indices
    affinity = torch.zeros_like(affinity).scatter(2, near, affinity.gather(2, near))
    affinity = F.pad(affinity, (0, 0, n_way, 0))
    graph = weight * (affinity + affinity.transpose(1, 2)) / 2
    # Added to the sum of the edge weights of each row, as in the authors' code.
    min_node_degree = 1e-12
    root = (graph.sum(dim=2) + min_node_degree).rsqrt()
    return root[:, :, None] * graph * root[:, None]
