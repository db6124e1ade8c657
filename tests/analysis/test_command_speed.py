"""What the study of the commands measures, and what it says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.commands.speed import (
    MIXED,
    measure,
    sample_columns,
    sample_table,
    tabulate,
    write_csv,
    write_parquet,
    write_rows,
)
from protonet.tables.features import choose_features
from protonet.tables.table import Wanted, read_table


def test_tables_are_read_back(tmp_path: Path) -> None:
    x, labels = sample_table(20, 3, 4)
    write_csv(tmp_path / "a.csv", x, labels)
    _, block = read_table("cmd", tmp_path / "a.csv", Wanted("label"))
    np.testing.assert_allclose(np.array(block.columns, float).T, x, rtol=1e-5)
    assert block.labels.tolist() == [f"class {label}" for label in labels]
    write_rows(tmp_path / "a.npy", 10, 3)
    assert np.load(tmp_path / "a.npy").shape == (10, 3)


def test_mixed_columns_are_taken_for_what_they_are(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "a.parquet", 80, mixed=True)
    table, block = read_table("cmd", tmp_path / "a.parquet", Wanted("label"))
    features = choose_features("cmd", table, block, {}, named=False)
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
