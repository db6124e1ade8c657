"""Views, networks, metrics and `solve` work on another device with equal results and few copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet import solve
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
from protonet.views import VIEW_FAMILIES
from protonet.views.fixed_convolution import FixedConvolution
from protonet.views.forest import Forest
from protonet.views.kernel_ridge import KERNEL_RIDGE_VIEWS
from protonet.views.linear import SCALINGS, Linear
from protonet.views.mlp import MLP
from protonet.views.tabular_transformer import TabularTransformer
from protonet.views.view import TrainingRows, View, ViewSpec
from tests.emulated_device import AWAY, Away, EmulatedDevice, Fake
from tests.model_cases import make_network
from tests.strategies import EVERY_KIND, LITTLE, PLAIN, blobs

X, LABELS = blobs(0)
EPISODES = torch.nn.functional.normalize(torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1)), dim=3)
SPECS: list[ViewSpec] = [*map(Linear, SCALINGS), Linear("standardised", (2, 6)), *KERNEL_RIDGE_VIEWS]
SPECS += [FixedConvolution(8, True, 0.1), FixedConvolution(4, False, 0.1), Forest(7), Forest(7, shifted=True)]
SPECS += [TabularTransformer(2), MLP(Linear("centred"), 2, 3, 4, 11)]
PLAIN_ROWS = TrainingRows(X, LABELS, 5, shifts=(0, 1, -1))
CASES = {
    "plain": PLAIN_ROWS,
    "weighted": replace(PLAIN_ROWS, weights=torch.linspace(0.5, 1, len(X), dtype=torch.float64)),
    "blocks": replace(PLAIN_ROWS, blocks=torch.tensor([0, 0, 1, 2, 2, 2, 2, 3])),
}
Use = Callable[..., Any]
#: Each mixes devices; torch's fake tensors reject the first three.
MIXED: list[Use] = [
    lambda x: x + torch.ones(30, 8),
    lambda x: x @ torch.ones(8, 2),
    lambda x: torch.cat([x, torch.ones(1, 8)]),
    lambda x: x.add_(torch.ones(8)),
    lambda x: x[torch.tensor([0, 2])],
    lambda x: torch.rand(3, generator=torch.Generator(), device=x.device),
    lambda x: x.numpy(),
]


def test_mixed_devices_are_rejected() -> None:
    for use in MIXED:
        with EmulatedDevice(), pytest.raises(RuntimeError):
            use(X.to(AWAY))
    for use in MIXED[:3]:
        with Fake(), pytest.raises(RuntimeError, match="two devices"):
            use(X.to(AWAY))


def fit(spec: ViewSpec, rows: TrainingRows) -> View:
    source = None if spec.source is None else spec.source.fit(rows, None).source
    return spec.fit(rows, source)


def embed(view: View, x: Tensor) -> Tensor:
    embedded: Tensor = view(x if view.source is None else view.source(x))
    return embedded


def test_every_kind_of_view_is_tried() -> None:
    assert {type(fit(spec, PLAIN_ROWS)) for spec in SPECS} == {view for _, view in VIEW_FAMILIES}


@pytest.mark.parametrize("case", CASES)
def test_views_are_fitted_and_map_rows_on_the_device_of_the_rows(case: str) -> None:
    rows, leaves = CASES[case], {Forest: {"view.to"}, MLP: {"mlp.train"}}
    for spec in SPECS:
        expected = embed(fit(spec, rows), X)
        with EmulatedDevice() as mode:
            sent = rows.to(AWAY)
            view = fit(spec, sent)
            parts = [view] if view.source is None else [view, view.source]
            assert {tensor.device for part in parts for tensor in part.state_dict().values()} == {AWAY}, spec
            assert set(mode.fetched) <= leaves.get(type(spec), set()), spec
            embed(view, sent.features)  # a view caches its constants
            mode.sent.clear()
            mode.fetched.clear()
            torch.testing.assert_close(embed(view, sent.features).cpu(), expected)
            assert mode.sent.keys() <= {"a test"}, spec
            assert mode.fetched.keys() <= {"a test"}, spec


def train(network: Any, x: Tensor, labels: Tensor) -> Tensor:
    optimizer = CustomOptimizer(network.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), labels).backward()
        optimizer.step()
    logits: Tensor = network(x)
    return logits.detach()


NETWORK_USES: dict[str, Use] = {
    "forward": lambda network, x, y: network(x),
    "add_class": lambda network, x, y: (network.add_class(x[:3]), network(x))[1],
    "set_prototypes": lambda network, x, y: (network.set_prototypes(x, y, torch.ones_like(y).double()), network(x))[1],
    "add_samples": lambda network, x, y: (network.add_samples(x, y + 1), network(x))[1],
    "arrange_classes": lambda network, x, y: (network.arrange_classes(y.new_tensor([2, 0, -1, 1])), network(x))[1],
    "score_known": lambda network, x, y: score_known(network(x).detach()),
    "class_means": lambda network, x, y: class_means(network.embed(x), y, 5)[0],
    "train": train,
}


@pytest.mark.parametrize("name", NETWORK_USES)
def test_a_network_computes_on_its_device(name: str) -> None:
    expected, network = NETWORK_USES[name](make_network(), X, LABELS), make_network()
    with EmulatedDevice() as mode:
        network, x, labels = network.to(AWAY), X.to(AWAY), LABELS.to(AWAY)
        network(x)
        mode.sent.clear()
        result = NETWORK_USES[name](network, x, labels)
        assert isinstance(result, Away)
        assert mode.sent.keys() <= {"a test", "stepper._adapt_factors"}  # the optimizer's layout, in the first step
        assert not mode.fetched
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)


LOGITS = X[:, :5]
METRICS: dict[str, Use] = {
    "measure": lambda logits, y, rows: vars(measure(logits, y)),
    "groups": lambda logits, y, rows: vars(measure(logits, y, Sample.of(30, y.double() + 1, y - 1))),
    "classes": lambda logits, y, rows: measure_classes(measure(logits, y).confusion),
    "bins": lambda logits, y, rows: fill_bins(logits.softmax(dim=1).amax(dim=1), logits.argmax(dim=1) == y),
    "unknown": lambda logits, y, rows: rejection_threshold(calibrate(score_known(logits)), 0.1),
    "auroc": lambda logits, y, rows: compute_auroc(*score_known(logits).split([10, 20])),
    "label errors": lambda logits, y, rows: score_label_errors(logits, y),
    "episodes": lambda logits, y, rows: episodic_loss(rows, n_shot=2, temperature=0.1, smoothing=0.1),
    "proxies": lambda logits, y, rows: cosine_cross_entropy(logits, y, logits[:5], temperature=0.1),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_and_losses_are_computed_on_the_device(name: str) -> None:
    expected = METRICS[name](LOGITS, LABELS, EPISODES)
    with EmulatedDevice() as mode:
        result = METRICS[name](LOGITS.to(AWAY), LABELS.to(AWAY), EPISODES.to(AWAY))
        assert mode.sent.keys() <= {"a test", "metrics.calibrate"}
        assert not mode.fetched
        result = torch.utils._pytree.tree_map_only(Tensor, lambda item: item.cpu(), result)
    torch.testing.assert_close(result, expected)


#: Functions that copy to the device: rows and folds, trees, random numbers, new constants. The guide names them.
SENT = {
    "view.to",
    "folds.to",
    "batches.move",
    "batches.observe",
    "batches._multiply",
    "stepper._adapt_factors",
    "tabular_transformer._encode_context",
    "tabular_transformer._make_codes",
    "encoder.apply",
    "network.set_offsets",
}
SENT |= {f"networks.{name}" for name in ("fit_rows", "_in_units", "decide_pooling", "pseudo_label_weights")}
SENT |= {"mlp.fit", "mlp.candidates", "mlp.train", "mlp._initial_proxies", "forest.fit", "kernel_ridge.fit"}
SENT |= {"kernel_ridge.__init__", "tabular_transformer.fit", "fixed_convolution.fit", "fixed_convolution._subsample"}
#: Functions that copy to the CPU: input checks, rows of trees, labels of episodes, evaluation.
FETCHED = {"_validation.check_device", "loading._check_batch", "view.to", "mlp.train", "evaluation.__post_init__"}
FETCHED |= {"evaluation.compute_fold_cosines", "kernel_ridge.cosines", "fixed_convolution.cosines"}
FETCHED |= {"networks.pseudo_label_weights", "networks.decide_pooling"}
PROBLEMS: dict[str, dict[str, Any]] = {
    "folds": {"train_loader": (X, LABELS), "effort": EVERY_KIND},
    "one row per class": {"train_loader": (X[LABELS.argsort()][::6], torch.arange(5)), "effort": LITTLE},
    "unlabelled rows": {"train_loader": (X[:20], LABELS[:20]), "unlabelled": X[20:] + 0.01, "effort": PLAIN},
    "rows far from zero": {"train_loader": (X.double() + 1e6, LABELS), "effort": PLAIN},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_solve_runs_on_the_given_device(name: str) -> None:
    problem = PROBLEMS[name]
    expected, (x, labels) = solve(**problem), problem["train_loader"]
    with EmulatedDevice() as mode:
        x = x.to(AWAY)
        network = solve(**(problem | {"train_loader": (x, labels.to(AWAY))}), metadata={"device": AWAY})
        assert {tensor.device for tensor in network.state_dict().values()} == {AWAY}
        assert mode.sent.keys() <= SENT | {"a test"}
        assert mode.fetched.keys() <= FETCHED
        torch.testing.assert_close(network(x).cpu(), expected(x.cpu()), rtol=1e-2, atol=1e-3)
