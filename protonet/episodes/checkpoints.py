"""Checkpoints of meta-training: safetensors files, written whole or not at all, that say what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protonet._checks import fail, find_version, optional_packages
from protonet._writing import write_whole
from protonet.episodes.backbones import make_backbone

#: The name of the entry, in the file's metadata, that says as JSON what the file is.
FORMAT = "protonet.episodes.train"
#: Raised whenever what is written changes; files of later versions are not read.
VERSION = 2
INSTALL = 'pip install "protonet[train]"'
#: What the names of an encoder's best weights begin with.
BEST = "best."


def write_checkpoint(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all.

    Args:
        path: Of the file.
        tensors: On any device.
        facts: Anything else, as JSON can write it.
    """
    with optional_packages("write_checkpoint", INSTALL):
        from safetensors.torch import save  # noqa: PLC0415 - optional

    header = {"version": VERSION, "library": find_version("protonet"), **facts}
    content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, {FORMAT: json.dumps(header)})
    write_whole(path, lambda file: file.write(content))


def read_checkpoint(function: str, argument: str, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint's tensors, on the CPU, and its other facts.

    Args:
        function: The public function's or command's name, for messages.
        argument: The argument that the path came from, for messages.
        path: Of the file.

    Raises:
        ImportError: safetensors is missing.
        ValueError: No file, a truncated or foreign one, or one of a newer version.
    """
    with optional_packages(function, INSTALL):
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

    wanted, remedy = "be a checkpoint of protonet.episodes train", "Pass the path of such a file."
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(FORMAT, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        fail(function, argument, wanted, f"{path} ({error})", remedy)
    if "version" not in header:
        fail(function, argument, wanted, f"{path} (of something else)", remedy)
    if header["version"] > VERSION:
        got = f"{path} of version {header['version']}, by protonet {header.get('library')}"
        fail(function, argument, f"be of version {VERSION} or older", got, "Update protonet.")
    return tensors, header


def take_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, by the rest of their names."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def load_encoder(path: str | Path, *, dim: int | None = None) -> nn.Module:
    """Load the encoder of a checkpoint: the weights that were best on the validation classes.

    Args:
        path: A file that ``python -m protonet.episodes train`` wrote.
        dim: Features a row that the encoder must take, or None for any.

    Returns:
        A module in eval mode, on the CPU, without gradients, that maps rows (n, dim) float32 of the data set to
        (n, embedding_dim).

    Raises:
        ImportError: safetensors is missing.
        ValueError: No file, a truncated or foreign one, one of a newer version, or of an encoder of other rows.
    """
    tensors, facts = read_checkpoint("load_encoder", "path", path)
    own = facts["backbone"]["dim"]
    if dim not in (None, own):
        fail("load_encoder", "path", f"hold an encoder of {dim} features a row", own, "Pass the data that it learned.")
    encoder = make_backbone(**facts["backbone"], generator=torch.Generator())
    encoder.load_state_dict(take_prefix(tensors, BEST))
    return encoder.eval().requires_grad_(False)


def read_plan(path: str | Path) -> dict[str, Any]:
    """Return what was asked of the run that a checkpoint is of: its data set, its split's seed and all the rest.

    Args:
        path: A file that ``python -m protonet.episodes train`` wrote.

    Returns:
        The fields of `protonet.episodes.meta.Plan` by name, ``dataset`` and ``split_seed`` among them.

    Raises:
        ImportError: safetensors is missing.
        ValueError: No file, a truncated or foreign one, or one of a newer version.
    """
    plan: dict[str, Any] = read_checkpoint("read_plan", "path", path)[1]["plan"]
    return plan
