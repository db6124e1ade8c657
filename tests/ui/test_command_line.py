"""Shared behaviour of commands: one-line errors, checks of paths, and no leftover files."""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from protonet.errors import InputError, InputTypeError, MissingPackageError
from protonet.ui import command_line
from protonet.ui.text import format_table


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
        (command_line.parse_finite_number, "1.5", "be a finite number > 0", ["-1", "0", "", "nan", "inf", "x"]),
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
