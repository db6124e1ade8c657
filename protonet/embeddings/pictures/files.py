"""Backbones: picture encoders from the user's files (ONNX, torch.export) or from any callable."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from protonet._io import JsonDict
from protonet._validation import check_int
from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder, first_line, hash_file
from protonet.embeddings.pictures.reading import map_pictures, require_pillow
from protonet.errors import optional_packages, raise_input_error, renamed_arguments

#: Suffixes of a backbone's file.
BACKBONE_SUFFIXES = (".onnx", ".pt2")
#: Names of the preprocessing settings that the user, or the metadata of a network's file, may specify.
PREPROCESSING_SETTINGS = ("size", "mean", "std")
#: Function that maps pictures (b, channels, height, width) float32 to embeddings (b, width) or (b, width, 1, 1).
PictureNetwork = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of pictures for a pretrained network (backbone), and the name and hash of its file."""

    file: str  #: The name of the backbone's file.
    digest: str  #: SHA-256 of the bytes of the file, hexadecimal; "" if the network is a callable.
    height: int  #: Height of the network's input in pixels.
    width: int  #: Width of the network's input in pixels.
    channels: int  #: 3 for RGB, 1 for grey.
    mean: tuple[float, ...]  #: Numbers that are subtracted from the channels, whose values are in [0, 1].
    std: tuple[float, ...]  #: Numbers by which the channels are then divided.

    def to_text(self) -> str:
        """Format the file name and the settings as a text FILE:SETTINGS, as `load_backbone_spec` reads it."""
        mean, std = ("/".join(map(repr, values)) for values in (self.mean, self.std))
        return f"{self.file}:size={self.height}x{self.width},mean={mean},std={std}"

    def compute_hash(self) -> str:
        """Compute the SHA-256, hexadecimal, of file and settings; "" if the network is a callable."""
        settings = replace(self, file="").to_dict()
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest() if self.digest else ""

    def to_dict(self) -> JsonDict:
        """Convert to a mapping of field names to values."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize pixels (..., channels, height, width) uint8 to the float32 input of the network."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std


class _BackboneFile(NamedTuple):
    """The content of a backbone's file."""

    network: PictureNetwork
    input_shape: tuple[int | None, ...]  #: Shape of the input, with None for each dimension of any size.
    settings: dict[str, str]  #: The settings "size", "mean" and "std" in the metadata of the file, as texts.


@dataclass(frozen=True)
class Backbone:
    """A network that embeds pictures, with its preprocessing."""

    network: PictureNetwork
    preprocessing: Preprocessing
    embedding_width: int  #: Width of an embedding.
    batch_size: int | None = None  #: The fixed batch size of the network; None for any size.

    def to_pretrained_encoder(self, cache: Path | None = None) -> PretrainedEncoder:
        """Convert to a `PretrainedEncoder`, which caches embeddings in the folder ``cache``.

        The embeddings of a callable are not cached.
        """
        settings = self.preprocessing
        record = EncoderRecord(settings.to_text(), "picture", self.embedding_width, settings.compute_hash(), "")
        return PretrainedEncoder(record, self._embed_files, cache)

    def embed_batch(self, x: Tensor) -> Tensor:
        """Embed preprocessed pictures (n, channels, height, width): (n, width) float32."""
        missing = -len(x) % (self.batch_size or 1)  # the last batch of a fixed size is padded with copies of a picture
        padded = torch.cat([x, x[-1:].expand(missing, -1, -1, -1)]) if missing else x
        parts = padded.split(self.batch_size or len(x))
        return torch.cat([run_network(self.network, part, self.preprocessing.file) for part in parts])[: len(x)]

    def _embed_files(self, paths: Sequence[Path]) -> np.ndarray:
        """Compute the embeddings (n, width) of pictures by their paths."""
        require_pillow()
        settings, grey = self.preprocessing, self.preprocessing.channels == 1

        def embed(pixels: Tensor) -> Tensor:
            return self.embed_batch(settings.normalize(pixels))

        return map_pictures(paths, settings.height, settings.width, embed, grey=grey).numpy()


def run_network(network: PictureNetwork, x: Tensor, name: str) -> Tensor:
    """Compute the embeddings (b, width) float32 of pictures (b, channels, height, width) by a network.

    Raises an InputError, with the name of the network, if it fails or its output has another shape.
    """
    try:
        output = network(x)
    except Exception as error:
        got = f"{name} with {tuple(x.shape)}: {first_line(error)}"
        raise_input_error("backbone", "take pictures of that size", got, "Name the size that it was trained with.")
    rows = torch.as_tensor(output[0] if isinstance(output, (tuple, list)) else output).detach().float()
    if rows.ndim > 2 and math.prod(rows.shape[2:]) == 1:
        rows = rows.flatten(1)
    if rows.ndim != 2 or len(rows) != len(x):
        got = f"{tuple(rows.shape)} for {len(x)} by {name}"
        remedy = "Export it with its pooling, without its map of places."
        raise_input_error("backbone", "give an embedding (n, width) of n pictures", got, remedy)
    return rows


def load_backbone(
    backbone: str | Path | PictureNetwork,
    *,
    size: int | tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Backbone:
    """Load a backbone: a file ``.onnx`` or ``.pt2`` (which may run code: load your own only), or a callable.

    Its first input are pictures (n, channels, height, width) or flat grey pictures (n, height * width), its first
    output embeddings (n, width). ``size`` is in pixels, one number or height and width. ``mean`` and ``std`` are one
    number or one per channel, of values in [0, 1]. An argument that is None is read from the metadata of the file, or
    has its default: the size of the network's input, 0 and 1.
    """
    digest = ""
    if callable(backbone):
        opened = _BackboneFile(backbone, (None, 3, None, None), {})
        name = getattr(backbone, "__name__", type(backbone).__name__)
    else:
        path = Path(backbone)
        if path.suffix.lower() not in BACKBONE_SUFFIXES or not path.is_file():
            suffixes = " or ".join(BACKBONE_SUFFIXES)
            raise_input_error("backbone", f"be a file that ends in {suffixes}", path, "Export it as one.")
        digest, name = hash_file(path), path.name
        opened = _load_onnx_backbone(path) if path.suffix.lower() == ".onnx" else _load_torch_export_backbone(path)
    network, shape, settings = opened
    height, width = _choose_picture_size(name, shape, size, settings.get("size"))
    channels = 1 if len(shape) == 2 else shape[1]
    if channels not in {1, 3}:
        raise_input_error("backbone", "take pictures of 1 or 3 channels", f"{name} with {shape}", "Export it so.")
    mean, std = (
        _choose_channel_values(given, argument, settings.get(argument), default, channels)
        for given, argument, default in ((mean, "mean", 0.0), (std, "std", 1.0))
    )
    if not all(value > 0 for value in std):
        raise_input_error("std", "be above 0", std, "Pass what the backbone was trained with.")
    flat_network = network
    if len(shape) == 2:
        network = lambda x: flat_network(x.flatten(1))  # noqa: E731 - a function of one line
    preprocessing = Preprocessing(name, digest, height, width, channels, tuple(mean), tuple(std))
    batch = shape[0]
    trial = run_network(network, torch.zeros(batch or 1, channels, height, width), name)
    return Backbone(network, preprocessing, trial.shape[1], batch)


def split_backbone_spec(text: str) -> tuple[str, str]:
    """Split a text FILE:SETTINGS into the path of the file and the settings; "" for no settings."""
    matched = re.fullmatch(r"(.*\.(?:onnx|pt2)):(\w+=.*)", text, re.IGNORECASE)
    return (text, "") if matched is None else (matched[1], matched[2])


def load_backbone_spec(text: str) -> Backbone:
    """Load a backbone by a text such as ``FILE.onnx`` or ``FILE.onnx:size=224x160,mean=0.485/0.456/0.406,std=0.2``."""
    path, settings_text = split_backbone_spec(text)
    settings: JsonDict = {}
    for part in filter(None, settings_text.split(",")):
        name, _, value = part.partition("=")
        values = _parse_floats(value)
        if name not in PREPROCESSING_SETTINGS or name in settings or not values or (name == "size" and len(values) > 2):
            remedy = "Pass FILE:size=224,mean=0.485/0.456/0.406,std=0.2, say."
            must = f"say no more than {', '.join(PREPROCESSING_SETTINGS)} after the file"
            raise_input_error("backbone", must, repr(part), remedy)
        settings[name] = (int(values[0]), int(values[-1])) if name == "size" else values
    with renamed_arguments(**dict.fromkeys(PREPROCESSING_SETTINGS, "backbone")):
        return load_backbone(path, **settings)


def embed_pictures(
    paths: Sequence[str | Path],
    backbone: str | Path | PictureNetwork,
    *,
    size: int | tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    cache: str | Path | None = None,
    show_progress: bool = False,
) -> np.ndarray:
    """Embed pictures by a backbone, as ``fit --representation FILE`` does.

    Args:
        paths: The paths of the pictures, at least one.
        backbone: A file or callable, as in `load_backbone`.
        size: Height and width in pixels, as in `load_backbone`.
        mean: Mean of each channel, as in `load_backbone`.
        std: Divisor of each channel, as in `load_backbone`.
        cache: A folder for cached embeddings; None for the default folder. Those of a callable are not cached.
        show_progress: Whether to show a progress bar on stderr.

    Returns:
        (n, width) float32.

    Raises:
        MissingPackageError: Pillow or ONNX Runtime is missing.
        InputError: As `load_backbone`; or there is no path, or a picture cannot be read.
    """
    if not len(paths):
        raise_input_error("paths", "name a picture", "none", "Pass paths.")
    opened = load_backbone(backbone, size=size, mean=mean, std=std)
    return opened.to_pretrained_encoder(None if cache is None else Path(cache)).embed(
        list(map(Path, paths)), show_progress=show_progress
    )


def _load_onnx_backbone(path: Path) -> _BackboneFile:
    """Load an ONNX file as a network with the shape and settings of its input."""
    with optional_packages("onnx,pictures"):
        import onnxruntime  # noqa: PLC0415 - optional

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # `map_pictures` uses several threads
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        _raise_unusable_file(path, error)
    inputs, output = session.get_inputs(), session.get_outputs()[0].name
    shape = _validate_input_shape(path, [tuple(node.shape) for node in inputs])

    def run(x: Tensor) -> Tensor:
        (embeddings,) = session.run([output], {inputs[0].name: x.numpy()})
        return torch.from_numpy(np.ascontiguousarray(embeddings))

    return _BackboneFile(run, shape, dict(session.get_modelmeta().custom_metadata_map))


def _load_torch_export_backbone(path: Path) -> _BackboneFile:
    """Load a file of `torch.export.save` as a network with the shape and settings of its input."""
    extra = dict.fromkeys(PREPROCESSING_SETTINGS, "")
    try:
        program = torch.export.load(path, extra_files=extra)
        names = set(program.graph_signature.user_inputs)
        nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
        shapes = [tuple(node.meta["val"].shape) for node in nodes]
        network = program.module()
    except Exception as error:
        _raise_unusable_file(path, error)
    texts = {name: text for name, text in extra.items() if text}
    return _BackboneFile(network, _validate_input_shape(path, shapes), texts)


def _raise_unusable_file(path: Path, error: Exception) -> NoReturn:
    """Raise an InputError: the file ``path`` cannot be loaded as a backbone, because of ``error``."""
    reason = type(error).__name__
    raise_input_error("backbone", "be a network that can be opened", f"{path} ({reason})", "Export it again.")


def _validate_input_shape(path: Path, shapes: list[tuple[object, ...]]) -> tuple[int | None, ...]:
    """Return the shape of a network's input, with None for any size; raise an InputError if it takes no pictures."""
    if len(shapes) != 1 or len(shapes[0]) not in {2, 4}:
        got = f"{path} with inputs of {shapes}"
        raise_input_error("backbone", "take pictures (n, channels, height, width) alone", got, "Export it so.")
    return tuple(size if type(size) is int else None for size in shapes[0])


def _choose_picture_size(
    name: str, shape: tuple[int | None, ...], size: int | tuple[int, int] | None, metadata: str | None
) -> tuple[int, int]:
    """Choose height and width of pictures for the network ``name``: ``size``, or else the input's shape or metadata."""
    input_size: tuple[int | None, int | None] = (None, None)
    if len(shape) == 4:
        input_size = shape[2], shape[3]
    elif shape[1] is not None and size is None and math.isqrt(shape[1]) ** 2 == shape[1]:
        input_size = (math.isqrt(shape[1]),) * 2
    if size is None and None in input_size and metadata is not None:
        values = _parse_floats(metadata)
        size = (int(values[0]), int(values[-1])) if values else None
    if size is None:
        if input_size[0] is None or input_size[1] is None:
            got, remedy = f"none, and {name} takes any", "Name the size that it was trained with."
            raise_input_error("size", "say how large pictures have to be", got, remedy)
        return input_size[0], input_size[1]
    requested = (size, size) if isinstance(size, int) else tuple(size)
    height, width = (check_int("size", side, low=1, high=2**15) for side in requested)
    fits = all(fixed in {None, side} for fixed, side in zip(input_size, (height, width), strict=True))
    if not fits or (len(shape) == 2 and shape[1] not in {None, height * width}):
        got = f"{height} x {width}, and {name} takes {shape}"
        raise_input_error("size", "be what the backbone takes", got, "Leave it out, or export the backbone anew.")
    return height, width


def _choose_channel_values(
    given: Sequence[float] | None, argument: str, metadata: str | None, default: float, channels: int
) -> tuple[float, ...]:
    """Choose a number for each channel: the user's (``given``), those in the file's ``metadata``, or the default."""
    from_file = _parse_floats(metadata) if metadata else [default]
    values = from_file if given is None else list(map(float, given))
    if len(values) == 1:
        values *= channels
    if len(values) != channels or not all(map(math.isfinite, values)):
        got, must = f"{given if given is not None else metadata!r}", f"be {channels} finite numbers, or one"
        raise_input_error(argument, must, got, "Pass what the backbone was trained with.")
    return tuple(values)


def _parse_floats(text: str) -> list[float]:
    """Parse numbers that are separated by ",", "/", "x" or spaces, or a JSON list; [] for an invalid text."""
    try:
        return [float(item) for item in re.split(r"[,/x\s]+", text.strip("[]() "))]
    except ValueError:
        return []
