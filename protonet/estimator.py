"""ProtoNetClassifier: the solver with scikit-learn's face."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_consistent_length, check_random_state, check_X_y, column_or_1d
from sklearn.utils.validation import _check_sample_weight, _num_samples, check_is_fitted, validate_data
from torch import Tensor

from protonet._text import to_printable
from protonet._validation import check_groups
from protonet.embeddings.opening import Selection
from protonet.errors import raise_input_error
from protonet.fit.active import Suggestion, cluster_unknown, suggest_rows
from protonet.fit.crossfit import crossfit, measure_held_out
from protonet.fit.importance import compute_importances
from protonet.fit.label_validation import (
    check_labels,
    check_one_kind,
    encode_labels,
    name_classes,
    normalize_weights,
    split_unlabelled,
    weigh_classes,
)
from protonet.fit.names import embed_class_names
from protonet.fit.search import EFFORTS, Search
from protonet.fit.solver import TIME_LIMIT, Solution
from protonet.fit.training_set import add_names
from protonet.fit.uninformative import parse_counts, predict_frequencies
from protonet.losses import CHUNK
from protonet.metrics import Metrics
from protonet.network import PrototypeNetwork
from protonet.pipeline import TablePipeline
from protonet.tables.columns.encoding import Encoding
from protonet.tables.frames import (
    Frame,
    FrameEncoding,
    array_frame,
    encode_frame,
    fit_frame,
    is_uninformative,
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
        effort: "fast" takes closed forms alone, "default" also trains, "best" tries more and trains for longer; or a
            `protonet.fit.search.Search` that says what is tried.
        time_limit: Seconds that ``fit`` may take, >= 0.
        random_state: Of folds, initial weights and episodes: an int, a ``RandomState``, or None for another one each
            time.
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
        held_out_accuracy_: Which share of the rows of ``fit`` is right where models fitted without them judge, one for
            each fold; None where no class has two rows. Found when it is first asked for, in about the time that
            ``fit`` took, from the rows: it is not known of a pickle, a copy or a file, unless it was asked for before.
        held_out_interval_: Of that accuracy, 95 %; None in the same case.

    Sample weights are in the losses, the prototypes and the statistics; only how those of one call differ matters.
    Whole weights do what repeated rows do, to the last digits, but in the encoding. Rows of weight 0 are left out.
    """

    classes_: np.ndarray
    network_: PrototypeNetwork
    _taken: FrameEncoding | None
    _solution: Solution | None = None  #: Of the last fit: what is held out of its rows.
    _held_out: Metrics | None = None  #: What rows held out say, once somebody has asked, if there are any.
    _label: str  #: What the labels are called.
    _uninformative: Tensor  #: (n_classes,) int64, how many rows of each class had no information.

    def __init__(
        self,
        effort: str | Search = "default",
        *,
        time_limit: float = TIME_LIMIT,
        random_state: Any = 0,
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
        self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None, unlabelled: Any = None
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
        if len(alone := np.unique(rows[1])) < 2:
            remedy = "Add rows of another one. partial_fit begins with one, where others will come."
            raise_input_error("y", "name two classes at least", f"one class: {to_printable(alone[0])}", remedy)
        rows = (*rows[:2], weigh_classes(self.class_weight, rows[1], rows[2]), *rows[3:])
        self._fit(*rows, [self._encode(self._check(part, reset=False)[0]) for part in rest])
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> ProtoNetClassifier:
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
        first = not hasattr(self, "network_")
        rows, labels, weights, _, uninformative = self._read(X, y, sample_weight, None, reset=first)
        if first:
            self._fit(rows, labels, weights, None, uninformative)
            rows, labels, uninformative = rows[:0], labels[:0], uninformative[:0]
        every = np.concatenate([self.classes_, labels, *known])
        check_one_kind("y", every)
        merged = np.unique(every)
        order = torch.full((len(merged),), -1)
        numbers, known_numbers = encode_labels(labels, merged), encode_labels(self.classes_, merged)
        order[known_numbers] = torch.arange(len(self.classes_))
        self.network_.arrange_classes(order)
        counts = torch.bincount(numbers[uninformative], minlength=len(merged))
        self._uninformative = counts.index_add_(0, known_numbers, self._uninformative)
        if len(rows):
            self.network_.add_samples(rows, numbers, weights=normalize_weights(weights))
        self.classes_ = merged
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the label (n,) of each row of X (n, n_features).

        Categories that ``fit`` never saw and columns of gaps alone are no errors. In arrays, NaN is one if ``fit`` had
        none. Rows without information get the class frequencies, and a UserWarning counts them.

        Raises:
            InputError: As in ``partial_fit``.
        """
        predicted = self._compute(X).argmax(axis=1)
        labels: np.ndarray = self.classes_[predicted]
        return labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities (n, n_classes) float64, at the temperature that fits rows held out of ``fit``."""
        return torch.from_numpy(self._compute(X)).softmax(dim=1).numpy()

    def decision_function(self, X: Any) -> np.ndarray:
        """Return logits (n, n_classes) float64; of two classes (n,), by how much the second one's are higher."""
        logits = self._compute(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def transform(self, X: Any) -> np.ndarray:
        """Return unit-norm embeddings (n, embedding_dim) float64 of rows X (n, n_features)."""
        return self._compute(X, embed=True)

    def suggest(self, X: Any, n: int) -> list[Suggestion]:
        """Select a batch of rows to label next, with the reasons.

        Args:
            X: (rows, n_features): rows without a label.
            n: How many to choose, at least 1, and at most as there are and as ``protonet.fit.active.RULES.max_rows``.

        Returns:
            The number of each row, from 0, and the reason, in words: the row to label first first. ``partial_fit``
            takes their labels, or ``fit`` with the others'.

        Raises:
            InputError: As in ``predict``; or more rows asked for than there are.
        """
        check_is_fitted(self)
        x = to_dense(self._encode(self._check(X, reset=False)[0]))
        return suggest_rows(self.network_, torch.from_numpy(x), n, self.classes_.tolist())

    def _compute(self, X: Any, *, embed: bool = False) -> np.ndarray:
        """Return logits, or embeddings, of rows X, in blocks that are made dense one at a time."""
        check_is_fitted(self)
        rows = self._check(X, reset=False)[0]
        x, network = self._encode(rows), self.network_
        with torch.no_grad():
            blocks = (torch.from_numpy(to_dense(x[first : first + CHUNK])) for first in range(0, x.shape[0], CHUNK))
            found = torch.cat([network.embed(block) if embed else network(block) for block in blocks])
        if not embed:
            predict_frequencies(found, is_uninformative(rows, self._taken), network.counts, self._uninformative)
        return found.numpy()

    def _check(self, X: Any, y: Any = NO_LABELS, *, reset: bool) -> tuple[Any, np.ndarray | None]:
        """Return rows, and labels (n,) where there are any, once scikit-learn has checked them.

        Rows are a `Frame` where their columns are, or have to be, encoded; otherwise an array or a CSR matrix, float64.
        """
        encoded = not reset and self._taken is not None
        frame = read_frame(X)
        if frame is not None and (reset or encoded):
            validate_data(self, frame.original, y, reset=reset, skip_check_array=True)
            if isinstance(y, str) and y == NO_LABELS:
                return frame, None
            return frame, check_X_y(np.zeros((len(frame.columns[0]), 1)), y, estimator=self)[1]
        checks = {"accept_sparse": "csr", "dtype": np.float64, "ensure_all_finite": "allow-nan"}
        found = validate_data(self, X, y, reset=reset, **checks)
        rows, labels = found if isinstance(found, tuple) else (found, None)
        gaps = int(np.isnan(rows.data if sparse.issparse(rows) else rows).sum())
        if encoded or (reset and (self.column_kinds or gaps)):
            return array_frame(to_dense(rows)), labels
        if gaps:
            remedy = "Fill them in, or fit to a data frame, or to rows with gaps: they are then filled in."
            raise_input_error("X", "have no gaps, as the rows of fit had none", f"{gaps} of NaN", remedy)
        return rows, labels

    def _encode(self, rows: Any) -> Any:
        """Return the features (n, features) of rows that `_check` returned."""
        if isinstance(rows, Frame):
            assert self._taken is not None  # fit has seen frames
            return encode_frame(rows, self._taken)
        return rows

    def _read(
        self, X: Any, y: Any, sample_weight: Any, groups: Any, *, reset: bool
    ) -> tuple[Tensor, np.ndarray, Tensor | None, Tensor | None, Tensor]:
        """Return features (n, features) float64, labels, weights, groups and uninformative (n,) of rows of weight > 0.

        With ``reset``, columns are taken for something.
        """
        name = getattr(y, "name", None)
        rows, y = self._check(X, y, reset=reset)
        check_labels(y)
        weights = None
        if groups is not None:
            groups = np.unique(column_or_1d(groups), return_inverse=True)[1]
            check_consistent_length(y, groups)
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, y, dtype=np.float64, ensure_non_negative=True)
            chosen = np.flatnonzero(weights)
            if not len(chosen):
                raise_input_error(
                    "sample_weight", "have a weight above 0", "0 for every row", "Pass None to weigh all alike."
                )
            rows = rows.take(chosen) if isinstance(rows, Frame) else rows[chosen]
            y, weights = y[chosen], torch.from_numpy(weights[chosen] / weights.max())
            groups = None if groups is None else groups[chosen]
        if groups is not None:
            check_groups("groups", groups, y)
        if reset:
            kinds, selection = self.column_kinds, Selection.of(self.representation)
            self._taken = fit_frame(rows, kinds, selection) if isinstance(rows, Frame) else None
            self._label = name if isinstance(name, str) else "label"
        features = torch.from_numpy(to_dense(self._encode(rows)))
        groups = None if groups is None else torch.from_numpy(groups)
        return features, y, weights, groups, is_uninformative(rows, self._taken)

    def _fit(
        self,
        rows: Tensor,
        labels: np.ndarray,
        weights: Tensor | None,
        groups: Tensor | None,
        uninformative: Tensor,
        unlabelled: Sequence[Any] = (),
    ) -> None:
        """Fit to rows (n, n_features), labels, weights, groups and uninformative (n,), and to rows without a label."""
        classes = np.unique(labels)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        numbers = encode_labels(labels, classes)
        self._uninformative = torch.bincount(numbers[uninformative], minlength=len(classes))
        pool = map(torch.from_numpy, iter_dense(unlabelled, CHUNK)) if unlabelled else None
        names = embed_class_names(self.encoding_, classes.tolist(), rows, numbers)
        pipeline, solution = TablePipeline.fit(
            rows,
            numbers,
            tuple(map(str, classes.tolist())),
            encoding=self.encoding_,
            weights=weights,
            groups=groups,
            unlabelled=pool,
            names=names,
            effort=self.effort,
            time_limit=self.time_limit,
            seed=seed,
        )
        network = deepcopy(pipeline.network)
        self._solution, self._held_out = solution, None
        self._named = None if names is None else names.describe(classes.tolist())
        self.learned_unlabelled_ = solution.pooled is not None and solution.pooled.learned
        self.novel_clusters_ = cluster_unknown(solution)
        network.arrange_classes(torch.arange(len(classes)))  # solve has two at the least
        # In float64, a row's probabilities are its own to the last digits, whatever else is in the batch.
        self.network_ = network.double()
        if not self.learned_unlabelled_:
            weights = normalize_weights(weights)
            if names is not None:
                rows, numbers, weights, *_ = add_names(names, rows, numbers, weights)
            self.network_.set_prototypes(rows, numbers, weights)
        self.classes_ = classes

    @property
    def encoding_(self) -> Encoding | None:
        """The encoding of the columns as features; None for arrays."""
        check_is_fitted(self)
        return None if self._taken is None else self._taken.encoding

    @property
    def columns_(self) -> dict[str, str]:
        """The inferred type of each column, as text."""
        check_is_fitted(self)
        return {} if self._taken is None else self._taken.summary

    @property
    def held_out_accuracy_(self) -> float | None:
        """Which share of rows held out is right."""
        return None if (held := self._judge()) is None else held.accuracy

    @property
    def held_out_interval_(self) -> tuple[float, float] | None:
        """The 95 % interval of ``held_out_accuracy_``."""
        return None if (held := self._judge()) is None else held.interval

    @property
    def feature_importances_(self) -> np.ndarray:
        """The rise of the held-out log-loss if a column of X is shuffled: ``(n_features_in_,)`` float64.

        Columns that are left out have 0. Found anew each time, as `held_out_accuracy_` is at first.

        Raises:
            AttributeError: There are no rows to hold out.
        """
        check_is_fitted(self)
        if self._solution is None:
            raise AttributeError("a pickle, a copy or a file has no rows to hold out: ask before it is made")
        crossed = crossfit(self._solution, deadline=time.monotonic() + self.time_limit)
        if not len(crossed.labels):
            raise AttributeError("no class has two rows, of which one could be held out")
        sizes = [1] * self.n_features_in_ if self.encoding_ is None else self.encoding_.sizes
        places = range(len(sizes)) if self._taken is None else self._taken.indices
        return compute_importances(crossed, sizes, places, self.n_features_in_)

    def _judge(self) -> Metrics | None:
        """Compute the metrics on held-out rows of the last fit, if there are any."""
        check_is_fitted(self)
        if self._held_out is None:
            if self._solution is None:
                raise AttributeError("a pickle, a copy or a file has no rows to hold out: ask before it is made")
            crossed = crossfit(self._solution, deadline=time.monotonic() + self.time_limit)
            if len(crossed.labels):
                self._held_out = measure_held_out(crossed)
        return self._held_out

    def __getstate__(self) -> dict[str, Any]:
        """Leave the rows of ``fit`` out."""
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("_solution", None)
        return state

    def save(self, path: str | Path) -> None:
        """Write a model file that `load` and the commands read.

        Nothing is pickled. The network is written as float32. Held-out rows are not stored, so that ``update`` cannot
        report its effect on them, and ``explain`` needs a labelled table.

        Args:
            path: Of the file, in a folder that exists; the commands' end in ``.protonet``.

        Raises:
            MissingPackageError: safetensors is missing.
            OSError: The file cannot be written.
            InputError: Classes that are neither all strings nor all whole numbers, or two columns of one name.
        """
        names, taken = list(self.columns_), self._taken
        columns = tuple(names[place] for place in taken.indices) if taken is not None and names else None
        label = self._label
        while label in names:
            label += "_"
        metadata = {
            "label": label,
            "effort": self.effort if isinstance(self.effort, str) else None,
            "seed": self.random_state if isinstance(self.random_state, int) else None,
            "samples": self.network_.counts.tolist(),
            "uninformative": self._uninformative.tolist(),
            **({"named": self._named} if self._named else {}),
            "left_out": [name for name in names if name not in (columns or ())],
            "features": self.columns_,
        }
        network = deepcopy(self.network_).float()
        classes = name_classes(self.classes_)
        pipeline = TablePipeline(
            network=network, classes=classes, columns=columns, metadata=metadata, encoding=self.encoding_
        )
        pipeline.save(path)

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
        model = TablePipeline.load(path, writer="save_model")
        effort, seed, label, named = (model.metadata.get(name) for name in ("effort", "seed", "label", "named"))
        if not isinstance(effort, str) or effort not in EFFORTS:
            effort = "default"
        estimator = cls(effort, random_state=seed if type(seed) is int and 0 <= seed < 2**32 else 0)
        network = model.network.double()
        order = sorted(range(len(model.classes)), key=model.classes.__getitem__)
        network.arrange_classes(torch.tensor(order))
        estimator.classes_, estimator.network_ = np.array(model.classes)[order], network
        estimator._uninformative = parse_counts(model.metadata.get("uninformative"), len(order))[order]
        estimator._label, estimator._named = label if isinstance(label, str) else "label", named
        estimator._taken, names = restore_frame_encoding(model.encoding, model.columns, model.metadata.get("features"))
        width = network.encoder.input_dim if model.encoding is None else len(model.encoding.columns)
        estimator.n_features_in_ = width if names is None else len(names)
        if names is not None:
            estimator.feature_names_in_ = np.array(names, dtype=object)
        return estimator

    @property
    def _n_features_out(self) -> int:
        """Width of the embedding, which ``get_feature_names_out`` asks for."""
        return self.network_.sums.shape[1]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags
