"""The command ``compare``: the files of several runs are compared episode by episode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.episodes.__main__ import main
from tests.episodes.cases import Command

KIND = "--way 3 --query 4 --episodes 60"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write features, and the files of some runs on them. Runs a and b have the same episodes."""
    folder = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(8), 12)
    x = generator.normal(size=(8, 5))[y] + 0.8 * generator.normal(size=(96, 5))
    np.savez(folder / "x.npz", x=x.astype(np.float32), y=y)
    np.savez(folder / "moved.npz", x=x[::-1].astype(np.float32), y=y[::-1].copy())
    np.savez(folder / "other.npz", x=(x + 0.1).astype(np.float32), y=y)
    for name, data, more in (
        ("a", "x", "protonet ridge"),
        ("b", "x", "soft-kmeans protonet"),
        ("longer", "x", "protonet mahalanobis --episodes 80"),
        ("seed", "x", "tim:steps=1 --seed 1"),
        ("other", "other", "soft-kmeans"),
        ("moved", "moved", "soft-kmeans"),
        ("ways", "x", "protonet ridge --way 2-4 --shot 1-9 --allow-small"),
    ):
        arguments = f"--dataset {folder}/{data}.npz {KIND} --method {more} --json {folder}/{name}.json"
        assert main(arguments.split()) == 0
    return folder


@pytest.fixture(autouse=True)
def _(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def read(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(Path(f"{name}.json").read_text(encoding="utf-8"))
    return results


def compare(*names: str) -> str:
    """Return the arguments of the command that compares the files of runs."""
    return " ".join(["compare", *(name if name.startswith("-") else f"{name}.json" for name in names)])


def list_cells(out: str) -> list[list[str]]:
    """List the first five cells of each row of a table, without its heading."""
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in out.splitlines()]
    return [row for row in rows if len(row) == 5][2:]


def test_counts_of_right_queries_agree_with_the_accuracies() -> None:
    for name in ("a", "ways"):
        results = read(name)
        queries = np.broadcast_to(results["queries"], results["episodes"])
        for method, right in results["right"].items():
            assert np.isclose(np.mean(right / queries), results["methods"][method]["accuracy"])
    assert Path("a.json").read_text(encoding="utf-8").count("\n") < 110  # counts are a line for each method


def test_runs_of_the_same_episodes_are_paired(command: Command, tmp_path: Path) -> None:
    tables = f"--latex {tmp_path}/a.tex --markdown {tmp_path}/a.md"
    out = command(compare("a", "b"), tables)
    assert out.startswith("60 episodes of 8 classes\n")
    assert out.count("| protonet ") == 1  # both runs have it, with equal results
    assert "Holm for 3 pairs" in out
    assert "calibration" not in out
    markdown, latex = ((tmp_path / name).read_text(encoding="utf-8") for name in ("a.md", "a.tex"))
    assert markdown in out
    assert latex.count(r"\pm") == markdown.count("±")
    assert latex.startswith(r"\begin{tabular}{lrrrr}")
    assert "2 comparisons of ridge with another" in command(compare("a", "b", "--against=ridge"))
    full = command("--dataset x.npz", KIND, "--method protonet ridge soft-kmeans")
    assert list_cells(out) == list_cells(full)  # one run of all of them says the same


def test_a_longer_run_is_compared_by_its_first_episodes(command: Command) -> None:
    assert "p over episodes (Holm)" in command(compare("ways"))  # of unequal ways
    out = command(compare("longer", "a"))
    assert "The first 60 episodes are compared, which all files have." in out
    assert out.count("| protonet ") == 1
    assert "| mahalanobis" in out


def test_compared_runs_may_differ_in_base_rows_and_normalisation(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    command("--dataset x.npz", KIND, f"--method ridge --base other.npz --normalize cl2 --json {file}")
    out = command("compare a.json", file)
    assert f"| ridge ({file}) " in out  # of other features than the ridge of a.json
    right = json.loads(file.read_text(encoding="utf-8"))["right"]["ridge"]
    (shown,) = re.findall(rf"\| ridge \({re.escape(str(file))}\) +\| (\S+)", out)
    assert np.isclose(float(shown), sum(right) / 7.2, atol=0.01)


def test_a_method_with_two_results_is_listed_once_per_file(command: Command, tmp_path: Path) -> None:
    results = read("b")
    results["right"]["protonet"] = results["right"]["protonet"][::-1]
    results["versions"]["torch"] = "0.1"
    (tmp_path / "c.json").write_text(json.dumps(results), encoding="utf-8")
    out = command("compare a.json", tmp_path / "c.json")
    assert f"| protonet ({tmp_path / 'c.json'})" in out
    assert "| protonet (a.json)" in out
    assert "Versions of torch differ: " in out


def test_errors(command: Command) -> None:
    for names, message in [
        ("a b a", "`FILE.json` must be named once; got .*a.json again. Leave one out."),
        ("a seed", "must be of the same episodes; got seed 0 in .*a.json and 1 in .*seed.json"),
        ("a ways", r"got way \[3, 3\] in .* and \[2, 4\] in "),
        ("a other", "must be of the same data; got others in "),
        ("a moved", "must be of the same data"),
        ("a absent", r"^protonet.episodes compare: no such file: .*absent\.json$"),
        ("a --against=rigde", "`--against` must be one of ridge, .*Did you mean ridge"),
    ]:
        command.refuses(message, compare(*names.split()))


def test_damaged_files_are_refused(command: Command, tmp_path: Path) -> None:
    good, path = read("a"), tmp_path / "bad.json"
    for content in (
        "",
        "[]",
        "{}",
        "3",
        json.dumps(good)[:-9],
        json.dumps(good | {"right": {}}),
        json.dumps(good | {"right": {"a": [1] * 59}}),
        json.dumps(good | {"right": {"a": [13] * 60}}),
        json.dumps(good | {"right": {"a": ["x"] * 60}}),
        json.dumps(good | {"queries": [1, 2]}),
        json.dumps(good | {"classes": 3}),
        json.dumps(good | {"class_indices": [0]}),
        *(json.dumps({key: good[key] for key in good if key != name}) for name in ("right", "class_indices")),
    ):
        path.write_text(content, encoding="utf-8")
        command.refuses("`FILE.json` must", "compare", path)
    path.write_text(json.dumps(good), encoding="utf-8")
    command.refuses("must be another file than the inputs", "compare", path, "--markdown", path)
