"""Parameters of equal shapes, stacked: their state and their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protonet.optimizer.preconditioner import Block, choose_blocks
from protonet.optimizer.settings import EMBEDDING, PRECONDITIONER, SEARCH, STEP, Group

#: Tensors of a batch and of a block that have one slice for each parameter, and entries of a parameter's state that
#: all parameters of a batch share.
BATCH_TENSORS = ("mean", "slow_mean", "square", "last_step", "gradient_size")
BLOCK_TENSORS = ("statistics", "basis", "factors", "slopes")
SHARED_ENTRIES = ("step", "embedding")


@dataclass
class ParameterBatch:
    """Slices that are alike and step together, stacked.

    Tensors are of at least single precision and (slices, rows, columns). Convolutions are matrices, and a parameter of
    fewer than two dimensions is one row.
    """

    indices: list[int]  #: Indices of the slices.
    embedding: bool  #: See `EmbeddingConfig`.
    mean: Tensor  #: Adam's first moment, in the bases.
    #: The mean over a longer window, in the bases. An embedding's is empty: rows are seen too seldom for one.
    slow_mean: Tensor
    square: Tensor  #: Adam's second moment, in the bases.
    last_step: Tensor  #: The last step, in the bases.
    gradient_size: Tensor  #: (slices,), the gradients' usual root mean square; infinite at first.
    blocks: list[Block]
    count: Tensor  #: 0-d, on the CPU, the number of steps taken.

    @classmethod
    def initialize(cls, indices: list[int], gradient: Tensor, *, embedding: bool) -> ParameterBatch:
        """Initialize the batch of slices before their first step, from gradients as `stack_matrices` makes them."""
        rows, columns = gradient.shape[1:]
        blocks = []
        for axis, start, n in [] if embedding else choose_blocks(rows, columns):
            basis = torch.eye(n, dtype=gradient.dtype, device=gradient.device).repeat(len(gradient), 1, 1)
            blocks.append(Block(axis, start, torch.zeros_like(basis), basis, *basis.new_zeros(2, len(basis), n)))
        mean, square, last_step = (torch.zeros_like(gradient) for _ in range(3))
        slow_mean = gradient.new_zeros(len(gradient), 0) if embedding else torch.zeros_like(gradient)
        size = gradient.new_full((len(gradient),), math.inf)
        return cls(indices, embedding, mean, slow_mean, square, last_step, size, blocks, torch.tensor(0))

    @classmethod
    def from_states(cls, indices: list[int], states: Sequence[dict[str, Tensor]]) -> ParameterBatch:
        """Stack copies of the states of slices, as `get_state` makes them; they have one shape and one step."""
        names = states[0].keys() - {*SHARED_ENTRIES}
        stacked = {name: torch.stack([state[name] for state in states]) for name in names}
        embedding, blocks = bool(states[0]["embedding"]), []
        for index, (axis, start, _) in enumerate([] if embedding else choose_blocks(*stacked["mean"].shape[1:])):
            blocks.append(Block(axis, start, *(stacked.pop(f"block{index}.{name}") for name in BLOCK_TENSORS)))
        return cls(indices, embedding, **stacked, blocks=blocks, count=states[0]["step"].clone())

    def get_state(self, row: int) -> dict[str, Tensor]:
        """Get the state of one slice: views of the stacked tensors."""
        state = {"step": self.count, "embedding": torch.tensor(self.embedding)}
        state |= {name: getattr(self, name)[row] for name in BATCH_TENSORS}
        for index, block in enumerate(self.blocks):
            state |= {f"block{index}.{name}": getattr(block, name)[row] for name in BLOCK_TENSORS}
        return state

    def select(self, rows: list[int]) -> ParameterBatch:
        """Copy some of the slices to a batch of their own."""
        return ParameterBatch.from_states([self.indices[row] for row in rows], [self.get_state(row) for row in rows])

    def observe(self, gradient: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Update the bases by gradients; return these in the bases, and their slopes along the last step."""
        max_norms = STEP.max_spike * math.sqrt(gradient[0].numel()) * self.gradient_size
        gradient = gradient.to(self.mean.dtype).mul_((max_norms / norms).clamp_(max=1)[:, None, None])
        step = int(self.count.add_(1))
        if step == 1 or step % PRECONDITIONER.gather_every == 0:
            for block in self.blocks:
                block.gather(gradient)
                if step <= PRECONDITIONER.early_steps or step % PRECONDITIONER.update_every == 0:
                    block.update_basis((self.mean, self.slow_mean, self.last_step), self.square)
        for block in self.blocks:
            block.rotate(gradient, block.basis.mT)
        uphill = self.last_step * gradient
        for block in self.blocks:
            block.adapt(uphill, step)
        return gradient, uphill.sum((1, 2))

    def move(self, rotated: Tensor, rates: list[float], parameters: list[Tensor], group: Group) -> None:
        """Move parameters by one step, along gradients in the bases, and decay the weights of matrices."""
        step, beta1, beta2 = int(self.count), float(group["betas"][0]), float(group["betas"][1])
        beta2 = max(beta2, EMBEDDING.min_beta2) if self.embedding else beta2
        slow_fraction = 0.0 if self.embedding else STEP.slow_fraction
        mean = self.mean.lerp_(rotated, 1 - beta1)
        square = self.square.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        correction, scale = 1 - beta2**step, (1 - slow_fraction) / (1 - beta1 ** (step + 1))
        size = square.mean((1, 2))  # a rotation does not change it
        self.gradient_size.copy_(size.div(correction).add_(STEP.tiny).sqrt_())
        floor = size.mul_(STEP.floor**2 + float(group["eps"]) ** 2).add_(STEP.tiny)
        direction = torch.lerp(rotated, mean, beta1, out=self.last_step)
        if self.embedding:
            sums = rotated.square().sum(2)  # (slices, rows); rows without a gradient have 0
            usual = sums.sum(1) / (sums.count_nonzero(1).clamp_(min=1) * rotated.shape[2])
            floor.add_(usual, alpha=EMBEDDING.extra_frequency * correction)
        else:
            slow_mean = self.slow_mean.lerp_(rotated, STEP.window / (step + STEP.window - 1))
            direction.add_(slow_mean, alpha=slow_fraction / scale)
        rate_factor, max_step = (EMBEDDING.rate_factor, EMBEDDING.max_step) if self.embedding else (1.0, STEP.max_step)
        sizes = [min(max_step, rate_factor * float(group["lr"]) * rate) for rate in rates]
        lengths: Any = sizes[0] if len({*sizes}) == 1 else floor.new_tensor(sizes)[:, None, None]
        direction.mul_((square + floor[:, None, None]).rsqrt_()).mul_(lengths * (-scale * math.sqrt(correction)))
        for block in self.blocks:
            block.scale(direction)
        update = direction.clone()
        for block in self.blocks:
            block.rotate(update, block.basis)
        if parameters[0].ndim > 1:
            decay = float(group["weight_decay"]) * (EMBEDDING.decay_factor if self.embedding else 1.0)
            # In full at usual steps, and none at short ones, which AdamW's decay would pull off the minimum.
            decays = [size * min(1.0, size / SEARCH.usual_rate) ** 2 * decay for size in sizes]
            torch._foreach_mul_(parameters, [1 - decay for decay in decays])
        torch._foreach_add_(parameters, [*update.view(-1, *parameters[0].shape)])


def split_batches(shape: Sequence[int], indices: list[int]) -> list[list[int]]:
    """Split the indices of slices of one shape into batches that fit a cache."""
    count = max(1, STEP.batch_elements // math.prod(shape))
    return [indices[start : start + count] for start in range(0, len(indices), count)]


def stack_matrices(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors to matrices (slices, rows, columns) of at least single precision."""
    stacked = torch.stack(list(tensors))
    rows = stacked.shape[1] if stacked.ndim > 2 else 1
    return stacked.reshape(len(stacked), rows, -1).to(torch.promote_types(stacked.dtype, torch.float32))
