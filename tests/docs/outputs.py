"""Run the examples of a page, and compare or write the outputs that it quotes.

A ``text`` block directly after a ``sh`` or ``python`` block is its output, or its first lines if the block ends in
``...``. ``python -m tests.docs.outputs`` writes the outputs of all pages of `PAGES` anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from protonet import __main__ as library
from tests.docs.blocks import ROOT

#: Pages whose outputs are checked, and the folder in which their examples run.
PAGES = {"docs/start/first-model.md": "examples/wine"}
#: Relative difference of a printed number that another machine's rounding may cause.
TOLERANCE = 0.02
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    """A code block, the output that the page quotes (None without one), and the output of the run."""

    code: str
    quoted: str | None
    printed: str


def run_command(command: str) -> None:
    """Run one command line; its output goes to stdout."""
    words = shlex.split(command, comments=True)
    if words[:1] == ["protonet"]:
        assert library.main(words[1:]) == 0, command
    else:
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        print(run.stdout, end="")


def run_page(text: str) -> Iterator[Example]:
    """Run the examples of a page in order, in the current folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, code, quoted in BLOCK.findall(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if language == "python":
                exec(code, names)
            else:
                for command in code.replace("\\\n", " ").splitlines():
                    run_command(command)
        yield Example(code, quoted or None, shorten(printed.getvalue(), quoted))


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
    return all(abs(float(a) - float(b)) <= TOLERANCE * max(abs(float(a)), 1.0) for a, b in pairs)


def write_outputs(name: str) -> None:
    """Replace the outputs that a page quotes by those of a run."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    new = iter(list(run_page(text)))

    def replace(match: re.Match[str]) -> str:
        example = next(new)
        if example.quoted is None:
            return match[0]
        return f"```{match[1]}\n{match[2]}```\n\n```text\n{example.printed.rstrip()}\n```\n"

    path.write_text(BLOCK.sub(replace, text), encoding="utf-8")


if __name__ == "__main__":
    os.environ["PROTONET_REPRESENTATION"] = "none"
    for page, source in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / source, folder, dirs_exist_ok=True)
            os.chdir(Path(folder))
            write_outputs(page)
            os.chdir(ROOT)
