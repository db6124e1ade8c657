"""The optimizer among torch's own tools: groups, closures, schedules, two processes; checkpoints and its state."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

from protonet.optimizer import CustomOptimizer
from solution.pack import join_package_modules
from tests.optimizer_cases import distance, loss_on, make_model, same, through_file, train, trained, weights


def test_a_group_may_come_in_mid_run() -> None:
    model = make_model()
    ps = list(model.parameters())
    optimizer = CustomOptimizer(ps[:3])
    train(model, optimizer, 5)
    before = weights(model)
    optimizer.add_param_group({"params": ps[3:], "lr": 0.5})
    train(model, optimizer, 5, first=5)
    assert not any(torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))
    assert all(bool(p.isfinite().all()) for p in ps)
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    qs = list(twin.parameters())
    fresh = CustomOptimizer([{"params": qs[:3]}, {"params": qs[3:]}])
    fresh.load_state_dict(through_file(optimizer.state_dict()))
    assert same(train(twin, fresh, 5, first=10), train(model, optimizer, 5, first=10))


def test_a_parameter_moves_only_when_it_has_a_gradient() -> None:
    ps = [nn.Parameter(torch.ones(shape)) for shape in [(4, 3), (3,), (), (2, 3, 2, 2)]]
    optimizer = CustomOptimizer(ps)
    for step in range(12):
        before = [p.detach().clone() for p in ps]
        for k, p in enumerate(ps):
            p.grad = torch.ones_like(p) if (step + k) % 3 == 0 else None
        optimizer.step()
        for p, old in zip(ps, before, strict=True):
            assert bool((p < old).all()) if p.grad is not None else torch.equal(p, old)


def split_groups(model: nn.Module) -> CustomOptimizer:
    ps = list(model.parameters())
    return CustomOptimizer([{"params": ps[:3]}, {"params": ps[3:]}])


def with_idle_parameters(model: nn.Module) -> CustomOptimizer:
    """Parameters that never have a gradient, and two steps without any."""
    idle, frozen = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = CustomOptimizer([idle, *model.parameters(), frozen])
    for _ in range(2):
        optimizer.step()
    assert torch.equal(idle, torch.ones(3, 2))
    assert same(model, make_model())
    return optimizer


def named_by_wrapping(model: nn.Module) -> CustomOptimizer:
    return CustomOptimizer((f"blocks.{i}", p) for i, p in enumerate(model.parameters()))


@pytest.mark.parametrize("make", [with_idle_parameters, named_by_wrapping])
def test_how_parameters_are_passed_changes_nothing(make: Callable[[nn.Module], CustomOptimizer]) -> None:
    model = make_model()
    train(model, make(model), 20)
    assert same(model, trained(20))


def test_groups_of_equal_settings_change_no_more_than_rounding() -> None:
    model = make_model(torch.float64)
    train(model, split_groups(model), 20)
    assert distance(model, trained(20, torch.float64)) < 1e-9


def test_a_closure_is_called_once_with_gradients_and_its_loss_comes_back() -> None:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    losses: list[Tensor] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_on(model, len(losses))
        loss.backward()
        losses.append(loss)
        return loss

    for step in range(8):
        with torch.set_grad_enabled(step % 2 == 0):
            assert optimizer.step(closure) is losses[-1]
    assert len(losses) == 8
    assert same(model, trained(8))
    optimizer.zero_grad()
    assert optimizer.step() is None


def test_a_grad_scaler_changes_nothing_and_skips_what_overflows() -> None:
    model = make_model()
    optimizer, scaler = CustomOptimizer(model.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(8):
        for factor in (math.inf, 1.0) if step == 4 else (1.0,):
            optimizer.zero_grad()
            scaler.scale(loss_on(model, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert same(model, trained(8))
    assert scaler.get_scale() == 128.0


def test_the_groups_rate_scales_the_step() -> None:
    start, *ends = [make_model(torch.float64) for _ in range(3)]
    for model, factor in zip(ends, (1.0, 0.25), strict=True):
        optimizer = CustomOptimizer(model.parameters(), weight_decay=0.0)
        optimizer.param_groups[0]["lr"] *= factor
        train(model, optimizer, 1)
    for p, full, quarter in zip(start.parameters(), *(model.parameters() for model in ends), strict=True):
        torch.testing.assert_close(quarter - p, (full - p) / 4, rtol=1e-3, atol=1e-7)


def test_weight_decay_fades_with_the_square_of_steps_below_the_usual_rate() -> None:
    def shrink(factor: float) -> Tensor:
        """Compute the part that the decay alone takes from a matrix of ones in one step."""
        ends = []
        for decay in (0.15, 0.0):
            p = nn.Parameter(torch.ones(6, 5, dtype=torch.float64))
            optimizer = CustomOptimizer([p], weight_decay=decay)
            optimizer.param_groups[0]["lr"] *= factor
            p.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            optimizer.step()
            ends.append(p.detach())
        return ends[1] - ends[0]

    torch.testing.assert_close(shrink(0.5), shrink(1.0) / 8, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 20),
        lambda optimizer: OneCycleLR(optimizer, 0.01, 21, cycle_momentum=False, final_div_factor=1e9),
        lambda optimizer: LambdaLR(optimizer, lambda step: float(step < 20)),
    ],
    ids=["cosine", "one cycle", "lambda"],
)
def test_schedules_end_where_nothing_moves(schedule: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    scheduler = schedule(optimizer)
    for step in range(20):
        train(model, optimizer, 1, first=step)
        scheduler.step()
    assert not any(torch.equal(p, q) for p, q in zip(weights(model), weights(make_model()), strict=True))
    before = weights(model)
    train(model, optimizer, 1, first=20)
    for p, q in zip(weights(model), before, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-8)


START = """
import os
import sys
import torch
import torch.distributed as dist
from custom_optimizer import CustomOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

child = os.fork()
rank = int(child > 0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
"""
END = """
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
REPLICATED = """
torch.manual_seed(rank)  # rank 0's weights are sent to rank 1; rows stay apart
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
start = model.module.weight.detach().clone()
optimizer = CustomOptimizer(model.parameters())
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 5)).square().mean()
    (loss * float("nan") if (step, rank) == (3, 1) else loss).backward()
    optimizer.step()
assert not torch.equal(start, model.module.weight)
assert optimizer.skipped == 1
ends = [torch.empty_like(start) for _ in range(2)]
dist.all_gather(ends, model.module.weight.detach())
assert torch.equal(*ends)
sharded = torch.nn.Linear(4, 4)
fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
try:
    CustomOptimizer(sharded.parameters())
except ValueError as error:
    assert "DTensor" in str(error), error
else:
    raise AssertionError("no error")
"""
#: One optimizer has all parameters, the other one is divided. A NaN in one parameter is seen by its owner alone.
DIVIDED = """
import copy

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
alone = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3))
model = copy.deepcopy(alone)
x = torch.randn(40, 16, 6)

def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[step]), x[step, :, :3].argmax(1))
        loss.backward()
        if step == 7:
            model[2].bias.grad[0] = torch.nan
        optimizer.step()

def divide(model):
    return ZeroRedundancyOptimizer(model.parameters(), CustomOptimizer, sharded=True, total_steps=40)

reference, divided = CustomOptimizer(alone.parameters(), total_steps=40), divide(model)
train(alone, reference, range(20))
train(model, divided, range(20))
divided.consolidate_state_dict(to=0)
saved = [divided.state_dict() if rank == 0 else None]
dist.broadcast_object_list(saved)
later = copy.deepcopy(model)
resumed = divide(later)
resumed.load_state_dict(saved[0])
train(alone, reference, range(20, 40))
train(model, divided, range(20, 40))
train(later, resumed, range(20, 40))
owned = [len(optimizer.optim.state) for optimizer in (divided, resumed)]
assert 0 < owned[0] == owned[1] < 4, owned
runs = [optimizer.stepper.runs[0] for optimizer in (reference, divided.optim, resumed.optim)]
assert [run.n_skipped for run in runs] == [1, 1, 1], runs
assert [run.steps for run in runs] == [39, 39, 39], runs
for run in runs[1:]:
    assert abs(run.rate / runs[0].rate - 1) < 1e-9, runs
for p, q, r in zip(alone.parameters(), model.parameters(), later.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q, r, rtol=0, atol=0)
"""


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    """DDP: one of them meets a NaN, and both skip that step. FSDP2: an error. ZeRO: one step size, also when resumed.

    The packed optimizer is all that the processes have of the library.
    """
    (tmp_path / "custom_optimizer.py").write_text(join_package_modules(), encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-c", START + REPLICATED + DIVIDED + END, str(tmp_path / "meeting")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


def test_groups_have_separate_settings() -> None:
    model = make_model()
    body, head = list(model.parameters())[:-2], list(model.parameters())[-2:]
    optimizer = CustomOptimizer([{"params": body}, {"params": head, "lr": 0.0}])
    assert [group["lr"] for group in optimizer.param_groups] == [optimizer.defaults["lr"], 0.0]
    before = weights(model)
    train(model, optimizer, 5)
    moved = [not torch.equal(p, q) for p, q in zip(weights(model), before, strict=True)]
    assert moved == [True] * len(body) + [False] * 2


def test_the_order_of_parameters_changes_no_more_than_rounding() -> None:
    model = make_model()
    train(model, CustomOptimizer(list(model.parameters())[::-1]), 20)
    assert distance(model, trained(20)) < 1e-3


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
    ("at", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (5, torch.float16), (12, torch.float64)], ids=str
)
def test_a_checkpoint_resumes_bit_for_bit(at: int, dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = CustomOptimizer(model.parameters(), total_steps=at + 5)
    train(model, optimizer, at)
    other, fresh = revive(model, optimizer, dtype)
    assert same(train(other, fresh, 8, first=at), train(model, optimizer, 8, first=at))


@pytest.mark.parametrize(
    ("dtype", "back"), [(torch.float64, False), (torch.bfloat16, True), (torch.float16, False)], ids=str
)
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
        batches = optimizer.stepper.batches
        parts = [vars(part) for batch in batches for part in (batch, *batch.stacks)]
        parts += [vars(block) for batch in batches for stack in batch.stacks for block in stack.blocks]
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage()
            for part in parts
            for x in part.values()
            if isinstance(x, Tensor)
        }
        assert sum(each.nbytes() for each in storages.values()) <= 4 * 2 * 4 * sum(p.numel() for p in ps), shapes[0]


def test_a_state_of_another_optimizer_is_refused() -> None:
    model = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).square().mean().backward()
    other.step()
    optimizer = CustomOptimizer(model.parameters())
    with pytest.raises(ValueError, match=r"^CustomOptimizer: `state_dict` must be of this optimizer; got .*older"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.step()  # as if nothing had been tried
