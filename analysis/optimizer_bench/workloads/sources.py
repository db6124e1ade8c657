"""Sequences: bytes, tokens and characters of Python's source code."""

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

from analysis.optimizer_bench.workload import WorkloadTask, make_row_task, make_workload_builder
from analysis.optimizer_bench.workloads.data import cut_windows, encode_ascii, join_sources, read_sources
from analysis.optimizer_bench.workloads.models import RecurrentStates, ResidualLayers, TokenEmbedding, make_mlp

N_ASCII_SYMBOLS, CONTEXT_LENGTH, GPT_WIDTH, HEADS = 128, 32, 64, 4
VOCABULARY_SIZE, LENGTH = 512, 16  #: Vocabulary size and sequence length; token 0 represents all rare tokens.
#: Kinds of tokens; white space and line ends are of kind 0.
TOKEN_TYPES = (tokenize.ENDMARKER, tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP, tokenize.COMMENT)
#: An additional kind, which tokenize counts among names.
KEYWORD_CLASS = len(TOKEN_TYPES)
MODULES, CHANNELS = 30, 32  #: Modules whose characters are classified: tokenizing all would take seconds.


def predict_next(model: nn.Module, symbols: Tensor) -> Tensor:
    """Compute the cross-entropy of the next symbol in windows (n, 1 + length), 0-d."""
    logits = model(symbols[:, :-1])  # (n, length, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


def split_heads(x: Tensor, parts: int) -> Tensor:
    """Reshape (batch, length, parts * width) to (parts, batch, heads, length, width of a head)."""
    heads: Tensor = x.unflatten(2, (parts, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return heads


class CausalAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(GPT_WIDTH, 3 * GPT_WIDTH)
        self.projection = nn.Linear(GPT_WIDTH, GPT_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        q, k, v = split_heads(self.qkv(x), 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


def make_gpt() -> nn.Module:
    """Make pre-norm residual blocks of attention and an MLP, and an untied head."""

    def make_block() -> nn.Sequential:
        attention = ResidualLayers(nn.LayerNorm(GPT_WIDTH), CausalAttention())
        mlp = make_mlp(GPT_WIDTH, 4 * GPT_WIDTH, GPT_WIDTH, activation=nn.GELU)
        return nn.Sequential(attention, ResidualLayers(nn.LayerNorm(GPT_WIDTH), mlp))

    def draw_as_gpt_2(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    embedding, blocks = TokenEmbedding(N_ASCII_SYMBOLS, CONTEXT_LENGTH, GPT_WIDTH), [make_block() for _ in range(2)]
    head = nn.Linear(GPT_WIDTH, N_ASCII_SYMBOLS, bias=False)
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(GPT_WIDTH), head).apply(draw_as_gpt_2)


@functools.cache
def load_bytes() -> tuple[Tensor, Tensor]:
    """Load windows (n, 1 + context) of bytes for training and for validation."""
    train, validation = map(encode_ascii, join_sources())
    return cut_windows(train, 1 + CONTEXT_LENGTH), cut_windows(validation, 1 + CONTEXT_LENGTH, 64)


@make_workload_builder
def gpt() -> WorkloadTask:
    """Predict the next byte by a GPT."""
    return make_row_task(make_gpt, predict_next, load_bytes(), 8)


@functools.cache
def load_tokens() -> tuple[Tensor, Tensor]:
    """Load windows (n, 1 + length) of tokens for training and for validation."""
    sides = [re.findall(r"\w+|[^\w\s]|\n", text) for text in join_sources()]
    common = Counter(sides[0]).most_common(VOCABULARY_SIZE - 1)
    token_ids = {token: token_id for token_id, (token, _) in enumerate(common, start=1)}
    train, validation = (torch.tensor([token_ids.get(token, 0) for token in side]) for side in sides)  # (size,)
    return cut_windows(train, 1 + LENGTH), cut_windows(validation, 1 + LENGTH, 128)


@make_workload_builder
def gru() -> WorkloadTask:
    """Predict the next token by a GRU: map (batch, length) to logits (batch, length, vocabulary)."""

    def make() -> nn.Module:
        embedding, states = nn.Embedding(VOCABULARY_SIZE, 48), RecurrentStates(nn.GRU(48, 80, batch_first=True))
        return nn.Sequential(embedding, states, nn.Linear(80, VOCABULARY_SIZE))

    return make_row_task(make, predict_next, load_tokens(), 16)


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
    """Cut sources into windows of characters and their token types, (n, 2, window) int64."""
    texts = list(itertools.islice(sources, MODULES))
    characters, kinds = encode_ascii("".join(texts)), torch.cat(list(map(label_characters, texts)))
    return torch.stack([cut_windows(symbols, 64, n) for symbols in (characters, kinds)], dim=1)


def make_dilated(dilation: int) -> nn.Sequential:
    """Make a residual block of two weight-normed dilated convolutions."""
    convolve = functools.partial(nn.Conv1d, CHANNELS, CHANNELS, 3, padding=dilation, dilation=dilation)
    first, second = (parametrizations.weight_norm(convolve()) for _ in range(2))
    return nn.Sequential(ResidualLayers(first, nn.ReLU(), second, nn.ReLU()), nn.ReLU())


@make_workload_builder
def syntax() -> WorkloadTask:
    """Classify each character of a Python source by its token: a keyword, a name, a string and so on.

    Source: S. Bai, J. Z. Kolter and V. Koltun (2018), An empirical evaluation of generic convolutional and
        recurrent networks for sequence modeling, arXiv 1803.01271; here both sides of a character are seen.
    """

    def make() -> nn.Module:
        embedding, path = nn.Embedding(N_ASCII_SYMBOLS, CHANNELS), map(make_dilated, (1, 3, 9))
        return nn.ModuleList([embedding, nn.Sequential(*path, nn.Conv1d(CHANNELS, len(TOKEN_TYPES) + 1, 1))])

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        (embedding, path), (characters, kinds) = model.children(), windows.unbind(1)
        return F.cross_entropy(path(embedding(characters).transpose(1, 2)), kinds)

    train, validation = (side.values() for side in read_sources())
    return make_row_task(make, loss, (cut_labelled_windows(train), cut_labelled_windows(validation, 128)), 8)
