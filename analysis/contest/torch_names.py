"""List the public names of the installed torch and their arguments in a file: ``python torch_names.py FILE.json.xz``.

`.ci/contest-versions --list` runs this file with each of the contest's releases, in environments with torch alone.
`tests/test_torch_names.py` compares the lists with what the code of the repository uses.

The JSON maps a release to its lists. Keys of these are "module torch.linalg" or "class torch.nn.modules.linear.Linear";
values map each name to one of:

- "module ..." or "class ...", the key of its own entry;
- the signatures of a function, separated by "|", such as "input,dim,*,out";
- "" if it is something else, or if its arguments are unknown.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

#: Modules that the repository may use. All others count as missing.
MODULES = {
    *("accelerator", "amp", "autograd", "autograd.function", "autograd.functional", "autograd.graph", "backends"),
    *("backends.cudnn", "backends.mkldnn", "backends.mps", "compiler", "cuda", "cuda.amp", "distributions", "export"),
    *("fft", "func", "futures", "library", "linalg", "mps", "multiprocessing", "nested", "nn", "nn.attention"),
    *("nn.functional", "nn.init", "nn.modules", "nn.modules.module", "nn.parallel", "nn.parameter", "nn.utils"),
    *("nn.utils.rnn", "onnx", "optim", "optim.lr_scheduler", "optim.optimizer", "optim.swa_utils", "overrides"),
    *("random", "serialization", "sparse", "special", "storage", "testing", "types", "utils", "utils.checkpoint"),
    *("utils.data", "utils.hooks", "xpu"),
}


def list_names() -> dict[str, dict[str, str]]:
    """List the names of all modules of `MODULES` that this torch has, and of their classes."""
    stubs = read_stubs()
    names: dict[str, dict[str, str]] = {}
    waiting: list[type] = []
    for path in ("torch", *sorted(f"torch.{name}" for name in MODULES)):
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        entry = names[f"module {path}"] = {}
        for name in sorted(dir(module)):
            value = inspect.getattr_static(module, name)
            if not name.startswith("_") or name.startswith(("_foreach", "_disable_dynamo")):  # of torch's optimizers
                entry[name] = describe(value, stubs.get(name, ""))
            if isinstance(value, type) and value.__module__.startswith("torch"):
                waiting.append(value)
    for cls in waiting:
        key = describe(cls, "")
        if key not in names:
            is_tensor = issubclass(cls, torch.Tensor)
            members = {name: inspect.getattr_static(cls, name) for name in sorted(dir(cls))}
            inherited = set(dir(object)) - {"__init__"}
            names[key] = {
                name: describe(value, stubs.get(f"Tensor.{name}", "") if is_tensor else "")
                for name, value in members.items()
                if name not in inherited
            }
    return names


def describe(value: object, stub: str) -> str:
    """Describe the value of a name; ``stub`` has the signatures of the type stubs, for functions written in C++."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}" if value.__name__.startswith("torch") else ""
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}" if value.__module__.startswith("torch") else ""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if not callable(value):
        return ""
    return stub or read_signature(value)


def read_signature(function: object) -> str:
    """Read a signature from a function of Python, or from the first line of the docstring of one of C++."""
    try:
        parameters = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = re.match(r"\s*[\w.]+\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*->", getattr(function, "__doc__", None) or "")
        if found is None:
            return ""
        try:
            parsed = ast.parse(f"def f({found.group(1)}): ...").body[0]
        except SyntaxError:
            return ""
        assert isinstance(parsed, ast.FunctionDef)
        return format_arguments(parsed.args)
    texts, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind == parameter.KEYWORD_ONLY and not keyword_only:
            texts.append("*")
        keyword_only |= parameter.kind in {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL}
        stars = 2 * (parameter.kind == parameter.VAR_KEYWORD) + (parameter.kind == parameter.VAR_POSITIONAL)
        texts.append("*" * stars + parameter.name)
    return ",".join(texts) or "()"


def format_arguments(arguments: ast.arguments) -> str:
    """Format the arguments of a parsed function, such as "input,dim,*,out"."""
    texts = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        texts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        texts.append("*")
    texts += [argument.arg for argument in arguments.kwonlyargs]
    texts += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ",".join(texts) or "()"


def read_stubs() -> dict[str, str]:
    """Read the signatures of functions written in C++ from torch's type stubs, by "name" or "Tensor.name"."""
    folder = Path(torch.__file__).parent / "_C"
    found: dict[str, list[str]] = {}
    for file in ("_VariableFunctions.pyi", "_nn.pyi", "__init__.pyi"):
        path = folder / file
        if path.is_file():
            for name, arguments in iterate_stub(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault(name, []).append(format_arguments(arguments))
    return {name: "|".join(dict.fromkeys(signatures)) for name, signatures in found.items()}


def iterate_stub(tree: ast.Module) -> Iterator[tuple[str, ast.arguments]]:
    """Yield the functions of a stub file, and the methods of its class of tensors."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.args
        elif isinstance(node, ast.ClassDef) and node.name in {"TensorBase", "_TensorBase"}:
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"Tensor.{member.name}", member.args


def main(path: Path) -> None:
    """Add the lists of this torch to a file, or replace them there."""
    lists = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    lists[torch.__version__.partition("+")[0]] = list_names()
    path.write_bytes(lzma.compress(json.dumps(lists, sort_keys=True).encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
