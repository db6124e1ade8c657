"""Methods that use a meta-trained encoder, from the command line and from Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS
from protonet.episodes.methods.choice import AvailableInputs, choose_methods, select_methods
from protonet.episodes.networks.backbones import embed_rows_in_batches
from protonet.episodes.networks.checkpoints import load_trained_encoder
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.training import tasks
from protonet.episodes.training.objectives import META_TRAINING
from protonet.sampling import index_classes
from tests.episodes.command_cases import Command
from tests.episodes.meta_cases import SIDES, make_data, save_data

pytestmark = pytest.mark.usefixtures("no_baseline")
SETTING = EpisodeConfig((2, 2), n_query=3)
FEW = "--dataset tiny.npz --way 2 --query 3 --episodes 5"
MINE = """
def own(episodes):
    for weight in episodes.trained.encoder.parameters():
        weight.data.zero_()  # of a copy
    rows, _ = episodes.trained.gather()
    assert rows.shape == (len(rows), 2, 64)
    return -((episodes.query[:, :, None] - episodes.support[:, None]) ** 2).sum(dim=3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_data(tmp_path / "tiny.npz")
    save_data(tmp_path / "other.npz", dim=9)
    Path("mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.setattr(tasks, "VALIDATION", replace(tasks.VALIDATION, n_episodes=10, n_slow_episodes=2))
    monkeypatch.setattr("protonet.episodes.training.train.META_TRAINING", replace(META_TRAINING, batch_norm_rows=40))
    return tmp_path


def train(command: Command, objective: str, *more: str) -> str:
    """Train an encoder for one step, and return the arguments of an evaluation with the encoder."""
    small = "--dataset tiny.npz --way 2 --query 2 --episodes-per-step 2 --steps 1 --backbone mlp --device cpu"
    command(f"train --objective {objective} {small}", *more, "-o a.safetensors")
    return f"{FEW} --encoder a.safetensors"


@pytest.mark.parametrize("objective", ["feat", "maml"])
def test_an_objective_is_trained_and_its_method_evaluated(command: Command, folder: Path, objective: str) -> None:
    methods = ["protonet", objective, "finetune:steps=1", "mine.py:own"]
    accuracies = command.accuracies(train(command, objective), "--method", *methods)
    data = make_data()
    trained = load_trained_encoder(folder / "a.safetensors", data.get_rows, dim=64)
    x = embed_rows_in_batches(trained.encoder, data.get_rows, torch.arange(72))
    index = index_classes(data.y).select_classes(torch.tensor([c for c, side in enumerate(SIDES) if side == "novel"]))
    scores = evaluate(x, index, choose_methods(methods), SETTING, n_episodes=5, trained=trained)
    assert accuracies == pytest.approx({name: float(score.accuracy.mean()) for name, score in scores.items()}, abs=1e-9)
    assert accuracies["mine.py:own"] == accuracies["protonet"]  # of one shot


@pytest.mark.usefixtures("folder")
def test_methods_refuse_encoders_that_do_not_fit(command: Command) -> None:
    arguments = train(command, "anil")
    for more, message in (
        ("--method maml", "find an encoder of the objective maml; got one of anil for maml. Pass the `--encoder`"),
        ("--method finetune:head=tree", "`finetune:head` must be one of prototypes, linear; got 'tree'."),
        ("--method finetune:learning-rate=-1", "have settings within their bounds, >= 0 here; got '-1'"),
        ("--dataset other.npz --method anil", "`--encoder` must hold an encoder of 9 features per row; got 64."),
        ("--side all --way 3 --method anil", "`--way` must be 2 for anil, whose last layer has .*; got 3. Pass 2, or"),
    ):
        command.refuses(message, arguments, more)
    for method, of in (("feat", " of the objective feat"), ("finetune", "")):
        message = f"`--method` must find an encoder{of}; got none for {method}. Pass the `--encoder` of such a run."
        command.refuses(message, FEW, "--method", method)


def test_all_leaves_out_methods_of_other_objectives_and_other_ways() -> None:
    given: dict[str, Any] = {"n_base_classes": 2, "has_texts": True, "has_unlabelled": True, "has_feature_maps": True}
    available = AvailableInputs(objective="anil", head_way=2, way=(2, 2), has_class_means=False, **given)
    methods, notes = select_methods([], available, all_methods=True)
    assert "Without an encoder of their objectives, feat, maml are left out." in notes
    assert methods.keys() == {name for name, spec in METHODS.items() if not spec.slow} - {"feat", "maml"}
    methods, notes = select_methods([], replace(available, way=(3, 3)), all_methods=True)
    assert "The head of the encoder is for another number of classes: anil are left out." in notes
    assert "anil" not in methods
