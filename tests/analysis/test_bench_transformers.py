"""The bench's transformers: what is sorted, what is hidden, and the fading memory as a recurrence."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads.text import BYTES, LENGTH, TOKENS
from analysis.optimizer_bench.workloads.transformers import (
    BERT,
    MASK,
    MASKED,
    MIXER_WIDTH,
    NUMBERS,
    SIZE,
    Mixer,
    RMSNorm,
    Sorter,
    hide_tokens,
    make_mixer,
    recall,
)


def test_memory_fades_step_by_step() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 5, generator=generator, dtype=torch.float64)  # each (batch, heads, length, width)
    stay = torch.rand(2, 4, 9, generator=generator, dtype=torch.float64)
    memory, found = torch.zeros(2, 4, 5, 5, dtype=torch.float64), []
    for t in range(9):
        memory = stay[..., t, None, None] * memory + k[..., t, :, None] * v[..., t, None, :]
        found.append((q[..., t, None, :] @ memory).squeeze(-2))
    torch.testing.assert_close(recall(q, k, v, stay.log()), torch.stack(found, -2))


def test_gradients_survive_gates_that_close() -> None:
    log_stay = torch.full((1, 8), -60.0, requires_grad=True)
    q, k, v = torch.ones(3, 1, 8, 2)
    found = recall(q, k, v, log_stay)
    torch.testing.assert_close(found, torch.full((1, 8, 2), 2.0))  # what is remembered is the last step alone
    found.sum().backward()
    assert log_stay.grad is not None
    assert log_stay.grad.isfinite().all()


def test_a_mixer_sees_no_future() -> None:
    with initial_weights(0):
        model = make_mixer()
    text = torch.arange(24).view(2, 12) % BYTES
    changed = text.clone()
    changed[:, 7:] += 1
    same = (model(text) == model(changed)).all(-1)
    assert same.tolist() == [[True] * 7 + [False] * 5] * 2


def test_root_mean_square_norm() -> None:
    normed = RMSNorm(16)(torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 7)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(5))


def test_a_mixer_keeps_shapes_and_few_biases() -> None:
    block = Mixer()
    assert block(torch.zeros(2, 3, MIXER_WIDTH)).shape == (2, 3, MIXER_WIDTH)
    assert [name for name, _ in block.named_parameters() if "bias" in name] == ["stay.bias"]


def test_sorting_needs_positions() -> None:
    with initial_weights(0):
        model = Sorter()
    numbers = torch.randperm(NUMBERS, generator=torch.Generator().manual_seed(0))[None, :SIZE]
    logits = model(numbers)  # (1, size, numbers)
    assert not torch.allclose(logits, model(numbers.sort(1).values))
    torch.nn.init.zeros_(model.positions.weight)  # all that tells places apart
    torch.testing.assert_close(model(numbers).flip(1), model(numbers.flip(1)))


def test_hidden_tokens_can_be_put_back() -> None:
    windows = torch.randint(TOKENS, (50, 1 + LENGTH), generator=torch.Generator().manual_seed(0))
    tokens, places, hidden = hide_tokens(windows, torch.Generator().manual_seed(1))
    assert (tokens == MASK).sum(1).eq(MASKED).all()
    assert torch.equal(tokens.scatter(1, places, hidden), windows)
    assert places.unique().tolist() == list(range(1 + LENGTH))


def test_bert_reads_places_and_ties_its_embeddings() -> None:
    with initial_weights(0):
        model = BERT()
    tokens = torch.randint(TOKENS, (2, 1 + LENGTH), generator=torch.Generator().manual_seed(0))
    everywhere = model(tokens, torch.arange(1 + LENGTH).expand(2, -1))  # (2, length, vocabulary)
    places = torch.tensor([[3, 0], [16, 5]])
    torch.testing.assert_close(model(tokens, places), everywhere[torch.arange(2)[:, None], places])
    assert everywhere.shape[-1] == TOKENS  # the mask is never an answer
    F.cross_entropy(model(tokens, places).flatten(0, 1), torch.zeros(4, dtype=torch.long)).backward()
    assert model.tokens.weight.grad is not None
    unseen = torch.tensor(sorted(set(range(TOKENS)) - set(tokens.flatten().tolist())))
    assert model.tokens.weight.grad[unseen].any(1).all()  # as weights of the output
    assert not model.tokens.weight.grad[MASK].any()


@pytest.mark.parametrize("shift", [0, 1])
def test_bert_sees_both_sides(shift: int) -> None:
    with initial_weights(0):
        model = BERT()
    tokens = torch.full((1, 1 + LENGTH), MASK)
    place = torch.tensor([[LENGTH // 2]])
    changed = tokens.clone()
    changed[0, -1 if shift else 0] = 3
    assert not torch.allclose(model(tokens, place), model(changed, place))
