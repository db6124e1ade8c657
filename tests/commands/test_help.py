"""What commands share: help with examples that can be parsed, errors of one line, checks of paths, progress bars."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.__main__ import main
from protonet._io import show_progress
from protonet.commands.arguments import COMMANDS
from protonet.commands.data import map_blocks
from protonet.episodes.__main__ import main as main_episodes
from protonet.errors import InputError, InputTypeError, MissingPackageError
from protonet.tables.table import RowBlock
from protonet.ui import command_line
from protonet.ui.command_line import CommandParser
from protonet.ui.text import format_table

Main = Callable[[Sequence[str]], int]
EVERY: dict[str, tuple[Main, tuple[str, ...]]] = {name: (main, (name,)) for name in COMMANDS}
EVERY |= {"episodes": (main_episodes, ()), "episodes extract": (main_episodes, ("extract",))}
TABLES = "CSV or text with a header, JSON, ARFF (also .gz, .zip, or - for stdin), Excel, OpenDocument, SQLite, Parquet"


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
            yield RowBlock([np.array([index])], [index], [index])

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


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (None, 0, ""),
        (InputError("`x`\nmust be"), 2, "cmd: `x` must be\n"),
        (InputTypeError("a"), 2, "cmd: a\n"),
        (MissingPackageError("`x` must be installed"), 2, "cmd: `x` must be installed\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "cmd: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, "cmd: interrupted\n"),
        (KeyboardInterrupt("stopped; half is kept"), 130, "cmd: stopped; half is kept\n"),
    ],
)
def test_exit_codes(error: BaseException | None, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: Sequence[str] | None) -> None:
        assert arguments == ["a"]
        if error is not None:
            raise error

    assert command_line.run_command("cmd", command, ["a"]) == code
    assert capsys.readouterr().err == line


def test_ctrl_c_that_becomes_another_error_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def command(_: Sequence[str] | None) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError from None  # as a package that is interrupted while it is imported

    handler = signal.getsignal(signal.SIGINT)
    assert command_line.run_command("cmd", command) == 130
    assert capsys.readouterr().err == "cmd: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is handler


BUGS = (RuntimeError("a bug"), ValueError("of ours"), TypeError("of ours"), ImportError("of ours"), AssertionError())


@pytest.mark.parametrize("error", BUGS, ids=lambda error: type(error).__name__)
def test_a_bug_gives_one_line_with_the_path_of_the_traceback(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: Sequence[str] | None) -> None:
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command_line.run_command("cmd", command, ["a"]) == 1
    captured = capsys.readouterr()
    (path,) = tmp_path.iterdir()
    assert captured.out == ""
    bug = f"cmd: this is a bug of protonet, not your mistake ({type(error).__name__}). Please report it with "
    assert captured.err == f"{bug}the command and {path}, which holds the traceback\n"
    text = path.read_text()
    assert text.startswith("cmd\nPython 3.")
    assert f"torch {metadata.version('torch')}" in text
    assert "Traceback (most recent call last):" in text
    assert "raise error" in text
    assert str(error) in text
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))  # no file can be written: the traceback is printed
    assert command_line.run_command("cmd", command) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"{bug}this:\n")
    assert err.rstrip().endswith(f"{type(error).__name__}: {error}".rstrip(": "))


def test_parser_errors() -> None:
    parser = command_line.CommandParser("cmd", "Do it.")
    parser.add_argument("--long-name")
    assert parser.parse_args(["--long-name", "x"]).long_name == "x"
    parser.add_argument("table")
    for arguments, message in (
        (["t", "--long", "x"], r"unknown option: --long \(did you mean --long-name\?\)"),
        (["t", "--log", "x"], r"unknown option: --log \(run cmd --help\)"),  # alike in its dashes only
        (["t", "--long-name"], r"argument --long-name: expected one argument \(run cmd --help\)"),
        (["t", "extra"], r"unexpected argument: extra \(cmd TABLE\)"),
        ([], r"missing argument: TABLE \(cmd TABLE\)"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"):
            parser.parse_args(arguments)


def test_parsers_accept_finite_values_in_range() -> None:
    cases: list[tuple[Callable[..., float], str, str, list[str]]] = [
        (command_line.parse_integer, "12", "be a whole number >= 0", ["-1", "1.5", "", "nan", "x"]),
        (
            partial(command_line.parse_number, strict=True),
            "1.5",
            "be a finite number > 0",
            ["-1", "0", "", "nan", "inf", "x"],
        ),
    ]
    for parse, good, must, bad in cases:
        assert parse("--n", good, low=0) == float(good), parse
        for text in bad:
            with pytest.raises(InputError, match=rf"^`--n` must {must}; got '{text}'\."):
                parse("--n", text, low=0)


def test_help_hides_expert_options(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line.CommandParser("cmd", "Do it.", ["python -m cmd x"])
    parser.add_argument("rows")
    parser.add_argument("--plain", help="for all")
    parser.add_expert_group("other matters").add_argument("--rare", help="for few")
    parser.write_appendix = lambda: "and so on"
    for option, shown in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit, match=r"^0$"):
            parser.parse_args([option])
        text = capsys.readouterr().out
        assert all(part in text for part in ("Do it.", "--plain", "  python -m cmd x", "--help-all", "rows"))
        assert {"--rare" in text, "other matters" in text, "and so on" in text} == {shown}
    assert parser.parse_args(["r", "--rare", "1"]).rare == "1"


def test_writable_paths(tmp_path: Path) -> None:
    old, new, folder = tmp_path / "old", tmp_path / "folder" / "new", tmp_path / "a" / "b"
    old.write_text("kept")
    assert command_line.check_output_path("--out", str(old)) == old
    assert old.read_text() == "kept"
    assert command_line.check_output_path("--out", new) == new
    assert not new.exists()
    assert command_line.check_output_path("--out", str(folder), folder=True) == folder
    assert list(folder.iterdir()) == []
    for kind, bad in (("file", tmp_path), ("file", old / "below"), ("folder", old)):
        with pytest.raises(InputError, match=rf"^`--out` must be a {kind} that can be written; got /"):
            command_line.check_output_path("--out", bad, folder=kind == "folder")


def test_check_name() -> None:
    known = ("pt-map", "protonet", "tim")
    assert command_line.check_known_name("--method", "tim", known) == "tim"
    with pytest.raises(InputError, match=r"be one of pt-map, .*; got 'PT_MAP'\. Did you mean pt-map\?"):
        command_line.check_known_name("--method", "PT_MAP", known)
    for other in ("12", "nosuch", "mytip"):  # no known name, or none that is similar
        with pytest.raises(InputError, match=rf"be one of pt-map, protonet, tim; got '{other}'\. Pick a listed one\."):
            command_line.check_known_name("--method", other, known)


def test_outputs_are_different_files(tmp_path: Path) -> None:
    options = argparse.Namespace(json=str(tmp_path / "a"), csv=str(tmp_path / "b"), plot=None)
    paths = command_line.check_output_options(options, ("json", "csv", "plot"))
    assert paths == {"json": tmp_path / "a", "csv": tmp_path / "b"}
    options.csv = str(tmp_path / "x" / ".." / "a")
    with pytest.raises(InputError, match=r"^`--csv` must be another file than --json"):
        command_line.check_output_options(options, ("json", "csv", "plot"))


def test_table() -> None:
    text = format_table(["a", "long name"], [["1", "2"], ["333333", "4"]])
    assert text.splitlines() == [
        "| a      | long name |",
        "|--------|-----------|",
        "| 1      | 2         |",
        "| 333333 | 4         |",
    ]
