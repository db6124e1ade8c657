"""Restricted unpickling loads data as pickle does, and runs no code."""

from __future__ import annotations

import collections
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protonet.datasets.features import load_pickle

BY_CLASS = collections.defaultdict(list, {0: [np.arange(3, dtype=np.float32)], 1: [np.ones(3, np.float32)] * 2})
CONTENTS: dict[str, Any] = {
    "rows by class": BY_CLASS,
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


def write(path: Path, content: object, protocol: int) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


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
            path = write(tmp_path / "a.pkl", content, protocol)
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
    path = write(tmp_path_factory.getbasetemp() / "a.pkl", array, protocol)
    result, expected = load_pickle("path", str(path)), pickle.loads(path.read_bytes())
    assert (result.dtype, result.shape, result.tobytes()) == (expected.dtype, array.shape, expected.tobytes())


def test_pickles_of_python_2_are_text_in_latin_1(tmp_path: Path) -> None:
    # {'labels': ['\xe9'], 'data': array([1, 255], uint8)}, as Python 2 and its NumPy wrote it.
    text = b"(dp0\nS'labels'\np1\n(lp2\nS'\\xe9'\np3\nasS'data'\np4\ncnumpy.core.multiarray\n_reconstruct\np5\n"
    text += b"(cnumpy\nndarray\np6\n(I0\ntp7\nS'b'\np8\ntp9\nRp10\n(I1\n(I2\ntp11\ncnumpy\ndtype\np12\n"
    text += (
        b"(S'u1'\np13\nI0\nI1\ntp14\nRp15\n(I3\nS'|'\np16\nNNNI-1\nI-1\nI0\ntp17\nbI00\nS'\\x01\\xff'\np18\ntp19\nbs."
    )
    (tmp_path / "a.pkl").write_bytes(text)
    result = load_pickle("path", tmp_path / "a.pkl")
    assert result["labels"] == ["é"]
    assert (result["data"].tolist(), result["data"].dtype) == ([1, 255], np.dtype(np.uint8))


class Call:
    """An object that pickle writes as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Sub(np.ndarray[Any, Any]):
    pass


def test_other_types_are_refused_in_one_line(tmp_path: Path) -> None:
    content_cases: list[tuple[object, str]] = [
        (Call(exec, "raise SystemExit('it was run')"), r"builtins\.exec"),
        (Call(getattr, {}, "get"), r"builtins\.getattr"),
        (Call(Path, "x"), r"pathlib\S*\.\w*Path"),
        (Call(torch.load, "x"), r"torch\.serialization\.load"),
        (Path.unlink, r"builtins\.getattr|pathlib\S*\.Path\S*"),
        (np.array([{}], object), "an array of dtype O8"),
        (np.zeros(2, "i4,f4"), "an array of dtype V8"),
        (np.array(["2020"], "M8[D]"), "an array of dtype M8"),
        (np.ma.zeros(3), r"numpy\.ma"),
        (np.zeros(3).view(Sub), r"tests\.datasets\.test_unpickling\.Sub"),
        (torch.nn.Linear(1, 1), r"torch\.nn"),
    ]
    for content, named in content_cases:
        for protocol in (2, 5):
            path = write(tmp_path / "a.pkl", [1, content], protocol)
            with pytest.raises(
                ValueError, match=rf"^`path` must be a pickle .*a\.pkl with ({named})\S*, which is not loaded"
            ):
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
        load_pickle("path", write(tmp_path / "a.pkl", Forged(), 2))


def test_a_dtype_that_hides_objects_is_refused(tmp_path: Path) -> None:
    class Forged:
        def __reduce__(self) -> Any:
            return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)  # no flag of a reference

    path = write(tmp_path / "a.pkl", Forged(), 2)
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
