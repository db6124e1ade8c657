"""Weights of an unusual scale: an MLP that begins with too large ones, and one whose layers make little of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Build, Workload, build_on_rows
from analysis.optimizer_bench.workloads.images import load_ascii

LOUDNESS = 10.0  #: Times torch's own initial weights.
FAINTNESS = 0.1  #: Times what a layer gives whose outputs begin as large as its inputs.
PIXELS, WIDTH, BATCH, VALIDATION = 28 * 28, 96, 32, 300
HALF = PIXELS // 2


def make_loud(num_classes: int) -> nn.Sequential:
    """Make an MLP of three layers whose logits begin some ``LOUDNESS**3`` times as large as they would."""
    first, second, head = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, num_classes)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(LOUDNESS)
    return model


def build_loud(seed: int) -> Workload:
    """Tell characters apart; the seed decides the initial weights and the order of batches."""
    data = load_ascii()
    shuffled = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled.tensor_split([VALIDATION])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(data.x[rows]), data.y[rows])

    return build_on_rows(lambda: make_loud(data.num_classes), loss, train, validation, size=BATCH, seed=seed)


class FaintLinear(nn.Module):
    """A linear layer whose weights begin with a standard deviation of 1 and whose outputs are multiplied instead.

    Source: T. Karras et al. (2018), Progressive growing of GANs, arXiv 1710.10196, section 4.1; there by He's constant
        alone.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs) to (n, outputs)."""
        return FAINTNESS * F.linear(x, self.weight / math.sqrt(x.shape[1]), self.bias)


def make_faint() -> nn.Sequential:
    """Make an MLP of three faint layers: its outputs begin near 0, and its weights must go far."""
    first, second, head = FaintLinear(HALF, WIDTH), FaintLinear(WIDTH, WIDTH), FaintLinear(WIDTH, HALF)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head)


def build_faint(seed: int) -> Workload:
    """Draw the lower half of a character from its upper half; the seed decides the initial weights and the order."""
    images = load_ascii().x
    shuffled = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    validation, train = shuffled.tensor_split([VALIDATION])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        upper, lower = rows.chunk(2, dim=1)
        return F.binary_cross_entropy_with_logits(model(upper), lower)

    return build_on_rows(make_faint, loss, train, validation, size=BATCH, seed=seed)


WORKLOADS: dict[str, Build] = {"loud": build_loud, "faint": build_faint}
