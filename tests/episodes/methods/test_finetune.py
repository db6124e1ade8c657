from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.draws.batch import Episodes
from protonet.episodes.methods.finetune import finetune
from protonet.episodes.methods.prototypes import protonet_cosine
from protonet.episodes.networks.augmentation import AUGMENTATION, draw_maps, warp_images
from tests.episodes.meta_cases import make_trained, make_trained_episodes

STEPS, RATE = 4, 0.02


def slow_logits(episodes: Episodes, number: int, head: str, augment: bool) -> Tensor:
    """Return one episode's logits by torch's own Adam on a copy of the encoder."""
    trained = episodes.trained
    assert trained is not None
    support, query = (rows[number] for rows in trained.gather())
    labels, encoder = episodes.support_labels[number], copy.deepcopy(trained.encoder).requires_grad_(True)
    layer = nn.utils.skip_init(nn.Linear, episodes.support.shape[2], 4)
    layer.load_state_dict({"weight": torch.zeros(4, layer.in_features), "bias": torch.zeros(4)})

    def classify(rows: Tensor) -> Tensor:
        if head == "linear":
            logits: Tensor = layer(encoder(rows))
            return logits
        embedded = encoder(support)
        means = torch.stack([embedded[labels == c].mean(dim=0) for c in range(4)])
        return F.cosine_similarity(encoder(rows)[:, None], means[None], dim=2) / 0.1

    optimizer = torch.optim.Adam([*encoder.parameters(), *layer.parameters()], lr=RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        changed = support
        if augment and trained.plan["backbone"] == "mlp":
            noise = torch.randn(support.shape, generator=generator)
            changed = support + AUGMENTATION.noise * support.std(dim=0, correction=0) * noise
        elif augment:
            changed = warp_images(support, draw_maps(len(support), generator))
        optimizer.zero_grad()
        F.cross_entropy(classify(changed), labels).backward()
        optimizer.step()
    return classify(query).detach()


@pytest.mark.parametrize(
    ("backbone", "head", "augment"),
    [("mlp", "prototypes", True), ("mlp", "linear", True), ("mlp", "prototypes", False), ("conv", "prototypes", True)],
)
def test_it_is_the_slow_one(backbone: str, head: str, augment: bool) -> None:
    episodes, _ = make_trained_episodes(
        make_trained("prototypes", backbone=backbone, dim=6 if backbone == "mlp" else 64)
    )
    with torch.no_grad():
        logits = finetune(episodes, head=head, steps=STEPS, learning_rate=RATE, augment=augment)
    for number in range(3):
        slow = slow_logits(episodes, number, head, augment)
        torch.testing.assert_close(logits[number], slow, atol=5e-3, rtol=5e-3)


def test_without_steps_it_is_prototypes() -> None:
    episodes, labels = make_trained_episodes(make_trained("prototypes"))
    torch.testing.assert_close(finetune(episodes, steps=0), protonet_cosine(episodes), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(finetune(episodes, learning_rate=0.0), protonet_cosine(episodes), atol=1e-5, rtol=1e-4)
    assert float((finetune(episodes).argmax(dim=2) == labels).double().mean()) > 0.6


@pytest.mark.parametrize("head", ["prototypes", "linear"])
def test_each_query_and_each_episode_is_alone(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes, _ = make_trained_episodes(make_trained("prototypes", backbone="conv4", dim=256), n_shot=1)
    weights = [weight.clone() for weight in episodes.trained.encoder.parameters()]  # type: ignore[union-attr]
    logits, trained = finetune(episodes, head=head, steps=2), episodes.trained
    assert trained is not None
    assert trained.support is not None
    assert trained.query is not None
    own = trained._replace(support=trained.support[1:2], query=trained.query[1:2, 3:5])
    alone = finetune(episodes._replace(support_labels=episodes.support_labels[1:2], trained=own), head=head, steps=2)
    torch.testing.assert_close(alone[0], logits[1, 3:5], atol=1e-3, rtol=1e-3)
    monkeypatch.setattr(sys.modules[finetune.__module__], "WEIGHTS_AT_ONCE", 1)  # an episode at a time
    torch.testing.assert_close(finetune(episodes, head=head, steps=2), logits, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(weights, trained.encoder.parameters(), strict=True))


def test_errors() -> None:
    episodes, _ = make_trained_episodes(make_trained("prototypes"))
    with pytest.raises(ValueError, match=r"^finetune: `head` must be one of prototypes, linear; got 'tree'\. Pick one"):
        finetune(episodes, head="tree")
    with pytest.raises(
        ValueError, match=r"^finetune: `episodes` must come with an encoder; got none\. Pass --encoder F"
    ):
        finetune(episodes._replace(trained=None))
