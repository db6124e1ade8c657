"""Workloads of the optimizer bench with several tasks or experts: shapes, losses' scales, an expert's choice."""

from __future__ import annotations

import math

import torch

from analysis.optimizer_bench.workloads import multitask
from analysis.optimizer_bench.workloads.images import load_ascii, load_latin


def test_a_shape_is_where_the_ink_is() -> None:
    image = torch.zeros(28, 28)
    image[4, 10] = image[8, 10] = 0.5
    image[6, 7:14:6] = 0.25
    positions = [(4, 10)] * 2 + [(8, 10)] * 2 + [(6, 7), (6, 13)]
    mean = [sum(axis) / 6 for axis in zip(*positions, strict=True)]
    rows, columns = ([p[axis] - mean[axis] for p in positions] for axis in (0, 1))
    products = (zip(rows, rows, strict=True), zip(columns, columns, strict=True), zip(rows, columns, strict=True))
    expected = torch.tensor([[1.5, *mean, *(sum(a * b for a, b in pairs) / 6 for pairs in products)]])
    torch.testing.assert_close(multitask.measure_shapes(image.view(1, -1)), expected)


def test_losses_differ_in_scale_but_validation_weighs_them_alike() -> None:
    workload = multitask.build_heads(0)
    model = workload.model
    assert isinstance(model, multitask.Heads)
    data, shapes = load_ascii(), multitask.load_shapes()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.heads[2].get_parameter("bias").copy_(data.x.mean(0))  # now every head guesses the same for all glyphs
        losses = model(data.x, data.y, shapes)
    assert losses.shape > 20 * losses.character > 1000 * losses.image
    torch.testing.assert_close(losses.character, torch.tensor(math.log(data.num_classes)))
    torch.testing.assert_close(losses.image, data.x.var(0, correction=0).mean())
    assert abs(workload.val_loss().item() - 1) < 0.1


def test_each_image_goes_through_the_likeliest_expert_alone() -> None:
    model = multitask.build_experts(0).model
    assert isinstance(model, multitask.Experts)
    images = load_latin().x[:40]
    with torch.no_grad():
        logits, _ = model(images)
        chosen = set()
        for image, expected in zip(images, logits, strict=True):
            x = model.stem(image)
            shares = model.gate(x).softmax(0)
            best = int(shares.argmax())
            chosen.add(best)
            x = x + shares[best] * (model.rise[best].T @ x).relu() @ model.fall[best]
            torch.testing.assert_close(model.head(x), expected, atol=1e-5, rtol=1e-4)
    assert len(chosen) > 1


def test_imbalance_is_1_at_its_best_and_the_number_of_experts_at_its_worst() -> None:
    model = multitask.build_experts(0).model
    assert isinstance(model, multitask.Experts)
    images = load_latin().x[:10]
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.zero_()
        torch.testing.assert_close(model(images)[1], torch.tensor(1.0))
        model.gate.bias[3] = 50
        torch.testing.assert_close(model(images)[1], torch.tensor(float(multitask.EXPERTS)))


def test_only_training_counts_the_imbalance() -> None:
    workload = multitask.build_experts(0)
    training = workload.val_loss()
    workload.model.eval()
    difference = (training - workload.val_loss()).item()
    assert multitask.BALANCE * 0.99 <= difference <= multitask.BALANCE * multitask.EXPERTS
