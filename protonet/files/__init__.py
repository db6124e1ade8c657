"""Model files and ONNX."""

from __future__ import annotations

from protonet.files.model import INSTALL, Model, load_model, save_model
from protonet.files.onnx import export_onnx

__all__ = ["INSTALL", "Model", "export_onnx", "load_model", "save_model"]
