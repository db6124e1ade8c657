"""Save and load models: networks, classes, columns and metadata, without pickles.

A network is stored as a config that JSON can hold, and as the tensors of its ``state_dict``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from protonet._io import JsonDict, write_atomically
from protonet.errors import (
    DISTRIBUTION_NAME,
    InputTypeError,
    installed_version,
    optional_packages,
    raise_input_error,
    raise_missing_file,
)
from protonet.files.archive import (
    FORMAT_VERSION,
    METADATA_ENTRY,
    FormatVersionError,
    check_entry_types,
    encode_config,
    read_model_file,
    write_archive,
)
from protonet.files.metadata import TrainingMetadata
from protonet.network import Encoder, PrototypeNetwork
from protonet.tables.columns.encoding import Encoding
from protonet.views import INPUT_MAP_CLASSES, VIEW_FAMILIES
from protonet.views.columns import ColumnSelection
from protonet.views.config import raise_unless, require_finite, validate_tensors
from protonet.views.view import InputMap, RestorableModule, View

ComponentT = TypeVar("ComponentT", InputMap, View)
#: Name of the network's buffer that is not stored, because it is computed from the buffers ``sums`` and ``counts``.
DERIVED_BUFFER_NAME = "prototypes"


def serialize_network(network: PrototypeNetwork) -> tuple[JsonDict, dict[str, Tensor]]:
    """Convert a network to what a model file stores: a config for `build_network`, and the tensors by name."""
    encoder = network.encoder
    assert isinstance(encoder, Encoder)
    config = {
        "input_dim": encoder.input_dim,
        "columns": None if encoder.columns is None else len(encoder.columns),
        "classes": len(network.counts),
        "sources": [{"kind": source.kind, **source.config.to_json()} for source in encoder.list_input_maps()],
        "views": [
            {"kind": view.kind, "source": index, **view.config.to_json()}
            for view, index in zip(encoder.iterate_views(), encoder.source_index, strict=True)
        ],
    }
    return config, {name: tensor for name, tensor in network.state_dict().items() if name != DERIVED_BUFFER_NAME}


def build_network(config: Any) -> PrototypeNetwork:
    """Build a network with the structure that an untrusted config describes; its tensors are still zeros.

    Raises:
        ValueError: The config is invalid.
    """
    dim, classes = (config.get(name) for name in ("input_dim", "classes"))
    raise_unless(type(dim) is int and type(classes) is int and min(dim, classes) > 0, "no usable input_dim or classes")
    n_columns = config.get("columns")
    raise_unless(n_columns is None or (type(n_columns) is int and 0 < n_columns <= dim), "no usable number of columns")
    width, columns = dim, None
    if n_columns is not None:
        width, columns = n_columns, ColumnSelection(torch.arange(n_columns), torch.ones(n_columns, dtype=torch.float32))
    sources: list[InputMap] = []
    for entry in _copy_entries(config, "sources"):
        source_class = _pop_component_class(entry, INPUT_MAP_CLASSES)
        source_config = source_class.config_type.from_json(entry)
        raise_unless(getattr(source_config, "input_dim", None) == width, "a source of another number of features")
        sources.append(source_class(source_config))
    views: list[View] = []
    for entry in _copy_entries(config, "views"):
        view_class, index = _pop_component_class(entry, [view for _, view in VIEW_FAMILIES]), entry.pop("source", None)
        raise_unless(index is None or (type(index) is int and 0 <= index < len(sources)), "a view of an unknown source")
        views.append(view_class(view_class.config_type.from_json(entry), None if index is None else sources[index]))
        raise_unless(views[-1].input_dim == width, "a view of another number of features")
    raise_unless(bool(views), "no view")
    raise_unless({view.source for view in views} - {None} == set(sources), "a source for no view")
    part_weights = torch.zeros(sum(len(view.part_sizes) for view in views))
    encoder = Encoder(views, part_weights, origin=torch.zeros(dim), columns=columns)
    return PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=classes).eval()


def check_network_tensors(network: PrototypeNetwork, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if the network cannot load the tensors of a file, which do not include the prototypes."""
    unchecked, expected = dict(tensors), network.state_dict()
    del expected[DERIVED_BUFFER_NAME]
    if unchecked["sums"].dtype == torch.float64:  # those of an estimator, whose predictions would change otherwise
        expected["sums"] = expected["sums"].double()
    encoder = network.encoder
    assert isinstance(encoder, Encoder)
    components: dict[str, RestorableModule] = {
        f"encoder.views.{at}.": view for at, view in enumerate(encoder.iterate_views())
    }
    components |= {f"encoder.sources.{at}.": source for at, source in enumerate(encoder.list_input_maps())}
    for prefix, component in components.items():
        names = [name for name in unchecked if name.startswith(prefix)]
        component.check({name.removeprefix(prefix): unchecked.pop(name) for name in names}, prefix)
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith(prefix)}
    validate_tensors(unchecked, expected)
    weights = unchecked["encoder.weights"]
    raise_unless(bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-3, "weights that do not sum to 1")
    positive = all(bool(unchecked[name] > 0) for name in ("encoder.scale", "temperature"))
    raise_unless(positive, "a scale or temperature that is not positive")
    if encoder.columns is not None:
        columns, signs = unchecked["encoder.columns"], unchecked["encoder.signs"]
        ascending = bool((columns.diff() > 0).all()) and 0 <= int(columns[0]) <= int(columns[-1]) < encoder.input_dim
        raise_unless(ascending and bool((signs.abs() == 1).all()), "columns that are not there, or without a sign")
    raise_unless(bool((unchecked["counts"] >= 0).all()), "counts below 0")


@torch.inference_mode(False)
def restore_network(config: Any, tensors: Mapping[str, Tensor]) -> PrototypeNetwork:
    """Restore a network in eval mode from an untrusted config and CPU tensors, as `serialize_network` returns them.

    The network shares memory with the tensors.

    Raises:
        ValueError: The config or a tensor is invalid.
    """
    raise_unless(
        isinstance(config, dict) and {"sums", "encoder.origin"} <= tensors.keys(),
        "no config of a network, or no tensor sums or encoder.origin",
    )
    sizes = [*tensors["encoder.origin"].shape, *tensors["sums"].shape[:1]]
    raise_unless(sizes == [config.get("input_dim"), config.get("classes")], "tensors of other features or classes")
    with torch.device("meta"):  # no memory is allocated before the sizes are compared with the tensors
        network = build_network(config)
    check_network_tensors(network, tensors)
    # Inference tensors could not be trained later.
    tensors = {name: value.clone() if value.is_inference() else value for name, value in tensors.items()}
    prototypes = torch.zeros_like(tensors["sums"], dtype=torch.float32)
    network.load_state_dict({**tensors, DERIVED_BUFFER_NAME: prototypes}, assign=True)
    network.set_sums(network.sums, network.counts)
    return network


def _pop_component_class(entry: JsonDict, classes: Sequence[type[ComponentT]]) -> type[ComponentT]:
    """Look up the class that the entry "kind" of a component's config names, and remove this entry from the config.

    A component is a view, or a source, which computes the input of several views.
    """
    kind = entry.pop("kind", None)
    for component_class in classes:
        if component_class.kind == kind:
            return component_class
    raise ValueError("a source or view of an unknown kind")


def _copy_entries(config: JsonDict, name: str) -> list[JsonDict]:
    """Copy the list of dicts that the config has as entry ``name``; raise a ValueError if it is not such a list."""
    entries = config.get(name)
    are_dicts = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    raise_unless(are_dicts, f"no usable entry {name}")
    return list(map(dict, entries))  # type: ignore[arg-type]


#: Prefixes of tensor names in model files: for the network, the encoding of columns, and ``Model.update_state``.
NETWORK_PREFIX, COLUMNS_PREFIX, UPDATE_PREFIX = "network.", "columns.", "update."


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """The content of a model file: a fitted network, the names of its classes and columns, and metadata."""

    network: PrototypeNetwork  #: The network that `protonet.solve` fits, float32; its sums may be float64.
    classes: tuple[str, ...] | tuple[int, ...]  #: The name of each class of the network: all strings or all integers.
    columns: tuple[str, ...] | None = None  #: The names of the table's columns, or None if they have no names.
    metadata: TrainingMetadata = field(default_factory=TrainingMetadata)  #: How the model was trained.
    update_state: dict[str, Tensor] = field(default_factory=dict)  #: Tensors for updates only, such as held-out rows.
    encoding: Encoding | None = None  #: Maps the columns to features; None if the columns are features.
    folds: tuple[PrototypeNetwork, ...] = ()  #: The cross-validation networks.


def save_model(path: str | Path, model: Model) -> None:
    """Write a model file atomically. The same model gives the same bytes.

    Args:
        path: The file, in a folder that exists. If its name ends in ``.safetensors``, it is not compressed, and every
            program that reads safetensors can read its tensors.
        model: The model, on any device.

    Raises:
        MissingPackageError: safetensors is missing.
        OSError: The file cannot be written.
        InputTypeError: The network's encoder is not a `protonet.Encoder`.
        InputError: The model has another dtype than float32, NaN, or invalid names or metadata, so that its file could
            not be loaded.
    """
    content = model_to_bytes(model, compress=Path(path).suffix.lower() != ".safetensors")
    write_atomically(path, lambda file: file.write(content))


def model_to_bytes(model: Model, *, compress: bool = True) -> bytes:
    """Compute the content of a model file, safetensors unless ``compress``; errors as in `save_model`."""
    with optional_packages("files"):
        from safetensors.torch import save  # noqa: PLC0415 - optional

    config, tensors = serialize_model(model)
    return write_archive(config, save(tensors)) if compress else save(tensors, {METADATA_ENTRY: encode_config(config)})


def load_model(path: str | Path, *, for_update: bool = False) -> Model:
    """Load a model file. All of its content is validated.

    Args:
        path: A file that `save_model` wrote.
        for_update: Whether to load also ``folds``, the cross-validation networks, and ``update_state``.

    Returns:
        The model on the CPU. Its network is in eval mode and computes the logits of the saved network, bit for bit.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: The file is missing, damaged, not a model file, or of another format version.
    """
    return read_model(path, for_update=for_update, writer="save_model")


@torch.inference_mode(False)  # as in `serialize_model`
def read_model(source: str | Path | bytes, *, for_update: bool = False, argument: str = "path", writer: str) -> Model:
    """Load a model file, given its path or content, as `load_model` does, with error messages for a given caller.

    The messages name the invalid ``argument``, and recommend ``writer``, a function or command that writes model files.
    """
    with optional_packages("files"):
        from safetensors import SafetensorError  # noqa: PLC0415 - optional
        from safetensors.torch import load  # noqa: PLC0415 - optional

    remedy = f"Pass a file that {writer} wrote."
    path = f"{len(source):,} bytes" if isinstance(source, bytes) else source
    try:
        config, content = read_model_file(source if isinstance(source, bytes) else Path(source))
        check_entry_types(config)
        return _build_model(config, load(content), for_update=for_update)
    except FileNotFoundError:
        raise_missing_file(path, argument=argument)
    except FormatVersionError as error:
        remedy = "Update protonet, or fit it again."
        raise_input_error(argument, f"be a model file of version {FORMAT_VERSION}", f"{path} ({error})", remedy)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise_input_error(argument, f"be a model file of version {FORMAT_VERSION}", f"{path} ({error})", remedy)


@torch.inference_mode(False)  # inference tensors cannot become parameters
def serialize_model(model: Model) -> tuple[JsonDict, dict[str, Tensor]]:
    """Convert a model to the config and the tensors of its file.

    Raises:
        InputError: A file with this content could not be loaded.
    """
    if not isinstance(model.network.encoder, Encoder):
        must, got = "hold a network with a protonet.Encoder", type(model.network.encoder).__name__
        raise_input_error("model", must, got, "Pass one of protonet.solve.", kind=InputTypeError)
    network, state = serialize_network(model.network)
    folds = [serialize_network(fold) for fold in model.folds]
    encoding, columns = (None, {}) if model.encoding is None else model.encoding.describe_columns()
    parts: list[tuple[str, Mapping[str, Tensor]]] = [(NETWORK_PREFIX, state), (COLUMNS_PREFIX, columns)]
    parts += [(UPDATE_PREFIX, model.update_state)]
    parts += [(f"folds.{index}.", fold_state) for index, (_, fold_state) in enumerate(folds)]
    tensors = {
        prefix + name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for prefix, part in parts
        for name, tensor in part.items()
    }
    config = {
        "library": installed_version(DISTRIBUTION_NAME),
        "classes": model.classes,
        "columns": model.columns,
        "metadata": model.metadata.to_json(),
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
        _build_model(json.loads(text), {name: tensor.clone() for name, tensor in tensors.items()}, for_update=True)
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = "Pass a float32 network of protonet.solve, a name per class and feature, and finite metadata."
        raise_input_error("model", "be what can be read again", f"one with {error}", remedy)
    return config, tensors


def _build_model(config: JsonDict, tensors: dict[str, Tensor], *, for_update: bool) -> Model:
    """Build a model from the untrusted config and tensors of a file; raise a ValueError if they are invalid."""
    folds, encoding = config["folds"], None
    prefixes = [NETWORK_PREFIX, COLUMNS_PREFIX, UPDATE_PREFIX, *(f"folds.{index}." for index in range(len(folds)))]
    state, columns, update_state, *fold_states = _split_by_prefix(tensors, prefixes)
    if config.get("encoding") is not None:
        encoding = Encoding.restore(config["encoding"], columns)
    raise_unless(encoding is not None or not columns, "tensors that belong to no column")
    network = restore_network(config["network"], state)
    classes = _parse_names("classes", config.get("classes"), len(network.counts), (str, int))
    names, input_dim = config.get("columns"), config["network"]["input_dim"]
    if names is not None:
        names = _parse_names("columns", names, input_dim if encoding is None else len(encoding.columns), (str,))
    fits = encoding is None or sum(encoding.n_features_per_column) == input_dim
    raise_unless(fits, "columns that make another number of features")
    metadata = TrainingMetadata.from_json(config.get("metadata"))
    fits = len(metadata.uninformative_counts) <= len(classes)
    raise_unless(fits, "metadata of other classes")
    model = Model(network=network, classes=classes, columns=names, metadata=metadata, encoding=encoding)
    if not for_update:
        return model
    for name, tensor in update_state.items():
        require_finite(name, tensor)
    fold_networks = tuple(map(restore_network, folds, fold_states))
    same_classes = all(len(fold.sums) == len(network.sums) for fold in fold_networks)
    same_features = all(fold["input_dim"] == input_dim for fold in folds)
    raise_unless(same_classes and same_features, "folds of other features or classes")
    return replace(model, update_state=update_state, folds=fold_networks)


def _split_by_prefix(tensors: Mapping[str, Tensor], prefixes: Iterable[str]) -> list[dict[str, Tensor]]:
    """Split tensors by the prefixes of their names, and remove the prefixes; return a dict for each prefix, in order.

    Raises:
        ValueError: A name begins with none of the prefixes.
    """
    by_prefix: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in prefixes}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in by_prefix if name.startswith(prefix)), None)
        if prefix is None:
            raise ValueError(f"a tensor {name!r:.60} that belongs to nothing")
        by_prefix[prefix][name.removeprefix(prefix)] = tensor
    return list(by_prefix.values())


def _parse_names(entry: str, names: Any, count: int, types: tuple[type, ...]) -> Any:
    """Convert an untrusted list to a tuple; raise a ValueError unless it has ``count`` distinct names of one type."""
    one_type = isinstance(names, list) and any(all(type(name) is kind for name in names) for kind in types)
    raise_unless(one_type and len(set(names)) == len(names) == count, f"{entry} that are not {count} different names")
    return tuple(names)
