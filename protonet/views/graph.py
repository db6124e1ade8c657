"""ONNX graphs of standard operators: nodes and constants, added in the order in which they are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


class Graph:
    """A graph that grows; needs the package onnx."""

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

    def pad(self, rows: str, columns: int, value: float) -> str:
        """Add constant columns to rows, if any, and return what they are then."""
        return self.add("Pad", rows, np.array([0, 0, 0, columns]), np.float32(value)) if columns else rows

    def city_blocks(self, z: str, landmarks: Array) -> str:
        """Add the sums of absolute differences (n, units), one landmark after the other: all at once would not fit."""
        from onnx import TensorProto, helper  # noqa: PLC0415 - optional

        body = Graph()
        own = f"{z}_landmark"  # names are one set, those within the scan as well
        difference = body.add("Abs", body.add("Sub", z, own, output=f"{own}_less"), output=f"{own}_apart")
        body.add("ReduceSum", difference, self.constant(np.array([1])), keepdims=0, output=f"{own}_sum")
        landmark = helper.make_tensor_value_info(own, TensorProto.DOUBLE, [landmarks.shape[1]])
        total = helper.make_tensor_value_info(f"{own}_sum", TensorProto.DOUBLE, [None])
        scanned = helper.make_graph(body.nodes, "city_block", [landmark], [total])
        return self.add("Scan", landmarks, body=scanned, num_scan_inputs=1, scan_output_axes=[1])

    @staticmethod
    def array(tensor: Tensor) -> Array:
        """Return a tensor of any device as an array."""
        return tensor.detach().cpu().numpy()
