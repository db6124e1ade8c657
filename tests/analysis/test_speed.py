"""The speed study measures processes of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.real_data.sets import load_real_dataset
from analysis.solver.speed import Measurement, measure, split_rows, tabulate
from analysis.solver.speed_worker import MEASUREMENTS
from solution.pack import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the module resource is missing there")


def test_a_solve_and_its_growth_are_measured_and_tabulated(tmp_path: Path) -> None:
    iris = load_real_dataset("iris")
    fit = measure(Measurement("fit", "iris, 2", split_rows(iris.x, iris.y, 2), "fast"), ROOT, tmp_path)
    grow = MEASUREMENTS["grow"]({"sizes": np.array([60, 3, 8])}, "fast")
    assert min(fit["value"], grow["value"]) > 0
    assert fit["right"] > 0.7
    assert grow["memory"] > 50
    rows = [{"kind": "fit", "name": "iris, 2", "option": effort, "now": fit} for effort in ("fast", "default")]
    text = tabulate([*rows, {"kind": "grow", "name": "60 rows", "option": "fast", "now": grow}])
    assert text.count("\n| ... loss") == 2
