"""Characters: a convolutional network and a vision transformer tell them, a variational autoencoder draws them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, classify, hold_out, shuffle, workload
from analysis.optimizer_bench.workloads.data import PIXELS, SIDE, load_ascii, load_latin
from analysis.optimizer_bench.workloads.models import make_mlp, make_transformer

PATCH, WIDTH, HEADS, LAYERS = 7, 64, 4, 2  #: The vision transformer's.
HIDDEN, LATENT, BATCH, VALIDATION = 128, 16, 64, 1000  #: The autoencoder's.


def make_cnn(num_classes: int) -> nn.Sequential:
    """Make three 3x3 convolutions that halve the image, each with a batch norm and a ReLU, and a linear head."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, SIDE, SIDE))]
    for inputs, outputs in ((1, 16), (16, 32), (32, 32)):
        convolve = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        layers += [convolve, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, num_classes))


@workload
def cnn() -> Task:
    """Tell Latin characters by a convolutional network."""
    data = load_latin()
    make = functools.partial(make_cnn, data.num_classes)
    return classify(make, data.x, data.y, held_out=300, size=32)


class ViT(nn.Module):
    """Patches with learned positions, transformer layers with the norm first, the mean patch and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, WIDTH))
        self.layers = make_transformer(WIDTH, HEADS, LAYERS, "gelu", norm_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, pixels) to logits (n, num_classes)."""
        patches = self.patches(images.view(-1, 1, SIDE, SIDE)).flatten(2).transpose(1, 2)  # (n, patches, width)
        logits: Tensor = self.head(self.norm(self.layers(patches + self.positions)).mean(dim=1))
        return logits


@workload
def vit() -> Task:
    """Tell ASCII characters by a transformer of their patches."""
    data = load_ascii()
    return classify(functools.partial(ViT, data.num_classes), data.x, data.y, held_out=200, size=16)


class VAE(nn.Module):
    """An encoder to the mean and log variance of a latent, and a decoder to the logits of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_mlp(PIXELS, HIDDEN, 2 * LATENT)
        self.decoder = make_mlp(LATENT, HIDDEN, PIXELS)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the negative evidence bound of images (n, pixels) under noise (n, latent): nats an image, 0-d."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)  # each (n, latent)
        logits = self.decoder(mean + noise * (log_variance / 2).exp())  # (n, pixels)
        divergence: Tensor = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        surprise = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        return (surprise + divergence) / len(images)


@workload
def vae() -> Task:
    """Describe Latin characters; the seed decides the latent's noise too, which validation goes without."""
    train, validation = hold_out(load_latin().x, VALIDATION)

    def draw(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return images, torch.randn(len(images), LATENT, generator=generator)

    held_out = validation, torch.zeros(VALIDATION, LATENT)
    return Task(VAE, lambda model, batch: model(*batch), shuffle(train, BATCH, draw), held_out)


WORKLOADS = {"cnn": cnn, "vit": vit, "vae": vae}
