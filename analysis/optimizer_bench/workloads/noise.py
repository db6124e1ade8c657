"""Training data with errors in them: wrong labels of characters, and a robot's tracker that rarely reads nonsense.

Both are validated on what is right.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, on_rows, seed_0, tell, workload
from analysis.optimizer_bench.workloads.data import PIXELS, load_ascii, standardise
from analysis.optimizer_bench.workloads.models import make_mlp

WRONG = 0.3  #: The share of training labels that are drawn anew among the other classes.
HELD_OUT, LABEL_WIDTH, LABEL_BATCH = 300, 96, 16

JOINTS, TURN = 4, math.pi / 2  #: Each joint turns by at most so much either way.
SPIKES, SPIKE = 0.01, 100.0  #: The share of spoilt readings, and their standard deviation, that of the others being 1.
READINGS, VALIDATION = 20_000, 512
ARM_WIDTH, ARM_BATCH = 64, 16


def spoil_labels(labels: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    """Replace a share of labels (n,) by another class's, each as likely."""
    other = torch.randint(1, num_classes, labels.shape, generator=generator)
    wrong = torch.rand(labels.shape, generator=generator) < WRONG
    return torch.where(wrong, (labels + other) % num_classes, labels)


@workload
def labels() -> Task:
    """Tell characters apart though many of the labels to learn from are wrong.

    Source: C. Zhang et al. (2017), Understanding deep learning requires rethinking generalization, arXiv 1611.03530.
    """
    data, generator = load_ascii(), seed_0()
    validation, train = torch.randperm(len(data.x), generator=generator).tensor_split([HELD_OUT])
    y = data.y.clone()
    y[train] = spoil_labels(y[train], data.num_classes, generator)
    sizes = PIXELS, LABEL_WIDTH, LABEL_WIDTH, data.num_classes
    make = functools.partial(make_mlp, *sizes, norm=nn.LayerNorm)
    return on_rows(make, tell(data.x, y), (train, validation), LABEL_BATCH)


def reach(angles: Tensor) -> Tensor:
    """Return where the hand (n, 2) is of a planar arm of links of length 1, each turned (n, joints) from the last."""
    headings = angles.cumsum(1)  # (n, joints)
    return torch.stack((headings.cos(), headings.sin()), 2).sum(1)


def draw_readings() -> tuple[Tensor, Tensor, Tensor]:
    """Return angles (n, joints) over ``TURN``, standardised hands (n, 2), and these as the tracker reads them."""
    generator = seed_0()
    x = 2 * torch.rand(READINGS, JOINTS, generator=generator) - 1
    hands = standardise(reach(TURN * x))
    spoilt = torch.rand(READINGS, 1, generator=generator) < SPIKES
    return x, hands, torch.where(spoilt, SPIKE * torch.randn(hands.shape, generator=generator), hands)


@workload
def spiky() -> Task:
    """Learn a robot arm's kinematics by squared error from readings of which few are wildly wrong."""
    x, hands, readings = draw_readings()
    validation, train = torch.arange(READINGS).tensor_split([VALIDATION])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(model(x[rows]), (readings if model.training else hands)[rows])

    make = functools.partial(make_mlp, JOINTS, ARM_WIDTH, ARM_WIDTH, 2, activation=nn.Tanh)
    return on_rows(make, loss, (train, validation), ARM_BATCH)


WORKLOADS = {"labels": labels, "spiky": spiky}
