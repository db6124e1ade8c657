"""`Command`, which runs ``python -m protonet.episodes`` in the process of a test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from protonet.episodes.__main__ import main


class Command:
    """Runs ``python -m protonet.episodes`` in this process. Arguments are texts with spaces between words."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder, self.error = capsys, folder, ""

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Run the command, check its exit code, keep its stderr in ``error``, and return what it printed."""
        self.capsys.readouterr()
        ended = main([word for argument in arguments for word in str(argument).split()])
        out, self.error = self.capsys.readouterr()
        assert ended == code, self.error
        return out

    def read(self, *arguments: object) -> dict[str, Any]:
        """Run the command with ``--json``, and return the content of the file."""
        self.printed = self(*arguments, "--json", self.folder / "read.json")
        results: dict[str, Any] = json.loads((self.folder / "read.json").read_text(encoding="utf-8"))
        return results

    def accuracies(self, *arguments: object) -> dict[str, float]:
        """Run the command, and return the accuracy of each method."""
        return {name: method["accuracy"] for name, method in self.read(*arguments)["methods"].items()}

    def refuses(self, message: str, *arguments: object) -> None:
        """Check that the command fails, prints nothing, and writes one line to stderr that matches ``message``."""
        assert self(*arguments, code=2) == ""
        assert self.error.count("\n") == 1, self.error
        assert re.search(message, self.error), self.error
