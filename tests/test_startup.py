"""The start of commands: Ctrl-C during imports, and errors that are raised before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import protonet
from protonet import files
from protonet.commands import arguments, options
from protonet.commands.arguments import COMMANDS
from protonet.errors import DISTRIBUTION_NAME, InputError, installed_version
from protonet.fit.search import EFFORTS
from protonet.fit.solver import TIME_LIMIT
from solution.pack import ROOT

EPISODES = ["protonet.episodes", *(f"protonet.episodes {name}" for name in ("train", "compare", "paper", "extract"))]


def run(tmp_path: Path, imported: str, source: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in which the import of a module runs other source code."""
    (tmp_path / f"{imported}.py").write_text(source)
    code = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)


def write_files(folder: Path) -> None:
    """Write tables, an unreadable model, and a file in place of a folder."""
    (folder / "t.csv").write_text("a,b,kind\n" + 10 * "1,2,x\n3,4,y\n")
    (folder / "gaps.csv").write_text("a,b,kind\n1,2,\n3,4,\n")
    (folder / "open.csv").write_text('class,description\n"x')
    (folder / "m.safetensors").write_text("junk")
    (folder / "plain").touch()


@pytest.mark.parametrize(
    ("command", "imported"),
    [
        *[("analysis contest", "torch"), ("analysis robustness", "torch")],
        *[("analysis", "argparse"), ("solution.pack", "argparse")],
        *[("protonet fit t.csv --label kind", "torch"), ("protonet predict m.safetensors t.csv", "torch")],
        *[("protonet.episodes", "torch"), ("protonet.episodes train -o new.safetensors", "torch")],
    ],
)
def test_interrupted_import(command: str, imported: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    ended = run(tmp_path, imported, "raise KeyboardInterrupt", *command.split())
    command = " ".join(word for word in command.split()[:2] if not word.startswith("-"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", f"{command}: interrupted\n")


#: Commands, and how their errors begin.
ERRORS = [
    ("protonet fitt", "`command` must be one of fit"),
    *[(f"protonet {name} --no-such-option", "unknown option: --no-such-option") for name in COMMANDS],
    *[(f"{name} --no-such-option", "unknown option: --no-such-option") for name in EPISODES],
    *[
        (f"protonet {name} no.safetensors t.csv {more}", "no such file: no.safetensors")
        for name, more in (("predict", ""), ("evaluate", ""), ("update", "--in-place"), ("explain", ""))
    ],
    *[
        (f"protonet {name} no.safetensors {more}", "no such file: no.safetensors")
        for name, more in (("info", ""), ("export", "--onnx new.onnx"))
    ],
    *[
        (f"protonet {name} m.safetensors no.csv {more}", "no such file: no.csv")
        for name, more in (("predict", ""), ("evaluate", ""), ("update", "--in-place"), ("suggest", ""))
    ],
    ("protonet predict t.csv t.csv", "`model` must be a model file, which comes before the table; got the table t.csv"),
    ("protonet predict m.safetensors t.csv --unknown x", "`--unknown` must be a number between 0 and 1; got 'x'."),
    ("protonet predict m.safetensors t.csv -o plain/p.csv", "`--output` must be a file that can be written"),
    ("protonet evaluate m.safetensors t.csv --report r.pdf", "`--report` must end in .html, .htm; got r.pdf."),
    ("protonet suggest no.csv", "no such file: no.csv"),
    ("protonet fit no.csv", "no such file: no.csv"),
    ("protonet fit t.csv", "`--label` must name a column of the table; got label, and t.csv has a, b, kind."),
    ("protonet fit gaps.csv --label kind", "`table` must have at least 2 classes; got no label alone in kind."),
    ("protonet fit t.csv --label kind --column-type a=colour", "`--column-type` must be one of "),
    ("protonet fit t.csv --label kind --unlabelled no.csv", "no such file"),
    ("protonet fit t.csv --label kind --classes open.csv", "`--classes` must be a CSV file; got open.csv"),
    ("protonet fit t.csv --effort slow", "`--effort` must be one of fast, default, best; got 'slow'."),
    ("protonet fit t.csv --seed x", "`--seed` must be a whole number >= 0; got 'x'."),
    ("protonet fit t.csv -o plain/m.safetensors", "`--output` must be a file that can be written"),
    ("protonet.episodes --preset none", "`--preset` must be one of "),
    ("protonet.episodes --json plain/r.json", "`--json` must be a file that can be written"),
    ("protonet.episodes train -o plain/e.safetensors", "`--output` must be a file that can be written"),
    ("protonet.episodes train -o e.safetensors --backbone x", "`--backbone` must be one of mlp, "),
    ("protonet.episodes compare no.json", "no such file: no.json"),
    ("protonet.episodes extract pictures --backbone n.onnx -o t.csv", "`--output` must end in .npz; got t.csv."),
]
#: Runs modules with arguments in one process without torch; prints the exit code, stdout and stderr of each.
WITHOUT_TORCH = """
import contextlib, io, json, runpy, sys
sys.modules["torch"] = None
results = []
for module, *arguments in json.loads(sys.argv[1]):
    out, err, sys.argv, code = io.StringIO(), io.StringIO(), [module, *arguments], 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def run_without_torch(folder: Path, commands: Sequence[str]) -> list[tuple[int, str, str]]:
    words = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([command.split() for command in commands])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return [(code, out, err) for code, out, err in json.loads(ended.stdout)]


def test_errors_are_raised_before_torch_is_imported(tmp_path: Path) -> None:
    write_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    results = run_without_torch(tmp_path, [command for command, _ in ERRORS])
    for (command, message), (code, out, err) in zip(ERRORS, results, strict=True):
        words = command.split()
        program = " ".join(words[:1] if words[1].startswith("-") or words == ["protonet", "fitt"] else words[:2])
        assert (code, out, err.count("\n")) == (2, "", 1), (command, err)
        assert err.startswith(f"{program}: {message}"), (command, err)
    assert sorted(tmp_path.iterdir()) == before


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    names = [*(f"protonet {name}" for name in COMMANDS), *EPISODES]
    every = [f"{name} --help-all" for name in names if name != "protonet.episodes"]  # which lists its methods there
    commands = ["protonet --help", *(f"{name} --help" for name in names), *every]
    results = run_without_torch(tmp_path, commands)
    assert "protonet fit train.csv" in results[0][1]
    for command, (code, out, err) in zip(commands[1:], results[1:], strict=True):
        name = command.rpartition(" ")[0]
        if command.endswith("--help") or "--help-all" in results[commands.index(f"{name} --help")][1]:
            assert (code, err) == (0, ""), command
            assert out.startswith(f"usage: {name} "), command


def test_constants_for_parsers_equal_those_of_the_library(tmp_path: Path) -> None:
    assert tuple(EFFORTS) == options.EFFORT_NAMES
    assert options.DEFAULT_TIME_LIMIT_SECONDS == TIME_LIMIT
    with pytest.raises(InputError) as light:
        arguments.check_model_path(tmp_path / "none", "path")
    with pytest.raises(InputError) as heavy:
        files.read_model(tmp_path / "none", writer="fit")
    assert str(light.value) == str(heavy.value)


def test_public_names_are_imported_lazily() -> None:
    assert set(protonet.__all__) <= set(dir(protonet))
    for name in protonet.__all__:
        assert getattr(protonet, name).__module__.startswith("protonet.")
    assert protonet.__version__ == (installed_version(DISTRIBUTION_NAME) or "unknown")
    with pytest.raises(AttributeError, match="module 'protonet' has no attribute 'solv'"):
        protonet.solv  # noqa: B018 - to ask is the test
