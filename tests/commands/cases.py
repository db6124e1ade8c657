"""What tests of commands share: a command run in this process, and the tables that it writes."""

from __future__ import annotations

import csv
import io

import pytest

from protonet.__main__ import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Run a command; return what it printed, or its one line of error."""
    found = main([*map(str, arguments), *["-q"] * (arguments[0] != "info")])
    out, err = capsys.readouterr()
    assert found == code, err
    if code:
        assert err.count("\n") == 1
        assert not out
        return err
    assert not err
    return out


def read_table(text: str) -> list[dict[str, str]]:
    """Return the rows of CSV, by the names of its columns."""
    return list(csv.DictReader(io.StringIO(text)))
