"""Options of commands, which fields of dataclasses declare: their parser, their values and their names in messages.

Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

from protonet._validation import check_int
from protonet.errors import raise_input_error, renamed_arguments
from protonet.ui.command_line import CommandParser, check_output_options, parse_integer

OptionsT = TypeVar("OptionsT")


def positional(help_text: str, **settings: Any) -> Any:
    """Declare a positional argument as a field of a dataclass; ``settings`` are keyword arguments of argparse."""
    return field(metadata={"help": help_text, "names": (), "group": "", **settings})


def option(
    help_text: str,
    default: object = None,
    *names: str,
    group: str = "",
    parse: Callable[[str, str], object] | None = None,
    suffixes: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Declare an option as a field of a dataclass, whose type determines ``nargs`` and ``metavar`` of argparse.

    Args:
        help_text: The help text.
        default: The default value; False declares a flag.
        *names: Further names of the option, such as "-o".
        group: The group of the option in ``--help-all``; options without a group are in ``--help`` as well. Options of
            a group whose name begins with "|" exclude each other.
        parse: Converts an option's name, which is for error messages, and the text that the user typed to a value.
        suffixes: Allowed suffixes, if the option names an output file; ("",) for any suffix.
        **settings: Further keyword arguments of ``ArgumentParser.add_argument``.
    """
    extra = {"help": help_text, "names": names, "group": group, "parse": parse, "suffixes": suffixes}
    return field(default=default, metadata=extra | settings)


def same_option(options_type: type, name: str, *, default: object = MISSING, **changes: Any) -> Any:
    """Declare the option ``name`` of another dataclass again, with changed arguments of `option`."""
    (declared,) = (declared for declared in fields(options_type) if declared.name == name)
    return field(default=declared.default if default is MISSING else default, metadata={**declared.metadata, **changes})


def get_option_name(field: Field[Any]) -> str:
    """Get the name on the command line, such as ``--time-limit``, of the option that a dataclass field declares."""
    return f"-{field.name}" if len(field.name) == 1 else f"--{field.name.replace('_', '-')}"


def get_argument_name(field: Field[Any]) -> str:
    """Get the name in error messages of the option or positional argument that a dataclass field declares."""
    return str(field.metadata.get("metavar", field.name)) if is_positional(field) else get_option_name(field)


def is_positional(field: Field[Any]) -> bool:
    """Test whether a dataclass field declares a positional argument."""
    return field.default is MISSING


def list_options(options_type: type) -> list[Field[Any]]:
    """List the fields of a dataclass that declare options or positional arguments; other fields are set in Python."""
    return [declared for declared in fields(options_type) if "help" in declared.metadata]


@contextmanager
def name_options_in_errors(options_type: type) -> Iterator[None]:
    """Call the fields of a dataclass by the names of their options in errors that are raised in the context."""
    with renamed_arguments(**{declared.name: get_argument_name(declared) for declared in list_options(options_type)}):
        yield


def parse_integer_up_to(high: int, name: str, text: str, *, low: int = 0) -> int:
    """Parse a whole number in [low, high] for the option ``name``, which error messages name."""
    return check_int(name, parse_integer(name, text, low=low), low=low, high=high)


def is_expert(group: str) -> bool:
    """Test whether the options of a group are in ``--help-all`` alone."""
    return bool(group) and not group.startswith("|")


def add_options(parser: CommandParser, options_type: type) -> None:
    """Add the options that the fields of a dataclass declare to a parser."""
    groups: dict[str, Any] = {"": parser}
    for declared in sorted(list_options(options_type), key=lambda declared: is_expert(declared.metadata["group"])):
        settings = {key: value for key, value in declared.metadata.items() if key not in {"parse", "suffixes"}}
        names, group, kind = settings.pop("names"), settings.pop("group"), str(declared.type)
        if group not in groups:
            expert = is_expert(group)
            groups[group] = parser.add_expert_group(group) if expert else parser.add_mutually_exclusive_group()
        if "Path" in kind and "str" not in kind:
            settings["type"] = Path
        if is_positional(declared):
            groups[group].add_argument(declared.name, **settings)
            continue
        if declared.default is False:
            settings["action"] = "store_true"
        elif "choices" not in settings:
            settings.setdefault("metavar", "FILE" if "Path" in kind else "N" if "int" in kind else "NAME")
        if kind.startswith("Sequence[str]"):
            settings.setdefault("nargs", "+")
        flags = sorted([get_option_name(declared), *names], key=lambda flag: flag.startswith("--"))
        groups[group].add_argument(*flags, dest=declared.name, default=declared.default, **settings)


def parse_options(parser: CommandParser, options_type: type, words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the words of a command line, None for those of the process; ``parser`` has the options of a dataclass.

    Returns the values of the options; and, as ``words``, the words themselves.
    """
    options = parser.parse_args(words)
    options.words = [*(sys.argv[1:] if words is None else words)]
    for declared in list_options(options_type):
        value, convert = getattr(options, declared.name), declared.metadata.get("parse")
        if convert is not None and isinstance(value, str):
            setattr(options, declared.name, convert(get_option_name(declared), value))
    return options


def make_options(options_type: type[OptionsT], parsed: object) -> OptionsT:
    """Create an options dataclass from an object with attributes of the same names, such as parsed options."""
    names = [declared.name for declared in fields(options_type) if hasattr(parsed, declared.name)]  # type: ignore[arg-type]
    return options_type(**{name: getattr(parsed, name) for name in names})


def check_output_paths(options: object, options_type: type, inputs: Collection[Path]) -> dict[str, Path]:
    """Return the paths of the output files that the options name, by field.

    An InputError is raised if a path has a wrong suffix, cannot be written, or is one of the ``inputs`` that exist.
    """
    suffixes = {declared.name: tuple(declared.metadata.get("suffixes", ())) for declared in list_options(options_type)}
    outputs = [name for name, allowed in suffixes.items() if allowed and getattr(options, name) is not None]
    for name in outputs:
        path = Path(getattr(options, name))
        if not path.name.lower().endswith(suffixes[name]):
            raise_input_error(f"--{name}", f"end in {', '.join(suffixes[name])}", path, "Rename it.")
    paths = check_output_options(options, outputs)
    for name, path in paths.items():
        if path.exists() and any(map(path.samefile, filter(path_exists, inputs))):
            raise_input_error(f"--{name}", "be another file than the inputs", path, "Pass another path.")
    return paths


def path_exists(path: Path) -> bool:
    """Test whether a path exists; a path that is too long for the file system does not."""
    try:
        return path.exists()
    except OSError:
        return False
