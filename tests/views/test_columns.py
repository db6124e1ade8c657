from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protonet.errors import InputError
from protonet.estimator import ProtoNetClassifier
from protonet.files import Model, export_onnx, load_model, save_model
from protonet.fit.solver import fit_solution, solve
from protonet.views.columns import ColumnSelection, _is_unlikely_by_chance, select_columns
from tests.strategies import load_wine_split

N_ROWS = 24
LABELS = torch.arange(N_ROWS) % 3


def draw(seed: int, dim: int = 5) -> Tensor:
    return torch.randn(N_ROWS, dim, generator=torch.Generator().manual_seed(seed)).exp()


@given(st.integers(0, 99), st.lists(st.sampled_from([-1.0, 1.0]), min_size=5, max_size=5))
def test_signs_copies_and_constants_do_not_change_what_views_read(seed: int, signs: list[float]) -> None:
    x = draw(seed)
    selected = select_columns(x, LABELS)
    other = torch.cat([x * torch.tensor(signs), -x, torch.full((N_ROWS, 1), 3.5)], dim=1)
    of_other = select_columns(other, LABELS)
    assert selected is not None
    assert of_other is not None
    assert of_other.indices.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(of_other.apply(other), selected.apply(x))


def test_a_negated_copy_of_counts_is_a_copy() -> None:
    """A zero times -1 is -0.0, which is equal to 0.0 but for its bytes."""
    generator = torch.Generator().manual_seed(0)
    counts, other = torch.randint(3, (60,), generator=generator).float(), torch.randn(60, generator=generator)
    for first, second in ((counts, 0 - counts), (0 - counts, counts), (counts, -counts)):
        selected = select_columns(torch.stack([first, second, other], dim=1), torch.arange(60) % 2)
        assert selected is not None
        assert selected.indices.tolist() == [0, 2]


def test_a_symmetric_column_has_the_sign_of_its_correlation_with_the_class() -> None:
    x = torch.stack([(LABELS - 1).float(), torch.rand(N_ROWS, generator=torch.Generator().manual_seed(0))], dim=1)
    for sign in (1.0, -1.0):
        selected = select_columns(sign * x, LABELS)
        assert selected is not None
        assert selected.apply(sign * x)[:, 0].tolist() == x[:, 0].tolist()


def test_columns_of_several_features_are_compared_as_a_whole() -> None:
    levels = torch.nn.functional.one_hot(torch.arange(N_ROWS) * 7 % 4).float()
    x = torch.cat([levels, -draw(0, 1), levels, levels[:, :1]], dim=1)
    blocks = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2, 3])
    selected = select_columns(x, LABELS, None, blocks)
    assert selected is not None
    assert selected.indices.tolist() == [0, 1, 2, 3, 4, 9]
    assert selected.signs.tolist() == [1, 1, 1, 1, -1, 1]
    assert selected.select_span(0, 4) == (0, 4)
    assert selected.select_span(5, 9) == (5, 5)


def test_columns_that_may_be_equal_by_chance_are_no_copies() -> None:
    of_class = (LABELS == 1).float()
    assert not _is_unlikely_by_chance(of_class[:, None].numpy(), LABELS.numpy())  # each follows from the class
    x = torch.stack([of_class, of_class, *draw(0, 2).T], dim=1)
    selected = select_columns(x, LABELS)
    assert selected is not None
    assert selected.indices.tolist() == [0, 1, 2, 3]
    # Of C(8, 4) orders of the values of eight rows of each class, one is equal.
    values = (torch.arange(N_ROWS) < N_ROWS // 2).float()[:, None].numpy()
    assert _is_unlikely_by_chance(values, LABELS.numpy()) == (math.comb(8, 4) ** -3 < 1e-6)


@pytest.mark.parametrize("dim", [65, 200])
def test_embeddings_series_and_features_without_variance_are_used_as_they_are(dim: int) -> None:
    assert select_columns(draw(0, dim), LABELS) is None
    assert select_columns(torch.ones(N_ROWS, 3), LABELS) is None
    steps = torch.randn(N_ROWS, 32, generator=torch.Generator().manual_seed(1))
    assert select_columns(steps.cumsum(dim=1), LABELS) is None


def change(x: pd.DataFrame, how: str) -> pd.DataFrame:
    if how == "sign":
        return x.assign(ash=-x["ash"], hue=-x["hue"])
    if how == "copies":
        return pd.concat([x, x.add_suffix(" copy")], axis=1)
    return x.assign(constant=3.5)


def wine() -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    from sklearn.datasets import load_wine

    x, y, _ = load_wine_split()
    return pd.DataFrame(x, columns=load_wine().feature_names), y, np.arange(len(y)) % 3 == 0


@pytest.mark.parametrize("how", ["sign", "copies", "constant"])
@pytest.mark.parametrize("with_category", [False, True])
def test_probabilities_depend_neither_on_signs_nor_on_copies_nor_on_constants(how: str, with_category: bool) -> None:
    x, y, train = wine()
    if with_category:
        x = x.assign(kind=np.where(x["alcohol"] > 13, "strong", "light"))
        x.loc[::7, "ash"] = np.nan
    expected = ProtoNetClassifier().fit(x[train], y[train]).predict_proba(x[~train])
    changed = change(x, how)
    actual = ProtoNetClassifier().fit(changed[train], y[train]).predict_proba(changed[~train])
    np.testing.assert_array_equal(actual, expected)


def test_a_network_of_selected_columns_is_saved_updated_and_exported(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    x = torch.cat([draw(0), -draw(0), torch.ones(N_ROWS, 1)], dim=1)
    network = solve([(x, LABELS)])
    assert network.encoder.columns.tolist() == [0, 1, 2, 3, 4]  # type: ignore[operator]
    model = Model(network=network, classes=(0, 1, 2))
    save_model(tmp_path / "model", model)
    restored = load_model(tmp_path / "model").network
    with torch.no_grad():
        expected = network(x)
        assert torch.equal(restored(x), expected)
        assert torch.equal(torch.compile(network, backend="eager")(x), expected)
    export_onnx(tmp_path / "model.onnx", model)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["logits"], {"features": x.numpy()})[0], expected.numpy(), atol=1e-4)
    new = torch.full((2, x.shape[1]), 9.0)
    assert network.add_class(new) == 3
    assert network(new).argmax(dim=1).tolist() == [3, 3]


def test_spans_of_dropped_columns_have_no_view() -> None:
    x = torch.cat([draw(0), draw(0)], dim=1)
    solution = fit_solution([(x, LABELS)], column_spans=[(0, 5), (5, 10)])
    again = fit_solution([(x[:, :5], LABELS)], column_spans=[(0, 5)])
    assert torch.equal(solution.network(x), again.network(x[:, :5]))


@pytest.mark.parametrize("columns", [[0, 0], [1, 0], [-1, 0], [0, 9]])
def test_columns_that_are_not_there_are_refused(tmp_path: Path, columns: list[int]) -> None:
    x = torch.cat([draw(0, 2), draw(0, 2)], dim=1)
    network = solve([(x, LABELS)])
    network.encoder.columns = torch.tensor(columns)
    with pytest.raises(InputError, match="columns that are not there"):
        save_model(tmp_path / "model", Model(network=network, classes=(0, 1, 2)))


def test_a_selection_moves_to_a_device() -> None:
    selection = ColumnSelection(torch.tensor([1]), torch.tensor([-1.0]))
    assert selection.to(torch.device("meta")).signs.device.type == "meta"
