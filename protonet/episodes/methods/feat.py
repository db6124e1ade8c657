"""FEAT: prototypes that a transformer adapts to each other."""

from __future__ import annotations

from torch import Tensor

from protonet.episodes.methods.common import cosines, get_trained, support_means
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes


def feat(episodes: Episodes, *, temperature: Positive = 0.1) -> Tensor:
    """Classify by the cosine to class means that were adapted to each other by self-attention.

    The encoder and the transformer are those of ``train --objective feat``.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), embedded by the encoder.
        temperature: > 0, divides the cosines; as in training.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There is no encoder, or it is one of another objective.

    Source: Ye, Hu, Zhan and Sha, "Few-shot learning via embedding adaptation with set-to-set functions" (2020), sec.
        4.1. https://arxiv.org/abs/1812.03664
    """
    head = get_trained(episodes, "feat", "feat").head
    weight = next(head.parameters())
    prototypes = head(support_means(episodes).to(weight)).to(episodes.query)
    return cosines(episodes.query, prototypes) / temperature
