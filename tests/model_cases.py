"""Models with all kinds of views, fitted in milliseconds, for tests of model files."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import torch
import torch.nn.functional as F

from protonet import Encoder, PrototypeNetwork
from protonet.files.archive import CONFIG_ENTRY, TENSORS_ENTRY
from protonet.files.model import Model
from protonet.network import split_weights
from protonet.views.fixed_convolution import FixedConvolutionSpec, KernelBank
from protonet.views.forest import ForestSpec
from protonet.views.kernel_ridge import KernelRidgeSpec
from protonet.views.linear import LinearSpec
from protonet.views.mlp import MLPView, ResidualMLPs
from protonet.views.tabular_transformer import TabularTransformerSpec
from protonet.views.view import TrainingRows, View
from tests.strategies import blobs


def make_network(*, learned: bool = True, raw: bool = False) -> PrototypeNetwork:
    """Build a network with all kinds of views, of which three share a source.

    Args:
        learned: Whether to add learned views, which read the raw features.
        raw: Whether to add the raw features as a view.
    """
    x, y = blobs(0)
    rows = TrainingRows(x, y, 5)
    linear = {scaling: LinearSpec(scaling).fit(rows) for scaling in ("raw", "standardised", "whitened", "robust")}
    radial = [
        KernelRidgeSpec(LinearSpec("standardised"), 2),
        KernelRidgeSpec(LinearSpec("robust"), 2, apply_tanh=True),
        KernelRidgeSpec(LinearSpec("standardised"), 1),
    ]
    views: list[View] = [
        linear["standardised"],
        *(item.fit(rows, linear[item.source.scaling].source) for item in radial),
        ForestSpec(7).fit(rows),
        linear["whitened"],
    ]
    if raw:
        views.insert(0, linear["raw"])
    if learned:
        generator = torch.Generator().manual_seed(0)
        mlps = ResidualMLPs(2, 8, 3, 11, generator)
        torch.nn.init.normal_(mlps.last, generator=generator)
        views.append(MLPView.from_mlps(mlps, linear["raw"].source))
    sizes = [(8, True), (8, False), (4, True)]
    patterns = [FixedConvolutionSpec(width, shifts, 0.1) for width, shifts in sizes]
    views += [item.fit(rows, KernelBank.fit(rows.features, item.line_width)) for item in patterns]
    views.append(TabularTransformerSpec(2).fit(rows))
    encoder = Encoder(views, split_weights(views, [1.0] * len(views)), origin=torch.zeros(8), scale=1.5)
    network = PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=6, temperature=0.07)
    network.set_prototypes(x, y)  # class 5 does not occur
    network.add_class(F.normalize(x[:3] + 1, dim=1))
    return network.eval()


def make_model(*, learned: bool = True, raw: bool = False) -> Model:
    """Build a model with seven classes, eight columns, metadata and tensors of held-out rows."""
    classes = ("ant", "bee", "Käfer", "ждун", 'a "b",\nc', "", "new")
    columns = tuple(f"column {index}" for index in range(8))
    held_out = {"rows": torch.arange(6.0).reshape(2, 3).T, "labels": torch.tensor([1, 0]), "none": torch.zeros(0, 8)}
    metadata = {"accuracy": [0.5, 0.75], "views": {"raw": 1.0}, "text": "ä\n"}
    return Model(
        network=make_network(learned=learned, raw=raw),
        classes=classes,
        columns=columns,
        metadata=metadata,
        update_state=held_out,
    )


def split_archive(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Read the config and the serialized tensors from the bytes of a model file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return json.loads(archive.read(CONFIG_ENTRY)), archive.read(TENSORS_ENTRY)


def join_archive(config: Any, tensors: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """Write a model file of a config, which may be any JSON value, and of serialized tensors; return its bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(CONFIG_ENTRY, json.dumps(config))
        archive.writestr(TENSORS_ENTRY, tensors)
    return buffer.getvalue()
