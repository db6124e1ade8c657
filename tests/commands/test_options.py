"""Options that dataclasses declare: their parser, their values and their names in errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from protonet.errors import InputError, raise_input_error
from protonet.ui.command_line import CommandParser, parse_integer
from protonet.ui.options import (
    add_options,
    check_output_paths,
    make_options,
    name_options_in_errors,
    option,
    parse_options,
    positional,
    same_option,
)


@dataclass(frozen=True, kw_only=True)
class Base:
    """Options of two commands."""

    table: Path = positional("the table", metavar="TABLE.csv")
    n_rows: int = option("rows", 5, "-n", parse=partial(parse_integer, low=1))
    names: Sequence[str] = option("names", (), group="more")
    fast: bool = option("be fast", False, group="more")
    counted: int = 0  #: Set in Python alone.


@dataclass(frozen=True, kw_only=True)
class More(Base):
    """Options of one command."""

    n_rows: int = same_option(Base, "n_rows", default=7, help="other rows")
    output: Path | None = option("the result", suffixes=(".txt",))
    words: Sequence[str] = ()  #: The command line.


def parse(words: Sequence[str]) -> More:
    parser = CommandParser("cmd", "Do it.")
    add_options(parser, More)
    return make_options(More, parse_options(parser, More, words))


def test_values_are_those_of_the_declarations() -> None:
    assert parse(["t"]) == More(table=Path("t"), n_rows=7, words=["t"])
    words = ["t", "-n", "3", "--names", "a", "b", "--fast", "--output", "o.txt"]
    expected = More(table=Path("t"), n_rows=3, names=["a", "b"], fast=True, output=Path("o.txt"), words=words)
    assert parse(words) == expected
    assert make_options(Base, expected) == Base(table=Path("t"), n_rows=3, names=["a", "b"], fast=True)


def test_expert_options_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    for word, shown in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit, match=r"^0$"):
            parse([word])
        text = capsys.readouterr().out
        assert ("--fast" in text) == ("more:" in text) == shown
        assert "-n N, --n-rows N" in text
        assert "other rows" in text
        assert "counted" not in text
        assert text.index("--output FILE") < text.index("--help-all  ")


def test_errors_name_the_option_of_a_field() -> None:
    with pytest.raises(InputError, match=r"^`--n-rows` must be a whole number >= 1; got '0'"):
        parse(["t", "-n", "0"])
    for argument, shown in (("n_rows", "--n-rows"), ("table", "TABLE.csv"), ("counted", "counted"), ("rows", "rows")):
        with (
            pytest.raises(InputError, match=rf"^`{shown}` must be it; got 3\. Pass `--fast`\.$") as error,
            name_options_in_errors(More),
        ):
            raise_input_error(argument, "be it", 3, "Pass `fast`.")
        assert error.value.argument == shown


def test_output_paths_are_checked(tmp_path: Path) -> None:
    read = tmp_path / "read.txt"
    read.touch()
    inputs = [read, tmp_path / "absent"]
    assert check_output_paths(More(table=read, output=tmp_path / "o.txt"), More, inputs) == {
        "output": tmp_path / "o.txt"
    }
    for path, message in ((tmp_path / "o.csv", "end in .txt"), (read, "be another file than the inputs")):
        with pytest.raises(InputError, match=f"^`--output` must {message}; got "):
            check_output_paths(More(table=read, output=path), More, inputs)
