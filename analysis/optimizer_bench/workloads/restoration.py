"""Pictures to restore: photographs under noise, and characters of which most patches are missing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, hold_out, on_rows, workload
from analysis.optimizer_bench.workloads.data import SIDE, load_latin, load_photograph
from analysis.optimizer_bench.workloads.models import make_mlp

PHOTOGRAPHS, TILE = ("china.jpg", "flower.jpg"), 12
NOISE = (0.02, 0.3)  # standard deviations, of which each tile's is uniform; colours are in [0, 1]
CHANNELS, CONVOLUTIONS, TILE_BATCH, TILE_VALIDATION = 16, 4, 8, 64

PATCH, HIDDEN_SHARE = 7, 0.6
PATCHES = (SIDE // PATCH) ** 2
WIDTH, LAYERS, GLYPH_BATCH, GLYPH_VALIDATION = 48, 2, 16, 64


def cut_tiles() -> Tensor:
    """Cut the photographs into tiles: (n, 3, tile, tile) in [0, 1]."""
    images = torch.stack(list(map(load_photograph, PHOTOGRAPHS))).movedim(3, 1) / 255
    tiles = images.unfold(2, TILE, TILE).unfold(3, TILE, TILE)  # (2, 3, rows, columns, tile, tile)
    return tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).contiguous()


class Denoiser(nn.Module):
    """Convolutions that guess the noise, to be taken away; batch norms between them.

    Source: K. Zhang et al. (2017), Beyond a Gaussian denoiser: residual learning of deep CNN for image denoising,
        arXiv 1608.03981.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1), nn.ReLU()]
        for _ in range(CONVOLUTIONS - 2):
            convolve = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
            layers += [convolve, nn.BatchNorm2d(CHANNELS), nn.ReLU()]
        self.noise = nn.Sequential(*layers, nn.Conv2d(CHANNELS, 3, 3, padding=1))

    def forward(self, tiles: Tensor) -> Tensor:
        """Map noisy tiles (n, 3, tile, tile) to clean ones."""
        return torch.sub(tiles, self.noise(tiles))


def add_noise(tiles: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tiles (n, 3, tile, tile) under normal noise, each at its own level, and the tiles."""
    low, high = NOISE
    levels = low + (high - low) * torch.rand(len(tiles), 1, 1, 1, generator=generator)
    return tiles + levels * torch.randn(tiles.shape, generator=generator), tiles


@workload
def denoiser() -> Task:
    """Take noise of an unknown level from tiles of photographs; the loss is 1000 times the mean squared error."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        noisy, clean = batch
        return 1000 * F.mse_loss(model(noisy), clean)

    return on_rows(Denoiser, loss, hold_out(cut_tiles(), TILE_VALIDATION), TILE_BATCH, add_noise)


class Mix(nn.Module):
    """A layer norm and an MLP over one axis of (n, patches, width), beside a skip."""

    def __init__(self, size: int, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = make_mlp(size, 2 * size, size, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, patches, width) to the same shape."""
        mixed = self.mlp(self.norm(x).transpose(self.axis, 2)).transpose(self.axis, 2)
        return torch.add(x, mixed)


class Mixer(nn.Module):
    """Patches, a learned one in place of each that is missing, mixed across patches and channels by turns.

    Source: I. Tolstikhin et al. (2021), MLP-Mixer, arXiv 2105.01601; trained as by Z. Xie et al. (2021), SimMIM,
        arXiv 2111.09886.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(PATCH**2, WIDTH)
        self.missing = nn.Parameter(0.02 * torch.randn(WIDTH))
        mixes = [mix for _ in range(LAYERS) for mix in (Mix(PATCHES, 1), Mix(WIDTH, 2))]
        self.head = nn.Sequential(*mixes, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PATCH**2))

    def forward(self, patches: Tensor, missing: Tensor) -> Tensor:
        """Map patches (n, patches, pixels), of which some are missing (n, patches), to the logits of all pixels."""
        logits: Tensor = self.head(torch.where(missing[..., None], self.missing, self.embedding(patches)))
        return logits


def cut_patches(images: Tensor) -> Tensor:
    """Cut pictures (n, side * side) into patches (n, patches, pixels), row by row."""
    return F.unfold(images.view(-1, 1, SIDE, SIDE), PATCH, stride=PATCH).transpose(1, 2).contiguous()


def hide_patches(patches: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return patches (n, patches, pixels) and which are to be missing, (n, patches): as many of every picture."""
    ranks = torch.rand(patches.shape[:2], generator=generator).argsort(1)
    return patches, ranks < round(HIDDEN_SHARE * patches.shape[1])


@workload
def masked() -> Task:
    """Fill in the missing patches of characters; the loss is the cross-entropy of their pixels, in nats a patch."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        whole, missing = batch
        logits = model(whole, missing)
        return PATCH**2 * F.binary_cross_entropy_with_logits(logits[missing], whole[missing])

    rows = hold_out(cut_patches(load_latin().x), GLYPH_VALIDATION)
    return on_rows(Mixer, loss, rows, GLYPH_BATCH, hide_patches)


WORKLOADS = {"denoiser": denoiser, "masked": masked}
