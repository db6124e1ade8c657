"""Settings of the site: Sphinx, MyST and the reference from docstrings. Built by ``make docs``."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "analysis" / "results"
sys.path.insert(0, str(ROOT))

from protonet.__main__ import COMMANDS  # noqa: E402 - behind its path
from protonet.episodes.methods import METHODS  # noqa: E402 - behind its path

project = "protonet"
author = "the protonet authors"
release = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[0]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings: list[str] = []

# Pages: headings have anchors, so that a link to a heading that is not there is an error.
myst_heading_anchors = 4

# Reference: pages by subject, from the docstrings of what is public.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# The types of settings are called by their names, whose bounds the page on extending has.
BOUNDED = ("Positive", "NonNegative", "Share", "PositiveShare", "BelowOne", "Count", "PositiveCount")
autodoc_type_aliases = {name: name for name in BOUNDED}
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Every reference to a name of this project has to resolve, but for the types of signatures, of which some are not
# public. What lies outside is not checked: the inventories of Python, torch, NumPy and scikit-learn are on the network,
# and the site is built without it.
nitpicky = True
OUTSIDE = (
    "argparse",
    "collections",
    "matplotlib",
    "mmap",
    "np",
    "numpy",
    "os",
    "PIL",
    "pathlib",
    "_pickle",
    "scipy",
    "sklearn",
    "torch",
    "typing",
)
nitpick_ignore_regex = [
    (r"py:.*", rf"({'|'.join(OUTSIDE)})\..+"),
    (r"py:.*", r"Tensor|nn\.Module|Path|Image|Callable(\[.*)?|Iterable|Iterator|Mapping|Sequence"),
    (r"py:(class|data|obj)", r"protonet\..+|[A-Z]\w*"),  # types of signatures
    (r"py:class", r"[\d.]+|sphinx\.util\.inspect\.Annotated"),  # what settings say is tried of them
]

html_theme = "furo"
html_title = f"protonet {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def write_results(app: Any) -> None:
    """Write a page for each table under analysis/results; these pages are not committed."""
    folder = Path(app.srcdir) / "results"
    folder.mkdir(exist_ok=True)
    names = [path.stem for path in sorted(RESULTS.glob("*.md"))]
    for path in folder.glob("*.md"):
        if path.stem not in {*names, "index"}:
            path.unlink()
    tree = "\n".join(names)
    pages = {
        "index": "# Results\n\nThe tables that the studies wrote, as they stand in `analysis/results`.\n\n"
        f"```{{toctree}}\n{tree}\n```\n"
    }
    for name in names:
        text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        title = "" if text.startswith("# ") else f"# {name.replace('_', ' ').capitalize()}\n\n"
        pages[name] = title + text
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def write_methods(app: Any) -> None:
    """Write the page of all few-shot methods, each by its docstring; it is not committed."""
    lines = ["# Methods", "", "Settings are keyword-only parameters; `--method NAME:setting=value` sets them.", ""]
    for kind, title in ((False, "Each query alone"), (True, "All queries of an episode together")):
        lines += [f"## {title}", ""]
        for name, spec in METHODS.items():
            if spec.transductive is kind:
                function = f"{spec.function.__module__}.{spec.function.__name__}"
                lines += [f"### {name}", "", "```{eval-rst}", f".. autofunction:: {function}", "```", ""]
    (Path(app.srcdir) / "reference" / "methods.md").write_text("\n".join(lines), encoding="utf-8")


def write_commands(app: Any) -> None:
    """Write the page of all commands from the help of their parsers; it is not committed."""
    pages = {
        "protonet": [[], *([name] for name in COMMANDS)],
        "protonet.episodes": [[], ["train"], ["extract"], ["paper"], ["compare"]],
        "analysis": [[]],
    }
    lines = ["# Commands", "", "The help of each command, as `--help-all` prints it.", ""]
    for module, commands in pages.items():
        for words in commands:
            prog = " ".join([module if module == "protonet" else f"python -m {module}", *words])
            lines += [f"## {prog}", "", "```text", read_help(module, words).rstrip(), "```", ""]
    (Path(app.srcdir) / "reference" / "commands.md").write_text("\n".join(lines), encoding="utf-8")


def read_help(module: str, words: list[str]) -> str:
    """Run ``--help-all``, or ``--help`` if a command has no further options, and return its output."""
    for option in ("--help-all", "--help"):
        command = [sys.executable, "-m", module, *words, option]
        environment = {**os.environ, "COLUMNS": "100"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if run.returncode == 0:
            return run.stdout
    raise RuntimeError(f"{command}: {run.stderr}")


def link_results(app: Any, docname: str, source: list[str]) -> None:
    """Lead links to the tables, which are written for a reader of the repository, to their pages on the site."""
    up = "../" * docname.count("/")
    source[0] = re.sub(r"\]\((?:\.\./)*analysis/results/(\w+)\.md\)", rf"]({up}results/\1.md)", source[0])


def prepare_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make a field of the source that a docstring names, and keep what Napoleon would misread.

    Of a constant or a field it takes what stands before a colon for the type.
    """
    lines[:] = [re.sub(r"^Source: ", ":Source: ", line) for line in lines]
    for number in reversed(range(1, len(lines))):
        if lines[number].startswith(":Source: ") and lines[number - 1].strip():
            lines.insert(number, "")
    if what in {"attribute", "data", "property"}:
        text = [] if lines and lines[0].startswith("Alias for field number") else list(lines)
        app.config.kept_attributes[name] = text


def restore_attributes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put back what `prepare_docstring` kept, after Napoleon."""
    if name in app.config.kept_attributes:
        lines[:] = app.config.kept_attributes.pop(name)


def resolve_annotations(app: Any) -> None:
    """Give modules the names that they import for types alone, so that annotations lead to the right class."""
    for path in sorted((ROOT / "protonet").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        blocks = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
        guarded = [node for block in blocks if "TYPE_CHECKING" in ast.dump(block.test) for node in block.body]
        for node in guarded:
            if isinstance(node, ast.ImportFrom) and node.module and name != "protonet":
                for alias in node.names:
                    setattr(import_module(name), alias.name, getattr(import_module(node.module), alias.name))


def shorten_defaults(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Write ``...`` for a default that is no Python, such as ``<function f>``, and the names of types of settings."""
    if signature is None:
        return None, returned
    return re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", re.sub(r"<[^<>]*>", "...", signature)), returned


def skip_member(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what scikit-learn writes into the class: its metadata routing."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.add_config_value("kept_attributes", {}, "")
    app.connect("builder-inited", write_results, priority=100)
    app.connect("builder-inited", write_methods, priority=100)
    app.connect("builder-inited", write_commands, priority=100)
    app.connect("builder-inited", resolve_annotations, priority=100)
    app.connect("source-read", link_results)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-docstring", restore_attributes, priority=600)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-skip-member", skip_member)
