"""Real text that is offline wherever Python is: a small GPT predicts the next byte of sources, a GRU the next token."""

from __future__ import annotations

import functools
import re
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, on_rows, workload
from analysis.optimizer_bench.workloads.data import cut_windows, encode_ascii, join_sources
from analysis.optimizer_bench.workloads.models import Skip, States, make_mlp

BYTES, CONTEXT, WIDTH, HEADS, LAYERS = 128, 32, 64, 4, 2  #: The GPT's; its vocabulary is ASCII.
#: The GRU's; of its tokens, 0 stands for all that are not among the commonest.
TOKENS, LENGTH, EMBEDDING, HIDDEN = 512, 16, 48, 80


def predict_next(model: nn.Module, symbols: Tensor) -> Tensor:
    """Return the cross-entropy of the next symbol of windows (n, 1 + length), 0-d."""
    logits = model(symbols[:, :-1])  # (n, length, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


class CausalAttention(nn.Module):
    """Attention to what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        qkv = self.qkv(x).unflatten(2, (3, HEADS, -1))  # (batch, length, 3, heads, width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


def make_block() -> nn.Sequential:
    """Make attention and an MLP, each after a norm and beside a skip."""
    attention = Skip(nn.LayerNorm(WIDTH), CausalAttention())
    return nn.Sequential(attention, Skip(nn.LayerNorm(WIDTH), make_mlp(WIDTH, 4 * WIDTH, WIDTH, activation=nn.GELU)))


class GPT(nn.Module):
    """Embeddings of bytes and positions, blocks, a norm and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(make_block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        self.apply(_init)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map bytes (batch, length) to logits (batch, length, vocabulary) of the byte after each."""
        x = self.tokens(symbols) + self.positions.weight[: symbols.shape[1]]  # (batch, length, width)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def _init(module: nn.Module) -> None:
    """Draw weights as GPT-2 does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@functools.cache
def load_bytes() -> tuple[Tensor, Tensor]:
    """Return windows (n, 1 + context) of bytes to train and to validate on."""
    train, validation = map(encode_ascii, join_sources())
    return cut_windows(train, 1 + CONTEXT), cut_windows(validation, 1 + CONTEXT, 64)


@workload
def gpt() -> Task:
    """Predict the next byte by a GPT."""
    return on_rows(GPT, predict_next, load_bytes(), 8)


@functools.cache
def load_tokens() -> tuple[Tensor, Tensor]:
    """Return windows (n, 1 + length) of tokens to train and to validate on."""
    sides = [re.findall(r"\w+|[^\w\s]|\n", text) for text in join_sources()]
    common = Counter(sides[0]).most_common(TOKENS - 1)
    numbers = {token: number for number, (token, _) in enumerate(common, start=1)}
    train, validation = (torch.tensor([numbers.get(token, 0) for token in side]) for side in sides)  # (size,)
    return cut_windows(train, 1 + LENGTH), cut_windows(validation, 1 + LENGTH, 128)


@workload
def gru() -> Task:
    """Predict the next token by a GRU: map (batch, length) to logits (batch, length, vocabulary)."""

    def make() -> nn.Module:
        embedding, states = nn.Embedding(TOKENS, EMBEDDING), States(nn.GRU(EMBEDDING, HIDDEN, batch_first=True))
        return nn.Sequential(embedding, states, nn.Linear(HIDDEN, TOKENS))

    return on_rows(make, predict_next, load_tokens(), 16)


WORKLOADS = {"gpt": gpt, "gru": gru}
