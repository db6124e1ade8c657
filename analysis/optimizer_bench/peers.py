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
OptimizerMaker = Callable[..., torch.optim.Optimizer]


class PeerOptimizer(NamedTuple):
    """An optimizer to compare with."""

    make_optimizer: OptimizerMaker  #: Makes it from parameters and a learning rate ``lr``.
    learning_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)  #: Learning rates to try.


def _import_class(library: str, name: str) -> OptimizerMaker:
    """Import an optimizer class of a library."""
    with optional_packages("peers"):
        module = importlib.import_module(library)
    if library == "heavyball":
        module.utils.compile_mode = None  # compiling would take longer than the run
    maker: OptimizerMaker = getattr(module, name)
    return maker


def make_default_optimizer(library: str, name: str) -> OptimizerMaker:
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
    "adamw": PeerOptimizer(torch.optim.AdamW),
    "nadamw": PeerOptimizer(partial(torch.optim.NAdam, weight_decay=0.01, decoupled_weight_decay=True)),
    "schedule-free": PeerOptimizer(make_schedule_free),
    "ademamix": PeerOptimizer(make_default_optimizer("pytorch_optimizer", "AdEMAMix")),
    "muon": PeerOptimizer(make_muon),
    "soap": PeerOptimizer(make_default_optimizer("heavyball", "SOAP")),
    "psgd-kron": PeerOptimizer(make_default_optimizer("heavyball", "PSGDKron")),
    "prodigy": PeerOptimizer(make_default_optimizer("pytorch_optimizer", "Prodigy"), (0.3, 1.0, 3.0)),
    "lion": PeerOptimizer(make_default_optimizer("pytorch_optimizer", "Lion"), (1e-4, 3e-4, 1e-3, 3e-3)),
}
