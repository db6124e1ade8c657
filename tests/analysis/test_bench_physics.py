"""Workloads of the optimizer bench on physics: derivatives, the known solution and the pendulums' energy."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.optimizer_bench.workloads import physics


def differentiate(values: Tensor, points: Tensor) -> Tensor:
    """Return u, u_t, u_x and u_xx, (4, n), of values (n,) made of points (n, 2) row by row."""
    (first,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), points)
    return torch.stack([values, first[:, 0], first[:, 1], second[:, 1]]).detach()


def draw_points() -> Tensor:
    return torch.rand(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def test_derivatives_carried_forward_are_those_of_autograd() -> None:
    workload, points = physics.build_heat(0), draw_points()
    model = workload.model.double()
    assert isinstance(model, physics.HeatNet)
    torch.testing.assert_close(model.differentiate(points).detach(), differentiate(model(points), points))


def test_the_known_solution_solves_the_equation() -> None:
    points = draw_points()
    _, u_t, _, u_xx = differentiate(physics.solve_heat(points), points)
    torch.testing.assert_close(u_t, physics.DIFFUSIVITY * u_xx)
    assert u_t.abs().max() > 0.1
    ends = torch.tensor([[0.3, 0.0], [0.7, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(physics.solve_heat(ends), torch.zeros(2, dtype=torch.float64))


def test_the_pendulums_keep_their_energy() -> None:
    angles, rates = physics.load_trajectories().double().chunk(2, dim=2)  # (n, times, 2)
    stretched = (angles[..., 0] - angles[..., 1]) ** 2
    energy = (rates**2 / 2 - angles.cos()).sum(2) + physics.SPRING / 2 * stretched  # (n, times)
    torch.testing.assert_close(energy, energy[:, :1].expand_as(energy), atol=1e-4, rtol=1e-4)
    assert energy.std() > 1


def test_the_true_rates_lead_to_the_trajectories() -> None:
    paths = physics.load_trajectories()
    predicted = physics.integrate(physics.swing, paths[:, 0], physics.INTERVAL, physics.OBSERVATIONS)
    assert torch.nn.functional.mse_loss(predicted, paths[:, 1:]) < 1e-4


def test_runge_kutta_is_exact_to_its_order() -> None:
    (end,) = physics.integrate(lambda x: x, torch.ones(1, 1), 0.5, 1).flatten()
    torch.testing.assert_close(end, torch.tensor(sum([1, 0.5, 0.5**2 / 2, 0.5**3 / 6, 0.5**4 / 24])))
