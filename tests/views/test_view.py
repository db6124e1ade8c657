"""The base classes of views: affine maps, and the validation of configs and tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protonet.views import VIEW_FAMILIES
from protonet.views.distances import batch_invariant_matmul
from protonet.views.view import LinearMap, LinearMapConfig, number_by_first_row
from tests.model_cases import make_network
from tests.strategies import blobs, seeds


@given(seed=seeds, rank=st.integers(0, 4))
def test_a_map_is_diagonal_plus_low_rank(seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, shift, gain = (torch.randn(shape, generator=generator) for shape in ((7, 4), (4,), (4,)))
    basis = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0][:, :rank]
    coefficient = torch.randn(rank, generator=generator)
    tensors = {"shift": shift, "gain": gain, "basis": basis, "coefficient": coefficient}
    mapping = LinearMap(LinearMapConfig(4, 4, rank, 0), tensors)
    dense = torch.diag(gain) + basis @ torch.diag(coefficient) @ basis.T
    torch.testing.assert_close(mapping(x), (x - shift) @ dense, atol=1e-5, rtol=1e-4)
    assert list(mapping.parameters()) == []
    again = LinearMap(LinearMapConfig.from_json(mapping.config.to_json()))
    again.load_state_dict(mapping.state_dict())
    assert torch.equal(again(x), mapping(x))


def test_every_view_has_a_unique_name_and_is_restored_from_its_config() -> None:
    names = [view.kind for _, view in VIEW_FAMILIES]
    assert len(set(names)) == len(names)
    x, _ = blobs(0)
    views = list(make_network(raw=True).encoder.list_views())  # type: ignore[operator]
    assert {view.kind for view in views} == set(names)
    for view in views:
        z = x if view.source is None else view.source(x)
        assert view(z).shape == (len(x), sum(view.sizes))
        restored = type(view)(view.config_type.from_json(view.config.to_json()), view.source)
        restored.check(view.state_dict())
        restored.load_state_dict(view.state_dict())
        assert torch.equal(restored(z), view(z))
        assert restored.sizes == view.sizes


def test_a_config_that_is_not_trusted_is_checked() -> None:
    cases: list[tuple[object, str]] = [
        (None, "entries other than"),
        ({"input_dim": 4, "dim": 4, "rank": 0}, "entries other than"),
        ({"input_dim": 4, "dim": 4, "rank": 0, "first": 0, "more": 1}, "entries other than"),
        ({"input_dim": True, "dim": 4, "rank": 0, "first": 0}, "no usable entry input_dim"),
        ({"input_dim": 4.0, "dim": 4, "rank": 0, "first": 0}, "no usable entry input_dim"),
        ({"input_dim": 4, "dim": 0, "rank": 0, "first": 0}, "an entry dim out of range"),
        ({"input_dim": 4, "dim": 4, "rank": 0, "first": 1}, "columns that are not there"),
    ]
    for entries, message in cases:
        with pytest.raises(ValueError, match=message):
            LinearMapConfig.from_json(entries)


def test_tensors_that_are_not_trusted_are_checked() -> None:
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({"gain": torch.zeros(3)}, "a tensor p.gain of another shape or type"),
        ({"gain": torch.zeros(4, dtype=torch.float64)}, "a tensor p.gain of another shape or type"),
        ({"gain": torch.full((4,), torch.nan)}, "a tensor p.gain that is not finite"),
        ({"gain": torch.full((4,), torch.inf)}, "a tensor p.gain that is not finite"),
        ({"more": torch.zeros(1)}, "tensors that belong to no part"),
    ]
    for change, message in cases:
        mapping = LinearMap(LinearMapConfig(4, 4, 0, 0))
        mapping.check(mapping.state_dict(), "p.")
        with pytest.raises(ValueError, match=message):
            mapping.check({**mapping.state_dict(), **change}, "p.")
        state = {name: tensor for name, tensor in mapping.state_dict().items() if name != "gain"}
        with pytest.raises(ValueError, match=r"no tensor p\.gain"):
            mapping.check(state, "p.")


def test_row_matmul_gives_a_row_the_same_digits_in_every_batch() -> None:
    for columns in (1, 5, 11, 15, 16, 40):
        draw = torch.Generator().manual_seed(columns)
        rows, matrix = torch.randn(256, 300, generator=draw), torch.randn(300, columns, generator=draw)
        full = batch_invariant_matmul(rows, matrix)
        torch.testing.assert_close(full, (rows.double() @ matrix.double()).float(), rtol=1e-4, atol=1e-4)
        for size in (16, 48, 128):
            some = torch.randint(0, 256, (size,), generator=draw)
            assert torch.equal(batch_invariant_matmul(rows[some], matrix), full[some]), columns


def test_classes_are_numbered_by_their_first_rows() -> None:
    labels = torch.tensor([7, 2, 7, 5, 2])
    numbers, classes = number_by_first_row(labels)
    assert numbers.tolist() == [0, 1, 0, 2, 1]
    assert torch.equal(classes[numbers], labels)
    assert torch.equal(number_by_first_row(9 - labels)[0], numbers)
