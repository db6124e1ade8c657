"""``protonet export``: export a model to ONNX or to a ``torch.export`` program."""

from __future__ import annotations

from protonet.commands.options import ExportOptions
from protonet.files import export_onnx, export_pt2
from protonet.pipeline import TablePipeline
from protonet.ui.text import format_byte_count


def run(options: ExportOptions) -> None:
    """Run ``export``: write the ONNX file, the ``torch.export`` program, or both, and print a line about each file."""
    model = TablePipeline.load(options.model, argument="model")
    dim, classes = model.network.encoder.input_dim, len(model.classes)
    mixed = model.encoding is not None and not model.encoding.is_fully_numeric
    inputs = f"{len(model.encoding.columns)} columns (n, 1)" if mixed and model.encoding else f"features (n, {dim})"
    if options.onnx is not None:
        export_onnx(options.onnx, model, model.uninformative_logits)
    if options.pt2 is not None:
        export_pt2(options.pt2, model)
    for path, outputs in ((options.onnx, "logits and probabilities"), (options.pt2, "logits")):
        if path is not None:
            print(f"{path}: {inputs} to {outputs} (n, {classes}), {format_byte_count(path.stat().st_size)}")
