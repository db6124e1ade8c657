"""Fixed descriptors of pictures: gradients, scattering coefficients, local binary patterns, and colours.

Nothing is trained or downloaded. Features are means over the picture or over a few cells, so that a small shift changes
little. Features of textures depend on the angles between orientations, so that a rotation changes little. Measurements
are in docs/benchmarks/archive.md.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

#: Pairs of a radius and a blur, in pixels. After the blur, a pixel is compared with its neighbours at this radius.
NEIGHBOUR_RADII_AND_BLURS = ((1.0, 0.0), (2.0, 1.0), (4.0, 2.0))
#: Factor on each part of the descriptor, such as its colour histogram, so that all parts have about the same variance.
DESCRIPTOR_PART_SCALES = {
    "outline": 0.76,
    "layout": 2.1,
    "responses": 0.55,
    "figure": 6.0,
    "texture": 10.0,
    "neighbours": 2.9,
    "colours": 1.2,
    "hues": 1.6,
}


PICTURE_SIDE = 64  #: Pixels per side to which a picture is resized.


def descriptor_part_sizes() -> dict[str, int]:
    """Compute the number of features of each part of the descriptors, by name."""
    parts = _compute_descriptor_parts(torch.zeros(1, 3, PICTURE_SIDE, PICTURE_SIDE))
    return {name: part.shape[1] for name, part in parts.items()}


BATCH_SIZE = 8  #: Number of pictures that are processed at once.


def compute_descriptors(pixels: Tensor) -> Tensor:
    """Compute hand-made features (n, features) float32 of pictures (n, 3, side, side) uint8, without a network.

    They are histograms of gradients, scattering coefficients of first and second order, and local binary patterns.

    Source: histograms of gradients, Dalal and Triggs, "Histograms of oriented gradients for human detection" (2005);
    scattering, Bruna and Mallat, "Invariant scattering convolution networks" (2013), eq. 9; binary patterns,
    Ojala, Pietikäinen and Mäenpää, "Multiresolution gray-scale and rotation invariant texture classification with local
    binary patterns" (2002), eq. 10.
    """
    batches = []
    for batch in pixels.split(BATCH_SIZE):
        parts = _compute_descriptor_parts(batch.float() / 255)
        batches.append(torch.cat([DESCRIPTOR_PART_SCALES[name] * part for name, part in parts.items()], dim=1))
    return torch.cat(batches)


def _compute_descriptor_parts(x: Tensor) -> dict[str, Tensor]:
    """Compute the descriptors of pictures (n, 3, side, side) in [0, 1], as a dict from part names to (n, features)."""
    # All numbers of this module were chosen on the first half of the data sets of docs/benchmarks/archive.md.
    n_half_turn_bins = 9  # number of bins of gradient orientations over half a turn, in small cells
    n_full_turn_bins = 16  # number of bins of gradient orientations over a whole turn, in large cells
    small_cell_side = 16  # pixels per side of small cells
    large_cell_side = 32  # pixels per side of large cells
    contrast_offset = 0.02  # added to the standard deviation by which a picture is divided
    opponent = _to_opponent_colours(x)
    grey = opponent[:, 0]
    gradients = _compute_gradients(x)
    deviation, mean = torch.std_mean(grey, dim=(1, 2), keepdim=True)
    first, second = _scattering_coefficients((grey - mean) / (deviation + contrast_offset))
    # No part is the best one everywhere, and cross-validation shows which are useful. In the comments: the accuracy of
    # a part alone on 20 pictures per class, beside that of raw pixels (docs/decisions/pictures.md).
    return {
        # Shapes at any position, without the sign of their contrast: 70 %, pixels 22 %.
        "outline": _orientation_histograms(*gradients, n_half_turn_bins, math.pi, small_cell_side),
        # Signed gradients of large areas: also 72 % of shapes, and 76 % of surfaces instead of 72 %.
        "layout": _orientation_histograms(*gradients, n_full_turn_bins, 2 * math.pi, large_cell_side),
        # Where edges are, in 4 x 4 cells: 97 % of glyphs, pixels 75 %.
        "responses": first.sqrt(),
        # Filters of filters by their relative rotation: the best part on average, 74 %, pixels 50 %.
        "figure": torch.fft.rfft(second, dim=-1).abs().flatten(1),
        # The mean over rotations gains on surfaces, 95 % instead of 92 %, and loses on shapes.
        "texture": second.mean(dim=-1).flatten(1).sqrt(),
        # All of the surfaces, pixels 76 %.
        "neighbours": _binary_pattern_histograms(grey),
        # Alone they fail on shapes; photographs have 93 %, pixels 68 %.
        "colours": _colour_histogram(opponent),
        # The one part for classes of a hue: 69 %, pixels 31 %.
        "hues": _hue_histogram(opponent),
    }


def _to_opponent_colours(x: Tensor) -> Tensor:
    """Convert RGB (n, 3, side, side) to opponent colours in [0, 1]: brightness, red-green and yellow-blue."""
    red, green, blue = x.unbind(1)
    return torch.stack([(red + green + blue) / 3, (red - green + 1) / 2, (red + green - 2 * blue + 2) / 4], dim=1)


def _compute_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute horizontal and vertical gradients (n, side, side), those of the steepest colour channel of each pixel."""
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    along = (padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]) / 2
    across = (padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]) / 2
    steepest = (along.square() + across.square()).argmax(dim=1, keepdim=True)
    return along.gather(1, steepest)[:, 0], across.gather(1, steepest)[:, 0]


def _orientation_histograms(along: Tensor, across: Tensor, bins: int, period: float, cell: int) -> Tensor:
    """Compute histograms (n, features) of gradient angles modulo ``period`` in cells, normalized in 2 x 2 cells."""
    max_bin_value = 0.2  # maximum value of a bin in a normalized histogram (Dalal and Triggs 2005)
    histogram_norm_offset = 0.01  # added to the norm of histograms, so that weak gradients are not amplified
    length = (along.square() + across.square()).sqrt()
    angle = torch.atan2(across, along).remainder(period) * (bins / period)
    lower = angle.floor()
    fraction, lower = angle - lower, lower.long() % bins
    maps = along.new_zeros(len(along), bins, *along.shape[1:])
    maps.scatter_add_(1, lower[:, None], (length * (1 - fraction))[:, None])
    maps.scatter_add_(1, ((lower + 1) % bins)[:, None], (length * fraction)[:, None])
    ramp = 1 - (torch.arange(2 * cell) + 0.5 - cell).abs() / cell
    window = (ramp[:, None] * ramp)[None, None] / cell**2
    pooled = F.conv2d(maps.flatten(0, 1)[:, None], window, stride=cell, padding=cell // 2)
    groups = F.unfold(pooled.unflatten(0, (-1, bins))[:, :, 0], 2).transpose(1, 2)  # (n, groups, 4 * bins)
    for max_value in (max_bin_value, 1.0):
        groups = groups / (groups.square().sum(dim=2, keepdim=True) + histogram_norm_offset**2).sqrt()
        groups = groups.clamp_max(max_value)
    return groups.flatten(1)


N_FILTER_SCALES = 4  #: Number of scales of the filters, one octave apart.
N_FILTER_ORIENTATIONS = 8  #: Number of orientations of the filters.


@cache
def morlet_filter_spectra() -> Tensor:
    """Compute the Fourier spectra (scales, orientations, side, side) of Morlet wavelets of mean 0.

    Source: Bruna and Mallat (2013), sec. 2: a Gaussian times ``exp(i u xi) - k``.
    """
    side, orientations = PICTURE_SIDE, N_FILTER_ORIENTATIONS
    frequency = torch.fft.fftfreq(side, dtype=torch.float64) * 2 * math.pi
    filters = []
    for scale in range(N_FILTER_SCALES):
        spread, centre, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / orientations
        for turn in (math.pi * index / orientations for index in range(orientations)):
            wave, mass = torch.zeros(side, side, dtype=torch.float64), torch.zeros(side, side, dtype=torch.float64)
            for up in (-1, 0, 1):  # aliasing: frequencies above the highest one fold back
                for left in (-1, 0, 1):
                    y, x = frequency[:, None] + 2 * math.pi * up, frequency + 2 * math.pi * left
                    u, v = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
                    wave += (-(spread**2) * ((u - centre) ** 2 + (v / slant) ** 2) / 2).exp()
                    mass += (-(spread**2) * (u**2 + (v / slant) ** 2) / 2).exp()
            filters.append(wave - wave[0, 0] / mass[0, 0] * mass)
    return torch.stack(filters).view(N_FILTER_SCALES, orientations, side, side).float()


@cache
def _crop_filter_spectra(side: int) -> Tensor:
    """Crop the filters to the low frequencies of pictures with ``side`` pixels per side."""
    return _crop_spectrum(morlet_filter_spectra(), side)


def _crop_spectrum(spectrum: Tensor, side: int) -> Tensor:
    """Crop a spectrum (..., larger, larger) to its lowest frequencies (..., side, side)."""
    half = side // 2
    if spectrum.shape[-1] == side:
        return spectrum
    rows = torch.cat([spectrum[..., :half, :], spectrum[..., -half:, :]], dim=-2)
    return torch.cat([rows[..., :half], rows[..., -half:]], dim=-1)


def _subsample_spectrum(spectrum: Tensor) -> Tensor:
    """Compute the spectrum of a picture that is subsampled by 2, from the spectrum of the picture."""
    half = spectrum.shape[-1] // 2
    folded = spectrum[..., :half, :] + spectrum[..., half:, :]
    return (folded[..., :half] + folded[..., half:]) / 4


CELLS_PER_SIDE = 4  #: Number of cells along each side in which filter responses are averaged.


def _scattering_coefficients(grey: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scattering coefficients of first and second order of pictures (n, side, side).

    The first (n, scales * orientations * cells^2) are the mean absolute responses of the filters in each cell. The
    second (n, pairs of scales, turns, orientations) are the mean absolute responses of coarser filters to the responses
    of finer filters, by the angle between both and the orientation of the finer filter.
    """
    scales, orientations = N_FILTER_SCALES, N_FILTER_ORIENTATIONS
    side = PICTURE_SIDE
    spectrum = torch.fft.fft2(grey)[:, None]
    first, second = [], []
    turned = (torch.arange(orientations) + torch.arange(orientations)[:, None]) % orientations  # (turns, orientations)
    finer = torch.arange(orientations)
    for scale in range(scales):
        size = min(side, side >> (scale - 1) if scale else side)
        shrunk = _crop_spectrum(spectrum, size) * _crop_filter_spectra(size)[scale] * (size / side) ** 2
        responses = torch.fft.ifft2(shrunk).abs()  # (n, orientations, size, size)
        first.append(F.adaptive_avg_pool2d(responses, CELLS_PER_SIDE))
        again = torch.fft.fft2(responses) if scale + 1 < scales else responses
        for coarser in range(scale + 1, scales):
            small = side >> (coarser - 1)
            cut = _crop_spectrum(again, small)[:, :, None] * _crop_filter_spectra(small)[coarser] * (small / size) ** 2
            means = torch.fft.ifft2(_subsample_spectrum(cut)).abs().mean(dim=(3, 4))  # (n, finer, coarser)
            second.append(means[:, finer, turned])  # (n, turns, orientations)
    return torch.cat(first, dim=1).flatten(1), torch.stack(second, dim=1)


def _binary_pattern_histograms(grey: Tensor) -> Tensor:
    """Compute histograms (n, features) of uniform local binary patterns at each radius."""
    # A neighbour is brighter than a pixel if the difference is at least this, of 1 for white.
    min_brightness_difference = 1e-3
    histograms = []
    for distance, smooth in NEIGHBOUR_RADII_AND_BLURS:
        blurred = _blur(grey, smooth)
        least = blurred + min_brightness_difference
        brighter = torch.stack([near > least for near in _interpolate_neighbours(blurred, distance)], dim=1)
        changes = (brighter != brighter.roll(1, dims=1)).sum(dim=1)
        kinds = torch.where(changes <= 2, brighter.sum(dim=1), 9)  # (n, side, side), 9 for non-uniform patterns
        pattern = kinds.flatten(1)
        counts = grey.new_zeros(len(grey), 10).scatter_add_(1, pattern, torch.ones_like(pattern, dtype=grey.dtype))
        histograms.append((counts / pattern.shape[1]).sqrt())
    return torch.cat(histograms, dim=1)


def _interpolate_neighbours(grey: Tensor, distance: float) -> list[Tensor]:
    """Interpolate the eight neighbours (n, side, side) of every pixel on a circle of this radius."""
    reach, side = math.ceil(distance) + 1, grey.shape[-1]
    padded = F.pad(grey[:, None], (reach, reach, reach, reach), mode="replicate")[:, 0]
    neighbours = []
    for index in range(8):
        turn = 2 * math.pi * index / 8
        y, x = -distance * math.sin(turn), distance * math.cos(turn)
        top, left = math.floor(y + 1e-9), math.floor(x + 1e-9)
        down, right = max(0.0, y - top), max(0.0, x - left)
        near = torch.zeros_like(grey)
        for row, row_weight in ((0, 1 - down), (1, down)):
            for column, column_weight in ((0, 1 - right), (1, right)):
                if row_weight * column_weight > 1e-6:
                    above, before = reach + top + row, reach + left + column
                    weight = row_weight * column_weight
                    near += weight * padded[:, above : above + side, before : before + side]
        neighbours.append(near)
    return neighbours


def _blur(grey: Tensor, deviation: float) -> Tensor:
    """Blur pictures (n, side, side) by a Gaussian of this standard deviation in pixels."""
    if not deviation:
        return grey
    reach = math.ceil(3 * deviation)
    window = torch.exp(-torch.arange(-reach, reach + 1).square() / (2 * deviation**2))
    window /= window.sum()
    padded = F.pad(grey[:, None], (reach, reach, reach, reach), mode="reflect")
    return F.conv2d(F.conv2d(padded, window.view(1, 1, 1, -1)), window.view(1, 1, -1, 1))[:, 0]


def _colour_histogram(opponent: Tensor) -> Tensor:
    """Compute the square roots (n, bins) of the colour histogram of pictures in opponent colours."""
    levels = 6  # bins of each of the three axes
    widened = torch.stack([opponent[:, 0], *(2 * opponent[:, axis] - 0.5 for axis in (1, 2))], dim=1)
    boxes = (widened * levels).clamp(0, levels - 1e-4).long()
    box = ((boxes[:, 0] * levels + boxes[:, 1]) * levels + boxes[:, 2]).flatten(1)
    counts = opponent.new_zeros(len(opponent), levels**3)
    counts.scatter_add_(1, box, torch.ones_like(box, dtype=opponent.dtype))
    return (counts / box.shape[1]).sqrt()


def _hue_histogram(opponent: Tensor) -> Tensor:
    """Compute the square roots (n, bins) of a histogram of hues, in which pixels are weighted by saturation."""
    n_hue_bins = 24  # number of bins of the histogram of hues
    saturation_offset = 0.02  # added to the mean saturation by which the histogram of hues is divided
    red, yellow = opponent[:, 1] - 0.5, opponent[:, 2] - 0.5
    saturation = (red.square() + yellow.square()).sqrt().flatten(1)
    angle = (torch.atan2(yellow, red) / (2 * math.pi)).remainder(1).flatten(1) * n_hue_bins
    lower = angle.floor()
    fraction, lower = angle - lower, lower.long() % n_hue_bins
    counts = opponent.new_zeros(len(opponent), n_hue_bins)
    counts.scatter_add_(1, lower, saturation * (1 - fraction))
    counts.scatter_add_(1, (lower + 1) % n_hue_bins, saturation * fraction)
    return (counts / (counts.sum(dim=1, keepdim=True) + saturation_offset * saturation.shape[1])).sqrt()
