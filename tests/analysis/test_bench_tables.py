"""The bench's embedding tables: both models by hand, and what is drawn and held out."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from analysis.optimizer_bench.workloads.recommender import load_pairs
from analysis.optimizer_bench.workloads.tables import (
    CONTEXT,
    KNOWN_PAIRS,
    RANKING_VALIDATION,
    REACH,
    VOCABULARY,
    WORDS_VALIDATION,
    Ranker,
    SkipGram,
    load_words,
)


def test_a_ranker_compares_two_scores() -> None:
    model = Ranker(5, 7)
    torch.nn.init.normal_(model.biases.weight)
    scores = model.users.weight @ model.items.weight.T + model.biases.weight.squeeze(1)  # (users, items)
    users, items, others = torch.tensor([0, 4, 2]), torch.tensor([1, 6, 0]), torch.tensor([3, 6, 5])
    torch.testing.assert_close(model(users, items, others), scores[users, items] - scores[users, others])


def test_users_know_few_of_their_words() -> None:
    pairs = load_pairs()
    assert len(pairs) / 5 > KNOWN_PAIRS + RANKING_VALIDATION
    assert KNOWN_PAIRS / (pairs[:, 0].max() + 1) < 4


def test_skip_gram_multiplies_the_two_tables() -> None:
    model = SkipGram()
    centres, others = torch.tensor([3, 8]), torch.tensor([[1, 3, 5], [0, 2, 4]])
    every = model.centres.weight[centres] @ model.contexts.weight.T  # (n, vocabulary)
    torch.testing.assert_close(model(centres, others), every.gather(1, others))


def test_a_context_is_all_of_a_window_but_its_centre() -> None:
    assert sorted([*CONTEXT.tolist(), REACH]) == list(range(1 + 2 * REACH))


def test_windows_slide_over_a_thinned_text() -> None:
    train, validation, weights = load_words()
    assert torch.equal(train[1:, :-1], train[:-1, 1:])
    assert len(validation) == WORDS_VALIDATION
    assert weights.shape == (VOCABULARY,)
    assert (weights.diff() <= 0).all()  # words are numbered from the commonest one
    shares = F.normalize(train[:, 0].bincount(minlength=VOCABULARY).float(), p=1, dim=0)
    assert shares.max() < 0.3 * weights.max() ** (4 / 3) / (weights ** (4 / 3)).sum()  # "self" is thinned out
