from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from protonet.encoder import LADDER, Encoder, ResidualMLPs, count_mlp_parameters, plan_encoder
from protonet.views.linear import LinearView, fit_view
from tests.strategies import blobs


def make_encoder(weights: list[float], *, members: int = 2, seed: int = 0) -> Encoder:
    x, y = blobs(seed)
    views = [fit_view(kind, x, y, 5) for kind in ("raw", "centred", "whitened")]
    learned = ResidualMLPs(members, 8, 3, 12, torch.Generator().manual_seed(seed))
    torch.nn.init.normal_(learned.last, generator=torch.Generator().manual_seed(seed))
    return Encoder(views, torch.tensor(weights), learned=learned)


@given(
    input_dim=st.integers(1, 5000),
    num_classes=st.integers(2, 5000),
    limit=st.one_of(st.integers(0, 10**7), st.floats(0, 1e7)),
)
def test_the_limit_is_never_passed_and_well_used(input_dim: int, num_classes: int, limit: float) -> None:
    plan = plan_encoder(input_dim, num_classes, limit)
    smallest = count_mlp_parameters(input_dim, 1, plan.embedding_dim)
    sizes = [members * count_mlp_parameters(input_dim, width, plan.embedding_dim) for members, width in plan.ladder]
    assert all(size <= limit for size in sizes)
    assert sizes == sorted(set(sizes))
    assert bool(sizes) == (limit >= smallest)
    assert plan.embedding_dim >= input_dim
    if sizes and plan.ladder[-1] != LADDER[-1]:  # cut by the budget: no further member, or hidden unit, fits
        members, width = plan.ladder[-1]
        step = smallest * (width if members > 1 or (members, width) in LADDER else 1)
        assert sizes[-1] + step > limit


@pytest.mark.parametrize("limit", [200_000, 500_000, 1_000_000, 2_500_000, 5_000_000])
def test_sister_limits_are_planned_exactly(limit: int) -> None:
    plan = plan_encoder(384, 128, limit)
    generator = torch.Generator().manual_seed(0)
    for members, width in plan.ladder:
        stack = ResidualMLPs(members, 384, width, plan.embedding_dim, generator)
        count = sum(p.numel() for p in stack.parameters())
        assert count == members * count_mlp_parameters(384, width, plan.embedding_dim) <= limit


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 2, 1), ValueError, "`input_dim` must be a whole number >= 1; got 0"),
        ((1, 1, 1), ValueError, "`num_classes` must be a whole number >= 2; got 1"),
        ((1, 2, -1), ValueError, "`param_limit` must be a finite number >= 0; got -1"),
        ((1, 2, math.inf), ValueError, "`param_limit` must be a finite number >= 0; got inf"),
        ((1, 2, "5"), TypeError, "`param_limit` must be a finite number >= 0; got '5'"),
    ],
)
def test_plan_errors(arguments: tuple[int, int, float], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_encoder(*arguments)


def test_an_untrained_mlp_is_the_padded_identity() -> None:
    stack = ResidualMLPs(3, 4, 2, 6, torch.Generator().manual_seed(0))
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(stack(z), F.pad(z, (0, 2)).expand(3, 5, 6))


def test_the_stack_is_the_loop_over_its_members() -> None:
    learned = make_encoder([1.0, 0, 0, 1, 1]).learned
    assert learned is not None
    z = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for m in range(2):
        hidden = F.gelu(z[m] @ learned.first[m] + learned.bias[m])
        expected = F.pad(z[m], (0, 4)) + hidden @ learned.last[m]
        torch.testing.assert_close(learned(z)[m], expected)
        torch.testing.assert_close(learned(z[m], slice(m, m + 1))[0], expected)


@pytest.mark.parametrize("weights", [[0.2, 0.3, 0.1, 0.2, 0.2], [0.0, 0.5, 0.0, 0.25, 0.25], [0.0, 0.0, 0.0, 3.0, 1.0]])
def test_the_cosine_is_the_weighted_sum_of_the_views_cosines(weights: list[float]) -> None:
    encoder = make_encoder(weights)
    assert encoder.learned is not None
    x, _ = blobs(4)
    linear = [view for view in encoder.views if isinstance(view, LinearView)]
    views = [view.embed(view(x)) for view in linear]
    views += list(encoder.learned(linear[0](x)))
    shares = torch.tensor(weights) / sum(weights)
    cosines = torch.stack([F.cosine_similarity(v[:, None], v[None, :], dim=2) for v in views])
    embedding = encoder(x)
    assert embedding.shape[1] == encoder.embedding_dim
    torch.testing.assert_close(embedding @ embedding.T, torch.tensordot(shares, cosines, dims=1))


def test_normalize_brings_each_view_back_to_its_weight() -> None:
    encoder = make_encoder([0.2, 0.3, 0.1, 0.2, 0.2])
    embedding = encoder(blobs(5)[0])
    torch.testing.assert_close(encoder.normalize(embedding * 3), embedding)
    mean = encoder.normalize(embedding.mean(dim=0, keepdim=True))
    norms = torch.stack([piece.norm() for piece in mean.split([8, 8, 9, 12, 12], dim=1)])
    torch.testing.assert_close(norms.square(), torch.tensor([0.2, 0.3, 0.1, 0.2, 0.2]))


def test_only_the_mlps_are_parameters() -> None:
    names = {name for name, _ in make_encoder([1.0, 1, 1, 1, 1]).named_parameters()}
    assert names == {"learned.first", "learned.bias", "learned.last"}
