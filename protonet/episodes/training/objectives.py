"""Objectives of meta-training: prototypes, those of FEAT, or fast adaptation by MAML and ANIL.

An objective is a learner: the encoder, what is trained beside it, and their losses on a batch of episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.methods.encoders import InnerLoop, classify_adapted, classify_embedded
from protonet.episodes.names import ADAPTED_OBJECTIVES, TrainingPlan
from protonet.episodes.networks.backbones import LinearHead, make_backbone, make_head
from protonet.losses import cosine_cross_entropy, episodic_loss


@dataclass(frozen=True)
class TrainingRecipe:
    """How the encoder is trained. All values are our own choice, but where another source is named."""

    weight_decay: float = 1e-2  #: AdamW's, of the encoder's weights; the head and the proxies have none.
    temperature: float = 0.1  #: Divides the cosines in all losses.
    smoothing: float = 0.1  #: Label smoothing in the losses of prototypes and proxies, in [0, 1).
    contrast: float = 0.1  #: The factor on FEAT's contrastive loss, one of the values that its authors' code names.
    average_decay: float = 0.99  #: Decay per step of the average of the weights, which is what is validated and kept.
    average_delay: int = 9  #: In step t the decay is at most t / (t + this), to forget the initial weights soon.
    measured_rows: int = 2048  #: Training rows that batch normalisation's statistics are of, at least.


TRAINING_RECIPE = TrainingRecipe()
LOSSES = ("episodic_loss", "contrastive_loss", "cross_entropy")  #: The names of a step's losses in the log.


class Learner(nn.Module):
    """An encoder and one proxy per base class, with their two losses.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        proxies: (classes, embedding_dim) float32.
    """

    losses: tuple[str, ...] = ("episodic_loss", "cross_entropy")

    def __init__(self, encoder: nn.Module, proxies: Tensor) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Identity()
        self.proxies = nn.Parameter(proxies)

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute the episodic loss and the cross-entropy.

        Args:
            x: (episodes, n_way, n_shot + n_query, dim) float32, support first.
            targets: (episodes, n_way, n_shot + n_query) int64, the rows' base classes.
            n_shot: Support rows per class.

        Returns:
            (2,) float32, in nats.
        """
        embeddings = F.normalize(self.encoder(x.flatten(0, 2)), dim=1)  # (rows of all episodes, embedding_dim)
        episodes = embeddings.unflatten(0, x.shape[:3])  # (episodes, n_way, n_shot + n_query, embedding_dim)
        temperature, smoothing = TRAINING_RECIPE.temperature, TRAINING_RECIPE.smoothing
        episodic = episodic_loss(episodes, n_shot=n_shot, temperature=temperature, smoothing=smoothing)
        labels = targets.flatten()
        entropy = cosine_cross_entropy(embeddings, labels, self.proxies, temperature=temperature, smoothing=smoothing)
        return torch.stack([episodic, entropy])


class ProtoNetLearner(nn.Module):
    """An encoder whose loss is the cross-entropy of queries by squared Euclidean distances to the class means.

    There are no proxies, no temperature and no label smoothing, and embeddings are not scaled to unit norm.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), eqs. 1 and 2, and
        algorithm 1. https://arxiv.org/abs/1703.05175
    """

    losses: tuple[str, ...] = ("episodic_loss",)

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Identity()

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute the episodic loss; arguments are as in `Learner.forward`. Returns (1,) float32, in nats."""
        del targets
        embeddings = self.encoder(x.flatten(0, 2)).unflatten(0, x.shape[:3])
        prototypes = embeddings[:, :, :n_shot].mean(dim=2)  # (episodes, n_way, embedding_dim)
        query = embeddings[:, :, n_shot:]  # (episodes, n_way, n_query, embedding_dim)
        differences = query[:, :, :, None] - prototypes[:, None, None]
        logits = -differences.square().sum(dim=4)  # (episodes, n_way, n_query, n_way)
        labels = torch.arange(x.shape[1], device=x.device)[:, None].expand(logits.shape[:3])
        return F.cross_entropy(logits.flatten(0, 2), labels.flatten())[None]


class FeatLearner(nn.Module):
    """An encoder, a transformer of its prototypes and one proxy per base class, with their three losses.

    The proxies' loss takes the place of the paper's classification before meta-training.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        head: A `protonet.episodes.networks.backbones.SetTransformer`.
        proxies: (classes, embedding_dim) float32.

    Source: Ye, Hu, Zhan and Sha, "Few-shot learning via embedding adaptation with set-to-set functions" (2020), eqs. 4
        and 9, with cosines. https://arxiv.org/abs/1812.03664
    """

    losses: tuple[str, ...] = LOSSES

    def __init__(self, encoder: nn.Module, head: nn.Module, proxies: Tensor) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.proxies = nn.Parameter(proxies)

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute the episodic, the contrastive (times its factor) and the proxies' loss; as `Learner`, (3,)."""
        embeddings = self.encoder(x.flatten(0, 2))  # (rows of all episodes, embedding_dim)
        rows = embeddings.unflatten(0, (-1, *x.shape[1:3]))  # (episodes, n_way, n_shot + n_query, embedding_dim)
        adapted = self.head(rows[:, :, :n_shot].mean(dim=2))  # (episodes, n_way, embedding_dim)
        centres = self.head(rows.flatten(0, 1)).mean(dim=1).unflatten(0, x.shape[:2])  # of support and queries together
        episodic, contrastive = _classify(rows[:, :, n_shot:], adapted), _classify(rows, centres)
        temperature, smoothing = TRAINING_RECIPE.temperature, TRAINING_RECIPE.smoothing
        entropy = cosine_cross_entropy(
            F.normalize(embeddings, dim=1),
            targets.flatten(),
            self.proxies,
            temperature=temperature,
            smoothing=smoothing,
        )
        return torch.stack([episodic, TRAINING_RECIPE.contrast * contrastive, entropy])


def _classify(rows: Tensor, prototypes: Tensor) -> Tensor:
    """Return the cross-entropy, 0-d, of rows (episodes, n_way, n, dim) by prototypes (episodes, n_way, dim)."""
    cosines = F.normalize(rows.flatten(1, 2), dim=2) @ F.normalize(prototypes, dim=2).transpose(1, 2)
    labels = torch.arange(rows.shape[1], device=rows.device).repeat_interleave(rows.shape[2])
    return F.cross_entropy((cosines / TRAINING_RECIPE.temperature).flatten(0, 1), labels.repeat(len(rows)))


class AdaptedLearner(nn.Module):
    """An encoder and a linear layer whose loss is of queries after gradient steps on the support: MAML or ANIL.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        head: The linear layer that episodes begin at.
        plan: Its objective is "maml", whose steps are those of all weights, or "anil", those of the layer.
    """

    losses: tuple[str, ...] = ("episodic_loss",)

    def __init__(self, encoder: nn.Module, head: LinearHead, plan: TrainingPlan) -> None:
        super().__init__()
        self.encoder, self.head, self.plan = encoder, head, plan

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute the queries' cross-entropy; as `Learner`, (1,)."""
        plan, n_way = self.plan, x.shape[1]
        rows = x if plan.objective == "maml" else self.encoder(x.flatten(0, 2)).unflatten(0, x.shape[:3])
        support, query = rows[:, :, :n_shot].flatten(1, 2), rows[:, :, n_shot:].flatten(1, 2)
        labels = torch.arange(n_way, device=x.device)
        of_support = labels.repeat_interleave(n_shot).expand(len(x), -1)
        inner = InnerLoop(plan.inner_steps, plan.inner_rate, plan.first_order)
        if plan.objective == "maml":
            logits = classify_adapted(self.encoder, self.head, support, of_support, query, n_way=n_way, inner=inner)
        else:
            logits = classify_embedded(self.head, support, of_support, query, n_way=n_way, inner=inner)
        of_query = labels.repeat_interleave(rows.shape[2] - n_shot).repeat(len(x))
        return F.cross_entropy(logits.flatten(0, 1), of_query)[None]


AnyLearner = Learner | ProtoNetLearner | FeatLearner | AdaptedLearner


def make_learner(plan: TrainingPlan, generator: torch.Generator) -> AnyLearner:
    """Make an untrained learner of a plan's objective, on the CPU; the generator draws its weights."""
    encoder = make_backbone(plan.backbone, plan.dim, generator, dropblock=plan.dropblock)
    with torch.no_grad():
        embedding_dim = encoder.eval()(torch.zeros(1, plan.dim)).shape[1]
    encoder.train()
    if plan.objective in ADAPTED_OBJECTIVES:
        head = make_head(plan.objective, embedding_dim, generator, n_way=plan.head_way)
        assert isinstance(head, LinearHead)
        return AdaptedLearner(encoder, head, plan)
    if plan.objective == "protonet":
        return ProtoNetLearner(encoder)
    proxies = torch.randn(plan.classes, embedding_dim, generator=generator) / embedding_dim**0.5
    if plan.objective == "feat":
        return FeatLearner(encoder, make_head("feat", embedding_dim, generator), proxies)
    return Learner(encoder, proxies)
