from __future__ import annotations

import math

import torch
from scipy.ndimage import map_coordinates

from protonet.episodes.augmentation import SHIFT, STRETCH, TURN, draw_maps, warp_images

SIDE = 9


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(n: int) -> torch.Tensor:
    return torch.rand(n, SIDE * SIDE, generator=generator())


def test_warped_images_are_scipys() -> None:
    x, maps = images(6), draw_maps(6, generator())
    centres = (2 * torch.arange(SIDE).double() + 1) / SIDE - 1
    down, right = torch.meshgrid(centres, centres, indexing="ij")
    for image, matrix, warped in zip(x, maps.double(), warp_images(x, maps), strict=True):
        source = matrix @ torch.stack([right, down, torch.ones_like(right)]).flatten(1)  # (2, pixels)
        places = ((source + 1) * SIDE - 1) / 2
        slow = map_coordinates(image.reshape(SIDE, SIDE).numpy(), places.flip(0).numpy(), order=1, mode="grid-constant")
        torch.testing.assert_close(warped, torch.from_numpy(slow).float(), atol=1e-5, rtol=0)


def test_no_map_no_change() -> None:
    x = images(3)
    torch.testing.assert_close(warp_images(x, torch.eye(2, 3).expand(3, -1, -1)), x)


def test_each_image_has_its_own_map() -> None:
    x, maps = images(4), draw_maps(4, generator())
    torch.testing.assert_close(warp_images(x[2:], maps[2:]), warp_images(x, maps)[2:])


def test_maps_are_small() -> None:
    maps = draw_maps(5000, generator())
    assert float(maps[..., 2].abs().max()) <= SHIFT
    areas = torch.linalg.det(maps[..., :2]).log()
    assert 0.9 * 2 * STRETCH < float(areas.abs().max()) <= 2 * STRETCH + 1e-6
    turns = torch.atan2(maps[:, 1, 0], maps[:, 0, 0])
    assert 0.99 * TURN < float(turns.abs().max()) <= TURN + 1e-6
    assert abs(float(turns.mean())) < 4 * TURN / math.sqrt(3 * 5000)
