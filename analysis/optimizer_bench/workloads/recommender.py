"""A recommender: which words a function of the standard library uses, by matrix factorisation."""

from __future__ import annotations

import functools
import re
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, on_rows, workload
from analysis.optimizer_bench.workloads.data import join_sources

MIN_USERS, MIN_ITEMS = 10, 10  #: Functions that use a word, and words that a function uses.
WIDTH = 16
NEGATIVES = 4  #: Words drawn for each pair, as not used.
BATCH, VALIDATION = 256, 10_000  #: Pairs.


class Recommender(nn.Module):
    """The dot product of a user's and an item's vector, plus their biases."""

    def __init__(self, num_users: int, num_items: int) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, WIDTH)
        self.items = nn.Embedding(num_items, WIDTH)
        self.user_biases = nn.Embedding(num_users, 1)
        self.item_biases = nn.Embedding(num_items, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_biases, self.item_biases):
            nn.init.zeros_(table.weight)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits (n,) of users (n,) using items (n,)."""
        biases = (self.user_biases(users) + self.item_biases(items)).squeeze(1)  # (n,)
        logits: Tensor = (self.users(users) * self.items(items)).sum(1) + biases
        return logits


@functools.cache
def load_pairs() -> Tensor:
    """Return which functions, the users, use which words, the items: numbers (n, 2), in random order."""
    bodies = re.split(r"^ *(?:async )?def ", "".join(join_sources()), flags=re.M)
    functions = [set(re.findall(r"[^\W\d]\w\w+", body)) for body in bodies]
    counts = Counter(word for words in functions for word in words)
    known = sorted(word for word, count in counts.items() if count >= MIN_USERS)
    numbers = {word: number for number, word in enumerate(known)}
    used = [sorted(numbers[word] for word in words & numbers.keys()) for words in functions]
    used = [items for items in used if len(items) >= MIN_ITEMS]
    pairs = torch.tensor([(user, item) for user, items in enumerate(used) for item in items])  # (n, 2)
    return pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]


@workload
def recommender() -> Task:
    """Tell which words a function uses from words that it may not; the seed decides those, too."""
    pairs = load_pairs()
    num_users, num_items = (pairs.amax(0) + 1).tolist()
    validation, train = pairs.tensor_split([VALIDATION])

    def draw(positive: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return positive, torch.randint(num_items, (NEGATIVES * len(positive),), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (users, items), negatives = batch[0].unbind(1), batch[1]  # (n,), (n,), (negatives * n,)
        logits = model(users.repeat(1 + NEGATIVES), torch.cat([items, negatives]))
        labels = (torch.arange(len(logits)) < len(users)).float()
        return F.binary_cross_entropy_with_logits(logits, labels)

    make = functools.partial(Recommender, num_users, num_items)
    return on_rows(make, loss, (train, validation), BATCH, draw)


WORKLOADS = {"recommender": recommender}
