"""Learned views: small residual MLPs on a linear view, the only parameters of a network.

`protonet.views.budget` says how many there may be, `protonet.views.training` trains them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from protonet.scoring import simplest_within_one_error, worse_by_one_error
from protonet.views.budget import SIZES, Plan, count_mlp_parameters
from protonet.views.config import Config, expect, size
from protonet.views.judge import PRUNING, Candidate, Judge, Kind
from protonet.views.linear import Linear
from protonet.views.training import RECIPE, Recipe, ResidualMLPs, make_task, train
from protonet.views.view import Graph, LinearMap, Rows, Source, Specification, View, need_map


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
    trained: ClassVar[bool] = True

    @property
    def traits(self) -> frozenset[str]:
        """That it is learned, and what it reads."""
        return self.source.traits | {"learned"}

    @property
    def name(self) -> str:
        """Its size, what it reads, and how long it trains."""
        return f"learned: {self.members}x{self.hidden} MLP on {self.source.name}, {self.steps} steps"

    def fit(self, rows: Rows, source: Source | None) -> MLPView:
        """Train on labelled rows, from weights and episodes that depend on their seed alone."""
        generator = torch.Generator().manual_seed(rows.seed)
        source = need_map(source)
        task = make_task(source, rows, shifted=self.shifted)
        stack = ResidualMLPs(self.members, task.z.shape[1], self.hidden, self.embedding_dim, generator)
        stack = stack.to(task.z.device)  # its first weights are drawn on the CPU, as all that is
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
        return MLPView.of(stack, source)


@dataclass(frozen=True)
class MLPKind(Kind):
    """Stacks of MLPs of rising size, each trained for as long as more steps do not hurt."""

    sizes: int = len(SIZES)  #: How many of the sizes that the budget affords are tried.
    steps: tuple[int, ...] = (3, 10, 30, 60)  #: At which training is judged; one that gets worse is not continued.
    work: float = 5e7  #: Parameters times steps that one size may cost, over all folds, at the most.
    recipe: Recipe = RECIPE  #: Of the training.
    stage: ClassVar[str] = "learned views"
    share: ClassVar[float] = 3.0

    @classmethod
    def for_effort(cls, effort: str) -> MLPKind:
        """Return none for "fast", and longer training for "best"."""
        if effort == "fast":
            return cls(sizes=0)
        return cls(steps=(3, 10, 30, 100, 300), work=2e9) if effort == "best" else cls()

    def unjudged(self) -> None:
        """Return nothing: whether training helps is not known."""

    def smallest(self, plan: Plan, source: Specification) -> MLP | None:
        """Return the least MLP on a linear view, if the budget affords it and one is asked for."""
        if not plan.sizes or not self.sizes or not isinstance(source, Linear):
            return None
        return MLP(source, *plan.sizes[0], self.steps[0], plan.embedding_dim, recipe=self.recipe)

    def candidates(self, judge: Judge) -> Iterator[Candidate]:
        """Train each size on all folds at once, and judge it after each number of steps.

        All read the simplest linear view that is within one standard error of the best, and train on shifted rows if
        the best view so far does.
        """
        rows, plan = judge.rows, judge.plan
        linear = [candidate for candidate in judge.candidates if isinstance(candidate.specification, Linear)]
        base = linear[simplest_within_one_error([candidate.losses for candidate in linear])].specification
        leader = min(judge.candidates, key=lambda candidate: candidate.loss)
        shifted = leader.specification.shifted
        smallest = self.smallest(plan, base)
        if smallest is None:
            return
        sources = [need_map(view.source) for view in judge.fit(base)]
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
            stack = stack.to(tasks[0].z.device)
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


def _embed_source(sources: Sequence[LinearMap], fold: int, x: Tensor) -> Tensor:
    """Return what a fold's MLPs read of features (n, input_dim): (1, n, dim)."""
    z: Tensor = sources[fold](x)
    return z[None]


def _embed_learned(sources: Sequence[LinearMap], stack: ResidualMLPs, members: int, fold: int, x: Tensor) -> Tensor:
    """Return one fold's learned views of features (n, input_dim): (members, n, embedding_dim)."""
    z: Tensor = stack(sources[fold](x), slice(fold * members, (fold + 1) * members))
    return z


@dataclass(frozen=True)
class MLPConfig(Config):
    """Members, and hidden units and dimensions of each."""

    members: int = size(high=1024)
    hidden: int = size()
    embedding_dim: int = size()


class MLPView(View):
    """The members of a stack, each a part of the embedding; its parameters are the view's."""

    kind = "mlp"
    config_type, reads = MLPConfig, LinearMap
    config: MLPConfig
    source: LinearMap

    def __init__(
        self, config: Config, source: Source | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(config, source, tensors)
        dim = self.source.config.dim
        expect(self.config.embedding_dim >= dim, "learned views with fewer dimensions than features")
        self.stack = ResidualMLPs(self.config.members, dim, self.config.hidden, self.config.embedding_dim)

    @classmethod
    def of(cls, stack: ResidualMLPs, source: LinearMap) -> MLPView:
        """Return the view of a trained stack that reads a map."""
        members, hidden, embedding_dim = stack.last.shape
        view = cls(MLPConfig(members, hidden, embedding_dim), source)
        view.stack = stack
        return view

    @property
    def sizes(self) -> tuple[int, ...]:
        """The width of each member."""
        return (self.config.embedding_dim,) * self.config.members

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, dim) to (n, members * embedding_dim)."""
        return torch.cat(self.stack(z.to(self.stack.first.dtype)).unbind(0), dim=1)

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
        dim, hidden = self.source.config.dim, self.config.hidden
        return [(dim, hidden), (hidden, self.config.embedding_dim)] * self.config.members
