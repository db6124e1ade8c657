"""Rows that several tensors hold are written once, and come back to the bit; what was written before is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet import PrototypeNetwork, solve
from protonet.encoder import Encoder
from protonet.files import Model, load_model, save_model
from protonet.files.header import HELD
from protonet.files.model import describe_network, restore_network
from protonet.files.shared_rows import NARROWEST, SHARED, share_rows, unshare_rows
from protonet.fit.search import EFFORTS
from protonet.views.radial import RadialView
from protonet.views.view import View

DIM = 20


def fit(dim: int) -> tuple[PrototypeNetwork, list[View], torch.Tensor]:
    """Return a network, its views, and the rows that it was fitted to."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, dim, generator=generator) + torch.randn(3, dim, generator=generator)[y]
    network = solve((x, y), effort=replace(EFFORTS["fast"], row_cost=0.0))
    assert isinstance(network.encoder, Encoder)
    return network, list(network.encoder.list_views()), x


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=12)), max_size=6),
    st.sampled_from([NARROWEST - 1, NARROWEST, 40]),
)
def test_what_is_shared_comes_back_to_the_bit(parts: list[tuple[bool, list[int]]], width: int) -> None:
    pool = torch.randn(10, width, generator=torch.Generator().manual_seed(1))
    pool[0, 0], pool[1] = -0.0, pool[0]
    pool[1, 0] = 0.0  # equal, and not the same
    tensors = {f"{HELD * held}{number}": pool[rows] for number, (held, rows) in enumerate(parts)}
    tensors |= {"bias": pool[0], "whole": torch.arange(width).repeat(9, 1)}
    tensors |= {
        f"{name} in half": tensor.half().view(torch.int16)
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    found, shared = share_rows(tensors, HELD)
    back = unshare_rows(found, shared, HELD)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].numpy().tobytes() == tensor.numpy().tobytes()
    read = {name: tensor for name, tensor in found.items() if not name.startswith(HELD)}
    for name, tensor in unshare_rows(read, shared, HELD).items():  # what predictions need needs nothing else
        assert tensor.numpy().tobytes() == tensors[name].numpy().tobytes()
    if width >= NARROWEST:
        size = sum(tensor.nbytes for tensor in found.values())
        assert size <= sum(tensor.nbytes for tensor in tensors.values())


POOL = f"{SHARED}{DIM}"


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"a": found["a"] + 1},  # a number that there is not
        lambda found: found | {"a": found["a"].long()},
        lambda found: found | {"a": torch.zeros(2**24, dtype=torch.int32)},  # a flood
        lambda found: found | {POOL: found[POOL][:, 1:]},
        lambda found: {name: tensor for name, tensor in found.items() if name != POOL},
    ],
)
def test_shared_rows_that_do_not_fit_are_refused(change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    rows = torch.randn(4, DIM).repeat(3, 1)
    found, widths = share_rows({"a": rows, "b": rows}, HELD)
    assert widths == {"a": DIM, "b": DIM}
    for tensors, shared in ((change(found), widths), (found, widths | {"a": "x"})):
        with pytest.raises(ValueError, match="shared rows"):
            unshare_rows(tensors, shared, HELD)


def test_a_file_holds_the_rows_of_all_views_once(tmp_path: Path) -> None:
    network, views, x = fit(400)
    radial = [view for view in views if isinstance(view, RadialView)]
    assert len(radial) > 2
    path = tmp_path / "m.safetensors"
    save_model(path, Model(network, ("a", "b", "c"), None, {}, {}))
    assert path.stat().st_size < len(radial) * x.nbytes
    assert torch.equal(load_model(path).network(x), network(x))


def test_landmarks_of_older_files_are_read() -> None:
    network, views, x = fit(DIM)
    structure, tensors = describe_network(network)
    for number, view in enumerate(views):
        if isinstance(view, RadialView):
            del tensors[f"views.{number}.units"]
            tensors[f"views.{number}.landmarks"] = view.landmarks
    old = restore_network(structure, tensors)
    assert torch.equal(old(x), network(x))
    again, written = describe_network(old)
    assert torch.equal(restore_network(again, written)(x), network(x))
