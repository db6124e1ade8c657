"""Views of a span of features: they equal the views of a table that has these columns alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from protonet.fit.search import EFFORTS
from protonet.fit.solver import fit_solution
from protonet.views.kernel_ridge import KernelRidgeSpec
from protonet.views.linear import FEATURE_SCALINGS, LinearSpec
from protonet.views.view import LinearMap, LinearMapConfig, TrainingRows
from tests.strategies import accuracy

SPAN = (3, 8)


def draw_rows() -> TrainingRows:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 3
    x = torch.randn(24, 10, generator=generator)
    x[:, 3:8] += 2 * torch.randn(3, 5, generator=generator)[labels]
    return TrainingRows(x, labels, 3, column_indices=torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 4]))


def cut(rows: TrainingRows) -> TrainingRows:
    blocks = None if rows.column_indices is None else rows.column_indices[slice(*SPAN)] - 1
    return replace(rows, features=rows.features[:, slice(*SPAN)], column_indices=blocks)


def test_a_linear_view_of_a_span_is_that_of_its_columns() -> None:
    for scaling in FEATURE_SCALINGS:
        rows = draw_rows()
        some, alone = LinearSpec(scaling, SPAN).fit(rows), LinearSpec(scaling).fit(cut(rows))
        torch.testing.assert_close(some.source(rows.features), alone.source(cut(rows).features))
        torch.testing.assert_close(some(some.source(rows.features)), alone(alone.source(cut(rows).features)))
        assert LinearSpec(scaling, SPAN).name == f"{scaling} 3-7", scaling


def test_a_kernel_ridge_view_of_a_span_is_that_of_its_columns() -> None:
    rows = draw_rows()
    result = []
    for training, span in ((rows, SPAN), (cut(rows), None)):
        source = LinearSpec("standardised", span)
        fitted = source.fit(training)
        view = KernelRidgeSpec(source, 2).fit(training, fitted.source)
        result.append(view(fitted.source(training.features)))
    torch.testing.assert_close(*result)


def test_noise_columns_do_not_hide_an_informative_span() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(120) % 3
    x = torch.randn(120, 200, generator=generator)
    x[:, 50:56] += 1.5 * torch.randn(3, 6, generator=generator)[labels]
    right = []
    for spans in ([], [(0, 50), (50, 56), (56, 200)]):
        search = replace(EFFORTS["fast"], shifts=False)
        solution = fit_solution((x[:30], labels[:30]), effort=search, column_spans=spans)
        with torch.no_grad():
            right.append(accuracy(solution.network(x[30:]), labels[30:]))
    assert right[1] > right[0] + 0.05


def test_a_map_of_columns_that_are_not_there_is_refused() -> None:
    tensors = {"shift": torch.zeros(5), "gain": torch.ones(5), "basis": torch.zeros(5, 0)}
    tensors["coefficient"] = torch.zeros(0)
    restored = LinearMap(LinearMapConfig(8, 5, 0, 3), tensors)
    torch.testing.assert_close(restored(torch.arange(16.0).view(2, 8)), torch.arange(16.0).view(2, 8)[:, 3:])
    for input_dim, first in ((8, 4), (8, -1), (4, 0)):
        with pytest.raises(ValueError, match=r"columns that are not there|first out of range"):
            LinearMapConfig(input_dim, 5, 0, first)
