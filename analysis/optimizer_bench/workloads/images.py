"""Images that are offline wherever matplotlib is: characters in every face that it ships.

A convolutional network and a vision transformer tell them apart, and a variational autoencoder describes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, build_on_rows
from protonet.datasets import Dataset, load_glyphs

SIDE, PIXELS = 28, 28 * 28
PATCH, WIDTH, HEADS, LAYERS = 7, 64, 4, 2  #: The vision transformer's.
HIDDEN, LATENT, BATCH, VALIDATION = 128, 16, 64, 1000  #: The autoencoder's.


@functools.cache
def load_latin() -> Dataset:
    """Return ASCII to Latin Extended-A: some 310 classes, 7,400 rows of 28 * 28 grey values in [0, 1]."""
    return load_glyphs(characters=map(chr, range(0x21, 0x180)), copies=2)


@functools.cache
def load_ascii() -> Dataset:
    """Return ASCII alone, jittered more often: 94 classes, 6,800 rows of 28 * 28 grey values in [0, 1]."""
    return load_glyphs(characters=map(chr, range(0x21, 0x7F)), copies=6)


def build_classifier(data: Dataset, make: Callable[[int], nn.Module], held_out: int, size: int, seed: int) -> Workload:
    """Build the workload of telling characters apart, given the number of rows held out and of a batch's."""
    images = data.x.unflatten(1, (1, SIDE, SIDE))
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled.tensor_split([held_out])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(images[rows]), data.y[rows])

    return build_on_rows(lambda: make(data.num_classes), loss, train, validation, size=size, seed=seed)


def make_cnn(num_classes: int) -> nn.Sequential:
    """Make three 3x3 convolutions that halve the image, each with a batch norm and a ReLU, and a linear head."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 32)):
        convolve = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        layers += [nn.Sequential(convolve, nn.BatchNorm2d(outputs), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, num_classes))


def build_cnn(seed: int) -> Workload:
    """Build the convolutional network's; the seed decides the initial weights and the order of batches."""
    return build_classifier(load_latin(), make_cnn, 300, 32, seed)


class ViT(nn.Module):
    """Patches with learned positions, transformer layers with the norm first, the mean patch and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, 1, 28, 28) to logits (n, num_classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # (n, patches, width)
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(dim=1))
        return logits


def build_vit(seed: int) -> Workload:
    """Build the transformer's; the seed decides the initial weights and the order of batches."""
    return build_classifier(load_ascii(), ViT, 200, 16, seed)


class VAE(nn.Module):
    """An encoder to the mean and log variance of a latent, and a decoder to the logits of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the negative evidence bound of images (n, pixels) under noise (n, latent): nats an image, 0-d."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)  # each (n, latent)
        logits = self.decoder(mean + noise * (log_variance / 2).exp())  # (n, pixels)
        divergence: Tensor = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        surprise = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        return (surprise + divergence) / len(images)


def build_vae(seed: int) -> Workload:
    """Build the autoencoder's; the seed decides the initial weights, the order of batches and the latent's noise."""
    shuffled = torch.randperm(len(load_latin().x), generator=torch.Generator().manual_seed(0))
    validation, train = load_latin().x[shuffled].tensor_split([VALIDATION])

    def draw(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return images, torch.randn(len(images), LATENT, generator=generator)

    held_out = validation, torch.zeros(VALIDATION, LATENT)
    return build_on_rows(VAE, lambda model, batch: model(*batch), train, held_out, size=BATCH, seed=seed, draw=draw)


WORKLOADS = {"cnn": build_cnn, "vit": build_vit, "vae": build_vae}
