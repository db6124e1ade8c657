"""Workloads that compare: views of pictures, losses over pairs, and characters held out."""

from __future__ import annotations

import math

import pytest
import torch

from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads import contrast
from analysis.optimizer_bench.workloads.images import load_ascii


def test_characters_are_held_out() -> None:
    train, validation = contrast.split_pictures(ascii_alone=True)
    data = load_ascii()
    assert data.y.diff().min() >= 0  # what the split relies on
    assert len(train) + len(validation) == data.num_classes
    assert torch.equal(validation[1].flatten(1), data.x[data.y == contrast.HELD_OUT])
    assert torch.equal(train[0].flatten(1), data.x[data.y == 1])


def test_views_without_jitter_are_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = contrast.split_pictures(ascii_alone=True)[0][:3, 0]
    first, second = contrast.draw_views(pictures, torch.Generator().manual_seed(0)).chunk(2)
    assert ((first - second).abs() > 3 * contrast.GREY).any(3).any(2).all()
    for name in ("TURN", "ZOOM", "SHIFT", "GREY"):
        monkeypatch.setattr(contrast, name, 0)
    views = contrast.draw_views(pictures, torch.Generator().manual_seed(0))
    torch.testing.assert_close(views, torch.cat((pictures, pictures)), atol=1e-5, rtol=0)


def test_views_are_turned_zoomed_and_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZOOM", "SHIFT", "GREY"):
        monkeypatch.setattr(contrast, name, 0)
    monkeypatch.setattr(contrast, "TURN", math.pi / 2)
    monkeypatch.setattr(torch, "rand", lambda *size, generator: torch.ones(size))  # all as far as they go
    pictures = contrast.split_pictures(ascii_alone=True)[0][:3, 0]
    views = contrast.draw_views(pictures, torch.Generator())
    torch.testing.assert_close(views[:3], pictures.rot90(1, (2, 3)), atol=1e-4, rtol=0)


def test_views_are_told_from_all_others() -> None:
    embeddings = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = 0.0
    for i in range(6):
        likes = [
            math.exp(torch.cosine_similarity(embeddings[i], embeddings[j], 0).item() / contrast.TEMPERATURE)
            for j in range(6)
        ]
        total -= math.log(likes[(i + 3) % 6] / (sum(likes) - likes[i])) / 6
    assert math.isclose(contrast.compare_views(embeddings).item(), total, rel_tol=1e-9)


def test_pairs_are_of_the_same_character_or_not() -> None:
    pictures = torch.arange(7 * 4).view(7, 4)  # its character is a picture's quotient by 4
    characters = torch.arange(7).repeat(5000)
    pairs, same = contrast.draw_pairs(pictures, characters, torch.Generator().manual_seed(0))
    shown = pairs // 4
    assert torch.equal(shown[:, 0], characters)
    assert torch.equal((shown[:, 0] == shown[:, 1]).float(), same)
    assert abs(same.mean().item() - 0.5) < 0.02
    assert len(pairs.unique(dim=0)) == 28 * 28  # of any copies


def test_the_siamese_network_has_two_equal_sides() -> None:
    with initial_weights(0):
        model = contrast.Siamese()
    pairs = contrast.split_pictures(ascii_alone=True)[0][:5, :2]
    torch.testing.assert_close(model(pairs), model(pairs.flip(1)))
    torch.testing.assert_close(model(pairs[:, [0, 0]]), model.head.bias.expand(5))
