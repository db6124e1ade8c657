"""Workloads of the optimizer bench whose weights are of an unusual scale: how unusual they are."""

from __future__ import annotations

import torch
from torch import nn

from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads import scales
from analysis.optimizer_bench.workloads.images import load_ascii


def test_loud_weights_are_torchs_own_but_larger() -> None:
    with initial_weights(0):
        loud = [*scales.make_loud(94).parameters()]
    with initial_weights(0):
        sizes = (scales.PIXELS, scales.WIDTH), (scales.WIDTH, scales.WIDTH), (scales.WIDTH, 94)
        plain = [parameter for size in sizes for parameter in nn.Linear(*size).parameters()]
    for large, small in zip(loud, plain, strict=True):
        torch.testing.assert_close(large, scales.LOUDNESS * small)


def test_a_faint_layer_makes_outputs_so_many_times_smaller() -> None:
    with initial_weights(0):
        layer, x = scales.FaintLinear(400, 3000), torch.randn(20, 400)
    assert abs(layer.weight.std().item() - 1) < 0.01
    torch.testing.assert_close(layer(x).std(), torch.tensor(scales.FAINTNESS), atol=0.1 * scales.FAINTNESS, rtol=0)
    with torch.no_grad():
        layer.bias.fill_(7)
    expected = scales.FAINTNESS * (x @ layer.weight.T / 20 + 7)
    torch.testing.assert_close(layer(x), expected)


def test_faint_outputs_begin_as_a_guess_of_even_odds() -> None:
    workload = scales.build_faint(0)
    upper, lower = load_ascii().x[:9].unflatten(1, (2, -1)).unbind(1)
    odds = workload.model(upper).sigmoid()
    assert odds.shape == lower.shape
    assert (odds - 0.5).abs().max() < 1e-3
