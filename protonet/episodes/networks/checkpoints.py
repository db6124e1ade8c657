"""Checkpoints of meta-training: safetensors files, written whole or not at all, with metadata that describe them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from protonet._io import write_atomically
from protonet.episodes.networks.backbones import make_backbone, make_head
from protonet.episodes.samplers.batch import Trained
from protonet.episodes.samplers.sampler import Take
from protonet.errors import DISTRIBUTION, installed_version, optional_packages, raise_input_error

CHECKPOINT_FORMAT = "protonet.episodes.train"  #: The entry of the file's header that holds our metadata, as JSON.
CHECKPOINT_VERSION = 3  #: Increased whenever the format changes; files of later versions are not read.
BEST = "best."  #: Prefix of the names of the encoder's best weights.
#: Suffix of the head weight that all classes shared in files of version 2 and that had no effect (see
#: `protonet.episodes.networks.backbones.LinearHead`); and the objectives that had it.
SHARED_HEAD_SUFFIX, ADAPTED_OBJECTIVES = ".head.weight", ("maml", "anil")
HEAD = "head."  #: Next prefix of the weights of the head.


class TrainingPlan(NamedTuple):
    """The settings that decide the result of a run; checkpoints store them under these names."""

    dataset: str  #: The data set, as the command line names it.
    split_seed: int | None  #: Seed of a random split by class; None without one.
    dim: int  #: Features per row.
    classes: int  #: The number of base classes.
    backbone: str  #: One of `protonet.episodes.names.BACKBONES`.
    way: int  #: Classes per training episode.
    shot: int  #: Support rows per class.
    query: int  #: Query rows per class.
    episodes_per_step: int  #: Episodes whose losses are averaged in a step.
    steps: int  #: Most steps.
    eval_every: int  #: Steps from one validation to the next.
    patience: int  #: Validations without a new best score after which the run ends.
    seed: int  #: Seed of initial weights, episodes and augmentation, in [0, 2**63).
    objective: str = "prototypes"  #: One of `protonet.episodes.names.OBJECTIVES`.
    learning_rate: float = 3e-3  #: AdamW's, > 0. The default is our own choice.
    inner_steps: int = 0  #: Of MAML and ANIL: gradient steps on an episode's support.
    inner_rate: float = 0.0  #: The rate of these steps.
    first_order: bool = False  #: Whether no gradient flows through these steps' gradients.
    dropblock: float = 0.0  #: The rate of DropBlock in ResNet-12, in [0, 1).
    start: str | None = None  #: The checkpoint that the encoder's weights begin at; None for new ones.
    head: str = "zero"  #: Of MAML and ANIL: one of `protonet.episodes.names.HEAD_KINDS`.


def describe_plan(plan: TrainingPlan) -> dict[str, Any]:
    """Return a plan's fields by name, without those that have a default and its value: as files of version 2 began."""
    defaults = TrainingPlan._field_defaults
    return {name: value for name, value in plan._asdict().items() if name not in defaults or value != defaults[name]}


def complete_plan(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a plan by name, from what `describe_plan` returned."""
    return {**TrainingPlan._field_defaults, **described}


def get_head_way(plan: Mapping[str, Any]) -> int | None:
    """Return for how many classes alone what a plan trains beside the encoder is; None for any number."""
    return plan["way"] if plan["head"] == "classes" else None


def write_checkpoint(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write a checkpoint, whole or not at all: tensors on any device and metadata that JSON can write, by name.

    Raises:
        MissingPackageError: safetensors is missing.
        OSError: The file cannot be written; an old one is left as it was.
    """
    with optional_packages("train"):
        from safetensors.torch import save  # noqa: PLC0415 - optional

    header = {"version": CHECKPOINT_VERSION, "library": installed_version(DISTRIBUTION), **metadata}
    content = save(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, {CHECKPOINT_FORMAT: json.dumps(header)}
    )
    write_atomically(path, lambda file: file.write(content))


def read_checkpoint(argument: str, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint: its tensors by name, on the CPU, and its metadata, with ``version`` and ``library``.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: There is no such file, it is truncated, no checkpoint, or of a newer version.
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
    if version > CHECKPOINT_VERSION:
        got = f"{path} of version {version}, by protonet {metadata.get('library')}"
        raise_input_error(argument, f"be of version {CHECKPOINT_VERSION} or older", got, "Update protonet.")
    if version < 3 and metadata.get("plan", {}).get("objective") in ADAPTED_OBJECTIVES:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(SHARED_HEAD_SUFFIX)}
    return tensors, metadata


def select_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, under the rest of their names."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def split_head(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split weights by name into the encoder's and the head's."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD)}, select_prefix(tensors, HEAD)


def load_trained(path: str | Path, take: Take, *, dim: int | None = None) -> Trained:
    """Load what a checkpoint's run trained, with the weights that were best on the validation classes.

    Args:
        path: A file that ``python -m protonet.episodes train`` wrote.
        take: Returns rows of data by number, for methods that adapt the encoder.
        dim: The features per row that the encoder must take, or None for any number.

    Returns:
        The encoder and the head, in evaluation mode, on the CPU, without gradients; the encoder maps rows (n, dim)
        float32 to (n, embedding_dim) float32.

    Raises:
        MissingPackageError: safetensors is missing.
        InputError: As `read_checkpoint`, or the encoder takes other rows.
    """
    tensors, metadata = read_checkpoint("path", path)
    encoder_dim = metadata["backbone"]["dim"]
    if dim not in (None, encoder_dim):
        remedy = "Pass data like those that it was trained on, pictures at the same `image_size`."
        raise_input_error("path", f"hold an encoder of {dim} features per row", encoder_dim, remedy)
    encoder = make_backbone(**metadata["backbone"], generator=torch.Generator())
    of_encoder, of_head = split_head(select_prefix(tensors, BEST))
    encoder.load_state_dict(of_encoder)
    encoder.eval().requires_grad_(False)
    plan = complete_plan(metadata["plan"])
    embedding_dim = encoder(torch.zeros(1, encoder_dim)).shape[1]
    head = make_head(plan["objective"], embedding_dim, torch.Generator(), n_way=get_head_way(plan))
    head.load_state_dict(of_head)
    return Trained(encoder, head.eval().requires_grad_(False), plan, take)


def load_encoder(path: str | Path, *, dim: int | None = None) -> nn.Module:
    """Load the encoder of a checkpoint alone, as `load_trained` does."""
    return load_trained(path, torch.clone, dim=dim).encoder
