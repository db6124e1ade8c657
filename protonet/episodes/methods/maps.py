"""Methods that compare the positions of feature maps: FRN, CrossTransformers, DeepBDC and DeepEMD."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import draw_row_orders, one_hot, squared_distances, support_means
from protonet.episodes.methods.keywords import BelowOne, Count, Fraction, Positive, PositiveCount
from protonet.episodes.methods.svm import (
    BOUNDARY_FRACTION,
    INTERIOR_POINT_TOLERANCE,
    MAX_INTERIOR_POINT_STEPS,
    compute_max_step_size,
)
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import raise_input_error

RIDGE_OFFSET = 1e-6  #: Added to the ridge of `feature_map_reconstruction`, as in the authors' code.


def reshape_to_positions(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """Reshape the rows to feature maps with an axis of spatial positions, height times width.

    Returns:
        support: (episodes, n_support, positions, channels) float64.
        query: (episodes, n_queries, positions, channels) float64.

    Raises:
        InputError: The rows are not feature maps: the episodes have no shape.
    """
    if episodes.shape is None:
        remedy = "Make maps by `protonet.episodes extract --maps`, or leave this method out."
        raise_input_error("shape", "be known", None, remedy)
    channels, height, width = episodes.shape
    sizes = channels, height * width
    support, query = (rows.double().unflatten(2, sizes).transpose(2, 3) for rows in (episodes.support, episodes.query))
    return support, query


def feature_map_reconstruction(
    episodes: Episodes, *, ridge: Positive = 1.0, shrinkage: Positive = 1.0, scale: Positive = 1.0
) -> Tensor:
    """Classify by the error of a ridge regression that predicts a query's feature map from positions of a class's maps.

    The paper learns the three settings together with the encoder; the defaults are their initial values. As in its code
    for ResNet-12, features are divided by the square root of the channels.

    Args:
        ridge: The exponential of the paper's alpha, > 0. The ridge of a class is this times its number of positions, of
            all support rows, over the number of channels.
        shrinkage: The exponential of the paper's beta, > 0: the factor on the predictions of the regression.
        scale: The paper's gamma, > 0: the factor on the logits.

    Source: Wertheimer, Tang and Hariharan, "Few-shot classification with feature map reconstruction networks" (2021),
        eqs. 4 to 8. https://arxiv.org/abs/2012.01506
    """
    support, query = reshape_to_positions(episodes)
    n_positions, channels = query.shape[2:]
    support, query = (maps.flatten(1, 2) / channels**0.5 for maps in (support, query))  # (episodes, ., channels)
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype)  # (episodes, n_support, n_way)
    gram, inner = support @ support.transpose(1, 2), query @ support.transpose(1, 2)
    norms = query.square().sum(dim=2)  # (episodes, n_queries * positions)
    eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    logits = []
    for inside in hot.repeat_interleave(n_positions, dim=1).unbind(2):  # (episodes, n_support * positions), per class
        masked_gram = gram * inside[:, :, None] * inside[:, None, :]
        penalty = ridge * inside.sum(dim=1) / channels + RIDGE_OFFSET
        across = inner * inside[:, None, :]
        # In the space of the class's positions, which are fewer than channels: eq. 8. Other positions have zeros.
        weights = torch.linalg.solve(masked_gram + penalty[:, None, None] * eye, across.transpose(1, 2)).transpose(1, 2)
        fit, size = (weights * across).sum(dim=2), (weights @ masked_gram * weights).sum(dim=2)
        distances = norms - 2 * shrinkage * fit + shrinkage**2 * size
        logits.append(-scale * distances.unflatten(1, (-1, n_positions)).mean(dim=2))
    return torch.stack(logits, dim=2).to(episodes.query.dtype)


def cross_transformers(episodes: Episodes, *, temperature: Positive | None = None) -> Tensor:
    """Classify by the distances between a query's positions and attention-weighted means of a class's positions.

    The paper trains linear maps from features to keys and values together with the encoder. Here, the features
    themselves are keys and values.

    Args:
        temperature: > 0, divides the inner products before the softmax of the attention. None takes the paper's value,
            the square root of the number of channels.

    Source: Doersch, Gupta and Zisserman, "CrossTransformers: spatially-aware few-shot transfer" (2020), sec. 3.2,
        without its linear heads. https://arxiv.org/abs/2007.11498
    """
    support, query = reshape_to_positions(episodes)
    n_positions, channels = query.shape[2:]
    support, query = support.flatten(1, 2), query.flatten(1, 2)  # (episodes, rows * positions, channels)
    labels = episodes.support_labels.repeat_interleave(n_positions, dim=1)
    hot = one_hot(labels, episodes.n_way, query.dtype)  # (episodes, n_support * positions, n_way)
    inner = query @ support.transpose(1, 2)
    # A softmax over the positions of each class: every column is of one class.
    logits = inner / (channels**0.5 if temperature is None else temperature)
    index = labels[:, None].expand_as(logits)
    largest = logits.new_full((*query.shape[:2], episodes.n_way), -torch.inf).scatter_reduce(2, index, logits, "amax")
    attention = (logits - largest.gather(2, index)).exp()
    attention = attention / (attention @ hot).gather(2, index)
    # Squared distances to the means, from inner products.
    within = support @ support.transpose(1, 2) * (hot @ hot.transpose(1, 2))
    size = (attention @ within - 2 * inner) * attention @ hot  # (episodes, n_queries * positions, n_way)
    distances: Tensor = query.square().sum(dim=2, keepdim=True) + size
    return -distances.view(*episodes.query.shape[:2], n_positions, -1).mean(dim=2).to(episodes.query.dtype)


def deepbdc(episodes: Episodes, *, scale: Positive | None = None) -> Tensor:
    """Classify by prototypes of feature maps that are represented by Brownian distance covariances of their channels.

    Each channel is a vector over the positions. Distances between channels, centred along rows and columns of their
    matrix, are the covariances. As in the authors' code for ResNet-12, channels are not reduced by a trained layer. At
    one shot the logits are inner products, otherwise minus squared distances to the class means, as in the code.

    Args:
        scale: > 0, the factor on squared distances between channels. The paper learns it; None takes the paper's
            initial value, 1 over twice the number of positions.

    Source: Xie, Long, Lv, Wang and Li, "Joint distribution matters: deep Brownian distance covariance for few-shot
        classification" (2022), sec. 3. https://arxiv.org/abs/2204.04567
    """
    support, query = reshape_to_positions(episodes)
    channels = support.shape[3]
    n_covariances = channels * (channels + 1) // 2  # of a row
    # Maximum number of covariances between channels in memory, but at least those of one row.
    covariances_per_block = 2**24
    max_episodes = max(1, covariances_per_block // (n_covariances * support.shape[1]))
    max_queries = max(1, covariances_per_block // (n_covariances * max_episodes))
    one_shot = support.shape[1] == episodes.n_way
    logits = []
    blocks = (tensor.split(max_episodes) for tensor in (support, query, episodes.support_labels))
    for some_support, some_query, labels in zip(*blocks, strict=True):
        covariances = _compute_distance_covariances(some_support, scale).to(episodes.support)
        prototypes = support_means(replace(episodes, support=covariances, support_labels=labels))
        logits_of_block = []
        for some in some_query.split(max_queries, dim=1):
            rows = _compute_distance_covariances(some, scale).to(episodes.query)
            similarities = rows @ prototypes.transpose(1, 2) if one_shot else -squared_distances(rows, prototypes)
            logits_of_block.append(similarities)
        logits.append(torch.cat(logits_of_block, dim=1))
    return torch.cat(logits)


def _compute_distance_covariances(maps: Tensor, scale: float | None) -> Tensor:
    """Compute distance covariances (episodes, n, channel pairs) of feature maps (episodes, n, positions, channels)."""
    n_positions, channels = maps.shape[2:]
    factor = 1 / (2 * n_positions) if scale is None else scale
    first, second = torch.triu_indices(channels, channels, device=maps.device)
    matrices = []
    # Added to squared distances before the root, as in the authors' code.
    distance_offset = 1e-5
    # Maximum number of distances between channels in memory, but at least those of one row.
    distances_per_block = 2**22
    for some in maps.flatten(0, 1).split(max(1, distances_per_block // channels**2)):
        gram = some.transpose(1, 2) @ some  # (rows, channels, channels)
        norms = gram.diagonal(dim1=1, dim2=2)
        squares = (norms[:, :, None] + norms[:, None, :] - 2 * gram).clamp_min(0)
        distances = (factor * squares + distance_offset).sqrt()
        means = distances.mean(dim=2, keepdim=True)
        centred = distances - means - means.transpose(1, 2) + means.mean(dim=1, keepdim=True)
        matrices.append(centred[:, first, second])
    covariances: Tensor = torch.cat(matrices).unflatten(0, maps.shape[:2])
    return covariances


def deepemd(
    episodes: Episodes,
    *,
    scale: Positive = 12.5,
    steps: Count = 100,
    batch_size: PositiveCount = 4,
    learning_rate: Positive = 100.0,
    momentum: BelowOne = 0.9,
    dampening: Fraction = 0.9,
    seed: int = 0,
) -> Tensor:
    """Classify by the earth mover's distance between the positions of a query's and a class's feature maps.

    The cost of a move is 1 minus the cosine of two positions, each centred over its channels. The weight of a position
    is its inner product with the mean of the other feature map. At one shot, a class is the feature map of its support
    row. With more shots, the feature maps of the classes are the weights of the paper's structured layer: they start at
    the class means, and are trained on the support rows. All defaults are those of the authors' code.

    Args:
        scale: The factor on the logits, > 0, which the authors call a temperature.
        steps: Passes over the support rows in the training of classes with several rows, >= 0; 0 for class means.
        batch_size: Rows per step, >= 1; the last step of a pass has the remaining rows.
        learning_rate: > 0.
        momentum: In [0, 1).
        dampening: In [0, 1]; gradients enter the momentum times 1 - dampening.
        seed: The seed of the order of the rows in each pass, the same in every episode.

    Source: Zhang, Cai, Lin and Shen, "DeepEMD: few-shot image classification with differentiable earth mover's distance
        and structured classifiers" (2020), sec. 3, with the 1e-3 and 1e-5 that its code adds to weights.
        https://arxiv.org/abs/2003.06777
    """
    support, query = reshape_to_positions(episodes)
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype)  # (episodes, n_support, n_way)
    classes = torch.einsum("esw,espc->ewpc", hot / hot.sum(dim=1, keepdim=True), support)
    n_support = support.shape[1]
    orders = draw_row_orders(steps * (n_support > episodes.n_way), n_support, torch.Generator().manual_seed(seed))
    velocity, gradient_weight = torch.zeros_like(classes), 1.0  # the first gradient is not dampened
    for order in orders.to(support.device):
        for rows in order.split(batch_size):
            gradient = _compute_class_gradient(support[:, rows], classes, hot[:, rows], scale)
            velocity = momentum * velocity + gradient_weight * gradient
            classes = classes - learning_rate * velocity
            gradient_weight = 1 - dampening
    return compute_emd_logits(query, classes, scale).to(episodes.query.dtype)


def _compute_class_gradient(rows: Tensor, classes: Tensor, hot: Tensor, scale: float) -> Tensor:
    """Compute the gradient of the mean cross-entropy with respect to ``classes``; flows and weights are constants."""
    with torch.enable_grad():
        classes = classes.detach().requires_grad_()
        losses = -(compute_emd_logits(rows, classes, scale).log_softmax(dim=2) * hot).sum(dim=2)
        (gradient,) = torch.autograd.grad(losses.mean(dim=1).sum(), classes)
    return gradient


def compute_emd_logits(rows: Tensor, classes: Tensor, scale: float) -> Tensor:
    """Compute logits (episodes, n, n_way) from the earth mover's distances between feature maps of rows and classes.

    A logit is ``scale`` times the mean cosine along the optimal flow from the positions of the row to those of the
    class. Rows are (episodes, n, positions, channels), classes (episodes, n_way, positions, channels).
    """
    n_positions = rows.shape[2]
    unit = [F.normalize(maps - maps.mean(dim=3, keepdim=True), dim=3) for maps in (rows, classes)]
    cosines = torch.einsum("enpc,ewqc->enwpq", *unit)
    # Added to the weights of positions, as in the authors' code.
    position_weight_offset = 1e-3 + 1e-5
    # Number of flows, one per pair of positions, that are computed at a time, to fit into processor caches.
    flows_per_block = 2**17
    with torch.no_grad():
        supply = torch.einsum("enpc,ewc->enwp", rows, classes.mean(dim=2)).relu() + position_weight_offset
        demand = torch.einsum("ewqc,enc->enwq", classes, rows.mean(dim=2)).relu() + position_weight_offset
        weights = (n_positions * weight / weight.sum(dim=3, keepdim=True) for weight in (supply, demand))
        n_problems = max(1, flows_per_block // n_positions**2)
        problems = (part.flatten(0, 2).split(n_problems) for part in (1 - cosines, *weights))
        flows = torch.cat([solve_optimal_transport(*some) for some in zip(*problems, strict=True)]).view_as(cosines)
    return scale / n_positions * (cosines * flows).sum(dim=(3, 4))


def solve_optimal_transport(costs: Tensor, supply: Tensor, demand: Tensor) -> Tensor:
    """Minimise ``sum(costs * flow)`` over flows >= 0 whose rows sum to the supply and whose columns to the demand.

    The algorithm is Mehrotra's predictor-corrector method. It starts at flows and dual prices that satisfy all
    equations, so that it only has to close the duality gap, the sum of flows times slacks.

    Args:
        costs: (problems, n, m) float64.
        supply: (problems, n), > 0.
        demand: (problems, m), > 0, with the sum of the supply.

    Returns:
        The optimal flows (problems, n, m).

    Source: Nocedal and Wright, "Numerical optimization" (2006), alg. 14.3, for transport.
    """
    flow = supply[:, :, None] * demand[:, None, :] / supply.sum(dim=1)[:, None, None]
    slack = costs - costs.amin(dim=(1, 2), keepdim=True) + 1  # the costs less the prices of both ends
    first = (flow * slack).mean(dim=(1, 2), keepdim=True)
    for _ in range(MAX_INTERIOR_POINT_STEPS):
        gap = (flow * slack).mean(dim=(1, 2), keepdim=True)
        going = gap > INTERIOR_POINT_TOLERANCE * first
        if not bool(going.any()):
            break
        barrier_ratio = flow / slack
        sums = barrier_ratio.sum(dim=2, keepdim=True)
        # The coupling of the columns' prices through rows. Prices have no origin, so the last one is fixed. The
        # diagonal is the sum of the other entries, without a difference of nearly equal numbers.
        linked = barrier_ratio.transpose(1, 2) @ (barrier_ratio / sums)
        linked.diagonal(dim1=1, dim2=2).zero_()
        factor, failed = torch.linalg.cholesky_ex((torch.diag_embed(linked.sum(dim=2)) - linked)[:, :-1, :-1])
        going = going & (failed == 0)[:, None, None]  # flows stay where rounding leaves no step
        missing = supply - flow.sum(dim=2), demand - flow.sum(dim=1)  # rounding errors
        solve = partial(_solve_transport_step, slack, barrier_ratio, factor, missing)
        flow_step, slack_step = solve(flow * slack)
        predicted_flow = flow + compute_max_step_size(flow, flow_step) * flow_step
        predicted = predicted_flow * (slack + compute_max_step_size(slack, slack_step) * slack_step)
        centre = (predicted.mean(dim=(1, 2), keepdim=True) / gap) ** 3 * gap
        flow_step, slack_step = solve(flow * slack + flow_step * slack_step - centre)
        flow_size, slack_size = compute_max_step_size(flow, flow_step), compute_max_step_size(slack, slack_step)
        flow = (flow + BOUNDARY_FRACTION * flow_size * flow_step).where(going, flow)
        slack = (slack + BOUNDARY_FRACTION * slack_size * slack_step).where(going, slack)
    return flow


def _solve_transport_step(
    slack: Tensor, barrier_ratio: Tensor, factor: Tensor, missing: tuple[Tensor, Tensor], product: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the changes (problems, n, m) of flows and of slacks that lower their products by ``product``."""
    sums, free = barrier_ratio.sum(dim=2, keepdim=True), product / slack
    rows = (missing[0] + free.sum(dim=2))[:, :, None]
    columns = (missing[1] + free.sum(dim=1))[:, :, None] - barrier_ratio.transpose(1, 2) @ (rows / sums)
    prices = F.pad(torch.cholesky_solve(columns[:, :-1], factor), (0, 0, 0, 1))  # (problems, m, 1)
    rise = (rows - barrier_ratio @ prices) / sums + prices.transpose(1, 2)  # of the prices of both ends
    return barrier_ratio * rise - free, -rise
