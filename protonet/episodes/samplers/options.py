"""Create episode samplers from the options of the command line."""

from __future__ import annotations

import argparse

from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import Sampler
from protonet.errors import raise_input_error
from protonet.ui.command_line import parse_integer

#: Options that several protocols depend on.
COMMON_SAMPLER_OPTIONS = ("way", "shot", "query", "unequal", "imbalance", "allow_small")
#: For each protocol, the options that its episodes depend on. Other options with this protocol raise an InputError.
PROTOCOL_OPTIONS = {
    "episodes": (*COMMON_SAMPLER_OPTIONS, "n_open_classes", "unlabelled", "distractors", "side", "split_seed", "base"),
    "meta-dataset": ("hierarchy", "side", "split_seed", "base"),
    "generalized": (*COMMON_SAMPLER_OPTIONS, "side", "split_seed"),
    "fixed-split": ("shot", "allow_small", "base"),
}


def make_samplers(options: argparse.Namespace) -> list[Sampler]:
    """Create the samplers that the options of the command line describe, one for each number of shots.

    ``options.given_options`` are the names of options on the command line, ``options.preset_options`` the names of
    options in the preset.
    """
    protocol = "fixed-split" if options.test_dataset else options.protocol
    kind = "--test-dataset" if options.test_dataset else f"--protocol {protocol}"
    if options.test_dataset and options.protocol != "episodes":
        remedy = "Leave one of the two out."
        raise_input_error("--test-dataset", f"be left out with --protocol {options.protocol}", "both", remedy)
    if options.way == "all" and not options.test_dataset:
        remedy = "Pass --test-dataset FILE, a test split by rows, or a number."
        raise_input_error("--way", "be a number or a span where there is no --test-dataset", "all", remedy)
    for name in (*PROTOCOL_OPTIONS["episodes"], "hierarchy"):
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        is_all = name in {"way", "side"} and value == "all"  # as in a fixed split
        if name in PROTOCOL_OPTIONS[protocol] or is_all:
            continue
        if name in options.given_options:
            remedy = "Leave it out." if name != "hierarchy" else "Pass --protocol meta-dataset."
            raise_input_error(option, f"be left out with {kind}", value, remedy)
        if name in options.preset_options:
            got = f"{options.preset}, which has {option} {value}"
            raise_input_error("--preset", f"have options that go with {kind}", got, "Leave one of the two out.")
    if protocol == "meta-dataset":
        return [MetaDataset(hierarchy=options.hierarchy)]
    shots = options.shot.split(",")
    if protocol == "fixed-split":  # the classes follow from the data
        samplers: list[Sampler] = [
            FixedSplit(parse_integer("--shot", shot, low=1), (), options.allow_small) for shot in shots
        ]
    else:
        configs = [make_episode_config(options, shot) for shot in shots]
        samplers = [GeneralizedSampler(config) if protocol == "generalized" else config for config in configs]
    if len({sampler.shot for sampler in samplers}) < len(samplers):
        raise_input_error("--shot", "have each value once", repr(options.shot), "Leave one out.")
    return samplers


def make_episode_config(options: argparse.Namespace, shot: str) -> EpisodeConfig:
    """Create an `EpisodeConfig` from the options of the command line; ``shot`` is a number or a span such as 5-20."""
    return EpisodeConfig(
        way=parse_integer_range("--way", options.way, low=2),
        shot=parse_integer_range("--shot", shot, low=1),
        n_query=options.query,
        unequal=options.unequal,
        imbalance=options.imbalance,
        n_open_classes=options.n_open_classes,
        allow_small=options.allow_small,
        n_unlabelled=options.unlabelled,
        n_distractors=options.distractors,
    )


def parse_integer_range(argument: str, text: str, *, low: int) -> tuple[int, int]:
    """Parse ``5`` as (5, 5) and ``5-20`` as (5, 20); raise an InputError for other texts or numbers below ``low``."""
    first, dash, last = text.partition("-")
    if not first or (dash and not last):
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), f"Pass a number >= {low}.")
    minimum = parse_integer(argument, first, low=low)
    maximum = parse_integer(argument, last, low=low) if dash else minimum
    if maximum < minimum:
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), "Write the smaller number first.")
    return minimum, maximum
