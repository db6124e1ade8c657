"""The kind of episodes that the command's options ask for."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from protonet._validation import check_number
from protonet.episodes.draws.fixed_split import FixedSplit
from protonet.episodes.draws.generalized import Generalized
from protonet.episodes.draws.meta_dataset import MetaDataset
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.draws.sampler import Sampler
from protonet.errors import raise_input_error
from protonet.ui.command_line import parse_whole

PROG = "protonet.episodes"  #: The command, for messages.
#: Options of kinds of episodes, of which each protocol takes some.
PLAIN = ("way", "shot", "query", "unequal", "imbalance", "allow_small")
OPTIONS = (*PLAIN, "open", "unlabelled", "distractors", "hierarchy", "side", "split_seed", "base")
TAKEN = {
    "episodes": (*PLAIN, "open", "unlabelled", "distractors", "side", "split_seed", "base"),
    "meta-dataset": ("hierarchy", "side", "split_seed", "base"),
    "generalized": (*PLAIN, "side", "split_seed"),
    "fixed-split": ("shot", "allow_small", "base"),
}


def read_samplers(options: argparse.Namespace, given: Collection[str], preset: Mapping[str, str]) -> dict[str, Sampler]:
    """Return the kinds of episodes that options ask for, by what tells them apart: the shots, where there are several.

    Args:
        options: Of the command.
        given: The names of those that were given, be it with their defaults' values.
        preset: The values by name that the preset ``options.preset`` has; none without one.

    Raises:
        InputError: A value is none of its option's, or an option, given or the preset's, is not one of the protocol's.
    """
    protocol = "fixed-split" if options.test else options.protocol
    kind = "--test" if options.test else f"--protocol {protocol}"
    if options.test and options.protocol != "episodes":
        raise_input_error(
            "--test", f"be left out with --protocol {options.protocol}", "both", "Leave one of the two out."
        )
    if options.way == "all" and not options.test:
        remedy = "Pass --test FILE, a test split by rows, or a number."
        raise_input_error("--way", "be a number or a span where there is no --test", "all", remedy)
    if options.test and "way" in given and options.way != "all":
        raise_input_error("--way", "be all with --test", options.way, "Leave it out.")
    for name in OPTIONS:
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if name in TAKEN[protocol] or (name in {"way", "side"} and value == "all"):  # which a fixed split has anyway
            continue
        if name in given:
            remedy = "Leave it out." if name != "hierarchy" else "Pass --protocol meta-dataset."
            raise_input_error(option, f"be left out with {kind}", value, remedy)
        if name in preset:
            got = f"{options.preset}, which has {option} {value}"
            raise_input_error("--preset", f"have options that go with {kind}", got, "Leave one of the two out.")
    if protocol == "meta-dataset":
        return {"": MetaDataset(hierarchy=options.hierarchy)}
    shots = options.shot.split(",")
    if len(set(shots)) < len(shots):
        raise_input_error("--shot", "have each value once", repr(options.shot), "Leave one out.")
    return {shot: _read_sampler(options, protocol, shot) for shot in shots}


def _read_sampler(options: argparse.Namespace, protocol: str, shot: str) -> Sampler:
    """Return the kind of episodes of a protocol that has shots."""
    if protocol == "fixed-split":  # whose data will tell the classes
        return FixedSplit(parse_whole("--shot", shot, low=1), (), options.allow_small)
    setting = read_setting(options, shot)
    return Generalized(setting) if protocol == "generalized" else setting


def read_setting(options: argparse.Namespace, shot: str) -> Setting:
    """Return the episodes that options ask for, with some shots."""
    return Setting(
        way=parse_span("--way", options.way, low=2),
        shot=parse_span("--shot", shot, low=1),
        n_query=parse_whole("--query", options.query, low=1),
        unequal=options.unequal,
        imbalance=None if options.imbalance is None else parse_number("--imbalance", options.imbalance, strict=True),
        n_open=parse_whole("--open", options.open, low=0),
        allow_small=options.allow_small,
        n_unlabelled=parse_whole("--unlabelled", options.unlabelled, low=0),
        n_distractors=parse_whole("--distractors", options.distractors, low=0),
    )


def parse_span(argument: str, text: str, *, low: int) -> tuple[int, int]:
    """Parse ``5`` as (5, 5) and ``5-20`` as (5, 20); raise an InputError for anything else."""
    first, dash, last = text.partition("-")
    if not first or (dash and not last):
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), f"Pass a number >= {low}.")
    least = parse_whole(argument, first, low=low)
    most = parse_whole(argument, last, low=low) if dash else least
    if most < least:
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), "Write the smaller number first.")
    return least, most


def parse_number(argument: str, text: str, *, strict: bool) -> float:
    """Parse a finite float >= 0 (> 0 if ``strict``); raise an InputError for anything else."""
    try:
        value: Any = float(text)
    except ValueError:
        value = text
    return check_number(argument, value, low=0, strict=strict)
