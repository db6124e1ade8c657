"""Batches of parameters that are updated together as stacked tensors: optimizer state and update rule."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from protonet.optimizer.preconditioner import BasisBlock, choose_basis_blocks, rotate
from protonet.optimizer.settings import EMBEDDING, PRECONDITIONER, STEP_CONFIG, STEP_SIZE_SEARCH, ParameterGroup

SliceState = dict[str, Tensor]  #: The optimizer state of one slice, by the names of its entries.
SCALAR_ENTRIES = ("step", "gradient_size", "step_length")  #: Entries of a `SliceState` that are numbers, on the CPU.
MATRIX_ENTRIES = ("mean", "slow_mean", "square", "direction")  #: Entries (rows, columns), like the slice.


def create_slice_state(rows: int, columns: int, like: Tensor, *, embedding: bool) -> SliceState:
    """Create the initial state of a slice (rows, columns) on the device of ``like``, in its dtype or float32."""
    like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    state = {"embedding": torch.tensor(embedding)}
    state |= {name: torch.tensor(0.0, dtype=torch.float64) for name in SCALAR_ENTRIES}
    state |= {name: like.new_zeros(rows, columns) for name in MATRIX_ENTRIES}
    if embedding:  # rows are seen too seldom for a mean over a long window
        state["slow_mean"] = like.new_zeros(0)
    lengths = [] if embedding else [n for _, _, n in choose_basis_blocks(rows, columns)]
    state |= {name: like.new_zeros(sum(lengths)) for name in ("factors", "slopes")}
    for index, n in enumerate(lengths):
        basis = torch.eye(n, dtype=like.dtype, device=like.device)
        state |= {f"block{index}.statistics": torch.zeros_like(basis), f"block{index}.basis": basis}
    return state


def is_short_vector(state: SliceState) -> bool:
    """Test whether the slice with this state has no eigenbases and few elements, so that it is padded and stacked."""
    if state["factors"].numel() or state["embedding"]:
        return False
    return bool(state["mean"].numel() <= STEP_CONFIG.max_short_length)


@dataclass(eq=False)
class ParameterBatch:
    """Parameters of equal shape and settings, stacked and updated together. A slice is a parameter of one training run.

    Tensors are of at least single precision and (slices, rows, columns). Convolutions are matrices, and a parameter of
    fewer than two dimensions is one row. Short vectors may differ in length: they are rows, padded with zeros.
    """

    indices: list[int]  #: Indices of the slices.
    shapes: list[tuple[int, int]]  #: The numbers of rows and columns of each slice.
    embedding: bool  #: See `EmbeddingConfig`.
    step: int  #: Number of steps taken.
    gradient_sizes: list[float]  #: The running root mean square of the gradients of each slice.
    step_lengths: list[float]  #: The factor on ``direction`` in the last step of each slice.
    mean: Tensor  #: Adam's first moment, in the eigenbases.
    slow_mean: Tensor  #: Gradient average over more steps, in the eigenbases; empty for embeddings.
    square: Tensor  #: Adam's second moment, in the eigenbases.
    direction: Tensor  #: Minus the last step, in the eigenbases, divided by ``step_lengths``.
    #: (2, slices, eigenvectors of all blocks): logarithms of step size factors; averages of squared slopes.
    factors: Tensor
    blocks: list[BasisBlock]  #: The eigenbases; the blocks of a side are consecutive.
    side_blocks: list[list[BasisBlock]] = field(init=False)  #: The blocks of each side (rows or columns).
    scalars: array[float] = field(init=False)  #: The scalar entries of all slice states, which are views of it.
    block_lengths: list[int] = field(init=False)  #: The number of eigenvectors of each block of each slice.
    is_short: bool = field(init=False)  #: Whether the slices are short vectors, which may differ in shape.
    views: list[Tensor] = field(init=False)  #: Views of ``direction`` in the parameters' shapes, if it is the update.

    def __post_init__(self) -> None:
        """Group the basis blocks by axis, and allocate the array of the scalar state entries."""
        self.side_blocks = [list(side) for _, side in groupby(self.blocks, lambda block: block.axis)]
        self.scalars = array("d", [self.step, *self.gradient_sizes, *self.step_lengths])
        self.block_lengths = [block.basis.shape[2] for block in self.blocks] * len(self.indices)
        self.is_short, self.views = is_short_vector(self.get_state(0)), []

    @classmethod
    def from_states(cls, indices: list[int], states: Sequence[SliceState]) -> ParameterBatch:
        """Build a batch of the slices ``indices`` from copies of their states, all of equal shapes and step counts."""
        first, shapes = states[0], [(state["mean"].shape[0], state["mean"].shape[1]) for state in states]
        stacked = {
            name: _stack([state[name] for state in states], pad=name in MATRIX_ENTRIES and len({*shapes}) > 1)
            for name in first.keys() - {"embedding", *SCALAR_ENTRIES}
        }
        sizes, lengths = ([float(state[name]) for state in states] for name in SCALAR_ENTRIES[1:])
        factors = torch.stack([stacked.pop(name) for name in ("factors", "slopes")])
        embedding, blocks, offset = bool(first["embedding"]), list[BasisBlock](), 0
        for index, (axis, start, n) in enumerate([] if embedding else choose_basis_blocks(*shapes[0])):
            statistics, basis = (stacked.pop(f"block{index}.{name}") for name in ("statistics", "basis"))
            blocks.append(BasisBlock(axis, start, statistics, basis, *factors.narrow(2, offset, n)))
            offset += n
        step = int(first["step"])
        return cls(indices, shapes, embedding, step, sizes, lengths, factors=factors, blocks=blocks, **stacked)

    def get_state(self, row: int) -> SliceState:
        """Get the state of the slice with index ``row`` in the batch: views of the stacked tensors."""
        rows, columns = self.shapes[row]
        entries = torch.frombuffer(self.scalars, dtype=torch.float64)
        state = {"embedding": torch.tensor(self.embedding)}
        state |= {"factors": self.factors[0, row], "slopes": self.factors[1, row]}
        offsets = (0, 1 + row, 1 + len(self.indices) + row)
        state |= {name: entries[offset] for name, offset in zip(SCALAR_ENTRIES, offsets, strict=True)}
        for name in MATRIX_ENTRIES:
            matrix = getattr(self, name)[row]
            state[name] = matrix.view(-1)[: rows * columns].view(rows, columns) if matrix.numel() else matrix
        for index, block in enumerate(self.blocks):
            state |= {f"block{index}.statistics": block.statistics[row], f"block{index}.basis": block.basis[row]}
        return state

    def select(self, rows: list[int]) -> ParameterBatch:
        """Copy the slices with the indices ``rows`` in this batch to a new batch."""
        return ParameterBatch.from_states([self.indices[row] for row in rows], [self.get_state(row) for row in rows])

    def stack(self, gradients: Sequence[Tensor]) -> Tensor:
        """Stack the gradients of all slices: (slices, rows, columns), which may be a view of a single gradient."""
        stacked = _stack(gradients, pad=self.is_short) if len(gradients) > 1 else gradients[0]
        return stacked.reshape(self.mean.shape).to(self.mean.dtype)

    def observe(self, gradient: Tensor, norms: Sequence[float], group: ParameterGroup) -> tuple[Tensor, Tensor, Tensor]:
        """Update the eigenbases with gradients (slices, rows, columns) of finite norms, which are not changed.

        Returns the gradients in the eigenbases, their inner products (slices,) with the last update directions, and the
        slopes (slices, eigenvectors): the parts of the inner product of gradient and last step along each eigenvector.
        """
        self.step += 1
        scales = self._update_gradient_sizes(norms, self._get_betas(group)[1])
        if min(scales) < 1:
            gradient = gradient * gradient.new_tensor(scales)[:, None, None]
        if self.step == 1 or self.step % PRECONDITIONER.gradient_interval == 0:
            update = self.step <= PRECONDITIONER.early_steps or self.step % PRECONDITIONER.basis_update_interval == 0
            for block in self.blocks:
                block.update_statistics(gradient)
                if update:
                    block.update_basis((self.mean, self.slow_mean, self.direction), self.square)
        gradient = rotate(self.side_blocks, gradient)
        products = self.direction * gradient
        if not self.side_blocks:
            return gradient, products.sum((1, 2)), self.factors[1]
        sums = [products.sum(3 - blocks[0].axis) for blocks in self.side_blocks]  # each (slices, rows or columns)
        return gradient, sums[0].sum(1), _multiply_slices(torch.cat(sums, 1), [-length for length in self.step_lengths])

    def _get_betas(self, group: ParameterGroup) -> tuple[float, float]:
        """Get the decay rates of the first and the second moments from a parameter group; embeddings have a minimum."""
        beta1, beta2 = map(float, group["betas"])
        return beta1, max(beta2, EMBEDDING.min_beta2) if self.embedding else beta2

    def _update_gradient_sizes(self, norms: Sequence[float], beta2: float) -> list[float]:
        """Update the running RMS of each slice's gradients; return factors <= 1 that clip outlier gradients."""
        step, scales = self.step, list[float]()
        for row, ((rows, columns), norm, size) in enumerate(zip(self.shapes, norms, self.gradient_sizes, strict=True)):
            root = math.sqrt(rows * columns)
            limit = STEP_CONFIG.max_gradient_ratio * root * size if step > 1 else math.inf
            scales.append(limit / norm if norm > limit else 1.0)
            # The mean of ``square``, which rotations do not change.
            mean = beta2 * (1 - beta2 ** (step - 1)) * size**2 + (1 - beta2) * (min(norm, limit) / root) ** 2
            self.gradient_sizes[row] = math.sqrt(mean / (1 - beta2**step) + STEP_CONFIG.min_squared_rms)
        return scales

    def update_parameters(
        self, rotated: Tensor, rates: Sequence[float], parameters: Sequence[Tensor], group: ParameterGroup
    ) -> None:
        """Update the parameters by one step, given gradients ``rotated`` to the eigenbases, and step sizes."""
        step, (beta1, beta2) = self.step, self._get_betas(group)
        slow_mean_weight = 0.0 if self.embedding else STEP_CONFIG.slow_mean_weight
        correction, scale = 1 - beta2**step, (1 - slow_mean_weight) / (1 - beta1 ** (step + 1))
        relative = correction * (STEP_CONFIG.min_relative_rms**2 + float(group["eps"]) ** 2)
        floors = [relative * size**2 + STEP_CONFIG.min_squared_rms for size in self.gradient_sizes]
        floor: float | Tensor = floors[0] if len(floors) == 1 else rotated.new_tensor(floors)[:, None, None]
        mean = self.mean.lerp_(rotated, 1 - beta1)
        square = self.square.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        direction = torch.lerp(rotated, mean, beta1, out=self.direction)
        if self.embedding:
            sums = rotated.square().sum(2)  # (slices, rows); rows without a gradient have 0
            usual = sums.sum(1) / (sums.count_nonzero(1).clamp_(min=1) * rotated.shape[2])
            floor = floor + EMBEDDING.extra_frequency * correction * usual[:, None, None]
        else:
            slow_mean = self.slow_mean.lerp_(
                rotated, STEP_CONFIG.slow_mean_divisor / (step + STEP_CONFIG.slow_mean_divisor - 1)
            )
            direction.add_(slow_mean, alpha=slow_mean_weight / scale)
        direction.mul_((square + floor).rsqrt_())
        if self.side_blocks:
            factors, offset = self.factors[0].exp(), 0
            for axis in (blocks[0].axis for blocks in self.side_blocks):
                direction.mul_(factors.narrow(1, offset, direction.shape[axis]).unsqueeze(3 - axis))
                offset += direction.shape[axis]
        rate_factor, max_step = (
            (EMBEDDING.rate_factor, EMBEDDING.max_step) if self.embedding else (1.0, STEP_CONFIG.max_step)
        )
        steps = [min(max_step, rate_factor * float(group["lr"]) * rate) for rate in rates]
        self.step_lengths = [scale * math.sqrt(correction) * length for length in steps]
        self.scalars[:] = array("d", [step, *self.gradient_sizes, *self.step_lengths])
        self._decay_weights(steps, parameters, group)
        self._subtract_update(rotate(self.side_blocks, direction, back=True), parameters)

    def _decay_weights(self, steps: Sequence[float], parameters: Sequence[Tensor], group: ParameterGroup) -> None:
        """Apply weight decay to matrices, given the step size of each slice.

        Below the usual step size, the decay falls with the cube of the step size, so that weights can converge.
        """
        weight_decay = float(group["weight_decay"]) * (EMBEDDING.decay_factor if self.embedding else 1.0)
        if not weight_decay:
            return
        for p, step in zip(parameters, steps, strict=True):
            if p.ndim > 1:
                p.mul_(1 - step * min(1.0, step / STEP_SIZE_SEARCH.usual_rate) ** 2 * weight_decay)

    def _subtract_update(self, update: Tensor, parameters: Sequence[Tensor]) -> None:
        """Subtract an update (slices, rows, columns), times the step length of each slice, from the parameters."""
        alike = len({*self.step_lengths}) == 1
        if not alike:
            update = _multiply_slices(update, self.step_lengths)
        views = self.views if update is self.direction else []
        if not views:
            views = [
                (row.view(-1)[: p.numel()] if self.is_short else row).view(p.shape)
                for row, p in zip(update.unbind(), parameters, strict=True)
            ]
        if update is self.direction:
            self.views = views
        torch._foreach_add_([*parameters], views, alpha=-self.step_lengths[0] if alike else -1.0)


def _stack(tensors: Sequence[Tensor], *, pad: bool = False) -> Tensor:
    """Stack tensors of one shape; if ``pad``, flatten and zero-pad tensors of any shape: (tensors, 1, length)."""
    if pad:
        return pad_sequence([tensor.reshape(-1) for tensor in tensors], batch_first=True)[:, None]
    return torch.stack([*tensors])


def _multiply_slices(stacked: Tensor, factors: Sequence[float]) -> Tensor:
    """Multiply each slice of a tensor (slices, ...) by its factor."""
    if len({*factors}) == 1:
        return stacked * factors[0]
    return stacked * stacked.new_tensor(factors).view(-1, *[1] * (stacked.ndim - 1))
