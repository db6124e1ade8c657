"""What all views share: affine maps, and parts of files that may say anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protonet.encoder import Encoder
from protonet.views import KINDS
from protonet.views.distances import row_matmul
from protonet.views.view import LinearMap, Stored, View
from tests.model_cases import make_network
from tests.strategies import blobs, seeds


@given(seed=seeds, rank=st.integers(0, 4))
def test_a_map_is_diagonal_plus_low_rank(seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, shift, gain = (torch.randn(shape, generator=generator) for shape in ((7, 4), (4,), (4,)))
    basis = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0][:, :rank]
    coefficient = torch.randn(rank, generator=generator)
    mapping = LinearMap(shift, gain, basis, coefficient)
    dense = torch.diag(gain) + basis @ torch.diag(coefficient) @ basis.T
    torch.testing.assert_close(mapping(x), (x - shift) @ dense, atol=1e-5, rtol=1e-4)
    assert list(mapping.parameters()) == []
    assert mapping.products() == ([(4, rank), (rank, 4)] if rank else [])
    tensors = {f"a.{name}": tensor for name, tensor in mapping.named_buffers()}
    again = LinearMap.restore(Stored({}, tensors, "a."), 4)
    assert torch.equal(again(x), mapping(x))
    assert tensors == {}  # all are taken


def test_every_kind_has_a_name_of_its_own_and_tells_what_it_costs() -> None:
    names = [view.kind for _, view in KINDS]
    assert len(set(names)) == len(names)
    x, _ = blobs(0)
    views = list(make_network(raw=True).encoder.list_views())  # type: ignore[operator]
    assert {view.kind for view in views} == set(names)
    for view in views:
        z = x if view.source is None else view.source(x)
        assert view(z).shape == (len(x), sum(view.sizes))
        assert all(columns > 0 and rows > 0 for rows, columns in view.products())
        restored = type(view).restore(Stored(view.describe(), dict(view.own_tensors())), view.source, 8)
        assert torch.equal(restored(z), view(z))
        assert restored.sizes == view.sizes


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS])
def test_every_kind_knows_every_effort(kind: Any) -> None:
    for effort in ("fast", "default", "best"):
        found = kind.for_effort(effort)
        assert type(found) is kind
        assert hash(found) == hash(kind.for_effort(effort))
        assert found.share > 0
        assert found.stage


def test_a_view_has_to_say_what_it_does() -> None:
    view = View(None, (3,))
    for call in (
        lambda: view(torch.zeros(1, 3)),
        lambda: view.restore(Stored({}, {}), None, 3),
        lambda: view.add_to_graph(None, "x"),  # type: ignore[arg-type]
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert view.describe() == {}
    assert view.products() == []


@pytest.mark.parametrize(
    ("description", "name", "kind"),
    [(None, "a", int), ([], "a", int), ({}, "a", int), ({"a": True}, "a", int), ({"a": 1}, "a", float)],
)
def test_an_entry_is_of_its_very_type(description: Any, name: str, kind: type) -> None:
    with pytest.raises(ValueError, match=r"^no usable entry a$"):
        Stored(description, {}).entry(name, kind)


def test_a_whole_number_is_within_its_range() -> None:
    stored = Stored({"a": 3, "b": 2.0}, {})
    assert stored.whole("a", 3) == stored.whole("a", 5, low=3) == 3
    for high, low in ((2, 0), (9, 4)):
        with pytest.raises(ValueError, match="an entry a out of range"):
            stored.whole("a", high, low=low)
    with pytest.raises(ValueError, match="no usable entry b"):
        stored.whole("b", 9)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2), "a tensor p.a of another shape or type"),
        (torch.zeros(2, 4), "a tensor p.a of another shape or type"),
        (torch.zeros(2, 3, dtype=torch.float64), "a tensor p.a of another shape or type"),
        (torch.full((2, 3), torch.nan), "a tensor p.a that is not finite"),
        (torch.full((2, 3), torch.inf), "a tensor p.a that is not finite"),
        (None, "no tensor p.a"),
    ],
)
def test_a_tensor_is_of_its_shape_and_type_and_finite(tensor: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stored({}, {} if tensor is None else {"p.a": tensor}, "p.").take("a", None, 3)


def test_what_is_taken_is_gone_and_thresholds_may_be_infinite() -> None:
    threshold = torch.tensor([0.5, torch.inf])
    stored = Stored({}, {"a": threshold, "b": torch.tensor([True, False])})
    assert stored.take("a", None, infinite=True) is threshold
    assert stored.take("b", 2, dtype=torch.bool).tolist() == [True, False]
    assert stored.tensors == {}
    for bad in (-torch.inf, torch.nan):
        with pytest.raises(ValueError, match="a tensor a that is not finite"):
            Stored({}, {"a": torch.tensor([bad])}).take("a", 1, infinite=True)
    odd = torch.tensor([0, 2], dtype=torch.uint8).view(torch.bool)
    with pytest.raises(ValueError, match="a tensor a that is not of yes and no"):
        Stored({}, {"a": odd}).take("a", 2, dtype=torch.bool)


def test_only_what_is_trained_has_parameters() -> None:
    encoder = make_network().encoder
    assert isinstance(encoder, Encoder)
    assert {view.kind for view in encoder.list_views() if any(True for _ in view.parameters())} == {"mlp"}


@pytest.mark.parametrize("columns", [1, 5, 11, 15, 16, 40])
def test_row_matmul_gives_a_row_the_same_digits_in_every_batch(columns: int) -> None:
    draw = torch.Generator().manual_seed(columns)
    rows, matrix = torch.randn(256, 300, generator=draw), torch.randn(300, columns, generator=draw)
    whole = row_matmul(rows, matrix)
    torch.testing.assert_close(whole, (rows.double() @ matrix.double()).float(), rtol=1e-4, atol=1e-4)
    for size in (16, 48, 128):
        some = torch.randint(0, 256, (size,), generator=draw)
        assert torch.equal(row_matmul(rows[some], matrix), whole[some])
