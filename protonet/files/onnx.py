"""A model as an ONNX file, of standard operators alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from protonet._checks import optional_packages
from protonet._writing import write_whole
from protonet.encoder import Encoder
from protonet.files.model import Model, check_model
from protonet.views.graph import Graph

#: The set of operators and the format of the file: any runtime since 2022 reads them.
OPSET, IR_VERSION = 17, 8


def export_onnx(path: str | Path, model: Model) -> None:
    """Write a model as an ONNX file, whole or not at all.

    Args:
        path: Of the file, in a folder that exists.
        model: On any device. What it holds beside network and names is left out.

    ``features`` (n, input_dim), of any n >= 1, give ``logits`` and ``probabilities`` (n, num_classes), all float32.
    ``classes`` and ``columns`` are in the file's metadata, as JSON.

    Raises:
        MissingPackageError: onnx is missing.
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not of this library.
        InputError: As `protonet.files.save_model`.
    """
    with optional_packages("export_onnx", 'pip install "protonet[onnx]"'):
        from onnx import TensorProto, helper  # noqa: PLC0415 - optional

    header, _, _ = check_model("export_onnx", model)
    network, encoder = model.network, model.network.encoder
    assert isinstance(encoder, Encoder)
    graph = Graph()
    embedding = encoder.add_to_graph(graph, "features")
    prototypes = graph.array(network.prototypes) / graph.array(network.temperature)
    logits = graph.add("MatMul", embedding, prototypes.T)
    graph.add("Where", graph.array(network.seen), logits, np.finfo(np.float32).min, output="logits")
    graph.add("Softmax", "logits", axis=1, output="probabilities")

    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", encoder.input_dim])
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", len(prototypes)])
        for name in ("logits", "probabilities")
    ]
    whole = helper.make_graph(graph.nodes, "protonet", [features], outputs, graph.constants)
    onnx = helper.make_model(whole, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    helper.set_model_props(onnx, {name: json.dumps(header[name]) for name in ("classes", "columns")})
    write_whole(path, lambda file: file.write(bytes(onnx.SerializeToString())))
