from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from sklearn.datasets import load_breast_cancer
from torch import Tensor

from protonet.datasets import load_digits
from protonet.datasets.synthetic import sample_family
from protonet.views import shifts
from protonet.views.shifts import FEATURE_ORDER, FeatureOrder, detect_feature_order, shift_rows
from tests.strategies import seeds


def waves(n: int, dim: int, period: float) -> Tensor:
    """Draw rows (n, dim) that are sines of random phase."""
    phase = torch.rand(n, 1, generator=torch.Generator().manual_seed(0)) * 2 * math.pi
    return torch.sin(phase + torch.arange(dim) * 2 * math.pi / period)


def test_a_series_is_shifted_by_the_lags_of_given_changes() -> None:
    result, width = detect_feature_order(waves(400, 100, 60.0))
    assert width == 100
    # Of sines, the squared difference at a distance is 1 - cos(2 pi distance / period) of that of unrelated features.
    expected = [math.floor(60 * math.acos(1 - change) / (2 * math.pi)) for change in FEATURE_ORDER.series_differences]
    assert [abs(a - b) <= 1 for a, b in zip(result[1::2], expected, strict=True)] == [True] * 3
    assert result[0] == 0
    assert [-step for step in result[1::2]] == list(result[2::2])


def test_an_image_is_shifted_to_its_eight_neighbours() -> None:
    x = load_digits().x
    assert detect_feature_order(x[:200]).width == 8
    assert set(detect_feature_order(x[:200]).shifts) == {
        row * 8 + column for row in (-1, 0, 1) for column in (-1, 0, 1)
    }


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
        found = [
            detect_feature_order(x[rows[:n]][:, torch.randperm(30, generator=generator)]) != FeatureOrder()
            for rows in (torch.randperm(len(x), generator=generator) for _ in range(50))
        ]
        assert sum(found) <= 2, n
    hours = waves(400, 24, 24.0) + 0.4 * torch.randn(400, 24, generator=torch.Generator().manual_seed(1))
    assert all(detect_feature_order(hours[:n]) != FeatureOrder() for n in (10, 300))


def test_too_few_rows_or_features_are_not_shifted() -> None:
    for shape in ((2, 100), (100, 1), (100, 5), (0, 100)):
        assert detect_feature_order(torch.ones(shape)).shifts == (0,), shape


def test_many_rows_are_shifted_less(monkeypatch: pytest.MonkeyPatch) -> None:
    x = waves(100, 100, 60.0)
    monkeypatch.setattr(shifts, "FEATURE_ORDER", replace(FEATURE_ORDER, max_shifted_rows=500))
    assert len(detect_feature_order(x).shifts) == 5
    monkeypatch.setattr(shifts, "FEATURE_ORDER", replace(FEATURE_ORDER, max_shifted_rows=299))
    assert detect_feature_order(x).shifts == (0,)


@given(seed=seeds)
def test_shifted_rows_are_the_slow_loop(seed: int) -> None:
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
    offsets = (0, 2, -3)
    shifted = shift_rows(x, offsets)
    for copy, offset in enumerate(offsets):
        for row in range(3):
            for column in range(7):
                assert shifted[3 * copy + row, column] == x[row, min(max(column + offset, 0), 6)]
    assert shift_rows(x, (0,)) is x
