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
from protonet.optimizer.settings import EMBEDDING, PRECONDITIONER, STEP_CONFIG, STEP_SIZE, ParameterGroup

SliceState = dict[str, Tensor]  #: The optimizer state of one slice, by the names of its entries.
SCALAR_ENTRIES = ("step", "gradient_rms", "step_length")  #: Entries of a `SliceState` that are numbers, on the CPU.
MATRIX_ENTRIES = ("exp_avg", "slow_avg", "exp_avg_sq", "direction")  #: Entries (rows, columns), like the slice.


def list_entry_shapes(rows: int, columns: int, *, embedding: bool) -> dict[str, tuple[int, ...]]:
    """List the entries of the state of a slice (rows, columns), a parameter as a matrix, with their shapes."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("embedding", *SCALAR_ENTRIES), ())
    shapes |= dict.fromkeys(MATRIX_ENTRIES, (rows, columns))
    if embedding:  # rows are seen too seldom for a mean over a long window
        shapes["slow_avg"] = (0,)
    lengths = [] if embedding else [n for _, _, n in choose_basis_blocks(rows, columns)]
    shapes |= dict.fromkeys(("log_factors", "squared_slopes"), (sum(lengths),))
    for index, n in enumerate(lengths):
        shapes |= dict.fromkeys((f"block{index}.second_moments", f"block{index}.basis"), (n, n))
    return shapes


def create_slice_state(rows: int, columns: int, like: Tensor, *, embedding: bool) -> SliceState:
    """Create the initial state of a slice (rows, columns), in ``like``'s dtype or float32."""
    like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    state = {
        name: like.new_zeros(shape) for name, shape in list_entry_shapes(rows, columns, embedding=embedding).items()
    }
    state |= {name: torch.tensor(0.0, dtype=torch.float64) for name in SCALAR_ENTRIES}
    state["embedding"] = torch.tensor(embedding)
    for name, tensor in state.items():
        if name.endswith(".basis"):
            tensor.fill_diagonal_(1)
    return state


def is_short_vector(state: SliceState) -> bool:
    """Test whether the slice with this state has no eigenbases and few elements, so that it is padded and stacked."""
    if state["log_factors"].numel() or state["embedding"]:
        return False
    return bool(state["exp_avg"].numel() <= STEP_CONFIG.max_padded_length)


@dataclass(eq=False)
class ParameterBatch:
    """Parameters of equal shape and settings, stacked and updated together. A slice is a parameter of one training run.

    Tensors are of at least single precision and (slices, rows, columns). Convolutions are matrices, and a parameter of
    fewer than two dimensions is one row. Short vectors may differ in length: they are rows, padded with zeros.
    """

    slice_ids: list[int]  #: Indices of the slices.
    shapes: list[tuple[int, int]]  #: The numbers of rows and columns of each slice.
    is_embedding: bool  #: Whether the slices are embeddings, see `EmbeddingConfig`.
    step: int  #: Number of steps taken.
    gradient_rms: list[float]  #: The running root mean square of the gradients of each slice.
    step_lengths: list[float]  #: The factor on ``direction`` in the last step of each slice.
    exp_avg: Tensor  #: Adam's first moment, in the eigenbases.
    slow_avg: Tensor  #: Gradient average over more steps, in the eigenbases; empty for embeddings.
    exp_avg_sq: Tensor  #: Adam's second moment, in the eigenbases.
    direction: Tensor  #: Minus the last step, in the eigenbases, divided by ``step_lengths``.
    #: (2, slices, eigenvectors of all blocks): logarithms of step size factors; averages of squared slopes.
    eigenvector_state: Tensor
    basis_blocks: list[BasisBlock]  #: The eigenbases; the blocks of a side are consecutive.
    blocks_by_side: list[list[BasisBlock]] = field(init=False)  #: The blocks of each side (rows or columns).
    scalar_entries: array[float] = field(init=False)  #: The scalar entries of all slice states, which are views of it.
    block_lengths: list[int] = field(init=False)  #: The number of eigenvectors of each block of each slice.
    has_short_vectors: bool = field(init=False)  #: Whether the slices are short vectors, which may differ in shape.
    direction_views: list[Tensor] = field(init=False)  #: Views of ``direction`` in the shapes of the parameters.

    def __post_init__(self) -> None:
        """Group the basis blocks by axis, and allocate the array of the scalar state entries."""
        self.blocks_by_side = [list(side) for _, side in groupby(self.basis_blocks, lambda block: block.axis)]
        self.scalar_entries = array("d", [self.step, *self.gradient_rms, *self.step_lengths])
        self.block_lengths = [block.basis.shape[2] for block in self.basis_blocks] * len(self.slice_ids)
        self.has_short_vectors, self.direction_views = is_short_vector(self.get_state(0)), []

    @classmethod
    def from_states(cls, indices: list[int], states: Sequence[SliceState]) -> ParameterBatch:
        """Build a batch of the slices ``indices`` from copies of their states, all of equal shapes and step counts."""
        first, shapes = states[0], [(state["exp_avg"].shape[0], state["exp_avg"].shape[1]) for state in states]
        stacked = {
            name: _stack([state[name] for state in states], pad=name in MATRIX_ENTRIES and len({*shapes}) > 1)
            for name in first.keys() - {"embedding", *SCALAR_ENTRIES}
        }
        sizes, lengths = ([float(state[name]) for state in states] for name in SCALAR_ENTRIES[1:])
        factors = torch.stack([stacked.pop(name) for name in ("log_factors", "squared_slopes")])
        embedding, blocks, offset = bool(first["embedding"]), list[BasisBlock](), 0
        for index, (axis, start, n) in enumerate([] if embedding else choose_basis_blocks(*shapes[0])):
            statistics, basis = (stacked.pop(f"block{index}.{name}") for name in ("second_moments", "basis"))
            blocks.append(BasisBlock(axis, start, statistics, basis, *factors.narrow(2, offset, n)))
            offset += n
        step = int(first["step"])
        stacked["eigenvector_state"] = factors
        return cls(indices, shapes, embedding, step, sizes, lengths, basis_blocks=blocks, **stacked)

    def get_state(self, row: int) -> SliceState:
        """Get the state of the slice with index ``row`` in the batch: views of the stacked tensors."""
        rows, columns = self.shapes[row]
        scalars = torch.frombuffer(self.scalar_entries, dtype=torch.float64)
        state = {"embedding": torch.tensor(self.is_embedding)}
        state |= {"log_factors": self.eigenvector_state[0, row], "squared_slopes": self.eigenvector_state[1, row]}
        offsets = (0, 1 + row, 1 + len(self.slice_ids) + row)
        state |= {name: scalars[offset] for name, offset in zip(SCALAR_ENTRIES, offsets, strict=True)}
        for name in MATRIX_ENTRIES:
            matrix = getattr(self, name)[row]
            state[name] = matrix.view(-1)[: rows * columns].view(rows, columns) if matrix.numel() else matrix
        for index, block in enumerate(self.basis_blocks):
            entries = {"second_moments": block.second_moments, "basis": block.basis}
            state |= {f"block{index}.{name}": tensor[row] for name, tensor in entries.items()}
        return state

    def select_slices(self, rows: list[int]) -> ParameterBatch:
        """Copy the slices with the indices ``rows`` in this batch to a new batch."""
        return ParameterBatch.from_states([self.slice_ids[row] for row in rows], [self.get_state(row) for row in rows])

    def stack_gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        """Stack the gradients of all slices: (slices, rows, columns), which may be a view of a single gradient."""
        stacked = _stack(gradients, pad=self.has_short_vectors) if len(gradients) > 1 else gradients[0]
        return stacked.reshape(self.exp_avg.shape).to(self.exp_avg.dtype)

    def update_bases(
        self, gradient: Tensor, norms: Sequence[float], group: ParameterGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update the eigenbases with gradients (slices, rows, columns), which are not changed; ``norms`` are finite.

        Returns the gradients in the eigenbases, their inner products (slices,) with the last update directions, and the
        slopes (slices, eigenvectors): the parts of the inner product of gradient and last step along each eigenvector.
        """
        self.step += 1
        scales = self._update_gradient_rms(norms, self._get_betas(group)[1])
        if min(scales) < 1:
            gradient = gradient * gradient.new_tensor(scales)[:, None, None]
        if self.step == 1 or self.step % PRECONDITIONER.gradient_interval == 0:
            update = self.step <= PRECONDITIONER.n_early_steps or self.step % PRECONDITIONER.basis_update_interval == 0
            for block in self.basis_blocks:
                block.update_statistics(gradient)
                if update:
                    block.update_basis((self.exp_avg, self.slow_avg, self.direction), self.exp_avg_sq)
        gradient = rotate(self.blocks_by_side, gradient)
        products = self.direction * gradient
        if not self.blocks_by_side:
            return gradient, products.sum((1, 2)), self.eigenvector_state[1]
        sums = [products.sum(3 - blocks[0].axis) for blocks in self.blocks_by_side]  # each (slices, rows or columns)
        return gradient, sums[0].sum(1), _multiply_slices(torch.cat(sums, 1), [-length for length in self.step_lengths])

    def _get_betas(self, group: ParameterGroup) -> tuple[float, float]:
        """Get Adam's two betas from a parameter group; for embeddings, the second beta is at least ``min_beta2``."""
        beta1, beta2 = map(float, group["betas"])
        return beta1, max(beta2, EMBEDDING.min_beta2) if self.is_embedding else beta2

    def _update_gradient_rms(self, norms: Sequence[float], beta2: float) -> list[float]:
        """Update the running RMS of each slice's gradients; return factors <= 1 that clip outlier gradients."""
        step, scales = self.step, list[float]()
        for row, ((rows, columns), norm, size) in enumerate(zip(self.shapes, norms, self.gradient_rms, strict=True)):
            root = math.sqrt(rows * columns)
            limit = STEP_CONFIG.max_gradient_rms_ratio * root * size if step > 1 else math.inf
            scales.append(limit / norm if norm > limit else 1.0)
            # The mean of ``square``, which rotations do not change.
            mean = beta2 * (1 - beta2 ** (step - 1)) * size**2 + (1 - beta2) * (min(norm, limit) / root) ** 2
            self.gradient_rms[row] = math.sqrt(mean / (1 - beta2**step) + STEP_CONFIG.min_squared_rms)
        return scales

    def update_parameters(
        self, rotated: Tensor, rates: Sequence[float], parameters: Sequence[Tensor], group: ParameterGroup
    ) -> None:
        """Update the parameters by one step, given gradients ``rotated`` to the eigenbases, and step sizes."""
        step, (beta1, beta2) = self.step, self._get_betas(group)
        slow_avg_weight = 0.0 if self.is_embedding else STEP_CONFIG.slow_avg_weight
        correction, scale = 1 - beta2**step, (1 - slow_avg_weight) / (1 - beta1 ** (step + 1))
        relative = correction * (STEP_CONFIG.min_relative_rms**2 + float(group["eps"]) ** 2)
        floors = [relative * size**2 + STEP_CONFIG.min_squared_rms for size in self.gradient_rms]
        floor: float | Tensor = floors[0] if len(floors) == 1 else rotated.new_tensor(floors)[:, None, None]
        mean = self.exp_avg.lerp_(rotated, 1 - beta1)
        square = self.exp_avg_sq.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        direction = torch.lerp(rotated, mean, beta1, out=self.direction)
        if self.is_embedding:
            sums = rotated.square().sum(2)  # (slices, rows); rows without a gradient have 0
            usual = sums.sum(1) / (sums.count_nonzero(1).clamp_(min=1) * rotated.shape[2])
            floor = floor + EMBEDDING.pseudo_gradient_frequency * correction * usual[:, None, None]
        else:
            divisor = STEP_CONFIG.slow_avg_weight_divisor
            slow_avg = self.slow_avg.lerp_(rotated, divisor / (step + divisor - 1))
            direction.add_(slow_avg, alpha=slow_avg_weight / scale)
        direction.mul_((square + floor).rsqrt_())
        if self.blocks_by_side:
            factors, offset = self.eigenvector_state[0].exp(), 0
            for axis in (blocks[0].axis for blocks in self.blocks_by_side):
                direction.mul_(factors.narrow(1, offset, direction.shape[axis]).unsqueeze(3 - axis))
                offset += direction.shape[axis]
        max_step = (EMBEDDING if self.is_embedding else STEP_CONFIG).max_weight_change
        step_size_factor = EMBEDDING.step_size_factor if self.is_embedding else 1.0
        steps = [min(max_step, step_size_factor * float(group["lr"]) * rate) for rate in rates]
        self.step_lengths = [scale * math.sqrt(correction) * length for length in steps]
        self.scalar_entries[:] = array("d", [step, *self.gradient_rms, *self.step_lengths])
        self._decay_weights(steps, parameters, group)
        self._subtract_update(rotate(self.blocks_by_side, direction, back=True), parameters)

    def _decay_weights(self, steps: Sequence[float], parameters: Sequence[Tensor], group: ParameterGroup) -> None:
        """Apply weight decay to matrices, given the step size of each slice.

        Below the usual step size, the decay falls with the cube of the step size, so that weights can converge.
        """
        weight_decay = float(group["weight_decay"]) * (EMBEDDING.weight_decay_factor if self.is_embedding else 1.0)
        if not weight_decay:
            return
        for p, step in zip(parameters, steps, strict=True):
            if p.ndim > 1:
                p.mul_(1 - step * min(1.0, step / STEP_SIZE.usual_step_size) ** 2 * weight_decay)

    def _subtract_update(self, update: Tensor, parameters: Sequence[Tensor]) -> None:
        """Subtract an update (slices, rows, columns), times the step length of each slice, from the parameters."""
        alike = len({*self.step_lengths}) == 1
        if not alike:
            update = _multiply_slices(update, self.step_lengths)
        views = self.direction_views if update is self.direction else []
        if not views:
            views = [
                (row.view(-1)[: p.numel()] if self.has_short_vectors else row).view(p.shape)
                for row, p in zip(update.unbind(), parameters, strict=True)
            ]
        if update is self.direction:
            self.direction_views = views
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
