"""ANIL: MAML whose gradient steps on the support are those of the last layer alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from protonet.episodes.methods.common import get_trained
from protonet.episodes.methods.keywords import Count, Positive
from protonet.episodes.methods.maml import InnerLoop, LayerWeights, adapt
from protonet.episodes.networks.backbones import LinearHead
from protonet.episodes.samplers.batch import Episodes


def anil(episodes: Episodes, *, steps: Count | None = None, rate: Positive | None = None) -> Tensor:
    """Classify by a linear layer on the embeddings after gradient steps on the support's cross-entropy.

    The encoder is one of ``train --objective anil``. The initial weights of the layer are as in `maml`.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), embedded by the encoder.
        steps: Gradient steps, >= 0; none: as in training.
        rate: Of the steps, > 0; none: as in training.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows.

    Raises:
        InputError: There is no encoder, or it is one of another objective or for another number of classes.

    Source: Raghu, Raghu, Bengio and Vinyals, "Rapid learning or feature reuse? Towards understanding the effectiveness
        of MAML" (2020), sec. 4.1. https://arxiv.org/abs/1909.09157
    """
    trained = get_trained(episodes, "anil", "anil")
    assert isinstance(trained.head, LinearHead)
    device = trained.head.weight.device
    rows = (tensor.to(device) for tensor in (episodes.support, episodes.support_labels, episodes.query))
    inner = InnerLoop.of(trained.plan, steps, rate)
    return classify_embedded(trained.head, *rows, n_way=episodes.n_way, inner=inner)


def classify_embedded(
    head: LinearHead, support: Tensor, labels: Tensor, query: Tensor, *, n_way: int, inner: InnerLoop
) -> Tensor:
    """Classify embedded queries by a linear layer that was adapted to each episode's embedded support.

    Args:
        head: The linear layer to begin at.
        support: (episodes, n_support, dim) floating.
        labels: (episodes, n_support) int64 in [0, n_way).
        query: (episodes, n_queries, dim) floating.
        n_way: Classes per episode.
        inner: The gradient steps.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows, through which gradients flow to the rows and
        to the head's weights.
    """
    start = {name: weight.to(support.dtype) for name, weight in head.begin(n_way).items()}

    def classify(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        def loss(layer: LayerWeights) -> Tensor:
            return F.cross_entropy(F.linear(support, **layer), labels)

        return F.linear(query, **adapt(loss, start, inner))

    logits: Tensor = vmap(classify)(support, labels, query)
    return logits
