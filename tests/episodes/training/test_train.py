"""The command ``python -m protonet.episodes train``: its results, its checkpoints, its errors."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from protonet.episodes.__main__ import run_subcommand
from protonet.episodes.evaluation.evaluate import ProcessGroup, evaluate
from protonet.episodes.features.sources import load_source
from protonet.episodes.methods import METHODS
from protonet.episodes.names import OBJECTIVES
from protonet.episodes.networks.backbones import embed_rows_in_batches, make_backbone
from protonet.episodes.networks.checkpoints import load_trained_encoder, read_checkpoint, select_by_prefix
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.settings import TrainingPlan
from protonet.episodes.training import tasks
from protonet.episodes.training import train as training
from protonet.episodes.training.objectives import LOSS_NAMES, make_learner
from protonet.episodes.training.train import choose_backbone
from protonet.sampling import index_classes
from tests.episodes.cases import SIDES, Command, make_data, save_data

GENERATOR = torch.Generator()
run_train = partial(run_subcommand, "train")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the data; validate on few episodes, and measure batch normalisation on few rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "N_VALIDATION_EPISODES", 20)
    monkeypatch.setattr(tasks, "N_MAML_VALIDATION_EPISODES", 4)
    monkeypatch.setattr(training, "MIN_BATCH_NORM_ROWS", 40)
    save_data(tmp_path / "tiny.npz")
    return tmp_path


def train(more: str = "", output: str = "a.safetensors", *, beat_raw: bool = False) -> Path:
    """Run the command ``train`` on the tiny data; return the checkpoint's path.

    The encoder must only beat the raw features with ``beat_raw``.
    """
    small = "--backbone mlp --way 4 --query 2 --episodes-per-step 2 --steps 10 --eval-every 4 --patience 9 --device cpu"
    raw = None if beat_raw else ("protonet", tasks.ValidationScore(0, 0.0, 0.0))
    score = mock.patch.object(training, "score_best_raw_method", return_value=raw)
    with contextlib.nullcontext() if beat_raw else score:
        run_train(f"--dataset tiny.npz -o {output} {small} {more}".split())
    return Path(output)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return read_checkpoint("path", path)


def read_log(name: str = "log") -> list[dict[str, float]]:
    entries = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


def same_tensors(first: Path, second: Path) -> bool:
    one, other = load_file(first), load_file(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_encoder_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    path, entries = train("--log log"), read_log()
    assert [entry["step"] for entry in entries] == [0, 4, 8, 10]
    step, accuracy, half_width = read(path)[1]["best"]
    plan = TrainingPlan(**read(path)[1]["plan"])
    assert accuracy == max(entry["accuracy"] for entry in entries) == entries[-1]["best_accuracy"]
    encoder = load_trained_encoder(path).encoder
    side = tasks.select_split_side(make_data(), "validation")
    assert tasks.score_encoder(encoder, nn.Identity(), side, plan, step) == (step, accuracy, half_width)
    line = capsys.readouterr().out
    assert line.startswith(f"{path}: mlp, 10 steps, ")
    assert line.endswith(f"{100 * accuracy:.2f} ±{100 * half_width:.2f} % on validation classes\n")
    before = path.read_bytes()
    train("--resume")  # a finished run is reported again
    assert path.read_bytes() == before
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("step", "more"), [(4, "--objective anil --way 2"), (7, "--objective feat --backbone conv4 --shot 1")]
)
def test_an_interrupted_run_ends_in_the_same_tensors(monkeypatch: pytest.MonkeyPatch, step: int, more: str) -> None:
    """The first run has a head of four classes, the second one dropout and batch normalisation."""
    save_data(Path("tiny.npz"), dim=256)
    full = train(f"{more} --log whole", "whole.safetensors")

    def draw(
        base: tasks.SplitSide, plan: TrainingPlan, position: int, group: ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if position == step - 1:
            signal.raise_signal(signal.SIGINT)
        return tasks.draw_training_episodes(base, plan, position, group)

    with monkeypatch.context() as patch:
        patch.setattr(training, "draw_training_episodes", draw)
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match=rf"^stopped at step {step}; run again with --resume$"):
            train(f"{more} --log log")
        assert signal.getsignal(signal.SIGINT) is handler
    assert read(Path("a.safetensors"))[1]["step"] == step
    text = Path("log").read_text(encoding="utf-8")
    text = re.sub(r'"seconds": [\d.]+', '"seconds": 1000.0', text)  # as if it had taken that long
    crash = '{"step": 8, "accuracy": 0.5, "seconds": 1}\n{"step": 10, "accu'  # after the checkpoint
    Path("log").write_text(text + crash, encoding="utf-8")
    assert same_tensors(train(f"{more} --resume --log log"), full)
    assert read_log("whole") == read_log()
    after = [json.loads(line)["seconds"] for line in Path("log").read_text(encoding="utf-8").splitlines()]
    assert len(after) > text.count("\n")
    assert min(after) >= 1000


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_method_of_an_objective_has_the_accuracy_of_the_validation(objective: str) -> None:
    tiny = make_data()
    x = tiny.x + torch.randn(tiny.x.shape, generator=torch.Generator().manual_seed(0))  # classes overlap
    np.savez("tiny.npz", x=x.numpy(), y=tiny.y.numpy(), split=np.array(SIDES)[tiny.y.numpy()])
    # Prototypes are validated with one row of each class, whatever the shots of training.
    path = train(f"--objective {objective} --way 2 --log log --steps 2 --shot {2 if objective == 'prototypes' else 1}")
    validation = load_source("tiny.npz")
    index = index_classes(validation.y).select_classes(torch.tensor([3, 5]))
    trained = load_trained_encoder(path, dim=64)._replace(take=validation.get_rows)
    x = embed_rows_in_batches(trained.encoder, validation.get_rows, torch.arange(72))
    setting = EpisodeConfig((2, 2), (1, 1), 15, allow_small=True)
    n_episodes = 4 if objective == "maml" else 20
    methods = {"own": METHODS.get(objective, METHODS["protonet-cosine"])}
    accuracy = evaluate(x, index, methods, setting, episodes=n_episodes, trained=trained)["own"].accuracy
    assert 0.5 < float(accuracy.mean()) < 1
    assert float(accuracy.mean()) == pytest.approx(read(path)[1]["best"][1], abs=1e-9)
    assert trained.plan.objective == objective
    assert read_log()[-1].keys() & set(LOSS_NAMES) == set(make_learner(trained.plan, GENERATOR).loss_names)


def test_batch_normalisation_is_measured_with_the_averaged_weights(folder: Path) -> None:
    save_data(folder / "tiny.npz", dim=256)
    tensors, metadata = read(train("--backbone conv4 --steps 2"))
    plan = TrainingPlan(**metadata["plan"])
    encoder = make_backbone("conv4", 256, GENERATOR)
    encoder.load_state_dict(select_by_prefix(tensors, training.AVERAGED_PREFIX))
    measured = encoder[2].running_mean
    base = tasks.select_split_side(make_data(dim=256), "base")
    batches = [
        tasks.draw_training_episodes(base, plan, step, ProcessGroup())[0].flatten(0, 2) for step in range(2)
    ]  # 48 rows
    means = torch.stack([encoder[1](encoder[0](rows)).mean(dim=(0, 2, 3)) for rows in batches]).mean(dim=0)
    torch.testing.assert_close(measured, means.detach(), atol=1e-5, rtol=1e-4)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_run_begins_at_another_ones_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    first = train()
    more = f"--start {first} --objective anil --head zero --steps 1"
    learned, started = (select_by_prefix(read(path)[0], "best.") for path in (first, train(more, "b.safetensors")))
    assert all(float((started[name] - learned[name]).abs().max()) < 0.02 for name in learned)
    assert "mlp by anil, 1 steps" in capsys.readouterr().out
    message = r"`--start` must hold an encoder of conv and 64 features per row; got mlp and 64"
    with pytest.raises(ValueError, match=message):
        train(f"--start {first} --backbone conv", "c.safetensors")
    first.unlink()
    train(f"{more} --resume", "b.safetensors")


def test_a_run_begins_at_an_encoder_of_its_split(folder: Path) -> None:
    y = np.arange(20).repeat(8)
    np.savez("tiny.npz", x=np.eye(20, 64, dtype=np.float32)[y], y=y)
    train("--split-seed 0")
    with pytest.raises(ValueError, match=r"`--split-seed` must be that of `--start`, 0, .*; got 1\. Pass the same"):
        train(f"--split-seed 1 --start a.safetensors --dataset ../{folder.name}/tiny.npz", "b.safetensors")


def test_validation_classes_that_are_too_small_for_the_shots() -> None:
    tiny = make_data()
    some = (tiny.y != 3) | (torch.arange(72) < 20)  # few rows of a validation class
    np.savez("tiny.npz", x=tiny.x[some].numpy(), y=tiny.y[some].numpy(), split=np.array(SIDES)[tiny.y[some]])
    for minimum, more in ((2, "--head zero"), (3, "--way 3")):
        message = (
            rf"`--dataset` must have at least {minimum} validation classes with 7 rows \(`--shot` \+ 1\); got 1\. Ask"
        )
        with pytest.raises(ValueError, match=message):
            train(f"--objective anil --shot 6 --query 1 {more}")


def test_a_second_interrupt_comes_at_once() -> None:
    with training.delay_interrupt() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("objective", ["feat", "protonet"])
def test_a_finished_run_gets_more_steps(objective: str) -> None:
    more = f"--objective {objective} --log log"
    whole = train(f"{more} --steps 12", "whole.safetensors")
    entries = read_log()
    path = train(f"{more} --steps 8")
    assert read(path)[1]["plan"]["steps"] == 8
    assert same_tensors(train(f"{more} --steps 12 --patience 7 --resume"), whole)
    assert read_log() == entries
    assert read(path)[1]["plan"] == read(whole)[1]["plan"] | {"patience": 7}


def test_a_run_that_ended_between_two_validations_gets_more_steps() -> None:
    """The weights at its end are validated once more, and may be the best ones; further steps are the same."""
    path = train("--steps 12", "whole.safetensors")
    whole = select_by_prefix(read(path)[0], training.LEARNER_PREFIX)
    train("--steps 6")
    longer = select_by_prefix(read(train("--steps 12 --resume"))[0], training.LEARNER_PREFIX)
    assert all(torch.equal(longer[name], whole[name]) for name in whole)


def test_resuming_with_other_settings_or_data() -> None:
    train()
    same = r"^`--resume` must continue a run of the same settings; got"
    with pytest.raises(
        ValueError, match=rf"{same} `--seed` 0 there and 3 here; `--augment` affine there and none here\. Pass"
    ):
        train("--resume --steps 20 --seed 3 --augment none")
    with pytest.raises(ValueError, match=r"^`--steps` must be at least the 10 steps that are taken; got 9\. Pass more"):
        train("--resume --steps 9")
    step = read(Path("a.safetensors"))[1]["best"][0]
    message = rf"^`--patience` must allow more steps; got 1, .* ended at step 10\. Pass {(10 - step) // 4 + 1} or more"
    with pytest.raises(ValueError, match=message):
        train("--resume --steps 20 --patience 1")
    save_data(Path("tiny.npz"), dim=9)
    with pytest.raises(ValueError, match=rf"{same} features per row: 64 there and 9 here\. Pass the same"):
        train("--resume")


def test_the_backbone_by_default(tmp_path: Path) -> None:
    for dataset in ("glyphs", "omniglot:root", "mini-imagenet:root", str(tmp_path)):
        assert [choose_backbone(dataset, dim) for dim in (784, 3 * 84 * 84, 640)] == ["conv", "conv4", "mlp"]
    for dataset in ("digits", "synthetic:warped", str(tmp_path / "f.npz")):
        assert choose_backbone(dataset, 784) == "mlp"


def test_outputs_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protonet.episodes.features.sources.load_source", None)
    Path("old.safetensors").write_text("hours of work")
    for more, output, message in (
        ("", "old.safetensors", r"`--output` must be a new file; got old\.safetensors, which exists\. Cont"),
        ("--resume", "old.safetensors", r"`--output` must be a checkpoint of .* train; got .*old\.safetensors"),
        ("--log new.safetensors", "new.safetensors", r"`--log` must be another file than --output"),
        ("", "new.pt", r"`--output` must end in \.safetensors; got new\.pt\. Rename it\."),
    ):
        with pytest.raises(ValueError, match=message):
            train(more, output)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'must be installed\. Run pip install -e "\.\[train\]"\.'):
        train("", "new.safetensors")


def test_bad_arguments() -> None:
    rows = r"`--dataset` must have 9 rows per base class \(`--shot` \+ `--query`\); got class '0' with 8"
    for more, message in (
        ("--backbone conv --dropblock 0.1", "`--dropblock` must be of the backbone resnet12; got that of conv"),
        ("--augment crop", r"`--augment` must be one of none, affine; got 'crop'"),
        ("--backbone cnov", r"`--backbone` must be one of conv, .*; got 'cnov'\. Did you mean conv\?"),
        ("--steps 0", r"`--steps` must be a whole number >= 1; got '0'"),
        (f"--query {'9' * 20}", r"`--query` must be a whole number in \[1, 1000000\]; got 9{20}\."),
        ("--query 8", rows),
        ("--dataset synthetic:isotropic", r"`--dataset` must have a split by class; got none\. Pass `--split-seed` 0"),
        ("--split-seed 0", "`--split-seed` must be left out for data that have a split by class; got 0"),
        ("--device abacus", "`--device` must be a device of this machine; got 'abacus'"),
        (f"--seed {2**63}", rf"`--seed` must be a whole number in \[0, {2**63 - 1}\]; got {2**63}"),
        ("--objective maml --head zero --inner-rate 1e30", r"`loss` must stay finite; got nan in step \d\. Lower"),
    ):
        with pytest.raises(ValueError, match=rf"^{message}"):
            train(more)
        assert not Path("a.safetensors").exists()


def test_an_encoder_that_is_worse_than_raw_features_is_kept_and_marked(command: Command) -> None:
    noise = 3 * np.random.default_rng(0).normal(size=(9, 40, 64))
    x = np.eye(9, 64)[:, None] * 100 + noise  # raw features classify perfectly
    y = np.arange(9).repeat(40)
    np.savez("tiny.npz", x=x.reshape(-1, 64), y=y, split=np.array(SIDES)[y])
    line = (
        r"^`accuracy` must be above 100\.00 ±0\.00 % \(protonet on raw features\); got .* a\.safetensors is kept, and "
    )
    for more, step in (("--steps 10", 10), ("--steps 20 --resume", 20)):
        with pytest.raises(ValueError, match=line):
            train(f"{more} --eval-every 10 --log log", beat_raw=True)
        metadata = read(Path("a.safetensors"))[1]
        assert (metadata["step"], metadata["raw_features"]["beaten"]) == (step, False)
        assert len(read_log()) == 1 + step // 10
    assert metadata["raw_features"] == {"method": "protonet", "accuracy": 1.0, "half_width": 0.0, "beaten": False}
    arguments = "--dataset tiny.npz --encoder a.safetensors --way 2 --episodes 5 --method protonet"
    assert "the encoder was less accurate than the features without it" in command(arguments)


def test_an_encoder_that_is_better_than_raw_features_is_written() -> None:
    """Classes differ in a few features of small variance, and the encoder learns to use these features."""
    generator = np.random.default_rng(0)
    y = np.arange(30).repeat(20)
    signal_of = generator.normal(size=(30, 4))
    x = np.concatenate([signal_of[y] + 0.3 * generator.normal(size=(600, 4)), generator.normal(size=(600, 60))], axis=1)
    np.savez("tiny.npz", x=x, y=y, split=np.array(["base"] * 20 + ["validation"] * 10)[y])
    metadata = read(train("--way 20 --steps 60 --eval-every 30", beat_raw=True))[1]
    assert metadata["raw_features"]["beaten"]
    side = tasks.select_split_side(load_source("tiny.npz"), "validation")
    _, raw = tasks.score_best_raw_method(side, TrainingPlan(**metadata["plan"]))
    assert metadata["best"][1] > raw.accuracy + 0.05


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew() -> None:
    """Before the first checkpoint there is no file, but perhaps a line of the log about the untrained network."""
    full, entries = train("--log log", "whole.safetensors"), read_log()
    log = Path("log")
    log.write_text(log.read_text(encoding="utf-8").partition("\n")[0] + "\n", encoding="utf-8")
    assert same_tensors(train("--resume --log log"), full)
    assert read_log() == entries
