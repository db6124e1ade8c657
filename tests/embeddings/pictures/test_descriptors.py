"""Hand-made picture features: invariances and oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from protonet.embeddings.pictures import descriptors
from protonet.embeddings.pictures.descriptors import (
    DESCRIPTOR_PART_SCALES,
    DESCRIPTORS,
    compute_descriptors,
    descriptor_part_sizes,
    morlet_filter_spectra,
)
from tests.embeddings.pictures.cases import draw


def read(kind: str, seed: int) -> Tensor:
    pixels = np.asarray(draw(kind, seed, DESCRIPTORS.picture_side)).transpose(2, 0, 1)
    return torch.from_numpy(pixels.copy())


def take(features: Tensor, name: str) -> Tensor:
    names = list(DESCRIPTOR_PART_SCALES)
    part: Tensor = features.split(list(descriptor_part_sizes().values()), dim=1)[names.index(name)]
    return part


def test_features_of_a_picture_do_not_depend_on_the_batch() -> None:
    pixels = torch.stack([read("disc", index) for index in range(DESCRIPTORS.batch_size + 2)])
    pixels[0] = 255
    full = compute_descriptors(pixels)
    assert full.shape == (len(pixels), sum(descriptor_part_sizes().values()))
    assert full.dtype == torch.float32
    assert bool(full.isfinite().all())
    torch.testing.assert_close(compute_descriptors(pixels[-1:]), full[-1:], rtol=1e-5, atol=1e-5)


def test_grey_pictures_have_no_hue_and_colours_do_not_change_the_outline() -> None:
    grey = read("cross", 0).float().mean(dim=0).round().byte().expand(3, -1, -1)[None]
    red = torch.stack([grey[0, 0], grey[0, 1] // 2, grey[0, 2] // 2])[None]
    first, second = compute_descriptors(grey), compute_descriptors(red)
    assert float(take(first, "hues").abs().max()) < 1e-4 < float(take(second, "hues").max())
    near = torch.nn.functional.cosine_similarity(take(first, "outline"), take(second, "outline"))
    assert float(near) > 0.98


def test_texture_features_are_invariant_to_rotation() -> None:
    pixels = read("cross", 1)[None]
    pixels[:, :, : DESCRIPTORS.picture_side // 2] = 0
    after = pixels.rot90(1, dims=(2, 3))
    first, second = compute_descriptors(pixels), compute_descriptors(after)
    for name, error in (("texture", 0.02), ("figure", 0.05), ("colours", 1e-5), ("hues", 1e-5), ("neighbours", 0.05)):
        before, after = take(first, name), take(second, name)
        assert float((before - after).norm() / before.norm()) < error, name
    assert float((take(first, "outline") - take(second, "outline")).norm()) > 0.5


def test_responses_are_those_of_a_slow_convolution() -> None:
    grey = torch.rand(1, DESCRIPTORS.picture_side, DESCRIPTORS.picture_side, generator=torch.Generator().manual_seed(0))
    first, second = descriptors._scattering_coefficients(grey)
    spectrum, filters = torch.fft.fft2(grey), morlet_filter_spectra()
    response = torch.fft.ifft2(spectrum * filters[1, 3]).abs()
    expected = torch.nn.functional.adaptive_avg_pool2d(response, DESCRIPTORS.cells_per_side).flatten()
    result = first.view(DESCRIPTORS.filter_scales, DESCRIPTORS.filter_orientations, -1)[1, 3]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    # of the second scale, turned by 2, to the first one's at 3: the means are over every other pixel
    finer = torch.fft.ifft2(spectrum * filters[0, 3]).abs()
    again = torch.fft.ifft2(torch.fft.fft2(finer) * filters[1, 5]).abs()[:, ::2, ::2].mean()
    torch.testing.assert_close(second[0, 0, 2, 3], again, rtol=1e-4, atol=1e-6)


def test_neighbours_of_a_light_spot_are_counted() -> None:
    grey = torch.zeros(1, DESCRIPTORS.picture_side, DESCRIPTORS.picture_side)
    grey[0, 20, 20] = 1.0
    fractions = descriptors._binary_pattern_histograms(grey)[0, :10].square() * DESCRIPTORS.picture_side**2
    # eight pixels have the spot beside them, one brighter neighbour or two where it lies between two
    assert float(fractions[0]) == pytest.approx(DESCRIPTORS.picture_side**2 - 8, abs=0.6)
    assert float(fractions[1:4].sum()) >= 7.5
