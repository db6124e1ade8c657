"""The house keeps its order: imports point one way, files stay small, nothing heavy is imported up front."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Each room may import the rooms before it (and _checks, which all may).
LAYERS = [
    {"_checks", "_writing", "optimizer"},
    {"graph", "loading", "prototypes", "losses", "folds", "stacking", "episodes.sampling", "_command"},
    {"views", "moves"},
    {"radial", "forest", "measuring"},
    {"encoder"},
    {"network", "training", "judging"},
    {"candidates", "rejection", "structure"},
    {"selection"},
    {"solver"},
    {"crossfit"},
]
#: Rooms beside the library proper, and what of the project they may import.
BESIDE = {
    "datasets": {"_checks", "_writing", "datasets"},
    "episodes": {"_checks", "_command", "_writing", "datasets", "episodes", "losses", "selection", "stacking", "views"},
    "files": {"_checks", "_command", "_writing", "datasets", "graph", "network", "structure"},
    "_formats": {"_checks", "datasets"},
    "tables": {"_checks", "_formats", "datasets"},
    "plots": {"_writing", "datasets", "measuring"},
    "estimator": {"_checks", "candidates", "crossfit", "network", "solver", "views"},
    "commands": {"_checks", "_command", "_writing", "commands", "crossfit", "datasets", "files", "measuring", "network"}
    | {"plots", "rejection", "selection", "solver", "tables"},
    "__main__": {"_command", "commands"},
}


def modules(folder: str) -> dict[str, Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {str(node.module)}
    return names


def test_imports_point_one_way() -> None:
    order = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
    for module, path in modules("protonet").items():
        room = module.removeprefix("protonet").removeprefix(".")
        targets = {name.removeprefix("protonet.") for name in imports(path) if name.startswith("protonet.")}
        if room == "":
            continue
        if room in order:
            assert all(order[target] < order[room] for target in targets), f"{module} imports {targets}"
        else:
            top = room.split(".", maxsplit=1)[0]
            assert {target.split(".")[0] for target in targets} <= BESIDE[top], f"{module} imports {targets}"


def test_nothing_imports_what_stands_above_it() -> None:
    above = {"protonet": {"solution", "analysis", "tests"}, "solution": {"analysis", "tests"}, "analysis": {"tests"}}
    for folder, forbidden in above.items():
        for path in modules(folder).values():
            assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


def test_files_stay_small() -> None:
    for folder in ("protonet", "solution", "analysis"):
        for path in modules(folder).values():
            most = 320 if path.name in {"optimizer.py", "custom_optimizer.py"} else 250  # one file, handed in alone
            assert len(path.read_text(encoding="utf-8").splitlines()) <= most, path


@pytest.mark.parametrize("heavy", ["scipy", "sklearn", "pandas", "matplotlib", "tqdm", "safetensors", "onnx"])
def test_the_library_does_not_import_what_it_does_not_need(heavy: str) -> None:
    code = f"import torch, sys; before = '{heavy}' in sys.modules; from protonet import *; "
    code += f"sys.exit('{heavy}' in sys.modules and not before)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
