"""The optimizer in place of torch's own: schedulers, state by parameter, group keys, wrappers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from analysis.optimizer_bench.workload import make_mlp, seed_initial_weights
from protonet.optimizer import CustomOptimizer
from protonet.optimizer.search import OptimizerRun
from tests.optimizer_cases import loss_on, make_model, same, train, trained, weights

VOCABULARY, CONTEXT, BATCH, STEPS = 24, 3, 64, 200
#: Makes the function that is called after each step with its number, from 1, and its loss.
Schedule = Callable[[torch.optim.Optimizer], Callable[[int, float], object]]


@functools.cache
def sample_text() -> Tensor:
    """Sample 12,000 tokens of a second-order Markov chain."""
    generator = torch.Generator().manual_seed(0)
    probabilities = (2 * torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator)).softmax(2).cumsum(2)
    tokens = [0, 1]
    for u in torch.rand(11_998, generator=generator):
        tokens.append(min(int(torch.searchsorted(probabilities[tokens[-2], tokens[-1]], u)), VOCABULARY - 1))
    return torch.tensor(tokens).unfold(0, CONTEXT + 1, 1)  # (positions, context and the next token)


def compute_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]), rows[:, -1])


class Training(NamedTuple):
    loss: float  #: On held-out text, after the last step.
    step_lengths: list[float]


@functools.cache
def train_with(kind: type[torch.optim.Optimizer], schedule: Schedule | None, steps: int = STEPS) -> Training:
    """Train a language model with a learning rate of 0.01, which is AdamW's best of 0.001, 0.003 and 0.01 here."""
    with seed_initial_weights(0):
        embedding = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Flatten())
        model = embedding.append(make_mlp(16 * CONTEXT, 64, VOCABULARY, norm=nn.LayerNorm, activation=nn.GELU))
    train, validation = sample_text().tensor_split([10_000])
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    after_step = schedule(optimizer) if schedule else lambda *_: None
    generator = torch.Generator().manual_seed(0)
    step_lengths = []
    for step in range(1, steps + 1):
        loss = compute_loss(model, train[torch.randint(len(train), (BATCH,), generator=generator)])
        optimizer.zero_grad()
        loss.backward()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer.step()
        step_lengths.append(float((nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm()))
        after_step(step, float(loss.detach()))
    with torch.no_grad():
        return Training(float(compute_loss(model, validation)), step_lengths)


def linear(optimizer: torch.optim.Optimizer) -> Callable[[int, float], object]:
    """As `transformers.get_linear_schedule_with_warmup` without warm-up: below one from the second step on."""
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    return lambda step, loss: scheduler.step()


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[int, float], object]:
    """From a 25th of the constructor's learning rate up to it, and down."""
    scheduler = OneCycleLR(optimizer, optimizer.defaults["lr"], STEPS + 1, cycle_momentum=False)
    return lambda step, loss: scheduler.step()


def step_down(optimizer: torch.optim.Optimizer) -> Callable[[int, float], object]:
    scheduler = StepLR(optimizer, STEPS, gamma=0.1)
    return lambda step, loss: scheduler.step()


def warm_up_by_hand(optimizer: torch.optim.Optimizer) -> Callable[[int, float], object]:
    """Raise ``group["lr"]`` for 40 steps, without a scheduler that would note the initial one."""

    def set_lr(step: int, loss: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * min(1.0, (step + 1) / 40)

    set_lr(0, math.nan)
    return set_lr


def drop_by_hand(optimizer: torch.optim.Optimizer) -> Callable[[int, float], object]:
    def set_lr(step: int, loss: float) -> None:
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * (1.0 if step < STEPS else 0.1)

    return set_lr


def plateau_of_loss(optimizer: torch.optim.Optimizer) -> Callable[[int, float], object]:
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=20)
    return lambda step, loss: scheduler.step(loss)


@pytest.mark.parametrize("schedule", [step_down, drop_by_hand])
def test_a_tenth_of_the_learning_rate_is_a_tenth_of_the_step_200_steps_later(schedule: Schedule) -> None:
    lengths = [sum(train_with(CustomOptimizer, choice, 2 * STEPS).step_lengths[-30:]) for choice in (schedule, None)]
    assert 0.08 < lengths[0] / lengths[1] < 0.125


@pytest.mark.parametrize("schedule", [linear, one_cycle, plateau_of_loss, warm_up_by_hand])
def test_a_language_model_ends_no_worse_than_with_adamw_under_the_same_schedule(schedule: Schedule) -> None:
    loss = train_with(CustomOptimizer, schedule).loss
    assert loss < train_with(AdamW, schedule).loss
    assert loss < 1.015 * train_with(CustomOptimizer, None).loss  # the schedule costs little


def test_schedules_neither_limit_the_search_nor_raise_the_rate() -> None:
    """The search ends in the first ten steps, at 5 times its start; the last steps follow a warm-up of 40."""
    choices = (None, linear, warm_up_by_hand)
    plain, falling, warm = (train_with(CustomOptimizer, choice).step_lengths for choice in choices)
    assert max(falling[:30]) > 0.8 * max(plain[:30])
    assert 0.5 < sum(warm[40:140]) / sum(plain[40:140]) < 1.5


def test_a_rate_that_was_searched_at_a_small_factor_is_not_multiplied_when_the_factor_rises() -> None:
    """A warm-up in few stairs: each is long enough for the search to end on it."""
    run = OptimizerRun(1.0)
    for _ in range(20):
        run.adapt_rate(-run.rate, 0.01, 0.1)  # downhill all the way
        run.steps += 1
    assert run.rate > 10
    rate = run.rate
    run.adapt_rate(-run.rate, 0.01, 1.0)
    assert run.rate * 1.0 == pytest.approx(rate * 0.1, rel=0.5)


@pytest.mark.parametrize("at", [0, 5])
def test_reading_the_state_does_not_change_the_run(at: int) -> None:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    train(model, optimizer, at)
    optimizer.zero_grad()
    get_optimizer_state_dict(model, optimizer)
    assert same(train(model, optimizer, 12 - at, first=at), trained(12))


def test_parameters_keep_their_state_when_a_group_goes_or_one_is_replaced() -> None:
    ps = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    optimizer = CustomOptimizer([{"params": [p]} for p in ps])
    for size, p in enumerate(ps, 1):
        p.grad = torch.full_like(p, float(size))
    optimizer.step()
    usual = [float(optimizer.state[p]["gradient_rms"]) for p in ps]
    assert usual == pytest.approx([1.0, 2.0, 3.0])
    del optimizer.param_groups[0]
    new = nn.Parameter(torch.ones(4, 3))
    optimizer.param_groups[0]["params"][0] = new
    new.grad = torch.full_like(new, 7.0)
    optimizer.step()
    assert float(optimizer.state[ps[2]]["gradient_rms"]) == pytest.approx(3.0)
    assert int(optimizer.state[ps[2]]["step"]) == 2
    assert float(optimizer.state[new]["gradient_rms"]) == pytest.approx(7.0)
    assert int(optimizer.state[ps[0]]["step"]) == 1


def test_maximize_is_the_negative_loss() -> None:
    model = make_model()
    train(model, CustomOptimizer(model.parameters(), maximize=True), 8, scale=-1.0)
    assert same(model, trained(8))


def test_complex_parameters_are_pairs_of_real_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.complex64))
    q = nn.Parameter(torch.view_as_real(p.detach()).flatten().clone())
    optimizers = [CustomOptimizer([p]), CustomOptimizer([q])]
    for _ in range(5):
        p.grad = torch.randn(5, generator=generator, dtype=torch.complex64)
        q.grad = torch.view_as_real(p.grad).flatten().clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.view_as_real(p.detach()).flatten(), q)


def test_a_state_of_other_shapes_is_an_error_before_anything_changes() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer, other = CustomOptimizer([p]), CustomOptimizer([nn.Parameter(torch.ones(2, 3))])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = weights(nn.ParameterList(other.param_groups[0]["params"]))
    with pytest.raises(ValueError, match=r"^CustomOptimizer: `state_dict` must have the parameters' shapes"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state
    assert torch.equal(before[0], other.param_groups[0]["params"][0])


def test_a_run_of_skipped_steps_alone_warns() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = CustomOptimizer([p])
    p.grad = torch.full_like(p, math.nan)
    for _ in range(9):
        optimizer.step()
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()


def test_arguments_of_adamw_that_are_off_are_accepted() -> None:
    model = make_model()
    train(model, CustomOptimizer(model.parameters(), foreach=None, amsgrad=False, fused=False), 1)


def test_a_run_may_be_extended() -> None:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters(), total_steps=10)
    train(model, optimizer, 10)
    longer = CustomOptimizer(model.parameters(), total_steps=40)
    longer.load_state_dict(optimizer.state_dict())
    before = weights(model)
    train(model, longer, 5, first=10)
    assert longer.state_dict()["param_groups"][0]["run"]["total_steps"] == 40
    assert max(float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), before, strict=True)) > 1e-3


def test_a_gan_finds_a_ring_of_eight_modes_with_the_settings_of_the_guide() -> None:
    """Each mode has at least a hundredth of the samples within six standard deviations."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.arange(8) * math.pi / 4
    modes = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)
    with seed_initial_weights(0):
        make = functools.partial(make_mlp, activation=lambda: nn.LeakyReLU(0.2))
        generate, discriminate = make(8, 64, 64, 2), make(2, 64, 64, 1)
    optimizers = [CustomOptimizer(model.parameters(), betas=(0.5, 0.98)) for model in (generate, discriminate)]

    def sample(count: int) -> Tensor:
        return cast(Tensor, generate(torch.randn(count, 8, generator=generator)))

    for _ in range(500):
        real = modes[torch.randint(8, (128,), generator=generator)]
        real = real + 0.05 * torch.randn(128, 2, generator=generator)
        optimizers[1].zero_grad()
        fake = sample(128).detach()
        (F.softplus(-discriminate(real)).mean() + F.softplus(discriminate(fake)).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-discriminate(sample(128))).mean().backward()
        optimizers[0].step()
    distances, nearest = torch.cdist(sample(2000).detach(), modes).min(1)
    counts = torch.bincount(nearest[distances < 0.3], minlength=8)
    assert int(counts.min()) >= 20
    assert all(optimizer.stepper.runs[0].rate_after_search for optimizer in optimizers)


def test_a_hugging_face_trainer_ends_no_worse_than_with_adamw(tmp_path: Path) -> None:
    """With its warm-up and its schedule."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 3)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    labels = x[:, :3].argmax(1)
    rows = [{"x": row, "labels": label} for row, label in zip(x, labels, strict=True)]
    losses = []
    for kind in (CustomOptimizer, AdamW):
        torch.manual_seed(0)
        model = Classifier()
        settings = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=60,
            lr_scheduler_type="linear",
            warmup_steps=6,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        optimizer = kind(model.parameters(), lr=0.01)
        transformers.Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, None)).train()
        losses.append(float(model(x, labels)["loss"].detach()))
    assert losses[0] < losses[1]


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # Lightning uses an old name
def test_a_lightning_trainer_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    """With a schedule by steps."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return loss_on(self.model, int(batch[0]))

        def configure_optimizers(self) -> dict[str, object]:
            optimizer = CustomOptimizer(self.model.parameters())
            scheduler = {"scheduler": CosineAnnealingLR(optimizer, 20), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    module, model = Module(), make_model()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(12)))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet).fit(module, loader)
    optimizer = CustomOptimizer(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 20)
    for step in range(12):
        train(model, optimizer, 1, first=step)
        scheduler.step()
    assert same(module.model, model)
    assert not same(model, trained(12))


def test_a_compiled_model_takes_the_same_steps() -> None:
    model = make_model()
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    train(compiled, CustomOptimizer(compiled.parameters()), 12)
    assert same(model, trained(12))


def test_other_group_keys_remain() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = CustomOptimizer([{"params": [p], "name": "head", "lr_scale": 0.5}], foreach=True)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["name"], optimizer.param_groups[0]["lr_scale"]) == ("head", 0.5)


def test_a_compiled_step_takes_the_same_steps_and_compiles_nothing() -> None:
    """It runs as it is inside of a compiled training loop; a graph of it would be compiled anew for new numbers."""
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    step = torch.compile(optimizer.step, backend=collect)
    for number in range(12):
        optimizer.zero_grad()
        loss_on(model, number).backward()
        step()
    assert same(model, trained(12))
    assert not graphs
