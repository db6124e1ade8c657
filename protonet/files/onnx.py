"""A network as an ONNX graph, of standard operators alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

#: The set of operators and the format of the file: any runtime since 2022 reads them.
OPSET, IR_VERSION = 17, 8


class Graph:
    """Nodes and constants, added in the order in which they are computed."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Array | np.generic) -> str:
        """Add a constant and return its name."""
        from onnx import numpy_helper  # noqa: PLC0415 - optional

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), f"constant{len(self.constants)}"))
        return str(self.constants[-1].name)

    def add(self, operator: str, *inputs: str | Array | np.generic, output: str = "", **attributes: Any) -> str:
        """Add a node and return its output's name; arrays among its inputs become constants."""
        from onnx import helper  # noqa: PLC0415 - optional

        names = [self.constant(each) if not isinstance(each, str) else each for each in inputs]
        output = output or f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [output], **attributes))
        return output


def make_onnx(structure: Mapping[str, Any], tensors: Mapping[str, Tensor], properties: Mapping[str, str]) -> bytes:
    """Turn a network into an ONNX model.

    Args:
        structure: Of the network, as `protonet.files.structure.take_apart` describes it.
        tensors: Its tensors by name, on the CPU.
        properties: Texts that the model carries with it.

    Returns:
        The model: ``features`` (n, input_dim) float32 give ``logits`` and ``probabilities``, (n, num_classes) float32.
    """
    from onnx import TensorProto, helper  # noqa: PLC0415 - optional

    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    graph = Graph()
    x = graph.add("Div", "features", arrays["scale"])
    linear: dict[int, str] = {}  # the linear views, each added where it is first read
    pieces: list[str] = []
    for index, view in enumerate(structure["views"]):
        if arrays["weights"][index] <= 0:
            continue
        own = _take(arrays, f"views.{index}.")
        if view["kind"] == "forest":
            pieces.append(_add_forest(graph, x, own, view["depth"], view["classes"]))
            continue
        number = view["reads"]
        linear[number] = linear.get(number) or _add_linear(graph, x, _take(arrays, f"linear.{number}."))
        if view["kind"] == "radial":
            pieces.append(_add_radial(graph, linear[number], own, view["norm"], squash=view["squash"]))
        else:
            lift = structure["lifts"][number]
            pieces.append(_pad(graph, linear[number], int(lift > 0), lift))
    if structure["learned"]:
        number = structure["views"][0]["reads"]
        z = linear.get(number) or _add_linear(graph, x, _take(arrays, f"linear.{number}."))
        pieces += _add_learned(graph, z, _take(arrays, "learned."))
    learned = len(structure["views"])
    weights = [weight for index, weight in enumerate(arrays["weights"]) if weight > 0 or index >= learned]
    scaled = []
    for piece, weight in zip(pieces, weights, strict=True):
        norm = graph.add("Max", graph.add("ReduceL2", piece, axes=[1]), np.float32(1e-12))
        scaled.append(graph.add("Mul", piece, graph.add("Div", np.sqrt(weight), norm)))
    prototypes = arrays["prototypes"] / arrays["temperature"]
    logits = graph.add("MatMul", graph.add("Concat", *scaled, axis=1), prototypes.T)
    graph.add("Where", arrays["seen"], logits, np.finfo(np.float32).min, output="logits")
    graph.add("Softmax", "logits", axis=1, output="probabilities")

    input_dim, num_classes = len(arrays["linear.0.shift"]), len(prototypes)
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", input_dim])
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", num_classes])
        for name in ("logits", "probabilities")
    ]
    whole = helper.make_graph(graph.nodes, "protonet", [features], outputs, graph.constants)
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    helper.set_model_props(model, dict(properties))
    return bytes(model.SerializeToString())


def _take(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the arrays whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _pad(graph: Graph, rows: str, columns: int, value: float) -> str:
    """Add constant columns to rows, if any."""
    return graph.add("Pad", rows, np.array([0, 0, 0, columns]), np.float32(value)) if columns else rows


def _add_linear(graph: Graph, x: str, own: Mapping[str, Array]) -> str:
    """Add `protonet.views.LinearView`."""
    centred = graph.add("Sub", x, own["shift"])
    z = graph.add("Mul", centred, own["gain"])
    if not own["basis"].shape[1]:
        return z
    low = graph.add("Mul", graph.add("MatMul", centred, own["basis"]), own["coefficient"])
    return graph.add("Add", z, graph.add("MatMul", low, own["basis"].T))


def _add_radial(graph: Graph, z: str, own: Mapping[str, Array], norm: int, *, squash: bool) -> str:
    """Add the scores of `protonet.views.radial.RadialView`, in float64: large read-outs cancel."""
    from onnx import TensorProto  # noqa: PLC0415 - optional

    z = graph.add("Cast", graph.add("Tanh", z) if squash else z, to=TensorProto.DOUBLE)
    landmarks, readout = own["landmarks"].astype(np.float64), own["readout"].astype(np.float64)
    if norm == 1:
        apart = _add_city_blocks(graph, z, landmarks)
    else:
        squares = graph.add("ReduceSumSquare", z, axes=[1])
        products = graph.add("MatMul", z, -2 * landmarks.T)
        apart = graph.add("Add", graph.add("Add", products, np.square(landmarks).sum(axis=1)), squares)
        apart = graph.add("Max", apart, np.float64(0))
    kernel = graph.add("Exp", graph.add("Div", apart, -own["width"].astype(np.float64)))
    return graph.add("Cast", graph.add("MatMul", kernel, readout), to=TensorProto.FLOAT)


def _add_city_blocks(graph: Graph, z: str, landmarks: Array) -> str:
    """Add the sums of absolute differences (n, units), one landmark after the other: all at once would not fit."""
    from onnx import TensorProto, helper  # noqa: PLC0415 - optional

    body = Graph()
    own = f"{z}_landmark"  # names are one set, those within the scan as well
    difference = body.add("Abs", body.add("Sub", z, own, output=f"{own}_less"), output=f"{own}_apart")
    body.add("ReduceSum", difference, graph.constant(np.array([1])), keepdims=0, output=f"{own}_sum")
    landmark = helper.make_tensor_value_info(own, TensorProto.DOUBLE, [landmarks.shape[1]])
    total = helper.make_tensor_value_info(f"{own}_sum", TensorProto.DOUBLE, [None])
    scanned = helper.make_graph(body.nodes, "city_block", [landmark], [total])
    return graph.add("Scan", landmarks, body=scanned, num_scan_inputs=1, scan_output_axes=[1])


def _add_forest(graph: Graph, x: str, own: Mapping[str, Array], depth: int, classes: int) -> str:
    """Add `protonet.views.forest.ForestView`: all trees' nodes, level by level."""
    from onnx import TensorProto  # noqa: PLC0415 - optional

    rows = graph.add("Shape", x, end=1)
    trees = len(own["root"])
    feature, threshold, child = (graph.constant(own[name]) for name in ("feature", "threshold", "child"))
    at = graph.add("Expand", own["root"], graph.add("Concat", rows, np.array([trees]), axis=0))  # (n, trees)
    for _ in range(depth):
        value = graph.add("GatherElements", x, graph.add("Gather", feature, at), axis=1)
        right = graph.add("Greater", value, graph.add("Gather", threshold, at))
        at = graph.add("Add", graph.add("Gather", child, at), graph.add("Cast", right, to=TensorProto.INT64))
    none = graph.add("Expand", np.float32(0), graph.add("Concat", rows, np.array([classes]), axis=0))
    share = graph.add("Expand", np.float32(1 / trees), graph.add("Shape", at))
    return graph.add("ScatterElements", none, graph.add("Gather", own["label"], at), share, axis=1, reduction="add")


def _add_learned(graph: Graph, z: str, own: Mapping[str, Array]) -> list[str]:
    """Add the members of `protonet.encoder.ResidualMLPs`."""
    _, dim, _ = own["first"].shape
    padded = _pad(graph, z, own["last"].shape[2] - dim, 0.0)
    members = []
    for first, bias, last in zip(own["first"], own["bias"], own["last"], strict=True):
        hidden = graph.add("Add", graph.add("MatMul", z, first), bias)
        error = graph.add("Erf", graph.add("Mul", hidden, np.float32(math.sqrt(0.5))))
        hidden = graph.add("Mul", graph.add("Mul", hidden, np.float32(0.5)), graph.add("Add", error, np.float32(1)))
        members.append(graph.add("Add", padded, graph.add("MatMul", hidden, last)))
    return members
