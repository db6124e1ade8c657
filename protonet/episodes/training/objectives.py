"""Objectives of meta-training: losses of cosine prototypes, prototypical networks, FEAT, MAML and ANIL.

Each objective is a subclass of `MetaLearner`, which holds the encoder and all modules that are trained with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.methods.encoders import classify_adapted
from protonet.episodes.networks.backbones import LinearHead, make_backbone, make_head
from protonet.episodes.settings import TrainingPlan
from protonet.losses import cosine_cross_entropy, episodic_loss

LOSS_NAMES = ("episodic_loss", "contrastive_loss", "cross_entropy")  #: The names of losses in the log.


COSINE_TEMPERATURE = 0.1  #: The divisor of the cosines in all losses of cosines.
LABEL_SMOOTHING = 0.1  #: Label smoothing in the losses of prototypes and proxies, in [0, 1).


class MetaLearner(nn.Module):
    """An objective of meta-training: the modules that are trained, and their losses on a batch of episodes.

    Args:
        plan: The settings of training.
        encoder: The backbone that embeds rows.
        head: The module that is trained with the encoder, from `make_head`.
        proxies: (classes, embedding_dim), initial values of one learned vector per base class, if the objective has a
            loss of cosines to these vectors; otherwise None.
    """

    loss_names: tuple[str, ...] = ("episodic_loss",)
    """The names of the losses that `forward` returns, from ``LOSS_NAMES``."""
    is_averaged: bool = True
    """Whether moving averages of the weights are validated and kept, instead of the weights themselves."""
    weight_decay: float = 1e-2
    """Weight decay of AdamW on the encoder's weights; head and proxies have none. Our own choice."""
    episodes_per_halving: int | None = None
    """The learning rate is halved each time after this number of training episodes; None for a constant rate."""
    has_uniform_weights: bool = False
    """Whether the encoder's initial weights are uniform, see `make_backbone`."""

    def __init__(self, plan: TrainingPlan, encoder: nn.Module, head: nn.Module, proxies: Tensor | None = None) -> None:
        super().__init__()
        self.plan, self.encoder, self.head = plan, encoder, head
        self.proxies = None if proxies is None else nn.Parameter(proxies)  # (classes, embedding_dim)

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute the losses of a batch of episodes, averaged over the episodes.

        Args:
            x: (episodes, n_way, n_shot + n_query, dim), the rows; support first.
            targets: (episodes, n_way, n_shot + n_query) int64, the base classes of the rows.
            n_shot: Support rows per class.

        Returns:
            One value in nats for each name in ``loss_names``, in this order.
        """
        raise NotImplementedError

    def embed(self, x: Tensor) -> Tensor:
        """Map rows (episodes, n_way, rows, dim) to embeddings (episodes, n_way, rows, embedding_dim)."""
        rows: Tensor = self.encoder(x.flatten(0, 2)).unflatten(0, x.shape[:3])
        return rows

    def compute_proxy_loss(self, unit: Tensor, targets: Tensor) -> Tensor:
        """Compute the label-smoothed cross-entropy whose logits are cosines to the learned vector of each base class.

        ``unit`` (n, embedding_dim) are embeddings of unit norm, and ``targets`` their base classes.
        """
        assert self.proxies is not None
        temperature, smoothing = COSINE_TEMPERATURE, LABEL_SMOOTHING
        return cosine_cross_entropy(unit, targets.flatten(), self.proxies, temperature=temperature, smoothing=smoothing)


class PrototypeLearner(MetaLearner):
    """The default objective: cross-entropy of cosines to class prototypes, and of cosines to a proxy per base class."""

    loss_names = ("episodic_loss", "cross_entropy")

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute two losses: of cosines to the prototypes of an episode, and of cosines to a proxy per base class."""
        unit = F.normalize(self.encoder(x.flatten(0, 2)), dim=1)
        temperature, smoothing = COSINE_TEMPERATURE, LABEL_SMOOTHING
        rows = unit.unflatten(0, x.shape[:3])
        episodic = episodic_loss(rows, n_shot=n_shot, temperature=temperature, smoothing=smoothing)
        return torch.stack([episodic, self.compute_proxy_loss(unit, targets)])


class ProtoNetLearner(MetaLearner):
    """The objective of prototypical networks: cross-entropy of squared Euclidean distances to class means.

    There are no proxies, no temperature and no label smoothing, and embeddings are not normalised. The optimizer is
    Adam without weight decay, and weights are not averaged over steps.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eqs. 1 and 2, and
        algorithm 1; sec. 3 for the optimizer. https://arxiv.org/abs/1703.05175
    """

    is_averaged = False
    weight_decay = 0.0
    episodes_per_halving = 2000
    # Behind normalisation the size of weights does not matter, but Adam's steps are of a fixed size: at the paper's
    # rate, they turn He's larger weights too slowly. That costs 3 points of accuracy after 300 steps on glyphs.
    has_uniform_weights = True

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute one loss, the mean cross-entropy of the queries; arguments are as in `MetaLearner.forward`."""
        del targets
        rows = self.embed(x)
        prototypes = rows[:, :, :n_shot].mean(dim=2)  # (episodes, n_way, embedding_dim)
        differences = rows[:, :, n_shot:, None] - prototypes[:, None, None]
        logits = -differences.square().sum(dim=4)  # (episodes, n_way, n_query, n_way)
        labels = torch.arange(x.shape[1], device=x.device)[:, None].expand(logits.shape[:3])
        return F.cross_entropy(logits.flatten(0, 2), labels.flatten())[None]


CONTRASTIVE_WEIGHT = 0.1  #: The factor on FEAT's contrastive loss, one of the values in its authors' code.


class FeatLearner(MetaLearner):
    """The objective of FEAT, whose transformer adapts the prototypes of an episode to each other.

    A loss of cosines to one learned vector per base class (proxy) is added. It replaces the paper's training of a
    classifier before meta-training.

    Source: Ye, Hu, Zhan and Sha, "Few-shot learning via embedding adaptation with set-to-set functions" (2020), eqs. 4
        and 9, with cosines. https://arxiv.org/abs/1812.03664
    """

    loss_names = LOSS_NAMES

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute three losses: episodic, FEAT's contrastive one, and the cross-entropy of cosines to class proxies."""
        embeddings = self.encoder(x.flatten(0, 2))
        rows = embeddings.unflatten(0, x.shape[:3])
        adapted = self.head(rows[:, :, :n_shot].mean(dim=2))  # (episodes, n_way, embedding_dim)
        centres = self.head(rows.flatten(0, 1)).mean(dim=1).unflatten(0, x.shape[:2])  # of support and queries together
        episodic, contrastive = _cosine_loss(rows[:, :, n_shot:], adapted), _cosine_loss(rows, centres)
        proxy_loss = self.compute_proxy_loss(F.normalize(embeddings, dim=1), targets)
        return torch.stack([episodic, CONTRASTIVE_WEIGHT * contrastive, proxy_loss])


def _cosine_loss(rows: Tensor, prototypes: Tensor) -> Tensor:
    """Compute the cross-entropy of rows (episodes, n_way, n, dim) by cosines to prototypes (episodes, n_way, dim)."""
    cosines = F.normalize(rows.flatten(1, 2), dim=2) @ F.normalize(prototypes, dim=2).transpose(1, 2)
    labels = torch.arange(rows.shape[1], device=rows.device).repeat_interleave(rows.shape[2])
    return F.cross_entropy((cosines / COSINE_TEMPERATURE).flatten(0, 1), labels.repeat(len(rows)))


class AdaptedLearner(MetaLearner):
    """The objective of MAML and ANIL: cross-entropy of the queries after gradient steps on the support.

    The gradient steps change all weights in MAML, and only the last layer in ANIL.
    """

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute the queries' cross-entropy after the gradient steps; arguments are as in `MetaLearner.forward`."""
        del targets
        assert isinstance(self.head, LinearHead)
        plan, n_way, encoder, rows = self.plan, x.shape[1], self.encoder, x
        if plan.objective == "anil":
            encoder, rows = nn.Identity(), self.embed(x)
        support, query = rows[:, :, :n_shot].flatten(1, 2), rows[:, :, n_shot:].flatten(1, 2)
        labels = torch.arange(n_way, device=x.device)
        support_labels = labels.repeat_interleave(n_shot).expand(len(x), -1)
        logits = classify_adapted(
            encoder,
            self.head,
            support,
            support_labels,
            query,
            n_way=n_way,
            steps=plan.inner_steps,
            rate=plan.inner_rate,
            first_order=plan.first_order,
        )
        query_labels = labels.repeat_interleave(rows.shape[2] - n_shot).repeat(len(x))
        return F.cross_entropy(logits.flatten(0, 1), query_labels)[None]


LEARNER_TYPES: dict[str, type[MetaLearner]] = {
    "prototypes": PrototypeLearner,
    "protonet": ProtoNetLearner,
    "feat": FeatLearner,
    "maml": AdaptedLearner,
    "anil": AdaptedLearner,
}


def make_learner(plan: TrainingPlan, generator: torch.Generator) -> MetaLearner:
    """Create the untrained `MetaLearner` of a plan's objective, on the CPU; ``generator`` draws initial weights."""
    learner, proxies = LEARNER_TYPES[plan.objective], None
    uniform = learner.has_uniform_weights
    encoder = make_backbone(plan.backbone, plan.dim, generator, dropblock=plan.dropblock, uniform=uniform)
    with torch.no_grad():
        embedding_dim = encoder.eval()(torch.zeros(1, plan.dim)).shape[1]
    encoder.train()
    if "cross_entropy" in learner.loss_names:
        proxies = torch.randn(plan.classes, embedding_dim, generator=generator) / embedding_dim**0.5
    head = make_head(plan.objective, embedding_dim, generator, n_way=plan.head_n_way)
    return learner(plan, encoder, head, proxies)
