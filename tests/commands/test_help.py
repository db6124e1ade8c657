"""The help of each command fits a screen, and its examples can be parsed."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from protonet.__main__ import main
from protonet.commands.arguments import COMMANDS
from protonet.episodes.__main__ import main as main_episodes
from protonet.ui.command_line import CommandParser

Main = Callable[[Sequence[str]], int]
EVERY: dict[str, tuple[Main, tuple[str, ...]]] = {name: (main, (name,)) for name in COMMANDS}
EVERY |= {"episodes": (main_episodes, ()), "episodes extract": (main_episodes, ("extract",))}
TABLES = "CSV, TSV or text with a header (also .gz, or - for stdin), Excel, Parquet, NPZ with x and y, NPY"


@pytest.mark.parametrize("name", EVERY)
def test_help_fits_a_screen_and_its_examples_parse(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    call, words = EVERY[name]
    with pytest.raises(SystemExit, match=r"^0$"):
        call([*words, "--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert call is main_episodes or "-q, --quiet" in text
    assert (TABLES in " ".join(text.split())) == (name in {*COMMANDS} - {"info", "export", "serve"})
    options = set(re.findall(r"^  (?:-\w,? .*?)?(--[\w-]+)|^  (-n) ", text, re.MULTILINE))
    assert 2 <= len(options) <= 14
    examples = text.partition("\nexamples:\n")[2].splitlines()
    assert len(examples) == 3

    def stop(parser: CommandParser, *given: Any) -> None:
        super(CommandParser, parser).parse_args(*given)
        raise SystemExit("taken")

    monkeypatch.setattr(CommandParser, "parse_args", stop)
    for example in examples:
        given = shlex.split(example.partition("; ")[0], comments=True)
        program = ["protonet"] if call is main else ["python", "-m", "protonet.episodes"]
        assert given[: len(program)] == program
        with pytest.raises(SystemExit, match=r"^taken$"):
            call(given[len(program) :])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_every_command_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$") if arguments else contextlib.nullcontext():
        assert main(arguments) == 0
    output = capsys.readouterr().out
    assert all(f"\n  protonet {name} " in output for name in COMMANDS)
