"""Rows that several tensors hold are written once, and come back to the bit; what was written before is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet import solve
from protonet.files import Model, load_model, save_model
from protonet.files.model import HELD, describe_network, restore_network
from protonet.files.shared_rows import NARROWEST, SHARED, share_rows, unshare_rows
from protonet.views.radial import RadialView

DIM = 20


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    return torch.randn(60, DIM, generator=generator) + torch.randn(3, DIM, generator=generator)[y], y


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


@pytest.mark.parametrize("fault", ["number", "dtype", "gone", "width", "kind"])
def test_shared_rows_that_do_not_fit_are_refused(fault: str) -> None:
    rows = torch.randn(4, DIM).repeat(3, 1)
    found, shared = share_rows({"a": rows, "b": rows}, HELD)
    assert shared == {"a": DIM, "b": DIM}
    pool = f"{SHARED}{DIM}"
    faults = {
        "number": lambda: found.update(a=found["a"] + 1),
        "dtype": lambda: found.update(a=found["a"].long()),
        "gone": lambda: found.pop(pool),
        "width": lambda: found.update({pool: found[pool][:, 1:]}),
        "kind": lambda: shared.update(a="x"),  # type: ignore[dict-item]
    }
    faults[fault]()
    with pytest.raises(ValueError, match="shared rows"):
        unshare_rows(found, shared, HELD)


def test_a_file_holds_the_rows_of_all_views_once(tmp_path: Path) -> None:
    x, y = make_rows()
    network = solve((x, y), effort="fast")
    radial = [view for view in network.encoder.list_views() if isinstance(view, RadialView)]  # type: ignore[union-attr]
    assert len(radial) > 2
    path = tmp_path / "m.safetensors"
    save_model(path, Model(network, ("a", "b", "c"), None, {}, {}))
    assert path.stat().st_size < len(radial) * x.nbytes
    assert torch.equal(load_model(path).network(x), network(x))


def test_landmarks_of_older_files_are_read() -> None:
    x, y = make_rows()
    network = solve((x, y), effort="fast")
    structure, tensors = describe_network(network)
    views = network.encoder.list_views()  # type: ignore[union-attr]
    for number, view in enumerate(views):
        if isinstance(view, RadialView):
            del tensors[f"views.{number}.units"]
            tensors[f"views.{number}.landmarks"] = view.landmarks
    old = restore_network(structure, tensors)
    assert torch.equal(old(x), network(x))
    again, written = describe_network(old)
    assert torch.equal(restore_network(again, written)(x), network(x))
