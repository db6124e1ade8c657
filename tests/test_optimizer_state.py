"""The state of the optimizer: checkpoints, copies, changes of dtype, bad gradients, memory."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from protonet.optimizer import CustomOptimizer
from tests.optimizer_cases import loss_on, make_model, same, through_file, train, trained, weights

LOW = [torch.bfloat16, torch.float16]
Pair = tuple[nn.Module, CustomOptimizer]


def revive(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> tuple[nn.Module, CustomOptimizer]:
    """Rebuild both in fresh objects from what a checkpoint file holds."""
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = make_model(dtype, seed=1)
    other.load_state_dict(saved["model"])
    fresh = CustomOptimizer(other.parameters())
    fresh.load_state_dict(saved["optimizer"])
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    return other, fresh


@pytest.mark.parametrize(
    ("at", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (5, torch.float16), (12, torch.float64)]
)
def test_a_checkpoint_resumes_bit_for_bit(at: int, dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = CustomOptimizer(model.parameters(), total_steps=at + 5)
    train(model, optimizer, at)
    other, fresh = revive(model, optimizer, dtype)
    assert same(train(other, fresh, 8, first=at), train(model, optimizer, 8, first=at))


@pytest.mark.parametrize(("dtype", "back"), [(torch.float64, False), (torch.bfloat16, True), (torch.float16, False)])
def test_a_checkpoint_resumes_after_a_change_of_dtype(dtype: torch.dtype, back: bool) -> None:
    first, second = (dtype, torch.float32) if back else (torch.float32, dtype)
    model = make_model(first)
    optimizer = CustomOptimizer(model.parameters())
    train(model, optimizer, 5)
    model.to(second)
    other, fresh = revive(model, optimizer, second)
    assert same(train(other, fresh, 8, first=5), train(model, optimizer, 8, first=5))
    tensors = [x for state in fresh.state_dict()["state"].values() for x in state.values() if isinstance(x, Tensor)]
    assert not {x.dtype for x in tensors} & set(LOW)


def load_state(pair: Pair) -> Pair:
    other = make_model()
    fresh = CustomOptimizer(other.parameters())
    other.load_state_dict(pair[0].state_dict())
    fresh.load_state_dict(pair[1].state_dict())
    return other, fresh


CLONES: list[Callable[[Pair], Pair]] = [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), load_state]


@pytest.mark.parametrize("clone", CLONES)
def test_copies_go_on_alike_and_apart_and_take_further_groups(clone: Callable[[Pair], Pair]) -> None:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    train(model, optimizer, 5)
    other, fresh = clone((model, optimizer))
    train(other, fresh, 8, first=5)
    assert same(train(model, optimizer, 8, first=5), other)
    assert same(model, trained(13))
    extra = nn.Parameter(torch.ones(3, 2))
    fresh.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones_like(extra)
    train(other, fresh, 1, first=13)  # it clears gradients
    assert same(other, train(model, optimizer, 1, first=13))
    extra.grad = torch.ones_like(extra)
    fresh.step()
    assert bool((extra < 1).all())


@pytest.mark.parametrize(("bad", "at"), [(math.nan, 0), (math.inf, 4), (-math.inf, 4)])
def test_a_step_with_one_bad_gradient_is_as_if_it_had_not_been(bad: float, at: int) -> None:
    model, last = make_model(), -1
    optimizer = CustomOptimizer(model.parameters())
    train(model, optimizer, at)
    before = weights(model)
    loss_on(model, 99).backward()
    grad = list(model.parameters())[last].grad
    assert grad is not None
    grad[0] = bad
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))
    assert same(train(model, optimizer, 8 - at, first=at), trained(8))
    assert optimizer.skipped == 1


def test_a_run_of_bad_gradients_is_counted_and_the_count_is_saved() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = CustomOptimizer([p])
    for grad in (1.0, math.nan, math.nan, 1.0, math.inf):
        p.grad = torch.full((2, 2), grad)
        optimizer.step()
    assert optimizer.skipped == 3
    other = CustomOptimizer([nn.Parameter(torch.ones(2, 2))])
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped == 3


@pytest.mark.parametrize(("odd", "at"), [(1e-25, 0), (1e25, 2)])
def test_one_gradient_of_another_order_does_not_stop_the_run(odd: float, at: int) -> None:
    p = nn.Parameter(torch.full((6, 4), 3.0))
    optimizer = CustomOptimizer([p])
    for step in range(80):
        p.grad = p.detach() * (odd if step == at else 1.0)
        optimizer.step()
    assert bool((p < 2.8).all())
    assert bool((p > -3).all())


def test_the_state_takes_up_to_four_times_that_of_adamw() -> None:
    cases: list[Sequence[Sequence[int]]] = [[(1000, 1000)], [(512, 1953)], [(50_000, 20)], [(10**6,)]]
    cases += [[(256, 256)] * 15, [(64, 64, 3, 3)] * 27, [(300, 10)] * 20]
    for shapes in cases:
        ps = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = CustomOptimizer(ps)
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
        parts = [vars(part) for batch in optimizer.stepper.batches for part in (batch, *batch.blocks)]
        tensors = [x for part in parts for x in part.values() if isinstance(x, Tensor)]
        assert sum(x.untyped_storage().nbytes() for x in tensors) <= 4 * 2 * 4 * sum(p.numel() for p in ps), shapes[0]


def test_a_state_of_another_optimizer_is_refused() -> None:
    model = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).square().mean().backward()
    other.step()
    optimizer = CustomOptimizer(model.parameters())
    with pytest.raises(ValueError, match=r"^CustomOptimizer: `state_dict` must be of this optimizer; got .*older"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.step()  # as if nothing had been tried
