"""Optimizers of other libraries, with default settings, at one learning rate for all workloads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from protonet.errors import optional_packages

LIBRARIES = ("heavyball", "pytorch_optimizer", "schedulefree")
Parameters = list[nn.Parameter]
Maker = Callable[..., torch.optim.Optimizer]


class Peer(NamedTuple):
    """An optimizer of parameters and a learning rate, ``lr``, and the learning rates to try."""

    make: Maker
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)


def _find(library: str, name: str) -> Maker:
    """Import a class of a library."""
    with optional_packages("peers"):
        module = importlib.import_module(library)
    if library == "heavyball":
        module.utils.compile_mode = None  # compiling would take longer than the run
    maker: Maker = getattr(module, name)
    return maker


def take_default(library: str, name: str) -> Maker:
    """Specify an optimizer with the defaults of its library, which is imported when it is made."""
    return lambda parameters, lr: _find(library, name)(parameters, lr=lr)


def make_schedule_free(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    """Make schedule-free AdamW; it is evaluated at the training weights, since only ``step`` is called."""
    optimizer = _find("schedulefree", "AdamWScheduleFree")(parameters, lr=lr)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def make_muon(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    """Make Muon for matrices, with steps scaled to the size of AdamW's, and AdamW for vectors."""
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == flag], "use_muon": flag} for flag in (True, False)]
    groups = [group for group in groups if group["params"]]
    return _find("pytorch_optimizer", "Muon")(groups, lr=lr, adamw_lr=lr, use_adjusted_lr=True)


PEERS = {
    "adamw": Peer(torch.optim.AdamW),
    "nadamw": Peer(partial(torch.optim.NAdam, weight_decay=0.01, decoupled_weight_decay=True)),
    "schedule-free": Peer(make_schedule_free),
    "ademamix": Peer(take_default("pytorch_optimizer", "AdEMAMix")),
    "muon": Peer(make_muon),
    "soap": Peer(take_default("heavyball", "SOAP")),
    "psgd-kron": Peer(take_default("heavyball", "PSGDKron")),
    "prodigy": Peer(take_default("pytorch_optimizer", "Prodigy"), (0.3, 1.0, 3.0)),
    "lion": Peer(take_default("pytorch_optimizer", "Lion"), (1e-4, 3e-4, 1e-3, 3e-3)),
}
