from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from protonet.losses import class_means
from protonet.selection.folds import split_folds
from protonet.views import evaluation, kernel_ridge
from protonet.views.evaluation import (
    VIEW_PRUNING,
    Candidate,
    CandidateEvaluator,
    ViewFamily,
    map_features,
    plan_encoder,
)
from protonet.views.forest import ForestFamily, ForestSpec, ForestView
from protonet.views.kernel_ridge import (
    KERNEL_BANDWIDTHS,
    KERNEL_RIDGE,
    KERNEL_RIDGE_PENALTIES,
    KERNEL_RIDGE_SPECS,
    KernelRidgeFamily,
    KernelRidgeSpec,
)
from protonet.views.linear import LinearFamily, LinearSpec
from protonet.views.mlp import MLPFamily, MLPSpec
from protonet.views.view import Source, TrainingRows, require_linear_map
from tests.strategies import blobs


def make_evaluator(
    seed: int = 0, *, rows: int = 10, noise: float = 1.0, shifts: tuple[int, ...] = (0,)
) -> CandidateEvaluator:
    x, y = blobs(seed, rows=rows, noise=noise)
    folds = split_folds(y, 5)
    return CandidateEvaluator(TrainingRows(x, y, 5, shifts=shifts), folds, plan_encoder(8, 5, 1000))


def evaluate_linear(evaluator: CandidateEvaluator, scaling: str) -> Candidate:
    (result,) = LinearFamily((scaling,)).candidates(evaluator)
    return result


def test_candidates_are_fitted_to_each_fold_alone() -> None:
    evaluator = make_evaluator()
    result = evaluator.evaluate(ForestSpec(3))
    assert result is not None
    parts = []
    for fold in evaluator.folds:
        view = ForestSpec(3).fit(evaluator.rows.select(fold.train))
        votes = F.normalize(view(evaluator.rows.features), dim=1)
        means = class_means(votes[fold.train], evaluator.rows.labels[fold.train], 5)[0]
        parts.append(votes[fold.held_out] @ F.normalize(means, dim=1).T)
    torch.testing.assert_close(result.cosines, torch.cat(parts))
    assert result.spec == ForestSpec(3)


def test_successive_halving_selects_one_of_the_best_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = make_evaluator(noise=2.0, rows=20)
    settings = [
        replace(KERNEL_RIDGE_SPECS[0], bandwidth=bandwidth, ridge=ridge)
        for bandwidth in KERNEL_BANDWIDTHS
        for ridge in KERNEL_RIDGE_PENALTIES
    ]
    parts = []
    for source, fold in zip(evaluator.fold_sources(KERNEL_RIDGE_SPECS[0]), evaluator.folds, strict=True):
        rows, queries = evaluator.rows.select(fold.train), evaluator.rows.features[fold.held_out]
        regression = kernel_ridge._KernelRegression(KERNEL_RIDGE_SPECS[0], require_linear_map(source), rows, queries)
        parts.append(
            torch.cat([regression.cosines(bandwidth, KERNEL_RIDGE_PENALTIES) for bandwidth in KERNEL_BANDWIDTHS])
        )
    every = torch.cat(parts, dim=1)
    losses = [float(evaluator.compute_losses(item).mean()) for item in every]
    (halved,) = KernelRidgeFamily(KERNEL_RIDGE_SPECS[:1]).candidates(evaluator)
    monkeypatch.setattr(kernel_ridge, "KERNEL_RIDGE", replace(KERNEL_RIDGE, min_halving_rows=10**6))
    (full,) = KernelRidgeFamily(KERNEL_RIDGE_SPECS[:1]).candidates(evaluator)
    assert isinstance(full.spec, KernelRidgeSpec)
    position = settings.index(full.spec)
    assert position == losses.index(min(losses))
    torch.testing.assert_close(full.cosines, every[position])
    assert halved.mean_loss < sorted(losses)[len(losses) // 4]


def test_a_clearly_worse_view_is_not_evaluated_on_all_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = make_evaluator(rows=80)  # more than enough rows per fold
    evaluator.best_linear_losses = evaluate_linear(evaluator, "raw").losses
    views = evaluator.fit(LinearSpec("raw"))
    noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    assert evaluator.should_prune(noise)
    assert not evaluator.should_prune(noise[: VIEW_PRUNING.min_evaluated_rows - 1])
    assert not evaluator.should_prune(noise, expected_loss_ratio=0.1)
    assert not evaluator.should_prune(evaluator.compute_fold_cosines(partial(map_features, views[0]), 0))
    features = torch.randn(evaluator.rows.features.shape, generator=torch.Generator().manual_seed(0))
    evaluator.rows = replace(evaluator.rows, features=features)
    fits: list[TrainingRows] = []
    fit = ForestSpec.fit

    def record(spec: ForestSpec, rows: TrainingRows, source: Source | None) -> ForestView:
        fits.append(rows)
        return fit(spec, rows, source)

    monkeypatch.setattr(ForestSpec, "fit", record)
    assert list(ForestFamily(3).candidates(evaluator)) == []
    assert len(fits) == 1
    monkeypatch.setattr(
        evaluation, "VIEW_PRUNING", replace(VIEW_PRUNING, max_excess_loss=math.inf, min_decisive_rows=10**6)
    )
    assert [item.spec.name for item in ForestFamily(3).candidates(evaluator)] == ["forest"]
    assert len(fits) == 1 + len(evaluator.folds)


def test_shifted_views_are_evaluated_if_shifts_are_detected() -> None:
    for shifts, index in (((0,), 0), ((0, 1, -1), 2)):
        evaluator = make_evaluator(shifts=shifts)
        tried = [*KernelRidgeFamily.for_effort("fast").candidates(evaluator), *ForestFamily(10).candidates(evaluator)]
        assert sum(item.spec.shifted for item in tried) == index
        assert all(item.spec.shifted == item.spec.name.startswith("shifted") for item in tried)


@pytest.mark.parametrize("kind", [KernelRidgeFamily(), ForestFamily()])
def test_no_candidate_is_evaluated_after_the_deadline(kind: ViewFamily) -> None:
    evaluator = make_evaluator()
    evaluator.rows = replace(evaluator.rows, deadline=0.0)
    assert list(kind.candidates(evaluator)) == []


def test_the_simplest_views_are_evaluated_after_the_deadline() -> None:
    evaluator = make_evaluator()
    evaluator.rows = replace(evaluator.rows, deadline=0.0)
    evaluator.candidates = list(LinearFamily().candidates(evaluator))
    assert [item.spec for item in evaluator.candidates] == [LinearSpec("raw")]
    (untrained,) = MLPFamily().candidates(evaluator)
    assert untrained.spec == MLPSpec(LinearSpec("raw"), 1, 1, 3, 20)
    torch.testing.assert_close(untrained.cosines, evaluator.candidates[0].cosines)


def test_learned_views_read_the_simplest_good_view_and_are_evaluated_at_each_step_count() -> None:
    evaluator = make_evaluator(noise=2.0, shifts=(0, 1))
    evaluator.candidates = list(LinearFamily(("raw", "standardised")).candidates(evaluator))
    tried = list(MLPFamily(max_sizes=2, step_counts=(1, 4)).candidates(evaluator))
    specs = [item.spec for item in tried]
    assert {item.source for item in specs} == {LinearSpec("raw")}
    sizes = [(item.members, item.hidden, item.steps) for item in specs]  # type: ignore[attr-defined]
    assert sizes == [(1, 1, 1), (1, 32, 1), (1, 32, 4)][: len(sizes)]  # the least one is trained as short as any
    assert len(sizes) > 1
    assert not any(item.shifted for item in specs)
    shifted = Candidate(
        ForestSpec(3, shifted=True), evaluator.candidates[0].cosines, evaluator.candidates[0].losses * 0
    )
    evaluator.candidates.append(shifted)  # the best view so far
    assert all(item.spec.shifted for item in MLPFamily(max_sizes=1, step_counts=(1,)).candidates(evaluator))
