"""Fixed features of pictures: edges, filters' responses of two orders, patterns of neighbours, and colours.

Nothing is learned and nothing is downloaded. Every part is a mean over the picture or over a few cells, so that a small
shift changes little; those of textures and outlines are told by how orientations lie to each other, not to the picture.
What was tried and what it is worth is in analysis/results/pictures.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DescriptorRules:
    """Sizes of the features. They were chosen on the first half of the sets of analysis/results/pictures.md."""

    side: int = 64  #: Pixels per side that a picture is brought to.
    bins: int = 9  #: Of a gradient's orientation, over half a turn ...
    turns: int = 16  #: ... and, coarsely in place, over a whole one.
    cell: int = 16  #: Pixels per side of the cells of orientations.
    coarse: int = 32  #: The same, where orientations are over a whole turn.
    clip: float = 0.2  #: Most of a normalised histogram that one bin may have (Dalal and Triggs 2005).
    faint: float = 0.01  #: What is added to the norm of gradients' histograms: less than this is no edge.
    scales: int = 4  #: Of the filters, an octave apart.
    orientations: int = 8  #: Of the filters.
    cells: int = 4  #: Along each side, for responses by place.
    flat: float = 0.02  #: What is added to a picture's standard deviation before it is divided by that.
    levels: int = 6  #: Of each of the three colour axes, in a histogram.
    hues: int = 24  #: Of a histogram of hues.
    pale: float = 0.02  #: The saturation that says as much as that of the picture.
    threshold: float = 1e-3  #: How much brighter a neighbour has to be.
    at_once: int = 8  #: Pictures that are worked on at a time.


RULES = DescriptorRules()
#: How far around a place its neighbours are compared with it, in pixels, and how the picture is smoothed for that.
RINGS = ((1.0, 0.0), (2.0, 1.0), (4.0, 2.0))
#: The parts, and what each is multiplied with: all vary about alike over the sets that they were chosen on.
PARTS = {
    "outline": 0.76,
    "layout": 2.1,
    "responses": 0.55,
    "figure": 6.0,
    "texture": 10.0,
    "neighbours": 2.9,
    "colours": 1.2,
    "hues": 1.6,
}


def list_sizes() -> dict[str, int]:
    """Return how many features each part has."""
    return {name: part.shape[1] for name, part in _describe(torch.zeros(1, 3, RULES.side, RULES.side)).items()}


def describe_pictures(pixels: Tensor) -> Tensor:
    """Return the features of pictures.

    Args:
        pixels: (n, 3, side, side) uint8, red, green and blue, of ``RULES.side``.

    Returns:
        (n, features) float32: the parts of ``PARTS`` side by side.

    Source: histograms of gradients, Dalal and Triggs, "Histograms of oriented gradients for human detection" (2005);
        filters of two orders, Bruna and Mallat, "Invariant scattering convolution networks" (2013), eq. 9; neighbours,
        Ojala, Pietikäinen and Mäenpää, "Multiresolution gray-scale and rotation invariant texture classification with
        local binary patterns" (2002), eq. 10.
    """
    found = [torch.cat(_weigh(_describe(part.float() / 255)), dim=1) for part in pixels.split(RULES.at_once)]
    return torch.cat(found) if found else torch.empty(0, sum(list_sizes().values()))


def _weigh(parts: dict[str, Tensor]) -> list[Tensor]:
    return [PARTS[name] * part for name, part in parts.items()]


def _describe(x: Tensor) -> dict[str, Tensor]:
    """Return the parts of pictures (n, 3, side, side) in [0, 1], (n, features) each."""
    opponent = _oppose(x)
    grey = opponent[:, 0]
    gradients = _find_gradients(x)
    deviation, mean = torch.std_mean(grey, dim=(1, 2), keepdim=True)
    first, second = _scatter((grey - mean) / (deviation + RULES.flat))
    return {
        "outline": _pool_orientations(*gradients, RULES.bins, math.pi, RULES.cell),
        "layout": _pool_orientations(*gradients, RULES.turns, 2 * math.pi, RULES.coarse),
        "responses": first.sqrt(),
        "figure": torch.fft.rfft(second, dim=-1).abs().flatten(1),
        "texture": second.mean(dim=-1).flatten(1).sqrt(),
        "neighbours": _compare_neighbours(grey),
        "colours": _count_colours(opponent),
        "hues": _count_hues(opponent),
    }


def _oppose(x: Tensor) -> Tensor:
    """Return brightness, red against green, and yellow against blue, in [0, 1]: (n, 3, side, side)."""
    red, green, blue = x.unbind(1)
    return torch.stack([(red + green + blue) / 3, (red - green + 1) / 2, (red + green - 2 * blue + 2) / 4], dim=1)


def _find_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient along and across lines, (n, side, side) each, of the colour where it is steepest."""
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    along = (padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]) / 2
    across = (padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]) / 2
    steepest = (along.square() + across.square()).argmax(dim=1, keepdim=True)
    return along.gather(1, steepest)[:, 0], across.gather(1, steepest)[:, 0]


def _pool_orientations(along: Tensor, across: Tensor, bins: int, period: float, cell: int) -> Tensor:
    """Return histograms of gradients' orientations by cell, normalised in groups of 2 x 2 cells: (n, features)."""
    length = (along.square() + across.square()).sqrt()
    angle = torch.atan2(across, along).remainder(period) * (bins / period)
    lower = angle.floor()
    share, lower = angle - lower, lower.long() % bins
    maps = along.new_zeros(len(along), bins, *along.shape[1:])
    maps.scatter_add_(1, lower[:, None], (length * (1 - share))[:, None])
    maps.scatter_add_(1, ((lower + 1) % bins)[:, None], (length * share)[:, None])
    ramp = 1 - (torch.arange(2 * cell) + 0.5 - cell).abs() / cell
    window = (ramp[:, None] * ramp)[None, None] / cell**2
    pooled = F.conv2d(maps.flatten(0, 1)[:, None], window, stride=cell, padding=cell // 2)
    groups = F.unfold(pooled.unflatten(0, (-1, bins))[:, :, 0], 2).transpose(1, 2)  # (n, groups, 4 * bins)
    for most in (RULES.clip, 1.0):
        groups = groups / (groups.square().sum(dim=2, keepdim=True) + RULES.faint**2).sqrt()
        groups = groups.clamp_max(most)
    return groups.flatten(1)


@cache
def make_filters() -> Tensor:
    """Return the spectra (scales, orientations, side, side) of Morlet wavelets.

    Source: Bruna and Mallat (2013), sec. 2: ``exp(i u xi) - k`` under a Gaussian, its mean 0.
    """
    side, orientations = RULES.side, RULES.orientations
    frequency = torch.fft.fftfreq(side, dtype=torch.float64) * 2 * math.pi
    found = []
    for scale in range(RULES.scales):
        spread, centre, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / orientations
        for turn in (math.pi * number / orientations for number in range(orientations)):
            wave, mass = torch.zeros(side, side, dtype=torch.float64), torch.zeros(side, side, dtype=torch.float64)
            for up in (-1, 0, 1):  # what is beyond the highest frequency folds back
                for left in (-1, 0, 1):
                    y, x = frequency[:, None] + 2 * math.pi * up, frequency + 2 * math.pi * left
                    u, v = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
                    wave += (-(spread**2) * ((u - centre) ** 2 + (v / slant) ** 2) / 2).exp()
                    mass += (-(spread**2) * (u**2 + (v / slant) ** 2) / 2).exp()
            found.append(wave - wave[0, 0] / mass[0, 0] * mass)
    return torch.stack(found).view(RULES.scales, orientations, side, side).float()


@cache
def _cut_filters(side: int) -> Tensor:
    """Return the filters for pictures of fewer pixels per side: their low frequencies alone."""
    return _cut(make_filters(), side)


def _cut(spectrum: Tensor, side: int) -> Tensor:
    """Return the lowest frequencies of a spectrum (..., larger, larger), (..., side, side), for as many pixels."""
    half = side // 2
    if spectrum.shape[-1] == side:
        return spectrum
    rows = torch.cat([spectrum[..., :half, :], spectrum[..., -half:, :]], dim=-2)
    return torch.cat([rows[..., :half], rows[..., -half:]], dim=-1)


def _fold(spectrum: Tensor) -> Tensor:
    """Return the spectrum of every other pixel of every other line."""
    half = spectrum.shape[-1] // 2
    folded = spectrum[..., :half, :] + spectrum[..., half:, :]
    return (folded[..., :half] + folded[..., half:]) / 4


def _scatter(grey: Tensor) -> tuple[Tensor, Tensor]:
    """Return what filters respond, and what filters respond to these responses.

    Args:
        grey: (n, side, side).

    Returns:
        first: (n, scales * orientations * cells^2), mean absolute responses by place.
        second: (n, pairs of scales, turns, orientations): of a coarser filter to a finer one's responses, that is
            turned against it by so much; the last axis is the finer one's orientation.
    """
    scales, orientations, side = RULES.scales, RULES.orientations, RULES.side
    spectrum = torch.fft.fft2(grey)[:, None]
    first, second = [], []
    turned = (torch.arange(orientations) + torch.arange(orientations)[:, None]) % orientations  # (turns, orientations)
    own = torch.arange(orientations)
    for scale in range(scales):
        size = min(side, side >> (scale - 1) if scale else side)
        shrunk = _cut(spectrum, size) * _cut_filters(size)[scale] * (size / side) ** 2
        responses = torch.fft.ifft2(shrunk).abs()  # (n, orientations, size, size)
        first.append(F.adaptive_avg_pool2d(responses, RULES.cells))
        again = torch.fft.fft2(responses) if scale + 1 < scales else responses
        for coarser in range(scale + 1, scales):
            small = side >> (coarser - 1)
            cut = _cut(again, small)[:, :, None] * _cut_filters(small)[coarser] * (small / size) ** 2
            means = torch.fft.ifft2(_fold(cut)).abs().mean(dim=(3, 4))  # (n, finer, coarser)
            second.append(means[:, own, turned])  # (n, turns, orientations)
    return torch.cat(first, dim=1).flatten(1), torch.stack(second, dim=1)


def _compare_neighbours(grey: Tensor) -> Tensor:
    """Return how often so many of the eight neighbours in a row are brighter, at each distance: (n, features)."""
    found = []
    for distance, smooth in RINGS:
        blurred = _blur(grey, smooth)
        brighter = torch.stack([near > blurred + RULES.threshold for near in _look_around(blurred, distance)], dim=1)
        changes = (brighter != brighter.roll(1, dims=1)).sum(dim=1)
        kinds = torch.where(changes <= 2, brighter.sum(dim=1), 9)  # (n, side, side), 9 for several in pieces
        places = kinds.flatten(1)
        counts = grey.new_zeros(len(grey), 10).scatter_add_(1, places, torch.ones_like(places, dtype=grey.dtype))
        found.append((counts / places.shape[1]).sqrt())
    return torch.cat(found, dim=1)


def _look_around(grey: Tensor, distance: float) -> list[Tensor]:
    """Return the eight neighbours (n, side, side) of every pixel on a circle, between pixels where need be."""
    reach, side = math.ceil(distance) + 1, grey.shape[-1]
    padded = F.pad(grey[:, None], (reach, reach, reach, reach), mode="replicate")[:, 0]
    found = []
    for number in range(8):
        turn = 2 * math.pi * number / 8
        y, x = -distance * math.sin(turn), distance * math.cos(turn)
        top, left = math.floor(y + 1e-9), math.floor(x + 1e-9)
        down, right = max(0.0, y - top), max(0.0, x - left)
        near = torch.zeros_like(grey)
        for row, own in ((0, 1 - down), (1, down)):
            for column, share in ((0, 1 - right), (1, right)):
                if own * share > 1e-6:
                    above, before = reach + top + row, reach + left + column
                    near += own * share * padded[:, above : above + side, before : before + side]
        found.append(near)
    return found


def _blur(grey: Tensor, deviation: float) -> Tensor:
    """Return pictures (n, side, side) under a Gaussian."""
    if not deviation:
        return grey
    reach = math.ceil(3 * deviation)
    window = torch.exp(-torch.arange(-reach, reach + 1).square() / (2 * deviation**2))
    window /= window.sum()
    padded = F.pad(grey[:, None], (reach, reach, reach, reach), mode="reflect")
    return F.conv2d(F.conv2d(padded, window.view(1, 1, 1, -1)), window.view(1, 1, -1, 1))[:, 0]


def _count_colours(opponent: Tensor) -> Tensor:
    """Return the square roots of the shares of colours, in boxes of the opponent space: (n, levels^3)."""
    levels = RULES.levels
    widened = torch.stack([opponent[:, 0], *(2 * opponent[:, axis] - 0.5 for axis in (1, 2))], dim=1)
    boxes = (widened * levels).clamp(0, levels - 1e-4).long()
    places = ((boxes[:, 0] * levels + boxes[:, 1]) * levels + boxes[:, 2]).flatten(1)
    counts = opponent.new_zeros(len(opponent), levels**3)
    counts.scatter_add_(1, places, torch.ones_like(places, dtype=opponent.dtype))
    return (counts / places.shape[1]).sqrt()


def _count_hues(opponent: Tensor) -> Tensor:
    """Return the square roots of the shares of hues, each pixel weighed by its saturation: (n, hues)."""
    red, yellow = opponent[:, 1] - 0.5, opponent[:, 2] - 0.5
    saturation = (red.square() + yellow.square()).sqrt().flatten(1)
    angle = (torch.atan2(yellow, red) / (2 * math.pi)).remainder(1).flatten(1) * RULES.hues
    lower = angle.floor()
    share, lower = angle - lower, lower.long() % RULES.hues
    counts = opponent.new_zeros(len(opponent), RULES.hues)
    counts.scatter_add_(1, lower, saturation * (1 - share))
    counts.scatter_add_(1, (lower + 1) % RULES.hues, saturation * share)
    return (counts / (counts.sum(dim=1, keepdim=True) + RULES.pale * saturation.shape[1])).sqrt()
