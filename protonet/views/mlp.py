"""Learned views: small residual MLPs on a linear view, trained by episodes plus cross-entropy.

They are the only parameters of a network, so they are what its budget is spent on. An MLP's last layer starts at zero:
untrained it is the linear view that it reads. Training has one loop, for a whole stack of MLPs at once.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet._checks import check_int, check_number
from protonet.losses import CHUNK, class_means, cosine_cross_entropy, episodic_loss
from protonet.optimizer import StackOptimizer
from protonet.sampling import index_classes, sample_episodes
from protonet.scoring import simplest_within_one_error, worse_by_one_error
from protonet.views.judge import PRUNING, Candidate, Judge
from protonet.views.linear import Linear, LinearView
from protonet.views.shifts import shift_rows
from protonet.views.view import Graph, LinearMap, Rows, Stored, View, expect, need_source

#: A learned view has at least this many dimensions: few features are padded with zeros to give classes room.
MIN_EMBEDDING_DIM = 64
#: Sizes of stacks, (members, hidden units), that the search may try, smallest first, cut to the budget.
SIZES = ((1, 1), (1, 32), (1, 128), (4, 128))
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


class Plan(NamedTuple):
    """What a parameter budget affords."""

    embedding_dim: int  #: Of the learned views.
    sizes: tuple[tuple[int, int], ...]  #: Of stacks, (members, hidden units), smallest first.


def count_mlp_parameters(input_dim: int, hidden: int, embedding_dim: int) -> int:
    """Return the parameters of one residual MLP: two matrices and the hidden bias."""
    return hidden * (input_dim + 1 + embedding_dim)


def plan_encoder(input_dim: int, num_classes: int, param_limit: float) -> Plan:
    """Turn a problem's size and a parameter limit into exact sizes, never one parameter over.

    Args:
        input_dim: Features per sample, >= 1.
        num_classes: Number of classes, >= 2.
        param_limit: Trainable parameters allowed, finite and >= 0; fractions are rounded down.

    Returns:
        Those of ``SIZES`` that fit, and as the last one what fits of the first that does not. ``sizes`` is empty
        where not even the smallest MLP fits: the model is then raw cosine with no parameters.

    Raises:
        InputTypeError: A size or the limit is not a number.
        InputError: A size below its least value; a negative or non-finite limit.
    """
    input_dim = check_int("plan_encoder", "input_dim", input_dim, low=1)
    num_classes = check_int("plan_encoder", "num_classes", num_classes, low=2)
    limit = math.floor(check_number("plan_encoder", "param_limit", param_limit, low=0))
    embedding_dim = max(input_dim, min(MIN_EMBEDDING_DIM, 4 * num_classes))
    units = limit // count_mlp_parameters(input_dim, 1, embedding_dim)
    sizes: list[tuple[int, int]] = []
    for members, hidden in SIZES:
        size = (members, hidden) if members * hidden <= units else (max(units // hidden, 1), min(units, hidden))
        if size[1] and size not in sizes:
            sizes.append(size)
        if size != (members, hidden):
            break
    return Plan(embedding_dim, tuple(sizes))


@dataclass(frozen=True)
class MLP:
    """A learned view: members that are trained alike from different first weights.

    Args:
        source: The linear view that it reads, without its bias coordinate.
        members: MLPs, each a part of the embedding of its own.
        hidden: Hidden units of each.
        steps: How long it trains.
        embedding_dim: Of each member, at least the width of the source.
        shifted: Train on shifted copies of the rows, too.
        recipe: Rates, augmentation and the losses' weights.
    """

    source: Linear
    members: int
    hidden: int
    steps: int
    embedding_dim: int
    shifted: bool = False
    recipe: Recipe = RECIPE

    @property
    def name(self) -> str:
        """Its size, what it reads, and how long it trains."""
        return f"learned: {self.members}x{self.hidden} MLP on {self.source.name}, {self.steps} steps"

    def fit(self, rows: Rows, source: View | None) -> MLPView:
        """Train on labelled rows, from weights and episodes that depend on their seed alone."""
        generator = torch.Generator().manual_seed(rows.seed)
        task = make_task(cast(LinearView, source), rows, shifted=self.shifted)
        stack = ResidualMLPs(self.members, task.z.shape[1], self.hidden, self.embedding_dim, generator)
        for _, average in train(
            stack,
            [task] * self.members,
            rows.num_classes,
            steps=[self.steps],
            generator=generator,
            deadline=rows.deadline,
            recipe=self.recipe,
        ):
            stack = average.requires_grad_(True)
        return MLPView(cast(LinearView, source).map, stack)


@dataclass(frozen=True)
class MLPKind:
    """Stacks of MLPs of rising size, each trained for as long as more steps do not hurt."""

    sizes: int = len(SIZES)  #: How many of the sizes that the budget affords are tried.
    steps: tuple[int, ...] = (3, 10, 30, 60)  #: At which training is judged; one that gets worse is not continued.
    work: float = 2e8  #: Parameters times steps that one size may cost, over all folds, at the most.
    recipe: Recipe = RECIPE  #: Of the training.
    stage: ClassVar[str] = "learned views"
    share: ClassVar[float] = 3.0
    trained: ClassVar[bool] = True

    @classmethod
    def for_effort(cls, effort: str) -> MLPKind:
        """Return none for "fast", and longer training for "best"."""
        if effort == "fast":
            return cls(sizes=0)
        return cls(steps=(3, 10, 30, 100, 300), work=2e9) if effort == "best" else cls()

    def unjudged(self) -> None:
        """Return nothing: whether training helps is not known."""

    def smallest(self, plan: Plan, source: Linear) -> MLP | None:
        """Return the least MLP, which changes a linear view least, if the budget affords it and one is asked for."""
        if not plan.sizes or not self.sizes:
            return None
        return MLP(source, *plan.sizes[0], self.steps[0], plan.embedding_dim, recipe=self.recipe)

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Train each size on all folds at once, and judge it after each number of steps.

        All read the simplest linear view that is within one standard error of the best, and train on shifted rows if
        the best view so far does.
        """
        rows, plan = judge.rows, judge.plan
        readable = [each for each in judge.found if isinstance(each.specification, Linear)]
        base = readable[simplest_within_one_error([each.losses for each in readable])].specification
        leader = min(judge.found, key=lambda each: each.loss)
        shifted = leader.specification.shifted
        smallest = self.smallest(plan, cast(Linear, base))
        if smallest is None:
            return
        sources = [cast(LinearView, view) for view in judge.fit(base)]
        untrained = judge.judge(smallest, judge.cosines(partial(_embed_source, sources)))
        if judge.late():
            yield untrained  # as good as trained for no step
            return
        tasks = [
            make_task(source, judge.take(fold), shifted=shifted)
            for source, fold in zip(sources, judge.folds, strict=True)
        ]
        dim = tasks[0].z.shape[1]
        best, best_size, sizes = untrained, (0, 0), plan.sizes[: self.sizes]
        for number, (members, hidden) in enumerate(sizes):
            if judge.late():
                return
            # A larger one is tried only where the last one beat the others, and keeps up with the best view.
            if number > 1 and (best_size != sizes[number - 1] or worse_by_one_error(best.losses, leader.losses)):
                break
            if number > 1 and len(judge.labels) < PRUNING.least_rows:
                break  # so few rows do not tell sizes apart
            stack = ResidualMLPs(members * len(tasks), dim, hidden, plan.embedding_dim, judge.generator)
            repeated = [task for task in tasks for _ in range(members)]
            cost = len(repeated) * count_mlp_parameters(dim, hidden, plan.embedding_dim)
            best_of_size = untrained
            wanted = self.steps if number else self.steps[:1]  # the least one is the linear view, and little more
            for steps, average in train(
                stack,
                repeated,
                rows.num_classes,
                steps=[steps for steps in wanted if steps * cost <= self.work] or wanted[:1],
                generator=judge.generator,
                deadline=rows.deadline,
                recipe=self.recipe,
            ):
                cosines = judge.cosines(partial(_embed_learned, sources, average, members))
                tried = MLP(smallest.source, members, hidden, steps, plan.embedding_dim, shifted, self.recipe)
                candidate = judge.judge(tried, cosines)
                yield candidate
                if worse_by_one_error(candidate.losses, best_of_size.losses):
                    break
                best_of_size = min(best_of_size, candidate, key=lambda each: each.loss)
            if best_of_size.loss < best.loss:
                best, best_size = best_of_size, (members, hidden)


def _embed_source(sources: Sequence[LinearView], fold: int, x: Tensor) -> Tensor:
    """Return what a fold's MLPs read of features (n, input_dim): (1, n, dim)."""
    z: Tensor = sources[fold].map(x)
    return z[None]


def _embed_learned(sources: Sequence[LinearView], stack: ResidualMLPs, members: int, fold: int, x: Tensor) -> Tensor:
    """Return one fold's learned views of features (n, input_dim): (members, n, embedding_dim)."""
    z: Tensor = stack(sources[fold].map(x), slice(fold * members, (fold + 1) * members))
    return z


class ResidualMLPs(nn.Module):
    """A stack of equal residual MLPs, evaluated as one: ``pad(z) + W2 gelu(W1 z + b1)``.

    The last layer starts at zero, so an untrained member returns its (zero-padded) input.

    Args:
        members: MLPs in the stack.
        input_dim: Features of the input.
        hidden: Hidden units of each.
        embedding_dim: Features of the output, >= input_dim.
        generator: Draws the first layer.
    """

    def __init__(
        self, members: int, input_dim: int, hidden: int, embedding_dim: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        first = torch.randn(members, input_dim, hidden, generator=generator, dtype=torch.float32)
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


class MLPView(View):
    """The members of a stack, each a part of the embedding.

    Args:
        source: What they read.
        stack: The members.
    """

    kind = "mlp"

    def __init__(self, source: LinearMap, stack: ResidualMLPs) -> None:
        members, _, embedding_dim = stack.last.shape
        super().__init__(source, (embedding_dim,) * members)
        self.stack = stack

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, dim) to (n, members * embedding_dim)."""
        return torch.cat(self.stack(z).unbind(0), dim=1)

    @classmethod
    def restore(cls, stored: Stored, source: LinearMap | None, input_dim: int) -> MLPView:
        """Build the stack again."""
        first = stored.take("stack.first", None, input_dim, None)
        members, _, hidden = first.shape
        expect(members > 0, "learned views without a member")
        bias = stored.take("stack.bias", members, 1, hidden)
        last = stored.take("stack.last", members, hidden, None)
        expect(last.shape[2] >= input_dim, "learned views with fewer dimensions than features")
        stack = ResidualMLPs(members, input_dim, hidden, last.shape[2], torch.Generator())
        stack.load_state_dict({"first": first, "bias": bias, "last": last})
        return cls(need_source(source), stack)

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the members."""
        first, bias, last = map(graph.array, (self.stack.first, self.stack.bias, self.stack.last))
        padded = graph.pad(rows, last.shape[2] - first.shape[1], 0.0)
        members = []
        for matrix, offset, readout in zip(first, bias, last, strict=True):
            hidden = graph.add("Add", graph.add("MatMul", rows, matrix), offset)
            error = graph.add("Erf", graph.add("Mul", hidden, np.float32(math.sqrt(0.5))))
            hidden = graph.add("Mul", graph.add("Mul", hidden, np.float32(0.5)), graph.add("Add", error, np.float32(1)))
            members.append(graph.add("Add", padded, graph.add("MatMul", hidden, readout)))
        return members

    def products(self) -> list[tuple[int, int]]:
        """Return both layers of each member."""
        members, dim, hidden = self.stack.first.shape
        return [(dim, hidden), (hidden, self.sizes[0])] * members


class Task(NamedTuple):
    """What one member of the stack learns from: view rows ``z`` (n, dim), their labels (n,) and weights (n,)."""

    z: Tensor
    labels: Tensor
    weights: Tensor | None = None  #: Of mean 1 within each class, as episodes draw from all classes alike; None for 1.


def make_task(source: LinearView, rows: Rows, *, shifted: bool) -> Task:
    """Return what a learned view learns from: the rows as it reads them, with shifted copies if asked for."""
    shifts = rows.shifts if shifted else (0,)
    z = torch.cat([source.map(part) for part in shift_rows(rows.features, shifts).split(CHUNK)])
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
        generator: The source of all randomness: the same one gives the same weights.
        deadline: ``time.monotonic()`` after which no step but the first starts; the run then ends, with a last yield.
        recipe: Rates, augmentation and the losses' weights.

    Yields:
        The number of steps taken and the weight average so far, the same object each time.

    Source: episodes as in Vinyals et al. 2016; weight averaging as in Polyak and Juditsky 1992.
    """
    embedding_dim = stack.last.shape[2]
    indices = [index_classes(task.labels) for task in tasks]
    n_way = min(recipe.ways, recipe.rows // 2, *(len(index.size) for index in indices))
    slots = max(2, min(10, recipe.rows // n_way))
    n_shot = slots // 2
    proxies = _initial_proxies(tasks, num_classes, embedding_dim, generator)
    average = copy.deepcopy(stack).requires_grad_(False)
    trained = [*stack.parameters(), proxies]
    kept, current = ([weight.detach() for weight in each.parameters()] for each in (average, stack))
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
            drawn = [sample_episodes(index, **sizes, generator=generator).flatten(1) for index in indices]
            drawn_labels = torch.stack([task.labels[rows] for task, rows in zip(tasks, drawn, strict=True)], dim=1)
            own = [task.weights[rows] for task, rows in zip(tasks, drawn, strict=True) if task.weights is not None]
            drawn_weights = torch.stack(own, dim=1) if own else None
        rows = [episodes[position] for episodes in drawn]
        z = torch.stack([task.z[row] for task, row in zip(tasks, rows, strict=True)])  # (members, way * slots, dim)
        labels = drawn_labels[position]  # (members, way * slots)
        z = z + recipe.noise * torch.randn(z.shape[1:], generator=generator, dtype=z.dtype)  # one for all members
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
        torch._foreach_lerp_(kept, current, 1 - decay)
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
    return torch.cat([means, 0.02 * noise], dim=2).requires_grad_(True)
