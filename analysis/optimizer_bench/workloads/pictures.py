"""Generation of pictures: characters completed and encoded, photographs denoised and painted."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import (
    WorkloadTask,
    hold_out,
    make_row_task,
    make_workload_builder,
    shuffle_batches,
)
from analysis.optimizer_bench.workloads.common import (
    PIXELS_PER_IMAGE,
    ResidualLayers,
    load_ascii,
    load_latin,
    load_photograph,
    make_convolutions,
    make_mlp,
    standardise,
)

LATENT_DIM = 16  #: The autoencoder's.
INITIAL_OUTPUT_SCALE = 0.1  #: Factor on the outputs of a layer that preserves the scale of its inputs.
#: Size of a tile, and the range of its standard deviation; colours are in [0, 1].
TILE_SIDE, NOISE_RANGE = 12, (0.02, 0.3)
FREQUENCY_DEVIATION = 16.0  #: The standard deviation of the first frequencies, in periods a picture.
N_FREQUENCIES, WIDTH = 48, 96


@make_workload_builder
def vae() -> WorkloadTask:
    """Learn a variational autoencoder of Latin characters; the seed determines the latent noise of training, too.

    An encoder gives the mean and log variance of a latent, and a decoder the logits of pixels. The loss is the negative
    evidence bound, in nats an image.
    """
    train, validation = hold_out(load_latin().x, 1000)

    def make() -> nn.Module:
        encoder, decoder = (PIXELS_PER_IMAGE, 128, 2 * LATENT_DIM), (LATENT_DIM, 128, PIXELS_PER_IMAGE)
        return nn.ModuleList([make_mlp(*encoder), make_mlp(*decoder)])

    def draw(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return images, torch.randn(len(images), LATENT_DIM, generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (encoder, decoder), (images, noise) = model.children(), batch
        mean, log_variance = encoder(images).chunk(2, dim=1)  # each (n, latent)
        logits = decoder(mean + noise * (log_variance / 2).exp())  # (n, pixels)
        divergence: Tensor = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        surprise = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        return (surprise + divergence) / len(images)

    held_out = validation, torch.zeros(len(validation), LATENT_DIM)
    return WorkloadTask(make, loss, shuffle_batches(train, 64, draw), held_out)


class DownscaledLinear(nn.Module):
    """A linear layer with weights of standard deviation 1, whose outputs are scaled down instead.

    Source: T. Karras et al. (2018), Progressive growing of GANs, arXiv 1710.10196, section 4.1; there by He's constant
        alone.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs) to (n, outputs)."""
        return INITIAL_OUTPUT_SCALE * F.linear(x, self.weight / math.sqrt(x.shape[1]), self.bias)


@make_workload_builder
def faint() -> WorkloadTask:
    """Predict the lower half of a character from its upper half; outputs start near 0."""

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        upper, lower = rows.chunk(2, dim=1)
        return F.binary_cross_entropy_with_logits(model(upper), lower)

    make = functools.partial(make_mlp, PIXELS_PER_IMAGE // 2, 96, 96, PIXELS_PER_IMAGE // 2, linear=DownscaledLinear)
    return make_row_task(make, loss, hold_out(load_ascii().x, 300), 32)


@make_workload_builder
def denoiser() -> WorkloadTask:
    """Remove noise of unknown level from tiles of photographs; the loss is 1000 times the mean squared error.

    Convolutions guess the noise, to be taken away.

    Source: K. Zhang et al. (2017), Beyond a Gaussian denoiser: residual learning of deep CNN for image denoising,
        arXiv 1608.03981.
    """
    images = torch.stack(list(map(load_photograph, ("china.jpg", "flower.jpg")))).movedim(3, 1) / 255
    tiles = images.unfold(2, TILE_SIDE, TILE_SIDE).unfold(3, TILE_SIDE, TILE_SIDE)  # (2, 3, rows, columns, tile, tile)
    tiles = tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).contiguous()  # (n, 3, tile, tile)

    def make() -> nn.Module:
        first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()
        return nn.Sequential(*first, *make_convolutions(16, 16, 16), nn.Conv2d(16, 3, 3, padding=1))

    def draw(clean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        low, high = NOISE_RANGE
        levels = low + (high - low) * torch.rand(len(clean), 1, 1, 1, generator=generator)
        return clean + levels * torch.randn(clean.shape, generator=generator), clean

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        noisy, clean = batch
        return 1000 * F.mse_loss(noisy - model(noisy), clean)

    return make_row_task(make, loss, hold_out(tiles, 64), 8, draw)


class FourierFeatures(nn.Module):
    """Cosines and sines of learned frequencies of numerical features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(FREQUENCY_DEVIATION * torch.randn(features, N_FREQUENCIES))

    def forward(self, x: Tensor) -> Tensor:
        """Map features (n, features) to (n, 2 * frequencies)."""
        angles = 2 * math.pi * x @ self.frequencies  # (n, frequencies)
        return torch.cat((angles.cos(), angles.sin()), 1)


@make_workload_builder
def pixels() -> WorkloadTask:
    """Predict the standardised colour of a photograph's pixel from its position, in [0, 1]: a table of two columns.

    Source: Y. Gorishniy et al. (2021), Revisiting deep learning models for tabular data, arXiv 2106.11959, and
        (2022), On embeddings for numerical features in tabular deep learning, arXiv 2203.05556.
    """
    image = load_photograph()
    x = torch.cartesian_prod(*(torch.linspace(0, 1, size) for size in image.shape[:2]))  # (n, 2)
    y = standardise(image.flatten(0, 1))  # (n, 3)

    def make() -> nn.Module:
        layers: list[nn.Module] = [FourierFeatures(2), nn.Linear(2 * N_FREQUENCIES, WIDTH)]
        for _ in range(2):
            layers.append(ResidualLayers(nn.BatchNorm1d(WIDTH), make_mlp(WIDTH, 2 * WIDTH, WIDTH)))
        return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(model(x[rows]), y[rows])

    return make_row_task(make, loss, hold_out(torch.arange(len(x)), 2048), 256)
