"""Inputs of methods other than support and queries, and checks that methods have the ones that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from protonet.episodes.methods import METHOD_ALIASES, METHODS, MethodSpec
from protonet.episodes.methods.choice import ChosenMethod
from protonet.errors import raise_input_error


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The available inputs of methods other than support and queries."""

    n_base: int  #: Number of base classes; 1 for base rows without labels, as in an NPY file.
    objective: str | None  #: The objective that the encoder was trained for; None without an encoder.
    head_way: int | None  #: The number of classes that the head of the encoder has; None for any number.
    way: tuple[int, int] | None  #: Least and most classes of an episode, if the sampler has them.
    texts: bool  #: Whether texts name the classes.
    unlabelled: bool  #: Whether episodes have unlabelled rows.
    maps: bool  #: Whether rows are maps of a network, with positions.
    means: bool  #: Whether episodes have base classes, which are known by their means alone.

    def list_missing(self, spec: MethodSpec) -> list[str]:
        """List the inputs that a method needs and that are missing, by their names in ``REMEDIES``."""
        trained = self.objective is not None and spec.objective in (None, self.objective)
        there = {"base": self.n_base > 1, "encoder": trained, "texts": self.texts, "unlabelled": self.unlabelled}
        there["maps"] = self.maps
        missing: list[str] = [need for need in REMEDIES if need in spec.needs and not there[need]]
        headed = self.head_way is not None and spec.objective == self.objective is not None
        narrow = headed and self.way is not None and self.way != (self.head_way, self.head_way)
        return missing + ["way"] * narrow + ["means"] * (self.means and not spec.takes_means)


#: For each missing input the constraint and the remedy of the message.
REMEDIES = {
    "texts": ("find texts that name the classes", "Pass `texts`, an NPZ file whose y are the names of the classes."),
    "encoder": ("find an encoder", "Pass the `encoder` of such a run."),
    "unlabelled": ("find unlabelled rows", "Pass `n_unlabelled` 5, with `n_distractors` 5 for rows of other classes."),
    "maps": ("find maps of a network", "Make them by `protonet.episodes extract --maps`."),
    "base": (
        "find base classes beside the evaluated ones",
        "Pass `side` novel, of data with a split by class (`split_seed` 0 makes one), or `base`.",
    ),
}
#: Notes on the methods that ``all`` leaves out, by reason.
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
    chosen: Sequence[ChosenMethod], available: Resources, *, every: bool
) -> tuple[dict[str, ChosenMethod], list[str]]:
    """Select the methods to evaluate, by name, and write notes for the report.

    Args:
        chosen: The methods that the user named.
        available: The inputs that they can use.
        every: Whether all methods of this package that can run come first.

    Raises:
        InputError: A chosen method lacks an input.
    """
    notes: list[str] = []
    choices = list(chosen)
    if every:
        notes, known = _choose_all(available)
        choices = known + choices
    for choice in choices:
        for need in available.list_missing(choice.spec)[:1] if choice.origin is None else ():
            _refuse(choice, need, available)
    notes += [f"{choice.key} is {choice.name}." for choice in choices if choice.key in METHOD_ALIASES]
    methods = {choice.name: choice for choice in choices}
    ours = {name: choice.spec for name, choice in methods.items() if choice.origin is None}
    blind = [name for name, spec in ours.items() if "unlabelled" not in spec.needs]
    if available.unlabelled and blind:
        notes.append(f"Unlabelled rows are not looked at by {', '.join(blind)}.")
    if not available.n_base:
        without = [name for name, spec in ours.items() if spec.without_base is not None]
        for text in dict.fromkeys(ours[name].without_base for name in without):
            same = ", ".join(name for name in without if ours[name].without_base == text)
            notes.append(f"Without base classes, {text} in {same}.")
    return methods, notes


def _choose_all(available: Resources) -> tuple[list[str], list[ChosenMethod]]:
    """Select all methods that can run, and write notes on the others."""
    reasons: dict[str, list[str]] = {reason: [] for reason in EXCLUSION_NOTES}
    chosen = []
    for name, spec in METHODS.items():
        missing = ["slow"] * spec.slow + available.list_missing(spec)
        if missing:
            reasons.get(missing[0], []).append(name)
        else:
            chosen.append(ChosenMethod(name, name, spec))
    notes = [EXCLUSION_NOTES[reason].format(", ".join(names)) for reason, names in reasons.items() if names]
    return notes, chosen


def _refuse(choice: ChosenMethod, need: str, available: Resources) -> NoReturn:
    """Raise an InputError for a method that lacks an input."""
    if need == "means":
        known = sorted(name for name, spec in METHODS.items() if spec.takes_means)
        constraint = "know a class by its mean, which is all that there is of base classes"
        raise_input_error("method", constraint, choice.name, f"Pass some of {', '.join(known)}.")
    if need == "way" and available.way is not None:
        constraint = f"be {available.head_way} for {choice.key}, whose last layer has weights of as many classes"
        remedy = f"Pass {available.head_way}, or train with `head` zero, for any number."
        raise_input_error("way", constraint, "-".join(map(str, dict.fromkeys(available.way))), remedy)
    constraint, remedy = REMEDIES[need]
    got = f"none for {choice.name}"
    if need == "encoder" and choice.spec.objective is not None:
        constraint += f" of the objective {choice.spec.objective}"
        got = got if available.objective is None else f"one of {available.objective} for {choice.name}"
    raise_input_error("method", constraint, got, remedy)
