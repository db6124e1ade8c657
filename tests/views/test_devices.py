"""Every view is fitted and maps rows where they are, and so does a network: elsewhere, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet import PrototypeNetwork, solve
from protonet.losses import class_means
from protonet.metrics import score_known
from protonet.optimizer import CustomOptimizer
from protonet.views import VIEW_FAMILIES
from protonet.views.fixed_convolution import FixedConvolution
from protonet.views.forest import Forest
from protonet.views.kernel_ridge import KERNEL_RIDGE_VIEWS
from protonet.views.linear import SCALINGS, Linear
from protonet.views.mlp import MLP
from protonet.views.tabular_transformer import TabularTransformer
from protonet.views.view import TrainingRows, View, ViewSpec
from tests.emulated_device import AWAY, EmulatedDevice
from tests.model_cases import make_network
from tests.strategies import EVERY_KIND, LITTLE, PLAIN, blobs

X, LABELS = blobs(0)
#: Specifications of every kind; a line is missing where a kind is, as a test below says.
EVERY: dict[str, ViewSpec] = {scaling: Linear(scaling) for scaling in SCALINGS} | {
    spec.name: spec for spec in KERNEL_RIDGE_VIEWS
}
EVERY |= {
    f"{spec.name} of {spec.width}": spec for spec in (FixedConvolution(8, True, 0.1), FixedConvolution(4, False, 0.1))
}
EVERY |= {"forest": Forest(7), "shifted forest": Forest(7, shifted=True), "context": TabularTransformer(2)}
EVERY |= {"span": Linear("standardised", (2, 6)), "mlp": MLP(Linear("centred"), 2, 3, 4, 11)}
#: What goes to the CPU and back, in the words of the guide.
NAMED = {"forest": {"view.to"}, "shifted forest": {"view.to"}, "mlp": {"training.train"}}


PLAIN_ROWS = TrainingRows(X, LABELS, 5, shifts=(0, 1, -1))
CASES = {
    "plain": PLAIN_ROWS,
    "weighted": PLAIN_ROWS._replace(weights=torch.linspace(0.5, 1, len(X), dtype=torch.float64)),
    "blocks": PLAIN_ROWS._replace(blocks=torch.tensor([0, 0, 1, 2, 2, 2, 2, 3])),
}


def fit(spec: ViewSpec, rows: TrainingRows) -> View:
    source = None if spec.source is None else spec.source.fit(rows, None).source
    return spec.fit(rows, source)


def embed(view: View, x: Tensor) -> Tensor:
    embedded: Tensor = view(x if view.source is None else view.source(x))
    return embedded


def test_every_kind_of_view_is_tried() -> None:
    views = {type(fit(spec, PLAIN_ROWS)) for spec in EVERY.values()}
    assert views == {view for _, view in VIEW_FAMILIES}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EVERY)
def test_a_view_is_fitted_where_its_rows_are(name: str, case: str) -> None:
    rows = CASES[case]
    expected = embed(fit(EVERY[name], rows), X)
    with EmulatedDevice() as mode:
        sent = rows.to(AWAY)
        view = fit(EVERY[name], sent)
        state = [*view.state_dict().values(), *(() if view.source is None else view.source.state_dict().values())]
        assert {tensor.device for tensor in state} == {AWAY}
        assert set(mode.fetched) <= NAMED.get(name, set())
        torch.testing.assert_close(embed(view, sent.features).cpu(), expected)  # attention rounds in another way


@pytest.mark.parametrize("name", EVERY)
def test_a_view_that_is_sent_maps_rows_there(name: str) -> None:
    view = fit(EVERY[name], PLAIN_ROWS)
    expected = embed(view, X)
    with EmulatedDevice() as mode:
        view, x = view.to(AWAY), X.to(AWAY)
        if view.source is not None:  # which the encoder holds, once for all views
            view.source.to(AWAY)
        embed(view, x)  # a view caches its constants
        mode.sent.clear()
        embedded = embed(view, x)
        assert mode.sent.keys() <= {"a test"}
        assert not mode.fetched
        torch.testing.assert_close(embedded.cpu(), expected)


def add_class(network: PrototypeNetwork, x: Tensor, labels: Tensor) -> Tensor:
    assert network.add_class(x[:3]) == 7
    logits: Tensor = network(x)
    return logits


def set_prototypes(network: PrototypeNetwork, x: Tensor, labels: Tensor) -> Tensor:
    network.set_prototypes(x, labels, torch.ones_like(labels).double())
    logits: Tensor = network(x)
    return logits


def add_samples(network: PrototypeNetwork, x: Tensor, labels: Tensor) -> Tensor:
    network.add_samples(x, labels + 1)
    logits: Tensor = network(x)
    return logits


def arrange(network: PrototypeNetwork, x: Tensor, labels: Tensor) -> Tensor:
    network.arrange_classes(labels.new_tensor([2, 0, -1, 1]))
    logits: Tensor = network(x)
    return logits


def reject(network: PrototypeNetwork, x: Tensor, labels: Tensor) -> Tensor:
    return score_known(network(x).detach())


def average(network: PrototypeNetwork, x: Tensor, labels: Tensor) -> Tensor:
    return class_means(network.embed(x), labels, 5)[0]


def train(network: PrototypeNetwork, x: Tensor, labels: Tensor) -> Tensor:
    optimizer = CustomOptimizer(network.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), labels).backward()
        optimizer.step()
    logits: Tensor = network(x)
    return logits.detach()


USES = [lambda network, x, labels: network(x), add_class, set_prototypes, add_samples, arrange, reject, average, train]


@pytest.mark.parametrize("use", USES)
def test_a_network_computes_on_its_device(use: Callable[[PrototypeNetwork, Tensor, Tensor], Tensor]) -> None:
    expected = use(make_network(), X, LABELS)
    network = make_network()
    with EmulatedDevice() as mode:
        network, x, labels = network.to(AWAY), X.to(AWAY), LABELS.to(AWAY)
        network(x)
        mode.sent.clear()
        result = use(network, x, labels)
        assert mode.sent.keys() <= {"a test"}
        assert not mode.fetched
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)


#: What solve() copies there, as the guide names it: rows and folds, once; trees; random numbers; what constants become.
SENT = {"view.to", "folds.to", "forest.fit", "networks.fit_rows", "networks._in_units", "networks.decide_pooling"}
SENT |= {"networks.pseudo_label_weights", "mlp.fit", "mlp.candidates", "training.train", "training._initial_proxies"}
SENT |= {
    "batches.move",
    "tabular_transformer.fit",
    "kernel_ridge.fit",
    "kernel_ridge.__init__",
    "fixed_convolution.fit",
    "fixed_convolution._subsample",
}
SENT |= {"cells._make_codes", "encoder.apply", "network.set_offsets"}
#: Functions that copy to the CPU: input checks, rows of trees, labels of episodes, evaluation.
FETCHED = {"_validation.check_device", "loading._check_batch", "view.to", "training.train", "evaluation.__post_init__"}
FETCHED |= {
    "evaluation.compute_fold_cosines",
    "kernel_ridge.cosines",
    "fixed_convolution.cosines",
    "networks.pseudo_label_weights",
    "networks.decide_pooling",
}
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
