"""The optimizer's steps for a stack of models: each member's are those of a separate optimizer, to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from protonet.optimizer import CustomOptimizer, StackOptimizer

MEMBERS, STEPS = 3, 30
#: A matrix turned on both sides, one of odd length on one side, a bias, a vector, a convolution, a table.
SHAPES: list[tuple[int, ...]] = [(16, 32), (5, 41), (1, 7), (7,), (4, 3, 2, 2), (60, 5)]
#: Changes gradients (members, ...) of a parameter at a step, in place.
Change = Callable[[list[Tensor], int], object]


CHANGES: dict[str, Change] = {
    "nothing": lambda gradients, step: None,
    "one not finite": lambda gradients, step: gradients[1][2].view(-1)[:1].add_(math.nan if step == 4 else 0),
    "all not finite": lambda gradients, step: gradients[1].add_(math.inf if step == 4 else 0),
    "late": lambda gradients, step: gradients[0].mul_(float(step >= 2)),
    "late in one": lambda gradients, step: gradients[0][1].mul_(float(step >= 2)),
    "table": lambda gradients, step: gradients[5][:, 10:40].zero_(),
    "table in one": lambda gradients, step: gradients[5][0, 10:40].zero_(),
    "spike in one": lambda gradients, step: gradients[0][1].mul_(1e6 if step == 6 else 1),
}


@pytest.mark.parametrize(("members", "change"), [(1, "nothing"), *((MEMBERS, change) for change in CHANGES)])
def test_a_stack_is_its_members(members: int, change: str) -> None:
    generator = torch.Generator().manual_seed(0)
    stack, targets = (
        [torch.randn((members, *shape), generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(2)
    )
    known = STEPS if change == "nothing" else None
    alone = [[nn.Parameter(weight[member].clone()) for weight in stack] for member in range(members)]
    optimizers = [
        CustomOptimizer(
            [{"params": parameters[:3], "weight_decay": 0.15}, {"params": parameters[3:], "weight_decay": 0.0}],
            total_steps=known,
        )
        for parameters in alone
    ]
    optimizer = StackOptimizer([(stack[:3], 0.15), (stack[3:], 0.0)], total_steps=known)
    for step in range(STEPS):
        noise = [0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in stack]
        gradients = [weight - target + part for weight, target, part in zip(stack, targets, noise, strict=True)]
        CHANGES[change](gradients, step)
        for member, (parameters, member_optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient[member].clone()
            member_optimizer.step()
        optimizer.step(gradients)
    for member, parameters in enumerate(alone):
        for p, weight in zip(parameters, stack, strict=True):
            torch.testing.assert_close(p.detach(), weight[member], rtol=1e-9, atol=1e-9)
    for run, member_optimizer in zip(optimizer.stepper.runs, optimizers, strict=True):
        alone_run = member_optimizer.stepper.runs[0]
        assert (run.steps, run.skipped, run.slopes, run.turns) == (
            *(alone_run.steps, alone_run.skipped),
            *(alone_run.slopes, alone_run.turns),
        )
        assert run.rate == pytest.approx(alone_run.rate, rel=1e-9)


def test_members_go_together_for_as_long_as_they_can() -> None:
    stack = [torch.ones(MEMBERS, 4, 3)]
    optimizer = StackOptimizer([(stack, 0.0)])
    gradient = torch.ones(MEMBERS, 4, 3)
    optimizer.step([gradient])
    assert [batch.indices for batch in optimizer.stepper.batches] == [[0, 1, 2]]
    gradient[1] = math.nan
    optimizer.step([gradient])
    assert [batch.indices for batch in optimizer.stepper.batches] == [[0, 2], [1]]
    assert [run.skipped for run in optimizer.stepper.runs] == [0, 1, 0]


@pytest.mark.parametrize(
    "shapes",
    [
        *([shape] * 3 for shape in ((16, 16), (9,), (4, 3, 2, 2))),
        *([(2, 3, 4), (2, 4, 3)], [(5,), (1, 5)], [(5,), (5, 1)], [(1, 5), (5,), (3,)], [(300,), (1, 300)]),
    ],
    ids=str,
)
def test_parameters_that_are_alike_go_together_and_as_if_they_were_alone(shapes: list[tuple[int, ...]]) -> None:
    """Settings that differ by nothing that counts keep them apart; one that misses a step goes on separately."""
    ends: list[list[Tensor]] = []
    for together in (True, False):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
        groups = [{"params": [p], "eps": 1e-8 + n * 1e-12} for n, p in enumerate(parameters)]
        optimizer = CustomOptimizer([{"params": parameters}] if together else groups)
        for step in range(STEPS):
            for index, p in enumerate(parameters):
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.grad = None if (step, index) == (5, 1) else p.detach() + 0.3 * noise
            optimizer.step()
            if len(shapes) == 3 == len({*shapes}) + 2:
                assert len(optimizer.stepper.batches) == (3 if not together else 1 if step < 5 else 2)
        ends.append([p.detach() for p in parameters])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
