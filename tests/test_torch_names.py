"""The entry uses only names and arguments of torch that each of the contest's releases has.

This notices in seconds what `.ci/contest-versions` notices in minutes, which also makes the lists:
``.ci/contest-versions --list``. They do not show changes of behaviour.
"""

from __future__ import annotations

import ast
import builtins
import json
import lzma
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from analysis.contest.torch_names import format_arguments
from solution.pack import ROOT, library_files

LISTS = ROOT / "tests" / "torch_names.json.xz"
#: Used only where torch has them: for the export to ONNX, which the entry's users do not call.
OPTIONAL = {"torch._higher_order_ops.scan.scan"}
GUARDED = "protonet/_compat.py"  #: Uses a name only if torch has it.
Names = dict[str, dict[str, str]]


class Use(NamedTuple):
    """A name of torch that a file uses, and the call if it is called."""

    line: int
    name: str  #: "torch.linalg.qr" of a module or class, or ".sum" of an object of unknown type.
    call: ast.Call | None


@cache
def read_lists() -> dict[str, Names]:
    lists: dict[str, Names] = json.loads(lzma.decompress(LISTS.read_bytes()))
    return lists


@cache
def list_names_of_other_objects() -> frozenset[str]:
    """Names that attributes of lists, arrays and the like have as well, so that their use says nothing about torch."""
    kinds: list[Any] = [
        getattr(builtins, name) for name in ("str", "list", "dict", "set", "tuple", "int", "float", "bytes")
    ]
    kinds += [np.ndarray, np.random.Generator, Path, re.Pattern, re.Match]
    return frozenset(name for kind in kinds for name in dir(kind))


def iterate_uses(tree: ast.Module) -> Iterator[Use]:
    """Yield what a module uses of torch: names below imported ones, and attributes of objects of unknown type."""
    aliases: dict[str, str] = {}
    others: set[str] = set()  # names of other modules and of what comes from them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.split(".")[0] != "torch":
                    others.add(item.asname or item.name.split(".")[0])
                else:
                    aliases[item.asname or "torch"] = item.name if item.asname else "torch"
                    yield Use(node.lineno, item.name, None)
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                if str(node.module).split(".")[0] != "torch":
                    others.add(item.asname or item.name)
                    continue
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
                yield Use(node.lineno, f"{node.module}.{item.name}", None)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in aliases and id(node) in calls:
            yield Use(node.lineno, aliases[node.id], calls[id(node)])
        if isinstance(node, ast.Attribute):
            path, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                path.append(root.attr)
                root = root.value
            if isinstance(root, ast.Name) and root.id in aliases:
                yield Use(node.lineno, ".".join([aliases[root.id], *reversed(path)]), calls.get(id(node)))
            elif not (isinstance(root, ast.Name) and root.id in others):
                yield Use(node.lineno, f".{node.attr}", calls.get(id(node)))


def look_up(names: Names, path: str) -> str | None:
    """Find the description of a dotted name, "" if it is not described further, or None if the release lacks it."""
    if f"module {path}" in names:
        return f"module {path}"
    parent, _, name = path.rpartition(".")
    entry = look_up(names, parent) if parent else None
    if not entry or not entry.startswith(("module ", "class ")):
        return entry
    return names[entry].get(name) if entry in names else ""


def accepts(signatures: str, call: ast.Call, *, bound: bool) -> bool:
    """Whether one of the signatures has the keywords of a call, and enough positional arguments."""
    keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    for signature in signatures.split("|"):
        parameters = [] if signature == "()" else signature.split(",")
        star = next((index for index, name in enumerate(parameters) if name.startswith("*")), len(parameters))
        positional = [name for name in parameters[:star] if not (bound and name == "self")]
        variadic = star < len(parameters) and parameters[star][1:2] not in {"", "*"}
        known = {name.lstrip("*") for name in parameters}
        any_keyword = any(name.startswith("**") for name in parameters)
        if (any_keyword or keywords <= known) and (variadic or starred or len(call.args) <= len(positional)):
            return True
    return False


def find_missing(source: str, names: Names, defined: frozenset[str] = frozenset()) -> list[str]:
    """List the uses of torch in a source text that a release lacks, as "line: name".

    Args:
        source: The text of a module.
        names: The release's names, from `read_lists`.
        defined: Names of attributes that are not torch's, where the type of an object is unknown.
    """
    kinds = [torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator]
    present = {name for kind in kinds for name in dir(kind)}
    members = [names[f"class {kind.__module__}.{kind.__qualname__}"] for kind in kinds]
    others = list_names_of_other_objects() | defined
    missing = []
    for line, name, call in iterate_uses(ast.parse(source)):
        if name.startswith("."):
            attribute = name[1:]
            if attribute in others or attribute not in present:
                continue
            found = [entry[attribute] for entry in members if attribute in entry]
            signatures = None if not found else "" if "" in found else "|".join(found)
            bound = True
        elif name in OPTIONAL or name == "torch":
            continue
        else:
            signatures, bound = look_up(names, name), False
            if signatures and signatures.startswith("class "):
                signatures, bound = names.get(signatures, {}).get("__init__", ""), True
        if signatures is None:
            missing.append(f"{line}: {name}")
        elif (
            call and signatures and not signatures.startswith("module ") and not accepts(signatures, call, bound=bound)
        ):
            missing.append(f"{line}: the arguments of {name}")
    return missing


@cache
def list_defined_names() -> frozenset[str]:
    """List the functions, methods and fields that the entry itself defines."""
    found: set[str] = set()
    for source in library_files().values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return frozenset(found)


@pytest.mark.parametrize("release", ["2.2.2", "2.3.1", "2.4.1"])
def test_entry_uses_what_each_release_has(release: str) -> None:
    names = read_lists()[release]
    files = {path: source for path, source in library_files().items() if path != GUARDED}
    files |= {"solution/solution.py": (ROOT / "solution/solution.py").read_text(encoding="utf-8")}
    defined = list_defined_names()
    missing = [f"{path}:{use}" for path, source in files.items() for use in find_missing(source, names, defined)]
    assert not missing, f"torch {release} lacks:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    "code",
    [
        "torch.amp.is_autocast_available('cpu')",
        "torch.is_autocast_enabled('cpu')",
        "torch.compiler.is_compiling()",
        "nn.functional.rms_norm(x, (2,))",
        "F.scaled_dot_product_attention(x, x, x, enable_gqa=True)",
        "nn.Buffer(x)",
        "torch.utils.data.DataLoader(x, in_order=False)",
        "from torch.nn import RMSNorm",
        "import torch.accelerator",
        "x.logsumexp(dims=1)",
        "module.set_submodule('a', x, strict=True)",
    ],
)
def test_names_and_arguments_that_2_2_lacks(code: str) -> None:
    header = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    assert len(find_missing(header + code, read_lists()["2.2.2"])) == 1
    assert not find_missing(header + "F.normalize(x, dim=1).sum(dim=1, keepdim=True)", read_lists()["2.2.2"])


def test_signatures() -> None:
    arguments = ast.parse("def f(a, b=1, *c, d, **e): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    assert format_arguments(arguments.args) == "a,b,*c,d,**e"
    call = ast.parse("f(1, 2, out=3)", mode="eval").body
    assert isinstance(call, ast.Call)
    assert accepts("a|a,b,*,out", call, bound=False)
    assert not accepts("self,a,*,out", call, bound=True)
    assert accepts("self,*a,out", call, bound=True)
    assert accepts("**options", ast.parse("f(out=3)", mode="eval").body, bound=False)  # type: ignore[arg-type]


def test_lists_are_small() -> None:
    assert LISTS.stat().st_size < 200_000
