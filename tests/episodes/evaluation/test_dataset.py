"""`evaluate_dataset` gives the results of the command from Python."""
# Wrong arguments are passed on purpose.
# mypy: disable-error-code="arg-type, dict-item, list-item"

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet import episodes
from protonet.episodes import (
    EpisodeConfig,
    Episodes,
    EvaluationSettings,
    FixedSplit,
    choose_methods,
    evaluate,
    evaluate_dataset,
    format_evaluation,
    index_classes,
    load_source,
)
from protonet.episodes.methods import METHODS
from protonet.episodes.samplers.meta_dataset import MetaDataset
from tests.episodes.cases import Command

SIDES = np.array(["base"] * 6 + ["validation"] * 4 + ["novel"] * 5)
EASY: dict[str, Any] = {"way": (3, 3), "query": 4}


@pytest.fixture(autouse=True)
def _(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write 15 classes of 12 rows, and the same rows in three files."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    y = np.arange(15).repeat(12)
    x = (0.5 * generator.normal(size=(15, 8))[y] + generator.normal(size=(180, 8))).astype(np.float32)
    np.savez("x.npz", x=x, y=y, split=SIDES[y])
    for k, name in enumerate(("train", "validation", "test")):
        np.savez(f"{name}.npz", x=x[k::3], y=y[k::3])


def mean_distance(episodes: Episodes) -> torch.Tensor:
    hot = torch.nn.functional.one_hot(episodes.support_labels).float()
    return -torch.cdist(episodes.query, hot.transpose(1, 2) @ episodes.support / hot.sum(dim=1)[..., None])


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("--side all --seed 3", {"side": "all", "seed": 3}),
        (
            "--tune ridge:penalty=0.1,10 --against protonet --normalize cl2",
            {"tune": ["ridge:penalty=0.1,10"], "against": "protonet", "normalize": "cl2"},
        ),
    ],
)
def test_the_function_agrees_with_the_command(command: Command, options: str, arguments: dict[str, Any]) -> None:
    common = "--dataset x.npz --way 3 --query 4 --episodes 300 --method protonet simpleshot"
    written = command.read(common, options)
    evaluation = evaluate_dataset(dataset="x.npz", method=["protonet", "simpleshot"], episodes=300, **EASY, **arguments)
    assert json.loads(json.dumps(evaluation.to_dict())) == written
    assert format_evaluation(evaluation) == command.printed


def test_a_setting_has_one_name_everywhere() -> None:
    """Options, arguments in Python, the sampler's fields and JSON: only what follows from the data has further keys."""
    known = {field.name for field in fields(EvaluationSettings)}
    assert {field.name for field in fields(EpisodeConfig)} - known == {"n_training_rows"}
    assert {field.name for field in fields(FixedSplit)} - known == {"n_training_rows"}
    evaluation = evaluate_dataset(dataset="x.npz", method=["protonet"], episodes=5, records=True, **EASY)
    assert evaluation.summary.settings.keys() <= known
    assert evaluation.summary.settings["episodes"] == 5
    generalized = evaluate_dataset(dataset="x.npz", method=["protonet"], episodes=5, protocol="generalized", **EASY)
    assert generalized.summary.settings.keys() - known == {"base_classes", "kind"}


def test_data_in_memory_and_functions_as_methods() -> None:
    by_path = evaluate_dataset(dataset="x.npz", method=["protonet"], episodes=50, **EASY)
    methods: dict[str, Any] = {"mine": mean_distance, "ours": METHODS["protonet"]}
    in_memory = evaluate_dataset(
        EvaluationSettings(dataset=load_source("x.npz"), method=methods, episodes=50, **EASY), against="mine"
    )
    assert in_memory.methods["ours"].to_dict() == by_path.methods["protonet"].to_dict()
    assert in_memory.methods["mine"].accuracy == by_path.methods["protonet"].accuracy
    assert in_memory.data_hash == by_path.data_hash
    assert [pair.first for pair in in_memory.summary.comparisons] == ["mine"]


def test_a_fixed_split_with_tuning(command: Command) -> None:
    methods, tune = ["protonet"], ["ridge:penalty=0.1,10"]
    files: dict[str, Any] = {"test_dataset": "test.npz", "validation_dataset": Path("validation.npz")}
    settings = EvaluationSettings(dataset="train.npz", method=methods, shot=(2, 2), episodes=5, tune=tune, **files)
    evaluation = evaluate_dataset(settings)
    assert evaluate_dataset(settings, shot=None, protocol=FixedSplit((2, 2))).to_dict() == evaluation.to_dict()
    common = "--dataset train.npz --shot 2 --episodes 5 --test-dataset"
    options = f"{common} test.npz --method protonet --tune ridge:penalty=0.1,10"
    assert command.read(options, "--validation-dataset validation.npz") == json.loads(json.dumps(evaluation.to_dict()))
    (tuning,) = evaluation.tuning
    on_validation = command.accuracies(common, "validation.npz --method", *tuning.accuracies)
    assert {name: rate.mean for name, rate in tuning.accuracies.items()} == on_validation
    for more, message in (
        ("", "`--tune` must have validation rows beside those of `--test-dataset`; got none. Pass `--validation-data"),
        ("--validation-dataset test.npz", "`--validation-dataset` must share no row with test.npz; got 60"),
        ("--validation-dataset train.npz", "must share no row with train.npz"),
        ("--validation-dataset a.npz b.npz", "`--validation-dataset` must be one for each `--dataset`"),
    ):
        command.refuses(message, options, more)
    command.refuses(
        "`--validation-dataset` must come with `--test-dataset` and `--tune`", "--dataset x.npz --validation-dataset a"
    )


untyped: Any = episodes  #: For calls with arguments of wrong types.
X, Y = torch.randn(20, 3), torch.arange(20) % 4


def test_wrong_arguments_of_evaluate_dataset() -> None:
    for settings, message in (
        ({"dataset": 3}, "`dataset` must be the name or the path of a data set"),
        ({"method": "protonet"}, r"`method` must be a list .*Pass \['protonet'\]"),
        ({"method": {"a": 3}}, "`method` must hold functions; got int as 'a'"),
        ({"method": []}, "`method` must be a list of names"),
        ({"method": ["protonett"]}, "`method` must be one of protonet, .*; got 'protonett'"),
        ({"protocol": 5}, "`protocol` must be one of episodes, .*got '5'"),
        ({"way": 3}, r"`way` must be a pair .*; got 3\. Pass \(3, 3\)"),
        ({"episodes": 0}, "`episodes` must be a whole number"),
        ({"side": "test"}, "`side` must be one of .*; got 'test'"),
        ({"dataset": load_source("x.npz"), "split_seed": 0}, "`split_seed` must be left out"),
        ({"tune": "ridge"}, "`tune` must be a list of texts"),
        ({"progress": 3}, "`progress` must be True or False"),
        ({"protocol": FixedSplit()}, "`protocol` must come with test data; got FixedSplit"),
        ({"protocol": MetaDataset(), "test_dataset": "x.npz"}, "`protocol` must be a FixedSplit or an EpisodeConfig"),
        ({"protocol": "meta-dataset", "way": (5, 5)}, "`way` must be left out with `protocol` meta-dataset; got 5"),
        ({"protocol": EpisodeConfig(), "query": 3}, "`query` must be left out with `protocol` EpisodeConfig"),
        ({"test_dataset": "x.npz"}, "`test_dataset` must share no row"),
        ({"normalize": "L2"}, "`normalize` must be one of l2"),
        ({"n_episodes": 3}, r"`fields` must be one of episodes, .*got 'n_episodes'\. Did you mean episodes\?"),
        ({"dataset": "absent.npz"}, "no such file|`path` must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            untyped.evaluate_dataset(**{"dataset": "x.npz", "method": ["protonet"]} | settings)


def test_an_error_in_a_setting_names_the_field() -> None:
    wrong = {"way": (4, 2), "shot": (0, 0), "query": 0, "imbalance": -1.0}
    for name, value in (wrong | dict.fromkeys(("n_open_classes", "unlabelled", "distractors"), -1)).items():
        with pytest.raises(ValueError, match=rf"^`{name}` must .*; got"):
            untyped.evaluate_dataset(dataset="x.npz", method=["protonet"], **{name: value})


def test_a_split_without_validation_classes_has_a_remedy_that_works() -> None:
    data = load_source("x.npz")
    sides = tuple("base" if side == "validation" else side for side in data.sides or ())
    for split, remedy in ((sides, "Mark some of the base classes"), (None, "`split_seed` 0 makes one")):
        with pytest.raises(ValueError, match=f"^`tune` must .*{remedy}") as error:
            evaluate_dataset(
                dataset=data._replace(sides=split), method=["protonet"], tune=["ridge:penalty=1,2"], **EASY
            )
        assert ("split_seed" in str(error.value)) == (split is None)


def test_wrong_arguments_of_other_functions() -> None:
    index, methods = index_classes(Y), choose_methods(["protonet"])
    config = EpisodeConfig(**EASY)
    for function, arguments, message in (
        (evaluate, (X.numpy(), index, methods, config), "`x` must be a tensor .*; got ndarray"),
        (evaluate, (X.int(), index, methods, config), "`x` must .*; got torch.int32 of shape"),
        (evaluate, (load_source("x.npz"), index, methods, config), "got a Dataset. Pass it to eval"),
        (evaluate, (X, Y, methods, config), "`index` must be a ClassIndex.*Pass index_classes"),
        (evaluate, (X[:9], index, methods, config), "`index` must have numbers of the 9 rows"),
        (evaluate, (X, index, ["protonet"], config), "`methods` must be a mapping from names"),
        (choose_methods, ("protonet",), r"`texts` must be a list of names; got 'protonet'"),
        (load_source, (5,), "`text` must be the name or the path of a data set; got int"),
        (untyped.format_report, ({},), "`summary` must be an EvaluationSummary"),
        (untyped.summarize, ({}, 1), r"`shot` must be a pair of whole numbers"),
    ):
        call: Any = function
        with pytest.raises((ValueError, TypeError), match=message):
            call(*arguments)
