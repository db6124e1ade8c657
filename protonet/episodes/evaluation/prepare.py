"""Settings of an evaluation, and its preparation: load data, select classes and methods, embed and normalise rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protonet._validation import check_type
from protonet.datasets import Dataset
from protonet.datasets.benchmarks import describe_class_list_difference
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.episodes.evaluation.evaluate import check_methods, get_process_device
from protonet.episodes.features.sources import (
    is_same_source,
    load_base_dataset,
    load_class_texts,
    load_source,
    normalize_rows,
)
from protonet.episodes.methods import Method, MethodSpec
from protonet.episodes.methods.choice import (
    AvailableInputs,
    ChosenMethod,
    choose_method,
    choose_method_grid,
    make_plugin_method,
    select_methods,
)
from protonet.episodes.networks.backbones import embed_rows_in_batches
from protonet.episodes.networks.checkpoints import load_trained_encoder
from protonet.episodes.samplers.batch import BaseClasses, TrainedEncoder, make_row_reader, summarize_base_classes
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit, join_test_rows
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import RowPool, RowReader, Sampler
from protonet.episodes.settings import EvaluationSettings, RowSettings
from protonet.errors import InputTypeError, raise_input_error, renamed_arguments
from protonet.sampling import ClassIndex, index_classes


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The settings of an evaluation, with the methods and the sampler that they name."""

    settings: EvaluationSettings  #: The settings, with a number of episodes.
    methods: Sequence[ChosenMethod]  #: The methods with fixed settings, in the order of the report.
    include_all: bool = False  #: Whether to also evaluate all methods of the package that can run on the data.
    tuning_grids: Sequence[Sequence[ChosenMethod]] = ()
    """For each method to tune, its candidate settings. The one that is best on validation classes is evaluated."""
    reference_method: ChosenMethod | None = None
    """The method that all others are compared with; None compares all pairs."""
    sampler: Sampler  #: The protocol that episodes are sampled by, not yet adapted to the data.

    @property
    def n_episodes(self) -> int:
        """The largest number of episodes."""
        assert self.settings.episodes is not None
        return self.settings.episodes

    @property
    def dataset_name(self) -> str:
        """The data set as text."""
        return "data in memory" if isinstance(self.settings.dataset, Dataset) else str(self.settings.dataset)

    @property
    def name(self) -> str:
        """The data set and the number of shots as text, to identify the evaluation among others."""
        return f"{self.dataset_name} {self.sampler.shot_title}-shot" if self.sampler.shot_title else self.dataset_name

    def add_tuned_methods(self, names: Collection[str]) -> EvaluationPlan:
        """Return a plan that also evaluates the candidate settings ``names``, and the reference method.

        If the settings of the reference method were tuned, it gets its best settings.
        """
        best = [choice for grid in self.tuning_grids for choice in grid if choice.name in names]
        chosen, against = [*self.methods, *best], self.reference_method
        if against is not None:
            tuned = [choice for choice in best if choice.method_key == against.method_key and not against.keywords]
            against = (tuned or [against])[0]
            chosen.append(against)
        return replace(self, methods=chosen, reference_method=against)

    def to_dict(self, side: str, sampler: Sampler) -> dict[str, object]:
        """Convert the settings to a dictionary for JSON.

        ``side`` is the evaluated side of the split, and ``sampler`` the protocol adapted to the data.
        """
        against, settings = self.reference_method, self.settings
        rows = {row.name: getattr(settings, row.name) for row in fields(RowSettings)}
        if settings.validation_dataset is None:
            del rows["validation_dataset"]
        return {
            **rows,
            "dataset": self.dataset_name,
            "side": side,
            "hierarchy": None,
            **sampler.to_dict(),
            "episodes": settings.episodes,
            "seed": settings.seed,
            "tune": [[choice.name for choice in grid] for grid in self.tuning_grids],
            "against": None if against is None else against.name,
            **({} if settings.device == "cpu" else {"device": settings.device}),
            **({"records": True} if settings.records else {}),
        }


def make_plan(settings: EvaluationSettings) -> EvaluationPlan:
    """Choose the methods and make the sampler that settings name; raise an InputError if they are unknown."""
    settings.check_protocol()
    sampler, compared = make_sampler(settings), None
    chosen = convert_methods(settings.method)
    if settings.against is not None:
        named = {method.name: method for method in chosen} if isinstance(settings.method, Mapping) else {}
        compared = named.get(settings.against) or choose_method(settings.against, "against")
    n_default = 10 if isinstance(sampler, FixedSplit) else 2000  # all queries are in each draw of a fixed test split
    paths = {row.name: getattr(settings, row.name) for row in fields(RowSettings)}
    texts: dict[str, Any] = {name: str(path) for name, path in paths.items() if isinstance(path, Path)}
    return EvaluationPlan(
        settings=replace(settings, **texts, episodes=settings.episodes or n_default),
        methods=chosen,
        include_all=not isinstance(settings.method, Mapping) and "all" in settings.method,
        tuning_grids=[choose_method_grid(text) for text in settings.tune],
        reference_method=compared,
        sampler=sampler,
    )


def make_sampler(settings: EvaluationSettings) -> Sampler:
    """Make the sampler of episodes that settings describe."""
    if isinstance(settings.protocol, Sampler):
        return settings.protocol
    if settings.sampling == "meta-dataset":
        return MetaDataset(hierarchy=settings.hierarchy)
    given: dict[str, Any] = {
        name: getattr(settings, name, None) for name in (declared.name for declared in fields(EpisodeConfig))
    }
    given = {name: value for name, value in given.items() if value is not None}
    if settings.sampling == "fixed-split":  # the classes follow from the data
        return FixedSplit(**{name: given[name] for name in ("shot", "allow_small") if name in given})
    config = EpisodeConfig(**given | ({"way": None} if settings.way == "all" else {}))
    return GeneralizedSampler(config) if settings.sampling == "generalized" else config


def convert_methods(methods: Sequence[str] | Mapping[str, Method]) -> list[ChosenMethod]:
    """Convert names or functions, the setting ``method``, to methods with their settings; "all" stands for none."""
    if isinstance(methods, Mapping):
        check_methods(methods, "method")
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
        raise_input_error("method", constraint, repr(methods), remedy, kind=InputTypeError)
    for name in methods:
        check_type("method", name, str, constraint.removeprefix("be "))
    return [choose_method(name) for name in methods if name != "all"]


class DataSources(NamedTuple):
    """The loaded inputs of an evaluation: the data set, the data set of base classes, and the encoder of the rows."""

    sampler: Sampler  #: The protocol of the episodes, adapted to the test rows of a fixed split.
    data: Dataset  #: The evaluated data set; for a fixed split, training and test rows together.
    base_data: Dataset  #: The data set that has the base classes; it may be ``data`` itself.
    trained: TrainedEncoder | None  #: The encoder, not yet connected to rows; None if there is no encoder.
    is_trained_on_data: bool  #: Whether the encoder was trained on base classes of ``data``, with the same split.


def load_data_sources(plan: EvaluationPlan) -> DataSources:
    """Load the data sets and the encoder of a plan.

    An InputError is raised if data or encoder cannot be loaded, or if the encoder was trained on another split of the
    same data.
    """
    settings, sampler = plan.settings, plan.sampler
    data = settings.dataset
    if not isinstance(data, Dataset):
        with renamed_arguments(text="dataset", path="dataset"):
            data = load_source(data, split_seed=settings.split_seed, image_size=settings.image_size)
    if isinstance(sampler, FixedSplit | EpisodeConfig) and settings.test_dataset is not None:
        with renamed_arguments(text="test_dataset", path="test_dataset", test="test_dataset"):
            test = load_source(settings.test_dataset, image_size=settings.image_size)
            sampler, data = sampler.join_test_set(data, test, (plan.dataset_name, str(settings.test_dataset)))
    dim = data.x.shape[1]
    base = (
        data
        if settings.base is None
        else load_base_dataset(str(settings.base), dim=dim, image_size=settings.image_size)
    )
    if settings.encoder is None:
        return DataSources(sampler, data, base, None, is_trained_on_data=False)
    with renamed_arguments(path="encoder"):
        trained = load_trained_encoder(settings.encoder, dim=dim)
    training = trained.plan
    is_trained_on_data = is_same_source(training.dataset, plan.dataset_name)
    if is_trained_on_data and training.split_seed != settings.split_seed:
        before = "without one" if training.split_seed is None else f"with {training.split_seed}"
        got = f"{settings.split_seed}; the encoder was trained {before}"
        constraint = "be the encoder's, or it would be judged on classes that it learned"
        raise_input_error("split_seed", constraint, got, "Pass the encoder's.")
    return DataSources(sampler, data, base, trained, is_trained_on_data)


@dataclass(frozen=True, kw_only=True)
class PreparedEvaluation:
    """An evaluation that is ready to run: rows, classes, base classes and methods are loaded and checked."""

    data: Dataset  #: The data set, before encoder and normalisation.
    side: str  #: The evaluated side of the split, or "all".
    n_classes: int
    """The number of classes of the side, including those with too few rows, plus base classes that the protocol adds.
    """
    class_ids: Tensor  #: (classes,) int64, the classes of ``data`` that episodes are drawn from.
    sampler: Sampler  #: The protocol that episodes are sampled by, adapted to the data.
    row_pool: RowPool  #: The rows that episodes are drawn from, embedded and normalised.
    base: BaseClasses | None  #: The base classes, if a method uses them.
    text_embeddings: Tensor | None  #: (classes, dim) float32, embeddings of texts that name the classes.
    trained: TrainedEncoder | None  #: The encoder that embedded the rows, for methods that adapt it; otherwise None.
    methods: dict[str, ChosenMethod]  #: The methods with their settings, by name.
    notes: list[str]  #: Lines of text to print with the report.

    @property
    def plugin_versions(self) -> dict[str, str]:
        """The version of each plug-in, such as a hash of its file, by name."""
        return {c.method_key: c.plugin_version for c in self.methods.values() if c.plugin_version is not None}

    @property
    def hashed_tensors(self) -> list[Tensor]:
        """The tensors that scores depend on, besides rows, to be hashed: base class means, texts, protocol and head."""
        means = [] if self.base is None else [self.base.mean, self.base.class_means]
        texts = [] if self.text_embeddings is None else [self.text_embeddings]
        head = [] if self.trained is None else self.trained.head.state_dict().values()
        return [*means, *texts, *self.sampler.hashed_tensors, *head]


class DatasetRows(NamedTuple):
    """Rows of a data set: all rows with their own features, or some rows embedded by an encoder."""

    x: Tensor  #: (n, dim), the rows before normalisation, in memory or memory-mapped.
    row_positions: Tensor  #: For each row of the data set its index in ``x``, int64; -1 if it was not embedded.
    read_rows: RowReader  #: Copies normalised rows of ``x`` by index to the device of the evaluation.
    trained: TrainedEncoder | None = None
    """The encoder that embedded the rows, or None. Its ``take`` reads rows before their embedding by the indices of
    ``x``."""

    def select_classes(self, index: ClassIndex) -> RowPool:
        """Make a `RowPool` of some classes, from which episodes are drawn; ``index`` has their rows in the data set."""
        rows_by_class = index._replace(row_indices=self.row_positions[index.row_indices])
        return RowPool(self.x, self.read_rows, rows_by_class, index)

    def summarize_base_classes(self, index: ClassIndex) -> BaseClasses:
        """Compute the means of some classes, which serve as base classes; ``index`` has their rows in the data set."""
        pool = self.select_classes(index)
        return summarize_base_classes(pool.read_rows, pool.rows_by_class)

    def normalize(self, kind: str, mean: Tensor | None) -> DatasetRows:
        """Return rows that are normalised by `normalize_rows` when they are read."""
        if kind == "none":
            return self
        read = self.read_rows
        return self._replace(read_rows=lambda rows: normalize_rows(read(rows), kind, mean))


def prepare_evaluation(plan: EvaluationPlan, sources: DataSources) -> PreparedEvaluation:
    """Prepare an evaluation: select classes and methods by its plan, and embed and normalise the rows of ``sources``.

    Methods to tune are ignored. An InputError is raised if data, protocol, encoder and methods do not fit together.
    """
    settings, sampler, data = plan.settings, sources.sampler, sources.data
    training = None if sources.trained is None else sources.trained.plan
    sides = data.sides or ("all",) * data.num_classes
    side = settings.side or ("all" if data.sides is None else "novel")
    if side not in {"all", *sides}:
        got = f"{side} of {', '.join(sorted(set(data.sides or ()))) or 'no split'}"
        remedy = "Pass `split_seed` 0 for a split." if data.sides is None else "Pass one of these, or all."
        raise_input_error("side", "be a side that has classes", got, remedy)
    base_ids = _list_base_classes(sources, side, settings.normalize)
    is_generalized = isinstance(sampler, GeneralizedSampler)
    if is_generalized and not base_ids:
        remedy = "Pass `side` novel, of data with a split by class (`split_seed` 0 makes one)."
        raise_input_error("protocol", "find base classes, to be generalized", "none", remedy)
    available = AvailableInputs(
        n_base_classes=len(base_ids),
        objective=None if training is None else training.objective,
        head_n_way=None if training is None else training.head_n_way,
        way=sampler.way,
        has_texts=settings.texts is not None,
        has_unlabelled=sampler.unlabelled > 0,
        has_base_class_means=is_generalized,
        has_feature_maps=data.has_feature_maps and training is None,
    )
    methods, notes = select_methods(plan.methods, available, include_all=plan.include_all)
    chosen = [c for c, name in enumerate(sides) if side in ("all", name)]
    names = tuple(data.class_names[c] for c in chosen)
    index_of_all = index_classes(data.y)
    sampler, index, lines = sampler.choose_classes(index_of_all.select_classes(torch.tensor(chosen)), names)
    notes += lines
    balanced = [name for name, choice in methods.items() if choice.spec.assumes_balance]
    if balanced and not sampler.has_equal_queries(index):
        text = "assumes equally many queries of each class, which these episodes do not have"
        text = text if len(balanced) == 1 else text.replace("assumes", "assume")
        notes.append(f"{', '.join(balanced)} {text}.")
    if settings.split_seed is None and data.sides is not None:
        counts = zip(zip(data.class_names, data.sides, strict=True), index_of_all.class_counts.tolist(), strict=True)
        notes += describe_class_list_difference(plan.dataset_name, dict(counts))
    kind = settings.normalize
    uses_base = is_generalized or any(choice.spec.uses_base for choice in methods.values())
    if kind != "cl2" and not uses_base:
        base_ids = []  # an encoder would embed their rows for nothing
    if training is not None:
        if sources.is_trained_on_data and side != "novel":
            notes.append(f"The encoder was trained or chosen on classes of side {side}: this is no test of it.")
        if sources.trained is not None and not sources.trained.beats_raw_features:
            notes.append("On its validation classes, the encoder was less accurate than the features without it.")
        adapting = [name for name, choice in methods.items() if choice.spec.adapts_encoder]
        if kind != "none" and adapting:
            notes.append(f"{' and '.join(adapting)} embed rows anew, which are not normalized then.")
        if data.shape is None and training.backbone != "mlp":
            n_features = data.x.shape[1]
            notes.append(f"The encoder takes rows of {n_features} features for images, which these may not be.")
        if is_generalized:
            notes.append("The encoder may have learned from the queries of base classes: their accuracy flatters it.")
    base_data = sources.base_data
    device = get_process_device(settings.device)
    encoder = sources.trained
    if encoder is not None:
        encoder = encoder._replace(encoder=encoder.encoder.to(device), head=encoder.head.to(device))
    rows = _load_rows(data, chosen + (base_ids if base_data is data else []), encoder, device)
    base, queries, mean = None, None, None
    if base_ids:
        base_rows = rows if base_data is data else _load_rows(base_data, base_ids, encoder, device)
        base_index = index_classes(base_data.y).select_classes(torch.tensor(base_ids))
        if isinstance(sampler, GeneralizedSampler):
            base_names = tuple(base_data.class_names[c] for c in base_ids)
            base_index, queries = sampler.hold_out_queries(base_index, base_names)
        mean = base_rows.summarize_base_classes(base_index).mean if kind == "cl2" else None
        base = base_rows.normalize(kind, mean).summarize_base_classes(base_index)
    rows = rows.normalize(kind, mean)
    pool, trained = rows.select_classes(index), rows.trained
    if isinstance(sampler, GeneralizedSampler) and queries is not None and base is not None:
        sampler, pool = sampler.join_base_classes(pool, rows.select_classes(queries), base.class_means)
        # Its ``take`` reads rows by their indices in the data set, and the joined pool has others.
        trained = None
    class_ids, texts = data.y[pool.dataset_rows.row_indices[pool.dataset_rows.class_starts]], None
    if settings.texts is not None:
        named = [data.class_names[c] for c in class_ids.tolist()]
        texts = load_class_texts(str(settings.texts), dim=pool.x.shape[1], names=named).to(device)
    return PreparedEvaluation(
        data=data,
        side=side,
        n_classes=len(chosen) + sampler.n_base_classes,
        class_ids=class_ids,
        sampler=sampler,
        row_pool=pool,
        base=base,
        text_embeddings=texts,
        trained=trained,
        methods=methods,
        notes=notes,
    )


def prepare_tuning(plan: EvaluationPlan, sources: DataSources) -> tuple[EvaluationPlan, PreparedEvaluation]:
    """Prepare the evaluation of candidate settings, from which the best settings of each method are chosen.

    It evaluates all candidate settings on validation classes or, for a fixed split, on validation rows. Returns the
    plan of this evaluation; and the evaluation, ready to run.
    """
    candidates = [choice for grid in plan.tuning_grids for choice in grid]
    n_episodes = min(plan.n_episodes, 500)  # the order of settings is known well enough, and they may be many
    settings = replace(plan.settings, episodes=n_episodes, records=False)
    if settings.test_dataset is None:
        _check_validation_classes(plan, sources)
        settings = replace(settings, side="validation")
    else:
        _check_validation_rows(settings)
        settings = replace(settings, test_dataset=settings.validation_dataset, validation_dataset=None)
    plan = EvaluationPlan(settings=settings, methods=candidates, sampler=plan.sampler)
    if settings.test_dataset is not None:
        sources = load_data_sources(plan)
    return plan, prepare_evaluation(plan, sources)


def _check_validation_rows(settings: EvaluationSettings) -> None:
    """Raise an InputError unless a fixed split has validation rows, which differ from its test rows."""
    if settings.validation_dataset is None:
        remedy = "Pass `validation_dataset`, other rows of the same classes, or fixed settings in `method`."
        raise_input_error("tune", "have validation rows beside those of `test_dataset`", "none", remedy)
    with renamed_arguments(text="validation_dataset", path="validation_dataset", test="validation_dataset"):
        names = str(settings.test_dataset), str(settings.validation_dataset)
        test, validation = (load_source(text, image_size=settings.image_size) for text in names)
        join_test_rows(test, validation, names)  # raises an error if they share a row


def _check_validation_classes(plan: EvaluationPlan, sources: DataSources) -> None:
    """Raise an InputError unless the split has enough validation classes, and these are not the evaluated ones."""
    sides, sampler = sources.data.sides, sources.sampler
    evaluated = plan.settings.side or ("novel" if sides else "all")
    if evaluated in {"validation", "all"}:
        remedy = "Pass `side` novel, of data with a split; `split_seed` 0 makes one."
        constraint = "choose on other classes than the evaluated ones"
        raise_input_error("tune", constraint, f"`side` {evaluated}", remedy)
    needed, there = sampler.n_required_classes, (sides or ()).count("validation")
    if there < needed:
        remedy = "Mark some of the base classes as validation classes in the split of the data."
        if sampler.way is not None and (fewer := there - needed + sampler.way[1]) > 1:
            remedy = f"Pass `way` {fewer}, or use data with more validation classes."
        raise_input_error("tune", f"find {needed} validation classes, as many as an episode draws from", there, remedy)


def _list_base_classes(sources: DataSources, side: str, normalize: str) -> list[int]:
    """Return the indices of the base classes in ``sources.base_data``; the evaluated ``side`` is not among them."""
    base = sources.base_data
    base_ids = [c for c, name in enumerate(base.sides or ()) if name == "base"]
    if base is not sources.data:
        return base_ids or list(range(base.num_classes))
    base_ids = base_ids if side in SPLIT_SIDES[1:] else []
    if normalize == "cl2" and not base_ids:
        remedy = "Pass `base`, `side` novel of data with a split (`split_seed` 0 makes one), or `normalize` l2."
        raise_input_error("normalize", "find base classes to centre on", "cl2 without any", remedy)
    return base_ids


def _load_rows(
    data: Dataset, class_ids: Sequence[int], trained: TrainedEncoder | None, device: torch.device
) -> DatasetRows:
    """Load rows of a data set on a device: all rows or, with an encoder, embeddings of the classes ``class_ids``."""
    if trained is None:
        positions = torch.arange(len(data.x))
        if data.has_float_array_in_memory:
            x = data.x.to(device)
            return DatasetRows(x, positions, make_row_reader(x))
        return DatasetRows(data.x, positions, lambda rows: data.get_rows(rows.cpu()).to(device))
    # Embedding is the slow part, so only rows of classes that are used are embedded.
    used = torch.isin(data.y, torch.tensor(class_ids)).nonzero().flatten()
    positions = torch.full((len(data.x),), -1).index_copy_(0, used, torch.arange(len(used)))
    trained = trained._replace(take=lambda rows: data.get_rows(used[rows]))
    x = embed_rows_in_batches(trained.encoder, data.get_rows, used)
    return DatasetRows(x, positions, make_row_reader(x), trained)
