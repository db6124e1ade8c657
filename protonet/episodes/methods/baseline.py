"""Baseline and Baseline++: a linear and a cosine classifier on frozen features, by stochastic gradient descent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import draw_orders, one_hot
from protonet.episodes.methods.keywords import BelowOne, Fraction, NonNegative, Positive, PositiveCount
from protonet.episodes.samplers.batch import Episodes


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
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        n_epochs: Passes over the support rows, >= 1.
        batch_size: Rows per step, >= 1; the last step of an epoch has the remaining rows.
        learning_rate: > 0.
        momentum: In [0, 1).
        dampening: In [0, 1]; gradients enter the momentum times 1 - dampening.
        weight_decay: >= 0, of weights and biases.
        zero: Whether the initial weights are zero instead of random. Random initial weights affect predictions at one
            shot nearly as much as training does. Zero is our own choice.
        seed: The seed of the initial weights and of the order of the rows in each epoch.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

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
    for order in draw_orders(n_epochs, support.shape[1], generator).to(support.device):
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
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        scale: > 0, the factor on the logits.
        n_epochs: Passes over the support rows, >= 1.
        batch_size: Rows per step, >= 1; the last step of an epoch has the remaining rows.
        learning_rate: > 0.
        momentum: In [0, 1).
        dampening: In [0, 1]; gradients enter the momentum times 1 - dampening.
        weight_decay: >= 0, of directions and lengths.
        seed: The seed of the initial weights and of the order of the rows in each epoch.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

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
    for order in draw_orders(n_epochs, n_support, generator).to(rows.device):
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
