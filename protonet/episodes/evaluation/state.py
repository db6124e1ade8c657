"""State files: the scores of the finished episodes of an evaluation, with what they are scores of."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet._checks import fail, find_version, show
from protonet._writing import write_whole
from protonet.episodes.draws.batch import Take
from protonet.episodes.evaluation.evaluate import Scores
from protonet.sampling import ClassIndex

PROG, FORMAT, VERSION = "protonet.episodes", "protonet.episodes", 3


def describe_run(
    settings: Mapping[str, Any], methods: Sequence[str], take: Take, by_class: ClassIndex, more: Sequence[Tensor]
) -> dict[str, Any]:
    """Describe, in a form that JSON can write, all that the scores depend on: settings, methods, data and versions.

    ``more`` are tensors that methods see beside the rows: means of base classes, texts.
    """
    digest = hashlib.sha256()
    places = torch.cat([by_class.start + offset for offset in (0, by_class.size // 2, by_class.size - 1)])
    sampled = by_class.rows[places]  # three rows of each class tell the data from others
    for tensor in (*by_class, take(sampled), *more):
        digest.update(tensor.contiguous().numpy().tobytes())
    run = {**settings, "methods": list(methods), "data": digest.hexdigest(), **find_versions()}
    described: dict[str, Any] = json.loads(json.dumps(run))
    return described


def find_versions() -> dict[str, str | None]:
    """Return the versions that scores may depend on, by package."""
    return {package: find_version(package) for package in ("protonet", "torch", "numpy")}


def write_state(path: Path, run: Mapping[str, Any], scores: Mapping[str, Scores]) -> None:
    """Write the scores of a run's first episodes, whole or not at all.

    Raises:
        OSError: The file cannot be written; an old one is left as it was.
    """
    header = json.dumps({"format": FORMAT, "version": VERSION, "run": run})
    arrays = {
        f"{number}.{field}": tensor.numpy()
        for number, own in enumerate(scores.values())
        for field, tensor in own._asdict().items()
    }
    write_whole(path, lambda file: np.savez(file, header=np.array(header), **arrays))


def read_state(path: Path, run: Mapping[str, Any]) -> dict[str, Scores]:
    """Read the scores, by method, that `write_state` wrote of the same run.

    Raises:
        InputError: The file is no such state, or one of another run; the message says what differs.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(str(arrays["header"]))
            if header["format"] != FORMAT or header["version"] != VERSION:
                raise ValueError("of another format")
            known = header["run"]
            scores = {
                name: Scores(*(torch.from_numpy(arrays[f"{number}.{field}"]) for field in Scores._fields))
                for number, name in enumerate(known["methods"])
            }
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        fail(PROG, "--state", "be a file that --state wrote", f"{path} ({error})", "Pass another path.")
    hashed = ("plugins", "data")  # last: another setting may be why they differ, and hashes tell nothing
    for name in (*sorted((known.keys() | run.keys()) - {*hashed}), *hashed):
        if known.get(name) != run.get(name):
            got = f"{name} {show(run.get(name))}, where {path} has {show(known.get(name))}"
            got = f"other {name} than {path} has" if name in hashed else got
            remedy = "Pass the same arguments, or another --state; for a study, another --output."
            fail(PROG, "--resume", "continue the same run", got, remedy)
    return scores
