"""A model as an ONNX file, of standard operators alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from protonet._text import to_printable
from protonet._writing import write_whole
from protonet.encoder import Encoder
from protonet.errors import optional_packages, raise_input_error
from protonet.files.model import Model, check_model
from protonet.tables.columns.encoding import Encoding
from protonet.views.view import Array

#: The set of operators and the format of the file: any runtime since 2022 reads them.
OPSET, IR_VERSION = 17, 8
#: The set of operators of tables, and its version.
LOOK_UPS, LOOK_UPS_VERSION = "ai.onnx.ml", 2


class Nodes:
    """The nodes and constants of a graph, in the order in which they are computed: a `protonet.views.view.Graph`."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Array | np.generic) -> str:
        """Add a constant and return its name."""
        from onnx import numpy_helper  # noqa: PLC0415 - optional

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), f"constant{len(self.constants)}"))
        return str(self.constants[-1].name)

    def add(self, operator: str, *inputs: str | Array | np.generic, output: str = "", **attributes: Any) -> str:
        """Add a node and return its output's name."""
        from onnx import helper  # noqa: PLC0415 - optional

        names = [self.constant(each) if not isinstance(each, str) else each for each in inputs]
        output = output or f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [output], **attributes))
        return output

    def pad(self, rows: str, columns: int, value: float) -> str:
        """Add constant columns to rows, if any."""
        return self.add("Pad", rows, np.array([0, 0, 0, columns]), np.float32(value)) if columns else rows

    def cast(self, value: str, dtype: str) -> str:
        """Convert a value."""
        from onnx import TensorProto  # noqa: PLC0415 - optional

        return self.add("Cast", value, to=getattr(TensorProto, dtype))

    def l1_distances(self, z: str, landmarks: Array) -> str:
        """Add the sums of absolute differences, landmark by landmark: all at once would not fit."""
        from onnx import TensorProto, helper  # noqa: PLC0415 - optional

        body = Nodes()
        own = f"{z}_landmark"  # names are one set, those within the scan as well
        difference = body.add("Abs", body.add("Sub", z, own, output=f"{own}_less"), output=f"{own}_apart")
        body.add("ReduceSum", difference, self.constant(np.array([1])), keepdims=0, output=f"{own}_sum")
        landmark = helper.make_tensor_value_info(own, TensorProto.DOUBLE, [landmarks.shape[1]])
        total = helper.make_tensor_value_info(f"{own}_sum", TensorProto.DOUBLE, [None])
        scanned = helper.make_graph(body.nodes, "city_block", [landmark], [total])
        return self.add("Scan", landmarks, body=scanned, num_scan_inputs=1, scan_output_axes=[1])

    def look_up(self, texts: str, keys: Sequence[str], values: Sequence[int], otherwise: int) -> str:
        """Add the value of each text."""
        pairs: dict[str, Any] = {"keys_strings": list(keys), "values_int64s": list(values)}
        return self.add("LabelEncoder", texts, domain=LOOK_UPS, default_int64=otherwise, **pairs)

    @staticmethod
    def array(tensor: Tensor) -> Array:
        """Return a tensor as an array."""
        return tensor.detach().cpu().numpy()


def export_onnx(path: str | Path, model: Model) -> None:
    """Write a model as an ONNX file, whole or not at all.

    Args:
        path: Of the file, in a folder that exists.
        model: On any device. What it holds beside network and names is left out.

    ``features`` (n, input_dim), of any n >= 1, give ``logits`` and ``probabilities`` (n, num_classes), all float32;
    the features are float64 where columns lie so far from 0 that float32 would lose their digits. A model of mixed
    columns has an input (n, 1) of each column's name instead: float64, NaN for a gap, or text, "" for a gap.
    ``classes`` and ``columns`` are in the file's metadata, as JSON.

    Raises:
        MissingPackageError: onnx is missing.
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not of this library.
        InputError: As `protonet.files.save_model`; or there are dates or texts, which ONNX cannot take apart.
    """
    with optional_packages("onnx"):
        from onnx import TensorProto, helper  # noqa: PLC0415 - optional

    header, _ = check_model(model)
    network, encoder = model.network, model.network.encoder
    assert isinstance(encoder, Encoder)
    graph = Nodes()
    kind = TensorProto.DOUBLE if bool(encoder.origin.any()) else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("features", kind, ["n", encoder.input_dim])]
    features = "features"
    if model.encoding is not None and not model.encoding.plain:
        names = model.columns or tuple(f"column {number}" for number in range(len(model.encoding.columns)))
        features = add_columns(graph, names, model.encoding)
        kinds = [
            TensorProto.STRING if column.kind == "category" else TensorProto.DOUBLE for column in model.encoding.columns
        ]
        inputs = [helper.make_tensor_value_info(name, kind, ["n", 1]) for name, kind in zip(names, kinds, strict=True)]
    embedding = encoder.add_to_graph(graph, features)
    prototypes = graph.array(network.prototypes) / graph.array(network.temperature)
    logits = graph.add("MatMul", embedding, prototypes.T)
    if bool(network.cancelled.any()):  # as in `PrototypeNetwork.mask_logits`
        rated = network.seen & ~network.cancelled
        least = graph.add("ReduceMin", graph.add("Where", graph.array(rated), logits, np.float32(0)), axes=[1])
        logits = graph.add("Where", graph.array(network.cancelled), graph.add("Sub", least, np.float32(1)), logits)
    graph.add("Where", graph.array(network.seen), logits, np.finfo(np.float32).min, output="logits")
    graph.add("Softmax", "logits", axis=1, output="probabilities")

    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", len(prototypes)])
        for name in ("logits", "probabilities")
    ]
    whole = helper.make_graph(graph.nodes, "protonet", inputs, outputs, graph.constants)
    opsets = [helper.make_opsetid("", OPSET)]
    opsets += [helper.make_opsetid(LOOK_UPS, LOOK_UPS_VERSION)] * any(node.domain == LOOK_UPS for node in graph.nodes)
    onnx = helper.make_model(whole, opset_imports=opsets, ir_version=IR_VERSION)
    helper.set_model_props(onnx, {name: json.dumps(header[name]) for name in ("classes", "columns")})
    write_whole(path, lambda file: file.write(bytes(onnx.SerializeToString())))


def add_columns(graph: Nodes, names: Sequence[str], encoding: Encoding) -> str:
    """Add the features of mixed columns, whose cells are the inputs of their names; return what holds them.

    Raises:
        InputError: There are columns that ONNX cannot take apart.
    """
    parts, impossible = [], []
    for name, column in zip(names, encoding.columns, strict=True):
        part = column.add_to_graph(graph, name)
        if part is None:
            impossible.append(f"{to_printable(name)} ({column.kind})")
        else:
            parts.append(part)
    if impossible:
        remedy = "Fit again without these columns (--drop), or encode them as numbers first."
        raise_input_error("model", "have columns that ONNX can take apart", ", ".join(impossible), remedy)
    return graph.add("Concat", *parts, axis=1)
