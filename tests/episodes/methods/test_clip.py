from __future__ import annotations

import pytest
import torch

from protonet._checks import InputError
from protonet.episodes.methods.clip import clip_zero_shot
from protonet.episodes.methods.tip_adapter import tip_adapter
from tests.episodes.cases import make_episodes, make_texts


def test_slow_loop() -> None:
    episodes, _ = make_episodes()
    texts = make_texts(episodes)
    plain, cached = clip_zero_shot(episodes, temperature=0.5), tip_adapter(episodes, alpha=2.0, beta=3.0)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        for place, row in enumerate(query):
            for c in range(4):
                angle = torch.cosine_similarity(row, texts[number, c], dim=0)
                assert torch.isclose(plain[number, place, c], angle / 0.5)
                own = support[labels == c]
                votes = sum((-3 * (1 - torch.cosine_similarity(row, other, dim=0))).exp() for other in own)
                assert torch.isclose(cached[number, place, c], 100 * angle + 2 * votes)


def test_without_a_cache_it_is_zero_shot() -> None:
    episodes, _ = make_episodes()
    assert torch.equal(tip_adapter(episodes, alpha=0.0), clip_zero_shot(episodes))


def test_without_texts() -> None:
    episodes, _ = make_episodes()
    for method in (clip_zero_shot, tip_adapter):
        with pytest.raises(InputError, match=rf"^{method.__name__}: `texts` must be known"):
            method(episodes._replace(texts=None))
