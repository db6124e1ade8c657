"""A convolutional network with batch norms that tells Latin characters apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, batches, initial_weights
from analysis.optimizer_bench.workloads._glyphs import load_latin

BATCH = 32
VALIDATION = 300


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 3x3 convolution that halves the image, then a batch norm and a ReLU."""
    convolve = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolve, nn.BatchNorm2d(outputs), nn.ReLU())


def build(seed: int) -> Workload:
    """Build the workload; the seed moves the initial weights and the order of batches."""
    data = load_latin()
    images = data.x.unflatten(1, (1, 28, 28))
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled[:VALIDATION], shuffled[VALIDATION:]
    with initial_weights(seed):
        stages = (convolution(1, 16), convolution(16, 32), convolution(32, 32))
        model = nn.Sequential(*stages, nn.Flatten(), nn.Linear(512, data.num_classes))
    order = batches(len(train), BATCH, torch.Generator().manual_seed(seed))

    def loss(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(images[rows]), data.y[rows])

    return Workload(model, lambda: loss(train[next(order)]), lambda: loss(validation))
