"""The settings of a method: its keyword-only parameters, read from its signature and described by its docstring.

There is no other list of them. What a text such as ``weights=1,1,1`` may say follows from the parameter's type: a
whole number, a number, true or false, some numbers with commas between them, a word; ``none`` where the type has it.
The bound of a number stands in its type, as in `Positive`, and so does what is tried of it (`Tried`). A trailing
underscore of a parameter, as in ``lambda_``, is left out.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from protonet.errors import raise_input_error

T = TypeVar("T")


class Bound(NamedTuple):
    """Between what a number has to be."""

    least: float
    most: float = math.inf
    above: bool = False  #: Whether ``least`` itself is outside.
    below: bool = False  #: Whether ``most`` itself is outside.

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"{'>' if self.above else '>='} {self.least:g}"
        return f"in {'[('[self.above]}{self.least:g}, {self.most:g}{'])'[self.below]}"

    def holds(self, value: float) -> bool:
        """Tell whether a number is within."""
        over = value > self.least if self.above else value >= self.least
        return over and (value < self.most if self.below else value <= self.most)


class Tried(NamedTuple):
    """What is tried of a setting on validation classes, beside its bound in the setting's type."""

    values: tuple[Any, ...]  #: Of the setting's type.


#: Types of settings: a number and its bound.
Positive = Annotated[float, Bound(0, above=True)]
NonNegative = Annotated[float, Bound(0)]
Share = Annotated[float, Bound(0, 1)]
PositiveShare = Annotated[float, Bound(0, 1, above=True)]
BelowOne = Annotated[float, Bound(0, 1, below=True)]
Count = Annotated[int, Bound(0)]
PositiveCount = Annotated[int, Bound(1)]

#: What a value of a type is called, and how it is read.
KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    int: ("a whole number", int),
    float: ("a number", float),
    str: ("a word", str),
}


class Keyword(NamedTuple):
    """A setting of a method."""

    name: str  #: As it is written in a text.
    parameter: str  #: Of the method.
    type: Any  #: A key of ``KINDS``, a tuple of them, or one of these or None.
    bound: Bound | None  #: Of its numbers.
    default: Any  #: `inspect.Parameter.empty` without one.
    text: str  #: What the docstring says of it, in one line; "" for nothing.
    tried: tuple[Any, ...] = ()  #: The values of `Tried` in its type.

    @property
    def kind(self) -> str:
        """What its values are, in words."""
        types = [each for each in get_args(self.type) if each is not type(None)]
        if get_origin(self.type) is tuple:
            return f"{len(types)} numbers with commas between"
        return f"{KINDS[types[0]][0]} or none" if types else KINDS[self.type][0]


def list_keywords(method: Callable[..., object]) -> dict[str, Keyword]:
    """Return the settings of a method by name: those keyword-only parameters whose values a text can hold.

    A parameter without a type, or with one that cannot be found, has that of its default.
    """
    try:
        hints = get_type_hints(method, include_extras=True)
    except (NameError, TypeError):  # a type that is imported for type checkers alone; no function
        hints = {}
    try:
        parameters = inspect.signature(method).parameters
    except ValueError:  # of a function of C, which tells nothing
        return {}
    described = describe_arguments(method)
    found = {}
    for name, parameter in parameters.items():
        hint = hints.get(name, type(parameter.default))
        kind, bound = _split(hint)
        if parameter.kind is parameter.KEYWORD_ONLY and _is_known(kind):
            text, tried = described.get(name, ""), _find(hint, Tried)
            own = Keyword(name.rstrip("_"), name, kind, bound, parameter.default, text, tried.values if tried else ())
            found[own.name] = own
    return found


def _split(kind: Any) -> tuple[Any, Bound | None]:
    """Return a type without bounds, and the bound that stands in it."""
    if get_origin(kind) is Annotated:
        inner, bound = _split(kind.__origin__)
        return inner, bound or _find(kind, Bound)
    parts = [_split(each) for each in get_args(kind)]
    bounds = [bound for _, bound in parts if bound is not None]
    if not bounds:
        return kind, None
    plain = tuple(own for own, _ in parts)
    return (GenericAlias(tuple, plain) if get_origin(kind) is tuple else reduce(or_, plain)), bounds[0]


def _find(kind: Any, note: type[T]) -> T | None:
    """Return what a type is annotated with, of one kind of note; None without one."""
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, note)), None)


def _is_known(kind: Any) -> bool:
    """Tell whether a text can hold values of a type."""
    types = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) is tuple:
        return bool(types) and all(each in (int, float) for each in types)
    return types[0] in KINDS and len(types) == 1 if types else kind in KINDS


def describe_arguments(method: Callable[..., object]) -> dict[str, str]:
    """Return what a docstring in Google style says of each argument, in one line."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(method) or "", re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^(\w+): (.*?)(?=^\w|\Z)", textwrap.dedent(section[1]), re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def find_source(method: Callable[..., object]) -> str:
    """Return what a docstring says after ``Source:``, in one line; "" for nothing."""
    section = re.search(r"^Source: (.*?)(?=\n\n|\Z)", inspect.getdoc(method) or "", re.DOTALL | re.MULTILINE)
    return "" if section is None else " ".join(section[1].split())


def parse_keywords(name: str, method: Callable[..., object], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the keyword arguments of a method that texts by setting stand for, in the order of its signature.

    Args:
        name: The method's, for messages.
        method: Takes a batch of episodes, and keyword-only settings.
        texts: What each setting shall be; ``-`` in their names stands for ``_``.

    Returns:
        Values by parameter.

    Raises:
        InputError: The method has no such setting, or its values are of another kind, or out of bounds.
    """
    known = list_keywords(method)
    texts = {each.replace("-", "_"): text for each, text in texts.items()}
    for each in texts:
        if each not in known:
            remedy = f"There are {', '.join(known)}; --methods lists them." if known else "Leave them out."
            got = f"{each!r}" if known else f"{each!r}, which has none"
            raise_input_error("method", f"have settings of {name} that exist", got, remedy)
    chosen = {own: texts[each] for each, own in known.items() if each in texts}
    values = {own: _parse(name, own, text) for own, text in chosen.items()}
    for own, value in values.items():
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if own.bound is not None and not all(map(own.bound.holds, numbers)):
            constraint = f"have settings within their bounds, {own.bound} here"
            raise_input_error("method", constraint, f"{chosen[own]!r} for {own.name} of {name}", "Pass another value.")
    return {own.parameter: value for own, value in values.items()}


def _parse(name: str, keyword: Keyword, text: str) -> Any:
    """Return the value of a setting that a text stands for."""
    try:
        return _read(keyword.type, text)
    except (KeyError, ValueError, OverflowError):
        default = "" if keyword.default is inspect.Parameter.empty else f" such as {show_value(keyword.default)}"
        got = f"{text!r} for {keyword.name} of {name}"
        raise_input_error(
            "method", f"have settings of their kind, {keyword.kind}", got, f"Pass {keyword.kind}{default}."
        )


def _read(kind: Any, text: str) -> Any:
    """Read a value of a type; raise a KeyError or a ValueError where the text is none."""
    types = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(_read(each, part) for each, part in zip(types, text.split(","), strict=True))
    if types:
        return None if text.lower() == "none" else _read(next(each for each in types if each is not type(None)), text)
    value = KINDS[kind][1](text)
    if kind is float and not math.isfinite(value):
        raise ValueError("not finite")
    return value


def show_value(value: Any) -> str:
    """Return a value as a text that reads as the same value: ``1,0.1``, ``none``, ``true``."""
    if isinstance(value, tuple):
        return ",".join(map(show_value, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
