"""Layers and networks that several workloads share, with torch's own initial weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn


class ResidualLayers(nn.Module):
    """Layers with a residual connection."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.path = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to another one of its shape."""
        return torch.add(x, self.path(x))


class RecurrentStates(nn.Module):
    """The hidden states (batch, length, width) of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, inputs) to (batch, length, width)."""
        states: Tensor = self.layer(x)[0]
        return states


class TokenEmbedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, symbols: int, length: int, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols (batch, length) to (batch, length, width)."""
        return torch.add(self.symbols(symbols), self.positions.weight[: symbols.shape[1]])


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


def make_convolutions(*channels: int, stride: int = 1, bias: bool = False) -> list[nn.Module]:
    """Make 3 x 3 convolutions from each number of channels to the next, each with a batch norm and a ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(channels):
        convolve = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        layers += [convolve, nn.BatchNorm2d(outputs), nn.ReLU()]
    return layers


def make_transformer(width: int, activation: str, *, norm_first: bool) -> nn.Module:
    """Make two transformer layers of four heads, (batch, length, width), feed-forward width doubled, no dropout."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, activation, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
