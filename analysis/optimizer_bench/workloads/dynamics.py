"""Workloads of physical systems: a robot arm, chaotic time series, the heat equation, and coupled pendulums."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench import workload

N_JOINTS, MAX_JOINT_ANGLE = 4, math.pi / 2  #: Joints, and largest angle of each in both directions.
#: Fraction of readings that are outliers, and their standard deviation relative to that of other readings.
OUTLIER_FRACTION, OUTLIER_STD = 0.01, 100.0
N_READINGS = 20_000
#: Units of time: delay of the equation, step of its solution, and interval between two samples.
MACKEY_GLASS_DELAY, EULER_STEP, SAMPLING_INTERVAL = 17.0, 0.1, 6.0
#: Number of series, samples of each, and discarded samples before them.
N_SERIES, SAMPLES_PER_SERIES, N_DISCARDED_SAMPLES = 64, 400, 50
FORECAST_HORIZON, SERIES_NOISE_STD = 14, 0.05  #: Forecast horizon in samples, and standard deviation of the noise.
WINDOW_LENGTH, N_WARMUP_SAMPLES = 24, 8  #: Samples of a window, and samples before the first forecast in the loss.
DIFFUSIVITY = 0.02
#: Amplitude at time 0 of each component sin(k pi x) of the solution, by k.
INITIAL_TEMPERATURE_MODES = {1: 1.0, 3: 0.6, 6: 0.4}
#: Points of a batch: inside, and on each of the three sides with known values.
N_INTERIOR_POINTS, N_BOUNDARY_POINTS = 64, 16
BOUNDARY_LOSS_WEIGHT = 10.0
#: Time step, observations per trajectory after its first state, and integration substeps.
OBSERVATION_INTERVAL, N_OBSERVATIONS, N_SUBSTEPS = 0.6, 2, 20


@workload.make_workload_builder
def regression_with_outliers() -> workload.WorkloadTask:
    """Learn the kinematics of a planar arm by squared error from readings with a few gross outliers.

    The arm's links have length 1; a reading is the position of the hand. Validation readings have no outliers.
    """
    generator = workload.make_seed_zero_generator()
    x = 2 * torch.rand(N_READINGS, N_JOINTS, generator=generator) - 1  # angles over MAX_JOINT_ANGLE
    headings = (MAX_JOINT_ANGLE * x).cumsum(1)  # (n, joints)
    hands = workload.standardise(torch.stack((headings.cos(), headings.sin()), 2).sum(1))  # (n, 2)
    spoilt = torch.rand(N_READINGS, 1, generator=generator) < OUTLIER_FRACTION
    readings = torch.where(spoilt, OUTLIER_STD * torch.randn(hands.shape, generator=generator), hands)
    validation, train = torch.arange(N_READINGS).tensor_split([512])

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(model(x[rows]), (readings if model.training else hands)[rows])

    make_model = functools.partial(workload.make_mlp, N_JOINTS, 64, 64, 2, activation=nn.Tanh)
    return workload.make_row_task(make_model, loss, (train, validation), 16)


def simulate_chaotic_series(series: int, samples: int) -> Tensor:
    """Simulate chaotic series from random initial states, in float64: (series, samples), ``SAMPLING_INTERVAL`` apart.

    Source: M. Mackey and L. Glass (1977), Oscillation and chaos in physiological control systems: x'(t) =
        0.2 x(t - MACKEY_GLASS_DELAY) / (1 + x(t - MACKEY_GLASS_DELAY)^10) - 0.1 x(t), by Euler steps.
    """
    delay, sample = round(MACKEY_GLASS_DELAY / EULER_STEP), round(SAMPLING_INTERVAL / EULER_STEP)
    x = np.empty((delay + samples * sample, series))
    x[:delay] = np.linspace(0.5, 1.3, series)  # constant pasts
    for now in range(delay, len(x)):
        past = x[now - delay]
        x[now] = x[now - 1] + EULER_STEP * (0.2 * past / (1 + past**10) - 0.1 * x[now - 1])
    return torch.from_numpy(x[delay::sample].T.copy())


@workload.make_workload_builder
def chaotic_series_forecasting() -> workload.WorkloadTask:
    """Forecast noisy chaotic time series by a causal tanh network.

    The loss is the unexplained fraction of the variance, from sample ``N_WARMUP_SAMPLES`` on.
    """
    x = simulate_chaotic_series(N_SERIES, N_DISCARDED_SAMPLES + SAMPLES_PER_SERIES)[:, N_DISCARDED_SAMPLES:].float()
    x = (x - x.mean()) / x.std()
    seen = x + SERIES_NOISE_STD * torch.randn(x.shape, generator=workload.make_seed_zero_generator())
    pairs = torch.stack((seen[:, :-FORECAST_HORIZON], x[:, FORECAST_HORIZON:]), 1)  # (series, 2, samples - ahead)
    windows = pairs.unfold(2, WINDOW_LENGTH, WINDOW_LENGTH // 2).transpose(1, 2)  # (series, windows of each, 2, length)
    validation, train = (part.flatten(0, 1) for part in windows.tensor_split([4]))

    def make_model() -> nn.Module:
        states = workload.RecurrentStates(nn.RNN(1, 48, batch_first=True))
        return nn.Sequential(nn.Unflatten(1, (-1, 1)), states, nn.Linear(48, 1), nn.Flatten())

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        seen, later = windows.unbind(1)
        return F.mse_loss(model(seen)[:, N_WARMUP_SAMPLES:], later[:, N_WARMUP_SAMPLES:])

    return workload.make_row_task(make_model, loss, (train, validation), 16)


def compute_derivatives(model: nn.Module, points: Tensor) -> Tensor:
    """Compute a tanh network's output u and derivatives u_t, u_x and u_xx (4, n) at points (n, 2) of t and x."""
    axes = torch.eye(3, 2, dtype=points.dtype)  # the last row is 0
    rates = axes.unsqueeze(1).expand(-1, len(points), -1)  # (3, n, 2)
    jet = torch.cat([points.unsqueeze(0), rates])  # (4, n, width)
    *hidden, last = (layer for layer in model.children() if isinstance(layer, nn.Linear))
    for layer in hidden:
        jet = propagate_through_tanh(propagate_through_linear(layer, jet))
    return propagate_through_linear(last, jet).squeeze(2)


def propagate_through_linear(layer: nn.Linear, jet: Tensor) -> Tensor:
    """Propagate values and derivatives (4, n, inputs) through a linear layer; its bias affects only the values."""
    return torch.cat([layer(jet[:1]), F.linear(jet[1:], layer.weight)])


def propagate_through_tanh(jet: Tensor) -> Tensor:
    """Propagate values and derivatives (4, n, width) through tanh: slope 1 - tanh^2, curvature -2 tanh * slope."""
    value = jet[0].tanh()
    slope = 1 - value**2
    u_t, u_x, u_xx = slope * jet[1:]
    return torch.stack([value, u_t, u_x, u_xx - 2 * value * u_x * jet[2]])


def exact_temperatures(points: Tensor) -> Tensor:
    """Compute exact temperatures (n,) at times and positions (n, 2) of a rod of length 1 with ends at temperature 0."""
    t, x = points.unbind(1)
    waves = [
        a * (-DIFFUSIVITY * (k * math.pi) ** 2 * t).exp() * (k * math.pi * x).sin()
        for k, a in INITIAL_TEMPERATURE_MODES.items()
    ]
    return torch.stack(waves).sum(0)


@workload.make_workload_builder
def heat_equation() -> workload.WorkloadTask:
    """Solve the heat equation u_t = diffusivity * u_xx by a network; the seed determines the collocation points.

    The training loss is the squared residual and the squared errors at time 0 and at both ends; the validation loss
    is the squared error as a fraction of the squared solution.

    Source: M. Raissi, P. Perdikaris and G. E. Karniadakis (2019), Physics-informed neural networks.
    """

    def stream(generator: torch.Generator) -> Iterator[Tensor]:
        while True:
            points = torch.rand(N_INTERIOR_POINTS + 3 * N_BOUNDARY_POINTS, 2, generator=generator)
            start, left, right = points[N_INTERIOR_POINTS:].split(N_BOUNDARY_POINTS)  # views
            start[:, 0], left[:, 1], right[:, 1] = 0, 0, 1
            yield points

    def loss(model: nn.Module, points: Tensor) -> Tensor:
        solution = exact_temperatures(points)
        if not model.training:
            error: Tensor = model(points).squeeze(1) - solution
            return error.square().sum() / solution.square().sum()
        u, u_t, _, u_xx = compute_derivatives(model, points)
        residual = (u_t - DIFFUSIVITY * u_xx)[:N_INTERIOR_POINTS]
        at_edges = F.mse_loss(u[N_INTERIOR_POINTS:], solution[N_INTERIOR_POINTS:])
        return F.mse_loss(residual, torch.zeros_like(residual)) + BOUNDARY_LOSS_WEIGHT * at_edges

    grid = torch.cartesian_prod(torch.linspace(0, 1, 25), torch.linspace(0, 1, 50))
    make_model = functools.partial(workload.make_mlp, 2, 32, 32, 32, 1, activation=nn.Tanh)
    return workload.WorkloadTask(make_model, loss, stream, grid)


VectorField = Callable[[Tensor], Tensor]  #: Maps states (n, d) to their time derivatives (n, d).


def integrate_runge_kutta(derivative: VectorField, states: Tensor, interval: float, n_steps: int) -> Tensor:
    """Integrate states (n, d) over time steps of equal intervals by the classical method: (n, n_steps, d)."""
    path = []
    for _ in range(n_steps):
        first = derivative(states)
        second = derivative(states + interval / 2 * first)
        third = derivative(states + interval / 2 * second)
        fourth = derivative(states + interval * third)
        states = states + interval / 6 * (first + 2 * (second + third) + fourth)
        path.append(states)
    return torch.stack(path, dim=1)


@workload.make_workload_builder
def coupled_pendulums() -> workload.WorkloadTask:
    """Learn the dynamics of two pendulums that are coupled by a spring, from their trajectories.

    Source: R. T. Q. Chen et al. (2018), Neural ordinary differential equations, arXiv 1806.07366.
    """
    # Stiffness of the spring between the two pendulums, whose natural frequency is 1.
    spring_stiffness = 0.5

    def time_derivative(states: Tensor) -> Tensor:
        angles, rates = states.chunk(2, dim=1)  # each (n, 2)
        return torch.cat([rates, spring_stiffness * (angles.flip(1) - angles) - angles.sin()], 1)

    initial_state_std = 1.5  # standard deviation of the initial angles and velocities
    first = initial_state_std * torch.randn(4000, 4, generator=workload.make_seed_zero_generator(), dtype=torch.float64)
    substeps = N_SUBSTEPS
    path = integrate_runge_kutta(time_derivative, first, OBSERVATION_INTERVAL / substeps, N_OBSERVATIONS * substeps)
    states = torch.cat([first.unsqueeze(1), path[:, substeps - 1 :: substeps]], 1).float()  # (n, 1 + observations, 4)
    validation, train = states.tensor_split([256])

    def loss(model: nn.Module, paths: Tensor) -> Tensor:
        return F.mse_loss(integrate_runge_kutta(model, paths[:, 0], OBSERVATION_INTERVAL, N_OBSERVATIONS), paths[:, 1:])

    make_model = functools.partial(workload.make_mlp, 4, 48, 48, 4, activation=nn.Tanh)
    return workload.make_row_task(make_model, loss, (train, validation), 64)
