"""The help of each command fits a screen, and its examples can be parsed; progress bars; blocks in parallel."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from protonet.__main__ import main
from protonet._io import show_progress
from protonet.commands.arguments import COMMANDS
from protonet.commands.data import map_blocks
from protonet.episodes.__main__ import main as main_episodes
from protonet.tables.table import RowBlock
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


@pytest.mark.parametrize("quiet", [False, True])
def test_the_bar_shows_the_remaining_time(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress(quiet=quiet) as report:
        for stage, fraction in (("start", 0.0), ("first", 0.2), ("second", 0.25), ("third", 0.5)):
            report(stage, fraction)
            now[0] += 30
    output = capsys.readouterr().err
    shown = re.findall(r"(\w+): (\d+) %\|.*?\| ([\d:]+), ([\d:]+) left", output)
    expected = [("first", "20", "00:30", "02:00"), ("second", "25", "01:00", "03:00")]
    expected += [("third", "50", "01:30", "01:30")]
    assert shown == ([] if quiet else expected)
    assert bool(output) != quiet


def test_blocks_are_processed_in_order_and_a_few_at_a_time() -> None:
    used: list[int] = []

    def blocks() -> Iterator[RowBlock]:
        for index in range(40):
            used.append(index)
            yield RowBlock([np.array([index])], np.empty(0, np.str_), (), [index], [index])

    def work(block: RowBlock) -> int:
        if len(used) == 40 and block.positions == [39]:
            raise ValueError("the last")
        return int(block.columns[0][0])

    threads = torch.get_num_threads()
    results = map_blocks(work, blocks())
    assert next(results) == 0
    assert len(used) <= 2 * threads + 1
    assert [next(results) for _ in range(38)] == list(range(1, 39))
    with pytest.raises(ValueError, match="the last"):
        next(results)
    assert torch.get_num_threads() == threads
