"""Methods that assign equally many queries to each class: PT-MAP, protoLP and iLPC."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import one_hot, squared_distances, support_means
from protonet.episodes.methods.keywords import BelowOne, Count, Fraction, Positive, PositiveCount, PositiveFraction
from protonet.episodes.samplers.batch import Episodes

POWER_TRANSFORM_OFFSET = 1e-6  #: Added to the absolute features before the power, as in eq. 1 of PT-MAP's paper.


MIN_EXPONENT = -60  #: Minimum exponent of the kernel: exp(-60) is above 0 in float32. Our own choice.


def pt_map(
    episodes: Episodes,
    *,
    beta: Positive = 0.5,
    lambda_: Positive = 10.0,
    alpha: PositiveFraction = 0.2,
    n_epochs: Count = 20,
) -> Tensor:
    """Classify by prototypes that move, step by step, towards the means of balanced assignments of the queries.

    After the power transform only inner products matter. For speed, prototypes are thus stored as the coefficients of
    support means and queries. All defaults are those of the authors' code (test_standard.py). Logits are logarithms of
    the transport plan, in which each class has n_queries / n_way queries.

    Args:
        beta: The exponent of the power transform, > 0.
        lambda_: The inverse of the transport's entropy regularisation, > 0.
        alpha: The fraction of the way to the new means that prototypes move per step, in (0, 1].
        n_epochs: The number of steps, >= 0.

    Source: Hu, Gripon and Pateux, "Leveraging the feature distribution in transfer-based few-shot learning" (2020),
        eqs. 1, 3 and 6, alg. 1. https://arxiv.org/abs/2006.03806. Centring and negative features follow the authors'
        code and Lazarou et al. (2021).
    """
    query_gram, products_of_means, squares = _compute_inner_products(episodes, beta)
    hot = one_hot(episodes.support_labels, episodes.n_way, query_gram.dtype)
    count = hot.sum(dim=1)[..., None]  # (episodes, n_way, 1)
    n_queries = query_gram.shape[1]
    mass, quota = query_gram.new_ones(1), query_gram.new_full((), n_queries / episodes.n_way)
    # A prototype is ``rates`` times its support mean plus ``probabilities`` times the queries.
    rates, probabilities = torch.ones_like(count), torch.zeros_like(products_of_means)
    scale = torch.ones_like(count)
    for epoch in range(n_epochs + 1):
        products = torch.addcmul(probabilities @ query_gram, rates, products_of_means)  # (episodes, n_way, n_queries)
        cross = (probabilities * (products + rates * products_of_means)).sum(dim=2, keepdim=True)
        logits = lambda_ * (2 * products - (rates.square() * squares + cross))  # -lambda_ * d^2, but for a constant
        kernel = (logits - logits.amax(dim=1, keepdim=True)).clamp_min_(MIN_EXPONENT).exp_()
        scale = sinkhorn_scales(kernel, mass, quota, scale)  # continues from the last epoch: far fewer iterations
        if epoch < n_epochs:
            plan = kernel.mul_(scale)
            plan /= plan.sum(dim=1, keepdim=True)
            step = alpha / (count + plan.sum(dim=2, keepdim=True))
            rates = torch.addcmul((1 - alpha) * rates, step, count)
            probabilities.mul_(1 - alpha).addcmul_(step, plan)
    return (logits + scale.log()).log_softmax(dim=1).transpose(1, 2)


def _compute_inner_products(episodes: Episodes, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute inner products query-query, mean-query and mean-mean after the power transform; means are class means."""
    n_queries, dim = episodes.query.shape[1:]
    # Number of floats of queries that are transformed and multiplied at a time.
    max_query_floats_in_cache = 2**20
    size = max(1, max_query_floats_in_cache // (n_queries * dim))
    blocks = []
    for start in range(0, len(episodes.query), size):
        some = slice(start, start + size)
        support, query = power_transform(episodes.support[some], beta), power_transform(episodes.query[some], beta)
        means = support_means(replace(episodes, support=support, support_labels=episodes.support_labels[some]))
        turned = query.transpose(1, 2)
        blocks.append((query @ turned, means @ turned, means.square().sum(dim=2, keepdim=True)))
    # (episodes, n_queries, n_queries), (episodes, n_way, n_queries) and (episodes, n_way, 1)
    query_gram, products_of_means, squares = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
    return query_gram, products_of_means, squares


def power_transform(rows: Tensor, beta: float) -> Tensor:
    """Apply PT-MAP's preprocessing to rows (episodes, n, dim): power, unit norm, centring, unit norm.

    The absolute values of features are raised to the power ``beta`` > 0, with the features' signs. Then rows are scaled
    to unit norm, centred on their mean, and scaled to unit norm again.

    Source: Hu, Gripon and Pateux (2020), eq. 1.
    """
    rows = rows.abs().add_(POWER_TRANSFORM_OFFSET).pow_(beta).copysign_(rows)
    rows /= rows.norm(dim=2, keepdim=True)
    rows -= rows.mean(dim=1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    min_row_norm = 1e-12  # rows are divided by at least this norm
    return rows.div_(norms.clamp_min_(min_row_norm))


SINKHORN_TOLERANCE = 1e-4  #: Iterations end once no class's scale changes by this fraction. Our own choice.
#: Iterations also end once the relative change of each scale differs by at most this from the change before. If
#: classes are far apart, scales drift at a constant rate for hundreds of iterations without an effect on the plan. The
#: authors' code has such a criterion on row sums.
SINKHORN_MAX_DRIFT = 1e-6


def sinkhorn_scales(kernel: Tensor, query_mass: Tensor, class_quota: Tensor, scale: Tensor) -> Tensor:
    """Compute the factor (episodes, n_way, 1) of each class for which a transport plan satisfies the class quotas.

    The plan is ``kernel`` times the factors, with each row then scaled to its mass. Sinkhorn's iterations end for each
    episode separately.

    Args:
        kernel: (episodes, n_way, rows), > 0, the affinity of classes and rows.
        query_mass: (episodes, 1, rows), the sum over classes that each row has in the plan.
        class_quota: (episodes, n_way, 1), the sum over rows that each class gets. The sums of quotas and masses are
            equal.
        scale: (episodes, n_way, 1), > 0, the initial factors.

    Source: Cuturi, "Sinkhorn distances" (2013), alg. 1. https://arxiv.org/abs/1306.0895
    """
    max_iterations = 1000  # maximum number of iterations, as in PT-MAP's code (test_standard.py)
    last = torch.zeros_like(scale)
    for _ in range(max_iterations):
        row_scale = query_mass / (kernel * scale).sum(dim=1, keepdim=True)
        following = class_quota / (kernel * row_scale).sum(dim=2, keepdim=True)
        change = (following - scale) / following
        far = (change.abs() > SINKHORN_TOLERANCE) & ((change - last).abs() > SINKHORN_MAX_DRIFT)
        moving, last = far.any(dim=1, keepdim=True), change
        scale = torch.where(moving, following, scale)
        if not bool(moving.any()):
            break
    return scale


def proto_lp(
    episodes: Episodes,
    *,
    beta: Positive = 0.5,
    n_dims: PositiveCount = 40,
    lambda_: Positive = 10.0,
    gamma: Positive = 1.0,
    mixing_weight: Fraction = 0.6,
    alpha: PositiveFraction = 0.2,
    n_epochs: Count = 100,
    balanced: bool = True,
    paper: bool = False,
) -> Tensor:
    """Classify by prototypes that move towards means of the queries, weighted by labels propagated through a graph.

    Defaults are those of the authors' code for mini-ImageNet (test_standard_GSSL_lapshot.py). Logits are logarithms of
    the last assignments.

    Args:
        beta: The exponent of the power transform, > 0; negative features keep their sign.
        n_dims: The number of singular vectors to which rows are reduced, >= 1.
        lambda_: The factor on the squared distances to prototypes, > 0.
        gamma: The weight of the graph's Laplacian, > 0.
        mixing_weight: Weight of the propagated labels in the update of prototypes, in [0, 1]. The assignments to the
            nearest prototypes, from which the graph is built, have the remaining weight.
        alpha: The fraction of the way to the new means that prototypes move per step, in (0, 1].
        n_epochs: The number of steps, >= 0.
        balanced: Whether to balance assignments and propagated labels, so that each class gets equally many queries.
        paper: Whether to use the Laplacian of the paper, as the authors' test_standard_GSSL_lapshot_full.py does with
            gamma 0.05, mixing weight 0.7 and 50 steps.

    Source: Zhu and Koniusz, "Transductive few-shot learning with prototype-based label propagation by iterative graph
        refinement" (2023), sec. 3. https://arxiv.org/abs/2304.11598. Only the authors' code has the
        transform, the singular vectors, the Laplacian I - W of prototypes, and the mixing weight.
    """
    rows = _reduce_rows_by_svd(torch.cat([episodes.support, episodes.query], dim=1), beta, n_dims)
    n_support, n_queries, n_way = episodes.support.shape[1], episodes.query.shape[1], episodes.n_way
    hot = one_hot(episodes.support_labels, n_way, rows.dtype).transpose(1, 2)  # (episodes, n_way, n_support)
    count = hot.sum(dim=2, keepdim=True)
    prototypes = F.normalize(hot @ rows[:, :n_support] / count, dim=2)
    mass, quota = rows.new_ones(1), rows.new_full((), n_queries / n_way)
    scales = [torch.ones_like(count), torch.ones_like(count)]  # of the last assignments and labels: fewer iterations
    for epoch in range(n_epochs + 1):
        logits = -lambda_ * squared_distances(rows[:, n_support:], prototypes).transpose(1, 2)
        if balanced:
            kernel = (logits - logits.amax(dim=1, keepdim=True)).clamp_min(MIN_EXPONENT).exp()
            scales[0] = sinkhorn_scales(kernel, mass, quota, scales[0])
            logits += scales[0].log()
        if epoch == n_epochs:
            break
        assigned = logits.softmax(dim=1)  # (episodes, n_way, n_queries)
        label = _propagate_labels(torch.cat([hot, assigned], dim=2), count, gamma, paper=paper)[..., n_support:]
        label = label.clamp_min(torch.finfo(rows.dtype).tiny)
        if balanced:
            scales[1] = sinkhorn_scales(label, mass, quota, scales[1])
            label = label * scales[1]
        label = label / label.sum(dim=1, keepdim=True)
        joined = torch.cat([hot, mixing_weight * label + (1 - mixing_weight) * assigned], dim=2)
        prototypes = prototypes.lerp(joined @ rows / joined.sum(dim=2, keepdim=True), alpha)
    return logits.log_softmax(dim=1).transpose(1, 2).to(episodes.query.dtype)


def _reduce_rows_by_svd(rows: Tensor, beta: float, n_dims: int) -> Tensor:
    """Power-transform rows (episodes, n, dim), reduce them by SVD to ``n_dims``, centre and normalize them."""
    rows = rows.double()
    rows = F.normalize(rows.abs().add_(POWER_TRANSFORM_OFFSET).pow_(beta).copysign_(rows), dim=2)
    values, vectors = torch.linalg.eigh(rows @ rows.transpose(1, 2))
    n_singular = min(n_dims, *rows.shape[1:])
    rows = vectors[..., -n_singular:] * values[:, None, -n_singular:].clamp_min(0).sqrt()
    return F.normalize(rows - rows.mean(dim=1, keepdim=True), dim=2)


def _propagate_labels(assigned: Tensor, count: Tensor, gamma: float, *, paper: bool) -> Tensor:
    """Propagate the support's labels over the prototypes to all rows: (episodes, n_way, rows), like ``assigned``."""
    total = assigned @ assigned.transpose(1, 2)  # (episodes, n_way, n_way), Z^T Z
    walk = total / assigned.sum(dim=2)[:, None]
    identity = torch.eye(total.shape[1], dtype=total.dtype, device=total.device)
    laplacian = total - walk @ total if paper else identity - walk
    degree = torch.diag_embed(count[..., 0])
    labels_of_prototypes: Tensor = torch.linalg.solve(degree + gamma * laplacian, degree)  # (episodes, n_way, n_way)
    return labels_of_prototypes.transpose(1, 2) @ assigned


def ilpc(
    episodes: Episodes,
    *,
    beta: Positive = 0.5,
    n_neighbours: PositiveCount = 15,
    gamma: Positive = 3.0,
    alpha: BelowOne = 0.8,
    tau: Positive = 3.0,
    n_clean: PositiveCount = 3,
    n_steps: PositiveCount = 1000,
) -> Tensor:
    """Label the queries in rounds: in each round, the queries with the cleanest labels join the support.

    A round propagates the support's labels to the remaining queries, balances them, trains a linear classifier on all
    rows, and moves the queries whose labels it learns most easily to the support. All computations are on inner
    products of rows. Logits are logarithms of a query's row of the balanced transport plan, in the round in which it
    moved.

    Args:
        beta: The exponent of the power transform, > 0.
        n_neighbours: Number of neighbours of a row in the graph, >= 1; all other rows if there are fewer.
        gamma: The exponent of the cosines in the graph, > 0.
        alpha: How far labels spread over the graph, in [0, 1).
        tau: The exponent of the propagated labels, > 0; larger values lower their entropy.
        n_clean: Maximum number of queries per class that move to the support in a round, >= 1.
        n_steps: Number of steps of the classifier's gradient descent, >= 1.

    Source: Lazarou, Stathaki and Avrithis, "Iterative label cleaning for transductive and semi-supervised few-shot
        learning" (2021), sec. 3. https://arxiv.org/abs/2012.07962. Only the authors' code has all settings
        (test_arguments.py, iterative_graph_functions.py); the constant learning rate; a class's quota, n_queries /
        n_way, minus the queries that moved. Their code starts the bias at random and stops when fewer than five queries
        move; here it starts at 0 and all queries move.
    """
    rows = power_transform(torch.cat([episodes.support, episodes.query], dim=1), beta)
    gram = rows @ rows.transpose(1, 2)
    n_way, n_support, n_queries = episodes.n_way, episodes.support.shape[1], episodes.query.shape[1]
    spread = _propagation_matrix(gram, n_neighbours, gamma, alpha)[..., n_support:]  # (episodes, rows, n_queries)
    hot = one_hot(episodes.support_labels, n_way, rows.dtype).transpose(1, 2)  # (episodes, n_way, n_support)
    labels = F.pad(hot, (0, n_queries))  # (episodes, n_way, rows), zeros for rows without a label
    logits = torch.zeros_like(labels[..., n_support:])
    moved = labels[..., n_support:]  # (episodes, n_way, n_queries), a view: writing to it writes to labels
    for _ in range(n_queries):
        left = 1 - moved.sum(dim=1, keepdim=True)  # (episodes, 1, n_queries)
        if not bool(left.any()):
            break
        reached = F.normalize((labels @ spread).clamp_min(0), p=1, dim=1)
        kernel = reached.clamp_min(torch.finfo(rows.dtype).eps) ** tau
        quota = (n_queries / n_way - moved.sum(dim=2, keepdim=True)).clamp_min(0)
        quota = quota * (left.sum(dim=2, keepdim=True) / quota.sum(dim=1, keepdim=True))
        plan = kernel * sinkhorn_scales(kernel, left, quota, torch.ones_like(quota))  # up to the scale of its rows
        guess = one_hot(plan.argmax(dim=1), n_way, rows.dtype).transpose(1, 2) * left
        guesses = torch.cat([hot, moved + guess], dim=2)
        losses = _compute_average_losses(gram, labels, guesses, n_steps)[:, None, n_support:]
        rank = losses.where(guess > 0, torch.inf).argsort(dim=2, stable=True).argsort(dim=2)
        clean = guess * (rank < n_clean)
        logits = logits.where(clean.sum(dim=1, keepdim=True) == 0, plan.clamp_min(torch.finfo(rows.dtype).tiny).log())
        moved += clean
    return logits.log_softmax(dim=1).transpose(1, 2)


def _propagation_matrix(gram: Tensor, n_neighbours: int, gamma: float, alpha: float) -> Tensor:
    """Compute (I - alpha W)^-1 for the nearest-neighbour graph W of rows, whose cosines are ``gram``."""
    n = gram.shape[1]
    eye = torch.eye(n, dtype=gram.dtype, device=gram.device)
    others = gram.masked_fill(eye > 0, -1)
    nearest = others.topk(min(n_neighbours, n - 1), dim=2)
    affinity = torch.zeros_like(gram).scatter_(2, nearest.indices, nearest.values.clamp_min(0) ** gamma)
    affinity = affinity + affinity.transpose(1, 2)
    root = affinity.sum(dim=2, keepdim=True).clamp_min(torch.finfo(gram.dtype).eps).rsqrt()
    graph = root * affinity * root.transpose(1, 2)
    inverse: Tensor = torch.linalg.inv(eye - alpha * graph)
    return inverse


def _compute_average_losses(gram: Tensor, known: Tensor, labels: Tensor, n_steps: int) -> Tensor:
    """Compute each row's cross-entropy in nats, averaged over the training steps of a linear classifier.

    Source: Huang et al., "O2U-Net: a simple noisy label detection approach for deep neural networks" (2019), sec. 3.
    """
    # The settings of SGD are those of the authors' code (iterative_graph_functions.py).
    learning_rate = 0.1
    momentum = 0.9
    weight_decay = 5e-4  # the outputs times this factor are added to the gradient of the outputs
    products = known @ gram  # (episodes, n_way, rows), of the sum of a class's rows with each row
    norms = (known * products).sum(dim=2, keepdim=True).clamp_min(torch.finfo(gram.dtype).eps).sqrt()
    outputs, velocity = products / norms, torch.zeros_like(products)
    kernel = (gram + 1) / gram.shape[1]
    total = torch.zeros_like(products)
    for _ in range(n_steps):
        log_probabilities = outputs.log_softmax(dim=1)
        total += log_probabilities
        gradient = torch.baddbmm(outputs, log_probabilities.exp() - labels, kernel, beta=weight_decay)
        velocity = gradient.add_(velocity, alpha=momentum)
        outputs.sub_(velocity, alpha=learning_rate)
    return -(labels * total).sum(dim=1) / n_steps
