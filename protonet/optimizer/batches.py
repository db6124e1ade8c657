"""Batches of parameters whose states lie one after the other in flat tensors: optimizer state and update rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from protonet.optimizer.preconditioner import MatrixStack, adapt_step_factors, choose_basis_blocks, get_update_intervals
from protonet.optimizer.settings import EMBEDDING, STEP_CONFIG, STEP_SIZE, ParameterGroup

SliceState = dict[str, Tensor]  #: The optimizer state of one slice, by the names of its entries.
SCALAR_ENTRIES = ("step", "gradient_rms", "step_length")  #: Entries of a `SliceState` that are numbers, on the CPU.
VECTOR_ENTRIES = ("log_factors", "squared_slopes")  #: Entries (eigenvectors,).
MATRIX_ENTRIES = ("exp_avg", "slow_avg", "exp_avg_sq", "direction")  #: Entries (rows, columns), like the slice.


def list_entry_shapes(rows: int, columns: int, *, embedding: bool) -> dict[str, tuple[int, ...]]:
    """List the entries of the state of a slice (rows, columns), a parameter as a matrix, with their shapes."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("embedding", *SCALAR_ENTRIES), ())
    shapes |= dict.fromkeys(MATRIX_ENTRIES, (rows, columns))
    if embedding:  # rows are seen too seldom for a mean over a long window
        shapes["slow_avg"] = (0,)
    lengths = [] if embedding else [n for _, _, n in choose_basis_blocks(rows, columns)]
    shapes |= dict.fromkeys(VECTOR_ENTRIES, (sum(lengths),))
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


def get_place(state: SliceState) -> tuple[int, ...]:
    """Get the sort key of a slice in its batch: those without eigenbases come first, equal shapes are neighbours."""
    return (int(state["log_factors"].numel() > 0), *state["exp_avg"].shape)


class ParameterBatch:
    """Parameters of equal settings that are updated together. A slice is a parameter of one training run.

    A slice is a matrix: convolutions have one row for each output, and a parameter of fewer than two dimensions is one
    row. The entries `MATRIX_ENTRIES` of all slices lie one after the other in flat tensors, so that an operation on
    them is one call for all: first the plain slices, which have no eigenbases, then the others, which form a
    `MatrixStack` for each shape.

    Args:
        slice_ids: Indices of the slices.
        states: The states of the slices in the order of `get_place`, which are copied. Either all or none are
            embeddings, which have equal numbers of columns.
    """

    def __init__(self, slice_ids: list[int], states: Sequence[SliceState]) -> None:
        self.slice_ids = slice_ids
        self.is_embedding = bool(states[0]["embedding"])
        #: The entries `SCALAR_ENTRIES` of the slices, (entries, slices): the number of steps, the running root mean
        #: square of the gradients, and the factor on ``direction`` in the last step.
        self.scalars = torch.stack([torch.stack([state[name] for state in states]) for name in SCALAR_ENTRIES])
        self.steps, self.gradient_rms, self.step_lengths = self.scalars.tolist()  # of the present step
        #: Of all elements, in the eigenbases: Adam's first moment, a gradient average over more steps (empty for
        #: embeddings), Adam's second moment, and minus the last step, divided by its step length.
        self.exp_avg, self.slow_avg, self.exp_avg_sq, self.direction = matrices = [
            torch.cat([state[name].reshape(-1) for state in states]) for name in MATRIX_ENTRIES
        ]
        #: (2, eigenvectors of all slices): logarithms of step size factors; averages of squared slopes.
        self.eigenvector_state = torch.stack([torch.cat([state[name] for state in states]) for name in VECTOR_ENTRIES])
        #: The state of each slice: views of the tensors of the batch.
        self.states: list[SliceState] = [{"embedding": torch.tensor(self.is_embedding)} for _ in states]
        tensors = (*self.scalars, *matrices, *self.eigenvector_state)
        for name, tensor in zip((*SCALAR_ENTRIES, *MATRIX_ENTRIES, *VECTOR_ENTRIES), tensors, strict=True):
            parts = tensor.split([state[name].numel() for state in states])
            for view, part, state in zip(self.states, parts, states, strict=True):
                view[name] = part.view(state[name].shape)
        self.sizes = [state["exp_avg"].numel() for state in states]  #: Numbers of elements.
        self._factors = torch.empty_like(self.eigenvector_state[0])  # of the step sizes of eigenvectors
        self.stacks: list[MatrixStack] = []
        n_plain = sum(not state["log_factors"].numel() for state in states)
        element, vector = n_elements, _ = sum(self.sizes[:n_plain]), 0
        for shape, group in groupby(range(n_plain, len(states)), lambda row: states[row]["exp_avg"].shape):
            rows = [*group]
            size, n_vectors = len(rows) * shape.numel(), len(rows) * states[rows[0]]["log_factors"].numel()
            of_stack = [matrix.narrow(0, element, size).view(-1, *shape) for matrix in matrices]
            vectors = [
                each.narrow(0, vector, n_vectors).view(len(rows), -1)
                for each in (self._factors, *self.eigenvector_state)
            ]
            self.stacks.append(MatrixStack([states[row] for row in rows], of_stack, vectors))
            for index, row in enumerate(rows):
                self.states[row] |= self.stacks[-1].view_bases(index)
            element, vector = element + size, vector + n_vectors
        self._counts = [n_plain, *(stack.count for stack in self.stacks)]
        to_indices = partial(torch.tensor, dtype=torch.long, device=self.exp_avg.device)
        self._sizes = to_indices(self.sizes)
        self._plain_square, self._plain_direction = self.exp_avg_sq[:n_elements], self.direction[:n_elements]
        self._table_shape = (-1, states[0]["exp_avg"].shape[1])  # of all embeddings together
        # The numbers of rows of embeddings, or of elements of other plain slices; the slice of each element.
        self._plain_lengths = to_indices([state["exp_avg"].shape[0] for state in states])
        if not self.is_embedding:
            self._plain_lengths = self._sizes[:n_plain]
            self._plain_index = torch.repeat_interleave(self._plain_lengths if n_plain > 1 else self._sizes[:0])
        # Numbers of sides with eigenbases, of eigenvectors, and of those of each block; the block of each eigenvector.
        of_slices = [stack for stack in self.stacks for _ in range(stack.count)]
        self._n_sides = to_indices([len(stack.sides) for stack in of_slices])
        self._n_eigenvectors = to_indices([state["log_factors"].numel() for state in states[n_plain:]])
        self._block_lengths = to_indices([block.basis.shape[2] for stack in of_slices for block in stack.blocks])
        self._block_of = torch.repeat_interleave(self._block_lengths)

    def update_bases(
        self, gradients: Sequence[Tensor | None], norms: Sequence[float | None], group: ParameterGroup
    ) -> tuple[Tensor, Tensor]:
        """Update the eigenbases with the gradients of the slices, which are not changed, and their finite norms.

        The step size factors of eigenvectors follow. Slices without a gradient (None) are updated as if it were 0 until
        `update_parameters` restores their states. Returns the gradients in the eigenbases (elements,), and their inner
        products (slices,) with the last update directions.
        """
        dtype, zero = self.direction.dtype, self.direction.new_zeros(())
        present = [
            zero.expand(size) if each is None else each if each.dtype == dtype else each.to(dtype)
            for each, size in zip(gradients, self.sizes, strict=True)
        ]
        self._absent = {row for row, each in enumerate(gradients) if each is None}
        self._before = [tensor.clone() for tensor in self._list_tensors()] if self._absent else []
        steps, self.gradient_rms, self.step_lengths = self.scalars.tolist()
        self.steps = [step + 1 for step in steps]
        scales = self._update_gradient_rms([norm or 0.0 for norm in norms], self._get_betas(group)[1])
        if min(scales) < 1:
            present = [*torch._foreach_mul(present, scales)]
        plain, *others = _split(present, self._counts)
        stacked = [stack.stack(part) for stack, part in zip(self.stacks, others, strict=True)]
        self._update_due_bases(stacked)
        stacked = [stack.rotate(matrices) for stack, matrices in zip(self.stacks, stacked, strict=True)]
        parts = [gradient.reshape(-1) for gradient in (*plain, *stacked)]
        rotated, products = torch.cat(parts) if len(parts) > 1 else parts[0], list[Tensor]()
        if plain:
            products.append(self._sum_plain_products(rotated[: len(self._plain_direction)]))
        if self.stacks:
            sums = [stack.sum_products(matrices).view(-1) for stack, matrices in zip(self.stacks, stacked, strict=True)]
            slopes = torch.cat(sums)
            # Each side of a matrix has the same sum of all products.
            products.append(_sum_slices(slopes, self._n_eigenvectors).div_(self._n_sides))
            slopes.mul_(self._expand([-length for length in self.step_lengths], self._n_eigenvectors))
            each_step = self._expand(self.steps, self._n_eigenvectors)
            factors, usual = self.eigenvector_state
            adapt_step_factors(factors, usual, slopes, self._block_lengths, self._block_of, each_step)
        return rotated, torch.cat(products) if len(products) > 1 else products[0]

    def _update_due_bases(self, gradients: Sequence[Tensor]) -> None:
        """Update second moments and eigenbases of slices for which it is time, given the gradients of each stack."""
        intervals = {step: get_update_intervals(step) for step in {*self.steps}}
        due = [
            [row not in self._absent and (step == 1 or step % n == 0) for n in intervals[step]]
            for row, step in enumerate(self.steps)
        ]
        for stack, of_stack, gradient in zip(self.stacks, _split(due, self._counts)[1:], gradients, strict=True):
            stack.update(gradient, *zip(*of_stack, strict=True))

    def _list_tensors(self) -> list[Tensor]:
        """List the tensors of the state that change in each step, but the bases."""
        return [self.scalars, self.eigenvector_state, self.exp_avg, self.exp_avg_sq, self.direction, self.slow_avg]

    def _restore_absent(self) -> None:
        """Restore the states of slices that had no gradient."""
        is_present = torch.tensor([row not in self._absent for row in range(len(self.sizes))])
        on_device = is_present.to(self.direction.device)
        of_elements = on_device.repeat_interleave(self._sizes)
        of_eigenvectors = on_device[self._counts[0] :].repeat_interleave(self._n_eigenvectors)
        masks = [is_present, of_eigenvectors, *[of_elements] * (3 if self.is_embedding else 4)]
        for mask, tensor, old in zip(masks, self._list_tensors(), self._before, strict=False):
            torch.where(mask, tensor, old, out=tensor)

    def _get_betas(self, group: ParameterGroup) -> tuple[float, float]:
        """Get Adam's two betas from a parameter group; for embeddings, the second beta is at least ``min_beta2``."""
        beta1, beta2 = map(float, group["betas"])
        return beta1, max(beta2, EMBEDDING.min_beta2) if self.is_embedding else beta2

    def _update_gradient_rms(self, norms: Sequence[float], beta2: float) -> list[float]:
        """Update the running RMS of each slice's gradients; return factors <= 1 that clip outlier gradients."""
        scales = list[float]()
        for row, (n, step, norm, size) in enumerate(zip(self.sizes, self.steps, norms, self.gradient_rms, strict=True)):
            root = math.sqrt(n)
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
        corrections = [1 - beta2**step for step in steps]
        # Those of the gradient average in a step, and of both averages.
        slow_weight = 0.0 if self.is_embedding else STEP_CONFIG.slow_avg_weight
        weights = [(1 - slow_weight) / (1 - beta1 ** (step + 1)) + slow_weight for step in steps]
        relative = STEP_CONFIG.min_relative_rms**2 + float(group["eps"]) ** 2
        floors = self.direction.new_tensor(
            [
                correction * relative * size**2 + STEP_CONFIG.min_squared_rms
                for correction, size in zip(corrections, self.gradient_rms, strict=True)
            ]
        )
        self.exp_avg.lerp_(rotated, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        torch.lerp(rotated, self.exp_avg, beta1, out=self.direction)
        if self.is_embedding:
            floors += self._compute_table_floors(rotated, corrections)
        else:
            divisor = STEP_CONFIG.slow_avg_weight_divisor
            self.slow_avg.lerp_(rotated, self._expand([divisor / (step + divisor - 1) for step in steps], self._sizes))
            self.direction.lerp_(self.slow_avg, self._expand([slow_weight / weight for weight in weights], self._sizes))
        floor, *stack_floors = floors.split_with_sizes(self._counts)
        self._plain_direction.mul_(self._add_plain_floors(floor).rsqrt_())
        torch.exp(self.eigenvector_state[0], out=self._factors)
        for stack, floor in zip(self.stacks, stack_floors, strict=True):
            stack.scale_direction(floor[:, None, None])
        max_step = (EMBEDDING if self.is_embedding else STEP_CONFIG).max_weight_change
        step_size_factor = EMBEDDING.step_size_factor if self.is_embedding else 1.0
        step_sizes = [min(max_step, step_size_factor * float(group["lr"]) * rate) for rate in rates]
        self.step_lengths = [
            weight * math.sqrt(correction) * size
            for weight, correction, size in zip(weights, corrections, step_sizes, strict=True)
        ]
        self.scalars.copy_(self.scalars.new_tensor([steps, self.gradient_rms, self.step_lengths]))
        self._decay_weights(step_sizes, parameters, group)
        self._subtract_update(parameters)
        if self._absent:
            self._restore_absent()

    def _sum_plain_products(self, gradient: Tensor) -> Tensor:
        """Compute the inner products (slices,) of gradients and last update directions of plain slices."""
        if not self.is_embedding:
            return _sum_slices(self._plain_direction * gradient, self._plain_lengths)
        tables = (flat.split_with_sizes(self.sizes) for flat in (self._plain_direction, gradient))
        return torch.stack([direction.dot(table) for direction, table in zip(*tables, strict=True)])

    def _add_plain_floors(self, floors: Tensor) -> Tensor:
        """Add the floor of each plain slice (slices,) to second moments."""
        if len(floors) == 1:
            return self._plain_square + floors
        if not self.is_embedding:
            return self._plain_square + floors.index_select(0, self._plain_index)
        sums = self._plain_square.clone()
        torch._foreach_add_(sums.split_with_sizes(self.sizes), [*floors.unbind()])
        return sums

    def _compute_table_floors(self, gradient: Tensor, corrections: Sequence[float]) -> Tensor:
        """Compute what is added to the second moments of embeddings (slices,), so that rare rows take short steps."""
        # As if gradients of average size came to every row now and then. With the longest step of 0.03, this raises
        # the ratio on tables alone from 0.39 to 0.64 (docs/decisions/optimizer-form.md).
        sums = gradient.view(self._table_shape).square().sum(1)  # (rows of all slices,)
        counts = _sum_slices((sums > 0).to(sums.dtype), self._plain_lengths)  # of rows with a gradient
        usual = _sum_slices(sums, self._plain_lengths).div_(counts.clamp_(min=1).mul_(self._table_shape[1]))
        return usual.mul_(usual.new_tensor(corrections)).mul_(EMBEDDING.pseudo_gradient_frequency)

    def _decay_weights(self, step_sizes: Sequence[float], parameters: Sequence[Tensor], group: ParameterGroup) -> None:
        """Apply weight decay to matrices, given the step size of each slice.

        Below the usual step size, the decay falls with the cube of the step size, so that weights can converge.
        """
        weight_decay = float(group["weight_decay"]) * (EMBEDDING.weight_decay_factor if self.is_embedding else 1.0)
        rows = [row for row, p in enumerate(parameters) if p.ndim > 1 and row not in self._absent]
        if not weight_decay or not rows:
            return
        # A decay in proportion to the step pulls each weight off the minimum as long as steps last. Steps along
        # eigenvectors have equal length, so the pull exceeds small slopes. Few rows need decay while steps are long,
        # and the square keeps it there (docs/decisions/optimizer-decay.md).
        decays = [step * min(1.0, step / STEP_SIZE.usual_step_size) ** 2 * weight_decay for step in step_sizes]
        for decay in {decays[row] for row in rows}:
            matrices = [parameters[row] for row in rows if decays[row] == decay]
            torch._foreach_add_(matrices, matrices, alpha=-decay)

    def _subtract_update(self, parameters: Sequence[Tensor]) -> None:
        """Subtract the update directions, times the step length of each slice, from the parameters."""
        updates = [*self._plain_direction.split_with_sizes(self.sizes[: self._counts[0]])]
        for stack in self.stacks:
            updates += stack.rotate(stack.direction, back=True).unbind()
        rows = [row for row in range(len(updates)) if row not in self._absent]
        parameters, lengths = [parameters[row] for row in rows], [self.step_lengths[row] for row in rows]
        updates = [updates[row].view(p.shape) for row, p in zip(rows, parameters, strict=True)]
        alike = len({*lengths}) == 1
        if not alike:
            updates = [*torch._foreach_mul(updates, lengths)]
        torch._foreach_add_(parameters, updates, alpha=-lengths[0] if alike else -1.0)

    def _expand(self, values: Sequence[float], lengths: Tensor) -> float | Tensor:
        """Return the value that all slices share, or repeat the values of the last slices by ``lengths``."""
        if len({*values}) == 1:
            return values[0]
        return self.direction.new_tensor(values[-len(lengths) :]).repeat_interleave(lengths)


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """Split a sequence into parts of these lengths."""
    return [values[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def _sum_slices(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum values (n,) of slices with these numbers of values, one slice after the other: (slices,)."""
    # The sum of a single slice is several times faster than a segment.
    if len(lengths) == 1:
        return values.sum(0, keepdim=True)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
