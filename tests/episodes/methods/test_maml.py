from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods import METHODS
from protonet.episodes.methods.anil import anil
from protonet.episodes.methods.maml import InnerLoop, adapt, maml
from protonet.episodes.networks.heads import HEADS, LinearHead
from tests.episodes.meta_cases import make_trained, make_trained_episodes


def slow_logits(episodes: Episodes, number: int, steps: int = 3) -> Tensor:
    """Return one episode's logits by torch's own optimizer on a copy of the network."""
    trained = episodes.trained
    assert trained is not None
    assert isinstance(trained.head, LinearHead)
    support, query = (rows[number] for rows in trained.gather())
    layer = torch.nn.utils.skip_init(torch.nn.Linear, trained.head.weight.shape[1], 4)
    layer.load_state_dict(trained.head.begin(4))
    network = torch.nn.Sequential(copy.deepcopy(trained.encoder), layer).requires_grad_(True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(network(support), episodes.support_labels[number]).backward()
        optimizer.step()
    logits: Tensor = network(query).detach()
    return logits


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("steps", [None, 1, 0])
def test_it_is_the_slow_one(steps: int | None, head: str) -> None:
    episodes, labels = make_trained_episodes(make_trained("maml", head=head))
    with torch.no_grad():
        logits = maml(episodes, steps=steps)
    slow = torch.stack([slow_logits(episodes, number, 3 if steps is None else steps) for number in range(3)])
    torch.testing.assert_close(logits, slow, atol=1e-5, rtol=1e-4)
    right = float((logits.argmax(dim=2) == labels).double().mean())
    assert right > 0.6 if steps is None else right >= 0


def test_its_rate_is_a_setting() -> None:
    episodes, _ = make_trained_episodes(make_trained("maml"))
    torch.testing.assert_close(maml(episodes, rate=0.5), maml(episodes))
    assert not torch.allclose(maml(episodes, rate=0.1), maml(episodes), atol=1e-3)


@pytest.mark.parametrize("backbone", ["mlp", "conv4"])
def test_each_query_and_each_episode_is_alone(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dim = 256 if backbone == "conv4" else 6
    episodes, _ = make_trained_episodes(make_trained("maml", backbone=backbone, dim=dim), n_episodes=2)
    logits, trained = maml(episodes), episodes.trained
    assert trained is not None
    assert trained.support is not None
    assert trained.query is not None
    own = trained._replace(support=trained.support[1:], query=trained.query[1:, 3:5])
    alone = maml(episodes._replace(support_labels=episodes.support_labels[1:], trained=own))
    torch.testing.assert_close(alone[0], logits[1, 3:5], atol=1e-4, rtol=1e-3)
    monkeypatch.setattr(sys.modules[maml.__module__], "ROWS_AT_ONCE", 1)  # an episode at a time
    torch.testing.assert_close(maml(episodes), logits, atol=1e-4, rtol=1e-3)
    assert all(not layer.leading for layer in trained.encoder.modules() if hasattr(layer, "leading"))


@pytest.mark.parametrize("head", HEADS)
def test_the_names_of_classes_matter_where_each_has_weights(head: str) -> None:
    episodes, _ = make_trained_episodes(make_trained("maml", head=head))
    renamed = torch.tensor([2, 0, 3, 1])
    changed = maml(episodes._replace(support_labels=renamed[episodes.support_labels]))[:, :, renamed]
    assert torch.allclose(changed, maml(episodes), atol=1e-5, rtol=1e-4) == (head == "zero")


@pytest.mark.parametrize("head", HEADS)
def test_one_step_is_anils_where_the_layer_begins_at_zero(head: str) -> None:
    trained = make_trained("maml", head=head)
    episodes, _ = make_trained_episodes(trained)
    own = trained._replace(plan={**trained.plan, "objective": "anil"})
    logits = anil(episodes._replace(trained=own), steps=1)
    assert torch.allclose(maml(episodes, steps=1), logits, atol=1e-5) == (head == "zero")


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_other_numbers_of_classes(name: str) -> None:
    for head in HEADS:
        episodes, _ = make_trained_episodes(make_trained(name, head=head))
        episodes = episodes._replace(support_labels=episodes.support_labels % 3, n_way=3)
        if head == "zero":
            assert METHODS[name](episodes).shape == (3, 12, 3)
        else:
            said = rf"^{name}: `episodes` must have 4 classes, as those .*; got 3\. Pass --way 4, or train with --head"
            with pytest.raises(ValueError, match=said):
                METHODS[name](episodes)


def test_a_step_is_a_step() -> None:
    weights = {"a": torch.tensor(2.0), "b": torch.tensor(1.0)}
    after = adapt(lambda own: own["a"] ** 2 * own["b"], weights, InnerLoop(1, 0.1))
    assert (float(after["a"]), float(after["b"])) == pytest.approx((2 - 0.1 * 4, 1 - 0.1 * 4))
    assert adapt(lambda own: own["a"], weights, InnerLoop(0, 0.1)) is weights


@pytest.mark.parametrize("method", [maml, anil])
def test_encoders_of_something_else(method: object) -> None:
    name = method.__name__  # type: ignore[attr-defined]
    episodes, _ = make_trained_episodes(make_trained("feat"))
    said = rf"^{name}: `episodes` must come with an encoder of the objective {name}; got "
    with pytest.raises(ValueError, match=rf"{said}one of feat\. Pass --encoder FILE, from train --objective {name}\.$"):
        method(episodes)  # type: ignore[operator]
    with pytest.raises(ValueError, match=rf"{said}none\. Pass --encoder"):
        method(episodes._replace(trained=None))  # type: ignore[operator]
