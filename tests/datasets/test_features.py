"""Features in the files of other programs: every form is loaded, no code is run, anything else is refused in a line."""

from __future__ import annotations

import collections
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protonet.datasets import load_features
from protonet.datasets.features import load_pickle

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.array([3, 1, 1, 7, 3, 1])
ORDER = [np.flatnonzero(label == Y) for label in (3, 1, 7)]  # as classes are met
BY_CLASS = {int(Y[rows[0]]): X[rows] for rows in ORDER}


class Call:
    """An object that pickle writes as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


HOSTILE = Call(exec, "raise SystemExit('it was run')")


def save_pickle(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def save_npy(path: Path, content: Any) -> None:
    np.save(path, content[0])
    np.save(path.with_name(f"{path.stem}_labels.npy"), content[1])


def save_torch(path: Path, content: Any) -> None:
    torch.save(content, path)


LISTS = {label: list(rows) for label, rows in BY_CLASS.items()}
TENSORS = {label: torch.tensor(rows) for label, rows in BY_CLASS.items()}
NAMED = {"features": torch.tensor(X).bfloat16(), "labels": Y.tolist(), "epoch": 3}
TIM = {"concat_features": torch.tensor(X), "concat_labels": torch.tensor(Y)}
#: For each form: the file's suffix, the function that saves the content, the content, and whether it is by class.
FORMS: dict[str, tuple[str, Callable[[Path, Any], object], Any, bool]] = {
    "NPY": (".npy", save_npy, (X, Y), False),
    "torch, a pair": (".pt", save_torch, (torch.tensor(X), torch.tensor(Y)), False),
    "torch, by name": (".pth", save_torch, NAMED, False),
    "torch, by class": (".pt", save_torch, {label: list(rows) for label, rows in TENSORS.items()}, True),
    "pickle of S2M2": (".plk", save_pickle, collections.defaultdict(list, LISTS), True),
    "pickle of TIM": (".plk", save_pickle, TIM, False),
    "pickle of tensors by class": (".pickle", save_pickle, {torch.tensor(c): x for c, x in TENSORS.items()}, True),
    "pickle, a pair": (".pkl", save_pickle, [X.tolist(), Y.tolist()], False),
}


def test_every_form_of_a_file_is_loaded(tmp_path: Path) -> None:
    for name, (suffix, save, content, by_class) in FORMS.items():
        path = tmp_path / f"a{suffix}"
        save(path, content)
        data = load_features(str(path))
        order = np.concatenate(ORDER) if by_class else np.arange(6)
        assert data.class_names == ("1", "3", "7"), name
        assert [int(data.class_names[label]) for label in data.y.tolist()] == Y[order].tolist(), name
        assert torch.equal(data.x, torch.tensor(X[order])), name
        assert (data.sides, data.memory_map, data.shape) == (None, None, None), name


@pytest.mark.parametrize("name", ["{}.labels.npy", "{}_labels.npy", "labels.npy", "y.npy"])
def test_labels_with_an_npy_file(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "train.npy", X.reshape(6, 2, 2).astype(np.float16))
    np.save(tmp_path / name.format("train"), np.array([b"b", b"a", b"a", b"c", b"b", b"a"]))
    data = load_features(tmp_path / "train.npy")
    assert data.class_names == ("a", "b", "c")
    assert torch.equal(data.x, torch.tensor(X))


def test_sides_of_a_file_are_loaded(tmp_path: Path) -> None:
    content = {"x": X, "y": list("baacba"), "split": ["val", "train", "train", "Test", "val", "train"]}
    save_pickle(tmp_path / "a.pkl", content)
    assert load_features(tmp_path / "a.pkl").sides == ("base", "validation", "novel")
    save_pickle(tmp_path / "a.pkl", content | {"split": ["train"] * 5 + ["val"]})
    with pytest.raises(ValueError, match=r"^`path` must keep every class on one side; got class a on"):
        load_features(tmp_path / "a.pkl")


def test_files_without_features_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[object, str]] = [
        ({"a": 1, "b": 2}, r"rows by class; got a dictionary of a, b in .*a\.pkl\. Save it with numpy\.savez"),
        ({}, "got a dictionary of nothing"),
        (3, "got a int in"),
        ({"image_data": X, "class_dict": {}}, r"got a dictionary of image_data, .*pictures are read as KIND:FOLDER"),
        ({"a": [X[0], X[1, :2]], "b": [X[0]]}, r"got rows that are no array \(ValueError\)"),
        ({"a": [X[0]], "b": [X[0, :2]]}, "got classes whose rows are of several shapes"),
        ([X, Y[:5]], "have one label per row; got 5 for 6 rows"),
        ([X[:, 0], Y], r"hold real features of shape \(n, dim\); got float32 \(6,\)"),
        ([X.astype(str), Y], r"hold real features of shape \(n, dim\); got <U"),
        ([np.where(X == 5, np.nan, X), Y], r"be finite; got NaN or infinity in 1 of 6 rows: 1"),
        ([X, Y / 2], "be integers or strings; got float64"),
        ([X, np.ones(6)[None].astype(int)[:, :5]], "one label per row"),
        ({0: X}, "have at least 2 classes; got 1"),
    ]
    for content, message in cases:
        save_pickle(tmp_path / "a.pkl", content)
        with pytest.raises(ValueError, match=rf"^`\w+` must .*{message}"):
            load_features(tmp_path / "a.pkl")


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"x": HOSTILE}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"of tensors and containers alone; got .*a\.pt \(\w+\)"):
        load_features(tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([HOSTILE], object), allow_pickle=True)
    np.save(tmp_path / "y.npy", Y)
    with pytest.raises(ValueError, match=r"be an NPY file of numbers or strings; got .*a\.npy \(ValueError\)"):
        load_features(tmp_path / "a.npy")


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^`path` must end in \.npy, \.pt, .*; got .*a\.mat\. Rename"):
        load_features(tmp_path / "a.mat")
    for name in ("a.npy", "a.pt", "a.pkl"):
        with pytest.raises(ValueError, match=rf"^no such file: .*{name}"):
            load_features(tmp_path / name)
        (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"have its labels beside it, in a\.labels\.npy or .*; got .*a\.npy alone"):
        load_features(tmp_path / "a.npy")
    np.save(tmp_path / "labels.npy", Y)
    with pytest.raises(ValueError, match=r"be an NPY file of numbers or strings; got .*a\.npy \(ValueError\)"):
        load_features(tmp_path / "a.npy")
    with pytest.raises(ValueError, match=r"be a file of torch\.save, .*; got .*a\.pt \(\w+\)"):
        load_features(tmp_path / "a.pt")


ROWS_BY_CLASS = collections.defaultdict(list, {0: [np.arange(3, dtype=np.float32)], 1: [np.ones(3, np.float32)] * 2})
CONTENTS: dict[str, Any] = {
    "rows by class": ROWS_BY_CLASS,
    "in columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">i2"),
    "text": np.array(["a", "längst"]),
    "bytes": np.array([b"a", b"\xff"]),
    "scalars": [np.float32(0.5), np.int64(-1), np.bool_(True)],
    "empty": np.zeros((0, 2, 3)),
    "one number": np.array(3.5),
    "builtins": {"a": (1, 2.5, None, True), "b": {1, 2}, "c": frozenset("x"), "d": b"\x00\xff", "e": bytearray(b"y")},
    "ordered": collections.OrderedDict(b=1, a=2),
    "tensors": {"x": torch.arange(6.0).reshape(2, 3), "y": torch.tensor([1, 0])},
    "tensors as keys": {torch.tensor(3): torch.ones(2, 3)},
}


def same(result: Any, expected: Any) -> bool:
    if isinstance(expected, (np.ndarray, np.generic)):
        result = np.asarray(result)
        return (result.dtype, result.shape) == (expected.dtype, expected.shape) and result.tolist() == expected.tolist()
    if isinstance(expected, torch.Tensor):
        return torch.equal(result, expected) and result.dtype == expected.dtype
    if isinstance(expected, dict):
        pairs = zip(result.items(), expected.items(), strict=True)
        return type(result) is type(expected) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(expected, (list, tuple)):
        return type(result) is type(expected) and all(same(a, b) for a, b in zip(result, expected, strict=True))
    return type(result) is type(expected) and bool(result == expected)


def test_unpickling_agrees_with_pickle(tmp_path: Path) -> None:
    for protocol in range(6):
        for name, content in CONTENTS.items():
            path = save_pickle(tmp_path / "a.pkl", content, protocol)
            assert same(load_pickle("path", path), pickle.loads(path.read_bytes())), (name, protocol)


@settings(max_examples=25)
@given(
    array=hnp.arrays(
        st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.unicode_string_dtypes()),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
        fill=st.nothing(),
    ),
    protocol=st.integers(0, 5),
)
def test_arrays_are_unpickled_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, protocol: int
) -> None:
    path = save_pickle(tmp_path_factory.getbasetemp() / "a.pkl", array, protocol)
    result, expected = load_pickle("path", str(path)), pickle.loads(path.read_bytes())
    assert (result.dtype, result.shape, result.tobytes()) == (expected.dtype, array.shape, expected.tobytes())


def test_pickles_of_python_2_are_text_in_latin_1(tmp_path: Path) -> None:
    # {'labels': ['\xe9'], 'data': array([1, 255], uint8)}, as Python 2 and its NumPy wrote it.
    text = b"(dp0\nS'labels'\np1\n(lp2\nS'\\xe9'\np3\nasS'data'\np4\ncnumpy.core.multiarray\n_reconstruct\np5\n"
    text += b"(cnumpy\nndarray\np6\n(I0\ntp7\nS'b'\np8\ntp9\nRp10\n(I1\n(I2\ntp11\ncnumpy\ndtype\np12\n"
    text += b"(S'u1'\np13\nI0\nI1\ntp14\nRp15\n(I3\nS'|'\np16\nNNNI-1\nI-1\nI0\ntp17\nb"
    text += b"I00\nS'\\x01\\xff'\np18\ntp19\nbs."
    (tmp_path / "a.pkl").write_bytes(text)
    result = load_pickle("path", tmp_path / "a.pkl")
    assert result["labels"] == ["é"]
    assert (result["data"].tolist(), result["data"].dtype) == ([1, 255], np.dtype(np.uint8))


class Sub(np.ndarray[Any, Any]):
    pass


def test_other_types_are_refused_in_one_line(tmp_path: Path) -> None:
    content_cases: list[tuple[object, str]] = [
        (HOSTILE, r"builtins\.exec"),
        (Call(getattr, {}, "get"), r"builtins\.getattr"),
        (Call(Path, "x"), r"pathlib\S*\.\w*Path"),
        (Call(torch.load, "x"), r"torch\.serialization\.load"),
        (Path.unlink, r"builtins\.getattr|pathlib\S*\.Path\S*"),
        (np.array([{}], object), "an array of dtype O8"),
        (np.zeros(2, "i4,f4"), "an array of dtype V8"),
        (np.array(["2020"], "M8[D]"), "an array of dtype M8"),
        (np.ma.zeros(3), r"numpy\.ma"),
        (np.zeros(3).view(Sub), r"tests\.datasets\.test_features\.Sub"),
        (torch.nn.Linear(1, 1), r"torch\.nn"),
    ]
    for content, named in content_cases:
        for protocol in (2, 5):
            path = save_pickle(tmp_path / "a.pkl", [1, content], protocol)
            message = rf"^`path` must be a pickle .*a\.pkl with ({named})\S*, which is not loaded"
            with pytest.raises(ValueError, match=message):
                load_pickle("path", path)


@pytest.mark.parametrize(
    "state",
    [
        (1, (2,), np.dtype("i4"), False, b"1234"),  # fewer bytes than the shape says
        (1, (2,), np.dtype("i4"), False, [1, 2]),
        (1, (2,), "O", False, b"0" * 16),
    ],
)
def test_an_array_that_does_not_fit_together_is_refused(tmp_path: Path, state: Any) -> None:
    class Forged:
        def __reduce__(self) -> Any:
            return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), state

    with pytest.raises(ValueError, match="must be a pickle of arrays"):
        load_pickle("path", save_pickle(tmp_path / "a.pkl", Forged(), 2))


def test_a_dtype_that_hides_objects_is_refused(tmp_path: Path) -> None:
    class Forged:
        def __reduce__(self) -> Any:
            return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)  # no flag of a reference

    path = save_pickle(tmp_path / "a.pkl", Forged(), 2)
    assert any(code.name == "BUILD" for code, _, _ in pickletools.genops(path.read_bytes()))
    with pytest.raises(ValueError, match="an array of dtype O8"):
        load_pickle("path", path)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    for content in (b"", b"no pickle", pickle.dumps(np.zeros(9))[:-20], b"\x80\x05R.", b"I1\n"):
        (tmp_path / "a.pkl").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.pkl \(\w+\)\. It is damaged or none: get it again\."):
            load_pickle("path", tmp_path / "a.pkl")
    with pytest.raises(ValueError, match=r"^no such file: .*absent"):
        load_pickle("path", tmp_path / "absent")
