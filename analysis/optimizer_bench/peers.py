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
    """An optimizer to compare with."""

    make: Maker  #: Makes it from parameters and a learning rate ``lr``.
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)  #: Learning rates to try.


def _import_class(library: str, name: str) -> Maker:
    """Import an optimizer class of a library."""
    with optional_packages("peers"):
        module = importlib.import_module(library)
    if library == "heavyball":
        module.utils.compile_mode = None  # compiling would take longer than the run
    maker: Maker = getattr(module, name)
    return maker


def use_defaults(library: str, name: str) -> Maker:
    """Return a maker of an optimizer with its default settings; the library is imported when it is called."""
    return lambda parameters, lr: _import_class(library, name)(parameters, lr=lr)


def make_schedule_free(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    """Make schedule-free AdamW; it is evaluated at the training weights, since only ``step`` is called."""
    optimizer = _import_class("schedulefree", "AdamWScheduleFree")(parameters, lr=lr)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def make_muon(parameters: Parameters, lr: float) -> torch.optim.Optimizer:
    """Make Muon for matrices, with steps scaled to the size of AdamW's, and AdamW for vectors."""
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == flag], "use_muon": flag} for flag in (True, False)]
    groups = [group for group in groups if group["params"]]
    return _import_class("pytorch_optimizer", "Muon")(groups, lr=lr, adamw_lr=lr, use_adjusted_lr=True)


PEERS = {
    "adamw": Peer(torch.optim.AdamW),
    "nadamw": Peer(partial(torch.optim.NAdam, weight_decay=0.01, decoupled_weight_decay=True)),
    "schedule-free": Peer(make_schedule_free),
    "ademamix": Peer(use_defaults("pytorch_optimizer", "AdEMAMix")),
    "muon": Peer(make_muon),
    "soap": Peer(use_defaults("heavyball", "SOAP")),
    "psgd-kron": Peer(use_defaults("heavyball", "PSGDKron")),
    "prodigy": Peer(use_defaults("pytorch_optimizer", "Prodigy"), (0.3, 1.0, 3.0)),
    "lion": Peer(use_defaults("pytorch_optimizer", "Lion"), (1e-4, 3e-4, 1e-3, 3e-3)),
}
