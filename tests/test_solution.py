"""The submission and its packer: the archive, the contest's limits, the single file, and which library it imports."""

from __future__ import annotations

import ast
import io
import json
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import protonet
from analysis.contest.trial import evaluate_submission
from analysis.contest.worker import import_solution
from protonet.datasets import Split, sample_family
from protonet.optimizer import CustomOptimizer
from solution import pack

GOOD = {
    "protocol": "zip_project",
    "protocol_version": 1,
    "note": "",
    "commands": {"setup": "s.sh", "build": "s.sh", "run": "s.sh"},
}


def test_library_is_what_the_solver_imports() -> None:
    code = "import sys, protonet.fit.solver; print(*(n for n in sys.modules if n.startswith('protonet')))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, cwd=pack.ROOT, check=True, capture_output=True, text=True).stdout.split()
    packed = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in pack.library_files()]
    assert sorted(packed) == sorted(loaded)


def test_imports_are_followed_in_every_form(tmp_path: Path) -> None:
    sources = {
        "__init__.py": "from protonet.a import x",
        "fit/__init__.py": "",
        "fit/solver.py": "import protonet.b.deep as deep, os",
        "a.py": "def f():\n    from . import c",
        "b/__init__.py": "",
        "b/deep.py": "from ..d import y\nimport torch.nn",
        **dict.fromkeys(["c.py", "d.py", "unused.py"], ""),
    }
    for name, source in sources.items():
        (tmp_path / "protonet" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "protonet" / name).write_text(source)
    expected = {f"protonet/{name}" for name in sources} - {"protonet/unused.py"}
    files = pack.library_files(tmp_path)
    assert set(files) == expected
    assert list(files) == sorted(files)
    (tmp_path / "protonet/c.py").write_text("from scipy.special import ive")
    with pytest.raises(ValueError, match=r"^`protonet/c.py` must import torch, numpy and .*; got scipy\."):
        pack.library_files(tmp_path)


def test_zip_has_what_is_needed_and_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(pack.pack_zip())) as archive:
        scripts = [f"scripts/{name}.sh" for name in ("setup", "build", "run")]
        assert sorted(archive.namelist()) == sorted(
            [*pack.library_files(), *scripts, pack.MANIFEST_FILE, "solution.py"]
        )
        assert archive.read("solution.py") == (pack.ROOT / "solution/solution.py").read_bytes()
        assert archive.read("protonet/fit/solver.py") == (pack.ROOT / "protonet/fit/solver.py").read_bytes()
        for entry in archive.infolist():
            assert entry.date_time == (1980, 1, 1, 0, 0, 0)
            mode = 0o755 if entry.filename.endswith(".sh") else 0o644
            assert entry.external_attr >> 16 == stat.S_IFREG | mode
        archive.extractall(tmp_path)
    for name in ("setup", "build"):
        subprocess.run(["sh", tmp_path / f"scripts/{name}.sh"], check=True, cwd="/")
    subprocess.run(["sh", "-n", tmp_path / "scripts/run.sh"], check=True)
    (tmp_path / "protonet/fit/solver.py").unlink()
    assert subprocess.run(["sh", tmp_path / "scripts/build.sh"], check=False).returncode == 1


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.text("'\\\r\n\0a"))
def test_literal_round_trip(text: str) -> None:
    assert ast.literal_eval(pack._format_literal(text)) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "have the keys"),
        ({"protocol": "git"}, "have protocol zip_project, version 1; got"),
        ({"protocol_version": 2}, "have protocol zip_project, version 1; got"),
        ({"note": "é" * 513}, "have a note of at most 1024 bytes; got 1026"),
        ({"commands": {"run": "s.sh"}}, "have the commands setup, build, run; got"),
    ],
)
def test_a_manifest_that_the_contest_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^`{pack.MANIFEST_FILE}` must {message}"):
        pack.check_archive({pack.MANIFEST_FILE: json.dumps(GOOD | changes)}, 100)


def test_limits_of_an_archive() -> None:
    good = {pack.MANIFEST_FILE: json.dumps(GOOD)}
    pack.check_archive(good | dict.fromkeys(map(str, range(255)), ""), pack.MAX_ARCHIVE_BYTES)
    with pytest.raises(ValueError, match=r"^`archive` must have at most 256 entries; got 257"):
        pack.check_archive(good | dict.fromkeys(map(str, range(256)), ""), 100)


def test_command_writes_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack.main(["-o", str(tmp_path / "new" / "folder")]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = (pack.ZIP_NAME, pack.SINGLE_FILE_NAME, pack.OPTIMIZER_FILE_NAME, pack.CONFIG_FILE_NAME)
    paths = [tmp_path / "new/folder" / name for name in names]
    assert lines == [f"{path}: {path.stat().st_size:,} bytes" for path in paths]
    archive, single, *optimizer = paths
    CustomOptimizer([torch.ones(2, requires_grad=True)], **json.loads(optimizer[1].read_text(encoding="utf-8")))
    assert optimizer[0].read_text(encoding="utf-8") == pack.join_package_modules()
    assert optimizer[1].read_bytes() == (pack.ROOT / "solution" / pack.CONFIG_FILE_NAME).read_bytes()
    assert archive.read_bytes() == pack.pack_zip()  # the same sources give the same bytes
    assert single.read_bytes() == pack.pack_single_file()
    assigned = next(node for node in ast.parse(single.read_bytes()).body if isinstance(node, ast.AnnAssign))
    assert assigned.value is not None
    assert ast.literal_eval(assigned.value) == pack.library_files()


def test_command_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(pack, "library_files", lambda: {"protonet/a.py": "x" * (pack.MAX_ARCHIVE_BYTES + 1)})
    for arguments, message in (
        (["-o", str(tmp_path / "file")], "solution.pack: `--output` must be a folder that can be written; got"),
        (["extra"], "solution.pack: unexpected argument: extra"),
        (["-o", str(tmp_path)], "solution.pack: `archive` must have at most 20971520 bytes; got"),
    ):
        assert pack.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(message)
        assert captured.err.count("\n") == 1


SOURCE = pack.ROOT / "solution" / "solution.py"


def sample_tiny() -> Split:
    return sample_family("isotropic", seed=7, n_train=8, n_val=1, n_test=20, num_classes=8, dim=16)


def score(module: ModuleType, split: Split) -> float:
    pairs = ((split.train_x, split.train_y), (split.val_x, split.val_y))
    loaders = [DataLoader(TensorDataset(x, y), batch_size=5) for x, y in pairs]
    network = module.Solution().solve(*loaders)
    assert isinstance(network, torch.nn.Module)
    return float((network(split.test_x).argmax(dim=1) == split.test_y).double().mean())


@pytest.fixture
def import_system() -> Iterator[None]:
    """Check that paths and finders are left alone, and put the repository's own library back."""
    path, finders = list(sys.path), list(sys.meta_path)
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "protonet"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "protonet"]:
        del sys.modules[name]
    sys.modules.update(modules)
    assert sys.path == path
    assert sys.meta_path == finders


@pytest.mark.usefixtures("import_system")
def test_the_repository_imports_the_repository_library() -> None:
    module = import_solution(SOURCE)
    assert module._library is protonet
    assert score(module, sample_tiny()) > 0.8


@pytest.mark.usefixtures("import_system")
def test_the_packed_solution_imports_the_packed_library(tmp_path: Path) -> None:
    zipfile.ZipFile(io.BytesIO(pack.pack_zip())).extractall(tmp_path)
    module = import_solution(tmp_path / "solution.py")
    assert module._library is not protonet
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "protonet"]
    origins = {Path(str(part.__file__)) for part in loaded}
    assert all(origin.is_relative_to(tmp_path) for origin in origins)
    assert import_solution(tmp_path / "solution.py")._library is module._library


@pytest.mark.usefixtures("import_system")
def test_the_single_file_imports_its_embedded_library(tmp_path: Path) -> None:
    path = tmp_path / "anything.py"
    path.write_bytes(pack.pack_single_file())
    module = import_solution(path)
    path.unlink()
    assert module._library is sys.modules["protonet"] is not protonet
    assert module._library.__file__ == f"{path}/protonet/__init__.py"


def test_without_a_library(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "solution.py").write_bytes(SOURCE.read_bytes())
    with pytest.raises(ModuleNotFoundError, match=r"^solution: `protonet` must lie in .* Pack it again"):
        import_solution(tmp_path / "a" / "solution.py")


def test_clean_process_zip_and_unwritable_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Permissions do not stop root, so a file in the place of each bytecode folder simulates them.
    archive = io.BytesIO(pack.pack_zip())
    with zipfile.ZipFile(archive, "a") as packed:
        for folder in ("", "protonet/", "protonet/episodes/"):
            packed.writestr(f"{folder}__pycache__", "")
    assert evaluate_submission(archive.getvalue(), sample_tiny(), param_limit=300.0)["accuracy"] > 0.8
