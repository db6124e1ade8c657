"""Augment training rows: warp images by random affine maps, and add noise to other rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def infer_image_shape(dim: int) -> tuple[int, int, int] | None:
    """Infer the shape (channels, side, side) of square grey or RGB images from their number of features ``dim``.

    Returns None if no such image has ``dim`` features.
    """
    for channels in (1, 3):
        side = math.isqrt(dim // channels)
        if channels * side * side == dim:
            return channels, side, side
    return None


#: Limits of the random changes to images, our own choice: the largest rotation to either side; the largest logarithm of
#: the scale along either axis, and the largest shear; the largest shift along either axis, of half the image's side.
MAX_ROTATION_RADIANS, MAX_LOG_STRETCH, MAX_SHIFT = math.pi / 12, 0.2, 0.15


def draw_affine_maps(n: int, generator: torch.Generator, *, flip: bool = False) -> Tensor:
    """Draw n random affine maps that rotate, scale, shear and shift images.

    Args:
        n: The number of maps.
        generator: Draws the random numbers.
        flip: Whether to also swap left and right, with probability 1/2.

    Returns:
        Matrices (n, 2, 3) float32 for `torch.nn.functional.affine_grid`: from output to input coordinates, which are -1
        and 1 at the edges of an image.
    """
    angle, shear, *scales, right, down = (2 * torch.rand(6, n, generator=generator) - 1).unbind()
    cos, sin = (MAX_ROTATION_RADIANS * angle).cos(), (MAX_ROTATION_RADIANS * angle).sin()
    rotation = torch.stack([cos, -sin, sin, cos], dim=1).reshape(n, 2, 2)  # (n, 2, 2)
    ones = torch.ones(n)
    slant = torch.stack([ones, MAX_LOG_STRETCH * shear, 0 * ones, ones], dim=1).reshape(n, 2, 2)  # (n, 2, 2)
    linear = rotation @ slant * (MAX_LOG_STRETCH * torch.stack(scales, dim=1)).exp()[:, None]
    if flip:
        signs = 1 - 2 * torch.randint(2, (n, 1), generator=generator).float()
        linear = torch.stack([signs * linear[..., 0], linear[..., 1]], dim=2)  # (n, 2, 2)
    return torch.cat([linear, MAX_SHIFT * torch.stack([right, down], dim=1)[..., None]], dim=2)


def warp_images(x: Tensor, maps: Tensor) -> Tensor:
    """Warp square grey or RGB images (n, channels * side * side) by affine maps (n, 2, 3) from `draw_affine_maps`.

    Returns images of the same shape. Interpolation is bilinear; pixels outside an image count as 0.

    Source: Jaderberg et al., "Spatial transformer networks" (2015), eqs. 1 and 5. https://arxiv.org/abs/1506.02025
    """
    shape = infer_image_shape(x.shape[1])
    assert shape is not None, "the backbone takes no other rows"
    images = x.reshape(-1, *shape)  # (n, channels, side, side)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).flatten(1)


ROW_NOISE_STD = 0.3  #: Of rows other than images: standard deviation of the noise, divided by that of each feature.


def augment_rows(x: Tensor, stds: Tensor | None, generator: torch.Generator, *, n: int, first: int = 0) -> Tensor:
    """Augment training rows: warp images, or add noise to other rows.

    Each process augments some rows of a batch, but draws the random numbers of all rows, so that the result does not
    depend on the number of processes.

    Args:
        x: (k, dim) float32, the rows with the indices ``first`` to ``first + k - 1`` of a batch.
        stds: (dim,), the standard deviation of each feature, which scales the noise; None if rows are square images.
            RGB images are also flipped at random.
        generator: Draws the random numbers.
        n: The number of rows of the whole batch.
        first: The index of the first row in the batch.

    Returns:
        The augmented rows (k, dim).
    """
    rows_of_batch = slice(first, first + len(x))
    if stds is not None:
        return x + ROW_NOISE_STD * stds * torch.randn(n, x.shape[1], generator=generator)[rows_of_batch]
    shape = infer_image_shape(x.shape[1])
    return warp_images(x, draw_affine_maps(n, generator, flip=shape is not None and shape[0] == 3)[rows_of_batch])
