"""Architecture: imports point one way, packages and files are small, and heavy libraries are imported lazily."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Each package may import those of earlier levels; the picture of the README shows them.
LEVELS = {
    "protonet": [
        {"_text"},
        {"errors"},
        {"_validation"},
        {"_compat", "_io", "optimizer", "sampling", "losses", "selection"},
        {"views"},
        {"embeddings"},
        {"tables"},
        {"network", "datasets"},
        {"metrics", "files"},
        {"fit", "ui"},
        {"pipeline"},
        {"report"},
        {"estimator", "commands"},
        {"server"},
        {"episodes"},
        {"__main__"},
    ],
    "protonet.episodes": [
        {"names"},
        {"settings", "plugins"},
        {"options", "samplers"},
        {"networks"},
        {"methods", "features"},
        {"evaluation"},
        {"training", "paper"},
        {"__main__"},
    ],
}
MAX_PACKAGES, MAX_LINES = 26, 500
MAX_FILES = 12  #: In a folder, but where its `__init__` says that there is one file for each of something.


def modules(folder: str) -> dict[str, Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def all_modules() -> dict[str, Path]:
    return modules("protonet") | modules("analysis")


@cache
def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names} & all_modules().keys()
            names |= members if len(members) == len(node.names) else {str(node.module), *members}
    return names


def package_of(module: str, package: str) -> str:
    return module.removeprefix(package).removeprefix(".").split(".")[0]


@pytest.mark.parametrize("package", LEVELS)
def test_imports_point_one_way(package: str) -> None:
    level = {name: index for index, names in enumerate(LEVELS[package]) for name in names}
    for module, path in modules(package.replace(".", "/")).items():
        source = package_of(module, package)
        targets = {package_of(name, package) for name in imports(path) if name.startswith(f"{package}.")} - {source}
        if source:
            assert all(level[target] < level[source] for target in targets), f"{module} imports {targets}"


def test_imports_have_no_cycles() -> None:
    """Nor do they in functions, or for types alone."""
    known = modules("protonet")
    graph = {module: {name for name in imports(path) if name in known} for module, path in known.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_all_progress_bars_come_from_one_helper() -> None:
    assert [path.name for path in modules("protonet").values() if "tqdm" in imports(path)] == ["_io.py"]


def test_packages_and_files_are_small() -> None:
    packages = {path.name for path in (ROOT / "protonet").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert len(packages - {"__pycache__"}) <= MAX_PACKAGES
    for folder in ("protonet", "solution", "analysis"):
        for path in modules(folder).values():
            assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path


def test_a_folder_holds_few_files_or_says_why() -> None:
    for folder in {path.parent for path in modules("protonet").values()} - {ROOT / "protonet"}:
        names = {path.name for path in folder.iterdir()} - {"__pycache__", "__init__.py"}
        assert len(names) <= MAX_FILES or "per file" in (ast.get_docstring(parse(folder / "__init__.py")) or ""), folder


def test_no_package_imports_a_higher_one() -> None:
    above = {"protonet": {"solution", "analysis", "tests"}, "solution": {"analysis", "tests"}, "analysis": {"tests"}}
    for folder, forbidden in above.items():
        for path in modules(folder).values():
            assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


def test_no_function_takes_the_name_of_its_caller() -> None:
    """Only parsers know the name of the command."""
    for folder in ("commands", "datasets", "files", "tables"):
        for path in modules(f"protonet/{folder}").values():
            names = {node.arg for node in ast.walk(parse(path)) if isinstance(node, ast.arg)}
            assert "prog" not in names or path.name == "options.py", path


HEAVY = """
import sys, torch
before = set(sys.modules)
from protonet import *
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*new & {"scipy", "sklearn", "pandas", "matplotlib", "tqdm", "safetensors", "onnx"})
x = torch.randn(30, 13, generator=torch.Generator().manual_seed(0))
x[:, 0] += 3 * (torch.arange(30) % 3)
assert solve([(x, torch.arange(30) % 3)], metadata={"param_limit": 500_000}).count_parameters() > 0
print(*{"torch._dynamo", "torch.onnx"} & set(sys.modules))
"""


def test_the_library_does_not_import_what_it_does_not_need() -> None:
    """The first torch.optim.Optimizer imports the compiler, which takes longer than a small problem."""
    assert find_spec("torch._dynamo") is not None
    ended = subprocess.run([sys.executable, "-c", HEAVY], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_committed_files_end_in_one_newline_and_are_small() -> None:
    check = runpy.run_path(str(ROOT / ".ci" / "check_files.py"))
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        content = (ROOT / name).read_bytes().replace(b"\r\n", b"\n")
        is_binary = b"\0" in content[:4096] or name.endswith((".png", ".gz"))
        assert is_binary or content == check["end_in_one_newline"](content), name
        assert len(content) <= (3_000_000 if name.endswith("tabular_transformer.npy") else check["LARGEST"]), name
