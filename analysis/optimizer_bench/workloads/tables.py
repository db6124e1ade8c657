"""Embedding tables alone: most rows of a table see no gradient in a step, and no weight is a matrix that multiplies.

One model ranks the words that a function of the standard library uses, one learns vectors of words from their context.
"""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, on_rows, seed_0, workload
from analysis.optimizer_bench.workloads.data import WORD, join_sources
from analysis.optimizer_bench.workloads.recommender import load_pairs

FACTORS, SPREAD = 16, 0.1  #: Of a user's or an item's vector, and the standard deviation it starts with.
KNOWN_PAIRS, RANKING_VALIDATION, RANKING_BATCH = 16_000, 2_000, 32  #: Some three words a function are known.

VOCABULARY, WIDTH = 4096, 32
REACH = 4  #: Words to either side that are a word's context.
NEGATIVES, FLATTEN = 5, 0.75  #: Words drawn for each pair, by their counts to this power.
FREQUENT = 1e-3  #: A word of a larger share of the text is thinned out.
WORDS_BATCH, WORDS_VALIDATION = 128, 1_000
#: The columns of a window that are not its centre.
CONTEXT = torch.tensor([column for column in range(1 + 2 * REACH) if column != REACH])


class Ranker(nn.Module):
    """A user's liking of an item is the dot product of their vectors plus the item's bias."""

    def __init__(self, num_users: int, num_items: int) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, FACTORS)
        self.items = nn.Embedding(num_items, FACTORS)
        self.biases = nn.Embedding(num_items, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=SPREAD)
        nn.init.zeros_(self.biases.weight)

    def forward(self, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
        """Return how much more users (n,) like items (n,) than others (n,): (n,)."""
        difference = self.items(items) - self.items(others)  # (n, factors)
        bias = (self.biases(items) - self.biases(others)).squeeze(1)  # (n,)
        return torch.add((self.users(users) * difference).sum(1), bias)


@workload
def ranking() -> Task:
    """Rank the words that a function uses before the others; the seed decides which others, too.

    Source: S. Rendle et al. (2009), BPR: Bayesian personalized ranking from implicit feedback, arXiv 1205.2618; here
        a word that the function happens to use may be drawn as another, one time in fifty or less.
    """
    pairs = load_pairs()
    num_users, num_items = (pairs.amax(0) + 1).tolist()
    validation, train, _ = pairs.tensor_split([RANKING_VALIDATION, RANKING_VALIDATION + KNOWN_PAIRS])

    def draw(used: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        return *used.unbind(1), torch.randint(num_items, (len(used),), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return -F.logsigmoid(model(*batch)).mean()

    make = functools.partial(Ranker, num_users, num_items)
    return on_rows(make, loss, (train, validation), RANKING_BATCH, draw)


class SkipGram(nn.Module):
    """A vector of each word as a centre, and one as context."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Embedding(VOCABULARY, WIDTH)
        self.contexts = nn.Embedding(VOCABULARY, WIDTH)
        for table in (self.centres, self.contexts):  # word2vec's zeros for one would give the other no first gradient
            nn.init.uniform_(table.weight, -0.5 / WIDTH, 0.5 / WIDTH)

    def forward(self, centres: Tensor, others: Tensor) -> Tensor:
        """Return the logits (n, k) of words (n, k) being in the context of words (n,)."""
        logits: Tensor = (self.contexts(others) @ self.centres(centres)[:, :, None]).squeeze(2)
        return logits


def load_words() -> tuple[Tensor, Tensor, Tensor]:
    """Return windows (n, 1 + 2 * reach) of words to train and to validate on, and the weights (vocabulary,) of words.

    Frequent words are left out at random, the oftener the more frequent they are, and rare ones always.
    """
    sides = [WORD.findall(text) for text in join_sources()]
    common = Counter(sides[0]).most_common(VOCABULARY)
    numbers = {word: number for number, (word, _) in enumerate(common)}
    counts = torch.tensor([count for _, count in common]).double()  # (vocabulary,)
    kept = (FREQUENT * counts.sum() / counts).sqrt()  # the probability, if below 1
    fixed = seed_0()

    def cut(words: list[str]) -> Tensor:
        text = torch.tensor([numbers[word] for word in words if word in numbers])  # (size,)
        text = text[torch.rand(len(text), generator=fixed) < kept[text]]
        return text.unfold(0, 1 + 2 * REACH, 1)

    train, validation = map(cut, sides)
    chosen = torch.linspace(0, len(validation) - 1, WORDS_VALIDATION).long()
    return train, validation[chosen], counts**FLATTEN


@workload
def words() -> Task:
    """Tell a word's context from words drawn at random; the seed decides the words drawn, too.

    Source: T. Mikolov et al. (2013), Distributed representations of words and phrases and their compositionality,
        arXiv 1310.4546.
    """
    train, validation, weights = load_words()
    signs = torch.tensor([1.0] + [-1.0] * NEGATIVES)

    def draw(windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n = len(windows)
        columns = CONTEXT[torch.randint(len(CONTEXT), (n, 1), generator=generator)]
        negatives = torch.multinomial(weights, n * NEGATIVES, replacement=True, generator=generator).view(n, -1)
        return windows[:, REACH], torch.cat((windows.gather(1, columns), negatives), 1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return -F.logsigmoid(signs * model(*batch)).sum(1).mean()

    return on_rows(SkipGram, loss, (train, validation), WORDS_BATCH, draw)


WORKLOADS = {"ranking": ranking, "words": words}
