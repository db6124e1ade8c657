"""A GRU that predicts the next token of Python sources."""

from __future__ import annotations

import functools
import re
from collections import Counter

import torch
from torch import Tensor, nn

from analysis.optimizer_bench.workload import Workload
from analysis.optimizer_bench.workloads._text import build_language_model, cut_windows, read_sources

VOCABULARY = 512  # the commonest tokens; 0 stands for all others
LENGTH = 16
EMBEDDING = 48
WIDTH = 80
BATCH = 16
VALIDATION = 128  # windows


class LanguageModel(nn.Module):
    """An embedding, a GRU and a linear head, with torch's own initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING)
        self.gru = nn.GRU(EMBEDDING, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, vocabulary) of the token after each."""
        states, _ = self.gru(self.embedding(tokens))  # (batch, length, width)
        logits: Tensor = self.head(states)
        return logits


@functools.cache
def load_windows() -> tuple[Tensor, Tensor]:
    """Return windows (n, 1 + length) of tokens to train and to validate on."""
    sides = [re.findall(r"\w+|[^\w\s]|\n", "".join(modules.values())) for modules in read_sources()]
    common = Counter(sides[0]).most_common(VOCABULARY - 1)
    numbers = {token: number for number, (token, _) in enumerate(common, start=1)}
    train, validation = (torch.tensor([numbers.get(token, 0) for token in side]) for side in sides)  # (size,)
    return cut_windows(train, 1 + LENGTH), cut_windows(validation, 1 + LENGTH, VALIDATION)


def build(seed: int) -> Workload:
    """Build the workload; the seed moves the initial weights and the order of batches."""
    return build_language_model(LanguageModel, load_windows(), BATCH, seed)
