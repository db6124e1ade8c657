"""Files of several runs, compared by episode."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from protonet.episodes.__main__ import main
from protonet.episodes.evaluation.compare import join_runs, read_run

KIND = ["--way", "3", "--query", "4", "--episodes", "60"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features, and the files of some runs: a and b are of the same episodes."""
    folder = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(8), 12)
    x = generator.normal(size=(8, 5))[y] + 0.8 * generator.normal(size=(96, 5))
    np.savez(folder / "x.npz", x=x.astype(np.float32), y=y)
    split = np.repeat(np.array(["base"] * 4 + ["validation"] * 3 + ["novel"]), 12)
    np.savez(folder / "split.npz", x=x.astype(np.float32), y=y, split=split)
    np.savez(folder / "moved.npz", x=x[::-1].astype(np.float32), y=y[::-1].copy())
    np.savez(folder / "other.npz", x=(x + 0.1).astype(np.float32), y=y)
    for name, data, more in (
        ("a", "x", ["--method", "protonet", "ridge"]),
        ("b", "x", ["--method", "soft-kmeans", "protonet"]),
        ("longer", "x", ["--method", "protonet", "mahalanobis", "--episodes", "80"]),
        ("seed", "x", ["--method", "tim:steps=1", "--seed", "1"]),
        ("z", "x", ["--method", "soft-kmeans", "--normalize", "z"]),
        ("other", "other", ["--method", "soft-kmeans"]),
        ("moved", "moved", ["--method", "soft-kmeans"]),
        ("ways", "x", ["--method", "protonet", "ridge", "--way", "2-4", "--shot", "1-9", "--allow-small"]),
    ):
        code = main(["--dataset", str(folder / f"{data}.npz"), *KIND, *more, "--json", str(folder / f"{name}.json")])
        assert code == 0
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return held


def compare(folder: Path, *names: str) -> int:
    return main(["compare", *(name if name.startswith("-") else str(folder / f"{name}.json") for name in names)])


def test_counts_are_those_of_the_accuracies(folder: Path) -> None:
    for name in ("a", "ways"):
        held = read(folder, name)
        queries = np.broadcast_to(held["queries"], held["episodes"])
        for method, right in held["right"].items():
            assert len(right) == 60
            assert np.isclose(np.mean(right / queries), held["methods"][method]["accuracy"])
        assert held["classes"] == 8
        assert set(held["versions"]) == {"protonet", "torch", "numpy"}
    assert len(set(read(folder, "ways")["queries"])) > 1
    assert '"queries": 12' in (folder / "a.json").read_text(encoding="utf-8")
    assert (folder / "a.json").read_text(encoding="utf-8").count("\n") < 110  # counts are a line for each method


def test_runs_of_the_same_episodes_are_paired(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folder, "a", "b") == 0
    out = capsys.readouterr().out
    assert out.startswith("60 episodes of 8 classes\n")
    assert out.count("| protonet ") == 1  # both runs have it, with equal results
    assert "Holm for 3 pairs" in out
    assert "calibration" not in out
    assert compare(folder, "a", "b", "--against=ridge") == 0
    assert "2 comparisons of ridge with another" in capsys.readouterr().out
    again = [*KIND, "--method", "protonet", "ridge", "soft-kmeans"]
    assert main(["--dataset", str(folder / "x.npz"), *again]) == 0  # one run of all of them says the same
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in capsys.readouterr().out.splitlines()]
    expected = [row for row in rows if len(row) == 5]
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in out.splitlines()]
    assert [row for row in rows if len(row) == 5][2:] == expected[2:]


def test_a_comparison_is_a_paired_t_test(folder: Path) -> None:
    runs = [read_run(folder / f"{name}.json") for name in ("a", "b")]
    summary, _ = join_runs(runs, against="soft-kmeans")
    (pair,) = (each for each in summary.comparisons if each.second == "ridge")
    first, second = runs[1].right["soft-kmeans"], runs[0].right["ridge"]
    assert pair.first == "soft-kmeans"
    assert np.isclose(pair.p_value_episodes, ttest_rel(first, second).pvalue)
    assert np.isclose(pair.difference, float((first - second).mean()) / 12)


def test_intervals_over_classes_are_those_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = ["--dataset", str(folder / "x.npz"), *KIND, "--method", "protonet", "ridge"]
    assert main(dataset) == 0
    expected = re.findall(r"± ?\d+\.\d+", capsys.readouterr().out)
    assert len(expected) == 6  # of two accuracies and their difference, over classes and over episodes
    assert compare(folder, "a") == 0
    assert re.findall(r"± ?\d+\.\d+", capsys.readouterr().out) == expected


def test_the_first_episodes_of_a_longer_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folder, "longer", "a") == 0
    out = capsys.readouterr().out
    assert "The first 60 episodes are compared, which all files have." in out
    assert out.count("| protonet ") == 1
    assert "| mahalanobis" in out


def test_the_hash_is_of_the_data_in_its_order(folder: Path) -> None:
    assert read(folder, "a")["data"] == read(folder, "b")["data"] == read(folder, "longer")["data"]
    assert read(folder, "a")["data"] == read(folder, "z")["data"]
    assert len({read(folder, name)["data"] for name in ("a", "other", "moved")}) == 3


def test_encoders_bases_and_normalisations_may_differ(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder, held = str(tmp_path / "encoder.safetensors"), str(tmp_path / "held.json")
    x = ["--dataset", str(folder / "x.npz")]
    training = ["train", "--dataset", str(folder / "split.npz"), "--backbone", "mlp", "--steps", "1", "--way", "3"]
    assert main([*training, "--query", "3", "-o", encoder]) == 0
    more = ["--method", "ridge", "--encoder", encoder, "--base", str(folder / "other.npz"), "--normalize", "cl2"]
    assert main([*x, *KIND, *more, "--json", held]) == 0
    capsys.readouterr()
    assert main(["compare", *(str(folder / f"{name}.json") for name in ("a", "z")), held]) == 0
    out = capsys.readouterr().out
    assert f"| ridge ({held}) " in out  # of other features than the ridge of a.json
    assert "Holm for 6 pairs" in out
    right = json.loads(Path(held).read_text(encoding="utf-8"))["right"]["ridge"]
    assert np.isclose(
        float(re.findall(rf"\| ridge \({re.escape(held)}\) +\| (\S+)", out)[0]), sum(right) / 7.2, atol=0.01
    )


def test_methods_of_one_name_with_other_results(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = read(folder, "b")
    held["right"]["protonet"] = held["right"]["protonet"][::-1]
    held["versions"]["torch"] = "0.1"
    (tmp_path / "c.json").write_text(json.dumps(held), encoding="utf-8")
    assert main(["compare", str(folder / "a.json"), str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert f"| protonet ({tmp_path / 'c.json'})" in out
    assert f"| protonet ({folder / 'a.json'})" in out
    assert "Versions of torch differ: " in out


def test_tables_in_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folder, "a", "b", f"--latex={tmp_path / 'a.tex'}", f"--markdown={tmp_path / 'a.md'}") == 0
    out = capsys.readouterr().out
    markdown = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert markdown in out
    latex = (tmp_path / "a.tex").read_text(encoding="utf-8")
    assert latex.count(r"\pm") == markdown.count("±")
    assert latex.startswith(r"\begin{tabular}{lrrrr}")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "a"], "`FILE.json` must be named once; got .*a.json again. Leave one out."),
        (["a", "seed"], "must be of the same episodes; got seed 0 in .*a.json and 1 in .*seed.json"),
        (["a", "ways"], r"got way \[3, 3\] in .* and \[2, 4\] in "),
        (["a", "other"], "must be of the same data; got others in "),
        (["a", "moved"], "must be of the same data"),
        (["a", "absent"], "must be a file that --json wrote; got .*absent.json"),
        (["a", "--against=rigde"], "`--against` must be one of ridge, .*Did you mean ridge"),
        (["a", "--frobnicate"], "must be as --help lists them"),
        (["a", "--latex=/proc/none/a.tex"], "`--latex` must be a file that can be written"),
    ],
)
def test_errors(folder: Path, capsys: pytest.CaptureFixture[str], names: list[str], message: str) -> None:
    assert compare(folder, *names) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err


def test_bad_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = read(folder, "a")
    path = tmp_path / "bad.json"
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
        json.dumps(good | {"members": [0]}),
        json.dumps({name: value for name, value in good.items() if name != "right"}),
    ):
        path.write_text(content, encoding="utf-8")
        assert main(["compare", str(path)]) == 2, content[:50]
        error = capsys.readouterr().err
        assert "`FILE.json` must" in error
        assert error.count("\n") == 1
    path.write_text(json.dumps({name: value for name, value in good.items() if name != "members"}), encoding="utf-8")
    assert main(["compare", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Files of earlier versions do not say which classes episodes have: nothing is over classes.\n" in out
    assert "over classes" not in out.partition("nothing is over classes.")[2]
    assert main(["compare", str(path), "--markdown", str(path)]) == 2
    assert "must be another file than what is read" in capsys.readouterr().err
