"""Studies of cost: the data, the products, what a process takes, and what tables say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.__main__ import main
from analysis.commands import speed
from analysis.commands.folders import Timed, same_files, write_folder
from analysis.commands.folders import tabulate as tabulate_folders
from analysis.commands.speed import MIXED, measure, sample_columns, sample_table, tabulate, write_csv, write_parquet
from analysis.solver.laplacian import exact_distances, fit_all
from analysis.solver.scale import list_products, measure_prediction, sample_rows
from analysis.solver.training import OPTIMIZERS, VARIANTS
from protonet import solve
from protonet.datasets import sample_family
from protonet.encoder import Encoder
from protonet.fit.search import Search
from protonet.tables.features import choose_features
from protonet.tables.table import Wanted, read_table
from protonet.views import radial
from protonet.views.forest import ForestKind
from protonet.views.mlp import MLPKind
from protonet.views.radial import RadialView
from tests.analysis.conftest import Made, read_cells


def test_rows_are_isotropic() -> None:
    features, labels = sample_rows(4001, 2, 8)
    assert features.shape == (4001, 8)
    assert labels.bincount().tolist() == [2001, 2000]
    for label in (0, 1):
        rows = features[labels == label].double()
        assert rows.mean(0).norm() == pytest.approx(2.5, abs=0.1)
        torch.testing.assert_close(rows.T.cov(), 0.16 * torch.eye(8).double(), atol=0.03, rtol=0)


def test_the_products_are_those_of_the_views_in_use() -> None:
    x, y = sample_rows(40, 4, 6)
    network = solve([(x, y)], effort=Search().with_kind(MLPKind(1, (10,))).without(ForestKind))
    shapes = list_products(network)
    units = [(len(v.landmarks), 4) for v in network.encoder.views if isinstance(v, RadialView)]  # type: ignore[union-attr]
    assert shapes[0] == (network.prototypes.shape[1], 4)
    assert [shape for shape in shapes if shape in units] == units
    assert shapes[-2:] == [(6, 1), (1, 16)]
    seconds, bare = measure_prediction(network, x)
    assert min(seconds, bare) > 0  # which is larger is for a quiet machine to say


def test_sizes_are_measured_and_one_that_fails_is_named(
    make_report: Callable[[str], Made],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = make_report("scale").rows
    assert min(row[f"{name}_seconds"] for name in ("wall", "cpu")) > 0
    assert min(row[f"{name}_microseconds"] for name in ("predict", "bare")) > 0
    assert 50 < row["mib_before"] <= row["peak_memory_mib"]
    monkeypatch.setattr("analysis.shared.runner.run_python", lambda *_: (-9, "", "MemoryError"))
    assert main(["scale", "--rows", "5", "--classes", "3", "--state", str(tmp_path / "state")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("analysis scale: `--rows` must be what this machine can hold; got 5: exit code -9, MemoryE")


def test_rounding_keeps_classes_and_costs_are_told(make_report: Callable[[str], Made]) -> None:
    said = make_report("laplacian").table
    row = read_cells(said)[2]
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


def test_the_recipes_table_has_a_row_for_each_variant(make_report: Callable[[str], Made]) -> None:
    said = make_report("training").table
    assert all(f"| {name} " in said for name in (*VARIANTS, *OPTIMIZERS))
    default = next(line for line in said.splitlines() if line.startswith("| default "))
    assert float(default.split("|")[2]) > 80


def test_tables_are_read_back(tmp_path: Path) -> None:
    x, labels = sample_table(20, 3, 4)
    write_csv(tmp_path / "a.csv", x, labels)
    _, block = read_table(tmp_path / "a.csv", Wanted("label"))
    np.testing.assert_allclose(np.array(block.columns, float).T, x, rtol=1e-5)
    assert block.labels.tolist() == [f"class {label}" for label in labels]
    speed.write_rows(tmp_path / "a.npy", 10, 3)
    assert np.load(tmp_path / "a.npy").shape == (10, 3)


def test_mixed_columns_are_taken_for_what_they_are(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "a.parquet", 80, mixed=True)
    table, block = read_table(tmp_path / "a.parquet", Wanted("label"))
    features = choose_features(table, block, {}, keep="")
    assert features.encoding is not None
    kinds = dict.fromkeys(column.kind for column in features.encoding.columns)
    assert (len(features.encoding.columns), list(kinds)) == (MIXED, ["number", "category", "date"])
    numbers = sample_columns(80, 0, mixed=False)
    assert len(numbers) == MIXED + 1
    assert {values.dtype.kind for name, values in numbers.items() if name != "label"} == {"f"}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no module resource")
def test_a_process_is_measured() -> None:
    seconds, cpu, peak = measure(["-c", "bytearray(2**27)"])
    assert min(seconds, cpu) > 0
    assert 128 < peak < 512


def test_table() -> None:
    results = {
        "import torch": (2.0, 1.5, 200.0),
        "predict": (12.0, 11.5, 300.0),
        "a row's products": 0.5,
        "products": [(3, 4)],
        "rows": 10,
        "streamed": "predict",
        "load": "1.0",
    }
    text = tabulate(results)
    assert "| predict      | 12.0    | 11.5       | 300      |" in text
    assert "(3x4), " in text
    assert "5.0 s of the CPU for 10 rows" in text
    assert "2.30 times" in text
    assert "2.00 times without the start" in text


def test_paces_are_of_a_process_and_of_the_cpu() -> None:
    first, second = tabulate_folders([Timed("one", 1, 100, 10.0, 5.0, 1.0), Timed("two", 2, 400, 16.0, 25.0, 1.0)])
    assert (first["pace"], first["thrift"], first["share"]) == (10.0, 20.0, 100.0)
    assert (second["pace"], second["thrift"], second["share"]) == (12.5, 16.0, 80.0)


def test_the_first_files_are_linked_and_no_two_are_equal(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    size = write_folder(tmp_path, 3, 2, 5, 4)
    paths = sorted((tmp_path / "all").iterdir())
    assert size == sum(path.stat().st_size for path in paths)
    assert [path.name for path in sorted((tmp_path / "few").iterdir())] == [path.name for path in paths[:2]]
    tables = [parquet.read_table(path).to_pydict() for path in paths]
    assert len(tables[0]["x0"]) == 5
    assert tables[0] != tables[1]
    assert "label" in parquet.read_schema(tmp_path / "train.parquet").names


def test_a_file_that_differs_ends_the_study(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.csv").write_text(text, encoding="utf-8")
    same_files(tmp_path / "a", tmp_path / "a")
    with pytest.raises(AssertionError, match=r"x\.csv differs"):
        same_files(tmp_path / "a", tmp_path / "b")
