"""`evaluate_dataset`: the results of the command, from Python."""
# Wrong arguments are passed on purpose.
# mypy: disable-error-code="arg-type, dict-item, list-item"

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.episodes import (
    Episodes,
    FixedSplit,
    Setting,
    choose_methods,
    evaluate,
    evaluate_dataset,
    format_evaluation,
    format_report,
    index_classes,
    load_source,
    summarize,
)
from protonet.episodes.methods import METHODS
from tests.episodes.command_cases import Command

SIDES = np.array(["base"] * 6 + ["validation"] * 4 + ["novel"] * 5)
EASY = Setting(way=(3, 3), n_query=4)


@pytest.fixture(autouse=True)
def _(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write 15 classes of 12 rows, of which the base classes are the easy ones; and the same rows in three files."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    y = np.arange(15).repeat(12)
    centres = generator.normal(size=(15, 8)) * np.where(SIDES == "base", 4.0, 0.5)[:, None]
    x = (centres[y] + generator.normal(size=(180, 8))).astype(np.float32)
    np.savez("x.npz", x=x, y=y, split=SIDES[y])
    for k, name in enumerate(("train", "validation", "test")):
        np.savez(f"{name}.npz", x=x[k::3], y=y[k::3])


def mean_distance(episodes: Episodes) -> torch.Tensor:
    hot = torch.nn.functional.one_hot(episodes.support_labels).float()
    return -torch.cdist(episodes.query, hot.transpose(1, 2) @ episodes.support / hot.sum(dim=1)[..., None])


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("", {}),
        ("--side all --seed 3", {"side": "all", "seed": 3}),
        ("--tune ridge:penalty=0.1,10 --against protonet", {"tune": ["ridge:penalty=0.1,10"], "against": "protonet"}),
        ("--normalize cl2", {"normalize": "cl2"}),
        ("--until 3", {"target_half_width": 3}),
    ],
)
def test_it_is_what_the_command_does(command: Command, options: str, arguments: dict[str, Any]) -> None:
    common = "--dataset x.npz --way 3 --query 4 --episodes 600 --method protonet simpleshot"
    written = command.read(common, options)
    evaluation = evaluate_dataset("x.npz", ["protonet", "simpleshot"], EASY, n_episodes=600, **arguments)
    assert json.loads(json.dumps(evaluation.describe())) == written
    assert format_evaluation(evaluation) == command.printed


def test_the_novel_side_is_evaluated() -> None:
    """Base classes are far easier here: all rows together would flatter a method."""
    novel = evaluate_dataset("x.npz", ["protonet"], EASY, n_episodes=200).methods["protonet"].accuracy
    data = load_source("x.npz")
    everything = evaluate(data.x, index_classes(data.y), choose_methods(["protonet"]), EASY, n_episodes=200)
    assert novel.mean < float(everything["protonet"].accuracy.mean()) - 0.15
    assert novel.half_width_classes > novel.half_width_episodes > 0


def test_data_in_memory_and_functions() -> None:
    by_path = evaluate_dataset("x.npz", ["protonet"], EASY, n_episodes=50)
    methods = {"mine": mean_distance, "ours": METHODS["protonet"]}
    in_memory = evaluate_dataset(load_source("x.npz"), methods, EASY, n_episodes=50, against="mine")
    assert in_memory.methods["ours"].describe() == by_path.methods["protonet"].describe()
    assert in_memory.methods["mine"].accuracy == by_path.methods["protonet"].accuracy
    assert in_memory.data == by_path.data
    assert [pair.first for pair in in_memory.summary.comparisons] == ["mine"]


def test_a_fixed_split_with_tuning(command: Command) -> None:
    methods, tune = ["protonet"], ["ridge:penalty=0.1,10"]
    files = {"test_data": "test.npz", "validation_data": Path("validation.npz")}
    evaluation = evaluate_dataset("train.npz", methods, FixedSplit(2), n_episodes=5, tune=tune, **files)
    options = "--dataset train.npz --test test.npz --shot 2 --episodes 5 --method protonet --tune ridge:penalty=0.1,10"
    assert command.read(options, "--validation-dataset validation.npz") == json.loads(json.dumps(evaluation.describe()))
    (tuning,) = evaluation.tuning
    on_validation = command.accuracies("--dataset train.npz --test validation.npz --shot 2 --episodes 5 --method",
                                       *tuning.accuracies)  # fmt: skip
    assert {name: rate.mean for name, rate in tuning.accuracies.items()} == on_validation
    for more, message in (
        ("", "`--tune` must have validation rows beside those of --test; got none. Pass --validation-dataset FILE"),
        ("--validation-dataset test.npz", "`--validation-dataset` must share no row with test.npz; got 60"),
        ("--validation-dataset train.npz", "must share no row with train.npz"),
        ("--validation-dataset a.npz b.npz", "`--validation-dataset` must be one for each --dataset"),
    ):
        command.refuses(message, options, more)
    command.refuses("`--validation-dataset` must come with --test and --tune", "--dataset x.npz --validation-dataset a")


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int]] = []
    evaluate_dataset("x.npz", ["protonet"], EASY, n_episodes=20, progress=lambda *counts: calls.append(counts))
    assert calls == [(1, 20), (4, 20), (16, 20), (20, 20)]


X, Y = torch.randn(20, 3), torch.arange(20) % 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: evaluate_dataset(3, ["protonet"]), "`data` must be the name or the path of a data set"),
        (lambda: evaluate_dataset("x.npz", "protonet"), r"`methods` must be a list .*Pass \['protonet'\]"),
        (lambda: evaluate_dataset("x.npz", {"a": 3}), "`methods` must hold functions; got int as 'a'"),
        (lambda: evaluate_dataset("x.npz", [print]), "`methods` must be a list of names"),
        (lambda: evaluate_dataset("x.npz", []), "`methods` must be a list of names"),
        (lambda: evaluate_dataset("x.npz", ["protonett"]), "`methods` must be one of protonet, .*; got 'protonett'"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], 5), "`config` must be a Setting, or another sampler; got int"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], Setting(way=3)), r"must be a pair .*; got 3\. Pass \(3, 3\)"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], Setting((9, 9))), "must be at most the number of classes"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], EASY, n_episodes=0), "`n_episodes` must be a whole number"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], EASY, side="test"), "`side` must be one of .*; got 'test'"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], EASY, split_seed=0), "`split_seed` must be left out"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], EASY, tune="ridge"), "`tune` must be a list of texts"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], EASY, progress=3), "`progress` must be a bool or a function"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], EASY, test_data="x.npz"), "`config` must be a FixedSplit"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], FixedSplit(1)), "`config` must be a FixedSplit"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], normalize="L2"), "`normalize` must be one of l2"),
        (lambda: evaluate_dataset("x.npz", ["protonet"], device="abacus"), "`device` must be a device"),
        (lambda: evaluate_dataset("absent.npz", ["protonet"]), "no such file|`path` must be"),
    ],
)
def test_wrong_arguments_of_evaluate_dataset(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda methods: evaluate(X.numpy(), index_classes(Y), methods, EASY), "`x` must be a tensor .*; got ndarray"),
        (lambda methods: evaluate(X.int(), index_classes(Y), methods, EASY), "`x` must .*; got torch.int32 of shape"),
        (
            lambda methods: evaluate(load_source("x.npz"), index_classes(Y), methods, EASY),
            "got a Dataset. Pass it to eval",
        ),
        (lambda methods: evaluate(X, Y, methods, EASY), "`index` must be a ClassIndex.*Pass index_classes"),
        (lambda methods: evaluate(X[:9], index_classes(Y), methods, EASY), "`index` must have numbers of the 9 rows"),
        (lambda _: evaluate(X, index_classes(Y), ["protonet"], EASY), "`methods` must be a mapping from names"),
        (lambda methods: evaluate(X, index_classes(Y), methods, (5, 1)), "`setting` must be a Setting"),
        (lambda _: index_classes(Y.numpy()), "`labels` must be a tensor of labels"),
        (lambda _: choose_methods("protonet"), r"`texts` must be a list of names; got 'protonet'"),
        (lambda _: load_source(5), "`text` must be the name or the path of a data set; got int"),
        (lambda _: format_report({}), "`summary` must be a Summary"),
        (lambda _: format_evaluation({}), "`evaluation` must be an Evaluation"),
        (lambda _: summarize([], (1, 1)), "`scores` must be a mapping"),
        (lambda _: summarize({}, 1), r"`shot` must be a pair of whole numbers"),
    ],
)
def test_wrong_arguments_of_the_parts(call: Callable[[object], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(choose_methods(["protonet"]))
