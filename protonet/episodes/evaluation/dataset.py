"""Evaluate few-shot methods on a data set from Python, as ``python -m protonet.episodes`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from protonet._validation import check_device, check_int, check_type
from protonet.datasets import Dataset
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.episodes.evaluation.evaluate import check_methods, join_process_group
from protonet.episodes.evaluation.prepare import EvaluationPlan
from protonet.episodes.evaluation.run import evaluate_plan
from protonet.episodes.evaluation.statistics import Evaluation
from protonet.episodes.methods import Method, MethodSpec
from protonet.episodes.methods.choice import ChosenMethod, choose_method, choose_method_grid, make_plugin_method
from protonet.episodes.names import ROW_NORMALIZATIONS
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.sampler import Sampler
from protonet.errors import InputTypeError, raise_input_error, renamed_arguments
from protonet.ui.command_line import check_known_name

#: For arguments of functions called by `evaluate_dataset`, its own argument, so that error messages can name it.
ARGUMENT_NAMES_IN_ERRORS = {
    **{name: f"config.{name}" for name in ("way", "shot", "n_query", "imbalance")},
    **{name: f"config.{name}" for name in ("n_open_classes", "n_unlabelled", "n_distractors")},
    "dataset": "data",
    "text": "data",
    "method": "methods",
    "test": "test_data",
    "test_dataset": "test_data",
    "validation": "validation_data",
    "validation_dataset": "validation_data",
}


def evaluate_dataset(
    data: str | Path | Dataset,
    methods: Sequence[str] | Mapping[str, Method],
    config: Sampler | None = None,
    *,
    n_episodes: int = 2000,
    seed: int = 0,
    side: str | None = None,
    split_seed: int | None = None,
    image_size: int | None = None,
    encoder: str | Path | None = None,
    normalize: str = "none",
    base: str | Path | None = None,
    texts: str | Path | None = None,
    test_data: str | Path | None = None,
    validation_data: str | Path | None = None,
    tune: Sequence[str] = (),
    against: str | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> Evaluation:
    """Evaluate few-shot methods on the episodes of a data set, as ``python -m protonet.episodes`` does.

    Episodes are drawn from the novel classes, if the data have a split by class. Methods that need base classes get the
    base classes of the split. Intervals and p-values are over classes and over episodes.

    Args:
        data: The name or the path of a data set, see `load_source`; or one in memory.
        methods: Names of methods, with settings such as ``tim:steps=100``, or ``file.py:function``; or a mapping from
            names to functions from a batch of `Episodes` to logits.
        config: How episodes are sampled; None for ``EpisodeConfig()``: 5-way 1-shot with 15 queries per class.
        n_episodes: Largest number of episodes, >= 1.
        seed: Seed of the episodes, in [0, 2**63).
        side: The side of the split to draw episodes from: "novel", "validation", "base" or "all". None selects "novel"
            if the data have a split, otherwise "all".
        split_seed: Seed of a random split by class, for data without a split; None for no such split.
        image_size: Pixels per side to resize pictures to; None for the size that their authors use.
        encoder: A file from ``python -m protonet.episodes train``; None to use the features themselves.
        normalize: The normalisation of all rows: "none", "l2", "cl2" or "z", see `normalize_rows`.
        base: A data set whose rows are the base classes; None for the base classes of the split.
        texts: A data set of embedded texts that name the classes, for `clip_zero_shot` and `tip_adapter`.
        test_data: A data set of test rows of the same classes, if ``config`` is a `FixedSplit`.
        validation_data: A data set of validation rows of the same classes, for ``tune`` with ``test_data``.
        tune: Methods with several values of settings, such as ``ridge:penalty=0.1,1``. The settings that are best on
            validation classes are evaluated as a further method.
        against: The method that all other methods are compared with; None to compare all pairs of methods.
        device: The device on which rows are embedded, classified and scored.
        progress: Whether to show a progress bar on terminals.

    Returns:
        The results: ``methods`` has accuracies with intervals by name, ``summary.comparisons`` the paired tests, and
        `format_evaluation` formats all results as text.

    Raises:
        MissingPackageError: A package that the data need is missing.
        InputTypeError: An argument has the wrong type.
        InputError: A value is out of range, or data, methods and config do not fit together.
    """
    check_type("data", data, (str, Path, Dataset), "the name or the path of a data set, or a Dataset")
    config = EpisodeConfig() if config is None else config
    check_type("config", config, Sampler, "an EpisodeConfig, or another sampler")
    if isinstance(config, FixedSplit) != (test_data is not None):
        got = f"{type(config).__name__} {'with' if test_data is not None else 'without'} test_data"
        remedy = "Pass config=FixedSplit(n_shot) and test_data together."
        raise_input_error("config", "be a FixedSplit if and only if there are test data", got, remedy)
    if isinstance(data, Dataset) and split_seed is not None:
        remedy = "Pass split_classes(data, seed) instead."
        raise_input_error("split_seed", "be left out for a data set in memory", split_seed, remedy)
    check_type("progress", progress, bool, "True or False")
    if isinstance(tune, str):
        raise_input_error("tune", "be a list of texts", repr(tune), f"Pass [{tune!r}].", kind=InputTypeError)
    n_episodes = check_int("n_episodes", n_episodes, low=1)
    seed = check_int("seed", seed, low=0, high=2**63 - 1)
    check_device("device", device)
    with renamed_arguments(**ARGUMENT_NAMES_IN_ERRORS):
        check_known_name("normalize", normalize, ROW_NORMALIZATIONS)
        if side is not None:
            check_known_name("side", side, (*SPLIT_SIDES, "all"))
        memory = data if isinstance(data, Dataset) else None
        chosen, compared = _convert_methods(methods), None
        if against is not None:
            named = {method.name: method for method in chosen} if isinstance(methods, Mapping) else {}
            compared = named.get(against) or choose_method(against, "against")
        grids = [choose_method_grid(text, "tune") for text in tune]
        plan = EvaluationPlan(
            dataset="data in memory" if memory is not None else str(data),
            side=side,
            image_size=image_size,
            split_seed=split_seed,
            normalize=normalize,
            test_dataset=_to_text(test_data),
            validation_dataset=_to_text(validation_data),
            encoder=_to_text(encoder),
            base=_to_text(base),
            texts=_to_text(texts),
            methods=chosen,
            tuning_grids=grids,
            reference_method=compared,
            sampler=config,
            n_episodes=n_episodes,
            seed=seed,
            device=device,
        )
        with join_process_group():
            evaluation, interrupted = evaluate_plan(plan, data=memory, progress=progress)
            if interrupted:
                raise KeyboardInterrupt
            return evaluation


def _to_text(path: str | Path | None) -> str | None:
    """Convert a path to text, and leave None."""
    return None if path is None else str(path)


def _convert_methods(methods: Sequence[str] | Mapping[str, Method]) -> list[ChosenMethod]:
    """Convert names or functions, the argument ``methods`` of `evaluate_dataset`, to methods with their settings."""
    if isinstance(methods, Mapping):
        check_methods(methods)
        chosen = []
        for name, method in methods.items():
            if isinstance(method, ChosenMethod):
                chosen.append(replace(method, name=name, method_key=name))
            elif isinstance(method, MethodSpec):
                chosen.append(ChosenMethod(name, name, method))
            else:
                chosen.append(make_plugin_method(name, method, "function"))
        return chosen
    constraint = "be a list of names, or a mapping from names to functions"
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        remedy = f"Pass [{methods!r}]." if isinstance(methods, str) else "Pass a list such as ['protonet']."
        raise_input_error("methods", constraint, repr(methods), remedy, kind=InputTypeError)
    for name in methods:
        check_type("methods", name, str, constraint.removeprefix("be "))
    return [choose_method(name, "methods") for name in methods]
