"""Model files: everything that predictions and updates need. Nothing is ever pickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protonet._writing import write_whole
from protonet.encoder import Encoder
from protonet.errors import (
    DISTRIBUTION,
    InputTypeError,
    installed_version,
    optional_packages,
    raise_input_error,
    raise_missing_file,
)
from protonet.files.archive import VERSION, VersionError, check_facts, read_archive, write_archive
from protonet.files.network import describe_network, restore_network
from protonet.network import PrototypeNetwork
from protonet.tables.columns.encoding import Encoding
from protonet.views.config import expect, expect_finite

#: Prefixes of the names of tensors: of the network, of the columns of tables, and of what only updates need.
NETWORK, COLUMNS, HELD = "network.", "columns.", "held."


class Model(NamedTuple):
    """A network and what it takes to use it."""

    network: PrototypeNetwork  #: As `protonet.solve` gives it, float32.
    classes: tuple[str, ...] | tuple[int, ...]
    """The name of each class of the network, in its order: all strings or all whole numbers."""
    columns: tuple[str, ...] | None  #: The names of a table's columns that are used, or None where they have none.
    metadata: dict[str, Any]  #: Anything else that JSON can hold: metrics, thresholds, what the views are.
    held: dict[str, Tensor]
    """Further tensors that predictions do not need."""
    encoding: Encoding | None = None  #: What makes features of these columns, or None where they are features.
    folds: tuple[PrototypeNetwork, ...] = ()  #: The cross-validation networks.


def save_model(path: str | Path, model: Model) -> None:
    """Write a model file, whole or not at all. The same model gives the same bytes.

    Args:
        path: Of the file, in a folder that exists.
        model: On any device.

    Raises:
        MissingPackageError: safetensors is missing.
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not of this library.
        InputError: The file could not be read again: another dtype than float32, NaN, names that do not fit, metadata
            that JSON cannot hold.
    """
    with optional_packages("files"):
        from safetensors.torch import save  # noqa: PLC0415 - optional

    config, tensors = check_model(model)
    content = write_archive(config, save(tensors))
    write_whole(path, lambda file: file.write(content))


def load_model(path: str | Path, *, held: bool = False) -> Model:
    """Read a model file, trusting nothing in it.

    Args:
        path: A file of `save_model`.
        held: Restore what predictions do not need, too: the cross-validation networks and held tensors.

    Returns:
        The model, on the CPU; its network, in eval mode, gives the logits of the saved one, bit for bit.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: No file, a truncated, damaged or foreign one, or one of another version.
    """
    return read_model(path, held=held, writer="save_model")


@torch.inference_mode(False)  # as in `check_model`
def read_model(path: str | Path, *, held: bool = False, writer: str) -> Model:
    """Read a model file as `load_model` does, for an entry that names itself.

    Args:
        path: As in `load_model`.
        held: The same.
        writer: What writes such files, for messages.
    """
    with optional_packages("files"):
        from safetensors import SafetensorError  # noqa: PLC0415 - optional
        from safetensors.torch import load  # noqa: PLC0415 - optional

    remedy = f"Pass a file that {writer} wrote."
    try:
        config, content = read_archive(Path(path))
        check_facts(config)
        return _make_model(config, load(content), held=held)
    except FileNotFoundError:
        raise_missing_file(path)
    except VersionError as error:
        remedy = "Update protonet, or fit it again."
        raise_input_error("path", f"be a model file of version {VERSION}", f"{path} ({error})", remedy)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise_input_error("path", f"be a model file of version {VERSION}", f"{path} ({error})", remedy)


@torch.inference_mode(False)  # parameters cannot be made of inference tensors
def check_model(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a model file, once it is known that they make a model again.

    Raises:
        InputTypeError: In the name of ``function``: the network's encoder is not of this library.
        InputError: They make no model.
    """
    if not isinstance(model.network.encoder, Encoder):
        got = type(model.network.encoder).__name__
        raise_input_error(
            "model", "hold a network with a protonet.Encoder", got, "Pass one of protonet.solve.", kind=InputTypeError
        )
    network, state = describe_network(model.network)
    folds = [describe_network(fold) for fold in model.folds]
    encoding, columns = (None, {}) if model.encoding is None else model.encoding.describe()
    parts: list[tuple[str, Mapping[str, Tensor]]] = [(NETWORK, state), (COLUMNS, columns), (HELD, model.held)]
    parts += [(_name_fold(number), fold_state) for number, (_, fold_state) in enumerate(folds)]
    tensors = {
        prefix + name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for prefix, part in parts
        for name, tensor in part.items()
    }
    config = {
        "library": installed_version(DISTRIBUTION),
        "classes": model.classes,
        "columns": model.columns,
        "metadata": model.metadata,
        "network": network,
        "folds": [fold for fold, _ in folds],
        "encoding": encoding,
        "counts": model.network.counts.tolist(),
        "parameters": model.network.count_parameters(),
        "buffer_elements": model.network.count_buffer_elements(),
        "told": None if model.encoding is None else model.encoding.summary,
    }
    try:
        text = json.dumps(config, ensure_ascii=False, allow_nan=False)
        text.encode()
        _make_model(json.loads(text), {name: tensor.clone() for name, tensor in tensors.items()}, held=True)
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = "Pass a float32 network of protonet.solve, a name per class and feature, and finite metadata."
        raise_input_error("model", "be what can be read again", f"one with {error}", remedy)
    return config, tensors


def _name_fold(number: int) -> str:
    """Return the prefix of the names of a fold's tensors."""
    return f"folds.{number}."


def _make_model(config: dict[str, Any], tensors: dict[str, Tensor], *, held: bool) -> Model:
    """Return the model of a config and tensors that are not trusted; raise a ValueError if they make none."""
    folds, encoding = config["folds"], None
    prefixes = [NETWORK, COLUMNS, HELD, *map(_name_fold, range(len(folds)))]
    state, columns, kept, *fold_states = _split(tensors, prefixes)
    if config.get("encoding") is not None:
        encoding = Encoding.restore(config["encoding"], columns)
    expect(encoding is not None or not columns, "tensors that belong to no column")
    network = restore_network(config["network"], state)
    classes = _check_names("classes", config.get("classes"), len(network.counts), (str, int))
    names, input_dim = config.get("columns"), config["network"]["input_dim"]
    if names is not None:
        names = _check_names("columns", names, input_dim if encoding is None else len(encoding.columns), (str,))
    expect(encoding is None or sum(encoding.sizes) == input_dim, "columns that make another number of features")
    expect(isinstance(config.get("metadata"), dict), "no metadata")
    if not held:
        return Model(network, classes, names, config["metadata"], {}, encoding)
    for name, tensor in kept.items():
        expect_finite(name, tensor)
    restored = tuple(map(restore_network, folds, fold_states))
    alike = all(each.sums.shape[:1] == network.sums.shape[:1] for each in restored)
    alike = alike and all(fold["input_dim"] == input_dim for fold in folds)
    expect(alike, "folds of other features or classes")
    return Model(network, classes, names, config["metadata"], kept, encoding, restored)


def _split(tensors: Mapping[str, Tensor], prefixes: Iterable[str]) -> list[dict[str, Tensor]]:
    """Return the tensors of each prefix, without it; raise a ValueError if one has none of the prefixes."""
    parts: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in prefixes}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
        if prefix is None:
            raise ValueError(f"a tensor {name!r:.60} that belongs to nothing")
        parts[prefix][name.removeprefix(prefix)] = tensor
    return list(parts.values())


def _check_names(what: str, names: Any, count: int, kinds: tuple[type, ...]) -> Any:
    """Return ``count`` different names as a tuple, all of one kind; raise a ValueError if they are not."""
    one_kind = isinstance(names, list) and any(all(type(name) is kind for name in names) for kind in kinds)
    expect(one_kind and len(set(names)) == len(names) == count, f"{what} that are not {count} different names")
    return tuple(names)
