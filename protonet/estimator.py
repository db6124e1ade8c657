"""`ProtoNetClassifier`: the scikit-learn estimator, a layer over `protonet.pipeline.TablePipeline`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state, check_X_y
from sklearn.utils.validation import _num_samples, check_is_fitted, validate_data
from torch import Tensor

from protonet._text import to_printable
from protonet.embeddings.opening import RepresentationChoice
from protonet.errors import raise_input_error
from protonet.files import MODEL_SUFFIXES
from protonet.fit.active import Suggestion, cluster_unknown, suggest_rows
from protonet.fit.crossfit import Crossfit, crossfit, measure_held_out
from protonet.fit.duplicates import describe_near_duplicates
from protonet.fit.importance import compute_importances, embed_rows
from protonet.fit.label_validation import (
    check_labels,
    check_one_kind,
    check_weights_and_groups,
    encode_labels,
    name_classes,
    normalize_weights,
    split_unlabelled,
    weigh_classes,
)
from protonet.fit.loading import Unlabelled
from protonet.fit.names import embed_class_names
from protonet.fit.search import EFFORTS, Search
from protonet.fit.solver import TIME_LIMIT, Solution
from protonet.fit.training_set import add_names
from protonet.fit.uninformative import describe_uninformative, parse_counts
from protonet.losses import CHUNK
from protonet.metrics import Metrics
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline, TrainingTable
from protonet.tables.columns.encoding import Encoding
from protonet.tables.frames import (
    Frame,
    FrameEncoding,
    array_frame,
    check_numbers,
    describe_columns,
    fit_frame,
    iter_dense,
    read_frame,
    restore_frame_encoding,
    to_dense,
)

NAME = "ProtoNetClassifier"
#: What scikit-learn's ``validate_data`` takes for labels that there are none of.
NO_LABELS = "no_validation"


class ProtoNetClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Classify by the cosine between a row's embedding and the class prototypes.

    What the embedding is made of is decided on held-out folds of the training rows; see `protonet.solve`.

    Args:
        effort: "fast" trains nothing, "default" trains if rows are many, "best" tries more and trains longer; or a
            `protonet.fit.search.Search` that says what is tried.
        time_limit: Seconds that ``fit`` may take, >= 0.
        random_state: Of the initial weights and episodes of MLPs, the only random choices: an int, a ``RandomState``,
            or None for another one each time. Without MLPs, it changes nothing.
        column_kinds: What columns of a data frame hold, where that is not seen from their cells, by name: "number",
            "category", "date", "text" or "picture" (paths). None leaves all to the cells.
        representation: What reads texts and pictures of a data frame: see ``fit --representation``; None for auto.
        class_weight: "balanced" lets all classes weigh alike in learning; a dict of classes and weights (1 for others)
            multiplies sample weights; None leaves these as they are.

    Attributes:
        classes_: (n_classes,) the labels, in ascending order.
        n_features_in_: Features per row.
        feature_names_in_: Their names, where the training rows had column names that are strings.
        columns_: By the name of each column of a data frame, what it was taken for, or why it is left out.
        encoding_: The `protonet.tables.columns.encoding.Encoding` that makes features of the columns that are used;
            None for arrays without gaps, which are their features.
        network_: The `protonet.PrototypeNetwork`, in float64, its classes in the order of ``classes_``.
        learned_unlabelled_: Whether ``fit`` learned from rows without a label: only if held-out rows that have one get
            a lower log-loss, or if no row can be held out.
        novel_clusters_: Clusters of rows that look like novel classes: their indices among the unlabelled rows, those
            in X first.
        held_out_accuracy_: The cross-validated accuracy; None if no class has two rows. It is computed on first use, in
            about the time of ``fit``. A pickle, a copy or a file knows it only if it was computed before.
        held_out_interval_: The 95 % interval of that accuracy; None in the same case.

    Sample weights are in the losses, the prototypes and the statistics; only how those of one call differ matters.
    Whole weights do what repeated rows do, to the last digits, but in the encoding and where chance repeats rows, as it
    does on few distinct values. Rows of weight 0 are left out.
    """

    classes_: np.ndarray
    _pipeline: TablePipeline  #: In float64; its classes are those of ``classes_`` as text.
    _solution: Solution | None = None  #: Of the last fit, for cross-validation; a pickle, a copy or a file has none.
    _held_out: Metrics | None = None  #: The cross-validated metrics, once they were computed.

    def __init__(
        self,
        effort: str | Search = "default",
        *,
        time_limit: float = TIME_LIMIT,
        random_state: object = 0,
        column_kinds: Mapping[str, str] | None = None,
        representation: str | Sequence[str] | None = None,
        class_weight: str | Mapping[Any, float] | None = None,
    ) -> None:
        self.effort = effort
        self.time_limit = time_limit
        self.random_state = random_state
        self.column_kinds = column_kinds
        self.representation = representation
        self.class_weight = class_weight

    def fit(
        self, X: object, y: object, sample_weight: object = None, groups: object = None, unlabelled: object = None
    ) -> ProtoNetClassifier:
        """Fit to labelled rows, and to rows without a label; the same rows in any order give the same network.

        Args:
            X: (n, n_features): an array of numbers or a sparse matrix (which is made dense), NaN for gaps; or a data
                frame of pandas, Polars or anything with the Arrow PyCapsule interface (which takes pyarrow), whose
                columns may hold numbers, categories, booleans, dates, text, and gaps.
            y: (n,) labels, of any type that can be sorted. Rows of None or NaN have none, and so have those of -1 where
                all other labels are whole numbers from 0 on, and two at least, as scikit-learn's semi-supervised
                estimators have it.
            sample_weight: (n,) >= 0, or None for 1; neither these nor groups are looked at where there is no label.
            groups: (n,) of any type that can be sorted: what is decided on rows held out, the probabilities'
                temperature too, is decided with none of a row's group among those fitted to. None for each row alone.
                With metadata routing, ``set_fit_request(groups=True)`` passes them on.
            unlabelled: (m, n_features) more rows without a label, of the same kind as X.

        Returns:
            The estimator.

        Raises:
            InputError: No row with a label; one class alone; labels with fractions; no column of use, or two of one
                name; column_kinds that do not fit; no row of positive weight; a group that holds a whole class; an
                unknown effort.
            ValueError: What scikit-learn rejects, such as an infinite number.
            MissingPackageError: A data frame is not of pandas, and pyarrow is missing.
        """
        X, y, sample_weight, groups, rest = split_unlabelled(X, y, sample_weight, groups)
        rest += [] if unlabelled is None or not _num_samples(unlabelled) else [unlabelled]
        rows = self._read(X, y, sample_weight, groups, reset=True)
        if len(alone := np.unique(rows.labels)) < 2:
            remedy = "Add rows of another one. To start with one class and add others later, use partial_fit."
            raise_input_error("y", "name two classes at least", f"one class: {to_printable(alone[0])}", remedy)
        rows = replace(rows, weights=weigh_classes(self.class_weight, rows.labels, rows.weights))
        parts = [self._encode(part, rows.frame_encoding)[0] for part in rest]
        self._fit(rows, map(torch.from_numpy, iter_dense(parts, CHUNK)) if parts else None)
        return self

    def partial_fit(
        self, X: object, y: object, classes: object = None, sample_weight: object = None
    ) -> ProtoNetClassifier:
        """Add samples, of known and of new classes, without training: prototypes move, the embedding stays.

        Args:
            X: As in ``fit``. The first call, if there was no ``fit``, is one.
            y: (n,) labels.
            classes: Labels that may come, or None; those without a sample are known, but never predicted.
            sample_weight: As in ``fit``.

        Returns:
            The estimator.

        Raises:
            InputError: As in ``fit``, another number of features, or a column that holds something else than in fit.
        """
        known = [] if classes is None else [np.asarray(classes)]
        first = not self.__sklearn_is_fitted__()
        rows = self._read(X, y, sample_weight, None, reset=first)
        labels = rows.labels
        if first:
            self._fit(rows)
            labels = labels[:0]
        every = np.concatenate([self.classes_, labels, *known])
        check_one_kind("y", every)
        merged, network = np.unique(every), self.network_
        order = torch.full((len(merged),), -1)
        indices, known_indices = encode_labels(labels, merged), encode_labels(self.classes_, merged)
        order[known_indices] = torch.arange(len(self.classes_))
        network.arrange_classes(order)
        counts = parse_counts(self._pipeline.metadata["uninformative"], len(self.classes_))
        counts = torch.zeros(len(merged), dtype=torch.int64).index_copy_(0, known_indices, counts)
        if not first:
            counts += torch.bincount(indices[rows.uninformative], minlength=len(merged))
            network.add_samples(rows.x, indices, weights=normalize_weights(rows.weights))
        self._set_classes(merged, counts)
        return self

    def predict(self, X: object) -> np.ndarray:
        """Predict the label (n,) of each row of X (n, n_features).

        Categories that ``fit`` never saw and columns of gaps alone are no errors. In arrays, NaN is one if ``fit`` had
        none. Rows without information get the class frequencies, and a UserWarning counts them.

        Raises:
            InputError: As in ``partial_fit``; or a number is far beyond the scale of the training rows.
        """
        predicted = self._predict_logits(X).argmax(dim=1).numpy()
        labels: np.ndarray = self.classes_[predicted]
        return labels

    def predict_proba(self, X: object) -> np.ndarray:
        """Compute probabilities (n, n_classes) float64, at the temperature that fits held-out rows of ``fit``."""
        return self._predict_logits(X).softmax(dim=1).numpy()

    def decision_function(self, X: object) -> np.ndarray:
        """Compute logits (n, n_classes) float64; of two classes (n,), how much higher those of the second are."""
        logits = self._predict_logits(X).numpy()
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def transform(self, X: object) -> np.ndarray:
        """Compute unit-norm embeddings (n, embedding_dim) float64 of rows X (n, n_features)."""
        x = self._encode(X, self._frame_encoding)[0]
        parts = [embed_rows(self.network_, torch.from_numpy(block)) for block in iter_dense([x], CHUNK)]
        return torch.cat(parts).numpy()

    def suggest(self, X: object, n: int) -> list[Suggestion]:
        """Select ``n`` of the rows X (rows, n_features) to label next, in order of priority, each with a reason.

        Raises:
            InputError: As in ``predict``; or ``n`` exceeds the number of rows, or 4096.
        """
        x = torch.from_numpy(to_dense(self._encode(X, self._frame_encoding)[0]))
        return suggest_rows(self.network_, x, n, self.classes_.tolist())

    def _predict_logits(self, X: object) -> Tensor:
        """Compute logits (n, n_classes) float64 of rows X, in blocks that are made dense one at a time."""
        x, uninformative = self._encode(X, self._frame_encoding)
        if uninformative.any() and self._pipeline.uninformative_logits is not None:
            warnings.warn(describe_uninformative(int(uninformative.sum())), UserWarning, stacklevel=3)
        masks = (uninformative[start : start + CHUNK] for start in range(0, x.shape[0], CHUNK))
        blocks = zip(iter_dense([x], CHUNK), masks, strict=True)
        return torch.cat([self._pipeline.predict_logits(block, mask, argument="X") for block, mask in blocks])

    def _encode(self, X: object, encoding: FrameEncoding | None) -> tuple[Any, np.ndarray]:
        """Validate rows X, and compute their features and the mask (n,) of those without information."""
        return _encode(self._check(X, encoded=encoding is not None)[0], encoding)

    def _check(
        self, X: object, y: object = NO_LABELS, *, encoded: bool = False, reset: bool = False
    ) -> tuple[Any, np.ndarray | None]:
        """Validate rows, and labels (n,) if there are any, with scikit-learn.

        Rows become a `Frame` if their columns are encoded, as ``encoded`` says of later rows. Otherwise they become an
        array or a CSR matrix, float64.
        """
        frame = read_frame(X)
        if frame is not None and (reset or encoded):
            validate_data(self, frame.original, y, reset=reset, skip_check_array=True)
            unlabelled = isinstance(y, str) and y == NO_LABELS
            labels = None if unlabelled else check_X_y(np.zeros((len(frame.columns[0]), 1)), y, estimator=self)[1]
            return frame, labels
        checks = {"accept_sparse": "csr", "dtype": np.float64, "ensure_all_finite": "allow-nan"}
        check_numbers(frame)
        checked = validate_data(self, X, y, reset=reset, **checks)
        rows, labels = checked if isinstance(checked, tuple) else (checked, None)
        gaps = int(np.isnan(rows.data if sparse.issparse(rows) else rows).sum())
        if encoded or (reset and (self.column_kinds or gaps)):
            return array_frame(to_dense(rows)), labels
        if gaps:
            remedy = "Fill them in, or fit to a data frame, or to rows with gaps: they are then filled in."
            raise_input_error("X", "have no gaps, as the rows of fit had none", f"{gaps} of NaN", remedy)
        return rows, labels

    def _read(self, X: object, y: object, sample_weight: object, groups: object, *, reset: bool) -> _LabelledRows:
        """Validate and encode the labelled rows of weight > 0; if ``reset``, fit the encoding of their columns."""
        name = getattr(y, "name", None)
        encoding = None if reset else self._frame_encoding
        rows, labels = self._check(X, y, encoded=encoding is not None, reset=reset)
        assert labels is not None
        check_labels(labels)
        chosen, weights, groups = check_weights_and_groups(labels, sample_weight, groups)
        if len(chosen) < len(labels):
            rows, labels = rows.take(chosen) if isinstance(rows, Frame) else rows[chosen], labels[chosen]
        if reset and isinstance(rows, Frame):
            encoding = fit_frame(rows, self.column_kinds, RepresentationChoice.of(self.representation))
        x, uninformative = _encode(rows, encoding)
        classes = np.unique(labels)
        return _LabelledRows(
            x=torch.from_numpy(to_dense(x)),
            y=encode_labels(labels, classes),
            classes=tuple(map(str, classes.tolist())),
            columns=None if encoding is None else encoding.used_names,
            encoding=None if encoding is None else encoding.encoding,
            weights=weights,
            groups=groups,
            labels=labels,
            uninformative=torch.from_numpy(uninformative),
            frame_encoding=encoding,
            metadata={
                **describe_columns(encoding, name if isinstance(name, str) else "label"),
                "effort": self.effort if isinstance(self.effort, str) else None,
                "seed": self.random_state if isinstance(self.random_state, int) else None,
            },
        )

    def _fit(self, rows: _LabelledRows, unlabelled: Unlabelled | None = None) -> None:
        """Fit the pipeline to labelled rows, and to blocks of features of unlabelled rows."""
        classes = np.unique(rows.labels)
        if (names := embed_class_names(rows.encoding, classes.tolist(), rows.x, rows.y)) is not None:
            rows = replace(rows, names=names, metadata=rows.metadata | {"named": names.describe(classes.tolist())})
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        pipeline, solution = TablePipeline.fit(
            rows, unlabelled=unlabelled, effort=self.effort, time_limit=self.time_limit, seed=seed
        )
        note = None if rows.groups is not None else describe_near_duplicates(solution.problem.rows, "`groups`")
        if note is not None:
            warnings.warn(note, UserWarning, stacklevel=4)
        network = deepcopy(pipeline.network)
        self._solution, self._held_out = solution, None
        self.learned_unlabelled_ = solution.pooled is not None and solution.pooled.learned
        self.novel_clusters_ = cluster_unknown(solution)
        network.arrange_classes(torch.arange(len(classes)))  # solve has two at the least
        # In float64, a row's probabilities are its own to the last digits, whatever else is in the batch.
        network.double()
        if not self.learned_unlabelled_:
            x, y, weights = rows.x, rows.y, normalize_weights(rows.weights)
            if names is not None:
                x, y, weights, *_ = add_names(names, x, y, weights)
            network.set_prototypes(x, y, weights)
        self._pipeline = replace(pipeline, network=network)
        self._set_classes(classes, torch.bincount(rows.y[rows.uninformative], minlength=len(classes)))

    def _set_classes(self, classes: np.ndarray, uninformative: Tensor) -> None:
        """Set the classes of the network, and the number (n_classes,) of rows of each class without information."""
        metadata = self._pipeline.metadata | {"uninformative": uninformative.tolist()}
        self.classes_ = classes
        self._pipeline = replace(self._pipeline, classes=tuple(map(str, classes.tolist())), metadata=metadata)

    @property
    def _frame_encoding(self) -> FrameEncoding | None:
        """The encoding of the columns, and what it says of each; None for arrays without gaps."""
        check_is_fitted(self)
        pipeline = self._pipeline
        return restore_frame_encoding(pipeline.encoding, pipeline.columns, pipeline.metadata.get("features"))

    @property
    def network_(self) -> PrototypeNetwork:
        """The network, in float64, its classes in the order of ``classes_``."""
        check_is_fitted(self)
        return self._pipeline.network

    @property
    def encoding_(self) -> Encoding | None:
        """The encoding of the columns as features; None for arrays."""
        check_is_fitted(self)
        return self._pipeline.encoding

    @property
    def columns_(self) -> dict[str, str]:
        """The inferred type of each column, as text."""
        return {} if self._frame_encoding is None else self._frame_encoding.summary

    @property
    def held_out_accuracy_(self) -> float | None:
        """The cross-validated accuracy."""
        metrics = self._measure_held_out()
        return None if metrics is None else metrics.accuracy

    @property
    def held_out_interval_(self) -> tuple[float, float] | None:
        """The 95 % interval of ``held_out_accuracy_``."""
        metrics = self._measure_held_out()
        return None if metrics is None else metrics.interval

    @property
    def feature_importances_(self) -> np.ndarray:
        """The rise of the held-out log-loss if a column of X is shuffled: ``(n_features_in_,)`` float64.

        Columns that are left out have 0. Found anew each time, as `held_out_accuracy_` is at first.

        Raises:
            AttributeError: There are no rows to hold out.
        """
        crossed, encoding, sizes = self._cross_validate(), self._frame_encoding, self._pipeline.column_sizes
        if not len(crossed.labels):
            raise AttributeError("no class has two rows, of which one could be held out")
        indices = range(len(sizes)) if encoding is None else encoding.indices
        return compute_importances(crossed, sizes, indices, self.n_features_in_)

    def _measure_held_out(self) -> Metrics | None:
        """Compute the metrics on held-out rows of the last fit, if there are any, once."""
        check_is_fitted(self)
        if self._held_out is None:
            crossed = self._cross_validate()
            if len(crossed.labels):
                self._held_out = measure_held_out(crossed)
        return self._held_out

    def _cross_validate(self) -> Crossfit:
        """Cross-validate the last fit; raise an AttributeError if its rows are not known."""
        check_is_fitted(self)
        if self._solution is None:
            raise AttributeError(
                "a pickle, a copy or a file has no training rows to hold out: read this on the fitted model first"
            )
        return crossfit(self._solution, deadline=time.monotonic() + self.time_limit)

    def __getstate__(self) -> dict[str, object]:
        """Leave the rows of ``fit`` out."""
        return {name: value for name, value in super().__getstate__().items() if name != "_solution"}

    def save(self, path: str | Path) -> None:
        """Write a model file that `load` and the commands read.

        Nothing is pickled. The network is written as float32. Held-out rows are not stored, so that ``update`` cannot
        report its effect on them, and ``explain`` needs a labelled table.

        Args:
            path: Of the file, in a folder that exists; it ends in ``.protonet`` or ``.safetensors``.

        Raises:
            MissingPackageError: safetensors is missing.
            OSError: The file cannot be written.
            InputError: Another suffix, classes neither all strings nor all whole numbers, or two columns of one name.
        """
        if Path(path).suffix.lower() not in MODEL_SUFFIXES:
            raise_input_error("path", f"end in {', '.join(MODEL_SUFFIXES)}", path, "Rename it.")
        network = deepcopy(self.network_).float()
        metadata = self._pipeline.metadata | {"samples": network.counts.tolist()}
        replace(self._pipeline, network=network, classes=name_classes(self.classes_), metadata=metadata).save(path)

    @classmethod
    def load(cls, path: str | Path) -> ProtoNetClassifier:
        """Read a model file of `save` or of the command ``fit``, trusting nothing in it.

        Args:
            path: Of the file. One of the command asks for the columns that it uses, ``feature_names_in_``, in their
                order: others of the table, such as that of the classes, are to be left out.

        Returns:
            The fitted estimator, which predicts what the saved one did, to the digits of float32.

        Raises:
            MissingPackageError: safetensors is missing.
            InputError: No file, a truncated, damaged or foreign one, or one of another version.
        """
        pipeline = TablePipeline.load(path, writer="save_model").without_cross_validation()
        effort, seed = (pipeline.metadata.get(name) for name in ("effort", "seed"))
        if not isinstance(effort, str) or effort not in EFFORTS:
            effort = "default"
        estimator = cls(effort, random_state=seed if type(seed) is int and 0 <= seed < 2**32 else 0)
        order = sorted(range(len(pipeline.classes)), key=pipeline.classes.__getitem__)
        pipeline.network.double().arrange_classes(torch.tensor(order))
        estimator._pipeline = pipeline
        counts = parse_counts(pipeline.metadata.get("uninformative"), len(order))
        estimator._set_classes(np.array(pipeline.classes)[order], counts[order])
        names = tuple(estimator.columns_) or pipeline.columns
        estimator.n_features_in_ = len(names or pipeline.column_sizes)
        if names is not None:
            estimator.feature_names_in_ = np.array(names, dtype=object)
        return estimator

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_pipeline")

    @property
    def _n_features_out(self) -> int:
        """Width of the embedding, which ``get_feature_names_out`` asks for."""
        return self.network_.sums.shape[1]

    def __sklearn_tags__(self) -> object:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags


@dataclass(frozen=True, kw_only=True, eq=False)
class _LabelledRows(TrainingTable):
    """Validated and encoded rows of ``fit`` or ``partial_fit``, float64."""

    labels: np.ndarray  #: (n,).
    uninformative: Tensor  #: (n,) bool: rows without information.
    frame_encoding: FrameEncoding | None  #: The encoding of the columns; None for arrays without gaps.


def _encode(rows: Any, encoding: FrameEncoding | None) -> tuple[Any, np.ndarray]:
    """Encode rows that `ProtoNetClassifier._check` has validated: features, and a mask (n,) of those without any."""
    if isinstance(rows, Frame) and encoding is not None:
        return encoding.encode(rows), encoding.is_uninformative(rows)
    return rows, np.zeros(rows.shape[0], bool)
