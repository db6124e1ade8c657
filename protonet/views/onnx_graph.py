"""`OnnxGraph` builds an ONNX graph node by node; views and columns add their computations to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Constant = NDArray[Any] | np.generic | Tensor
#: The ONNX operator set that maps categories to numbers.
ONNX_ML_DOMAIN = "ai.onnx.ml"


class OnnxGraph:
    """A builder of an ONNX graph. Values of the graph are referred to by name; methods return the name of a new value.

    Args:
        onnx: The imported package ``onnx``, which the solver does not need.

    Attributes:
        nodes: The operations so far, as ONNX nodes.
        constants: The constants so far, as ONNX tensors.
    """

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Constant) -> str:
        """Add a constant, which may be a tensor on any device."""
        array = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
        self.constants.append(self.onnx.numpy_helper.from_array(array, f"constant{len(self.constants)}"))
        return str(self.constants[-1].name)

    def add(self, operator: str, *inputs: str | Constant, output: str = "", **attributes: Any) -> str:
        """Add a node with an ONNX operator, such as "MatMul".

        Inputs are names of values, or arrays and tensors, which become constants. The output gets a new name unless
        ``output`` is given. The attributes are those of the operator.
        """
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        output = output or f"value{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, names, [output], **attributes))
        return output

    def cast(self, value: str, dtype: str) -> str:
        """Convert a value to "FLOAT", "DOUBLE" or "INT64"."""
        return self.add("Cast", value, to=getattr(self.onnx.TensorProto, dtype))

    def pad(self, rows: str, columns: int, value: float) -> str:
        """Append columns that are filled with ``value`` to rows; return ``rows`` itself if ``columns`` is 0."""
        return self.add("Pad", rows, np.array([0, 0, 0, columns]), np.float32(value)) if columns else rows

    def l1_distances(self, z: str, landmarks: Tensor) -> str:
        """Compute the L1 distances (n, units) of rows ``z`` (n, dim) to landmarks (units, dim) float64.

        A scan computes the distances one landmark at a time. All at once would take too much memory.
        """
        body, helper, double = OnnxGraph(self.onnx), self.onnx.helper, self.onnx.TensorProto.DOUBLE
        landmark = f"{z}_landmark"  # names within the scan must be unique in the whole graph
        difference = body.add("Sub", z, landmark, output=f"{landmark}_difference")
        absolute = body.add("Abs", difference, output=f"{landmark}_absolute")
        body.add("ReduceSum", absolute, self.constant(np.array([1])), keepdims=0, output=f"{landmark}_sum")
        scan_input = helper.make_tensor_value_info(landmark, double, [landmarks.shape[1]])
        scan_output = helper.make_tensor_value_info(f"{landmark}_sum", double, [None])
        scan = helper.make_graph(body.nodes, "l1_distance", [scan_input], [scan_output])
        return self.add("Scan", landmarks, body=scan, num_scan_inputs=1, scan_output_axes=[1])

    def look_up(self, texts: str, keys: Sequence[str], values: Sequence[int], default: int) -> str:
        """Map each text that equals ``keys[i]`` to the INT64 ``values[i]``, and any other text to ``default``."""
        pairs: dict[str, Any] = {"keys_strings": list(keys), "values_int64s": list(values)}
        return self.add("LabelEncoder", texts, domain=ONNX_ML_DOMAIN, default_int64=default, **pairs)
