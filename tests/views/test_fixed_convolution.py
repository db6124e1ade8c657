from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from protonet.selection.folds import split_folds
from protonet.views.evaluation import CandidateEvaluator, plan_encoder
from protonet.views.fixed_convolution import (
    FIXED_CONVOLUTION,
    FixedConvolutionFamily,
    FixedConvolutionSpec,
    KernelBank,
    KernelBankConfig,
    fixed_kernels,
    list_dilations,
    number_of_kernels,
)
from protonet.views.view import TrainingRows
from tests.strategies import accuracy


def draw_shifted_templates(n: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rows (n, dim) that are windows of one of two templates, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    templates = F.avg_pool1d(torch.randn(2, 1, 4 * dim, generator=generator), 5, 1)[:, 0]
    y = torch.arange(n) % 2
    start = torch.randint(2 * dim, (n, 1), generator=generator)
    return templates[y[:, None], start + torch.arange(dim)], y


def fit(spec: FixedConvolutionSpec, rows: TrainingRows) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fit a view and return its map of features."""
    bank = KernelBank.fit(rows.features, spec.line_width)
    view = spec.fit(rows, bank)
    return lambda x: view(bank(x))


def slow_fractions(bank: KernelBank, x: torch.Tensor) -> torch.Tensor:
    """Compute the pooled fractions of a kernel bank by loops."""
    dim, width, parts, columns = x.shape[1], bank.config.width, bank.config.parts, []
    height = dim // width
    offsets = [(0, at - 4) for at in range(9)] if width == dim else [(at // 3 - 1, at % 3 - 1) for at in range(9)]
    for dilation, thresholds in zip(list_dilations(width, dim), bank.thresholds, strict=True):
        responses = torch.zeros(len(x), number_of_kernels(), height, width)
        for row in range(height):
            for column in range(width):
                for tap, (lower, further) in enumerate(offsets):
                    at = row + dilation * lower, column + dilation * further
                    if 0 <= at[0] < height and 0 <= at[1] < width:
                        value = x[:, at[0] * width + at[1]]
                        responses[:, :, row, column] += value[:, None] * fixed_kernels()[:, tap]
        for threshold in thresholds.T:
            above = (responses > threshold[:, None, None]).float()
            if width == dim:
                cut = [round(math.ceil(part * dim / parts)) for part in range(parts + 1)]
                cells = [above[..., 0, low:high].mean(dim=2) for low, high in itertools.pairwise(cut)]
            else:
                down, right = (
                    [math.ceil(part * side / parts) for part in range(parts + 1)] for side in (height, width)
                )
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
    thresholds = {"thresholds": KernelBank.fit(x, width).thresholds}
    bank = KernelBank(KernelBankConfig(dim, width, parts), thresholds)
    torch.testing.assert_close(bank(x), slow_fractions(bank, x))
    full = KernelBank(KernelBankConfig(dim, width, 1), thresholds)
    torch.testing.assert_close(bank.pool(bank(x), local=False), slow_fractions(full, x))


def test_kernels_are_all_with_three_high_taps_and_sum_to_zero() -> None:
    kernels = fixed_kernels()
    assert kernels.shape == (84, 9)
    assert len(kernels.unique(dim=0)) == 84
    assert not kernels.sum(dim=1).any()


def test_dilations_reach_over_the_row() -> None:
    assert list_dilations(9, 9) == [1]
    assert list_dilations(100, 100) == [1, 2, 4, 8]
    assert list_dilations(1000, 1000)[-1] * 8 < 1000
    assert len(list_dilations(10_000, 10_000)) == FIXED_CONVOLUTION.max_dilations
    assert list_dilations(6, 36) == [1]
    assert list_dilations(28, 784) == [1, 2, 4]


def test_rows_of_one_value_are_the_same_whatever_the_batch() -> None:
    x = torch.full((3, 30), 0.1) + torch.tensor([[0.0], [0.2], [1.7]])
    bank = KernelBank.fit(torch.cat([x, torch.randn(3, 30, generator=torch.Generator().manual_seed(0))]), 30)
    torch.testing.assert_close(bank(x), torch.cat([bank(row[None]) for row in x]))
    assert bank(x[:0]).shape == (0, bank.size)


def test_convolutions_classify_shifted_rows_better_than_linear_views() -> None:
    x, y = draw_shifted_templates(40, 60)
    other, labels = draw_shifted_templates(200, 60)  # other starts of the same templates
    view = fit(FixedConvolutionSpec(60, False, 0.1), TrainingRows(x, y, 2))
    assert accuracy(view(other), labels) > 0.85


def test_low_weights_reduce_influence_and_equal_weights_have_no_effect() -> None:
    x, y = draw_shifted_templates(12, 30)
    y[0] = 1 - y[0]
    weights = torch.ones(12, dtype=torch.float64)
    plain = fit(FixedConvolutionSpec(30, True, 1.0), TrainingRows(x, y, 2))
    torch.testing.assert_close(
        fit(FixedConvolutionSpec(30, True, 1.0), TrainingRows(x, y, 2, weights=3 * weights))(x), plain(x)
    )
    weights[0] = 1e-3
    light = fit(FixedConvolutionSpec(30, True, 1.0), TrainingRows(x, y, 2, weights=weights))
    assert float(light(x)[0, y[0]]) < float(plain(x)[0, y[0]]) - 0.05


def test_candidates_equal_a_fit_to_each_fold() -> None:
    x, y = draw_shifted_templates(30, 40)
    rows = TrainingRows(x, y, 2, width=40)
    evaluator = CandidateEvaluator(rows, split_folds(y, 2), plan_encoder(40, 2, 1000))
    result = list(FixedConvolutionFamily().candidates(evaluator))
    unordered = replace(evaluator, rows=replace(rows, width=0))
    assert list(FixedConvolutionFamily().candidates(unordered)) == []
    assert [item.spec.name for item in result] == ["convolution", "local convolution"]
    for item in result:
        tried = evaluator.evaluate(item.spec)
        assert tried is not None
        torch.testing.assert_close(tried.cosines, item.cosines, atol=1e-4, rtol=1e-4)
