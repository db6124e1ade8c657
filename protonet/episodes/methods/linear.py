"""Linear classifiers of the support, or of features sampled around it; and the Mahalanobis distance."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import cosines, draw_row_orders, one_hot, reduce_to_span, squared_distances
from protonet.episodes.methods.keywords import BelowOne, Fraction, NonNegative, Positive, PositiveCount, SearchSpace
from protonet.episodes.samplers.batch import BaseClasses, Episodes
from protonet.errors import raise_input_error


def ridge_regression(
    episodes: Episodes, *, penalty: Positive = 1.0, scale: Positive = 10.0, shift: float = 0.0
) -> Tensor:
    """Classify by ridge regression from rows of unit norm, with a bias feature, to the one-hot labels.

    The paper learns the three settings together with the encoder. The defaults and the unit norm are our own choice,
    for encoders that were not trained with them.

    Args:
        penalty: The paper's lambda, > 0: the ridge.
        scale: The paper's alpha, > 0: the factor on the predicted labels.
        shift: The paper's beta: added to all logits.

    Source: Bertinetto, Henriques, Torr and Vedaldi, "Meta-learning with differentiable closed-form solvers" (2019),
        eqs. 5 and 6. https://arxiv.org/abs/1805.08136
    """
    rows = F.normalize(episodes.support, dim=2)
    gram = rows @ rows.transpose(1, 2) + 1  # X X^T (episodes, n_support, n_support), with the ones of the bias
    target = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    coefficients: Tensor = torch.linalg.solve(gram + penalty * eye, target)
    return scale * (cosines(episodes.query, rows) + 1) @ coefficients + shift  # eq. 6


def logistic_regression(
    episodes: Episodes, *, inverse_penalty: Annotated[Positive, SearchSpace((0.1, 1.0, 10.0, 100.0))] = 1.0
) -> Tensor:
    """Classify by L2-penalised logistic regression on rows of unit norm, without a penalty on the intercept.

    Args:
        inverse_penalty: scikit-learn's C, > 0: the weight of the sum of the rows' losses against half the squared
            weights. 1 is scikit-learn's default.

    Source: Tian, Wang, Krishnan, Tenenbaum and Isola, "Rethinking few-shot image classification: a good embedding is
        all you need?" (2020), eq. 4 and sec. 3.2. https://arxiv.org/abs/2003.11539
    """
    rows = F.normalize(episodes.support, dim=2)
    target = one_hot(episodes.support_labels, episodes.n_way, rows.dtype)
    span = reduce_to_span(rows)
    weight, intercept = fit_logistic(span, target, inverse_penalty=inverse_penalty)
    # Where the gradient is zero, the weights are these combinations of the rows, in any coordinates.
    residual = inverse_penalty * (target - (span @ weight + intercept).softmax(dim=2))
    return cosines(episodes.query, rows) @ residual + intercept


def fit_logistic(
    rows: Tensor, target: Tensor, *, inverse_penalty: Positive = 1.0, decrement: Positive = 1e-9
) -> tuple[Tensor, Tensor]:
    """Fit L2-penalised logistic regression: minimise C * (sum of cross-entropies) + (sum of squared weights) / 2.

    The algorithm is Newton's method with conjugate gradients. The intercept is not penalised.

    Args:
        rows: (episodes, n, dim).
        target: (episodes, n, n_way), one-hot.
        inverse_penalty: C, > 0.
        decrement: Steps end once the next step would lower the objective by less than half of this, in nats.

    Returns:
        weight: (episodes, dim, n_way).
        intercept: (episodes, 1, n_way).

    Source: Nocedal and Wright, "Numerical optimization" (2006), alg. 7.1.
    """
    max_steps = 30  # maximum number of Newton steps
    max_halvings = 20  # maximum number of times that a step is halved because it would increase the loss
    loss_tolerance_epsilons = 8  # relative increases of the loss by fewer epsilons count as rounding errors
    mean = rows.mean(dim=1, keepdim=True)  # goes into the intercept: centred rows need fewer steps
    rows = torch.cat([rows - mean, torch.ones_like(rows[:, :, :1])], dim=2)  # (episodes, n, dim + 1)
    penalty = rows.new_full((rows.shape[2], 1), 1 / inverse_penalty)
    penalty[-1] = 0  # the intercept's
    weight = rows.new_zeros(len(rows), rows.shape[2], target.shape[2])
    logits = torch.zeros_like(target)
    loss = _compute_objective(logits, target, weight, penalty)
    going = torch.ones_like(loss, dtype=torch.bool)  # (episodes, 1, 1): converged episodes stay as they are
    for _ in range(max_steps):
        probability = logits.softmax(dim=2)
        gradient = _multiply_transpose(rows, probability - target) + penalty * weight
        # A constant on all classes changes no probability; conjugate gradients would follow one from rounding errors.
        gradient = gradient - gradient.mean(dim=2, keepdim=True)
        step = _compute_newton_step(rows, probability, penalty, gradient)
        going = going & (-_inner_product(gradient, step) > decrement)
        if not bool(going.any()):
            break
        size, change = going.to(rows.dtype), rows @ step
        for _ in range(max_halvings):
            trial = _compute_objective(logits + size * change, target, weight + size * step, penalty)
            worse = trial > loss * (1 + loss_tolerance_epsilons * torch.finfo(loss.dtype).eps)
            if not bool(worse.any()):
                break
            size = torch.where(worse, size / 2, size)
        weight, logits, loss = weight + size * step, logits + size * change, trial
    weight, intercept = weight[:, :-1], weight[:, -1:]
    return weight, intercept - mean @ weight


def _compute_objective(logits: Tensor, target: Tensor, weight: Tensor, penalty: Tensor) -> Tensor:
    """Compute the objective of `fit_logistic` divided by C: sum of cross-entropies plus penalty, (episodes, 1, 1)."""
    return 0.5 * _inner_product(penalty * weight, weight) - _inner_product(logits.log_softmax(dim=2), target)


def _compute_newton_step(rows: Tensor, probability: Tensor, penalty: Tensor, gradient: Tensor) -> Tensor:
    """Solve Hessian @ step = -gradient, (episodes, dim, n_way), by conjugate gradients."""
    max_conjugate_gradient_steps = 50  # maximum number of conjugate gradient steps per Newton step
    max_relative_residual = 0.1  # conjugate gradients end at this fraction of the initial residual
    step, residual = torch.zeros_like(gradient), -gradient
    direction, square = residual, _inner_product(residual, residual)
    enough = max_relative_residual**2 * square
    for _ in range(max_conjugate_gradient_steps):
        going = square > enough
        if not bool(going.any()):
            break
        change = probability * (rows @ direction)
        change = change - probability * change.sum(dim=2, keepdim=True)
        curved = _multiply_transpose(rows, change) + penalty * direction
        size = torch.where(going, square / _inner_product(direction, curved), 0)
        step, residual = step + size * direction, residual - size * curved
        last, square = square, _inner_product(residual, residual)
        direction = residual + torch.where(going, square / last, 0) * direction
    return step


def _multiply_transpose(rows: Tensor, change: Tensor) -> Tensor:
    """Compute ``rows.transpose(1, 2) @ change`` as a product in the memory order of the rows, for speed."""
    return (change.transpose(1, 2) @ rows).transpose(1, 2)


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute the inner product of each episode's two matrices, (episodes, 1, 1)."""
    return (a * b).sum(dim=(1, 2), keepdim=True)


def linear_probe(episodes: Episodes, *, inverse_penalty: Positive = 0.316) -> Tensor:
    """Classify by L2-penalised logistic regression on rows that are not normalised.

    The effect of the penalty depends on the scale of the features. The intercept is not penalised.

    Args:
        inverse_penalty: scikit-learn's C, > 0. The authors' code uses 0.316, found on ImageNet.

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021), sec. 3.2 and
        A.3, and the example of its code (README.md, "Linear-probe evaluation"). https://arxiv.org/abs/2103.00020
    """
    # In float64: the penalty is the same at any scale of the features, and float32 would lose it beside large squares.
    support, query = project_to_span(episodes.support.double(), episodes.query.double())
    target = one_hot(episodes.support_labels, episodes.n_way, support.dtype)
    weight, intercept = fit_logistic(support, target, inverse_penalty=inverse_penalty)
    return (query @ weight + intercept).to(episodes.query.dtype)


def mahalanobis(episodes: Episodes, *, ridge: Positive = 1.0) -> Tensor:
    """Classify by half the squared Mahalanobis distance to the class means.

    The covariance of a class of n rows is the sum of n / (n + 1) times its own covariance (zero for a single row), 1 /
    (n + 1) times the covariance of all support rows, and the ridge. Covariances divide by the number of rows minus one.
    Distances are within the span of the support rows; the part of a query outside of it is equally far from all
    classes.

    Args:
        ridge: The paper's beta, > 0: the factor of the identity that is added to the covariance. The paper uses 1. It
            is increased where rounding errors would exceed it.

    Source: Bateni, Goyal, Masrani, Wood and Sigal, "Improved few-shot visual classification" (2020), eqs. 2 and 3.
        https://arxiv.org/abs/1912.03432
    """
    # In float64: the ridge is 1 at any scale of the features, and float32 would lose it beside large squares.
    support, query = project_to_span(episodes.support.double(), episodes.query.double())
    hot = one_hot(episodes.support_labels, episodes.n_way, support.dtype).transpose(1, 2)
    count = hot.sum(dim=2, keepdim=True)  # (episodes, n_way, 1)
    means = hot @ support / count  # (episodes, n_way, dim)
    n_support, dim = support.shape[1:]
    class_weight = count / (count + 1)  # lambda
    within = support[:, None] - means[:, :, None]  # (episodes, n_way, n_support, dim)
    within = within * ((class_weight / (count - 1).clamp_min(1)).sqrt() * hot)[..., None]
    centred = support - support.mean(dim=1, keepdim=True)
    task = centred.transpose(1, 2) @ centred / (n_support - 1)
    # (episodes, n_way, dim, dim)
    covariance = within.transpose(2, 3) @ within + (1 - class_weight)[..., None] * task[:, None]
    trace = covariance.diagonal(dim1=2, dim2=3).sum(dim=2)[..., None]
    # Minimum ridge of `mahalanobis`, in machine epsilons times the trace of the covariance. A smaller ridge would be
    # lost by rounding.
    min_ridge_in_epsilons = 4
    min_ridge = (min_ridge_in_epsilons * torch.finfo(support.dtype).eps * trace).clamp_min(ridge)
    factor = torch.linalg.cholesky(covariance + torch.diag_embed(min_ridge.expand(-1, -1, dim)))
    away = (query[:, None] - means[:, :, None]).transpose(2, 3)  # (episodes, n_way, dim, n_queries)
    whitened: Tensor = torch.linalg.solve_triangular(factor, away, upper=False)
    return -0.5 * whitened.square().sum(dim=2).transpose(1, 2).to(episodes.query.dtype)


def project_to_span(support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Project support and query rows to the span of the support, in min(n_support, dim) coordinates.

    Inner products with support rows stay the same.
    """
    span = reduce_to_span(support)
    if span is support:
        return support, query
    products = support @ query.transpose(1, 2)  # (episodes, n_support, n_queries)
    return span, torch.linalg.solve_triangular(span, products, upper=False).transpose(1, 2)


def linear_finetune(
    episodes: Episodes,
    *,
    n_epochs: PositiveCount = 100,
    batch_size: PositiveCount = 4,
    learning_rate: Positive = 0.01,
    momentum: BelowOne = 0.9,
    dampening: Fraction = 0.9,
    weight_decay: NonNegative = 0.001,
    zero: bool = False,
    seed: int = 0,
) -> Tensor:
    """Classify by a linear layer with bias, trained on the support rows by SGD with momentum as in torch.optim.SGD.

    Trained weights are linear combinations of the support rows and the initial weights. For speed, the function trains
    the coefficients of these combinations, on inner products of rows. Every episode uses the same mini-batches of row
    indices and the same initial weights. All defaults are those of the authors' code. The default learning rate is too
    high for features far from zero.

    Args:
        n_epochs: Passes over the support rows, >= 1.
        batch_size: Rows per step, >= 1; the last step of an epoch has the remaining rows.
        learning_rate: > 0.
        momentum: In [0, 1).
        dampening: In [0, 1]; gradients enter the momentum times 1 - dampening.
        weight_decay: >= 0, of weights and biases.
        zero: Whether the initial weights are zero instead of random. Random initial weights affect predictions at one
            shot nearly as much as training does. Zero is our own choice.
        seed: The seed of the initial weights and of the order of the rows in each epoch.

    Source: Chen, Liu, Kira, Wang and Huang, "A closer look at few-shot classification" (2019), Baseline, sec. 3.2 and
        4.1, https://arxiv.org/abs/1904.04232, with the initial weights of its code (baselinefinetune.py), which are
        those of torch.nn.Linear.
    """
    support, query = episodes.support, episodes.query
    generator = torch.Generator().manual_seed(seed)
    # The initial weights, the bias last, are the same in all episodes.
    drawn = 2 * torch.rand(episodes.n_way, support.shape[2] + 1, generator=generator, dtype=torch.float64) - 1
    start = (drawn * (not zero) / support.shape[2] ** 0.5).to(support)  # (n_way, dim + 1)
    # Episodes come last in memory: steps on a few rows of many small matrices are then on contiguous numbers.
    target = one_hot(episodes.support_labels, episodes.n_way, support.dtype).permute(1, 2, 0).contiguous()
    gram = support @ support.transpose(1, 2) + 1  # the bias is the weight of a feature that is one
    gram = gram.permute(1, 2, 0).contiguous()  # (n_support, n_support, episodes)
    initial_logits = F.linear(support, start[:, :-1], start[:, -1]).permute(1, 2, 0).contiguous()
    initial_factor, factor_velocity = 1.0, 0.0  # of the initial weights in the layer
    coefficients, velocity = torch.zeros_like(target), torch.zeros_like(target)  # (n_support, n_way, episodes)
    gradient_weight = 1.0  # the first gradient is not dampened
    for order in draw_row_orders(n_epochs, support.shape[1], generator).to(support.device):
        for rows in order.split(batch_size):
            logits = (gram.index_select(0, rows)[:, :, None] * coefficients).sum(dim=1)  # (rows, n_way, episodes)
            logits.add_(initial_logits.index_select(0, rows), alpha=initial_factor)
            error = logits.softmax(dim=1).sub_(target.index_select(0, rows))
            velocity.mul_(momentum).add_(coefficients, alpha=gradient_weight * weight_decay)
            velocity.index_add_(0, rows, error, alpha=gradient_weight / len(rows))
            coefficients.sub_(velocity, alpha=learning_rate)
            factor_velocity = momentum * factor_velocity + gradient_weight * weight_decay * initial_factor
            initial_factor -= learning_rate * factor_velocity
            gradient_weight = 1 - dampening
    learned = (query @ support.transpose(1, 2) + 1) @ coefficients.permute(2, 0, 1)
    return learned + initial_factor * F.linear(query, start[:, :-1], start[:, -1])


def baseline_pp(
    episodes: Episodes,
    *,
    scale: Positive = 2.0,
    n_epochs: PositiveCount = 100,
    batch_size: PositiveCount = 4,
    learning_rate: Positive = 0.01,
    momentum: BelowOne = 0.9,
    dampening: Fraction = 0.9,
    weight_decay: NonNegative = 0.001,
    seed: int = 0,
) -> Tensor:
    """Classify by cosines to class weights times the weights' lengths, both trained on the support rows by SGD.

    As in weight normalisation, the direction and the length of a class weight are separate parameters. Momentum is that
    of torch.optim.SGD. Directions stay in the span of the support rows and the initial directions. For speed, the
    function trains their coordinates in this span, on inner products of rows. Every episode uses the same mini-batches
    of row indices and the same initial weights. All defaults are those of the authors' code; its scale of 2 is for at
    most 200 classes. Rows are not centred: if features have a common mean, cosines are nearly equal, and
    the method is hardly better than chance.

    Args:
        scale: > 0, the factor on the logits.
        n_epochs: Passes over the support rows, >= 1.
        batch_size: Rows per step, >= 1; the last step of an epoch has the remaining rows.
        learning_rate: > 0.
        momentum: In [0, 1).
        dampening: In [0, 1]; gradients enter the momentum times 1 - dampening.
        weight_decay: >= 0, of directions and lengths.
        seed: The seed of the initial weights and of the order of the rows in each epoch.

    Source: Chen, Liu, Kira, Wang and Huang, "A closer look at few-shot classification" (2019), Baseline++, sec. 3.2 and
        4.1, https://arxiv.org/abs/1904.04232, with the lengths of its code (backbone.py, issues 4 and 8), which takes
        weight normalisation: Salimans and Kingma (2016), eqs. 2 and 3, https://arxiv.org/abs/1602.07868
    """
    rows, query = (F.normalize(features, dim=2) for features in (episodes.support, episodes.query))
    n_support, n_way, dim = rows.shape[1], episodes.n_way, rows.shape[2]
    generator = torch.Generator().manual_seed(seed)
    drawn = 2 * torch.rand(n_way, dim, generator=generator, dtype=torch.float64) - 1  # as torch.nn.Linear starts
    start = (drawn / dim**0.5).to(rows).expand(len(rows), -1, -1)
    basis = torch.cat([rows, start], dim=1)  # (episodes, n_support + n_way, dim), of the directions
    inner = basis @ basis.transpose(1, 2)
    # Episodes come last in memory: steps on a few rows of many small matrices are then on contiguous numbers.
    target = one_hot(episodes.support_labels, n_way, rows.dtype).permute(2, 1, 0).contiguous()
    gram = inner.permute(1, 2, 0).contiguous()  # (n_support + n_way, n_support + n_way, episodes)
    eye = torch.eye(n_way, dtype=rows.dtype, device=rows.device)
    direction = F.pad(eye, (n_support, 0))[..., None].expand(-1, -1, len(rows)).clone()
    length = torch.linalg.vector_norm(start, dim=2).T[:, None].clone()  # (n_way, 1, episodes)
    velocity, length_velocity = torch.zeros_like(direction), torch.zeros_like(length)
    product_velocity = torch.zeros_like(direction)  # inner products of the velocity with the basis
    gradient_weight = 1.0  # the first gradient is not dampened
    for order in draw_row_orders(n_epochs, n_support, generator).to(rows.device):
        # Inner products of the directions with the basis, recomputed in each epoch against rounding errors.
        products = (direction.permute(2, 0, 1) @ inner).permute(1, 2, 0).contiguous()
        for batch in order.split(batch_size):
            norm = (direction * products).sum(dim=1, keepdim=True).sqrt_()
            cosine = products.index_select(1, batch) / norm  # (n_way, rows, episodes)
            probability = (scale * length * cosine).softmax(dim=0)
            error = probability.sub_(target.index_select(1, batch)).mul_(scale / len(batch))
            length_gradient = (error * cosine).sum(dim=1, keepdim=True)
            # The gradient of the direction is that of the weight, less its part along the direction.
            shrink = gradient_weight * (weight_decay - length_gradient * length / norm.square())
            error *= length / norm
            velocity.mul_(momentum).addcmul_(shrink, direction).index_add_(1, batch, error, alpha=gradient_weight)
            product_velocity.mul_(momentum).addcmul_(shrink, products)
            product_velocity.add_((error[:, :, None] * gram.index_select(0, batch)).sum(dim=1), alpha=gradient_weight)
            length_gradient.add_(length, alpha=weight_decay)
            length_velocity.mul_(momentum).add_(length_gradient, alpha=gradient_weight)
            direction.sub_(velocity, alpha=learning_rate)
            products.sub_(product_velocity, alpha=learning_rate)
            length.sub_(length_velocity, alpha=learning_rate)
            gradient_weight = 1 - dampening
    weight: Tensor = F.normalize(direction.permute(2, 0, 1) @ basis, dim=2) * (scale * length.permute(2, 0, 1))
    return query @ weight.transpose(1, 2)


def distribution_calibration(
    episodes: Episodes,
    *,
    power: Positive = 0.5,
    n_nearest: PositiveCount = 2,
    spread: NonNegative = 0.21,
    n_samples: PositiveCount = 750,
    seed: int = 0,
) -> Tensor:
    """Classify by logistic regression on the support rows and on features sampled from calibrated Gaussians.

    As in the authors' code (evaluate_DC.py), the features of base classes are not transformed by ``power``. The method
    therefore works badly on features whose size is far from one.

    Args:
        power: The exponent of Tukey's transform, > 0; negative features keep their sign. The authors' code
            uses 0.5.
        n_nearest: The paper's k: number of nearest base classes used for each support row, in [1, base classes].
            The authors' code uses 2.
        spread: The paper's alpha, >= 0, added to every entry of the covariances. The authors' code uses 0.21.
        n_samples: Features sampled per class, >= 1, shared equally among its support rows. The paper uses 750. With
            100, the method takes an eighth of the time and loses 5 points of accuracy at 1-shot on 640 ReLU features.
        seed: The seed of the samples; every episode and class uses the same normal numbers.

    Source: Yang, Liu and Xu, "Free lunch for few-shot learning: distribution calibration" (2021), eqs. 3 to 7.
        https://arxiv.org/abs/2101.06395
    """
    base = episodes.base
    if base is None:
        raise_input_error("base", "be known", None, "Give the experiment base classes, or leave this method out.")
    if n_nearest > len(base.rows_by_class.class_counts):
        limit = f"be at most the number of base classes ({len(base.rows_by_class.class_counts)})"
        raise_input_error("n_nearest", limit, n_nearest, "Ask for fewer.")
    # Maximum number of sampled features in memory, but at least one episode's.
    max_sampled_features = 2**24
    max_episodes = max(1, max_sampled_features // (episodes.n_way * n_samples * episodes.support.shape[2]))
    rows = (episodes.support, episodes.support_labels, episodes.query)
    logits = []
    for support, labels, query in zip(*(part.split(max_episodes) for part in rows), strict=True):
        some = replace(episodes, support=support, support_labels=labels, query=query)
        logits.append(_classify_by_calibration(some, base, power, n_nearest, spread, n_samples, seed))
    return torch.cat(logits)


def _classify_by_calibration(
    episodes: Episodes, base: BaseClasses, power: float, n_nearest: int, spread: float, n_samples: int, seed: int
) -> Tensor:
    """Compute logits (episodes, n_queries, n_way) of a batch of episodes whose sampled features fit into memory."""
    support, query = _apply_tukey_transform(episodes.support, power), _apply_tukey_transform(episodes.query, power)
    means = base.class_means.to(support.dtype)
    distances = squared_distances(support, means.expand(len(support), -1, -1))
    nearest = distances.topk(n_nearest, dim=2, largest=False).indices  # (episodes, n_support, n_nearest): eq. 5
    centres = (means[nearest].sum(dim=2) + support) / (n_nearest + 1)  # eq. 6

    members = one_hot(episodes.support_labels, episodes.n_way, torch.int64).transpose(1, 2)
    class_rows_first = members.argsort(dim=2, descending=True, stable=True)  # (episodes, n_way, n_support)
    turns = torch.arange(n_samples, device=support.device) % members.sum(dim=2, keepdim=True)
    source = class_rows_first.gather(2, turns)  # (episodes, n_way, n_samples): the support row of each sample
    episode = torch.arange(len(support), device=support.device).reshape(-1, 1, 1)

    generator = torch.Generator().manual_seed(seed)
    shape = (n_nearest, n_samples, int(base.rows_by_class.class_counts.max()))
    normal = torch.randn(shape, generator=generator, dtype=torch.float64).to(support)
    common = torch.randn(n_samples, 1, generator=generator, dtype=torch.float64).to(support)
    samples = centres[episode, source] + spread**0.5 * common  # (episodes, n_way, n_samples, dim)
    # ``chosen`` (episodes, n_way, n_samples, n_nearest) are positions in ``used``, the base classes near any row.
    used, chosen = nearest[episode, source].unique(return_inverse=True)
    base_classes_per_block = 8  # number of base classes whose noise is computed at a time
    for first in range(0, len(used), base_classes_per_block):
        deviations = _compute_scaled_deviations(base, used[first : first + base_classes_per_block], support.dtype)
        for rank in range(n_nearest):
            noise = normal[rank] @ deviations / n_nearest**0.5  # (classes, n_samples, dim)
            position = chosen[..., rank] - first
            in_block = ((position >= 0) & (position < len(noise))).nonzero(as_tuple=True)
            samples[in_block] += noise[position[in_block], in_block[2]]

    rows = torch.cat([support, samples.flatten(1, 2)], dim=1)
    sampled = torch.arange(episodes.n_way, device=support.device).repeat_interleave(n_samples).expand(len(support), -1)
    target = one_hot(torch.cat([episodes.support_labels, sampled], dim=1), episodes.n_way, support.dtype)
    # The logistic regression of `distribution_calibration` ends at this ``decrement`` (see `fit_logistic`), in nats.
    # The effect is far below the sampling error.
    calibration_decrement = 1e-2
    weight, intercept = fit_logistic(rows, target, decrement=calibration_decrement)
    return query @ weight + intercept


def _apply_tukey_transform(x: Tensor, power: float) -> Tensor:
    """Raise the absolute values of features to a power and keep the signs of the features (eq. 3)."""
    return x.sign() * x.abs() ** power


def _compute_scaled_deviations(base: BaseClasses, classes: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale deviations (classes, rows, dim) of base rows: products with normal noise have the class covariance."""
    # They are divided by the root of the number of rows minus 1, and padded with zeros. Covariances (eq. 2) are never
    # computed themselves.
    start, size = base.rows_by_class.class_starts[classes, None], base.rows_by_class.class_counts[classes, None]
    position = torch.arange(int(base.rows_by_class.class_counts.max()), device=size.device)
    present = position < size  # (k, most rows)
    rows = base.take(base.rows_by_class.row_indices[start + position.where(present, 0)].flatten())
    rows = rows.unflatten(0, present.shape).to(dtype)  # (k, most rows, dim)
    means = base.class_means[classes].to(dtype)
    weight: Tensor = present / (size - 1).clamp_min(1).sqrt()
    deviations: Tensor = (rows - means[:, None]) * weight[..., None].to(dtype)
    return deviations
