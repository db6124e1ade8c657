"""Infer the type of each column, and encode the rows of a table as features by one fitted column for each."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.errors import raise_input_error
from protonet.tables.columns import dates, parsing, quantities
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.category import Category
from protonet.tables.columns.gaps import GapFiller
from protonet.tables.columns.ordered import Date, Numbers, Numeric
from protonet.tables.columns.parsing import format_cells
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.scales import find_scale
from protonet.tables.columns.text import EmbeddedText, Text, count_ngrams
from protonet.tables.columns.units import normalize_cell
from protonet.views.config import UntrustedComponent, raise_unless

#: The class of every column type, by its name in model files.
COLUMN_CLASSES: dict[str, type[FittedColumn]] = {
    cls.column_type: cls for cls in (Numeric, Numbers, Category, Date, Text, EmbeddedText, Picture)
}


def list_fitted_columns(encoding: Encoding | None, n_columns: int) -> Sequence[FittedColumn]:
    """List the fitted columns of an encoding; without one, ``n_columns`` columns of numbers that are used unchanged."""
    return [Numeric("plain", 0.0, 0.0, 1.0, 0.0)] * n_columns if encoding is None else encoding.columns


@dataclass(frozen=True)
class Encoding:
    """Encodes the rows of a table as features, by one or more fitted columns.

    If all columns are numbers without missing values, they are used unchanged, because their variances may have a
    meaning for the user. Otherwise each column is encoded with a variance of the order of 1.
    """

    columns: tuple[FittedColumn, ...]  #: The fitted columns, in the order of the table.
    gap_filler: GapFiller | None = None  #: Fills cells of columns without gaps in training; None to use their medians.

    @property
    def is_fully_numeric(self) -> bool:
        """Whether all columns are numbers without missing values."""
        return all(column.is_fully_numeric for column in self.columns)

    @property
    def summary(self) -> list[str] | None:
        """A one-line summary of each column; None if all columns are plain numbers without missing values."""
        summaries = [column.summary() for column in self.columns]
        return None if set(summaries) == {Numeric.column_type} else summaries

    @property
    def n_features_per_column(self) -> list[int]:
        """The number of features of each column."""
        if self.is_fully_numeric:
            return [1] * len(self.columns)
        return [len(column.feature_name_suffixes) for column in self.columns]

    @property
    def feature_block_indices(self) -> Tensor | None:
        """The index (dim,) of the block to which each feature belongs; None if each feature is a block of its own.

        Feature maps (views) scale all features of a block by one factor. A block is a column or, for texts and
        pictures, a part of the column: the embedding of a text, its words, or an image descriptor.
        """
        sizes = (
            self.n_features_per_column
            if self.is_fully_numeric
            else [size for column in self.columns for size in column.feature_block_sizes]
        )
        return None if max(sizes) == 1 else torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

    @property
    def standalone_feature_ranges(self) -> list[tuple[int, int]]:
        """The ranges [start, end) of features that a feature map (view) may use without all others.

        The embedding of a picture column is such a range, and so is each of its descriptors. If a table has embedded
        texts and other columns, the ranges also include each of these texts, and the columns between two of them. The
        embeddings of the texts would outweigh the other columns in a view of all features.
        """
        spans: list[tuple[int, int]] = []
        split = any(column.outweighs_other_columns for column in self.columns) and len(self.columns) > 1
        first = run_start = 0
        for column, size in zip(self.columns, self.n_features_per_column, strict=True):
            standalone = column.standalone_feature_block_sizes if split or not column.outweighs_other_columns else []
            if split and standalone:
                spans += [(run_start, first)] * (first > run_start)
                run_start = first + size
            spans += itertools.pairwise(itertools.accumulate(standalone, initial=first))
            first += size
        return spans + [(run_start, first)] * (split and first > run_start)

    def feature_range(self, index: int) -> range:
        """Return the indices of the features of column ``index``, as a range."""
        first = sum(self.n_features_per_column[:index])
        return range(first, first + self.n_features_per_column[index])

    def encode(self, cells: Sequence[np.ndarray], *, keep_gaps: bool = False) -> np.ndarray:
        """Compute the features (n, sum of ``n_features_per_column``) of rows, given the cells (n,) of each column.

        The features are float32. If all columns are used unchanged, and float32 may have too few digits for them, the
        features are float64. A gap in a column that had none in training is filled by ``gap_filler``; it is NaN if
        ``keep_gaps``.
        """
        pairs = list(zip(self.columns, cells, strict=True))
        if self.is_fully_numeric:
            x = self.stack_numeric_columns([column.comparable_values(values) for column, values in pairs])
        else:
            x = np.concatenate([column.encode(values) for column, values in pairs], axis=1)
        if self.gap_filler is None:
            return x
        first = 0
        for (column, values), size, complete in zip(
            pairs, self.n_features_per_column, self.gap_filler.was_complete, strict=True
        ):
            if complete and (gaps := column.is_uninformative(values)).any():
                x[gaps, first : first + size] = np.nan
            first += size
        return x if keep_gaps else self.gap_filler.fill(x)

    def with_gap_filler(self, x: np.ndarray, cells: Sequence[np.ndarray]) -> Encoding:
        """Return a copy that fills gaps as learned from training rows: features x (n, dim), cells (n,) of columns."""
        complete = np.array(
            [
                column.modality is None and not column.is_uninformative(values).any()
                for column, values in zip(self.columns, cells, strict=True)
            ]
        )
        return replace(self, gap_filler=GapFiller.fit(x, complete))

    def is_uninformative(self, cells: Sequence[np.ndarray]) -> np.ndarray:
        """Compute a mask (n,) bool of rows whose cells (n,) of all columns are uninformative, such as missing."""
        uninformative_mask = np.ones(len(cells[0]), bool)
        # Embedded columns come last: they are slow, and few rows remain.
        pairs = sorted(zip(self.columns, cells, strict=True), key=lambda pair: pair[0].encoder_record is not None)
        for column, values in pairs:
            rows = np.flatnonzero(uninformative_mask)
            if not len(rows):
                break
            uninformative_mask[rows] = column.is_uninformative(values[rows])
        return uninformative_mask

    @staticmethod
    def stack_numeric_columns(columns: Sequence[np.ndarray]) -> np.ndarray:
        """Stack columns of numbers (n,) to features (n, columns), float64 if float32 may have too few digits."""
        exact = any(values.dtype.itemsize > (4 if values.dtype.kind == "f" else 2) for values in columns)
        return np.stack(columns, axis=1).astype(np.float64 if exact else np.float32)

    def describe_columns(self) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
        """Describe the columns for a model file: JSON values of each, and all tensors by index and name."""
        described = [{"kind": column.column_type, **column.stored_values()} for column in self.columns]
        tensors = {
            f"{index}.{name}": torch.from_numpy(values)
            for index, column in enumerate(self.columns)
            for name, values in column.stored_arrays().items()
        }
        if self.gap_filler is not None:
            tensors |= {
                f"gaps.{name}": torch.from_numpy(part) for name, part in self.gap_filler.stored_arrays().items()
            }
        return described, tensors

    @classmethod
    def restore(cls, described: Any, tensors: Mapping[str, Tensor]) -> Encoding:
        """Restore an encoding from an untrusted result of `describe_columns`; raise a ValueError if it is invalid."""
        raise_unless(isinstance(described, list) and bool(described), "an encoding without columns")
        remaining, columns = dict(tensors), []
        for index, description in enumerate(described):
            stored = UntrustedComponent(description, remaining, f"{index}.")
            column_class = COLUMN_CLASSES.get(stored.get_entry("kind", str))
            if column_class is None:
                raise ValueError("a column of an unknown kind")
            columns.append(column_class.restore(stored))
        encoding = cls(tuple(columns))
        if any(name.startswith("gaps.") for name in remaining):
            stored, dim = UntrustedComponent({}, remaining, "gaps."), sum(encoding.n_features_per_column)
            encoding = replace(encoding, gap_filler=GapFiller.restore(stored, len(columns), dim))
        raise_unless(not remaining, "tensors that belong to no column")
        return encoding


def make_encoding(columns: Iterable[FittedColumn]) -> Encoding:
    """Make the encoding of fitted columns; numbers that it uses unchanged lose their logarithmic scale."""
    encoding = Encoding(tuple(columns))
    if not encoding.is_fully_numeric:
        return encoding
    return Encoding(
        tuple(replace(column, log_unit=0.0) if isinstance(column, Numeric) else column for column in encoding.columns)
    )


class InferredType(NamedTuple):
    """The inferred type of a column: a fitted column of this type, or the reason to drop the column."""

    column: FittedColumn | None  #: The fitted column; None if the column is dropped.
    drop_reason: str = ""  #: The reason why the column is dropped; "" if it is not.
    is_text: bool = False  #: Whether the column holds free text, which a pretrained encoder can embed.

    @property
    def modality(self) -> str | None:
        """The kind of pretrained network that can embed the column: "text" or "picture"; None for other columns."""
        return "text" if self.is_text else None if self.column is None else self.column.modality


def infer_column_type(
    cells: np.ndarray, *, format_order: Sequence[str] = quantities.FORMATS_DECIMAL_POINT_FIRST
) -> InferredType:
    """Infer the type of a column from its cells (n,), and fit a column of this type, or give a reason to drop it.

    The first format of ``format_order`` wins among the number formats that match equally many cells. Columns that are
    empty, constant, identifiers of rows, dates in contradictory formats, or text without shared words are dropped.
    """
    present = cells[~parsing.is_missing(cells)]
    distinct = list(dict.fromkeys(present.tolist()))
    if not distinct:
        return InferredType(None, "empty")
    if len(distinct) == 1:
        return InferredType(None, "constant") if len(present) == len(cells) else InferredType(Category.fit(cells))
    if cells.dtype.kind == "M":
        return InferredType(Date.fit(cells))
    if cells.dtype.kind != "O":
        return InferredType(Numeric.fit(cells))
    written = list(dict.fromkeys(map(normalize_cell, distinct)))
    if numeric_format := _infer_numeric_format(written, format_order):
        return InferredType(Numeric.fit(cells, numeric_format))
    if date_format := dates.infer_date_format(written):
        return InferredType(Date.fit(cells, date_format))
    if number_formats := quantities.infer_number_formats(written, format_order):
        parts = tuple(Numeric.fit(cells, number_format) for number_format in number_formats)
        return InferredType(parts[0] if len(parts) == 1 else Numbers(parts))
    if scale := find_scale(distinct):
        return InferredType(Category.fit(cells, scale))
    if len(distinct) <= max_category_levels(distinct, len(present)) and not are_sentences(distinct, present.tolist()):
        return InferredType(Category.fit(cells))
    if dates.are_dates_in_any_format(distinct):
        return InferredType(None, "dates in more than one order of day and month")
    if len(distinct) == len(present) and are_identifiers(distinct):
        presence = Category.fit(cells)  # whether a row has an identifier may be informative
        if presence.levels == ("",):
            return InferredType(presence)
        return InferredType(None, "a different code in each row")
    text = Text.fit(cells)
    if text.feature_name_suffixes:
        return InferredType(text, is_text=True)
    shared = set.intersection(*(set(count_ngrams(cell)) for cell in distinct))
    reason = "text with the same words in every row" if shared else "text in which no two rows share a word"
    return InferredType(None, reason, is_text=True)


def _infer_numeric_format(distinct: Sequence[str], format_order: Sequence[str], *, is_user_type: bool = False) -> str:
    """Infer the format of numbers, intervals or durations; if not ``is_user_type``, not of codes and times of day.

    Returns "" for cells of other formats.
    """
    if numeric_format := quantities.infer_numeric_format(distinct, allow_codes=is_user_type, format_order=format_order):
        return numeric_format
    if interval_format := quantities.infer_interval_format(distinct, format_order):
        return interval_format
    return "duration" if quantities.are_durations(distinct, allow_times_of_day=is_user_type) else ""


#: Maximum number of distinct cells of a column of categories, even if rows are few.
TYPE_MAX_CATEGORY_LEVELS = 5
#: Minimum median number of words per distinct cell of a column of sentences.
MIN_WORDS_PER_TEXT = 3


def max_category_levels(distinct: Sequence[str], n: int) -> float:
    """Compute the maximum number of ``distinct`` cells of a column of categories with n non-missing cells."""
    # Maximum number of distinct cells per non-missing cell of a column of categories. The larger of both maxima holds.
    max_category_levels_per_row = 0.5
    # The same two maxima for short cells, both of which must hold: of ten rows, eight cities are still categories.
    max_short_levels = 10
    max_short_levels_per_row = 0.8
    maximum = max(TYPE_MAX_CATEGORY_LEVELS, max_category_levels_per_row * n)
    if median_word_count(distinct) >= MIN_WORDS_PER_TEXT:
        return maximum
    return max(maximum, min(max_short_levels, max_short_levels_per_row * n))


#: Minimum fraction of distinct cells with a digit in a column of identifiers.
MIN_IDENTIFIER_DIGIT_FRACTION = 0.5


def is_free_text(cells: np.ndarray, *, is_only_column: bool) -> bool:
    """Test whether a column (n,) of few cells, inferred as categories, is free text, as no cell repeats another one.

    Cells of several words are free text. So are three single words or more if the table has no other column. Cells with
    digits may be codes, and a column of missing cells tells where it has none.
    """
    present = format_cells(cells[~parsing.is_missing(cells)]).tolist()
    n, with_digits = len(present), sum(any(map(str.isdigit, cell)) for cell in present)
    if len(set(present)) < n or 2 * n < len(cells) or with_digits > MIN_IDENTIFIER_DIGIT_FRACTION * n:
        return False
    return median_word_count(present) > 1 or (is_only_column and n > 2)


def are_identifiers(distinct: Sequence[str]) -> bool:
    """Test whether cells are codes that say nothing: with digits, without spaces, decimals or shared prefixes.

    Few prefixes before a separator, as in A-001 and B-002, may tell classes.
    """
    min_fraction = MIN_IDENTIFIER_DIGIT_FRACTION * len(distinct)
    max_prefixes = len(distinct) / 4
    prefixes = {match[0] for cell in distinct if (match := re.match(r"[^\W\d_]+(?=[\W_])", cell))}
    with_prefix = sum(bool(re.match(r"[^\W\d_]+[\W_]", cell)) for cell in distinct)
    has_prefixes = with_prefix > min_fraction and 1 < len(prefixes) <= max_prefixes
    decimals = sum(bool(re.search(r"(?<![\d.])\d+[.,]\d+(?![\d.])", cell)) for cell in distinct)
    with_digits = sum(any(map(str.isdigit, cell)) for cell in distinct)
    has_spaces = any(" " in cell for cell in distinct)
    return not has_spaces and with_digits > min_fraction and decimals <= min_fraction and not has_prefixes


def find_useless_names(
    fitted: Mapping[str, InferredType],
    columns: Mapping[str, np.ndarray],
    column_types: Mapping[str, str],
    labels: np.ndarray | None,
) -> dict[str, InferredType]:
    """Find the columns of proper names; return them as dropped if they do not tell the labels (n,) of held-out rows.

    The result is empty if the table has no other column. Columns with a type of the user are kept.
    """
    reason = "names, which differ in nearly every row and do not tell the class (`column_type` NAME=text keeps them)"
    names = {
        name: column
        for name, (column, _, is_text) in fitted.items()
        if is_text and column and name not in column_types and are_names(format_cells(columns[name]).tolist())
    }
    if not names or not any(column is not None and name not in names for name, (column, *_) in fitted.items()):
        return {}
    parts = [column.encode(columns[name]) for name, column in names.items()]
    candidates = [*parts, np.concatenate(parts, axis=1)]  # one may be drowned by the others, or several add up
    useful = labels is not None and any(predicts_labels(x, labels) for x in candidates)
    return {} if useful else dict.fromkeys(names, InferredType(None, reason))


def predicts_labels(x: np.ndarray, labels: np.ndarray) -> bool:
    """Test whether features (n, dim) predict the labels (n,) of left-out rows better than chance, by ridge regression.

    Source: Allen, "The relationship between variable selection and data augmentation" (1974), for the left-out errors.
    """
    max_rows, min_deviations = 1000, 1.0  # exceeded by 4 % of 80 columns of random names of 15 rows
    rows = np.flatnonzero(labels.astype(str) != "")
    rows = rows[:: max(1, -(-len(rows) // max_rows))]
    classes, y = np.unique(labels[rows], return_inverse=True)
    if len(classes) < 2:
        return False
    centred = (x[rows] - x[rows].mean(axis=0)).astype(np.float64)
    gram = centred @ centred.T
    hat = np.linalg.solve(gram + (np.trace(gram) / len(rows) + 1e-12) * np.eye(len(rows)), gram)
    targets = np.eye(len(classes))[y] - np.bincount(y) / len(rows)
    leverage = np.diag(hat) + 1 / len(rows)  # of a model with an intercept
    left_out = targets - (targets - hat @ targets) / (1 - leverage)[:, None]
    chance = np.bincount(y).max() / len(rows)
    accuracy = (left_out.argmax(axis=1) == y).mean()
    return bool(accuracy > chance + min_deviations * np.sqrt(chance * (1 - chance) / len(rows)))


def are_names(cells: Sequence[str]) -> bool:
    """Test whether cells are proper names: few words without digits, capitalised, nearly all distinct, few shared."""
    min_distinct_fraction, max_words, min_name_fraction, max_shared_fraction = 0.9, 4, 0.8, 0.5
    present = [cell for cell in cells if cell]
    words = [[word for word in re.split(r"[\s,]+", cell) if len(word) > 1] for cell in present]
    counts = Counter(word.casefold() for row in words for word in set(row))
    # Codes with digits are no names: their parts may say something, unless `are_identifiers`.
    n_named = sum(all(word[0] != word[0].lower() and not any(map(str.isdigit, word)) for word in row) for row in words)
    min_rows = max(3, 0.08 * len(present))  # with a word, such as a make of cars; fewer share a first name by chance
    n_shared = sum(any(counts[word.casefold()] >= min_rows for word in row) for row in words)
    return (
        len(set(present)) >= min_distinct_fraction * len(present)
        and max(map(len, words), default=max_words + 1) <= max_words
        and n_named >= min_name_fraction * len(present)
        and n_shared <= max_shared_fraction * len(present)
    )


def median_word_count(cells: Sequence[object]) -> int:
    """Compute the (upper) median number of words of cells."""
    return sorted(len(str(cell).split()) for cell in cells)[len(cells) // 2]


def are_sentences(distinct: Sequence[object], cells: Sequence[object]) -> bool:
    """Test whether non-missing cells are sentences: several words each, and too many occur once to be categories."""
    # Minimum fraction of cells of a column of sentences that no other cell repeats.
    min_unique_sentence_fraction = 0.2
    if median_word_count(distinct) < MIN_WORDS_PER_TEXT:
        return False
    unique = sum(count == 1 for count in Counter(cells).values())
    has_many = len(distinct) > TYPE_MAX_CATEGORY_LEVELS
    min_unique = min_unique_sentence_fraction * len(cells)
    return (has_many and unique >= min_unique) or unique == len(cells)


def fit_column_as(
    name: str,
    column_type: str,
    cells: np.ndarray,
    argument: str = "column_type",
    *,
    has_text_encoder: bool = False,
    format_order: Sequence[str] = quantities.FORMATS_DECIMAL_POINT_FIRST,
) -> InferredType:
    """Fit a column of the type of ``COLUMN_TYPES`` that the user has set to cells (n,).

    Texts without shared words are only accepted if ``has_text_encoder``. Raises an InputError, with the names of the
    column and of the ``argument``, if the column is empty or its cells are not of this type.
    """
    distinct = list(dict.fromkeys(cells[~parsing.is_missing(cells)].tolist()))
    text = parsing.format_cells(cells)
    if distinct and column_type == "picture" and cells.dtype.kind == "O":
        return InferredType(Picture())
    if distinct and column_type == "category":
        return InferredType(
            Category.fit(cells, find_scale(list(map(str, distinct))) if cells.dtype.kind == "O" else "")
        )
    if distinct and column_type == "text" and ((fitted := Text.fit(text)).feature_name_suffixes or has_text_encoder):
        return InferredType(fitted, is_text=True)
    if distinct and column_type == "date":
        if cells.dtype.kind == "M":
            return InferredType(Date.fit(cells))
        if date_format := dates.infer_date_format(map(normalize_cell, map(str, distinct))):
            return InferredType(Date.fit(text, date_format))
    if distinct and column_type == "number" and cells.dtype.kind != "M":
        if cells.dtype.kind != "O":
            return InferredType(Numeric.fit(cells))
        written = list(map(normalize_cell, distinct))
        if numeric_format := _infer_numeric_format(written, format_order, is_user_type=True):
            return InferredType(Numeric.fit(cells, numeric_format))
        if number_formats := quantities.infer_number_formats(written, format_order):
            return InferredType(Numbers(tuple(Numeric.fit(cells, name) for name in number_formats)))
    got = f"{name} with cells such as {str(distinct[0])[:50]!r}" if distinct else f"{name}, which is empty"
    return raise_input_error(argument, f"name a column that holds a {column_type}", got, "Name another type, or none.")
