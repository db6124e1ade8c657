"""Augmentation of training rows: images are moved and turned, other rows get noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """The strength of the augmentation. All values are our own choice."""

    rotation: float = math.pi / 12  #: Largest rotation of an image to either side, in radians.
    stretch: float = 0.2  #: Largest logarithm of an image's scale along either axis, and its largest shear.
    shift: float = 0.15  #: Largest shift of an image along either axis, in halves of its side.
    noise: float = 0.3  #: Standard deviation of the noise on other rows, in standard deviations of each feature.
    n_sampled: int = 4096  #: About the largest number of rows for estimates of the features' standard deviations.


AUGMENTATION = Augmentation()


def infer_image_shape(dim: int) -> tuple[int, int, int] | None:
    """Infer the shape (channels, side, side) of square grey or RGB images with ``dim`` features; None if impossible."""
    for channels in (1, 3):
        side = math.isqrt(dim // channels)
        if channels * side * side == dim:
            return channels, side, side
    return None


def draw_affine_maps(n: int, generator: torch.Generator, *, flip: bool = False) -> Tensor:
    """Draw random affine maps of images, (n, 2, 3) float32: rotation, scale along either axis, shear and shift.

    The maps are from output to input coordinates, which are -1 and 1 at the edges. With ``flip``, half of them also
    swap left and right.
    """
    limits = AUGMENTATION
    angle, shear, *scales, right, down = (2 * torch.rand(6, n, generator=generator) - 1).unbind()
    cos, sin = (limits.rotation * angle).cos(), (limits.rotation * angle).sin()
    rotation = torch.stack([cos, -sin, sin, cos], dim=1).reshape(n, 2, 2)  # (n, 2, 2)
    ones = torch.ones(n)
    slant = torch.stack([ones, limits.stretch * shear, 0 * ones, ones], dim=1).reshape(n, 2, 2)  # (n, 2, 2)
    linear = rotation @ slant * (limits.stretch * torch.stack(scales, dim=1)).exp()[:, None]
    if flip:
        signs = 1 - 2 * torch.randint(2, (n, 1), generator=generator).float()
        linear = torch.stack([signs * linear[..., 0], linear[..., 1]], dim=2)  # (n, 2, 2)
    return torch.cat([linear, limits.shift * torch.stack([right, down], dim=1)[..., None]], dim=2)


def warp_images(x: Tensor, maps: Tensor) -> Tensor:
    """Warp square images (n, channels * side * side), grey or RGB, by maps (n, 2, 3) from `draw_affine_maps`.

    Interpolation is bilinear; pixels outside the image are 0.

    Source: Jaderberg et al., "Spatial transformer networks" (2015), eqs. 1 and 5. https://arxiv.org/abs/1506.02025
    """
    shape = infer_image_shape(x.shape[1])
    assert shape is not None, "the backbone takes no other rows"
    images = x.reshape(-1, *shape)  # (n, channels, side, side)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).flatten(1)


def augment_rows(x: Tensor, spread: Tensor | None, generator: torch.Generator, *, n: int, first: int = 0) -> Tensor:
    """Augment rows (k, dim) float32, the rows ``first`` to ``first + k - 1`` of a batch of ``n``.

    Random numbers are drawn for the whole batch, so that processes can share it. ``spread`` (dim,) is the standard
    deviation of each feature, for noise; None is for images, which are warped, and flipped if they are RGB.
    """
    rows_of_batch = slice(first, first + len(x))
    if spread is not None:
        return x + AUGMENTATION.noise * spread * torch.randn(n, x.shape[1], generator=generator)[rows_of_batch]
    shape = infer_image_shape(x.shape[1])
    return warp_images(x, draw_affine_maps(n, generator, flip=shape is not None and shape[0] == 3)[rows_of_batch])
