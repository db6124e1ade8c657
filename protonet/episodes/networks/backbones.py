"""The backbones of meta-training: an MLP for rows of any kind, and convolutional networks for images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from protonet.episodes.names import BACKBONES
from protonet.episodes.networks.augmentation import infer_image_shape
from protonet.episodes.networks.conv import BatchNorm, make_conv4, make_resnet12
from protonet.episodes.samplers.sampler import Take
from protonet.errors import raise_input_error

#: The backbones for square images, with the least side in pixels that their strides and pools leave a pixel of.
IMAGES = {"conv": 8, "conv4": 16, "resnet12": 16}
EMBED_BATCH_SIZE = 1024  #: Rows that `embed_rows` embeds at a time.


def make_backbone(name: str, dim: int, generator: torch.Generator, *, dropblock: float = 0.0) -> nn.Sequential:
    """Make an untrained backbone.

    No row's embedding depends on other rows: "mlp" and "conv" normalise each row alone (layer and group normalisation),
    and the others do so in evaluation mode, see `protonet.episodes.networks.conv.BatchNorm`.

    Args:
        name: "mlp" for rows of any kind; "conv" for square grey images; "conv4" and "resnet12" for square images, grey
            or RGB. Features of images are in the order of channels, rows and columns.
        dim: Features per row; of images the square of the side, times 3 for RGB.
        generator: Draws the weights.
        dropblock: The rate of DropBlock in "resnet12", in [0, 1).

    Returns:
        A module on the CPU that maps rows (n, dim) float32 to (n, embedding_dim) float32.

    Raises:
        InputError: The name is unknown, or the rows cannot be square images, or are too small ones.

    Source: "conv" follows Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), sec. 3.1,
        https://arxiv.org/abs/1703.05175, with a stride in the first layer, for speed. Weights: He et al., "Delving deep
        into rectifiers" (2015), eq. 10, https://arxiv.org/abs/1502.01852. Normalisation: Wu and He, "Group
        normalization" (2018), https://arxiv.org/abs/1803.08494.
    """
    if name not in BACKBONES:
        raise_input_error("name", f"be one of {', '.join(BACKBONES)}", repr(name), "Pick one of them.")
    channels, side, _ = shape = infer_image_shape(dim) or (0, 0, 0)
    if name in IMAGES and (side < IMAGES[name] or (name == "conv" and channels > 1)):
        constraint = f"be the square of a side of {IMAGES[name]} pixels or more"
        constraint, kind = (
            (constraint, "grey") if name == "conv" else (f"{constraint}, or three times that", "grey or RGB")
        )
        raise_input_error("dim", constraint, dim, f"Use the mlp, or square {kind} images.")
    makers = {
        "mlp": lambda: _make_mlp(dim),
        "conv": lambda: _make_conv(side),
        "conv4": lambda: make_conv4(shape),
        "resnet12": lambda: make_resnet12(shape, dropblock),
    }
    with torch.device("meta"):  # torch's own initial weights would come from its global generator
        backbone = makers[name]()
    backbone = backbone.to_empty(device="cpu")
    with torch.no_grad():
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.weight.normal_(0, math.sqrt(2 / layer.weight[0].numel()), generator=generator)
                if layer.bias is not None:
                    layer.bias.zero_()
            elif isinstance(layer, nn.GroupNorm | nn.LayerNorm | BatchNorm):
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
    """Embed the rows of some numbers (n,) int64, a chunk at a time: (n, embedding_dim) float32, where the encoder is.

    The encoder maps (n, dim) float32 to (n, embedding_dim), on any device; ``take`` returns rows by number, which are
    copied there.
    """
    device = next(encoder.parameters()).device
    return torch.cat([encoder(take(chunk).to(device).float()) for chunk in rows.split(EMBED_BATCH_SIZE)])
