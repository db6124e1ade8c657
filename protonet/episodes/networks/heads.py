"""What an objective trains beside the encoder: FEAT's transformer, and the linear layer that MAML and ANIL begin at."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class SetTransformer(nn.Module):
    """Self-attention over a set of rows, by which each moves with regard to the others, in no order.

    One head, one layer; dropout of the attention and of its output in training.

    Args:
        dim: Features per row.

    Source: Ye, Hu, Zhan and Sha, "Few-shot learning via embedding adaptation with set-to-set functions" (2020), eqs. 6
        to 8, https://arxiv.org/abs/1812.03664, with the dropout of the authors' code.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.asked, self.asking, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.output, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.attention_dropout, self.output_dropout = nn.Dropout(0.1), nn.Dropout(0.5)

    def forward(self, sets: Tensor) -> Tensor:
        """Adapt the rows of sets (sets, rows, dim); the result has the same shape."""
        scores = self.asking(sets) @ self.asked(sets).transpose(1, 2) / math.sqrt(sets.shape[2])  # (sets, rows, rows)
        moved = self.output(self.attention_dropout(scores.softmax(dim=2)) @ self.value(sets))
        adapted: Tensor = self.norm(sets + self.output_dropout(moved))
        return adapted


class LinearHead(nn.Module):
    """A linear layer whose classes all begin at the same learned weights, so that their order and number are free.

    Source: Ye and Chao, "How to train your MAML to excel in few-shot classification" (2022), sec. 5, UNICORN-MAML.
        https://arxiv.org/abs/2106.16245
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dim))
        self.register_buffer("bias", torch.zeros(1), persistent=False)
        self.bias: Tensor

    def begin(self, n_way: int) -> dict[str, Tensor]:
        """Return the layer that an episode of ``n_way`` classes begins at: its weight and its bias, by name."""
        return {"weight": self.weight.expand(n_way, -1), "bias": self.bias.expand(n_way)}

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (n, dim) to logits (n, n_way)."""
        return nn.functional.linear(rows, self.weight, self.bias)


def make_head(objective: str, dim: int, generator: torch.Generator) -> nn.Module:
    """Make what an objective trains beside the encoder: nothing for "prototypes".

    Args:
        objective: One of `protonet.episodes.training.objectives.OBJECTIVES`.
        dim: Features per embedding.
        generator: Draws the weights.
    """
    if objective == "prototypes":
        return nn.Identity()
    with torch.device("meta"):  # torch's own initial weights would come from its global generator
        head = SetTransformer(dim) if objective == "feat" else LinearHead(dim)
    head = head.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1 / math.sqrt(dim), generator=generator)
            else:
                parameter.fill_(float(name == "norm.weight"))
        for buffer in head.buffers():
            buffer.zero_()
    return head
