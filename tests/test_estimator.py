from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from protonet.errors import InputError, InputTypeError
from protonet.estimator import ProtoNetClassifier
from protonet.fit.cross_validation import cross_validate, measure_cross_validation
from protonet.fit.label_validation import to_class_names
from protonet.fit.networks import get_encoder
from protonet.fit.solver import fit_solution
from protonet.views.tabular_transformer import TabularTransformerView
from tests.strategies import PLAIN, blobs, load_wine_split

TENSOR_X, TENSOR_Y = blobs(0)
X, Y = TENSOR_X.numpy(), TENSOR_Y.numpy()
NAMES = np.array(["ash", "birch", "cedar", "elm", "fir"])[Y]


def make() -> ProtoNetClassifier:
    return ProtoNetClassifier(effort=PLAIN)


FITTED = make().fit(X, NAMES)
SOLUTION = fit_solution([(TENSOR_X, TENSOR_Y)], effort=PLAIN, seed=int(np.random.RandomState(0).randint(2**31 - 1)))


def test_partial_fit_takes_labels_as_fit_does() -> None:
    x, y = (part.numpy() for part in blobs(0, classes=3, rows=4))
    model = ProtoNetClassifier(effort=PLAIN).fit(x, y)
    for labels in (["new"] * 3, [0, None, 1], [0.0, np.nan, 1.0], [-1, 0, 1]):
        with pytest.raises((InputError, InputTypeError), match=r"be all text or all numbers|have a label for each row"):
            model.partial_fit(x[:3], labels)
    assert model.classes_.tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="have a label for each row; got 4 of 12 without one"):
        ProtoNetClassifier(effort=PLAIN).partial_fit(x, np.where(y == 0, -1, y))
    assert model.partial_fit(x[:1], [1], classes=9).classes_.tolist() == [0, 1, 2, 9]
    signs = ProtoNetClassifier(effort=PLAIN).fit(x[y < 2], 2 * y[y < 2] - 1)
    assert signs.partial_fit(x[:1], [-1]).classes_.tolist() == [-1, 1]
    assert to_class_names(np.array([0.0, 1.0, 7.0])) == (0, 1, 7)
    weighted = ProtoNetClassifier(effort=PLAIN, class_weight="balanced")
    rows = np.r_[np.flatnonzero(y == 0), np.flatnonzero(y > 0)[::3]]
    expected = clone(weighted).fit(x[rows], y[rows]).predict_proba(x)
    assert np.array_equal(clone(weighted).partial_fit(x[rows], y[rows]).predict_proba(x), expected)


def test_partial_fit_changes_nothing_if_it_fails() -> None:
    x, y = (part.numpy() for part in blobs(0, classes=3, rows=4))
    model = ProtoNetClassifier(effort=PLAIN)
    with pytest.raises(InputTypeError, match="be all text or all numbers"):
        model.partial_fit(x, y, classes=["ant"])
    with pytest.raises(NotFittedError):
        model.predict(x)
    before = model.fit(x, y).predict_proba(x)
    for method in (model.predict, lambda far: model.partial_fit(far, y[:1])):
        with pytest.raises(InputError, match="`X` must have numbers of the scale of the training data"):
            method(np.full_like(x[:1], 1e30))
    assert np.array_equal(model.predict_proba(x), before)


def test_errors_name_arguments_of_the_estimator() -> None:
    x, y = (part.numpy() for part in blobs(0, classes=3, rows=4))
    with pytest.raises(InputError, match="`X` must lie within the range of float32"):
        ProtoNetClassifier(effort=PLAIN).fit(x.astype(float) * 1e200, y)
    for weights, message in (({"1": 2.0}, "'1'"), ({0: 1.0, 1: 2.0, 7: 3.0}, "7")):
        with pytest.raises(
            InputError, match=f"`class_weight` must name classes of y; got {message}. The classes are 0"
        ):
            ProtoNetClassifier(effort=PLAIN, class_weight=weights).fit(x, y)
    every = dict.fromkeys(range(5), 1.0)  # of classes that may come later
    assert len(ProtoNetClassifier(effort=PLAIN, class_weight=every).fit(x, y).classes_) == 3


@parametrize_with_checks([ProtoNetClassifier(effort=PLAIN)])  # type: ignore[untyped-decorator]
def test_scikit_learn_estimator_checks_pass(estimator: Any, check: Any) -> None:
    check(estimator)


def test_the_default_effort_is_the_solvers() -> None:
    x, y = load_iris(return_X_y=True)
    fitted = ProtoNetClassifier().fit(x[::10], y[::10])
    views = get_encoder(fitted.network_).iterate_views()
    assert any(isinstance(view, TabularTransformerView) for view in views)  # "fast" has none
    assert fitted.score(x, y) > 0.8


def test_the_network_and_its_probabilities_equal_solve() -> None:
    expected = SOLUTION.network(TENSOR_X).softmax(dim=1).detach().numpy()
    np.testing.assert_allclose(FITTED.predict_proba(X), expected, atol=1e-4)
    assert FITTED.predict(X).tolist() == np.unique(NAMES)[expected.argmax(axis=1)].tolist()
    assert FITTED.score(X, NAMES) > 0.9


def test_the_embedding_feeds_a_neighbours_index() -> None:
    embedding = FITTED.transform(X)
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), 1)
    assert len(FITTED.get_feature_names_out()) == embedding.shape[1]
    assert make_pipeline(make(), KNeighborsClassifier(3)).fit(X, NAMES).score(X, NAMES) > 0.9
    named = pickle.loads(pickle.dumps(FITTED)).set_output(transform="pandas").transform(X)
    assert list(named.columns) == list(FITTED.get_feature_names_out())


def test_samples_are_added_as_if_they_had_been_there_when_prototypes_were_made() -> None:
    more, labels = (part.numpy() for part in blobs(1, classes=7))
    names = np.array(["ash", "birch", "cedar", "elm", "fir", "alder", "yew"])[labels]
    added = pickle.loads(pickle.dumps(FITTED))
    for part in (slice(None, 20), slice(20, None)):
        assert added.partial_fit(more[part], names[part]) is added
    assert added.classes_.tolist() == sorted({*NAMES, *names})
    network = pickle.loads(pickle.dumps(FITTED)).network_
    both = np.concatenate([NAMES, names])
    indices = torch.from_numpy(np.searchsorted(added.classes_, both))
    network.arrange_classes(torch.full((len(added.classes_),), -1))
    network.set_prototypes(torch.from_numpy(np.concatenate([X, more])), indices)
    np.testing.assert_allclose(added.network_.prototypes, network.prototypes, atol=1e-5)
    np.testing.assert_allclose(FITTED.network_.prototypes.shape[0], 5)  # the copy alone has changed


def test_partial_fit_begins_with_a_fit_and_accepts_later_classes() -> None:
    begun = make().partial_fit(X, NAMES, classes=["zelkova", *NAMES])
    assert begun.classes_[-1] == "zelkova"
    assert begun.predict_proba(X)[:, -1].max() == 0
    np.testing.assert_allclose(begun.predict_proba(X)[:, :-1], FITTED.predict_proba(X))
    far = -5 * X[:1] + 0.1 * X[:3]  # three similar rows
    assert begun.partial_fit(far, ["zelkova"] * 3).predict(far).tolist() == ["zelkova"] * 3


def test_weights_begin_with_partial_fit_too_and_a_heavy_row_is_one_row() -> None:
    weights = np.arange(len(X)) % 3
    expected = make().fit(X, NAMES, sample_weight=weights).decision_function(X)
    np.testing.assert_array_equal(make().partial_fit(X, NAMES, sample_weight=weights).decision_function(X), expected)
    heavy = make().fit(X, NAMES, sample_weight=np.where(np.arange(len(X)) == 0, 1e6, 0.5))
    assert np.isfinite(heavy.predict_proba(X)).all()
    more = pickle.loads(pickle.dumps(FITTED)).partial_fit(X[:4] + 5, NAMES[:4], sample_weight=[0, 5, 5, 5])
    assert int(more.network_.counts.sum()) == len(X) + 3


def test_groups_are_checked() -> None:
    assert make().fit(X, NAMES, groups=np.arange(len(X))).score(X, NAMES) > 0.9
    with pytest.raises(ValueError, match=r"^`groups` must hold no class whole; got all 6 rows of"):
        make().fit(X, NAMES, groups=NAMES)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        make().fit(X, NAMES, groups=np.arange(3))
    for missing in (None, float("nan")):
        groups = [f"group {row}" for row in range(len(X))]
        with pytest.raises(ValueError, match=r"^`groups` must name the group of each row; got none in row 2\. "):
            make().fit(X, NAMES, groups=np.array([*groups[:2], missing, *groups[3:]], object))


def test_one_sample_a_class_works_and_so_does_one_class_where_others_may_come() -> None:
    first = [int(np.flatnonzero(name == NAMES)[0]) for name in np.unique(NAMES)]
    assert make().fit(X[first], NAMES[first]).predict(X[first]).tolist() == NAMES[first].tolist()
    alone = make().partial_fit(X, ["ash"] * len(X))
    assert set(alone.predict(X)) == {"ash"}
    assert alone.predict_proba(X).shape == (len(X), 1)


def test_a_fitted_estimator_has_the_held_out_accuracy() -> None:
    expected = measure_cross_validation(cross_validate(SOLUTION))
    model = clone(FITTED).fit(X, NAMES)
    copied = pickle.loads(pickle.dumps(model))
    assert not hasattr(copied, "held_out_accuracy_")  # the rows of fit are in no pickle
    before = model.predict_proba(X)
    assert (model.held_out_accuracy_, model.held_out_interval_) == (expected.accuracy, expected.interval)
    np.testing.assert_array_equal(model.predict_proba(X), before)
    assert pickle.loads(pickle.dumps(model)).held_out_interval_ == expected.interval
    first = np.unique(NAMES, return_index=True)[1]
    assert make().fit(X[first], NAMES[first]).held_out_accuracy_ is None
    with pytest.raises(NotFittedError):
        make().held_out_accuracy_  # noqa: B018


@pytest.mark.parametrize(
    ("change", "labels", "weights", "message"),
    [
        ({"effort": "slow"}, NAMES, None, "`effort` must be one of fast, default, best; got 'slow'"),
        ({"time_limit": -1}, NAMES, None, "`time_limit` must be a finite number >= 0; got -1"),
        ({}, NAMES, np.zeros(len(X)), "[Ss]ample.weight"),
        ({}, NAMES, -np.ones(len(X)), "Negative values in data passed to `sample_weight`"),
        ({}, ["ash"] * len(X), None, "^`y` must name two classes at least; got one class: ash. Add"),
        ({}, X[:, 0], None, "^`y` must name classes; got numbers with fractions .*. Bin them into"),
    ],
)
def test_invalid_arguments_are_errors(change: dict[str, Any], labels: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().set_params(**change).fit(X, labels, sample_weight=weights)


def test_unlabelled_rows_have_any_missing_label() -> None:
    x, y, few = load_wine_split()
    remaining = np.setdiff1d(np.arange(len(y)), few)
    model = ProtoNetClassifier(PLAIN).fit(x[few], y[few], unlabelled=x[remaining])
    expected = model.predict_proba(x)
    assert model.learned_unlabelled_
    minus, none, gaps = np.full(len(y), -1), np.full(len(y), None), np.full(len(y), np.nan)
    for marked in (minus, none, gaps):
        marked[few] = y[few]
    for rows, marked in ((x, none), (x, gaps), (scipy.sparse.coo_matrix(x), minus)):
        again = ProtoNetClassifier(PLAIN).fit(rows, marked)
        np.testing.assert_array_equal(again.classes_, [0, 1, 2])
        np.testing.assert_allclose(again.predict_proba(x), expected, atol=1e-6)
    half = ProtoNetClassifier(PLAIN).fit(x[: len(x) // 2], minus[: len(x) // 2], unlabelled=x[len(x) // 2 :])
    assert half.learned_unlabelled_
    assert ProtoNetClassifier(PLAIN).fit(x[few], y[few] - 2).classes_.tolist() == [-2, -1, 0]  # -1 is a class here
    alone = ProtoNetClassifier(PLAIN).fit(x[few], y[few])
    assert not alone.learned_unlabelled_
    assert alone.novel_clusters_ == []


def test_invalid_unlabelled_rows_are_refused() -> None:
    x, y, few = load_wine_split()
    with pytest.raises(InputError, match="`y` must have rows with a label; got none"):
        ProtoNetClassifier(PLAIN).fit(x, np.full(len(y), None))
    with pytest.raises(ValueError, match="X has 5 features, but ProtoNetClassifier is expecting 13"):
        ProtoNetClassifier(PLAIN).fit(x[few], y[few], unlabelled=x[:, :5])
    marked = np.full(len(y), -1)
    marked[few] = y[few]
    for given in ({"sample_weight": np.ones(15)}, {"groups": list(range(15))}):
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            ProtoNetClassifier(PLAIN).fit(x, marked, **given)
    gap = x.copy()
    gap[3, 2] = np.nan
    with pytest.raises(InputError, match="`X` must have no gaps, as the rows of fit had none; got 1 of NaN"):
        ProtoNetClassifier(PLAIN).fit(x[few], y[few], unlabelled=gap)


def test_labels_of_mixed_types_get_a_warning() -> None:
    x, mixed = np.arange(20.0)[:, None], np.array(["a", 1] * 10, object)
    match = r"^`y` must be all text or all numbers; got the text 'a' and 1\. Fit to y\.astype\(str\)\.$"
    for y in (mixed, mixed[::-1]):
        with pytest.raises(TypeError, match=match):
            ProtoNetClassifier(PLAIN).fit(x, y)
    fitted = ProtoNetClassifier(PLAIN).fit(x, np.array(["a", "b"] * 10, object))
    with pytest.raises(TypeError, match=match):
        fitted.partial_fit(x[:1], np.array([1]))
