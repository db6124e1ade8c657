"""Model files: everything that predictions and updates need. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protonet._io import write_atomically
from protonet.encoder import Encoder
from protonet.errors import (
    DISTRIBUTION,
    InputTypeError,
    installed_version,
    optional_packages,
    raise_input_error,
    raise_missing_file,
)
from protonet.files.archive import FORMAT_VERSION, VersionError, check_entry_types, read_archive, write_archive
from protonet.files.network import describe_network, restore_network
from protonet.network import PrototypeNetwork
from protonet.tables.columns.encoding import Encoding
from protonet.views.config import expect, expect_finite

#: Prefixes of the names of tensors: of the network, of the encoding of columns, and of the state for updates.
NETWORK_PREFIX, COLUMNS_PREFIX, UPDATE_PREFIX = "network.", "columns.", "update."


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A fitted network with its classes, columns and metadata."""

    network: PrototypeNetwork  #: From `protonet.solve`, float32.
    classes: tuple[str, ...] | tuple[int, ...]
    """The name of each class of the network, in its order: all strings or all integers."""
    columns: tuple[str, ...] | None = None  #: The names of the table's columns, or None if they have no names.
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metrics, thresholds, descriptions of views, and other values that JSON can hold."""
    update_state: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that updates need and predictions do not, such as the held-out rows of cross-validation."""
    encoding: Encoding | None = None  #: Maps the columns to features; None if the columns are features.
    folds: tuple[PrototypeNetwork, ...] = ()  #: The cross-validation networks.


def save_model(path: str | Path, model: Model) -> None:
    """Write a model file atomically. The same model gives the same bytes.

    Args:
        path: The file, in a folder that exists.
        model: On any device.

    Raises:
        MissingPackageError: safetensors is missing.
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not a `protonet.Encoder`.
        InputError: The file could not be loaded: another dtype than float32, NaN, invalid names, or metadata that JSON
            cannot hold.
    """
    with optional_packages("files"):
        from safetensors.torch import save  # noqa: PLC0415 - optional

    config, tensors = check_model(model)
    content = write_archive(config, save(tensors))
    write_atomically(path, lambda file: file.write(content))


def load_model(path: str | Path, *, for_update: bool = False) -> Model:
    """Load a model file. All of its content is validated.

    Args:
        path: A file of `save_model`.
        for_update: Also load what predictions do not need: the cross-validation networks and ``update_state``.

    Returns:
        The model on the CPU. Its network is in eval mode and computes the logits of the saved one, bit for bit.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: The file is missing, damaged, not a model file, or of another format version.
    """
    return read_model(path, for_update=for_update, writer="save_model")


@torch.inference_mode(False)  # as in `check_model`
def read_model(path: str | Path, *, for_update: bool = False, argument: str = "path", writer: str) -> Model:
    """Load a model file as `load_model` does, with another argument and writer in error messages.

    Args:
        path: A file of `save_model`.
        for_update: Also load what predictions do not need.
        argument: The argument that names the file, for error messages.
        writer: The function or command that writes model files, for error messages.
    """
    with optional_packages("files"):
        from safetensors import SafetensorError  # noqa: PLC0415 - optional
        from safetensors.torch import load  # noqa: PLC0415 - optional

    remedy = f"Pass a file that {writer} wrote."
    try:
        config, content = read_archive(Path(path))
        check_entry_types(config)
        return _make_model(config, load(content), for_update=for_update)
    except FileNotFoundError:
        raise_missing_file(path, argument=argument)
    except VersionError as error:
        remedy = "Update protonet, or fit it again."
        raise_input_error(argument, f"be a model file of version {FORMAT_VERSION}", f"{path} ({error})", remedy)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise_input_error(argument, f"be a model file of version {FORMAT_VERSION}", f"{path} ({error})", remedy)


@torch.inference_mode(False)  # inference tensors cannot become parameters
def check_model(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert a model to the config and the tensors of a file, and check that these can be loaded.

    Raises:
        InputTypeError: The network's encoder is not a `protonet.Encoder`.
        InputError: The file could not be loaded.
    """
    if not isinstance(model.network.encoder, Encoder):
        got = type(model.network.encoder).__name__
        raise_input_error(
            "model", "hold a network with a protonet.Encoder", got, "Pass one of protonet.solve.", kind=InputTypeError
        )
    network, state = describe_network(model.network)
    folds = [describe_network(fold) for fold in model.folds]
    encoding, columns = (None, {}) if model.encoding is None else model.encoding.describe()
    parts: list[tuple[str, Mapping[str, Tensor]]] = [(NETWORK_PREFIX, state), (COLUMNS_PREFIX, columns)]
    parts += [(UPDATE_PREFIX, model.update_state)]
    parts += [(_fold_prefix(index), fold_state) for index, (_, fold_state) in enumerate(folds)]
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
        "column_summaries": None if model.encoding is None else model.encoding.summary,
    }
    try:
        text = json.dumps(config, ensure_ascii=False, allow_nan=False)
        text.encode()
        _make_model(json.loads(text), {name: tensor.clone() for name, tensor in tensors.items()}, for_update=True)
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = "Pass a float32 network of protonet.solve, a name per class and feature, and finite metadata."
        raise_input_error("model", "be what can be read again", f"one with {error}", remedy)
    return config, tensors


def _fold_prefix(index: int) -> str:
    """Return the prefix of the names of a fold's tensors."""
    return f"folds.{index}."


def _make_model(config: dict[str, Any], tensors: dict[str, Tensor], *, for_update: bool) -> Model:
    """Make a model from the config and the tensors of a file; raise a ValueError if they are invalid."""
    folds, encoding = config["folds"], None
    prefixes = [NETWORK_PREFIX, COLUMNS_PREFIX, UPDATE_PREFIX, *map(_fold_prefix, range(len(folds)))]
    state, columns, update_state, *fold_states = _split_by_prefix(tensors, prefixes)
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
    if not for_update:
        return Model(network=network, classes=classes, columns=names, metadata=config["metadata"], encoding=encoding)
    for name, tensor in update_state.items():
        expect_finite(name, tensor)
    fold_networks = tuple(map(restore_network, folds, fold_states))
    same_classes = all(len(fold.sums) == len(network.sums) for fold in fold_networks)
    same_features = all(fold["input_dim"] == input_dim for fold in folds)
    expect(same_classes and same_features, "folds of other features or classes")
    return Model(
        network=network,
        classes=classes,
        columns=names,
        metadata=config["metadata"],
        update_state=update_state,
        encoding=encoding,
        folds=fold_networks,
    )


def _split_by_prefix(tensors: Mapping[str, Tensor], prefixes: Iterable[str]) -> list[dict[str, Tensor]]:
    """Group tensors by the prefix of their names, and remove it; raise a ValueError for a name without a prefix."""
    parts: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in prefixes}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
        if prefix is None:
            raise ValueError(f"a tensor {name!r:.60} that belongs to nothing")
        parts[prefix][name.removeprefix(prefix)] = tensor
    return list(parts.values())


def _check_names(entry: str, names: Any, count: int, types: tuple[type, ...]) -> Any:
    """Convert a list of ``count`` distinct names of one type to a tuple; raise a ValueError if it is invalid."""
    one_type = isinstance(names, list) and any(all(type(name) is kind for name in names) for kind in types)
    expect(one_type and len(set(names)) == len(names) == count, f"{entry} that are not {count} different names")
    return tuple(names)
