"""Transformers unlike the bench's GPT: they sort numbers, fill in masked tokens, or fade what they remember."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, on_rows, seed_0, workload
from analysis.optimizer_bench.workloads.models import Skip, make_transformer
from analysis.optimizer_bench.workloads.text import BYTES, LENGTH, TOKENS, load_bytes, load_tokens, predict_next

HEADS, LAYERS = 4, 2

NUMBERS, SIZE, SORTER_WIDTH = 96, 10, 48  #: What is sorted: so many numbers, all smaller than the first constant.
SEQUENCES, SORTER_VALIDATION, SORTER_BATCH = 60_000, 64, 16

MASK, MASKED = TOKENS, 3  #: The token that hides another, and how many are hidden in a window.
BERT_WIDTH, BERT_BATCH = 48, 8

MIXER_WIDTH, MIXER_HIDDEN, MIXER_BATCH = 48, 96, 6
REMEMBER = 2.0  #: The first logit of a gate: seven eighths of the memory stay.
EPSILON = 1e-6


class Sorter(nn.Module):
    """Embeddings of numbers and positions, an encoder whose norms come after the skips, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, SORTER_WIDTH)
        self.positions = nn.Embedding(SIZE, SORTER_WIDTH)
        self.layers = make_transformer(SORTER_WIDTH, HEADS, LAYERS, "relu", norm_first=False)
        self.head = nn.Linear(SORTER_WIDTH, NUMBERS)

    def forward(self, numbers: Tensor) -> Tensor:
        """Map numbers (batch, size) to logits (batch, size, numbers) of what is at each place once they are sorted."""
        logits: Tensor = self.head(self.layers(self.numbers(numbers) + self.positions.weight))
        return logits


@workload
def sorter() -> Task:
    """Sort numbers."""
    sequences = torch.randint(NUMBERS, (SEQUENCES, SIZE), generator=seed_0())
    validation, train = sequences.tensor_split([SORTER_VALIDATION])

    def loss(model: nn.Module, numbers: Tensor) -> Tensor:
        return F.cross_entropy(model(numbers).flatten(0, 1), numbers.sort(1).values.flatten())

    return on_rows(Sorter, loss, (train, validation), SORTER_BATCH)


class BERT(nn.Module):
    """An encoder whose tokens' embeddings are its output's weights, too.

    Source: J. Devlin et al. (2018), BERT: pre-training of deep bidirectional transformers, arXiv 1810.04805.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS + 1, BERT_WIDTH)
        self.positions = nn.Embedding(1 + LENGTH, BERT_WIDTH)
        self.norm = nn.LayerNorm(BERT_WIDTH)
        self.layers = make_transformer(BERT_WIDTH, HEADS, LAYERS, "gelu", norm_first=False)
        self.transform = nn.Sequential(nn.Linear(BERT_WIDTH, BERT_WIDTH), nn.GELU(), nn.LayerNorm(BERT_WIDTH))
        self.bias = nn.Parameter(torch.zeros(TOKENS))
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, k, vocabulary) of those that places (batch, k) hide."""
        x = self.norm(self.tokens(tokens) + self.positions.weight)  # (batch, length, width)
        hidden = torch.take_along_dim(self.layers(x), places[..., None], dim=1)  # (batch, k, width)
        return F.linear(self.transform(hidden), self.tokens.weight[:TOKENS], self.bias)


def hide_tokens(windows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return windows (n, length) with some tokens hidden, and the places and the tokens hidden, (n, masked) each."""
    places = torch.rand(windows.shape, generator=generator).argsort(1)[:, :MASKED]
    return windows.scatter(1, places, MASK), places, windows.gather(1, places)


@workload
def bert() -> Task:
    """Guess hidden tokens of sources; the seed decides what is hidden, too."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, places, hidden = batch
        return F.cross_entropy(model(tokens, places).flatten(0, 1), hidden.flatten())

    return on_rows(BERT, loss, load_tokens(), BERT_BATCH, hide_tokens)


class RMSNorm(nn.Module):
    """Features divided by their root mean square, times learned factors."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., features) to the same shape."""
        return torch.mul(x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt(), self.weight)


def recall(q: Tensor, k: Tensor, v: Tensor, log_stay: Tensor) -> Tensor:
    """Return what queries find in a memory that fades: attention without a softmax.

    The memory of step t is ``exp(log_stay[t])`` times the one before plus the outer product of key and value; all
    steps are computed at once.

    Args:
        q: Queries, (..., length, width).
        k: Keys, of the same shape.
        v: Values, of the same shape.
        log_stay: The logarithms of the shares of the memory that stay, (..., length).
    """
    log_left = log_stay.cumsum(-1)
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    fade = (log_left[..., :, None] - log_left[..., None, :]).masked_fill(future, -math.inf).exp()
    return (q @ k.transpose(-1, -2) * fade) @ v


class GatedAttention(nn.Module):
    """Gated linear attention; no biases but the gate's.

    Source: S. Yang et al. (2023), Gated linear attention transformers with hardware-efficient training, arXiv
        2312.06635, here with one gate a head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(MIXER_WIDTH // HEADS)
        self.qkvo = nn.Linear(MIXER_WIDTH, 4 * MIXER_WIDTH, bias=False)
        self.stay = nn.Linear(MIXER_WIDTH, HEADS)
        nn.init.constant_(self.stay.bias, REMEMBER)
        self.projection = nn.Linear(MIXER_WIDTH, MIXER_WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        qkvo = self.qkvo(x).unflatten(2, (4, HEADS, -1))  # (batch, length, 4, heads, width)
        q, k, v, out = qkvo.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width)
        found = recall(q, k, v, F.logsigmoid(self.stay(x)).transpose(1, 2))
        mixed = self.norm(found) * F.silu(out)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


class SwiGLU(nn.Module):
    """A gated MLP.

    Source: N. Shazeer (2020), GLU variants improve transformer, arXiv 2002.05202.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Linear(MIXER_WIDTH, 2 * MIXER_HIDDEN, bias=False)
        self.fall = nn.Linear(MIXER_HIDDEN, MIXER_WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        gate, value = self.rise(x).chunk(2, dim=-1)
        fallen: Tensor = self.fall(F.silu(gate) * value)
        return fallen


def make_mixer() -> nn.Sequential:
    """Make a model that maps bytes (batch, length) to logits (batch, length, vocabulary) of the byte after each."""
    head = nn.Linear(MIXER_WIDTH, BYTES, bias=False)
    embedding = nn.Embedding(BYTES, MIXER_WIDTH)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        for kind in (GatedAttention, SwiGLU):
            layers.append(Skip(RMSNorm(MIXER_WIDTH), kind()))
    return nn.Sequential(embedding, *layers, RMSNorm(MIXER_WIDTH), head)


@workload
def mixer() -> Task:
    """Predict the next byte of sources."""
    return on_rows(make_mixer, predict_next, load_bytes(), MIXER_BATCH)


WORKLOADS = {"sorter": sorter, "bert": bert, "mixer": mixer}
