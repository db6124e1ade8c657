"""Promises: figures beside limits, one line for each that does not hold, and the lowest versions."""

from __future__ import annotations

import re
import sys
import time

import pytest
from packaging.requirements import Requirement

from analysis.__main__ import main
from analysis.promises import measures
from analysis.promises.study import PROMISES, compare, list_broken
from solution.pack import ROOT


def test_figures_are_compared_with_the_promise_whose_name_fits() -> None:
    figures = iter([("import protonet", 0.01), ("import protonet.estimator", 99.0)])
    rows = list(compare("startup", figures))
    assert [(row.limit, row.holds) for row in rows] == [
        (PROMISES["startup"][row.promise].limit, i == 0) for i, row in enumerate(rows)
    ]
    (broken,) = list_broken(rows)
    assert re.fullmatch(r"import protonet\.estimator: 99 x is above [\d.]+", broken)
    low, high = compare("contest", iter([("score, ZIP", 95.0), ("score, single file", 95.81)]))
    assert (low.holds, high.holds) == (False, True)
    assert list_broken([low, high]) == ["score, ZIP: 95 is below 95.81"]


def test_a_broken_promise_is_a_line_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measures, "measure_versions", lambda: iter([("untested lowest versions", 2.0)]))
    with pytest.raises(SystemExit, match="1"):
        main(["promises", "--topics", "versions"])
    captured = capsys.readouterr()
    assert "| NO " in captured.out
    assert captured.err.splitlines()[-1] == "untested lowest versions: 2 is above 0"


def test_a_time_that_is_too_long_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([9.0, 0.5, *[9.0] * 5])
    monkeypatch.setattr(measures, "measure_startup", lambda: iter([("import protonet.estimator", next(figures))]))
    assert main(["promises", "--topics", "startup"]) == 0
    with pytest.raises(SystemExit, match="1"):
        main(["promises", "--topics", "startup"])


def test_ratios_of_cpu_times() -> None:
    def work(n: int) -> None:
        for _ in range(n):
            sum(range(1000))

    ratio = measures.ratio_of_cpu_times(lambda: work(3000), lambda: work(1000), 5)
    assert 2 < ratio < 4.5
    assert measures.ratio_of_cpu_times(lambda: time.sleep(0.05), lambda: work(1000), 1) < 0.5  # sleep takes no CPU time


def test_each_set_has_its_promises() -> None:
    for name in measures.SETS:
        assert {f"fit, {name}", f"prediction of 500 rows, {name}"} <= PROMISES["fits"].keys()
        *_, few_y, _ = measures.load_split(name, 5)
        assert set(map(int, few_y)) == set(range(int(few_y.max()) + 1))
        assert len(few_y) == 5 * (int(few_y.max()) + 1)
    assert {f"view, {name}" for name in measures.TIMED_VIEWS} == PROMISES["views"].keys()


def test_the_lowest_version_of_each_dependency_is_tested() -> None:
    assert measures.list_untested_minimums() == []
    lines = (ROOT / ".ci/lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all([part.operator for part in pin.specifier] == ["=="] for pin in pins)


def test_wrong_interpreters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promises", "--python", f"{sys.executable},nowhere"]) == 2
    assert capsys.readouterr().err.startswith("analysis promises: `--python` must be files, with commas; got 'nowhere'")
