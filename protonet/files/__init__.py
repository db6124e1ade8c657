"""Model files and ONNX."""

from __future__ import annotations

from protonet.files.model import INSTALL, Model, load_model, read_versions, save_model
from protonet.files.onnx import export_onnx

__all__ = ["INSTALL", "Model", "export_onnx", "load_model", "read_versions", "save_model"]
