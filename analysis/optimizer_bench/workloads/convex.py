"""Convex, or nearly so: a linear classifier of bags of words, and a photograph as a product of two factors."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, classify, on_rows, seed_0, workload
from analysis.optimizer_bench.workloads.data import DEFINITION, SMALLEST, WORD, load_photograph, read_sources

WORDS = 1000  #: Features: how often a body has each of the commonest words.
SOFTMAX_BATCH, SOFTMAX_VALIDATION = 48, 300

RANK, START = 32, 0.1  #: Of the factors, and the standard deviation that they begin with.
OBSERVED = 0.5  #: Share of the pixels to train on.
FACTOR_BATCH, FACTOR_VALIDATION = 512, 4096


def count_words() -> tuple[Tensor, Tensor]:
    """Return how often each function of the standard library has each word, (n, words), and its module (n,)."""
    modules = sorted(itertools.chain.from_iterable(side.items() for side in read_sources()))
    functions = (DEFINITION.split(source)[2::2] for _, source in modules)
    bodies = [each for each in functions if len(each) >= SMALLEST]
    labels = torch.arange(len(bodies)).repeat_interleave(torch.tensor(list(map(len, bodies))))
    bags = [WORD.findall(body) for body in itertools.chain.from_iterable(bodies)]
    counts = Counter(itertools.chain.from_iterable(bags))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    columns = {word: column for column, word in enumerate(words)}
    known = [torch.tensor([columns[word] for word in bag if word in columns], dtype=torch.int64) for bag in bags]
    return torch.stack([each.bincount(minlength=WORDS) for each in known]).float(), labels


@workload
def softmax() -> Task:
    """Tell the module of a function by multinomial logistic regression, on counts that nobody scaled."""
    x, y = count_words()
    make = functools.partial(nn.Linear, WORDS, int(y.max()) + 1)
    return classify(make, x, y, held_out=SOFTMAX_VALIDATION, size=SOFTMAX_BATCH)


class Factors(nn.Module):
    """A matrix as the product of two."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(START * torch.randn(rows, RANK))
        self.columns = nn.Parameter(START * torch.randn(columns, RANK))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the entries (n,) at rows (n,) and columns (n,)."""
        return (self.rows[rows] * self.columns[columns]).sum(1)


@workload
def factor() -> Task:
    """Complete a photograph, in standardised grey values, of which some pixels are known."""
    grey = load_photograph().mean(2)
    image = (grey - grey.mean()) / grey.std()
    known = torch.randperm(image.numel(), generator=seed_0())[: FACTOR_VALIDATION + int(OBSERVED * image.numel())]
    validation, train = known.tensor_split([FACTOR_VALIDATION])

    def loss(model: nn.Module, pixels: Tensor) -> Tensor:
        places = pixels // image.shape[1], pixels % image.shape[1]
        return F.mse_loss(model(*places), image[places])

    return on_rows(functools.partial(Factors, *image.shape), loss, (train, validation), FACTOR_BATCH)


WORKLOADS = {"softmax": softmax, "factor": factor}
