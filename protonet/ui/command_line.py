"""Shared code of all commands: the argument parser, exit codes, one-line errors, and checks of output paths."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import signal
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from protonet._text import to_printable
from protonet.errors import DISTRIBUTION_NAME, InputError, UserError, installed_version, raise_input_error


class CommandParser(argparse.ArgumentParser):
    """An argument parser with common and expert options, which raises an InputError for invalid arguments.

    ``--help`` shows the common options. ``--help-all`` also shows expert options, which are in groups that
    `add_expert_group` created.
    """

    def __init__(self, prog: str, description: str, examples: Sequence[str] = ()) -> None:
        form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
        epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=form, allow_abbrev=False)
        self.expert_groups: list[argparse._ArgumentGroup] = []
        self.write_appendix: Callable[[], str] = str  #: Makes the text at the end of ``--help-all``.

    def add_expert_group(self, title: str) -> argparse._ArgumentGroup:
        """Add a group of options that only ``--help-all`` shows."""
        if not self.expert_groups:
            self.add_argument("--help-all", action=_HelpAllAction, nargs=0, help="show all options, and exit")
        self.expert_groups.append(self.add_argument_group(title))
        return self.expert_groups[-1]

    def format_help(self, *, include_expert: bool = False) -> str:
        """Format the help of the common options, and also of expert options if ``include_expert``."""
        groups = [group for group in self._action_groups if include_expert or group not in self.expert_groups]
        formatter = self._get_formatter()
        actions = [action for group in groups for action in group._group_actions]
        options = [action for action in actions if action.option_strings]
        positionals = [action for action in actions if not action.option_strings]
        usage = self.usage
        if self.expert_groups and not include_expert:
            required = [action for action in options if action.required]
            usage = "%(prog)s [options]" + "".join(map(_format_argument, [*required, *positionals]))
        formatter.add_usage(usage, [*options, *positionals], [])
        text = self.description or ""
        formatter.add_text(text if "\n" in text else textwrap.fill(text, formatter._width))
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        if include_expert:
            formatter.add_text(self.write_appendix())
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: object = None) -> Any:
        """Parse arguments as argparse does, but report an unknown option before a missing argument."""
        for given in sys.argv[1:] if args is None else args:
            name = str(given).partition("=")[0]
            if name == "--":
                break
            if name.startswith("--") and name not in self._option_string_actions:
                options = {option.lstrip("-"): option for option in self._option_string_actions}
                near = difflib.get_close_matches(name.lstrip("-"), options, n=1)  # dashes would make all similar
                hint = f"did you mean {options[near[0]]}?" if near else f"run {self.prog} --help"
                raise InputError(to_printable(f"unknown option: {name} ({hint})"), argument=name)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise an InputError in the style of Unix commands, given an error message of argparse."""
        what, _, names = message.partition(": ")
        if what == "the following arguments are required":
            missing = ", ".join(name if name.startswith("-") else name.upper() for name in names.split(", "))
            message = f"missing argument: {missing} ({self._format_required_usage()})"
        elif what == "unrecognized arguments":
            message = f"unexpected argument: {names.split()[0]} ({self._format_required_usage()})"
        else:
            message = f"{message} (run {self.prog} --help)"
        raise InputError(to_printable(message), argument="arguments")

    def _format_required_usage(self) -> str:
        """Format the usage line with required arguments only."""
        required = [action for action in self._actions if action.required and action.option_strings]
        positionals = [action for action in self._actions if not action.option_strings]
        return f"{self.prog}{''.join(map(_format_argument, [*positionals, *required]))}"


class _HelpAllAction(argparse.Action):
    """The action of ``--help-all``: print the help of all options, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, CommandParser)
        print(parser.format_help(include_expert=True), end="")
        parser.exit()


def _format_argument(action: argparse.Action) -> str:
    """Format a positional argument or a required option for the usage line of the help."""
    name = " ".join([*action.option_strings[:1], str(action.metavar or action.dest.upper())])
    return {"*": f" [{name} ...]", "+": f" {name} [...]", "?": f" [{name}]"}.get(str(action.nargs), f" {name}")


def run_command(
    prog: str, command: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None = None
) -> int:
    """Run a command, report its errors as one line on stderr, and return its exit code.

    Args:
        prog: The name of the command, with which the line of an error begins.
        command: The command, a function of its arguments.
        arguments: The arguments; None to take them from ``sys.argv``.

    Returns:
        0 for success, 2 for an error of the user, 130 after Ctrl-C, and 1 for a bug.
    """
    interrupts: list[int] = []
    try:
        with warnings.catch_warnings(), _record_interrupts(interrupts):
            warnings.filterwarnings("ignore", module=r"PIL\b")  # of large or unusual pictures; errors are reported
            command(arguments)
    except KeyboardInterrupt as interrupt:
        print(f"{prog}: {' '.join(map(str, interrupt.args)) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe: discard further output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, MemoryError) as error:
        print(f"{prog}: {error or 'there is not enough memory'}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Exception as error:
        if interrupts:
            print(f"{prog}: interrupted", file=sys.stderr)
            return 130
        print(f"{prog}: {write_bug_report(prog, error)}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _record_interrupts(interrupts: list[int]) -> Iterator[None]:
    """Record Ctrl-C in a list, too: a package that it interrupts while it is imported may raise another error."""

    def interrupt(number: int, _: object) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def write_bug_report(prog: str, error: Exception) -> str:
    """Write the traceback of a bug and the package versions to a temporary file; return a line that names the file."""
    versions = ", ".join(f"{package} {installed_version(package)}" for package in (DISTRIBUTION_NAME, "torch", "numpy"))
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


def parse_integer(argument: str, text: str, *, low: int) -> int:
    """Parse an integer >= ``low``; raise an InputError, which names ``argument``, for other texts."""
    with suppress(ValueError):
        if (value := int(text)) >= low:
            return value
    return raise_input_error(argument, f"be a whole number >= {low}", repr(text), f"Pass a number such as {low}.")


def parse_number(argument: str, text: str, *, low: float, strict: bool = False, example: float = 0.01) -> float:
    """Parse a finite number >= ``low``, > ``low`` if ``strict``; the error for other texts has an ``example``."""
    with suppress(ValueError):
        if low <= (value := float(text)) < math.inf and not (strict and value == low):
            return value
    bounds = f"be a finite number {'>' if strict else '>='} {low:g}"
    return raise_input_error(argument, bounds, repr(text), f"Pass a number such as {example:g}.")


def check_known_name(argument: str, name: str, known_names: Collection[str]) -> str:
    """Return ``name`` if it is known; else raise an InputError that lists the known names, similar ones first."""
    if name not in known_names:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), known_names, n=3)
        remedy = f"Did you mean {near[0]}?" if near else "Pick a listed one."
        raise_input_error(argument, f"be one of {', '.join(dict.fromkeys([*near, *known_names]))}", repr(name), remedy)
    return name


def check_output_path(argument: str, path: str | Path, *, folder: bool = False) -> Path:
    """Check that a path can be written, create its folder if needed, and return the path."""
    path = Path(path)
    try:
        (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
        if folder:
            tempfile.TemporaryFile(dir=path).close()
        else:
            existed = path.exists()
            path.open("ab").close()
            if not existed:
                path.unlink(missing_ok=True)
    except OSError as error:
        must = f"be a {'folder' if folder else 'file'} that can be written"
        raise_input_error(argument, must, f"{path} ({error.strerror})", "Pass another path.")
    return path


def check_output_options(options: object, names: Sequence[str]) -> dict[str, Path]:
    """Check that the output paths in the options ``names`` can be written; return these paths by option name."""
    paths: dict[str, Path] = {}
    for name in names:
        if getattr(options, name) is not None:
            path = check_output_path(f"--{name}", getattr(options, name))
            for other, used in paths.items():
                if path.resolve() == used.resolve():
                    raise_input_error(f"--{name}", f"be another file than --{other}", path, "Pass another path.")
            paths[name] = path
    return paths
