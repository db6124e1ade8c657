"""A model as a program of ``torch.export``, which C++ and AOTInductor run, and Python without this package."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from torch import Tensor

from protonet._writing import write_whole
from protonet.errors import raise_input_error
from protonet.files.model import Model, check_model
from protonet.network import PrototypeNetwork

#: Rows of the batch that is traced: 0 and 1 would be taken for constants.
TRACED_ROWS = 2


@torch.no_grad()
def export_network(network: PrototypeNetwork) -> torch.export.ExportedProgram:
    """Return the program that maps features (n, input_dim), of any n >= 1, to logits (n, num_classes).

    Features are float32, or float64 if columns lie so far from 0 that float32 would lose their digits. What is computed
    once, at the first call, becomes part of the program.

    Args:
        network: In eval mode, with an `Encoder`.
    """
    origin = network.encoder.origin
    assert isinstance(origin, Tensor)
    x = origin.to(torch.float64 if bool(origin.any()) else torch.float32).expand(TRACED_ROWS, -1).clone()
    network(x)
    return torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))


def export_pt2(path: str | Path, model: Model) -> None:
    """Write a model as a ``.pt2`` file, which ``torch.export.load`` reads, whole or not at all.

    Its extra files ``classes`` and ``columns`` are JSON.

    Args:
        path: Of the file, in a folder that exists.
        model: On any device, of columns that are numbers without gaps.

    Raises:
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not of this library.
        InputError: As `protonet.files.save_model`; or columns that are not numbers without gaps.
    """
    config, _ = check_model(model)
    if model.encoding is not None and not model.encoding.plain:
        remedy = "Export to ONNX, which encodes columns, or fit to numbers without gaps."
        raise_input_error("model", "have columns of numbers without gaps", "others", remedy)
    buffer = io.BytesIO()
    names = {name: json.dumps(config[name]) for name in ("classes", "columns")}
    torch.export.save(export_network(model.network), buffer, extra_files=names)
    write_whole(path, lambda file: file.write(buffer.getvalue()))
