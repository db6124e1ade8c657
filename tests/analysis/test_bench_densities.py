"""Workloads of the optimizer bench on densities: the flow's determinant, its loss and the mix of image and noise."""

from __future__ import annotations

import math

import torch

from analysis.optimizer_bench.workloads import densities


def test_the_determinant_is_the_jacobians() -> None:
    model = densities.build_flow(0).model
    levels = densities.load_patches()[:5]
    _, log_determinants = model(levels)
    for row, log_determinant in zip(levels, log_determinants, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: model(x[None])[0][0], row)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian.double())[1].float(), log_determinant)


def test_the_loss_is_the_negative_log_density() -> None:
    workload = densities.build_flow(0)
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.zero_()  # then the levels are normal
    generator = torch.Generator().manual_seed(0)
    levels = densities.load_patches()[: densities.FLOW_VALIDATION]
    levels = levels + torch.rand(levels.shape, generator=generator)
    normal = torch.distributions.Normal(densities.CENTRE, densities.SCALE)
    torch.testing.assert_close(workload.val_loss(), -normal.log_prob(levels).mean())


def test_patches_are_neighbours() -> None:
    pixels = densities.load_patches().unflatten(1, (3, 2, 2))  # (n, colours, rows, columns)
    assert len(pixels) == 213 * 320
    assert {pixels.min().item(), pixels.max().item()} == {0, 255}
    apart = (pixels - pixels.roll(1, 0)).abs().mean()
    for axis in (2, 3):
        assert pixels.diff(dim=axis).abs().mean() < apart / 4


def test_noise_takes_the_place_of_the_image() -> None:
    images, noise = torch.randn(2, 2000, 64, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([0.0, 0.5, 1.0]).repeat_interleave(2000)[:, None]
    first, middle, last = densities.mix(images.repeat(3, 1), noise.repeat(3, 1), times).chunk(3)
    torch.testing.assert_close(first, images)
    torch.testing.assert_close(last, noise, atol=1e-6, rtol=0)
    torch.testing.assert_close(middle, (images + noise) / math.sqrt(2))


def test_who_always_answers_zero_has_the_noises_variance() -> None:
    workload = densities.build_diffusion(0)
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.zero_()
    margin = 5 * math.sqrt(2 / (densities.DIFFUSION_VALIDATION * densities.PIXELS))
    torch.testing.assert_close(workload.val_loss(), torch.tensor(1.0), atol=margin, rtol=0)
