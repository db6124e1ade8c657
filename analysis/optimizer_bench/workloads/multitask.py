"""Several tasks and several experts: a trunk whose heads' losses differ in scale, and a mixture of experts."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, hold_out, on_rows, workload
from analysis.optimizer_bench.workloads.data import PIXELS, SIDE, load_ascii, load_latin
from analysis.optimizer_bench.workloads.models import make_mlp

TRUNK, BOTTLENECK, SHAPES = 96, 48, 6
HEADS_BATCH, HEADS_VALIDATION = 32, 300

EXPERTS, WIDTH, EXPERT_WIDTH = 8, 64, 48
BALANCE = 0.01  #: Weight of the term that keeps experts equally busy.
EXPERTS_BATCH, EXPERTS_VALIDATION = 32, 300


class Losses(NamedTuple):
    """A loss, 0-d, of each task."""

    character: Tensor  #: Cross-entropy, in nats: from 4.5.
    shape: Tensor  #: Squared error, in pixels and squares of them: from some 150.
    image: Tensor  #: Squared error, in grey values of [0, 1]: from some 0.04.


def measure_shapes(images: Tensor) -> Tensor:
    """Return how much ink images (n, pixels) have, and where: (n, shapes), in pixels.

    They are: the ink, its mean row and column, the variances of both and their covariance.
    """
    positions = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).float()  # (pixels, 2)
    total = images.sum(1, keepdim=True)  # (n, 1)
    ink = images / total
    mean = ink @ positions  # (n, 2)
    row, column = (positions - mean.unsqueeze(1)).unbind(2)  # each (n, pixels)
    moments = [(ink * product).sum(1, keepdim=True) for product in (row * row, column * column, row * column)]
    return torch.cat([total, mean, *moments], 1)


class Heads(nn.Module):
    """A trunk of two layers, and a linear head for each task."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(make_mlp(PIXELS, TRUNK, BOTTLENECK), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(BOTTLENECK, outputs) for outputs in (num_classes, SHAPES, PIXELS))

    def forward(self, images: Tensor, y: Tensor, shapes: Tensor) -> Losses:
        """Return the losses of images (n, pixels) of classes (n,) and shapes (n, shapes)."""
        x = self.trunk(images)  # (n, bottleneck)
        logits, shape, image = (head(x) for head in self.heads)
        return Losses(F.cross_entropy(logits, y), F.mse_loss(shape, shapes), F.mse_loss(image, images))


@workload
def heads() -> Task:
    """Tell a glyph's character and shape, less the mean shape, and draw it again.

    The training loss is the sum of losses that nobody weighed against each other. The validation loss weighs tasks
    alike: it is the mean of their losses, each as a share of what it is for one who guesses the same for all glyphs.
    """
    data = load_ascii()
    shapes = measure_shapes(data.x)
    shapes -= shapes.mean(0)
    guesses = torch.stack([torch.tensor(math.log(data.num_classes)), shapes.var(), data.x.var(0).mean()])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        losses = torch.stack([*model(data.x[rows], data.y[rows], shapes[rows])])  # (tasks,)
        return losses.sum() if model.training else (losses / guesses).mean()

    rows = hold_out(torch.arange(len(data.x)), HEADS_VALIDATION)
    return on_rows(functools.partial(Heads, data.num_classes), loss, rows, HEADS_BATCH)


class Experts(nn.Module):
    """A layer, one of several experts beside a skip, and a linear head; a gate chooses each image's expert.

    Source: W. Fedus, B. Zoph and N. Shazeer (2022), Switch transformers, arXiv 2101.03961, (1) to (6).
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU())
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.rise = nn.Parameter(torch.randn(EXPERTS, WIDTH, EXPERT_WIDTH) * math.sqrt(2 / WIDTH))
        self.fall = nn.Parameter(torch.randn(EXPERTS, EXPERT_WIDTH, WIDTH) * math.sqrt(2 / EXPERT_WIDTH))
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images (n, pixels) to logits (n, num_classes) and the imbalance, 0-d: 1 where all are equally busy."""
        x: Tensor = self.stem(images)  # (n, width)
        shares = self.gate(x).softmax(1)  # (n, experts)
        share, chosen = shares.max(1)  # each (n,)
        # Each expert sees all images, which so few experts do faster than they would sort them.
        outputs = (x @ self.rise).relu() @ self.fall  # (experts, n, width)
        x = x + share.unsqueeze(1) * outputs[chosen, torch.arange(len(x))]
        busy = F.one_hot(chosen, EXPERTS).float().mean(0)  # (experts,)
        return self.head(x), EXPERTS * (busy * shares.mean(0)).sum()


@workload
def experts() -> Task:
    """Tell characters apart. The imbalance is part of the training loss alone."""
    data = load_latin()

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        logits, imbalance = model(data.x[rows])
        total: Tensor = F.cross_entropy(logits, data.y[rows]) + BALANCE * imbalance * model.training
        return total

    rows = hold_out(torch.arange(len(data.x)), EXPERTS_VALIDATION)
    return on_rows(functools.partial(Experts, data.num_classes), loss, rows, EXPERTS_BATCH)


WORKLOADS = {"heads": heads, "experts": experts}
