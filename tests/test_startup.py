"""Start of the commands: Ctrl-C during imports, and errors before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import protonet
from protonet import files
from protonet.__main__ import COMMANDS
from protonet.commands import arguments, options
from protonet.errors import InputError
from protonet.fit.search import EFFORTS
from protonet.fit.solver import TIME_LIMIT
from solution.pack import ROOT

EPISODES = ["protonet.episodes", *(f"protonet.episodes {name}" for name in ("train", "compare", "paper", "extract"))]


def run(tmp_path: Path, imported: str, source: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command where an import runs another source."""
    (tmp_path / f"{imported}.py").write_text(source)
    code = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)


def write_files(folder: Path) -> None:
    """Write a table, a model that no one can read, and a file where a folder may be meant."""
    (folder / "t.csv").write_text("a,b,kind\n" + 10 * "1,2,x\n3,4,y\n")
    (folder / "gaps.csv").write_text("a,b,kind\n1,2,\n3,4,\n")
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


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    ended = run(tmp_path, "torch", "raise RuntimeError", "protonet", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "protonet fit train.csv" in ended.stdout
    ended = run(tmp_path, "torch", "raise RuntimeError", "protonet", "fitt")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("protonet: `command` must be one of fit")


@pytest.mark.parametrize("name", [*(f"protonet {name}" for name in COMMANDS), *EPISODES])
def test_the_help_of_a_command_does_not_wait_for_torch(name: str, tmp_path: Path) -> None:
    ended = run(tmp_path, "torch", "raise RuntimeError", *name.split(), "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: {name} ")
    if "--help-all" in ended.stdout and name != "protonet.episodes":  # which lists its methods there
        ended = run(tmp_path, "torch", "raise RuntimeError", *name.split(), "--help-all")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.startswith(f"usage: {name} ")


@pytest.mark.parametrize(
    ("command", "output"),
    [
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
        (
            "protonet predict t.csv t.csv",
            "`model` must be a model file, which comes before the table; got the table t.csv.",
        ),
        ("protonet predict m.safetensors t.csv --unknown x", "`--unknown` must be a number between 0 and 1; got 'x'."),
        ("protonet predict m.safetensors t.csv -o plain/p.csv", "`--output` must be a file that can be written"),
        ("protonet evaluate m.safetensors t.csv --report r.pdf", "`--report` must end in .html, .htm; got r.pdf."),
        ("protonet suggest no.csv", "no such file: no.csv"),
        ("protonet fit no.csv", "no such file: no.csv"),
        ("protonet fit t.csv", "`table` must have a column label; got t.csv with a, b, kind. Pass --label NAME"),
        ("protonet fit gaps.csv --label kind", "`table` must have at least 2 classes; got no label alone in kind."),
        ("protonet fit t.csv --label kind --column-type a=colour", "`--column-type` must be one of "),
        ("protonet fit t.csv --label kind --unlabelled no.csv", "no such file"),
        ("protonet fit t.csv --effort slow", "`--effort` must be one of fast, default, best; got 'slow'."),
        ("protonet fit t.csv --seed x", "`--seed` must be a whole number >= 0; got 'x'."),
        ("protonet fit t.csv -o plain/m.safetensors", "`--output` must be a file that can be written"),
        ("protonet.episodes --preset none", "`--preset` must be one of "),
        ("protonet.episodes --json plain/r.json", "`--json` must be a file that can be written"),
        ("protonet.episodes train -o plain/e.safetensors", "`--output` must be a file that can be written"),
        ("protonet.episodes train -o e.safetensors --backbone x", "`--backbone` must be one of mlp, "),
        ("protonet.episodes compare no.json", "`FILE.json` must be a file that --json wrote; got no.json "),
        ("protonet.episodes extract pictures --backbone n.onnx -o t.csv", "`--output` must end in .npz; got t.csv."),
    ],
)
def test_errors_are_raised_before_torch_is_imported(command: str, output: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    ended = run(tmp_path, "torch", "raise RuntimeError", *command.split())
    (line,) = ended.stderr.splitlines()
    prog = " ".join(command.split()[:2]) if command.split()[1][:1] != "-" else command.split(maxsplit=1)[0]
    assert (ended.returncode, ended.stdout) == (2, "")
    assert line.startswith(f"{prog}: {output}")
    assert sorted(item for item in tmp_path.iterdir() if item.name not in {"torch.py", "__pycache__"}) == before


def test_constants_for_parsers_equal_those_of_the_library(tmp_path: Path) -> None:
    assert tuple(EFFORTS) == arguments.EFFORT_NAMES
    assert arguments.DEFAULT_TIME_LIMIT == TIME_LIMIT
    with pytest.raises(InputError) as light:
        options.check_model_path(tmp_path / "none", "path")
    with pytest.raises(InputError) as heavy:
        files.read_model(tmp_path / "none", writer="fit")
    assert str(light.value) == str(heavy.value)
    assert [*arguments.PARSERS] == [*arguments.EXAMPLES] == [*COMMANDS]


def test_public_names_are_imported_lazily() -> None:
    assert set(protonet.__all__) <= set(dir(protonet))
    for name in protonet.__all__:
        assert getattr(protonet, name).__module__.startswith("protonet.")
    with pytest.raises(AttributeError, match="module 'protonet' has no attribute 'solv'"):
        protonet.solv  # noqa: B018 - to ask is the test
