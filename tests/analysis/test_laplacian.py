from __future__ import annotations

import pytest
import torch

from analysis.__main__ import main
from analysis.solver.laplacian import exact_distances, fit_all, percent
from protonet.datasets import sample_family
from protonet.encoder import Encoder
from protonet.views import radial
from protonet.views.radial import RadialView


def test_the_table_tells_what_rounding_costs_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "64", "--dim", "48", "--classes", "20", "--shots", "20", "--held", "5"]
    assert main(["laplacian", "--family", "isotropic", *sizes]) == 0
    said = capsys.readouterr().out
    row = [cell.strip() for cell in said.splitlines()[2].split("|")[1:-1]]
    assert row[0] == "isotropic"
    assert all(float(cell.rstrip(" %")) > 0 for cell in row[1:])
    assert float(row[-1].rstrip(" %")) >= 99
    assert "3 of them Laplacian, of at most 400 units" in " ".join(said.split())


def test_distances_are_exact_within_and_rounded_before_and_after() -> None:
    split = sample_family("isotropic", seed=1, n_train=20, num_classes=20, dim=48)
    network = fit_all(split.train_x, split.train_y, 20)
    assert isinstance(network.encoder, Encoder)
    laplacian = [view for view in network.encoder.list_views() if isinstance(view, RadialView) and view.norm == 1]
    before, rounded = radial.RADIAL, [view._count_terms() for view in laplacian]
    with exact_distances():
        assert [view._count_terms() for view in laplacian] == [None] * 3
    assert radial.RADIAL is before
    assert None not in rounded


def test_percent_is_the_share_of_hits() -> None:
    assert percent(torch.tensor([True, False, True, True])) == 75
