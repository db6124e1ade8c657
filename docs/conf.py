"""Configuration of the site that ``make docs`` builds with Sphinx and MyST."""

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

from protonet.commands.arguments import COMMANDS  # noqa: E402 - needs the path
from protonet.episodes.methods import METHODS  # noqa: E402 - needs the path

project = "protonet"
author = "the protonet authors"
release = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[0]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
suppress_warnings: list[str] = []

# Headings get anchors, so that a link to a missing heading is an error.
myst_heading_anchors = 4

# Notebooks have outputs, which `tests/docs/test_gallery.py` compares with a run.
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # with tables
# Outputs, which are text, have no copy button.
copybutton_selector = "div.highlight-sh pre, div.highlight-python pre, div.highlight-ipython3 pre"

# The reference is made from the docstrings of public names.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Signatures show the names of bounded types; the page "Extend" lists their bounds.
BOUNDED = ("Positive", "NonNegative", "Fraction", "PositiveFraction", "BelowOne", "Count", "PositiveCount")
autodoc_type_aliases = {name: name for name in BOUNDED}
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# Every reference to a name of this project has to resolve, except types in signatures, some of which are private.
# References to other packages are not checked: their inventories are on the network, and the site is built offline.
nitpicky = True
OUTSIDE = (
    "abc",
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
    (r"py:(class|data|obj)", r"protonet\..+|[A-Z]\w*"),  # types in signatures
    (r"py:class", r"[\d.]+|sphinx\.util\.inspect\.Annotated"),  # search spaces of settings
]

html_theme = "furo"
html_title = f"protonet {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def write_results(app: Any) -> None:
    """Write a page for each table in analysis/results. These pages are not committed."""
    folder = Path(app.srcdir) / "results"
    folder.mkdir(exist_ok=True)
    names = [path.stem for path in sorted(RESULTS.glob("*.md"))]
    for path in folder.glob("*.md"):
        if path.stem not in {*names, "index"}:
            path.unlink()
    tree = "\n".join(names)
    pages = {
        "index": "# Results\n\nThe tables that the studies wrote to `analysis/results`.\n\n"
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
    """Write the page of all few-shot methods from their docstrings. It is not committed."""
    lines = ["# Methods", "", "Settings are keyword-only parameters; `--method NAME:setting=value` sets them.", ""]
    for kind, title in ((False, "Inductive methods"), (True, "Transductive methods")):
        lines += [f"## {title}", ""]
        for name, spec in METHODS.items():
            if spec.transductive is kind:
                function = f"{spec.function.__module__}.{spec.function.__name__}"
                lines += [f"### {name}", "", "```{eval-rst}", f".. autofunction:: {function}", "```", ""]
    (Path(app.srcdir) / "reference" / "methods.md").write_text("\n".join(lines), encoding="utf-8")


def write_commands(app: Any) -> None:
    """Write the page of all commands from the help of their parsers. It is not committed."""
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
    """Replace links to files of analysis/results by links to their pages."""
    up = "../" * docname.count("/")
    source[0] = re.sub(r"\]\((?:\.\./)*analysis/results/(\w+)\.md\)", rf"]({up}results/\1.md)", source[0])


def prepare_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the source of a docstring into a field, and save attribute docstrings before Napoleon reads them.

    Napoleon takes the text before the first colon of an attribute's docstring for its type.
    """
    lines[:] = [re.sub(r"^Source: ", ":Source: ", line) for line in lines]
    for index in reversed(range(1, len(lines))):
        if lines[index].startswith(":Source: ") and lines[index - 1].strip():
            lines.insert(index, "")
    if what in {"attribute", "data", "property"}:
        text = [] if lines and lines[0].startswith("Alias for field number") else list(lines)
        app.config.kept_attributes[name] = text


def restore_attributes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Restore the attribute docstrings that `prepare_docstring` saved."""
    if name in app.config.kept_attributes:
        lines[:] = app.config.kept_attributes.pop(name)


def resolve_annotations(app: Any) -> None:
    """Import the names that modules import for type checking only, so that annotations resolve."""
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
    """Write ``...`` for defaults that are not Python, such as ``<function f>``, and names of type aliases."""
    if signature is None:
        return None, returned
    return re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", re.sub(r"<[^<>]*>", "...", signature)), returned


def locate_source(app: Any, modname: str, attribute: str) -> str | None:
    """Return the module of a bounded type, whose ``__module__`` is that of the number: ``builtins``."""
    return modname if attribute in BOUNDED else None


def skip_member(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Skip the methods that scikit-learn generates for metadata routing."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def setup(app: Any) -> None:
    """Connect the event handlers."""
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
    app.connect("viewcode-follow-imported", locate_source)
