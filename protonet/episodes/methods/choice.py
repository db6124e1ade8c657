"""Choose methods by name, from this package, files or installed packages, and check that their inputs are available."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from itertools import product
from typing import NoReturn

from torch import Tensor

from protonet.episodes.methods import METHODS, MethodSpec
from protonet.episodes.methods.keywords import (
    format_setting,
    list_method_settings,
    parse_method_settings,
    parse_source_section,
)
from protonet.episodes.plugins import PLUGIN_PATTERN, check_callable, load_plugin, wrap_plugin_error
from protonet.episodes.samplers.batch import Episodes
from protonet.episodes.samplers.sampler import format_span
from protonet.errors import InputError, InputTypeError, raise_input_error
from protonet.ui.command_line import check_known_name

ENTRY_POINT_GROUP = "protonet.methods"  #: The entry points by which a package offers methods.
#: The syntax of a method as text: ``method[:setting=value...]``. The method of a plug-in is ``file.py:function``.
METHOD_TEXT_PATTERN = re.compile(r"(?P<key>.+\.py(:[^:=]*)?|[^:]*)(?P<settings>(:[^:]*)*)")
#: How methods take the queries of an episode: each alone, all together, or together as equally many of each class.
METHOD_SETTINGS = ("inductive", "transductive", "transductive, balanced")
METHOD_DESCRIPTION = "a function from episodes to logits"  #: The description of a method in messages.


@dataclass(frozen=True, eq=False)
class ChosenMethod:
    """A few-shot method with values for its settings. It can be called with a batch of episodes alone."""

    name: str  #: The name in tables, files and messages: the method's name, then its settings.
    method_key: str  #: The method's name without settings, as the user chose it.
    spec: MethodSpec  #: The method without settings.
    keywords: Mapping[str, object] = field(default_factory=dict)  #: Settings that differ from the defaults.
    plugin_version: str | None = None
    """The version of a plug-in, such as a hash of its file; None for methods of the package."""

    @property
    def setting(self) -> str | None:
        """How the method takes queries, one of ``METHOD_SETTINGS``; None for a plug-in, of which it is not known."""
        if self.plugin_version is not None:
            return None
        return METHOD_SETTINGS[self.spec.transductive + self.spec.assumes_balance]

    def __call__(self, episodes: Episodes) -> Tensor:
        """Compute logits (episodes, n_queries, n_way); errors of plug-ins and of given settings become InputErrors."""
        try:
            return self.spec(episodes, **self.keywords)
        except Exception as error:
            if self.plugin_version is None and (not self.keywords or isinstance(error, (InputError, InputTypeError))):
                raise
            constraint, remedy = "run on every batch of episodes", "Correct it; `traceback` shows where it comes from."
            raise wrap_plugin_error(error, "method", constraint, self.name, remedy=remedy) from error


def choose_methods(texts: Iterable[str]) -> dict[str, ChosenMethod]:
    """Choose methods by texts such as ``tim:weights=1,1,1:steps=100``.

    Args:
        texts: Names of `protonet.episodes.methods.METHODS`, of entry points of the group ``protonet.methods``, or
            ``file.py:function``. Settings may follow.

    Returns:
        The methods by their names in tables, for `protonet.episodes.evaluate`.

    Raises:
        InputError: There is no such method or setting, a value has the wrong type, or a plug-in cannot be loaded.
    """
    if isinstance(texts, str):
        raise_input_error("texts", "be a list of names", repr(texts), f"Pass [{texts!r}].", kind=InputTypeError)
    chosen = [choose_method(text) for text in texts]
    return {choice.name: choice for choice in chosen}


def choose_method(text: str, argument: str = "method") -> ChosenMethod:
    """Choose one method by a text, see `choose_methods`; error messages name the ``argument``."""
    choice, settings = _parse_method(text, argument)
    return _add_settings(choice, settings)


def choose_method_grid(text: str, argument: str = "tune") -> list[ChosenMethod]:
    """Parse a method with several values per setting, and list it once for each combination of values.

    In ``laplacian-shot:lambda=0.1,0.5,1`` the setting lambda has three values, separated by ``,``. If a value consists
    of several numbers, the separator is ``/``. Without settings, the values of the method's `SearchSpace` annotations
    are used. If the ``argument`` is ``tune``, fewer than two combinations raise an InputError.
    """
    choice, texts = _parse_method(text, argument)
    known = list_method_settings(choice.spec.function)
    settings = {
        name: [*map(format_setting, keyword.candidate_values)]
        for name, keyword in known.items()
        if keyword.candidate_values
    }
    if texts:
        many = {name for name, keyword in known.items() if keyword.value_description.endswith("between")}
        settings = {name: value.split("/" if name.replace("-", "_") in many else ",") for name, value in texts.items()}
    grid = product(*settings.values())
    choices = [_add_settings(choice, dict(zip(settings, values, strict=True))) for values in grid]
    choices = [*{choice.name: choice for choice in choices}.values()]
    if len(choices) < 2 and argument == "tune":
        raise_input_error("tune", "name two values of a setting or more", repr(text), "Pass METHOD:name=v1,v2,v3.")
    return choices


def _parse_method(text: str, argument: str) -> tuple[ChosenMethod, dict[str, str]]:
    """Split the text of a method into the method without settings, and the texts of its settings by name."""
    parts = METHOD_TEXT_PATTERN.fullmatch(text)
    assert parts is not None, "it matches any text"
    key, settings = parts["key"], {}
    choice = _look_up_method(key, argument)
    for part in parts["settings"].split(":")[1:]:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise_input_error("method", "have settings of the form name=value", repr(text), f"Pass {key}:name=value.")
        if name in settings:
            raise_input_error("method", "have each setting once", repr(text), f"Leave one {name} out.")
        settings[name] = value
    return choice, settings


def _add_settings(choice: ChosenMethod, texts: Mapping[str, str]) -> ChosenMethod:
    """Parse the values of settings from ``texts`` by name, and add the settings to a method and to its name."""
    keywords = parse_method_settings(choice.method_key, choice.spec.function, texts)
    shown = [f"{keyword.rstrip('_')}={format_setting(value)}" for keyword, value in keywords.items()]
    return replace(choice, name=":".join([choice.name, *shown]), keywords=keywords)


def _look_up_method(key: str, option: str) -> ChosenMethod:
    """Look up a method of this package, a user's file or an installed package; ``option`` is named in errors."""
    if key in METHODS:
        return ChosenMethod(key, key, METHODS[key])
    if PLUGIN_PATTERN.fullmatch(key):
        return make_plugin_method(key, *load_plugin("method", key, METHOD_DESCRIPTION))
    offered = _list_entry_points()
    check_known_name(option, key, [*METHODS, *offered, "FILE.py:FUNCTION"])
    try:
        function = offered[key].load()
    except Exception as error:
        raise wrap_plugin_error(error, "method", "load", key) from error
    package = offered[key].dist
    version = "" if package is None else f"{package.name} {package.version}"
    check_callable("method", key, function, METHOD_DESCRIPTION)
    return make_plugin_method(key, function, version)


def make_plugin_method(key: str, function: Callable[..., Tensor], origin: str) -> ChosenMethod:
    """Wrap a function from outside the package as a method that may use all inputs of the episodes.

    ``key`` is the name of the method, and ``origin`` its version, such as the hash of a file.
    """
    return ChosenMethod(key, key, MethodSpec(function, transductive=True, uses_base=True), plugin_version=origin)


def _list_entry_points() -> dict[str, EntryPoint]:
    """List the methods of other installed packages by name, except for names that this package uses itself."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in METHODS}


def format_methods() -> str:
    """Format all methods with their sources and settings, for ``--list-methods``."""
    lines = ["Settings follow a method's name, as in tim:weights=1,1,1:steps=100 or FILE.py:FUNCTION:name=value."]
    for name, spec in METHODS.items():
        summary = (spec.function.__doc__ or "").partition("\n")[0]
        lines += ["", f"{name} ({METHOD_SETTINGS[spec.transductive + spec.assumes_balance]}): {summary}"]
        lines += _wrap_text(f"Source: {parse_source_section(spec.function)}", 2)
        for keyword in list_method_settings(spec.function).values():
            bound = "" if keyword.bound is None else f" {keyword.bound}"
            tried = (
                f"; --tune tries {' and '.join(map(format_setting, keyword.candidate_values))}"
                if keyword.candidate_values
                else ""
            )
            lines.append(
                f"  {keyword.name}: {keyword.value_description}{bound}, "
                f"{format_setting(keyword.default)} by default{tried}"
            )
            lines += _wrap_text(keyword.description, 6)
    lines += ["", *(f"{name}: of the installed {point.value}" for name, point in _list_entry_points().items())]
    return "\n".join(lines) + "\n"


def _wrap_text(text: str, indent: int) -> list[str]:
    """Wrap a text into indented lines of at most 100 characters."""
    pad = " " * indent
    return textwrap.wrap(text, 100, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)


@dataclass(frozen=True, kw_only=True)
class AvailableInputs:
    """The inputs that an evaluation offers to methods, in addition to support and queries."""

    n_base_classes: int  #: Number of base classes.
    objective: str | None  #: The objective that the encoder was trained with; None without an encoder.
    head_n_way: int | None  #: The number of classes that the encoder's head needs; None for any number.
    way: tuple[int, int] | None  #: Minimum and maximum number of classes per episode, see `Sampler.way`.
    has_texts: bool  #: Whether there are embeddings of texts that name the classes.
    has_unlabelled: bool  #: Whether episodes have unlabelled rows.
    has_feature_maps: bool  #: Whether rows are feature maps of a network, with spatial positions.
    has_base_class_means: bool  #: Whether episodes have base classes, which are given only by their means.

    def list_missing_inputs(self, spec: MethodSpec) -> list[str]:
        """List why a method cannot run: missing inputs (keys of ``MISSING_INPUT_REMEDIES``), "way" or "means".

        "way": the encoder's head is for another number of classes. "means": only means of base classes are available,
        but the method needs base rows.
        """
        has_encoder = self.objective is not None and spec.objective in (None, self.objective)
        available = {"texts": self.has_texts, "encoder": has_encoder, "unlabelled": self.has_unlabelled}
        available |= {"maps": self.has_feature_maps, "base": self.n_base_classes > 0}
        missing = [need for need in MISSING_INPUT_REMEDIES if need in spec.needs and not available[need]]
        uses_head = self.head_n_way is not None and spec.objective == self.objective is not None
        wrong_way = uses_head and self.way is not None and self.way != (self.head_n_way, self.head_n_way)
        return missing + ["way"] * wrong_way + ["means"] * (self.has_base_class_means and not spec.needs_only_means)


#: The constraint and the remedy in the error message about each missing input.
MISSING_INPUT_REMEDIES = {
    "texts": ("find texts that name the classes", "Pass `texts`, an NPZ file whose y are the names of the classes."),
    "encoder": ("find an encoder", "Pass the `encoder` of such a run."),
    "unlabelled": ("find unlabelled rows", "Pass `unlabelled` 5, with `distractors` 5 for rows of other classes."),
    "maps": ("find maps of a network", "Make them by `protonet.episodes extract --maps`."),
    "base": (
        "find base classes beside the evaluated ones",
        "Pass `side` novel, of data with a split by class (`split_seed` 0 makes one), or `base`.",
    ),
}
#: For each reason, the note for the report on the methods that the choice ``all`` leaves out.
EXCLUSION_NOTES = {
    "encoder": "Without an encoder of their objectives, {} are left out.",
    "texts": "Without texts, {} are left out.",
    "unlabelled": "Without unlabelled rows, {} are left out.",
    "maps": "Without maps of a network, {} are left out.",
    "slow": "{} take long, and are left out of 'all': name them, too.",
    "way": "The head of the encoder is for another number of classes: {} are left out.",
    "means": "Methods that need rows of all classes are left out: base classes have means.",
}


def select_methods(
    chosen: Sequence[ChosenMethod], available: AvailableInputs, *, include_all: bool
) -> tuple[dict[str, ChosenMethod], list[str]]:
    """Select the methods to evaluate: the ``chosen`` ones, with ``include_all`` after all of this package that can run.

    Returns the methods by name, and lines for the report. An InputError is raised if a chosen method lacks an input.
    """
    notes, runnable = _select_runnable_methods(available) if include_all else ([], [])
    choices = [*runnable, *chosen]
    for choice in choices:
        for need in available.list_missing_inputs(choice.spec)[:1] if choice.plugin_version is None else ():
            _raise_missing_input(choice, need, available)
    methods = {choice.name: choice for choice in choices}
    ours = {name: choice.spec for name, choice in methods.items() if choice.plugin_version is None}
    ignoring = [name for name, spec in ours.items() if "unlabelled" not in spec.needs]
    if available.has_unlabelled and ignoring:
        notes.append(f"Unlabelled rows are ignored by {', '.join(ignoring)}.")
    centred = [name for name, spec in ours.items() if spec.centred]
    if centred and not available.n_base_classes:
        notes.append(f"Without base classes, rows are centred on each episode's own support in {', '.join(centred)}.")
    return methods, notes


def _select_runnable_methods(available: AvailableInputs) -> tuple[list[str], list[ChosenMethod]]:
    """Select all methods of this package that can run; return notes on excluded methods, and the selected methods."""
    reasons: dict[str, list[str]] = {reason: [] for reason in EXCLUSION_NOTES}
    chosen = []
    for name, spec in METHODS.items():
        missing = ["slow"] * spec.is_slow + available.list_missing_inputs(spec)
        if missing:
            reasons.get(missing[0], []).append(name)
        else:
            chosen.append(ChosenMethod(name, name, spec))
    notes = [EXCLUSION_NOTES[reason].format(", ".join(names)) for reason, names in reasons.items() if names]
    return notes, chosen


def _raise_missing_input(choice: ChosenMethod, need: str, available: AvailableInputs) -> NoReturn:
    """Raise an InputError for a method that cannot run, given a reason from `AvailableInputs.list_missing_inputs`."""
    if need == "means":
        known = sorted(name for name, spec in METHODS.items() if spec.needs_only_means)
        constraint = "know a class by its mean, which is all that there is of base classes"
        raise_input_error("method", constraint, choice.name, f"Pass some of {', '.join(known)}.")
    if need == "way" and available.way is not None:
        way = available.head_n_way
        constraint = f"be {way} for {choice.method_key}, whose last layer has weights of as many classes"
        remedy = f"Pass {way}, or train with `head` zero, for any number."
        raise_input_error("way", constraint, format_span(available.way), remedy)
    constraint, remedy = MISSING_INPUT_REMEDIES[need]
    got = f"none for {choice.name}"
    if need == "encoder" and choice.spec.objective is not None:
        constraint += f" of the objective {choice.spec.objective}"
        got = got if available.objective is None else f"one of {available.objective} for {choice.name}"
    raise_input_error("method", constraint, got, remedy)
