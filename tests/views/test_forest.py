"""Forests, and fixed convolutions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from sklearn.ensemble import ExtraTreesClassifier
from torch import Tensor

from protonet.datasets import load_digits
from protonet.fit.search import ModelSearch
from protonet.fit.solver import fit_solution
from protonet.selection.folds import split_folds
from protonet.views import fixed_convolution, forest
from protonet.views.evaluation import CandidateEvaluator, plan_encoder
from protonet.views.forest import MAX_FOREST_WORK, MAX_TREE_ROWS, ForestFamily, ForestSpec, ForestView, max_tree_count
from protonet.views.linear import LinearFamily, LinearSpec
from protonet.views.shifts import shift_rows
from protonet.views.view import InputMap, TrainingRows
from tests.strategies import accuracy, blobs, make_noise_evaluator, seeds


def grow(x: Tensor, y: Tensor, classes: int = 5, trees: int = 20) -> ForestView:
    return ForestSpec(trees).fit(TrainingRows(x, y, classes))


def vote_slowly(view: ForestView, x: Tensor) -> Tensor:
    """Walk every row down every tree."""
    votes = torch.zeros(len(x), view.part_sizes[0])
    for index, row in enumerate(x):
        for root in view.root:
            at = int(root)
            while int(view.child[at]) != at:
                at = int(view.child[at]) + int(row[view.feature[at]] > view.threshold[at])
            votes[index, view.label[at]] += 1 / len(view.root)
    return votes


@settings(max_examples=10)
@given(seed=seeds)
def test_votes_equal_a_slow_walk_down_the_trees(seed: int) -> None:
    x, y = blobs(seed, rows=3, noise=2.0)
    view = grow(x, y, trees=4)
    queries = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(view(queries), vote_slowly(view, queries))


def test_a_forest_is_as_accurate_as_that_of_scikit_learn() -> None:
    x, y = load_digits().x, load_digits().y
    ours = accuracy(grow(x[:300], y[:300], 10, 200)(x[300:]), y[300:])
    oracle = ExtraTreesClassifier(200, random_state=0).fit(x[:300].numpy(), y[:300].numpy())
    assert ours > oracle.score(x[300:].numpy(), y[300:].numpy()) - 0.01


def test_equal_rows_of_two_classes_go_to_the_majority_and_then_to_the_class_of_the_first_row() -> None:
    x = torch.tensor([[0.0, 1.0]] * 5 + [[1.0, 1.0]] * 2)
    y = torch.tensor([2, 1, 1, 0, 2, 1, 0])
    view = grow(x, y, 3)
    assert view(x).argmax(dim=1).tolist() == [2] * 5 + [1] * 2
    assert view.config.depth == 1
    equal = grow(torch.ones(4, 2), torch.tensor([1, 1, 0, 2]), 3)
    torch.testing.assert_close(equal(torch.ones(1, 2)), torch.tensor([[0.0, 1.0, 0.0]]))


def test_batches_of_trees_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(1, noise=2.0)
    monkeypatch.setattr(forest, "MAX_BATCH_WORK", 300)  # a few trees at a time
    view = grow(x, y)
    assert len(view.root) == 20
    torch.testing.assert_close(view(x), torch.nn.functional.one_hot(y, 5).float())
    torch.testing.assert_close(view(x[:4] + 0.3), vote_slowly(view, x[:4] + 0.3))


def test_the_same_seed_gives_the_same_trees_in_any_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(2)
    first, second = grow(x, y), grow(x * 1024, y)
    assert torch.equal(first.feature, second.feature)
    assert torch.equal(first.threshold * 1024, second.threshold)
    monkeypatch.setattr(forest, "FOREST_SEED", 1)
    assert not torch.equal(first(x + 1), grow(x, y)(x + 1))


def test_work_is_bounded() -> None:
    max_work = max(MAX_FOREST_WORK, MAX_TREE_ROWS * 20)
    for n in (1, 100, 10_000, 1_000_000):
        trees = max_tree_count(n, 400, 200)
        assert 1 <= trees <= 200, n
        assert trees * min(n, MAX_TREE_ROWS) * 20 <= max_work, n


def test_trees_are_grown_from_a_part_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(3)
    x, y = x[y.argsort()], y.sort().values
    monkeypatch.setattr(forest, "MAX_TREE_ROWS", 10)
    view = grow(x, y)
    assert len(view.feature) <= len(view.root) * (2 * 10 - 1)
    assert set(view.label.tolist()) == set(range(5))


def test_the_forest_of_a_fold_uses_the_same_fraction_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, cosines of held-out rows have another scale than those of the final forest."""
    monkeypatch.setattr(forest, "MAX_TREE_ROWS", 200)
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(1000, 8, generator=generator), (torch.arange(1000) % 50 == 0).long()
    features[labels == 1] += 0.6
    search = replace(ModelSearch(), families=(LinearFamily(("raw",)), ForestFamily(50)))
    model = fit_solution([(features, labels)], search=search).network
    new = torch.randn(5000, 8, generator=generator)
    new[:100] += 0.6
    with torch.no_grad():
        predicted = model(new).softmax(dim=1)[:, 1].mean()
    assert float(predicted) == pytest.approx(0.02, rel=0.5)


def count_roots(x: Tensor, blocks: Tensor | None, trees: int = 3000) -> Tensor:
    """Count the trees (dim,) that split first by each feature; with two blocks, or two features, a node tries one."""
    view = ForestSpec(trees).fit(TrainingRows(x, torch.arange(len(x)) % 2, 2, column_indices=blocks))
    return view.feature[view.root].bincount(minlength=x.shape[1]).double()


def test_blocks_are_drawn_uniformly_and_features_of_a_block_by_their_variance() -> None:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 1.0, 2.0, 0.0, 3.0, 4.0])
    blocks = torch.tensor([0, 1, 1, 1, 1, 1])
    variance = x.var(dim=0).double()
    expected = 1500 * variance / torch.bincount(blocks, variance)[blocks]
    torch.testing.assert_close(count_roots(x, blocks), expected, rtol=0, atol=110)  # 4 standard deviations
    assert count_roots(x, blocks)[3] == 0


def test_without_blocks_features_are_drawn_uniformly() -> None:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(2)) * torch.tensor([100.0, 1.0])
    torch.testing.assert_close(count_roots(x, None), torch.full((2,), 1500.0).double(), rtol=0, atol=110)


def test_a_shifted_forest_is_the_forest_of_the_shifted_rows() -> None:
    x, y = blobs(5)
    shifts = (0, 2, -1)
    use_shifts = ForestSpec(5, use_shifts=True).fit(TrainingRows(x, y, 5, shifts=shifts))
    expected = grow(shift_rows(x, shifts), y.repeat(3), trees=5)
    assert torch.equal(use_shifts(x + 0.2), expected(x + 0.2))
    plain = ForestSpec(5).fit(TrainingRows(x, y, 5, shifts=shifts))
    assert torch.equal(plain(x + 0.2), grow(x, y, trees=5)(x + 0.2))
    assert [ForestSpec(5, use_shifts=shift).name for shift in (False, True)] == ["forest", "shifted forest"]


@pytest.mark.parametrize(
    ("held_out", "reference", "grown"),
    [
        (256, 0.05, [6]),  # two classes of noise: no more trees would save it
        (255, 0.05, [50]),  # too few rows to settle that
        (256, 0.8, [6, 50]),
    ],
)
def test_a_few_trees_reject_a_clearly_worse_candidate(
    held_out: int, reference: float, grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = make_noise_evaluator(held_out, reference)
    trees: list[int] = []
    fit = ForestSpec.fit

    def record(spec: ForestSpec, rows: TrainingRows, source: InputMap | None = None) -> ForestView:
        trees.append(spec.max_trees)
        return fit(spec, rows, source)

    monkeypatch.setattr(ForestSpec, "fit", record)
    candidates = list(ForestFamily(64).candidates(evaluator))
    assert trees == grown
    assert all(candidate.spec == ForestSpec(50) for candidate in candidates)


def test_a_forest_of_small_weight_has_fewer_trees_in_the_final_fit() -> None:
    for fraction, trees in ((0.0, 50), (0.1, 100), (0.2, 200), (1.0, 200)):
        final = ForestFamily().final_spec(ForestSpec(50, use_shifts=True), fraction)
        assert final == ForestSpec(trees, use_shifts=True), fraction
        assert ForestFamily().final_spec(ForestSpec(50), 0.0) == ForestSpec(50), fraction
        assert ForestFamily().final_spec(LinearSpec("raw"), fraction) == LinearSpec("raw"), fraction


def draw_shifted_templates(n: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rows (n, dim) that are windows of one of two templates, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    templates = F.avg_pool1d(torch.randn(2, 1, 4 * dim, generator=generator), 5, 1)[:, 0]
    y = torch.arange(n) % 2
    start = torch.randint(2 * dim, (n, 1), generator=generator)
    return templates[y[:, None], start + torch.arange(dim)], y


def fit(spec: fixed_convolution.FixedConvolutionSpec, rows: TrainingRows) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fit a view and return its map of features."""
    bank = fixed_convolution.KernelBank.fit(rows.features, spec.line_width)
    view = spec.fit(rows, bank)
    return lambda x: view(bank(x))


def slow_fractions(bank: fixed_convolution.KernelBank, x: torch.Tensor) -> torch.Tensor:
    """Compute the pooled fractions of a kernel bank by loops."""
    dim, width, parts, columns = x.shape[1], bank.config.width, bank.config.parts, []
    height = dim // width
    offsets = [(0, at - 4) for at in range(9)] if width == dim else [(at // 3 - 1, at % 3 - 1) for at in range(9)]
    for dilation, thresholds in zip(fixed_convolution.list_dilations(width, dim), bank.thresholds, strict=True):
        responses = torch.zeros(len(x), fixed_convolution.count_kernels(), height, width)
        for row in range(height):
            for column in range(width):
                for tap, (lower, further) in enumerate(offsets):
                    at = row + dilation * lower, column + dilation * further
                    if 0 <= at[0] < height and 0 <= at[1] < width:
                        value = x[:, at[0] * width + at[1]]
                        responses[:, :, row, column] += value[:, None] * fixed_convolution.fixed_kernels()[:, tap]
        for threshold in thresholds.T:
            above = (responses > threshold[:, None, None]).float()
            if width == dim:
                cut = [round(math.ceil(part * dim / parts)) for part in range(parts + 1)]
                cells = [above[..., 0, low:high].mean(dim=2) for low, high in itertools.pairwise(cut)]
            else:
                edges = [[math.ceil(part * side / parts) for part in range(parts + 1)] for side in (height, width)]
                down, right = edges
                cells = [
                    above[:, :, down[i] : down[i + 1], right[j] : right[j + 1]].mean(dim=(2, 3))
                    for i in range(parts)
                    for j in range(parts)
                ]
            columns.append(torch.stack(cells, dim=2).flatten(1))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize(("dim", "width", "parts"), [(20, 20, 1), (20, 20, 3), (30, 6, 1), (64, 8, 3)])
def test_pooled_fractions_equal_a_slow_loop(dim: int, width: int, parts: int) -> None:
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(0))
    thresholds = {"thresholds": fixed_convolution.KernelBank.fit(x, width).thresholds}
    bank = fixed_convolution.KernelBank(fixed_convolution.KernelBankConfig(dim, width, parts), thresholds)
    torch.testing.assert_close(bank(x), slow_fractions(bank, x))
    full = fixed_convolution.KernelBank(fixed_convolution.KernelBankConfig(dim, width, 1), thresholds)
    torch.testing.assert_close(bank.pool(bank(x), local=False), slow_fractions(full, x))


def test_kernels_are_all_with_three_high_taps_and_sum_to_zero() -> None:
    kernels = fixed_convolution.fixed_kernels()
    assert kernels.shape == (84, 9)
    assert len(kernels.unique(dim=0)) == 84
    assert not kernels.sum(dim=1).any()


def test_dilations_reach_over_the_row() -> None:
    assert fixed_convolution.list_dilations(9, 9) == [1]
    assert fixed_convolution.list_dilations(100, 100) == [1, 2, 4, 8]
    assert fixed_convolution.list_dilations(1000, 1000)[-1] * 8 < 1000
    assert len(fixed_convolution.list_dilations(10_000, 10_000)) == fixed_convolution.MAX_DILATIONS
    assert fixed_convolution.list_dilations(6, 36) == [1]
    assert fixed_convolution.list_dilations(28, 784) == [1, 2, 4]


def test_rows_of_one_value_are_the_same_whatever_the_batch() -> None:
    x = torch.full((3, 30), 0.1) + torch.tensor([[0.0], [0.2], [1.7]])
    bank = fixed_convolution.KernelBank.fit(
        torch.cat([x, torch.randn(3, 30, generator=torch.Generator().manual_seed(0))]), 30
    )
    torch.testing.assert_close(bank(x), torch.cat([bank(row[None]) for row in x]))
    assert bank(x[:0]).shape == (0, bank.size)


def test_convolutions_classify_shifted_rows_better_than_linear_views() -> None:
    x, y = draw_shifted_templates(40, 60)
    other, labels = draw_shifted_templates(200, 60)  # other starts of the same templates
    view = fit(fixed_convolution.FixedConvolutionSpec(60, False, 0.1), TrainingRows(x, y, 2))
    assert accuracy(view(other), labels) > 0.85


def test_low_weights_reduce_influence_and_equal_weights_have_no_effect() -> None:
    x, y = draw_shifted_templates(12, 30)
    y[0] = 1 - y[0]
    weights = torch.ones(12, dtype=torch.float64)
    plain = fit(fixed_convolution.FixedConvolutionSpec(30, True, 1.0), TrainingRows(x, y, 2))
    rows = TrainingRows(x, y, 2, weights=3 * weights)
    torch.testing.assert_close(fit(fixed_convolution.FixedConvolutionSpec(30, True, 1.0), rows)(x), plain(x))
    weights[0] = 1e-3
    light = fit(fixed_convolution.FixedConvolutionSpec(30, True, 1.0), TrainingRows(x, y, 2, weights=weights))
    assert float(light(x)[0, y[0]]) < float(plain(x)[0, y[0]]) - 0.05


def test_candidates_equal_a_fit_to_each_fold() -> None:
    x, y = draw_shifted_templates(30, 40)
    rows = TrainingRows(x, y, 2, line_width=40)
    evaluator = CandidateEvaluator(rows, split_folds(y, 2), plan_encoder(40, 2, 1000))
    result = list(fixed_convolution.FixedConvolutionFamily().candidates(evaluator))
    unordered = replace(evaluator, rows=replace(rows, line_width=0))
    assert list(fixed_convolution.FixedConvolutionFamily().candidates(unordered)) == []
    assert [item.spec.name for item in result] == ["convolution", "local convolution"]
    for item in result:
        tried = evaluator.evaluate(item.spec)
        assert tried is not None
        torch.testing.assert_close(tried.cosines, item.cosines, atol=1e-4, rtol=1e-4)
