"""Physics: a network that solves the heat equation, and one that learns how coupled pendulums move."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, on_rows, seed_0, workload
from analysis.optimizer_bench.workloads.models import make_mlp

DIFFUSIVITY = 0.02
MODES = {1: 1.0, 3: 0.6, 6: 0.4}  #: Amplitudes at time 0 of the waves sin(k pi x) that the solution is made of.
HEAT_WIDTH, HEAT_LAYERS = 32, 3  #: Hidden ones.
INTERIOR, EDGE = 64, 16  #: Points of a batch: within, and on each of the three sides where the solution is given.
EDGE_WEIGHT = 10.0
GRID = 25  #: Times and places to validate on.

SPRING = 0.5  #: Between the two pendulums, whose own frequency is 1.
SPREAD = 1.5  #: Standard deviation of the first angles and velocities.
INTERVAL, OBSERVATIONS, SUBSTEPS = 0.6, 2, 20  #: Of each trajectory, after its first state; substeps make the data.
TRAJECTORIES, PENDULUM_VALIDATION, PENDULUM_BATCH, PENDULUM_WIDTH = 4000, 256, 64, 48


class HeatNet(nn.Module):
    """A tanh network of time and place that can tell its own derivatives."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [2, *[HEAT_WIDTH] * HEAT_LAYERS, 1]
        self.layers = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise(sizes)))

    def forward(self, points: Tensor) -> Tensor:
        """Map times and places (n, 2) to temperatures (n,)."""
        x = points
        for layer in self.layers[:-1]:
            x = layer(x).tanh()
        temperatures: Tensor = self.layers[-1](x).squeeze(1)
        return temperatures

    def differentiate(self, points: Tensor) -> Tensor:
        """Map times and places (n, 2) to u, u_t, u_x and u_xx, (4, n), carried forward through the layers."""
        axes = torch.eye(3, 2, dtype=points.dtype)  # the last row is 0
        rates = axes.unsqueeze(1).expand(-1, len(points), -1)  # (3, n, 2)
        jet = torch.cat([points.unsqueeze(0), rates])  # (4, n, width)
        for layer in self.layers[:-1]:
            jet = bend(carry(layer, jet))
        return carry(self.layers[-1], jet).squeeze(2)


def carry(layer: nn.Module, jet: Tensor) -> Tensor:
    """Map values and derivatives (4, n, inputs) by a linear layer, whose bias moves no derivative."""
    return torch.cat([layer(jet[:1]), F.linear(jet[1:], layer.get_parameter("weight"))])


def bend(jet: Tensor) -> Tensor:
    """Map values and derivatives (4, n, width) by tanh, whose slope is 1 - tanh^2 and curvature -2 tanh times that."""
    value = jet[0].tanh()
    slope = 1 - value**2
    u_t, u_x, u_xx = slope * jet[1:]
    return torch.stack([value, u_t, u_x, u_xx - 2 * value * u_x * jet[2]])


def solve_heat(points: Tensor) -> Tensor:
    """Return the temperatures (n,) of a rod of length 1 whose ends are kept at 0, at times and places (n, 2)."""
    t, x = points.unbind(1)
    waves = [a * (-DIFFUSIVITY * (k * math.pi) ** 2 * t).exp() * (k * math.pi * x).sin() for k, a in MODES.items()]
    return torch.stack(waves).sum(0)


@workload
def heat() -> Task:
    """Solve u_t = diffusivity * u_xx; the seed decides the points.

    The training loss is the squared residual and the squared errors at time 0 and at both ends; the validation loss
    is the squared error, as a share of the solution's square.

    Source: M. Raissi, P. Perdikaris and G. E. Karniadakis (2019), Physics-informed neural networks.
    """

    def stream(generator: torch.Generator) -> Iterator[Tensor]:
        while True:
            points = torch.rand(INTERIOR + 3 * EDGE, 2, generator=generator)
            start, left, right = points[INTERIOR:].split(EDGE)  # views
            start[:, 0], left[:, 1], right[:, 1] = 0, 0, 1
            yield points

    def loss(model: nn.Module, points: Tensor) -> Tensor:
        solution = solve_heat(points)
        if not model.training:
            error: Tensor = model(points) - solution
            return error.square().sum() / solution.square().sum()
        assert isinstance(model, HeatNet)
        u, u_t, _, u_xx = model.differentiate(points)
        residual = (u_t - DIFFUSIVITY * u_xx)[:INTERIOR]
        at_edges = F.mse_loss(u[INTERIOR:], solution[INTERIOR:])
        return F.mse_loss(residual, torch.zeros_like(residual)) + EDGE_WEIGHT * at_edges

    grid = torch.cartesian_prod(torch.linspace(0, 1, GRID), torch.linspace(0, 1, 2 * GRID))
    return Task(HeatNet, loss, stream, grid)


def swing(states: Tensor) -> Tensor:
    """Return the rates (n, 4) of states (n, 4): the angles of two pendulums with a spring between, and their rates."""
    angles, rates = states.chunk(2, dim=1)
    return torch.cat([rates, SPRING * (angles.flip(1) - angles) - angles.sin()], 1)


def integrate(field: Callable[[Tensor], Tensor], states: Tensor, interval: float, count: int) -> Tensor:
    """Return the states (n, count, d) that follow states (n, d) at even intervals, by the classical Runge-Kutta."""
    path = []
    for _ in range(count):
        first = field(states)
        second = field(states + interval / 2 * first)
        third = field(states + interval / 2 * second)
        fourth = field(states + interval * third)
        states = states + interval / 6 * (first + 2 * (second + third) + fourth)
        path.append(states)
    return torch.stack(path, dim=1)


def draw_trajectories() -> Tensor:
    """Return states of the pendulums, the first one and those observed: (n, 1 + observations, 4)."""
    first = SPREAD * torch.randn(TRAJECTORIES, 4, generator=seed_0(), dtype=torch.float64)
    path = integrate(swing, first, INTERVAL / SUBSTEPS, OBSERVATIONS * SUBSTEPS)[:, SUBSTEPS - 1 :: SUBSTEPS]
    return torch.cat([first.unsqueeze(1), path], 1).float()


@workload
def oscillator() -> Task:
    """Learn the rates of the pendulums from what they lead to.

    Source: R. T. Q. Chen et al. (2018), Neural ordinary differential equations, arXiv 1806.07366.
    """

    def loss(model: nn.Module, paths: Tensor) -> Tensor:
        return F.mse_loss(integrate(model, paths[:, 0], INTERVAL, OBSERVATIONS), paths[:, 1:])

    validation, train = draw_trajectories().tensor_split([PENDULUM_VALIDATION])
    make = functools.partial(make_mlp, 4, PENDULUM_WIDTH, PENDULUM_WIDTH, 4, activation=nn.Tanh)
    return on_rows(make, loss, (train, validation), PENDULUM_BATCH)


WORKLOADS = {"heat": heat, "oscillator": oscillator}
