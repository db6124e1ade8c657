"""Transformers unlike the bench's GPT: they sort numbers, fill in masked tokens, or fade what they remember."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Build, Workload, build_on_rows
from analysis.optimizer_bench.workloads.text import BYTES, LENGTH, TOKENS, load_bytes, load_tokens, predict_next

HEADS, LAYERS = 4, 2

NUMBERS, SIZE, SORTER_WIDTH = 96, 10, 48  #: What is sorted: so many numbers, all smaller than the first constant.
SEQUENCES, SORTER_VALIDATION, SORTER_BATCH = 60_000, 64, 16

MASK, MASKED = TOKENS, 3  #: The token that hides another, and how many are hidden in a window.
BERT_WIDTH, BERT_BATCH = 48, 8

MIXER_WIDTH, MIXER_HIDDEN, MIXER_BATCH = 48, 96, 6
REMEMBER = 2.0  #: The first logit of a gate: seven eighths of the memory stay.
EPSILON = 1e-6


def make_post_norm(width: int, activation: str) -> nn.TransformerEncoder:
    """Make layers whose norms come after the skips, as in the first transformer."""
    layer = nn.TransformerEncoderLayer(width, HEADS, 2 * width, dropout=0.0, activation=activation, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


class Sorter(nn.Module):
    """Embeddings of numbers and positions, an encoder and a head, with torch's own initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, SORTER_WIDTH)
        self.positions = nn.Embedding(SIZE, SORTER_WIDTH)
        self.layers = make_post_norm(SORTER_WIDTH, "relu")
        self.head = nn.Linear(SORTER_WIDTH, NUMBERS)

    def forward(self, numbers: Tensor) -> Tensor:
        """Map numbers (batch, size) to logits (batch, size, numbers) of what is at each place once they are sorted."""
        logits: Tensor = self.head(self.layers(self.numbers(numbers) + self.positions.weight))
        return logits


def build_sorter(seed: int) -> Workload:
    """Sort numbers; the seed decides the initial weights and the order of batches."""
    sequences = torch.randint(NUMBERS, (SEQUENCES, SIZE), generator=torch.Generator().manual_seed(0))
    validation, train = sequences.tensor_split([SORTER_VALIDATION])

    def loss(model: nn.Module, numbers: Tensor) -> Tensor:
        return F.cross_entropy(model(numbers).flatten(0, 1), numbers.sort(1).values.flatten())

    return build_on_rows(Sorter, loss, train, validation, size=SORTER_BATCH, seed=seed)


class BERT(nn.Module):
    """An encoder whose tokens' embeddings are its output's weights, too.

    Source: J. Devlin et al. (2018), BERT: pre-training of deep bidirectional transformers, arXiv 1810.04805.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS + 1, BERT_WIDTH)
        self.positions = nn.Embedding(1 + LENGTH, BERT_WIDTH)
        self.norm = nn.LayerNorm(BERT_WIDTH)
        self.layers = make_post_norm(BERT_WIDTH, "gelu")
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


def build_bert(seed: int) -> Workload:
    """Guess hidden tokens of sources; the seed decides what is hidden, too."""
    train, validation = load_tokens()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, places, hidden = batch
        return F.cross_entropy(model(tokens, places).flatten(0, 1), hidden.flatten())

    held_out = hide_tokens(validation, torch.Generator().manual_seed(0))
    return build_on_rows(BERT, loss, train, held_out, size=BERT_BATCH, seed=seed, draw=hide_tokens)


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


class Mixer(nn.Module):
    """Gated linear attention, then a gated MLP (SwiGLU), each after a norm and beside a skip; no biases but the gate's.

    Sources: S. Yang et al. (2023), Gated linear attention transformers with hardware-efficient training, arXiv
        2312.06635, here with one gate a head; N. Shazeer (2020), GLU variants improve transformer, arXiv 2002.05202.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads_norm, self.mlp_norm = (
            RMSNorm(features) for features in (MIXER_WIDTH, MIXER_WIDTH // HEADS, MIXER_WIDTH)
        )
        self.qkvo = nn.Linear(MIXER_WIDTH, 4 * MIXER_WIDTH, bias=False)
        self.stay = nn.Linear(MIXER_WIDTH, HEADS)
        nn.init.constant_(self.stay.bias, REMEMBER)
        self.projection = nn.Linear(MIXER_WIDTH, MIXER_WIDTH, bias=False)
        self.rise = nn.Linear(MIXER_WIDTH, 2 * MIXER_HIDDEN, bias=False)
        self.fall = nn.Linear(MIXER_HIDDEN, MIXER_WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        normed = self.norm(x)
        qkvo = self.qkvo(normed).unflatten(2, (4, HEADS, -1))  # (batch, length, 4, heads, width)
        q, k, v, out = qkvo.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width)
        found = recall(q, k, v, F.logsigmoid(self.stay(normed)).transpose(1, 2))
        mixed = self.heads_norm(found) * F.silu(out)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))  # (batch, length, width)
        gate, value = self.rise(self.mlp_norm(x)).chunk(2, dim=-1)
        return torch.add(x, self.fall(F.silu(gate) * value))


def make_mixer() -> nn.Sequential:
    """Make a model that maps bytes (batch, length) to logits (batch, length, vocabulary) of the byte after each."""
    head = nn.Linear(MIXER_WIDTH, BYTES, bias=False)
    return nn.Sequential(
        nn.Embedding(BYTES, MIXER_WIDTH), *(Mixer() for _ in range(LAYERS)), RMSNorm(MIXER_WIDTH), head
    )


def build_mixer(seed: int) -> Workload:
    """Predict the next byte of sources; the seed decides the initial weights and the order of batches."""
    return build_on_rows(make_mixer, predict_next, *load_bytes(), size=MIXER_BATCH, seed=seed)


WORKLOADS: dict[str, Build] = {"sorter": build_sorter, "bert": build_bert, "mixer": build_mixer}
