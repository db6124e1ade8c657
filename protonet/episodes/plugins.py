"""Load functions from Python files of users (plug-ins), which are named ``FILE.py:FUNCTION``."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protonet._text import to_printable
from protonet.errors import InputError, raise_input_error

PLUGIN_PATTERN = re.compile(r"(?P<path>.+\.py)(:(?P<function>.*))?")


def load_plugin(argument: str, key: str, description: str) -> tuple[Callable[..., Any], str]:
    """Load a function from a user's Python file, by running the file unless it was run before.

    ``key`` is the plug-in, ``FILE.py:FUNCTION``, which matches ``PLUGIN_PATTERN``. Returns the function; and the text
    "sha256 " with the SHA-256 of the file. An InputError is raised if there is no such file or function, if the file
    raises an error, or if the object is no function. ``argument`` names the plug-in in messages, and ``description``
    the expected function, as in "a function from pictures to embeddings".
    """
    match = PLUGIN_PATTERN.fullmatch(key)
    assert match is not None
    path, function = Path(match["path"]), match["function"] or ""
    if not path.is_file():
        raise_input_error(argument, "be in a file that exists", str(path), "Pass FILE.py:FUNCTION.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"_protonet_plugin_{hashlib.sha256(f'{path.resolve()} {digest}'.encode()).hexdigest()[:16]}"
    if name not in sys.modules:  # a file runs once, as an import does, though several evaluations name it
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses and pickles look it up
        try:
            spec.loader.exec_module(sys.modules[name])
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise wrap_plugin_error(error, argument, "be in a file that runs", key) from error
    module = sys.modules[name]
    if not hasattr(module, function):
        # Functions that the file defines, not functions that it imports.
        defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        remedy = f"It has {', '.join(defined)}." if defined else "It has none."
        raise_input_error(argument, "be a function of its file", repr(key), remedy)
    loaded = getattr(module, function)
    check_callable(argument, key, loaded, description)
    return loaded, f"sha256 {digest}"


def check_callable(argument: str, key: str, loaded: object, description: str) -> None:
    """Raise an InputError unless the object ``loaded`` is a function; other arguments are as in `load_plugin`."""
    if not callable(loaded) or isinstance(loaded, type):
        got = f"{'a class' if isinstance(loaded, type) else type(loaded).__name__} of {key}"
        raise_input_error(argument, f"be {description}", got, "Pass the name of a function.")


def wrap_plugin_error(
    error: BaseException, argument: str, constraint: str, name: str, *, remedy: str = "Correct that line."
) -> Exception:
    """Convert an error of the plug-in ``name`` to an InputError about ``argument``, which names the file and line."""
    got = f"{type(error).__name__} of {name}: {error}"
    if not isinstance(error, SyntaxError):  # whose message has file and line
        last = traceback.extract_tb(error.__traceback__)[-1]
        got += f" ({Path(last.filename).name}, line {last.lineno})"
    message = " ".join(f"`{argument}` must {constraint}; got {got}. {remedy}".split())
    return InputError(to_printable(message), argument=argument)
