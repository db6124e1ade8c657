"""Names, docstrings and pages use the terms of the field."""

from __future__ import annotations

import ast
import builtins
import pydoc
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Parts of names that a reader of the field does not expect.
PRIVATE_NAMES = re.compile(
    r"told|tells?|asked|own|found|kept|said|strange|strangers?|kin|twins|beside|desk|rooms?|door|figures|wanted|mend|taken"
    r"|believe|beliefs|pose|suspicion|settle"
)
#: Phrases of docstrings and pages that a reader of the field does not expect.
PRIVATE_PHRASES = re.compile(
    r"\b(?:told|tells?|whoever|nobody|by heart|as ever|strangers?|kin|rooms?|is one line|are one line|row by row)\b"
    r"|\bof which\b|\bchose nothing\b|\bthe house\b|\bright, %|\bheld against\b",
    re.IGNORECASE,
)
#: Suffixes of file names in docstrings, such as ``labels.npy``.
FILE_SUFFIXES = {".csv", ".npy", ".npz", ".onnx", ".pkl", ".plk", ".txt"}
#: Allowed private words per 1,000 lines.
LIMITS = {"tests": 4.0}
LIMITS |= dict.fromkeys(("protonet", "solution", "analysis", "docs", "README.md", "CONTRIBUTING.md"), 2.0)


def list_files(name: str) -> list[Path]:
    path = ROOT / name
    if path.is_file():
        return [path]
    skipped = {"_build", "results", "__pycache__"}
    files = (file for file in path.rglob("*") if file.suffix in {".py", ".md"} and file != Path(__file__))
    return sorted(file for file in files if not skipped & set(file.parts))


@cache
def list_nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def list_docstrings(path: Path) -> Iterator[str]:
    for node in list_nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def list_names(path: Path) -> Iterator[str]:
    for node in list_nodes(path):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def list_private_words(path: Path) -> list[str]:
    if path.suffix == ".md":
        return PRIVATE_PHRASES.findall(re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
    names = [name for name in list_names(path) if any(map(PRIVATE_NAMES.fullmatch, name.lower().split("_")))]
    return names + [phrase for text in list_docstrings(path) for phrase in PRIVATE_PHRASES.findall(text)]


def test_names_in_docstrings_exist() -> None:
    known = {*dir(builtins), *dir(str), *dir(list)}
    for path in [file for folder in ("protonet", "analysis", "tests") for file in list_files(folder)]:
        known.update(path.relative_to(ROOT).with_suffix("").parts)
        for node in list_nodes(path):
            names = [getattr(node, key, None) for key in ("id", "attr", "name", "arg", "module", "value")]
            words = (name for name in names if isinstance(name, str) and " " not in name)
            known.update(part for word in words for part in re.findall(r"\w+", word))
    missing = set()
    for path in list_files("protonet"):
        for text in list_docstrings(path):
            for name in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*?\))?`", text):
                exists = known.issuperset(name.split("."))
                if not exists and pydoc.locate(name) is None and Path(name).suffix not in FILE_SUFFIXES:
                    missing.add((path.name, name))
    assert missing == set()


@pytest.mark.parametrize("name", LIMITS)
def test_private_words_are_rare(name: str) -> None:
    words, lines = list[str](), 0
    for path in list_files(name):
        words += list_private_words(path)
        lines += path.read_text(encoding="utf-8").count("\n")
    assert 1000 * len(words) / lines <= LIMITS[name], words


@pytest.mark.parametrize("folder", ["protonet", "solution", "analysis"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    for path in list_files(folder):
        starts = [text for text in list_docstrings(path) if re.match(r"(?:Return what|What|Say|Tell)\b", text)]
        assert starts == [], path


def test_public_classes_and_constants_are_defined_once() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in list_files("protonet"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = {item.id for target in targets if target for item in ast.walk(target) if isinstance(item, ast.Name)}
            names |= {node.name} if isinstance(node, ast.ClassDef) else set()
            for name in names:
                if not name.startswith("_"):
                    homes[name].add(str(path.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
