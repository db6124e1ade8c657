from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from protonet.episodes.methods.anil import anil
from protonet.episodes.networks.heads import HEADS, LinearHead
from tests.episodes.meta_cases import make_trained, make_trained_episodes


@pytest.mark.parametrize("head", HEADS)
def test_it_is_the_slow_one(head: str) -> None:
    episodes, labels = make_trained_episodes(make_trained("anil", head=head))
    trained = episodes.trained
    assert trained is not None
    assert isinstance(trained.head, LinearHead)
    with torch.no_grad():
        logits = anil(episodes)
    for number in range(3):
        weight, bias = (each.clone().requires_grad_() for each in trained.head.begin(4).values())
        optimizer = torch.optim.SGD([weight, bias], lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(episodes.support[number] @ weight.T + bias, episodes.support_labels[number]).backward()
            optimizer.step()
        slow = (episodes.query[number] @ weight.T + bias).detach()
        torch.testing.assert_close(logits[number], slow, atol=1e-5, rtol=1e-4)
    assert float((logits.argmax(dim=2) == labels).double().mean()) > 0.6


def test_it_is_maml_where_the_encoder_stays() -> None:
    episodes, _ = make_trained_episodes(make_trained("anil"))
    assert not torch.allclose(anil(episodes, steps=1), anil(episodes, steps=2), atol=1e-3)
    torch.testing.assert_close(anil(episodes, steps=3, rate=0.5), anil(episodes))


def test_it_keeps_the_dtype_and_sees_one_query_at_a_time() -> None:
    episodes, _ = make_trained_episodes(make_trained("anil"))
    double = episodes._replace(support=episodes.support.double(), query=episodes.query.double())
    assert anil(double).dtype == torch.float64
    torch.testing.assert_close(anil(double).float(), anil(episodes), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(anil(double._replace(query=double.query[:, 2:4])), anil(double)[:, 2:4])
