"""Workloads that restore pictures: what is spoilt, what is hidden and what is seen."""

from __future__ import annotations

import torch
from sklearn.datasets import load_sample_image
from torch.nn import functional as F

from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads import restoration
from analysis.optimizer_bench.workloads.images import SIDE, load_latin


def test_tiles_are_cut_from_the_photographs() -> None:
    tiles, side = restoration.load_tiles(), restoration.TILE
    order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))
    rows, columns = 427 // side, 640 // side
    assert len(tiles) == 2 * rows * columns
    china, flower = (torch.tensor(load_sample_image(name)) / 255 for name in restoration.PHOTOGRAPHS)
    pieces = {1: china[:side, side : 2 * side], rows * columns + columns: flower[side : 2 * side, :side]}
    for place, piece in pieces.items():
        assert torch.equal(tiles[order == place][0].permute(1, 2, 0), piece)


def test_noise_is_of_many_levels() -> None:
    clean = torch.full((500, 3, 12, 12), 0.5)
    noisy, kept = restoration.add_noise(clean, torch.Generator().manual_seed(0))
    assert torch.equal(kept, clean)
    assert abs((noisy - clean).mean().item()) < 0.003
    levels = (noisy - clean).flatten(1).std(1).sort().values
    expected = torch.linspace(*restoration.NOISE, len(levels))
    torch.testing.assert_close(levels, expected, atol=0.03, rtol=0)


def test_patches_cover_the_picture() -> None:
    pictures = load_latin().x[:3]
    patches = restoration.cut_patches(pictures)
    assert patches.shape == (3, restoration.PATCHES, restoration.PATCH**2)
    whole = F.fold(patches.transpose(1, 2), (SIDE, SIDE), restoration.PATCH, stride=restoration.PATCH)
    assert torch.equal(whole.flatten(1), pictures)
    corner = pictures.view(3, SIDE, SIDE)[:, : restoration.PATCH, : restoration.PATCH]
    assert torch.equal(patches[:, 0], corner.flatten(1))


def test_as_many_patches_of_every_picture_are_hidden() -> None:
    patches = torch.zeros(2000, restoration.PATCHES, 1)
    _, missing = restoration.hide_patches(patches, torch.Generator().manual_seed(0))
    hidden = round(restoration.HIDDEN_SHARE * restoration.PATCHES)
    assert missing.sum(1).unique().tolist() == [hidden]
    shares = torch.full((restoration.PATCHES,), hidden / restoration.PATCHES)
    torch.testing.assert_close(missing.float().mean(0), shares, atol=0.05, rtol=0)


def test_the_mixer_sees_what_is_not_missing_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    with initial_weights(0):
        model = restoration.Mixer()
    patches, missing = restoration.hide_patches(restoration.cut_patches(load_latin().x[:4]), generator)
    other = torch.rand(patches.shape, generator=generator)
    logits = model(patches, missing)
    assert torch.equal(logits, model(torch.where(missing[..., None], other, patches), missing))
    seen = torch.where(missing[..., None], patches, other)
    assert (logits != model(seen, missing)).any(2).all()  # every patch depends on those that are seen
