from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from protonet.episodes.methods.feat import feat
from protonet.episodes.networks.heads import SetTransformer
from tests.episodes.meta_cases import make_trained, make_trained_episodes


def test_it_is_the_slow_one() -> None:
    episodes, labels = make_trained_episodes(make_trained("feat"))
    trained = episodes.trained
    assert trained is not None
    assert isinstance(trained.head, SetTransformer)
    head, logits = trained.head, feat(episodes)
    for number in range(3):
        support, own = episodes.support[number], episodes.support_labels[number]
        means = torch.stack([support[own == c].mean(dim=0) for c in range(4)])
        adapted = []
        for mean in means:
            scores = torch.stack([head.asking(mean) @ head.asked(other) / 8**0.5 for other in means])
            moved = sum(p * head.value(other) for p, other in zip(scores.softmax(dim=0), means, strict=True))
            adapted.append(F.layer_norm(mean + head.output(moved), (8,)))
        slow = F.cosine_similarity(episodes.query[number][:, None], torch.stack(adapted)[None], dim=2) / 0.1
        torch.testing.assert_close(logits[number], slow, atol=1e-4, rtol=1e-4)
    assert logits.shape == (3, 12, 4)
    assert float((logits.argmax(dim=2) == labels).double().mean()) > 0.25


def test_what_it_does_not_depend_on() -> None:
    episodes, _ = make_trained_episodes(make_trained("feat"))
    renamed = torch.tensor([2, 0, 3, 1])
    changed = feat(episodes._replace(support_labels=renamed[episodes.support_labels]))
    torch.testing.assert_close(changed[:, :, renamed], feat(episodes), atol=1e-5, rtol=1e-4)
    double = episodes._replace(support=episodes.support.double(), query=episodes.query.double())
    assert feat(double).dtype == torch.float64
    torch.testing.assert_close(feat(episodes, temperature=1.0), feat(episodes) / 10)


def test_encoders_of_something_else() -> None:
    episodes, _ = make_trained_episodes(make_trained("prototypes"))
    with pytest.raises(ValueError, match=r"^feat: `episodes` must come with an .* feat; got one of prototypes"):
        feat(episodes)
