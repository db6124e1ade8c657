"""Count the lines of each package: code, documentation and comments that stand on lines of their own."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from analysis.shared.runner import StudyOptions, StudyReport
from protonet.ui.text import format_table
from solution.pack import ROOT

#: Every line is of one kind. Documentation is docstrings, strings below fields and comments that begin with ``#:``.
KINDS = ("code", "documentation", "comments", "blank")
TABLE_NOTE = """
Documentation: docstrings, strings below fields, and comments that begin with #:. Comments: other comments on lines of
their own. A line with code and a comment is a line of code.
"""


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of the study."""


def run(options: Options) -> StudyReport:
    """Count the lines of the packages of this repository."""
    del options
    rows: dict[str, Counter[str]] = {}
    for package, path in list_files(ROOT):
        rows.setdefault(package, Counter()).update(count_lines(path.read_text(encoding="utf-8")))
    for folder in ("protonet", "analysis", "tests"):
        parts = [counts for package, counts in rows.items() if package.split(".")[0] == folder]
        rows[f"{folder}, all"] = sum(parts, Counter())
    lines = [
        [package, *(f"{counts[kind]:,}" for kind in KINDS), f"{100 * counts['comments'] / counts['code']:.1f}"]
        for package, counts in rows.items()
        if counts["code"]
    ]
    table = format_table(["package", *KINDS, "comments per 100 lines of code"], lines)
    return StudyReport(rows, table + TABLE_NOTE)


def list_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the Python files below ``root`` with their packages, such as protonet.views."""
    for folder in ("protonet", "analysis", "solution", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            yield ".".join(path.relative_to(root).parent.parts[:2]), path


def count_lines(source: str) -> Counter[str]:
    """Count the lines of each kind of ``KINDS`` in the source of a module; a SyntaxError is raised for other text."""
    kinds = ["blank"] * len(source.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            kinds[token.start[0] - 1] = "documentation" if token.string.startswith("#:") else "comments"
        elif token.string.strip() and token.type != tokenize.COMMENT:  # other tokens are line ends and indents
            kinds[token.start[0] - 1 : token.end[0]] = ["code"] * (token.end[0] - token.start[0] + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            kinds[node.lineno - 1 : node.lineno - 1 + length] = ["documentation"] * length
    return Counter(kinds)
