"""The exported graph gives what the network gives, in onnxruntime."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from protonet import PrototypeNetwork, solve
from protonet.errors import InputError, InputTypeError
from protonet.files import Model, export_onnx, load_model, save_model
from protonet.fit.search import EFFORTS
from protonet.fit.solver import solve_problem
from protonet.views import kernel_ridge
from protonet.views.tabular_transformer import TabularTransformerFamily
from tests.model_cases import make_model
from tests.strategies import blobs

X, Y = blobs(0)


def start(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def check(session: Any, network: PrototypeNetwork, x: Tensor) -> None:
    logits, probabilities = session.run(None, {"features": x.numpy()})
    with torch.no_grad():
        expected = network(x)
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)
    np.testing.assert_allclose(probabilities, expected.softmax(dim=1).numpy(), atol=1e-4)
    assert logits.dtype == probabilities.dtype == np.float32
    assert (logits.argmax(axis=1) == expected.argmax(dim=1).numpy()).all()


@pytest.mark.parametrize(("learned", "raw"), [(True, True), (False, False)])
def test_all_kinds_of_views_in_batches_of_any_size(tmp_path: Path, learned: bool, raw: bool) -> None:
    model = make_model(learned=learned, raw=raw)
    export_onnx(tmp_path / "x.onnx", model)
    onnx.checker.check_model(str(tmp_path / "x.onnx"), full_check=True)
    session = start(tmp_path / "x.onnx")
    for n in (1, 2, 300):
        check(session, model.network, 2 * torch.randn(n, 8, generator=torch.Generator().manual_seed(n)))
    assert list(tmp_path.iterdir()) == [tmp_path / "x.onnx"]
    texts = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(texts["classes"])) == model.classes
    assert tuple(json.loads(texts["columns"])) == model.columns


def test_networks_of_solve(tmp_path: Path) -> None:
    network = solve([(100 * X, Y)], None, {"param_limit": 1000, "num_classes": 7}, effort="fast")
    export_onnx(str(tmp_path / "x"), Model(network=network, classes=tuple(range(7))))
    check(start(tmp_path / "x"), network, 100 * X)


def test_views_of_some_columns(tmp_path: Path) -> None:
    search = EFFORTS["fast"].without(TabularTransformerFamily)
    network = solve_problem((X, Y), effort=search, spans=[(0, 3), (3, X.shape[1])]).network
    sources: Any = network.encoder.sources
    assert any(source.config.dim < source.config.input_dim for source in sources if hasattr(source.config, "first"))
    model = Model(network=network, classes=tuple(range(len(network.prototypes))))
    export_onnx(tmp_path / "x.onnx", model)
    check(start(tmp_path / "x.onnx"), network, X)
    save_model(tmp_path / "x.safetensors", model)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "x.safetensors").network(X), network(X), rtol=0, atol=0)


def test_quantized_distances_and_cancelled_classes_equal_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    sums = model.network.sums.clone()
    sums[2] = 0  # the rows of a class cancel
    model.network.set_sums(sums, model.network.counts)
    exact = model.network(X)
    monkeypatch.setattr(kernel_ridge, "KERNEL_RIDGE", replace(kernel_ridge.KERNEL_RIDGE, exact_coordinates=0))
    model.network.load_state_dict(model.network.state_dict())  # which decides how coarsely to round
    assert not torch.equal(model.network(X), exact)
    export_onnx(tmp_path / "x", model)
    check(start(tmp_path / "x"), model.network, X)


def test_unsupported_exports_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^`model` must .* classes that are not 7 different names\."):
        export_onnx(tmp_path / "x", replace(make_model(), classes=("a", "b")))
    network = PrototypeNetwork(nn.Linear(8, 3), embedding_dim=3, num_classes=2)
    with pytest.raises(InputTypeError, match=r"`model` must hold a network with a protonet\.Encoder; got Linear"):
        export_onnx(tmp_path / "x", Model(network=network, classes=("a", "b")))
    assert list(tmp_path.iterdir()) == []


def test_large_read_outs_cancel_as_they_do_in_the_network(tmp_path: Path) -> None:
    model = make_model()
    views: Any = model.network.encoder.views
    views[1].readout *= 1e5  # of nearly equal rows with a small ridge
    export_onnx(tmp_path / "x", model)
    check(start(tmp_path / "x"), model.network, X)
