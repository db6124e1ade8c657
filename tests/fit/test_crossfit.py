from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from protonet.fit.candidates import Search
from torch import Tensor

from protonet.fit.crossfit import add_rows, count_rows, crossfit, pack, predict_held, predict_rivals, unpack, update
from protonet.fit.solver import Solution, fit_choice, solve, solve_problem
from protonet.metrics import measure
from tests.strategies import blobs

X, Y = blobs(0, rows=8, noise=0.8)
SOLUTION = solve_problem([(X, Y)], effort="fast")
CROSSED = crossfit(SOLUTION)
STRUCTURES, TENSORS = pack(CROSSED)


def test_the_solution_is_what_solve_returns_and_its_choice_fits_again() -> None:
    network = solve([(X, Y)], effort="fast")
    again = fit_choice(SOLUTION.problem, SOLUTION.choice)
    for other in (SOLUTION.network, again):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in network.state_dict().items())


def test_every_row_is_held_out_once_and_judged_by_a_network_of_the_other_rows() -> None:
    assert sorted(map(tuple, CROSSED.features.tolist())) == sorted(
        map(tuple, (SOLUTION.problem.features * SOLUTION.problem.scale).tolist())
    )
    logits, problem = predict_held(CROSSED), SOLUTION.problem
    for number, fitted in enumerate(CROSSED.folds):
        rows = CROSSED.fold == number
        others = (problem.features[:, None] * problem.scale != CROSSED.features[rows]).any(dim=2).all(dim=1)
        part = problem._replace(features=problem.features[others], labels=problem.labels[others])
        network = fit_choice(part, SOLUTION.choice)
        torch.testing.assert_close(logits[rows], network(CROSSED.features[rows]))
        assert fitted.counts.tolist() == torch.bincount(part.labels).tolist()


def test_held_out_rows_tell_the_accuracy_on_fresh_rows() -> None:
    held, new = [], []
    for seed in range(4):
        x, y = blobs(seed, rows=40, noise=1.2)
        solution = solve_problem([(x[:100], y[:100])], effort=Search(folds=3, radial=(), trees=0, rungs=0))
        crossed = crossfit(solution)
        held.append(measure(predict_held(crossed), crossed.labels).accuracy)
        new.append(measure(solution.network(x[100:]), y[100:]).accuracy)
    assert abs(np.mean(held) - np.mean(new)) < 3 * np.sqrt(0.25 / 400 + 0.25 / 400)


def test_rivals_are_judged_on_the_same_rows() -> None:
    for scores in predict_rivals(SOLUTION.problem).values():
        assert scores.shape == (len(CROSSED.labels), 5)
        assert measure(scores, CROSSED.labels).accuracy > 0.6


def test_adding_rows_is_what_all_rows_at_once_give() -> None:
    more, labels = blobs(9, classes=6)
    fitted = add_rows(CROSSED.whole, more[labels < 5], labels[labels < 5], 5)
    network = solve([(X, Y)], effort="fast")
    network.set_prototypes(torch.cat([X, more[labels < 5]]), torch.cat([Y, labels[labels < 5]]))
    torch.testing.assert_close(fitted.network(X), network(X), atol=1e-4, rtol=1e-4)
    added = add_rows(fitted, more[labels == 5], labels[labels == 5], 6)
    network.add_class(more[labels == 5])
    torch.testing.assert_close(added.network(X), network(X), atol=1e-4, rtol=1e-4)
    assert added.counts.tolist() == [14] * 5 + [6]


def test_counted_rows_leave_the_prototypes_as_they_were() -> None:
    network = copy.deepcopy(SOLUTION.network)
    fitted = count_rows(network, X, Y)
    torch.testing.assert_close(fitted.network.prototypes, SOLUTION.network.prototypes)


def test_an_update_shows_what_a_new_class_costs_the_others() -> None:
    near = X[Y == 2] + 0.01
    labels = torch.full((len(near),), 5)
    crossed = update(CROSSED, near, labels, 6)
    before, after = (measure(predict_held(each), CROSSED.labels) for each in (CROSSED, crossed))
    assert after.confusion[2, 5] > 0
    assert after.confusion[2, 2] < before.confusion[2, 2]
    far = measure(predict_held(update(CROSSED, -near, labels, 6)), CROSSED.labels)
    assert far.accuracy > after.accuracy


def test_packing_loses_nothing() -> None:
    crossed = unpack(copy.deepcopy(SOLUTION.network), STRUCTURES, {name: t.clone() for name, t in TENSORS.items()})
    assert torch.equal(predict_held(crossed), predict_held(CROSSED))
    assert crossed.gain == CROSSED.gain
    more = update(crossed, *blobs(3, classes=7), 7)  # what is unpacked can be added to
    assert torch.equal(predict_held(more), predict_held(update(CROSSED, *blobs(3, classes=7), 7)))
    assert more.whole.counts.tolist() == [14] * 5 + [6] * 2


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in TENSORS.items() if key != name}


@pytest.mark.parametrize(
    ("structures", "tensors", "message"),
    [
        (None, TENSORS, "no list of folds"),
        ([*STRUCTURES, {}], TENSORS, "no usable entry"),
        (STRUCTURES, without("sums"), "a network without its sums"),
        (STRUCTURES, without("1.counts"), "a network without its sums"),
        (STRUCTURES, without("fold"), "no rows that were held out"),
        (STRUCTURES, TENSORS | {"counts": TENSORS["counts"][:3]}, "sums of another shape or type"),
        (STRUCTURES, TENSORS | {"0.sums": TENSORS["0.sums"] * torch.inf}, "sums of another shape or type"),
        (STRUCTURES, TENSORS | {"features": TENSORS["features"][:, :3]}, "rows held out of another shape or type"),
        (STRUCTURES, TENSORS | {"labels": TENSORS["labels"] + 3}, "rows held out of no class or no fold"),
        (STRUCTURES, TENSORS | {"fold": TENSORS["fold"] - 1}, "rows held out of no class or no fold"),
        (STRUCTURES, TENSORS | {"gain": TENSORS["gain"] / 0}, "a gain that is no number"),
    ],
)
def test_what_is_not_a_crossfit_is_an_error(structures: Any, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(SOLUTION.network, structures, tensors)


def test_with_one_sample_a_class_nothing_is_held_out_and_samples_can_be_added_all_the_same() -> None:
    crossed = crossfit(solve_problem([(X[:5], torch.arange(5))], effort="fast"))
    assert not crossed.folds
    assert predict_held(crossed).shape == (0, len(crossed.whole.counts))
    assert predict_rivals(SOLUTION.problem._replace(labels=torch.arange(len(Y)), num_classes=len(Y))) == {}
    crossed = unpack(crossed.whole.network, *pack(crossed))
    assert len(update(crossed, X, Y, 8).whole.counts) == 8


def test_the_gain_is_what_more_rows_add_and_nothing_where_rows_are_many() -> None:
    few, labels = blobs(1, classes=8, rows=5, dim=20, noise=0.8)
    assert float(crossfit(solve_problem([(few, labels)], effort="fast")).gain) > 0
    many = blobs(1, rows=20)
    plain = Search(folds=3, radial=(), trees=0, rungs=0)
    assert float(crossfit(solve_problem([many], effort=plain)).gain) == 0
    two_folds = blobs(1, rows=2)
    assert float(crossfit(solve_problem([two_folds], effort=plain)).gain) == 0


def test_progress_is_told_and_no_global_state_is_touched() -> None:
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    told: list[float] = []
    solution: Solution = SOLUTION._replace(network=copy.deepcopy(SOLUTION.network))
    crossfit(solution, progress=lambda stage, share: told.append(share), deadline=0.0)
    assert told == sorted(told)
    assert told[0] == 0
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())
