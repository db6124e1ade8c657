"""Offline use of the Hugging Face hub: weights are read from the disk only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

#: Environment variables that keep the hub's clients off the network.
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@contextmanager
def stay_offline() -> Iterator[None]:
    """Keep the hub's clients off the network, including those that are already imported."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    constants: Any = import_module("huggingface_hub.constants") if find_spec("huggingface_hub") else None
    was = getattr(constants, "HF_HUB_OFFLINE", None)
    try:
        if constants is not None:
            constants.HF_HUB_OFFLINE = True
        yield
    finally:
        if constants is not None:
            constants.HF_HUB_OFFLINE = was
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
