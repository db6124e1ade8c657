"""Training of MLP views by an episodic loss plus cross-entropy, in one loop for an ensemble of MLPs."""

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
from protonet.views.view import LinearMap, TrainingRows

#: Episodes that are sampled by one call, whose cost hardly depends on their number.
EPISODES_PER_CALL = 64


class MLPRecipe(NamedTuple):
    """Hyperparameters of a training run; analysis/results/training.md has ablations."""

    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """Makes the optimizer of one MLP from parameter groups and ``lr``. None: steps of `CustomOptimizer` for all MLPs at
    once, without torch.optim, whose first use imports torch's compiler."""
    learning_rate: float = 1e-3  #: Initial step size of the step-size search.
    weight_decay: float = 0.15  #: Decoupled weight decay of the matrices, in units of the step size.
    temperature: float = 0.1  #: Divides the cosines in both losses.
    smoothing: float = 0.1  #: Label smoothing, in [0, 1).
    noise: float = 0.5  #: Standard deviation of the Gaussian noise added to the input, which has unit scale.
    average: float = 0.98  #: Decay of the exponential moving average of the weights.
    rows: int = 256  #: Maximal number of rows per episode.
    ways: int = 64  #: Maximal number of classes per episode.
    episodic: float = 1.0  #: Weight of the episodic loss.
    cross_entropy: float = 1.0  #: Weight of the cross-entropy.


MLP_RECIPE = MLPRecipe()


class ResidualMLPs(nn.Module):
    """An ensemble of residual MLPs of equal size, evaluated in batched products: ``pad(z) + W2 gelu(W1 z + b1)``.

    The last layer is initialized with zeros, so an untrained member returns its (zero-padded) input.

    Args:
        members: Number of MLPs.
        input_dim: Width of the input.
        hidden: Hidden units per MLP.
        embedding_dim: Width of the output, >= input_dim.
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
        """Map rows to (members, n, embedding_dim).

        Args:
            z: (members, n, input_dim), or (n, input_dim) for the same input to all members.
            members: The members to evaluate.
        """
        first, bias, last = self.first[members], self.bias[members], self.last[members]
        z = z.expand(len(first), -1, -1)
        hidden = F.gelu(torch.baddbmm(bias, z, first))
        padding = last.shape[2] - z.shape[2]
        return torch.baddbmm(F.pad(z, (0, padding)) if padding else z, hidden, last)


class MemberData(NamedTuple):
    """The training data of one MLP."""

    z: Tensor  #: (n, dim) input rows.
    labels: Tensor  #: (n,) int64.
    weights: Tensor | None = None  #: (n,) with mean 1 within each class, since episodes are class-balanced; None for 1.


def build_member_data(source: LinearMap, rows: TrainingRows, *, shifted: bool) -> MemberData:
    """Map training rows by the source, and append shifted copies if ``shifted``."""
    shifts = rows.shifts if shifted else (0,)
    z = torch.cat([source(part) for part in shift_rows(rows.features, shifts).split(CHUNK)])
    weights = rows.class_balanced_weights
    weights = None if weights is None else weights.to(z.dtype).repeat(len(shifts))
    return MemberData(z, rows.labels.repeat(len(shifts)), weights)


def train(
    stack: ResidualMLPs,
    tasks: Sequence[MemberData],
    num_classes: int,
    *,
    steps: Sequence[int],
    generator: torch.Generator,
    deadline: float = float("inf"),
    recipe: MLPRecipe = MLP_RECIPE,
) -> Iterator[tuple[int, ResidualMLPs]]:
    """Train each MLP on its data; after each of the given step counts, yield the averaged weights.

    Args:
        stack: One MLP for each entry of ``tasks``; trained in place.
        tasks: The training data of each MLP, of any sizes.
        num_classes: Number of classes.
        steps: Ascending step counts.
        generator: Draws episodes and noise on the CPU, so that the result does not depend on the device.
        deadline: Value of ``time.monotonic()`` after which training ends with a last yield, after at least one step.
        recipe: Hyperparameters.

    Yields:
        The number of steps taken, and the average of the weights so far: the same object each time.

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
    loss_settings = {"temperature": recipe.temperature, "smoothing": recipe.smoothing}
    for step in range(1, steps[-1] + 1):
        if step > 1 and time.monotonic() > deadline:
            yield step - 1, average
            return
        position = (step - 1) % EPISODES_PER_CALL
        if position == 0:
            count = min(EPISODES_PER_CALL, steps[-1] + 1 - step)
            sizes = {"n_way": n_way, "n_shot": n_shot, "n_query": slots - n_shot, "n_episodes": count}
            drawn = [sample_episodes(index, **sizes, generator=generator).flatten(1).to(device) for index in indices]
            drawn_labels = torch.stack([task.labels[rows] for task, rows in zip(tasks, drawn, strict=True)], dim=1)
            weights_of_tasks = [
                task.weights[rows] for task, rows in zip(tasks, drawn, strict=True) if task.weights is not None
            ]
            drawn_weights = torch.stack(weights_of_tasks, dim=1) if weights_of_tasks else None
        rows = [episodes[position] for episodes in drawn]
        z = torch.stack([task.z[row] for task, row in zip(tasks, rows, strict=True)])  # (members, way * slots, dim)
        labels = drawn_labels[position]  # (members, way * slots)
        noise = torch.randn(z.shape[1:], generator=generator, dtype=z.dtype).to(device)  # one for all members
        z = z + recipe.noise * noise
        embeddings = F.normalize(stack(z), dim=2)
        episode = embeddings.unflatten(1, (n_way, slots))  # (members, way, slots, dim)
        weights = None if drawn_weights is None else drawn_weights[position]  # (members, way * slots)
        episode_weights = None if weights is None else weights.unflatten(1, (n_way, slots))
        loss = recipe.episodic * episodic_loss(episode, n_shot=n_shot, **loss_settings, weights=episode_weights)
        proxy_loss = cosine_cross_entropy(embeddings, labels, proxies, **loss_settings, weights=weights)
        loss = loss + recipe.cross_entropy * proxy_loss
        gradients = torch.autograd.grad(loss, trained)
        step_members(gradients)
        decay = min(recipe.average, step / (step + 9))
        torch._foreach_lerp_(averages, weights_now, 1 - decay)
        if step in steps:
            yield step, average


def _make_step(recipe: MLPRecipe, weights: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
    """Make the function that updates weights (members, ...), the last of which are the proxies, given their gradients.

    Each member has a separate optimizer or step size: a common one would leak information between folds.
    """
    if recipe.optimizer is None:
        groups = [(weights[:-1], recipe.weight_decay), (weights[-1:], 0.0)]
        return StackOptimizer(groups, start=recipe.learning_rate).step
    members = [[nn.Parameter(part) for part in parts] for parts in zip(*(w.detach() for w in weights), strict=True)]
    optimizers = [
        recipe.optimizer(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": [proxies], "weight_decay": 0.0}],
            lr=recipe.learning_rate,
        )
        for *matrices, proxies in members
    ]

    def step(gradients: Sequence[Tensor]) -> None:
        for parameters, optimizer, parts in zip(members, optimizers, zip(*gradients, strict=True), strict=True):
            for parameter, gradient in zip(parameters, parts, strict=True):
                parameter.grad = gradient
            optimizer.step()

    return step


def _initial_proxies(
    tasks: Sequence[MemberData], num_classes: int, embedding_dim: int, generator: torch.Generator
) -> Tensor:
    """Initialize proxies (members, num_classes, embedding_dim) with the untrained prototypes, and noise as padding."""
    means = torch.stack([class_means(F.normalize(z, dim=1), y, num_classes, w)[0] for z, y, w in tasks])
    padding = embedding_dim - means.shape[2]
    noise = torch.randn(*means.shape[:2], padding, generator=generator, dtype=means.dtype)
    return torch.cat([means, 0.02 * noise.to(means.device)], dim=2).requires_grad_(True)
