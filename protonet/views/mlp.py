"""MLP views: ensembles of small residual MLPs on the output of a linear view. Only these are trained by gradients.

`protonet.views.evaluation` chooses their sizes within a parameter budget.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.losses import MAX_CHUNK_ROWS, class_means, cosine_cross_entropy, episodic_loss
from protonet.optimizer import StackOptimizer
from protonet.sampling import index_classes, sample_episodes
from protonet.selection.scoring import is_worse_by_one_error, select_simplest_within_one_error
from protonet.views import evaluation
from protonet.views.config import Config, bounded_field, raise_unless
from protonet.views.linear import LinearSpec
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.shifts import shift_rows
from protonet.views.view import (
    InputMap,
    LinearMap,
    TrainingRows,
    View,
    ViewSpec,
    renumber_by_first_row,
    require_linear_map,
)

#: Number of episodes that are sampled by one call, whose time hardly depends on it.
EPISODES_PER_SAMPLING = 64


@dataclass(frozen=True, kw_only=True)
class MLPTrainingConfig:
    """Hyperparameters of a training run; docs/benchmarks/archive.md has ablations."""

    learning_rate: float = 1e-3  #: Initial step size of the step-size search.
    weight_decay: float = 0.15  #: Decoupled weight decay of the matrices, in units of the step size.
    temperature: float = 0.1  #: Divisor of the cosines in both losses.
    label_smoothing: float = 0.1  #: Label smoothing, in [0, 1).
    input_noise: float = 0.5  #: Standard deviation of the Gaussian noise added to the input, which has unit scale.
    weight_average_decay: float = 0.98  #: Decay of the exponential moving average of the weights, in [0, 1).
    max_episode_rows: int = 256  #: Maximum number of rows per episode.
    max_episode_classes: int = 64  #: Maximum number of classes per episode.
    episodic_loss_weight: float = 1.0  #: Weight of the episodic loss.
    cross_entropy_weight: float = 1.0  #: Weight of the cross-entropy to one proxy per class.


MLP_TRAINING = MLPTrainingConfig()


class ResidualMLPs(nn.Module):
    """An ensemble of residual MLPs of equal size, evaluated in batched products: ``pad(z) + W2 gelu(W1 z + b1)``.

    The last layers are zeros at first, so that an untrained MLP returns its input, padded with zeros. The generator
    draws the first layers; without one, they are zeros until a state dict is loaded.
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
        """Apply the selected MLPs to rows: (members, n, embedding_dim).

        Rows z are (members, n, input_dim), or (n, input_dim) if all MLPs have the same input.
        """
        first, bias, last = self.first[members], self.bias[members], self.last[members]
        z = z.expand(len(first), -1, -1)
        hidden = F.gelu(torch.baddbmm(bias, z, first))
        padding = last.shape[2] - z.shape[2]
        return torch.baddbmm(F.pad(z, (0, padding)) if padding else z, hidden, last)


class MLPTrainingData(NamedTuple):
    """The training data of one MLP of an ensemble."""

    inputs: Tensor  #: (n, dim): the training rows, mapped by the affine map of a linear view.
    labels: Tensor  #: (n,) int64: classes, numbered by their first rows.
    weights: Tensor | None = None
    """(n,) sample weights with a mean of 1 within each class, since episodes are class-balanced. If None, all are 1."""


def build_mlp_training_data(source: LinearMap, rows: TrainingRows, *, use_shifts: bool) -> MLPTrainingData:
    """Build the training data of an MLP: rows that are mapped by ``source``, with shifted copies if ``use_shifts``."""
    shifts = rows.shifts if use_shifts else (0,)
    z = torch.cat([source(part) for part in shift_rows(rows.features, shifts).split(MAX_CHUNK_ROWS)])
    weights = rows.class_balanced_weights
    weights = None if weights is None else weights.to(z.dtype).repeat(len(shifts))
    class_ids, _ = renumber_by_first_row(rows.labels)  # classes have random initial proxies
    return MLPTrainingData(z, class_ids.repeat(len(shifts)), weights)


def train_mlps(
    ensemble: ResidualMLPs,
    training_data: Sequence[MLPTrainingData],
    num_classes: int,
    *,
    steps: Sequence[int],
    generator: torch.Generator,
    deadline: float = float("inf"),
    config: MLPTrainingConfig = MLP_TRAINING,
) -> Iterator[tuple[int, ResidualMLPs]]:
    """Train each MLP of an ensemble on its data; yield the MLPs with averaged weights at the given step counts.

    Episodes and noise are drawn on the CPU, so that the result does not depend on the device.

    Args:
        ensemble: The MLPs, which are trained in place.
        training_data: The training data of each MLP.
        num_classes: Number of classes.
        steps: The step counts after which to yield, ascending. Training ends after the last.
        generator: Draws episodes and noise.
        deadline: Value of ``time.monotonic()`` after which training ends with a last yield, after one step at least.
        config: Training hyperparameters.

    Yields:
        The number of steps so far, and the MLPs with averaged weights: the same object each time.

    Source: episodes as in Vinyals et al. 2016; weight averaging as in Polyak and Juditsky 1992.
    """
    embedding_dim = ensemble.last.shape[2]
    indices, device = [index_classes(task.labels.cpu()) for task in training_data], training_data[0].inputs.device
    fewest = min(len(index.class_counts) for index in indices)
    n_way = min(config.max_episode_classes, config.max_episode_rows // 2, fewest)
    slots = max(2, min(10, config.max_episode_rows // n_way))
    n_shot = slots // 2
    proxies = _initial_proxies(training_data, num_classes, embedding_dim, generator)
    average = copy.deepcopy(ensemble).requires_grad_(False)
    trained = [*ensemble.parameters(), proxies]
    averages, weights_now = ([weight.detach() for weight in mlps.parameters()] for mlps in (average, ensemble))
    # Each member has a separate step size: a common one would leak information between folds.
    parameter_groups = [(trained[:-1], config.weight_decay), (trained[-1:], 0.0)]
    optimizer = StackOptimizer(parameter_groups, start=config.learning_rate)
    loss_settings = {"temperature": config.temperature, "smoothing": config.label_smoothing}
    for step in range(1, steps[-1] + 1):
        if step > 1 and time.monotonic() > deadline:
            yield step - 1, average
            return
        position = (step - 1) % EPISODES_PER_SAMPLING
        if position == 0:
            count = min(EPISODES_PER_SAMPLING, steps[-1] + 1 - step)
            sizes = {"n_way": n_way, "n_shot": n_shot, "n_query": slots - n_shot, "n_episodes": count}
            drawn = [sample_episodes(index, **sizes, generator=generator).flatten(1).to(device) for index in indices]
            pairs = list(zip(training_data, drawn, strict=True))
            drawn_labels = torch.stack([task.labels[rows] for task, rows in pairs], dim=1)
            weights_of_tasks = [task.weights[rows] for task, rows in pairs if task.weights is not None]
            drawn_weights = torch.stack(weights_of_tasks, dim=1) if weights_of_tasks else None
        rows = [episodes[position] for episodes in drawn]
        # (members, way * slots, dim)
        z = torch.stack([task.inputs[row] for task, row in zip(training_data, rows, strict=True)])
        labels = drawn_labels[position]  # (members, way * slots)
        noise = torch.randn(z.shape[1:], generator=generator, dtype=z.dtype).to(device)  # one for all members
        z = z + config.input_noise * noise
        embeddings = F.normalize(ensemble(z), dim=2)
        episode = embeddings.unflatten(1, (n_way, slots))  # (members, way, slots, dim)
        weights = None if drawn_weights is None else drawn_weights[position]  # (members, way * slots)
        episode_weights = None if weights is None else weights.unflatten(1, (n_way, slots))
        loss = episodic_loss(episode, n_shot=n_shot, **loss_settings, weights=episode_weights)
        loss = config.episodic_loss_weight * loss
        proxy_loss = cosine_cross_entropy(embeddings, labels, proxies, **loss_settings, weights=weights)
        loss = loss + config.cross_entropy_weight * proxy_loss
        optimizer.step(torch.autograd.grad(loss, trained))
        decay = min(config.weight_average_decay, step / (step + 9))
        torch._foreach_lerp_(averages, weights_now, 1 - decay)
        if step in steps:
            yield step, average


def _initial_proxies(
    training_data: Sequence[MLPTrainingData], num_classes: int, embedding_dim: int, generator: torch.Generator
) -> Tensor:
    """Compute initial class proxies (members, num_classes, embedding_dim): class means of inputs, padded with noise."""
    means = torch.stack([class_means(F.normalize(z, dim=1), y, num_classes, w)[0] for z, y, w in training_data])
    padding = embedding_dim - means.shape[2]
    noise = torch.randn(*means.shape[:2], padding, generator=generator, dtype=means.dtype)
    return torch.cat([means, 0.02 * noise.to(means.device)], dim=2).requires_grad_(True)


@dataclass(frozen=True)
class MLPSpec:
    """The spec (hyperparameters) of an MLP view: an ensemble whose members differ in their initial weights."""

    source: LinearSpec  #: The spec of the linear view whose affine map is the input, without its bias coordinate.
    n_mlps: int  #: Number of MLPs, each a part of the embedding.
    n_hidden: int  #: Number of hidden units of each MLP.
    n_steps: int  #: Number of training steps.
    embedding_dim: int  #: Width of the output of each MLP, at least the width of its input.
    use_shifts: bool = False  #: Whether the MLPs are also trained on shifted copies of the rows.
    training_config: MLPTrainingConfig = MLP_TRAINING  #: Training hyperparameters.
    is_trained: ClassVar[bool] = True

    @property
    def tags(self) -> frozenset[str]:
        """Properties by which the prior predicts the view's weight: "learned", and those of the input map."""
        return self.source.tags | {"learned"}

    @property
    def name(self) -> str:
        """The name in reports: the number of MLPs, their hidden units, their input, and the number of steps."""
        return f"learned: {self.n_mlps}x{self.n_hidden} MLP on {self.source.name}, {self.n_steps} steps"

    def fit(self, rows: TrainingRows, source: InputMap | None) -> MLPView:
        """Train the MLPs on labelled rows; initial weights and episodes are drawn with the seed ``rows.seed`` alone."""
        generator = torch.Generator().manual_seed(rows.seed)
        source = require_linear_map(source)
        data = build_mlp_training_data(source, rows, use_shifts=self.use_shifts)
        mlps = ResidualMLPs(self.n_mlps, data.inputs.shape[1], self.n_hidden, self.embedding_dim, generator)
        mlps = mlps.to(data.inputs.device)  # weights are drawn on the CPU: they do not depend on the device
        steps, tasks = [self.n_steps], [data] * self.n_mlps
        limits: dict[str, Any] = {"deadline": rows.deadline, "config": self.training_config}
        for _, average in train_mlps(mlps, tasks, rows.num_classes, steps=steps, generator=generator, **limits):
            mlps = average.requires_grad_(True)
        return MLPView.from_mlps(mlps, source)


@dataclass(frozen=True)
class MLPFamily(evaluation.ViewFamily):
    """Ensembles of MLPs of increasing size, each trained until more steps increase the held-out log-loss."""

    max_n_sizes: int = len(evaluation.MLP_SIZES)  #: Maximum number of sizes that are evaluated, smallest first.
    step_counts: tuple[int, ...] = (3, 10, 30, 60)  #: Numbers of training steps after which MLPs are evaluated.
    max_work: float = 5e7  #: Maximum number of parameters times steps for one size, over all folds.
    training_config: MLPTrainingConfig = MLP_TRAINING  #: Training hyperparameters.
    progress_name: ClassVar[str] = "MLP views"
    relative_time: ClassVar[float] = 3.0

    def without_validation(self) -> None:
        """Return None, for no MLP: without held-out rows, it cannot be decided whether training helps."""

    def smallest_trained_spec(self, plan: evaluation.EncoderPlan, source: ViewSpec) -> MLPSpec | None:
        """Return the spec of the smallest MLP on a linear view.

        Returns None if the family has no MLPs, or if all exceed the parameter budget.
        """
        if not plan.ensemble_sizes or not self.max_n_sizes or not isinstance(source, LinearSpec):
            return None
        sizes, steps = plan.ensemble_sizes[0], self.step_counts[0]
        return MLPSpec(source, *sizes, steps, plan.embedding_dim, training_config=self.training_config)

    def candidates(self, evaluator: evaluation.CandidateEvaluator) -> Iterator[evaluation.Candidate]:
        """Train MLPs of each size on all folds at once; yield a candidate for each size and number of steps.

        The input is the simplest linear view that is within one standard error of the best linear view. MLPs are also
        trained on shifted copies of the rows if the best view so far is fitted to shifted copies.
        """
        rows, plan = evaluator.rows, evaluator.mlp_sizes
        linear = [candidate for candidate in evaluator.candidates if isinstance(candidate.spec, LinearSpec)]
        base = linear[select_simplest_within_one_error([candidate.losses for candidate in linear])].spec
        leader = min(evaluator.candidates, key=lambda candidate: candidate.mean_loss)
        use_shifts = leader.spec.use_shifts
        smallest = self.smallest_trained_spec(plan, base)
        if smallest is None:
            return
        sources = [require_linear_map(view.source) for view in evaluator.fit(base)]
        untrained = evaluator.make_candidate(
            smallest, evaluator.compute_cosines([partial(_apply_mlps, source) for source in sources])
        )
        if evaluator.is_past_deadline():
            yield untrained
            return
        fold_data = [
            build_mlp_training_data(source, evaluator.rows.select(fold.train), use_shifts=use_shifts)
            for source, fold in zip(sources, evaluator.folds, strict=True)
        ]
        dim = fold_data[0].inputs.shape[1]
        best, best_size, sizes = untrained, (0, 0), plan.ensemble_sizes[: self.max_n_sizes]
        for index, (members, hidden) in enumerate(sizes):
            if evaluator.is_past_deadline():
                return
            # A larger size is evaluated only if the last one was the best, and is not worse than the best view.
            if index > 1 and (best_size != sizes[index - 1] or is_worse_by_one_error(best.losses, leader.losses)):
                break
            if index > 1 and len(evaluator.labels) < evaluation.MIN_EVALUATED_ROWS:
                break  # too few rows to compare sizes
            mlps = ResidualMLPs(members * len(fold_data), dim, hidden, plan.embedding_dim, evaluator.generator)
            mlps = mlps.to(fold_data[0].inputs.device)
            data = [rows_of_fold for rows_of_fold in fold_data for _ in range(members)]
            step_work = len(data) * evaluation.count_mlp_parameters(dim, hidden, plan.embedding_dim)
            best_of_size = untrained
            # The smallest MLP hardly differs from its source.
            step_counts = self.step_counts if index else self.step_counts[:1]
            for steps, average in train_mlps(
                mlps,
                data,
                rows.num_classes,
                steps=[steps for steps in step_counts if steps * step_work <= self.max_work] or step_counts[:1],
                generator=evaluator.generator,
                deadline=rows.deadline,
                config=self.training_config,
            ):
                maps = [
                    partial(_apply_mlps, source, mlps=average, members=slice(fold * members, (fold + 1) * members))
                    for fold, source in enumerate(sources)
                ]
                cosines = evaluator.compute_cosines(maps)
                size, recipe = (members, hidden, steps, plan.embedding_dim), self.training_config
                spec = MLPSpec(smallest.source, *size, use_shifts, recipe)
                candidate = evaluator.make_candidate(spec, cosines)
                yield candidate
                if is_worse_by_one_error(candidate.losses, best_of_size.losses):
                    break
                best_of_size = min(best_of_size, candidate, key=lambda evaluated: evaluated.mean_loss)
            if best_of_size.mean_loss < best.mean_loss:
                best, best_size = best_of_size, (members, hidden)


def _apply_mlps(source: LinearMap, x: Tensor, mlps: ResidualMLPs | None = None, members: slice = slice(None)) -> Tensor:
    """Apply the input map ``source``, then the selected MLPs, to features x (n, input_dim): (members, n, dim)."""
    z: Tensor = source(x)
    return z[None] if mlps is None else mlps(z, members)


@dataclass(frozen=True)
class MLPConfig(Config):
    """The sizes from which an `MLPView` is built."""

    members: int = bounded_field(high=1024)  #: Number of MLPs.
    hidden: int = bounded_field()  #: Number of hidden units of each MLP.
    embedding_dim: int = bounded_field()  #: Width of the output of each MLP.


class MLPView(View):
    """A view whose output has a part (a block of columns) for each MLP of an ensemble."""

    kind = "mlp"
    config_type, input_map_type = MLPConfig, LinearMap
    config: MLPConfig
    source: LinearMap

    def __init__(
        self, config: Config, source: InputMap | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(config, source, tensors)
        dim = self.source.config.dim
        raise_unless(self.config.embedding_dim >= dim, "an MLP with fewer dimensions than features")
        self.mlps = ResidualMLPs(self.config.members, dim, self.config.hidden, self.config.embedding_dim)

    @classmethod
    def from_mlps(cls, mlps: ResidualMLPs, source: LinearMap) -> MLPView:
        """Build a view from trained MLPs and their input map."""
        members, hidden, embedding_dim = mlps.last.shape
        view = cls(MLPConfig(members, hidden, embedding_dim), source)
        view.mlps = mlps
        return view

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The width of the output of each MLP."""
        return (self.config.embedding_dim,) * self.config.members

    def forward(self, z: Tensor) -> Tensor:
        """Map rows z (n, dim) by all MLPs; return their concatenated outputs (n, members * embedding_dim)."""
        return torch.cat(self.mlps(z.to(self.mlps.first.dtype)).unbind(0), dim=1)

    def add_to_graph(self, graph: OnnxGraph, rows: str) -> list[str]:
        """Add the MLPs to an ONNX graph; return the names of the values of their outputs."""
        first, bias, last = self.mlps.first, self.mlps.bias, self.mlps.last
        padded = graph.pad(rows, last.shape[2] - first.shape[1], 0.0)
        members = []
        for matrix, offset, readout in zip(first, bias, last, strict=True):
            hidden = graph.add("Add", graph.add("MatMul", rows, matrix), offset)
            erf = graph.add("Erf", graph.add("Mul", hidden, np.float32(math.sqrt(0.5))))
            hidden = graph.add("Mul", graph.add("Mul", hidden, np.float32(0.5)), graph.add("Add", erf, np.float32(1)))
            members.append(graph.add("Add", padded, graph.add("MatMul", hidden, readout)))
        return members
