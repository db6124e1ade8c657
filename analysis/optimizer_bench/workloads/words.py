"""Words of the functions of Python's standard library: recommendation, ranking and embeddings.

They train tables of vectors: most rows see no gradient in a step, and no weight is a matrix that multiplies.
"""

from __future__ import annotations

import functools
import re
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import WorkloadTask, fixed_generator, make_row_task, make_workload_builder
from analysis.optimizer_bench.workloads.data import WORD_PATTERN, join_sources

FACTOR_DIM = 16  #: Length of a user's or an item's vector.
UNUSED_WORDS_PER_WORD = 4  #: Words drawn for each that a function uses, as not used.
VOCABULARY, WIDTH = 4096, 32
CONTEXT_RADIUS = 4  #: Words to either side that are a word's context.
#: The columns of a window that are not its centre.
CONTEXT_COLUMNS = torch.tensor([column for column in range(1 + 2 * CONTEXT_RADIUS) if column != CONTEXT_RADIUS])
NEGATIVE_SAMPLES, FREQUENCY_EXPONENT = 5, 0.75  #: Words drawn for each pair, by their counts to this power.
#: Words with a larger relative frequency are subsampled.
FREQUENT_WORD_THRESHOLD = 1e-3


def make_factors(num_users: int, num_items: int, biases: tuple[int, ...]) -> nn.Module:
    """Make low-dimensional vectors of users and of items, and tables of biases that start at 0."""
    vectors = [nn.Embedding(count, FACTOR_DIM) for count in (num_users, num_items)]
    tables = [nn.Embedding(count, 1) for count in biases]
    for table in vectors:
        nn.init.normal_(table.weight, std=0.1)
    for table in tables:
        nn.init.zeros_(table.weight)
    return nn.ModuleList([*vectors, *tables])


@functools.cache
def load_pairs() -> Tensor:
    """Load pairs of a function, the user, and a word in it, the item: (n, 2) int64, in random order."""
    bodies = re.split(r"^ *(?:async )?def ", "".join(join_sources()), flags=re.M)
    functions = [set(re.findall(r"[^\W\d]\w\w+", body)) for body in bodies]
    counts = Counter(word for words in functions for word in words)
    known = sorted(word for word, count in counts.items() if count >= 10)
    word_ids = {word: word_id for word_id, word in enumerate(known)}
    used = [sorted(word_ids[word] for word in words & word_ids.keys()) for words in functions]
    used = [items for items in used if len(items) >= 10]
    pairs = torch.tensor([(user, item) for user, items in enumerate(used) for item in items])  # (n, 2)
    return pairs[torch.randperm(len(pairs), generator=fixed_generator())]


@make_workload_builder
def recommender() -> WorkloadTask:
    """Discriminate the words of a function from random words, which depend on the seed.

    The logit is the dot product of a user's and an item's vector, plus their biases.
    """
    pairs = load_pairs()
    num_users, num_items = (pairs.amax(0) + 1).tolist()
    validation, train = pairs.tensor_split([10_000])

    def draw(positive: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return positive, torch.randint(num_items, (UNUSED_WORDS_PER_WORD * len(positive),), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (users, items), negatives = batch[0].unbind(1), batch[1]  # (n,), (n,), (negatives * n,)
        users, items, used = users.repeat(1 + UNUSED_WORDS_PER_WORD), torch.cat([items, negatives]), len(users)
        of_user, of_item, user_bias, item_bias = model.children()
        biases = (user_bias(users) + item_bias(items)).squeeze(1)  # (n,)
        logits = (of_user(users) * of_item(items)).sum(1) + biases
        return F.binary_cross_entropy_with_logits(logits, (torch.arange(len(logits)) < used).float())

    make = functools.partial(make_factors, num_users, num_items, (num_users, num_items))
    return make_row_task(make, loss, (train, validation), 256, draw)


def score_difference(model: nn.Module, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
    """Compute the difference of the scores of items (n,) and other items (n,) for users (n,)."""
    of_user, of_item, item_bias = model.children()
    difference = of_item(items) - of_item(others)  # (n, factors)
    bias = (item_bias(items) - item_bias(others)).squeeze(1)  # (n,)
    return torch.add((of_user(users) * difference).sum(1), bias)


@make_workload_builder
def ranking() -> WorkloadTask:
    """Rank the words that a function uses above random words, which depend on the seed.

    Some three words of each function are known.

    Source: S. Rendle et al. (2009), BPR: Bayesian personalized ranking from implicit feedback, arXiv 1205.2618; here
        a word that the function happens to use may be drawn as another, one time in fifty or less.
    """
    pairs = load_pairs()
    num_users, num_items = (pairs.amax(0) + 1).tolist()
    validation, train, _ = pairs.tensor_split([2_000, 18_000])

    def draw(used: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        return *used.unbind(1), torch.randint(num_items, (len(used),), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return -F.logsigmoid(score_difference(model, *batch)).mean()

    make = functools.partial(make_factors, num_users, num_items, (num_items,))
    return make_row_task(make, loss, (train, validation), 32, draw)


def make_skip_gram() -> nn.Module:
    """Make a vector of each word as a centre, and one as context."""
    tables = [nn.Embedding(VOCABULARY, WIDTH) for _ in range(2)]
    for table in tables:  # word2vec's zeros for one would give the other no first gradient
        nn.init.uniform_(table.weight, -0.5 / WIDTH, 0.5 / WIDTH)
    return nn.ModuleList(tables)


def context_logits(model: nn.Module, centres: Tensor, others: Tensor) -> Tensor:
    """Compute the logits (n, k) that words (n, k) are in the context of words (n,)."""
    of_centre, of_context = model.children()
    logits: Tensor = (of_context(others) @ of_centre(centres)[:, :, None]).squeeze(2)
    return logits


def load_words() -> tuple[Tensor, Tensor, Tensor]:
    """Load windows (n, 1 + 2 * reach) of words for training and for validation, and word weights (vocabulary,).

    Frequent words are left out at random, the oftener the more frequent they are, and rare ones always.
    """
    sides = [WORD_PATTERN.findall(text) for text in join_sources()]
    common = Counter(sides[0]).most_common(VOCABULARY)
    word_ids = {word: word_id for word_id, (word, _) in enumerate(common)}
    counts = torch.tensor([count for _, count in common]).double()  # (vocabulary,)
    chance = (FREQUENT_WORD_THRESHOLD * counts.sum() / counts).sqrt()  # of staying, if below 1
    fixed = fixed_generator()

    def cut(words: list[str]) -> Tensor:
        text = torch.tensor([word_ids[word] for word in words if word in word_ids])  # (size,)
        text = text[torch.rand(len(text), generator=fixed) < chance[text]]
        return text.unfold(0, 1 + 2 * CONTEXT_RADIUS, 1)

    train, validation = map(cut, sides)
    chosen = torch.linspace(0, len(validation) - 1, 1_000).long()
    return train, validation[chosen], counts**FREQUENCY_EXPONENT


@make_workload_builder
def words() -> WorkloadTask:
    """Discriminate a word's context from random words, which depend on the seed.

    Source: T. Mikolov et al. (2013), Distributed representations of words and phrases and their compositionality,
        arXiv 1310.4546.
    """
    train, validation, weights = load_words()
    signs = torch.tensor([1.0] + [-1.0] * NEGATIVE_SAMPLES)

    def draw(windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n = len(windows)
        columns = CONTEXT_COLUMNS[torch.randint(len(CONTEXT_COLUMNS), (n, 1), generator=generator)]
        negatives = torch.multinomial(weights, n * NEGATIVE_SAMPLES, replacement=True, generator=generator).view(n, -1)
        return windows[:, CONTEXT_RADIUS], torch.cat((windows.gather(1, columns), negatives), 1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return -F.logsigmoid(signs * context_logits(model, *batch)).sum(1).mean()

    return make_row_task(make_skip_gram, loss, (train, validation), 128, draw)
