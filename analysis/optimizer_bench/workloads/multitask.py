"""Several tasks and several experts: a trunk whose heads' losses differ in scale, and a mixture of experts."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Build, Workload, build_on_rows
from analysis.optimizer_bench.workloads.images import PIXELS, SIDE, load_ascii, load_latin

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
        hidden = [nn.Linear(PIXELS, TRUNK), nn.ReLU(), nn.Linear(TRUNK, BOTTLENECK), nn.ReLU()]
        self.trunk = nn.Sequential(*hidden)
        self.heads = nn.ModuleList(nn.Linear(BOTTLENECK, outputs) for outputs in (num_classes, SHAPES, PIXELS))

    def forward(self, images: Tensor, y: Tensor, shapes: Tensor) -> Losses:
        """Return the losses of images (n, pixels) of classes (n,) and shapes (n, shapes)."""
        x = self.trunk(images)  # (n, bottleneck)
        logits, shape, image = (head(x) for head in self.heads)
        return Losses(F.cross_entropy(logits, y), F.mse_loss(shape, shapes), F.mse_loss(image, images))


@functools.cache
def load_shapes() -> Tensor:
    """Return the shapes of all ASCII glyphs, less their means: (n, shapes)."""
    shapes = measure_shapes(load_ascii().x)
    return shapes - shapes.mean(0)


def build_heads(seed: int) -> Workload:
    """Tell a glyph's character and shape and draw it again; the seed decides the initial weights and the order.

    The training loss is the sum of losses that nobody weighed against each other. The validation loss weighs tasks
    alike: it is the mean of their losses, each as a share of what it is for one who guesses the same for all glyphs.
    """
    data, shapes = load_ascii(), load_shapes()
    shuffled = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled.tensor_split([HEADS_VALIDATION])
    guesses = torch.stack([torch.tensor(math.log(data.num_classes)), shapes.var(), data.x.var(0).mean()])

    def compute(model: nn.Module, rows: Tensor) -> Tensor:
        return torch.stack([*model(data.x[rows], data.y[rows], shapes[rows])])  # (tasks,)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return compute(model, rows).sum()

    make = functools.partial(Heads, data.num_classes)
    workload = build_on_rows(make, loss, train, validation, size=HEADS_BATCH, seed=seed)

    def val_loss() -> Tensor:
        return (compute(workload.model, validation) / guesses).mean()

    return workload._replace(val_loss=val_loss)


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


def build_experts(seed: int) -> Workload:
    """Tell characters apart; the seed decides the initial weights and the order of batches.

    The imbalance is part of the training loss alone.
    """
    data = load_latin()
    shuffled = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled.tensor_split([EXPERTS_VALIDATION])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        logits, imbalance = model(data.x[rows])
        total: Tensor = F.cross_entropy(logits, data.y[rows]) + BALANCE * imbalance * model.training
        return total

    make = functools.partial(Experts, data.num_classes)
    return build_on_rows(make, loss, train, validation, size=EXPERTS_BATCH, seed=seed)


WORKLOADS: dict[str, Build] = {"heads": build_heads, "experts": build_experts}
