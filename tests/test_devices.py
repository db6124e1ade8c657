"""Views, networks, metrics and `solve` work on another device.

Torch's `FakeTensorMode` has torch's device rules, but no values. Fits depend on values: an emulated device has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from protonet import Encoder, PrototypeNetwork, metrics
from protonet.fit.search import ModelSearch
from protonet.losses import class_means, cosine_cross_entropy, episodic_loss
from protonet.network import split_weights
from protonet.views import VIEW_FAMILIES
from protonet.views.density import DensitySpec
from protonet.views.fixed_convolution import FixedConvolutionSpec
from protonet.views.forest import ForestSpec
from protonet.views.kernel_ridge import KERNEL_RIDGE_SPECS, KernelRidgeFamily
from protonet.views.linear import FEATURE_SCALINGS, LinearFamily, LinearSpec
from protonet.views.mlp import MLPFamily, MLPSpec
from protonet.views.tabular_transformer import TabularTransformerSpec
from protonet.views.view import TrainingRows, View, ViewSpec
from tests.emulated_device import AWAY, EmulatedDevice
from tests.strategies import blobs, solve_with

X, LABELS = blobs(0)
EPISODES = torch.nn.functional.normalize(torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(1)), dim=3)
SPECS: list[ViewSpec] = [*map(LinearSpec, FEATURE_SCALINGS), LinearSpec("standardised", (2, 6))]
SPECS += KERNEL_RIDGE_SPECS[::2]
SPECS += [FixedConvolutionSpec(8, True, 0.1), FixedConvolutionSpec(4, False, 0.1)]
SPECS += [ForestSpec(7), ForestSpec(7, use_shifts=True)]
SPECS += [DensitySpec(LinearSpec("standardised"), per_row=per_row) for per_row in (True, False)]
SPECS += [TabularTransformerSpec(), MLPSpec(LinearSpec("centred"), 2, 3, 4, 11)]
PLAIN_ROWS = TrainingRows(X, LABELS, 5, shifts=(0, 1, -1))
WEIGHTED_ROWS = replace(
    PLAIN_ROWS,
    weights=torch.linspace(0.5, 1, len(X), dtype=torch.float64),
    column_indices=torch.tensor([0, 0, 1, 2, 2, 2, 2, 3]),
)
#: A search with linear views, a kernel and an MLP, each as short as possible.
SHORT = replace(ModelSearch(), n_folds=2, families=(LinearFamily(("raw", "whitened")),))
kernels, mlps = KernelRidgeFamily(KERNEL_RIDGE_SPECS[:1], (2.0,), (0.1,)), MLPFamily(1, (3,))
SHORT = replace(SHORT, families=(*SHORT.families, kernels, mlps))
#: Functions that copy to the CPU: input checks, rows of trees, labels of episodes, evaluation.
FETCHED = {"_validation.check_device", "training_set._to_tensor", "view.to", "mlp.train_mlps"}
FETCHED |= {"evaluation.__post_init__"}
FETCHED |= {"evaluation.compute_fold_cosines", "kernel_ridge.cosines", "fixed_convolution.cosines"}
FETCHED |= {"networks.predict_pseudo_labels", "networks.predict_fold"}


class NoValues(FakeTensorMode):
    """Torch's device rules on tensors without values: each value that is read is 0, and all rows are selected."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # real tensors are on the CPU

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Replace operations whose results depend on values; run any other operation."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        if func is torch.ops.aten.nonzero.default:
            return torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.int64, device=args[0].device)
        if func is torch.ops.aten.bincount.default:
            weights, length = args[1] if len(args) > 1 else None, (kwargs or {}).get("minlength") or args[2]
            return torch.ones(length, dtype=torch.int64 if weights is None else weights.dtype, device=AWAY)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def fit(spec: ViewSpec, rows: TrainingRows) -> View:
    source = None if spec.source is None else spec.source.fit(rows, None).source
    return spec.fit(rows, source)


def embed(view: View, x: Tensor) -> Tensor:
    embedded: Tensor = view(x if view.source is None else view.source(x))
    return embedded


def test_mixed_devices_are_rejected() -> None:
    for use in (lambda x: x + torch.ones(30, 8), lambda x: x @ torch.ones(8, 2), lambda x: torch.cat([x, X])):
        with NoValues(), pytest.raises(RuntimeError, match="two devices"):
            use(X.to(AWAY))


def test_networks_metrics_and_losses_compute_on_the_device_of_their_tensors() -> None:
    views = [fit(spec, PLAIN_ROWS) for spec in SPECS]
    assert {type(view) for view in views} == {view for _, view in VIEW_FAMILIES}
    # The number of columns of a transformer depends on values.
    views = [view for view in views if view.kind != "tabular_transformer"]
    encoder = Encoder(views, split_weights(views, [1.0] * len(views)), origin=torch.zeros(8))
    network = PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=5)
    with NoValues():
        for module in network.modules():
            parts: Any = (module._buffers, module._parameters)
            for tensors in parts:
                tensors.update({name: value.detach().to(AWAY) for name, value in tensors.items() if value is not None})
    uses: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda x, y, rows: network(x),
        lambda x, y, rows: (network.set_prototypes(x, y, torch.ones_like(y).double()), network(x))[1],
        lambda x, y, rows: (network.add_samples(x, y), network(x))[1],
        lambda x, y, rows: (network.arrange_classes(y.new_tensor([2, 0, -1, 1])), network(x))[1],
        lambda x, y, rows: (network.add_class(x[:3]), network(x))[1],
        lambda x, y, rows: metrics.calibrate_known_scores(metrics.score_known_class(network(x))),
        lambda x, y, rows: metrics.score_label_errors(x, y),
        lambda x, y, rows: metrics.sum_confidence_bins(x.softmax(dim=1).amax(dim=1), y > 0),
        lambda x, y, rows: metrics.compute_class_metrics(y.new_ones(5, 5)).recall,
        lambda x, y, rows: class_means(x, y, 5)[0],
        lambda x, y, rows: episodic_loss(rows, n_shot=2, temperature=0.1, smoothing=0.1),
        lambda x, y, rows: cosine_cross_entropy(x, y, x[:5], temperature=0.1),
    ]
    with NoValues():
        x, y, rows = X.to(AWAY), LABELS.to(AWAY), EPISODES.to(AWAY)
        assert all(use(x, y, rows).device == AWAY for use in uses)
        metrics.compute_auroc(*metrics.score_known_class(x).split([10, 20]))


@pytest.mark.parametrize("rows", [PLAIN_ROWS, WEIGHTED_ROWS], ids=["plain", "weighted"])
def test_views_are_fitted_and_map_rows_on_the_device_of_the_rows(rows: TrainingRows) -> None:
    leaves = {DensitySpec: {"density._choose"}, ForestSpec: {"view.to"}, MLPSpec: {"mlp.train_mlps"}}
    for spec in SPECS:
        expected = embed(fit(spec, rows), X)
        with EmulatedDevice() as mode:
            sent = rows.to(AWAY)
            view = fit(spec, sent)
            parts = [view] if view.source is None else [view, view.source]
            assert {tensor.device for part in parts for tensor in part.state_dict().values()} == {AWAY}, spec
            assert set(mode.fetched) <= leaves.get(type(spec), set()), spec
            torch.testing.assert_close(embed(view, sent.features).cpu(), expected)


def test_solve_runs_on_the_given_device() -> None:
    x, more = X[:20].double() + 1e6, X[20:].double() + 1e6
    expected = solve_with((x, LABELS[:20]), search=SHORT, unlabelled=more)
    with EmulatedDevice() as mode:
        sent, metadata = (x.to(AWAY), LABELS[:20].to(AWAY)), {"device": AWAY}
        network = solve_with(sent, None, metadata, search=SHORT, unlabelled=more)
        assert {tensor.device for tensor in network.state_dict().values()} == {AWAY}
        assert mode.fetched.keys() <= FETCHED
        torch.testing.assert_close(network(sent[0]).cpu(), expected(x), rtol=1e-2, atol=1e-3)
