"""Heads that are trained with the encoder: FEAT's transformer, and the initial linear layer of MAML and ANIL."""

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
    """The linear layer that episodes begin at: learned weights of each class, or zero, where nothing is learned.

    Zero is for any number of classes, in any order. So are weights that all classes share, but they are the same thing:
    they add as much to every logit of a row, which the softmax and its gradients leave out. The first gradient step
    from zero changes the layer alone, so that one step of MAML is one of ANIL.

    Args:
        dim: Features per row.
        n_way: Classes with weights of their own, the only number that it is then for; None for zero.

    Source: Finn, Abbeel and Levine, "Model-agnostic meta-learning for fast adaptation of deep networks" (2017), and its
        code, https://arxiv.org/abs/1703.03400; zero: Kao, Chiu and Chen, "MAML is a noisy contrastive learner in
        classification" (2022), sec. 3, https://arxiv.org/abs/2106.15367; shared: Ye and Chao, "How to train your MAML
        to excel in few-shot classification" (2022), sec. 5. https://arxiv.org/abs/2106.16245
    """

    def __init__(self, dim: int, n_way: int | None = None) -> None:
        super().__init__()
        self.n_way = n_way
        self.weight: Tensor
        self.bias: Tensor
        if n_way is None:
            self.register_buffer("weight", torch.zeros(1, dim), persistent=False)
            self.register_buffer("bias", torch.zeros(1), persistent=False)
        else:
            self.weight, self.bias = nn.Parameter(torch.zeros(n_way, dim)), nn.Parameter(torch.zeros(n_way))

    def begin(self, n_way: int) -> dict[str, Tensor]:
        """Return the layer that an episode of ``n_way`` classes begins at: its weight and its bias, by name."""
        return {"weight": self.weight.expand(n_way, -1), "bias": self.bias.expand(n_way)}

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (n, dim) to logits (n, n_way)."""
        return nn.functional.linear(rows, self.weight, self.bias)


def make_head(objective: str, dim: int, generator: torch.Generator, *, n_way: int | None = None) -> nn.Module:
    """Make what an objective trains beside the encoder: nothing for "prototypes" and "protonet".

    Args:
        objective: One of `protonet.episodes.names.OBJECTIVES`.
        dim: Features per embedding.
        generator: Draws the weights: normal, of variance 1 / dim; biases are 0.
        n_way: Of MAML and ANIL: the classes that each have weights of their own; None for a layer at zero.
    """
    if objective in ("prototypes", "protonet"):
        return nn.Identity()
    with torch.device("meta"):  # torch's own initial weights would come from its global generator
        head = SetTransformer(dim) if objective == "feat" else LinearHead(dim, n_way)
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
