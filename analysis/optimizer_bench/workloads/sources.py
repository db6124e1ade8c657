"""Workloads of Python's source code: its bytes, tokens and characters as sequences, its words as embeddings.

Words train embedding tables for recommendation, ranking and word vectors: in a step, most rows of a table get no
gradient, and no weight is a matrix of a linear layer.
"""

from __future__ import annotations

import functools
import io
import itertools
import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from analysis.optimizer_bench.workload import (
    WORD_PATTERN,
    RecurrentStates,
    ResidualLayers,
    TokenEmbedding,
    WorkloadTask,
    cut_windows,
    encode_ascii,
    join_stdlib_sources,
    make_mlp,
    make_row_task,
    make_seed_zero_generator,
    make_workload_builder,
    read_stdlib_sources,
)

N_ASCII_SYMBOLS, CONTEXT_LENGTH, GPT_WIDTH, N_HEADS = 128, 32, 64, 4
VOCABULARY_SIZE, SEQUENCE_LENGTH = 512, 16  #: Vocabulary size and sequence length; token 0 represents all rare tokens.
#: Kinds of tokens; white space and line ends are of kind 0.
TOKEN_TYPES = (tokenize.ENDMARKER, tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP, tokenize.COMMENT)
KEYWORD_CLASS = len(TOKEN_TYPES)  #: An additional kind for keywords, which are names for tokenize.
N_MODULES, N_CHANNELS = 30, 32  #: Modules whose characters are classified (not all, to save time); channels.
FACTOR_DIM = 16  #: Length of a user's or an item's vector.
N_EMBEDDED_WORDS, WORD_VECTOR_DIM = 4096, 32
CONTEXT_RADIUS = 4  #: Words to either side that are a word's context.
#: The columns of a window that are not its centre.
CONTEXT_COLUMNS = torch.tensor([column for column in range(1 + 2 * CONTEXT_RADIUS) if column != CONTEXT_RADIUS])
N_NEGATIVES, FREQUENCY_EXPONENT = 5, 0.75  #: Random words for each pair, and power of their counts in the sampling.


def next_symbol_loss(model: nn.Module, symbols: Tensor) -> Tensor:
    """Compute the cross-entropy, 0-d, of a model's prediction of each next symbol in windows (n, 1 + length)."""
    logits = model(symbols[:, :-1])  # (n, length, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


class CausalAttention(nn.Module):
    """Causal multi-head self-attention: no position attends to later positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(GPT_WIDTH, 3 * GPT_WIDTH)
        self.projection = nn.Linear(GPT_WIDTH, GPT_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        # each (batch, heads, length, width)
        q, k, v = self.qkv(x).unflatten(2, (3, N_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


def make_gpt() -> nn.Module:
    """Make a GPT: pre-norm residual blocks of attention and MLP, and an output layer with its own weights."""

    def make_block() -> nn.Sequential:
        attention = ResidualLayers(nn.LayerNorm(GPT_WIDTH), CausalAttention())
        mlp = make_mlp(GPT_WIDTH, 4 * GPT_WIDTH, GPT_WIDTH, activation=nn.GELU)
        return nn.Sequential(attention, ResidualLayers(nn.LayerNorm(GPT_WIDTH), mlp))

    def initialize_like_gpt_2(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    embedding, blocks = TokenEmbedding(N_ASCII_SYMBOLS, CONTEXT_LENGTH, GPT_WIDTH), [make_block() for _ in range(2)]
    head = nn.Linear(GPT_WIDTH, N_ASCII_SYMBOLS, bias=False)
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(GPT_WIDTH), head).apply(initialize_like_gpt_2)


@make_workload_builder
def gpt_byte_prediction() -> WorkloadTask:
    """Predict the next byte of Python source code by a GPT."""
    train, validation = map(encode_ascii, join_stdlib_sources())
    windows = cut_windows(train, 1 + CONTEXT_LENGTH), cut_windows(validation, 1 + CONTEXT_LENGTH, 64)
    return make_row_task(make_gpt, next_symbol_loss, windows, 8)


@make_workload_builder
def gru_token_prediction() -> WorkloadTask:
    """Predict the next token of Python source code by a GRU, with logits (batch, length, vocabulary)."""
    sides = [re.findall(r"\w+|[^\w\s]|\n", text) for text in join_stdlib_sources()]
    common = Counter(sides[0]).most_common(VOCABULARY_SIZE - 1)
    token_ids = {token: token_id for token_id, (token, _) in enumerate(common, start=1)}
    train, validation = (torch.tensor([token_ids.get(token, 0) for token in side]) for side in sides)  # (size,)
    windows = cut_windows(train, 1 + SEQUENCE_LENGTH), cut_windows(validation, 1 + SEQUENCE_LENGTH, 128)

    def make_model() -> nn.Module:
        embedding, states = nn.Embedding(VOCABULARY_SIZE, 48), RecurrentStates(nn.GRU(48, 80, batch_first=True))
        return nn.Sequential(embedding, states, nn.Linear(80, VOCABULARY_SIZE))

    return make_row_task(make_model, next_symbol_loss, windows, 16)


def label_characters(source: str) -> Tensor:
    """Label every character of a Python source by its token type: (size,) int64."""
    starts = [0, *itertools.accumulate(map(len, io.StringIO(source)))]  # of lines
    kinds = torch.zeros(len(source), dtype=torch.int64)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TOKEN_TYPES:
            begin, end = (starts[line - 1] + column for line, column in (token.start, token.end))
            kinds[begin:end] = KEYWORD_CLASS if keyword.iskeyword(token.string) else TOKEN_TYPES.index(token.type)
    return kinds


def cut_labelled_windows(sources: Iterable[str], n: int | None = None) -> Tensor:
    """Cut sources into all or ``n`` windows of characters and of their token types: (n, 2, window) int64."""
    texts = list(itertools.islice(sources, N_MODULES))
    characters, kinds = encode_ascii("".join(texts)), torch.cat(list(map(label_characters, texts)))
    return torch.stack([cut_windows(symbols, 64, n) for symbols in (characters, kinds)], dim=1)


def make_dilated_block(dilation: int) -> nn.Sequential:
    """Make a residual block of two dilated convolutions with weight normalization."""
    convolve = functools.partial(nn.Conv1d, N_CHANNELS, N_CHANNELS, 3, padding=dilation, dilation=dilation)
    first, second = (parametrizations.weight_norm(convolve()) for _ in range(2))
    return nn.Sequential(ResidualLayers(first, nn.ReLU(), second, nn.ReLU()), nn.ReLU())


@make_workload_builder
def token_type_labelling() -> WorkloadTask:
    """Classify each character of a Python source by its token: a keyword, a name, a string and so on.

    Source: S. Bai, J. Z. Kolter and V. Koltun (2018), An empirical evaluation of generic convolutional and
        recurrent networks for sequence modeling, arXiv 1803.01271; here both sides of a character are seen.
    """

    def make_model() -> nn.Module:
        embedding, path = nn.Embedding(N_ASCII_SYMBOLS, N_CHANNELS), map(make_dilated_block, (1, 3, 9))
        return nn.ModuleList([embedding, nn.Sequential(*path, nn.Conv1d(N_CHANNELS, len(TOKEN_TYPES) + 1, 1))])

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        (embedding, path), (characters, kinds) = model.children(), windows.unbind(1)
        return F.cross_entropy(path(embedding(characters).transpose(1, 2)), kinds)

    train, validation = (side.values() for side in read_stdlib_sources())
    return make_row_task(make_model, loss, (cut_labelled_windows(train), cut_labelled_windows(validation, 128)), 8)


def make_factor_tables(num_users: int, num_items: int, biases: tuple[int, ...]) -> nn.Module:
    """Make embedding tables of users and items (matrix factors), and tables of biases with initial values of 0."""
    vectors = [nn.Embedding(count, FACTOR_DIM) for count in (num_users, num_items)]
    tables = [nn.Embedding(count, 1) for count in biases]
    for table in vectors:
        nn.init.normal_(table.weight, std=0.1)
    for table in tables:
        nn.init.zeros_(table.weight)
    return nn.ModuleList([*vectors, *tables])


@functools.cache
def load_word_pairs() -> Tensor:
    """Load pairs (n, 2) int64 of a function (the user) and a word in it (the item), in random order."""
    bodies = re.split(r"^ *(?:async )?def ", "".join(join_stdlib_sources()), flags=re.M)
    functions = [set(re.findall(r"[^\W\d]\w\w+", body)) for body in bodies]
    counts = Counter(word for words in functions for word in words)
    known = sorted(word for word, count in counts.items() if count >= 10)
    word_ids = {word: word_id for word_id, word in enumerate(known)}
    used = [sorted(word_ids[word] for word in words & word_ids.keys()) for words in functions]
    used = [items for items in used if len(items) >= 10]
    pairs = torch.tensor([(user, item) for user, items in enumerate(used) for item in items])  # (n, 2)
    return pairs[torch.randperm(len(pairs), generator=make_seed_zero_generator())]


@make_workload_builder
def matrix_factorization() -> WorkloadTask:
    """Distinguish the words in the source code of a function from random words.

    Functions are users and words are items: the logit is the dot product of their vectors, plus their biases.
    """
    pairs = load_word_pairs()
    num_users, num_items = (pairs.amax(0) + 1).tolist()
    validation, train = pairs.tensor_split([10_000])

    negatives_per_word = 4  # random words for each word that a function uses

    def add_negatives(positive: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return positive, torch.randint(num_items, (negatives_per_word * len(positive),), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (users, items), negatives = batch[0].unbind(1), batch[1]  # (n,), (n,), (negatives * n,)
        users, items, used = users.repeat(1 + negatives_per_word), torch.cat([items, negatives]), len(users)
        of_user, of_item, user_bias, item_bias = model.children()
        biases = (user_bias(users) + item_bias(items)).squeeze(1)  # (n,)
        logits = (of_user(users) * of_item(items)).sum(1) + biases
        return F.binary_cross_entropy_with_logits(logits, (torch.arange(len(logits)) < used).float())

    make_model = functools.partial(make_factor_tables, num_users, num_items, (num_users, num_items))
    return make_row_task(make_model, loss, (train, validation), 256, add_negatives)


@make_workload_builder
def pairwise_word_ranking() -> WorkloadTask:
    """Rank the words that a function uses above random words, which depend on the seed.

    About three words of each function are in the training set.

    Source: S. Rendle et al. (2009), BPR: Bayesian personalized ranking from implicit feedback, arXiv 1205.2618; here
        at most 2 % of the random words are words that the function uses.
    """
    pairs = load_word_pairs()
    num_users, num_items = (pairs.amax(0) + 1).tolist()
    validation, train, _ = pairs.tensor_split([2_000, 18_000])

    def add_negatives(used: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        return *used.unbind(1), torch.randint(num_items, (len(used),), generator=generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        (of_user, of_item, item_bias), (users, items, others) = model.children(), batch
        difference = of_item(items) - of_item(others)  # (n, factors)
        bias = (item_bias(items) - item_bias(others)).squeeze(1)  # (n,)
        return -F.logsigmoid((of_user(users) * difference).sum(1) + bias).mean()

    make_model = functools.partial(make_factor_tables, num_users, num_items, (num_items,))
    return make_row_task(make_model, loss, (train, validation), 32, add_negatives)


def load_word_windows() -> tuple[Tensor, Tensor, Tensor]:
    """Load training and validation windows of words (n, 1 + 2 * CONTEXT_RADIUS), and sampling weights (vocabulary,).

    Frequent words are left out at random, with a probability that rises with their frequency; rare words are left out.
    """
    sides = [WORD_PATTERN.findall(text) for text in join_stdlib_sources()]
    common = Counter(sides[0]).most_common(N_EMBEDDED_WORDS)
    word_ids = {word: word_id for word_id, (word, _) in enumerate(common)}
    counts = torch.tensor([count for _, count in common]).double()  # (vocabulary,)
    frequent_word_threshold = 1e-3  # words with a larger relative frequency are subsampled
    chance = (frequent_word_threshold * counts.sum() / counts).sqrt()  # of staying, if below 1
    fixed = make_seed_zero_generator()

    def cut_words(words: list[str]) -> Tensor:
        text = torch.tensor([word_ids[word] for word in words if word in word_ids])  # (size,)
        text = text[torch.rand(len(text), generator=fixed) < chance[text]]
        return text.unfold(0, 1 + 2 * CONTEXT_RADIUS, 1)

    train, validation = map(cut_words, sides)
    chosen = torch.linspace(0, len(validation) - 1, 1_000).long()
    return train, validation[chosen], counts**FREQUENCY_EXPONENT


@make_workload_builder
def word2vec() -> WorkloadTask:
    """Discriminate a word's context from random words, which depend on the seed.

    Source: T. Mikolov et al. (2013), Distributed representations of words and phrases and their compositionality,
        arXiv 1310.4546.
    """
    train, validation, weights = load_word_windows()
    signs = torch.tensor([1.0] + [-1.0] * N_NEGATIVES)

    def make_model() -> nn.Module:  # a vector of each word as a centre, and one as context
        tables = [nn.Embedding(N_EMBEDDED_WORDS, WORD_VECTOR_DIM) for _ in range(2)]
        for table in tables:  # word2vec's zeros for one would give the other no first gradient
            nn.init.uniform_(table.weight, -0.5 / WORD_VECTOR_DIM, 0.5 / WORD_VECTOR_DIM)
        return nn.ModuleList(tables)

    def add_negatives(windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        n = len(windows)
        columns = CONTEXT_COLUMNS[torch.randint(len(CONTEXT_COLUMNS), (n, 1), generator=generator)]
        negatives = torch.multinomial(weights, n * N_NEGATIVES, replacement=True, generator=generator).view(n, -1)
        return windows[:, CONTEXT_RADIUS], torch.cat((windows.gather(1, columns), negatives), 1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (of_centre, of_context), (centres, others) = model.children(), batch
        logits = (of_context(others) @ of_centre(centres)[:, :, None]).squeeze(2)  # (n, 1 + negatives)
        return -F.logsigmoid(signs * logits).sum(1).mean()

    return make_row_task(make_model, loss, (train, validation), 128, add_negatives)
