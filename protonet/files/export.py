"""Export models to ONNX files of standard operators, and to ``torch.export`` programs."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protonet._io import write_atomically
from protonet._text import to_printable
from protonet.errors import optional_packages, raise_input_error
from protonet.files.model import Model, serialize_model
from protonet.network import Encoder, PrototypeNetwork
from protonet.tables.columns.encoding import Encoding
from protonet.views.onnx_graph import ONNX_ML_DOMAIN, OnnxGraph

#: Versions of the ONNX operator set and of the ONNX file format, which every runtime supports since 2022.
ONNX_OPSET, ONNX_IR_VERSION = 17, 8
#: Version of the ONNX operator set that maps categories to numbers.
ONNX_ML_OPSET = 2


def export_onnx(path: str | Path, model: Model, uninformative_logits: Tensor | None = None) -> None:
    """Export a model to an ONNX file, which is written atomically.

    The input ``features`` (n, input_dim) with any n >= 1 gives ``logits`` and ``probabilities`` (n, num_classes), all
    float32. The features are float64 if columns are so far from 0 that float32 would lose their digits.

    Columns are mixed if they are not all numbers without missing values. A model of mixed columns has an input (n, 1)
    for each column instead: float64 with NaN for missing values, or text with "" for missing values. The metadata of
    the file hold ``classes`` and ``columns`` as JSON.

    Args:
        path: The file, in a folder that exists.
        model: The model, on any device. Only the network, the encoding and the names are exported.
        uninformative_logits: (num_classes,) logits of rows in which each cell is missing or unknown to the encoding;
            None if the network predicts such rows like other rows.

    Raises:
        MissingPackageError: onnx is missing.
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not a `protonet.Encoder`.
        InputError: `protonet.files.save_model` would raise it; or there are dates or texts, which ONNX cannot encode.
    """
    with optional_packages("onnx"):
        import onnx  # noqa: PLC0415 - optional
        from onnx import TensorProto, helper  # noqa: PLC0415

    header, _ = serialize_model(model)
    network, encoder = model.network, model.network.encoder
    assert isinstance(encoder, Encoder)
    graph = OnnxGraph(onnx)
    dtype = TensorProto.DOUBLE if bool(encoder.origin.any()) else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("features", dtype, ["n", encoder.input_dim])]
    features, uninformative_mask = "features", ""
    if model.encoding is not None and not model.encoding.is_fully_numeric:
        names = model.columns or tuple(f"column {index}" for index in range(len(model.encoding.columns)))
        features, uninformative_mask = add_column_encoding(graph, names, model.encoding)
        inputs = []
        for name, column in zip(names, model.encoding.columns, strict=True):
            dtype = TensorProto.STRING if column.column_type == "category" else TensorProto.DOUBLE
            inputs.append(helper.make_tensor_value_info(name, dtype, ["n", 1]))
    embedding = encoder.add_to_graph(graph, features)
    prototypes = network.prototypes / network.temperature
    logits = graph.add("MatMul", embedding, prototypes.T)
    if bool(network.offsets.any()):
        logits = graph.add("Add", logits, network.offsets)
    if bool(network.has_zero_sum.any()):  # as in `PrototypeNetwork.mask_logits`
        has_prototype = network.has_samples & ~network.has_zero_sum
        lowest = graph.add("ReduceMin", graph.add("Where", has_prototype, logits, np.float32(0)), axes=[1])
        logits = graph.add("Where", network.has_zero_sum, graph.add("Sub", lowest, np.float32(1)), logits)
    logits = graph.add("Where", network.has_samples, logits, np.finfo(np.float32).min)
    if uninformative_mask and uninformative_logits is not None:
        logits = graph.add("Where", uninformative_mask, uninformative_logits.float(), logits)
    graph.add("Identity", logits, output="logits")
    graph.add("Softmax", "logits", axis=1, output="probabilities")

    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", len(prototypes)])
        for name in ("logits", "probabilities")
    ]
    onnx_graph = helper.make_graph(graph.nodes, "protonet", inputs, outputs, graph.constants)
    opsets = [helper.make_opsetid("", ONNX_OPSET)]
    if any(node.domain == ONNX_ML_DOMAIN for node in graph.nodes):
        opsets.append(helper.make_opsetid(ONNX_ML_DOMAIN, ONNX_ML_OPSET))
    exported = helper.make_model(onnx_graph, opset_imports=opsets, ir_version=ONNX_IR_VERSION)
    helper.set_model_props(exported, {name: json.dumps(header[name]) for name in ("classes", "columns")})
    write_atomically(path, lambda file: file.write(bytes(exported.SerializeToString())))


def add_column_encoding(graph: OnnxGraph, names: Sequence[str], encoding: Encoding) -> tuple[str, str]:
    """Add the encoding of mixed columns to a graph, given the name of the input (n, 1) of each column.

    Returns:
        The name of the features (n, dim), and the name of the mask (n, 1) of rows in which each cell is missing or
            unknown to the encoding.
    """
    added = [column.add_to_graph(graph, name) for name, column in zip(names, encoding.columns, strict=True)]
    outputs = [output for output in added if output is not None]
    if len(outputs) < len(added):
        columns = zip(names, encoding.columns, added, strict=True)
        unsupported = [
            f"{to_printable(name)} ({column.column_type})" for name, column, output in columns if output is None
        ]
        remedy = "Fit again without these columns (--drop), or encode them as numbers first."
        raise_input_error("model", "have columns that ONNX can encode", ", ".join(unsupported), remedy)
    features, masks = zip(*outputs, strict=True)
    uninformative_mask = functools.reduce(functools.partial(graph.add, "And"), masks)
    return graph.add("Concat", *features, axis=1), uninformative_mask


#: Number of rows of the example batch that is traced. With 0 or 1 rows, torch.export would fix the number of rows.
TRACED_BATCH_ROWS = 2


@torch.no_grad()
def export_network(network: PrototypeNetwork) -> torch.export.ExportedProgram:
    """Export a network in eval mode as a program that maps features (n, input_dim), for any n >= 1, to logits.

    Tensors that the network computes and caches at its first call become constants of the program.
    """
    origin = network.encoder.origin
    assert isinstance(origin, Tensor)
    x = origin.to(torch.float64 if bool(origin.any()) else torch.float32).expand(TRACED_BATCH_ROWS, -1).clone()
    network(x)
    return torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))


def export_pt2(path: str | Path, model: Model) -> None:
    """Export a model to a ``.pt2`` file for ``torch.export.load``, which is written atomically.

    The program maps features (n, input_dim), for any n >= 1, to logits. The extra files ``classes`` and ``columns``
    hold the names as JSON.

    Args:
        path: The file, in a folder that exists.
        model: The model, on any device, with numeric columns without missing values.

    Raises:
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not a `protonet.Encoder`.
        InputError: `protonet.files.save_model` would raise it; or a column is not numeric, or may have missing values.
    """
    config, _ = serialize_model(model)
    if model.encoding is not None and not model.encoding.is_fully_numeric:
        remedy = "Export to ONNX, which encodes columns, or fit to numbers without gaps."
        raise_input_error("model", "have columns of numbers without gaps", "others", remedy)
    buffer = io.BytesIO()
    names = {name: json.dumps(config[name]) for name in ("classes", "columns")}
    torch.export.save(export_network(model.network), buffer, extra_files=names)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
