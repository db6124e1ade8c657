"""The fenced blocks of README, CONTRIBUTING and the pages under docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GENERATED = (
    ROOT / "docs" / "_build",
    ROOT / "docs" / "results",
    *(ROOT / "docs" / "reference" / name for name in ("methods.md", "commands.md")),
)
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if not any(made in (path, *path.parents) for made in GENERATED)
)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


class Block(NamedTuple):
    """A fenced block: the page it stands on, its line, its language and its text."""

    page: str
    line: int
    language: str
    text: str


def read_blocks(name: str) -> list[Block]:
    """Return a page's fenced blocks, those in a list or a table among them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    pattern = r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$"
    blocks = re.finditer(pattern, text, re.DOTALL | re.MULTILINE)
    return [
        Block(name, text.count("\n", 0, match.start()) + 1, match["language"].strip(), match["text"])
        for match in blocks
    ]


def read_commands(name: str) -> list[str]:
    """Return the command lines of a page's shell blocks, without comments, continued lines joined."""
    commands = []
    for block in read_blocks(name):
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"^(\w+=\w+ )+", "", re.sub(r"(^|\s)#.*", "", line).strip())
                if command:
                    commands.append(re.sub(r"^protonet(?= )", "python -m protonet", command))
    return commands


def read_extras() -> list[str]:
    """Return the names of the extras in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return re.findall(r"^(\w+) = ", section, re.MULTILINE)
