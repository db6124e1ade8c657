from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from protonet.datasets import load_digits
from protonet.datasets.synthetic import sample_family
from protonet.fit.search import EFFORTS, MIXTURE, RAW, Choice, Search, select
from protonet.views import KINDS
from protonet.views.forest import ForestKind
from protonet.views.linear import Linear
from protonet.views.mlp import MLP, MLPKind, Plan, plan_encoder
from protonet.views.radial import BANDWIDTHS, RIDGES, Radial, RadialKind
from protonet.views.view import Rows


def choose(family: str, limit: float = 500_000, **counts: int) -> Choice:
    split = sample_family(family, seed=21, num_classes=32, dim=48, **counts)
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    return select(Rows(x / x.square().mean().sqrt(), y, 32), plan_encoder(48, 32, limit))


def smallest(plan: Plan) -> MLP:
    """Return the least MLP on raw features, trained for as short as any."""
    return MLP(RAW, 1, 1, MLPKind().steps[0], plan.embedding_dim)


def weights(choice: Choice) -> dict[str, float]:
    return {specification.name: weight for specification, weight in choice.views}


def test_on_isotropic_data_the_smallest_mlp_on_raw_features_is_kept() -> None:
    choice = choose("isotropic")
    assert choice.views == ((smallest(plan_encoder(48, 32, 500_000)), 1.0),)


def test_on_correlated_noise_the_mlp_reads_whitened_features() -> None:
    choice = choose("correlated")
    (learned,) = (specification for specification, _ in choice.views if isinstance(specification, MLP))
    assert learned.source == Linear("whitened")
    assert choice.losses["whitened"] < choice.losses["raw"]


def test_without_parameters_the_choice_is_raw_cosine() -> None:
    choice = choose("correlated", limit=0)
    assert choice.views == ((RAW, 1.0),)
    assert choice.temperature > 0


def test_without_time_the_choice_is_the_smallest_mlp_on_raw_features() -> None:
    plan = plan_encoder(4, 4, 1000)
    choice = select(Rows(torch.eye(4), torch.arange(4) % 2, 4, deadline=0.0), plan)
    assert choice.views == ((smallest(plan), 1.0),)


@pytest.mark.parametrize("limit", [0, 1000])
@pytest.mark.parametrize("effort", EFFORTS)
def test_without_folds_it_is_a_fixed_mixture_in_which_raw_cosine_weighs_most(limit: int, effort: str) -> None:
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    plan = plan_encoder(12, 6, limit)
    choice = select(Rows(x, torch.arange(6), 6), plan, search=EFFORTS[effort])
    trained = bool(limit) and effort != "fast"
    (raw, weight), *others = choice.views
    assert raw == (smallest(plan) if trained else RAW)
    if not limit:
        assert others == []
    else:
        names = {specification.name for specification, _ in others}
        assert names == {"gaussian standardised", "laplacian standardised", "forest"}
        assert weight > max(share for _, share in others)
    assert abs(sum(weights(choice).values()) - 1) < 1e-6


def test_shifted_views_are_used_on_pixels_unless_they_are_ruled_out() -> None:
    data = load_digits()
    x, y = data.x[:100] / data.x[:100].square().mean().sqrt(), data.y[:100]
    search = Search().with_kind(ForestKind(trees=20)).with_kind(MLPKind(sizes=1, steps=(10,)))
    rows, plan = Rows(x, y, 10), plan_encoder(64, 10, 1000)
    choice = select(rows, plan, search=search)
    assert len(choice.shifts) == 9
    closed = [(each, weight) for each, weight in choice.views if not isinstance(each, MLP)]
    assert sum(weight for each, weight in closed if each.shifted) > 0.5
    still = select(rows, plan, search=replace(search, shifts=False))
    assert not any(each.shifted for each, _ in still.views)
    assert still.shifts == (0,)
    assert choice.losses["mixture"] < still.losses["mixture"]


def test_the_stages_are_told_in_order() -> None:
    told: list[tuple[str, float]] = []
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    rows = Rows(x, torch.arange(20) % 2, 2)
    select(rows, plan_encoder(4, 2, 100), progress=lambda *stage: told.append(stage))
    assert [stage for stage, _ in told] == ["linear views", "radial views", "forests", "learned views"]
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_radial_views_are_used_where_tails_are_heavy() -> None:
    choice = choose("heavy_tails")
    assert weights(choice)["gaussian squashed"] > 0.1
    for specification, weight in choice.views:
        assert weight > 0
        if isinstance(specification, Radial):
            assert specification.bandwidth in BANDWIDTHS
            assert specification.ridge in RIDGES
    assert any(isinstance(specification, MLP) for specification, _ in choice.views)
    assert abs(sum(weights(choice).values()) - 1) < 1e-6
    assert choice.losses["mixture"] < choice.losses["raw"]


def test_a_search_is_changed_kind_by_kind() -> None:
    assert [type(kind) for kind in Search().kinds] == [kind for kind, _ in KINDS]
    changed = Search().with_kind(ForestKind(trees=3)).without(RadialKind)
    assert [type(kind) for kind in changed.kinds] == [kind for kind, _ in KINDS if kind is not RadialKind]
    assert ForestKind(trees=3) in changed.kinds
    assert Search() == EFFORTS["default"]
    assert changed.with_kind(RadialKind()) == changed  # one that it has not got is not added


def test_without_a_kind_none_of_its_views_are_tried() -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    search = Search().without(RadialKind).without(MLPKind).with_kind(ForestKind(trees=5))
    choice = select(Rows(x, torch.arange(40) % 2, 2), plan_encoder(4, 2, 100), search=search)
    assert set(choice.losses) == {
        "raw",
        "centred",
        "standardised",
        "relevant",
        "robust",
        "whitened",
        "forest",
        "mixture",
    }


def test_the_prior_weight_of_shifted_views_counts() -> None:
    assert MIXTURE.shifted > 1
    data = load_digits()
    rows = Rows(data.x[:60] / data.x[:60].square().mean().sqrt(), data.y[:60], 10)
    search = Search().without(RadialKind).without(MLPKind).with_kind(ForestKind(trees=20))
    choice = select(rows, plan_encoder(64, 10, 1000), search=search)
    assert weights(choice)["shifted forest"] > weights(choice)["forest"]
