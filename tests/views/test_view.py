"""What all views have in common: their interface, shifted copies, and their evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer
from torch import Tensor

from protonet.datasets import load_digits
from protonet.datasets.synthetic import sample_family
from protonet.losses import class_means
from protonet.selection.folds import split_folds
from protonet.views import VIEW_FAMILIES, evaluation
from protonet.views.distances import batch_invariant_matmul
from protonet.views.forest import ForestFamily, ForestSpec, ForestView
from protonet.views.kernel_ridge import KernelRidgeFamily
from protonet.views.linear import LinearFamily, LinearSpec
from protonet.views.mlp import MLPFamily, MLPSpec
from protonet.views.shifts import SERIES_DIFFERENCES, FeatureOrder, detect_feature_order, shift_rows
from protonet.views.view import InputMap, LinearMap, LinearMapConfig, TrainingRows, renumber_by_first_row
from tests.strategies import blobs, make_network, seeds


@given(seed=seeds, rank=st.integers(0, 4))
def test_a_map_is_diagonal_plus_low_rank(seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, shift, gain = (torch.randn(shape, generator=generator) for shape in ((7, 4), (4,), (4,)))
    basis = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0][:, :rank]
    coefficient = torch.randn(rank, generator=generator)
    tensors = {"shift": shift, "gain": gain, "basis": basis, "coefficient": coefficient}
    mapping = LinearMap(LinearMapConfig(4, 4, rank, 0, 0.0), tensors)
    dense = torch.diag(gain) + basis @ torch.diag(coefficient) @ basis.T
    torch.testing.assert_close(mapping(x), (x - shift) @ dense, atol=1e-5, rtol=1e-4)
    assert list(mapping.parameters()) == []
    again = LinearMap(LinearMapConfig.from_json(mapping.config.to_json()))
    again.load_state_dict(mapping.state_dict())
    assert torch.equal(again(x), mapping(x))


def test_every_view_has_a_unique_name_and_is_restored_from_its_config() -> None:
    names = [view.kind for _, view in VIEW_FAMILIES]
    assert len(set(names)) == len(names)
    x, _ = blobs(0)
    views = list(make_network(raw=True).encoder.iterate_views())  # type: ignore[operator]
    assert {view.kind for view in views} == set(names)
    for view in views:
        z = x if view.source is None else view.source(x)
        assert view(z).shape == (len(x), sum(view.part_sizes))
        restored = type(view)(view.config_type.from_json(view.config.to_json()), view.source)
        restored.check(view.state_dict())
        restored.load_state_dict(view.state_dict())
        assert torch.equal(restored(z), view(z))
        assert restored.part_sizes == view.part_sizes


def test_a_config_that_is_not_trusted_is_checked() -> None:
    cases: list[tuple[object, str]] = [
        (None, "entries other than"),
        ({"input_dim": 4, "dim": 4, "rank": 0}, "entries other than"),
        ({"input_dim": 4, "dim": 4, "rank": 0, "first": 0, "limit": 0.0, "more": 1}, "entries other than"),
        ({"input_dim": True, "dim": 4, "rank": 0, "first": 0, "limit": 0.0}, "no usable entry input_dim"),
        ({"input_dim": 4.0, "dim": 4, "rank": 0, "first": 0, "limit": 0.0}, "no usable entry input_dim"),
        ({"input_dim": 4, "dim": 0, "rank": 0, "first": 0, "limit": 0.0}, "an entry dim out of range"),
        ({"input_dim": 4, "dim": 4, "rank": 0, "first": 0, "limit": -1.0}, "an entry limit out of range"),
        ({"input_dim": 4, "dim": 4, "rank": 0, "first": 1, "limit": 0.0}, "columns that are not there"),
    ]
    for entries, message in cases:
        with pytest.raises(ValueError, match=message):
            LinearMapConfig.from_json(entries)


def test_tensors_that_are_not_trusted_are_checked() -> None:
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({"gain": torch.zeros(3)}, "a tensor p.gain of another shape or type"),
        ({"gain": torch.zeros(4, dtype=torch.float64)}, "a tensor p.gain of another shape or type"),
        ({"gain": torch.full((4,), torch.nan)}, "a tensor p.gain that is not finite"),
        ({"gain": torch.full((4,), torch.inf)}, "a tensor p.gain that is not finite"),
        ({"more": torch.zeros(1)}, "tensors that belong to no part"),
    ]
    for change, message in cases:
        mapping = LinearMap(LinearMapConfig(4, 4, 0, 0, 0.0))
        mapping.check(mapping.state_dict(), "p.")
        with pytest.raises(ValueError, match=message):
            mapping.check({**mapping.state_dict(), **change}, "p.")
        state = {name: tensor for name, tensor in mapping.state_dict().items() if name != "gain"}
        with pytest.raises(ValueError, match=r"no tensor p\.gain"):
            mapping.check(state, "p.")


def test_row_matmul_gives_a_row_the_same_digits_in_every_batch() -> None:
    for columns in (1, 5, 11, 15, 16, 40):
        draw = torch.Generator().manual_seed(columns)
        rows, matrix = torch.randn(256, 300, generator=draw), torch.randn(300, columns, generator=draw)
        full = batch_invariant_matmul(rows, matrix)
        torch.testing.assert_close(full, (rows.double() @ matrix.double()).float(), rtol=1e-4, atol=1e-4)
        for size in (16, 48, 128):
            some = torch.randint(0, 256, (size,), generator=draw)
            assert torch.equal(batch_invariant_matmul(rows[some], matrix), full[some]), columns


def test_classes_are_numbered_by_their_first_rows() -> None:
    labels = torch.tensor([7, 2, 7, 5, 2])
    numbers, classes = renumber_by_first_row(labels)
    assert numbers.tolist() == [0, 1, 0, 2, 1]
    assert torch.equal(classes[numbers], labels)
    assert torch.equal(renumber_by_first_row(9 - labels)[0], numbers)


def waves(n: int, dim: int, period: float) -> Tensor:
    """Draw rows (n, dim) that are sines of random phase."""
    phase = torch.rand(n, 1, generator=torch.Generator().manual_seed(0)) * 2 * math.pi
    return torch.sin(phase + torch.arange(dim) * 2 * math.pi / period)


def test_a_series_is_shifted_by_the_lags_of_given_changes() -> None:
    result, width = detect_feature_order(waves(400, 100, 60.0))
    assert width == 100
    # Of sines, the squared difference at a distance is 1 - cos(2 pi distance / period) of that of unrelated features.
    expected = [math.floor(60 * math.acos(1 - change) / (2 * math.pi)) for change in SERIES_DIFFERENCES]
    assert [abs(a - b) <= 1 for a, b in zip(result[1::2], expected, strict=True)] == [True] * 3
    assert result[0] == 0
    assert [-step for step in result[1::2]] == list(result[2::2])


def test_an_image_is_shifted_to_its_eight_neighbours() -> None:
    x = load_digits().x
    assert detect_feature_order(x[:200]).line_width == 8
    shifts = {row * 8 + column for row in (-1, 0, 1) for column in (-1, 0, 1)}
    assert set(detect_feature_order(x[:200]).shifts) == shifts


def test_interleaved_channels_are_shifted_by_the_channel_count() -> None:
    generator = torch.Generator().manual_seed(1)
    slow = waves(300, 40, 80.0)
    channels = [slow, torch.randn(300, 40, generator=generator), -slow.roll(20, dims=0), slow.roll(99, dims=0)]
    assert detect_feature_order(torch.stack(channels, dim=2).flatten(1)).shifts == (0, 4, -4)


def test_features_in_no_order_are_not_shifted() -> None:
    for family in ("isotropic", "correlated", "nuisance", "heavy_tails"):
        split = sample_family(family, seed=5, num_classes=16, dim=60)
        assert detect_feature_order(split.train_x) == FeatureOrder(), family


def test_a_few_large_features_at_some_lag_are_not_an_order() -> None:
    """Two similar features that are larger than the others seem to be a period in a fifth of all orders."""
    x = torch.from_numpy(load_breast_cancer().data).float()
    for n in (10, 300):
        generator = torch.Generator().manual_seed(0)
        detections = [
            detect_feature_order(x[rows[:n]][:, torch.randperm(30, generator=generator)]) != FeatureOrder()
            for rows in (torch.randperm(len(x), generator=generator) for _ in range(50))
        ]
        assert sum(detections) <= 2, n
    hours = waves(400, 24, 24.0) + 0.4 * torch.randn(400, 24, generator=torch.Generator().manual_seed(1))
    assert all(detect_feature_order(hours[:n]) != FeatureOrder() for n in (10, 300))


def test_too_few_rows_or_features_are_not_shifted() -> None:
    for shape in ((2, 100), (100, 1), (100, 5), (0, 100)):
        assert detect_feature_order(torch.ones(shape)).shifts == (0,), shape


def test_many_rows_are_shifted_less(monkeypatch: pytest.MonkeyPatch) -> None:
    x = waves(100, 100, 60.0)
    monkeypatch.setattr("protonet.views.shifts.MAX_SHIFTED_ROWS", 500)
    assert len(detect_feature_order(x).shifts) == 5
    monkeypatch.setattr("protonet.views.shifts.MAX_SHIFTED_ROWS", 299)
    assert detect_feature_order(x).shifts == (0,)


@given(seed=seeds)
def test_shifted_rows_are_the_slow_loop(seed: int) -> None:
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
    offsets = (0, 2, -3)
    use_shifts = shift_rows(x, offsets)
    for copy, offset in enumerate(offsets):
        for row in range(3):
            for column in range(7):
                assert use_shifts[3 * copy + row, column] == x[row, min(max(column + offset, 0), 6)]
    assert shift_rows(x, (0,)) is x


def make_evaluator(
    seed: int = 0, *, rows: int = 10, noise: float = 1.0, shifts: tuple[int, ...] = (0,)
) -> evaluation.CandidateEvaluator:
    x, y = blobs(seed, rows=rows, noise=noise)
    folds = split_folds(y, 5)
    return evaluation.CandidateEvaluator(
        TrainingRows(x, y, 5, shifts=shifts), folds, evaluation.plan_encoder(8, 5, 1000)
    )


def evaluate_linear(evaluator: evaluation.CandidateEvaluator, scaling: str) -> evaluation.Candidate:
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


def test_a_clearly_worse_view_is_not_evaluated_on_all_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = make_evaluator(rows=80)  # more than enough rows per fold
    evaluator.best_losses = evaluator.best_linear_losses = evaluate_linear(evaluator, "raw").losses
    views = evaluator.fit(LinearSpec("raw"))
    noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    assert evaluator.should_prune(noise)
    assert not evaluator.should_prune(noise[: evaluation.MIN_EVALUATED_ROWS - 1])
    assert not evaluator.should_prune(noise, expected_loss_ratio=0.1)
    assert not evaluator.should_prune(evaluator.compute_fold_cosines(partial(evaluation.map_features, views[0]), 0))
    features = torch.randn(evaluator.rows.features.shape, generator=torch.Generator().manual_seed(0))
    evaluator.rows = replace(evaluator.rows, features=features)
    fits: list[TrainingRows] = []
    fit = ForestSpec.fit

    def record(spec: ForestSpec, rows: TrainingRows, source: InputMap | None) -> ForestView:
        fits.append(rows)
        return fit(spec, rows, source)

    monkeypatch.setattr(ForestSpec, "fit", record)
    assert list(ForestFamily(3).candidates(evaluator)) == []
    assert len(fits) == 1
    monkeypatch.setattr(evaluation, "MAX_EXCESS_LOSS", math.inf)
    monkeypatch.setattr(evaluation, "MIN_DECISIVE_ROWS", 10**6)
    assert [item.spec.name for item in ForestFamily(3).candidates(evaluator)] == ["forest"]
    assert len(fits) == 1 + len(evaluator.folds)


def test_shifted_views_are_evaluated_if_shifts_are_detected() -> None:
    for shifts, index in (((0,), 0), ((0, 1, -1), 2)):
        evaluator = make_evaluator(shifts=shifts)
        tried = [*KernelRidgeFamily().candidates(evaluator), *ForestFamily(10).candidates(evaluator)]
        assert sum(item.spec.use_shifts for item in tried) == index
        assert all(item.spec.use_shifts == item.spec.name.startswith("shifted") for item in tried)


@pytest.mark.parametrize("kind", [KernelRidgeFamily(), ForestFamily()])
def test_no_candidate_is_evaluated_after_the_deadline(kind: evaluation.ViewFamily) -> None:
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
    tried = list(MLPFamily(max_n_sizes=2, step_counts=(1, 4)).candidates(evaluator))
    specs = [item.spec for item in tried]
    assert {item.source for item in specs} == {LinearSpec("raw")}
    sizes = [(item.n_mlps, item.n_hidden, item.n_steps) for item in specs]  # type: ignore[attr-defined]
    assert sizes == [(1, 1, 1), (1, 32, 1), (1, 32, 4)][: len(sizes)]  # the least one is trained as short as any
    assert len(sizes) > 1
    assert not any(item.use_shifts for item in specs)
    first = evaluator.candidates[0]
    use_shifts = evaluation.Candidate(ForestSpec(3, use_shifts=True), first.cosines, first.losses * 0)
    evaluator.candidates.append(use_shifts)  # the best view so far
    assert all(item.spec.use_shifts for item in MLPFamily(max_n_sizes=1, step_counts=(1,)).candidates(evaluator))
