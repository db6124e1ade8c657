"""The backbones of meta-training: an MLP for rows of any kind, a small convolutional network for grey images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from protonet._checks import fail
from protonet.episodes.batch import Take

BACKBONES = ("mlp", "conv")
CHUNK = 1024  #: Rows that `embed_rows` embeds at a time.


def make_backbone(name: str, dim: int, generator: torch.Generator) -> nn.Sequential:
    """Make an untrained backbone.

    It normalises each row alone (layer and group normalisation), so that no row's embedding depends on other rows.

    Args:
        name: "mlp" for rows of any kind, or "conv" for square grey images, given row by row of their pixels.
        dim: Features per row; for "conv" the square of the image's side, which is at least 8.
        generator: Draws the weights.

    Returns:
        A module on the CPU that maps rows (n, dim) float32 to (n, embedding_dim) float32.

    Raises:
        InputError: The name is unknown, or the rows cannot be square images.

    Source: "conv" follows Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), sec. 3.1,
        https://arxiv.org/abs/1703.05175, with a stride in the first layer, for speed. Weights: He et al., "Delving deep
        into rectifiers" (2015), eq. 10, https://arxiv.org/abs/1502.01852. Normalisation: Wu and He, "Group
        normalization" (2018), https://arxiv.org/abs/1803.08494.
    """
    if name not in BACKBONES:
        fail("make_backbone", "name", f"be one of {', '.join(BACKBONES)}", repr(name), "Pick one of them.")
    side = math.isqrt(dim)
    if name == "conv" and (side * side != dim or side < 8):
        remedy = "Use the mlp, or square grey images."
        fail("make_backbone", "dim", "be the square of a side of 8 pixels or more", dim, remedy)
    with torch.device("meta"):  # torch's own initial weights would come from its global generator
        backbone = _make_conv(side) if name == "conv" else _make_mlp(dim)
    backbone = backbone.to_empty(device="cpu")
    with torch.no_grad():
        for layer in backbone:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.weight.normal_(0, math.sqrt(2 / layer.weight[0].numel()), generator=generator)
            elif isinstance(layer, nn.GroupNorm | nn.LayerNorm):
                layer.reset_parameters()
    return backbone


def _make_mlp(dim: int) -> nn.Sequential:
    """Return an MLP that maps rows (n, dim) to (n, 128)."""
    first = nn.Linear(dim, 512, bias=False), nn.LayerNorm(512), nn.GELU()
    second = nn.Linear(512, 512, bias=False), nn.LayerNorm(512), nn.GELU()
    return nn.Sequential(*first, *second, nn.Linear(512, 128, bias=False))


def _make_conv(side: int) -> nn.Sequential:
    """Return four convolutions that map rows (n, side * side) to (n, embedding_dim): 576 for a side of 28."""
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        *(nn.Conv2d(1, 32, 5, stride=2, padding=2, bias=False), nn.GroupNorm(8, 32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.Flatten()),
    )


@torch.no_grad()
def embed_rows(encoder: nn.Module, take: Take, rows: Tensor) -> Tensor:
    """Embed the rows of some numbers (n,) int64, a chunk at a time: (n, embedding_dim) float32 on the CPU.

    The encoder maps (n, dim) float32 to (n, embedding_dim), on any device; ``take`` returns rows by number.
    """
    device = next(encoder.parameters()).device
    return torch.cat([encoder(take(chunk).float().to(device)).cpu() for chunk in rows.split(CHUNK)])
