"""`TablePipeline`: a model of a table, with methods to fit, predict, evaluate, update, explain, save and load it.

The scikit-learn estimator, the commands and the servers parse input, call one of these methods, and format the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protonet._text import normalize_spelling, shorten_list
from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder
from protonet.embeddings.loading import AUTO, NONE, EncoderName, describe_encoder, get_encoder_modality, reload_encoder
from protonet.errors import raise_input_error
from protonet.files.metadata import TrainingMetadata, count_training_rows
from protonet.files.model import Model, read_model, save_model
from protonet.fit.active import Suggestion, suggest_rows
from protonet.fit.cross_validation import (
    CrossValidation,
    add_samples_to_folds,
    cross_validation_tensors,
    measure_cross_validation,
    restore_cross_validation,
    score_class_frequencies,
    score_known_class_of_held_out_rows,
)
from protonet.fit.diagnostics import RowExplanation, explain_rows
from protonet.fit.duplicates import hash_rows
from protonet.fit.names import (
    CLASS_NAMES_ONLY_SEARCH,
    NAMES_ONLY_SHARPENING,
    classify_by_names,
    describe_class_names,
    embed_class_names,
    raise_missing_labels,
)
from protonet.fit.search import FitProgress, ignore_progress
from protonet.fit.solver import TIME_LIMIT, Solution, fit_solution
from protonet.fit.uninformative import (
    compute_uninformative_logits,
    format_uninformative_note,
    mix_draws,
    pad_class_counts,
)
from protonet.metrics import calibrate_known_scores, compute_class_metrics, compute_metrics
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.encoding import list_fitted_columns
from protonet.tables.delimited import MISSING_TEXTS, parse_missing_texts
from protonet.tables.drift import DriftMonitor, monitor_drift
from protonet.tables.features import convert_to_training_formats, encode_block
from protonet.tables.table import ReadSpec, RowBlock, Table, open_table, read_table
from protonet.tables.training import TrainingTable
from protonet.views.config import raise_unless

#: Name of the tensor in a model file with the hashes of all training rows, by which ``add_samples_to_folds`` detects
#: repeated rows.
TRAINING_HASHES_ENTRY = "given"
#: Name of the tensor in a model file with the position of each held-out row in the training file.
HELD_OUT_POSITIONS_ENTRY = "positions"
#: The largest feature that is accepted, relative to the scale of the training rows; squares of larger ones overflow.
MAX_FEATURE_TO_TRAINING_SCALE = 2.0**60
#: Maximum rows of a batch. Rows are padded to a multiple of ``BATCH_ROW_MULTIPLE``, the float32 size of an AVX-512
#: vector.
PREDICTION_BATCH_ROWS, BATCH_ROW_MULTIPLE = 256, 16


@dataclass(frozen=True, kw_only=True, eq=False)
class TablePipeline(Model):
    """A fitted network with the columns, classes, cross-validation and metadata of its training table."""

    @classmethod
    def fit(
        cls,
        table: TrainingTable,
        *,
        metadata: TrainingMetadata | None = None,
        time_limit: float = TIME_LIMIT,
        seed: int = 0,
        progress: FitProgress = ignore_progress,
    ) -> tuple[TablePipeline, Solution]:
        """Fit a network to a training table, with the keyword arguments of `protonet.solve`.

        Informative class names are training samples if a pretrained encoder embeds a column. ``metadata`` are stored
        in the model file; the views and the class names are added to them.

        Returns:
            The pipeline without cross-validation, and the result of model selection, by which `cross_validate` computes
            it.

        Raises:
            InputError: No row has a label, and the class names cannot be embedded.
        """
        classes, encoding, names_only = table.classes, table.encoding, not len(table.x)
        names = embed_class_names(encoding, classes, table.x, table.y, table.descriptions)
        if names_only and names is None:
            raise_missing_labels(encoding, classes)
        solution = fit_solution(
            None if names_only else [(table.x, table.y)],
            metadata={"num_classes": max(2, len(classes))},
            time_limit=time_limit,
            search=CLASS_NAMES_ONLY_SEARCH if names_only else None,
            seed=seed,
            weights=table.weights,
            groups=table.groups,
            column_indices=None if encoding is None else encoding.feature_block_indices,
            column_spans=() if encoding is None else encoding.standalone_feature_ranges,
            progress=progress,
            unlabelled=table.unlabelled,
            names=names,
        )
        if names_only:
            solution.network.temperature.div_(1 + NAMES_ONLY_SHARPENING / len(classes))
        metadata = replace(
            metadata or TrainingMetadata(),
            view_influences=solution.view_influences,
            class_names=None if names is None else describe_class_names(names, classes),
        )
        pipeline = cls(
            network=solution.network, classes=classes, columns=table.rows.names, metadata=metadata, encoding=encoding
        )
        return pipeline, solution

    @classmethod
    def load(
        cls, source: str | Path | bytes, *, for_update: bool = False, argument: str = "path", writer: str = "fit"
    ) -> TablePipeline:
        """Load a pipeline from a model file; arguments and errors as in `protonet.files.model.read_model`."""
        return cls(**vars(read_model(source, for_update=for_update, argument=argument, writer=writer)))

    def save(self, path: str | Path) -> None:
        """Write the pipeline to a model file; errors as in `protonet.save_model`."""
        save_model(path, self)

    def with_loaded_encoders(
        self, names: Sequence[EncoderName] | None, *, show_progress: bool, use_cache: bool = True
    ) -> TablePipeline:
        """Copy the pipeline and load the pretrained encoders that text and picture columns need to encode rows.

        Args:
            names: The encoders that the user named; None for those of ``fit``.
            show_progress: Whether to show progress bars when the encoders are used.
            use_cache: Whether embeddings are read from the cache and written to it.
        """
        columns = self.fitted_columns

        def load_column_encoder(record: EncoderRecord) -> PretrainedEncoder:
            encoder = reload_encoder(record, names)
            return replace(encoder, use_cache=use_cache and encoder.use_cache)

        attached = tuple(
            column.with_loaded_encoder(load_column_encoder, show_progress=show_progress) for column in columns
        )
        column_modalities = {column.modality for column in columns if column.encoder_record is not None}
        for name in names or ():
            if name not in {AUTO, NONE} and get_encoder_modality(name) not in column_modalities:
                must = f"come with a model whose {get_encoder_modality(name)}s a pretrained encoder read in fit"
                raise_input_error(
                    "representation", must, f"{describe_encoder(name)} and another model", "Leave it out."
                )
        return self if self.encoding is None else replace(self, encoding=replace(self.encoding, columns=attached))

    @property
    def fitted_columns(self) -> Sequence[FittedColumn]:
        """The fitted columns; without an encoding, a column of numbers for each feature."""
        return list_fitted_columns(self.encoding, self.input_dim)

    @property
    def column_modalities(self) -> list[str | None]:
        """The modality of each column: "text", "picture", or None for neither."""
        return [column.modality for column in self.fitted_columns]

    @property
    def has_pretrained_encoder(self) -> bool:
        """Whether a pretrained encoder embeds a column of texts or pictures."""
        return any(column.encoder_record is not None for column in self.fitted_columns)

    @property
    def has_pictures(self) -> bool:
        """Whether the model reads pictures, from a folder or a column."""
        return "picture" in self.column_modalities

    @property
    def input_dim(self) -> int:
        """The number of features that the network takes."""
        return int(self.network.encoder.input_dim)  # type: ignore[arg-type]

    @property
    def n_features_per_column(self) -> list[int]:
        """The number of features that encode each column."""
        return [1] * self.input_dim if self.encoding is None else self.encoding.n_features_per_column

    @property
    def column_names(self) -> Sequence[str]:
        """The name of each column, such as "column 3" for the fourth column of a table without names."""
        return self.columns or [f"column {index}" for index in range(len(self.n_features_per_column))]

    @property
    def column_descriptions(self) -> Mapping[str, str]:
        """The type of each column of the training frame, or why it is dropped, by name; empty for arrays.

        Models of commands describe the columns that are used.
        """
        stored, names = self.metadata.column_descriptions, self.columns
        if self.encoding is None or names is None:
            return {}
        if {*names} <= stored.keys():
            return stored
        return {name: column.summary() for name, column in zip(names, self.encoding.columns, strict=True)}

    @property
    def missing_texts(self) -> frozenset[str]:
        """The texts that mean a missing value, in lower case, as in ``fit``; the default ones if none are stored."""
        texts = self.metadata.missing_texts
        return MISSING_TEXTS if texts is None else parse_missing_texts(texts)

    @property
    def sample_counts(self) -> list[int]:
        """The number of training rows of each class; samples that stand for embedded class names do not count."""
        return count_training_rows(self.network.counts.tolist(), self.classes, self.metadata.class_names)

    @property
    def new_row_spec(self) -> ReadSpec:
        """The specification for reading new rows: labels are optional, and columns that the model lacks are ignored."""
        names = tuple(map(normalize_spelling, self.columns or ()))  # those of data frames may have another form
        return ReadSpec(
            label_column=self.metadata.label_column,
            require_labels=False,
            columns=names if names and len(set(names)) == len(names) else self.columns,
            n_features=len(self.n_features_per_column),
            ignored_columns=self.metadata.dropped_columns,
            missing_texts=self.missing_texts,
            class_names=tuple(map(str, self.classes)),
            usual_encoding=self.metadata.text_encoding,
        )

    def open_table(self, path: Path, spec: ReadSpec, labels: Path | None = None) -> Table:
        """Open a table of new rows, to read them in blocks.

        A row is uninformative if each of its cells is missing or unknown to the model. The field ``uninformative_mask``
        of a block marks such rows. The notes of the table report cells that do not match the type of their column. At
        the end, they also report columns that drifted from ``fit``, and the number of uninformative rows.

        Args:
            path: The path of the table.
            spec: How to read the table: `new_row_spec`, or a changed copy.
            labels: The path of the labels of an NPY table; None if it has no labels.
        """
        table = self._convert_and_monitor(open_table(path, spec, labels), spec)
        return replace(table, blocks=self.mark_uninformative(table))

    def read_table(self, path: Path, spec: ReadSpec, labels: Path | None = None) -> TrainingTable:
        """Read and encode all rows of a table, with the arguments and errors of `open_table`, which reads in blocks.

        The class index of a row is -1 if it has no label, or a class that the model does not know.
        """
        table, rows = read_table(path, spec, labels)
        table = self._convert_and_monitor(replace(table, blocks=iter([rows])), spec)
        (rows,) = table.blocks
        return TrainingTable(
            rows=rows,
            x=torch.from_numpy(self.encode(rows)),
            y=self.find_classes(rows.labels) if len(rows.labels) else torch.full((len(rows.positions),), -1),
            classes=self.classes,
            encoding=self.encoding,
            uninformative_mask=torch.from_numpy(self.is_uninformative(rows)),
            notes=table.all_notes,
        )

    def _convert_and_monitor(self, table: Table, spec: ReadSpec) -> Table:
        """Copy a table so that reading it converts numbers as in ``fit``, checks column types and monitors drift."""
        table = convert_to_training_formats(table, self.encoding, decimal=spec.decimal_mark)
        monitor = DriftMonitor(self.metadata.column_statistics, self.encoding, len(self.n_features_per_column))
        return replace(table, blocks=monitor_drift(table, monitor))

    def encode(self, block: RowBlock, argument: str = "path", *, keep_gaps: bool = False) -> np.ndarray:
        """Encode the rows of a block as features (b, dim), as `protonet.tables.features.encode_block` does."""
        return encode_block(block, self.encoding, argument, keep_gaps=keep_gaps)

    def fill_gaps(self, x: np.ndarray) -> np.ndarray:
        """Replace NaN in rows x (n, dim), of `encode` with ``keep_gaps``, by the expected features."""
        return x if self.encoding is None or self.encoding.gap_filler is None else self.encoding.gap_filler.fill(x)

    def is_uninformative(self, block: RowBlock) -> np.ndarray:
        """Compute a mask (b,) bool of the rows of a block in which each cell is missing or unknown to the model."""
        n = len(block.positions)
        return np.zeros(n, bool) if self.encoding is None else self.encoding.is_uninformative(block.columns)

    def mark_uninformative(self, table: Table) -> Iterator[RowBlock]:
        """Yield copies of the blocks of a table with their field ``uninformative_mask`` set by `is_uninformative`.

        After the last block, a note with the number of uninformative rows is added to the table, if there are any.
        """
        rows = 0
        for block in table.blocks:
            yield block._replace(uninformative_mask=(mask := self.is_uninformative(block)))
            rows += int(mask.sum())
        if rows and self.uninformative_logits is not None:
            table.notes.append(format_uninformative_note(rows))

    @property
    def uninformative_logits(self) -> Tensor | None:
        """The logits (num_classes,) of rows without a known cell, by class frequencies; None for the network's."""
        counts, seen = torch.tensor(self.sample_counts), self.metadata.uninformative_counts
        if self.metadata.balanced or not bool(counts.any()):
            counts, seen = self.network.has_samples, ()
        return compute_uninformative_logits(counts, pad_class_counts(seen, len(self.classes)))

    def find_classes(self, labels: np.ndarray) -> Tensor:
        """Find the class index (n,) int64 of each label (n,), -1 if unknown; 7 and the text "7" are the same label."""
        indices = {str(name): index for index, name in enumerate(self.classes)}
        return torch.tensor([indices.get(name, -1) for name in labels.astype(str).tolist()], dtype=torch.int64)

    def class_indices(self, y: np.ndarray) -> Tensor:
        """Convert labels y (n,) to class indices (n,) int64; raise an InputError if the model does not know one."""
        indices = self.find_classes(y)
        if unknown := sorted({*y[(indices < 0).numpy()].astype(str).tolist()}):
            remedy = "Add them with protonet update."
            raise_input_error("y", "have classes that the model knows", shorten_list(map(repr, unknown), 1), remedy)
        return indices

    @torch.inference_mode()
    def predict_logits(
        self, x: np.ndarray, uninformative_mask: np.ndarray | None = None, *, argument: str = "x"
    ) -> Tensor:
        """Compute the logits (n, num_classes) of rows x (n, dim) float32 or float64.

        The logits of a row do not depend on the other rows, to the last digit.

        Args:
            x: (n, dim) features; rows with NaN, of `encode` with ``keep_gaps``, get mean probabilities of draws.
            uninformative_mask: (n,) bool, the rows that get `uninformative_logits`; None for no row.
            argument: The name of ``x`` in error messages.

        Raises:
            InputError: A feature is so large that the embedding of its row overflows.
        """
        mask = np.zeros(len(x), bool) if uninformative_mask is None else uninformative_mask
        gaps, given, x = np.isnan(x).any(axis=1) & ~mask, x, self.fill_gaps(x)
        if gaps.any() and self.encoding is not None and self.encoding.gap_filler is not None:
            logits, drawn = self.predict_logits(x, mask, argument=argument), self.encoding.gap_filler.draw(given[gaps])
            of_draws = self.predict_logits(drawn.reshape(-1, x.shape[1]), argument=argument)
            logits[torch.from_numpy(gaps)] = mix_draws(of_draws.view(*drawn.shape[:2], -1))
            return logits
        # Matrix products of few rows, and remainders of vectors, use other instructions: rows are repeated as padding.
        padded = torch.from_numpy(np.resize(x, (-(-len(x) // BATCH_ROW_MULTIPLE) * BATCH_ROW_MULTIPLE, x.shape[1])))
        logits = torch.cat([self.network(rows) for rows in padded.split(PREDICTION_BATCH_ROWS)])[: len(x)]
        max_feature = float(self.network.encoder.scale) * MAX_FEATURE_TO_TRAINING_SCALE  # type: ignore[arg-type]
        overflows = ~logits.isfinite().all(dim=1) | torch.from_numpy(np.abs(x).max(axis=1) > max_feature)
        if bool(overflows.any()):
            got = f"{np.abs(x[overflows.numpy()][0]).max():g} as the largest value of a row"
            must = "have numbers of the scale of the training data"
            raise_input_error(argument, must, got, "Correct or drop the row.")
        if mask.any() and (by_frequency := self.uninformative_logits) is not None:
            logits[torch.from_numpy(mask)] = by_frequency.to(logits)
        return logits

    @cached_property
    def cross_validation(self) -> CrossValidation | None:
        """The cross-validation of ``fit``: the held-out rows and the networks that predict them; None if not stored.

        Models of interrupted fits and of estimators do not store it, and it is only loaded with ``for_update``.
        """
        if "labels" not in self.update_state:
            return None
        try:
            cv = restore_cross_validation(self.network, self.folds, self.update_state)
            raise_unless(len(self.held_out_positions) == len(cv.labels), "held-out rows without positions")
        except ValueError as error:
            raise_input_error("model", "have the cross-validation of fit", str(error), "Fit it again.")
        return cv if len(cv.labels) else None

    @property
    def training_hashes(self) -> Tensor:
        """The hashes (n,) int64 of the training rows; empty if the model file does not store them."""
        return self._get_index_tensor(TRAINING_HASHES_ENTRY)

    @property
    def held_out_positions(self) -> Tensor:
        """The position (held_out,) int64 of each held-out row in the training file, such as its line."""
        return self._get_index_tensor(HELD_OUT_POSITIONS_ENTRY)

    def _get_index_tensor(self, name: str) -> Tensor:
        """Get the tensor ``name`` (n,) int64 of the model file; an empty tensor if the file has no valid one."""
        values = self.update_state.get(name, torch.empty(0))
        return values if values.dtype == torch.int64 and values.ndim == 1 else torch.empty(0, dtype=torch.int64)

    def format_held_out_location(self, row: int) -> str:
        """Format where held-out row number ``row``, from 0, is in the training file, such as "line 18"."""
        return str(self.metadata.position_format).replace("{}", str(int(self.held_out_positions[row])))

    def with_cross_validation(
        self, cv: CrossValidation, groups: dict[str, int], hashes: Tensor, positions: Tensor
    ) -> TablePipeline:
        """Copy the pipeline with the results of cross-validation, so that `save` stores them.

        Args:
            cv: The held-out rows and the networks that predict them.
            groups: The index of each group of rows, by the name of the group.
            hashes: (n,) int64, the hashes of all training rows by `hash_rows`.
            positions: (held_out,) int64, the position of each held-out row in the training file.
        """
        samples = replace(self, network=cv.network).sample_counts
        metadata = replace(self.metadata, sample_counts=tuple(samples), group_indices=groups)
        if len(cv.labels):
            metrics = measure_cross_validation(cv)
            scores = score_class_frequencies(torch.tensor(samples), len(cv.labels))
            stored = {
                "rows": round(float(cv.weights.sum())),
                **vars(metrics),
                "confusion": metrics.confusion.tolist(),
                "balanced_accuracy": compute_class_metrics(metrics.confusion).balanced_accuracy,
                "most_frequent_class": compute_metrics(scores, cv.labels, cv.evaluation_sample).accuracy,
            }
            known = score_known_class_of_held_out_rows(cv)
            known_scores = tuple(calibrate_known_scores(known, float(cv.known_score_offset)).tolist())
            metadata = replace(metadata, cross_validation=stored, known_scores=known_scores)
        update_state = cross_validation_tensors(cv)
        update_state |= {TRAINING_HASHES_ENTRY: hashes, HELD_OUT_POSITIONS_ENTRY: positions}
        return replace(self, network=cv.network, metadata=metadata, update_state=update_state, folds=cv.fold_models)

    def without_cross_validation(self) -> TablePipeline:
        """Copy the pipeline without the results of cross-validation, which would not hold after samples are added."""
        return replace(self, metadata=replace(self.metadata, cross_validation=None, known_scores=(), group_indices={}))

    def as_single_fold(self, features: Tensor, labels: Tensor) -> CrossValidation:
        """Make a `CrossValidation` of one fold: its held-out rows are new rows (n, dim), its model this network."""
        weights, zero = torch.ones(len(labels), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        fold, groups = torch.zeros_like(labels), torch.full_like(labels, -1)
        return CrossValidation(
            network=self.network,
            fold_models=(self.network,),
            features=features,
            labels=labels,
            weights=weights,
            fold_index=fold,
            groups=groups,
            known_score_offset=zero,
            accuracy_gain=zero.expand(2),
        )

    def update(
        self,
        x: Tensor,
        labels: np.ndarray,
        classes: tuple[str, ...] | tuple[int, ...],
        *,
        groups: Sequence[str] | None = None,
        uninformative_mask: np.ndarray,
    ) -> TablePipeline:
        """Add samples of known and new classes without training: prototypes change, the embedding does not.

        The networks are changed in place, and the result is a pipeline with these networks and all classes.

        Args:
            x: (n, dim) features.
            labels: (n,) the class name of each row.
            classes: The names of all classes, the known ones first.
            groups: (n,) the name of each row's group; None if the model has no groups.
            uninformative_mask: (n,) bool, rows in which each cell is missing or unknown to the model.
        """
        extended = replace(self, classes=classes)
        nothing = self.as_single_fold(x[:0], torch.empty(0, dtype=torch.int64))
        cv = self.cross_validation or replace(nothing, fold_models=())
        for network in (cv.network, *cv.fold_models):
            replace(self, network=network).predict_logits(x.numpy())  # raises if the embedding of a row overflows
        indices, known_groups = extended.class_indices(labels), self.metadata.group_indices
        group_ids = None if groups is None else torch.tensor([known_groups.get(name, -1) for name in groups])
        add_samples_to_folds(cv, x, indices, len(classes), group_ids)
        if uninformative_mask.any():
            counts = pad_class_counts(self.metadata.uninformative_counts, len(classes))
            counts += torch.bincount(indices[torch.from_numpy(uninformative_mask)], minlength=len(classes))
            extended = replace(extended, metadata=replace(self.metadata, uninformative_counts=tuple(counts.tolist())))
        hashes = torch.cat([self.training_hashes, hash_rows(x)])
        return extended.with_cross_validation(cv, known_groups, hashes, self.held_out_positions)

    def suggest(self, x: Tensor, n: int, names: Sequence[str], rows: Tensor) -> list[Suggestion]:
        """Suggest ``n`` of ``rows`` (m,) of x (total, dim) to label next, with reasons that use class ``names``."""
        by_name = None
        if (named := self.metadata.class_names) is not None:
            texts = named.descriptions if len(named.descriptions) == len(self.classes) else None
            by_name = classify_by_names(self.encoding, self.classes, x, texts)
        return suggest_rows(self.network, x, n, names, unlabelled_rows=rows, nearest_name=by_name)

    def explain(
        self, x: Tensor, labels: Sequence[int], generator: torch.Generator, progress: FitProgress = ignore_progress
    ) -> list[RowExplanation]:
        """Explain the predicted class indices ``labels`` (n,) of rows x (n, dim) by the held-out rows of ``fit``.

        The explanation of a row has the nearest held-out rows and the contribution of each column. To measure it,
        ``generator`` draws held-out rows that replace the cells. The list is empty without held-out rows.
        """
        if self.cross_validation is None:
            return []
        return explain_rows(self.cross_validation, x, labels, self.n_features_per_column, generator, progress)
