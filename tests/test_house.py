"""The house keeps its order: imports point one way, rooms are few, nothing heavy is imported up front."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Each room may import the rooms of the levels before its own; the README's picture shows the same.
LEVELS = [
    {"_checks"},
    {"_writing", "optimizer", "sampling", "losses", "scoring"},
    {"views", "datasets"},
    {"encoder", "tables"},
    {"network"},
    {"metrics", "files"},
    {"fit"},
    {"estimator", "commands"},
    {"episodes", "__main__"},
]
MOST_ROOMS, MOST_LINES = 20, 450


def modules(folder: str) -> dict[str, Path]:
    paths = sorted(path for path in (ROOT / folder).rglob("*.py") if "_renamed" not in path.parts)
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


def room(module: str) -> str:
    return module.removeprefix("protonet").removeprefix(".").split(".")[0]


def test_imports_point_one_way() -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    for module, path in modules("protonet").items():
        own = room(module)
        targets = {room(name) for name in imports(path) if name.startswith("protonet.")} - {own}
        if own:
            assert all(level[target] < level[own] for target in targets), f"{module} imports {targets}"


def test_no_two_modules_wait_for_each_other() -> None:
    """Nor do they in functions, or for types alone."""
    known = modules("protonet")
    graph = {module: {name for name in imports(path) if name in known} for module, path in known.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_rooms_are_few_and_small() -> None:
    rooms = {path.name for path in (ROOT / "protonet").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert len(rooms - {"__pycache__"}) <= MOST_ROOMS
    for folder in ("protonet", "solution", "analysis"):
        for path in modules(folder).values():
            most = 820 if path.name == "optimizer.py" else MOST_LINES  # one file, handed in alone
            assert len(path.read_text(encoding="utf-8").splitlines()) <= most, path


def test_nothing_imports_what_stands_above_it() -> None:
    above = {"protonet": {"solution", "analysis", "tests"}, "solution": {"analysis", "tests"}, "analysis": {"tests"}}
    for folder, forbidden in above.items():
        for path in modules(folder).values():
            assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


@pytest.mark.parametrize("heavy", ["scipy", "sklearn", "pandas", "matplotlib", "tqdm", "safetensors", "onnx"])
def test_the_library_does_not_import_what_it_does_not_need(heavy: str) -> None:
    code = f"import torch, sys; before = '{heavy}' in sys.modules; from protonet import *; "
    code += f"sys.exit('{heavy}' in sys.modules and not before)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *[("candidates", "fit.search"), ("crossfit", "fit.crossfit"), ("measuring", "metrics")],
        *[("rejection", "metrics"), ("selection", "fit.search"), ("solver", "fit.solver"), ("training", "views.mlp")],
        ("episodes.sampling", "sampling"),
    ],
)
def test_a_module_that_was_renamed_says_its_new_name(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=rf"^protonet\.{old} is now protonet\.{new}\b.*; see CHANGELOG\.md$"):
        import_module(f"protonet.{old}")
    assert import_module(f"protonet.{new}")
