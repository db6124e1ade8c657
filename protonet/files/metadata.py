"""Metadata of a model file: how the model was trained, and what its table was like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from protonet._io import JsonDict

#: Numbers of rows are below this, so that every program that reads JSON keeps their digits.
MAX_COUNT = 2**53


@dataclass(frozen=True, kw_only=True)
class ClassNameMetadata:
    """The class names whose embeddings are training samples."""

    classes: tuple[str | int, ...]  #: The classes with an embedded name.
    weight: float  #: The number of samples that each name counts as, >= 0.
    descriptions: tuple[str, ...] = ()  #: The description of each class of the model, or nothing.

    def __post_init__(self) -> None:
        _raise_unless(0 <= self.weight < 2**31, "class_names.weight")


@dataclass(frozen=True, kw_only=True)
class TrainingMetadata:
    """How a model was trained, and what its training table was like; fields that are not known have their default."""

    label_column: str = "label"  #: The name of the column of labels.
    seed: int | None = None  #: The seed of the fit.
    time_limit: float | None = None  #: The time limit of the fit in seconds.
    balanced: bool = False  #: Whether all classes had equal weight.
    group_column: str | None = None  #: The column whose equal cells keep rows in one fold.
    id_column: str | None = None  #: The column that predictions repeat.
    dropped_columns: tuple[str, ...] = ()  #: The columns of the training table that the model does not use.
    missing_texts: tuple[str, ...] | None = None  #: The texts that mean a missing value; None for the usual ones.
    text_encoding: str | None = None  #: The encoding of the training table, if it was text that is not Unicode.
    position_format: str | None = None  #: A format for positions of training rows, such as "line {}".
    sample_counts: tuple[int, ...] = ()  #: The number of training rows of each class.
    uninformative_counts: tuple[int, ...] = ()
    """The number of training rows of each class without a known cell. Missing numbers at the end are 0."""
    group_indices: dict[str, int] = field(default_factory=dict)  #: The index of each group of rows by its name.
    class_names: ClassNameMetadata | None = None  #: The class names that are training samples.
    column_statistics: JsonDict | None = None
    """The result of `protonet.tables.drift.compute_column_statistics`, which `DriftMonitor` validates."""
    column_descriptions: dict[str, str] = field(default_factory=dict)  #: A description of each column of a data frame.
    has_boolean_classes: bool = False  #: Whether the class names "False" and "True" are booleans.
    view_influences: dict[str, float] = field(default_factory=dict)
    """The influence of each view on the predictions by name; they sum to 1."""
    cross_validation: JsonDict | None = None  #: The metrics of cross-validation, as ``info --json`` shows them.
    known_scores: tuple[float, ...] = ()
    """Calibrated scores that held-out rows are of a known class, from which the threshold of unknown rows follows."""

    def __post_init__(self) -> None:
        for name in ("sample_counts", "uninformative_counts"):
            _raise_unless(all(0 <= count < MAX_COUNT for count in getattr(self, name)), name)
        _raise_unless(self.cross_validation is None or _are_metrics(self.cross_validation), "cross_validation")

    @classmethod
    def from_json(cls, value: object) -> TrainingMetadata:
        """Build metadata from the entry of an untrusted file.

        Raises:
            ValueError: The entry is not a dict, or has an unknown or an invalid entry.
        """
        metadata: TrainingMetadata = _convert(value, cls, "metadata")
        return metadata

    def to_json(self) -> JsonDict:
        """Convert metadata to values that JSON can hold; fields with their default are left out."""
        default = asdict(TrainingMetadata())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


#: The types of the fields of both records by name.
FIELD_TYPES: dict[Any, dict[str, Any]] = {
    record: get_type_hints(record) for record in (ClassNameMetadata, TrainingMetadata)
}


def count_training_rows(
    counts: Sequence[int], classes: Sequence[str | int], names: ClassNameMetadata | None
) -> list[int]:
    """Compute the number of training rows of each class, without the samples that an embedded class name stands for.

    In a model of texts, the embedding of a class name may be added to its prototype with the weight of some samples.
    """
    if names is None:
        return list(counts)
    less = round(names.weight)
    return [max(0, rows - less * (name in names.classes)) for name, rows in zip(classes, counts, strict=True)]


def _are_metrics(metrics: JsonDict) -> bool:
    """Test whether the metrics of cross-validation have the entries and types that commands show."""
    required = ("rows", "accuracy", "log_loss", "calibration_error")
    intervals = [value for name, value in metrics.items() if name.endswith("interval")]
    return (
        all(isinstance(metrics.get(name), int | float) for name in required)
        and "interval" in metrics
        and all(isinstance(ends, list | tuple) and [type(end) for end in ends] == [float] * 2 for ends in intervals)
    )


def _raise_unless(condition: bool, name: str) -> None:
    """Raise a ValueError about the entry ``name`` of a file unless a condition holds."""
    if not condition:
        raise ValueError(f"metadata with an invalid entry {name}")


def _convert(value: object, hint: Any, name: str) -> Any:
    """Convert a JSON value to the annotated type of a field; raise a ValueError that names an entry that does not fit.

    Types are those of the fields above: simple ones, unions, tuples of one type, dicts with text keys, dataclasses.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        if value is None and NoneType in arguments:
            return None
        inner = [argument for argument in arguments if argument is not NoneType]
        simple = [argument for argument in inner if type(value) is argument]
        return _convert(value, simple[0] if simple else inner[0], name)
    if origin is tuple:
        _raise_unless(isinstance(value, list | tuple), name)
        return tuple(_convert(item, arguments[0], name) for item in value)  # type: ignore[attr-defined]
    if origin is dict:
        _raise_unless(isinstance(value, dict) and all(type(key) is str for key in value), name)
        return {key: _convert(item, arguments[1], name) for key, item in value.items()}  # type: ignore[attr-defined]
    if hint in FIELD_TYPES:
        hints = FIELD_TYPES[hint]
        _raise_unless(isinstance(value, dict), name)
        assert isinstance(value, dict)
        _raise_unless(value.keys() <= hints.keys(), str(next(iter(value.keys() - hints.keys()), name)))
        try:
            return hint(**{key: _convert(item, hints[key], key) for key, item in value.items()})
        except TypeError:
            raise ValueError(f"metadata with an incomplete entry {name}") from None
    if hint is float and type(value) is int:
        _raise_unless(abs(value) < MAX_COUNT, name)  # larger integers may not fit in a float
        return float(value)
    _raise_unless(hint is Any or type(value) is hint, name)
    return value
