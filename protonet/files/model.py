"""Model files: safetensors with a JSON header that says all the tensors do not. Nothing is ever pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from protonet.files.header import FORMAT, HELD, OLDEST, VERSION, parse_header, sum_part, take_checksum, write_header
from protonet.files.shared_rows import share_rows, unshare_rows
from protonet.network import PrototypeNetwork
from protonet.tables.columns.encoding import Encoding
from protonet.views import KINDS, SOURCES
from protonet.views.view import LinearMap, Source, Stored, expect, expect_sound

#: What the names of tensors begin with that belong to the columns of tables.
COLUMNS = "columns."


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

    header, tensors, held = check_model(model)
    tensors |= {HELD + name: tensor for name, tensor in held.items()}
    # How a product of matrices rounds depends on their layout: what lies column by column does so when it is read.
    columnwise = [name for name, tensor in tensors.items() if tensor.ndim == 2 and not tensor.is_contiguous()]
    tensors |= {name: tensors[name].t() for name in columnwise}
    header["columnwise"] = columnwise
    tensors, header["shared"] = share_rows(tensors, HELD)
    narrow = {name: _narrow(tensor) for name, tensor in tensors.items()}
    header["narrow"] = [name for name, tensor in tensors.items() if narrow[name].dtype != tensor.dtype]
    tensors = narrow
    header["checksums"] = {part: _sum(tensors, part) for part in ("", HELD)}
    content = save(tensors, {FORMAT: write_header(header)})
    write_whole(path, lambda file: file.write(content))


def load_model(path: str | Path, *, held: bool = False) -> Model:
    """Read a model file, trusting nothing in it.

    Args:
        path: A file of `save_model`.
        held: Read the tensors that predictions do not need, too.

    Returns:
        The model, on the CPU; its network, in eval mode, gives the logits of the saved one, bit for bit.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: No file, a truncated, damaged or foreign one, or one of another version.
    """
    return read_model(path, held=held, writer="save_model")


def read_model(path: str | Path, *, held: bool = False, writer: str) -> Model:
    """Read a model file, trusting nothing in it, for an entry that names itself.

    Args:
        path: As in `load_model`.
        held: The same.
        writer: What writes such files, as whoever called the entry knows it.

    Returns:
        The model, on the CPU; its network, in eval mode, gives the logits of the saved one, bit for bit.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: No file, a truncated, damaged or foreign one, or one of another version.
    """
    with optional_packages("files"):
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

    remedy = f"Pass a file that {writer} wrote."
    try:
        expect(Path(path).resolve(strict=True).is_file(), "no file")  # to open a pipe would be to wait
        with safe_open(path, framework="pt") as file:
            header = parse_header((file.metadata() or {}).get(FORMAT))
            if not OLDEST <= header["version"] <= VERSION:
                remedy = "Update protonet." if header["version"] > VERSION else "Fit it again."
                raise ValueError(f"version {header['version']}, by protonet {header.get('library')!r:.20}")
            take_checksum(header)
            names = [name for name in file.keys() if held or not name.startswith(HELD)]  # noqa: SIM118 - not a dict
            columnwise = header.get("columnwise") or ()
            expect(isinstance(columnwise, (list, tuple)), "columnwise tensors that are no list")
            narrow = header.get("narrow", [])
            expect(isinstance(narrow, list) and all(type(name) is str for name in narrow), "narrow tensors of no name")
            # Copied: a tensor that lies in the file keeps it open, and on Windows that bars the next save.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        sums = header.get("checksums")
        for part in ("", HELD) if held else ("",):
            expect(isinstance(sums, dict) and sums.get(part) == _sum(tensors, part), "damaged: a wrong checksum")
        tensors |= {name: _widen(tensors[name]) for name in narrow if name in tensors}
        tensors = unshare_rows(tensors, header.get("shared", {}), HELD)
        tensors |= {name: tensors[name].t() for name in tensors if name in columnwise}
        kept = {name[len(HELD) :]: tensors.pop(name) for name in list(tensors) if name.startswith(HELD)}
        return _make_model(header, tensors, kept)
    except FileNotFoundError:
        raise_missing_file(path)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise_input_error("path", f"be a model file of version {VERSION}", f"{path} ({error})", remedy)


def read_versions(path: str | Path) -> tuple[int, str | None]:
    """Return the version of a model file that `load_model` reads, and that of the protonet which wrote it, if known."""
    with optional_packages("files"):
        from safetensors import safe_open  # noqa: PLC0415 - optional

    with safe_open(path, framework="pt") as file:
        header = parse_header(file.metadata()[FORMAT])
    return header["version"], header.get("library")


def check_model(model: Model) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return header, the network's tensors and the held ones, once it is known that they make a model again.

    Raises:
        InputTypeError: In the name of ``function``: the network's encoder is not of this library.
        InputError: They make no model.
    """
    if not isinstance(model.network.encoder, Encoder):
        got = type(model.network.encoder).__name__
        raise_input_error(
            "model", "hold a network with a protonet.Encoder", got, "Pass one of protonet.solve.", kind=InputTypeError
        )
    structure, parts = describe_network(model.network)
    tensors, held = ({name: _copy(each) for name, each in some.items()} for some in (parts, model.held))
    described, more = (None, {}) if model.encoding is None else model.encoding.describe()
    tensors |= {COLUMNS + name: tensor for name, tensor in more.items()}
    named: dict[str, Any] = {"classes": model.classes, "columns": model.columns, "metadata": model.metadata}
    named |= {"structure": structure, "encoding": described}
    try:
        header = parse_header(json.dumps({"version": VERSION, "library": installed_version(DISTRIBUTION), **named}))
        header |= tell_facts(_make_model(header, tensors, held))
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = "Pass a float32 network of protonet.solve, a name per class and feature, and finite metadata."
        raise_input_error("model", "be what can be read again", f"one with {error}", remedy)
    return header, tensors, held


def tell_facts(model: Model) -> dict[str, Any]:
    """Return what a header says for whoever asks without reading tensors, as JSON can hold it."""
    network, encoding = model.network, model.encoding
    return {
        "counts": network.counts.tolist(),
        "parameters": network.count_parameters(),
        "buffer_elements": network.count_buffer_elements(),
        "told": None if encoding is None else encoding.summary,
    }


def describe_network(network: PrototypeNetwork) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Describe a network by its views.

    Args:
        network: With the encoder that `protonet.solve` gives.

    Returns:
        structure: What its tensors do not tell, as JSON can hold it.
        tensors: Its parameters and buffers by name, what several views read once.
    """
    encoder = network.encoder
    assert isinstance(encoder, Encoder)  # check_model has said so
    sources = encoder.list_sources()
    tensors = {name: getattr(network, name) for name in ("sums", "counts", "temperature")}
    tensors |= {name: getattr(encoder, name) for name in ("weights", "origin", "scale")}
    for number, source in enumerate(sources):
        tensors |= {f"sources.{number}.{name}": tensor for name, tensor in source.state_dict().items()}
    views: list[dict[str, Any]] = []
    for number, view in enumerate(encoder.list_views()):
        source_number = None if view.source is None else sources.index(view.source)
        views.append({"kind": view.kind, "source": source_number, **view.describe()})
        tensors |= {f"views.{number}.{name}": tensor for name, tensor in view.own_tensors().items()}
    read = [{"kind": source.kind, **source.describe()} for source in sources]
    structure = {"input_dim": encoder.input_dim, "sources": read, "views": views}
    return structure, {name: tensor.detach() for name, tensor in tensors.items()}


@torch.inference_mode(False)
def restore_network(structure: Any, tensors: Mapping[str, Tensor]) -> PrototypeNetwork:
    """Build the network that `describe_network` described, from a description that may say anything.

    Args:
        structure: The description.
        tensors: The tensors by name, on the CPU.

    Returns:
        The network in eval mode.

    Raises:
        ValueError: What the two say is no network; the reason in a few words.
    """
    left = dict(tensors)
    whole = Stored(structure, left)
    input_dim = whole.whole("input_dim", 2**31, low=1)
    sources = _restore_sources(whole, left, input_dim)
    kinds = {view.kind: view for _, view in KINDS}
    views = []
    for number, description in enumerate(whole.entry("views", list)):
        stored = Stored(description, left, f"views.{number}.")
        kind = kinds.get(stored.entry("kind", str))
        if kind is None:
            raise ValueError("a view of an unknown kind")
        read = None if description.get("source") is None else sources[stored.whole("source", len(sources) - 1)]
        views.append(kind.restore(stored, read, input_dim))
    expect(bool(views), "no view")
    weights = whole.take("weights", sum(len(view.sizes) for view in views))
    expect(bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-3, "weights that are no shares")
    origin, scale, temperature = whole.take("origin", input_dim), whole.take("scale"), whole.take("temperature")
    expect(bool(scale > 0) and bool(temperature > 0), "a scale or temperature that is not positive")
    encoder = Encoder(views, weights, origin=origin, scale=scale)
    sums, counts = whole.take("sums", None, encoder.embedding_dim), whole.take("counts", None, dtype=torch.int64)
    expect(len(sums) == len(counts) > 0 and bool((counts >= 0).all()), "sums of other classes than counts")
    expect(not left, "tensors that belong to no view")
    network = PrototypeNetwork(
        encoder, embedding_dim=encoder.embedding_dim, num_classes=len(counts), temperature=float(temperature)
    )
    network.set_sums(sums, counts)
    return network.eval()


def _restore_sources(whole: Stored, left: dict[str, Tensor], input_dim: int) -> list[Source]:
    """Return what views read, which files before version 7 only count: linear maps."""
    if type(whole.description.get("sources")) is int:
        described: list[Any] = [{"kind": LinearMap.kind}] * whole.whole("sources", len(left))
    else:
        described = whole.entry("sources", list)
    kinds = {source.kind: source for source in SOURCES}
    sources = []
    for number, description in enumerate(described):
        stored = Stored(description, left, f"sources.{number}.")
        kind = kinds.get(stored.entry("kind", str))
        if kind is None:
            raise ValueError("a source of an unknown kind")
        sources.append(kind.restore(stored, input_dim))
    return sources


def _sum(tensors: Mapping[str, Tensor], part: str) -> str:
    """Return what `sum_part` does of tensors."""
    arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    return sum_part({name: (str(each.dtype), each.shape, each.data) for name, each in arrays.items()}, part)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, by rows or, of a matrix, by columns, which shares its memory with no other tensor."""
    tensor = tensor.detach().cpu().clone()
    return tensor if tensor.ndim == 2 and tensor.t().is_contiguous() else tensor.contiguous()


def _narrow(tensor: Tensor) -> Tensor:
    """Return whole numbers in as few bytes as hold them."""
    if tensor.dtype == torch.int64 and tensor.numel():
        for dtype in (torch.int16, torch.int32):
            if torch.iinfo(dtype).min <= int(tensor.min()) and int(tensor.max()) <= torch.iinfo(dtype).max:
                return tensor.to(dtype)
    return tensor


def _widen(tensor: Tensor) -> Tensor:
    """Return what `_narrow` was given; files of version 7 have directions in half precision, too."""
    expect(tensor.dtype in {torch.float16, torch.int16, torch.int32}, "narrow tensors that are wide")
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _make_model(header: dict[str, Any], tensors: dict[str, Tensor], held: dict[str, Tensor]) -> Model:
    """Return the model that a header and tensors give; raise a ValueError if they give none."""
    named = [name for name in tensors if name.startswith(COLUMNS)]
    described, own = header.get("encoding"), {name[len(COLUMNS) :]: tensors[name] for name in named}
    expect(described is not None or not own, "tensors that belong to no column")
    encoding = None if described is None else Encoding.restore(described, own)
    rest = {name: tensor for name, tensor in tensors.items() if name not in named}
    network = restore_network(header.get("structure"), rest)
    classes = _check_names("classes", header.get("classes"), len(network.prototypes), (str, int))
    columns, input_dim = header.get("columns"), header["structure"]["input_dim"]
    if columns is not None:
        columns = _check_names("columns", columns, input_dim if encoding is None else len(encoding.columns), (str,))
    expect(encoding is None or sum(encoding.sizes) == input_dim, "columns that make another number of features")
    metadata = header.get("metadata")
    for name, tensor in held.items():
        expect_sound(name, tensor, infinite=name.partition(".")[0].isdigit())  # of a leaf of a fold model
    if not isinstance(metadata, dict):
        raise ValueError("no metadata")
    return Model(network, classes, columns, metadata, held, encoding)


def _check_names(what: str, names: Any, count: int, kinds: tuple[type, ...]) -> Any:
    """Return ``count`` different names as a tuple, all of one kind; raise a ValueError if they are not."""
    one_kind = isinstance(names, list) and any(all(type(name) is kind for name in names) for kind in kinds)
    expect(one_kind and len(set(names)) == len(names) == count, f"{what} that are not {count} different names")
    return tuple(names)
