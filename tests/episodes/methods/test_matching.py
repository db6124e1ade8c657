from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from protonet.episodes.methods.matching import matching_networks
from tests.episodes.cases import load_easyfsl, make_episodes, run_easyfsl


def test_slow_loop() -> None:
    episodes, _ = make_episodes()
    probability = matching_networks(episodes).exp()
    for number, (support, labels, query) in enumerate(zip(*episodes[:3], strict=True)):
        for position, row in enumerate(query):
            attention = torch.stack([torch.exp(row @ s / (row.norm() * s.norm())) for s in support])
            votes = torch.zeros(4, dtype=torch.float64)
            for label, weight in zip(labels.tolist(), attention / attention.sum(), strict=True):
                votes[label] += weight
            assert torch.allclose(probability[number, position], votes)


def test_easyfsl(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its context embeddings, which need torchvision, are off, and queries normalised as the cosine of eq. 1 has it.
    def no_context(rows: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.zeros_like(rows).repeat(1, 1, 2),)

    def no_cell(rows: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(rows[:, : state[0].shape[1]]), state[1]

    bare = types.ModuleType("easyfsl.modules.predesigned_modules")
    for side, encoder in (("support", no_context), ("query", no_cell)):
        setattr(bare, f"default_matching_networks_{side}_encoder", lambda _, encoder=encoder: encoder)
    for name in ("easyfsl.modules", "easyfsl.modules.predesigned_modules"):
        monkeypatch.setitem(sys.modules, name, bare)
    theirs = load_easyfsl("methods.matching_networks").MatchingNetworks(feature_dimension=12)
    episodes, _ = make_episodes(dtype=torch.float32)
    unit = episodes._replace(query=F.normalize(episodes.query, dim=2))
    torch.testing.assert_close(matching_networks(episodes), run_easyfsl(theirs, unit), atol=1e-4, rtol=0)


def test_logits_are_log_probabilities() -> None:
    episodes, _ = make_episodes(shots=(1, 1, 5, 9))
    torch.testing.assert_close(matching_networks(episodes).logsumexp(dim=2), torch.zeros(3, 10, dtype=torch.float64))


def test_rows_of_zeros() -> None:
    episodes, _ = make_episodes()
    logits = matching_networks(episodes._replace(support=torch.zeros_like(episodes.support)))
    shots = torch.tensor([0.3, 0.1, 0.2, 0.4], dtype=torch.float64)
    assert torch.allclose(logits.exp(), shots)
