"""Methods that use a meta-trained encoder, from the command line and from Python: real files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods.choice import choose_methods
from protonet.episodes.networks.backbones import embed_rows
from protonet.episodes.networks.checkpoints import load_trained
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.training import tasks
from protonet.episodes.training.objectives import TRAINING_RECIPE
from protonet.sampling import index_classes
from tests.episodes.cases import TRAINED
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
    other = make_data(dim=9)
    np.savez("other.npz", x=other.x.numpy(), y=other.y.numpy(), split=np.array(SIDES)[other.y.numpy()])
    Path("mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.setattr(tasks, "VALIDATION", replace(tasks.VALIDATION, n_episodes=10, n_slow=2))
    monkeypatch.setattr("protonet.episodes.training.train.TRAINING_RECIPE", replace(TRAINING_RECIPE, measured_rows=40))
    return tmp_path


def train(command: Command, objective: str, *more: str) -> str:
    """Train an encoder for a step, and return the arguments of its evaluation."""
    small = "--dataset tiny.npz --way 2 --query 2 --episodes-per-step 2 --steps 1 --backbone mlp --device cpu"
    command(f"train --objective {objective} {small}", *more, "-o a.safetensors")
    return f"{FEW} --encoder a.safetensors"


@pytest.mark.parametrize("objective", ["feat", "maml", "anil"])
def test_an_objective_is_trained_and_its_method_evaluated(command: Command, folder: Path, objective: str) -> None:
    methods = ["protonet", objective, "finetune:steps=1", "mine.py:own"]
    accuracies = command.accuracies(train(command, objective), "--method", *methods)
    assert accuracies.keys() == set(methods)
    data = make_data()
    trained = load_trained(folder / "a.safetensors", data.get_rows, dim=64)
    x = embed_rows(trained.encoder, data.get_rows, torch.arange(72))
    index = index_classes(data.y).take(torch.tensor([c for c, side in enumerate(SIDES) if side == "novel"]))
    scores = evaluate(x, index, choose_methods(methods), SETTING, n_episodes=5, trained=trained)
    for name in methods:
        assert accuracies[name] == pytest.approx(float(scores[name].accuracy.mean()), abs=1e-9)
    assert accuracies["mine.py:own"] == accuracies["protonet"]  # of one shot


@pytest.mark.usefixtures("folder")
def test_all_leaves_out_methods_of_other_objectives(command: Command) -> None:
    out = command(train(command, "feat", "--backbone conv"), "--side all --method all")
    assert "Without an encoder of their objectives, maml, anil are left out." in out
    assert "| feat " in out
    assert all(f"| {name} " not in out for name in TRAINED if name != "feat")


@pytest.mark.usefixtures("folder")
def test_bad_input(command: Command) -> None:
    arguments = train(command, "feat")
    for more, message in (
        ("--method maml", "find an encoder of the objective maml; got one of feat for maml. Pass the `--encoder`"),
        ("--method finetune:head=tree", "^protonet.episodes: `head` must be one of prototypes, linear; got 'tree'."),
        ("--method finetune:learning-rate=-1", "have settings within their bounds, >= 0 here; got '-1'"),
        ("--method feat:temperature=0", "have settings within their bounds, > 0 here; got '0'"),
        ("--dataset other.npz --method feat", "`--encoder` must hold an encoder of 9 features per row; got 64."),
    ):
        command.refuses(message, arguments, more)
    for method, of in (("feat", " of the objective feat"), ("finetune", "")):
        message = f"`--method` must find an encoder{of}; got none for {method}. Pass the `--encoder` of such a run."
        command.refuses(message, FEW, "--method", method)


@pytest.mark.usefixtures("folder")
def test_a_last_layer_of_other_classes_is_refused_before_the_work(command: Command) -> None:
    arguments = f"{train(command, 'anil')} --side all"
    command(arguments, "--method anil")
    message = "`--way` must be 2 for anil, whose last layer has weights of as many classes; got 3. Pass 2, or"
    command.refuses(message, arguments, "--way 3 --method anil")
    message = "The head of the encoder is for another number of classes: anil are left out."
    assert message in command(arguments, "--way 3 --method all")
