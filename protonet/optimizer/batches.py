"""Batches of parameters that are updated together as stacked tensors: optimizer state and update rule."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from protonet.optimizer.preconditioner import BasisBlock, choose_basis_blocks, get_update_intervals, rotate
from protonet.optimizer.settings import EMBEDDING, STEP_CONFIG, STEP_SIZE, ParameterGroup

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
    #: The entries `SCALAR_ENTRIES` of all slices, one entry after the other: the number of steps, the running
    #: root mean square of the gradients, and the factor on ``direction`` in the last step. Slice states have views.
    scalars: array[float]
    exp_avg: Tensor  #: Adam's first moment, in the eigenbases.
    slow_avg: Tensor  #: Gradient average over more steps, in the eigenbases; empty for embeddings.
    exp_avg_sq: Tensor  #: Adam's second moment, in the eigenbases.
    direction: Tensor  #: Minus the last step, in the eigenbases, divided by its step length.
    #: (2, slices, eigenvectors of all blocks): logarithms of step size factors; averages of squared slopes.
    eigenvector_state: Tensor
    #: Of each `BasisBlock`: its axis, the index of its first row or column, its second moments and its basis.
    bases: list[tuple[int, int, list[Tensor]]]
    basis_blocks: list[BasisBlock] = field(init=False)  #: The eigenbases; the blocks of a side are consecutive.
    blocks_by_side: list[list[BasisBlock]] = field(init=False)  #: The blocks of each side (rows or columns).
    steps: list[float] = field(init=False)  #: The parts of ``scalars`` in the present step.
    gradient_rms: list[float] = field(init=False)
    step_lengths: list[float] = field(init=False)
    block_lengths: list[int] = field(init=False)  #: The number of eigenvectors of each block of each slice.
    has_short_vectors: bool = field(init=False)  #: Whether the slices are short vectors, which may differ in shape.
    direction_views: list[Tensor] = field(init=False)  #: Views of ``direction`` in the shapes of the parameters.

    def __post_init__(self) -> None:
        """Make the basis blocks, and group them by axis."""
        self._read_scalars()
        lengths = [tensors[0].shape[2] for *_, tensors in self.bases]
        parts = self.eigenvector_state.split(lengths, 2)
        self.basis_blocks = [
            BasisBlock(axis, start, *tensors, *part)
            for (axis, start, tensors), part in zip(self.bases, parts, strict=True)
        ]
        self.blocks_by_side = [list(side) for _, side in groupby(self.basis_blocks, lambda block: block.axis)]
        self.block_lengths = lengths * len(self.slice_ids)
        self.has_short_vectors, self.direction_views = is_short_vector(self.get_state(0)), []

    @classmethod
    def from_states(cls, indices: list[int], states: Sequence[SliceState]) -> ParameterBatch:
        """Build a batch of the slices ``indices`` from copies of their states, all of equal shapes."""
        first, shapes = states[0], [(state["exp_avg"].shape[0], state["exp_avg"].shape[1]) for state in states]
        stacked = {
            name: _stack([state[name] for state in states], padded=name in MATRIX_ENTRIES and len({*shapes}) > 1)
            for name in first.keys() - {"embedding", *SCALAR_ENTRIES}
        }
        scalars = array("d", [float(state[name]) for name in SCALAR_ENTRIES for state in states])
        stacked["eigenvector_state"] = torch.stack([stacked.pop(name) for name in ("log_factors", "squared_slopes")])
        embedding = bool(first["embedding"])
        bases = [
            (axis, start, [stacked.pop(f"block{index}.{name}") for name in ("second_moments", "basis")])
            for index, (axis, start, _) in enumerate([] if embedding else choose_basis_blocks(*shapes[0]))
        ]
        return cls(indices, shapes, embedding, scalars, bases=bases, **stacked)

    def _read_scalars(self) -> None:
        """Read the lists of scalar entries, which users may have changed in the slice states."""
        n, values = len(self.slice_ids), self.scalars.tolist()
        self.steps, self.gradient_rms, self.step_lengths = values[:n], values[n : 2 * n], values[2 * n :]

    def get_state(self, row: int) -> SliceState:
        """Get the state of the slice with index ``row`` in the batch: views of the stacked tensors."""
        rows, columns = self.shapes[row]
        scalars = torch.frombuffer(self.scalars, dtype=torch.float64)[row :: len(self.slice_ids)]
        state = {"embedding": torch.tensor(self.is_embedding)}
        state |= {"log_factors": self.eigenvector_state[0, row], "squared_slopes": self.eigenvector_state[1, row]}
        state |= dict(zip(SCALAR_ENTRIES, scalars.unbind(), strict=True))
        for name in MATRIX_ENTRIES:
            matrix = getattr(self, name)[row]
            state[name] = matrix.view(-1)[: rows * columns].view(rows, columns) if matrix.numel() else matrix
        for index, (_, _, (second_moments, basis)) in enumerate(self.bases):
            state |= {f"block{index}.second_moments": second_moments[row], f"block{index}.basis": basis[row]}
        return state

    def copy_slices(self, rows: Sequence[int]) -> ParameterBatch:
        """Copy the slices with the indices ``rows`` in this batch to a new batch."""
        index, n = torch.tensor(rows, device=self.exp_avg.device), len(self.slice_ids)
        return ParameterBatch(
            [self.slice_ids[row] for row in rows],
            [self.shapes[row] for row in rows],
            self.is_embedding,
            array("d", [self.scalars[start + row] for start in range(0, 3 * n, n) for row in rows]),
            eigenvector_state=self.eigenvector_state.index_select(1, index),
            bases=[(axis, start, [x.index_select(0, index) for x in tensors]) for axis, start, tensors in self.bases],
            **{name: getattr(self, name).index_select(0, index) for name in MATRIX_ENTRIES},
        )

    def write_slices(self, rows: Sequence[int], part: ParameterBatch) -> None:
        """Replace the slices with the indices ``rows`` by those of ``part``, a result of `copy_slices`."""
        index = torch.tensor(rows, device=self.exp_avg.device)
        for entry in range(len(SCALAR_ENTRIES)):
            for place, row in enumerate(rows):
                self.scalars[entry * len(self.slice_ids) + row] = part.scalars[entry * len(rows) + place]
        for name in MATRIX_ENTRIES:
            getattr(self, name).index_copy_(0, index, getattr(part, name))
        self.eigenvector_state.index_copy_(1, index, part.eigenvector_state)
        for (_, _, tensors), (_, _, updated) in zip(self.bases, part.bases, strict=True):
            for tensor, update in zip(tensors, updated, strict=True):
                tensor.index_copy_(0, index, update)

    def stack_gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        """Stack gradients of slices: (gradients, rows, columns), which may be a view of a single gradient."""
        _, rows, columns = self.exp_avg.shape
        stacked = _stack(gradients, padded=self.has_short_vectors) if len(gradients) > 1 else gradients[0]
        if self.has_short_vectors:  # some slice that has no gradient now may be the longest
            stacked = stacked.reshape(len(gradients), 1, -1)
            stacked = pad(stacked, (0, columns - stacked.shape[2])) if stacked.shape[2] < columns else stacked
        return stacked.reshape(-1, rows, columns).to(self.exp_avg.dtype)

    def update_bases(
        self, gradient: Tensor, norms: Sequence[float], group: ParameterGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update the eigenbases with gradients (slices, rows, columns), which are not changed; ``norms`` are finite.

        Returns the gradients in the eigenbases, their inner products (slices,) with the last update directions, and the
        slopes (slices, eigenvectors): the parts of the inner product of gradient and last step along each eigenvector.
        """
        self._read_scalars()
        self.steps = steps = [step + 1 for step in self.steps]
        scales = self._update_gradient_rms(norms, self._get_betas(group)[1])
        if min(scales) < 1:
            gradient = gradient * gradient.new_tensor(scales)[:, None, None]
        if self.basis_blocks:
            intervals = [get_update_intervals(step) for step in steps]
            is_due = [[step == 1 or step % n == 0 for n in each] for step, each in zip(steps, intervals, strict=True)]
            self._update_statistics(gradient, [row for row, (due, _) in enumerate(is_due) if due])
            self._update_bases([row for row, (_, due) in enumerate(is_due) if due])
        gradient = rotate(self.blocks_by_side, gradient)
        products = self.direction * gradient
        if not self.blocks_by_side:
            return gradient, products.sum((1, 2)), self.eigenvector_state[1]
        sums = [products.sum(3 - blocks[0].axis) for blocks in self.blocks_by_side]  # each (slices, rows or columns)
        return gradient, sums[0].sum(1), _multiply_slices(torch.cat(sums, 1), [-length for length in self.step_lengths])

    def _update_statistics(self, gradient: Tensor, rows: Sequence[int]) -> None:
        """Update the second moments of the slices with the indices ``rows``."""
        if not rows:
            return
        index = None if len(rows) == len(self.slice_ids) else torch.tensor(rows, device=gradient.device)
        for block in self.basis_blocks:
            block.update_statistics(gradient if index is None else gradient.index_select(0, index), index)

    def _update_bases(self, rows: Sequence[int]) -> None:
        """Update the eigenbases of the slices with the indices ``rows``."""
        if not rows:
            return
        part = self if len(rows) == len(self.slice_ids) else self.copy_slices(rows)
        for block in part.basis_blocks:
            block.update_basis((part.exp_avg, part.slow_avg, part.direction), part.exp_avg_sq)
        if part is not self:
            self.write_slices(rows, part)

    def _get_betas(self, group: ParameterGroup) -> tuple[float, float]:
        """Get Adam's two betas from a parameter group; for embeddings, the second beta is at least ``min_beta2``."""
        beta1, beta2 = map(float, group["betas"])
        return beta1, max(beta2, EMBEDDING.min_beta2) if self.is_embedding else beta2

    def _update_gradient_rms(self, norms: Sequence[float], beta2: float) -> list[float]:
        """Update the running RMS of each slice's gradients; return factors <= 1 that clip outlier gradients."""
        scales = list[float]()
        for row, ((rows, columns), norm, size) in enumerate(zip(self.shapes, norms, self.gradient_rms, strict=True)):
            root, step = math.sqrt(rows * columns), self.steps[row]
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
        steps, (beta1, beta2) = self.steps, self._get_betas(group)
        slow_avg_weight = 0.0 if self.is_embedding else STEP_CONFIG.slow_avg_weight
        corrections = [1 - beta2**step for step in steps]
        scales = [(1 - slow_avg_weight) / (1 - beta1 ** (step + 1)) for step in steps]
        relative = STEP_CONFIG.min_relative_rms**2 + float(group["eps"]) ** 2
        floor = _stack_numbers(
            [
                correction * relative * size**2 + STEP_CONFIG.min_squared_rms
                for correction, size in zip(corrections, self.gradient_rms, strict=True)
            ],
            rotated,
        )
        mean = self.exp_avg.lerp_(rotated, 1 - beta1)
        square = self.exp_avg_sq.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        direction = torch.lerp(rotated, mean, beta1, out=self.direction)
        if self.is_embedding:
            # As if gradients of average size came to every row now and then. With the longest step of 0.03, this raises
            # the ratio on tables alone from 0.39 to 0.64 (docs/decisions/optimizer-form.md).
            sums = rotated.square().sum(2)  # (slices, rows); rows without a gradient have 0
            usual = sums.sum(1) / (sums.count_nonzero(1).clamp_(min=1) * rotated.shape[2])
            frequencies = [EMBEDDING.pseudo_gradient_frequency * correction for correction in corrections]
            floor = floor + _stack_numbers(frequencies, rotated) * usual[:, None, None]
        else:
            divisor = STEP_CONFIG.slow_avg_weight_divisor
            slow_avg = self.slow_avg.lerp_(
                rotated, _stack_numbers([divisor / (step + divisor - 1) for step in steps], rotated)
            )
            weights = _stack_numbers([slow_avg_weight / scale for scale in scales], rotated)
            if isinstance(weights, float):
                direction.add_(slow_avg, alpha=weights)
            else:
                direction.addcmul_(slow_avg, weights)
        direction.mul_((square + floor).rsqrt_())
        if self.blocks_by_side:
            factors, offset = self.eigenvector_state[0].exp(), 0
            for axis in (blocks[0].axis for blocks in self.blocks_by_side):
                direction.mul_(factors.narrow(1, offset, direction.shape[axis]).unsqueeze(3 - axis))
                offset += direction.shape[axis]
        max_step = (EMBEDDING if self.is_embedding else STEP_CONFIG).max_weight_change
        step_size_factor = EMBEDDING.step_size_factor if self.is_embedding else 1.0
        sizes = [min(max_step, step_size_factor * float(group["lr"]) * rate) for rate in rates]
        self.step_lengths = [
            scale * math.sqrt(correction) * size
            for scale, correction, size in zip(scales, corrections, sizes, strict=True)
        ]
        self.scalars[:] = array("d", [*steps, *self.gradient_rms, *self.step_lengths])
        self._decay_weights(sizes, parameters, group)
        self._subtract_update(rotate(self.blocks_by_side, direction, back=True), parameters)

    def _decay_weights(self, steps: Sequence[float], parameters: Sequence[Tensor], group: ParameterGroup) -> None:
        """Apply weight decay to matrices, given the step size of each slice.

        Below the usual step size, the decay falls with the cube of the step size, so that weights can converge.
        """
        weight_decay = float(group["weight_decay"]) * (EMBEDDING.weight_decay_factor if self.is_embedding else 1.0)
        if not weight_decay:
            return
        # A decay in proportion to the step pulls each weight off the minimum as long as steps last. Steps along
        # eigenvectors have equal length, so the pull exceeds small slopes. Few rows need decay while steps are long,
        # and the square keeps it there (docs/decisions/optimizer-decay.md).
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


def _stack_numbers(values: Sequence[float], like: Tensor) -> float | Tensor:
    """Return the value if all are the same, else a tensor (values, 1, 1), which takes longer to compute with."""
    return values[0] if len({*values}) == 1 else like.new_tensor(values)[:, None, None]


def _stack(tensors: Sequence[Tensor], *, padded: bool = False) -> Tensor:
    """Stack tensors of one shape; if ``padded``, flatten and zero-pad tensors of any shape: (tensors, 1, length)."""
    if padded:
        return pad_sequence([tensor.reshape(-1) for tensor in tensors], batch_first=True)[:, None]
    return torch.stack([*tensors])


def _multiply_slices(stacked: Tensor, factors: Sequence[float]) -> Tensor:
    """Multiply each slice of a tensor (slices, ...) by its factor."""
    if len({*factors}) == 1:
        return stacked * factors[0]
    return stacked * stacked.new_tensor(factors).view(-1, *[1] * (stacked.ndim - 1))
