"""``python -m protonet export``: write a model as ONNX."""

from __future__ import annotations

import argparse

from protonet.commands.models import read_model
from protonet.files import export_onnx


def run(options: argparse.Namespace) -> None:
    """Export as the arguments say, and print one line.

    Raises:
        MissingPackageError: onnx is missing.
        InputError: Arguments or a model that do not fit.
    """
    path = options.outputs["onnx"]
    model = read_model(options.model)
    export_onnx(path, model)
    dim, classes = model.network.encoder.input_dim, len(model.classes)
    mixed = model.encoding is not None and not model.encoding.plain
    taken = f"{len(model.encoding.columns)} columns (n, 1)" if mixed and model.encoding else f"features (n, {dim})"
    print(f"{path}: {taken} to logits and probabilities (n, {classes}), {path.stat().st_size / 1e6:.1f} MB")
