"""The losses and gradients of each objective equal those of plain loops over episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.names import OBJECTIVES, TrainingPlan
from protonet.episodes.networks.backbones import BatchNorm, LinearHead, SetTransformer, make_head
from protonet.episodes.training.objectives import (
    META_TRAINING_CONSTANTS,
    AdaptedLearner,
    FeatLearner,
    ProtoNetLearner,
    make_learner,
)
from tests.episodes.meta_cases import make_plan

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
    check_gradients(
        ProtoNetLearner(plan_of("protonet"), encoder, nn.Identity()), x, targets, torch.stack(losses).mean()
    )


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
                        losses.append(-(cosines / META_TRAINING_CONSTANTS.temperature).log_softmax(dim=0)[way])
    result = learner(x, targets, N_SHOT)
    torch.testing.assert_close(result[0], torch.stack(episodic).mean())
    torch.testing.assert_close(result[1], META_TRAINING_CONSTANTS.contrastive_weight * torch.stack(contrastive).mean())
    cosines = F.normalize(encoder(x.flatten(0, 2)), dim=1) @ F.normalize(proxies, dim=1).T
    smooth = F.cross_entropy(
        cosines / META_TRAINING_CONSTANTS.temperature,
        targets.flatten(),
        label_smoothing=META_TRAINING_CONSTANTS.label_smoothing,
    )
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
    assert len(losses) == len(learner.losses)
    losses.sum().backward()
    assert all(weight.grad is not None for weight in learner.parameters())
