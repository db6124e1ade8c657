"""Exported models give the logits of the network: in onnxruntime, and as programs of torch.export."""

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
from torch import Tensor

from protonet import PrototypeNetwork, solve
from protonet.datasets import sample_family
from protonet.errors import InputError
from protonet.files import Model, export_onnx, export_pt2, load_model, save_model
from protonet.files.export import export_network
from protonet.fit.search import ModelSearch
from protonet.fit.solver import fit_solution
from protonet.network import Encoder
from protonet.tables.columns.category import Category
from protonet.tables.columns.encoding import Encoding
from protonet.views import VIEW_FAMILIES, kernel_ridge
from protonet.views.forest import ForestFamily
from protonet.views.kernel_ridge import KernelRidgeFamily
from protonet.views.linear import LinearFamily
from tests.strategies import blobs, make_model, make_network

X, Y = blobs(0)


def start_session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def check_session(session: Any, network: PrototypeNetwork, x: Tensor) -> None:
    logits, probabilities = session.run(None, {"features": x.numpy()})
    with torch.no_grad():
        expected = network(x)
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4)
    np.testing.assert_allclose(probabilities, expected.softmax(dim=1).numpy(), atol=1e-4)
    assert logits.dtype == probabilities.dtype == np.float32
    assert (logits.argmax(axis=1) == expected.argmax(dim=1).numpy()).all()


def test_all_kinds_of_views_in_batches_of_any_size(tmp_path: Path) -> None:
    model = make_model(raw=True)
    export_onnx(tmp_path / "x.onnx", model)
    onnx.checker.check_model(str(tmp_path / "x.onnx"), full_check=True)
    session = start_session(tmp_path / "x.onnx")
    for n in (1, 2, 300):
        check_session(session, model.network, 2 * torch.randn(n, 8, generator=torch.Generator().manual_seed(n)))
    assert list(tmp_path.iterdir()) == [tmp_path / "x.onnx"]
    texts = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(texts["classes"])) == model.classes
    assert tuple(json.loads(texts["columns"])) == model.columns


def test_networks_of_solve(tmp_path: Path) -> None:
    network = solve([(100 * X, Y)], None, {"param_limit": 1000, "num_classes": 7})
    export_onnx(str(tmp_path / "x"), Model(network=network, classes=tuple(range(7))))
    check_session(start_session(tmp_path / "x"), network, 100 * X)


def test_views_of_some_columns(tmp_path: Path) -> None:
    search = ModelSearch().without_family(ForestFamily).with_family(KernelRidgeFamily(()))  # kernels of the spans alone
    network = fit_solution((X, Y), search=search, column_spans=[(0, 3), (3, X.shape[1])]).network
    sources: Any = network.encoder.sources
    assert any(source.config.dim < source.config.input_dim for source in sources if hasattr(source.config, "first"))
    model = Model(network=network, classes=tuple(range(len(network.prototypes))))
    export_onnx(tmp_path / "x.onnx", model)
    check_session(start_session(tmp_path / "x.onnx"), network, X)
    save_model(tmp_path / "x.safetensors", model)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "x.safetensors").network(X), network(X), rtol=0, atol=0)


def test_clipped_features(tmp_path: Path) -> None:
    split = sample_family("heavy_tails", seed=0, n_train=12, n_val=0, num_classes=10, dim=96)
    search = ModelSearch(families=(LinearFamily(("raw", "clipped")),))
    network = fit_solution((split.train_x, split.train_y), search=search).network
    sources: Any = network.encoder.sources
    assert any(source.config.limit for source in sources)
    model = Model(network=network, classes=tuple(range(10)))
    export_onnx(tmp_path / "x.onnx", model)
    check_session(start_session(tmp_path / "x.onnx"), network, split.test_x)
    save_model(tmp_path / "x.safetensors", model)
    with torch.no_grad():
        loaded, expected = load_model(tmp_path / "x.safetensors").network(split.test_x), network(split.test_x)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


def test_quantized_distances_and_cancelled_classes_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    sums = model.network.sums.clone()
    sums[2] = 0  # the rows of a class cancel
    model.network.set_sums(sums, model.network.counts)
    exact = model.network(X)
    monkeypatch.setattr(kernel_ridge, "MAX_EXACT_COORDINATES", 0)
    model.network.load_state_dict(model.network.state_dict())  # which decides how coarsely to round
    assert not torch.equal(model.network(X), exact)
    export_onnx(tmp_path / "x", model)
    check_session(start_session(tmp_path / "x"), model.network, X)


def test_unsupported_exports_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^`model` must .* classes that are not 7 different names\."):
        export_onnx(tmp_path / "x", replace(make_model(), classes=("a", "b")))
    assert list(tmp_path.iterdir()) == []


def test_large_read_outs_cancel_as_they_do_in_the_network(tmp_path: Path) -> None:
    model = make_model()
    views: Any = model.network.encoder.views
    views[1].readout *= 1e5  # of nearly equal rows with a small ridge
    export_onnx(tmp_path / "x", model)
    check_session(start_session(tmp_path / "x"), model.network, X)


def draw(n: int) -> Tensor:
    return 2 * torch.randn(n, 8, generator=torch.Generator().manual_seed(n))


def check_program(program: Any, network: PrototypeNetwork, *sizes: int) -> None:
    for n in sizes:
        with torch.no_grad():
            torch.testing.assert_close(program(draw(n)), network(draw(n)), rtol=0, atol=1e-5)


def test_every_kind_of_view_is_exported_with_a_dynamic_batch(tmp_path: Path) -> None:
    model = make_model(raw=True)
    encoder: Any = model.network.encoder
    assert {view.kind for view in encoder.iterate_views()} == {view.kind for _, view in VIEW_FAMILIES}
    export_pt2(tmp_path / "x.pt2", model)
    names = {"classes": "", "columns": ""}
    program = torch.export.load(tmp_path / "x.pt2", extra_files=names)
    check_program(program.module(), model.network, 1, 3)
    assert tuple(json.loads(names["classes"])) == model.classes
    assert tuple(json.loads(names["columns"])) == model.columns
    assert list(tmp_path.iterdir()) == [tmp_path / "x.pt2"]


def test_rounded_distances_of_features_far_from_zero_are_exported_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_ridge, "MAX_EXACT_COORDINATES", 0)
    network = views_of(make_network(learned=False), "linear", "kernel_ridge")
    encoder: Any = network.encoder
    encoder.origin.fill_(1e7)
    module = export_network(network).module()
    x = draw(5).double() + 1e7
    torch.testing.assert_close(module(x), network(x), rtol=0, atol=1e-5)


def test_programs_of_mixed_columns_are_refused(tmp_path: Path) -> None:
    encoding = Encoding((Category(("a", "b", "c", "d"), (3, 3, 3, 3), 12),) * 2)
    with pytest.raises(InputError, match="`model` must have columns of numbers without gaps; got others"):
        export_pt2(tmp_path / "x.pt2", replace(make_model(), columns=None, encoding=encoding))


def views_of(network: PrototypeNetwork, *kinds: str) -> PrototypeNetwork:
    """Build a network from the views of some kinds of another network."""
    encoder = network.encoder
    assert isinstance(encoder, Encoder)
    views = [view for view in encoder.iterate_views() if view.kind in kinds]
    parts = sum(len(view.part_sizes) for view in views)
    some = Encoder(views, torch.full((parts,), 1 / parts), origin=torch.zeros(8), scale=1.5)
    result = PrototypeNetwork(some, embedding_dim=some.embedding_dim, num_classes=5)
    result.set_prototypes(*blobs(0))
    return result.eval()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of inductor itself
def test_a_network_is_compiled_without_graph_breaks() -> None:
    network = views_of(make_network(), "linear", "mlp")
    with torch.no_grad():
        compiled = torch.compile(network, fullgraph=True, dynamic=True, backend="aot_eager")
        check_program(compiled, network, 5, 40)


@pytest.mark.filterwarnings("ignore")  # of torch.onnx and onnxscript: deprecations of what they call
def test_torch_onnx_checks_the_exporter(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="it translates torch's operators")
    network = views_of(make_network(learned=False), "linear", "kernel_ridge", "forest")
    model = Model(network=network, classes=tuple(range(5)))
    export_onnx(tmp_path / "ours.onnx", model)
    n = torch.export.Dim("n", min=1)
    with torch.no_grad():
        program = torch.onnx.export(network, (draw(2),), dynamo=True, dynamic_shapes=({0: n},), verbose=False)
    assert program is not None
    program.save(tmp_path / "theirs.onnx")
    ours, theirs = start_session(tmp_path / "ours.onnx"), start_session(tmp_path / "theirs.onnx")
    for rows in (1, 60):
        x = draw(rows).numpy()
        logits = theirs.run(None, {theirs.get_inputs()[0].name: x})[0]
        np.testing.assert_allclose(ours.run(None, {"features": x})[0], logits, atol=2e-5)
        with torch.no_grad():
            np.testing.assert_allclose(network(draw(rows)).numpy(), logits, atol=1e-5)
