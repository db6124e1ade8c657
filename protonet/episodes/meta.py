"""Meta-training: an encoder that learns to tell apart the classes of episodes, and all base classes at once."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.backbones import make_backbone
from protonet.episodes.checkpoints import BEST, take_prefix
from protonet.episodes.draws import Setting
from protonet.losses import cosine_cross_entropy, episodic_loss

LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-2
TEMPERATURE = 0.1
SMOOTHING = 0.1
#: Decay of the weight average, which is what is judged and kept.
AVERAGE = 0.99
#: What the names of a checkpoint's tensors begin with, beside those of the best weights.
LEARNER, AVERAGED, OPTIMIZER = "learner.", "average.", "optimizer."


class Plan(NamedTuple):
    """What decides the result of a run.

    Attributes:
        dataset: What the command line calls the data set.
        split_seed: Of the split by class, or None for the data set's own.
        dim: Features a row.
        classes: Base classes.
        backbone: One of `protonet.episodes.backbones.BACKBONES`.
        way: Classes a training episode.
        shot: Support rows a class.
        query: Query rows a class.
        episodes_per_step: Episodes whose losses are averaged in a step.
        steps: Most steps.
        eval_every: Steps from one validation to the next.
        patience: Validations without a new best after which the run ends.
        seed: Of the first weights, the episodes and the augmentation, in [0, 2**63).
    """

    dataset: str
    split_seed: int | None
    dim: int
    classes: int
    backbone: str
    way: int
    shot: int
    query: int
    episodes_per_step: int
    steps: int
    eval_every: int
    patience: int
    seed: int

    @property
    def setting(self) -> Setting:
        """The kind of training episodes."""
        return Setting((self.way, self.way), (self.shot, self.shot), self.query)


class Score(NamedTuple):
    """The accuracy on the validation episodes after a step, in [0, 1], and half the width of its 95 % interval."""

    step: int
    accuracy: float
    half_width: float


class Learner(nn.Module):
    """An encoder, one proxy a base class, and their two losses.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        proxies: (classes, embedding_dim).
    """

    def __init__(self, encoder: nn.Module, proxies: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.proxies = nn.Parameter(proxies)

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Return the episodic loss and the cross-entropy, (2,).

        Args:
            x: (episodes, way, slots, dim), support first.
            targets: (episodes, way, slots) base classes.
            n_shot: Support rows a class.
        """
        embeddings = F.normalize(self.encoder(x.flatten(0, 2)), dim=1)
        episodes = embeddings.unflatten(0, x.shape[:3])  # (episodes, way, slots, embedding_dim)
        setting = {"temperature": TEMPERATURE, "smoothing": SMOOTHING}
        episodic = episodic_loss(episodes, n_shot=n_shot, **setting)
        return torch.stack([episodic, cosine_cross_entropy(embeddings, targets.flatten(), self.proxies, **setting)])


@dataclass
class Run:
    """A run between two steps: all that the next ones hang on.

    Attributes:
        plan: What was asked for.
        learner: What is trained.
        optimizer: Of its parameters.
        average: The encoder with averaged weights.
        kept: The averaged weights of the best validation.
        best: The best validation.
        step: Steps taken.
        losses: The two losses of each step since the last validation.
    """

    plan: Plan
    learner: Learner
    optimizer: torch.optim.AdamW
    average: nn.Module
    kept: dict[str, Tensor]
    best: Score
    step: int
    losses: list[list[float]]

    @property
    def finished(self) -> bool:
        """Whether all steps are taken, or the best validation is too long ago."""
        since = self.step - self.best.step
        return self.step >= self.plan.steps or since >= self.plan.patience * self.plan.eval_every


def begin_run(plan: Plan, device: str) -> Run:
    """Return a run before its first step, all tensors on ``device``."""
    generator = torch.Generator().manual_seed(plan.seed)
    encoder = make_backbone(plan.backbone, plan.dim, generator)
    embedding_dim = encoder(torch.zeros(1, plan.dim)).shape[1]
    proxies = torch.randn(plan.classes, embedding_dim, generator=generator) / embedding_dim**0.5
    learner = Learner(encoder, proxies).to(device)
    proxy_group: dict[str, Any] = {"params": [learner.proxies], "weight_decay": 0.0}
    groups = [{"params": list(encoder.parameters())}, proxy_group]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    average = copy.deepcopy(learner.encoder).requires_grad_(False)
    return Run(plan, learner, optimizer, average, copy.deepcopy(average.state_dict()), Score(0, 0.0, 0.0), 0, [])


def take_step(run: Run, model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Take one step on a batch and return its two losses, (2,).

    Args:
        run: Changed in place.
        model: The run's learner, or what shares its gradients among processes.
        x: (episodes, way, shot + query, dim).
        targets: (episodes, way, shot + query).

    Source: the average of weights as in Polyak and Juditsky, "Acceleration of stochastic approximation by averaging"
        (1992).
    """
    device = run.learner.proxies.device
    losses: Tensor = model(x.to(device), targets.to(device), run.plan.shot)
    run.optimizer.zero_grad(set_to_none=True)
    losses.sum().backward()
    run.optimizer.step()
    run.step += 1
    decay = min(AVERAGE, run.step / (run.step + 9))
    for kept, weight in zip(run.average.parameters(), run.learner.encoder.parameters(), strict=True):
        kept.lerp_(weight.detach(), 1 - decay)
    return losses.detach()


def keep_best(run: Run, score: Score) -> None:
    """Keep the averaged weights, if their score is the best so far."""
    if score.accuracy > run.best.accuracy:
        run.best, run.kept = score, copy.deepcopy(run.average.state_dict())


def pack_run(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a run as tensors by name, and what else there is to know, for a checkpoint."""
    states = {
        LEARNER: run.learner.state_dict(),
        AVERAGED: run.average.state_dict(),
        BEST: run.kept,
        **{f"{OPTIMIZER}{number}.": state for number, state in run.optimizer.state_dict()["state"].items()},
    }
    tensors = {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.items()}
    backbone, plan = {"name": run.plan.backbone, "dim": run.plan.dim}, run.plan._asdict()
    return tensors, {"step": run.step, "best": run.best, "losses": run.losses, "plan": plan, "backbone": backbone}


def unpack_run(run: Run, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Bring a run of the same plan to where another one was packed."""
    run.learner.load_state_dict(take_prefix(tensors, LEARNER))
    run.average.load_state_dict(take_prefix(tensors, AVERAGED))
    run.kept = take_prefix(tensors, BEST)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in take_prefix(tensors, OPTIMIZER).items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": state})
    run.step, run.best = facts["step"], Score(*facts["best"])
    run.losses = facts.get("losses", [])  # none in version 1
