"""Sequences: a plain recurrent network forecasts chaos, and a state-space model reads pictures pixel by pixel."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, classify, on_rows, seed_0, workload
from analysis.optimizer_bench.workloads.data import SIDE, load_ascii
from analysis.optimizer_bench.workloads.models import Skip, States

DELAY, EULER, SAMPLE = 17.0, 0.1, 6.0  # units of time: of the equation, of its solution, and between two samples
SERIES, SERIES_HELD_OUT = 64, 4
SAMPLES, SETTLE = 400, 50  # of each series: that are kept, and before them, in which it settles
AHEAD, GRAIN = 14, 0.05  # samples from what is seen to what is forecast, and the standard deviation of its noise
LENGTH, HEARD = 24, 8  # samples of a window, and those before the first forecast that counts
HIDDEN, FORECASTS = 48, 16

GRID = 8  # pixels a side of the shrunk pictures that are read
CHANNELS, STATES, LAYERS = 16, 8, 2
STEPS = (0.01, 0.2)  # the bounds of channels' first time steps: the state fades by exp(-DECAY * step) a pixel
DECAY = 0.5
READ, READ_VALIDATION = 16, 64


def make_forecaster() -> nn.Sequential:
    """Make a tanh network that maps what was seen (n, length) to forecasts (n, length), each from what came before."""
    states = States(nn.RNN(1, HIDDEN, batch_first=True))
    return nn.Sequential(nn.Unflatten(1, (-1, 1)), states, nn.Linear(HIDDEN, 1), nn.Flatten())


def simulate(series: int, samples: int) -> Tensor:
    """Return chaotic series, each from its own past, in float64: (series, samples), ``SAMPLE`` apart.

    Source: M. Mackey and L. Glass (1977), Oscillation and chaos in physiological control systems: x'(t) =
        0.2 x(t - DELAY) / (1 + x(t - DELAY)^10) - 0.1 x(t), by Euler steps.
    """
    delay, sample = round(DELAY / EULER), round(SAMPLE / EULER)
    x = np.empty((delay + samples * sample, series))
    x[:delay] = np.linspace(0.5, 1.3, series)  # constant pasts
    for now in range(delay, len(x)):
        past = x[now - delay]
        x[now] = x[now - 1] + EULER * (0.2 * past / (1 + past**10) - 0.1 * x[now - 1])
    return torch.from_numpy(x[delay::sample].T.copy())


def draw_series() -> tuple[Tensor, Tensor]:
    """Return windows (n, 2, length), of what is seen and what it is ``AHEAD`` later: to train, and to validate on."""
    x = simulate(SERIES, SETTLE + SAMPLES)[:, SETTLE:].float()
    x = (x - x.mean()) / x.std()
    seen = x + GRAIN * torch.randn(x.shape, generator=seed_0())
    pairs = torch.stack((seen[:, :-AHEAD], x[:, AHEAD:]), 1)  # (series, 2, samples - ahead)
    windows = pairs.unfold(2, LENGTH, LENGTH // 2).transpose(1, 2)  # (series, windows of each, 2, length)
    validation, train = windows.tensor_split([SERIES_HELD_OUT])
    return train.flatten(0, 1), validation.flatten(0, 1)


@workload
def chain() -> Task:
    """Forecast noisy chaotic series; the loss is the share of the variance that is missed, from ``HEARD`` on."""

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        seen, later = windows.unbind(1)
        return F.mse_loss(model(seen)[:, HEARD:], later[:, HEARD:])

    return on_rows(make_forecaster, loss, draw_series(), FORECASTS)


class StateSpace(nn.Module):
    """A linear state-space model of each channel with a diagonal transition, as one long convolution.

    A state is x_t = exp(step * (i frequency - decay)) x_(t-1) + step * u_t; the output is the real part of the sum of
    a channel's states, each times its complex readout, and what goes through: a multiple of u_t.

    Source: A. Gu et al. (2022), On the parameterization and initialization of diagonal state space models,
        arXiv 2206.11893: S4D-Lin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.empty(CHANNELS, 1).uniform_(*map(math.log, STEPS)))
        self.log_decay = nn.Parameter(torch.full((CHANNELS, STATES), math.log(DECAY)))
        self.frequency = nn.Parameter(math.pi * torch.arange(STATES).repeat(CHANNELS, 1))
        self.readout = nn.Parameter(torch.randn(2, CHANNELS, STATES))
        self.through = nn.Parameter(torch.randn(CHANNELS))

    def make_kernel(self, length: int) -> Tensor:
        """Return what an input adds to the outputs 0, 1, ... steps later: (channels, length)."""
        time = self.log_step.exp() * torch.arange(length)  # (channels, length)
        decay = torch.exp(-self.log_decay.exp()[..., None] * time[:, None])  # (channels, states, length)
        angle = self.frequency[..., None] * time[:, None]
        real, imaginary = self.log_step.exp()[..., None] * self.readout[..., None]
        return torch.sum(decay * (real * angle.cos() - imaginary * angle.sin()), 1)

    def forward(self, u: Tensor) -> Tensor:
        """Map inputs (n, channels, length) to outputs of the same shape."""
        length = u.shape[2]
        spectra = [torch.fft.rfft(x, 2 * length) for x in (self.make_kernel(length), u)]
        remembered = torch.fft.irfft(torch.mul(*spectra), 2 * length)[..., :length]
        return torch.add(remembered, self.through[:, None] * u)


def make_reader(num_classes: int) -> nn.Sequential:
    """Make a network that maps sequences (n, 1, length) to logits (n, num_classes), from the mean over time.

    Its layers are a norm, a state-space model and a gated mix of channels, beside a skip.
    """

    def make_layer() -> Skip:
        mix = StateSpace(), nn.GELU(), nn.Conv1d(CHANNELS, 2 * CHANNELS, 1), nn.GLU(dim=1)
        return Skip(nn.BatchNorm1d(CHANNELS), *mix)

    layers = [make_layer() for _ in range(LAYERS)]
    pool = nn.AdaptiveAvgPool1d(1), nn.Flatten()
    return nn.Sequential(nn.Conv1d(1, CHANNELS, 1), *layers, *pool, nn.Linear(CHANNELS, num_classes))


def read_pixels(images: Tensor) -> Tensor:
    """Return pictures (n, side * side) as sequences of pixels, row by row: (n, 1, GRID * GRID)."""
    return F.adaptive_avg_pool2d(images.view(-1, 1, SIDE, SIDE), GRID).flatten(2)


@workload
def states() -> Task:
    """Tell characters apart of which one pixel is seen at a time."""
    data = load_ascii()
    make = functools.partial(make_reader, data.num_classes)
    return classify(make, read_pixels(data.x), data.y, held_out=READ_VALIDATION, size=READ)


WORKLOADS = {"chain": chain, "states": states}
