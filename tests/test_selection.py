from __future__ import annotations

import torch

from protonet import selection
from protonet.datasets.synthetic import sample_family
from protonet.encoder import plan_encoder
from protonet.selection import select


def choose(family: str, limit: float = 500_000, **counts: int) -> selection.Choice:
    split = sample_family(family, seed=21, num_classes=32, dim=48, **counts)
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    return select(x / x.square().mean().sqrt(), y, 32, plan_encoder(48, 32, limit))


def test_on_isotropic_data_the_smallest_mlp_on_raw_features_is_kept() -> None:
    choice = choose("isotropic")
    assert (choice.reads, choice.rung, choice.steps) == ("raw", (1, 1), selection.Search().steps[0])
    assert (choice.weights, choice.learned) == ({}, 1.0)


def test_on_correlated_noise_the_mlp_reads_whitened_features() -> None:
    choice = choose("correlated")
    assert choice.reads == "whitened"
    assert choice.losses["whitened"] < choice.losses["raw"]


def test_without_parameters_the_choice_is_raw_cosine() -> None:
    choice = choose("correlated", limit=0)
    assert (choice.reads, choice.weights, choice.learned, choice.rung) == ("raw", {"raw": 1.0}, 0.0, (0, 0))


def test_without_folds_or_time_the_choice_is_the_smallest_mlp_on_raw_features() -> None:
    x, plan = torch.eye(4), plan_encoder(4, 4, 1000)
    for labels, deadline in ((torch.arange(4), float("inf")), (torch.arange(4) % 2, 0.0)):
        choice = select(x, labels, 4, plan, deadline=deadline)
        assert (choice.reads, choice.learned, choice.rung) == ("raw", 1.0, (1, 1))


def test_radial_views_are_used_where_tails_are_heavy() -> None:
    choice = choose("heavy_tails")
    assert choice.weights["gaussian squashed"] > 0.1
    assert set(choice.settings) == {name for name in choice.weights if " " in name}
    assert choice.learned > 0
    assert abs(sum(choice.weights.values()) + choice.learned - 1) < 1e-6
    assert choice.losses["mixed"] < choice.losses["raw"]
