"""Steps of the optimizer for one model or for several models at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed

from protonet.optimizer.batches import ParameterBatch, SliceState, create_slice_state, get_place
from protonet.optimizer.search import OptimizerRun
from protonet.optimizer.settings import EMBEDDING, STEP_CONFIG, STEP_SIZE, ParameterGroup


class Stepper:
    """Performs optimizer steps of one training run, or of several runs that are batched for speed.

    Each run has one slice of each parameter. The index of a slice is parameter index * number of runs + run index.

    Args:
        runs: The step size state of each run.
        sharded: Whether the processes of torch's default group have other parameters of the same, single run.
    """

    def __init__(self, *runs: OptimizerRun, sharded: bool = False) -> None:
        self.runs = runs
        self.sharded = sharded
        self.slices: list[tuple[Tensor, ParameterGroup]] = []
        self.batches: list[ParameterBatch] = []

    def step(self, gradients: dict[int, Tensor]) -> None:
        """Take one step, given the gradient of each slice by its index; skip runs that have a non-finite gradient."""
        gradients = {index: each.float() if each.dtype.itemsize < 4 else each for index, each in gradients.items()}
        each_norm = torch._foreach_norm([*gradients.values()]) if gradients else []
        norms = dict(zip(gradients, _to_floats(each_norm), strict=True))
        bad = {index % len(self.runs) for index, norm in norms.items() if not math.isfinite(norm)}
        if self.sharded:
            bad = {0} if any(row[0] for row in self._gather_from_processes([bool(bad)])) else set()
        if bad:  # a value that is not finite would stay in moments and bases
            for run in bad:
                self.runs[run].n_skipped += 1
            gradients = {index: gradient for index, gradient in gradients.items() if index % len(self.runs) not in bad}
            if not gradients:
                return
        known = {index for batch in self.batches for index in batch.slice_ids}
        if new := [index for index in gradients if norms[index] and index not in known]:
            self.add_states({index: self._create_state(index, gradients[index]) for index in new})
        self._update_parameters(gradients, {index: norms[index] for index in gradients})

    def add_states(self, states: dict[int, SliceState]) -> None:
        """Group slices of equal settings into batches, given the state of each slice by its index."""
        alike = defaultdict[Any, dict[int, SliceState]](dict)
        for index, state in states.items():
            alike[self._get_kind(index, state)][index] = state
        batches, self.batches = self.batches, []
        for batch in batches:
            kind = self._get_kind(batch.slice_ids[0], batch.states[0])
            if kind in alike:
                alike[kind] |= zip(batch.slice_ids, batch.states, strict=True)
            else:
                self.batches.append(batch)
        for members in alike.values():
            sizes = {index: state["exp_avg"].numel() for index, state in members.items()}
            part, total = list[int](), 0
            for index in sorted(members, key=lambda index: (*get_place(members[index]), index)):
                if part and total + sizes[index] > STEP_CONFIG.max_batch_elements:
                    self.batches.append(ParameterBatch(part, [members[index] for index in part]))
                    part, total = [], 0
                part.append(index)
                total += sizes[index]
            self.batches.append(ParameterBatch(part, [members[index] for index in part]))

    def _get_kind(self, index: int, state: SliceState) -> Any:
        """Get what the slices of a batch have in common."""
        p, group = self.slices[index]
        matrix, columns = state["exp_avg"], state["exp_avg"].shape[1] if state["embedding"] else None
        # A large one is alone, so that it is not copied when others join.
        alone = index if matrix.numel() > STEP_CONFIG.max_batch_elements else None
        return alone, columns, p.dtype, p.device, id(group), matrix.dtype

    def _create_state(self, index: int, gradient: Tensor) -> SliceState:
        """Create the state of a parameter slice; zero rows of its first gradient show that it is an embedding table."""
        p, rows = self.slices[index][0], gradient.shape[0] if gradient.ndim > 1 else 1
        tall = p.ndim == 2 and p.shape[0] >= EMBEDDING.min_aspect_ratio * p.shape[1]
        embedding = tall and bool((gradient == 0).all(1).float().mean() > EMBEDDING.min_zero_row_fraction)
        return create_slice_state(rows, gradient.numel() // rows, gradient, embedding=embedding)

    def _update_parameters(self, gradients: dict[int, Tensor], norms: dict[int, float]) -> None:
        """Adapt step sizes to the gradients, and update the parameters that have a state and a gradient.

        Slices of a batch go on as one after some of them had no gradient: they only differ in their numbers of steps.
        """
        active = [batch for batch in self.batches if not gradients.keys().isdisjoint(batch.slice_ids)]
        groups = [self.slices[batch.slice_ids[0]][1] for batch in active]
        observed = [
            batch.update_bases([*map(gradients.get, batch.slice_ids)], [*map(norms.get, batch.slice_ids)], group)
            for batch, group in zip(active, groups, strict=True)
        ]
        products = iter(_to_floats([products for _, products in observed]))
        # By run and slice: slope, learning rate, a scheduler's factor, largest rate, whether it is not an embedding.
        statistics: dict[int, list[list[float]]] = defaultdict(list)
        for batch, group in zip(active, groups, strict=True):
            lr = float(group["unit_lr"] if "unit_lr" in group else group["lr"])
            factor = float(group["lr"]) / lr if lr else 0.0
            max_step = (EMBEDDING if batch.is_embedding else STEP_CONFIG).max_weight_change
            max_step /= EMBEDDING.step_size_factor if batch.is_embedding else 1.0
            shared = [lr, factor, max_step / (lr or 1.0), float(not batch.is_embedding)]
            for index, length in zip(batch.slice_ids, batch.step_lengths, strict=True):
                product = next(products)
                if index in gradients:
                    statistics[index % len(self.runs)].append([-length * product, *shared])
        if self.sharded:
            reduced = _reduce_statistics(statistics[0] or [STATISTICS_WITHOUT_GRADIENTS])
            statistics = {0: self._gather_from_processes(reduced)}
        for index, observations in statistics.items():
            slope, lr, factor, max_rate, others = _reduce_statistics(observations)
            if max_rate:  # some process has gradients
                self.runs[index].adapt_rate(slope, lr or 1.0, factor)
                self.runs[index].cap_rate(max_rate, embeddings_alone=not others)
        rates = [run.rate * run.annealing_factor(run.steps) for run in self.runs]
        for batch, group, (rotated, _) in zip(active, groups, observed, strict=True):
            parameters = [self.slices[index][0] for index in batch.slice_ids]
            batch.update_parameters(rotated, [rates[i % len(rates)] for i in batch.slice_ids], parameters, group)
        for index, observations in statistics.items():
            self.runs[index].steps += any(max_rate for *_, max_rate, _ in observations)

    def _gather_from_processes(self, values: Sequence[float]) -> list[list[float]]:
        """Gather a list of numbers from each process of torch's default group; return one list for each process."""
        device = self.slices[0][0].device if self.slices else torch.device("cpu")
        local = torch.tensor(values, dtype=torch.float64, device=device)
        rows = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
        distributed.all_gather(rows, local)
        return [row.tolist() for row in rows]


STATISTICS_WITHOUT_GRADIENTS = [0.0] * 5  #: The statistics of a process without gradients.


def _reduce_statistics(statistics: Sequence[list[float]]) -> list[float]:
    """Reduce statistics of slices to one list: the sum of their slopes, and the maximum of each other number."""
    slopes, *others = zip(*statistics, strict=True)
    return [math.fsum(slopes), *map(max, others)]


def _to_floats(tensors: Sequence[Tensor]) -> list[float]:
    """Convert tensors (n,) or () to one list of floats, with a single transfer from a device."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    floats: list[float] = torch.hstack([*tensors]).tolist() if tensors else []
    return floats


class StackOptimizer:
    """Optimize several models of one architecture at once, as `CustomOptimizer` does, each with its own step size.

    It is no `torch.optim.Optimizer`, because making the first one imports torch's compiler (about 1.1 CPU seconds). It
    has no hooks, schedulers or state dictionary.

    Args:
        groups: Weights (models, ...) and their weight decay, >= 0; each model's slice of a weight has at least one
            dimension.
        start: The initial step size, > 0.
        betas: Decay rates in [0, 1) of the averages of the gradients and of their squares.
        eps: >= 0, relative to the root mean square of recent gradients.
        total_steps: The number of steps of the training run; None if it is unknown.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Tensor], float]],
        start: float = STEP_SIZE.usual_step_size,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        total_steps: int | None = None,
    ) -> None:
        self.stepper = Stepper(*(OptimizerRun(1.0, total_steps) for _ in groups[0][0][0]))
        for weights, decay in groups:
            group = {"lr": start, "betas": betas, "eps": eps, "weight_decay": decay}
            self.stepper.slices += [(part, group) for weight in weights for part in weight.detach().unbind()]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step of every model, given the gradients (models, ...) of the weights, in the order of the groups.

        A model with a gradient that is not finite is not changed.
        """
        self.stepper.step(dict(enumerate(chain(*(gradient.unbind() for gradient in gradients)))))
