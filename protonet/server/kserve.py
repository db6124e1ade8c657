"""Tensors of KServe's inference protocol, version 2, over REST, as rows of a model.

Source: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
"""

from __future__ import annotations

import math
from typing import Any

from protonet._text import to_printable
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.server.parsing import MAX_ROWS, Rows, check_count, encode, number_limits, picture_columns, to_column
from protonet.server.schemas import OUTPUTS, InferRequest, Tensor

#: Types of tensors that are read, and those of their elements.
DATATYPES: dict[str, tuple[type, ...]] = {
    "BOOL": (bool,),
    "BYTES": (str,),
    **{f"{kind}{bits}": (int, float) for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("FP32", "FP64"), (int, float)),
}


def parse_tensors(model: Model, inputs: list[Tensor]) -> Rows:
    """Parse rows from one tensor of all columns, or one per column.

    Raises:
        InputError: Tensors that do not fit the model.
    """
    if any(picture_columns(model)):
        remedy = "Send them to /models/NAME/predict."
        raise_input_error("inputs", "be for a model without pictures", "one with pictures", remedy)
    names, width = list(model.columns or ()), len(number_limits(model))
    given = {tensor.name: tensor for tensor in inputs}
    if len(inputs) == 1 and len(inputs[0].shape) == 2 and (width > 1 or inputs[0].name not in names):
        if inputs[0].shape[1] != width:
            remedy = "Send all columns of the model, in its order."
            raise_input_error("inputs", f"have shape [rows, {width}]", inputs[0].shape, remedy)
        cells = read_data(inputs[0])
        columns = [cells[index::width] for index in range(width)]
    else:
        if not names or sorted(names) != sorted(tensor.name for tensor in inputs):
            got = ", ".join(map(to_printable, given))[:80] or "none"
            expected = ", ".join(names)[:200] or f"one tensor of shape [rows, {width}]"
            raise_input_error("inputs", f"hold each of {expected} once", got, "Ask /v2/models/NAME for its inputs.")
        columns = [read_data(given[name]) for name in names]
        if len(set(map(len, columns))) > 1:
            must = "have shape [rows] or [rows, 1], each the same rows"
            raise_input_error("inputs", must, "others", "Send one cell per row.")
    if not columns[0]:
        raise_input_error("inputs", "hold rows", "none", "Send one at least.")
    check_count(len(columns[0]))
    return encode(model, [to_column(column) for column in columns], len(columns[0]))


def read_data(tensor: Tensor) -> list[Any]:
    """Read the elements of a tensor of one or two dimensions, flat; null is a missing value.

    Raises:
        InputError: An unknown type, or data of another type or shape.
    """
    kinds = DATATYPES.get(tensor.datatype)
    if kinds is None:
        got = to_printable(tensor.datatype)[:20]
        raise_input_error("datatype", f"be one of {', '.join(DATATYPES)}", got, "Convert the tensor.")
    data = tensor.data
    for _ in tensor.shape:
        if data and all(isinstance(item, list) for item in data):
            data = [cell for item in data for cell in item]
    wrong = [cell for cell in data if cell is not None and type(cell) not in kinds]
    size = math.prod(tensor.shape) if len(tensor.shape) in {1, 2} else -1
    if size != len(data) or wrong or tensor.shape[0] > MAX_ROWS:
        got = f"{len(data)} elements" + (f", such as {to_printable(wrong[0])[:20]!r}" if wrong else "")
        got += f" in {to_printable(tensor.name)[:40]}"
        raise_input_error("data", f"be {tensor.datatype} of shape {tensor.shape[:8]}", got, "Correct it.")
    return data


def select_outputs(request: InferRequest, outputs: list[Tensor]) -> list[Tensor]:
    """Select the outputs that a request names; all if it names none.

    Raises:
        InputError: There is no such output.
    """
    names = [output.name for output in request.outputs or ()]
    if not set(names) <= set(OUTPUTS):
        got = ", ".join(map(to_printable, names))[:80]
        raise_input_error("outputs", f"be of {', '.join(OUTPUTS)}", got, "Name those.")
    by_name = {output.name: output for output in outputs}
    return [by_name[name] for name in names] or outputs
