"""The command's protocols: real files, resumed and shared runs, several data sets, presets, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.episodes.__main__ import main
from protonet.episodes.draws.presets import PRESETS
from protonet.episodes.methods import METHODS
from tests.episodes.cases import needing

#: Stops the run that finds no file "started" after three batches of episodes, as Ctrl-C does.
STOPS = """
from pathlib import Path
from protonet.episodes.methods.prototypes import protonet

calls = 0

def stops(episodes):
    global calls
    calls += 1
    if calls > 3 and not Path("started").exists():
        Path("started").touch()
        raise KeyboardInterrupt
    return protonet(episodes)
"""
#: Fails where it finds a query among the base rows.
PEEKS = """
import torch
from protonet.episodes.methods.prototypes import protonet

def peeks(episodes):
    rows = episodes.base.take(episodes.base.by_class.rows)
    assert len(rows) == int(episodes.base.by_class.size.sum()) == 45
    assert torch.cdist(episodes.query.flatten(0, 1), rows).min() > 1e-3, "a query"
    torch.testing.assert_close(episodes.base.mean, rows.mean(dim=0))
    return protonet(episodes)
"""
#: Stops where the number of shots has changed as often as the file "stop" says.
STOPS_LATER = """
from pathlib import Path
from protonet.episodes.methods.prototypes import protonet

seen = []

def stops(episodes):
    n_support = episodes.support.shape[1]
    if seen[-1:] != [n_support]:
        seen.append(n_support)
    if len(seen) > int(Path("stop").read_text()):
        raise KeyboardInterrupt
    return protonet(episodes)
"""
#: Arguments of each protocol.
KINDS = {
    "fixed-split": ["--dataset", "a.npz", "--test", "a-test.npz", "--shot", "2"],
    "meta-dataset": ["--dataset", "all.npz", "--side", "all", "--protocol", "meta-dataset", "--hierarchy", "names"],
    "generalized": ["--dataset", "all.npz", "--protocol", "generalized", "--way", "3", "--query", "2"],
    "unlabelled": ["--dataset", "all.npz", "--way", "2", "--query", "2", "--unlabelled", "3", "--distractors", "2"],
    "several": ["--dataset", "a.npz", "all.npz", "--way", "2", "--query", "2", "--shot", "1,2"],
}


def sample(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of 12 classes of two superclasses, and their names."""
    y = np.repeat(np.arange(12), n)
    centres = np.random.default_rng(0).normal(size=(12, 6))
    x = centres[y] + 0.8 * np.random.default_rng(seed).normal(size=(len(y), 6))
    return x.astype(np.float32), np.array([f"{'odd' if c % 2 else 'even'}/{c}" for c in y])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write training and test rows, and rows with a split by class."""
    for name, seed, n in (("a", 1, 9), ("a-test", 2, 4)):
        x, y = sample(seed, n)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    x, y = sample(3, 11)
    split = np.repeat(np.array(["base"] * 5 + ["novel"] * 7), 11)
    np.savez(tmp_path / "all.npz", x=x, y=y, split=split)
    (tmp_path / "mine.py").write_text(STOPS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return main(list(arguments))


def read(*arguments: str) -> dict[str, Any]:
    """Return what ``--json`` holds of a run."""
    assert run(*arguments, "--json=out.json") == 0
    held: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return held


def test_methods_do_not_see_the_queries_of_base_classes(folder: Path) -> None:
    (folder / "peeks.py").write_text(PEEKS, encoding="utf-8")
    assert run(*KINDS["generalized"], "--episodes", "5", "--method", "peeks.py:peeks", "simpleshot") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*KINDS[kind], "--episodes", "80", "--method", "protonet", "mine.py:stops"]
    assert run(*arguments, "--state", "run.npz") == 130
    assert "of 80 episodes; run again with --resume" in capsys.readouterr().err
    first = "run-1.npz" if kind == "several" else "run.npz"
    with np.load(folder / first) as kept:
        assert 0 < len(kept["0.accuracy"]) < 80
    assert run(*arguments, "--state", "run.npz", "--resume", "--json", "parts.json") == 0
    assert run(*arguments, "--json", "whole.json") == 0
    assert (folder / "parts.json").read_bytes() == (folder / "whole.json").read_bytes()


def test_several_processes_give_the_same_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All protocols one after the other, in one group of processes; of the first, one process has done a part."""
    arguments = [[*kind, "--episodes", "260", "--method", "protonet"] for kind in KINDS.values()]
    arguments[-2].append("semi-kmeans")
    arguments.append(["--dataset", "a.npz", "--query", "4", "--episodes", "900", "--until", "1.5"])
    arguments[0] += ["mine.py:stops", "--state", "run.npz", "--resume"]
    assert run(*arguments[0]) == 130
    lines = ["import sys", "from protonet.episodes.__main__ import main"]
    lines += ["from protonet.episodes.evaluation.distributed import join_group", "with join_group():"]
    lines += [f"    for number, each in enumerate({arguments!r}):"]
    lines += ["        if main([*each, '--json', f'shared{number}.json']):", "            sys.exit(1)"]
    (folder / "all.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "all.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(launcher, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    (folder / "run.npz").unlink()
    capsys.readouterr()
    for number, each in enumerate(arguments):
        assert run(*each, "--json", f"alone{number}.json") == 0
        assert (folder / f"alone{number}.json").read_bytes() == (folder / f"shared{number}.json").read_bytes()
    assert json.loads((folder / "alone5.json").read_text(encoding="utf-8"))["episodes"] < 900
    assert ended.stdout == capsys.readouterr().out


def test_all_ways_and_a_fixed_test_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = read("--dataset", "a.npz", "--test", "a-test.npz", "--way", "all", "--shot", "4", "--report", "page.html")
    out = capsys.readouterr().out
    assert "all 12 ways, 4-shot, queries of a fixed test split, 10 episodes" in out
    assert "speak of other draws of the support, of the same test split." in out
    assert (held["queries"], held["classes"], held["episodes"]) == (48, 12, 10)
    assert held["settings"]["protocol"] == "fixed-split"
    assert "queries of a fixed test split" in (folder / "page.html").read_text(encoding="utf-8")
    split = ["--dataset", "a.npz", "--test", "a-test.npz"]
    assert read(*split, "--shot", "99", "--allow-small")["methods"]
    x, y = sample(9, 1)
    np.savez("texts.npz", x=x, y=y)
    named = read(*split, "--texts", "texts.npz", "--method", "clip-zero-shot", "tip-adapter", "tip-adapter:beta=5")
    assert all(own["accuracy"] > 0.3 for own in named["methods"].values())
    assert (
        named["methods"]["clip-zero-shot"]["half_width_episodes"] == 0
    )  # the support does not matter, and queries are fixed
    assert run(*split, "--method", "protonet", "--state", "s.npz") == 0
    x, y = sample(8, 4)
    np.savez("a-test.npz", x=x, y=y)
    assert run(*split, "--method", "protonet", "--state", "s.npz", "--resume") == 2
    assert "got other data than s.npz has" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_meta_dataset_of_superclasses(capsys: pytest.CaptureFixture[str]) -> None:
    held = read(*KINDS["meta-dataset"], "--episodes", "30", "--method", "protonet")
    assert "Meta-Dataset's ways and shots, 2 superclasses, 30 episodes" in capsys.readouterr().out
    assert {queries % 5 for queries in held["queries"]} == {0}  # 5 or 6 ways of 5 queries
    assert held["settings"]["groups"] == 2
    lines = [f"{'low' if c < 6 else 'high'} {'odd' if c % 2 else 'even'}/{c}" for c in range(12)]
    Path("tree.txt").write_text("\n".join(lines), encoding="utf-8")
    arguments = [*KINDS["meta-dataset"], "--hierarchy", "tree.txt", "--method", "protonet", "--episodes", "9"]
    assert run(*arguments, "--state", "s.npz") == 0
    assert "2 nodes of a hierarchy" in capsys.readouterr().out
    assert run(*arguments, "--state", "s.npz", "--resume") == 0
    Path("tree.txt").write_text("\n".join([*lines, "low even/10"]), encoding="utf-8")
    assert run(*arguments, "--state", "s.npz", "--resume") == 2
    assert "got other data than s.npz has" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_base_beside_novel_classes(capsys: pytest.CaptureFixture[str]) -> None:
    held = read(*KINDS["generalized"], "--episodes", "40", "--method", "all", "--report", "page.html")
    assert "harmonic mean" in Path("page.html").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert "Methods that need rows of all classes are left out: base classes have means." in out
    assert set(held["methods"]) == {name for name, spec in METHODS.items() if spec.takes_means and not spec.needs}
    for own in held["methods"].values():
        assert 0.2 < own["harmonic"] <= max(own["base"], own["novel"])
        assert own["harmonic_half_width_classes"] > own["harmonic_half_width_episodes"] > 0
    assert re.search(r"\| of base classes, % +\| of novel classes, % +\| harmonic mean, % +\|", out)
    x, y = sample(9, 1)
    np.savez("texts.npz", x=x, y=y)
    named = read(*KINDS["generalized"], "--method", "clip-zero-shot", "--texts", "texts.npz", "--episodes", "9")
    assert named["methods"]["clip-zero-shot"]["accuracy"] > 0.3


@pytest.mark.usefixtures("folder")
def test_unlabelled_rows_help_who_looks_at_them(capsys: pytest.CaptureFixture[str]) -> None:
    held = read(*KINDS["unlabelled"], "--episodes", "400", "--method", "protonet", *sorted(needing("unlabelled")))
    out = capsys.readouterr().out
    assert "2-way 1-shot 2-query, 3 unlabelled rows of each class and of 2 distractor classes, 400 episodes" in out
    assert "Unlabelled rows are not looked at by protonet." in out
    rates = {name: own["accuracy"] for name, own in held["methods"].items()}
    assert all(rates[name] > rates["protonet"] for name in needing("unlabelled"))
    plain = read("--dataset", "all.npz", "--way", "2", "--query", "2", "--episodes", "400", "--method", "protonet")
    assert plain["right"]["protonet"] == held["right"]["protonet"]  # the same episodes


def test_several_data_sets_and_shots(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*KINDS["several"], "--episodes", "60", "--method", "protonet", "ridge", "simpleshot"]
    held = read(*arguments, "--markdown", "table.md", "--latex", "table.tex", "--state", "s.npz")
    out = capsys.readouterr().out
    assert list(held["runs"]) == ["a.npz 1-shot", "a.npz 2-shot", "all.npz 1-shot", "all.npz 2-shot"]
    assert sorted(path.name for path in folder.glob("s-*.npz")) == ["s-1.npz", "s-2.npz", "s-3.npz", "s-4.npz"]
    for shot, means in held["averages"].items():
        for name, own in means.items():
            pair = [held["runs"][f"{data} {shot}-shot"]["methods"][name] for data in ("a.npz", "all.npz")]
            assert own["accuracy"] == pytest.approx(sum(each["accuracy"] for each in pair) / 2)
            for over in ("classes", "episodes"):
                halves = [each[f"half_width_{over}"] for each in pair]
                assert own[f"half_width_{over}"] == pytest.approx(sum(half**2 for half in halves) ** 0.5 / 2)
            assert own["rank"] == pytest.approx(sum(own["ranks"]) / 2)
    tables = (folder / "table.md").read_text(encoding="utf-8")
    assert tables in out
    assert "average rank" in tables
    assert "mean accuracy, %" in tables
    assert (folder / "table.tex").read_text(encoding="utf-8").count("toprule") == 3
    alone = read("--dataset", "a.npz", "--way", "2", "--query", "2", "--shot", "2", *arguments[-6:])
    assert alone["right"] == held["runs"]["a.npz 2-shot"]["right"]
    assert read(*arguments, "--state", "s.npz", "--resume") == held
    capsys.readouterr()
    assert run("compare", "out.json") == 2
    assert (
        "`FILE.json` must be of one evaluation; got out.json of a.npz 1-shot, a.npz 2-shot, " in capsys.readouterr().err
    )
    assert run(*arguments, "--state", "s.npz") == 2
    assert "`--state` must be new files; got s-1.npz, which exists" in capsys.readouterr().err


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_several_evaluations_that_are_stopped(done: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "later.py").write_text(STOPS_LATER, encoding="utf-8")
    (folder / "stop").write_text(str(done), encoding="utf-8")
    (folder / "run.npz").touch()  # which no one of several writes
    arguments = [*KINDS["several"], "--episodes", "9", "--method", "protonet", "later.py:stops", "--state", "run.npz"]
    files = ["--json", "part.json", "--markdown", "part.md", "--latex", "part.tex"]
    assert run(*arguments, *files) == 130
    names = ["a.npz 1-shot", "a.npz 2-shot", "all.npz 1-shot", "all.npz 2-shot"]
    out, error = capsys.readouterr()
    assert error.endswith(f"protonet.episodes: interrupted; not finished: {', '.join(names[done:])}\n")
    assert (folder / "part.json").exists() == (done > 0)
    (folder / "stop").write_text("9", encoding="utf-8")
    whole = read(*arguments, "--resume", "--markdown", "whole.md")
    if done:
        held = json.loads((folder / "part.json").read_text(encoding="utf-8"))
        assert held["runs"] == {name: whole["runs"][name] for name in names[:done]}
        assert (folder / "part.md").read_text(encoding="utf-8") in out
        tables = (folder / "part.tex").read_text(encoding="utf-8")
        assert tables.count("toprule") == {1: 1, 2: 1, 3: 2}[done]
        assert tables.count(r"$ (1.5)") == {1: 2, 2: 0, 3: 6}[done]  # equal methods, with their ranks
        assert "± " not in tables


def test_a_study_sweeps_test_splits_and_shots(folder: Path) -> None:
    text = 'dataset = "a.npz"\ntest = "a-test.npz"\nmethod = ["protonet"]\nshot = [1, 2, 4, "1,2"]\nepisodes = 3\n'
    (folder / "study.toml").write_text(text + 'output = "results"\n', encoding="utf-8")
    assert run("study", "study.toml") == 0
    table = (folder / "results" / "table.md").read_text(encoding="utf-8").splitlines()
    cells = [cell.strip() for cell in table[0].split("|")][2:-1]
    assert cells == ["shot=1", "shot=2", "shot=4", "shot=1,2 a.npz 1-shot", "shot=1,2 a.npz 2-shot"]
    rates = [cell.strip() for cell in table[2].split("|")][2:-1]
    assert rates[0] == rates[3]
    assert rates[1] == rates[4]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_options_and_what_is_given_wins(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each preset's own options give the same run; the data here are small, so some are given beside both."""
    x, y = sample(3, 100)
    np.savez(folder / "many.npz", x=x, y=y)
    given = ["--dataset", "many.npz", "--episodes", "3", "--method", "protonet"]
    given += ["--test", "a-test.npz"] if name == "coop" else []
    own = [text for option, value in PRESETS[name].options.items() for text in (f"--{option}", value)]
    assert run("--preset", name, *given) == 0
    printed = capsys.readouterr().out
    assert run(*own, *given) == 0
    assert capsys.readouterr().out == printed
    assert run("--presets") == 0
    listed = capsys.readouterr().out
    assert f"\n{name}: {PRESETS[name].summary}\n  {' '.join(own)}\n  Source: " in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--way", "all"], "`--way` must be a number or a span where there is no --test; got all"),
        (["--test", "all.npz", "--way", "3"], "`--way` must be all with --test; got 3"),
        (
            ["--test", "all.npz"],
            "`--test` must share no row with --dataset; got 132, such as row 0 of all.npz and row 0 of",
        ),
        (["--test", "a-test.npz", "--query", "3"], "`--query` must be left out with --test; got 3"),
        (["--test", "a-test.npz", "--side", "novel"], "`--side` must be left out with --test; got novel"),
        (["--test", "a-test.npz", "--shot", "1-3"], "`--shot` must be a whole number >= 1; got '1-3'"),
        (["--test", "a-test.npz", "--shot", "12"], "`classes` must have 12 training rows; got class 'even/0' with 11"),
        (
            ["--test", "a-test.npz", "--protocol", "generalized"],
            "`--test` must be left out with --protocol generalized",
        ),
        (
            ["--test", "a-test.npz", "a-test.npz"],
            "`--test` must be one for each --dataset, in their order; got 2 for 1",
        ),
        (
            ["--hierarchy", "names"],
            "`--hierarchy` must be left out with --protocol episodes; got names. Pass --protocol",
        ),
        (["--protocol", "meta-dataset", "--way", "7"], "`--way` must be left out with --protocol meta-dataset; got 7"),
        (
            ["--protocol", "meta-dataset", "--hierarchy", "no.txt"],
            "`--hierarchy` must be names, or a file that can be read",
        ),
        (
            ["--protocol", "generalized", "--side", "all"],
            "`--protocol` must find base classes, to be generalized; got none",
        ),
        (["--protocol", "generalized", "--open", "2"], "`--open` must be left out with --protocol generalized; got 2"),
        (
            ["--protocol", "generalized", "--method", "ridge"],
            "`--method` must know a class by its mean, which is all that there is of base classes; got ridge. Pass",
        ),
        (
            ["--method", "semi-kmeans"],
            "`--method` must find unlabelled rows; got none for semi-kmeans. Pass --unlabelled",
        ),
        (["--distractors", "2"], "`--distractors` must be 0 where there are no unlabelled rows; got 2"),
        (["--unlabelled", "few"], "`--unlabelled` must be a whole number >= 0; got 'few'"),
        (["--shot", "1,1"], "`--shot` must have each value once; got '1,1'"),
        (["--shot", "1,x"], "`--shot` must be a whole number >= 1; got 'x'"),
        (["--shot", "1,2", "--plot", "a.png"], "`--plot` must be of one data set and one --shot; got 2 evaluations"),
        (["--shot", "1,99"], "`classes` must have 102 rows (shot + query); got class"),
        (["--preset", "no"], "`--preset` must be one of mini-imagenet, "),
        (["--test", "a-test.npz", "--way", "5"], "`--way` must be all with --test; got 5"),
        (["--test", "a-test.npz", "--query", "15"], "`--query` must be left out with --test; got 15"),
        (["--protocol", "meta-dataset", "--way=5"], "`--way` must be left out with --protocol meta-dataset; got 5"),
        (["--protocol", "generalized", "--open", "0"], "`--open` must be left out with --protocol generalized; got 0"),
        (
            ["--preset", "open-set", "--protocol", "generalized"],
            "`--preset` must have options that go with --protocol generalized; got open-set, which has --open 5. Leave",
        ),
        (
            ["--preset", "semi-supervised", "--protocol", "generalized"],
            "got semi-supervised, which has --unlabelled 20",
        ),
        (["--preset", "dirichlet", "--protocol", "meta-dataset"], "got dirichlet, which has --way 5"),
        (["--preset", "mini-imagenet", "--test", "a-test.npz"], "go with --test; got mini-imagenet, which has --way 5"),
        (["--preset", "meta-dataset", "--shot", "1"], "`--shot` must be left out with --protocol meta-dataset; got 1"),
        (["--hierarchy", "all"], "`--hierarchy` must be left out with --protocol episodes; got all"),
        (["--protocol", "meta-dataset", "--query", "all"], "`--query` must be left out with --protocol meta-dataset"),
        (["--protocol", "meta-dataset", "--imbalance", "all"], "`--imbalance` must be left out with --protocol meta"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    given = [] if "--query" in arguments or "--test" in arguments or "meta-dataset" in arguments else ["--query", "3"]
    assert run("--dataset", "all.npz", "--episodes", "3", *given, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("folder")
def test_runs_of_other_protocols_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("meta-dataset", "generalized", "unlabelled"):
        assert run(*KINDS[name], "--episodes", "20", "--method", "protonet", f"--json={name}.json") == 0
    for other in ("ridge", "knn"):
        assert run(*KINDS["meta-dataset"], "--episodes", "20", "--method", other, f"--json={other}.json") == 0
    capsys.readouterr()
    assert run("compare", "ridge.json", "knn.json", "meta-dataset.json") == 0
    assert "p over classes (Holm)" in capsys.readouterr().out
    assert run("compare", "ridge.json", "unlabelled.json") == 2
    assert "be of the same episodes; got way [5, 50] in ridge.json and [2, 2] in" in capsys.readouterr().err
    assert run("compare", "unlabelled.json") == 0
