"""The cost of solve(): the data, a size's own process, the command."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.__main__ import main
from analysis.solver.scale import list_products, measure_prediction, sample_rows
from protonet import solve
from protonet.fit.search import Search
from protonet.views.forest import ForestKind
from protonet.views.mlp import MLPKind
from protonet.views.radial import RadialView


def test_rows_are_isotropic() -> None:
    features, labels = sample_rows(4001, 2, 8)
    assert features.shape == (4001, 8)
    assert labels.bincount().tolist() == [2001, 2000]
    for label in (0, 1):
        rows = features[labels == label].double()
        assert rows.mean(0).norm() == pytest.approx(2.5, abs=0.1)
        torch.testing.assert_close(rows.T.cov(), 0.16 * torch.eye(8).double(), atol=0.03, rtol=0)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    outputs = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "table.md")]
    outputs += ["--state", str(tmp_path / "state.jsonl")]
    assert main(["scale", "--rows", "12,6,12", "--classes", "3,8", "--dim", "4", *outputs]) == 0
    captured = capsys.readouterr()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["classes"], row["rows"]) for row in rows] == [(3, 6), (3, 12), (8, 12)]
    for row in rows:
        assert row["wall_seconds"] > 0
        assert row["cpu_seconds"] > 0
        assert row["predict_microseconds"] > 0
        assert row["bare_microseconds"] > 0
        assert 50 < row["mib_before"] <= row["peak_memory_mib"]
    made = "python -m analysis scale --classes 3,8 --rows 12,6,12 --dim 4"
    assert (tmp_path / "table.md").read_text() == f"{captured.out}\nMade by `{made}`.\n"
    assert [line.split()[3] for line in captured.out.splitlines()[2:5]] == ["6", "12", "12"]
    assert "on 1 thread." in captured.out
    assert "3/3" in captured.err


def test_the_products_are_those_of_the_views_in_use() -> None:
    x, y = sample_rows(40, 4, 6)
    network = solve([(x, y)], effort=Search().with_kind(MLPKind(1, (10,))).without(ForestKind))
    shapes = list_products(network)
    units = [(len(v.landmarks), 4) for v in network.encoder.views if isinstance(v, RadialView)]  # type: ignore[union-attr]
    assert shapes[0] == (network.prototypes.shape[1], 4)
    assert [shape for shape in shapes if shape in units] == units
    assert shapes[-2:] == [(6, 1), (1, 16)]
    seconds, bare = measure_prediction(network, x)
    assert seconds > bare > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "2"], "`--rows` must be a whole number >= 3; got '2'"),
        (["--rows", "x"], "`--rows` must be a whole number >= 2; got 'x'"),
        (["--classes", "1"], "`--classes` must be a whole number >= 2; got '1'"),
        (["--json", "/dev/null", "--markdown", "/dev/null"], "`--markdown` must be another file than --json"),
        (["--unknown"], "`arguments` must be as --help lists them"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["scale", "--classes", "3", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"analysis scale: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_size_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -9, "", "Traceback\nMemoryError")

    monkeypatch.setattr("analysis.shared.runner.subprocess.run", run)
    assert main(["scale", "--rows", "5", "--classes", "3", "--state", str(tmp_path / "state")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    expected = "analysis scale: `--rows` must be what this machine can hold; got 5: exit code -9, MemoryError."
    assert last == f"{expected} Pass fewer rows."
