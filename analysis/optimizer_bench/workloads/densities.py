"""Densities: a normalising flow of a photograph's patches, and a diffusion model of digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, hold_out, on_rows, workload
from analysis.optimizer_bench.workloads.data import load_photograph
from analysis.optimizer_bench.workloads.models import Skip, make_mlp
from protonet._checks import optional_packages

PATCH, HALF = 2, 6  #: A patch has 2 * 2 pixels of 3 colours; a coupling moves half of these by the other half.
COUPLINGS, FLOW_WIDTH = 4, 64
FLOW_BATCH, FLOW_VALIDATION = 128, 512
CENTRE, SCALE = 128.0, 64.0  #: What is taken from levels of 0 to 255, and what then divides them.

PIXELS, LEVELS = 64, 16  #: Of a digit; the grey levels are 0 to 16.
FREQUENCIES, DIFFUSION_WIDTH = 8, 160
DIFFUSION_BATCH, DIFFUSION_VALIDATION = 96, 297


class Coupling(nn.Module):
    """Half of the columns scale and shift the other half; then both are interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.path = make_mlp(HALF, FLOW_WIDTH, 2 * HALF)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (n, columns) to the same shape and the logarithms (n,) of its Jacobian's determinant, up to a sign."""
        kept, moved = x.chunk(2, dim=1)
        shift, log_scale = self.path(kept).chunk(2, dim=1)
        log_scale = log_scale.tanh()
        return torch.stack([moved * log_scale.exp() + shift, kept], dim=2).flatten(1), log_scale.sum(1)


class Flow(nn.Module):
    """Couplings from patches to normal noise.

    Source: L. Dinh, J. Sohl-Dickstein and S. Bengio (2017), Density estimation using Real NVP, arXiv 1605.08803.
    """

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling() for _ in range(COUPLINGS))

    def forward(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Map levels (n, columns) to noise of that shape and the logarithms (n,) of the Jacobian's determinant."""
        x = (levels - CENTRE) / SCALE
        log_determinant = torch.full((len(x),), -2 * HALF * math.log(SCALE))
        for coupling in self.couplings:
            x, change = coupling(x)
            log_determinant = log_determinant + change
        return x, log_determinant


def cut_patches() -> Tensor:
    """Return the levels 0 to 255 of a photograph's patches, (n, columns)."""
    return load_photograph().unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).flatten(0, 1).flatten(1)


@workload
def flow() -> Task:
    """Tell the density of patches; the seed decides the noise added to levels, too.

    The loss is in nats a column. The noise, uniform in [0, 1), makes it a bound of the entropy of whole levels: it is
    positive.

    Source: L. Theis, A. van den Oord and M. Bethge (2016), A note on the evaluation of generative models.
    """

    def draw(levels: Tensor, generator: torch.Generator) -> Tensor:
        return levels + torch.rand(levels.shape, generator=generator)

    def loss(model: nn.Module, levels: Tensor) -> Tensor:
        noise, log_determinant = model(levels)
        surprise: Tensor = (noise**2).mean() / 2 + math.log(2 * math.pi) / 2 - log_determinant.mean() / (2 * HALF)
        return surprise

    return on_rows(Flow, loss, hold_out(cut_patches(), FLOW_VALIDATION), FLOW_BATCH, draw)


class Denoiser(nn.Module):
    """An MLP with a skip that tells the noise in an image; the time enters as waves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(PIXELS + 2 * FREQUENCIES, DIFFUSION_WIDTH)
        hidden = [Skip(nn.Linear(DIFFUSION_WIDTH, DIFFUSION_WIDTH), nn.SiLU()) for _ in range(2)]
        self.path = nn.Sequential(nn.SiLU(), *hidden, nn.Linear(DIFFUSION_WIDTH, PIXELS))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Map noisy images (n, pixels) at times (n, 1) in [0, 1] to their noise (n, pixels)."""
        angles = times * (math.pi * torch.arange(1, 1 + FREQUENCIES))  # (n, frequencies)
        noise: Tensor = self.path(self.stem(torch.cat([images, angles.cos(), angles.sin()], 1)))
        return noise


def load_images() -> Tensor:
    """Return scikit-learn's digits, (1797, pixels) in [-1, 1]."""
    with optional_packages("load_images"):
        from sklearn.datasets import load_digits  # noqa: PLC0415 - optional
    return torch.tensor(load_digits().data).float() / (LEVELS / 2) - 1


def mix(images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Mix images and noise, both (n, pixels), at times (n, 1): from images alone at 0 to noise alone at 1."""
    angles = times * (math.pi / 2)
    return images * angles.cos() + noise * angles.sin()


@workload
def diffusion() -> Task:
    """Tell the noise in digits; the seed decides the noise and the times, too.

    Source: J. Ho, A. Jain and P. Abbeel (2020), Denoising diffusion probabilistic models, arXiv 2006.11239, (14); the
        schedule is A. Nichol and P. Dhariwal's (2021), Improved denoising diffusion probabilistic models.
    """

    def draw(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(images.shape, generator=generator)
        return images, noise, torch.rand(len(images), 1, generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        _, noise, times = batch
        return F.mse_loss(model(mix(*batch), times), noise)

    return on_rows(Denoiser, loss, hold_out(load_images(), DIFFUSION_VALIDATION), DIFFUSION_BATCH, draw)


WORKLOADS = {"flow": flow, "diffusion": diffusion}
