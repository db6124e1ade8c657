"""Methods by name: those of this package with settings, plug-ins from files, and those of installed packages."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import Tensor

from protonet.episodes.methods import METHOD_ALIASES, METHODS, MethodSpec
from protonet.episodes.methods.keywords import list_keywords, parse_keywords, parse_source, show_value
from protonet.episodes.plugins import PLUGIN, check_callable, load_plugin, wrap_plugin_error
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import InputError, InputTypeError, raise_input_error
from protonet.ui.command_line import check_name

ENTRY_POINT_GROUP = "protonet.methods"  #: The entry points by which a package offers methods.
#: ``method[:setting=value...]``; a plug-in's method is ``file.py:function``.
TEXT = re.compile(r"(?P<key>.+\.py(:[^:=]*)?|[^:]*)(?P<settings>(:[^:]*)*)")
METHOD_KIND = "a function from episodes to logits"


@dataclass(frozen=True, eq=False)
class ChosenMethod:
    """A method with settings, which is a method itself."""

    name: str  #: As tables, files and messages call it: the method's name, then its settings.
    key: str  #: The method's name without settings, as it was chosen.
    spec: MethodSpec  #: The method without settings.
    keywords: Mapping[str, Any] = field(default_factory=dict)  #: The settings that are not the method's own defaults.
    origin: str | None = None  #: A text that identifies the version of a plug-in; None for methods of this package.

    def __call__(self, episodes: Episodes) -> Tensor:
        """Return the method's logits.

        Raises:
            InputError: A plug-in, or a method of ours with settings of one's own, raised. That error is the cause.
        """
        try:
            return self.spec(episodes, **self.keywords)
        except Exception as error:
            if self.origin is None and (not self.keywords or isinstance(error, (InputError, InputTypeError))):
                raise
            constraint, remedy = "run on every batch of episodes", "Correct it; `traceback` shows where it comes from."
            raise wrap_plugin_error(error, "method", constraint, self.name, remedy=remedy) from error


def choose_methods(texts: Iterable[str]) -> dict[str, ChosenMethod]:
    """Return the methods that texts name, by their names in tables.

    Args:
        texts: Each the name of one of `protonet.episodes.methods.METHODS` or of an entry point of the group
            ``protonet.methods``, or ``file.py:function``. Settings may follow: ``tim:weights=1,1,1:steps=100``.

    Returns:
        The methods, each once, for `protonet.episodes.evaluation.evaluate`.

    Raises:
        InputError: There is no such method or setting, a value is of another kind, or a plug-in cannot be loaded.
    """
    if isinstance(texts, str):
        raise_input_error("texts", "be a list of names", repr(texts), f"Pass [{texts!r}].", kind=InputTypeError)
    chosen = [choose_method(text) for text in texts]
    return {choice.name: choice for choice in chosen}


def choose_method(text: str, argument: str = "method") -> ChosenMethod:
    """Return the method that a text names, see `choose_methods`."""
    choice, settings = _open_text(text, argument)
    return _set(choice, {name: value for name, (value,) in settings.items()}) if settings else choice


def choose_grid(text: str, argument: str = "tune") -> list[ChosenMethod]:
    """Return the methods that a text of a method and several values of its settings names: all combinations.

    Args:
        text: Such as ``laplacian-shot:lambda=0.1,0.5,1``; where a value is several numbers, ``/`` is between two. A
            method alone has the values that its settings are annotated with, see `SearchSpace`.
        argument: The argument that has the text; only ``tune`` needs two combinations or more.

    Raises:
        InputError: As in `choose_methods`, or there are not two combinations.
    """
    choice, settings = _open_text(text, argument, several=True)
    if not settings:
        known = list_keywords(choice.spec.function).values()
        settings = {keyword.name: [*map(show_value, keyword.tried)] for keyword in known if keyword.tried}
    choices = {}
    for values in itertools.product(*settings.values()):
        choice_with = _set(choice, dict(zip(settings, values, strict=True)))
        choices[choice_with.name] = choice_with
    if len(choices) < 2 and argument == "tune":
        raise_input_error("tune", "name two values of a setting or more", repr(text), "Pass METHOD:name=v1,v2,v3.")
    return list(choices.values())


def _open_text(text: str, argument: str, *, several: bool = False) -> tuple[ChosenMethod, dict[str, list[str]]]:
    """Return a text's method without settings, and the texts of the values of each setting."""
    parts = TEXT.fullmatch(text)
    key, settings_text = (parts["key"], parts["settings"]) if parts else (text, "")
    choice = _find_method(key, argument)
    known, settings = list_keywords(choice.spec.function), {}
    for part in settings_text.split(":")[1:]:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise_input_error("method", "have settings of the form name=value", repr(text), f"Pass {key}:name=value.")
        if name in settings:
            raise_input_error("method", "have each setting once", repr(text), f"Leave one {name} out.")
        keyword = known.get(name.replace("-", "_"))
        split = "/" if keyword is not None and keyword.kind.endswith("between") else ","
        settings[name] = value.split(split) if several else [value]
    return choice, settings


def _set(choice: ChosenMethod, texts: Mapping[str, str]) -> ChosenMethod:
    """Return a method with settings from texts."""
    keywords = parse_keywords(choice.key, choice.spec.function, texts)
    name = ":".join(
        [choice.name, *(f"{keyword.rstrip('_')}={show_value(value)}" for keyword, value in keywords.items())]
    )
    return replace(choice, name=name, keywords=keywords)


def _find_method(key: str, option: str) -> ChosenMethod:
    """Return the method of an option's name, without settings: ours, a file's or an installed package's."""
    if key in METHODS or key in METHOD_ALIASES:
        name = METHOD_ALIASES.get(key, key)
        return ChosenMethod(name, key, METHODS[name])
    if PLUGIN.fullmatch(key):
        return plug_in(key, *load_plugin("method", key, METHOD_KIND))
    offered = _list_entry_points()
    check_name(option, key, [*METHODS, *METHOD_ALIASES, *offered, "FILE.py:FUNCTION"])
    try:
        function = offered[key].load()
    except Exception as error:
        raise wrap_plugin_error(error, "method", "load", key) from error
    package = offered[key].dist
    version = "" if package is None else f"{package.name} {package.version}"
    check_callable("method", key, function, METHOD_KIND)
    return plug_in(key, function, version)


def plug_in(key: str, function: Callable[..., Tensor], origin: str) -> ChosenMethod:
    """Return a function from outside the package as a method, which may use everything that episodes have."""
    return ChosenMethod(key, key, MethodSpec(function, transductive=True, uses_base=True), origin=origin)


def _list_entry_points() -> dict[str, EntryPoint]:
    """Return the methods that installed packages offer; one of ours cannot be taken by another."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in METHODS}


def list_methods() -> str:
    """Return all methods with their settings, each with its type, default and source, as text for people."""
    lines = ["Settings follow a method's name, as in tim:weights=1,1,1:steps=100 or FILE.py:FUNCTION:name=value."]
    for name, spec in METHODS.items():
        summary = (spec.function.__doc__ or "").partition("\n")[0]
        lines += ["", f"{name} ({'transductive' if spec.transductive else 'inductive'}): {summary}"]
        lines += _wrap_text(f"Source: {parse_source(spec.function)}", 2)
        for keyword in list_keywords(spec.function).values():
            bound = "" if keyword.bound is None else f" {keyword.bound}"
            tried = f"; --tune tries {' and '.join(map(show_value, keyword.tried))}" if keyword.tried else ""
            lines.append(f"  {keyword.name}: {keyword.kind}{bound}, {show_value(keyword.default)} by default{tried}")
            lines += _wrap_text(keyword.text, 6)
    lines += ["", *(f"{alias}: another name of {name}" for alias, name in METHOD_ALIASES.items())]
    lines += [f"{name}: of the installed {point.value}" for name, point in _list_entry_points().items()]
    return "\n".join(lines) + "\n"


def _wrap_text(text: str, indent: int) -> list[str]:
    """Return a text as lines of at most 100 characters, indented."""
    pad = " " * indent
    return textwrap.wrap(text, 100, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)
