"""Weights of an unusual scale: an MLP that begins with too large ones, and one whose layers make little of them."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, classify, hold_out, on_rows, workload
from analysis.optimizer_bench.workloads.data import PIXELS, load_ascii
from analysis.optimizer_bench.workloads.models import make_mlp

LOUDNESS = 10.0  #: Times torch's own initial weights.
FAINTNESS = 0.1  #: Times what a layer gives whose outputs begin as large as its inputs.
HALF, WIDTH, BATCH, VALIDATION = PIXELS // 2, 96, 32, 300


def make_loud(num_classes: int) -> nn.Sequential:
    """Make an MLP of three layers whose logits begin some ``LOUDNESS**3`` times as large as they would."""
    model = make_mlp(PIXELS, WIDTH, WIDTH, num_classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(LOUDNESS)
    return model


@workload
def loud() -> Task:
    """Tell characters apart."""
    data = load_ascii()
    make = functools.partial(make_loud, data.num_classes)
    return classify(make, data.x, data.y, held_out=VALIDATION, size=BATCH)


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


@workload
def faint() -> Task:
    """Draw the lower half of a character from its upper half; outputs begin near 0, and weights must go far."""

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        upper, lower = rows.chunk(2, dim=1)
        return F.binary_cross_entropy_with_logits(model(upper), lower)

    make = functools.partial(make_mlp, HALF, WIDTH, WIDTH, HALF, linear=FaintLinear)
    return on_rows(make, loss, hold_out(load_ascii().x, VALIDATION), BATCH)


WORKLOADS = {"loud": loud, "faint": faint}
