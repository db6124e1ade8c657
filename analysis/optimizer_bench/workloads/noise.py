"""Training data with errors in them: wrong labels of characters, and a robot's tracker that rarely reads nonsense.

Both are validated on what is right.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Build, Workload, build_on_rows
from analysis.optimizer_bench.workloads.images import PIXELS, load_ascii

WRONG = 0.3  # the share of training labels that are drawn anew among the other classes
HELD_OUT, LABEL_WIDTH, LABEL_BATCH = 300, 96, 16

JOINTS, TURN = 4, math.pi / 2  # each joint turns by at most so much either way
SPIKES, SPIKE = 0.01, 100.0  # the share of spoilt readings, and their standard deviation, that of the others being 1
READINGS, VALIDATION = 20_000, 512
ARM_WIDTH, ARM_BATCH = 64, 16


def spoil_labels(labels: Tensor, num_classes: int, generator: torch.Generator) -> Tensor:
    """Replace a share of labels (n,) by another class's, each as likely."""
    other = torch.randint(1, num_classes, labels.shape, generator=generator)
    wrong = torch.rand(labels.shape, generator=generator) < WRONG
    return torch.where(wrong, (labels + other) % num_classes, labels)


def make_classifier(num_classes: int) -> nn.Sequential:
    """Make an MLP that maps pixels (n, pixels) to logits (n, num_classes), with a layer norm after each hidden layer.

    Source of the task: C. Zhang et al. (2017), Understanding deep learning requires rethinking generalization,
        arXiv 1611.03530: partially corrupted labels.
    """
    layers: list[nn.Module] = []
    for inputs in (PIXELS, LABEL_WIDTH):
        layers += [nn.Linear(inputs, LABEL_WIDTH), nn.LayerNorm(LABEL_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(LABEL_WIDTH, num_classes))


def build_labels(seed: int) -> Workload:
    """Tell characters apart though many of the labels to learn from are wrong."""
    data = load_ascii()
    generator = torch.Generator().manual_seed(0)
    validation, train = torch.randperm(len(data.x), generator=generator).tensor_split([HELD_OUT])
    labels = data.y.clone()
    labels[train] = spoil_labels(labels[train], data.num_classes, generator)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(data.x[rows]), labels[rows])

    make = functools.partial(make_classifier, data.num_classes)
    return build_on_rows(make, loss, train, validation, size=LABEL_BATCH, seed=seed)


def reach(angles: Tensor) -> Tensor:
    """Return where the hand (n, 2) is of a planar arm of links of length 1, each turned (n, joints) from the last."""
    headings = angles.cumsum(1)  # (n, joints)
    return torch.stack((headings.cos(), headings.sin()), 2).sum(1)


@functools.cache
def load_readings() -> tuple[Tensor, Tensor, Tensor]:
    """Return angles (n, joints) over ``TURN``, standardised hands (n, 2), and these as the tracker reads them."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(READINGS, JOINTS, generator=generator) - 1
    hands = reach(TURN * x)
    hands = (hands - hands.mean(0)) / hands.std(0)
    spoilt = torch.rand(READINGS, 1, generator=generator) < SPIKES
    return x, hands, torch.where(spoilt, SPIKE * torch.randn(hands.shape, generator=generator), hands)


def make_arm() -> nn.Sequential:
    """Make an MLP that maps angles (n, joints), over ``TURN``, to hands (n, 2)."""
    hidden = nn.Linear(JOINTS, ARM_WIDTH), nn.Tanh(), nn.Linear(ARM_WIDTH, ARM_WIDTH), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(ARM_WIDTH, 2))


def build_spiky(seed: int) -> Workload:
    """Learn a robot arm's kinematics by squared error from readings of which few are wildly wrong."""
    x, hands, readings = load_readings()
    validation, train = torch.arange(READINGS).tensor_split([VALIDATION])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(model(x[rows]), (readings if model.training else hands)[rows])

    return build_on_rows(make_arm, loss, train, validation, size=ARM_BATCH, seed=seed)


WORKLOADS: dict[str, Build] = {"labels": build_labels, "spiky": build_spiky}
