"""The tests' second device refuses what torch refuses on a GPU; metrics and losses work on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet.losses import class_means, cosine_cross_entropy, episodic_loss
from protonet.metrics import (
    Sample,
    calibrate,
    compute_auroc,
    fill_bins,
    measure,
    measure_classes,
    rejection_threshold,
    score_known,
    score_label_errors,
)
from protonet.optimizer import CustomOptimizer
from tests.emulated_device import AWAY, Away, EmulatedDevice, Fake, MixedDevicesError

X = torch.arange(12.0).view(3, 4)
#: What mixes devices, of rows (3, 4) elsewhere.
MIXED: dict[str, Callable[[Tensor], object]] = {
    "a sum": lambda x: x + torch.ones(3, 4),
    "a product": lambda x: x @ torch.ones(4, 2),
    "one of several": lambda x: torch.cat([x, torch.ones(1, 4)]),
    "a mask": lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool), 0),
}
#: What torch's fake tensors let pass, be it that a GPU refuses it, or copies it without being asked.
UNASKED = MIXED | {
    "in place": lambda x: x.add_(torch.ones(4)),
    "an index": lambda x: x[torch.tensor([0, 2])],
    "a generator": lambda x: torch.rand(3, generator=torch.Generator(), device=x.device),
}
#: What does not mix them.
ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda x: (2 * x + 1).where(x > 3, 0.5),
    "a number of the CPU": lambda x: x * torch.tensor(3.0),
    "made there": lambda x: x + x.new_ones(4) + torch.eye(4, device=x.device)[:3] + x.new_tensor([1.0, 2, 3, 4]),
    "in place": lambda x: x.clone().add_(x).index_fill_(0, torch.tensor([1], device=x.device), 7.0),
    "a view": lambda x: (y := x.clone(), y[:, 1:3].mul_(2))[0],
    "a list": lambda x: x[[0, 2]],
    "copied": lambda x: x + torch.ones(4).to(x.device),
    "gradients": lambda x: torch.func.grad(lambda y: (y @ x.T).square().sum())(x),
    "each alone": torch.vmap(lambda row: row.cumsum(0)),
}


@pytest.mark.parametrize("name", UNASKED)
def test_devices_are_not_mixed(name: str) -> None:
    with EmulatedDevice(), pytest.raises(MixedDevicesError):
        UNASKED[name](X.to(AWAY))


@pytest.mark.parametrize("name", MIXED)
def test_torch_says_so_too(name: str) -> None:
    with Fake(), pytest.raises(RuntimeError, match="two devices"):
        MIXED[name](X.to(AWAY))


def test_values_cannot_be_converted_to_an_array() -> None:
    with EmulatedDevice(), pytest.raises((RuntimeError, TypeError)):
        X.to(AWAY).numpy()


@pytest.mark.parametrize("name", ALONE)
def test_computations_on_the_emulated_device_equal_the_cpu(name: str) -> None:
    expected = ALONE[name](X.clone())
    with EmulatedDevice() as mode:
        result = ALONE[name](X.to(AWAY))
        assert isinstance(result, Away)
        assert torch.equal(result.host_values, expected)
        assert bool((result < 1e9).all())
        assert not mode.fetched
        assert mode.read == {"a test": 1}


LOGITS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 4
ROWS = torch.nn.functional.normalize(torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1)), dim=3)
USES: dict[str, Callable[..., Any]] = {
    "measure": lambda logits, labels, rows: measure(logits, labels),
    "groups": lambda logits, labels, rows: measure(logits, labels, Sample.of(30, labels.double() + 1, labels - 1)),
    "classes": lambda logits, labels, rows: measure_classes(measure(logits, labels).confusion),
    "bins": lambda logits, labels, rows: fill_bins(logits.softmax(dim=1).amax(dim=1), logits.argmax(dim=1) == labels),
    "unknown": lambda logits, labels, rows: rejection_threshold(calibrate(score_known(logits)), 0.1),
    "auroc": lambda logits, labels, rows: compute_auroc(*score_known(logits).split([10, 20])),
    "labels": lambda logits, labels, rows: score_label_errors(logits, labels),
    "episodes": lambda logits, labels, rows: episodic_loss(rows, n_shot=2, temperature=0.1, smoothing=0.1),
    "proxies": lambda logits, labels, rows: cosine_cross_entropy(logits, labels, rows[0, :, 0, :4], temperature=0.1),
    "means": lambda logits, labels, rows: class_means(logits, labels, 5),
}


@pytest.mark.parametrize("name", USES)
def test_metrics_and_losses_work_where_their_rows_are(name: str) -> None:
    expected = USES[name](LOGITS, LABELS, ROWS)
    with EmulatedDevice() as mode:
        result = USES[name](LOGITS.to(AWAY), LABELS.to(AWAY), ROWS.to(AWAY))
        assert mode.sent.keys() <= {"a test", "metrics.calibrate"}
        assert not mode.fetched
        result = torch.utils._pytree.tree_map_only(Tensor, lambda item: item.cpu(), result)
    torch.testing.assert_close(result, expected)


def test_the_optimizer_steps_where_its_weights_are() -> None:
    def take_steps(device: torch.device) -> Tensor:
        weights = [torch.nn.Parameter(rows.clone().to(device)) for rows in (X, X[0])]
        optimizer = CustomOptimizer(weights)
        for _ in range(5):
            optimizer.zero_grad()
            (weights[0] @ weights[1]).square().mean().backward()
            optimizer.step()
        return weights[0].detach().cpu()

    expected = take_steps(torch.device("cpu"))
    with EmulatedDevice():
        torch.testing.assert_close(take_steps(AWAY), expected)
