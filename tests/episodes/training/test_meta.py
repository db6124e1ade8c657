from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from protonet.episodes.evaluation.distributed import ProcessGroup
from protonet.episodes.names import TrainingPlan
from protonet.episodes.networks import backbones
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.training import tasks
from protonet.episodes.training.objectives import META_TRAINING
from protonet.episodes.training.tasks import (
    VALIDATION,
    ValidationScore,
    draw_training_episodes,
    score_encoder,
    select_split_side,
)
from protonet.episodes.training.train import (
    TrainingRun,
    make_training_run,
    restore_run,
    serialize_run,
    take_training_step,
    update_best,
)
from protonet.sampling import index_classes
from tests.episodes.meta_cases import SIDES, make_data, make_plan


def advance(run: TrainingRun, steps: int) -> list[torch.Tensor]:
    base = select_split_side("data", make_data(dim=run.plan.dim), "base")
    return [
        take_training_step(run, run.learner, *draw_training_episodes(base, run.plan, run.step, ProcessGroup()))
        for _ in range(steps)
    ]


def same(first: TrainingRun, second: TrainingRun) -> bool:
    packed, other = serialize_run(first), serialize_run(second)
    equal = packed[0].keys() == other[0].keys() and all(torch.equal(packed[0][k], other[0][k]) for k in packed[0])
    return equal and packed[1] == other[1]


def smoothed(cosines: torch.Tensor, target: int) -> torch.Tensor:
    log_p = (cosines / META_TRAINING.temperature).log_softmax(dim=0)
    return -(1 - META_TRAINING.label_smoothing) * log_p[target] - META_TRAINING.label_smoothing * log_p.mean()


def test_the_losses_equal_slow_loops() -> None:
    run = make_training_run(make_plan(), "cpu")
    assert run.learner.proxies is not None
    x, targets = draw_training_episodes(select_split_side("data", make_data(), "base"), run.plan, 0, ProcessGroup())
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
        decay = min(META_TRAINING.average_decay, step / (step + META_TRAINING.average_delay))
        learned = [*run.learner.encoder.parameters(), *run.learner.head.parameters()]
        saved = [decay * old + (1 - decay) * new.detach() for old, new in zip(saved, learned, strict=True)]
    assert run.step == 12
    assert float(losses[-1].sum()) < 0.8 * float(losses[0].sum())
    for weight, expected in zip(
        [*run.averaged_encoder.parameters(), *run.averaged_head.parameters()], saved, strict=True
    ):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(torch.get_rng_state(), before)
    update_best(run, ValidationScore(1, 0.5, 0.1))
    names = {name for name in run.best_weights if name.startswith("head.")}
    assert names == (set() if objective == "prototypes" else {"head.weight", "head.bias"})


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(),
        replace(make_plan("conv4", dim=256), objective="feat", **SMALL),
        replace(make_plan("conv"), objective="maml", **SMALL),
        replace(make_plan("resnet12", dim=256), dropblock=0.2, **SMALL),
    ],
    ids=lambda plan: f"{plan.objective} {plan.backbone}",
)
def test_a_packed_run_continues_to_the_same(plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "RESNET12_CHANNELS", (4, 6, 8, 8))  # a small ResNet-12
    full, first, second = (make_training_run(plan, "cpu") for _ in range(3))
    advance(full, 3)
    advance(first, 2)
    update_best(first, ValidationScore(2, 0.5, 0.1))
    first.losses = [[0.1, 1 / 3]]
    restore_run(second, *copy.deepcopy(serialize_run(first)))
    assert same(first, second)
    advance(second, 1)
    full.best_weights, full.best_score, full.losses = second.best_weights, second.best_score, [[0.1, 1 / 3]]
    assert same(second, full)
    assert not same(second, first)


def test_the_best_weights_are_saved_until_better_ones_are_found() -> None:
    run = make_training_run(make_plan(), "cpu")
    bias = next(iter(run.best_weights))
    for step, accuracy, best in ((0, 0.5, 0), (5, 0.4, 0), (10, 0.5, 0), (15, 0.6, 15)):
        with torch.no_grad():
            dict(run.averaged_encoder.named_parameters())[bias].fill_(step)
        update_best(run, ValidationScore(step, accuracy, 0.1))
        assert run.best_score.step == best
        assert (run.best_weights[bias] == best).all()


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
        selected, class_ids = select_split_side("data", data, side), [c for c, name in enumerate(SIDES) if name == side]
        assert selected.names == tuple(data.class_names[c] for c in class_ids)
        assert selected.by_class.size.tolist() == [8] * len(class_ids)
        for row, label in enumerate(data.y.tolist()):
            assert selected.classes[row] == (class_ids.index(label) if label in class_ids else -1)
        element = torch.stack([x for x, label in zip(data.x, data.y, strict=True) if label in class_ids])
        torch.testing.assert_close(selected.feature_deviations, element.std(dim=0, correction=0))
        assert torch.equal(selected.read_rows(torch.tensor([71, 0, 5])), data.x[[71, 0, 5]])


@pytest.mark.parametrize("backbone", ["mlp", "conv"])
def test_processes_divide_one_batch(backbone: str) -> None:
    base, plan = select_split_side("data", make_data(), "base"), make_plan(backbone)
    x, targets = draw_training_episodes(base, plan, 3, ProcessGroup())
    assert x.shape == (4, 4, 5, 64)
    parts = [draw_training_episodes(base, plan, 3, ProcessGroup(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    again, other = (
        draw_training_episodes(base, plan, 3, ProcessGroup()),
        draw_training_episodes(base, plan, 4, ProcessGroup()),
    )
    assert torch.equal(again[0], x)
    assert not torch.equal(other[0], x)


def test_a_batch_has_base_rows_of_its_classes() -> None:
    data = make_data()
    base = select_split_side("data", data, "base")
    names = torch.tensor([data.class_names.index(name) for name in base.names])
    x, targets = draw_training_episodes(
        base._replace(feature_deviations=torch.zeros(64)), make_plan(), 0, ProcessGroup()
    )
    for rows, labels in zip(x.flatten(0, 2), names[targets.flatten()], strict=True):
        (result,) = (data.x == rows).all(dim=1).nonzero().flatten().tolist()
        assert data.y[result] == labels
    assert (targets == targets[..., :1]).all()
    assert all(len(episode[:, 0].unique()) == 4 for episode in targets)


def test_the_score_equals_a_slow_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "VALIDATION", replace(VALIDATION, n_episodes=60))
    data, encoder = make_data(dim=3), nn.Linear(3, 3, bias=False)
    encoder.load_state_dict({"weight": torch.rand(3, generator=torch.Generator().manual_seed(0)).diag()})
    side = select_split_side("data", data, "validation")
    score = score_encoder(encoder, nn.Identity(), side, make_plan(), 7, ProcessGroup())
    chosen = data.select_classes([3, 5])
    setting = EpisodeConfig((2, 2), (1, 1), 15, allow_small=True)
    draw = setting.sample(index_classes(chosen.y), seed=0, first=0, n_episodes=60)
    accuracies, embedded = [], encoder(chosen.x)
    for support, query in zip(draw.support, draw.query, strict=True):
        right = []
        for label, rows in enumerate(query):
            for row in rows:
                cosines = [F.cosine_similarity(embedded[row], embedded[part[0]], dim=0) for part in support]
                right.append(float(cosines[label] > cosines[1 - label]))
        accuracies.append(sum(right) / len(right))
    assert score.step == 7
    assert abs(score.accuracy - sum(accuracies) / len(accuracies)) < 1e-9
    assert 0 < score.half_width < 0.15


def test_data_without_enough_classes_on_a_side_are_refused() -> None:
    data = make_data()
    with pytest.raises(ValueError, match=r"^`data` must have a split by class; got none\. Pass `split_seed` 0\.$"):
        select_split_side("data", data._replace(sides=None), "base")
    lone = torch.cat([(data.y == c).nonzero()[:1] for c in range(9)]).flatten()  # a row a class
    rows = torch.cat([lone, (data.y == 0).nonzero().flatten()])
    for few, got in (
        (data._replace(sides=("base", *["novel"] * 8)), 0),
        (data._replace(sides=("validation", *["base"] * 8)), 1),
        (data._replace(x=data.x[rows], y=data.y[rows], sides=("validation",) * 9), 1),
    ):
        message = rf"^`data` must have at least 2 validation classes with 2 rows; got {got}\. Add classes [^`]*$"
        with pytest.raises(ValueError, match=message):
            select_split_side("data", few, "validation")
