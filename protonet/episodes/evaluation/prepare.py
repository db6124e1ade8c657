"""The plan of an evaluation, and the rows, classes, base classes and methods that are prepared by the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.datasets import Dataset
from protonet.datasets.benchmarks import describe_difference
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.episodes.evaluation.distributed import ProcessGroup, pick_device
from protonet.episodes.evaluation.evaluate import ProgressCallback, Scores, evaluate
from protonet.episodes.features.sources import (
    ROWS_PER_BLOCK,
    DataSources,
    RowsPlan,
    load_data,
    load_source,
    load_texts,
    normalize_rows,
)
from protonet.episodes.methods.choice import ChosenMethod, Resources, select_methods
from protonet.episodes.networks.backbones import embed_rows
from protonet.episodes.samplers.batch import BaseClasses, TrainedEncoder, make_row_reader, summarize_base
from protonet.episodes.samplers.sampler import RowPool, RowReader, Sampler
from protonet.errors import raise_input_error, renamed_arguments
from protonet.sampling import ClassIndex, index_classes

MAX_TUNING_EPISODES = 500  #: Most validation episodes on which settings are compared.


@dataclass(frozen=True)
class MethodsPlan:
    """The methods to evaluate, to tune and to compare with."""

    chosen: Sequence[ChosenMethod]  #: The methods in the order of the report.
    every: bool = False  #: Whether to evaluate all methods that can run, before ``chosen``.
    #: For each method to tune, its candidate settings. The best on validation classes is evaluated, too.
    tune: Sequence[Sequence[ChosenMethod]] = ()
    against: ChosenMethod | None = None  #: The method that all others are compared with; None compares all pairs.

    def add_tuned(self, best: Sequence[ChosenMethod]) -> MethodsPlan:
        """Add the best settings of tuned methods, and the method that others are compared with, tuned if it was."""
        chosen, against = [*self.chosen, *best], self.against
        if against is not None:
            tuned = [choice for choice in best if choice.key == against.key and not against.keywords]
            against = (tuned or [against])[0]
            chosen.append(against)
        return replace(self, chosen=chosen, against=against)


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """All settings of an evaluation."""

    rows: RowsPlan  #: The rows to classify.
    methods: MethodsPlan  #: The methods to evaluate.
    sampler: Sampler  #: The protocol, not yet adapted to the data.
    n_episodes: int  #: Largest number of episodes.
    #: Stop once the half-widths of all 95 % intervals are below this many percentage points; 0: never.
    target_half_width: float = 0.0
    seed: int = 0  #: Seed of the episodes.
    device: str = "cpu"  #: The device on which rows are embedded and classified.
    #: Whether to record the prediction and the row of each query, of episodes of equal sizes.
    records: bool = False

    def describe(self, side: str, sampler: Sampler) -> dict[str, object]:
        """Describe the settings, with the evaluated side and the adapted sampler, as JSON with command-line names."""
        against = self.methods.against
        rows = asdict(self.rows)
        if self.rows.validation_dataset is None:
            del rows["validation_dataset"]
        return {
            **rows,
            "side": side,
            "hierarchy": None,
            **sampler.describe(),
            "max_episodes": self.n_episodes,
            "target_half_width": self.target_half_width,
            "seed": self.seed,
            "tune": [[choice.name for choice in grid] for grid in self.methods.tune],
            "against": None if against is None else against.name,
            **({} if self.device == "cpu" else {"device": self.device}),
            **({"records": True} if self.records else {}),
        }


@dataclass(frozen=True, kw_only=True)
class PreparedEvaluation:
    """All inputs of an evaluation: rows, classes, base classes and methods."""

    data: Dataset  #: The data set, before encoder and normalisation.
    side: str  #: The evaluated side of the split, or "all".
    n_classes: int  #: The number of classes of the side, small or not, and of base classes that the protocol adds.
    class_ids: Tensor  #: (classes,) int64, the classes of ``data`` that episodes are drawn from.
    sampler: Sampler  #: The protocol, adapted to the data.
    pool: RowPool  #: The rows to draw episodes from.
    base: BaseClasses | None  #: The base classes, if a method uses them.
    texts: Tensor | None  #: (classes, dim) float32, embeddings of texts that name the classes.
    trained: TrainedEncoder | None  #: The encoder that embedded the rows.
    methods: dict[str, ChosenMethod]  #: The methods by name.
    notes: list[str]  #: Lines to print with the report.

    @property
    def plugins(self) -> dict[str, str]:
        """The version of each plug-in, such as a hash of its file, by name."""
        return {choice.key: choice.origin for choice in self.methods.values() if choice.origin is not None}

    @property
    def hashed_tensors(self) -> list[Tensor]:
        """All tensors other than the rows that the scores depend on."""
        means = [] if self.base is None else [self.base.mean, self.base.class_means]
        texts = [] if self.texts is None else [self.texts]
        head = [] if self.trained is None else self.trained.head.state_dict().values()
        return [*means, *texts, *self.sampler.hashed_tensors, *head]

    def evaluate(
        self,
        plan: EvaluationPlan,
        group: ProcessGroup,
        progress: ProgressCallback,
        earlier: Mapping[str, Scores] | None = None,
    ) -> dict[str, Scores]:
        """Score all methods on the episodes of a plan; arguments and result are as in `evaluate`."""
        return evaluate(
            self.pool.x,
            self.pool.by_class,
            self.methods,
            self.sampler,
            seed=plan.seed,
            n_episodes=plan.n_episodes,
            target_half_width=plan.target_half_width,
            base=self.base,
            texts=self.texts,
            trained=self.trained,
            shape=self.data.shape if self.trained is None else None,
            group=group,
            progress=progress,
            take=self.pool.take,
            earlier=earlier,
            keep_predictions=plan.records,
        )


class SourceRows(NamedTuple):
    """Rows of a data set, embedded or not."""

    x: Tensor  #: (n, dim) floating, on the plan's device unless ``read`` copies rows there.
    positions: Tensor  #: (rows of the data set,) int64, the position of each row in ``x``, or -1.
    read: RowReader | None = None  #: Reads rows of ``x``; None if ``x`` is in memory.
    #: The encoder, with a reader of the rows before their embedding, by the indices of ``x``.
    trained: TrainedEncoder | None = None

    def select(self, index: ClassIndex) -> RowPool:
        """Make a pool of the rows of some classes, with its own reader, as a method may use rows of two pools."""
        take = make_row_reader(self.x) if self.read is None else self.read
        return RowPool(self.x, take, index._replace(rows=self.positions[index.rows]), index)

    def summarize(self, index: ClassIndex) -> BaseClasses:
        """Summarise the rows of some classes as base classes."""
        pool = self.select(index)
        return summarize_base(pool.take, pool.by_class)

    def normalize(self, kind: str, mean: Tensor | None) -> SourceRows:
        """Normalise the rows by `normalize_rows`; the rows of a mapped file are normalised when they are read."""
        if kind == "none":
            return self
        if self.read is None:
            return self._replace(x=torch.cat([normalize_rows(x, kind, mean) for x in self.x.split(ROWS_PER_BLOCK)]))
        read = self.read
        return self._replace(read=lambda rows: normalize_rows(read(rows), kind, mean))


def prepare_data(plan: EvaluationPlan, sampler: Sampler, sources: DataSources) -> PreparedEvaluation:
    """Select the classes and methods of a plan, and embed and normalise their rows.

    ``sampler`` and ``sources`` are from `load_data`; methods to tune are ignored.
    """
    data, training = sources.data, None if sources.trained is None else sources.trained.plan
    sides = data.sides or ("all",) * data.num_classes
    side = plan.rows.side or ("all" if data.sides is None else "novel")
    if side not in {"all", *sides}:
        got = f"{side} of {', '.join(sorted(set(data.sides or ()))) or 'no split'}"
        remedy = "Pass `split_seed` 0 for a split." if data.sides is None else "Pass one of these, or all."
        raise_input_error("side", "be a side that has classes", got, remedy)
    base_ids = _list_base_classes(sources, side, plan.rows.normalize)
    if sampler.adds_base_classes and not base_ids:
        remedy = "Pass `side` novel, of data with a split by class (`split_seed` 0 makes one)."
        raise_input_error("protocol", "find base classes, to be generalized", "none", remedy)
    available = Resources(
        n_base=len(base_ids),
        objective=None if training is None else training.objective,
        head_way=None if training is None else training.head_way,
        way=sampler.way,
        texts=plan.rows.texts is not None,
        unlabelled=sampler.n_unlabelled > 0,
        means=sampler.adds_base_classes,
        maps=data.has_maps and training is None,
    )
    methods, notes = select_methods(plan.methods.chosen, available, every=plan.methods.every)
    chosen = [c for c, name in enumerate(sides) if side in ("all", name)]
    names = tuple(data.class_names[c] for c in chosen)
    index_of_all = index_classes(data.y)
    sampler, index, lines = sampler.choose_classes(index_of_all.take(torch.tensor(chosen)), names)
    notes += lines
    if plan.rows.split_seed is None and data.sides is not None:
        counts = dict(zip(zip(data.class_names, data.sides, strict=True), index_of_all.size.tolist(), strict=True))
        notes += describe_difference(plan.rows.dataset, counts)
    kind = plan.rows.normalize
    uses_base = sampler.adds_base_classes or any(choice.spec.uses_base for choice in methods.values())
    if kind != "cl2" and not uses_base:
        base_ids = []
    if training is not None:
        if sources.is_trained_on_data and side != "novel":
            notes.append(f"The encoder was trained or chosen on classes of side {side}: this is no test of it.")
        adapting = [name for name, choice in methods.items() if choice.spec.adapts]
        if kind != "none" and adapting:
            notes.append(f"{' and '.join(adapting)} embed rows anew, which are not normalized then.")
        if data.shape is None and training.backbone != "mlp":
            n_features = data.x.shape[1]
            notes.append(f"The encoder takes rows of {n_features} features for images, which these may not be.")
        if sampler.adds_base_classes:
            notes.append("The encoder may have learned from the queries of base classes: their accuracy flatters it.")
    is_within = sources.base is data
    device = pick_device(plan.device)
    encoder = None if sources.trained is None else sources.trained.send(device)
    rows = _open_rows(data, chosen + (base_ids if is_within else []), encoder, device)
    base, means, queries, mean = None, None, None, None
    if base_ids:
        base_rows = rows if is_within else _open_rows(sources.base, base_ids, encoder, device)
        base_index = index_classes(sources.base.y).take(torch.tensor(base_ids))
        base_index, queries = sampler.hold_out(base_index, tuple(sources.base.class_names[c] for c in base_ids))
        mean = base_rows.summarize(base_index).mean if kind == "cl2" else None
        base = base_rows.normalize(kind, mean).summarize(base_index)
        means = base.class_means
    rows = rows.normalize(kind, mean)
    base_pool = None if queries is None else rows.select(queries)
    sampler, pool = sampler.join_base(rows.select(index), base_pool, means)
    trained = None if sampler.adds_base_classes else rows.trained  # whose rows have other indices
    class_ids, texts = data.y[pool.dataset_rows.rows[pool.dataset_rows.start]], None
    if plan.rows.texts is not None:
        named = [data.class_names[c] for c in class_ids.tolist()]
        texts = load_texts(plan.rows.texts, dim=pool.x.shape[1], names=named).to(device)
    return PreparedEvaluation(
        data=data,
        side=side,
        n_classes=len(chosen) + sampler.n_base,
        class_ids=class_ids,
        sampler=sampler,
        pool=pool,
        base=base,
        texts=texts,
        trained=trained,
        methods=methods,
        notes=notes,
    )


def prepare_tuning(
    plan: EvaluationPlan, sampler: Sampler, sources: DataSources
) -> tuple[EvaluationPlan, PreparedEvaluation]:
    """Prepare an evaluation of all candidate settings on validation classes or, for a fixed split, validation rows."""
    candidates = MethodsPlan([choice for grid in plan.methods.tune for choice in grid])
    plan = replace(
        plan,
        methods=candidates,
        n_episodes=min(plan.n_episodes, MAX_TUNING_EPISODES),
        target_half_width=0.0,
        records=False,
    )
    if plan.rows.test_dataset is None:
        plan = replace(plan, rows=_select_validation(plan.rows, sampler, sources))
    else:
        plan = replace(plan, rows=_replace_test(plan.rows, sampler))
        sampler, sources = load_data(plan.rows, plan.sampler)
    return plan, prepare_data(plan, sampler, sources)


def _replace_test(rows: RowsPlan, sampler: Sampler) -> RowsPlan:
    """Replace the test rows of a fixed split by its validation rows."""
    if rows.validation_dataset is None or rows.test_dataset is None:
        remedy = "Pass `validation_dataset`, other rows of the same classes, or fixed settings in `method`."
        raise_input_error("tune", "have validation rows beside those of `test_dataset`", "none", remedy)
    with renamed_arguments(text="validation_dataset", path="validation_dataset", test="validation_dataset"):
        names = rows.test_dataset, rows.validation_dataset
        test, validation = (load_source(text, image_size=rows.image_size) for text in names)
        sampler.join_test(test, validation, names)  # raises an error if they share a row
    return replace(rows, test_dataset=rows.validation_dataset, validation_dataset=None)


def _select_validation(rows: RowsPlan, sampler: Sampler, sources: DataSources) -> RowsPlan:
    """Select the rows of the validation classes; raise an InputError if there are too few classes."""
    sides = sources.data.sides
    evaluated = rows.side or ("novel" if sides else "all")
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
    return replace(rows, side="validation")


def _list_base_classes(sources: DataSources, side: str, normalize: str) -> list[int]:
    """List the indices of the base classes in the data set that has them."""
    base = sources.base
    base_ids = [c for c, name in enumerate(base.sides or ()) if name == "base"]
    if base is not sources.data:
        return base_ids or list(range(base.num_classes))
    base_ids = base_ids if side in SPLIT_SIDES[1:] else []
    if normalize == "cl2" and not base_ids:
        remedy = "Pass `base`, `side` novel of data with a split (`split_seed` 0 makes one), or `normalize` l2."
        raise_input_error("normalize", "find base classes to centre on", "cl2 without any", remedy)
    return base_ids


def _open_rows(
    data: Dataset, class_ids: Sequence[int], trained: TrainedEncoder | None, device: torch.device
) -> SourceRows:
    """Copy rows to a device, at once or when they are read from a mapped file; or embed the rows of ``class_ids``."""
    if trained is None:
        positions = torch.arange(len(data.x))
        if data.is_plain:
            return SourceRows(data.x.to(device), positions)
        return SourceRows(data.x, positions, lambda rows: data.get_rows(rows.cpu()).to(device))
    take = make_row_reader(data.x) if data.is_plain else data.get_rows
    used = torch.isin(data.y, torch.tensor(class_ids)).nonzero().flatten()
    positions = torch.full((len(data.x),), -1).index_copy_(0, used, torch.arange(len(used)))
    trained = trained._replace(take=lambda rows: take(used[rows]))
    return SourceRows(embed_rows(trained.encoder, take, used), positions, trained=trained)
