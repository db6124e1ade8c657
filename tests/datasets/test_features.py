"""Features in the files of other programs: every form is loaded, and anything else is refused in one line."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.datasets import load_features

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.array([3, 1, 1, 7, 3, 1])
ORDER = [np.flatnonzero(label == Y) for label in (3, 1, 7)]  # as classes are met
BY_CLASS = {int(Y[rows[0]]): X[rows] for rows in ORDER}


def save_pickle(path: Path, content: Any) -> None:
    path.write_bytes(pickle.dumps(content))


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
FORMS: dict[str, tuple[str, Callable[[Path, Any], None], Any, bool]] = {
    "NPY": (".npy", save_npy, (X, Y), False),
    "torch, a pair": (".pt", save_torch, (torch.tensor(X), torch.tensor(Y)), False),
    "torch, by name": (".pth", save_torch, NAMED, False),
    "torch, by class": (".pt", save_torch, {label: list(rows) for label, rows in TENSORS.items()}, True),
    "pickle of S2M2": (".plk", save_pickle, collections.defaultdict(list, LISTS), True),
    "pickle of LaplacianShot": (".plk", save_pickle, [X.mean(0), -1, BY_CLASS, {3: [None]}], True),
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


class Hostile:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it was run')",)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    save_pickle(tmp_path / "a.plk", {0: Hostile()})
    with pytest.raises(ValueError, match=r"got .*a\.plk with builtins\.exec, which is not loaded"):
        load_features(tmp_path / "a.plk")
    torch.save({"x": Hostile()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"of tensors and containers alone; got .*a\.pt \(\w+\)"):
        load_features(tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([Hostile()], object), allow_pickle=True)
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
