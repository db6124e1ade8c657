"""Exceptions for mistakes that a caller can correct, and functions that raise them with a uniform message.

A message is a line: ```argument` must {constraint}; got {value}. {remedy}``. Commands print the message after their
name, and replace the argument by the option that the user typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from protonet._text import to_printable

DISTRIBUTION_NAME = "protonet-solver"  #: The library's name on the package index.


class UserError(Exception):
    """Base class of errors for mistakes that a caller can correct.

    Args:
        message: A line with the constraint, the value that was given, and the remedy.
        argument: The name of the argument at fault, which is in backquotes in the message; "" if no argument is.
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
    """Raise an InputError, or an error of class ``kind``, with the uniform message of this package.

    Args:
        argument: The name of the argument at fault.
        constraint: The part of the message after "must", such as ``be > 0``.
        got: The value that was given, or a description of it.
        remedy: A sentence that says what to do; "" for no such sentence.
        kind: The class of the error.
    """
    message = " ".join(f"`{argument}` must {constraint}; got {got}. {remedy}".split())
    raise kind(to_printable(message), argument=argument)


def raise_missing_file(path: object, *, argument: str = "path") -> NoReturn:
    """Raise an InputError for the file ``path`` that does not exist; ``argument`` is the argument at fault."""
    raise InputError(f"no such file: {to_printable(path)}", argument=argument)


def rename_argument(error: UserError, argument: str) -> UserError:
    """Copy an error with another name, ``argument``, of the argument at fault, also in the message."""
    message = str(error).replace(f"`{error.argument}` must", f"`{argument}` must", 1) if error.argument else str(error)
    return type(error)(message, argument=argument)


@contextmanager
def renamed_arguments(**names: str) -> Iterator[None]:
    """Change argument names in the message of a UserError that is raised in the context.

    A function can thus report the errors of functions that it calls by the names of its own arguments.

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
    """Format the pip command that installs an extra of this library, such as "text".

    If the library runs from a checkout of its repository, the command installs the extra from there.
    """
    checkout = (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file()
    return f'pip install -e ".[{extra}]"' if checkout else f'pip install "{DISTRIBUTION_NAME}[{extra}]"'


@contextmanager
def optional_packages(extra: str = "analysis", *, install: str = "") -> Iterator[None]:
    """Convert an ImportError that is raised in the context to a MissingPackageError with the command that installs it.

    Args:
        extra: The extra of this library that installs the package.
        install: Another command that installs the package; "" for the pip command of the extra.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        message = f"`{package}` must be installed. Run {install or install_command(extra)}."
        raise MissingPackageError(message, argument=package) from None


def installed_version(package: str) -> str | None:
    """Get the version of a package; None if the package is not installed."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
