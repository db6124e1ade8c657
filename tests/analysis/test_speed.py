"""The speed study measures processes of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.solver.speed import Work, measure, split_rows, tabulate
from protonet.datasets import load_digits
from solution.pack import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the module resource is missing there")


def test_a_solve_and_its_growth_are_measured_and_tabulated(tmp_path: Path) -> None:
    digits = load_digits()
    works = [Work("fit", "digits, 2", split_rows(digits.x, digits.y, 2), effort) for effort in ("fast", "default")]
    works.append(Work("grow", "60 rows", {"sizes": np.array([60, 3, 8])}, "fast"))
    measured = [measure(work, ROOT, tmp_path) for work in works]
    assert all(values["value"] > 0 for values in measured)
    assert measured[0]["right"] > 0.3
    assert measured[2]["memory"] > 50
    rows = [
        {"kind": work.kind, "name": work.name, "option": work.option, "now": values}
        for work, values in zip(works, measured, strict=True)
    ]
    assert tabulate(rows).count("\n| ... loss") == 2
