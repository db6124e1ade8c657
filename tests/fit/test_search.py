from __future__ import annotations

import pytest
import torch

from protonet.datasets import load_digits
from protonet.datasets.synthetic import sample_family
from protonet.encoder import plan_encoder
from protonet.fit.candidates import Search
from protonet.fit.search import EFFORTS, Choice, select


def choose(family: str, limit: float = 500_000, **counts: int) -> Choice:
    split = sample_family(family, seed=21, num_classes=32, dim=48, **counts)
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    return select(x / x.square().mean().sqrt(), y, 32, plan_encoder(48, 32, limit))


def test_on_isotropic_data_the_smallest_mlp_on_raw_features_is_kept() -> None:
    choice = choose("isotropic")
    assert (choice.reads, choice.rung, choice.steps) == ("raw", (1, 1), Search().steps[0])
    assert (choice.weights, choice.learned) == ({}, 1.0)


def test_on_correlated_noise_the_mlp_reads_whitened_features() -> None:
    choice = choose("correlated")
    assert choice.reads == "whitened"
    assert choice.losses["whitened"] < choice.losses["raw"]


def test_without_parameters_the_choice_is_raw_cosine() -> None:
    choice = choose("correlated", limit=0)
    assert (choice.reads, choice.weights, choice.learned, choice.rung) == ("raw", {"raw": 1.0}, 0.0, (0, 0))


def test_without_time_the_choice_is_the_smallest_mlp_on_raw_features() -> None:
    choice = select(torch.eye(4), torch.arange(4) % 2, 4, plan_encoder(4, 4, 1000), deadline=0.0)
    assert (choice.reads, choice.learned, choice.rung) == ("raw", 1.0, (1, 1))


@pytest.mark.parametrize("limit", [0, 1000])
@pytest.mark.parametrize("effort", EFFORTS)
def test_without_folds_it_is_a_fixed_mixture_in_which_raw_cosine_has_the_most_say(limit: int, effort: str) -> None:
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    choice = select(x, torch.arange(6), 6, plan_encoder(12, 6, limit), search=EFFORTS[effort])
    trained = bool(limit) and effort != "fast"
    assert (choice.reads, choice.rung) == ("raw", (1, 1) if trained else (0, 0))
    if not limit:
        assert choice.weights == {"raw": 1.0}
    else:
        raw = choice.learned if trained else choice.weights["raw"]
        assert set(choice.weights) - {"raw"} == {"gaussian standardised", "laplacian standardised", "forest"}
        assert raw > max(share for name, share in choice.weights.items() if name != "raw")
    assert abs(sum(choice.weights.values()) + choice.learned - 1) < 1e-6


def test_moved_views_are_used_on_pixels_unless_they_are_ruled_out() -> None:
    data = load_digits()
    x, y = data.x[:100] / data.x[:100].square().mean().sqrt(), data.y[:100]
    search = Search(trees=20, rungs=1, steps=(10,))
    choice = select(x, y, 10, plan_encoder(64, 10, 1000), search=search)
    assert len(choice.moves) == 9
    assert sum(share for name, share in choice.weights.items() if name.startswith("moved")) > 0.5
    still = select(x, y, 10, plan_encoder(64, 10, 1000), search=search._replace(moves=False))
    assert not any(name.startswith("moved") for name in still.weights)
    assert choice.losses["mixed"] < still.losses["mixed"]


def test_the_stages_are_told_in_order() -> None:
    told: list[tuple[str, float]] = []
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    select(x, torch.arange(20) % 2, 2, plan_encoder(4, 2, 100), progress=lambda *stage: told.append(stage))
    assert [stage for stage, _ in told] == ["linear views", "radial views", "forests", "learned views"]
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_radial_views_are_used_where_tails_are_heavy() -> None:
    choice = choose("heavy_tails")
    assert choice.weights["gaussian squashed"] > 0.1
    assert set(choice.settings) == {name for name in choice.weights if " " in name}
    assert choice.learned > 0
    assert abs(sum(choice.weights.values()) + choice.learned - 1) < 1e-6
    assert choice.losses["mixed"] < choice.losses["raw"]
