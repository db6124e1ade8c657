"""Cross-fits in model files come back, but for what rounding moves; and nothing in a file is trusted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from protonet.fit.crossfit import crossfit, predict_held
from protonet.fit.packing import pack, unpack
from protonet.fit.solver import solve_problem
from tests.fit.test_crossfit import CROSSED, SOLUTION, X, Y, updated
from tests.strategies import PLAIN, blobs

STRUCTURES, TENSORS = pack(CROSSED)


def test_packing_moves_no_probability_by_more_than_a_thousandth() -> None:
    wide = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) + 0.3 * torch.eye(4).repeat(10, 75)
    far = blobs(1, rows=8)[0].double() + 2.0**20  # columns that lie far from 0, with digits that float32 would lose
    for x, y in ((X, Y), (wide, torch.arange(40) % 4), (far, Y)):
        crossed = crossfit(solve_problem([(x, y)], effort="fast"))
        structures, tensors = pack(crossed)
        again = unpack(copy.deepcopy(crossed.whole), structures, {name: t.clone() for name, t in tensors.items()})
        assert torch.equal(again.features, crossed.features)
        assert again.offset == crossed.offset
        new = blobs(3, classes=7, dim=x.shape[1])
        for one, other in ((again, crossed), (updated(again, *new, 7), updated(crossed, *new, 7))):
            moved = predict_held(one).softmax(dim=1) - predict_held(other).softmax(dim=1)
            assert moved.abs().max() < 1e-3
        assert any(name.endswith("mixture") for name in tensors) == (x is wide)
        assert updated(again, *new, 7).whole.counts[-1] == 6


def test_a_sum_of_many_samples_keeps_the_digits_that_tell_one_more() -> None:
    x, y = blobs(0, rows=400)
    crossed = crossfit(solve_problem([(x, y)], effort=PLAIN))
    assert {pack(crossed)[1]["0.sums"].dtype, TENSORS["0.sums"].dtype} == {torch.float32, torch.float16}


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in TENSORS.items() if key != name}


@pytest.mark.parametrize(
    ("structures", "tensors", "message"),
    [
        (None, TENSORS, "no list of folds"),
        ([*STRUCTURES, {}], TENSORS, "no usable entry"),
        (STRUCTURES, without("0.sums"), "no tensor sums"),
        (STRUCTURES, without("1.counts"), "no tensor counts"),
        (STRUCTURES, without("fold"), "no rows that were held out"),
        (STRUCTURES, TENSORS | {"0.counts": TENSORS["0.counts"][:3]}, "sums of other classes than counts"),
        (STRUCTURES, TENSORS | {"0.counts": -TENSORS["0.counts"]}, "sums of other classes than counts"),
        (STRUCTURES, TENSORS | {"0.sums": TENSORS["0.sums"][:, :3]}, "a tensor sums of another shape or type"),
        (
            STRUCTURES,
            TENSORS | {f"0.{name}": TENSORS[f"0.{name}"][:3] for name in ("sums", "counts")},
            "folds of other",
        ),
        (STRUCTURES, TENSORS | {"0.sums": TENSORS["0.sums"] * torch.inf}, "a tensor sums that is not finite"),
        (STRUCTURES, TENSORS | {"rows": TENSORS["rows"][:, :3]}, "rows held out of another shape or type"),
        (STRUCTURES, TENSORS | {"0.sources.0.mixture": torch.ones(2, 2)}, "a mixture of other rows"),
        (STRUCTURES, TENSORS | {"rows": TENSORS["rows"].double()}, "rows held out of another shape or type"),
        (STRUCTURES, TENSORS | {"rows": TENSORS["rows"].long()}, "rows held out of another shape or type"),
        (STRUCTURES, TENSORS | {"labels": TENSORS["labels"] + 3}, "rows held out of no class or no fold"),
        (STRUCTURES, TENSORS | {"fold": TENSORS["fold"] - 1}, "rows held out of no class or no fold"),
        (STRUCTURES, TENSORS | {"offset": TENSORS["offset"] / 0}, "an offset that is no number"),
    ],
)
def test_what_is_not_a_crossfit_is_an_error(structures: Any, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(SOLUTION.network, structures, tensors)


def test_a_mixture_beside_a_shift_of_another_type_is_an_error() -> None:
    more = {"0.sources.0.mixture": torch.ones(len(TENSORS["rows"]), 1), "0.sources.0.shift": torch.zeros(8).double()}
    with pytest.raises(ValueError, match="a mixture of other rows"):
        unpack(SOLUTION.network, STRUCTURES, TENSORS | more)
