"""The command ``paper``, which compares a method with the usual ones: the content of its files, and its errors."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.episodes.evaluation.statistics import (
    EvaluationSummary,
    MeasureMean,
    MethodSummary,
    adjust_p_values,
    compare_method_pairs,
)
from protonet.episodes.paper import adjust_summary_p_values, rename_methods
from tests.episodes.cases import Command

MINE = """
from pathlib import Path
from typing import Annotated
import torch
from protonet.episodes import Episodes, SearchSpace
from protonet.episodes.methods.common import support_means

def near(episodes: Episodes, *, power: Annotated[float, SearchSpace((0.5, 2.0))] = 1.0) -> torch.Tensor:
    "Classify by a power of the distances."
    with Path("calls").open("a") as file:
        file.write("x")
    if Path("stop").exists() and episodes.support.shape[1] == 6:
        raise KeyboardInterrupt
    return -torch.cdist(episodes.query, support_means(episodes), p=power)
"""
RUN = "--dataset x.npz --way 3 --shot 1,2 --query 4 --episodes 40 --method protonet tim-adm:steps=2 ridge:penalty=1,9"
PAPER = f"paper mine.py:near {RUN} -o out"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a method, and 14 classes of 12 rows in random order; return the output folder."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    y = generator.permutation(np.repeat(np.arange(14), 12))
    x = generator.normal(size=(14, 5))[y] + 0.7 * generator.normal(size=(168, 5))
    split = np.array(["novel", "validation", "novel", "base"] * 4)[y]
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32), y=y, split=split)
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path / "out"


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """Decode an array as the guide does."""
    data = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"])


def check_going_on(command: Command, folder: Path) -> None:
    """Check that a stopped run continues to the same files, and computes nothing twice."""
    full = {path.name: path.read_bytes() for path in folder.glob("*.[jtp]*")}
    calls = Path("calls").stat().st_size
    for path in folder.glob("*.json"):
        path.unlink()
    command(PAPER)
    assert Path("calls").stat().st_size == calls
    assert {path.name: path.read_bytes() for path in folder.glob("*.[jtp]*")} == full
    for path in folder.glob("*-2*"):
        path.unlink()
    Path("stop").touch()
    out = command(PAPER, code=130)
    assert "| 1-shot" in out
    assert "| 2-shot" not in out
    assert command.error.endswith("interrupted; not finished: x.npz 2-shot\n")
    Path("stop").unlink()
    command(PAPER)
    assert {path.name: path.read_bytes() for path in folder.glob("*.[jtp]*")} == full
    command(PAPER, "--seed 1", code=2)
    assert "`--output` must continue the same run; got seed 1" in command.error


def test_predictions_are_of_the_rows_that_the_file_names_and_a_run_goes_on(command: Command, folder: Path) -> None:
    out = command(PAPER)
    data = np.load("x.npz")
    x, y = data["x"].astype(np.float64), data["y"]
    for shot in (1, 2):
        run = json.loads((folder / f"{shot}-shot.json").read_text(encoding="utf-8"))
        records = run["records"]
        support, query, labels, classes = (unpack(records[name]) for name in ("support", "query", "labels", "classes"))
        assert (support.shape, query.shape) == ((40, 3 * shot), (40, 12))
        labels_of = np.array(records["class_names"])[classes].astype(int)  # (episodes, ways)
        assert (y[support].reshape(40, 3, shot) == labels_of[:, :, None]).all()
        assert (y[query] == np.take_along_axis(labels_of, labels.astype(int), axis=1)).all()
        assert (data["split"][query] == "novel").all()
        means = x[support].reshape(40, 3, shot, 5).mean(axis=2)
        distances = ((x[query][:, :, None] - means[:, None]) ** 2).sum(axis=3)
        assert (distances.argmin(axis=2) == unpack(records["predicted"]["protonet"])).mean() > 0.999
        for name, selected in records["predicted"].items():
            assert (unpack(selected) == labels).sum(axis=1).tolist() == run["right"][name]
        assert {tuning["chosen"].partition(":p")[0] for tuning in run["tuning"]} == {"mine.py:near", "ridge"}
        assert {pair["first"] for pair in run["comparisons"]} == {run["settings"]["against"]}
        row = next(line for line in out.split(f"| {shot}-shot")[-1].splitlines() if line.startswith("| mine.py:near "))
        rate = run["methods"][run["settings"]["against"]]
        assert f"| {100 * rate['accuracy']:.2f} ±{100 * rate['half_width_classes']:.2f} ±" in row
    assert "adjusted by Holm for these 6 comparisons together" in out
    assert out.endswith((folder / "table.md").read_text(encoding="utf-8"))
    assert "| protonet" in command("compare out/1-shot.json")
    check_going_on(command, folder)


def test_the_appendix_describes_the_run(command: Command, folder: Path) -> None:
    command(PAPER, "--imbalance 2 --normalize l2 --query 3")
    text = (folder / "appendix.tex").read_text(encoding="utf-8")
    for shown in (
        "x.npz: 168 rows of 5 features in 14 classes: 3 base, 4 validation, 7 novel.",
        "normalized by l2",
        "queries: 9 in all, shared by a Dirichlet distribution of concentration 2. 40 and 40 episodes, drawn by seed 0",
        "mine.py:near; sha256 ",
        "Classify by a power of the distances.",
        "tim-adm:steps=2: Classify by prototypes",
        "``Meta-learning with differentiable closed-form solvers'' (2019)",
        "on the same 40 episodes of the kind above, of 4 validation classes",
        "jackknife",
        "-o out --imbalance 2",
    ):
        assert shown in text, shown
    assert not re.search(r"(?<!\\)[%_&#]", text)
    assert (folder / "table.tex").read_text(encoding="utf-8").count(r"\begin{tabular}{lrrrr}") == 2
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")


def test_errors_come_before_the_work(command: Command) -> None:
    for arguments, message in [
        (f"paper mine.py:far {RUN} -o out", "must be a function of its file; got 'mine.py:far'. It has near"),
        (f"{PAPER} --way 2-3", "`--way` must be one number; got 2-3"),
        (f"{PAPER} --way 5", r"`METHOD` must find 5 validation classes, .*; got 4\. Pass `--way` 4, or use data"),
        (f"{PAPER} --shot 1,1", "`--shot` must have each value once"),
        # Each query is recorded, and so episodes have equally many: `paper` has no --allow-small.
        (f"{PAPER} --imbalance 2 --query 5", "were all of one class.*an evaluation can also allow small classes"),
        (f"{PAPER} --normalize l3", "`--normalize` must be one of .*; got 'l3'"),
        (f"{PAPER} -o /proc/none", "`--output` must be a folder that can be written"),
    ]:
        command.refuses(message, arguments)
        assert not Path("calls").exists()


def summary_of(seed: int) -> EvaluationSummary:
    """Make a summary that compares a method with two others on a few episodes."""
    rows = torch.rand(3, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    accuracies = dict(zip("abc", rows + torch.tensor([[0.4], [0.0], [0.2]]), strict=True))
    methods = {name: MethodSummary(MeasureMean.from_values(values, None)) for name, values in accuracies.items()}
    return EvaluationSummary({"against": "a"}, 20, methods, compare_method_pairs(accuracies, against="a"))


def test_p_values_of_all_tables_are_adjusted_together() -> None:
    summaries = [summary_of(seed) for seed in (0, 1)]
    together = adjust_summary_p_values([rename_methods(summary, {"b": "renamed"}) for summary in summaries])
    pairs = [pair for summary in summaries for pair in summary.comparisons]
    adjusted = [pair for summary in together for pair in summary.comparisons]
    assert [pair.p_holm_episodes for pair in adjusted] == adjust_p_values([pair.p_value_episodes for pair in pairs])
    assert [pair.difference for pair in adjusted] == [pair.difference for pair in pairs]
    assert "renamed" in together[0].methods
    assert {pair.second for pair in together[0].comparisons} <= {"renamed", "c"}
