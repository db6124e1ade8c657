"""The estimator on data frames: column types, missing cells, and agreement with the commands."""

from __future__ import annotations

import datetime
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn
from sklearn.base import clone
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection import GridSearchCV, GroupKFold

from protonet import load_model, save_model
from protonet.errors import InputError, InputTypeError, MissingPackageError
from protonet.estimator import ProtoNetClassifier
from protonet.estimator.frames import read_frame
from protonet.files.metadata import TrainingMetadata
from protonet.fit import solver
from protonet.pipeline import TablePipeline
from tests.commands.cases import FAST, Run
from tests.strategies import PLAIN

KINDS = ["ash", "birch", "cedar"]
N = 36
Y = np.array(KINDS)[np.arange(N) % 3]


def make(**options: Any) -> ProtoNetClassifier:
    return ProtoNetClassifier(**options)


def make_frame(seed: int = 0) -> pd.DataFrame:
    """Make rows of three kinds of trees with informative columns of every type."""
    rng = np.random.default_rng(seed)
    y = np.arange(N) % 3
    height = (y + rng.normal(0, 0.6, N)).round(3)
    height[::7] = np.nan
    bark = np.array(["smooth", "rough", "scaly"], dtype=object)[(y + (rng.random(N) < 0.3)) % 3]
    bark[::9] = None
    days = np.datetime64("2020-01-01", "us") + ((y * 60 + rng.integers(0, 90, N)) * 86_400_000_000)
    words = np.array(["grows by the river", "stands on dry hills", "found in old gardens"], dtype=object)[y]
    notes = [f"{words[word]} near {index}" for word, index in enumerate(rng.integers(0, 10**6, N))]
    return pd.DataFrame(
        {
            "height": height,
            "bark": bark,
            "evergreen": y == 2,
            "seen": days,
            "notes": notes,
            "rings": pd.array(rng.integers(5, 90, N), dtype="Int64"),
            "zone": pd.Categorical(rng.integers(1, 4, N)),
            "country": "here",
            "empty": np.nan,
        }
    )


FRAME = make_frame()
NEW = make_frame(1)
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
    FITTED = make().fit(FRAME, pd.Series(Y, name="kind"))


@pytest.fixture(scope="module", autouse=True)
def linear_views() -> Iterator[None]:
    """Let fits compare linear views only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
        yield


def test_column_types_are_inferred_and_reported() -> None:
    assert FITTED.columns_ == {
        "height": "number, 17 % missing",
        "bark": "category: missing, rough, scaly, smooth",
        "evergreen": "category: False, True",
        "seen": "date, in week, year",
        "notes": FITTED.columns_["notes"],
        "rings": "number",
        "zone": "category: 1, 2, 3",
        "country": "dropped: constant",
        "empty": "dropped: empty",
    }
    assert FITTED.columns_["notes"].startswith("text: 9 components")
    assert FITTED.feature_names_in_.tolist() == list(FRAME)
    assert FITTED.n_features_in_ == 9
    assert FITTED.encoding_ is not None
    assert sum(FITTED.encoding_.n_features_per_column) == FITTED.network_.encoder.input_dim
    assert FITTED.score(NEW, Y) > 0.9
    assert len(FITTED.get_feature_names_out()) == FITTED.transform(NEW).shape[1]
    assert not hasattr(make(), "columns_")
    assert not hasattr(make(), "encoding_")
    with pytest.raises(ValueError, match="y should be a 1d array"):
        make().fit(FRAME, "kind")


def test_the_commands_agree_with_the_estimator_and_read_its_files(tmp_path: Path, run: Run) -> None:
    FRAME.assign(kind=Y).to_csv(tmp_path / "trees.csv", index=False)
    NEW.assign(kind=Y).to_csv(tmp_path / "new.csv", index=False)
    table, new, model, saved = (tmp_path / name for name in ("trees.csv", "new.csv", "m.safetensors", "saved.protonet"))
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    run("fit", table, *FAST, "--column-type", "zone=category", "--seed", seed, "-o", model)
    loaded = ProtoNetClassifier.load(model)
    assert loaded.feature_names_in_.tolist() == ["height", "bark", "evergreen", "seen", "notes", "rings", "zone"]
    assert loaded.columns_ == {name: FITTED.columns_[name] for name in loaded.feature_names_in_}
    assert loaded.random_state == seed
    loaded.save(tmp_path / "again.protonet")
    fields = [TablePipeline.load(path).metadata.to_json().keys() for path in (model, tmp_path / "again.protonet")]
    assert fields[0] - fields[1] == {"cross_validation", "known_scores"}
    FITTED.save(saved)
    own = NEW[loaded.feature_names_in_]
    for path, estimator, rows, atol in ((model, loaded, own, 1e-3), (saved, FITTED, NEW, 1e-5)):
        result = pd.read_csv(io.StringIO(run("predict", path, new, "--proba")))
        assert result["class"].tolist() == estimator.predict(rows).tolist() == FITTED.predict(NEW).tolist()
        fractions = result[[f"P({kind})" for kind in KINDS]]
        np.testing.assert_allclose(fractions, estimator.predict_proba(rows), atol=1e-5)
        np.testing.assert_allclose(fractions, FITTED.predict_proba(NEW), atol=atol)
    output = run("evaluate", saved, new, quiet=False)
    assert f"new.csv: accuracy {100 * FITTED.score(NEW, Y):.2f} % on 36 rows" in output
    assert run.notes == ""  # it knows the columns that are left out
    output = run("update", saved, new, "--in-place")
    unknown = "no held-out rows: the effect on the old classes is unknown"
    assert output.splitlines() == [f"{saved}: 36 samples added, 0 new classes", unknown]
    assert run.count_samples(saved) == [2 * n for n in run.count_samples(model)]
    assert f"{100 * FITTED.score(NEW, Y):.2f}" <= run("evaluate", saved, new).partition("accuracy ")[2]


class Capsule:
    """A data frame with the Arrow PyCapsule interface only."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self.table.__arrow_c_stream__(schema)


def test_frames_of_other_libraries_give_the_same_model() -> None:
    """Compare pandas with an Arrow table of two chunks, and with Polars if it is installed."""
    pyarrow = pytest.importorskip("pyarrow")
    frame, new = (item.assign(zone=item["zone"].astype(str).astype("category")) for item in (FRAME, NEW))
    parts = pyarrow.concat_tables([pyarrow.table(frame[:20]), pyarrow.table(frame[20:])])
    fitted = make().fit(Capsule(parts), Y)
    assert fitted.columns_ == FITTED.columns_
    assert fitted.feature_names_in_.tolist() == list(FRAME)
    for item in (new, pyarrow.table(new), *([import_module("polars").from_pandas(new)] if find_spec("polars") else [])):
        np.testing.assert_allclose(fitted.predict_proba(item), FITTED.predict_proba(NEW))
    nested = {"a": [[row] for row in range(N)]}
    message = r"^`X` must have columns of numbers, dates and text; got list.* in a"
    for lists in (Capsule(pyarrow.table(nested)), pd.DataFrame(nested)):
        with pytest.raises(ValueError, match=message):
            make().fit(lists, Y)


class Arrays:
    """A data frame that NumPy can read, whose Arrow interface raises an error."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.values

    def __arrow_c_stream__(self, schema: object = None) -> object:
        raise AssertionError


def test_without_pyarrow_numeric_frames_are_arrays_and_mixed_ones_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what Python does for a package that is not there
    assert read_frame(Arrays([[1.0, 2.0]])) is None
    frame = read_frame(pd.DataFrame({"a": ["b"], "c": [True], "d": [1]}))
    assert frame is not None
    assert [cells.dtype.kind for cells in frame.columns] == ["O", "O", "i"]
    with pytest.raises(MissingPackageError, match=r"^`pyarrow` must be installed"):
        read_frame(Arrays([["a", "b"]]))


def test_every_column_type_is_read_as_from_a_file() -> None:
    cases: list[tuple[Any, list[Any]]] = [
        (pd.Series([True, False]), ["True", "False"]),
        (pd.Series([True, None], dtype="boolean"), ["True", ""]),
        (pd.Series([1, None], dtype="Int8"), [1.0, np.nan]),
        (pd.Series([1, 2], dtype="UInt16"), [1, 2]),
        (pd.Series([1.5, None], dtype="Float32"), [1.5, np.nan]),
        (pd.Series([2**60 + 1, 0]), [2**60 + 1, 0]),
        (pd.Series([0.0, 1.0], dtype=pd.SparseDtype(float)), [0.0, 1.0]),
        (pd.Series([" a b ", None], dtype="string"), ["a b", ""]),
        (pd.Series(["1", 2.5], dtype=object), ["1", "2.5"]),
        (pd.Series(pd.Categorical([1, None])), ["1", ""]),
        (pd.Series(pd.to_datetime(["2020-02-03", None])), [datetime.datetime(2020, 2, 3), None]),
        (pd.Series(pd.to_datetime(["2020-02-03T00:00+02:00"])), [datetime.datetime(2020, 2, 2, 22)]),
        (pd.Series([datetime.date(2020, 2, 3), None]), ["2020-02-03", ""]),
        (pd.Series(pd.period_range("2020-01", periods=1, freq="M")), [datetime.datetime(2020, 1, 1)]),
        (pd.Series(pd.to_timedelta(["1min", None])), [60.0, np.nan]),
        (pd.Series(pd.array([1, None], dtype="int64[pyarrow]")), [1.0, np.nan]),
        (pd.Series(pd.array(["a", None], dtype="string[pyarrow]")), ["a", ""]),
    ]
    for values, expected in cases:
        frame = read_frame(pd.DataFrame({"a": values}))
        assert frame is not None, values.dtype
        cells = frame.columns[0]
        assert cells.dtype.kind in "Oiuf" or cells.dtype == "datetime64[us]", values.dtype
        for result, meant in zip(cells.tolist(), expected, strict=True):
            assert result == meant or (result != result and meant != meant), values.dtype  # noqa: PLR0124 - NaN


def test_numeric_frames_equal_their_array() -> None:
    x = np.random.default_rng(0).normal(size=(N, 4)) + np.arange(N)[:, None] % 3
    x[:, 3] = 7.0
    bare = make().fit(x, Y)
    frame = pd.DataFrame(x).astype({1: object}).rename(columns=str)
    fitted = make().fit(frame, Y)
    np.testing.assert_array_equal(fitted.predict_proba(frame), bare.predict_proba(x))
    gaps = frame.copy()
    gaps.iloc[3, :3] = np.nan
    others, predicted = np.arange(N) != 3, fitted.predict_proba(gaps)
    np.testing.assert_allclose(predicted[others], bare.predict_proba(x[others]), rtol=1e-12)
    np.testing.assert_allclose(predicted[3], 1 / 3, atol=0.1)  # nothing is known of this row


def test_arrays_with_gaps_are_encoded_and_new_gaps_are_refused() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 3)) + np.arange(N)[:, None] % 3
    full = make().fit(x, Y)
    for kind in (np.asarray, scipy.sparse.csr_array):
        with pytest.raises(InputError, match=r"`X` must have no gaps, as the rows of fit had none; got \d+ of NaN"):
            full.predict(kind(np.where(x > 1, np.nan, x)))
    x[rng.random((N, 3)) < 0.2] = np.nan
    model = make().fit(x, Y)
    assert model.encoding_ is not None
    assert (model.columns_, model.n_features_in_) == ({}, 3)
    assert model.score(x, Y) > 0.7
    np.testing.assert_array_equal(
        model.predict_proba(scipy.sparse.csr_array(np.nan_to_num(x))), model.predict_proba(np.nan_to_num(x))
    )
    sparse = make().fit(scipy.sparse.csr_array(x), Y)
    np.testing.assert_array_equal(sparse.predict_proba(x), model.predict_proba(x))
    with pytest.raises(ValueError, match="Input X contains infinity"):
        make().fit(np.where(np.isnan(x), np.inf, x), Y)


def test_new_categories_and_empty_columns_are_accepted_and_other_types_refused() -> None:
    unknown = NEW.assign(bark="striped", seen=pd.NaT, height=None, zone=7, country="there", empty="full")
    assert np.isfinite(FITTED.predict_proba(unknown)).all()
    assert FITTED.predict(unknown[:1]).shape == (1,)
    for frame, message in (
        (NEW.assign(height="tall"), r"got 'tall' in height, row 0 \(counted from 0\), which held number, 17 % missing"),
        (NEW.assign(seen=5), "got '5' in seen, row 0 .* which held date, in week, year"),
        (NEW.assign(height=np.inf), "`X` must have finite numbers, or missing ones; got inf in height, row 0"),
        (NEW.assign(rings=1e39 + 0j), "`X` must have columns of real numbers; got complex128 in rings"),
        (NEW.rename(columns={"bark": "skin"}), "feature names should match"),
        (NEW[["height"]], "feature names should match"),
        (NEW[:0], "`X` must have at least one row; got none"),
        (NEW[["bark", "height", "bark"]], "`X` must name each column once; got bark twice"),
    ):
        with pytest.raises(ValueError, match=message):
            FITTED.predict(frame)


def test_column_types_may_be_given() -> None:
    model = make(column_kinds={"rings": "category", "zone": "number", "notes": "category"}).fit(FRAME, Y)
    assert model.columns_["rings"].startswith("category: ")
    assert model.columns_["zone"] == "number"
    assert clone(model).get_params()["column_kinds"] == model.column_kinds


def test_invalid_frames_are_errors() -> None:
    cases: list[tuple[Any, Any, str]] = [
        (["a"], FRAME, "`column_kinds` must be a dict of names and kinds, or None; got list"),
        ({"bark": "colour"}, FRAME, "kinds of number, category, date, text, picture; got 'colour' for bark"),
        ({"skin": "text"}, FRAME, "`column_kinds` must name a feature of the table; got skin"),
        ({"bark": "date"}, FRAME, "`column_kinds` must name a column that holds a date; got bark"),
        ({"x0": "category"}, np.eye(N), "`column_kinds` must come with a data frame; got an array"),
        (None, FRAME[["country", "empty"]], "`X` must have a column of use; got dropped: country: constant"),
    ]
    for kinds, frame, message in cases:
        with pytest.raises((TypeError, ValueError), match=f"^.*{message}"):
            make(column_kinds=kinds).fit(frame, Y)


def test_samples_weights_and_groups_come_with_frames() -> None:
    model = make().partial_fit(FRAME, Y)
    np.testing.assert_array_equal(model.predict_proba(NEW), FITTED.predict_proba(NEW))
    model.partial_fit(NEW[:4], ["yew"] * 4)
    assert model.classes_.tolist() == [*KINDS, "yew"]
    assert model.decision_function(NEW).shape == (N, 4)
    groups = np.arange(N) // 2
    with sklearn.config_context(enable_metadata_routing=True):
        routed = make().set_fit_request(groups=True, sample_weight=True).set_score_request(sample_weight=True)
        params = {"groups": groups, "sample_weight": np.ones(N)}
        searched = GridSearchCV(routed, {"column_kinds": [{"rings": "category"}]}, cv=GroupKFold(2))
        searched.fit(FRAME, Y, **params)
    assert searched.best_score_ > 0.7
    assert searched.predict(NEW).shape == (N,)


@pytest.mark.parametrize("columns", ["names", "gaps", "booleans"])
def test_estimators_round_trip_through_a_file(columns: str, tmp_path: Path) -> None:
    path = tmp_path / "trees.safetensors"
    x: Any = FRAME if columns == "names" else np.random.default_rng(0).normal(size=(N, 4)) + np.arange(N)[:, None] % 3
    y = {"names": Y, "gaps": np.arange(N) % 3 + 7, "booleans": np.arange(N) % 3 > 0}[columns]
    if columns == "gaps":
        x[np.arange(N) % 5 == 0, 1] = np.nan
    saved = (
        make(random_state=3)
        .fit(x, y)
        .partial_fit(x[:2], {"names": ["alder", "yew"], "gaps": [-3, 100], "booleans": [True, False]}[columns])
    )
    saved.save(path)
    loaded = ProtoNetClassifier.load(path)
    np.testing.assert_array_equal(loaded.classes_, saved.classes_)
    np.testing.assert_array_equal(loaded.predict_proba(x), saved.predict_proba(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(saved)).predict_proba(x), saved.predict_proba(x))
    np.testing.assert_array_equal(loaded.predict(x), saved.predict(x))
    assert (loaded.columns_, loaded.n_features_in_) == (saved.columns_, saved.n_features_in_)
    names = getattr(loaded, "feature_names_in_", np.empty(0)).tolist()
    assert names == (list(x) if isinstance(x, pd.DataFrame) else [])
    assert loaded.get_params() == saved.get_params()
    assert loaded.classes_.dtype.kind == saved.classes_.dtype.kind
    more = {"names": ["yew"] * 3, "gaps": [100] * 3, "booleans": [False] * 3}[columns]
    grown = loaded.partial_fit(x[:3], more).predict_proba(x)
    np.testing.assert_array_equal(grown, saved.partial_fit(x[:3], more).predict_proba(x))


def test_a_saved_model_keeps_its_label_apart_from_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "trees.safetensors"
    make().fit(FRAME[["height", "bark"]].rename(columns={"bark": "label"}), Y).save(path)
    assert load_model(path).metadata.label_column == "label_"
    FITTED.save(path)
    model = load_model(path)
    odd = TrainingMetadata(seed=-1, column_descriptions={"height": "tall"})
    save_model(tmp_path / "odd.safetensors", replace(model, metadata=odd))
    loaded = ProtoNetClassifier.load(tmp_path / "odd.safetensors")
    assert loaded.get_params() == ProtoNetClassifier().get_params()
    assert list(loaded.columns_) == loaded.feature_names_in_.tolist() == list(model.columns or ())
    assert (model.metadata.label_column, model.metadata.dropped_columns) == ("kind", ("country", "empty"))
    assert model.metadata.sample_counts == (12, 12, 12)


def test_commands_match_names_of_columns_in_another_form(tmp_path: Path, run: Run) -> None:
    frame = FRAME[["rings", "bark"]].set_axis(["Gro\u0308\u00dfe", " bark"], axis=1)
    fitted, table = make().fit(frame, Y), tmp_path / "t.csv"
    fitted.save(tmp_path / "m.protonet")
    frame.assign(kind=Y).to_csv(table, index=False)
    predicted = pd.read_csv(io.StringIO(run("predict", tmp_path / "m.protonet", table)))
    assert predicted["class"].tolist() == fitted.predict(frame).tolist()
    output = run("fit", table, *FAST, "--column-type", "Gro\u0308\u00dfe=category", "-o", tmp_path / "other.protonet")
    assert "Gr\u00f6\u00dfe: category" in output


@pytest.mark.parametrize("labels", [np.arange(N) % 3 + 0.5, np.array([1, "a", 2] * 12, object)])
def test_classes_that_files_cannot_hold_are_refused(labels: Any, tmp_path: Path) -> None:
    model = make().fit(np.arange(N, dtype=float)[:, None], labels.astype(str))
    model.classes_ = np.array(sorted(set(labels.tolist()), key=str), dtype=labels.dtype)
    with pytest.raises(ValueError, match=r"^`classes_` must be all strings or all whole numbers to be"):
        model.save(tmp_path / "trees.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no such file"):
        ProtoNetClassifier.load(tmp_path / "none.safetensors")


def make_objects() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(30) % 3
    x = np.array([[["red", "blue", "green"][kind], rng.normal(), rng.normal()] for kind in y], object)
    x[4, 1] = None
    return x, y


def test_arrays_of_objects_may_hold_text() -> None:
    x, y = make_objects()
    model = ProtoNetClassifier().fit(x, y)
    assert model.score(x, y) == 1
    assert model.n_features_in_ == 3
    assert model.columns_["x0"] == "category: blue, green, red"
    assert np.array_equal(model.predict(x.tolist()), model.predict(x))
    importances = model.feature_importances()
    assert importances.shape == (3,)
    assert importances.argmax() == 0
    selector = SelectFromModel(model, importance_getter=ProtoNetClassifier.feature_importances, prefit=True)
    assert selector.get_support().tolist() == [True, False, False]


@pytest.mark.parametrize("form", ["date", "Timestamp", "timedelta", "Timedelta", "datetime64", "NA", "NaT", "bytes"])
def test_arrays_may_hold_dates_and_other_objects(form: str) -> None:
    rng = np.random.default_rng(0)
    y = np.array(["a", "b"])[np.arange(30) % 2]
    days = [int(day) for day in 100 * (np.arange(30) % 2) + rng.integers(0, 60, 30)]
    dates = [datetime.date(2020, 1, 1) + datetime.timedelta(day) for day in days]
    cells: list[Any] = {
        "date": dates,
        "Timestamp": [pd.Timestamp(day) for day in dates],
        "timedelta": [datetime.timedelta(day) for day in days],
        "Timedelta": [pd.Timedelta(day, "D") for day in days],
        "datetime64": [np.datetime64(day) for day in dates],
        "NA": [pd.NA, *days[1:]],
        "NaT": [pd.NaT, *map(pd.Timestamp, dates[1:])],
        "bytes": [b"red" if label == "a" else b"green" for label in y],
    }[form]
    x = np.empty((30, 2), object)
    x[:, 0], x[:, 1] = cells, rng.normal(size=30)
    model = make().fit(x, y)
    assert model.score(x, y) > 0.8
    assert np.array_equal(make().fit(x.tolist(), y).predict(x.tolist()), model.predict(x))


def test_files_of_other_suffixes_are_refused(tmp_path: Path) -> None:
    for name in ("m.bin", "m"):
        with pytest.raises(InputError, match=r"`path` must end in \.protonet"):
            FITTED.save(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_texts_may_come_without_columns() -> None:
    notes = make_frame()["notes"]
    model = make(representation="none").fit(notes.tolist(), Y)
    assert model.columns_["x0"].startswith("text: ")
    expected = model.predict_proba(notes.tolist())
    assert (model.predict(notes.tolist()) == Y).all()
    pyarrow = pytest.importorskip("pyarrow")
    for texts in (notes, notes.to_numpy(), tuple(notes), pyarrow.array(notes), notes.to_numpy()[:, None]):
        np.testing.assert_array_equal(model.predict_proba(texts), expected)
        np.testing.assert_array_equal(make(representation="none").fit(texts, Y).predict_proba(texts), expected)
    marked = np.array(Y, object)
    marked[:3] = None
    learner = make(representation="none").fit(notes.tolist()[3:], Y[3:], unlabelled=notes.tolist()[:3])
    again = make(representation="none").fit(notes.tolist(), marked)
    np.testing.assert_array_equal(again.predict_proba(notes), learner.predict_proba(notes))


@pytest.mark.parametrize("form", [list, lambda texts: pd.DataFrame({"text": texts, "rank": [1, 1, 2, 2]})])
def test_few_short_texts_are_no_categories(form: Callable[[list[str]], Any]) -> None:
    model = make(representation="none").fit(
        form(["great film", "great cast", "awful film", "awful plot"]), [1, 1, 0, 0]
    )
    assert model.predict(form(["great idea", "awful idea", "a great day", "an awful day"])).tolist() == [1, 0, 1, 0]


def test_rows_of_other_types_are_errors() -> None:
    frame = make_frame()
    for rows, got in (
        (frame.to_dict("records"), "a list of dicts"),
        (frame.to_dict("list"), "dict"),
        ("a text", "str"),
        (iter(frame["notes"].tolist()), "list_iterator"),
        (Path("a.csv"), "PosixPath"),
        (None, "NoneType"),
    ):
        with pytest.raises(InputTypeError, match=rf"^`X` must have rows and columns; got {got}\. Pass "):
            make().fit(rows, Y)
        with pytest.raises(InputTypeError, match=rf"^`X` must have rows and columns; got {got}\. Pass "):
            FITTED.predict(rows)
        if rows is not None:
            with pytest.raises(InputTypeError, match=rf"^`unlabelled` must have rows and columns; got {got}\. Pass "):
                make().fit(frame, Y, unlabelled=rows)


def test_lazy_frames_are_collected() -> None:
    polars = pytest.importorskip("polars")
    lazy = polars.from_pandas(FRAME.drop(columns="zone")).lazy()
    model = make().fit(lazy, Y)
    assert model.columns_ == {name: text for name, text in FITTED.columns_.items() if name != "zone"}
    np.testing.assert_array_equal(model.predict_proba(lazy), model.predict_proba(lazy.collect()))


@pytest.mark.filterwarnings("ignore:.* near-duplicates")
def test_data_sets_of_the_hub_are_frames() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {"text": FRAME["notes"].tolist(), "rings": FRAME["rings"].tolist(), "y": Y.tolist()}
    )
    shuffled = data.shuffle(seed=0)
    x = shuffled.remove_columns("y")
    model = make().fit(x, shuffled["y"])
    np.testing.assert_array_equal(model.predict_proba(x), model.predict_proba(x.to_pandas()))
    assert (model.predict(x) == np.array(shuffled["y"])).mean() > 0.9
    texts = make(representation="none").fit(shuffled["text"], shuffled["y"])
    assert (texts.predict(data["text"]) == Y).mean() > 0.9
    with pytest.raises(InputTypeError, match="`X` must have rows and columns; got DatasetDict"):
        make().fit(datasets.DatasetDict(train=x), Y)


class LetterCounts:
    """An encoder of texts as a program may pass it: an object with a method ``encode``."""

    def encode(self, texts: list[str]) -> list[list[float]]:
        return [[float(text.count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


class OneNumber:
    def encode(self, texts: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]


def test_an_encoder_may_be_an_object(tmp_path: Path) -> None:
    texts = make_frame()[["notes"]]
    model = make(representation=LetterCounts()).fit(texts, Y)
    assert re.match(r"text by LetterCounts \(\w{8}\), 26 numbers", model.columns_["notes"])
    expected = model.predict_proba(texts)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict_proba(texts), expected)
    assert clone(model).fit(texts, Y).predict_proba(texts).shape == expected.shape
    model.save(tmp_path / "m.protonet")
    loaded = ProtoNetClassifier.load(tmp_path / "m.protonet", representation=LetterCounts())
    np.testing.assert_array_equal(loaded.predict_proba(texts), expected)
    with pytest.raises(InputError, match=r"`representation` must be that of fit, LetterCounts \(\w{8}\), 26 numbers"):
        ProtoNetClassifier.load(tmp_path / "m.protonet").predict(texts)
    with pytest.raises(InputError, match=r"gives a row for each of 2 texts; got an array of shape \(2,\) of OneNumber"):
        make(representation=OneNumber()).fit(texts, Y)
    with pytest.raises(InputTypeError, match="`representation` must be a name, an object with a method encode, or"):
        make(representation=3).fit(texts, Y)
    with pytest.raises(InputError, match="`representation` must come with a column of texts; got LetterCounts"):
        make(representation=LetterCounts()).fit(FRAME[["height", "bark"]], Y)


def test_numbers_are_expected_where_fit_had_numbers() -> None:
    x = np.random.default_rng(0).normal(size=(N, 2))
    model = make().fit(x, Y)
    for rows in ([["red", 1.0]], np.array([["red", 1.0]], object)):
        with pytest.raises(InputError, match="`X` must hold numbers, as the rows of fit did; got 'red' in x0"):
            model.predict(rows)


def test_class_weights_are_sample_weights() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [40, 8])
    x = rng.normal(size=(48, 2)) + 0.8 * y[:, None]
    expected = ProtoNetClassifier().fit(x, y, np.array([0.6, 3.0])[y]).predict_proba(x)
    model = ProtoNetClassifier(class_weight="balanced").fit(x, y)
    np.testing.assert_allclose(model.predict_proba(x), expected, atol=1e-6)
    with pytest.raises(InputError, match="`class_weight` must be "):
        ProtoNetClassifier(class_weight="even").fit(x, y)


def test_labels_of_pandas_integers_stay_exact() -> None:
    x, large = np.arange(24.0)[:, None], [2**53, 2**53 + 1]
    for labels in (large * 12, [*large, None] * 8):
        model = make().fit(x, pd.Series(labels, dtype="Int64"))
        assert model.classes_.tolist() == large
        assert model.partial_fit(x[:2], pd.Series(large, dtype="Int64")).classes_.tolist() == large
