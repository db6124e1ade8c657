from __future__ import annotations

import torch
import torch.nn.functional as F

from protonet.episodes.methods.transductive_finetune import transductive_finetune
from tests.episodes.cases import load_easyfsl, make_episodes, run_easyfsl


def test_autograd() -> None:
    episodes, _ = make_episodes(noise=1.0)
    ours = transductive_finetune(episodes, temperature=0.1, learning_rate=1e-2, steps=25)
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        layer = torch.nn.Linear(support.shape[1], episodes.n_way, dtype=torch.float64)
        means = torch.stack([F.normalize(support)[labels == c].mean(dim=0) for c in range(episodes.n_way)])
        layer.weight.data.copy_(F.normalize(means))
        layer.bias.data.zero_()
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(25):
            p = (layer(F.normalize(query)) / 0.1).softmax(dim=1)
            loss = F.cross_entropy(layer(F.normalize(support)) / 0.1, labels) - (p * p.log()).sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert torch.allclose(ours[number], layer(F.normalize(query)).detach() / 0.1)


def test_easyfsl() -> None:
    episodes, _ = make_episodes(n_episodes=8, noise=0.4)
    classifier = load_easyfsl("methods.transductive_finetuning").TransductiveFinetuning(feature_normalization=2.0)
    theirs = run_easyfsl(classifier, episodes)
    agree = transductive_finetune(episodes).argmax(dim=2) == theirs.argmax(dim=2)
    assert float(agree.double().mean()) > 0.95  # theirs are distances to the means, the paper's a linear layer


def test_entropy_falls() -> None:
    episodes, _ = make_episodes(noise=1.0)

    def entropy(steps: int) -> float:
        log_p = transductive_finetune(episodes, temperature=0.1, learning_rate=1e-2, steps=steps).log_softmax(dim=2)
        return -float((log_p.exp() * log_p).sum(dim=2).mean())

    assert entropy(50) < entropy(25) < entropy(0)
