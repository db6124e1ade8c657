"""A variational autoencoder of the images of Latin characters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, batches, initial_weights
from analysis.optimizer_bench.workloads._glyphs import load_latin

PIXELS = 28 * 28
HIDDEN = 128
LATENT = 16
BATCH = 64
VALIDATION = 1000


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
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum() / 2
        surprise = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        loss: Tensor = (surprise + divergence) / len(images)
        return loss


def build(seed: int) -> Workload:
    """Build the workload; the seed moves the initial weights, the order of batches and the latent's noise."""
    shuffled = torch.randperm(len(load_latin().x), generator=torch.Generator().manual_seed(0))
    validation, train = load_latin().x[shuffled].tensor_split([VALIDATION])
    with initial_weights(seed):
        model = VAE()
    generator = torch.Generator().manual_seed(seed)
    rows = batches(len(train), BATCH, generator)

    def train_loss() -> Tensor:
        loss: Tensor = model(train[next(rows)], torch.randn(BATCH, LATENT, generator=generator))
        return loss

    return Workload(model, train_loss, lambda: model(validation, torch.zeros(VALIDATION, LATENT)))
