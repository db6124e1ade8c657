from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from protonet.encoder import ResidualMLPs
from protonet.losses import class_means
from protonet.views.mlp import Recipe, Task, train


def rings(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes that no cosine tells apart: inside and outside of a circle, both in all directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(200) % 2
    direction = F.normalize(torch.randn(200, 2, generator=generator), dim=1)
    return direction * (1 + 2 * labels[:, None]) + 0.2 * torch.randn(200, 2, generator=generator), labels


def run(
    task: Task, steps: int, *, seed: int = 0, deadline: float = float("inf"), recipe: Recipe | None = None
) -> list[ResidualMLPs]:
    generator = torch.Generator().manual_seed(seed)
    stack = ResidualMLPs(1, task.z.shape[1], 32, 16, generator)
    recipe = recipe or Recipe(noise=0.1)
    runs = train(stack, [task], 2, steps=[steps], generator=generator, deadline=deadline, recipe=recipe)
    return [average for _, average in runs]


def accuracy(stack: ResidualMLPs, train_set: Task, test_set: Task) -> float:
    embedded = F.normalize(stack(train_set.z)[0], dim=1)
    prototypes = F.normalize(class_means(embedded, train_set.labels, 2)[0], dim=1)
    logits = F.normalize(stack(test_set.z)[0], dim=1) @ prototypes.T
    return float((logits.argmax(dim=1) == test_set.labels).double().mean())


def test_training_learns_what_cosine_cannot() -> None:
    train_set, test_set = Task(*rings(0)), Task(*rings(1))
    untrained = ResidualMLPs(1, 2, 32, 16, torch.Generator().manual_seed(0))
    assert accuracy(untrained, train_set, test_set) < 0.65
    both = Recipe(noise=0.1)
    for steps, recipe in (
        (300, both),
        (300, both._replace(episodic=0.0)),
        (600, both._replace(cross_entropy=0.0)),
    ):
        assert accuracy(run(train_set, steps, recipe=recipe)[-1], train_set, test_set) > 0.95


def test_same_seed_same_weights_and_no_global_state() -> None:
    task = Task(*rings(0))
    before = torch.get_rng_state()
    first, second, other = (run(task, 5, seed=seed)[-1] for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.last, second.last)
    assert not torch.equal(first.last, other.last)


def test_members_of_a_stack_do_not_see_each_other() -> None:
    """What a member learns from its task is the same whatever the other members learn from."""
    task, other = Task(*rings(0)), Task(*rings(5))
    results = []
    for tasks in ([task, task], [task, other]):
        generator = torch.Generator().manual_seed(0)
        stack = ResidualMLPs(2, 2, 8, 16, generator)
        for _, average in train(stack, tasks, 2, steps=[10], generator=torch.Generator().manual_seed(1)):
            results.append(average)
    torch.testing.assert_close(results[0].first[0], results[1].first[0])
    assert not torch.allclose(results[0].first[1], results[1].first[1])


def test_pauses_are_where_they_were_asked_for() -> None:
    task = Task(*rings(0))
    generator = torch.Generator().manual_seed(0)
    stack = ResidualMLPs(1, 2, 4, 16, generator)
    steps = [steps for steps, _ in train(stack, [task], 2, steps=[1, 3, 70], generator=generator)]
    assert steps == [1, 3, 70]


def test_a_deadline_in_the_past_still_takes_one_step() -> None:
    (average,) = run(Task(*rings(0)), 5, deadline=time.monotonic() - 1)
    assert bool((average.last != 0).any())


def test_one_sample_a_class_trains_on_augmented_views() -> None:
    task = Task(torch.eye(2), torch.tensor([0, 1]))
    average = run(task, 20)[-1]
    assert bool(torch.isfinite(average.last).all())
    assert float(average.last.abs().max()) > 0


def test_each_member_has_an_optimizer_of_its_own_with_the_recipes_settings() -> None:
    made: list[tuple[list[dict[str, Any]], float]] = []

    def build(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        made.append((groups, lr))
        return torch.optim.SGD(groups, lr=lr)

    recipe = Recipe(optimizer=build, learning_rate=0.125, weight_decay=0.25)
    task = Task(*rings(0))
    stack = ResidualMLPs(2, 2, 4, 16, torch.Generator().manual_seed(0))
    for _ in train(stack, [task, task], 2, steps=[2], generator=torch.Generator().manual_seed(1), recipe=recipe):
        pass
    assert [lr for _, lr in made] == [0.125, 0.125]
    for member, (groups, _) in enumerate(made):
        assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
        assert groups[0]["params"][0].data_ptr() == stack.first[member].data_ptr()  # a view: steps reach the stack
