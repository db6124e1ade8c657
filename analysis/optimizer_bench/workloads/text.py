"""Real text that is offline wherever Python is: the sources of its own standard library.

A small GPT predicts the next byte, and a GRU the next token.
"""

from __future__ import annotations

import functools
import re
import sysconfig
import zlib
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, build_on_rows

VALIDATION_SHARE = 10  # one module in ten
BYTES, CONTEXT, WIDTH, HEADS, LAYERS = 128, 32, 64, 4, 2  #: The GPT's; its vocabulary is ASCII.
#: The GRU's; of its tokens, 0 stands for all that are not among the commonest.
TOKENS, LENGTH, EMBEDDING, HIDDEN = 512, 16, 48, 80


@functools.cache
def read_sources() -> tuple[dict[str, str], dict[str, str]]:
    """Return the sources by name of the standard library's modules: those to train and those to validate on."""
    train, validation = dict[str, str](), dict[str, str]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        # A module stays on its side whatever others its Python has.
        side = train if zlib.crc32(path.name.encode()) % VALIDATION_SHARE else validation
        side[path.name] = path.read_text(encoding="utf-8")
    return train, validation


def cut_windows(symbols: Tensor, length: int, n: int | None = None) -> Tensor:
    """Cut a text (size,) into windows (n, length) that do not overlap: all, or n at even distances."""
    windows = symbols[: len(symbols) // length * length].view(-1, length)
    return windows if n is None else windows[torch.linspace(0, len(windows) - 1, n).long()]  # (n, length)


def predict_next(model: nn.Module, symbols: Tensor) -> Tensor:
    """Return the cross-entropy of the next symbol of windows (n, 1 + length), 0-d."""
    logits = model(symbols[:, :-1])  # (n, length, vocabulary)
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


class Block(nn.Module):
    """Attention to what came before, then an MLP, each after a norm and beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(2, (3, HEADS, -1))  # (batch, length, 3, heads, width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))  # (batch, length, width)
        return torch.add(x, self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Embeddings of bytes and positions, blocks, a norm and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
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
    texts = ("".join(modules.values()).encode("ascii", "replace") for modules in read_sources())
    train, validation = (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts)  # (size,)
    return cut_windows(train, 1 + CONTEXT), cut_windows(validation, 1 + CONTEXT, 64)


def build_gpt(seed: int) -> Workload:
    """Build the GPT's; the seed decides the initial weights and the order of batches."""
    return build_on_rows(GPT, predict_next, *load_bytes(), size=8, seed=seed)


class TokenModel(nn.Module):
    """An embedding, a GRU and a linear head, with torch's own initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, EMBEDDING)
        self.gru = nn.GRU(EMBEDDING, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary) of the token after each."""
        states, _ = self.gru(self.embedding(tokens))  # (batch, length, width)
        logits: Tensor = self.head(states)
        return logits


@functools.cache
def load_tokens() -> tuple[Tensor, Tensor]:
    """Return windows (n, 1 + length) of tokens to train and to validate on."""
    sides = [re.findall(r"\w+|[^\w\s]|\n", "".join(modules.values())) for modules in read_sources()]
    common = Counter(sides[0]).most_common(TOKENS - 1)
    numbers = {token: number for number, (token, _) in enumerate(common, start=1)}
    train, validation = (torch.tensor([numbers.get(token, 0) for token in side]) for side in sides)  # (size,)
    return cut_windows(train, 1 + LENGTH), cut_windows(validation, 1 + LENGTH, 128)


def build_gru(seed: int) -> Workload:
    """Build the GRU's; the seed decides the initial weights and the order of batches."""
    return build_on_rows(TokenModel, predict_next, *load_tokens(), size=16, seed=seed)


WORKLOADS = {"gpt": build_gpt, "gru": build_gru}
