"""Layers and networks that several workloads share, with torch's own initial weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Skip(nn.Module):
    """Layers beside a skip."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.path = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to another one of its shape."""
        return torch.add(x, self.path(x))


class States(nn.Module):
    """The states (batch, length, width) of a recurrent layer, without the last one beside them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, inputs) to (batch, length, width)."""
        states: Tensor = self.layer(x)[0]
        return states


def make_mlp(
    *sizes: int,
    linear: Callable[[int, int], nn.Module] = nn.Linear,
    norm: Callable[[int], nn.Module] | None = None,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Make linear layers from each size to the next, with an optional norm and an activation between them."""
    *hidden, last = itertools.pairwise(sizes)
    layers: list[nn.Module] = []
    for inputs, outputs in hidden:
        layers += [linear(inputs, outputs), activation()]
        if norm is not None:
            layers.insert(-1, norm(outputs))
    return nn.Sequential(*layers, linear(*last))


def make_transformer(width: int, heads: int, layers: int, activation: str, *, norm_first: bool) -> nn.Module:
    """Make transformer layers of (batch, length, width) whose hidden size is twice the width, without dropout."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 2 * width, 0.0, activation, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
