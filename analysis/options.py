"""What the studies' commands share: lists of names, and the files that they write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from protonet._checks import fail
from protonet._command import check_writable_file, parse_whole


def parse_names(prog: str, argument: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names of a list with commas, each once, or raise a ValueError if one is not known."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            fail(prog, argument, f"be of {', '.join(known)}", repr(name), "Pick listed ones, with commas.")
    return names


def parse_wholes(prog: str, argument: str, text: str, *, low: int) -> list[int]:
    """Return the numbers of a list with commas, each once, or raise a ValueError if one is no int >= low."""
    return list(dict.fromkeys(parse_whole(prog, argument, number, low=low) for number in text.split(",")))


def check_outputs(prog: str, options: argparse.Namespace, names: Sequence[str]) -> dict[str, Path]:
    """Return the paths of those options of ``names`` that are given, once it is known that they can be written.

    Raises:
        ValueError: One cannot, or two are the same file.
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


def write_results(outputs: Mapping[str, Path], rows: object, table: str) -> None:
    """Print the table, and write the rows to the path ``json`` and the table to ``markdown``, if they are there."""
    if "json" in outputs:
        outputs["json"].write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if "markdown" in outputs:
        outputs["markdown"].write_text(table, encoding="utf-8")
    print(table, end="")
