"""ProtoNetClassifier: the solver with scikit-learn's face."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from protonet._checks import check_groups, fail
from protonet.fit.search import Search
from protonet.fit.solver import TIME_LIMIT, solve_problem
from protonet.losses import CHUNK
from protonet.network import PrototypeNetwork


class ProtoNetClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Classify by the cosine between a row's embedding and the class prototypes.

    What the embedding is made of is decided on held-out folds of the training rows; see `protonet.solve`.

    Args:
        effort: "fast" takes closed forms alone, "default" also trains, "best" tries more and trains for longer; or a
            `protonet.fit.search.Search` that says what is tried.
        time_limit: Seconds that ``fit`` may take, >= 0.
        random_state: Of folds, initial weights and episodes: an int, a ``RandomState``, or None for another one each
            time.

    Attributes:
        classes_: (n_classes,) the labels, in ascending order.
        n_features_in_: Features per row.
        feature_names_in_: Their names, where the training rows had column names that are strings.
        network_: The `protonet.PrototypeNetwork`, in float64, its classes in the order of ``classes_``.

    Sample weights are in the losses, the prototypes and the statistics; only how those of one call differ matters, so
    that equal weights are none. Whole weights do what repeated rows do. Rows of weight 0 are left out.
    """

    classes_: np.ndarray
    network_: PrototypeNetwork

    def __init__(
        self, effort: str | Search = "default", *, time_limit: float = TIME_LIMIT, random_state: Any = 0
    ) -> None:
        self.effort = effort
        self.time_limit = time_limit
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> ProtoNetClassifier:
        """Fit to labelled rows; the same rows in any order give the same network.

        Args:
            X: (n, n_features) real and finite, an array, a data frame or a sparse matrix (which is made dense).
            y: (n,) labels, of any type that can be sorted.
            sample_weight: (n,) >= 0, or None for 1.
            groups: (n,) of any type that can be sorted: what is decided on rows held out, the probabilities'
                temperature too, is decided with none of a row's group among those fitted to. None for each row alone.
                With metadata routing, ``set_fit_request(groups=True)`` passes them on.

        Returns:
            The estimator.

        Raises:
            InputError: What scikit-learn's estimators reject; no row of positive weight; a group that holds a whole
                class; an unknown effort.
        """
        self._fit(*self._read(X, y, sample_weight, groups, reset=True))
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
            InputError: As in ``fit``, or another number of features.
        """
        known = [] if classes is None else [np.asarray(classes)]
        first = not hasattr(self, "network_")
        rows, labels, weights, _ = self._read(X, y, sample_weight, None, reset=first)
        if first:
            self._fit(rows, labels, weights, None)
            rows, labels = rows[:0], labels[:0]
        merged = np.unique(np.concatenate([self.classes_, labels, *known]))
        order = torch.full((len(merged),), -1)
        order[_number(self.classes_, merged)] = torch.arange(len(self.classes_))
        self.network_.arrange_classes(order)
        if len(rows):
            self.network_.add_samples(rows, _number(labels, merged), weights=weights)
        self.classes_ = merged
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the label (n,) of each row of X (n, n_features)."""
        places = self._compute(X).argmax(axis=1)
        labels: np.ndarray = self.classes_[places]
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

    def _compute(self, X: Any, *, embed: bool = False) -> np.ndarray:
        """Return logits, or embeddings, of rows X, in blocks that are made dense one at a time."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        network = self.network_
        with torch.no_grad():
            blocks = (torch.from_numpy(_make_dense(X[first : first + CHUNK])) for first in range(0, X.shape[0], CHUNK))
            return torch.cat([network.embed(block) if embed else network(block) for block in blocks]).numpy()

    def _read(
        self, X: Any, y: Any, sample_weight: Any, groups: Any, *, reset: bool
    ) -> tuple[Tensor, np.ndarray, Tensor | None, Tensor | None]:
        """Return rows (n, n_features) float64, their labels, weights and groups (n,), those of positive weight."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, reset=reset)
        check_classification_targets(y)
        weights = None
        if groups is not None:
            groups = np.unique(column_or_1d(groups), return_inverse=True)[1]
            check_consistent_length(X, groups)
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            chosen = np.flatnonzero(weights)
            if not len(chosen):
                remedy = "Pass None to weigh all rows alike."
                fail("ProtoNetClassifier", "sample_weight", "have a weight above 0", "0 for every row", remedy)
            X, y, weights = X[chosen], y[chosen], torch.from_numpy(weights[chosen] / weights.max())
            weights = weights / weights.mean()
            groups = None if groups is None else groups[chosen]
        if groups is not None:
            check_groups("ProtoNetClassifier", "groups", groups, y)
        return torch.from_numpy(_make_dense(X)), y, weights, None if groups is None else torch.from_numpy(groups)

    def _fit(self, rows: Tensor, labels: np.ndarray, weights: Tensor | None, groups: Tensor | None) -> None:
        """Fit to rows (n, n_features), labels, weights and groups (n,)."""
        classes = np.unique(labels)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        numbers = _number(labels, classes)
        metadata = {"num_classes": max(2, len(classes))}
        network = solve_problem(
            [(rows, numbers)], None, metadata, self.time_limit, self.effort, None, seed, weights, groups
        ).network
        network.arrange_classes(torch.arange(len(classes)))  # solve has two at the least
        # In float64, a row's probabilities are its own to the last digits, whatever else is in the batch.
        self.network_ = network.double()
        self.network_.set_prototypes(rows, numbers, weights)
        self.classes_ = classes

    @property
    def _n_features_out(self) -> int:
        """Width of the embedding, which ``get_feature_names_out`` asks for."""
        return self.network_.sums.shape[1]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _number(labels: np.ndarray, classes: np.ndarray) -> Tensor:
    """Return the places (n,) of labels (n,) among the classes, which are in ascending order."""
    return torch.from_numpy(np.searchsorted(classes, labels))


def _make_dense(X: Any) -> np.ndarray:
    """Return rows as an array that torch may have: dense, and not read-only."""
    return X.toarray() if hasattr(X, "toarray") else np.require(X, requirements=["C", "W"])
