"""Workloads on sequences: the chaotic series against their equation, the state-space model against its recurrence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads import recurrent
from analysis.optimizer_bench.workloads.images import SIDE, load_ascii


def test_series_solve_their_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = recurrent.simulate(9, 40)
    torch.testing.assert_close(coarse[5], torch.ones(40, dtype=torch.float64))  # at 1, growth balances decay
    monkeypatch.setattr(recurrent, "EULER", 0.05)
    monkeypatch.setattr(recurrent, "SAMPLE", 0.05)
    fine = recurrent.simulate(9, 40 * 120)
    torch.testing.assert_close(fine[:, ::120], coarse, atol=0.03, rtol=0)
    past, now = fine[:, :-340], fine[:, 340:]  # 17 apart
    slope = (now[:, 2:] - now[:, :-2]) / 0.1
    expected = 0.2 * past / (1 + past**10) - 0.1 * now
    torch.testing.assert_close(slope, expected[:, 1:-1], atol=0.01, rtol=0)


def test_forecasts_are_ahead_of_what_is_seen() -> None:
    for windows in recurrent.load_series():
        seen, later = windows.unbind(1)
        noise = seen[:, recurrent.AHEAD :] - later[:, : -recurrent.AHEAD]
        assert abs(noise.std().item() / recurrent.GRAIN - 1) < 0.1
        assert abs(later.std().item() - 1) < 0.1


def test_series_to_validate_on_are_held_out() -> None:
    train, validation = (windows[:, 1] for windows in recurrent.load_series())
    each = len(train) // (recurrent.SERIES - recurrent.SERIES_HELD_OUT)
    assert len(validation) == each * recurrent.SERIES_HELD_OUT
    assert torch.cdist(validation, train).min() > 0


def test_the_state_space_model_is_a_recurrence() -> None:
    with initial_weights(0):
        model = recurrent.StateSpace().double()
    u = torch.randn(2, recurrent.CHANNELS, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = model.log_step.exp()
    turn = torch.exp(step * torch.complex(-model.log_decay.exp(), model.frequency))  # (channels, states)
    readout, state = torch.complex(*model.readout), torch.zeros(2, *turn.shape, dtype=torch.complex128)
    outputs = []
    for now in u.unbind(2):  # (n, channels)
        state = turn * state + (step.squeeze(1) * now)[..., None]
        outputs.append((readout * state).sum(2).real + model.through * now)
    torch.testing.assert_close(model(u), torch.stack(outputs, 2))


def test_pictures_are_read_row_by_row() -> None:
    sequences, size = recurrent.load_sequences(), recurrent.GRID
    assert sequences.shape == (len(load_ascii().y), 1, size**2)
    picture = load_ascii().x[7].view(SIDE, SIDE).numpy()
    edges = [(i * SIDE // size, -(-(i + 1) * SIDE // size)) for i in range(size)]
    means = [[picture[top:bottom, left:right].mean() for left, right in edges] for top, bottom in edges]
    np.testing.assert_allclose(sequences[7, 0], np.ravel(means), atol=1e-6)
