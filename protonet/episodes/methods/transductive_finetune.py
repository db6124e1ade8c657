"""Transductive fine-tuning: a linear layer that starts at the class means, then learns from support and queries."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods.common import adam, adaptation_gradient, one_hot, unit_rows
from protonet.episodes.methods.keywords import Count, Positive
from protonet.episodes.samplers.batch import Episodes


def transductive_finetune(
    episodes: Episodes, *, temperature: Positive = 1, learning_rate: Positive = 5e-5, steps: Count = 25
) -> Tensor:
    """Classify by a linear layer trained on the support's cross-entropy plus the queries' entropy.

    The paper trains the whole network. Here features are fixed and the layer alone is trained, which changes it very
    little at the paper's learning rate; but where features have a common mean, cosines differ by less than that, and it
    is hardly better than chance.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating; rows are scaled to
            unit norm.
        temperature: > 0, divides the logits; the paper has none.
        learning_rate: Adam's, > 0. The paper: 5e-5.
        steps: Adam's, >= 0. The paper: 25.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Source: Dhillon et al., "A baseline for few-shot image classification" (2020), support-based initialisation and
        eq. 8. https://arxiv.org/abs/1909.02729
    """
    n_support = episodes.support.shape[1]
    rows = unit_rows(episodes)
    labels = one_hot(episodes.support_labels, episodes.n_way, rows.dtype).transpose(1, 2)
    imprinted = F.normalize(labels @ rows[:, :n_support], dim=2)
    # The bias is the weight of an added feature that is always 1.
    rows, imprinted = F.pad(rows, (0, 1), value=1), F.pad(imprinted, (0, 1))

    def logits(layer: Tensor) -> Tensor:
        return layer @ rows.transpose(1, 2) / temperature  # (episodes, n_way, rows)

    def gradient(layer: Tensor) -> Tensor:
        return adaptation_gradient(logits(layer).log_softmax(dim=1), labels, (1, 0, 1)) @ rows / temperature

    layer = adam(imprinted, gradient, learning_rate=learning_rate, steps=steps)
    return logits(layer)[..., n_support:].transpose(1, 2)
