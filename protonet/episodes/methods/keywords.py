"""The settings of a method: its keyword-only parameters, read from its signature and described by its docstring.

Settings are not listed elsewhere. The type of the parameter determines how a text such as ``weights=1,1,1`` is parsed:
as an integer, a number, true or false, comma-separated numbers, or a word; or as ``none``, if the type includes it. The
type also has the bound of a number, as in `Positive`, and the values to try (`SearchSpace`). A trailing underscore of a
parameter, as in ``lambda_``, is not part of the setting's name.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, NamedTuple, get_args, get_origin, get_type_hints

from protonet.errors import raise_input_error


class Bound(NamedTuple):
    """The range of valid numbers, an interval that may be open at either end."""

    low: float  #: The lower end.
    high: float = math.inf  #: The upper end.
    low_open: bool = False  #: Whether ``low`` itself is excluded.
    high_open: bool = False  #: Whether ``high`` itself is excluded.

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'>' if self.low_open else '>='} {self.low:g}"
        return f"in {'[('[self.low_open]}{self.low:g}, {self.high:g}{'])'[self.high_open]}"

    def contains(self, value: float) -> bool:
        """Test whether a number is in the range."""
        above = value > self.low if self.low_open else value >= self.low
        return above and (value < self.high if self.high_open else value <= self.high)


class SearchSpace(NamedTuple):
    """The values of a setting that ``--tune`` tries on validation classes. It annotates the type of the setting."""

    values: tuple[object, ...]  #: The values to try, of the setting's type.


#: Types of settings: numbers, annotated with their bounds.
Positive = Annotated[float, Bound(0, low_open=True)]
NonNegative = Annotated[float, Bound(0)]
Fraction = Annotated[float, Bound(0, 1)]
PositiveFraction = Annotated[float, Bound(0, 1, low_open=True)]
BelowOne = Annotated[float, Bound(0, 1, high_open=True)]
Count = Annotated[int, Bound(0)]
PositiveCount = Annotated[int, Bound(1)]


@dataclass(frozen=True, kw_only=True)
class MethodSetting:
    """A setting of a few-shot method, that is, a keyword-only parameter of its function."""

    name: str  #: The name of the setting on the command line.
    parameter_name: str  #: The name of the method's parameter.
    value_description: str  #: A description of the values, such as "a whole number or none".
    parse: Callable[[str], object]  #: Parses a text; raises a KeyError or a ValueError for an invalid text.
    bound: Bound | None  #: The range of the number, or of each number of a tuple; None for any.
    default: object  #: The default value, or `inspect.Parameter.empty`.
    description: str  #: The description in the docstring, in one line, or "".
    candidate_values: tuple[object, ...] = ()
    """The values to try, from the `SearchSpace` in the type; empty without it."""


def _parse_number(text: str) -> float:
    """Parse a finite number."""
    if not math.isfinite(value := float(text)):
        raise ValueError("not finite")
    return value


#: For each type of setting, a description of its values and the function that parses a text.
VALUE_PARSERS: dict[object, tuple[str, Callable[[str], object]]] = {
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    int: ("a whole number", int),
    float: ("a number", _parse_number),
    str: ("a word", str),
}


def _make_value_parser(kind: object) -> tuple[str, Callable[[str], object]] | None:
    """Return a description of the values of a type, and the function that parses a text; None if there is none."""
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        parsers = [VALUE_PARSERS[part][1] for part in parts if part in (int, float)]
        if len(parsers) < len(parts):
            return None
        numbers = f"{len(parts)} numbers with commas between"
        return numbers, lambda text: tuple(parse(item) for parse, item in zip(parsers, text.split(","), strict=True))
    optional = len(parts) == 2 and NoneType in parts
    parser = VALUE_PARSERS.get(parts[parts[0] is NoneType] if optional else kind)
    if parser is None or not optional:
        return parser
    words, parse = parser
    return f"{words} or none", lambda text: None if text.lower() == "none" else parse(text)


def list_method_settings(method: Callable[..., object]) -> dict[str, MethodSetting]:
    """List the settings of a method by name: the keyword-only parameters whose values can be parsed from text.

    A parameter without a type hint has the type of its default.
    """
    try:
        hints, annotated = get_type_hints(method), get_type_hints(method, include_extras=True)
    except (NameError, TypeError):  # a type that is imported for type checkers alone, or a function without a signature
        hints = annotated = {}
    try:
        parameters = inspect.signature(method).parameters
    except ValueError:  # a function of C without a signature
        return {}
    described = describe_arguments(method)
    keywords = {}
    for parameter, given in parameters.items():
        kind = hints.get(parameter, type(given.default))
        parser = _make_value_parser(kind)
        if given.kind is given.KEYWORD_ONLY and parser is not None:
            name, notes = parameter.rstrip("_"), list(_list_type_annotations(annotated.get(parameter)))
            keywords[name] = MethodSetting(
                name=name,
                parameter_name=parameter,
                value_description=parser[0],
                parse=parser[1],
                bound=next((note for note in notes if isinstance(note, Bound)), None),
                default=given.default,
                description=described.get(parameter, ""),
                candidate_values=next((note.values for note in notes if isinstance(note, SearchSpace)), ()),
            )
    return keywords


def _list_type_annotations(kind: object) -> Iterator[object]:
    """Yield the annotations that a type contains, such as `Bound`, also in nested types."""
    yield from getattr(kind, "__metadata__", ())
    for part in get_args(kind):
        yield from _list_type_annotations(part)


def describe_arguments(method: Callable[..., object]) -> dict[str, str]:
    """Parse the descriptions of a method's arguments, by name, from its docstring in Google style."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(method) or "", re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^(\w+): (.*?)(?=^\w|\Z)", textwrap.dedent(section[1]), re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def parse_source_section(method: Callable[..., object]) -> str:
    """Parse the section ``Source:`` of a method's docstring; "" if there is none."""
    section = re.search(r"^Source: (.*?)(?=\n\n|\Z)", inspect.getdoc(method) or "", re.DOTALL | re.MULTILINE)
    return "" if section is None else " ".join(section[1].split())


def parse_method_settings(name: str, method: Callable[..., object], texts: Mapping[str, str]) -> dict[str, object]:
    """Parse the keyword arguments of a method from ``texts``, the text of each setting by name.

    Settings may be named with ``-`` in place of ``_``; ``name`` is the method's, for messages. Returns the values by
    the name of the parameter, in the order of the signature. An InputError is raised if the method has no such setting,
    or if a value has the wrong type or is out of bounds.
    """
    known = list_method_settings(method)
    texts = {setting.replace("-", "_"): text for setting, text in texts.items()}
    for setting in texts:
        if setting not in known:
            must = f"have settings of {name} that exist" if known else f"have no settings for {name}"
            remedy = f"There are {', '.join(known)}." if known else "Leave them out."
            raise_input_error("method", must, repr(setting), remedy)
    chosen = [(keyword, texts[setting]) for setting, keyword in known.items() if setting in texts]
    return {keyword.parameter_name: _parse_setting(name, keyword, text) for keyword, text in chosen}


def _parse_setting(name: str, keyword: MethodSetting, text: str) -> object:
    """Parse a setting's value for the method ``name``, and check its bounds; raise an InputError if it is invalid."""
    got = f"{text!r} for {keyword.name} of {name}"
    try:
        value = keyword.parse(text)
    except (KeyError, ValueError, OverflowError):
        default = "" if keyword.default is inspect.Parameter.empty else f" such as {format_setting(keyword.default)}"
        remedy = f"Pass {keyword.value_description}{default}."
        raise_input_error("method", f"have settings of their kind, {keyword.value_description}", got, remedy)
    items = value if isinstance(value, tuple) else (value,)
    if keyword.bound is not None and value is not None and not all(map(keyword.bound.contains, items)):
        constraint = f"have settings within their bounds, {keyword.bound} here"
        raise_input_error("method", constraint, got, "Pass another value.")
    return value


def format_setting(value: object) -> str:
    """Format a setting's value in the syntax of the command line, such as ``1,0.1``, ``none`` or ``true``."""
    if isinstance(value, tuple):
        return ",".join(map(format_setting, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
