"""State files: the scores of the finished episodes of an evaluation, with its settings."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from protonet._io import write_atomically
from protonet._text import to_printable
from protonet.episodes.evaluation.evaluate import Scores, join_batches
from protonet.episodes.evaluation.prepare import Prepared
from protonet.errors import DISTRIBUTION, installed_version, raise_input_error

STATE_FORMAT, STATE_VERSION = "protonet.episodes", 5
#: Settings that the scores of an episode do not depend on: a run may go on with others.
FREE_SETTINGS = ("against", "max_episodes", "target_half_width")


def describe_run(settings: Mapping[str, object], prepared: Prepared) -> dict[str, object]:
    """Describe, in a form that JSON can write, all that the scores depend on: settings, methods, data and versions.

    A hash of three rows of each class identifies the data. The settings in ``FREE_SETTINGS`` are left out.
    """
    digest = hashlib.sha256()
    index = prepared.pool.by_class
    positions = torch.cat([index.start + offset for offset in (0, index.size // 2, index.size - 1)])
    for tensor in (*index, prepared.pool.take(index.rows[positions]), *prepared.seen):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    run = {name: value for name, value in settings.items() if name not in FREE_SETTINGS}
    run |= {"plugins": prepared.plugins, "methods": list(prepared.methods), "data": digest.hexdigest()}
    described: dict[str, object] = json.loads(json.dumps(run | get_versions()))
    return described


def get_versions() -> dict[str, str | None]:
    """Return the versions that scores may depend on, by package."""
    packages = {"protonet": DISTRIBUTION, "torch": "torch", "numpy": "numpy"}
    return {name: installed_version(package) for name, package in packages.items()}


def write_state(path: Path, run: Mapping[str, object], batches: Sequence[Mapping[str, Scores]]) -> None:
    """Write the scores of a run's first episodes, whole or not at all.

    Args:
        path: The file.
        run: From `describe_run`.
        batches: The scores by method of one or more batches of episodes, in the order of the episodes' numbers. The
            last batch is stored by itself: a longer run scores it again if it is not a whole one.

    Raises:
        OSError: The file cannot be written; an old one is left as it was.
    """
    parts = [join_batches(batches[:-1]), batches[-1]] if len(batches) > 1 else batches
    header = json.dumps({"format": STATE_FORMAT, "version": STATE_VERSION, "run": run, "parts": len(parts)})
    arrays = {
        f"{part}.{method_index}.{field}": tensor.numpy()
        for part, scores in enumerate(parts)
        for method_index, score in enumerate(scores.values())
        for field, tensor in score._asdict().items()
    }
    write_atomically(path, lambda file: np.savez(file, header=np.array(header), **arrays))


def read_state(path: Path, run: Mapping[str, object]) -> list[dict[str, Scores]]:
    """Read the scores that `write_state` wrote of the same run: one or two batches, by method.

    Raises:
        InputError: The file is no such state, or one of another run; the message says what differs.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(str(arrays["header"]))
            if header["format"] != STATE_FORMAT or header["version"] != STATE_VERSION:
                raise ValueError("of another format")
            stored = header["run"]
            batches = [
                {
                    name: Scores(
                        *(torch.from_numpy(arrays[f"{part}.{method_index}.{field}"]) for field in Scores._fields)
                    )
                    for method_index, name in enumerate(stored["methods"])
                }
                for part in range(header["parts"])
            ]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise_input_error("state", "be the state of an evaluation", f"{path} ({error})", "Pass another path.")
    hashed = ("plugins", "data")  # last, because a differing setting is the more helpful message
    for name in (*sorted((stored.keys() | run.keys()) - {*hashed}), *hashed):
        if stored.get(name) != run.get(name):
            got = f"{name} {to_printable(run.get(name))}, where {path} has {to_printable(stored.get(name))}"
            got = f"other {name} than {path} has" if name in hashed else got
            remedy = "Pass the same arguments, or another `state`."
            raise_input_error("resume", "continue the same run", got, remedy)
    return batches
