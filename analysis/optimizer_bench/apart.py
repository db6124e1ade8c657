"""Two workloads that no tuning may see: a temporal convolution that reads syntax, and a regression on a photograph.

They are kept out of the choice of any setting and reported apart:
``python -m analysis optimizer-bench --workload-file analysis/optimizer_bench/apart.py``.
"""

from __future__ import annotations

import functools
import io
import itertools
import keyword
import math
import tokenize
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from analysis.optimizer_bench.workload import Build, Workload, batches, initial_weights
from analysis.optimizer_bench.workloads.text import cut_windows, read_sources
from protonet._checks import optional_packages

VOCABULARY = 128  # ASCII
#: What a character may belong to; white space and line ends are of kind 0.
KINDS = (tokenize.ENDMARKER, tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP, tokenize.COMMENT)
KEYWORD = len(KINDS)  # a kind of its own, that tokenize counts among names
MODULES = 30  # tokenising all would take seconds
WINDOW = 64  # characters
CHANNELS = 32
DILATIONS = (1, 3, 9)
SYNTAX_BATCH, SYNTAX_VALIDATION = 8, 128  # windows

FREQUENCIES = 48
SPREAD = 16.0  # the standard deviation of the first frequencies, in periods a picture
WIDTH = 96
BLOCKS = 2
PIXEL_BATCH, PIXEL_VALIDATION = 256, 2048


class Convolutions(nn.Module):
    """Two weight-normed dilated convolutions beside a skip."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        first, second = (
            parametrizations.weight_norm(nn.Conv1d(CHANNELS, CHANNELS, 3, padding=dilation, dilation=dilation))
            for _ in range(2)
        )
        self.path = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, length) to the same shape."""
        y: Tensor = torch.relu(x + self.path(x))
        return y


class SyntaxReader(nn.Module):
    """Embedded characters, convolutions that see further and further, a kind for every character.

    Source: S. Bai, J. Z. Kolter and V. Koltun (2018), An empirical evaluation of generic convolutional and
        recurrent networks for sequence modeling, arXiv 1803.01271; here both sides of a character are seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, CHANNELS)
        self.path = nn.Sequential(*map(Convolutions, DILATIONS))
        self.head = nn.Conv1d(CHANNELS, len(KINDS) + 1, 1)

    def forward(self, characters: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch, kinds, length)."""
        x = self.characters(characters).transpose(1, 2)  # (batch, channels, length)
        logits: Tensor = self.head(self.path(x))
        return logits


class Perceptron(nn.Module):
    """A norm and two layers beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.path = nn.Sequential(nn.BatchNorm1d(WIDTH), *layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        y: Tensor = x + self.path(x)
        return y


class TabularResNet(nn.Module):
    """Learned frequencies of the numerical features, then residual blocks.

    Source: Y. Gorishniy et al. (2021), Revisiting deep learning models for tabular data, arXiv 2106.11959, and
        (2022), On embeddings for numerical features in tabular deep learning, arXiv 2203.05556.
    """

    def __init__(self, features: int, targets: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(SPREAD * torch.randn(features, FREQUENCIES))
        self.stem = nn.Linear(2 * FREQUENCIES, WIDTH)
        self.blocks = nn.Sequential(*(Perceptron() for _ in range(BLOCKS)))
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, targets))

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, features) to targets (n, targets)."""
        angles = 2 * math.pi * x @ self.frequencies  # (n, frequencies)
        waves = torch.cat((angles.cos(), angles.sin()), 1)  # (n, 2 * frequencies)
        y: Tensor = self.head(self.blocks(self.stem(waves)))
        return y


def label_characters(source: str) -> Tensor:
    """Return the kind of every character of a Python source: (size,) int64."""
    ends = itertools.accumulate(map(len, io.StringIO(source)))
    starts = [0, *ends]  # of lines
    kinds = torch.zeros(len(source), dtype=torch.int64)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in KINDS:
            begin, end = (starts[line - 1] + column for line, column in (token.start, token.end))
            kinds[begin:end] = KEYWORD if keyword.iskeyword(token.string) else KINDS.index(token.type)
    return kinds


@functools.cache
def load_syntax() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return characters and kinds to train on, then those to validate on: (n, window) each, int64."""

    def cut(sources: Iterable[str], n: int | None = None) -> tuple[Tensor, Tensor]:
        texts = list(itertools.islice(sources, MODULES))
        characters = torch.frombuffer(bytearray("".join(texts).encode("ascii", "replace")), dtype=torch.uint8).long()
        kinds = torch.cat([label_characters(text) for text in texts])
        return cut_windows(characters, WINDOW, n), cut_windows(kinds, WINDOW, n)

    train, validation = read_sources()
    return *cut(train.values()), *cut(validation.values(), SYNTAX_VALIDATION)


@functools.cache
def load_pixels() -> tuple[Tensor, Tensor]:
    """Return the positions, (n, 2) in [0, 1], and standardised colours, (n, 3), of a photograph's pixels, shuffled."""
    with optional_packages("load_pixels"):
        from sklearn.datasets import load_sample_image  # noqa: PLC0415 - optional
    image = torch.tensor(load_sample_image("china.jpg")).float()  # (height, width, 3)
    axes = [torch.linspace(0, 1, size) for size in image.shape[:2]]
    x, y = torch.cartesian_prod(*axes), image.flatten(0, 1)  # (n, 2), (n, 3)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], ((y - y.mean(0)) / y.std(0))[order]


def build_syntax(seed: int) -> Workload:
    """Tell what each character of a Python source belongs to: a keyword, a name, a string and so on."""
    train, train_kinds, validation, validation_kinds = load_syntax()
    with initial_weights(seed):
        model = SyntaxReader()
    order = batches(len(train), SYNTAX_BATCH, torch.Generator().manual_seed(seed))

    def train_loss() -> Tensor:
        rows = next(order)
        return F.cross_entropy(model(train[rows]), train_kinds[rows])

    return Workload(model, train_loss, lambda: F.cross_entropy(model(validation), validation_kinds))


def build_pixels(seed: int) -> Workload:
    """Tell the colour of a photograph's pixel from its position: a regression on a table of two columns."""
    x, y = load_pixels()
    with initial_weights(seed):
        model = TabularResNet(x.shape[1], y.shape[1])
    validation = slice(PIXEL_VALIDATION)
    order = batches(len(x) - PIXEL_VALIDATION, PIXEL_BATCH, torch.Generator().manual_seed(seed))

    def loss(rows: Tensor | slice) -> Tensor:
        return F.mse_loss(model(x[rows]), y[rows])

    return Workload(model, lambda: loss(PIXEL_VALIDATION + next(order)), lambda: loss(validation))


WORKLOADS: dict[str, Build] = {"syntax": build_syntax, "pixels": build_pixels}
