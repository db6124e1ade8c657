"""Model files, ONNX, and the embeddings of pictures' files."""

from __future__ import annotations

from protonet.files.model import INSTALL, Model, load_model, read_model, read_versions, save_model
from protonet.files.onnx import export_onnx
from protonet.representations.pictures.files import embed_pictures

__all__ = [
    "INSTALL",
    "Model",
    "embed_pictures",
    "export_onnx",
    "load_model",
    "read_model",
    "read_versions",
    "save_model",
]
