"""Optimizers of other people's libraries, as they are set by default, at one learning rate for all workloads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from protonet._checks import optional_packages

LIBRARIES = ("heavyball", "pytorch_optimizer", "schedulefree")
Parameters = list[nn.Parameter]


class Peer(NamedTuple):
    """What makes an optimizer of parameters and a learning rate, ``lr``, and the learning rates to try."""

    make: Callable[..., torch.optim.Optimizer]
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)


def _find(library: str, name: str) -> Callable[..., Any]:
    """Return a library's class."""
    with optional_packages("--compare", 'pip install "protonet[peers]"'):
        module = importlib.import_module(library)
    if library == "heavyball":
        module.utils.compile_mode = None  # compiling would take longer than the run
    found: Callable[..., Any] = getattr(module, name)
    return found


def make_default(parameters: Parameters, lr: float, *, library: str, name: str) -> torch.optim.Optimizer:
    """Make an optimizer as its library sets it."""
    optimizer: torch.optim.Optimizer = _find(library, name)(parameters, lr=lr)
    return optimizer


def make_nadamw(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    """Make NAdam with AdamW's decoupled weight decay."""
    return torch.optim.NAdam(parameters, lr, weight_decay=0.01, decoupled_weight_decay=True)


def make_schedule_free(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    """Make schedule-free AdamW; it is judged where gradients are taken, since ``step`` alone is called."""
    optimizer = _find("schedulefree", "AdamWScheduleFree")(parameters, lr=lr)
    optimizer.train()
    made: torch.optim.Optimizer = optimizer
    return made


def make_muon(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    """Make Muon for matrices, its steps scaled to the size of AdamW's, and AdamW for vectors."""
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == flag], "use_muon": flag} for flag in (True, False)]
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer = _find("pytorch_optimizer", "Muon")(
        groups, lr=lr, adamw_lr=lr, use_adjusted_lr=True
    )
    return optimizer


PEERS = {
    "adamw": Peer(torch.optim.AdamW),
    "nadamw": Peer(make_nadamw),
    "schedule-free": Peer(make_schedule_free),
    "muon": Peer(make_muon),
    "soap": Peer(partial(make_default, library="heavyball", name="SOAP")),
    "psgd-kron": Peer(partial(make_default, library="heavyball", name="PSGDKron"), (3e-4, 1e-3, 3e-3, 1e-2)),
    "prodigy": Peer(partial(make_default, library="pytorch_optimizer", name="Prodigy"), (0.3, 1.0, 3.0)),
    "lion": Peer(partial(make_default, library="pytorch_optimizer", name="Lion"), (1e-4, 3e-4, 1e-3, 3e-3)),
}
