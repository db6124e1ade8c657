"""The optimizer's state as users and hooks see and change it: entries by parameter, saving, loading and matching."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.optimizer import CustomOptimizer
from tests.optimizer_cases import distance, make_model, same, through_file, train, trained, weights

StateDict = dict[str, Any]


def half_trained() -> tuple[nn.Module, CustomOptimizer]:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    train(model, optimizer, 12)
    return model, optimizer


def untrained_copy(model: nn.Module) -> tuple[nn.Module, CustomOptimizer]:
    other = make_model(seed=1)
    other.load_state_dict(model.state_dict())
    return other, CustomOptimizer(other.parameters())


class Twins(nn.Module):
    """Two layers of one shape, which an exchange of their states confuses without an error."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layers = {name: nn.Linear(8, 8) for name in ("first", "second")}
        for layer in layers.values():
            for p in layer.parameters():
                nn.init.normal_(p, 0.0, 0.4, generator=generator)
        for name in sorted(layers, reverse=swapped):
            self.add_module(name, layers[name])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.get_submodule("first")(x).tanh()
        outputs: Tensor = self.get_submodule("second")(hidden)
        return outputs


def train_twins(model: Twins, optimizer: torch.optim.Optimizer, steps: range) -> Tensor:
    for step in steps:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), x.flip(1).sin()).backward()
        optimizer.step()
    parameters = dict(model.named_parameters())
    return nn.utils.parameters_to_vector([parameters[name] for name in sorted(parameters)]).detach()


def match_names(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    """Give each parameter the state of that of the same name, as torch's guide to the optimizers has it."""
    adapted = copy.deepcopy(optimizer.state_dict())
    saved_group, group = state_dict["param_groups"][0], adapted["param_groups"][0]
    group.update({name: value for name, value in saved_group.items() if name not in ("params", "param_names")})
    saved_index = dict(zip(saved_group["param_names"], saved_group["params"], strict=True))
    for index, name in zip(group["params"], group["param_names"], strict=True):
        if saved_index[name] in state_dict["state"]:
            adapted["state"][index] = copy.deepcopy(state_dict["state"][saved_index[name]])
    return adapted


@pytest.mark.skipif("param_names" not in repr(torch.optim.Optimizer.state_dict.__doc__), reason="torch below 2.6")
def test_a_load_pre_hook_matches_parameters_by_name() -> None:
    model, twin = Twins(), Twins(swapped=True)
    optimizer, other = (CustomOptimizer(each.named_parameters()) for each in (model, twin))
    train_twins(model, optimizer, range(15))
    twin.load_state_dict(model.state_dict())
    other.register_load_state_dict_pre_hook(match_names)
    other.load_state_dict(through_file(optimizer.state_dict()))
    start = train_twins(model, optimizer, range(0))
    ends = train_twins(model, optimizer, range(15, 30)), train_twins(twin, other, range(15, 30))
    assert float((ends[0] - ends[1]).norm() / (ends[0] - start).norm()) < 1e-3


def test_a_load_pre_hook_may_unwrap_a_dict() -> None:
    model, optimizer = half_trained()
    other, fresh = untrained_copy(model)
    fresh.register_load_state_dict_pre_hook(lambda _, wrapped: wrapped["optimizer"])
    fresh.load_state_dict({"epoch": 3, "optimizer": optimizer.state_dict()})
    assert same(train(other, fresh, 8, first=12), train(model, optimizer, 8, first=12))


def test_load_hooks_see_the_states_and_may_change_them() -> None:
    """Each halves all means: before the load in what is loaded, after it in what was loaded."""

    def halve(states: dict[Any, dict[str, Tensor]]) -> None:
        assert states
        for state in states.values():
            state["exp_avg"] = state["exp_avg"] / 2

    def halve_loaded(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> None:
        state_dict["state"] = {index: {**state} for index, state in state_dict["state"].items()}
        halve(state_dict["state"])

    model, optimizer = half_trained()
    ends = []
    for hooks in ((), ("pre",), ("post",), ("pre", "post")):
        other, fresh = untrained_copy(model)
        if "pre" in hooks:
            fresh.register_load_state_dict_pre_hook(halve_loaded)
        if "post" in hooks:
            fresh.register_load_state_dict_post_hook(lambda optimizer: halve(optimizer.state))
        fresh.load_state_dict(optimizer.state_dict())
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            expected = optimizer.state[p]["exp_avg"] / 2 ** len(hooks)
            assert torch.equal(fresh.state[q]["exp_avg"], expected)
        ends.append(train(other, fresh, 3, first=12))
    assert same(ends[1], ends[2])
    assert not any(same(ends[i], ends[j]) for i, j in ((0, 1), (1, 3), (0, 3)))


def test_a_state_that_a_hook_has_spoilt_is_an_error_before_anything_changes() -> None:
    model, optimizer = half_trained()
    other, fresh = untrained_copy(model)

    def spoil(_: torch.optim.Optimizer, state_dict: StateDict) -> None:
        state_dict["state"][0]["exp_avg"] = torch.zeros(2, 2)

    message = r"^CustomOptimizer: `state_dict` must have the parameters' shapes"
    with fresh.register_load_state_dict_pre_hook(spoil), pytest.raises(ValueError, match=message):
        fresh.load_state_dict(optimizer.state_dict())
    assert not fresh.state
    assert same(train(other, fresh, 0), model)
    fresh.load_state_dict(optimizer.state_dict())
    assert same(train(other, fresh, 8, first=12), trained(20))


def test_a_state_dict_post_hook_may_add_entries() -> None:
    model, optimizer = half_trained()

    def add(_: torch.optim.Optimizer, state_dict: StateDict) -> None:
        state_dict["state"][0]["loss"] = 0.5
        state_dict["state"]["epoch"] = 3
        state_dict["version"] = 1

    optimizer.register_state_dict_post_hook(add)
    saved = through_file(optimizer.state_dict())
    assert saved["state"][0]["loss"] == 0.5
    assert saved["version"] == 1
    assert not any("loss" in state for state in optimizer.state.values())  # the dict is a copy
    other, fresh = untrained_copy(model)
    fresh.load_state_dict(saved)
    assert fresh.state[next(other.parameters())]["loss"] == 0.5
    assert fresh.state["epoch"] == 3  # type: ignore[index]
    assert same(train(other, fresh, 8, first=12), train(model, optimizer, 8, first=12))
    assert fresh.state[next(other.parameters())]["loss"] == 0.5


OTHERS: dict[str, Any] = {"calls": 2, "note": "frozen", "importance": torch.arange(3.0), "history": [1.0, "a"]}


@pytest.mark.parametrize("at", [0, 5])
def test_entries_of_users_change_nothing_and_are_saved_loaded_and_copied(at: int) -> None:
    model = make_model()
    optimizer = CustomOptimizer(model.parameters())
    train(model, optimizer, at)
    for p in model.parameters():
        optimizer.state[p].update(copy.deepcopy(OTHERS))
    train(model, optimizer, 12 - at, first=at)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})  # states are stacked anew
    train(model, optimizer, 1, first=12)
    assert same(model, trained(13))
    other, fresh = untrained_copy(model)
    fresh.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    fresh.load_state_dict(through_file(optimizer.state_dict()))
    for pair in ((model, optimizer), (other, fresh), copy.deepcopy((model, optimizer))):
        for p in pair[0].parameters():
            state = pair[1].state[p]
            assert [state[name] for name in ("calls", "note", "history")] == [2, "frozen", [1.0, "a"]]
            assert torch.equal(state["importance"], torch.arange(3.0))
    assert same(train(other, fresh, 8, first=13), trained(21))


def reset_mean(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def reset_mean_in_place(state: dict[str, Any]) -> None:
    state["exp_avg"].zero_()


def reset_mean_in_low_precision(state: dict[str, Any]) -> None:
    state["exp_avg"] = torch.zeros_like(state["exp_avg"], dtype=torch.bfloat16)


def restart_count(state: dict[str, Any]) -> None:
    state["step"] = torch.tensor(1.0)


def restart_count_with_a_number(state: dict[str, Any]) -> None:
    state["step"] = 1


def restart_count_in_place(state: dict[str, Any]) -> None:
    state["step"].fill_(1)


@pytest.mark.parametrize(
    "changes",
    [
        (reset_mean, reset_mean_in_place, reset_mean_in_low_precision),
        (restart_count, restart_count_in_place, restart_count_with_a_number),
    ],
    ids=["mean", "count"],
)
def test_changed_entries_are_used(changes: tuple[Callable[[dict[str, Any]], None], ...]) -> None:
    ends = []
    for change in changes:
        model, optimizer = half_trained()
        for p in model.parameters():
            change(optimizer.state[p])
        train(model, optimizer, 1, first=12)
        ends.append(model)
    assert all(same(model, ends[0]) for model in ends)
    assert distance(ends[0], trained(13)) > 1e-2


@pytest.mark.parametrize("change", [{"exp_avg": torch.zeros(7)}, {"squared_slopes": torch.zeros(3)}, None], ids=str)
def test_entries_that_do_not_fit_are_an_error_before_anything_moves(change: dict[str, Tensor] | None) -> None:
    model, optimizer = half_trained()
    before, saved = weights(model), optimizer.state_dict()
    state = optimizer.state[list(model.parameters())[-2]]
    if change is None:
        del state["exp_avg_sq"]
    else:
        state.update(change)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^CustomOptimizer: `state` must .*; got .*\. \S"):
            train(model, optimizer, 1, first=12)
        assert all(torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))
    optimizer.load_state_dict(saved)
    assert same(train(model, optimizer, 1, first=12), trained(13))


@pytest.mark.parametrize("clear", [dict.clear, lambda state: None], ids=["emptied", "kept"])
def test_a_parameter_whose_state_is_emptied_starts_anew(clear: Callable[[dict[str, Any]], None]) -> None:
    model, optimizer = half_trained()
    p = list(model.parameters())[-2]
    clear(optimizer.state[p])
    train(model, optimizer, 1, first=12)
    assert int(optimizer.state[p]["step"]) == (1 if clear is dict.clear else 13)


def test_a_changed_entry_of_the_step_size_is_used() -> None:
    lengths = []
    for factor in (1.0, 0.5):
        model, optimizer = half_trained()
        optimizer.param_groups[0]["run"]["rate"] *= factor
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        train(model, optimizer, 1, first=12)
        lengths.append(float((nn.utils.parameters_to_vector(model.parameters()) - before).detach().norm()))
    assert lengths[1] < 0.9 * lengths[0]


def test_a_saved_state_does_not_follow_later_steps() -> None:
    model, optimizer = half_trained()
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    train(model, optimizer, 3, first=12)
    for index, state in kept["state"].items():
        assert all(torch.equal(value, saved["state"][index][name]) for name, value in state.items())
