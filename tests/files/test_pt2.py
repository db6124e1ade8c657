"""Networks are ordinary modules: torch.export, torch.compile and torch.onnx give what the network gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protonet import PrototypeNetwork
from protonet.encoder import Encoder
from protonet.errors import InputError
from protonet.files import Model, export_onnx, export_pt2
from protonet.files.export import export_network
from protonet.tables.columns.category import Category
from protonet.tables.columns.encoding import Encoding
from protonet.views import VIEW_FAMILIES, kernel_ridge
from tests.files.test_onnx import start
from tests.model_cases import make_model, make_network
from tests.strategies import blobs

X, _ = blobs(0)


def draw(n: int) -> Tensor:
    return 2 * torch.randn(n, 8, generator=torch.Generator().manual_seed(n))


def check(ours: Any, network: PrototypeNetwork, *sizes: int) -> None:
    for n in sizes:
        with torch.no_grad():
            torch.testing.assert_close(ours(draw(n)), network(draw(n)), rtol=0, atol=1e-5)


def test_every_kind_of_view_is_exported_with_a_dynamic_batch(tmp_path: Path) -> None:
    model = make_model(raw=True)
    encoder: Any = model.network.encoder
    assert {view.kind for view in encoder.list_views()} == {view.kind for _, view in VIEW_FAMILIES}
    export_pt2(tmp_path / "x.pt2", model)
    names = {"classes": "", "columns": ""}
    program = torch.export.load(tmp_path / "x.pt2", extra_files=names)
    check(program.module(), model.network, 1, 3)
    assert [json.loads(names[name]) for name in ("classes", "columns")] == [
        list(model.classes),
        list(model.columns or ()),
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "x.pt2"]


def test_rounded_distances_of_features_far_from_zero_are_exported_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_ridge, "KERNEL_RIDGE", kernel_ridge.KernelRidgeRules(exact_coordinates=0))
    network = views_of(make_network(learned=False), "linear", "kernel_ridge")
    encoder: Any = network.encoder
    encoder.origin.fill_(1e7)
    module = export_network(network).module()
    x = draw(5).double() + 1e7
    torch.testing.assert_close(module(x), network(x), rtol=0, atol=1e-5)


def test_mixed_columns_are_refused(tmp_path: Path) -> None:
    column = Category(("a", "b", "c"), (4, 4, 4), 12)
    network = make_network(learned=False)
    encoder = network.encoder
    assert isinstance(encoder, Encoder)
    encoding = Encoding((column,) * 2)
    assert not encoding.plain
    model = Model(network=network, classes=tuple(range(7)), encoding=encoding)
    with pytest.raises(InputError, match="`model` must "):
        export_pt2(tmp_path / "x.pt2", model)


def views_of(network: PrototypeNetwork, *kinds: str) -> PrototypeNetwork:
    """Return a network with the views of some kinds alone."""
    encoder = network.encoder
    assert isinstance(encoder, Encoder)
    views = [view for view in encoder.list_views() if view.kind in kinds]
    parts = sum(len(view.sizes) for view in views)
    some = Encoder(views, torch.full((parts,), 1 / parts), origin=torch.zeros(8), scale=1.5)
    result = PrototypeNetwork(some, embedding_dim=some.embedding_dim, num_classes=5)
    result.set_prototypes(*blobs(0))
    return result.eval()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of inductor itself
def test_a_network_is_compiled_without_graph_breaks() -> None:
    network = views_of(make_network(), "linear", "mlp")
    with torch.no_grad():
        compiled = torch.compile(network, fullgraph=True, dynamic=True, backend="aot_eager")
        check(compiled, network, 5, 40)


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
    ours, theirs = start(tmp_path / "ours.onnx"), start(tmp_path / "theirs.onnx")
    for rows in (1, 60):
        x = draw(rows).numpy()
        logits = theirs.run(None, {theirs.get_inputs()[0].name: x})[0]
        np.testing.assert_allclose(ours.run(None, {"features": x})[0], logits, atol=2e-5)
        with torch.no_grad():
            np.testing.assert_allclose(network(draw(rows)).numpy(), logits, atol=1e-5)
