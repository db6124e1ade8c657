"""The command gives the same results on another device as on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from protonet.episodes.evaluation.distributed import get_process_device
from tests.emulated_device import AWAY, EmulatedDevice
from tests.episodes.command_cases import Command
from tests.episodes.meta_cases import save_data

FEW = "--dataset tiny.npz --side novel --way 2 --query 2 --episodes 6"
LINES = {
    "plain": "--dataset tiny.npz --side all --way 3 --query 4 --episodes 6 --method protonet mine.py:own",
    "mapped, normalised": f"{FEW} --normalize cl2 --method simpleshot bd-cspn mine.py:own",
    "shots, open, shares": "--dataset tiny.npz --side all --way 2-4 --shot 1-2 --unequal --query 1 --n-open-classes 1 "
    "--imbalance 2 --unlabelled 2 --episodes 6 --method oslo semi-kmeans",
    "generalised": f"{FEW} --protocol generalized --method protonet",
    "encoder": f"{FEW} --encoder a.safetensors --method feat protonet finetune:steps=1 mine.py:own",
}
OWN = """
from protonet.episodes.methods.prototypes import protonet

def own(episodes):
    if episodes.base is not None:
        episodes.base.take(episodes.base.by_class.rows)
    if episodes.trained is not None:
        episodes.trained.gather()
    return protonet(episodes)
"""


@pytest.mark.parametrize("name", LINES)
@pytest.mark.usefixtures("no_baseline")
def test_a_command_gives_the_same_on_another_device(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_data(tmp_path / "tiny.npz")
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    if name == "encoder":
        small = "--dataset tiny.npz --way 2 --query 2 --episodes-per-step 2 --steps 1 --backbone mlp --device cpu"
        command(f"train --objective feat {small} -o a.safetensors")
    expected = command(LINES[name], "--json here.json")
    with EmulatedDevice():
        result = command(LINES[name], f"--device {AWAY} --json there.json")
    assert result == expected
    here, there = (json.loads(Path(f"{item}.json").read_text(encoding="utf-8")) for item in ("here", "there"))
    assert there["settings"].pop("device") == str(AWAY)
    assert there == here


def test_a_device_that_the_machine_lacks_is_refused(command: Command) -> None:
    for device in ["abacus", "meta", "cuda:99"]:
        command.refuses(
            r"`--device` must be a device of this machine; got '.*' \(.*\)\. Pass 'cpu'\.", "--device", device
        )


def test_processes_of_a_machine_share_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(get_process_device(name)) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
