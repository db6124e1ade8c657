"""The losses and gradients of each objective equal those of plain loops; meta-training by each of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.evaluation.evaluate import ProcessGroup
from protonet.episodes.names import OBJECTIVES
from protonet.episodes.networks.backbones import BatchNorm, LinearHead, SetTransformer, make_head
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.settings import TrainingPlan
from protonet.episodes.training.objectives import (
    CONTRASTIVE_WEIGHT,
    COSINE_TEMPERATURE,
    LABEL_SMOOTHING,
    AdaptedLearner,
    FeatLearner,
    ProtoNetLearner,
    make_learner,
)
from protonet.episodes.training.tasks import ValidationScore, draw_training_episodes, select_split_side
from protonet.episodes.training.train import (
    WEIGHT_AVERAGE_DECAY,
    WEIGHT_AVERAGE_DELAY,
    TrainingRun,
    make_training_run,
    take_training_step,
    update_best_weights,
)
from tests.episodes.cases import SIDES, make_data, make_plan

N_SHOT, N_QUERY, N_WAY = 2, 3, 3


def make_encoder(name: str) -> nn.Module:
    """Make an encoder of 4 x 4 images with or without batch normalisation, in float64."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3, padding=1)
    norm: nn.Module = BatchNorm(4) if name == "batch" else nn.GroupNorm(2, 4)
    layers = [nn.Unflatten(1, (1, 4, 4)), first, norm, nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(*layers).double()


def make_batch(n_episodes: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n_episodes, N_WAY, N_SHOT + N_QUERY, 16, generator=generator, dtype=torch.float64)
    return x, torch.arange(N_WAY).expand(n_episodes, -1)[..., None].expand(-1, -1, N_SHOT + N_QUERY)


def plan_of(objective: str, **changes: Any) -> TrainingPlan:
    return replace(make_plan(), objective=objective, inner_steps=2, inner_rate=0.3, **changes)


def make_head_of(objective: str, dim: int, *, n_way: int | None = N_WAY) -> Any:
    return make_head(objective, dim, torch.Generator().manual_seed(2), n_way=n_way).double()


def run(encoder: nn.Module, weights: list[Tensor], x: Tensor, statistics: int | None) -> Tensor:
    """Run the network of `make_encoder` with other weights; the first ``statistics`` rows give the statistics."""
    z = F.conv2d(x.reshape(-1, 1, 4, 4), weights[0], weights[1], padding=1)
    if statistics is None:
        z = F.group_norm(z, 2, weights[2], weights[3])
    else:
        mean = z[:statistics].mean(dim=(0, 2, 3), keepdim=True)
        variance = (z[:statistics] - mean).square().mean(dim=(0, 2, 3), keepdim=True)
        z = (z - mean) / (variance + 1e-5).sqrt() * weights[2][:, None, None] + weights[3][:, None, None]
    return F.linear(F.avg_pool2d(z.tanh(), 2).flatten(1), weights[4], weights[5])


def check_gradients(learner: nn.Module, x: Tensor, targets: Tensor, slow: Tensor) -> None:
    """Check a learner's loss and gradients against a loss that slow loops computed of the same weights."""
    weights = list(learner.parameters())
    expected = torch.autograd.grad(slow, weights)
    loss = learner(x, targets, N_SHOT)
    torch.testing.assert_close(loss, slow[None])
    for ours, theirs in zip(torch.autograd.grad(loss.sum(), weights), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-8)


def test_the_loss_of_prototypical_networks_equals_a_slow_loop() -> None:
    encoder, (x, targets) = make_encoder("group"), make_batch()
    losses = []
    for episode in x:
        rows = encoder(episode.flatten(0, 1)).unflatten(0, episode.shape[:2])
        prototypes = [rows[c, :N_SHOT].mean(dim=0) for c in range(N_WAY)]
        for c in range(N_WAY):
            for query in rows[c, N_SHOT:]:
                distances = torch.stack([((query - prototype) ** 2).sum() for prototype in prototypes])
                losses.append(distances[c] + (-distances).logsumexp(dim=0))  # eq. 2
    learner = ProtoNetLearner(plan_of("protonet"), encoder, nn.Identity())
    check_gradients(learner, x, targets, torch.stack(losses).mean())


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_mamls_gradients_equal_a_slow_loop(norm: str, first_order: bool) -> None:
    encoder, head, (x, targets) = make_encoder(norm), make_head_of("maml", 5), make_batch()
    learner = AdaptedLearner(plan_of("maml", first_order=first_order), encoder, head)
    originals = list(encoder.parameters())
    statistics = N_WAY * N_SHOT if norm == "batch" else None
    losses = []
    for episode in x:
        support, query = episode[:, :N_SHOT].flatten(0, 1), episode[:, N_SHOT:].flatten(0, 1)
        labels = [torch.arange(N_WAY).repeat_interleave(n) for n in (N_SHOT, N_QUERY)]
        weights = [*originals, head.weight, head.bias]
        for _ in range(2):
            logits = run(encoder, weights, support, statistics) @ weights[-2].T + weights[-1]
            inner = F.cross_entropy(logits, labels[0])
            gradients = torch.autograd.grad(inner, weights, create_graph=not first_order, allow_unused=True)
            pairs = zip(weights, gradients, strict=True)
            weights = [weight if slope is None else weight - 0.3 * slope for weight, slope in pairs]
        embedded = run(encoder, weights, torch.cat([support, query]), statistics)[len(support) :]
        losses.append(F.cross_entropy(embedded @ weights[-2].T + weights[-1], labels[1]))
    check_gradients(learner, x, targets, torch.stack(losses).mean())


@pytest.mark.parametrize("first_order", [False, True])
def test_anils_gradients_equal_a_slow_loop(first_order: bool) -> None:
    encoder, head, (x, targets) = make_encoder("batch"), make_head_of("anil", 5), make_batch()
    learner = AdaptedLearner(plan_of("anil", first_order=first_order), encoder, head)
    embedded = encoder(x.flatten(0, 2)).unflatten(0, x.shape[:3])  # the statistics of the whole batch
    losses = []
    for rows in embedded:
        support, query = rows[:, :N_SHOT].flatten(0, 1), rows[:, N_SHOT:].flatten(0, 1)
        hot = [F.one_hot(torch.arange(N_WAY).repeat_interleave(n), N_WAY).double() for n in (N_SHOT, N_QUERY)]
        weight, bias = head.weight, head.bias
        for _ in range(2):  # the gradient in closed form
            error = ((support @ weight.T + bias).softmax(dim=1) - hot[0]) / len(support)
            steps = (error.T @ support, error.sum(dim=0))
            steps = tuple(step.detach() for step in steps) if first_order else steps
            weight, bias = weight - 0.3 * steps[0], bias - 0.3 * steps[1]
        losses.append(F.cross_entropy(query @ weight.T + bias, hot[1]))
    check_gradients(learner, x, targets, torch.stack(losses).mean())


def attend(head: SetTransformer, sets: Tensor) -> Tensor:
    """Adapt sets by torch's own attention."""
    dim = sets.shape[2]
    attention = nn.MultiheadAttention(dim, 1, batch_first=True, dtype=torch.float64)
    state = {
        "in_proj_weight": torch.cat([head.query.weight, head.key.weight, head.value.weight]),
        "in_proj_bias": torch.zeros(3 * dim).double(),
        "out_proj.weight": head.output.weight,
        "out_proj.bias": head.output.bias,
    }
    moved = torch.func.functional_call(attention, state, (sets, sets, sets))[0]
    return F.layer_norm(sets + moved, (dim,), head.norm.weight, head.norm.bias)


def test_feats_losses_equal_a_slow_loop() -> None:
    encoder, head, (x, targets) = make_encoder("group"), make_head_of("feat", 5).eval(), make_batch()
    assert isinstance(head, SetTransformer)
    proxies = torch.rand(5, 5, generator=torch.Generator().manual_seed(3)).double()
    learner = FeatLearner(plan_of("feat"), encoder, head, proxies)
    episodic: list[Tensor] = []
    contrastive: list[Tensor] = []
    for episode in encoder(x.flatten(0, 2)).unflatten(0, x.shape[:3]):
        adapted = attend(head, episode[:, :N_SHOT].mean(dim=1)[None])[0]
        centres = torch.stack([attend(head, rows[None])[0].mean(dim=0) for rows in episode])
        for way in range(N_WAY):
            for index, row in enumerate(episode[way]):
                for losses, points in ((episodic, adapted), (contrastive, centres)):
                    if losses is contrastive or index >= N_SHOT:
                        cosines = F.cosine_similarity(points, row[None])
                        losses.append(-(cosines / COSINE_TEMPERATURE).log_softmax(dim=0)[way])
    result = learner(x, targets, N_SHOT)
    torch.testing.assert_close(result[0], torch.stack(episodic).mean())
    torch.testing.assert_close(result[1], CONTRASTIVE_WEIGHT * torch.stack(contrastive).mean())
    cosines = F.normalize(encoder(x.flatten(0, 2)), dim=1) @ F.normalize(proxies, dim=1).T
    smooth = F.cross_entropy(cosines / COSINE_TEMPERATURE, targets.flatten(), label_smoothing=LABEL_SMOOTHING)
    torch.testing.assert_close(result[2], smooth)


def test_initial_heads_depend_on_the_generator() -> None:
    before = torch.get_rng_state()
    for objective in OBJECTIVES:
        first, same = (make_head(objective, 64, torch.Generator().manual_seed(0)).state_dict() for _ in range(2))
        assert first.keys() == same.keys()
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert bool(first) == (objective == "feat")
    assert torch.equal(torch.get_rng_state(), before)
    head, zero = (make_head("maml", 10_000, torch.Generator().manual_seed(0), n_way=n_way) for n_way in (3, None))
    assert isinstance(head, LinearHead)
    assert isinstance(zero, LinearHead)
    assert abs(float(head.weight.detach().std() * 100) - 1) < 0.05
    assert [tuple(item.shape) for item in zero.make_initial_weights(3).values()] == [(3, 10_000), (3,)]
    assert not any(bool(item.any()) for item in (head.bias, *zero.make_initial_weights(3).values()))
    assert not [*zero.parameters()]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_trained_weight_changes_the_loss(objective: str) -> None:
    learner = make_learner(plan_of(objective, dim=16, head="classes", way=N_WAY), torch.Generator().manual_seed(1))
    x, targets = make_batch()
    learner.double()(x, targets, N_SHOT).sum().backward()
    for name, weight in learner.named_parameters():
        assert weight.grad is not None, name
        assert float(weight.grad.norm()) > 1e-6, name
    plan = plan_of(objective, backbone="conv4", dim=256)
    learner, same = (make_learner(plan, torch.Generator().manual_seed(1)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(learner.parameters(), same.parameters(), strict=True))
    x = torch.rand(2, 4, 3, 256, generator=torch.Generator().manual_seed(0))
    losses = learner(x, torch.arange(4)[:, None].expand(2, -1, 3), 2)
    assert len(losses) == len(learner.loss_names)
    losses.sum().backward()
    assert all(weight.grad is not None for weight in learner.parameters())


def advance(run: TrainingRun, steps: int) -> list[torch.Tensor]:
    base = select_split_side(make_data(dim=run.plan.dim), "base")
    return [
        take_training_step(run, run.learner, *draw_training_episodes(base, run.plan, run.step, ProcessGroup()))
        for _ in range(steps)
    ]


def smoothed(cosines: torch.Tensor, target: int) -> torch.Tensor:
    log_p = (cosines / COSINE_TEMPERATURE).log_softmax(dim=0)
    return -(1 - LABEL_SMOOTHING) * log_p[target] - LABEL_SMOOTHING * log_p.mean()


def test_the_losses_equal_slow_loops() -> None:
    run = make_training_run(make_plan(), "cpu")
    assert run.learner.proxies is not None
    x, targets = draw_training_episodes(select_split_side(make_data(), "base"), run.plan, 0, ProcessGroup())
    episodic, cross_entropy = [], []
    for episode, labels in zip(x, targets, strict=True):
        embedded = F.normalize(run.learner.encoder(episode.flatten(0, 1)), dim=1).reshape(4, 5, -1)
        prototypes = torch.stack([F.normalize(rows[:2].mean(dim=0), dim=0) for rows in embedded])
        for way in range(4):
            for slot in range(5):
                row = embedded[way, slot]
                if slot >= 2:
                    episodic.append(smoothed(prototypes @ row, way))
                proxies = F.normalize(run.learner.proxies, dim=1)
                cross_entropy.append(smoothed(proxies @ row, int(labels[way, slot])))
    slow = torch.stack([torch.stack(episodic).mean(), torch.stack(cross_entropy).mean()])
    torch.testing.assert_close(run.learner(x, targets, 2), slow)


SMALL: dict[str, Any] = {"way": 3, "query": 1, "shot": 1, "episodes_per_step": 2, "inner_steps": 2, "inner_rate": 0.1}


@pytest.mark.parametrize("objective", ["prototypes", "anil"])
def test_steps_reduce_the_losses_and_average_the_weights_and_the_head(objective: str) -> None:
    plan = make_plan() if objective == "prototypes" else replace(make_plan(), objective="anil", head="classes", **SMALL)
    run = make_training_run(plan, "cpu")
    before = torch.get_rng_state()
    saved = [weight.clone() for module in (run.learner.encoder, run.learner.head) for weight in module.parameters()]
    losses = []
    for step in range(1, 13):
        losses += advance(run, 1)
        decay = min(WEIGHT_AVERAGE_DECAY, step / (step + WEIGHT_AVERAGE_DELAY))
        learned = [*run.learner.encoder.parameters(), *run.learner.head.parameters()]
        saved = [decay * old + (1 - decay) * new.detach() for old, new in zip(saved, learned, strict=True)]
    assert run.step == 12
    assert float(losses[-1].sum()) < 0.8 * float(losses[0].sum())
    weights = [*run.averaged_encoder.parameters(), *run.averaged_head.parameters()]
    for weight, expected in zip(weights, saved, strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(torch.get_rng_state(), before)
    update_best_weights(run, ValidationScore(1, 0.5, 0.1))
    names = {name for name in run.best_weights if name.startswith("head.")}
    assert names == (set() if objective == "prototypes" else {"head.weight", "head.bias"})


def test_plain_prototypical_training_is_a_plain_loop() -> None:
    """Neither augmentation nor averages nor weight decay: the kept weights are those of Adam on the class means."""
    plan = replace(make_plan("conv"), objective="protonet", augment="none", learning_rate=1e-3)
    run = make_training_run(plan, "cpu")
    encoder, data = copy.deepcopy(run.learner.encoder), make_data()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    base = select_split_side(data, "base")
    rows = torch.tensor([row for row, label in enumerate(data.y.tolist()) if SIDES[label] == "base"])
    config = EpisodeConfig((4, 4), (2, 2), 3)
    for step in range(6):
        draw = config.sample(base.rows_by_class, seed=1, first=4 * step, n_episodes=4)
        losses = []
        for support, query in zip(draw.support_ids, draw.query_ids, strict=True):
            means = encoder(data.x[rows[support.flatten()]]).view(4, 2, -1).mean(dim=1)
            distances = torch.cdist(encoder(data.x[rows[query.flatten()]]), means).square()
            losses.append(F.cross_entropy(-distances, torch.arange(4).repeat_interleave(3)))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    advance(run, 6)
    # Distances do not depend on the last bias, whose gradient is a rounding error that Adam scales up.
    kept, expected = (network(data.x).detach() for network in (run.averaged_encoder, encoder))
    torch.testing.assert_close(torch.cdist(kept, kept), torch.cdist(expected, expected), atol=0.05, rtol=1e-3)


def test_the_learning_rate_of_protonet_is_halved_every_2000_episodes() -> None:
    run = make_training_run(replace(make_plan(), objective="protonet", learning_rate=1e-3), "cpu")  # 4 episodes a step
    rates = []
    for run.step in (0, 499, 500, 999, 1000):
        advance(run, 1)
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4]


def test_initial_weights_of_protonet_are_those_of_torch() -> None:
    network = make_learner(replace(make_plan("conv4", dim=256), objective="protonet"), torch.Generator()).encoder
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    for layer in layers:
        theirs = nn.Conv2d(layer.in_channels, layer.out_channels, 3)
        for ours, other in zip(layer.state_dict().values(), theirs.state_dict().values(), strict=True):
            bound = (9 * layer.in_channels) ** -0.5
            assert 0.9 * bound < float(ours.abs().max()) <= bound
            assert float(ours.std()) == pytest.approx(float(other.std()), rel=0.3)


def test_a_run_is_finished_after_its_steps_or_its_patience() -> None:
    run = make_training_run(replace(make_plan(), steps=100, eval_every=5, patience=3), "cpu")
    run.best_score = ValidationScore(20, 0.5, 0.1)
    for step, finished in ((20, False), (34, False), (35, True), (100, True)):
        run.step = step
        assert run.is_finished == finished
    run.best_score = ValidationScore(90, 0.5, 0.1)
    assert run.is_finished


def test_a_side_has_only_its_own_classes() -> None:
    data = make_data()
    for side in ("base", "validation", "novel"):
        selected, class_ids = select_split_side(data, side), [c for c, name in enumerate(SIDES) if name == side]
        assert selected.class_names == tuple(data.class_names[c] for c in class_ids)
        assert selected.rows_by_class.class_counts.tolist() == [8] * len(class_ids)
        inside = [row for row, label in enumerate(data.y.tolist()) if label in class_ids]
        assert selected.row_classes.tolist() == [class_ids.index(int(data.y[row])) for row in inside]
        torch.testing.assert_close(selected.feature_stds, data.x[inside].std(dim=0, correction=0))
        assert torch.equal(selected.read_rows(torch.tensor([7, 0, 5])), data.x[[inside[7], inside[0], inside[5]]])


@pytest.mark.parametrize("backbone", ["mlp", "conv"])
def test_processes_divide_one_batch(backbone: str) -> None:
    base, plan = select_split_side(make_data(), "base"), make_plan(backbone)
    x, targets = draw_training_episodes(base, plan, 3, ProcessGroup())
    assert x.shape == (4, 4, 5, 64)
    parts = [draw_training_episodes(base, plan, 3, ProcessGroup(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    again, other = (draw_training_episodes(base, plan, step, ProcessGroup()) for step in (3, 4))
    assert torch.equal(again[0], x)
    assert not torch.equal(other[0], x)


def test_a_batch_has_base_rows_of_its_classes() -> None:
    data = make_data()
    base = select_split_side(data, "base")
    names = torch.tensor([data.class_names.index(name) for name in base.class_names])
    x, targets = draw_training_episodes(base._replace(feature_stds=torch.zeros(64)), make_plan(), 0, ProcessGroup())
    for rows, labels in zip(x.flatten(0, 2), names[targets.flatten()], strict=True):
        (result,) = (data.x == rows).all(dim=1).nonzero().flatten().tolist()
        assert data.y[result] == labels
    assert (targets == targets[..., :1]).all()
    assert all(len(episode[:, 0].unique()) == 4 for episode in targets)


def test_data_without_enough_classes_on_a_side_are_refused() -> None:
    data = make_data()
    with pytest.raises(ValueError, match=r"^`dataset` must have a split by class; got none\. Pass `split_seed` 0\.$"):
        select_split_side(data._replace(sides=None), "base")
    lone = torch.cat([(data.y == c).nonzero()[:1] for c in range(9)]).flatten()  # a row a class
    rows = torch.cat([lone, (data.y == 0).nonzero().flatten()])
    for few, got in (
        (data._replace(sides=("base", *["novel"] * 8)), 0),
        (data._replace(sides=("validation", *["base"] * 8)), 1),
        (data._replace(x=data.x[rows], y=data.y[rows], sides=("validation",) * 9), 1),
    ):
        message = rf"^`dataset` must have at least 2 validation classes with 2 rows; got {got}\. Add classes [^`]*$"
        with pytest.raises(ValueError, match=message):
            select_split_side(few, "validation")
