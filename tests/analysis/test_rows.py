"""Made tables keep every row through the commands, however they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.commands.rows import Found, tabulate, try_table
from protonet._checks import find_version

NEEDS = {"parquet": "pyarrow", "xlsx": "openpyxl"}


@pytest.mark.parametrize("seed", range(13))
def test_a_prediction_for_every_row_in_order(seed: int, tmp_path: Path) -> None:
    for package in NEEDS.values():
        if find_version(package) is None:
            pytest.skip(f"needs {package}")
    found = try_table(seed, tmp_path)
    assert found.refused == ""
    assert found == Found(found.kind, True, found.rows, found.rows, True, True, True, "")


def test_sums() -> None:
    lost = Found("csv", True, 9, 8, False, True, True, "")
    refused = Found("xlsx", False, 9, 0, False, False, False, "fit: no")
    *_, line = tabulate([lost, refused])
    assert (line["name"], line["tables"], line["fitted"], line["rows"]) == ("all", 2, 1, 18)
    assert (line["predictions"], line["same"], line["evaluated"], line["refused"]) == (8, 0, 1, 1)
