"""Model files, export to ONNX and torch.export, and embeddings of image files."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protonet.embeddings.pictures.files import embed_pictures
    from protonet.files.export import export_onnx, export_pt2
    from protonet.files.model import Model, load_model, read_model, save_model

__all__ = ["Model", "embed_pictures", "export_onnx", "export_pt2", "load_model", "read_model", "save_model"]

#: Suffixes of model files: archives, and files of safetensors.
MODEL_SUFFIXES = (".protonet", ".safetensors")
_LAZY_MODULES = {
    "export_onnx": "files.export",
    "export_pt2": "files.export",
    "embed_pictures": "embeddings.pictures.files",
}


def __getattr__(name: str) -> Any:
    """Import the public name ``name`` on first use, so that ``protonet info`` reads model files without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"protonet.{_LAZY_MODULES.get(name, 'files.model')}"), name)
