"""``python -m protonet export``: write a model as ONNX."""

from __future__ import annotations

from collections.abc import Sequence

from protonet.commands.models import check_packages, check_paths, make_parser, read_model
from protonet.files import export_onnx

PROG = "protonet export"
EXAMPLES = (
    "model.safetensors --onnx model.onnx",
    "wine.safetensors --onnx build/wine.onnx",
    "model.safetensors --onnx model.onnx -q",
)


def run(arguments: Sequence[str] | None) -> None:
    """Export as the arguments say, and print one line.

    Raises:
        MissingPackageError: onnx is missing.
        InputError: Arguments or a model that do not fit.
    """
    text = "Write a model as ONNX: features (n, dim) float32 in, logits and probabilities out."
    parser = make_parser(PROG, text, EXAMPLES, model=True, table=False)
    parser.add_argument("--onnx", required=True, metavar="FILE", help="what to write, .onnx")
    options = parser.parse_args(arguments)
    path = check_paths(options, {"onnx": (".onnx",)}, [options.model])["onnx"]
    check_packages(["onnx"], 'pip install "protonet[onnx]"')
    model = read_model(options.model)
    export_onnx(path, model)
    dim, classes = model.network.encoder.input_dim, len(model.classes)
    mixed = model.encoding is not None and not model.encoding.plain
    taken = f"{len(model.encoding.columns)} columns (n, 1)" if mixed and model.encoding else f"features (n, {dim})"
    print(f"{path}: {taken} to logits and probabilities (n, {classes}), {path.stat().st_size / 1e6:.1f} MB")
