"""The screen of optimizer variants: other constants, the choice without a family, rank correlation."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from analysis.__main__ import main
from analysis.optimizer_bench import runs, screen
from analysis.optimizer_bench.loading import compute_fingerprint, load_python
from analysis.optimizer_bench.screen import CHEAP, change_constants, correlate, estimate, leave_out
from analysis.optimizer_bench.workloads import FAMILIES, FAMILY, ROLE, ROLES
from tests.analysis.test_optimizer_bench import WORKLOAD_FILE, install_workloads

OPTIMIZER_FILE = """
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    first: float = 0.1
    pair: tuple[int, int] = (1, 2)


@dataclass(frozen=True)
class Shapes:
    size: int = 4


RATES, SHAPES = Rates(), Shapes()


class CustomOptimizer(torch.optim.SGD):
    def __init__(self, params, lr=None):
        super().__init__(params, lr or RATES.first)
"""
RATIOS = {
    "steady": {"a": 1.2, "b": 1.1, "c": 1.3, "d": 1.2},
    "one": {"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.0},
    "worst": {"a": 0.5, "b": 0.5, "c": 0.4, "d": 0.5},
}
OF = {"a": "x", "b": "y", "c": "z", "d": "z"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of optimizers and baselines, of a bench with four tiny workloads."""
    (tmp_path / "workloads.py").write_text(WORKLOAD_FILE)
    (tmp_path / "plain.py").write_text(OPTIMIZER_FILE)
    roles = {"a": "visible", "b": "tuning", "c": "tuning", "d": "tuning", "hidden": "test"}
    install_workloads(monkeypatch, tmp_path / "workloads.py", roles, OF | {"hidden": "hidden"})
    monkeypatch.setattr(screen, "CHEAP", ("a", "b", "c"))
    baseline = {"target": 1e-3, "steps": 30, "initial": 15.0, "max_steps": 30, "curve": [15.0]}
    baseline["fingerprint"] = compute_fingerprint("a", None)
    baselines = {"20": baseline | {"target": 0.5, "max_steps": 20}, "30": baseline}
    (tmp_path / "baselines.json").write_text(json.dumps(dict.fromkeys(roles, baselines)))
    return tmp_path


def run(folder: Path, *more: str) -> int:
    given = ["--baselines", str(folder / "baselines.json"), "--state", str(folder / "state.jsonl")]
    return main(["optimizer-screen", *more, *given, "--steps", "20,30", "--jobs", "1"])


def test_cheap_workloads_are_of_every_family_that_may_be_looked_at() -> None:
    assert {FAMILY[name] for name in CHEAP} == {*ROLES["visible"], *ROLES["tuning"]}
    assert {ROLE[name] for name in CHEAP} == {"visible", "tuning"}
    assert all(sum(name in CHEAP for name in family) <= 2 for family in FAMILIES.values())


def test_constants_are_changed_for_the_functions_that_read_them(folder: Path) -> None:
    source = change_constants(folder / "plain.py", "RATES.first=0.5,RATES.pair=(3, 4),SHAPES.size=7")
    (folder / "other.py").write_text(source)
    other = load_python("--optimizer", folder / "other.py")
    assert (other.RATES.first, other.RATES.pair, other.SHAPES.size) == (0.5, (3, 4), 7)
    optimizer = other.CustomOptimizer([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["lr"] == 0.5
    plain = load_python("--optimizer", folder / "plain.py")
    assert plain.RATES.first == 0.1


def test_the_choice_without_a_family_does_not_see_it() -> None:
    choices = {choice.family: choice for choice in leave_out(RATIOS, OF)}
    assert choices["x"].variant == "steady"  # the variant that is best on this family alone is not chosen for it
    assert (choices["x"].ratio, choices["x"].best) == pytest.approx((1.2, 9.0))
    assert choices["y"].variant == choices["z"].variant == "one"
    assert choices["z"].best == pytest.approx((1.3 * 1.2) ** 0.5)
    assert estimate([*choices.values()], OF, OF) == pytest.approx(statistics.geometric_mean([1.2, 1, 1, 1]))
    renamed = {name: {workload.upper(): ratio for workload, ratio in ratios.items()} for name, ratios in RATIOS.items()}
    again = leave_out(renamed, {workload.upper(): family for workload, family in OF.items()})
    assert again == [*choices.values()]


def test_rank_correlation() -> None:
    ratios = {f"{n}": {"a": 1.0 + n, "b": b, "c": c} for n, (b, c) in enumerate([(9, 2), (1, 3), (4, 1), (5, 9)])}
    every = [statistics.geometric_mean(ratio.values()) for ratio in ratios.values()]
    assert correlate(ratios, ["a"]) == pytest.approx(spearmanr([1, 2, 3, 4], every).statistic)
    assert correlate(ratios, ["a", "b", "c"]) == pytest.approx(1)
    assert correlate({name: ratios[name] for name in "01"}, ["a"]) is None


def test_screen(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(folder / "plain.py")
    variants = [file, f"{file}:RATES.first=0.05", f"{file}:RATES.first=0.07", f"{file}:RATES.first=1e30"]
    assert run(folder, *variants, "--json", str(folder / "few.json")) == 0
    few = json.loads((folder / "few.json").read_text())
    assert [*few["rows"]] == ["plain", *(f"plain RATES.first={rate}" for rate in ("0.05", "0.07", "1e30"))]
    assert {row["workload"] for row in few["rows"]["plain"]} == {"a", "b", "c"}
    assert {row["steps"] for row in few["rows"]["plain"]} == {20, 30}
    assert few["rows"]["plain RATES.first=1e30"][0]["ratio"] == pytest.approx(0.05)
    assert "rank_correlation" not in few
    assert [choice["family"] for choice in few["choices"]] == ["x", "y", "z"]
    out = capsys.readouterr().out.splitlines()
    ranked = [line.strip("| ").split(" | ") for line in out[2:6]]
    means = [float(line[1]) for line in ranked]
    assert means == sorted(means, reverse=True)
    assert ranked[-1][0].startswith("plain RATES.first=1e30")
    best = ranked[0][0].strip()
    assert any(line.startswith(f"Best on all: {best}, {means[0]:.3f}. Chosen without the family ") for line in out)

    assert run(folder, *variants, "--all", "--json", str(folder / "all.json")) == 0
    reported = json.loads((folder / "all.json").read_text())
    assert {row["workload"] for row in reported["rows"]["plain"]} == {"a", "b", "c", "d"}
    assert reported["rank_correlation"] == pytest.approx(1)  # equal workloads
    assert "correlation of the 3 cheap workloads with all 4: 1.00.\n" in capsys.readouterr().out
    monkeypatch.setattr(runs, "do", None)  # all is in the journal, of variants that are made again, too
    assert run(folder, *variants, "--json", str(folder / "again.json")) == 0
    assert json.loads((folder / "again.json").read_text()) == few


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("RATES.first", "`variants` must be FILE:NAME.field=value,...; got 'RATES.first'."),
        ("RATE.first=1", "`variants` must be one of RATES, SHAPES; got 'RATE'."),
        ("RATES.last=1", "`variants` must be one of first, pair; got 'last'."),
        ("RATES.first=x", "`variants` must have a literal as RATES.first; got 'x'."),
    ],
)
def test_errors(folder: Path, capsys: pytest.CaptureFixture[str], fields: str, message: str) -> None:
    assert run(folder, f"{folder / 'plain.py'}:{fields}") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"analysis optimizer-screen: {message}")
    assert captured.err.count("\n") == 1


def test_a_missing_file_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, f"{folder / 'none.py'}:RATES.first=1") == 2
    assert "`--optimizer` must be a Python file that can be imported; got " in capsys.readouterr().err
