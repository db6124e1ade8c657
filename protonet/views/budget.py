"""The sizes of trained MLPs within a parameter budget."""

from __future__ import annotations

import math
from typing import NamedTuple

from protonet._validation import check_int, check_number

#: Minimal width of a trained view: rows of few features are padded with zeros.
MIN_EMBEDDING_DIM = 64
#: Sizes of ensembles, (members, hidden units), that may be evaluated, smallest first.
MLP_SIZES = ((1, 1), (1, 32), (1, 128), (4, 128))


class EncoderPlan(NamedTuple):
    """The sizes of trained views within a parameter budget."""

    embedding_dim: int  #: Width of each MLP's output.
    sizes: tuple[tuple[int, int], ...]  #: Sizes of ensembles, (members, hidden units), smallest first.


def count_mlp_parameters(input_dim: int, hidden: int, embedding_dim: int) -> int:
    """Count the parameters of one residual MLP: two matrices and the hidden bias."""
    return hidden * (input_dim + 1 + embedding_dim)


def plan_encoder(input_dim: int, num_classes: int, param_limit: float) -> EncoderPlan:
    """Choose sizes of trained MLPs that do not exceed a parameter limit.

    Args:
        input_dim: Features per sample, >= 1.
        num_classes: Number of classes, >= 2.
        param_limit: Maximal number of trainable parameters, finite and >= 0; fractions are rounded down.

    Returns:
        Those of ``MLP_SIZES`` that fit; the first one that does not fit is reduced to the budget. ``sizes`` is empty
        if not even the smallest MLP fits: the model is then raw cosine with no parameters.

    Raises:
        InputTypeError: A size or the limit is not a number.
        InputError: A size is too small, or the limit is negative or not finite.
    """
    input_dim = check_int("input_dim", input_dim, low=1)
    num_classes = check_int("num_classes", num_classes, low=2)
    limit = math.floor(check_number("param_limit", param_limit, low=0))
    embedding_dim = max(input_dim, min(MIN_EMBEDDING_DIM, 4 * num_classes))
    units = limit // count_mlp_parameters(input_dim, 1, embedding_dim)
    sizes: list[tuple[int, int]] = []
    for members, hidden in MLP_SIZES:
        size = (members, hidden) if members * hidden <= units else (max(units // hidden, 1), min(units, hidden))
        if size[1] and size not in sizes:
            sizes.append(size)
        if size != (members, hidden):
            break
    return EncoderPlan(embedding_dim, tuple(sizes))
