"""`ProtoNetClassifier`: the scikit-learn estimator, a layer over `protonet.pipeline.TablePipeline`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _num_samples, check_is_fitted
from torch import Tensor

from protonet._text import to_printable
from protonet.embeddings.loading import EncoderName, list_encoders
from protonet.errors import InputTypeError, raise_input_error, renamed_arguments
from protonet.estimator import frames
from protonet.estimator.evaluation import CrossValidatedEstimator, print_stages
from protonet.estimator.labels import (
    apply_class_weights,
    are_booleans,
    concatenate_labels,
    encode_labels,
    from_class_names,
    normalize_weights,
    require_labels,
    split_unlabelled,
    to_class_names,
)
from protonet.estimator.rows import encode_rows, prepare_labelled_rows, validate_rows_and_labels
from protonet.files import MODEL_SUFFIXES, export_onnx
from protonet.files.metadata import TrainingMetadata
from protonet.files.model import model_to_bytes
from protonet.fit.active import Suggestion, cluster_unknown, suggest_rows
from protonet.fit.diagnostics import embed_rows
from protonet.fit.duplicates import describe_near_duplicates
from protonet.fit.search import ignore_progress
from protonet.fit.solver import TIME_LIMIT
from protonet.fit.training_set import append_class_names
from protonet.fit.uninformative import format_uninformative_note, pad_class_counts
from protonet.losses import MAX_CHUNK_ROWS
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.tables.columns.encoding import Encoding
from protonet.tables.spellings import describe_similar_names
from protonet.tables.training import TrainingTable
from protonet.ui.text import format_view_influences

#: The file that `ProtoNetClassifier.save` writes into a folder.
MODEL_FILE_NAME = "model.protonet"


class ProtoNetClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, CrossValidatedEstimator):  # type: ignore[misc]
    """Classify rows by the cosine between their embedding and the class prototypes.

    The feature maps of the embedding are selected and weighted by cross-validation; see `protonet.solve`.

    Args:
        time_limit: Maximum time of ``fit`` in seconds, >= 0.
        random_state: Seed of the initial weights and episodes of MLPs, the only random choices: an int, a
            ``RandomState``, or None for another seed in each call.
        column_kinds: The type of each column of a data frame by its name: "number", "category", "date", "text" or
            "picture" (paths of files). The types of columns that are not named are inferred from their cells.
        representation: The pretrained encoders of text and picture columns, by the names that ``fit --representation``
            takes. An encoder of texts may also be an object with a method ``encode`` that maps a list of texts to an
            array (n, width), such as a ``SentenceTransformer``. None is "auto", which uses installed encoders.
        class_weight: "balanced" gives all classes equal weight in training; a dict of weights by class (1 for others)
            multiplies the sample weights; None leaves them unchanged.
        verbose: Whether ``fit`` prints its stages with the time, and the candidate views with their weights.

    Attributes:
        classes_: (n_classes,) the labels, in ascending order.
        n_features_in_: The number of columns of X.
        feature_names_in_: The names of the columns of X, if all are strings.
        columns_: The inferred type of each column of a data frame, or the reason why it is dropped, by name.
        encoding_: The `protonet.tables.columns.encoding.Encoding` that computes features from columns; None for arrays
            without gaps, which are used as features.
        network_: The `protonet.PrototypeNetwork`, float64, with its classes in the order of ``classes_``.
        learned_unlabelled_: Whether ``fit`` learned from the unlabelled rows. It does if they lower the log-loss of
            held-out rows, or if no row can be held out.
        novel_clusters_: Clusters of unlabelled rows that may be novel classes, as lists of indices of unlabelled rows;
            the unlabelled rows of X are counted before those of ``unlabelled``.

    Sample weights apply to the losses, the prototypes and the statistics. Only their ratios within one call matter.
    A row with an integer weight counts as that many equal rows, except in the encoding of columns and in random
    samples of rows. Rows of weight 0 are dropped.
    """

    classes_: np.ndarray
    _pipeline: TablePipeline  #: The fitted pipeline, float64; its classes are ``classes_`` as text.

    def __init__(
        self,
        *,
        time_limit: float = TIME_LIMIT,
        random_state: object = 0,
        column_kinds: Mapping[str, str] | None = None,
        representation: EncoderName | Sequence[EncoderName] | None = None,
        class_weight: str | Mapping[Any, float] | None = None,
        verbose: bool = False,
    ) -> None:
        self.time_limit = time_limit
        self.random_state = random_state
        self.column_kinds = column_kinds
        self.representation = representation
        self.class_weight = class_weight
        self.verbose = verbose

    def fit(
        self, X: object, y: object, sample_weight: object = None, groups: object = None, unlabelled: object = None
    ) -> ProtoNetClassifier:
        """Fit to labelled rows and, optionally, to unlabelled rows; the order of the rows does not matter.

        Args:
            X: (n, n_features) rows: an array of numbers or a sparse matrix (which is made dense), with NaN for missing
                values; a data frame of pandas, of Polars (also a lazy one), or with the Arrow PyCapsule interface (this
                needs pyarrow); a ``datasets.Dataset``; or n texts. Columns may hold numbers, categories, booleans,
                dates, text and missing values.
            y: (n,) labels of any type that can be sorted. Rows with None or NaN are unlabelled. As in scikit-learn's
                semi-supervised estimators, so are rows with -1, if the other labels are two or more integers >= 0.
            sample_weight: (n,) >= 0, or None for 1; the weights and groups of unlabelled rows are ignored.
            groups: (n,) group labels of any type that can be sorted: in cross-validation, rows of a group are held out
                together. None for a group per row. Metadata routing needs ``set_fit_request(groups=True)``.
            unlabelled: (m, n_features) more unlabelled rows, of the same type as X.

        Returns:
            The estimator.

        Raises:
            InputError: No row is labelled, there is one class only, labels have fractions, no column is useful, two
                columns have the same name, column_kinds do not match, no weight is positive, all rows of a class are
                in one group.
            ValueError: scikit-learn rejects the arguments, for example because a number is infinite.
            MissingPackageError: The data frame is not of pandas, and pyarrow is not installed.
        """
        X, unlabelled = frames.to_rows(X), None if unlabelled is None else frames.to_rows(unlabelled, "unlabelled")
        X, y, sample_weight, groups, rest, labelled = split_unlabelled(X, y, sample_weight, groups)
        rest += [] if unlabelled is None or not _num_samples(unlabelled) else [unlabelled]
        rows = prepare_labelled_rows(self, X, y, sample_weight, groups, None)
        if len(alone := np.unique(rows.rows.labels)) < 2:
            remedy = "Add rows of another one. To start with one class and add others later, use partial_fit."
            raise_input_error("y", "name two classes at least", f"one class: {to_printable(alone[0])}", remedy)
        _warn_of_spellings(rows.rows.labels)
        weights = apply_class_weights(self.class_weight, rows.rows.labels, rows.weights)
        if labelled is not None:  # rows of reports are counted with the unlabelled ones
            positions = labelled[rows.rows.positions].tolist()
            rows = replace(rows, rows=rows.rows._replace(positions=positions, row_indices=positions))
        parts = [self._encode_rows(part, rows)[0] for part in rest]
        blocks = map(torch.from_numpy, frames.iterate_dense_blocks(parts, MAX_CHUNK_ROWS))
        self._fit_pipeline(replace(rows, weights=weights, unlabelled=blocks if parts else None), y)
        return self

    def partial_fit(
        self, X: object, y: object, classes: object = None, sample_weight: object = None
    ) -> ProtoNetClassifier:
        """Add samples of known and new classes without training: prototypes change, the embedding does not.

        If the estimator is not fitted yet, the first call fits it.

        Args:
            X: (n, n_features) rows, as in ``fit``.
            y: (n,) labels.
            classes: Labels that later calls may add, or None; classes without samples are never predicted.
            sample_weight: (n,) weights, as in ``fit``.

        Returns:
            The estimator.

        Raises:
            InputError: As in ``fit``; or X has another number of columns, or columns of other types, than in ``fit``.
        """
        first = not self.__sklearn_is_fitted__()
        require_labels(y, [] if first else self.classes_.tolist())
        rows = prepare_labelled_rows(self, X, y, sample_weight, None, None if first else self._pipeline)
        labels, later = rows.rows.labels, [] if classes is None else [np.atleast_1d(np.asarray(classes))]
        merged = np.unique(concatenate_labels([labels if first else self.classes_, labels, *later]))
        _warn_of_spellings(labels, () if first else self.classes_.tolist())
        if first:
            weights = apply_class_weights(self.class_weight, labels, rows.weights)
            self._fit_pipeline(replace(rows, weights=weights), y)
        else:
            self._pipeline.predict_logits(rows.x.numpy(), argument="X")  # raises if the scale is not that of fit
        indices, known_indices = encode_labels(labels, merged), encode_labels(self.classes_, merged)
        order = torch.full((len(merged),), -1).index_copy_(0, known_indices, torch.arange(len(self.classes_)))
        self.network_.arrange_classes(order)
        counts = pad_class_counts(self._pipeline.metadata.uninformative_counts, len(self.classes_))
        counts = torch.zeros(len(merged), dtype=torch.int64).index_copy_(0, known_indices, counts)
        if not first:
            counts += torch.bincount(indices[rows.uninformative_mask], minlength=len(merged))
            self.network_.add_samples(rows.x, indices, weights=normalize_weights(rows.weights))
        self._set_classes(merged, counts)
        return self

    def predict(self, X: object) -> np.ndarray:
        """Predict the label (n,) of each row of X (n, n_features).

        Data frames may have unknown categories and missing values; arrays may have NaN only if those of ``fit`` had.
        Rows in which each cell is missing or unknown are predicted by the class frequencies; a UserWarning counts them.

        Raises:
            InputError: As in ``partial_fit``; or a number is far beyond the scale of the training rows.
        """
        predicted = self._predict_logits(X).argmax(dim=1).numpy()  # an unfitted estimator has no classes_
        return np.asarray(self.classes_[predicted])

    def predict_proba(self, X: object) -> np.ndarray:
        """Compute class probabilities (n, n_classes) float64 of rows X, calibrated on held-out rows of ``fit``."""
        return self._predict_logits(X).softmax(dim=1).numpy()

    def decision_function(self, X: object) -> np.ndarray:
        """Compute logits (n, n_classes) float64; of two classes, the second logit minus the first (n,)."""
        logits = self._predict_logits(X).numpy()
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def transform(self, X: object) -> np.ndarray:
        """Compute unit-norm embeddings (n, embedding_dim) float64 of rows X (n, n_features)."""
        x = self._encode_rows(X)[0]
        blocks = map(torch.from_numpy, frames.iterate_dense_blocks([x], MAX_CHUNK_ROWS))
        return torch.cat([embed_rows(self.network_, block) for block in blocks]).numpy()

    def suggest(self, X: object, n: int) -> list[Suggestion]:
        """Select ``n`` rows of X (rows, n_features) to label next, with a reason for each; none without a value.

        Raises:
            InputError: As in ``predict``; or ``n`` exceeds 4096 or the number of rows with a value.
        """
        encoded, empty = self._encode_rows(X)
        x, rows = map(torch.from_numpy, (frames.to_dense(encoded), np.flatnonzero(~empty)))
        return suggest_rows(self.network_, x, n, self.classes_.tolist(), unlabelled_rows=rows)

    def _predict_logits(self, X: object) -> Tensor:
        """Compute logits (n, n_classes) float64 of rows X; sparse rows are made dense block by block."""
        x, uninformative_mask = self._encode_rows(X, keep_gaps=True)
        if uninformative_mask.any() and self._pipeline.uninformative_logits is not None:
            warnings.warn(format_uninformative_note(int(uninformative_mask.sum())), UserWarning, stacklevel=3)
        masks = (uninformative_mask[start : start + MAX_CHUNK_ROWS] for start in range(0, x.shape[0], MAX_CHUNK_ROWS))
        blocks = zip(frames.iterate_dense_blocks([x], MAX_CHUNK_ROWS), masks, strict=True)
        return torch.cat([self._pipeline.predict_logits(block, mask, argument="X") for block, mask in blocks])

    def _encode_rows(
        self, X: object, fitted: TrainingTable | None = None, *, keep_gaps: bool = False
    ) -> tuple[Any, np.ndarray]:
        """Validate rows X, and encode them as those of ``fit`` or of the table that will be fitted.

        Returns their features (n, dim), and a mask (n,) bool of rows without a known cell.
        """
        if fitted is None:
            check_is_fitted(self)
        columns = fitted or self._pipeline
        return encode_rows(validate_rows_and_labels(self, X, fitted=columns)[0], columns, keep_gaps=keep_gaps)

    def _fit_pipeline(self, rows: TrainingTable, y: object) -> None:
        """Fit the pipeline to encoded rows; the name of ``y``, if it has one, is that of the label column."""
        classes, label = np.unique(rows.rows.labels), getattr(y, "name", None)
        label = label if isinstance(label, str) else "label"
        while label in rows.column_descriptions:  # commands need distinct names
            label += "_"
        metadata = TrainingMetadata(
            label_column=label,
            dropped_columns=rows.dropped_columns,
            column_descriptions=dict(rows.column_descriptions),
            seed=self.random_state if isinstance(self.random_state, int) else None,
        )
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        progress = print_stages(self) if self.verbose else ignore_progress
        with renamed_arguments(train_loader="X"):
            pipeline, solution = TablePipeline.fit(
                rows, metadata=metadata, time_limit=self.time_limit, seed=seed, progress=progress
            )
        if self.verbose:
            print(format_view_influences(solution.view_influences, solution.candidate_losses), end="")
        note = None if rows.groups is not None else describe_near_duplicates(solution.training_set.rows, "`groups`")
        if note is not None:
            warnings.warn(note, UserWarning, stacklevel=4)
        network, names = deepcopy(pipeline.network), solution.class_names
        self._training, self._cross_validation = (solution, replace(rows, unlabelled=None)), None
        self.learned_unlabelled_ = solution.semi_supervised is not None and solution.semi_supervised.uses_unlabelled
        self.novel_clusters_ = cluster_unknown(solution)
        network.arrange_classes(torch.arange(len(classes)))  # a single class has a second, empty one
        # In float64, the probabilities of a row do not depend on the other rows of its batch, to the last digits.
        network.double()
        if not self.learned_unlabelled_:
            x, labels, weights = rows.x, rows.y, normalize_weights(rows.weights)
            if names is not None:
                x, labels, weights, *_ = append_class_names(names, x, labels, weights)
            network.set_prototypes(x, labels, weights)
        self._pipeline = replace(pipeline, network=network)
        self._set_classes(classes, torch.bincount(rows.y[rows.uninformative_mask], minlength=len(classes)))

    def _set_classes(self, classes: np.ndarray, uninformative_counts: Tensor) -> None:
        """Set the classes, and the number (n_classes,) of training rows of each class that have no known cell."""
        metadata = replace(self._pipeline.metadata, uninformative_counts=tuple(uninformative_counts.tolist()))
        self.classes_ = classes
        self._pipeline = replace(self._pipeline, classes=tuple(map(str, classes.tolist())), metadata=metadata)

    @property
    def network_(self) -> PrototypeNetwork:
        """The network, float64, with its classes in the order of ``classes_``."""
        check_is_fitted(self)
        return self._pipeline.network

    @property
    def encoding_(self) -> Encoding | None:
        """The encoding that maps columns to features; None for arrays without missing values."""
        check_is_fitted(self)
        return self._pipeline.encoding

    @property
    def columns_(self) -> dict[str, str]:
        """The inferred type of each column, or the reason why it is dropped, by name; empty for arrays."""
        check_is_fitted(self)
        return dict(self._pipeline.column_descriptions)

    def __getstate__(self) -> dict[str, object]:
        """Return the state for pickles and copies: the content of a model file, and no training rows."""
        state = dict(super().__getstate__())
        for name in ("_training", "_cross_validation"):
            state.pop(name, None)
        if self.__sklearn_is_fitted__():
            state["_pipeline"] = model_to_bytes(self._copy_for_file(self._pipeline.classes))
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a state; its model file is validated as one on the disk is."""
        content = state.get("_pipeline")
        super().__setstate__({name: value for name, value in state.items() if name != "_pipeline"})
        if content is None:
            return
        if not isinstance(content, bytes):
            got = type(content).__name__
            raise_input_error("state", "have the bytes of a model file", got, "Fit again.", kind=InputTypeError)
        pipeline = TablePipeline.load(content, argument="state", writer="ProtoNetClassifier")
        if len(pipeline.classes) != len(self.classes_):
            got = f"{len(pipeline.classes)} and {len(self.classes_)}"
            raise_input_error("state", "have as many classes as its model file", got, "Fit again.")
        network = pipeline.network.double()
        network.set_sums(network.sums, network.counts)  # prototypes in float64
        self._pipeline = self._load_encoders(pipeline)

    def _copy_for_file(self, classes: tuple[str, ...] | tuple[int, ...]) -> TablePipeline:
        """Copy the pipeline for a file, with these class names; the network is float32 but for the class sums."""
        network = deepcopy(self.network_).float()
        network.set_sums(self.network_.sums, self.network_.counts)  # the only values with more digits than float32
        metadata = replace(
            self._pipeline.metadata,
            sample_counts=tuple(network.counts.tolist()),
            has_boolean_classes=are_booleans(self.classes_),
        )
        return replace(self._pipeline, network=network, classes=classes, metadata=metadata)

    def _load_encoders(self, pipeline: TablePipeline) -> TablePipeline:
        """Load the pretrained encoders of a pipeline from a file that ``representation`` names."""
        if self.representation is None or not pipeline.has_pretrained_encoder:
            return pipeline
        return pipeline.with_loaded_encoders(list_encoders(self.representation), show_progress=bool(self.verbose))

    def save(self, path: str | Path) -> None:
        """Write a model file that `load` and the commands read.

        Nothing is pickled. Held-out rows are not stored: the command ``update`` cannot report its effect on them, and
        ``explain`` needs a labelled table.

        Args:
            path: The file, in a folder that exists. Its name ends in ``.protonet``, or in ``.safetensors`` for a larger
                one that other programs can read. Or a folder that exists: the file ``model.protonet`` is written there,
                so that `load` reads the folder, also after ``huggingface_hub`` has uploaded and downloaded it.

        Raises:
            MissingPackageError: safetensors is not installed.
            OSError: The file cannot be written.
            InputError: The name has another suffix, or the classes are not all of one type.
        """
        file = _locate_model_file(path)
        if file.suffix.lower() not in MODEL_SUFFIXES:
            must = f"end in {', '.join(MODEL_SUFFIXES)}, or be a folder that exists"
            raise_input_error("path", must, path, "Rename it, or make the folder.")
        self._copy_for_file(to_class_names(self.classes_)).save(file)

    @classmethod
    def load(
        cls, path: str | Path, *, representation: EncoderName | Sequence[EncoderName] | None = None
    ) -> ProtoNetClassifier:
        """Load a model file of `save` or of the command ``fit``. All of its content is validated.

        Args:
            path: The file, or the folder of ``model.protonet``. If the command wrote it, the estimator expects rows
                with the columns ``feature_names_in_``, in this order, and without the other columns of the training
                table.
            representation: The encoders of ``fit``, if they are objects, or in folders or files, which model files do
                not store.

        Returns:
            The fitted estimator, whose predictions equal those of the saved one, bit for bit.

        Raises:
            MissingPackageError: safetensors is not installed.
            InputError: The file is missing, damaged, not a model file, or of another format version; or the
                representation is not that of ``fit``.
        """
        pipeline = TablePipeline.load(_locate_model_file(path), writer="save_model").without_cross_validation()
        seed = pipeline.metadata.seed
        seed = seed if seed is not None and 0 <= seed < 2**32 else 0
        estimator = cls(random_state=seed, representation=representation)
        order = sorted(range(len(pipeline.classes)), key=pipeline.classes.__getitem__)
        pipeline.network.double().arrange_classes(torch.tensor(order))
        estimator._pipeline = estimator._load_encoders(pipeline)
        counts = pad_class_counts(pipeline.metadata.uninformative_counts, len(order))
        estimator._set_classes(from_class_names(pipeline.classes, pipeline.metadata)[order], counts[order])
        names = tuple(estimator.columns_) or pipeline.columns
        estimator.n_features_in_ = len(names or pipeline.n_features_per_column)
        if names is not None:
            estimator.feature_names_in_ = np.array(names, dtype=object)
        return estimator

    def export_onnx(self, path: str | Path) -> None:
        """Write an ONNX file that computes ``logits`` and ``probabilities`` (n, n_classes) float32, as ``export`` does.

        Its input is ``features`` (n, n_features); or, if columns are not all numbers without gaps, an input (n, 1) for
        each column that is used. The metadata of the file name the ``classes`` and the ``columns``.

        Args:
            path: The file, in a folder that exists.

        Raises:
            MissingPackageError: onnx is not installed.
            OSError: The file cannot be written.
            InputError: There are dates or texts, which ONNX cannot encode, or the classes are not all of one type.
        """
        model = self._copy_for_file(to_class_names(self.classes_))
        export_onnx(path, model, model.uninformative_logits)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_pipeline")

    @property
    def _n_features_out(self) -> int:
        """The number of dimensions of the embedding, for ``get_feature_names_out``."""
        return self.network_.sums.shape[1]

    def __sklearn_tags__(self) -> object:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags


def _locate_model_file(path: str | Path) -> Path:
    """Return the path of a model file, which in a folder is ``model.protonet``."""
    return Path(path) / MODEL_FILE_NAME if Path(path).is_dir() else Path(path)


def _warn_of_spellings(labels: np.ndarray, known_classes: Sequence[object] = ()) -> None:
    """Warn if new classes among labels (n,) may be spellings of known ones, or of each other."""
    for note in describe_similar_names(np.unique(labels).tolist(), known_classes):
        warnings.warn(note, UserWarning, stacklevel=3)
