"""Convex, or nearly so: a linear classifier of bags of words, and a photograph as a product of two factors."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Build, Workload, build_on_rows
from analysis.optimizer_bench.workloads.gnn import DEFINITION, SMALLEST
from analysis.optimizer_bench.workloads.text import read_sources
from protonet._checks import optional_packages

WORDS = 1000  #: Features: how often a body has each of the commonest words.
SOFTMAX_BATCH, SOFTMAX_VALIDATION = 48, 300

RANK, START = 32, 0.1  #: Of the factors, and the standard deviation that they begin with.
OBSERVED = 0.5  #: Share of the pixels to train on.
FACTOR_BATCH, FACTOR_VALIDATION = 512, 4096


@functools.cache
def load_bags() -> tuple[Tensor, Tensor]:
    """Return how often each function of the standard library has each word, (n, words), and its module (n,)."""
    bodies, labels = list[str](), list[int]()
    modules = itertools.chain.from_iterable(side.items() for side in read_sources())
    pieces = (DEFINITION.split(source)[2::2] for _, source in sorted(modules))
    for module, functions in enumerate(each for each in pieces if len(each) >= SMALLEST):
        bodies += functions
        labels += [module] * len(functions)
    bags = [re.findall(r"[^\W\d]\w+", body) for body in bodies]
    counts = Counter(itertools.chain.from_iterable(bags))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    columns = {word: column for column, word in enumerate(words)}
    x = torch.zeros(len(bags), WORDS)
    for row, bag in enumerate(bags):
        known = torch.tensor([columns[word] for word in bag if word in columns], dtype=torch.int64)
        x[row] = known.bincount(minlength=WORDS)
    return x, torch.tensor(labels)


def build_softmax(seed: int) -> Workload:
    """Tell the module of a function by multinomial logistic regression, on counts that nobody scaled.

    The seed decides the initial weights and the order of batches.
    """
    x, y = load_bags()
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled.tensor_split([SOFTMAX_VALIDATION])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(x[rows]), y[rows])

    make = functools.partial(nn.Linear, WORDS, int(y.max()) + 1)
    return build_on_rows(make, loss, train, validation, size=SOFTMAX_BATCH, seed=seed)


class Factors(nn.Module):
    """A matrix as the product of two."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(START * torch.randn(rows, RANK))
        self.columns = nn.Parameter(START * torch.randn(columns, RANK))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the entries (n,) at rows (n,) and columns (n,)."""
        return (self.rows[rows] * self.columns[columns]).sum(1)


@functools.cache
def load_photograph() -> Tensor:
    """Return a photograph's grey values, (height, width), standardised."""
    with optional_packages("load_photograph"):
        from sklearn.datasets import load_sample_image  # noqa: PLC0415 - optional
    grey = torch.tensor(load_sample_image("china.jpg")).float().mean(2)
    return (grey - grey.mean()) / grey.std()


def build_factor(seed: int) -> Workload:
    """Complete a photograph of which some pixels are known; the seed decides the initial weights and the order."""
    image = load_photograph()
    shuffled = torch.randperm(image.numel(), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled[: FACTOR_VALIDATION + int(OBSERVED * image.numel())].tensor_split([FACTOR_VALIDATION])

    def loss(model: nn.Module, pixels: Tensor) -> Tensor:
        rows, columns = pixels // image.shape[1], pixels % image.shape[1]
        return F.mse_loss(model(rows, columns), image[rows, columns])

    make = functools.partial(Factors, *image.shape)
    return build_on_rows(make, loss, train, validation, size=FACTOR_BATCH, seed=seed)


WORKLOADS: dict[str, Build] = {"softmax": build_softmax, "factor": build_factor}
