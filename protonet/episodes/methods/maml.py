"""MAML: a few gradient steps of the whole network on the support, from weights that were meta-trained for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from protonet.episodes.methods.common import get_trained
from protonet.episodes.methods.keywords import Count, Positive
from protonet.episodes.names import TrainingPlan
from protonet.episodes.networks.backbones import LinearHead, lead_by
from protonet.episodes.samplers.batch import Episodes

LayerWeights = Mapping[str, Tensor]
#: Features of rows, and weights of networks, that are adapted at a time: bounds the memory.
MAML_FEATURES_PER_BATCH, MAML_WEIGHTS_PER_BATCH = 2**21, 2**22


class InnerLoop(NamedTuple):
    """The gradient steps on an episode's support."""

    steps: int  #: >= 0.
    rate: float  #: > 0.
    first_order: bool = False  #: Whether the steps' gradients are taken for constants.

    @classmethod
    def of(cls, plan: TrainingPlan, steps: int | None = None, rate: float | None = None) -> InnerLoop:
        """Return the steps of a plan's training, or those given in their place."""
        return cls(plan.inner_steps if steps is None else steps, plan.inner_rate if rate is None else rate)


def maml(episodes: Episodes, *, steps: Count | None = None, rate: Positive | None = None) -> Tensor:
    """Classify by the encoder and a linear layer after gradient steps on the support's cross-entropy.

    The encoder is one of ``train --objective maml``, of as many classes: each begins at learned weights of its own, so
    that their order matters a little (Ye and Chao 2022). One of ``--head zero`` is for any number, in any order; its
    first step changes the layer alone, as in `anil`. Batch normalisation is by the support's statistics (Bronskill et
    al. 2020): in the authors' code it is by the queries' own, which lets each query see the others.

    Args:
        episodes: Those of an encoder, whose rows before it are used.
        steps: Gradient steps, >= 0; none: as in training. The paper trains with 5, and tests with 10.
        rate: Of the steps, > 0; none: as in training.

    Returns:
        Logits (episodes, n_queries, n_way) float32.

    Raises:
        InputError: There is no encoder, or it is one of another objective or for another number of classes.

    Source: Finn, Abbeel and Levine, "Model-agnostic meta-learning for fast adaptation of deep networks" (2017),
        algorithm 2. https://arxiv.org/abs/1703.03400
    """
    trained = get_trained(episodes, "maml", "maml")
    support, query = trained.gather()
    assert isinstance(trained.head, LinearHead)
    inner, labels = InnerLoop.of(trained.plan, steps, rate), episodes.support_labels.to(support.device)
    return classify_adapted(trained.encoder, trained.head, support, labels, query, n_way=episodes.n_way, inner=inner)


class AdaptableClassifier(nn.Module):
    """An encoder and a linear layer on its embeddings, as one network."""

    def __init__(self, encoder: nn.Module, head: LinearHead) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor) -> Tensor:
        """Map rows (n, dim) to logits (n, n_way)."""
        logits: Tensor = self.head(self.encoder(x))
        return logits


def adapt(loss: Callable[[LayerWeights], Tensor], weights: LayerWeights, inner: InnerLoop) -> LayerWeights:
    """Take gradient steps, through which gradients flow: ``weights - rate * gradient``.

    Args:
        loss: Maps weights by name to a loss, 0-d.
        weights: To begin at.
        inner: The steps.

    Returns:
        The weights after the steps.

    Source: Finn, Abbeel and Levine (2017), eq. 1, and sec. 5.2 for the first order.
    """
    for _ in range(inner.steps):
        gradients = grad(loss)(weights)
        if inner.first_order:
            gradients = {name: gradient.detach() for name, gradient in gradients.items()}
        weights = {name: weight - inner.rate * gradients[name] for name, weight in weights.items()}
    return weights


def classify_adapted(
    encoder: nn.Module,
    head: LinearHead,
    support: Tensor,
    labels: Tensor,
    query: Tensor,
    *,
    n_way: int,
    inner: InnerLoop,
) -> Tensor:
    """Classify the queries of episodes, each by a network of its own that was adapted to its support.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        head: The linear layer to begin at.
        support: (episodes, n_support, dim) float32.
        labels: (episodes, n_support) int64 in [0, n_way).
        query: (episodes, n_queries, dim) float32.
        n_way: Classes per episode.
        inner: The gradient steps.

    Returns:
        Logits (episodes, n_queries, n_way), through which gradients flow to the encoder's and the head's weights.
    """
    network = AdaptableClassifier(encoder, head)
    weights: dict[str, Tensor] = {f"encoder.{name}": weight for name, weight in encoder.named_parameters()}
    weights |= {f"head.{name}": weight for name, weight in head.begin(n_way).items()}

    def classify(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        def loss(weights: LayerWeights) -> Tensor:
            return F.cross_entropy(functional_call(network, dict(weights), support), labels)

        adapted = adapt(loss, weights, inner)
        rows = torch.cat([support, query]) if has_statistics else query
        logits: Tensor = functional_call(network, dict(adapted), rows)
        return logits[-len(query) :]

    n_weights = sum(weight.numel() for weight in weights.values())
    at_once = min(
        MAML_FEATURES_PER_BATCH // (support[0].numel() + query[0].numel()), MAML_WEIGHTS_PER_BATCH // n_weights
    )
    with lead_by(encoder, support.shape[1]) as has_statistics:
        logits: Tensor = vmap(classify, randomness="different", chunk_size=max(1, at_once))(support, labels, query)
    return logits
