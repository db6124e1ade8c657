"""The evaluation command with settings of methods, plug-ins, tuning, normalisation, base rows and texts of files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet.episodes.features.sources import normalize_rows
from protonet.episodes.methods import METHODS
from protonet.episodes.training import tasks
from tests.episodes.cases import Command, save_data

KIND = "--way 2 --query 4 --episodes 70"
#: The arguments of evaluations of x.npz and of plain.npz.
X, PLAIN = (f"{KIND} --dataset {name}.npz" for name in ("x", "plain"))
SIDES = ["base", "novel", "novel", "validation", "base", "novel", "novel", "base", "validation", "validation"]
MINE = """
import torch
from protonet.episodes.methods.common import support_means

def city_block(episodes, *, power: float = 1.0):
    return -torch.cdist(episodes.query, support_means(episodes), p=power)

def centred(episodes):
    return -torch.cdist(episodes.query - episodes.base.mean, support_means(episodes) - episodes.base.mean)

def broken(episodes):
    raise ValueError("no such thing")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write features with a split, files of their base and novel rows, and a plug-in."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12)
    x = generator.normal(size=(10, 5))[y] + 0.9 * generator.normal(size=(120, 5)) + 1
    split = np.repeat(np.array(SIDES), 12)
    np.savez("x.npz", x=x.astype(np.float32), y=y, split=split)
    np.savez("plain.npz", x=x[split == "novel"].astype(np.float32), y=y[split == "novel"])
    np.savez("base.npz", x=x[split == "base"].astype(np.float32), y=y[split == "base"])
    np.savez("wide.npz", x=np.ones((3, 6)), y=np.arange(3))
    Path("mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path


def test_settings_and_plugins_stand_side_by_side(command: Command) -> None:
    names = ["tim:weights=1,1,1:steps=9", "tim:steps=9", "mine.py:city_block", "mine.py:city_block:power=2"]
    again = [X, "--state a.npz --method", *names, "mine.py:city_block:power=1"]
    results = command.read(*again)
    assert all(f"| {name} " in command.printed for name in names)
    assert list(results["methods"]) == list(results["right"]) == [*names, "mine.py:city_block:power=1"]
    assert results["right"][names[2]] == results["right"]["mine.py:city_block:power=1"] != results["right"][names[3]]
    assert list(results["plugins"]) == ["mine.py:city_block"]
    assert command.read(*again, "--resume") == results
    Path("mine.py").write_text(f"{MINE}# changed\n", encoding="utf-8")
    command.refuses("`--resume` must continue the same run; got other plugins than a.npz has. ", *again, "--resume")


def test_one_method_against_the_others(command: Command) -> None:
    results = command.read(X, "--method protonet ridge --against mine.py:city_block")
    assert {pair["first"] for pair in results["comparisons"]} == {"mine.py:city_block"}
    assert "2 comparisons of mine.py:city_block with another" in command.printed
    for pair in results["comparisons"]:
        (cells,) = re.findall(rf"\| {pair['second']} +\|[^|]*\| (\S+)", command.printed)
        assert cells == f"{100 * pair['difference']:+.2f}"
    assert re.search(r"\| mine.py:city_block +\|[^|]*\| +\| +\| +\|", command.printed)
    tune = "--tune mine.py:city_block:power=1,2,3"
    results = command.read(X, "--method ridge --against mine.py:city_block", tune)
    assert re.fullmatch(r"mine.py:city_block:power=[123]", results["settings"]["against"])  # the tuned one


def test_tuning_is_by_accuracy_on_validation_classes(command: Command) -> None:
    names = ["soft-kmeans:steps=0", "soft-kmeans:steps=1", "soft-kmeans:steps=9"]
    tune = "--tune soft-kmeans:steps=0,1,9 ridge:penalty=0.1,1"
    results = command.read(X, "--method protonet", tune)
    first = results["tuning"][0]
    line = f"{first['chosen']} is the best of 3 settings on 3 validation classes, 70 episodes: soft-kmeans:"
    assert line in command.printed
    there = command.accuracies(X, "--side validation --method", *names)
    assert {name: rate["accuracy"] for name, rate in first["accuracies"].items()} == there
    assert first["chosen"] == max(names, key=lambda name: there[name])
    assert (first["classes"], first["episodes"]) == (3, 70)
    assert list(results["methods"]) == ["protonet", *(tuning["chosen"] for tuning in results["tuning"])]
    with np.load("x.npz") as arrays:  # other novel rows change nothing
        noise = (arrays["split"] == "novel")[:, None] * np.random.default_rng(1).normal(size=(120, 5))
        np.savez("noisy.npz", x=(arrays["x"] + 3 * noise).astype(np.float32), y=arrays["y"], split=arrays["split"])
    assert command.read(KIND, "--dataset noisy.npz", tune)["tuning"] == results["tuning"]


def test_a_state_of_tuning_is_of_one_run(command: Command) -> None:
    arguments = f"{X} --method protonet --tune ridge:penalty=0.1,1 --state a.npz"
    command(arguments)
    Path("a.npz").unlink()
    command.refuses("`--state` must have no file of `--tune` beside it; got a-tune.npz", arguments)


def test_errors(command: Command) -> None:
    for arguments, message in (
        ("--tune ridge:penalty=1,2 --side all", "got `--side` all. Pass `--side` novel, .*`--split-seed` 0"),
        (
            "--tune ridge:penalty=1,2 --way 4",
            "`--tune` must find 4 validation classes, .*; got 3. Pass `--way` 3, or use data",
        ),
        ("--normalize cl2 --side all", "`--normalize` must find base classes to centre on; got cl2 without"),
        ("--base x.npz", "`--base` must be another data set than `--dataset`"),
        ("--base wide.npz", "^protonet.episodes: `--base` must have 5 features per row, as the data; got 6 of wide"),
        ("--method tip-adapter", "`--method` must find texts that name the classes; got none for tip-adapter"),
        ("--method tip-adapter --texts base.npz", "must have a text of each class, by name; got none for 4"),
        ("--texts wide.npz", "`--texts` must have 5 features per row, as the data; got 6 of wide.npz"),
    ):
        command.refuses(message, X, "--method protonet", arguments)


def test_a_traceback_on_request(command: Command) -> None:
    command(X, "--method mine.py:broken --traceback", code=2)
    assert 'raise ValueError("no such thing")' in command.error
    last = command.error.splitlines()[-1]
    assert last.startswith("protonet.episodes: `--method` must run on every batch of episodes")


@pytest.mark.parametrize("kind", ["l2", "cl2", "z"])
def test_normalized_rows_equal_those_of_a_normalized_file(command: Command, kind: str) -> None:
    """``--normalize`` of a mapped or a compressed file gives the accuracies of a file of normalised rows."""
    methods = "--method protonet simpleshot distribution-calibration:n_samples=9"
    with np.load("x.npz") as file:
        arrays = dict(file)
    x = torch.from_numpy(arrays["x"]).double()
    centre = x[arrays["split"] == "base"].mean(dim=0) if kind == "cl2" else None
    np.savez("done.npz", **(arrays | {"x": normalize_rows(x, kind, centre).float().numpy()}))
    np.savez_compressed("packed.npz", **arrays)
    expected = command.accuracies(KIND, methods, "--dataset done.npz")
    for name in ("x", "packed"):
        assert command.accuracies(KIND, methods, f"--normalize {kind} --dataset {name}.npz") == expected


def test_base_rows_of_another_file(command: Command) -> None:
    few = "--method simpleshot bd-cspn mine.py:centred"
    methods = f"{few} distribution-calibration:n_samples=9"
    expected = command.accuracies(X, methods)  # of its own base classes, which are the same rows
    assert command.accuracies(PLAIN, methods, "--base base.npz") == expected
    normalized = command.accuracies(X, methods, "--normalize cl2")
    assert command.accuracies(PLAIN, methods, "--base base.npz --normalize cl2") == normalized
    rates = command.accuracies(PLAIN, few, "--base base.npz")
    assert rates == {name: expected[name] for name in rates}
    plain = command.accuracies(PLAIN, "--method protonet")  # it does not use base classes, which are more than the data
    assert command.accuracies(PLAIN, "--method protonet --base x.npz") == plain


def test_texts_by_name(command: Command) -> None:
    """A class's text is the mean of its prompts' unit rows; the file has two prompts per class, in another order."""
    with np.load("x.npz") as arrays:
        x, y = arrays["x"], arrays["y"]
    means = np.stack([x[y == c].mean(axis=0) for c in range(10)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    away = np.random.default_rng(2).normal(size=means.shape)
    away -= (away * means).sum(axis=1, keepdims=True) * means
    order = np.array([3, 1, 9, 6, 0, 2, 8, 7, 5, 4])
    prompts = np.concatenate([3 * (means + 0.1 * away)[order], (means - 0.1 * away)[order]])
    np.savez("texts.npz", x=prompts.astype(np.float32), y=np.concatenate([order, order]))
    rates = command.accuracies(X, "--method clip-zero-shot tip-adapter:alpha=0 protonet --texts texts.npz")
    assert rates["clip-zero-shot"] == rates["tip-adapter:alpha=0"] > rates["protonet"]


def test_all_methods_that_can_run_and_more(command: Command) -> None:
    few = "--base base.npz --episodes 1 --method all soft-kmeans:steps=2"
    rates = command.accuracies(PLAIN, few)
    missing = {name for name, spec in METHODS.items() if spec.needs or spec.is_slow}
    assert list(rates) == [*(name for name in METHODS if name not in missing), "soft-kmeans:steps=2"]
    assert "Without texts, clip-zero-shot, tip-adapter are left out." in command.printed
    unlabelled = "semi-kmeans, semi-kmeans-cluster, semi-kmeans-masked"
    assert f"Without unlabelled rows, {unlabelled} are left out." in command.printed
    slow = "distribution-calibration, deepbdc, deepemd, finetune, solver, alpha-am take long"
    assert f"{slow}, and are left out of 'all': name them, too." in command.printed


@pytest.mark.usefixtures("no_baseline")
def test_an_encoder_embeds_base_rows_of_another_file_too(command: Command) -> None:
    command("train --dataset x.npz --backbone mlp --way 3 --steps 1 --query 3 --output encoder.safetensors")
    methods = "--method simpleshot mine.py:centred --normalize cl2"
    expected = command.accuracies(X, methods, "--encoder encoder.safetensors")
    again = command.accuracies(PLAIN, methods, "--encoder encoder.safetensors --base base.npz")
    assert again == expected != command.accuracies(X, methods)


@pytest.mark.usefixtures("no_baseline")
def test_methods_refuse_encoders_that_do_not_fit(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    save_data(Path("tiny.npz"))
    save_data(Path("other.npz"), dim=9)
    monkeypatch.setattr(tasks, "N_VALIDATION_EPISODES", 10)
    small = "--dataset tiny.npz --way 2 --query 2 --episodes-per-step 2 --steps 1 --backbone mlp --device cpu"
    command(f"train --objective anil {small} -o a.safetensors")
    few = "--dataset tiny.npz --way 2 --query 3 --episodes 5"
    for more, message in (
        ("--method maml", "find an encoder of the objective maml; got one of anil for maml. Pass the `--encoder`"),
        ("--method finetune:head=tree", "`finetune:head` must be one of prototypes, linear; got 'tree'."),
        ("--method finetune:learning-rate=-1", "have settings within their bounds, >= 0 here; got '-1'"),
        ("--dataset other.npz --method anil", "`--encoder` must hold an encoder of 9 features per row; got 64."),
        ("--side all --way 3 --method anil", "`--way` must be 2 for anil, whose last layer has .*; got 3. Pass 2, or"),
    ):
        command.refuses(message, few, "--encoder a.safetensors", more)
    for method, of in (("feat", " of the objective feat"), ("finetune", "")):
        message = f"`--method` must find an encoder{of}; got none for {method}. Pass the `--encoder` of such a run."
        command.refuses(message, few, "--method", method)
