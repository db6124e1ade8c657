"""Methods that use a meta-trained encoder, from the command line and from Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protonet.episodes.methods import METHODS
from protonet.episodes.methods.choice import AvailableInputs, select_methods
from protonet.episodes.training import tasks
from tests.episodes.command_cases import Command
from tests.episodes.meta_cases import save_data

pytestmark = pytest.mark.usefixtures("no_baseline")
FEW = "--dataset tiny.npz --way 2 --query 3 --episodes 5"


def test_methods_refuse_encoders_that_do_not_fit(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_data(tmp_path / "tiny.npz")
    save_data(tmp_path / "other.npz", dim=9)
    monkeypatch.setattr(tasks, "VALIDATION", replace(tasks.VALIDATION, n_episodes=10))
    small = "--dataset tiny.npz --way 2 --query 2 --episodes-per-step 2 --steps 1 --backbone mlp --device cpu"
    command(f"train --objective anil {small} -o a.safetensors")
    arguments = f"{FEW} --encoder a.safetensors"
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
