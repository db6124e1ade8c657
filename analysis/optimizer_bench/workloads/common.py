"""Data and layers of several workloads: fonts, photographs and Python's sources; networks with torch's own weights."""

from __future__ import annotations

import functools
import itertools
import re
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from protonet.datasets import Dataset, load_glyphs
from protonet.errors import optional_packages

IMAGE_SIDE, PIXELS_PER_IMAGE = 28, 28 * 28  #: Size of a picture of a character.
MODULES_PER_VALIDATION_MODULE = 10  #: One module of the standard library in ten is for validation.
WORD_PATTERN = re.compile(r"[^\W\d]\w+")


@functools.cache
def load_latin() -> Dataset:
    """Load pictures of characters, from ASCII to Latin Extended-A: 7,400 rows of 28 * 28 grey values, 310 classes."""
    return load_glyphs(characters=map(chr, range(0x21, 0x180)), copies=2)


@functools.cache
def load_ascii() -> Dataset:
    """Load ASCII with more augmented copies: 94 classes, 6,800 rows of 28 * 28 grey values in [0, 1]."""
    return load_glyphs(characters=map(chr, range(0x21, 0x7F)), copies=6)


def load_photograph(name: str = "china.jpg") -> Tensor:
    """Load a photograph of scikit-learn: levels 0 to 255, (height, width, 3) float32."""
    with optional_packages():
        from sklearn.datasets import load_sample_image  # noqa: PLC0415 - optional
    return torch.tensor(load_sample_image(name)).float()


def standardise(x: Tensor) -> Tensor:
    """Standardize rows (n, ...) column by column."""
    return (x - x.mean(0)) / x.std(0)


@functools.cache
def read_sources() -> tuple[dict[str, str], dict[str, str]]:
    """Read the sources of the standard library's modules by name: for training, and for validation."""
    train, validation = dict[str, str](), dict[str, str]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        # A module stays on its side whatever others its Python has.
        side = train if zlib.crc32(path.name.encode()) % MODULES_PER_VALIDATION_MODULE else validation
        side[path.name] = path.read_text(encoding="utf-8")
    return train, validation


def join_sources() -> list[str]:
    """Concatenate the sources to a training text and a validation text."""
    return ["".join(modules.values()) for modules in read_sources()]


def encode_ascii(text: str) -> Tensor:
    """Encode a text as bytes (size,) int64, question marks for non-ASCII characters."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def cut_windows(symbols: Tensor, length: int, n: int | None = None) -> Tensor:
    """Cut a text (size,) into windows (n, length) that do not overlap: all, or n at equal distances."""
    windows = symbols[: len(symbols) // length * length].view(-1, length)
    return windows if n is None else windows[torch.linspace(0, len(windows) - 1, n).long()]


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


def make_transformer(width: int) -> nn.Module:
    """Make two transformer layers of four heads with the norm first, (batch, length, width), without dropout."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
