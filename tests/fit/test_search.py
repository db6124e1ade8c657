"""Which views a search selects, and the prior over their weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from protonet.datasets import load_digits
from protonet.datasets.synthetic import sample_family
from protonet.estimator import ProtoNetClassifier
from protonet.fit.prior import (
    N_DATASET_STATISTICS,
    N_VIEW_STATISTICS,
    VIEW_TAGS,
    WeightingPrior,
    build_prior_input,
    compute_row_statistics,
    deserialize_prior,
    encode_tags,
    serialize_prior,
)
from protonet.fit.search import (
    DEFAULT_SEARCH,
    FLOPS_PER_MICROSECOND,
    RAW_LINEAR,
    ModelSearch,
    SearchResult,
    SelectedModel,
    _drop_slow_views,
    evaluate_candidates,
    select_model,
)
from protonet.fit.solver import solve
from protonet.selection import scoring
from protonet.selection.scoring import MIN_INFLUENCE, fit_view_weights, row_slices, weights_from_losses
from protonet.selection.scoring import fit_temperature as fit
from protonet.views import VIEW_FAMILIES
from protonet.views.density import DensitySpec
from protonet.views.evaluation import EncoderPlan, plan_encoder
from protonet.views.fixed_convolution import FixedConvolutionSpec
from protonet.views.forest import ForestFamily, ForestSpec
from protonet.views.kernel_ridge import KernelRidgeFamily, KernelRidgeSpec
from protonet.views.linear import FEATURE_SCALINGS, LinearFamily, LinearSpec
from protonet.views.mlp import MLPFamily, MLPSpec
from protonet.views.view import TrainingRows, ViewSpec
from tests.strategies import LITTLE, blobs, make_noise_evaluator, seeds, select_views


def scale_rows(x: torch.Tensor, y: torch.Tensor, classes: int) -> TrainingRows:
    """Make training rows of unit mean square."""
    return TrainingRows(x / x.square().mean().sqrt(), y, classes)


def select_for(family: str, *, classes: int, dim: int, search: ModelSearch = DEFAULT_SEARCH) -> SelectedModel:
    """Select views for a synthetic data set."""
    split = sample_family(family, seed=21, num_classes=classes, dim=dim)
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    return select_views(scale_rows(x, y, classes), plan_encoder(dim, classes, 50_000), search=search)


def smallest_mlp(plan: EncoderPlan) -> MLPSpec:
    """Specify the smallest MLP on raw features, with the fewest steps."""
    return MLPSpec(RAW_LINEAR, 1, 1, MLPFamily().step_counts[0], plan.embedding_dim)


def test_on_isotropic_data_the_smallest_mlp_on_raw_features_is_selected() -> None:
    search = replace(LITTLE, n_folds=5).without_family(ForestFamily).with_family(MLPFamily(max_n_sizes=1))
    choice = select_for("isotropic", classes=32, dim=48, search=search)
    assert choice.views == ((smallest_mlp(plan_encoder(48, 32, 50_000)), 1.0),)


def test_on_correlated_noise_whitened_features_have_the_largest_weight() -> None:
    choice = select_for("correlated", classes=16, dim=32, search=replace(LITTLE, n_folds=5))
    whitened = [weight for spec, weight in choice.views if LinearSpec("whitened") in {spec, spec.source}]
    assert sum(whitened) > 0.5
    assert choice.losses["whitened"] < choice.losses["raw"]


def test_the_raw_features_are_selected_if_all_rows_are_equal() -> None:
    for x in (torch.zeros(30, 8), torch.ones(30, 8)):
        plan = plan_encoder(8, 5, 30)
        choice = select_views(TrainingRows(x, torch.arange(30) % 5, 5), plan)
        assert choice.views == ((smallest_mlp(plan), 1.0),)


def test_the_smallest_mlp_on_raw_features_is_selected_without_time() -> None:
    plan = plan_encoder(4, 4, 1000)
    choice = select_views(TrainingRows(torch.eye(4), torch.arange(4) % 2, 4, deadline=0.0), plan)
    assert choice.views == ((smallest_mlp(plan), 1.0),)


@pytest.mark.parametrize("limit", [0, 1000])
def test_without_folds_the_mixture_has_the_views_that_need_no_validation(limit: int) -> None:
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    plan = plan_encoder(12, 6, limit)
    choice = select_views(TrainingRows(x, torch.arange(6), 6), plan, search=ModelSearch())
    assert choice.losses == {}
    assert not any(spec.use_shifts for spec, _ in choice.views)
    if not limit:
        assert choice.views == ((RAW_LINEAR, 1.0),)
    else:
        trained = [spec for spec, _ in choice.views if isinstance(spec, MLPSpec)]
        assert trained in ([], [smallest_mlp(plan)])  # it replaces raw cosine
        assert len(choice.views) > 3
    assert abs(sum(weight for _, weight in choice.views) - 1) < 1e-6


def test_shifted_views_are_used_on_pixels_unless_the_search_excludes_them() -> None:
    data, search = load_digits(), replace(LITTLE, n_folds=5)
    rows, plan = scale_rows(data.x[:100], data.y[:100], 10), plan_encoder(64, 10, 1000)
    choice = select_views(rows, plan, search=search)
    assert len(choice.shifts) == 9
    untrained = [(item, weight) for item, weight in choice.views if not isinstance(item, MLPSpec)]
    assert sum(weight for item, weight in untrained if item.use_shifts or isinstance(item, FixedConvolutionSpec)) > 0.3
    assert any(item.use_shifts for item, _ in untrained)
    unshifted = select_views(rows, plan, search=replace(search, use_shifts=False))
    assert not any(item.use_shifts for item, _ in unshifted.views)
    assert unshifted.shifts == (0,)
    assert choice.losses["mixture"] < unshifted.losses["mixture"]


def test_families_of_a_search_are_replaced_and_removed() -> None:
    assert [type(kind) for kind in ModelSearch().families] == [kind for kind, _ in VIEW_FAMILIES]
    changed = ModelSearch().with_family(ForestFamily(max_trees=3)).without_family(KernelRidgeFamily)
    kinds = [kind for kind, _ in VIEW_FAMILIES if kind is not KernelRidgeFamily]
    assert [type(kind) for kind in changed.families] == kinds
    assert ForestFamily(max_trees=3) in changed.families
    assert ModelSearch() == ModelSearch()
    assert changed.with_family(KernelRidgeFamily()) == changed  # one that it has not got is not added


def test_a_view_whose_cosines_hardly_differ_has_little_influence() -> None:
    x, y = blobs(0, classes=2, rows=20)
    x = torch.cat([x, torch.full((len(x), 1), 40.0)], dim=1)  # all rows have nearly the same direction
    choice = select_views(scale_rows(x, y, 2), plan_encoder(x.shape[1], 2, 1000), search=ModelSearch())
    weights = {spec.name: weight for spec, weight in choice.views}
    assert set(choice.influences) == set(weights)
    assert sum(choice.influences.values()) == pytest.approx(1)
    assert weights["raw"] > 0.9
    assert choice.influences["raw"] < 0.2


def test_cosines_that_hardly_differ_are_not_multiplied_without_limit() -> None:
    rng, labels = np.random.default_rng(4), np.arange(30) % 2
    rows = np.stack([10 ** rng.normal(2 * labels, 1), rng.normal(labels, 1)], axis=1)  # one row is far from all others
    assert ProtoNetClassifier().fit(rows, labels).network_.temperature > 1e-3


def test_the_prior_weighs_the_views() -> None:
    data = load_digits()
    rows = TrainingRows(data.x[:60] / data.x[:60].square().mean().sqrt(), data.y[:60], 10)
    search = ModelSearch().without_family(KernelRidgeFamily).without_family(MLPFamily)
    search = search.with_family(ForestFamily(max_trees=20))
    prior = WeightingPrior()
    prior.first.weight.data.zero_()
    prior.second.weight.data.zero_()
    prior.first.weight.data[0, N_VIEW_STATISTICS + VIEW_TAGS.index("forest")] = 10.0
    prior.second.weight.data[0, 0] = 1.0
    prior.score.weight.data[0, 0] = 10.0
    forests = []
    for item in (WeightingPrior(), prior):
        choice = select_views(rows, plan_encoder(64, 10, 1000), search=replace(search, prior=item))
        forests.append(sum(weight for spec, weight in choice.views if "forest" in spec.name))
    assert forests[0] < 0.5
    assert forests[1] > 0.99


def test_a_slow_view_of_small_weight_is_dropped_unless_it_is_needed() -> None:
    evaluator = make_noise_evaluator(60, 1.0)
    right = torch.nn.functional.one_hot(evaluator.labels, 2).float()
    wrong = 1 - right
    spread, weights = torch.ones(3, dtype=torch.float64), torch.tensor([0.96, 0.03, 0.01], dtype=torch.float64)

    def drop(cosines: list[torch.Tensor], microseconds: list[float]) -> list[bool]:
        names = [LinearSpec(scaling) for scaling in ("raw", "centred", "relevant")]
        flops = [FLOPS_PER_MICROSECOND * time for time in microseconds]
        result = [evaluator.make_candidate(*item) for item in zip(names, cosines, flops, strict=True)]
        explored = SearchResult(evaluator.rows, evaluator, result, {}, has_held_out_rows=True)
        remaining = _drop_slow_views(explored, weights, spread)
        assert float(remaining.sum()) == pytest.approx(1)
        return [bool(weight > 0) for weight in remaining]

    assert drop([right, right, right], [1.0, 9.0, 0.0]) == [True, False, True]
    assert drop([right, right, right], [900.0, 0.9, 0.0]) == [True] * 3  # one has much weight, the others are fast
    assert drop([0 * right, right, wrong], [1.0, 9.0, 9.0]) == [True, True, False]  # no other view separates rows
    assert drop([0 * right, right, wrong], [1.0, 1e6, 9.0]) == [True, False, False]  # a second per row


def test_selection_without_some_rows_ignores_their_cosines() -> None:
    x, y = blobs(0, rows=10, classes=3, noise=1.5)
    explored = evaluate_candidates(scale_rows(x, y, 3), plan_encoder(x.shape[1], 3, 10_000), ModelSearch())
    assert explored is not None
    held_out = torch.cat([fold.held_out for fold in explored.evaluator.folds])
    excluded = torch.arange(0, 30, 4)
    signs = torch.where(torch.isin(held_out, excluded), -1.0, 1.0)[:, None]
    misleading = [item._replace(cosines=signs * item.cosines) for item in explored.candidates]

    def choose(explored: SearchResult, rows: torch.Tensor) -> SelectedModel:
        result = explored.without_rows(rows)
        return select_model(result, explored.evaluator.mlp_sizes, ModelSearch())._replace(losses={})

    assert choose(explored, excluded) == choose(explored._replace(candidates=misleading), excluded)
    assert choose(explored, excluded) != choose(explored, excluded[:0])
    assert explored.without_rows(held_out) is explored  # no row would remain


@pytest.mark.parametrize("samples", [1, 2])
def test_with_many_classes_a_part_of_the_rows_is_evaluated(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines of all rows and classes would not fit in memory; views are validated if most classes have two rows."""
    classes = 1000
    monkeypatch.setattr("protonet.selection.folds.MAX_COSINES", 2**19)
    monkeypatch.setattr("protonet.fit.search.MAX_COSINES", 2**19)
    labels = torch.arange(classes).repeat(samples)
    x = torch.randn(classes, 4, generator=torch.Generator().manual_seed(0))[labels]
    x += 0.01 * torch.arange(len(x))[:, None] / len(x)
    search = ModelSearch(families=(LinearFamily(("raw",)),))
    explored = evaluate_candidates(TrainingRows(x, labels, classes), plan_encoder(4, classes, 50_000), search)
    assert explored is not None
    assert explored.has_held_out_rows == (samples > 1)
    assert all(candidate.cosines.numel() <= 2**19 for candidate in explored.candidates)


def test_class_frequencies_do_not_decide_which_views_are_used() -> None:
    """Votes of a forest depend on how rare a class is. Cosines do not, and are evaluated with fitted class offsets."""
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = (torch.arange(n) % 20 == 0).long()
        return torch.randn(n, 2, generator=generator) + 1.1 * y[:, None], y

    x, y = draw(1000)
    test_x, test_y = draw(20_000)
    network = solve([(x, y)])
    with torch.no_grad():
        logits = network(test_x)
    reference = LogisticRegression().fit(x.numpy(), y.numpy()).predict_proba(test_x.numpy())
    assert torch.nn.functional.cross_entropy(logits, test_y) < 1.05 * log_loss(test_y.numpy(), reference)
    assert float(logits.softmax(dim=1)[:, 1].mean()) == pytest.approx(0.05, rel=0.15)


@pytest.mark.parametrize("seed", [2, 3, 7])
def test_without_signal_probabilities_are_the_class_frequencies(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, new = torch.randn(200, 2, generator=generator), torch.randn(500, 2, generator=generator)
    network = solve([(x, (torch.arange(200) < 20).long())])
    with torch.no_grad():
        rare = network(new).softmax(dim=1)[:, 1]
    assert rare.mean() == pytest.approx(0.1, rel=0.15)


VIEWS: list[ViewSpec] = [
    LinearSpec("raw"),
    KernelRidgeSpec(LinearSpec("standardised"), 2),
    ForestSpec(9, use_shifts=True),
    MLPSpec(LinearSpec("raw"), 1, 32, 10, 64),
]
TAG_FLAGS = encode_tags(VIEWS)


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


def test_the_tags_of_a_view() -> None:
    cases: list[tuple[ViewSpec, set[str]]] = [
        *((LinearSpec(scaling, span), {scaling}) for scaling in FEATURE_SCALINGS[:-1] for span in (None, (0, 3))),
        (LinearSpec("clipped"), {"standardised"}),
        (KernelRidgeSpec(LinearSpec("relevant"), 1), {"laplacian", "relevant"}),
        (DensitySpec(LinearSpec("centred"), per_row=True), {"centred", "rows"}),
        (FixedConvolutionSpec(9, False, 0.1), {"convolution"}),
        (FixedConvolutionSpec(9, True, 0.1), {"convolution", "local"}),
        (ForestSpec(9), {"forest"}),
        (ForestSpec(9, use_shifts=True), {"forest", "shifted"}),
        (MLPSpec(LinearSpec("whitened"), 1, 32, 10, 64, use_shifts=True), {"learned", "whitened"}),
    ]
    for spec, tags in cases:
        (flags,) = encode_tags([spec]).tolist()
        assert flags == [float(tag in tags) for tag in VIEW_TAGS], spec
        assert spec.tags <= set(VIEW_TAGS), spec


@settings(max_examples=15)
@given(seed=seeds)
def test_an_untrained_prior_returns_the_weights_that_held_out_rows_suggest(seed: int) -> None:
    rows, cosines, labels = draw(seed)
    seen = torch.ones(5, dtype=torch.bool)
    start = weights_from_losses(cosines, [fit(item, labels, seen)[1] for item in cosines])
    joint = fit_view_weights(cosines, labels, seen.double(), start)
    weights, size = WeightingPrior().predict_view_weights(build_prior_input(rows, TAG_FLAGS, cosines, labels))
    torch.testing.assert_close(weights, joint, rtol=0.02, atol=0.02)  # the least ones are left out
    assert size == 1.0


def test_evidence_from_many_rows_is_gathered_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "VALUES_PER_BLOCK", 10000)
    rows, cosines, labels = draw(0, n=900)
    assert len(list(row_slices(900, 4 * 5))) > 1
    evidence = build_prior_input(rows, TAG_FLAGS, cosines, labels)
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
    weights, size = prior.predict_view_weights(build_prior_input(rows, TAG_FLAGS, cosines, labels))
    swapped = TAG_FLAGS[order], [cosines[at] for at in order]
    others, other = prior.predict_view_weights(build_prior_input(rows, *swapped, labels))
    torch.testing.assert_close(others, weights[order], rtol=1e-3, atol=1e-5)
    assert other == pytest.approx(size, rel=1e-3)


def test_weights_sum_to_one_and_small_ones_are_left_out() -> None:
    rows, cosines, labels = draw(3)
    for index in range(5):
        evidence = build_prior_input(rows, TAG_FLAGS, cosines, labels)
        weights, size = random_prior(index).predict_view_weights(evidence)
        assert float(weights.sum()) == pytest.approx(1)
        fractions = weights * evidence.view_spreads
        fractions = fractions / fractions.sum()
        assert bool(((fractions == 0) | (fractions >= 0.99 * MIN_INFLUENCE)).all())
        assert size > 0


def test_a_view_that_does_not_separate_rows_gets_zero_weight() -> None:
    rows, cosines, labels = draw(4)
    cosines[1] = torch.full_like(cosines[1], 0.7)
    weights, _ = WeightingPrior().predict_view_weights(build_prior_input(rows, TAG_FLAGS, cosines, labels))
    assert float(weights[1]) == 0
    nothing, _ = WeightingPrior().predict_view_weights(build_prior_input(rows, TAG_FLAGS[:1], cosines[1:2], labels))
    assert nothing.tolist() == [0.0]


def test_without_held_out_rows_weights_depend_on_the_spread_alone() -> None:
    rows, cosines, _ = draw(5)
    weights, _ = WeightingPrior().predict_view_weights(build_prior_input(rows, TAG_FLAGS, cosines, None))
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
    shuffled = compute_row_statistics(TrainingRows(x[order], y[order], 5))
    torch.testing.assert_close(shuffled, result, rtol=1e-3, atol=1e-3)


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
