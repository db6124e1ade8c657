"""Settings of an evaluation, and its preparation: load data, select classes and methods, embed and normalise rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.datasets import Dataset
from protonet.datasets.benchmarks import describe_class_list_difference
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.episodes.evaluation.evaluate import get_process_device
from protonet.episodes.features.sources import (
    is_same_source,
    load_base_dataset,
    load_class_texts,
    load_source,
    normalize_rows,
)
from protonet.episodes.methods.choice import AvailableInputs, ChosenMethod, select_methods
from protonet.episodes.networks.backbones import embed_rows_in_batches
from protonet.episodes.networks.checkpoints import load_trained_encoder
from protonet.episodes.samplers.batch import BaseClasses, TrainedEncoder, make_row_reader, summarize_base_classes
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit, join_test_rows
from protonet.episodes.samplers.sampler import RowPool, RowReader, Sampler
from protonet.errors import raise_input_error, renamed_arguments
from protonet.sampling import ClassIndex, index_classes

MAX_TUNING_EPISODES = 500  #: Settings of methods are compared on at most this many validation episodes.


#: The fields of `EvaluationPlan` about the rows to classify. They are also options of the command line.
ROW_SETTINGS = (
    *("dataset", "test_dataset", "validation_dataset", "side", "image_size", "split_seed", "encoder", "normalize"),
    *("base", "texts"),
)


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """All settings of an evaluation: the rows to classify, the methods, and the episodes."""

    dataset: str  #: The data set by name or path, see `load_source`.
    #: For a fixed split into training and test rows: the data set of the test rows by name or path. Otherwise None.
    test_dataset: str | None = None
    #: For a fixed split: the data set of further rows of the same classes, on which settings of methods are chosen.
    validation_dataset: str | None = None
    #: The evaluated side of the split by class, or "all"; None takes "novel" if there is a split, otherwise "all".
    side: str | None = None
    image_size: int | None = None  #: Pixels per side of pictures, see `load_source`.
    split_seed: int | None = None  #: Seed of a random split by class, for data without a split; None for no such split.
    encoder: str | None = None  #: The path of a checkpoint of `train`; None to classify the features themselves.
    normalize: str = "none"  #: The normalisation of rows, one of `protonet.episodes.names.ROW_NORMALIZATIONS`.
    base: str | None = None  #: A data set of base classes; None takes the base side of ``dataset``.
    texts: str | None = None  #: A data set of embedded texts that name the classes, see `load_class_texts`.
    methods: Sequence[ChosenMethod]  #: The methods with fixed settings, in the order of the report.
    include_all: bool = False  #: Whether to also evaluate all methods of the package that can run on the data.
    #: For each method to tune, its candidate settings. The one that is best on validation classes is evaluated.
    tuning_grids: Sequence[Sequence[ChosenMethod]] = ()
    #: The method that all others are compared with; None compares all pairs.
    reference_method: ChosenMethod | None = None
    sampler: Sampler  #: The protocol that episodes are sampled by, not yet adapted to the data.
    n_episodes: int  #: Largest number of episodes.
    seed: int = 0  #: Seed of the episodes.
    device: str = "cpu"  #: The device on which rows are embedded and classified.
    #: Whether to record the prediction and the row of each query. All episodes must then have the same size.
    save_predictions: bool = False

    @property
    def name(self) -> str:
        """The data set and the number of shots as text, to identify the evaluation among others."""
        return f"{self.dataset} {self.sampler.shot_title}-shot" if self.sampler.shot_title else self.dataset

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
        """Convert the settings to a dictionary for JSON, whose keys are the names of the command-line options.

        ``side`` is the evaluated side of the split, and ``sampler`` the protocol adapted to the data.
        """
        against = self.reference_method
        rows = {name: getattr(self, name) for name in ROW_SETTINGS}
        if self.validation_dataset is None:
            del rows["validation_dataset"]
        return {
            **rows,
            "side": side,
            "hierarchy": None,
            **sampler.to_dict(),
            "max_episodes": self.n_episodes,
            "seed": self.seed,
            "tune": [[choice.name for choice in grid] for grid in self.tuning_grids],
            "against": None if against is None else against.name,
            **({} if self.device == "cpu" else {"device": self.device}),
            **({"records": True} if self.save_predictions else {}),
        }


class DataSources(NamedTuple):
    """The loaded inputs of an evaluation: the data set, the data set of base classes, and the encoder of the rows."""

    sampler: Sampler  #: The protocol of the episodes, adapted to the test rows of a fixed split.
    data: Dataset  #: The evaluated data set; for a fixed split, training and test rows together.
    base_data: Dataset  #: The data set that has the base classes; it may be ``data`` itself.
    trained: TrainedEncoder | None  #: The encoder, not yet connected to rows; None if there is no encoder.
    is_trained_on_data: bool  #: Whether the encoder was trained on base classes of ``data``, with the same split.


def load_data_sources(plan: EvaluationPlan, data: Dataset | None = None) -> DataSources:
    """Load the data sets and the encoder of a plan; ``data`` is the evaluated data set, if it is already in memory.

    An InputError is raised if data or encoder cannot be loaded, or if the encoder was trained on another split of the
    same data.
    """
    with renamed_arguments(text="dataset", path="dataset"):
        data = data or load_source(plan.dataset, split_seed=plan.split_seed, image_size=plan.image_size)
    sampler = plan.sampler
    if isinstance(sampler, FixedSplit | EpisodeConfig) and plan.test_dataset is not None:
        with renamed_arguments(text="test_dataset", path="test_dataset", test="test_dataset"):
            test = load_source(plan.test_dataset, image_size=plan.image_size)
            sampler, data = sampler.join_test_set(data, test, (plan.dataset, plan.test_dataset))
    dim = data.x.shape[1]
    base = data if plan.base is None else load_base_dataset(plan.base, dim=dim, image_size=plan.image_size)
    if plan.encoder is None:
        return DataSources(sampler, data, base, None, is_trained_on_data=False)
    with renamed_arguments(path="encoder"):
        trained = load_trained_encoder(plan.encoder, dim=dim)
    training = trained.plan
    is_trained_on_data = is_same_source(training.dataset, plan.dataset)
    if is_trained_on_data and training.split_seed != plan.split_seed:
        before = "without one" if training.split_seed is None else f"with {training.split_seed}"
        got = f"{plan.split_seed}; the encoder was trained {before}"
        constraint = "be the encoder's, or it would be judged on classes that it learned"
        raise_input_error("split_seed", constraint, got, "Pass the encoder's.")
    return DataSources(sampler, data, base, trained, is_trained_on_data)


@dataclass(frozen=True, kw_only=True)
class PreparedEvaluation:
    """An evaluation that is ready to run: rows, classes, base classes and methods are loaded and checked."""

    data: Dataset  #: The data set, before encoder and normalisation.
    side: str  #: The evaluated side of the split, or "all".
    #: The number of classes of the side, including those with too few rows, plus base classes that the protocol adds.
    n_classes: int
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
    #: The encoder that embedded the rows, or None. Its ``take`` reads rows before their embedding by the indices of
    #: ``x``.
    trained: TrainedEncoder | None = None

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
    sampler, data = sources.sampler, sources.data
    training = None if sources.trained is None else sources.trained.plan
    sides = data.sides or ("all",) * data.num_classes
    side = plan.side or ("all" if data.sides is None else "novel")
    if side not in {"all", *sides}:
        got = f"{side} of {', '.join(sorted(set(data.sides or ()))) or 'no split'}"
        remedy = "Pass `split_seed` 0 for a split." if data.sides is None else "Pass one of these, or all."
        raise_input_error("side", "be a side that has classes", got, remedy)
    base_ids = _list_base_classes(sources, side, plan.normalize)
    is_generalized = isinstance(sampler, GeneralizedSampler)
    if is_generalized and not base_ids:
        remedy = "Pass `side` novel, of data with a split by class (`split_seed` 0 makes one)."
        raise_input_error("protocol", "find base classes, to be generalized", "none", remedy)
    available = AvailableInputs(
        n_base_classes=len(base_ids),
        objective=None if training is None else training.objective,
        head_n_way=None if training is None else training.head_n_way,
        way=sampler.way,
        has_texts=plan.texts is not None,
        has_unlabelled=sampler.n_unlabelled > 0,
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
    if plan.split_seed is None and data.sides is not None:
        counts = zip(zip(data.class_names, data.sides, strict=True), index_of_all.class_counts.tolist(), strict=True)
        notes += describe_class_list_difference(plan.dataset, dict(counts))
    kind = plan.normalize
    uses_base = is_generalized or any(choice.spec.uses_base for choice in methods.values())
    if kind != "cl2" and not uses_base:
        base_ids = []
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
    device = get_process_device(plan.device)
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
        trained = None  # whose rows have other indices
    class_ids, texts = data.y[pool.dataset_rows.row_indices[pool.dataset_rows.class_starts]], None
    if plan.texts is not None:
        named = [data.class_names[c] for c in class_ids.tolist()]
        texts = load_class_texts(plan.texts, dim=pool.x.shape[1], names=named).to(device)
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
    n_episodes = min(plan.n_episodes, MAX_TUNING_EPISODES)
    plan = replace(
        plan,
        methods=candidates,
        include_all=False,
        tuning_grids=(),
        reference_method=None,
        n_episodes=n_episodes,
        save_predictions=False,
    )
    if plan.test_dataset is None:
        _check_validation_classes(plan, sources)
        plan = replace(plan, side="validation")
    else:
        _check_validation_rows(plan, plan.test_dataset)
        plan = replace(plan, test_dataset=plan.validation_dataset, validation_dataset=None)
        sources = load_data_sources(plan)
    return plan, prepare_evaluation(plan, sources)


def _check_validation_rows(plan: EvaluationPlan, test_dataset: str) -> None:
    """Raise an InputError unless a fixed split has validation rows, which differ from those of ``test_dataset``."""
    if plan.validation_dataset is None:
        remedy = "Pass `validation_dataset`, other rows of the same classes, or fixed settings in `method`."
        raise_input_error("tune", "have validation rows beside those of `test_dataset`", "none", remedy)
    with renamed_arguments(text="validation_dataset", path="validation_dataset", test="validation_dataset"):
        names = test_dataset, plan.validation_dataset
        test, validation = (load_source(text, image_size=plan.image_size) for text in names)
        join_test_rows(test, validation, names)  # raises an error if they share a row


def _check_validation_classes(plan: EvaluationPlan, sources: DataSources) -> None:
    """Raise an InputError unless the split has enough validation classes, and these are not the evaluated ones."""
    sides, sampler = sources.data.sides, sources.sampler
    evaluated = plan.side or ("novel" if sides else "all")
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
    used = torch.isin(data.y, torch.tensor(class_ids)).nonzero().flatten()
    positions = torch.full((len(data.x),), -1).index_copy_(0, used, torch.arange(len(used)))
    trained = trained._replace(take=lambda rows: data.get_rows(used[rows]))
    x = embed_rows_in_batches(trained.encoder, data.get_rows, used)
    return DatasetRows(x, positions, make_row_reader(x), trained)
