"""Networks of pictures from files that a person brings: ONNX, torch.export; or any callable."""

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

from protonet._validation import check_int
from protonet.embeddings.pictures import SETTINGS
from protonet.embeddings.pictures.reading import map_pictures, need_pillow
from protonet.embeddings.representation import Record, Representation, hash_file
from protonet.errors import optional_packages, raise_input_error, renamed_arguments
from protonet.views.config import Stored, expect

FUNCTION = "embed_pictures"
#: What the name of a backbone's file may end in.
SUFFIXES = (".onnx", ".pt2")
#: From pictures (b, channels, height, width) float32 to embeddings (b, width), or (b, width, 1, 1).
Network = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Preprocessing:
    """What decides a picture's embedding, beside the picture."""

    file: str  #: The name of the backbone's file.
    digest: str  #: Of its bytes, SHA-256, hexadecimal; "" for a callable.
    height: int  #: Pixels.
    width: int
    channels: int  #: 3, red, green and blue; or 1, grey.
    mean: tuple[float, ...]  #: By channel, of values in [0, 1]; it is subtracted, ...
    std: tuple[float, ...]  #: ... and this divided by.

    def write(self) -> str:
        """Return it as `open_typed` takes it, the file without its folder."""
        mean, std = ("/".join(map(repr, each)) for each in (self.mean, self.std))
        return f"{self.file}:size={self.height}x{self.width},mean={mean},std={std}"

    def hash(self) -> str:
        """Return the SHA-256, hexadecimal, of all that decides an embedding; "" for a callable."""
        settings = replace(self, file="").describe()
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest() if self.digest else ""

    def describe(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def restore(cls, stored: Stored) -> Preprocessing:
        """Build it again from a description that may say anything."""
        channels = stored.get_int("channels", 3, low=1)
        height, width = (stored.get_int(name, 2**15, low=1) for name in ("height", "width"))
        mean, std = (stored.get_floats(name, channels) for name in ("mean", "std"))
        expect(all(each > 0 for each in std), "a backbone's std that is not positive")
        return cls(stored.entry("file", str), stored.entry("digest", str), height, width, channels, mean, std)


class _Opened(NamedTuple):
    """A backbone's file."""

    network: Network
    shape: tuple[int | None, ...]  #: Of its input, None for any size.
    settings: dict[str, str]  #: What its metadata say of size, mean and std.


@dataclass(frozen=True)
class Backbone:
    """A network that embeds pictures, and how they are brought to it.

    Args:
        network: It.
        preprocessing: How.
        width: Of an embedding.
        batch: How many pictures it takes at a time; None for any number.
    """

    network: Network
    preprocessing: Preprocessing
    width: int
    batch: int | None = None

    def represent(self, cache: Path | None = None) -> Representation:
        """Return the representation of pictures, whose embeddings a folder keeps; of a callable none does."""
        settings = self.preprocessing
        record = Record(settings.write(), "picture", self.width, settings.hash(), "")
        return Representation(record, self._compute, cache)

    def run(self, x: Tensor) -> Tensor:
        """Return the embeddings (n, width) float32 of prepared pictures (n, channels, height, width)."""
        short = -len(x) % (self.batch or 1)  # a network of a fixed number of pictures gets the last one again
        filled = torch.cat([x, x[-1:].expand(short, -1, -1, -1)]) if short else x
        parts = filled.split(self.batch or len(x))
        return torch.cat([run_network(self.network, part, self.preprocessing.file) for part in parts])[: len(x)]

    def _compute(self, paths: Sequence[Path]) -> np.ndarray:
        """Return the embeddings (n, width) of pictures."""
        need_pillow()
        settings = self.preprocessing
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (settings.mean, settings.std))

        def work(pixels: Tensor) -> Tensor:
            return self.run((pixels.float() / 255 - mean) / std)

        grey = settings.channels == 1
        return map_pictures(paths, settings.height, settings.width, work, grey=grey).numpy()


def run_network(network: Network, x: Tensor, name: str) -> Tensor:
    """Return the embeddings (b, width) float32 of pictures (b, channels, height, width)."""
    try:
        found = network(x)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        got = f"{name} with {tuple(x.shape)}: {reason}"
        raise_input_error("backbone", "take pictures of that size", got, "Name the size that it was trained with.")
    rows = torch.as_tensor(found[0] if isinstance(found, (tuple, list)) else found).detach().float()
    if rows.ndim > 2 and math.prod(rows.shape[2:]) == 1:
        rows = rows.flatten(1)
    if rows.ndim != 2 or len(rows) != len(x):
        got = f"{tuple(rows.shape)} for {len(x)} by {name}"
        remedy = "Export it with its pooling, without its map of places."
        raise_input_error("backbone", "give an embedding (n, width) of n pictures", got, remedy)
    return rows


def open_backbone(
    backbone: str | Path | Network,
    *,
    size: int | tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Backbone:
    """Open a backbone.

    Args:
        backbone: A file, ``.onnx`` or ``.pt2`` (`torch.export.save`, which may run code of the file: open your own),
            whose first input is pictures (n, channels, height, width) or flat grey ones (n, height * width), and whose
            first output embeddings (n, width); or a callable of such tensors.
        size: Height and width in pixels, or both as one; None for what the file says.
        mean: By channel, of values in [0, 1]; None for what the file's metadata say, or else 0.
        std: The same, or else 1.

    Raises:
        MissingPackageError: ONNX Runtime is missing.
        InputError: No such file, or none of these; another size than it takes; an output of another rank.
    """
    digest = ""
    if callable(backbone):
        opened = _Opened(backbone, (None, 3, None, None), {})
        name = getattr(backbone, "__name__", type(backbone).__name__)
    else:
        path = Path(backbone)
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            raise_input_error("backbone", f"be a file that ends in {' or '.join(SUFFIXES)}", path, "Export it as one.")
        digest, name = hash_file(path), path.name
        opened = _open_onnx(path) if path.suffix.lower() == ".onnx" else _open_exported(path)
    network, shape, settings = opened
    height, width = _choose_size(name, shape, size, settings.get("size"))
    channels = 1 if len(shape) == 2 else shape[1]
    if channels not in {1, 3}:
        raise_input_error("backbone", "take pictures of 1 or 3 channels", f"{name} with {shape}", "Export it so.")
    mean, std = (
        _choose_numbers(given, argument, settings.get(argument), otherwise, channels)
        for given, argument, otherwise in ((mean, "mean", 0.0), (std, "std", 1.0))
    )
    if not all(each > 0 for each in std):
        raise_input_error("std", "be above 0", std, "Pass what the backbone was trained with.")
    flat = network
    if len(shape) == 2:
        network = lambda x: flat(x.flatten(1))  # noqa: E731 - a function of one line
    preprocessing = Preprocessing(name, digest, height, width, channels, tuple(mean), tuple(std))
    batch = shape[0]
    trial = run_network(network, torch.zeros(batch or 1, channels, height, width), name)
    return Backbone(network, preprocessing, trial.shape[1], batch)


def split_backbone(text: str) -> tuple[str, str]:
    """Return the file of a backbone that a person typed, and what stands after its colon."""
    matched = re.fullmatch(r"(.*\.(?:onnx|pt2)):(\w+=.*)", text, re.IGNORECASE)
    return (text, "") if matched is None else (matched[1], matched[2])


def open_typed(text: str) -> Backbone:
    """Open a backbone as commands take it: a file, and after a colon what its metadata do not say.

    Args:
        text: Such as ``FILE.onnx`` or ``FILE.onnx:size=224x160,mean=0.485/0.456/0.406,std=0.2``.

    Raises:
        MissingPackageError: As `open_backbone`.
        InputError: The same; or what is said after the file is something else.
    """
    path, more = split_backbone(text)
    settings: dict[str, Any] = {}
    for part in filter(None, more.split(",")):
        name, _, value = part.partition("=")
        numbers = _parse(value)
        if name not in SETTINGS or name in settings or not numbers or (name == "size" and len(numbers) > 2):
            remedy = "Pass FILE:size=224,mean=0.485/0.456/0.406,std=0.2, say."
            raise_input_error("backbone", f"say no more than {', '.join(SETTINGS)} after the file", repr(part), remedy)
        settings[name] = (int(numbers[0]), int(numbers[-1])) if name == "size" else numbers
    with renamed_arguments(**dict.fromkeys(SETTINGS, "backbone")):
        return open_backbone(path, **settings)


def embed_pictures(
    paths: Sequence[str | Path],
    backbone: str | Path | Network,
    *,
    size: int | tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    cache: str | Path | None = None,
    shown: bool = False,
) -> np.ndarray:
    """Embed pictures by a backbone: what ``fit --representation FILE`` gives the solver.

    Args:
        paths: Of the pictures, at least one.
        backbone: As in `open_backbone`, and so are the others.
        size: The same.
        mean: The same.
        std: The same.
        cache: A folder to keep embeddings in; None for ``embeddings`` in the cache's folder. Those of a callable are
            not kept.
        shown: Show progress on stderr.

    Returns:
        (n, width) float32.

    Raises:
        MissingPackageError: Pillow or ONNX Runtime is missing.
        InputError: As `open_backbone`; no path; a picture that cannot be read.
    """
    if not len(paths):
        raise_input_error("paths", "name a picture", "none", "Pass paths.")
    opened = open_backbone(backbone, size=size, mean=mean, std=std)
    return opened.represent(None if cache is None else Path(cache)).embed(list(map(Path, paths)), shown=shown)


def _open_onnx(path: Path) -> _Opened:
    """Open an ONNX file."""
    with optional_packages("onnx,pictures"):
        import onnxruntime  # noqa: PLC0415 - optional

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # each thread of ours computes alone
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        _refuse_file(path, error)
    inputs, output = session.get_inputs(), session.get_outputs()[0].name
    shape = _check_inputs(path, [tuple(each.shape) for each in inputs])

    def run(x: Tensor) -> Tensor:
        (found,) = session.run([output], {inputs[0].name: x.numpy()})
        return torch.from_numpy(np.ascontiguousarray(found))

    return _Opened(run, shape, dict(session.get_modelmeta().custom_metadata_map))


def _open_exported(path: Path) -> _Opened:
    """Open a file of `torch.export.save`."""
    extra = dict.fromkeys(SETTINGS, "")
    try:
        program = torch.export.load(path, extra_files=extra)
        names = set(program.graph_signature.user_inputs)
        nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
        shapes = [tuple(node.meta["val"].shape) for node in nodes]
        network = program.module()
    except Exception as error:
        _refuse_file(path, error)
    return _Opened(network, _check_inputs(path, shapes), {name: text for name, text in extra.items() if text})


def _refuse_file(path: Path, error: Exception) -> NoReturn:
    """Raise an InputError: a file is no backbone."""
    reason = type(error).__name__
    raise_input_error("backbone", "be a network that can be opened", f"{path} ({reason})", "Export it again.")


def _check_inputs(path: Path, shapes: list[tuple[Any, ...]]) -> tuple[int | None, ...]:
    """Return the shape of the only input, None for what may be of any size."""
    if len(shapes) != 1 or len(shapes[0]) not in {2, 4}:
        got = f"{path} with inputs of {shapes}"
        raise_input_error("backbone", "take pictures (n, channels, height, width) alone", got, "Export it so.")
    return tuple(each if type(each) is int else None for each in shapes[0])


def _choose_size(
    name: str, shape: tuple[int | None, ...], size: int | tuple[int, int] | None, said: str | None
) -> tuple[int, int]:
    """Return height and width: as asked for, as the file has it, or as its metadata say."""
    own: tuple[int | None, int | None] = (None, None)
    if len(shape) == 4:
        own = shape[2], shape[3]
    elif shape[1] is not None and size is None and math.isqrt(shape[1]) ** 2 == shape[1]:
        own = (math.isqrt(shape[1]),) * 2
    if size is None and None in own and said is not None:
        found = _parse(said)
        size = (int(found[0]), int(found[-1])) if found else None
    if size is None:
        if own[0] is None or own[1] is None:
            got = f"none, and {name} takes any"
            raise_input_error(
                "size", "say how large pictures have to be", got, "Name the size that it was trained with."
            )
        return own[0], own[1]
    asked = (size, size) if isinstance(size, int) else tuple(size)
    height, width = (check_int("size", each, low=1, high=2**15) for each in asked)
    fits = all(has in {None, wanted} for has, wanted in zip(own, (height, width), strict=True))
    if not fits or (len(shape) == 2 and shape[1] not in {None, height * width}):
        got = f"{height} x {width}, and {name} takes {shape}"
        raise_input_error("size", "be what the backbone takes", got, "Leave it out, or export the backbone anew.")
    return height, width


def _choose_numbers(
    given: Sequence[float] | None, argument: str, said: str | None, otherwise: float, channels: int
) -> tuple[float, ...]:
    """Return a number for each channel: as asked for, as the file's metadata say, or another one."""
    found = list(map(float, given)) if given is not None else _parse(said) if said else [otherwise]
    if len(found) == 1:
        found *= channels
    if len(found) != channels or not all(map(math.isfinite, found)):
        got, must = f"{given if given is not None else said!r}", f"be {channels} finite numbers, or one"
        raise_input_error(argument, must, got, "Pass what the backbone was trained with.")
    return tuple(found)


def _parse(text: str) -> list[float]:
    """Return the numbers of a text, with "," "/" "x" or spaces between them, or as a JSON list; none if it is none."""
    try:
        return [float(each) for each in re.split(r"[,/x\s]+", text.strip("[]() "))]
    except ValueError:
        return []
