"""The submission, loaded by its path: which library it takes, and that it leaves the import system alone."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import protonet
from analysis.contest.trial import evaluate_submission
from analysis.contest.worker import load_solution
from protonet.datasets import Split, sample_family
from solution.pack import ROOT, pack_single_file, pack_zip

SOURCE = ROOT / "solution" / "solution.py"


def sample_tiny() -> Split:
    return sample_family("isotropic", seed=7, n_train=8, n_val=1, n_test=20, num_classes=8, dim=16)


def score(module: ModuleType, split: Split, metadata: dict[str, float] | None) -> float:
    loaders = [
        DataLoader(TensorDataset(x, y), batch_size=5)
        for x, y in ((split.train_x, split.train_y), (split.val_x, split.val_y))
    ]
    network = module.Solution().solve(*loaders, metadata)
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
    module = load_solution(SOURCE)
    assert module._library is protonet
    for metadata in ({"param_limit": 300.0}, None):
        assert score(module, sample_tiny(), metadata) > 0.8


@pytest.mark.usefixtures("import_system")
def test_the_packed_solution_imports_the_packed_library(tmp_path: Path) -> None:
    zipfile.ZipFile(io.BytesIO(pack_zip())).extractall(tmp_path)
    module = load_solution(tmp_path / "solution.py")
    assert module._library is not protonet
    origins = {
        Path(str(loaded.__file__)) for name, loaded in sys.modules.items() if name.partition(".")[0] == "protonet"
    }
    assert all(origin.is_relative_to(tmp_path) for origin in origins)
    assert load_solution(tmp_path / "solution.py")._library is module._library


@pytest.mark.usefixtures("import_system")
def test_the_single_file_imports_its_embedded_library(tmp_path: Path) -> None:
    path = tmp_path / "anything.py"
    path.write_bytes(pack_single_file())
    module = load_solution(path)
    path.unlink()
    assert module._library is sys.modules["protonet"] is not protonet
    assert module._library.__file__ == f"{path}/protonet/__init__.py"


def test_without_a_library(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "solution.py").write_bytes(SOURCE.read_bytes())
    with pytest.raises(ModuleNotFoundError, match=r"^solution: `protonet` must lie in .* Pack it again"):
        load_solution(tmp_path / "a" / "solution.py")


def test_clean_process_zip_and_unwritable_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Permissions do not stop root, so a file in the place of each bytecode folder simulates them.
    archive = io.BytesIO(pack_zip())
    with zipfile.ZipFile(archive, "a") as packed:
        for folder in ("", "protonet/", "protonet/episodes/"):
            packed.writestr(f"{folder}__pycache__", "")
    assert evaluate_submission(archive.getvalue(), sample_tiny(), param_limit=300.0)["accuracy"] > 0.8
