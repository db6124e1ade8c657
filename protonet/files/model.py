"""Model files: safetensors with a JSON header that says all the tensors do not, and ONNX. Nothing is ever pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from protonet._checks import fail, find_version, optional_packages
from protonet._writing import write_whole
from protonet.files.onnx import make_onnx
from protonet.files.structure import expect, expect_sound, put_together, take_apart
from protonet.network import PrototypeNetwork

#: The name of the entry, in the file's metadata, that says as JSON what the file is.
FORMAT = "protonet.model"
#: Raised whenever what is written changes; files of later versions are not read.
VERSION = 1
INSTALL = 'pip install "protonet[files]"'
#: What the names of tensors begin with that are held for later, and are no part of the network.
HELD = "held."


class Model(NamedTuple):
    """A network and what it takes to use it.

    Attributes:
        network: As `protonet.solve` gives it, float32.
        classes: The name of each class of the network, in its order: all strings or all whole numbers.
        columns: The names of the features in their order, or None where they have none.
        facts: Anything else that JSON can hold: figures, thresholds, what the views are.
        held: Further tensors that predictions do not need.
    """

    network: PrototypeNetwork
    classes: tuple[str, ...] | tuple[int, ...]
    columns: tuple[str, ...] | None
    facts: dict[str, Any]
    held: dict[str, Tensor]


def save_model(path: str | Path, model: Model) -> None:
    """Write a model file, whole or not at all. The same model gives the same bytes.

    Args:
        path: Of the file, in a folder that exists.
        model: On any device.

    Raises:
        ImportError: safetensors is missing.
        OSError: The file cannot be written.
        TypeError: The network's encoder is not of this library.
        ValueError: The file could not be read again: another dtype than float32, NaN, names that do not fit, facts that
            JSON cannot hold.
    """
    with optional_packages("save_model", INSTALL):
        from safetensors.torch import save  # noqa: PLC0415 - optional

    header, tensors, held = _take_apart("save_model", model)
    tensors |= {HELD + name: tensor for name, tensor in held.items()}
    # How a product of matrices rounds hangs on their layout: what lies column by column does so when it is read.
    columnwise = [name for name, tensor in tensors.items() if tensor.ndim == 2 and not tensor.is_contiguous()]
    tensors |= {name: tensors[name].t() for name in columnwise}
    content = save(tensors, {FORMAT: json.dumps(header | {"columnwise": columnwise})})
    write_whole(path, lambda file: file.write(content))


def load_model(path: str | Path, *, held: bool = False) -> Model:
    """Read a model file, trusting nothing in it.

    Args:
        path: A file of `save_model`.
        held: Read the tensors that predictions do not need, too.

    Returns:
        The model, on the CPU; its network, in eval mode, gives the logits of the saved one, bit for bit.

    Raises:
        ImportError: safetensors is missing.
        ValueError: No file, a truncated, damaged or foreign one, or one of a newer version.
    """
    with optional_packages("load_model", INSTALL):
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

    remedy = "Pass a file that save_model wrote."
    try:
        expect(Path(path).is_file(), "no file")  # to open a pipe would be to wait
        with safe_open(path, framework="pt") as file:
            header = _parse_header((file.metadata() or {}).get(FORMAT))
            if header["version"] > VERSION:
                remedy = "Update protonet."
                raise ValueError(f"version {header['version']}, by protonet {header.get('library')!r:.20}")
            names = [name for name in file.keys() if held or not name.startswith(HELD)]  # noqa: SIM118 - not a dict
            columnwise = header.get("columnwise") or ()
            expect(isinstance(columnwise, (list, tuple)), "columnwise tensors that are no list")
            # Copied: a tensor that lies in the file keeps it open, and on Windows that bars the next save.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        tensors |= {name: tensors[name].t() for name in names if name in columnwise}
        kept = {name[len(HELD) :]: tensors.pop(name) for name in names if name.startswith(HELD)}
        return _make_model(header, tensors, kept)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        fail("load_model", "path", f"be a model file of version {VERSION} or older", f"{path} ({error})", remedy)


def export_onnx(path: str | Path, model: Model) -> None:
    """Write a model as an ONNX file, whole or not at all.

    Args:
        path: Of the file, in a folder that exists.
        model: On any device. What it holds beside network and names is left out.

    ``features`` (n, input_dim), of any n >= 1, give ``logits`` and ``probabilities`` (n, num_classes), all float32.
    ``classes`` and ``columns`` are in the file's metadata, as JSON.

    Raises:
        ImportError: onnx is missing.
        OSError: The file cannot be written.
        TypeError: The network's encoder is not of this library.
        ValueError: As `save_model`.
    """
    with optional_packages("export_onnx", 'pip install "protonet[onnx]"'):
        import onnx  # noqa: F401, PLC0415 - optional

    header, tensors, _ = _take_apart("export_onnx", model)
    properties = {name: json.dumps(header[name]) for name in ("classes", "columns")}
    content = make_onnx(header["structure"], tensors, properties)
    write_whole(path, lambda file: file.write(content))


def _take_apart(function: str, model: Model) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return header, the network's tensors and the held ones, once it is known that they make a model again."""
    structure, parts = take_apart(model.network)
    tensors, held = ({name: _copy(each) for name, each in some.items()} for some in (parts, model.held))
    facts = {"classes": model.classes, "columns": model.columns, "facts": model.facts, "structure": structure}
    try:
        header = _parse_header(json.dumps({"version": VERSION, "library": find_version("protonet"), **facts}))
        _make_model(header, tensors, held)
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = (
            "Pass a float32 network of protonet.solve, a name for each of its classes and features, and finite facts."
        )
        fail(function, "model", "be what can be read again", f"one with {error}", remedy)
    return header, tensors, held


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, by rows or, of a matrix, by columns, which shares its memory with no other tensor."""
    tensor = tensor.detach().cpu().clone()
    return tensor if tensor.ndim == 2 and tensor.t().is_contiguous() else tensor.contiguous()


def _parse_header(text: str | None) -> dict[str, Any]:
    """Return a header with a version; raise a ValueError if it is none."""
    expect(text is not None, "of something else")
    header = json.loads(str(text))
    json.dumps(header, ensure_ascii=False, allow_nan=False).encode()  # no NaN, and no text that could not be printed
    expect(isinstance(header, dict) and type(header.get("version")) is int, "a header without a version")
    return dict(header)


def _make_model(header: dict[str, Any], tensors: dict[str, Tensor], held: dict[str, Tensor]) -> Model:
    """Return the model that a header and tensors give; raise a ValueError if they give none."""
    network = put_together(header.get("structure"), tensors)
    classes = _check_names("classes", header.get("classes"), len(network.prototypes), (str, int))
    columns = header.get("columns")
    if columns is not None:
        columns = _check_names("columns", columns, len(tensors["linear.0.shift"]), (str,))
    facts = header.get("facts")
    for name, tensor in held.items():
        expect_sound(name, tensor)
    if not isinstance(facts, dict):
        raise ValueError("no facts")
    return Model(network, classes, columns, facts, held)


def _check_names(what: str, names: Any, count: int, kinds: tuple[type, ...]) -> Any:
    """Return ``count`` different names as a tuple, all of one kind; raise a ValueError if they are not."""
    one_kind = isinstance(names, list) and any(all(type(name) is kind for name in names) for kind in kinds)
    expect(one_kind and len(set(names)) == len(names) == count, f"{what} that are not {count} different names")
    return tuple(names)
