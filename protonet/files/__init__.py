"""Model files and ONNX."""
