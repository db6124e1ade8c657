"""Export of models by ``torch.export``, for C++, AOTInductor, and Python without this package."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from torch import Tensor

from protonet._io import write_atomically
from protonet.errors import raise_input_error
from protonet.files.model import Model, check_model
from protonet.network import PrototypeNetwork

#: Rows of the example batch. torch.export would specialize on 0 or 1 rows.
TRACED_ROWS = 2


@torch.no_grad()
def export_network(network: PrototypeNetwork) -> torch.export.ExportedProgram:
    """Export a network as a program that maps features (n, input_dim), for any n >= 1, to logits (n, num_classes).

    Features are float32, or float64 if columns are so far from 0 that float32 would lose their digits. Constants that
    are cached at the first call become part of the program.

    Args:
        network: In eval mode, with an `Encoder`.
    """
    origin = network.encoder.origin
    assert isinstance(origin, Tensor)
    x = origin.to(torch.float64 if bool(origin.any()) else torch.float32).expand(TRACED_ROWS, -1).clone()
    network(x)
    return torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))


def export_pt2(path: str | Path, model: Model) -> None:
    """Export a model to a ``.pt2`` file for ``torch.export.load``, which is written atomically.

    Its extra files ``classes`` and ``columns`` are JSON.

    Args:
        path: The file, in a folder that exists.
        model: On any device, with numeric columns without missing values.

    Raises:
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not a `protonet.Encoder`.
        InputError: As `protonet.files.save_model`; or other columns than numeric ones without missing values.
    """
    config, _ = check_model(model)
    if model.encoding is not None and not model.encoding.plain:
        remedy = "Export to ONNX, which encodes columns, or fit to numbers without gaps."
        raise_input_error("model", "have columns of numbers without gaps", "others", remedy)
    buffer = io.BytesIO()
    names = {name: json.dumps(config[name]) for name in ("classes", "columns")}
    torch.export.save(export_network(model.network), buffer, extra_files=names)
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
