"""The steps of one run, or of several runs at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from protonet.optimizer.batches import ParameterBatch, split_batches, stack_matrices
from protonet.optimizer.search import Run
from protonet.optimizer.settings import EMBEDDING, STEP, Group


class Stepper:
    """The steps of one run, or of several runs that are computed together for speed.

    Each run has a slice of each parameter. Its index is the parameter's, times the number of runs, plus the run's.
    """

    def __init__(self, *runs: Run) -> None:
        self.runs = runs
        self.slices: list[tuple[Tensor, Group]] = []
        self.batches: list[ParameterBatch] = []

    def step(self, gradients: dict[int, Tensor]) -> None:
        """Take one step along gradients, by the slices' indices; a run skips it if one of its own is not finite."""
        n_runs, batches, self.batches = len(self.runs), self.batches, []
        for batch in batches:  # is split if only some of its slices have gradients
            rows = [[row for row, n in enumerate(batch.indices) if (n in gradients) == has] for has in (True, False)]
            self.batches += [batch.select(part) for part in rows] if all(rows) else [batch]
        active = [batch for batch in self.batches if batch.indices[0] in gradients]
        known = {index for batch in self.batches for index in batch.indices}
        indices = [batch.indices for batch in active] + [[index] for index in gradients if index not in known]
        stacks = [stack_matrices([gradients[index] for index in part]) for part in indices]
        norms = [torch.linalg.vector_norm(stack, dim=(1, 2)) for stack in stacks]
        norm_of = dict(zip(chain(*indices), _to_floats(norms), strict=True))
        if bad := {index % n_runs for index, norm in norm_of.items() if not math.isfinite(norm)}:
            for run in bad:
                self.runs[run].skipped += 1
            self.step({index: gradient for index, gradient in gradients.items() if index % n_runs not in bad})
        elif new := [index for index, norm in norm_of.items() if norm and index not in known]:
            self._initialize(new, gradients)
            self.step(gradients)
        else:
            self._move(active, stacks, norms)
            for run in {index % n_runs for index in gradients if index in known}:  # the others have no state
                self.runs[run].steps += 1

    def _initialize(self, indices: list[int], gradients: dict[int, Tensor]) -> None:
        """Batch slices that are alike, before their first step."""
        alike = defaultdict[Any, list[int]](list)
        for index in indices:
            p, group = self.slices[index]
            tall = p.ndim == 2 and p.shape[0] >= EMBEDDING.min_ratio * p.shape[1]
            embedding = tall and bool((gradients[index] == 0).all(1).float().mean() > EMBEDDING.min_untouched)
            alike[p.shape, p.dtype, p.device, id(group), embedding].append(index)
        for (shape, *_, embedding), similar in alike.items():
            for part in split_batches(shape, similar):
                stack = stack_matrices([gradients[index] for index in part])
                self.batches.append(ParameterBatch.initialize(part, stack, embedding=embedding))

    def _move(self, active: list[ParameterBatch], stacks: list[Tensor], norms: list[Tensor]) -> None:
        """Update the rates by the gradients, and move the parameters of batches."""
        observed = [batch.observe(stack, norm) for batch, stack, norm in zip(active, stacks, norms, strict=False)]
        slopes = iter(_to_floats([slopes for _, slopes in observed]))
        groups = [self.slices[batch.indices[0]][1] for batch in active]
        evidence = defaultdict[int, list[tuple[float, float, float, float]]](list)
        for batch, group in zip(active, groups, strict=True):
            lr = float(group["unit_lr"] if "unit_lr" in group else group["lr"])
            factor = float(group["lr"]) / lr if lr else 0.0
            max_step = EMBEDDING.max_step / EMBEDDING.rate_factor if batch.embedding else STEP.max_step
            for index in batch.indices:
                evidence[index % len(self.runs)].append((next(slopes), lr, factor, max_step / (lr or 1.0)))
        # Embeddings alone stay at their short longest step for hundreds of steps, to their good.
        end_search = not all(batch.embedding for batch in active)
        for index, items in evidence.items():
            run, (run_slopes, lrs, factors, max_rates) = self.runs[index], zip(*items, strict=True)
            run.follow(math.fsum(run_slopes), max(lrs) or 1.0, max(factors))
            run.limit(max(max_rates), end_search=end_search)
        rates = [run.rate * run.anneal(run.steps) for run in self.runs]
        for batch, group, (rotated, _) in zip(active, groups, observed, strict=True):
            parameters = [self.slices[index][0] for index in batch.indices]
            batch.move(rotated, [rates[index % len(rates)] for index in batch.indices], parameters, group)


def _to_floats(rows: Sequence[Tensor]) -> list[float]:
    """List the numbers of tensors (n,), with one transfer from the device."""
    floats: list[float] = torch.cat([row.to(rows[0].device) for row in rows]).tolist() if rows else []
    return floats
