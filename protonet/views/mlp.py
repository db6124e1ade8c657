"""MLP views: ensembles of small residual MLPs on a linear view, the only trained parameters of a network.

`protonet.views.budget` chooses their sizes within a parameter budget, `protonet.views.training` trains them.
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

from protonet.selection.scoring import simplest_within_one_error, worse_by_one_error
from protonet.views.budget import MLP_SIZES, EncoderPlan, count_mlp_parameters
from protonet.views.config import Config, expect, size
from protonet.views.evaluation import PRUNING, Candidate, CandidateEvaluator, ViewFamily
from protonet.views.linear import Linear
from protonet.views.training import MLP_RECIPE, MLPRecipe, ResidualMLPs, build_member_data, train
from protonet.views.view import Graph, LinearMap, Source, TrainingRows, View, ViewSpec, require_linear_map


@dataclass(frozen=True)
class MLP:
    """The spec of an MLP view: an ensemble whose members differ in their initial weights.

    Args:
        source: The linear view whose map is read, without its bias coordinate.
        members: Number of MLPs, each a part of the embedding.
        hidden: Hidden units per MLP.
        steps: Number of training steps.
        embedding_dim: Width of each member's output, at least the width of the source.
        shifted: Also train on shifted copies of the rows.
        recipe: Training hyperparameters.
    """

    source: Linear
    members: int
    hidden: int
    steps: int
    embedding_dim: int
    shifted: bool = False
    recipe: MLPRecipe = MLP_RECIPE
    trained: ClassVar[bool] = True

    @property
    def traits(self) -> frozenset[str]:
        """The trait "learned", and the traits of the source."""
        return self.source.traits | {"learned"}

    @property
    def name(self) -> str:
        """The size, the source, and the number of steps."""
        return f"learned: {self.members}x{self.hidden} MLP on {self.source.name}, {self.steps} steps"

    def fit(self, rows: TrainingRows, source: Source | None) -> MLPView:
        """Train on labelled rows; initial weights and episodes depend on ``rows.seed`` alone."""
        generator = torch.Generator().manual_seed(rows.seed)
        source = require_linear_map(source)
        data = build_member_data(source, rows, shifted=self.shifted)
        mlps = ResidualMLPs(self.members, data.z.shape[1], self.hidden, self.embedding_dim, generator)
        mlps = mlps.to(data.z.device)  # initial weights are drawn on the CPU, so that they do not depend on the device
        for _, average in train(
            mlps,
            [data] * self.members,
            rows.num_classes,
            steps=[self.steps],
            generator=generator,
            deadline=rows.deadline,
            recipe=self.recipe,
        ):
            mlps = average.requires_grad_(True)
        return MLPView.from_mlps(mlps, source)


@dataclass(frozen=True)
class MLPFamily(ViewFamily):
    """Ensembles of MLPs of increasing size, each trained until more steps are worse."""

    sizes: int = len(MLP_SIZES)  #: How many of the sizes within the budget are evaluated, at most.
    steps: tuple[int, ...] = (3, 10, 30, 60)  #: Step counts at which training is evaluated; it ends if one is worse.
    work: float = 5e7  #: Maximal number of parameters times steps for one size, over all folds.
    recipe: MLPRecipe = MLP_RECIPE  #: Training hyperparameters.
    stage: ClassVar[str] = "MLP views"
    relative_time: ClassVar[float] = 3.0

    @classmethod
    def for_effort(cls, effort: str) -> MLPFamily:
        """Choose no MLP for "fast", and longer training for "best"."""
        if effort == "fast":
            return cls(sizes=0)
        return cls(steps=(3, 10, 30, 100, 300), work=2e9) if effort == "best" else cls()

    def without_validation(self) -> None:
        """Use no MLP: without held-out rows it is unknown whether training helps."""

    def smallest_trained(self, plan: EncoderPlan, source: ViewSpec) -> MLP | None:
        """Specify the smallest MLP on a linear view; None if no MLP is evaluated, or if it exceeds the budget."""
        if not plan.sizes or not self.sizes or not isinstance(source, Linear):
            return None
        return MLP(source, *plan.sizes[0], self.steps[0], plan.embedding_dim, recipe=self.recipe)

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Train each size on all folds at once, and evaluate it after each number of steps.

        The MLPs read the simplest linear view that is within one standard error of the best one. They train on shifted
        rows if the best view so far does.
        """
        rows, plan = evaluator.rows, evaluator.plan
        linear = [candidate for candidate in evaluator.candidates if isinstance(candidate.spec, Linear)]
        base = linear[simplest_within_one_error([candidate.losses for candidate in linear])].spec
        leader = min(evaluator.candidates, key=lambda candidate: candidate.loss)
        shifted = leader.spec.shifted
        smallest = self.smallest_trained(plan, base)
        if smallest is None:
            return
        sources = [require_linear_map(view.source) for view in evaluator.fit(base)]
        untrained = evaluator.score(smallest, evaluator.compute_cosines(partial(_embed_source, sources)))
        if evaluator.out_of_time():
            yield untrained
            return
        fold_data = [
            build_member_data(source, evaluator.training_rows(fold), shifted=shifted)
            for source, fold in zip(sources, evaluator.folds, strict=True)
        ]
        dim = fold_data[0].z.shape[1]
        best, best_size, sizes = untrained, (0, 0), plan.sizes[: self.sizes]
        for index, (members, hidden) in enumerate(sizes):
            if evaluator.out_of_time():
                return
            # A larger size is evaluated only if the last one was the best, and is not worse than the best view.
            if index > 1 and (best_size != sizes[index - 1] or worse_by_one_error(best.losses, leader.losses)):
                break
            if index > 1 and len(evaluator.labels) < PRUNING.min_rows:
                break  # too few rows to compare sizes
            mlps = ResidualMLPs(members * len(fold_data), dim, hidden, plan.embedding_dim, evaluator.generator)
            mlps = mlps.to(fold_data[0].z.device)
            data = [rows_of_fold for rows_of_fold in fold_data for _ in range(members)]
            step_work = len(data) * count_mlp_parameters(dim, hidden, plan.embedding_dim)
            best_of_size = untrained
            step_counts = self.steps if index else self.steps[:1]  # the smallest MLP hardly differs from its source
            for steps, average in train(
                mlps,
                data,
                rows.num_classes,
                steps=[steps for steps in step_counts if steps * step_work <= self.work] or step_counts[:1],
                generator=evaluator.generator,
                deadline=rows.deadline,
                recipe=self.recipe,
            ):
                cosines = evaluator.compute_cosines(partial(_embed_mlps, sources, average, members))
                spec = MLP(smallest.source, members, hidden, steps, plan.embedding_dim, shifted, self.recipe)
                candidate = evaluator.score(spec, cosines)
                yield candidate
                if worse_by_one_error(candidate.losses, best_of_size.losses):
                    break
                best_of_size = min(best_of_size, candidate, key=lambda evaluated: evaluated.loss)
            if best_of_size.loss < best.loss:
                best, best_size = best_of_size, (members, hidden)


def _embed_source(sources: Sequence[LinearMap], fold: int, x: Tensor) -> Tensor:
    """Map features (n, input_dim) by the source of a fold: (1, n, dim)."""
    z: Tensor = sources[fold](x)
    return z[None]


def _embed_mlps(sources: Sequence[LinearMap], mlps: ResidualMLPs, members: int, fold: int, x: Tensor) -> Tensor:
    """Embed features (n, input_dim) by the MLPs of a fold: (members, n, embedding_dim)."""
    z: Tensor = mlps(sources[fold](x), slice(fold * members, (fold + 1) * members))
    return z


@dataclass(frozen=True)
class MLPConfig(Config):
    """The number of MLPs, and the hidden units and output width of each."""

    members: int = size(high=1024)
    hidden: int = size()
    embedding_dim: int = size()


class MLPView(View):
    """An ensemble of MLPs, each a part of the embedding."""

    kind = "mlp"
    config_type, source_type = MLPConfig, LinearMap
    config: MLPConfig
    source: LinearMap

    def __init__(
        self, config: Config, source: Source | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(config, source, tensors)
        dim = self.source.config.dim
        expect(self.config.embedding_dim >= dim, "an MLP with fewer dimensions than features")
        self.mlps = ResidualMLPs(self.config.members, dim, self.config.hidden, self.config.embedding_dim)

    @classmethod
    def from_mlps(cls, mlps: ResidualMLPs, source: LinearMap) -> MLPView:
        """Make a view of trained MLPs."""
        members, hidden, embedding_dim = mlps.last.shape
        view = cls(MLPConfig(members, hidden, embedding_dim), source)
        view.mlps = mlps
        return view

    @property
    def sizes(self) -> tuple[int, ...]:
        """The output width of each member."""
        return (self.config.embedding_dim,) * self.config.members

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, dim) to (n, members * embedding_dim)."""
        return torch.cat(self.mlps(z.to(self.mlps.first.dtype)).unbind(0), dim=1)

    def add_to_graph(self, graph: Graph, rows: str) -> list[str]:
        """Add the MLPs."""
        first, bias, last = map(graph.array, (self.mlps.first, self.mlps.bias, self.mlps.last))
        padded = graph.pad(rows, last.shape[2] - first.shape[1], 0.0)
        members = []
        for matrix, offset, readout in zip(first, bias, last, strict=True):
            hidden = graph.add("Add", graph.add("MatMul", rows, matrix), offset)
            erf = graph.add("Erf", graph.add("Mul", hidden, np.float32(math.sqrt(0.5))))
            hidden = graph.add("Mul", graph.add("Mul", hidden, np.float32(0.5)), graph.add("Add", erf, np.float32(1)))
            members.append(graph.add("Add", padded, graph.add("MatMul", hidden, readout)))
        return members

    def matmul_shapes(self) -> list[tuple[int, int]]:
        """List the shapes of both layers of each MLP."""
        dim, hidden = self.source.config.dim, self.config.hidden
        return [(dim, hidden), (hidden, self.config.embedding_dim)] * self.config.members
