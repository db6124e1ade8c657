"""`evaluate_dataset` gives the results of the command from Python."""
# Wrong arguments are passed on purpose.
# mypy: disable-error-code="arg-type, dict-item, list-item"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet import episodes
from protonet.episodes import (
    EpisodeConfig,
    Episodes,
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
EASY = EpisodeConfig(way=(3, 3), n_query=4)


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
    evaluation = evaluate_dataset("x.npz", ["protonet", "simpleshot"], EASY, n_episodes=300, **arguments)
    assert json.loads(json.dumps(evaluation.to_dict())) == written
    assert format_evaluation(evaluation) == command.printed


def test_data_in_memory_and_functions_as_methods() -> None:
    by_path = evaluate_dataset("x.npz", ["protonet"], EASY, n_episodes=50)
    methods: dict[str, Any] = {"mine": mean_distance, "ours": METHODS["protonet"]}
    in_memory = evaluate_dataset(load_source("x.npz"), methods, EASY, n_episodes=50, against="mine")
    assert in_memory.methods["ours"].to_dict() == by_path.methods["protonet"].to_dict()
    assert in_memory.methods["mine"].accuracy == by_path.methods["protonet"].accuracy
    assert in_memory.data_hash == by_path.data_hash
    assert [pair.first for pair in in_memory.summary.comparisons] == ["mine"]


def test_a_fixed_split_with_tuning(command: Command) -> None:
    methods, tune = ["protonet"], ["ridge:penalty=0.1,10"]
    files: dict[str, Any] = {"test_data": "test.npz", "validation_data": Path("validation.npz")}
    evaluation = evaluate_dataset("train.npz", methods, FixedSplit(2), n_episodes=5, tune=tune, **files)
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
        ("--validation-dataset a.npz b.npz", "`--validation-dataset` must be one for each --dataset"),
    ):
        command.refuses(message, options, more)
    command.refuses(
        "`--validation-dataset` must come with --test-dataset and --tune", "--dataset x.npz --validation-dataset a"
    )


untyped: Any = episodes  #: For calls with arguments of wrong types.
X, Y = torch.randn(20, 3), torch.arange(20) % 4


def test_wrong_arguments_of_evaluate_dataset() -> None:
    names = ["protonet"]
    for arguments, settings, message in (
        ((3, names), {}, "`data` must be the name or the path of a data set"),
        (("x.npz", "protonet"), {}, r"`methods` must be a list .*Pass \['protonet'\]"),
        (("x.npz", {"a": 3}), {}, "`methods` must hold functions; got int as 'a'"),
        (("x.npz", []), {}, "`methods` must be a list of names"),
        (("x.npz", ["protonett"]), {}, "`methods` must be one of protonet, .*; got 'protonett'"),
        (("x.npz", names, 5), {}, "`config` must be an EpisodeConfig, or another sampler; got int"),
        (("x.npz", names, untyped.EpisodeConfig(way=3)), {}, r"`config.way` must be a pair .*; got 3\. Pass \(3, 3\)"),
        (("x.npz", names, EASY), {"n_episodes": 0}, "`n_episodes` must be a whole number"),
        (("x.npz", names, EASY), {"side": "test"}, "`side` must be one of .*; got 'test'"),
        (("x.npz", names, EASY), {"split_seed": 0}, "`split_seed` must be left out"),
        (("x.npz", names, EASY), {"tune": "ridge"}, "`tune` must be a list of texts"),
        (("x.npz", names, EASY), {"progress": 3}, "`progress` must be True or False"),
        (("x.npz", names, FixedSplit(1)), {}, "`config` must come with test data; got FixedSplit"),
        (("x.npz", names, MetaDataset()), {"test_data": "x.npz"}, "`config` must be a FixedSplit or an EpisodeConfig"),
        (("x.npz", names, EASY), {"test_data": "x.npz"}, "`test_data` must share no row"),
        (("x.npz", names), {"normalize": "L2"}, "`normalize` must be one of l2"),
        (("absent.npz", names), {}, "no such file|`path` must be"),
    ):
        data = load_source("x.npz") if settings.get("split_seed") == 0 else arguments[0]
        with pytest.raises((ValueError, TypeError), match=message):
            untyped.evaluate_dataset(data, *arguments[1:], **settings)


def test_an_error_in_a_config_names_the_field() -> None:
    wrong = {"way": (4, 2), "shot": (0, 0), "n_query": 0, "imbalance": -1.0}
    for name, value in (wrong | dict.fromkeys(("n_open_classes", "n_unlabelled", "n_distractors"), -1)).items():
        with pytest.raises(ValueError, match=rf"^`config\.{name}` must .*; got"):
            evaluate_dataset("x.npz", ["protonet"], untyped.EpisodeConfig(**{name: value}))


def test_a_split_without_validation_classes_has_a_remedy_that_works() -> None:
    data = load_source("x.npz")
    sides = tuple("base" if side == "validation" else side for side in data.sides or ())
    for split, remedy in ((sides, "Mark some of the base classes"), (None, "`split_seed` 0 makes one")):
        with pytest.raises(ValueError, match=f"^`tune` must .*{remedy}") as error:
            evaluate_dataset(data._replace(sides=split), ["protonet"], EASY, tune=["ridge:penalty=1,2"])
        assert ("split_seed" in str(error.value)) == (split is None)


def test_wrong_arguments_of_other_functions() -> None:
    index, methods = index_classes(Y), choose_methods(["protonet"])
    for function, arguments, message in (
        (evaluate, (X.numpy(), index, methods, EASY), "`x` must be a tensor .*; got ndarray"),
        (evaluate, (X.int(), index, methods, EASY), "`x` must .*; got torch.int32 of shape"),
        (evaluate, (load_source("x.npz"), index, methods, EASY), "got a Dataset. Pass it to eval"),
        (evaluate, (X, Y, methods, EASY), "`index` must be a ClassIndex.*Pass index_classes"),
        (evaluate, (X[:9], index, methods, EASY), "`index` must have numbers of the 9 rows"),
        (evaluate, (X, index, ["protonet"], EASY), "`methods` must be a mapping from names"),
        (choose_methods, ("protonet",), r"`texts` must be a list of names; got 'protonet'"),
        (load_source, (5,), "`text` must be the name or the path of a data set; got int"),
        (untyped.format_report, ({},), "`summary` must be an EvaluationSummary"),
        (untyped.summarize, ({}, 1), r"`shot` must be a pair of whole numbers"),
    ):
        call: Any = function
        with pytest.raises((ValueError, TypeError), match=message):
            call(*arguments)
