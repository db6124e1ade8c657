"""What every command shares: errors of one line, arguments and output paths checked before the work."""

from __future__ import annotations

import argparse
import csv
import difflib
import io
import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from protonet._checks import InputError, InputTypeError, MissingPackageError, fail, find_version, guard


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors in the one message form.

    Args:
        prog: The module that ``python -m`` runs; it opens every message.
        description: One sentence for ``--help``.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise an InputError: an option is unknown, or lacks its value."""
        fail(self.prog, "arguments", "be as --help lists them", message, f"Run python -m {self.prog} --help.")


def run_command(
    prog: str, command: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None
) -> int:
    """Run a command and turn its errors into one line on stderr.

    Args:
        prog: The command's name, for messages that do not name it themselves.
        command: Called with ``arguments``; None stands for the command line's.
        arguments: The arguments, without the command's name.

    Returns:
        The exit code: 0, 2 after an error that the caller can mend, 130 after Ctrl-C, 1 after a bug of ours, whose
        traceback is kept in a file.
    """
    try:
        command(arguments)
    except KeyboardInterrupt as interrupt:
        print(f"{prog}: {' '.join(map(str, interrupt.args)) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads has enough: what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, MemoryError) as error:
        print(f"{prog}: {error or 'there is not enough memory'}", file=sys.stderr)
        return 2
    except (InputError, InputTypeError, MissingPackageError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    except Exception as error:
        print(f"{prog}: {_report_bug(prog, error)}", file=sys.stderr)
        return 1
    return 0


def _report_bug(prog: str, error: Exception) -> str:
    """Keep a traceback in a file, with the versions that it came from; return a line that says so."""
    versions = ", ".join(f"{package} {find_version(package)}" for package in ("protonet", "torch", "numpy"))
    text = f"{prog}\nPython {sys.version}\n{versions}\n\n{''.join(traceback.format_exception(error))}"
    what = f"this is a bug of protonet, not your mistake ({type(error).__name__})"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="protonet-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(text)
    except OSError:
        return f"{what}. Please report it with this:\n{text}"
    return f"{what}. Please report it with the command and {file.name}, which holds the traceback"


def parse_whole(prog: str, argument: str, text: str, *, low: int) -> int:
    """Return ``text`` as an int >= ``low``, or raise an InputError in the one message form."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        fail(prog, argument, f"be a whole number >= {low}", repr(text), f"Pass a number such as {low}.")
    return value


def parse_number(prog: str, argument: str, text: str, *, low: float) -> float:
    """Return ``text`` as a finite float > ``low``, or raise an InputError in the one message form."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > low):
        fail(prog, argument, f"be a finite number > {low:g}", repr(text), f"Pass a number such as {low + 10:g}.")
    return value


def check_name(prog: str, argument: str, name: str, known: Collection[str]) -> str:
    """Return ``name`` if it is known, or raise an InputError that lists the known ones, the nearest first."""
    if name not in known:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=3)
        listed = [*near, *(other for other in known if other not in near)]
        fail(
            prog,
            argument,
            f"be one of {', '.join(listed)}",
            repr(name),
            f"Did you mean {near[0]}?" if near else "Pick a listed one.",
        )
    return name


def check_writable_file(prog: str, argument: str, path: str | Path) -> Path:
    """Return ``path`` once it is known that a file can be written there; its folder is made if need be.

    Raises:
        InputError: It cannot; nothing is left behind but the folder.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        fail(prog, argument, "be a file that can be written", f"{path} ({error.strerror})", "Pass another path.")
    return path


def check_writable_folder(prog: str, argument: str, path: str | Path) -> Path:
    """Return ``path`` once it is a folder, made if need be, in which files can be written.

    Raises:
        InputError: It is not.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fail(prog, argument, "be a folder that can be written", f"{path} ({error.strerror})", "Pass another path.")
    return path


def check_outputs(prog: str, options: argparse.Namespace, names: Sequence[str]) -> dict[str, Path]:
    """Return the paths of those options of ``names`` that are given, once it is known that they can be written.

    Raises:
        InputError: One cannot, or two are the same file.
    """
    paths: dict[str, Path] = {}
    for name in names:
        if getattr(options, name) is not None:
            path = check_writable_file(prog, f"--{name}", getattr(options, name))
            for other, taken in paths.items():
                if path.resolve() == taken.resolve():
                    fail(prog, f"--{name}", f"be another file than --{other}", path, "Pass another path.")
            paths[name] = path
    return paths


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns padded to line up, ending in a newline."""
    widths = [max(3, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |\n"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|\n"
    return line(header) + rule + "".join(line(row) for row in rows)


def order_naturally(names: Sequence[object]) -> list[int]:
    """Return the places of names in the order in which people look for them: k2 before k10."""

    def key(at: int) -> list[tuple[int, int, str]]:
        parts = re.split(r"([0-9]+)", str(names[at]))
        return [(0, int(part), part) if number % 2 else (1, 0, part.casefold()) for number, part in enumerate(parts)]

    return sorted(range(len(names)), key=key)


def count(n: int, noun: str) -> str:
    """Return a number and its noun: ``1 draw``, ``2,000 draws``, ``2 classes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"


def format_csv(lines: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as CSV that neither a spreadsheet nor a terminal runs."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(guard, line) for line in lines)
    return text.getvalue()
