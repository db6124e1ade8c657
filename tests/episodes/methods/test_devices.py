"""Every method works where its episodes are: elsewhere, nothing is fetched, and the logits are the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from protonet.episodes.draws.batch import Base, Episodes, Trained
from protonet.episodes.methods import METHODS, Method
from protonet.episodes.methods.alpha_am import alpha_am
from protonet.episodes.methods.calibration import distribution_calibration
from protonet.episodes.methods.finetune import finetune
from protonet.episodes.methods.ilpc import ilpc
from tests.elsewhere import AWAY, Away, Elsewhere
from tests.episodes.cases import TRAINED, make_base, make_episodes
from tests.episodes.meta_cases import make_trained, make_trained_episodes

#: Fewer steps of what takes long.
QUICK = {"alpha-am": partial(alpha_am, steps=3), "ilpc": partial(ilpc, n_steps=5), "finetune": partial(finetune, steps=2)}
QUICK["distribution-calibration"] = partial(distribution_calibration, n_samples=20)
CASES: dict[str, Method] = {name: QUICK.get(name, spec) for name, spec in METHODS.items()}


def make_case(name: str) -> Episodes:
    """Make episodes that have all that a method needs."""
    if name in TRAINED:
        return make_trained_episodes(make_trained(TRAINED[name] or "prototypes"))[0]
    return make_episodes(base=make_base(dtype=torch.float32), dtype=torch.float32)[0]


def send(episodes: Episodes) -> Episodes:
    """Copy episodes to the other device, as `protonet.episodes.draws.batch.gather_episodes` makes them there."""

    def send_base(base: Base) -> Base:
        rows = base.take(torch.arange(len(base.by_class.rows))).to(AWAY)
        index = base.by_class._replace(**{name: each.to(AWAY) for name, each in base.by_class._asdict().items()})
        return Base(lambda numbers: rows[numbers], index, base.mean.to(AWAY), base.class_means.to(AWAY))

    def send_trained(trained: Trained) -> Trained:
        return trained._replace(encoder=trained.encoder.to(AWAY), head=trained.head.to(AWAY))

    base = None if episodes.base is None else send_base(episodes.base)
    trained = None if episodes.trained is None else send_trained(episodes.trained)
    fields = {name: each.to(AWAY) for name, each in episodes._asdict().items() if isinstance(each, Tensor)}
    return episodes._replace(**fields, base=base, trained=trained)


@pytest.mark.parametrize("name", CASES)
def test_a_method_works_where_its_episodes_are(name: str) -> None:
    episodes = make_case(name)
    expected = CASES[name](episodes)
    with Elsewhere() as mode:
        sent = send(episodes)
        logits = CASES[name](sent)
        assert isinstance(logits, Away)
        assert torch.equal(logits.numbers, expected)
    print(name, mode.sent, mode.fetched, mode.read)
    assert not (mode.fetched - mode.sent if name == "solver" else mode.fetched)
