"""scikit-learn's digits as a `Dataset`, and the methods of `Dataset`."""

from __future__ import annotations

import sys

import pytest
import torch
from sklearn import datasets

from protonet.datasets import Dataset, load_digits
from protonet.datasets.dataset import make_dataset
from protonet.errors import MissingPackageError


def test_digits_equal_scikit_learns() -> None:
    data = load_digits()
    x, y = datasets.load_digits(return_X_y=True)
    assert (tuple(data.x.shape), data.x.dtype, data.y.dtype) == ((1797, 64), torch.float32, torch.int64)
    torch.testing.assert_close(data.x.double() * 16, torch.from_numpy(x))
    assert data.y.tolist() == y.tolist()
    assert data.class_names == tuple("0123456789")
    assert data.num_classes == 10
    assert data.sides is None


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # what Python does for a package that is not there
    line = r"`sklearn` must be installed\. "
    with pytest.raises(MissingPackageError, match=line + r'Run pip install -e "\.\[analysis\]"\.$'):
        load_digits()


def small() -> Dataset:
    sides = ["novel", "base", "novel", "base", "validation"]
    return make_dataset("x", torch.arange(10.0).reshape(5, 2), ["b", "a", "b", "a", "c"], sides)


def test_select_classes_renumbers() -> None:
    part = small().select_classes([2, 1])
    assert part.x.tolist() == [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]
    assert part.y.tolist() == [1, 1, 0]
    assert (part.class_names, part.sides) == (("c", "b"), ("validation", "novel"))
    assert small().select_side("novel").class_names == ("b",)


def test_errors_of_selections() -> None:
    for classes, message in (([0, 0], "name each class once; got .0, 0."), ([3], r"be in \[0, 3\); got 3")):
        with pytest.raises(ValueError, match=f"^`class_ids` must .*{message}"):
            small().select_classes(classes)
    with pytest.raises(ValueError, match=r"^`side` must be a side that has classes; got 'test' of"):
        small().select_side("test")
    with pytest.raises(ValueError, match="got 'base' of no split"):
        load_digits().select_side("base")
