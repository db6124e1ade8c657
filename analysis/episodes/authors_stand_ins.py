"""What stands for packages that authors' code imports, and for what it does with labels.

What only their training needs, and is not installed, is replaced by modules that do nothing; their GPU by this
processor; TensorFlow and faiss by the few functions that are used of them.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
#: Packages that these repositories import for training, plots and logs alone.
UNUSED = (
    *("configargparse", "cvxpy", "faiss", "loguru", "matplotlib", "matplotlib.pyplot", "networkx", "pyod", "requests"),
    *("sacred", "seaborn", "tarjan", "torchvision", "torchvision.transforms", "visdom_logger"),
)


class Labels(Tensor):
    """Labels that keep what they are compared with: predictions, of which some of the code tells the accuracy alone."""

    compared: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the other side of a comparison."""
        if func in {Tensor.__eq__, Tensor.eq, torch.eq}:
            cls.compared.append(next(each for each in args if not isinstance(each, cls)))
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result.view(LabelArray) if func is Tensor.numpy else result

    @classmethod
    def take_last(cls, n_rows: int) -> Array:
        """Return the last predictions (n_rows, queries), and forget all."""
        rows: list[Array] = []
        while len(rows) < n_rows:
            rows = [*np.atleast_2d(np.asarray(cls.compared.pop())), *rows]
        cls.compared.clear()
        return np.stack(rows)


class LabelArray(np.ndarray[Any, Any]):
    """The same in NumPy."""

    def __eq__(self, other: object) -> Any:
        """Keep the other side."""
        Labels.compared.append(other)
        return np.asarray(self) == other

    __hash__ = None


class Model(torch.nn.Module):
    """What stands for their backbone: features as they are."""

    def forward(self, rows: Tensor, feature: bool = True) -> tuple[Tensor, None]:
        """Return the rows, and no logits."""
        assert feature
        return rows, None


class Ingredient:
    """What TIM uses of sacred: functions take the arguments that they are not given from settings."""

    values: dict[str, Any] = {}  # noqa: RUF012 - one for all

    def __init__(self, name: str) -> None:
        del name

    def config(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the settings that are written there: ours are passed."""
        return function

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Fill in arguments by name."""
        names = list(inspect.signature(function).parameters)

        @wraps(function)
        def filled(*arguments: Any, **given: Any) -> Any:
            missing = [name for name in names[len(arguments) :] if name not in given and name in self.values]
            return function(*arguments, **given, **{name: self.values[name] for name in missing})

        return filled


class _Whatever(type):
    """The type of a class that has any attribute."""

    def __getattr__(cls, name: str) -> type[Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_Whatever):
    """What stands for anything in a package that is not there: a class, a function, a module."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        del arguments, given


def _find(name: str) -> type[Ingredient | Nothing]:
    """Return what stands for a name in a package that is not there."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Ingredient if name == "Ingredient" else Nothing


@contextmanager
def stand_in() -> Iterator[None]:
    """Replace the packages that are not there by modules that do nothing, and the GPU by the processor."""
    added, names, cuda = [], dict(vars(np)), torch.Tensor.cuda
    for name in UNUSED:
        if name not in sys.modules and ("." in name or importlib.util.find_spec(name) is None):
            module = sys.modules[name] = types.ModuleType(name)
            module.__getattr__ = _find  # type: ignore[method-assign]
            added.append(name)
    vars(np).update(float=float, in1d=np.isin)  # what NumPy called them then
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
        for name in {"float", "in1d"} - names.keys():
            del vars(np)[name]
        torch.Tensor.cuda = cuda  # type: ignore[method-assign]


class Index:
    """What iLPC uses of faiss: the nearest rows by inner product."""

    def __init__(self, *_: Any) -> None:
        self.rows = np.empty(0)

    @property
    def ntotal(self) -> int:
        """How many rows there are."""
        return len(self.rows)

    def add(self, rows: Any) -> None:
        """Search these rows."""
        self.rows = rows

    def search(self, queries: Any, k: int) -> tuple[Any, Any]:
        """Return the ``k`` largest products of each query, and which rows they are with."""
        products = queries @ self.rows.T
        found = np.argsort(-products, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(products, found, axis=1), found


def scale_rows(rows: Any) -> None:
    """Scale rows to unit norm in place, as faiss does."""
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)


class Graph(types.ModuleType):
    """What two repositories use of TensorFlow 1."""

    def __init__(self) -> None:
        super().__init__("tensorflow")
        self.__version__ = "1"
        for name in ("einsum", "exp", "log", "ones", "reshape", "rsqrt", "sigmoid", "sqrt", "square", "zeros_like"):
            setattr(self, name, getattr(torch, name))
        self.expand_dims, self.equal, self.to_float, self.float32 = (
            torch.unsqueeze,
            torch.eq,
            Tensor.float,
            torch.float32,
        )
        self.shape, self.gather, self.newaxis = (lambda x: x.shape), (lambda x, index: x[index]), None
        self.cast = lambda x, kind: torch.as_tensor(x).to(kind)
        self.stop_gradient, self.argmax = Tensor.detach, lambda x, axis: x.argmax(dim=axis)
        self.log = lambda x: torch.as_tensor(x).log()
        self.matmul = lambda a, b, transpose_b: a @ b.T if transpose_b else a @ b
        self.cond = lambda which, first, second: first() if which else second()
        self.name_scope = lambda _: nullcontext()
        for name, own in {"sum": "sum", "mean": "mean", "min": "amin", "max": "amax"}.items():
            setattr(self, f"reduce_{name}", partial(self.reduce, own))
        self.nn = Namespace(softmax=lambda x: x.softmax(dim=-1), moments=self.moments, tanh=torch.tanh)
        segments = {name: partial(self.join, name) for name in ("amax", "sum")}
        self.math = Namespace(unsorted_segment_max=segments["amax"], unsorted_segment_sum=segments["sum"])

    def reduce(self, how: str, x: Tensor, axis: Any = None, keep_dims: bool = False, keepdims: bool = False) -> Tensor:
        """Reduce over axes."""
        axes = tuple(range(x.ndim)) if axis is None else axis
        reduced: Tensor = getattr(torch, how)(x, axes, keepdim=keep_dims or keepdims)
        return reduced

    def moments(self, x: Tensor, axis: Any, keep_dims: bool = False) -> tuple[Tensor, Tensor]:
        """Return mean and variance."""
        return x.mean(axis, keepdim=keep_dims), x.var(axis, correction=0, keepdim=keep_dims)

    def join(self, how: str, x: Tensor, labels: Tensor, count: Any) -> Tensor:
        """Reduce the rows of each class."""
        index = labels.view(-1, *[1] * (x.ndim - 1)).expand_as(x)
        start = x.new_full((int(count), *x.shape[1:]), -torch.inf if how == "amax" else 0.0)
        return start.scatter_reduce(0, index, x, how)

    def __getattr__(self, name: str) -> Any:
        """Return what does nothing."""
        return _find(name)
