from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protonet.episodes.evaluation.distributed import ProcessGroup
from protonet.episodes.training.objectives import META_TRAINING_CONSTANTS
from protonet.episodes.training.tasks import ValidationScore, draw_training_episodes, select_split_side
from protonet.episodes.training.train import TrainingRun, make_training_run, take_training_step, update_best
from tests.episodes.meta_cases import SIDES, make_data, make_plan


def advance(run: TrainingRun, steps: int) -> list[torch.Tensor]:
    base = select_split_side("data", make_data(dim=run.plan.dim), "base")
    return [
        take_training_step(run, run.learner, *draw_training_episodes(base, run.plan, run.step, ProcessGroup()))
        for _ in range(steps)
    ]


def smoothed(cosines: torch.Tensor, target: int) -> torch.Tensor:
    log_p = (cosines / META_TRAINING_CONSTANTS.temperature).log_softmax(dim=0)
    return (
        -(1 - META_TRAINING_CONSTANTS.label_smoothing) * log_p[target]
        - META_TRAINING_CONSTANTS.label_smoothing * log_p.mean()
    )


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
        decay = min(META_TRAINING_CONSTANTS.average_decay, step / (step + META_TRAINING_CONSTANTS.average_delay))
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
        torch.testing.assert_close(selected.feature_stds, element.std(dim=0, correction=0))
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
    x, targets = draw_training_episodes(base._replace(feature_stds=torch.zeros(64)), make_plan(), 0, ProcessGroup())
    for rows, labels in zip(x.flatten(0, 2), names[targets.flatten()], strict=True):
        (result,) = (data.x == rows).all(dim=1).nonzero().flatten().tolist()
        assert data.y[result] == labels
    assert (targets == targets[..., :1]).all()
    assert all(len(episode[:, 0].unique()) == 4 for episode in targets)


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
