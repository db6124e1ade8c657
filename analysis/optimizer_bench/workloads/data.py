"""Offline data: characters of matplotlib's fonts, scikit-learn's photographs, Python's source code."""

from __future__ import annotations

import functools
import re
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

from protonet.datasets import Dataset, load_glyphs
from protonet.errors import optional_packages

IMAGE_SIDE, PIXELS_PER_IMAGE = 28, 28 * 28  #: Size of a picture of a character.
#: One module of the standard library in ten is for validation.
MODULES_PER_VALIDATION_MODULE = 10
DEFINITION_PATTERN = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
WORD_PATTERN = re.compile(r"[^\W\d]\w+")
#: Minimum number of functions of a module in tasks that classify modules.
MIN_FUNCTIONS_PER_MODULE = 20


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
