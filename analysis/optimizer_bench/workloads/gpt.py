"""A small GPT: a transformer that predicts the next byte of Python sources."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload
from analysis.optimizer_bench.workloads._text import build_language_model, cut_windows, read_sources

VOCABULARY = 128  # ASCII
CONTEXT = 32
WIDTH = 64
HEADS = 4
LAYERS = 2
BATCH = 8
VALIDATION = 64  # windows


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
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """Embeddings of bytes and positions, blocks, a norm and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
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
def load_windows() -> tuple[Tensor, Tensor]:
    """Return windows (n, 1 + context) of bytes to train and to validate on."""
    texts = ("".join(modules.values()).encode("ascii", "replace") for modules in read_sources())
    train, validation = (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts)  # (size,)
    return cut_windows(train, 1 + CONTEXT), cut_windows(validation, 1 + CONTEXT, VALIDATION)


def build(seed: int) -> Workload:
    """Build the workload; the seed moves the initial weights and the order of batches."""
    return build_language_model(GPT, load_windows(), BATCH, seed)
