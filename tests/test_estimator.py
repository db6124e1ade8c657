from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from protonet.errors import InputError, InputTypeError
from protonet.estimator import ProtoNetClassifier
from protonet.estimator.labels import to_class_names
from protonet.files.model import model_to_bytes
from protonet.fit import solver
from protonet.fit.cross_validation import cross_validate, measure_cross_validation
from protonet.fit.search import ModelSearch
from protonet.fit.solver import fit_solution
from tests.strategies import PLAIN, blobs, load_wine_split

TENSOR_X, TENSOR_Y = blobs(0)
X, Y = TENSOR_X.numpy(), TENSOR_Y.numpy()
NAMES = np.array(["ash", "birch", "cedar", "elm", "fir"])[Y]


def make() -> ProtoNetClassifier:
    return ProtoNetClassifier()


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
    FITTED = make().fit(X, NAMES)
SOLUTION = fit_solution([(TENSOR_X, TENSOR_Y)], search=PLAIN, seed=int(np.random.RandomState(0).randint(2**31 - 1)))


@pytest.fixture(scope="module", autouse=True)
def linear_views() -> Iterator[None]:
    """Let fits compare linear views only: what the estimator does with a network does not depend on its views."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
        yield


def test_partial_fit_takes_labels_as_fit_does() -> None:
    x, y = (part.numpy() for part in blobs(0, classes=3, rows=4))
    model = ProtoNetClassifier().fit(x, y)
    for labels in (["new"] * 3, [0, None, 1], [0.0, np.nan, 1.0], [-1, 0, 1]):
        with pytest.raises((InputError, InputTypeError), match=r"be all text or all numbers|have a label for each row"):
            model.partial_fit(x[:3], labels)
    assert model.classes_.tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="have a label for each row; got 4 of 12 without one"):
        ProtoNetClassifier().partial_fit(x, np.where(y == 0, -1, y))
    assert model.partial_fit(x[:1], [1], classes=9).classes_.tolist() == [0, 1, 2, 9]
    signs = ProtoNetClassifier().fit(x[y < 2], 2 * y[y < 2] - 1)
    assert signs.partial_fit(x[:1], [-1]).classes_.tolist() == [-1, 1]
    assert to_class_names(np.array([0.0, 1.0, 7.0])) == (0, 1, 7)
    weighted = ProtoNetClassifier(class_weight="balanced")
    rows = np.r_[np.flatnonzero(y == 0), np.flatnonzero(y > 0)[::3]]
    expected = clone(weighted).fit(x[rows], y[rows]).predict_proba(x)
    assert np.array_equal(clone(weighted).partial_fit(x[rows], y[rows]).predict_proba(x), expected)


def test_partial_fit_changes_nothing_if_it_fails() -> None:
    x, y = (part.numpy() for part in blobs(0, classes=3, rows=4))
    model = ProtoNetClassifier()
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
        ProtoNetClassifier().fit(x.astype(float) * 1e200, y)
    for weights, message in (({"1": 2.0}, "'1'"), ({0: 1.0, 1: 2.0, 7: 3.0}, "7")):
        with pytest.raises(
            InputError, match=f"`class_weight` must name classes of y; got {message}. The classes are 0"
        ):
            ProtoNetClassifier(class_weight=weights).fit(x, y)
    every = dict.fromkeys(range(5), 1.0)  # of classes that may come later
    assert len(ProtoNetClassifier(class_weight=every).fit(x, y).classes_) == 3


@parametrize_with_checks([ProtoNetClassifier()])  # type: ignore[untyped-decorator]
def test_scikit_learn_estimator_checks_pass(estimator: Any, check: Any) -> None:
    check(estimator)


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


def test_cross_validation_equals_that_of_the_solution() -> None:
    expected = measure_cross_validation(cross_validate(SOLUTION))
    model = clone(FITTED).fit(X, NAMES)
    before = model.predict_proba(X)
    metrics = model.cross_validate()
    assert (metrics.accuracy, metrics.interval) == (expected.accuracy, expected.interval)
    np.testing.assert_array_equal(model.predict_proba(X), before)
    first = np.unique(NAMES, return_index=True)[1]
    with pytest.raises(InputError, match="`y` must have two different rows of a class; got none"):
        make().fit(X[first], NAMES[first]).cross_validate()
    with pytest.raises(NotFittedError):
        make().cross_validate()
    copied = pickle.loads(pickle.dumps(model))
    for method in (copied.cross_validate, copied.feature_importances):
        with pytest.raises(InputError, match="`estimator` must be the one that was fitted; got a copy"):
            method()


def count_calls(function: Callable[[], object]) -> int:
    """Count the calls of Python functions while ``function`` runs."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_showing_a_fitted_estimator_computes_nothing() -> None:
    """A display reads every attribute; the fit of these small data alone makes 100 times as many calls."""
    model = clone(FITTED).fit(X, NAMES)
    html = getattr(model, "_repr_html_", lambda: "")
    html()  # imports
    names = [name for name in dir(model) if name.endswith("_") and not name.startswith("_")]
    assert {"network_", "classes_", "columns_", "encoding_"} <= {*names}
    for read in (html, lambda: repr(model), lambda: [getattr(model, name) for name in names]):
        assert count_calls(read) < 20_000
    assert model._cross_validation is None


def test_copies_predict_the_same_to_the_bit(tmp_path: Path) -> None:
    model = clone(FITTED).set_params(random_state=3).fit(X, NAMES).partial_fit(X[:3] + 0.1, ["yew"] * 3)
    expected, size = model.predict_proba(X), len(model_to_bytes(model._copy_for_file(model._pipeline.classes)))
    joblib.dump(model, tmp_path / "m.joblib")
    model.save(tmp_path / "m.protonet")
    model.save(tmp_path / "m.safetensors")
    (tmp_path / "folder").mkdir()
    model.save(tmp_path / "folder")
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), joblib.load(tmp_path / "m.joblib")]
    copies += [ProtoNetClassifier.load(tmp_path / name) for name in ("m.protonet", "m.safetensors", "folder")]
    copies += [pickle.loads(pickle.dumps(copies[-1]))]
    grown = pickle.loads(pickle.dumps(model)).partial_fit(X[:2], NAMES[:2]).predict_proba(X)
    assert len(pickle.dumps(model)) < size + 4000
    for copied in copies:
        np.testing.assert_array_equal(copied.predict_proba(X), expected)
        np.testing.assert_array_equal(copied.classes_, model.classes_)
        grown = copied.partial_fit(X[:2], NAMES[:2]).predict_proba(X)
        np.testing.assert_array_equal(
            grown, pickle.loads(pickle.dumps(model)).partial_fit(X[:2], NAMES[:2]).predict_proba(X)
        )
    assert pickle.loads(pickle.dumps(make())).get_params().keys() == make().get_params().keys()


def test_states_are_validated_like_files() -> None:
    state: dict[str, Any] = FITTED.__getstate__()
    assert {type(value) for value in state.values()} <= {
        bytes,
        str,
        int,
        float,
        bool,
        list,
        np.ndarray,
        type(None),
        ModelSearch,
    }
    for change, message in (
        ({"_pipeline": state["_pipeline"][:-9]}, "`state` must be a model file of version"),
        ({"_pipeline": "/etc/passwd"}, "`state` must have the bytes of a model file; got str"),
        ({"classes_": np.array(["a"])}, "`state` must have as many classes as its model file; got 5 and 1"),
    ):
        with pytest.raises((InputError, InputTypeError), match=message):
            make().__setstate__(state | change)


def test_other_libraries_store_estimators(tmp_path: Path) -> None:
    skops_io = pytest.importorskip("skops.io")
    model = ProtoNetClassifier().fit(X, NAMES)
    skops_io.dump(model, tmp_path / "m.skops")
    trusted = ["protonet.estimator.classifier.ProtoNetClassifier"]
    assert skops_io.get_untrusted_types(file=tmp_path / "m.skops") == trusted
    loaded = skops_io.load(tmp_path / "m.skops", trusted=trusted)
    np.testing.assert_array_equal(loaded.predict_proba(X), model.predict_proba(X))


def test_spellings_of_known_classes_get_a_warning() -> None:
    x, y = (part.numpy() for part in blobs(0, classes=2, rows=4))
    names = np.array(["Oak", "Yew"])[y]
    model = make().fit(x, names)
    with pytest.warns(UserWarning, match=r"^classes 'oak ' for 'Oak'; two spellings of one class\?$"):
        model.partial_fit(x[:2], ["oak ", "Yew"])
    for method in (make().fit, make().partial_fit):
        with pytest.warns(UserWarning, match=r"^classes 'yew' for 'Yew'; two spellings of one class\?$"):
            method(x, np.where(np.arange(8) == np.flatnonzero(y)[0], "yew", names))


def test_the_report_numbers_the_rows_of_x(tmp_path: Path) -> None:
    marked = np.array(NAMES, object)
    marked[:2] = None
    model = make().fit(X, marked)
    with pytest.raises(FileNotFoundError):
        model.report(tmp_path / "none" / "r.html")
    model.report(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    metrics = json.loads(page.partition('id="metrics">')[2].partition("</script>")[0])
    assert metrics["predictions"]["index"] == list(range(2, len(X)))
    assert (metrics["data"]["rows"], metrics["accuracy"]) == (len(X) - 2, model.cross_validate().accuracy)
    labels = [metrics["classes"][label]["name"] for label in metrics["predictions"]["label"]]
    assert labels == NAMES[2:].tolist()


def test_an_exported_graph_computes_the_probabilities(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    FITTED.export_onnx(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    dtype = {"tensor(float)": np.float32, "tensor(double)": np.float64}[session.get_inputs()[0].type]
    probabilities = session.run(["probabilities"], {"features": X.astype(dtype)})[0]
    np.testing.assert_allclose(probabilities, FITTED.predict_proba(X), atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == FITTED.classes_.tolist()


def test_verbose_prints_stages_and_views(capsys: pytest.CaptureFixture[str]) -> None:
    make().fit(X, NAMES)
    assert capsys.readouterr().out == ""
    model = make().set_params(verbose=True).fit(X, NAMES)
    stages, _, views = capsys.readouterr().out.partition("| view")
    assert all(re.fullmatch(r"\[ProtoNetClassifier\] +\d+\.\d s +\d+ % .+", line) for line in stages.splitlines())
    assert "influence, %" in views
    model.cross_validate()
    assert "fold 1 of" in capsys.readouterr().out


WITHOUT = """
import sys
sys.modules["sklearn"] = None  # what Python does for a package that is not there
try:
    import protonet.estimator
except ImportError as error:
    print(error)
"""


def test_without_scikit_learn_the_error_says_what_to_install() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"`sklearn` must be installed\. Run pip install .*\[sklearn\].*\.\n", ended.stdout)


@pytest.mark.parametrize(
    ("change", "labels", "weights", "message"),
    [
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
    model = ProtoNetClassifier().fit(x[few], y[few], unlabelled=x[remaining])
    expected = model.predict_proba(x)
    assert model.learned_unlabelled_
    minus, none, gaps = np.full(len(y), -1), np.full(len(y), None), np.full(len(y), np.nan)
    for marked in (minus, none, gaps):
        marked[few] = y[few]
    for rows, marked in ((x, none), (x, gaps), (scipy.sparse.coo_matrix(x), minus)):
        again = ProtoNetClassifier().fit(rows, marked)
        np.testing.assert_array_equal(again.classes_, [0, 1, 2])
        np.testing.assert_allclose(again.predict_proba(x), expected, atol=1e-6)
    half = ProtoNetClassifier().fit(x[: len(x) // 2], minus[: len(x) // 2], unlabelled=x[len(x) // 2 :])
    assert half.learned_unlabelled_
    assert ProtoNetClassifier().fit(x[few], y[few] - 2).classes_.tolist() == [-2, -1, 0]  # -1 is a class here
    alone = ProtoNetClassifier().fit(x[few], y[few])
    assert not alone.learned_unlabelled_
    assert alone.novel_clusters_ == []


def test_invalid_unlabelled_rows_are_refused() -> None:
    x, y, few = load_wine_split()
    with pytest.raises(InputError, match="`y` must have rows with a label; got none"):
        ProtoNetClassifier().fit(x, np.full(len(y), None))
    with pytest.raises(ValueError, match="X has 5 features, but ProtoNetClassifier is expecting 13"):
        ProtoNetClassifier().fit(x[few], y[few], unlabelled=x[:, :5])
    marked = np.full(len(y), -1)
    marked[few] = y[few]
    for given in ({"sample_weight": np.ones(15)}, {"groups": list(range(15))}):
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            ProtoNetClassifier().fit(x, marked, **given)
    gap = x.copy()
    gap[3, 2] = np.nan
    with pytest.raises(InputError, match="`X` must have no gaps, as the rows of fit had none; got 1 of NaN"):
        ProtoNetClassifier().fit(x[few], y[few], unlabelled=gap)


def test_labels_of_mixed_types_get_a_warning() -> None:
    x, mixed = np.arange(20.0)[:, None], np.array(["a", 1] * 10, object)
    match = r"^`y` must be all text or all numbers; got the text 'a' and 1\. Fit to y\.astype\(str\)\.$"
    for y in (mixed, mixed[::-1]):
        with pytest.raises(TypeError, match=match):
            ProtoNetClassifier().fit(x, y)
    fitted = ProtoNetClassifier().fit(x, np.array(["a", "b"] * 10, object))
    with pytest.raises(TypeError, match=match):
        fitted.partial_fit(x[:1], np.array([1]))
