"""The command: real processes and files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tqdm import tqdm

from protonet.episodes.__main__ import main
from protonet.episodes.evaluation import run as running
from protonet.episodes.methods import ALIASES, METHODS
from tests.episodes.cases import SLOW, needing

FEW = ["--way", "3", "--query", "4", "--episodes", "300"]


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """Write 10 classes of 12 rows, some of them base, validation and novel."""
    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12) * 7 - 20
    x = generator.normal(size=(10, 5))[np.repeat(np.arange(10), 12)] + 0.7 * generator.normal(size=(120, 5))
    split = np.array(["base", "novel", "novel", "validation", "base", "novel", "novel", "base", "novel", "validation"])
    path = tmp_path / "features.npz"
    np.savez(path, x=x.astype(np.float32), y=y, split=np.repeat(split, 12))
    return path


def run(*arguments: str) -> int:
    return main(list(arguments))


def test_report_and_files(features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [f"--{kind}={tmp_path / f'out.{kind}'}" for kind in ("json", "csv")]
    methods = ["protonet", "simpleshot", "distribution-calibration"]
    code = run(
        "--dataset",
        str(features),
        *FEW,
        "--shot",
        "1-2",
        *outputs,
        f"--plot={tmp_path / 'out.png'}",
        "--method",
        *methods,
    )
    captured = capsys.readouterr()
    assert code == 0
    assert captured.out.startswith(f"{features}, 5 classes, 5 features: 3-way 1-2-shot 4-query, 300 episodes, seed 0\n")
    summary = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert list(summary["methods"]) == methods
    assert all(0.4 < own["accuracy"] < 1 for own in summary["methods"].values())
    assert summary["settings"]["dataset"] == str(features)
    assert summary["settings"]["side"] == "novel"
    assert (tmp_path / "out.csv").read_text(encoding="utf-8").count("\n") == 1 + 3 * 4 + 3 * 3
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in captured.err


def test_sides_and_splits(features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, classes in (("all", 10), ("base", 3)):
        assert run("--dataset", str(features), *FEW, "--side", side, "--method", "protonet") == 0
        assert f", {classes} classes, " in capsys.readouterr().out
    assert run("--dataset", str(features), *FEW, "--way", "2", "--split-seed", "1", "--method", "protonet") == 0
    assert ", 2 classes, " in capsys.readouterr().out


def test_same_seed_same_numbers(features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("0", "0", "1"):
        assert run("--dataset", str(features), *FEW, "--seed", seed, "--method", "protonet", "ridge") == 0
        texts.append(capsys.readouterr().out.split("\n", 1)[1])
    assert texts[0] == texts[1] != texts[2]


def test_a_method_that_takes_base_rows_disturbs_no_other(features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for methods in (["protonet"], ["distribution-calibration", "protonet"]):
        assert run("--dataset", str(features), *FEW, "--method", *methods) == 0
        tables.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| protonet")))
    assert [table.split("|")[2].strip() for table in tables].count(tables[0].split("|")[2].strip()) == 2


def test_a_mapped_file_gives_the_same_as_one_in_memory(
    features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(features) as arrays:
        np.savez_compressed(tmp_path / "packed.npz", **arrays)
    texts = []
    for path in (features, tmp_path / "packed.npz"):
        assert run("--dataset", str(path), *FEW, "--method", "protonet", "simpleshot") == 0
        texts.append(capsys.readouterr().out.split("\n", 1)[1])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "protonett"], "`--method` must be one of protonet, .*; got 'protonett'. Did you mean protonet?"),
        (["--way", "6"], r"`--way` must be at most the number of classes \(5\); got 6"),
        (["--way", "x"], "`--way` must be a whole number >= 2; got 'x'"),
        (["--way", "-5"], "`--way` must be a number or a span such as 5-20; got '-5'"),
        (["--way", "9-5"], "`--way` must be a number or a span such as 5-20; got '9-5'"),
        (["--shot", "0"], "`--shot` must be a whole number >= 1; got '0'"),
        (["--query", "12"], r"`classes` must have 13 rows \(shot \+ query\); got class '-13' with 12"),
        (["--imbalance", "0"], "`--imbalance` must be a finite number > 0"),
        (["--imbalance", "nan"], "`--imbalance` must be a finite number > 0"),
        (["--until", "x"], "`--until` must be a finite number >= 0"),
        (["--episodes", "0"], "`--episodes` must be a whole number >= 1"),
        (["--side", "test"], "`arguments` must be as --help lists them; got .*invalid choice"),
        (["--side", "base", "--method", "distribution-calibration"], "`--method` must find base classes"),
        (["--dataset", "glyhps"], "got 'glyhps'. Did you mean glyphs?"),
        (["--dataset", "absent.npz"], "absent.npz"),
        (["--encoder", "absent.safetensors"], "absent.safetensors"),
        (["--json", "/proc/none/a.json"], "`--json` must be a file that can be written"),
        (["--split-seed", "x"], "`--split-seed` must be a whole number >= 0"),
        (["--shot", "9" * 30], "`--shot` must be a whole number in .*; got 9999"),
        (["--query", "9" * 30, "--allow-small"], "`--query` must be a whole number in .*; got 9999"),
        (["--plot", "build/out.jpeg"], "`--plot` must end in .png, .pdf, .svg; got build/out.jpeg"),
        (["--method", "PT_MAP"], "Did you mean pt-map?"),
        (["--resume"], "`--resume` must come with the file to continue; got no --state"),
        (["--state", "/proc/none/a.npz"], "`--state` must be a file that can be written"),
        (["--frobnicate"], "`arguments` must be as --help lists them"),
    ],
)
def test_errors(features: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run("--dataset", str(features), *FEW, "--method", "protonet", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err


def test_what_is_read_is_not_written_over(features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = features.read_bytes()
    assert run("--dataset", str(features), *FEW, "--json", str(features)) == 2
    assert "`--json` must be another file than what is read" in capsys.readouterr().err
    assert features.read_bytes() == before


def test_all_methods(features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--way", "3", "--query", "4", "--episodes", "2"]
    assert run("--dataset", str(features), *few, "--method", "all") == 0
    out = capsys.readouterr().out
    left = {*needing("encoder"), *needing("texts"), *needing("unlabelled"), *SLOW}
    assert all((f"| {name} " in out) == (name not in left) for name in METHODS)
    assert "Without texts, clip-zero-shot, tip-adapter are left out." in out
    assert "Without unlabelled rows, semi-kmeans, semi-kmeans-cluster, semi-kmeans-masked are left out." in out
    take_long = "distribution-calibration, finetune, solver, alpha-am take long"
    assert f"{take_long}, and are left out of 'all': name them, too." in out
    assert run("--dataset", str(features), *few, "--side", "all", "--method", "all") == 0
    out = capsys.readouterr().out
    assert "| distribution-calibration" not in out


def test_small_classes_are_told(features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*FEW, "--query", "20", "--allow-small", "--method", "protonet"]
    assert run("--dataset", str(features), *arguments) == 0
    assert "\n5 of 5 classes have fewer rows than shot + query, 0 too few to be drawn.\n" in capsys.readouterr().out


def test_an_encoder_is_not_judged_by_another_split(
    features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = str(tmp_path / "encoder.safetensors")
    training = ["train", "--dataset", str(features), "--backbone", "mlp", "--way", "3", "--steps", "2", "-o", encoder]
    assert run(*training, "--eval-every", "1") == 0
    evaluation = ["--dataset", str(features), *FEW, "--method", "protonet", "simpleshot", "--encoder", encoder]
    assert run(*evaluation) == 0
    assert f", 5 classes, {encoder}: " in capsys.readouterr().out
    assert run(*evaluation, "--side", "base") == 0
    assert "The encoder was trained or chosen on classes of side base" in capsys.readouterr().out
    assert run(*evaluation, "--way", "2", "--split-seed", "1") == 2
    assert "`--split-seed` must be the encoder's" in capsys.readouterr().err
    spelled = str(features.parent / ".." / features.parent.name / features.name)
    assert run(*evaluation, "--way", "2", "--split-seed", "1", "--dataset", spelled) == 2
    assert "`--split-seed` must be the encoder's" in capsys.readouterr().err


def test_a_missing_package_is_found_before_the_work(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--dataset", str(features), *FEW, "--plot", str(tmp_path / "a.png")) == 2
    captured = capsys.readouterr()
    assert "`matplotlib` must be installed" in captured.err
    assert captured.out == ""


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros((20, 3), np.float32), np.arange(20) // 5
    holed = x.copy()
    holed[[3, 7]] = np.nan
    cases = {
        "nan": ({"x": holed, "y": y}, "NaN or infinity in 2 of 20 rows: 3, 7"),
        "no_y": ({"x": x}, "must hold an array y"),
        "objects": ({"x": x, "y": np.array([{}] * 20, object)}, "must hold no object arrays"),
        "one": ({"x": x, "y": y * 0}, "at least 2 classes"),
    }
    for name, (arrays, message) in cases.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        assert run("--dataset", str(path), *FEW) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_a_state_is_of_one_run(features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "a.npz"
    arguments = ["--dataset", str(features), *FEW, "--episodes", "20", "--method", "protonet", "--state", str(state)]
    assert run(*arguments, "--resume") == 0  # a first run, for loops that always pass it
    first = capsys.readouterr().out
    kept = state.read_bytes()
    assert run(*arguments) == 2
    assert "`--state` must be a new file" in capsys.readouterr().err
    for changes, message in (
        (["--seed", "1"], "got seed 1, where .* has 0"),
        (["--method", "ridge"], r"got methods \['ridge'\], where .* has \['protonet'\]"),
        (["--side", "all"], "got side all, where .* has novel"),
        (["--method", "simpleshot"], r"got methods \['simpleshot'\], where .* has \['protonet'\]"),  # with a base
    ):
        assert run(*arguments, "--resume", *changes) == 2
        assert re.search(f"`--resume` must continue the same run; {message}", capsys.readouterr().err)
    with np.load(features) as arrays:
        changed = {**arrays, "x": 1.5 * arrays["x"]}
    before = features.read_bytes()
    np.savez(features, **changed)
    assert run(*arguments, "--resume") == 2
    assert f"`--resume` must continue the same run; got other data than {state} has. Pass" in capsys.readouterr().err
    features.write_bytes(before)
    assert state.read_bytes() == kept
    assert run(*arguments, "--resume") == 0
    assert capsys.readouterr().out == first
    for content in (b"", kept[: len(kept) // 2], b"x,y", before):
        state.write_bytes(content)
        assert run(*arguments, "--resume") == 2
        captured = capsys.readouterr().err
        assert "`--state` must be a file that --state wrote" in captured
        assert captured.count("\n") == 1


def test_intervals_say_what_they_speak_of(features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "2": "over classes, which come first, speak of other classes",
        "5": "of these same classes alone: those over",
    }
    for way, words in said.items():
        path = tmp_path / f"{way}.json"
        more = ["--way", way, "--method", "protonet", "ridge", f"--json={path}"]
        assert run("--dataset", str(features), *FEW, *more) == 0
        out = capsys.readouterr().out
        assert words in out
        assert ("±classes" in out) == ("p over classes" in out) == (way == "2")
        summary = json.loads(path.read_text(encoding="utf-8"))
        own, (pair,) = summary["methods"]["protonet"], summary["comparisons"]
        if way == "2":
            assert own["half_width_classes"] > own["half_width_episodes"]
            assert pair["p_value_classes"] > pair["p_value_episodes"]
        else:  # of 5 classes
            assert own["half_width_classes"] is pair["p_value_classes"] is pair["p_holm_classes"] is None


def test_the_bar_of_one_episode_has_no_interval(
    features: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "SHOWN_EVERY", 0)
    monkeypatch.setattr(running, "tqdm", lambda **settings: tqdm(**(settings | {"delay": 0})))  # shown at once
    shown = []
    for episodes in ("1", "2"):
        assert run("--dataset", str(features), *FEW, "--episodes", episodes, "--method", "protonet") == 0
        shown.append(capsys.readouterr().err)
    assert re.search(r"protonet \d+\.\d\d %", shown[0])
    assert re.search(r"protonet \d+\.\d\d ±\d+\.\d\d %", shown[1])


def test_an_alias_is_evaluated_once(features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dataset", str(features), *FEW, "--method", "simpleshot-un", "protonet") == 0
    out = capsys.readouterr().out
    assert "\nsimpleshot-un is protonet.\n" in out
    assert out.count("| protonet ") == 1
    assert "| simpleshot-un" not in out


@pytest.mark.skipif(os.name == "nt", reason="there are no such signals on Windows")
def test_ctrl_c_reports_what_is_done(features: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    arguments = ["--dataset", str(features), *FEW, "--episodes", "100000000", "--method", "protonet", f"--json={path}"]
    # A shell's background job is started with the signal ignored, and so would be its children.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from protonet.episodes.__main__ import main; sys.exit(main(sys.argv[1:]))"
    started = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        shown = ""
        while "protonet " not in shown and process.poll() is None:  # the bar shows a running accuracy
            shown += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "| protonet" in out
    assert error.splitlines()[-1].startswith("protonet.episodes: stopped after ")
    assert "Traceback" not in error
    assert json.loads(path.read_text(encoding="utf-8"))["episodes"] < 100000000


def test_help_is_quick_to_import_and_names_every_method() -> None:
    code = """
import runpy, sys
sys.argv = ["x", "--help-all"]
try:
    runpy.run_module("protonet.episodes", run_name="__main__")
except SystemExit:
    print(sorted({"scipy", "matplotlib", "sklearn", "safetensors"} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, heavy = ended.stdout.splitlines()
    assert heavy == "[]"
    words = set(" ".join(text).replace(",", " ").split())
    assert set(METHODS) | set(ALIASES) <= words


def test_threads_are_put_back(features: Path) -> None:
    threads = torch.get_num_threads()
    assert run("--dataset", str(features), *FEW, "--method", "protonet") == 0
    assert torch.get_num_threads() == threads
