from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from protonet.fit.prior import (
    N_DATASET_STATISTICS,
    VIEW_TRAITS,
    WeightingPrior,
    build_prior_input,
    compute_row_statistics,
    deserialize_prior,
    encode_traits,
    serialize_prior,
)
from protonet.selection import scoring
from protonet.selection.scoring import WEIGHTING, fit_view_weights, row_slices, weights_from_losses
from protonet.selection.scoring import fit_temperature as fit
from protonet.views.fixed_convolution import FixedConvolutionSpec
from protonet.views.forest import ForestSpec
from protonet.views.kernel_ridge import KernelRidgeSpec
from protonet.views.linear import FEATURE_SCALINGS, LinearSpec
from protonet.views.mlp import MLPSpec
from protonet.views.view import TrainingRows, ViewSpec
from tests.strategies import blobs, seeds

VIEWS: list[ViewSpec] = [
    LinearSpec("raw"),
    KernelRidgeSpec(LinearSpec("standardised"), 2),
    ForestSpec(9, shifted=True),
    MLPSpec(LinearSpec("raw"), 1, 32, 10, 64),
]
TRAIT_FLAGS = encode_traits(VIEWS)


def draw(seed: int, n: int = 30) -> tuple[TrainingRows, list[torch.Tensor], torch.Tensor]:
    """Draw training rows, cosines (n, 5) of held-out rows for four views, the best first, and labels (n,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 5
    right = torch.nn.functional.one_hot(labels, 5).float()
    cosines = [right * use + 0.3 * torch.randn(n, 5, generator=generator) for use in (0.5, 0.4, 0.3, 0.1)]
    x, y = blobs(seed % 100)
    return TrainingRows(x, y, 5), [cosine.clamp(-1, 1) for cosine in cosines], labels


def random_prior(seed: int) -> WeightingPrior:
    """Create a prior with random parameters."""
    prior, generator = WeightingPrior(), torch.Generator().manual_seed(seed)
    for weight in prior.parameters():  # zeros before
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return prior


def test_the_traits_of_a_view() -> None:
    cases: list[tuple[ViewSpec, set[str]]] = [
        *((LinearSpec(scaling, span), {scaling}) for scaling in FEATURE_SCALINGS for span in (None, (0, 3))),
        (KernelRidgeSpec(LinearSpec("relevant"), 1), {"laplacian", "relevant"}),
        (KernelRidgeSpec(LinearSpec("robust"), 1, apply_tanh=True), {"laplacian", "squashed"}),
        (FixedConvolutionSpec(9, False, 0.1), {"convolution"}),
        (FixedConvolutionSpec(9, True, 0.1), {"convolution", "local"}),
        (ForestSpec(9), {"forest"}),
        (ForestSpec(9, shifted=True), {"forest", "shifted"}),
        (MLPSpec(LinearSpec("whitened"), 1, 32, 10, 64, shifted=True), {"learned", "whitened"}),
    ]
    for spec, traits in cases:
        (flags,) = encode_traits([spec]).tolist()
        assert flags == [float(trait in traits) for trait in VIEW_TRAITS], spec
        assert spec.traits <= set(VIEW_TRAITS), spec


@settings(max_examples=15)
@given(seed=seeds)
def test_an_untrained_prior_returns_the_weights_that_held_out_rows_suggest(seed: int) -> None:
    rows, cosines, labels = draw(seed)
    seen = torch.ones(5, dtype=torch.bool)
    start = weights_from_losses(cosines, [fit(item, labels, seen)[1] for item in cosines])
    joint = fit_view_weights(cosines, labels, seen.double(), start)
    weights, size = WeightingPrior().predict_view_weights(build_prior_input(rows, TRAIT_FLAGS, cosines, labels))
    torch.testing.assert_close(weights, joint, rtol=0.02, atol=0.02)  # the least ones are left out
    assert size == 1.0


def test_evidence_from_many_rows_is_gathered_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "WEIGHTING", replace(WEIGHTING, values_per_block=10_000))
    rows, cosines, labels = draw(0, n=900)
    assert len(list(row_slices(900, 4 * 5))) > 1
    evidence = build_prior_input(rows, TRAIT_FLAGS, cosines, labels)
    stacked, seen = torch.stack(cosines).double(), torch.ones(5, dtype=torch.bool)
    spread = stacked.var(dim=2, correction=0).mean(dim=1).sqrt()
    torch.testing.assert_close(evidence.view_spreads, spread)
    start = weights_from_losses(cosines, [fit(item, labels, seen)[1] for item in cosines])
    influence = fit_view_weights(cosines, labels, seen.double(), start) * spread
    influence /= influence.sum()
    scaled = stacked / spread[:, None, None]
    mixed = torch.tensordot(influence, scaled, dims=1)
    flat, common = (part - part.mean(dim=-1, keepdim=True) for part in (scaled, mixed))
    similarity = torch.cosine_similarity(flat.flatten(1), common.flatten()[None], dim=1)
    torch.testing.assert_close(evidence.view_statistics[:, -1], similarity.float())
    wrong = (evidence.initial_inverse_temperature * mixed).softmax(dim=1) - torch.nn.functional.one_hot(labels, 5)
    pull = evidence.initial_inverse_temperature * (wrong * scaled).sum(dim=(1, 2)) / len(labels)
    torch.testing.assert_close(evidence.view_statistics[:, -2], (pull - (influence * pull).sum()).float())


@settings(max_examples=15)
@given(seed=seeds)
def test_the_order_of_views_does_not_matter(seed: int) -> None:
    rows, cosines, labels = draw(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist()
    prior = random_prior(seed)
    weights, size = prior.predict_view_weights(build_prior_input(rows, TRAIT_FLAGS, cosines, labels))
    swapped = TRAIT_FLAGS[order], [cosines[at] for at in order]
    others, other = prior.predict_view_weights(build_prior_input(rows, *swapped, labels))
    torch.testing.assert_close(others, weights[order], rtol=1e-3, atol=1e-5)
    assert other == pytest.approx(size, rel=1e-3)


def test_weights_sum_to_one_and_small_ones_are_left_out() -> None:
    rows, cosines, labels = draw(3)
    for index in range(5):
        evidence = build_prior_input(rows, TRAIT_FLAGS, cosines, labels)
        weights, size = random_prior(index).predict_view_weights(evidence)
        assert float(weights.sum()) == pytest.approx(1)
        fractions = weights * evidence.view_spreads
        fractions = fractions / fractions.sum()
        assert bool(((fractions == 0) | (fractions >= 0.99 * WEIGHTING.min_influence)).all())
        assert size > 0


def test_a_view_that_does_not_separate_rows_gets_zero_weight() -> None:
    rows, cosines, labels = draw(4)
    cosines[1] = torch.full_like(cosines[1], 0.7)
    weights, _ = WeightingPrior().predict_view_weights(build_prior_input(rows, TRAIT_FLAGS, cosines, labels))
    assert float(weights[1]) == 0
    nothing, _ = WeightingPrior().predict_view_weights(build_prior_input(rows, TRAIT_FLAGS[:1], cosines[1:2], labels))
    assert nothing.tolist() == [0.0]


def test_without_held_out_rows_weights_depend_on_the_spread_alone() -> None:
    rows, cosines, _ = draw(5)
    weights, _ = WeightingPrior().predict_view_weights(build_prior_input(rows, TRAIT_FLAGS, cosines, None))
    spread = torch.stack([item.double().var(dim=1, correction=0).mean().sqrt() for item in cosines])
    torch.testing.assert_close(weights, (1 / spread) / (1 / spread).sum())


@settings(max_examples=15)
@given(seed=seeds)
def test_statistics_of_rows_do_not_depend_on_units_and_order(seed: int) -> None:
    x, y = blobs(seed % 100)
    result = compute_row_statistics(TrainingRows(x, y, 5))
    assert result.shape == (N_DATASET_STATISTICS - 5,)
    torch.testing.assert_close(compute_row_statistics(TrainingRows(x * 1000, y, 5)), result, rtol=1e-3, atol=1e-3)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        compute_row_statistics(TrainingRows(x[order], y[order], 5)), result, rtol=1e-3, atol=1e-3
    )


def test_degenerate_rows_have_finite_statistics() -> None:
    for x in (torch.zeros(6, 3), torch.ones(6, 1), torch.eye(6)[:, :2] * 1e-30):
        assert bool(torch.isfinite(compute_row_statistics(TrainingRows(x, torch.arange(6) % 2, 2))).all()), x


def test_prior_parameters_round_trip() -> None:
    prior = random_prior(0)
    again = deserialize_prior(serialize_prior(prior))
    for one, other in zip(prior.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.data, other.data, rtol=1e-3, atol=1e-4)
    assert not any(weight.requires_grad for weight in again.parameters())
    with pytest.raises((RuntimeError, ValueError), match=r"split|buffer"):
        deserialize_prior(serialize_prior(prior)[:-40])
