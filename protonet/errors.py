"""Exceptions for mistakes that a caller can correct, and helpers that format their messages.

A message is a line: ```argument` must {constraint}; got {value}. {remedy}``. Commands print it after their name, with
the option that the user typed in place of the argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from protonet._text import to_printable

DISTRIBUTION = "protonet-solver"  #: The library's name on the package index.


class UserError(Exception):
    """A mistake that a caller can correct.

    Args:
        message: A line with the constraint, the value that was given, and the remedy.
        argument: The name of the argument at fault, as the message has it in backquotes; "" for none.
    """

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class InputError(UserError, ValueError):
    """An argument has an invalid value, or a file cannot be used."""


class InputTypeError(UserError, TypeError):
    """An argument has the wrong type."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed; the message says how to install it."""


def raise_input_error(
    argument: str, constraint: str, got: object, remedy: str = "", *, kind: type[UserError] = InputError
) -> NoReturn:
    """Raise an error whose message names the argument, the constraint, the given value and the remedy.

    Args:
        argument: The name of the argument at fault.
        constraint: The constraint after "must", such as ``be > 0``.
        got: The value that was given, or a description of it.
        remedy: A sentence with the remedy.
        kind: The class of the error.
    """
    message = " ".join(f"`{argument}` must {constraint}; got {got}. {remedy}".split())
    raise kind(to_printable(message), argument=argument)


def raise_missing_file(path: object, *, argument: str = "path") -> NoReturn:
    """Raise an InputError for a file that does not exist."""
    raise InputError(f"no such file: {to_printable(path)}", argument=argument)


def rename_argument(error: UserError, argument: str) -> UserError:
    """Copy an error, and replace the name of the argument at fault in its message by ``argument``."""
    message = str(error).replace(f"`{error.argument}` must", f"`{argument}` must", 1) if error.argument else str(error)
    return type(error)(message, argument=argument)


@contextmanager
def renamed_arguments(**names: str) -> Iterator[None]:
    """Rename arguments, which are in backquotes, in the message of an error that is raised in the context.

    Args:
        **names: The new name of each argument, by its old name.
    """
    try:
        yield
    except UserError as error:
        message = re.sub(r"`([^`]+)`", lambda name: f"`{names.get(name[1], name[1])}`", str(error))
        argument = names.get(error.argument, error.argument)
        if (message, argument) == (str(error), error.argument):
            raise
        raise type(error)(message, argument=argument) from error.__cause__


def install_command(extra: str) -> str:
    """Format the pip command that installs an extra of this library, from the checkout if there is one."""
    checkout = (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file()
    return f'pip install -e ".[{extra}]"' if checkout else f'pip install "{DISTRIBUTION}[{extra}]"'


@contextmanager
def optional_packages(extra: str = "analysis", *, install: str = "") -> Iterator[None]:
    """Convert an ImportError that is raised in the context to a MissingPackageError with the command to install it.

    Args:
        extra: The extra of this library that brings the package.
        install: Another command that installs it; "" for the extra.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        message = f"`{package}` must be installed. Run {install or install_command(extra)}."
        raise MissingPackageError(message, argument=package) from None


def installed_version(package: str) -> str | None:
    """Get the version of an installed package; None if it is not installed."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
