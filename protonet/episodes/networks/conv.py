"""The image backbones of the papers: Conv4, and ResNet-12 with DropBlock; batch normalisation for episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESNET12_CHANNELS = (64, 160, 320, 640)  #: Of ResNet-12's four blocks.
SLOPE = 0.1  #: Of ResNet-12's leaky rectifiers.
BLOCK_SIZE = 5  #: Side of what DropBlock takes away, in pixels of the map; all of a smaller map.


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation in three modes; none changes the layer during training.

    In training mode the batch's own statistics are used and nothing is kept; in evaluation mode those that
    `measure_statistics` measured: an average kept along the way would be of other weights than the averaged ones. With
    ``leading`` set, in both modes, the statistics are of a batch's leading rows, the support, so that no query sees
    another.

    Source: Ioffe and Szegedy (2015), https://arxiv.org/abs/1502.03167; statistics of the support: Bronskill et al.,
        "TaskNorm" (2020), sec. 3.2, MetaBN. https://arxiv.org/abs/2003.03284
    """

    leading = 0  #: How many rows the statistics are of; 0 for the usual ones.
    measuring = False  #: Whether the batches' statistics are being averaged.

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the channels of maps (n, channels, height, width)."""
        if self.leading:
            variance, mean = torch.var_mean(x[: self.leading], dim=(0, 2, 3), correction=0)  # (channels,)
            scale = self.weight * (variance + self.eps).rsqrt()
            return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]
        if self.training and not self.measuring:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return super().forward(x)


@contextmanager
def lead_by(encoder: nn.Module, n_rows: int) -> Iterator[bool]:
    """Take the statistics of an encoder's batch normalisation from leading rows; yield whether it has any."""
    layers = [layer for layer in encoder.modules() if isinstance(layer, BatchNorm)]
    for layer in layers:
        layer.leading = n_rows
    try:
        yield bool(layers)
    finally:
        for layer in layers:
            layer.leading = 0


@torch.no_grad()
def measure_statistics(encoder: nn.Module, batches: Iterable[Tensor]) -> None:
    """Measure the statistics of an encoder's batch normalisation anew, in place; it is in evaluation mode afterwards.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim). Without batch normalisation nothing is done.
        batches: Rows (n, dim) float32 on the encoder's device, at least one batch; the result is the mean over batches.

    Source: Wu and Johnson, "Rethinking 'Batch' in BatchNorm" (2021), sec. 3. https://arxiv.org/abs/2105.07576
    """
    encoder.eval()
    layers = [layer for layer in encoder.modules() if isinstance(layer, BatchNorm)]
    if not layers:
        return
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
        layer.measuring = True
    for rows in batches:
        encoder(rows)
    for layer in layers:
        layer.eval()
        layer.measuring = False


class DropBlock(nn.Module):
    """Sets squares of the maps to zero in training, and scales what is left to the same mean.

    Args:
        rate: The share of a map that is dropped, about, in [0, 1); 0 drops nothing.
        size: Side of the squares, in pixels, >= 1; a map that is smaller is dropped whole. Squares of 1 are dropout.

    Source: Ghiasi, Lin and Le, "DropBlock" (2018), algorithm 1, https://arxiv.org/abs/1810.12890, with the rate of all
        steps; Lee et al., "MetaOptNet" (2019), whose code raises it from 0 over 40,000 batches.
    """

    def __init__(self, rate: float, size: int) -> None:
        super().__init__()
        self.rate, self.size = rate, size

    def forward(self, x: Tensor) -> Tensor:
        """Return maps (n, channels, side, side) with squares of zeros; in evaluation mode, the maps as they are."""
        if not self.training or not self.rate:
            return x
        side = x.shape[3]
        size = min(self.size, side)
        n_positions = side - size + 1
        seed_rate = self.rate * (side / (size * n_positions)) ** 2  # the probability that a square begins at a position
        seeds = (torch.rand_like(x[..., :n_positions, :n_positions]) < seed_rate).to(x.dtype)
        mask = 1 - F.max_pool2d(F.pad(seeds, [size - 1] * 4), size, stride=1)  # (n, channels, side, side)
        return x * mask * (mask.numel() / mask.sum().clamp_min(1))


class Residual(nn.Module):
    """ResNet-12's block: three convolutions of 3 x 3 beside one of 1 x 1, then the larger of two by two pixels."""

    def __init__(self, before: int, channels: int, drop: DropBlock) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for layer in range(3):
            layers += [nn.Conv2d(channels if layer else before, channels, 3, padding=1, bias=False)]
            layers += [BatchNorm(channels), nn.LeakyReLU(SLOPE)]
        self.path = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, bias=False), BatchNorm(channels))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, before, side, side) to (n, channels, side // 2, side // 2)."""
        pooled: Tensor = self.drop(F.max_pool2d(F.leaky_relu(self.path(x) + self.shortcut(x), SLOPE), 2))
        return pooled


def make_conv4(shape: tuple[int, int, int]) -> nn.Sequential:
    """Return Conv4, which maps rows of images (channels, side, side) to (n, 64 * (side // 16)**2): 1600 for 84 pixels.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), sec. 3.1.
        https://arxiv.org/abs/1703.05175
    """
    blocks: list[nn.Module] = []
    for before in (shape[0], 64, 64, 64):
        blocks += [nn.Conv2d(before, 64, 3, padding=1), BatchNorm(64), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Unflatten(1, shape), *blocks, nn.Flatten())


def make_resnet12(shape: tuple[int, int, int], dropblock: float) -> nn.Sequential:
    """Return ResNet-12, which maps rows of images (channels, side, side) to (n, 640).

    ``dropblock`` is the rate of dropout in the first two blocks and of DropBlock in the others.

    Source: Oreshkin, Rodríguez López and Lacoste, "TADAM" (2018), https://arxiv.org/abs/1805.10123, with the widths and
        rectifiers of Lee et al., "MetaOptNet" (2019), https://arxiv.org/abs/1904.03758, and the mean of the last maps.
    """
    drops = [DropBlock(dropblock, size) for size in (1, 1, BLOCK_SIZE, BLOCK_SIZE)]
    blocks = map(Residual, (shape[0], *RESNET12_CHANNELS), RESNET12_CHANNELS, drops)
    return nn.Sequential(nn.Unflatten(1, shape), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
