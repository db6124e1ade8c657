"""The encoder: closed-form views and a learned residual MLP, one embedding, and the parameter budget.

The embedding is the concatenation of unit-norm views, each scaled by the square root of its weight, so that the
cosine of two embeddings is the weighted sum of the views' cosines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet._checks import check_int, check_number
from protonet.views.forest import ForestView
from protonet.views.linear import LinearView
from protonet.views.radial import RadialView

#: A learned view has at least this many dimensions: few features are padded with zeros to give classes room.
MIN_EMBEDDING_DIM = 64
#: Stacks of (members, hidden width) that selection may try, smallest first, cut to the budget.
LADDER = ((1, 1), (1, 32), (1, 128), (4, 128))


class Plan(NamedTuple):
    """What a budget affords: the learned views' dimension, and stacks of (members, width), smallest first."""

    embedding_dim: int
    ladder: tuple[tuple[int, int], ...]


def count_mlp_parameters(input_dim: int, width: int, embedding_dim: int) -> int:
    """Return the parameters of one residual MLP: two matrices and the hidden bias."""
    return width * (input_dim + 1 + embedding_dim)


def plan_encoder(input_dim: int, num_classes: int, param_limit: float) -> Plan:
    """Turn a problem's size and a parameter limit into exact sizes, never one parameter over.

    Args:
        input_dim: Features a sample, >= 1.
        num_classes: Number of classes, >= 2.
        param_limit: Most trainable parameters allowed, finite and >= 0; fractions are rounded down.

    Returns:
        The stacks of ``LADDER`` that fit, and as the last rung what fits of the first that does not. No rung where
        not even the smallest MLP fits: the model is then raw cosine with no parameters.

    Raises:
        TypeError: A size or the limit is not a number.
        ValueError: A size below its least value; a negative or non-finite limit.
    """
    input_dim = check_int("plan_encoder", "input_dim", input_dim, low=1)
    num_classes = check_int("plan_encoder", "num_classes", num_classes, low=2)
    limit = math.floor(check_number("plan_encoder", "param_limit", param_limit, low=0))
    embedding_dim = max(input_dim, min(MIN_EMBEDDING_DIM, 4 * num_classes))
    units = limit // count_mlp_parameters(input_dim, 1, embedding_dim)
    ladder: list[tuple[int, int]] = []
    for members, width in LADDER:
        rung = (members, width) if members * width <= units else (max(units // width, 1), min(units, width))
        if rung[1] and rung not in ladder:
            ladder.append(rung)
        if rung != (members, width):
            break
    return Plan(embedding_dim, tuple(ladder))


class ResidualMLPs(nn.Module):
    """A stack of equal residual MLPs, evaluated as one: ``pad(z) + W2 gelu(W1 z + b1)``.

    The last layer starts at zero, so an untrained member returns its (zero-padded) input.

    Args:
        members: MLPs in the stack.
        input_dim: Features of the input.
        width: Hidden units of each.
        embedding_dim: Features of the output, >= input_dim.
        generator: Draws the first layer.
    """

    def __init__(
        self, members: int, input_dim: int, width: int, embedding_dim: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        first = torch.randn(members, input_dim, width, generator=generator, dtype=torch.float32)
        self.first = nn.Parameter(first * math.sqrt(1 / input_dim))
        self.bias = nn.Parameter(torch.zeros(members, 1, width, dtype=torch.float32))
        self.last = nn.Parameter(torch.zeros(members, width, embedding_dim, dtype=torch.float32))

    def forward(self, z: Tensor, members: slice = slice(None)) -> Tensor:
        """Map (members, n, input_dim), or (n, input_dim) shared by them, to (members, n, embedding_dim).

        Args:
            z: Float rows, or one set of rows for each member.
            members: Which members to evaluate.
        """
        first, bias, last = self.first[members], self.bias[members], self.last[members]
        z = z.expand(len(first), -1, -1)
        hidden = F.gelu(torch.baddbmm(bias, z, first))
        padding = last.shape[2] - z.shape[2]
        return torch.baddbmm(F.pad(z, (0, padding)) if padding else z, hidden, last)


class Encoder(nn.Module):
    """Features to one embedding: closed-form views (buffers) and learned views (parameters).

    Args:
        views: The linear, radial and forest views in use; the first is linear.
        weights: (len(views) + members,) non-negative weight of each view's cosine, learned views last. A view of
            weight 0 is not part of the embedding (the learned views may read it all the same).
        learned: The learned views, if the budget affords any. They read the first view.

    The buffer ``scale`` is the features' magnitude, divided out first so that no unit over- or underflows.
    """

    weights: Tensor
    scale: Tensor

    def __init__(
        self,
        views: Sequence[LinearView | RadialView | ForestView],
        weights: Tensor,
        *,
        learned: ResidualMLPs | None = None,
    ) -> None:
        super().__init__()
        self.views = nn.ModuleList(views)
        first = views[0]
        assert isinstance(first, LinearView)
        self.input_dim = first.dim
        self.dims = [view.embedding_dim for view in views]
        self.learned = learned
        self.register_buffer("weights", (weights / weights.sum()).to(torch.float32))
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float32))
        self.active = self._find_active()

    def _find_active(self) -> tuple[int, ...]:
        """Return the views that are part of the embedding: those of positive weight."""
        return tuple(index for index, weight in enumerate(self.weights[: len(self.views)].tolist()) if weight > 0)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Take over which views are in use along with their weights."""
        super()._load_from_state_dict(*args)
        self.active = self._find_active()

    @property
    def embedding_dim(self) -> int:
        """Width of the embedding: all views in use, side by side."""
        return sum(self._sizes())

    def _sizes(self) -> list[int]:
        """Return the width of each view in use."""
        sizes = [self.dims[index] for index in self.active]
        if self.learned is not None:
            sizes += [self.learned.last.shape[2]] * len(self.learned.last)
        return sizes

    def _split(self, embedding: Tensor) -> list[Tensor]:
        """Cut an embedding (n, embedding_dim) into its views."""
        return list(embedding.split(self._sizes(), dim=1))

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Concatenate views, each at norm sqrt(weight): (n, embedding_dim)."""
        weights = torch.cat([self.weights[list(self.active)], self.weights[len(self.views) :]]).sqrt()
        least = max(1e-12, torch.finfo(pieces[0].dtype).tiny)
        scaled = [
            piece * (weight / torch.linalg.vector_norm(piece, dim=1, keepdim=True).clamp_min(least))
            for piece, weight in zip(pieces, weights, strict=True)
        ]
        return torch.cat(scaled, dim=1) if len(scaled) > 1 else scaled[0]

    def normalize(self, embedding: Tensor) -> Tensor:
        """Bring every view of each row (n, embedding_dim) back to norm sqrt(weight), as prototypes need."""
        return self._join(self._split(embedding))

    def forward(self, x: Tensor) -> Tensor:
        """Embed features (n, input_dim) as unit rows (n, embedding_dim)."""
        x = x / self.scale
        read: dict[nn.Module, Tensor] = {}  # the linear views, those that several others read once
        pieces = []
        for index in self.active:
            view = self.views[index]
            if isinstance(view, ForestView):
                pieces.append(view(x))
                continue
            linear = view.view if isinstance(view, RadialView) else view
            if linear not in read:
                read[linear] = linear(x)
            z = read[linear]
            pieces.append(view.score(z) if isinstance(view, RadialView) else linear.embed(z))  # type: ignore[operator]
        if self.learned is not None:
            z = read[self.views[0]] if self.views[0] in read else self.views[0](x)
            pieces += self.learned(z).unbind(0)
        return self._join(pieces)
