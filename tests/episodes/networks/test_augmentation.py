from __future__ import annotations

import math

import pytest
import torch
from scipy.ndimage import map_coordinates

from protonet.episodes.networks.augmentation import (
    AUGMENTATION_LIMITS,
    augment_rows,
    draw_affine_maps,
    infer_image_shape,
    warp_images,
)

PIXELS = 9  #: The pixels per side of an image.


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(n: int, channels: int = 1) -> torch.Tensor:
    return torch.rand(n, channels * PIXELS * PIXELS, generator=generator())


def test_warped_images_equal_scipys() -> None:
    x, maps = images(6), draw_affine_maps(6, generator())
    centres = (2 * torch.arange(PIXELS).double() + 1) / PIXELS - 1
    down, right = torch.meshgrid(centres, centres, indexing="ij")
    for image, matrix, warped in zip(x, maps.double(), warp_images(x, maps), strict=True):
        source = matrix @ torch.stack([right, down, torch.ones_like(right)]).flatten(1)  # (2, pixels)
        positions = ((source + 1) * PIXELS - 1) / 2
        slow = map_coordinates(
            image.reshape(PIXELS, PIXELS).numpy(), positions.flip(0).numpy(), order=1, mode="grid-constant"
        )
        torch.testing.assert_close(warped, torch.from_numpy(slow).float(), atol=1e-5, rtol=0)


def test_the_channels_of_an_image_move_together() -> None:
    x, maps = images(5, channels=3), draw_affine_maps(5, generator(), flip=True)
    one_by_one = [warp_images(channel, maps) for channel in x.split(PIXELS * PIXELS, dim=1)]
    torch.testing.assert_close(warp_images(x, maps), torch.cat(one_by_one, dim=1))


def test_half_of_the_affine_maps_swap_left_and_right() -> None:
    plain, maps = draw_affine_maps(2000, generator()), draw_affine_maps(2000, generator(), flip=True)
    signs = maps[:, :, 0] / plain[:, :, 0]
    assert torch.equal(signs[:, 0], signs[:, 1])
    assert torch.equal(maps[:, :, 1:], plain[:, :, 1:])
    assert signs.abs().unique().tolist() == [1]
    assert abs(float(signs[:, 0].mean())) < 4 / math.sqrt(2000)


def test_the_shape_of_an_image_is_inferred_from_the_number_of_features() -> None:
    for dim, shape in [(784, (1, 28, 28)), (21168, (3, 84, 84)), (1, (1, 1, 1)), (3, (3, 1, 1)), (640, None)]:
        assert infer_image_shape(dim) == shape


@pytest.mark.parametrize("images_too", [True, False])
def test_a_row_is_augmented_alike_in_any_part_of_the_batch(images_too: bool) -> None:
    x = images(6)
    spread = None if images_too else torch.linspace(0, 2, PIXELS * PIXELS)
    full = augment_rows(x, spread, generator(), n=6)
    torch.testing.assert_close(augment_rows(x[2:5], spread, generator(), n=6, first=2), full[2:5])
    if spread is not None:
        assert torch.equal(full[:, 0], x[:, 0])  # a feature that is the same everywhere
        assert abs(float(((full - x)[:, 1:] / spread[1:]).std()) - AUGMENTATION_LIMITS.noise_std) < 0.03


def test_affine_maps_stay_within_the_recipe() -> None:
    maps = draw_affine_maps(5000, generator())
    assert float(maps[..., 2].abs().max()) <= AUGMENTATION_LIMITS.max_shift
    areas = torch.linalg.det(maps[..., :2]).log()
    assert (
        0.9 * 2 * AUGMENTATION_LIMITS.max_stretch
        < float(areas.abs().max())
        <= 2 * AUGMENTATION_LIMITS.max_stretch + 1e-6
    )
    turns = torch.atan2(maps[:, 1, 0], maps[:, 0, 0])
    assert 0.99 * AUGMENTATION_LIMITS.max_rotation < float(turns.abs().max()) <= AUGMENTATION_LIMITS.max_rotation + 1e-6
    assert abs(float(turns.mean())) < 4 * AUGMENTATION_LIMITS.max_rotation / math.sqrt(3 * 5000)


@pytest.mark.parametrize("channels", [1, 3])
def test_rgb_images_are_flipped_and_grey_ones_are_not(channels: int) -> None:
    x = images(20, channels)
    expected = warp_images(x, draw_affine_maps(20, generator(), flip=channels == 3))
    assert torch.equal(augment_rows(x, None, generator(), n=20), expected)
