"""Tip-Adapter: CLIP's zero-shot classifier, and a cache of the support rows that needs no training."""

from __future__ import annotations

from torch import Tensor

from protonet.episodes.methods.clip import clip_zero_shot, get_texts
from protonet.episodes.methods.common import cosines, one_hot
from protonet.episodes.methods.keywords import NonNegative, Positive
from protonet.episodes.samplers.batch import Episodes


def tip_adapter(
    episodes: Episodes, *, alpha: NonNegative = 1.17, beta: Positive = 1.0, temperature: Positive = 0.01
) -> Tensor:
    """Classify by the cosine to texts that name the classes, plus votes of the support rows by their closeness.

    Defaults are those with which the authors' code begins on ImageNet (configs/imagenet.yaml), where a validation set
    chooses others: here ``--tune tip-adapter:alpha=1,2,5:beta=1,3,7``.

    Args:
        episodes: Support (episodes, n_support, dim), query (episodes, n_queries, dim) and texts (episodes, n_way, dim),
            floating.
        alpha: >= 0, the weight of the cache.
        beta: > 0, how fast a row's vote falls with its distance.
        temperature: > 0, divides the cosines to texts, see `clip_zero_shot`.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There are no texts.

    Source: Zhang et al., "Tip-Adapter: training-free adaption of CLIP for few-shot classification" (2022), sec. 3.
        https://arxiv.org/abs/2207.09519
    """
    get_texts(episodes)
    votes = (beta * (cosines(episodes.query, episodes.support) - 1)).exp()  # (episodes, n_queries, n_support)
    hot = one_hot(episodes.support_labels, episodes.n_way, votes.dtype)
    return clip_zero_shot(episodes, temperature=temperature) + alpha * votes @ hot
