"""Every method computes on the device of its episodes, copies nothing to the CPU, and gives equal logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protonet.episodes.methods import METHODS, Method, MethodSpec
from protonet.episodes.methods.keywords import list_method_settings
from protonet.episodes.samplers.batch import BaseClasses, Episodes, TrainedEncoder
from protonet.sampling import ClassIndex
from tests.emulated_device import AWAY, Away, EmulatedDevice
from tests.episodes.cases import TRAINED, make_base, make_episodes
from tests.episodes.meta_cases import make_trained, make_trained_episodes

#: Settings that make slow methods faster.
FEW = {"steps": 2, "n_steps": 2, "n_epochs": 2, "n_samples": 20}
#: Methods that are not tested here: `tim-dirichlet` is `tim` with settings, and `solver` has a test of its own.
ELSEWHERE = {"tim-dirichlet", "solver"}


def shorten(spec: MethodSpec) -> Method:
    """Return a method with those settings of ``FEW`` that it has."""
    known = list_method_settings(spec.function)
    settings: Any = {name: few for name, few in FEW.items() if name in known}
    return partial(spec, **settings)


CASES: dict[str, Method] = {name: shorten(spec) for name, spec in METHODS.items() if name not in ELSEWHERE}
#: Functions that may copy tensors to the device: random numbers, rows for an encoder, and weights of views.
SENT = {"linear.linear_finetune", "linear.baseline_pp", "maps.deepemd", "adaptive.adaptive"}
SENT |= {"calibration._classify", "encoders.augment_support", "batch.gather"}


def make_case(name: str) -> Episodes:
    """Make episodes that have everything that a method needs."""
    if name in TRAINED:
        return make_trained_episodes(make_trained(TRAINED[name] or "prototypes"))[0]
    n_episodes, n_queries = (1, 4) if METHODS[name].slow else (3, 10)
    return make_episodes(
        n_episodes=n_episodes, n_queries=n_queries, base=make_base(dtype=torch.float32), dtype=torch.float32
    )[0]


def send(episodes: Episodes, to: Callable[[Tensor], Tensor]) -> Episodes:
    """Copy all tensors of episodes to another device, as `gather_episodes` would make the tensors there."""

    def send_module(module: nn.Module) -> nn.Module:
        for layer in module.modules():
            for tensors in (layer._parameters, layer._buffers):
                tensors.update({name: None if item is None else to(item.data) for name, item in tensors.items()})  # type: ignore[misc]
        return module

    def send_base(base: BaseClasses) -> BaseClasses:
        rows, index = (to(base.take(torch.arange(len(base.by_class.rows)))), ClassIndex(*map(to, base.by_class)))
        return BaseClasses(lambda indices: rows[indices], index, to(base.mean), to(base.class_means))

    def send_trained(trained: TrainedEncoder) -> TrainedEncoder:
        return trained._replace(encoder=send_module(trained.encoder), head=send_module(trained.head))

    base = episodes.base and send_base(episodes.base)
    trained = episodes.trained and send_trained(episodes.trained)
    fields: Any = {name: to(item) for name, item in vars(episodes).items() if isinstance(item, Tensor)}
    return replace(episodes, **fields, base=base, trained=trained)


@pytest.mark.parametrize("name", CASES)
def test_a_method_works_where_its_episodes_are(name: str) -> None:
    episodes = make_case(name)
    expected = CASES[name](episodes)
    with EmulatedDevice() as mode:
        sent = send(episodes, lambda rows: rows.to(AWAY))
        logits = CASES[name](sent)
        assert isinstance(logits, Away)
        assert torch.equal(logits.host_values, expected)
    assert mode.sent.keys() <= SENT | {"a test"}
    assert not mode.fetched
