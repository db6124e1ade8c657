"""What there is for methods beside support and queries, and which of them lack something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from protonet.episodes.methods import ALIASES, METHODS, MethodSpec
from protonet.episodes.methods.choice import ChosenMethod
from protonet.errors import raise_input_error


class Supply(NamedTuple):
    """What there is for methods beside support and queries."""

    n_base: int  #: Base classes; base rows without classes, as of an NPY file, are one, and what needs them needs two.
    objective: str | None  #: That the encoder was trained for; None without one.
    head_way: int | None  #: The classes that what was trained beside the encoder is for; None for any number.
    way: tuple[int, int] | None  #: Least and most classes of an episode, where the setting says.
    texts: bool  #: Whether texts name the classes.
    unlabelled: bool  #: Whether episodes have unlabelled rows.
    maps: bool  #: Whether rows are maps of a network, with places.
    means: bool  #: Whether base classes stand beside the novel ones, by their means.

    def list_missing(self, spec: MethodSpec) -> list[str]:
        """Return what a method needs and does not find, keys of ``LACKS``."""
        trained = self.objective is not None and spec.objective in (None, self.objective)
        there = {"base": self.n_base > 1, "encoder": trained, "texts": self.texts, "unlabelled": self.unlabelled}
        there["maps"] = self.maps
        missing: list[str] = [need for need in LACKS if need in spec.needs and not there[need]]
        headed = self.head_way is not None and spec.objective == self.objective is not None
        narrow = headed and self.way is not None and self.way != (self.head_way, self.head_way)
        return missing + ["way"] * narrow + ["means"] * (self.means and not spec.takes_means)


#: What a method lacks: what it must find, and how that is had.
LACKS = {
    "texts": ("find texts that name the classes", "Pass --texts FILE.npz, whose y are the names of the classes."),
    "encoder": ("find an encoder", "Pass --encoder FILE, of such a run."),
    "unlabelled": ("find unlabelled rows", "Pass --unlabelled 5, with --distractors 5 for rows of other classes."),
    "maps": ("find maps of a network", "Make them by extract --maps."),
    "base": (
        "find base classes beside the evaluated ones",
        "Pass --side novel, of data with a split by class (--split-seed 0 makes one), or --base FILE.npz.",
    ),
}
#: Why "all" leaves out methods that lack something; those that take long are named, too.
LEFT_OUT = {
    "encoder": "Without an encoder of their objectives, {} are left out.",
    "texts": "Without texts, {} are left out.",
    "unlabelled": "Without unlabelled rows, {} are left out.",
    "maps": "Without maps of a network, {} are left out.",
    "slow": "{} take long, and are left out of 'all': name them, too.",
    "way": "What was trained beside the encoder is for another --way, and {} are left out.",
    "means": "Methods that need rows of all classes are left out: base classes have means.",
}


def find_methods(
    chosen: Sequence[ChosenMethod], supply: Supply, *, every: bool
) -> tuple[dict[str, ChosenMethod], list[str]]:
    """Return methods by name, and lines for the report.

    Args:
        chosen: Those that a person named.
        supply: What there is for them.
        every: Put all of ours that can run before them.

    Raises:
        InputError: A chosen one lacks something.
    """
    notes: list[str] = []
    choices = list(chosen)
    if every:
        notes, known = _choose_all(supply)
        choices = known + choices
    for choice in choices:
        for need in supply.list_missing(choice.spec)[:1] if choice.origin is None else ():
            _refuse(choice, need, supply)
    notes += [f"{choice.key} is {choice.name}." for choice in choices if choice.key in ALIASES]
    methods = {choice.name: choice for choice in choices}
    ours = {name: choice.spec for name, choice in methods.items() if choice.origin is None}
    blind = [name for name, spec in ours.items() if "unlabelled" not in spec.needs]
    if supply.unlabelled and blind:
        notes.append(f"Unlabelled rows are not looked at by {', '.join(blind)}.")
    if not supply.n_base:
        without = [name for name, spec in ours.items() if spec.without_base is not None]
        for text in dict.fromkeys(ours[name].without_base for name in without):
            same = ", ".join(name for name in without if ours[name].without_base == text)
            notes.append(f"Without base classes, {text} in {same}.")
    return methods, notes


def _choose_all(supply: Supply) -> tuple[list[str], list[ChosenMethod]]:
    """Return all methods that can run, and lines that say which others there are."""
    reasons: dict[str, list[str]] = {reason: [] for reason in LEFT_OUT}
    chosen = []
    for name, spec in METHODS.items():
        missing = ["slow"] * spec.slow + supply.list_missing(spec)
        if missing:
            reasons.get(missing[0], []).append(name)
        else:
            chosen.append(ChosenMethod(name, name, spec))
    notes = [LEFT_OUT[reason].format(", ".join(names)) for reason, names in reasons.items() if names]
    return notes, chosen


def _refuse(choice: ChosenMethod, need: str, supply: Supply) -> NoReturn:
    """Raise an InputError for a method that lacks something."""
    if need == "means":
        known = sorted(name for name, spec in METHODS.items() if spec.takes_means)
        constraint = "know a class by its mean, which is all that there is of base classes"
        raise_input_error("method", constraint, choice.name, f"Pass some of {', '.join(known)}.")
    if need == "way" and supply.way is not None:
        constraint = f"be {supply.head_way} for {choice.key}, whose last layer has weights of as many classes"
        remedy = f"Pass --way {supply.head_way}, or train with --head zero, for any number."
        raise_input_error("way", constraint, "-".join(map(str, dict.fromkeys(supply.way))), remedy)
    constraint, remedy = LACKS[need]
    got = f"none for {choice.name}"
    if need == "encoder" and choice.spec.objective is not None:
        constraint += f" of train --objective {choice.spec.objective}"
        got = got if supply.objective is None else f"one of {supply.objective} for {choice.name}"
    raise_input_error("method", constraint, got, remedy)
