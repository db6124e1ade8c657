"""The evaluation command ``python -m protonet.episodes``, with real processes and files."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from protonet import episodes
from protonet.episodes.__main__ import main
from protonet.episodes.methods import METHODS
from tests.episodes.cases import Command

FEW = "--dataset x.npz --way 3 --query 4 --episodes 300"
SIDES = ["base", "novel", "novel", "validation", "base", "novel", "novel", "base", "novel", "validation"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write 10 classes of 12 rows, to x.npz with a split by class and to plain.npz without a split."""
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12) * 7 - 20
    x = generator.normal(size=(10, 5))[np.repeat(np.arange(10), 12)] + 0.7 * generator.normal(size=(120, 5))
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32), y=y, split=np.repeat(np.array(SIDES), 12))
    np.savez(tmp_path / "plain.npz", x=x.astype(np.float32), y=y)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_exported_name_is_the_object_of_its_module() -> None:
    for name in episodes.__all__:
        exported = getattr(episodes, name)
        assert getattr(import_module(exported.__module__), name) is exported
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = episodes.absent


def test_report_and_files(command: Command, folder: Path) -> None:
    methods = ["protonet", "simpleshot", "distribution-calibration:n_samples=20"]
    outputs = "--json out.json --plot out.png"
    out = command(FEW, "--shot 1-2", outputs, "--method", *methods)
    assert out.startswith("x.npz, 5 classes, 5 features: 3-way 1-2-shot 4-query, 300 episodes, seed 0\n")
    assert "wrote" in command.error
    summary = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert list(summary["methods"]) == methods
    assert all(0.4 < method["accuracy"] < 1 for method in summary["methods"].values())
    assert (summary["settings"]["dataset"], summary["settings"]["side"]) == ("x.npz", "novel")
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    assert command(FEW, "--shot 1-2 --method", *methods) == out
    # A method that takes base rows disturbs no other.
    alone = command.read(FEW, "--shot 1-2 --method protonet")["methods"]["protonet"]
    assert alone == summary["methods"]["protonet"]
    for more, n in (("--side all", 10), ("--way 2 --dataset plain.npz --split-seed 1", 2)):
        assert f", {n} classes, " in command(FEW, more, "--episodes 9 --method protonet")


def test_errors(command: Command, folder: Path) -> None:
    """Each error is one line that names the option and the constraint; it comes before the work."""
    x, y = np.zeros((20, 3), np.float32), np.arange(20) // 5
    x[[3, 7]] = np.nan
    np.savez("nan.npz", x=x, y=y)
    before = (folder / "x.npz").read_bytes()
    for arguments, message in (
        ("--method protonett", "`--method` must be one of protonet, .*; got 'protonett'. Did you mean protonet?"),
        ("--way 6", r"`--way` must be at most the number of classes \(5\); got 6"),
        ("--way x", "`--way` must be a whole number >= 2; got 'x'"),
        ("--way 9-5", "`--way` must be a number or a span such as 5-20; got '9-5'"),
        ("--imbalance nan", "`--imbalance` must be a finite number > 0"),
        ("--side test", "`--side` must be one of novel, validation, base, all; got 'test'"),
        ("--dataset glyhps", "got 'glyhps'. Did you mean glyphs?"),
        ("--dataset nan.npz", "NaN or infinity in 2 of 20 rows: 3, 7"),
        ("--json x.npz", "`--json` must be another file than the inputs"),
        ("--split-seed 1", "`--split-seed` must be left out for data that have a split by class"),
        (f"--query {'9' * 30} --allow-small", "`--query` must be a whole number in .*; got 9999"),
        ("--plot build/out.jpeg", "`--plot` must end in .png, .pdf, .svg; got build/out.jpeg"),
        ("--resume", "`--resume` must come with the file to continue; got no `--state`"),
        ("--frobnicate", "unknown option: --frobnicate"),
    ):
        command.refuses(message, FEW, "--method protonet", arguments)
    command.refuses("`command` must be one of train, .*; got 'trian'. Did you mean train?", "trian")
    assert (folder / "x.npz").read_bytes() == before


def test_small_classes_are_reported(command: Command) -> None:
    out = command(FEW, "--query 20 --allow-small --method protonet")
    assert "\n5 of 5 classes have fewer rows than shot + query, 0 too few to be drawn.\n" in out


@pytest.mark.usefixtures("no_baseline")
def test_an_encoder_is_not_evaluated_on_another_split(command: Command, folder: Path) -> None:
    encoder = "encoder.safetensors"
    command(f"train --dataset x.npz --backbone mlp --way 3 --steps 2 --eval-every 1 -o {encoder}")
    evaluation = f"{FEW} --method protonet simpleshot --encoder {encoder}"
    assert f", 5 classes, {encoder}: " in command(evaluation)
    assert "The encoder was trained or chosen on classes of side base" in command(evaluation, "--side base")
    (folder / "plain.npz").rename("x.npz")
    for spelled in ("x.npz", f"../{folder.name}/x.npz"):
        other = f"--way 2 --split-seed 1 --dataset {spelled}"
        command.refuses("`--split-seed` must be the encoder's", evaluation, other)


def test_a_missing_package_is_detected_before_the_work(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command.refuses("`matplotlib` must be installed", FEW, "--plot a.png")


@pytest.mark.parametrize("n_features", [5, 200])  # narrow rows are scored in larger batches
def test_a_run_continues_with_more_episodes(command: Command, n_features: int) -> None:
    generator = np.random.default_rng(1)
    y = np.repeat(np.arange(6), 12)
    np.savez("x.npz", x=generator.normal(size=(72, n_features)), y=y)
    arguments = f"{FEW} --method protonet simpleshot adaptive --json"
    files = [Path(name) for name in ("once.json", "again.json")]
    command(arguments, files[0], "--episodes 300")
    for n_episodes in (10, 130, 300):
        command(arguments, files[1], f"--episodes {n_episodes} --state s.npz --resume")
    assert files[0].read_bytes() == files[1].read_bytes()
    state = Path("s.npz").read_bytes()
    command.refuses("`--episodes` must be at least the 300 of s.npz", FEW, "--method protonet simpleshot adaptive",
                    "--episodes 299 --state s.npz --resume")  # fmt: skip
    assert Path("s.npz").read_bytes() == state


def test_a_state_file_continues_only_its_own_run(command: Command, folder: Path) -> None:
    state, arguments = folder / "a.npz", f"{FEW} --episodes 20 --method protonet --state a.npz"
    first = command(arguments, "--resume")  # in a first run, --resume does nothing
    written = state.read_bytes()
    command.refuses("`--state` must be a new file", arguments)
    for changes, message in (
        ("--seed 1", "got seed 1, where .* has 0"),
        ("--method ridge", r"got methods \['ridge'\], where .* has \['protonet'\]"),
    ):
        command.refuses(f"`--resume` must continue the same run; {message}", arguments, "--resume", changes)
    before = (folder / "x.npz").read_bytes()
    with np.load("x.npz") as arrays:
        np.savez("x.npz", **{**arrays, "x": 1.5 * arrays["x"]})
    command.refuses(r"must continue the same run; got other data than a\.npz has\. Pass", arguments, "--resume")
    (folder / "x.npz").write_bytes(before)
    assert state.read_bytes() == written
    assert command(arguments, "--resume") == first
    for content in (b"", written[: len(written) // 2], before):
        state.write_bytes(content)
        command.refuses("`--state` must be the state of an evaluation", arguments, "--resume")


@pytest.mark.skipif(os.name == "nt", reason="there are no such signals on Windows")
def test_ctrl_c_reports_the_finished_episodes(folder: Path) -> None:
    arguments = f"{FEW} --episodes 100000000 --method protonet --json a.json"
    # A shell's background job is started with the signal ignored, and so would be its children.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from protonet.episodes.__main__ import main; sys.exit(main(sys.argv[1:]))"
    started = [sys.executable, "-c", code, *arguments.split()]
    fcntl = pytest.importorskip("fcntl")
    termios = pytest.importorskip("termios")
    terminal, stderr = os.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        os.close(stderr)
        shown = ""
        while "protonet " not in shown and process.poll() is None:  # the bar shows a running accuracy
            shown += os.read(terminal, 1).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    error = os.read(terminal, 2**16).decode(errors="replace")
    os.close(terminal)
    assert process.returncode == 130, error
    assert "| protonet" in out
    assert "protonet.episodes: stopped after " in error
    assert "Traceback" not in error
    assert json.loads((folder / "a.json").read_text(encoding="utf-8"))["episodes"] < 100000000


def test_help_names_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help-all"])
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert set(METHODS) <= words
