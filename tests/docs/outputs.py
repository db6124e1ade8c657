"""Read the fenced blocks of README, CONTRIBUTING and the pages under docs/; run a page, compare or write its outputs.

A ``text`` block directly after a ``sh`` or ``python`` block is its output, or its first lines if the block ends in
``...``. A block below the comment ``<!-- not run -->`` is only shown. ``python -m tests.docs.outputs [PAGE ...]`` runs
pages, all by default, and replaces the quoted outputs that differ.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from protonet import __main__ as library
from protonet.episodes import __main__ as episodes
from tests.commands.servers import start as start_server

ROOT = Path(__file__).resolve().parents[2]
GENERATED = (
    ROOT / "docs" / "_build",
    ROOT / "docs" / "results",
    *(ROOT / "docs" / "reference" / name for name in ("methods.md", "commands.md")),
)
#: The pages, without generated ones.
NAMES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if not any(made in (path, *path.parents) for made in GENERATED)
]


class Page(NamedTuple):
    """Settings of the run of a page."""

    #: A folder with the files that the examples read.
    source: str | None = None
    #: Whether texts and pictures are read by the installed pretrained encoders, which take seconds.
    encoders: bool = False


#: Pages whose outputs are checked.
PAGES = {
    "docs/start/first-model.md": Page("examples/wine"),
    "docs/how-to/tables.md": Page("examples/wine"),
    "docs/how-to/inspect.md": Page("examples/wine"),
    "docs/how-to/label.md": Page("examples/wine"),
    "docs/how-to/text.md": Page("examples/texts", encoders=True),
    "docs/how-to/pictures.md": Page(encoders=True),
    "docs/how-to/few-shot.md": Page(),
    "docs/how-to/optimizer.md": Page(),
    "docs/how-to/python.md": Page(),
    "docs/how-to/scikit-learn.md": Page(),
    "docs/how-to/serve.md": Page("examples/wine"),
    "docs/how-to/many-files.md": Page("examples/wine"),
    "docs/explanation/data-flow.md": Page(),
}
#: Relative difference of a printed number that another machine's rounding may cause, less than that of one of a hundred
#: test rows; and of a number between 0 and 1, such as a probability, from the nearer of the two.
TOLERANCE, FRACTION_TOLERANCE = 0.002, 0.25
#: The address at which `protonet serve` listens by default; a run takes another port.
SERVER = "127.0.0.1:8765"
BLOCK = re.compile(r"^(<!-- not run -->\n)?```(sh|python)\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.DOTALL | re.M)


class Example(NamedTuple):
    """A code block, the output that the page quotes (None without one), and the output of the run."""

    code: str
    quoted: str | None
    printed: str


class Shell:
    """Runs command lines; the commands of this package run in this process, and servers in the background.

    Args:
        servers: Ends the servers when it is left.
    """

    def __init__(self, servers: contextlib.ExitStack) -> None:
        self._servers, self._address = servers, SERVER

    def run(self, command: str) -> None:
        """Run one command line; its output goes to stdout."""
        words = shlex.split(command, comments=True)
        if "serve" in words:
            self._serve(words)
        elif words[:1] == ["protonet"]:
            assert library.main(words[1:]) == 0, command
        elif words[:3] == ["python", "-m", "protonet.episodes"]:
            assert episodes.main(words[3:]) == 0, command
        elif words and words[:2] != ["pip", "install"]:
            line = ["bash", "-c", command.replace(SERVER, self._address)]
            run = subprocess.run(line, capture_output=True, text=True, check=True)
            print(run.stdout.replace(self._address, SERVER).rstrip())

    def _serve(self, words: list[str]) -> None:
        """Start a server on a free port, and print its first line."""
        settings = {"PYTHONPATH": str(ROOT)} | dict(word.split("=") for word in words if re.match(r"[A-Z_]+=", word))
        arguments = [word for word in words if "=" not in word][1:]
        server = self._servers.enter_context(start_server(*arguments, environment=settings))
        self._address = f"127.0.0.1:{server.port}"
        print(server.line.replace(self._address, SERVER).rstrip())


def run_page(text: str) -> Iterator[Example]:
    """Run the examples of a page in order, in the current folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.ExitStack() as servers:
        shell = Shell(servers)
        for hidden, language, code, quoted in BLOCK.findall(text):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if language == "python" and not hidden:
                    exec(code, names)
                elif not hidden:
                    for command in code.replace("\\\n", " ").splitlines():
                        shell.run(command)
            yield Example(code, None if hidden else quoted or None, shorten(printed.getvalue(), quoted))


def shorten(printed: str, quoted: str) -> str:
    """Keep as many lines as a quoted output has if that ends in ``...``."""
    if not quoted.endswith("\n...\n"):
        return printed
    return "\n".join([*printed.splitlines()[: quoted.count("\n") - 1], "...\n"])


def is_same(quoted: str, printed: str) -> bool:
    """Compare two outputs: equal words, and numbers that are equal but for rounding, their signs among them."""
    number = r"[-+]?\d+(?:\.\d+)?"
    if re.sub(rf"{number}|[ -]+", "", quoted) != re.sub(rf"{number}|[ -]+", "", printed):
        return False
    pairs = zip(re.findall(number, quoted), re.findall(number, printed), strict=True)
    return all(_is_near(a, b) for a, b in pairs)


def _is_near(quoted: str, printed: str) -> bool:
    """Compare two numbers; the last digit of decimals, and of integers of three digits, may differ by one."""
    size = abs(float(quoted))
    allowed = TOLERANCE * size if size >= 1 else FRACTION_TOLERANCE * min(size, 1 - size)
    decimals = quoted.partition(".")[2]
    last_digit = 1.01 * 10.0 ** -len(decimals) if decimals or size >= 100 else 0.0
    return abs(float(quoted) - float(printed)) <= max(allowed, last_digit)


@contextlib.contextmanager
def prepare(page: Page, folder: Path) -> Iterator[None]:
    """Enter a folder with the files of a page's examples, and set the environment of a run."""
    if page.source is not None:
        shutil.copytree(ROOT / page.source, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTONET_CACHE", str(folder / ".cache"))
        patch.setenv("COLUMNS", "120")
        if page.encoders:
            patch.delenv("PROTONET_REPRESENTATION", raising=False)
        else:
            patch.setenv("PROTONET_REPRESENTATION", "none")
        patch.chdir(folder)
        yield


def write_outputs(name: str) -> None:
    """Replace the outputs of a page that differ from those of a run by more than rounding."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    new = iter(list(run_page(text)))

    def replace(match: re.Match[str]) -> str:
        example = next(new)
        if example.quoted is None or is_same(example.quoted, example.printed):
            return match[0]
        return f"```{match[2]}\n{match[3]}```\n\n```text\n{example.printed.rstrip()}\n```\n"

    path.write_text(BLOCK.sub(replace, text), encoding="utf-8")


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PAGES:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, prepare(PAGES[name], Path(folder)):
            write_outputs(name)
        print(f"{name}: {time.monotonic() - start:.1f} s")
