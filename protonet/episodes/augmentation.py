"""Augmentation of square images: small random affine maps, a batch of them at once."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TURN = math.pi / 12  # radians
STRETCH = 0.2  # logarithm of the scale along either axis, and the shear
SHIFT = 0.15  # of half a side


def draw_maps(n: int, generator: torch.Generator) -> Tensor:
    """Draw affine maps: a rotation, a scale along either axis, a shear and a shift, each uniform about none.

    Args:
        n: How many.
        generator: The source of all randomness.

    Returns:
        (n, 2, 3) from the output's coordinates to the input's, which are -1 and 1 at the edges of an image.
    """
    turn, shear, *scales, right, down = (2 * torch.rand(6, n, generator=generator) - 1).unbind()
    cos, sin = (TURN * turn).cos(), (TURN * turn).sin()
    rotation = torch.stack([cos, -sin, sin, cos], dim=1).reshape(n, 2, 2)
    ones = torch.ones(n)
    slant = torch.stack([ones, STRETCH * shear, 0 * ones, ones], dim=1).reshape(n, 2, 2)
    linear = rotation @ slant * (STRETCH * torch.stack(scales, dim=1)).exp()[:, None]
    return torch.cat([linear, SHIFT * torch.stack([right, down], dim=1)[..., None]], dim=2)


def warp_images(x: Tensor, maps: Tensor) -> Tensor:
    """Move the pixels of square images, by bilinear interpolation; what comes from outside is 0.

    Args:
        x: (n, side * side) float32.
        maps: (n, 2, 3), from `draw_maps`.

    Returns:
        (n, side * side).

    Source: Jaderberg et al., "Spatial transformer networks" (2015), eqs. 1 and 5. https://arxiv.org/abs/1506.02025
    """
    side = math.isqrt(x.shape[1])
    images = x.reshape(-1, 1, side, side)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).flatten(1)
