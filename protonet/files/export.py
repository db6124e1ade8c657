"""Export models to ONNX files of standard operators, and to ``torch.export`` programs."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet._io import JsonDict, write_atomically
from protonet._text import to_printable
from protonet.errors import optional_packages, raise_input_error
from protonet.files.model import Model, serialize_model
from protonet.network import Encoder, PrototypeNetwork
from protonet.tables.columns.encoding import Encoding
from protonet.views.view import Array

#: Versions of the ONNX operator set and of the ONNX file format, which every runtime supports since 2022.
ONNX_OPSET, ONNX_IR_VERSION = 17, 8
#: The ONNX operator set that maps categories to numbers, and its version.
ONNX_ML_DOMAIN, ONNX_ML_OPSET = "ai.onnx.ml", 2


class GraphBuilder:
    """Builds an ONNX graph node by node, as views do through the protocol `protonet.views.view.OnnxGraph`."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Array | np.generic) -> str:
        """Add a constant to the graph and return its name."""
        from onnx import numpy_helper  # noqa: PLC0415 - optional

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), f"constant{len(self.constants)}"))
        return str(self.constants[-1].name)

    def add(self, operator: str, *inputs: str | Array | np.generic, output: str = "", **attributes: Any) -> str:
        """Add an operation to the graph and return the name of its output, a new one if ``output`` is "".

        Inputs are names, or arrays, which become constants.
        """
        from onnx import helper  # noqa: PLC0415 - optional

        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        output = output or f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [output], **attributes))
        return output

    def pad(self, rows: str, columns: int, value: float) -> str:
        """Append columns of a constant value to a matrix, and return the name of the result."""
        return self.add("Pad", rows, np.array([0, 0, 0, columns]), np.float32(value)) if columns else rows

    def cast(self, value: str, dtype: str) -> str:
        """Convert a value to the ONNX type ``dtype`` ("FLOAT", "DOUBLE" or "INT64"); return the name of the result."""
        from onnx import TensorProto  # noqa: PLC0415 - optional

        return self.add("Cast", value, to=getattr(TensorProto, dtype))

    def l1_distances(self, z: str, landmarks: Array) -> str:
        """Compute the L1 distance of each row of ``z`` (n, dim) to each of the landmarks (landmarks, dim) float64.

        A scan computes the distances (n, landmarks) one landmark at a time. All at once would take too much memory.
        """
        from onnx import TensorProto, helper  # noqa: PLC0415 - optional

        body = GraphBuilder()
        landmark = f"{z}_landmark"  # names within the scan must be unique in the whole graph
        difference = body.add("Sub", z, landmark, output=f"{landmark}_difference")
        absolute = body.add("Abs", difference, output=f"{landmark}_absolute")
        body.add("ReduceSum", absolute, self.constant(np.array([1])), keepdims=0, output=f"{landmark}_sum")
        scan_input = helper.make_tensor_value_info(landmark, TensorProto.DOUBLE, [landmarks.shape[1]])
        scan_output = helper.make_tensor_value_info(f"{landmark}_sum", TensorProto.DOUBLE, [None])
        scan = helper.make_graph(body.nodes, "l1_distance", [scan_input], [scan_output])
        return self.add("Scan", landmarks, body=scan, num_scan_inputs=1, scan_output_axes=[1])

    def look_up(self, texts: str, keys: Sequence[str], values: Sequence[int], default: int) -> str:
        """Map texts to the integers of equal keys, others to the default; return the name of the result (INT64)."""
        pairs: JsonDict = {"keys_strings": list(keys), "values_int64s": list(values)}
        return self.add("LabelEncoder", texts, domain=ONNX_ML_DOMAIN, default_int64=default, **pairs)

    @staticmethod
    def array(tensor: Tensor) -> Array:
        """Convert a tensor on any device to a NumPy array."""
        return tensor.detach().cpu().numpy()


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
            None if the network predicts such rows as others.

    Raises:
        MissingPackageError: onnx is missing.
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not a `protonet.Encoder`.
        InputError: `protonet.files.save_model` would raise it; or there are dates or texts, which ONNX cannot encode.
    """
    with optional_packages("onnx"):
        from onnx import TensorProto, helper  # noqa: PLC0415 - optional

    header, _ = serialize_model(model)
    network, encoder = model.network, model.network.encoder
    assert isinstance(encoder, Encoder)
    graph = GraphBuilder()
    dtype = TensorProto.DOUBLE if bool(encoder.origin.any()) else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("features", dtype, ["n", encoder.input_dim])]
    features, uninformative = "features", ""
    if model.encoding is not None and not model.encoding.is_fully_numeric:
        names = model.columns or tuple(f"column {index}" for index in range(len(model.encoding.columns)))
        features, uninformative = add_column_encoding(graph, names, model.encoding)
        inputs = []
        for name, column in zip(names, model.encoding.columns, strict=True):
            dtype = TensorProto.STRING if column.kind == "category" else TensorProto.DOUBLE
            inputs.append(helper.make_tensor_value_info(name, dtype, ["n", 1]))
    embedding = encoder.add_to_graph(graph, features)
    prototypes = graph.array(network.prototypes) / graph.array(network.temperature)
    logits = graph.add("MatMul", embedding, prototypes.T)
    if bool(network.offsets.any()):
        logits = graph.add("Add", logits, graph.array(network.offsets))
    if bool(network.has_zero_sum.any()):  # as in `PrototypeNetwork.mask_logits`
        has_prototype = network.has_samples & ~network.has_zero_sum
        lowest = graph.add("ReduceMin", graph.add("Where", graph.array(has_prototype), logits, np.float32(0)), axes=[1])
        logits = graph.add("Where", graph.array(network.has_zero_sum), graph.add("Sub", lowest, np.float32(1)), logits)
    logits = graph.add("Where", graph.array(network.has_samples), logits, np.finfo(np.float32).min)
    if uninformative and uninformative_logits is not None:
        logits = graph.add("Where", uninformative, graph.array(uninformative_logits.float()), logits)
    graph.add("Identity", logits, output="logits")
    graph.add("Softmax", "logits", axis=1, output="probabilities")

    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", len(prototypes)])
        for name in ("logits", "probabilities")
    ]
    onnx_graph = helper.make_graph(graph.nodes, "protonet", inputs, outputs, graph.constants)
    opsets = [helper.make_opsetid("", ONNX_OPSET)]
    opsets += [helper.make_opsetid(ONNX_ML_DOMAIN, ONNX_ML_OPSET)] * any(
        node.domain == ONNX_ML_DOMAIN for node in graph.nodes
    )
    onnx = helper.make_model(onnx_graph, opset_imports=opsets, ir_version=ONNX_IR_VERSION)
    helper.set_model_props(onnx, {name: json.dumps(header[name]) for name in ("classes", "columns")})
    write_atomically(path, lambda file: file.write(bytes(onnx.SerializeToString())))


def add_column_encoding(graph: GraphBuilder, names: Sequence[str], encoding: Encoding) -> tuple[str, str]:
    """Add the encoding of mixed columns to a graph, given the name of the input (n, 1) of each column.

    Returns:
        The name of the features (n, dim), and the name of the mask (n, 1) of rows in which each cell is missing or
            unknown to the encoding.
    """
    added = [column.add_to_graph(graph, name) for name, column in zip(names, encoding.columns, strict=True)]
    outputs = [output for output in added if output is not None]
    if len(outputs) < len(added):
        columns = zip(names, encoding.columns, added, strict=True)
        unsupported = [f"{to_printable(name)} ({column.kind})" for name, column, output in columns if output is None]
        remedy = "Fit again without these columns (--drop), or encode them as numbers first."
        raise_input_error("model", "have columns that ONNX can encode", ", ".join(unsupported), remedy)
    features, masks = zip(*outputs, strict=True)
    uninformative = functools.reduce(functools.partial(graph.add, "And"), masks)
    return graph.add("Concat", *features, axis=1), uninformative


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
