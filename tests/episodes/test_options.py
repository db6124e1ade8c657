"""The command's methods with settings, plug-ins, tuning, normalisation and base statistics: real files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet._checks import InputError
from protonet.datasets import map_npz
from protonet.episodes.__main__ import main
from protonet.episodes.draws.batch import summarize_base, take_from
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS
from protonet.sampling import index_classes

KIND = ["--way", "2", "--query", "4", "--episodes", "70"]
SETTING = Setting(way=(2, 2), n_query=4)
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

def flat(episodes):
    return episodes.query
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write features with a split, others to take base statistics of, and a plug-in."""
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12)
    x = generator.normal(size=(10, 5))[y] + 0.9 * generator.normal(size=(120, 5)) + 1
    split = np.repeat(np.array(SIDES), 12)
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32), y=y, split=split)
    np.savez(tmp_path / "plain.npz", x=x[split == "novel"].astype(np.float32), y=y[split == "novel"])
    np.savez(tmp_path / "base.npz", x=x[split == "base"].astype(np.float32), y=y[split == "base"])
    np.save(tmp_path / "base.npy", x[split == "base"].astype(np.float32))
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, dataset: str = "x.npz") -> int:
    return main(["--dataset", dataset, *KIND, *arguments])


def read(*arguments: str, dataset: str = "x.npz") -> dict[str, Any]:
    """Return what ``--json`` holds of a run."""
    assert run(*arguments, "--json=out.json", dataset=dataset) == 0
    held: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return held


def accuracies(*arguments: str, dataset: str = "x.npz") -> dict[str, float]:
    """Return the accuracies of a run by method."""
    return {name: own["accuracy"] for name, own in read(*arguments, dataset=dataset)["methods"].items()}


@pytest.mark.usefixtures("folder")
def test_settings_and_plugins_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["tim:weights=1,1,1:steps=9", "tim:steps=9", "mine.py:city_block", "mine.py:city_block:power=2"]
    held = read("--method", *names, "mine.py:city_block:power=1", "--state", "a.npz")
    assert list(held["methods"]) == list(held["right"]) == [*names, "mine.py:city_block:power=1"]
    assert held["right"][names[2]] == held["right"]["mine.py:city_block:power=1"] != held["right"][names[3]]
    assert list(held["plugins"]) == ["mine.py:city_block"]
    out = capsys.readouterr().out
    assert all(f"| {name} " in out for name in names)
    again = ["--method", *names, "mine.py:city_block:power=1", "--state", "a.npz", "--resume"]
    assert read(*again) == held
    Path("mine.py").write_text(f"{MINE}# changed\n", encoding="utf-8")
    capsys.readouterr()
    assert run(*again) == 2
    assert "`--resume` must continue the same run; got other plugins than a.npz has. " in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_one_method_against_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    held = read("--method", "protonet", "ridge", "--against", "mine.py:city_block")
    assert {pair["first"] for pair in held["comparisons"]} == {"mine.py:city_block"}
    assert held["settings"]["against"] == "mine.py:city_block"
    assert "2 comparisons of mine.py:city_block with another" in capsys.readouterr().out
    own = read("--method", "ridge", "--against", "mine.py:city_block", "--tune", "mine.py:city_block:power=1,2,3")
    assert re.fullmatch(r"mine.py:city_block:power=[123]", own["settings"]["against"])  # the tuned one
    assert len(own["comparisons"]) == 1


def test_tuning_is_by_accuracy_on_validation_classes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["soft-kmeans:steps=0", "soft-kmeans:steps=1", "soft-kmeans:steps=9"]
    held = read("--method", "protonet", "--tune", "soft-kmeans:steps=0,1,9", "ridge:penalty=0.1,1")
    there = accuracies("--side", "validation", "--method", *names)
    first = held["tuning"][0]
    assert {name: own["accuracy"] for name, own in first["accuracies"].items()} == there
    assert first["chosen"] == max(names, key=lambda name: there[name])
    assert (first["classes"], first["episodes"]) == (3, 70)
    assert list(held["methods"]) == ["protonet", *(each["chosen"] for each in held["tuning"])]
    out = capsys.readouterr().out
    assert f"{first['chosen']} is the best of 3 settings on 3 validation classes, 70 episodes: soft-kmeans:" in out
    with np.load(folder / "x.npz") as arrays:  # other novel rows change nothing
        noisy = arrays["x"] + 3 * (arrays["split"] == "novel")[:, None] * np.random.default_rng(1).normal(size=(120, 5))
        np.savez(folder / "noisy.npz", x=noisy.astype(np.float32), y=arrays["y"], split=arrays["split"])
    again = read("--tune", "soft-kmeans:steps=0,1,9", "ridge:penalty=0.1,1", dataset="noisy.npz")
    assert again["tuning"] == held["tuning"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune", "ridge"], "`--tune` must name two values of a setting or more; got 'ridge'"),
        (["--tune", "ridge:penalty=1,x"], "a number; got 'x' for penalty"),
        (["--tune", "ridge:penalty=1,2", "--side", "validation"], "`--tune` must choose on other classes than"),
        (["--tune", "ridge:penalty=1,2", "--side", "all"], "got --side all. Pass --side novel, .*--split-seed 0"),
        (["--tune", "ridge:penalty=1,2", "--way", "4"], "`--tune` must find 4 validation classes .*; got 3"),
        (["--method", "ridge:lambda=1"], "must have settings of ridge that exist; got 'lambda'. There are penalty, "),
        (["--method", "mine.py:absent"], "It has city_block, centred, broken, flat"),
        (["--method", "mine.py:broken"], r"got ValueError of mine.py:broken: no such thing \(mine.py, line 12\)"),
        (["--method", "mine.py:flat"], "`--method` must give logits of shape .* of mine.py:flat"),
        (["--against", "nosuch"], "`--against` must be one of .*; got 'nosuch'. Pick a listed one"),
        (["--against", "rigde"], "`--against` must be one of ridge, .*Did you mean ridge"),
        (["--tune", "rigde:penalty=1,2"], "`--tune` must be one of ridge, "),
        (["--normalize", "l3"], "`arguments` must be as --help lists them"),
        (["--normalize", "cl2", "--side", "all"], "`--normalize` must find base classes to centre on; got cl2 without"),
        (["--base", "x.npz"], "`--base` must be another data set than --dataset"),
        (["--base", "absent.npz"], "absent.npz"),
        (
            ["--base", "wide.npy"],
            "^protonet.episodes: `--base` must have 5 features per row, as the data; got 6 of wide.npy",
        ),
        (["--base", "base.npy", "--method", "distribution-calibration"], "`--method` must find base classes beside"),
        (["--method", "tip-adapter"], "`--method` must find texts that name the classes; got none for tip-adapter"),
        (["--method", "tip-adapter", "--texts", "base.npz"], "must have a text of each class, by name; got none for 4"),
        (["--texts", "wide.npz"], "`--texts` must have 5 features per row, as the data; got 6 of wide.npz"),
        (["--texts", "absent.npz"], "absent.npz"),
        (["--texts", "base.npz", "--json", "base.npz"], "`--json` must be another file than what is read"),
        (["--base", "base.npz", "--json", "base.npz"], "`--json` must be another file than what is read"),
        (["--latex", "/proc/none/a.tex"], "`--latex` must be a file that can be written"),
    ],
)
def test_errors(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    np.save(folder / "wide.npy", np.ones((3, 6)))
    np.savez(folder / "wide.npz", x=np.ones((3, 6)), y=np.arange(3))
    assert run("--method", "protonet", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err


def test_a_data_set_without_a_split_cannot_tune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del folder
    assert run("--tune", "ridge:penalty=1,2", dataset="plain.npz") == 2
    assert "--split-seed 0 makes one" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_traceback_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--method", "mine.py:broken", "--traceback") == 2
    error = capsys.readouterr().err
    assert 'raise ValueError("no such thing")' in error
    assert error.splitlines()[-1].startswith("protonet.episodes: `--method` must run on every batch of episodes")


@pytest.mark.usefixtures("folder")
def test_the_list_of_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--methods") == 0
    assert "  lambda: a number >= 0, 0.7 by default" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["l2", "cl2", "z"])
def test_normalised_rows_are_as_if_the_file_held_them(folder: Path, kind: str) -> None:
    """A file of rows that were normalised before, in memory and mapped; the base statistics are of such rows, too."""
    methods = ["--method", "protonet", "simpleshot", "distribution-calibration:n_samples=9"]
    with np.load(folder / "x.npz") as arrays:
        held = dict(arrays)
    x = held["x"].astype(np.float64)
    x = x - (x[held["split"] == "base"].mean(axis=0) if kind == "cl2" else 0)
    x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True) if kind == "z" else x
    x = x if kind == "z" else x / np.linalg.norm(x, axis=1, keepdims=True)
    np.savez(folder / "done.npz", **(held | {"x": x.astype(np.float32)}))
    np.savez_compressed(folder / "packed.npz", **held)
    expected = accuracies(*methods, dataset="done.npz")
    assert accuracies(*methods, "--normalize", kind) == expected
    assert accuracies(*methods, "--normalize", kind, dataset="packed.npz") == expected
    assert accuracies(*methods) != expected


def test_base_rows_of_another_file(folder: Path) -> None:
    methods = ["--method", "simpleshot", "bd-cspn", "distribution-calibration:n_samples=9", "mine.py:centred"]
    expected = accuracies(*methods)  # of its own base classes, which are the same rows
    assert accuracies(*methods, "--base", "base.npz", dataset="plain.npz") == expected
    normalized = accuracies(*methods, "--normalize", "cl2")
    assert accuracies(*methods, "--base", "base.npz", "--normalize", "cl2", dataset="plain.npz") == normalized
    rows = ["--method", "simpleshot", "bd-cspn", "mine.py:centred", "--base", "base.npy"]
    found = accuracies(*rows, dataset="plain.npz")
    assert found == {name: expected[name] for name in found}
    assert accuracies("--method", "protonet", "--base", "x.npz", dataset="plain.npz") == accuracies(
        "--method", "protonet", dataset="plain.npz"
    )  # which does not use the base classes, and they are more than the data
    data, base = map_npz(folder / "plain.npz"), map_npz(folder / "base.npz")
    own = summarize_base(take_from(base.x), index_classes(base.y))
    scores = evaluate(data.x, index_classes(data.y), {"a": METHODS["simpleshot"]}, SETTING, n_episodes=70, base=own)
    assert float(scores["a"].accuracy.mean()) == expected["simpleshot"]


def test_texts_by_name(folder: Path) -> None:
    """Two prompts of each class, not in the classes' order: a class's text is the mean of its unit rows."""
    with np.load(folder / "x.npz") as arrays:
        x, y = arrays["x"], arrays["y"]
    means = np.stack([x[y == c].mean(axis=0) for c in range(10)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    away = np.random.default_rng(2).normal(size=means.shape)
    away -= (away * means).sum(axis=1, keepdims=True) * means
    order = np.array([3, 1, 9, 6, 0, 2, 8, 7, 5, 4])
    prompts = np.concatenate([3 * (means + 0.1 * away)[order], (means - 0.1 * away)[order]])
    np.savez(folder / "texts.npz", x=prompts.astype(np.float32), y=np.concatenate([order, order]))
    found = accuracies("--method", "clip-zero-shot", "tip-adapter:alpha=0", "protonet", "--texts", "texts.npz")
    assert found["clip-zero-shot"] == found["tip-adapter:alpha=0"] > found["protonet"]
    novel = map_npz(folder / "x.npz")
    index = index_classes(novel.y).take(torch.tensor([c for c, side in enumerate(SIDES) if side == "novel"]))
    texts = torch.from_numpy(means[[side == "novel" for side in SIDES]]).float()
    methods = {"a": METHODS["clip-zero-shot"]}
    scores = evaluate(novel.x, index, methods, SETTING, n_episodes=70, texts=texts)
    assert float(scores["a"].accuracy.mean()) == found["clip-zero-shot"]
    with pytest.raises(InputError, match=r"^evaluate: `texts` must be floats of shape \(classes, dim\), \(4, 5\) here"):
        evaluate(novel.x, index, methods, SETTING, n_episodes=70, texts=texts[:3])


@pytest.mark.usefixtures("folder")
def test_all_methods_that_can_run_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--episodes", "2", "--method", "all", "soft-kmeans:steps=2"]
    found = accuracies(*few, "--base", "base.npy", dataset="plain.npz")
    left = {name for name, spec in METHODS.items() if spec.needs or spec.slow}
    assert list(found) == [*(name for name in METHODS if name not in left), "soft-kmeans:steps=2"]
    assert "distribution-calibration, finetune, solver, alpha-am take long" in capsys.readouterr().out


def test_an_encoder_embeds_base_rows_of_another_file_too(folder: Path) -> None:
    encoder = ["--encoder", str(folder / "encoder.safetensors")]
    training = ["train", "--dataset", "x.npz", "--backbone", "mlp", "--way", "3", "--steps", "1", "--query", "3"]
    assert main([*training, "--output", encoder[1]]) == 0
    for kind in ("none", "cl2"):
        methods = ["--method", "simpleshot", "mine.py:centred", *encoder, "--normalize", kind]
        expected = accuracies(*methods)
        assert accuracies(*methods, "--base", "base.npz", dataset="plain.npz") == expected
        assert expected != accuracies(*methods[:3], "--normalize", kind)
