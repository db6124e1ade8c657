"""Write and read checkpoints of meta-training: safetensors files with metadata as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protonet._io import write_atomically
from protonet.episodes.networks.backbones import make_backbone, make_head
from protonet.episodes.samplers.batch import TrainedEncoder
from protonet.episodes.settings import TrainingPlan
from protonet.errors import DISTRIBUTION_NAME, installed_version, optional_packages, raise_input_error

CHECKPOINT_FORMAT = "protonet.episodes.train"  #: The key of the safetensors header under which the metadata are JSON.
CHECKPOINT_VERSION = 5  #: The version of the format; files of other versions are not read.
BEST_WEIGHTS_PREFIX = "best."  #: Names of the weights that were best on the validation classes begin with this prefix.
#: Names of the head's weights begin with this prefix, after ``BEST_WEIGHTS_PREFIX`` or another one.
HEAD_WEIGHTS_PREFIX = "head."


def write_checkpoint(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write named tensors, which may be on any device, and metadata as JSON to a checkpoint file, atomically."""
    with optional_packages("train"):
        from safetensors.torch import save  # noqa: PLC0415 - optional

    header = {"version": CHECKPOINT_VERSION, "library": installed_version(DISTRIBUTION_NAME), **metadata}
    weights = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    content = save(weights, {CHECKPOINT_FORMAT: json.dumps(header)})
    write_atomically(path, lambda file: file.write(content))


def read_checkpoint(argument: str, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors of a checkpoint file by name, on the CPU, and its metadata; ``argument`` names it in messages.

    The metadata include ``version`` (of the format) and ``library`` (the version of this package that wrote the file).
    An InputError is raised if the file does not exist, is truncated, is not a checkpoint, or has another version.
    """
    with optional_packages("train"):
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

    constraint, remedy = "be a checkpoint of protonet.episodes train", "Pass the path of such a file."
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(CHECKPOINT_FORMAT, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise_input_error(argument, constraint, f"{path} ({error})", remedy)
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if not isinstance(version, int):
        raise_input_error(argument, constraint, f"{path} (of something else)", remedy)
    if version != CHECKPOINT_VERSION:
        got = f"{path} of version {version}, by protonet {metadata.get('library')}"
        remedy = "Update protonet." if version > CHECKPOINT_VERSION else "Train it again."
        raise_input_error(argument, f"be of version {CHECKPOINT_VERSION}", got, remedy)
    return tensors, metadata


def select_by_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors whose names begin with a prefix, and remove the prefix from the names."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def split_encoder_and_head(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split weights by name into weights of the encoder and weights of the head, without the prefix of the head."""
    encoder = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD_WEIGHTS_PREFIX)}
    return encoder, select_by_prefix(tensors, HEAD_WEIGHTS_PREFIX)


def load_trained_encoder(path: str | Path, *, dim: int | None = None) -> TrainedEncoder:
    """Load the encoder and the head of a checkpoint, with the weights that were best on the validation classes.

    They are not yet connected to rows. Both modules are in evaluation mode, on the CPU, without gradients. An
    InputError is raised as in `read_checkpoint`, or if ``dim`` is given and the encoder takes another number of
    features.
    """
    tensors, metadata = read_checkpoint("path", path)
    plan = TrainingPlan(**metadata["plan"])
    if dim not in (None, plan.dim):
        remedy = "Pass data like those that it was trained on, pictures at the same `image_size`."
        raise_input_error("path", f"hold an encoder of {dim} features per row", plan.dim, remedy)
    encoder = make_backbone(plan.backbone, plan.dim, torch.Generator())
    of_encoder, of_head = split_encoder_and_head(select_by_prefix(tensors, BEST_WEIGHTS_PREFIX))
    encoder.load_state_dict(of_encoder)
    encoder.eval().requires_grad_(False)
    embedding_dim = encoder(torch.zeros(1, plan.dim)).shape[1]
    head = make_head(plan.objective, embedding_dim, torch.Generator(), n_way=plan.head_n_way)
    head.load_state_dict(of_head)
    head.eval().requires_grad_(False)
    beats_raw = metadata.get("raw_features", {"beaten": True})["beaten"]  # earlier files were kept only if they did
    return TrainedEncoder(encoder, head, plan, torch.clone, beats_raw_features=beats_raw)
