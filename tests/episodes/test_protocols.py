"""The protocols of the evaluation command, with several data sets, processes and presets; and how runs continue."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protonet.episodes.methods import METHODS
from protonet.episodes.names import PRESETS
from protonet.episodes.options import make_parser
from protonet.episodes.training.objectives import LOSS_NAMES
from tests.episodes.cases import Command, needing

#: ``stops`` interrupts the run after as many batches as the file "limit" says; ``peeks`` fails if it finds a query
#: among the base rows.
MINE = """
from pathlib import Path
import torch
from protonet.episodes.methods.prototypes import protonet

calls = 0

def stops(episodes):
    global calls
    calls += 1
    if Path("limit").exists() and calls > int(Path("limit").read_text()):
        raise KeyboardInterrupt
    return protonet(episodes)

def peeks(episodes):
    rows = episodes.base.take(episodes.base.rows_by_class.row_indices)
    assert len(rows) == int(episodes.base.rows_by_class.class_counts.sum()) == 45
    assert torch.cdist(episodes.query.flatten(0, 1), rows).min() > 1e-3, "a query"
    torch.testing.assert_close(episodes.base.mean, rows.mean(dim=0))
    return protonet(episodes)
"""
#: A program that evaluates and meta-trains in two processes, whose environment is that of torchrun. The second process
#: is forked, so that the library is imported once.
PROCESSES = """
import contextlib, io, os, socket, sys
from protonet.episodes.__main__ import main
from protonet.episodes.evaluation.evaluate import join_process_group
from protonet.episodes.training import tasks, train

train.score_best_raw_method = lambda *_: ("protonet", tasks.ValidationScore(0, 0.0, 0.0))
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
child = os.fork()
rank = str(int(child == 0))
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
with join_process_group():
    codes = [main([*options.split(), "--json", f"shared{{number}}.json"]) for number, options in enumerate({arguments})]
    with contextlib.redirect_stdout(io.StringIO()):
        codes.append(main([*"{train} --output two.safetensors --log-file two".split()]))
if child:
    codes.append(os.waitpid(child, 0)[1])
sys.exit(any(codes))
"""
#: The arguments of an evaluation by each protocol, and of several evaluations.
KINDS = {
    "fixed-split": "--dataset a.npz --test-dataset a-test.npz --shot 2",
    "meta-dataset": "--dataset all.npz --side all --protocol meta-dataset --hierarchy names",
    "generalized": "--dataset all.npz --protocol generalized --way 3 --query 2",
    "unlabelled": "--dataset all.npz --way 2 --query 2 --unlabelled 3 --distractors 2",
    "several": "--dataset a.npz all.npz --way 2 --query 2 --shot 1,2",
}
SEVERAL = ["a.npz 1-shot", "a.npz 2-shot", "all.npz 1-shot", "all.npz 2-shot"]


def sample(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample ``n`` rows of each of 12 classes; return them and their classes' names, which begin with superclasses."""
    y = np.repeat(np.arange(12), n)
    centres = np.random.default_rng(0).normal(size=(12, 6))
    x = centres[y] + 0.8 * np.random.default_rng(seed).normal(size=(len(y), 6))
    return x.astype(np.float32), np.array([f"{'odd' if c % 2 else 'even'}/{c}" for c in y])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write training rows, test rows, texts, rows with a split by class, and a plug-in."""
    monkeypatch.chdir(tmp_path)
    for name, seed, n in (("a", 1, 9), ("a-test", 2, 4), ("b-test", 5, 4), ("texts", 9, 1)):
        x, y = sample(seed, n)
        np.savez(f"{name}.npz", x=x, y=y)
    x, y = sample(3, 11)
    np.savez("all.npz", x=x, y=y, split=np.repeat(np.array(["base"] * 5 + ["novel"] * 7), 11))
    np.savez("split.npz", x=x, y=y, split=np.repeat(np.array(["base"] * 5 + ["validation"] * 7), 11))
    Path("mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path


def test_methods_do_not_see_the_queries_of_base_classes(command: Command) -> None:
    command(KINDS["generalized"], "--episodes 5 --method mine.py:peeks simpleshot")


@pytest.mark.parametrize("kind", ["fixed-split", "meta-dataset", "several"])
def test_a_stopped_run_continues_to_the_same_bytes(kind: str, command: Command) -> None:
    arguments = f"{KINDS[kind]} --episodes 80 --method protonet mine.py:stops"
    Path("limit").write_text("3", encoding="utf-8")
    command(arguments, "--state run.npz", code=130)
    assert "of 80 episodes; run again with --resume" in command.error
    with np.load("run-1.npz" if kind == "several" else "run.npz") as state:
        assert 0 < sum(len(state[name]) for name in state if name.endswith(".0.accuracy")) < 80
    Path("limit").unlink()
    command(arguments, "--state run.npz --resume --json parts.json")
    command(arguments, "--json whole.json")
    assert Path("parts.json").read_bytes() == Path("whole.json").read_bytes()


@pytest.mark.usefixtures("no_baseline")
def test_several_processes_give_the_same_bytes(command: Command) -> None:
    """A group of processes runs the protocols one after the other; an earlier single process began the first run."""
    kinds = (KINDS[name] for name in ("fixed-split", "generalized", "unlabelled", "several"))
    arguments = [f"{kind} --episodes 260 --method protonet" for kind in kinds]
    arguments[2] += " semi-kmeans"
    arguments[0] += " mine.py:stops --state run.npz --resume"
    Path("limit").write_text("3", encoding="utf-8")
    command(arguments[0], code=130)
    Path("limit").unlink()
    train = "train --dataset split.npz --backbone mlp --way 2 --query 2 --episodes-per-step 2 --steps 3 --eval-every 2"
    Path("all.py").write_text(PROCESSES.format(arguments=arguments, train=train), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "all.py"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert ended.returncode == 0, ended.stderr
    Path("run.npz").unlink()
    assert ended.stdout == "".join(command(part, f"--json alone{n}.json") for n, part in enumerate(arguments))
    for index in range(len(arguments)):
        assert Path(f"alone{index}.json").read_bytes() == Path(f"shared{index}.json").read_bytes()
    command(train, "--output one.safetensors --log one")
    logs = [[json.loads(line) for line in Path(name).read_text().splitlines()] for name in ("one", "two")]
    assert len(logs[0]) == len(logs[1]) == 3
    for ours, theirs in zip(*logs, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() & {"step", *LOSS_NAMES}:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3)
        assert theirs["accuracy"] == pytest.approx(ours["accuracy"], abs=0.02)


def test_all_ways_and_a_fixed_test_split(command: Command) -> None:
    split = KINDS["fixed-split"].removesuffix("--shot 2")
    results = command.read(split, "--way all --shot 4 --report page.html")
    assert "all 12 ways, 4-shot, queries of a fixed test split, 10 episodes" in command.printed
    assert "apply to new draws of the support, of the same test split." in command.printed
    assert (results["queries"], results["classes"], results["episodes"]) == (48, 12, 10)
    assert "queries of a fixed test split" in Path("page.html").read_text(encoding="utf-8")
    assert command.read(split, "--shot 99 --allow-small --method protonet")["methods"]
    named = command.read(split, "--texts texts.npz --method clip-zero-shot tip-adapter tip-adapter:beta=5")["methods"]
    assert all(method["accuracy"] > 0.3 for method in named.values())
    # The support does not matter, and queries are fixed.
    assert named["clip-zero-shot"]["half_width_episodes"] == 0
    command(split, "--method protonet --state s.npz")
    x, y = sample(8, 4)
    np.savez("a-test.npz", x=x, y=y)
    command.refuses("got other data than s.npz has", split, "--method protonet --state s.npz --resume")


def test_support_and_queries_of_two_files_at_some_ways(command: Command) -> None:
    split = "--dataset a.npz --test-dataset a-test.npz --way 5 --shot 2 --query 3 --method protonet"
    results = command.read(split, "--episodes 60")
    assert "5-way 2-shot 3-query, queries of a test split, 60 episodes" in command.printed
    assert (results["queries"], results["ways"], results["classes"]) == (15, 5, 12)
    assert results["settings"]["protocol"] == "episodes"
    assert results["methods"]["protonet"]["half_width_classes"] > 0
    chosen = command.read(split, "--episodes 20 --tune ridge:penalty=0.1,1 --validation-dataset b-test.npz")
    assert len(chosen["tuning"]) == 1
    command.refuses(r"must have 9 test rows \(query\); got class '.*' with 4", split, "--query 9")
    command.refuses(r"must have 10 training rows \(shot\); got class '.*' with 9", split, "--shot 10")
    assert command.read(split, "--query 9 --allow-small --episodes 5")["queries"] == 20
    assert command.read(split.replace("--way 5", "--preset mini-imagenet"), "--episodes 5")["ways"] == 5


def test_all_ways_with_queries_of_a_few_classes(command: Command) -> None:
    arguments = "--dataset a.npz --way all --n-effective-classes 3 --query 2 --episodes 40 --method protonet pt-map"
    results = command.read(arguments)
    assert "12-way 1-shot 2-query, 3 effective classes, 40 episodes" in command.printed
    assert (results["queries"], results["ways"]) == (6, 12)
    assert results["settings"]["n_effective_classes"] == 3
    results = command.read(arguments, "--multinomial --test-dataset a-test.npz --allow-small")
    assert results["settings"]["multinomial"]
    assert command.read("--dataset a.npz --preset paddle --shot 1 --query 2 --allow-small --episodes 9")["ways"] == 12


def test_rows_say_which_methods_are_transductive_and_assume_balance(command: Command) -> None:
    names = "--method protonet bd-cspn pt-map tim:steps=2 mine.py:stops"
    arguments = f"--dataset a.npz --way 3 --query 2 --episodes 6 {names}"
    note = "pt-map, tim:steps=2 assume equally many queries of each class, which these episodes do not have."
    results = command.read(arguments, "--latex table.tex --markdown table.md")
    assert note not in command.printed
    assert "balanced ones assume equally many of each class" in command.printed
    assert {name: method["setting"] for name, method in results["methods"].items()} == {
        "protonet": "inductive", "bd-cspn": "transductive", "pt-map": "transductive, balanced",
        "tim:steps=2": "transductive, balanced", "mine.py:stops": None,
    }  # fmt: skip
    for text in (Path("table.md").read_text(), Path("table.tex").read_text(), command("compare", "read.json")):
        assert "bd-cspn (transductive) " in text
        assert "pt-map (transductive, balanced) " in text
        assert "protonet (" not in text
    suite = command(arguments, "--shot 1,2")
    assert suite.count("pt-map (transductive, balanced)") == 3
    for more in ("--imbalance 2 --allow-small", "--multinomial --allow-small", "--n-effective-classes 2"):
        assert note in command(arguments, more)
    assert note not in command(f"{KINDS['fixed-split']} {names}")


def test_meta_dataset_draws_from_superclasses(command: Command) -> None:
    results = command.read(KINDS["meta-dataset"], "--episodes 30 --method protonet")
    assert "Meta-Dataset's ways and shots, 2 superclasses, 30 episodes" in command.printed
    assert {queries % 5 for queries in results["queries"]} == {0}  # 5 or 6 ways of 5 queries
    assert results["settings"]["groups"] == 2


def test_generalized_episodes_have_base_and_novel_classes(command: Command) -> None:
    results = command.read(KINDS["generalized"], "--episodes 40 --method all --report page.html")
    assert "harmonic mean" in Path("page.html").read_text(encoding="utf-8")
    assert "Methods that need rows of all classes are left out: base classes have means." in command.printed
    assert set(results["methods"]) == {n for n, spec in METHODS.items() if spec.needs_only_means and not spec.needs}
    for rates in results["methods"].values():
        assert 0.2 < rates["harmonic"] <= max(rates["base"], rates["novel"])
        assert rates["harmonic_half_width_classes"] > rates["harmonic_half_width_episodes"] > 0
    header = r"\| of base classes, % +\| of novel classes, % +\| harmonic mean, % +\|"
    assert re.search(header, command.printed)


def test_unlabelled_rows_help_methods_that_use_them(command: Command) -> None:
    rates = command.accuracies(KINDS["unlabelled"], "--episodes 400 --method protonet", *needing("unlabelled"))
    line = "2-way 1-shot 2-query, 3 unlabelled rows of each class and of 2 distractor classes, 400 episodes"
    assert line in command.printed
    assert "Unlabelled rows are ignored by protonet." in command.printed
    assert all(rates[name] > rates["protonet"] for name in needing("unlabelled"))
    plain = command.accuracies("--dataset all.npz --way 2 --query 2 --episodes 400 --method protonet")
    assert plain["protonet"] == rates["protonet"]  # the same episodes


def test_several_data_sets_and_shots(command: Command, folder: Path) -> None:
    methods = "--episodes 60 --method protonet ridge simpleshot"
    arguments = f"{KINDS['several']} {methods} --state s.npz"
    results = command.read(arguments, "--markdown table.md --latex table.tex")
    assert list(results["runs"]) == SEVERAL
    assert sorted(path.name for path in folder.glob("s-*.npz")) == ["s-1.npz", "s-2.npz", "s-3.npz", "s-4.npz"]
    for shot, means in results["averages"].items():
        for name, mean in means.items():
            pair = [results["runs"][f"{data} {shot}-shot"]["methods"][name] for data in ("a.npz", "all.npz")]
            assert mean["accuracy"] == pytest.approx(sum(rate["accuracy"] for rate in pair) / 2)
            for half in ("half_width_classes", "half_width_episodes"):
                assert mean[half] == pytest.approx(sum(rate[half] ** 2 for rate in pair) ** 0.5 / 2)
            assert mean["rank"] == pytest.approx(sum(mean["ranks"]) / 2)
    tables = Path("table.md").read_text(encoding="utf-8")
    assert tables in command.printed
    assert "average rank" in tables
    assert "mean accuracy, %" in tables
    assert Path("table.tex").read_text(encoding="utf-8").count("toprule") == 3
    alone = command.read("--dataset a.npz --way 2 --query 2 --shot 2", methods)
    assert alone["right"] == results["runs"]["a.npz 2-shot"]["right"]
    assert command.read(arguments, "--resume") == results
    message = "`FILE.json` must be of one evaluation; got .*of a.npz 1-shot, a.npz"
    command.refuses(message, "compare", folder / "read.json")
    command.refuses("`--state` must be new files; got s-1.npz, which exists", arguments)


@pytest.mark.parametrize("done", [0, 3])
def test_several_evaluations_continue_after_a_stop(done: int, command: Command) -> None:
    Path("limit").write_text(str(3 * done), encoding="utf-8")  # batches end at 1, 4 and 9 episodes
    Path("run.npz").touch()  # which no one of several writes
    arguments = f"{KINDS['several']} --episodes 9 --method protonet mine.py:stops --state run.npz"
    out = command(arguments, "--json part.json --markdown part.md --latex part.tex", code=130)
    assert command.error.endswith(f"protonet.episodes: interrupted; not finished: {', '.join(SEVERAL[done:])}\n")
    assert Path("part.json").exists() == (done > 0)
    Path("limit").unlink()
    full = command.read(arguments, "--resume --markdown whole.md")
    if done:
        results = json.loads(Path("part.json").read_text(encoding="utf-8"))
        assert results["runs"] == {name: full["runs"][name] for name in SEVERAL[:done]}
        assert Path("part.md").read_text(encoding="utf-8") in out
        tables = Path("part.tex").read_text(encoding="utf-8")
        assert tables.count("toprule") == 2
        assert tables.count(r"$ (1.5)") == 6  # equal methods, with their ranks


def test_a_preset_sets_options_and_given_options_take_precedence(command: Command) -> None:
    listed = command("--list-presets")
    for name, preset in PRESETS.items():
        make_parser().parse_args(preset.options.split())
        assert f"\n{name}: {preset.summary}\n  {preset.options}\n  Source: " in listed
    given = "--dataset all.npz --way 2 --shot 1 --query 3 --episodes 9 --method protonet"
    assert command("--preset bscd-fsl", given) == command("--side all", given)
    fixed = "--dataset a.npz --test-dataset a-test.npz --method protonet --shot 2"
    assert command("--preset coop", fixed) == command("--episodes 3", fixed)


def test_errors(command: Command) -> None:
    split = "--test-dataset a-test.npz"
    for arguments, message in (
        ("--way all --protocol generalized", "`--way` must be a number or a span with `--protocol` generalized; got"),
        ("--n-effective-classes 6", r"`--n-effective-classes` must be a whole number in \[1, 5\]; got 6"),
        ("--multinomial --imbalance 2", "`--multinomial` must be left out with `--imbalance`; got `--imbalance` 2"),
        (f"{split} --way 3 --unlabelled 2", "`--unlabelled` must be left out with `--test-dataset`; got 2"),
        ("--test-dataset all.npz", "`--test-dataset` must share no row with all.npz; got 132"),
        (f"{split} --query 3", "`--query` must be left out with `--test-dataset`; got 3"),
        (f"{split} --protocol generalized", "`--test-dataset` must be left out with `--protocol` generalized"),
        (f"{split} a-test.npz", "`--test-dataset` must be one for each `--dataset`, .*; got 2 for 1"),
        (f"{split} --preset semi-supervised", "go with `--test-dataset`; got semi-supervised, which has `--unlab"),
        ("--hierarchy names", "`--hierarchy` must be left out with `--protocol` episodes; got names"),
        ("--protocol meta-dataset --way 7", "`--way` must be left out with `--protocol` meta-dataset; got 7"),
        ("--protocol generalized --side all", "`--protocol` must find base classes, to be generalized; got none"),
        ("--protocol generalized --n-open-classes 0", "`--n-open-classes` must be left out .*; got 0"),
        ("--protocol generalized --method ridge", "`--method` must know a class by its mean, .*; got ridge"),
        ("--protocol generalized --preset semi-supervised", "got semi-supervised, which has `--unlabelled` 20"),
        ("--method semi-kmeans", "`--method` must find unlabelled rows; got none for semi-kmeans"),
        ("--shot 1,1", "`--shot` must have each value once; got '1,1'"),
        ("--shot 1,2 --plot a.png", "`--plot` must be of one data set and one `--shot`; got 2 evaluations"),
        ("--preset no", "`--preset` must be one of mini-imagenet, "),
        ("--preset metaopt --protocol meta-dataset", "got metaopt, which has `--way` 5. Leave one of the two out"),
    ):
        plain = not any(word in arguments for word in ("--query", "--test-dataset", "meta-dataset"))
        command.refuses(message, "--dataset all.npz --episodes 3", "--query 3" if plain else "", arguments)
