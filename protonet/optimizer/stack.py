"""StackOptimizer: the steps of a stack of models, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from protonet.optimizer.search import Run
from protonet.optimizer.settings import SEARCH
from protonet.optimizer.stepper import Stepper


class StackOptimizer:
    """CustomOptimizer's steps for a stack of models, all at once, with a step size for each model.

    It is no `torch.optim.Optimizer`, because making the first one imports torch's compiler (about 1.1 CPU seconds). It
    has no hooks, schedulers or state dictionary.

    Args:
        groups: Weights (members, ...) and their weight decay, >= 0; each member's slice of a weight has at least one
            dimension.
        start: > 0, where the search for the step size starts.
        betas: Those of `CustomOptimizer`.
        eps: That of `CustomOptimizer`.
        total_steps: That of `CustomOptimizer`, of every member.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Tensor], float]],
        start: float = SEARCH.usual_rate,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        total_steps: int | None = None,
    ) -> None:
        self.stepper = Stepper(*(Run(1.0, total_steps) for _ in groups[0][0][0]))
        for weights, decay in groups:
            group = {"lr": start, "betas": betas, "eps": eps, "weight_decay": decay}
            self.stepper.slices += [(part, group) for weight in weights for part in weight.detach().unbind()]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step of every member with the weights' gradients (members, ...), in the groups' order.

        A member whose gradients are not finite stays where it is.
        """
        self.stepper.step(dict(enumerate(chain(*(gradient.unbind() for gradient in gradients)))))
