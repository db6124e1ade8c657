"""Files of small networks of texts, and pictures, for tests."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

#: The vocabulary; the first word is the token of unknown words.
WORDS = ("[UNK]", "card", "lost", "my", "where", "is", "money", "back", "please")
TABLE = np.random.default_rng(0).normal(size=(len(WORDS), 5)).astype(np.float32)


def write_tokenizer(folder: Path, *, unknown: str | None = "[UNK]") -> Path:
    """Write a tokenizer of `WORDS` in lower case, with or without a token of unknown words."""
    tokenizers: Any = importlib.import_module("tokenizers")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token=unknown) if unknown else None
    tokenizer = tokenizers.Tokenizer(model or tokenizers.models.WordLevel(vocabulary))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_vectors(folder: Path, *more: np.ndarray, table: np.ndarray = TABLE) -> Path:
    """Write a folder of static vectors, and perhaps further matrices."""
    numpy: Any = importlib.import_module("safetensors.numpy")
    tensors = {f"{index}": item for index, item in enumerate([table, *more])}
    numpy.save_file(tensors, write_tokenizer(folder) / "model.safetensors")
    return folder


def write_network(
    folder: Path,
    *,
    limit: int | None = None,
    pooled: bool = False,
    whole: bool = False,
    inputs: Sequence[str] = ("input_ids",),
) -> Path:
    """Write a folder of a network in ONNX: each token's vector; if pooled, the first one's beside; or one number."""
    onnx: Any = importlib.import_module("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes = [helper.make_node("Gather", ["table", inputs[0]], ["tokens"], axis=0)]
    outputs = [helper.make_tensor_value_info("tokens", kinds.FLOAT, None)]
    constants = [onnx.numpy_helper.from_array(TABLE, "table")]
    if pooled:
        nodes.append(helper.make_node("Gather", ["tokens", "zero"], ["pooled"], axis=1))
        constants.append(onnx.numpy_helper.from_array(np.array(0), "zero"))
        outputs.append(helper.make_tensor_value_info("pooled", kinds.FLOAT, None))
    if whole:
        nodes.append(helper.make_node("ReduceMean", ["tokens"], ["mean"], keepdims=0))
        outputs = [helper.make_tensor_value_info("mean", kinds.FLOAT, None)]
    given = [helper.make_tensor_value_info(name, kinds.INT64, ["n", "tokens"]) for name in inputs]
    graph = helper.make_graph(nodes, "words", given, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, str(write_tokenizer(folder) / "model.onnx"))
    if limit is not None:
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": limit}), encoding="utf-8")
    return folder


def list_tokens(text: str) -> list[int]:
    """List the indices in `WORDS` of the words of a text, which are separated by spaces."""
    return [WORDS.index(word) if word in WORDS else 0 for word in text.lower().split()]


def normalize(rows: np.ndarray) -> np.ndarray:
    """Scale rows to unit length; zeros stay zeros."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1))


def draw(kind: str, seed: int, side: int = 40) -> Image.Image:
    """Draw a disc or a cross, light on dark, somewhere."""
    rng = np.random.default_rng([seed, *kind.encode()])
    picture = Image.new("RGB", (side, side), tuple(rng.integers(0, 80, 3).tolist()))
    x, y = rng.integers(side // 3, 2 * side // 3, 2).tolist()
    radius, ink = side // 4, tuple(rng.integers(150, 255, 3).tolist())
    pen = ImageDraw.Draw(picture)
    if kind == "disc":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
    else:
        pen.line((x - radius, y, x + radius, y), fill=ink, width=4)
        pen.line((x, y - radius, x, y + radius), fill=ink, width=4)
    return picture


def write_folders(root: Path, *, per_class: int = 5, first: int = 0) -> Path:
    """Write a folder of discs, in JPEG, and one of crosses, in PNG."""
    for kind, suffix in (("disc", "jpg"), ("cross", "png")):
        (root / kind).mkdir(parents=True)
        for index in range(first, first + per_class):
            draw(kind, index).save(root / kind / f"{index}.{suffix}")
    return root
