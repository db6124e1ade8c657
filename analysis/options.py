"""What the studies' commands share: lists of names, and the files that they write."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from protonet._checks import fail
from protonet.commands.common import parse_whole


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


def write_results(outputs: Mapping[str, Path], rows: object, table: str) -> None:
    """Print the table, and write the rows to the path ``json`` and the table to ``markdown``, if they are there."""
    if "json" in outputs:
        outputs["json"].write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if "markdown" in outputs:
        outputs["markdown"].write_text(table, encoding="utf-8")
    print(table, end="")
