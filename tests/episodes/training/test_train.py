"""The command ``python -m protonet.episodes train``: its results, its checkpoints, its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from protonet.episodes.__main__ import train as run_train
from protonet.episodes.draws.batch import take_from
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.evaluation.distributed import Group
from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS
from protonet.episodes.networks.backbones import embed_rows, make_backbone
from protonet.episodes.networks.checkpoints import (
    Plan,
    complete_plan,
    load_encoder,
    load_trained,
    read_checkpoint,
    read_plan,
    take_prefix,
)
from protonet.episodes.training import meta, tasks
from protonet.episodes.training.objectives import LOSSES, RECIPE, make_learner
from protonet.episodes.training.tasks import Score, Side, draw_batch, score_encoder, take_side
from protonet.episodes.training.train import choose_backbone
from protonet.sampling import index_classes
from tests.episodes.meta_cases import SIDES, make_data, save_data

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = torch.Generator()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save_data(tmp_path / "tiny.npz")


def arguments(data: Path, output: str, *more: str) -> list[str]:
    small = "--backbone mlp --way 4 --query 2 --episodes-per-step 2 --steps 10 --eval-every 4 --patience 9 --device cpu"
    return ["--dataset", str(data), "-o", str(data.with_name(output)), *small.split(), *more]


def read_log(path: Path) -> list[dict[str, float]]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(base: Side, plan: Plan, number: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        if number == step - 1:
            signal.raise_signal(signal.SIGINT)
        return draw_batch(base, plan, number, group)

    monkeypatch.setattr(meta, "draw_batch", draw)


def test_the_best_encoder_is_kept(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_train(arguments(data, "a.safetensors", "--log", str(data.with_name("log"))))
    path = data.with_name("a.safetensors")
    entries = read_log(data.with_name("log"))
    assert [entry["step"] for entry in entries] == [0, 4, 8, 10]
    step, accuracy, half_width = read_checkpoint("f", "path", path)[1]["best"]
    assert accuracy == max(entry["accuracy"] for entry in entries) == entries[-1]["best_accuracy"]
    encoder = load_encoder(path)
    score = score_encoder(encoder, take_side("f", "data", make_data(), "validation"), step, Group())
    assert score == (step, accuracy, half_width)
    assert embed_rows(encoder, take_from(make_data().x), torch.arange(72)).shape == (72, 128)
    assert step == 0
    said = f"no validation beat the untrained network: {100 * accuracy:.2f} ±{100 * half_width:.2f} %"
    assert capsys.readouterr().out == f"{path}: mlp, 10 steps, {said} on validation classes\n"


def test_the_closing_line(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(meta, "score_encoder", lambda _encoder, _side, step, *_: Score(step, step / 10, 0.1))
    run_train(arguments(data, "a.safetensors"))
    assert capsys.readouterr().out.endswith(": mlp, 10 steps, 100.00 ±10.00 % on validation classes after step 10\n")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take few validation episodes, and few rows to measure batch normalisation on."""
    monkeypatch.setattr(tasks, "VALIDATION", replace(tasks.VALIDATION, n_episodes=20, n_slow=4))
    monkeypatch.setattr("protonet.episodes.training.meta.RECIPE", replace(RECIPE, measured_rows=40))


@pytest.mark.parametrize(("step", "objective"), [(4, "prototypes"), (7, "prototypes"), (7, "feat"), (7, "anil")])
def test_an_interrupted_run_ends_in_the_same_tensors(
    data: Path, monkeypatch: pytest.MonkeyPatch, quick: None, step: int, objective: str
) -> None:
    more = ["--objective", objective, "--way", "2" if objective == "anil" else "4"]
    logs = [data.with_name(f"{name}.jsonl") for name in ("whole", "parts")]
    run_train(arguments(data, "whole.safetensors", *more, "--log", str(logs[0])))
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match=rf"^stopped at step {step}; run again with --resume$"):
            run_train(arguments(data, "parts.safetensors", *more, "--log", str(logs[1])))
        assert signal.getsignal(signal.SIGINT) is handler
    assert read_checkpoint("f", "path", data.with_name("parts.safetensors"))[1]["step"] == step
    with logs[1].open("a", encoding="utf-8") as file:
        file.write('{"step": 8, "accuracy": 0.5}\n{"step": 10, "accu')  # of a crash after the checkpoint
    run_train(arguments(data, "parts.safetensors", *more, "--resume", "--log", str(logs[1])))
    whole, parts = (load_file(data.with_name(f"{name}.safetensors")) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert read_log(logs[0]) == read_log(logs[1])


@pytest.mark.parametrize("objective", ["feat", "maml", "anil"])
def test_the_method_of_an_objective_has_the_accuracy_of_the_validation(data: Path, quick: None, objective: str) -> None:
    path = data.with_name("a.safetensors")
    more = ["--objective", objective, "--way", "2", "--log", str(data.with_name("log"))]
    run_train(arguments(data, "a.safetensors", *more, "--steps", "2"))
    best = read_checkpoint("f", "path", path)[1]["best"]
    validation = make_data()
    index = index_classes(validation.y).take(torch.tensor([3, 5]))
    trained = load_trained(path, validation.take_rows, dim=64)
    x = embed_rows(trained.encoder, validation.take_rows, torch.arange(72))
    setting = Setting((2, 2), (1, 1), 15, allow_small=True)
    n_episodes = 4 if objective == "maml" else 20
    methods = {objective: METHODS[objective]}
    accuracy = evaluate(x, index, methods, setting, n_episodes=n_episodes, trained=trained)[objective].accuracy
    assert float(accuracy.mean()) == pytest.approx(best[1], abs=1e-9)
    assert read_plan(path)["objective"] == objective
    entries = read_log(data.with_name("log"))
    assert entries[-1].keys() & set(LOSSES) == set(make_learner(Plan(**read_plan(path)), GENERATOR).losses)


def test_batch_normalisation_is_measured_with_the_averaged_weights(tmp_path: Path, quick: None) -> None:
    data = save_data(tmp_path / "tiny.npz", dim=256)
    run_train(arguments(data, "a.safetensors", "--backbone", "conv4", "--steps", "2"))
    tensors, metadata = read_checkpoint("f", "path", tmp_path / "a.safetensors")
    plan = Plan(**complete_plan(metadata["plan"]))
    encoder = make_backbone("conv4", 256, GENERATOR)
    encoder.load_state_dict(take_prefix(tensors, meta.AVERAGED))
    measured = encoder[2].running_mean
    base = take_side("f", "data", make_data(dim=256), "base")
    batches = [draw_batch(base, plan, step, Group())[0].flatten(0, 2) for step in range(2)]  # 48 rows
    means = torch.stack([encoder[1](encoder[0](rows)).mean(dim=(0, 2, 3)) for rows in batches]).mean(dim=0)
    torch.testing.assert_close(measured, means.detach(), atol=1e-5, rtol=1e-4)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_run_begins_at_another_ones_encoder(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (data.with_name(f"{name}.safetensors") for name in "ab")
    run_train(arguments(data, first.name))
    more = ["--start", str(first), "--objective", "anil", "--head", "zero", "--steps", "1"]
    run_train(arguments(data, second.name, *more))
    learned = take_prefix(read_checkpoint("f", "path", first)[0], "best.")
    started = take_prefix(read_checkpoint("f", "path", second)[0], "best.")
    assert all(float((started[name] - learned[name]).abs().max()) < 0.02 for name in learned)
    assert "mlp by anil, 1 steps" in capsys.readouterr().out
    first.unlink()
    run_train(arguments(data, second.name, *more, "--resume"))
    with pytest.raises(ValueError, match=r"--head zero there and classes here"):
        run_train(arguments(data, second.name, *more, "--head", "classes", "--way", "2", "--resume"))


def test_validation_classes_that_are_too_small_for_the_shots(data: Path) -> None:
    tiny = make_data()
    kept = (tiny.y != 3) | (torch.arange(72) < 20)  # few rows of a validation class
    np.savez(data, x=tiny.x[kept].numpy(), y=tiny.y[kept].numpy(), split=np.array(SIDES)[tiny.y[kept]])
    more = ["--objective", "anil", "--shot", "6", "--query", "1"]
    for least, own in ((2, ["--head", "zero"]), (3, ["--way", "3"])):
        said = rf"`--dataset` must have at least {least} validation classes with 7 rows \(--shot \+ 1\); got 1\. Ask"
        with pytest.raises(ValueError, match=said):
            run_train(arguments(data, "a.safetensors", *more, *own))


def test_losses_that_are_not_finite(data: Path, quick: None) -> None:
    said = r"^train: `loss` must stay finite; got nan in step \d\. Lower --learning-rate, or --inner-rate; --resume"
    with pytest.raises(ValueError, match=said):
        run_train(arguments(data, "a.safetensors", "--objective", "maml", "--head", "zero", "--inner-rate", "1e30"))


def test_a_run_begins_at_an_encoder_of_its_backbone(data: Path) -> None:
    run_train(arguments(data, "a.safetensors"))
    start = ["--start", str(data.with_name("a.safetensors")), "--backbone", "conv"]
    with pytest.raises(
        ValueError, match=r"`--start` must hold an encoder of conv and 64 features per row; got mlp and 64"
    ):
        run_train(arguments(data, "b.safetensors", *start))


def test_a_run_begins_at_an_encoder_of_its_split(data: Path) -> None:
    y = np.arange(20).repeat(8)
    np.savez(data, x=np.eye(20, 64, dtype=np.float32)[y], y=y)
    run_train(arguments(data, "a.safetensors", "--split-seed", "0"))
    again = Path(os.path.relpath(data.parent)) / data.name
    start = ["--split-seed", "1", "--start", str(data.with_name("a.safetensors"))]
    with pytest.raises(ValueError, match=r"`--split-seed` must be that of --start, 0, .*; got 1\. Pass the same"):
        run_train([*arguments(data, "b.safetensors", *start), "--dataset", str(again)])


def test_files_of_before_the_objectives_are_the_same(data: Path) -> None:
    run_train(arguments(data, "a.safetensors"))
    stored = read_checkpoint("f", "path", data.with_name("a.safetensors"))[1]["plan"]
    fields = {"dataset", "split_seed", "dim", "classes", "backbone", "way", "shot", "query", "episodes_per_step"}
    assert stored.keys() == fields | {"steps", "eval_every", "patience", "seed"}
    plan = read_plan(data.with_name("a.safetensors"))
    assert plan["objective"] == "prototypes"
    assert plan == Plan(**stored)._asdict()


def test_seconds_go_on_where_they_stopped(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = data.with_name("log.jsonl")
    with monkeypatch.context() as patch:
        interrupt_at(7, patch)
        with pytest.raises(KeyboardInterrupt):
            run_train(arguments(data, "parts.safetensors", "--log", str(log)))
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    entries[-1]["seconds"] = 1000.0  # as if it had taken that long
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    run_train(arguments(data, "parts.safetensors", "--resume", "--log", str(log)))
    after = [json.loads(line)["seconds"] for line in log.read_text(encoding="utf-8").splitlines()][len(entries) :]
    assert after
    assert all(seconds >= 1000 for seconds in after)


def test_a_second_interrupt_comes_at_once() -> None:
    with meta.delay_interrupt() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(data: Path, quick: None) -> None:
    """There is no file yet, but perhaps a line of the log, of the untrained network."""
    log = data.with_name("log.jsonl")
    run_train(arguments(data, "whole.safetensors", "--log", str(log)))
    entries = read_log(log)
    log.write_text(log.read_text(encoding="utf-8").partition("\n")[0] + "\n", encoding="utf-8")
    run_train(arguments(data, "killed.safetensors", "--resume", "--log", str(log)))
    whole, killed = (load_file(data.with_name(f"{name}.safetensors")) for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert read_log(log) == entries


def test_a_finished_run_is_reported_again(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_train(arguments(data, "a.safetensors"))
    before, said = data.with_name("a.safetensors").read_bytes(), capsys.readouterr().out
    run_train(arguments(data, "a.safetensors", "--resume"))
    assert data.with_name("a.safetensors").read_bytes() == before
    assert capsys.readouterr().out == said


def test_patience_ends_a_run(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "score_encoder", lambda _encoder, _side, step, *_: Score(step, 0.5, 0.1))
    run_train(arguments(data, "a.safetensors", "--steps", "99", "--patience", "2"))
    assert read_checkpoint("f", "path", data.with_name("a.safetensors"))[1]["step"] == 8


def test_tensorboard_has_the_log(data: Path) -> None:
    folder, log = data.with_name("board"), data.with_name("log")
    run_train(arguments(data, "a.safetensors", "--tensorboard", str(folder), "--log", str(log)))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(folder)).Reload()
    for name in ("accuracy", "episodic_loss", "cross_entropy"):
        logged = [(entry["step"], entry[name]) for entry in read_log(log) if name in entry]
        assert len(logged) == (4 if name == "accuracy" else 3)
        board = [(event.step, event.value) for event in events.Scalars(name)]
        assert board == [(step, pytest.approx(value)) for step, value in logged]


def test_resuming_with_other_settings(data: Path) -> None:
    run_train(arguments(data, "a.safetensors"))
    said = (
        r"`--resume` must continue a run of the same settings; got --steps 10 there and 20 here; --seed 0 there and 3 "
    )
    with pytest.raises(ValueError, match=rf"^protonet\.episodes train: {said}here\. Pass the same"):
        run_train(arguments(data, "a.safetensors", "--resume", "--steps", "20", "--seed", "3"))


def test_resuming_with_other_data(data: Path) -> None:
    run_train(arguments(data, "a.safetensors"))
    other = make_data(dim=9)
    np.savez(data, x=other.x.numpy(), y=other.y.numpy(), split=np.array(["base", "validation", "base"] * 3)[other.y])
    said = r"same settings; got features per row: 64 there and 9 here; base classes: 5 there and 6 here\. Pass the same"
    with pytest.raises(ValueError, match=said):
        run_train(arguments(data, "a.safetensors", "--resume"))


def test_the_backbone_by_default(tmp_path: Path) -> None:
    for dataset in ("glyphs", "omniglot:root", "mini-imagenet:root", str(tmp_path)):
        assert choose_backbone(dataset, 784) == "conv"
        assert choose_backbone(dataset, 3 * 84 * 84) == "conv4"
        assert choose_backbone(dataset, 640) == "mlp"
    for dataset in ("digits", "synthetic:warped", str(tmp_path / "f.npz")):
        assert choose_backbone(dataset, 784) == "mlp"


def test_outputs_are_checked_first(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protonet.episodes.features.sources.load_source", None)
    data.with_name("old.safetensors").write_text("hours of work")
    with pytest.raises(ValueError, match=r"`--output` must be a new file; got .*old\.safetensors, which exists\. Cont"):
        run_train(arguments(data, "old.safetensors"))
    with pytest.raises(ValueError, match=r"`--output` must be a checkpoint of .* train; got .*old\.safetensors"):
        run_train(arguments(data, "old.safetensors", "--resume"))
    with pytest.raises(ValueError, match=r"`--log` must be another file than --output"):
        run_train(arguments(data, "new.safetensors", "--log", str(data.with_name("new.safetensors"))))
    with pytest.raises(ValueError, match=r"`--tensorboard` must be a folder that can be written"):
        run_train(arguments(data, "new.safetensors", "--tensorboard", str(data)))
    with pytest.raises(ValueError, match=r"`--output` must end in \.safetensors; got .*new\.pt\. Rename it\."):
        run_train(arguments(data, "new.pt"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'must be installed; .* Run pip install "protonet\[tensorboard\]"\.'):
        run_train(arguments(data, "new.safetensors", "--tensorboard", str(data.with_name("board"))))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'`safetensors` must be installed; .* Run pip install "protonet\[train\]"\.'):
        run_train(arguments(data, "new.safetensors"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--backbone", "cnov"],
            r"`--backbone` must be one of conv, conv4, mlp, resnet12; got 'cnov'\. Did you mean conv\?",
        ),
        (["--steps", "0"], r"`--steps` must be a whole number >= 1; got '0'"),
        (["--query", "9" * 20], r"`--query` must be a whole number in \[1, 1000000\]; got 9{20}\."),
        (
            ["--query", "8"],
            r"`--dataset` must have 9 rows per base class \(--shot \+ --query\); got class '0' with 8\. "
            r"Ask for fewer rows\.$",
        ),
        (
            ["--dataset", "synthetic:isotropic"],
            r"`--dataset` must have a split by class; got none\. Pass --split-seed 0",
        ),
        (
            ["--split-seed", "0"],
            r"`--dataset` must have at least 2 validation classes with 2 rows; got 1\. Add classes ",
        ),
        (["--device", "meta"], r"`--device` must be one that torch has here; got meta \(.*\)\. Leave it out\."),
        (["--device", "abacus"], r"`--device` must be one that torch has here; got abacus \(.*\)\. Leave it out\."),
        (
            ["--seed", str(2**63)],
            r"`--seed` must be a whole number in \[0, 9223372036854775807\]; got 9223372036854775808",
        ),
        (["--way", "1"], r"`--way` must be a whole number >= 2; got '1'"),
    ],
)
def test_bad_arguments(data: Path, more: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^(protonet\.episodes train: )?{said}"):
        run_train(arguments(data, "a.safetensors", *more))
    assert not data.with_name("a.safetensors").exists()


def test_two_processes_follow_the_path_of_one(data: Path) -> None:
    both = [
        arguments(data, f"{name}.safetensors", "--backbone", "conv", "--log-file", str(data.with_name(name)))
        for name in ("one", "two")
    ]
    run_train(both[0])
    code = "import sys; from protonet.episodes.__main__ import train; train(sys.argv[1:])"
    script = data.with_name("script.py")
    script.write_text(code, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run([*launch, *both[1]], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    one, two = (read_log(data.with_name(name)) for name in ("one", "two"))
    assert len(one) == 4
    for ours, theirs in zip(one, two, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() & {"step", *LOSSES}:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3)
        assert theirs["accuracy"] == pytest.approx(ours["accuracy"], abs=0.02)
