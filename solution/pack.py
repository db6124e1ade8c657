"""Pack the submissions: ``python -m solution.pack`` writes a ZIP for Agentics and a file for Frontier-CS.

Both contain the modules of protonet that the solver imports. Their bytes depend on the sources only: times and
permissions are fixed, entries are sorted, and nothing is compressed, because zlib's output depends on its version. The
shared optimizer is submitted as two files: the modules of `protonet.optimizer` joined in one, and its configuration.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start_command

    sys.exit(start_command("solution.pack"))

import ast
import io
import json
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path, PurePosixPath

from protonet.errors import raise_input_error
from protonet.ui.command_line import CommandParser, check_output_path, run_command

ROOT = Path(__file__).resolve().parent.parent
ENTRY_MODULES = ("protonet", "protonet.fit", "protonet.fit.solver")
ALLOWED_IMPORTS = sys.stdlib_module_names | {"protonet", "torch", "numpy"}
MANIFEST_FILE = "agentics.solution.json"
MANIFEST_COMMANDS = ("setup", "build", "run")
ZIP_NAME, SINGLE_FILE_NAME = "protonet-agentics.zip", "solution.py"
#: File names of the shared optimizer.
OPTIMIZER_FILE_NAME, CONFIG_FILE_NAME = "custom_optimizer.py", "optimizer_config.json"

#: The contest's limits on an archive: bytes, entries, and bytes of the note in the manifest.
MAX_ARCHIVE_BYTES, MAX_ENTRIES, MAX_NOTE_BYTES = 20 << 20, 256, 1024


def library_files(root: Path = ROOT) -> dict[str, str]:
    """Collect the source files that the solver needs, by following its imports.

    Args:
        root: The folder that holds ``protonet``.

    Returns:
        POSIX path below ``root`` to source text, sorted by path.

    Raises:
        InputError: A file imports a package that the contest does not provide.
    """
    files: dict[str, str] = {}
    waiting = list(ENTRY_MODULES)
    while waiting:
        module = waiting.pop()
        path = PurePosixPath(module.replace(".", "/"))
        options = (path / "__init__.py", path.with_suffix(".py"))
        file = next((option for option in options if (root / option).is_file()), None)
        if file is None or str(file) in files:  # None: a name inside a module, not a module
            continue
        files[str(file)] = source = (root / file).read_text(encoding="utf-8")
        package = module if file.stem == "__init__" else module.rpartition(".")[0]
        for name in _imported_names(ast.parse(source), package):
            top = name.partition(".")[0]
            if top not in ALLOWED_IMPORTS:
                remedy = "Move it out of the solver's way."
                raise_input_error(str(file), "import torch, numpy and the standard library alone", top, remedy)
            if top == "protonet":
                parts = name.split(".")
                waiting += [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return dict(sorted(files.items()))


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the absolute names that a module of ``package`` imports, without imports for type checking only."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += node.orelse if isinstance(node, ast.If) and type_checking else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def pack_zip() -> bytes:
    """Make the ZIP archive for Agentics (manifest, scripts, ``solution.py``, library); check it against the limits."""
    here = ROOT / "solution"
    manifest = (here / MANIFEST_FILE).read_text(encoding="utf-8")
    names = [MANIFEST_FILE, "solution.py", *json.loads(manifest)["commands"].values()]
    files = library_files() | {name: (here / name).read_text(encoding="utf-8") for name in names}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, text in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # the default time is in 1980
            entry.create_system = 3  # Unix, wherever it is packed
            entry.external_attr = (stat.S_IFREG | (0o755 if name.endswith(".sh") else 0o644)) << 16
            archive.writestr(entry, text)
    check_archive(files, len(buffer.getvalue()))
    return buffer.getvalue()


def pack_single_file() -> bytes:
    """Make the single-file submission: `solution.single_file` with the sources of the library embedded."""
    template = (ROOT / "solution" / "single_file.py").read_text(encoding="utf-8")
    entries = [f'    "{path}": {_format_literal(source)},\n' for path, source in library_files().items()]
    empty = "FILES: dict[str, str] = {}\n"
    assert template.count(empty) == 1
    return template.replace(empty, empty.replace("{}", "{\n" + "".join(entries) + "}")).encode()


def join_package_modules(package: str = "protonet.optimizer", root: Path = ROOT) -> str:
    """Join the modules of a package into the source of one module that can be imported alone.

    Args:
        package: Full name. Its modules import each other by ``from ... import`` without new names.
        root: The folder that holds the outermost package.

    Returns:
        Source text: the package's docstring, the imports from elsewhere, and the modules, each after those it imports.
    """
    folder = root / package.replace(".", "/")
    sources = {f"{package}.{path.stem}": path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    sources[package] = sources.pop(f"{package}.__init__")
    trees = {module: ast.parse(source) for module, source in sources.items()}
    graph = {
        module: [source for name in _imported_names(tree, package) if (source := name.rpartition(".")[0]) in trees]
        for module, tree in trees.items()
    }
    elsewhere, bodies = set[str](), list[str]()
    for module in TopologicalSorter(graph).static_order():
        lines = sources[module].splitlines()
        for node in trees[module].body:
            end = node.end_lineno or node.lineno
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.Import | ast.ImportFrom) or docstring:
                lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
            if isinstance(node, ast.Import):
                elsewhere.add(ast.unparse(node))
            elif isinstance(node, ast.ImportFrom) and node.module not in trees and node.module != "__future__":
                elsewhere |= {f"from {node.module} import {alias.name}" for alias in node.names}
        bodies.append("\n".join(lines).strip())
    head = f'"""{ast.get_docstring(trees[package])}\n"""\n\nfrom __future__ import annotations\n\n'
    return head + "\n".join(sorted(elsewhere)) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"


def _format_literal(text: str) -> str:
    """Format a text as a Python literal: a raw string with its line breaks, or an escaped one if that is impossible."""
    readable = f"r'''{text}'''"
    plain = "'''" not in text and not text.endswith(("'", "\\")) and not {"\r", "\0"} & set(text)
    return readable if plain else repr(text)


def check_archive(files: Mapping[str, str], size: int) -> None:
    """Raise an InputError if an archive of ``size`` bytes, with file texts by path, violates the contest's limits."""
    _require(size <= MAX_ARCHIVE_BYTES, f"have at most {MAX_ARCHIVE_BYTES} bytes", size)
    _require(len(files) <= MAX_ENTRIES, f"have at most {MAX_ENTRIES} entries", len(files))
    manifest = json.loads(files[MANIFEST_FILE])
    keys = ["commands", "note", "protocol", "protocol_version"]
    _require(sorted(manifest) == keys, f"have the keys {keys}", manifest, MANIFEST_FILE)
    protocol = manifest["protocol"], manifest["protocol_version"]
    _require(protocol == ("zip_project", 1), "have protocol zip_project, version 1", protocol, MANIFEST_FILE)
    length = len(manifest["note"].encode())
    _require(length <= MAX_NOTE_BYTES, f"have a note of at most {MAX_NOTE_BYTES} bytes", length, MANIFEST_FILE)
    commands = manifest["commands"]
    _require(
        sorted(commands) == sorted(MANIFEST_COMMANDS),
        f"have the commands {', '.join(MANIFEST_COMMANDS)}",
        commands,
        MANIFEST_FILE,
    )


def _require(condition: bool, constraint: str, got: object, argument: str = "archive") -> None:
    """Raise an InputError unless ``condition`` holds; ``argument`` is "archive" or the name of a file in it."""
    if not condition:
        raise_input_error(argument, constraint, got, "Correct solution/ and pack again.")


def _write_submissions(arguments: Sequence[str] | None) -> None:
    """Write all submissions to the folder of ``--output``, and print a line for each."""
    parser = CommandParser(
        "solution.pack", "Write the contest's ZIP, the single-file submission and the shared optimizer."
    )
    parser.add_argument("-o", "--output", default="dist", metavar="DIR", help="folder (default: dist)")
    folder = check_output_path("--output", parser.parse_args(arguments).output, folder=True)
    submissions = {ZIP_NAME: pack_zip(), SINGLE_FILE_NAME: pack_single_file()}
    config = (ROOT / "solution" / CONFIG_FILE_NAME).read_bytes()
    submissions |= {OPTIMIZER_FILE_NAME: join_package_modules().encode(), CONFIG_FILE_NAME: config}
    for name, data in submissions.items():
        (folder / name).write_bytes(data)
        print(f"{folder / name}: {len(data):,} bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command("solution.pack", _write_submissions, arguments)
