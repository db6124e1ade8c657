"""A prediction for every place: what each character of a source belongs to, and the colour of a photograph's pixels."""

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

from analysis.optimizer_bench.workload import Task, hold_out, on_rows, workload
from analysis.optimizer_bench.workloads.data import (
    cut_windows,
    encode_ascii,
    load_photograph,
    read_sources,
    standardise,
)
from analysis.optimizer_bench.workloads.models import Skip

VOCABULARY = 128  # ASCII
#: What a character may belong to; white space and line ends are of kind 0.
KINDS = (tokenize.ENDMARKER, tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP, tokenize.COMMENT)
KEYWORD = len(KINDS)  # a kind of its own, that tokenize counts among names
MODULES = 30  # tokenising all would take seconds
WINDOW = 64  # characters
CHANNELS, DILATIONS = 32, (1, 3, 9)
SYNTAX_BATCH, SYNTAX_VALIDATION = 8, 128  # windows

SPREAD = 16.0  # the standard deviation of the first frequencies, in periods a picture
FREQUENCIES, WIDTH, BLOCKS = 48, 96, 2
PIXEL_BATCH, PIXEL_VALIDATION = 256, 2048


def make_convolutions(dilation: int) -> nn.Sequential:
    """Make two weight-normed dilated convolutions beside a skip."""
    convolve = functools.partial(nn.Conv1d, CHANNELS, CHANNELS, 3, padding=dilation, dilation=dilation)
    first, second = (parametrizations.weight_norm(convolve()) for _ in range(2))
    return nn.Sequential(Skip(first, nn.ReLU(), second, nn.ReLU()), nn.ReLU())


class SyntaxReader(nn.Module):
    """Embedded characters, convolutions that see further and further, a kind for every character.

    Source: S. Bai, J. Z. Kolter and V. Koltun (2018), An empirical evaluation of generic convolutional and
        recurrent networks for sequence modeling, arXiv 1803.01271; here both sides of a character are seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, CHANNELS)
        self.path = nn.Sequential(*map(make_convolutions, DILATIONS))
        self.head = nn.Conv1d(CHANNELS, len(KINDS) + 1, 1)

    def forward(self, characters: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch, kinds, length)."""
        x = self.characters(characters).transpose(1, 2)  # (batch, channels, length)
        logits: Tensor = self.head(self.path(x))
        return logits


class Waves(nn.Module):
    """Cosines and sines of learned frequencies of numerical features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(SPREAD * torch.randn(features, FREQUENCIES))

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, features) to (n, 2 * frequencies)."""
        angles = 2 * math.pi * x @ self.frequencies  # (n, frequencies)
        return torch.cat((angles.cos(), angles.sin()), 1)


def make_tabular_resnet(features: int, targets: int) -> nn.Sequential:
    """Make a network of waves and residual blocks that maps features (n, features) to targets (n, targets).

    Source: Y. Gorishniy et al. (2021), Revisiting deep learning models for tabular data, arXiv 2106.11959, and
        (2022), On embeddings for numerical features in tabular deep learning, arXiv 2203.05556.
    """

    def make_block() -> Skip:
        return Skip(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    stem = [Waves(features), nn.Linear(2 * FREQUENCIES, WIDTH)]
    blocks = [make_block() for _ in range(BLOCKS)]
    return nn.Sequential(*stem, *blocks, nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, targets))


def label_characters(source: str) -> Tensor:
    """Return the kind of every character of a Python source: (size,) int64."""
    starts = [0, *itertools.accumulate(map(len, io.StringIO(source)))]  # of lines
    kinds = torch.zeros(len(source), dtype=torch.int64)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in KINDS:
            begin, end = (starts[line - 1] + column for line, column in (token.start, token.end))
            kinds[begin:end] = KEYWORD if keyword.iskeyword(token.string) else KINDS.index(token.type)
    return kinds


def read_syntax() -> tuple[Tensor, Tensor]:
    """Return characters with their kinds, (n, 2, window) int64: to train on, and to validate on."""

    def cut(sources: Iterable[str], n: int | None = None) -> Tensor:
        texts = list(itertools.islice(sources, MODULES))
        characters, kinds = encode_ascii("".join(texts)), torch.cat(list(map(label_characters, texts)))
        return torch.stack([cut_windows(symbols, WINDOW, n) for symbols in (characters, kinds)], dim=1)

    train, validation = read_sources()
    return cut(train.values()), cut(validation.values(), SYNTAX_VALIDATION)


@workload
def syntax() -> Task:
    """Tell what each character of a Python source belongs to: a keyword, a name, a string and so on."""

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        return F.cross_entropy(model(windows[:, 0]), windows[:, 1])

    return on_rows(SyntaxReader, loss, read_syntax(), SYNTAX_BATCH)


@workload
def pixels() -> Task:
    """Tell the standardised colour of a photograph's pixel from its position, in [0, 1]: a table of two columns."""
    image = load_photograph()
    x = torch.cartesian_prod(*(torch.linspace(0, 1, size) for size in image.shape[:2]))  # (n, 2)
    y = standardise(image.flatten(0, 1))  # (n, 3)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(model(x[rows]), y[rows])

    make = functools.partial(make_tabular_resnet, x.shape[1], y.shape[1])
    return on_rows(make, loss, hold_out(torch.arange(len(x)), PIXEL_VALIDATION), PIXEL_BATCH)


WORKLOADS = {"syntax": syntax, "pixels": pixels}
