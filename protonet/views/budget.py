"""The parameter budget: what MLPs it affords."""

from __future__ import annotations

import math
from typing import NamedTuple

from protonet._validation import check_int, check_number

#: A learned view has at least this many dimensions: few features are padded with zeros to give classes room.
MIN_EMBEDDING_DIM = 64
#: Sizes of stacks, (members, hidden units), that the search may try, smallest first, cut to the budget.
SIZES = ((1, 1), (1, 32), (1, 128), (4, 128))


class Plan(NamedTuple):
    """What a parameter budget affords."""

    embedding_dim: int  #: Of the learned views.
    sizes: tuple[tuple[int, int], ...]  #: Of stacks, (members, hidden units), smallest first.


def count_mlp_parameters(input_dim: int, hidden: int, embedding_dim: int) -> int:
    """Return the parameters of one residual MLP: two matrices and the hidden bias."""
    return hidden * (input_dim + 1 + embedding_dim)


def plan_encoder(input_dim: int, num_classes: int, param_limit: float) -> Plan:
    """Turn a problem's size and a parameter limit into exact sizes, never one parameter over.

    Args:
        input_dim: Features per sample, >= 1.
        num_classes: Number of classes, >= 2.
        param_limit: Trainable parameters allowed, finite and >= 0; fractions are rounded down.

    Returns:
        Those of ``SIZES`` that fit, and as the last one what fits of the first that does not. ``sizes`` is empty
        where not even the smallest MLP fits: the model is then raw cosine with no parameters.

    Raises:
        InputTypeError: A size or the limit is not a number.
        InputError: A size below its least value; a negative or non-finite limit.
    """
    input_dim = check_int("input_dim", input_dim, low=1)
    num_classes = check_int("num_classes", num_classes, low=2)
    limit = math.floor(check_number("param_limit", param_limit, low=0))
    embedding_dim = max(input_dim, min(MIN_EMBEDDING_DIM, 4 * num_classes))
    units = limit // count_mlp_parameters(input_dim, 1, embedding_dim)
    sizes: list[tuple[int, int]] = []
    for members, hidden in SIZES:
        size = (members, hidden) if members * hidden <= units else (max(units // hidden, 1), min(units, hidden))
        if size[1] and size not in sizes:
            sizes.append(size)
        if size != (members, hidden):
            break
    return Plan(embedding_dim, tuple(sizes))
