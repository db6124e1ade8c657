"""Workloads with errors in their training data: which data are wrong, and that validation is on right ones."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import validate
from analysis.optimizer_bench.workloads import noise
from analysis.optimizer_bench.workloads.images import load_ascii


def test_wrong_labels_are_of_any_other_class() -> None:
    right = torch.arange(50_000) % 5
    spoilt = noise.spoil_labels(right, 5, torch.Generator().manual_seed(0))
    wrong = spoilt != right
    assert abs(wrong.float().mean().item() - noise.WRONG) < 0.01
    shares = ((spoilt - right)[wrong] % 5).bincount(minlength=5) / wrong.sum()
    torch.testing.assert_close(shares, torch.tensor([0, 0.25, 0.25, 0.25, 0.25]), atol=0.01, rtol=0)


def test_labels_to_validate_on_are_right() -> None:
    workload = noise.build_labels(0)
    head = [layer for layer in workload.model.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        head.weight.zero_()
        logits = head.bias.copy_(torch.randn(head.out_features, generator=torch.Generator().manual_seed(1)))
    y = load_ascii().y
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[: noise.HELD_OUT]
    expected = F.cross_entropy(logits.expand(len(rows), -1), y[rows]).item()
    assert math.isclose(validate(workload.model, workload.val_loss), expected, rel_tol=1e-5)


def test_the_hand_of_an_arm() -> None:
    angles = torch.zeros(3, 4)
    angles[1, 0] = angles[2, 2] = math.pi / 2  # the whole arm turned, and its second half
    torch.testing.assert_close(noise.reach(angles), torch.tensor([[4.0, 0.0], [0.0, 4.0], [2.0, 2.0]]))


def test_few_readings_are_spoilt_and_validation_ignores_them() -> None:
    x, hands, readings = noise.load_readings()
    assert x.abs().max() <= 1
    spoilt = (readings != hands).all(1)
    assert torch.equal(spoilt, (readings != hands).any(1))
    assert abs(spoilt.float().mean().item() - noise.SPIKES) < 0.003
    assert abs(readings[spoilt].std().item() / noise.SPIKE - 1) < 0.1
    assert spoilt[: noise.VALIDATION].any()
    workload = noise.build_spiky(0)
    for parameter in workload.model.parameters():
        nn.init.zeros_(parameter)
    expected = hands[: noise.VALIDATION].square().mean().item()
    assert math.isclose(validate(workload.model, workload.val_loss), expected, rel_tol=1e-5)
    assert sum(workload.train_loss().item() for _ in range(100)) > 1000 * expected
