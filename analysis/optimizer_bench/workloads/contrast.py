"""Embeddings learnt by comparison: two views of one picture against all others, and pairs of characters.

Both are validated on characters that they never saw.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, seed_0, shuffle, workload
from analysis.optimizer_bench.workloads.data import SIDE, load_ascii, load_latin
from protonet.datasets import Dataset

HELD_OUT = 5  #: Every fifth character.

TURN, ZOOM, SHIFT = math.radians(20), 0.25, 0.15  # how far a view goes: half the picture's side is 1
GREY = 0.1  # the standard deviation of a view's noise
TEMPERATURE, EMBEDDING = 0.2, 32
VIEWS, VIEWS_VALIDATION = 16, 64  # pictures, of two views each

PAIRS, PAIRS_VALIDATION = 8, 64


def split_pictures(data: Dataset) -> tuple[Tensor, Tensor]:
    """Return pictures by character, (characters, copies, 1, side, side): to train, and of others to validate on."""
    pictures = data.x.view(data.num_classes, -1, 1, SIDE, SIDE)  # characters are in order, and have as many rows each
    held_out = torch.arange(data.num_classes) % HELD_OUT == 0
    return pictures[~held_out], pictures[held_out]


def draw_views(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, zoom, shift and blot pictures (n, 1, side, side) twice: (2 n, 1, side, side), a picture's n rows apart."""
    angle, zoom, right, down = 2 * torch.rand(4, 2 * len(pictures), generator=generator) - 1  # each (2 n,) in [-1, 1]
    cos, sin = ((1 + ZOOM * zoom) * side for side in ((TURN * angle).cos(), (TURN * angle).sin()))
    maps = torch.stack((cos, -sin, SHIFT * right, sin, cos, SHIFT * down), 1).view(-1, 2, 3)
    grid = F.affine_grid(maps, [len(maps), 1, SIDE, SIDE], align_corners=False)
    views = F.grid_sample(pictures.repeat(2, 1, 1, 1), grid, align_corners=False)
    return views + GREY * torch.randn(views.shape, generator=generator)


def compare_views(embeddings: Tensor) -> Tensor:
    """Return the cross-entropy, 0-d, of telling each view's twin, n rows apart, among all of (2 n, embedding).

    Source: T. Chen et al. (2020), A simple framework for contrastive learning of visual representations,
        arXiv 2002.05709, algorithm 1.
    """
    unit = F.normalize(embeddings, dim=1)
    similar = (unit @ unit.T / TEMPERATURE).fill_diagonal_(-math.inf)  # (2 n, 2 n)
    return F.cross_entropy(similar, torch.arange(len(unit)).roll(len(unit) // 2))


def make_encoder() -> nn.Sequential:
    """Make convolutions that halve the picture, and a projection: (n, 1, side, side) to (n, embedding)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, EMBEDDING))


@workload
def contrast() -> Task:
    """Tell which views are of one picture, as SimCLR does; the seed decides the views too."""
    train, validation = (pictures.flatten(0, 1) for pictures in split_pictures(load_latin()))
    generator = seed_0()
    few = torch.randperm(len(validation), generator=generator)[:VIEWS_VALIDATION]
    held_out = draw_views(validation[few], generator)
    stream = shuffle(train, VIEWS, draw_views)
    return Task(make_encoder, lambda model, views: compare_views(model(views)), stream, held_out)


class Siamese(nn.Module):
    """An encoder of either picture, and a logit of a weighted distance of what it makes of them.

    Source: G. Koch, R. Zemel and R. Salakhutdinov (2015), Siamese neural networks for one-shot image recognition.
    """

    def __init__(self) -> None:
        super().__init__()
        convolve = nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        self.encoder = nn.Sequential(*convolve, nn.Flatten(), nn.Linear(256, 64), nn.Sigmoid())
        self.head = nn.Linear(64, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Map pairs (n, 2, 1, side, side) to the logits (n,) of being the same character."""
        first, second = self.encoder(pairs.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)  # each (n, 64)
        logits: Tensor = self.head((first - second).abs()).squeeze(1)
        return logits


def draw_pairs(pictures: Tensor, characters: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pair a picture of each character (n,) with one of it or, as often, of another: (n, 2, ...) and same (n,)."""
    total, copies = pictures.shape[:2]
    same = torch.rand(len(characters), generator=generator) < 0.5
    others = (characters + torch.randint(1, total, characters.shape, generator=generator)) % total
    which = torch.stack((characters, torch.where(same, characters, others)), 1)  # (n, 2)
    return pictures[which, torch.randint(copies, which.shape, generator=generator)], same.float()


@workload
def siamese() -> Task:
    """Tell whether two pictures show one character, from few pairs at a time; the seed decides the pairs too."""
    train, validation = split_pictures(load_ascii())

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        pairs, same = batch
        return F.binary_cross_entropy_with_logits(model(pairs), same)

    generator = seed_0()
    characters = torch.randint(len(validation), (PAIRS_VALIDATION,), generator=generator)
    held_out = draw_pairs(validation, characters, generator)
    stream = shuffle(torch.arange(len(train)), PAIRS, functools.partial(draw_pairs, train))
    return Task(Siamese, loss, stream, held_out)


WORKLOADS = {"contrast": contrast, "siamese": siamese}
