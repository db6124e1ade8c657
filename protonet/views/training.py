"""How learned views are trained: by episodes plus cross-entropy, one loop for a whole stack of MLPs at once."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.losses import CHUNK, class_means, cosine_cross_entropy, episodic_loss
from protonet.optimizer import StackOptimizer
from protonet.sampling import index_classes, sample_episodes
from protonet.views.shifts import shift_rows
from protonet.views.view import LinearMap, Rows

#: Episodes that are drawn by one call of the sampler: its cost is per call.
EPISODES_AT_ONCE = 64


class Recipe(NamedTuple):
    """What one training run uses; analysis/results/training.md shows what each part is worth."""

    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """Makes an optimizer of each member from groups of parameters and ``lr``; None: all members' steps at once, as
    `CustomOptimizer` takes them, without torch.optim, the first use of which imports torch's compiler."""
    learning_rate: float = 1e-3  #: Where the search for the step size starts.
    weight_decay: float = 0.15  #: Of the MLPs' matrices, decoupled, in units of the step size.
    temperature: float = 0.1  #: Divides the cosines in both losses.
    smoothing: float = 0.1  #: Label smoothing, in [0, 1).
    noise: float = 0.5  #: Standard deviation of what is added to the rows, in units of the features' own.
    average: float = 0.98  #: Decay of the average of the weights.
    rows: int = 256  #: Rows per episode, at the most.
    ways: int = 64  #: Classes per episode, at the most.
    episodic: float = 1.0  #: Weight of the episodic loss.
    cross_entropy: float = 1.0  #: Weight of the cross-entropy.


RECIPE = Recipe()


class ResidualMLPs(nn.Module):
    """A stack of equal residual MLPs, evaluated as one: ``pad(z) + W2 gelu(W1 z + b1)``.

    The last layer starts at zero, so an untrained member returns its (zero-padded) input.

    Args:
        members: MLPs in the stack.
        input_dim: Features of the input.
        hidden: Hidden units of each.
        embedding_dim: Features of the output, >= input_dim.
        generator: Draws the first layer; None for zeros, which ``load_state_dict`` fills.
    """

    def __init__(
        self, members: int, input_dim: int, hidden: int, embedding_dim: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        first = torch.zeros(members, input_dim, hidden, dtype=torch.float32)
        if generator is not None:
            first = torch.randn(first.shape, generator=generator, dtype=torch.float32)
        self.first = nn.Parameter(first * math.sqrt(1 / input_dim))
        self.bias = nn.Parameter(torch.zeros(members, 1, hidden, dtype=torch.float32))
        self.last = nn.Parameter(torch.zeros(members, hidden, embedding_dim, dtype=torch.float32))

    def forward(self, z: Tensor, members: slice = slice(None)) -> Tensor:
        """Map (members, n, input_dim), or (n, input_dim) shared by them, to (members, n, embedding_dim).

        Args:
            z: Float rows, or one set of rows for each member.
            members: Which members to evaluate.
        """
        first, bias, last = self.first[members], self.bias[members], self.last[members]
        z = z.expand(len(first), -1, -1)
        hidden = F.gelu(torch.baddbmm(bias, z, first))
        padding = last.shape[2] - z.shape[2]
        return torch.baddbmm(F.pad(z, (0, padding)) if padding else z, hidden, last)


class Task(NamedTuple):
    """What one member of the stack learns from: view rows ``z`` (n, dim), their labels (n,) and weights (n,)."""

    z: Tensor
    labels: Tensor
    weights: Tensor | None = None  #: Of mean 1 within each class, as episodes draw from all classes alike; None for 1.


def make_task(source: LinearMap, rows: Rows, *, shifted: bool) -> Task:
    """Return what a learned view learns from: the rows as it reads them, with shifted copies if asked for."""
    shifts = rows.shifts if shifted else (0,)
    z = torch.cat([source(part) for part in shift_rows(rows.features, shifts).split(CHUNK)])
    shares = rows.shares
    weights = None if shares is None else shares.to(z.dtype).repeat(len(shifts))
    return Task(z, rows.labels.repeat(len(shifts)), weights)


def train(
    stack: ResidualMLPs,
    tasks: Sequence[Task],
    num_classes: int,
    *,
    steps: Sequence[int],
    generator: torch.Generator,
    deadline: float = float("inf"),
    recipe: Recipe = RECIPE,
) -> Iterator[tuple[int, ResidualMLPs]]:
    """Train every member on its own task; after each of the given step counts, yield the averaged weights.

    Args:
        stack: One MLP per task, where training starts; trained in place.
        tasks: One for each member, of any sizes.
        num_classes: Number of classes.
        steps: Ascending step counts.
        generator: The source of all randomness, on the CPU, wherever rows are: the same one gives the same weights.
        deadline: ``time.monotonic()`` after which no step but the first starts; the run then ends, with a last yield.
        recipe: Rates, augmentation and the losses' weights.

    Yields:
        The number of steps taken and the weight average so far, the same object each time.

    Source: episodes as in Vinyals et al. 2016; weight averaging as in Polyak and Juditsky 1992.
    """
    embedding_dim = stack.last.shape[2]
    indices, device = [index_classes(task.labels.cpu()) for task in tasks], tasks[0].z.device
    n_way = min(recipe.ways, recipe.rows // 2, *(len(index.size) for index in indices))
    slots = max(2, min(10, recipe.rows // n_way))
    n_shot = slots // 2
    proxies = _initial_proxies(tasks, num_classes, embedding_dim, generator)
    average = copy.deepcopy(stack).requires_grad_(False)
    trained = [*stack.parameters(), proxies]
    averages, weights_now = ([weight.detach() for weight in mlps.parameters()] for mlps in (average, stack))
    step_members = _make_step(recipe, trained)
    setting = {"temperature": recipe.temperature, "smoothing": recipe.smoothing}
    for step in range(1, steps[-1] + 1):
        if step > 1 and time.monotonic() > deadline:
            yield step - 1, average
            return
        position = (step - 1) % EPISODES_AT_ONCE
        if position == 0:
            count = min(EPISODES_AT_ONCE, steps[-1] + 1 - step)
            sizes = {"n_way": n_way, "n_shot": n_shot, "n_query": slots - n_shot, "n_episodes": count}
            drawn = [sample_episodes(index, **sizes, generator=generator).flatten(1).to(device) for index in indices]
            drawn_labels = torch.stack([task.labels[rows] for task, rows in zip(tasks, drawn, strict=True)], dim=1)
            own = [task.weights[rows] for task, rows in zip(tasks, drawn, strict=True) if task.weights is not None]
            drawn_weights = torch.stack(own, dim=1) if own else None
        rows = [episodes[position] for episodes in drawn]
        z = torch.stack([task.z[row] for task, row in zip(tasks, rows, strict=True)])  # (members, way * slots, dim)
        labels = drawn_labels[position]  # (members, way * slots)
        noise = torch.randn(z.shape[1:], generator=generator, dtype=z.dtype).to(device)  # one for all members
        z = z + recipe.noise * noise
        embeddings = F.normalize(stack(z), dim=2)
        episode = embeddings.unflatten(1, (n_way, slots))  # (members, way, slots, dim)
        weights = None if drawn_weights is None else drawn_weights[position]  # (members, way * slots)
        shaped = None if weights is None else weights.unflatten(1, (n_way, slots))
        loss = recipe.episodic * episodic_loss(episode, n_shot=n_shot, **setting, weights=shaped)
        more = cosine_cross_entropy(embeddings, labels, proxies, **setting, weights=weights)
        loss = loss + recipe.cross_entropy * more
        gradients = torch.autograd.grad(loss, trained)
        step_members(gradients)
        decay = min(recipe.average, step / (step + 9))
        torch._foreach_lerp_(averages, weights_now, 1 - decay)
        if step in steps:
            yield step, average


def _make_step(recipe: Recipe, weights: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
    """Return what moves all members by the gradients of weights (members, ...), the last of which are the proxies.

    Each member has an optimizer, or a step size, of its own: a common one would let folds see each other.
    """
    if recipe.optimizer is None:
        groups = [(weights[:-1], recipe.weight_decay), (weights[-1:], 0.0)]
        return StackOptimizer(groups, start=recipe.learning_rate).step
    shares = [[nn.Parameter(share) for share in member] for member in zip(*(w.detach() for w in weights), strict=True)]
    optimizers = [
        recipe.optimizer(
            [{"params": own, "weight_decay": recipe.weight_decay}, {"params": [own_proxies], "weight_decay": 0.0}],
            lr=recipe.learning_rate,
        )
        for *own, own_proxies in shares
    ]

    def step(gradients: Sequence[Tensor]) -> None:
        for own, optimizer, parts in zip(shares, optimizers, zip(*gradients, strict=True), strict=True):
            for share, gradient in zip(own, parts, strict=True):
                share.grad = gradient
            optimizer.step()

    return step


def _initial_proxies(tasks: Sequence[Task], num_classes: int, embedding_dim: int, generator: torch.Generator) -> Tensor:
    """Return trainable proxies (members, num_classes, embedding_dim): the untrained prototypes, off their padding."""
    means = torch.stack([class_means(F.normalize(z, dim=1), y, num_classes, w)[0] for z, y, w in tasks])
    padding = embedding_dim - means.shape[2]
    noise = torch.randn(*means.shape[:2], padding, generator=generator, dtype=means.dtype)
    return torch.cat([means, 0.02 * noise.to(means.device)], dim=2).requires_grad_(True)
