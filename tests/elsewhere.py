"""A second device on any machine: real numbers that say that they are elsewhere, and a mode that lets none be mixed.

`Elsewhere` runs everything for real, so that code goes through every branch; torch's own `FakeTensorMode` has no
numbers, but torch's own rules. What code may do is a little less than on a GPU, where torch copies an index for itself:
whatever goes from one device to another has to say so.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import protonet

#: What such tensors call their device. Torch has nothing to do for it, be there a GPU or not.
AWAY = torch.device("meta")
#: What reads one number, for a branch: slow on a GPU, but no mistake.
READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::_linalg_check_errors"}
COPIES = {"aten::_to_copy", "aten::copy_"}
HOUSE = str(Path(protonet.__file__).parent)


class MixedDevicesError(RuntimeError):
    """An operation of tensors on two devices, or of a generator on another one."""


class Away(Tensor):
    """A tensor that says that it is on ``AWAY``, with its numbers on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Away:
        """Wrap numbers, which others may share."""
        made: Away = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device=AWAY,
        )
        made.numbers = numbers
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the numbers, and that they are elsewhere."""
        return f"Away({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do nothing outside an `Elsewhere`."""
        raise MixedDevicesError(f"{func} outside of Elsewhere")


class FromPython(TorchFunctionMode):
    """Make what Python's numbers and lists become on a device, and the reverse, the way that `Elsewhere` can see.

    Args:
        read: Counts the reads.
    """

    def __init__(self, read: Counter[str]) -> None:
        super().__init__()
        self.read = read

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Make tensors on the CPU, and copy them."""
        kwargs = kwargs or {}
        if func in {torch.tensor, torch.as_tensor, Tensor.new_tensor}:
            device = kwargs.pop("device", args[0].device if func is Tensor.new_tensor else None)
            if func is Tensor.new_tensor:
                kwargs, args = {"dtype": args[0].dtype} | kwargs, args[1:]
            made = (torch.as_tensor if func is torch.as_tensor else torch.tensor)(*args, **kwargs)
            return made if device is None else made.to(device)
        if func is Tensor.tolist and isinstance(args[0], Away):
            self.read[_find_caller()] += 1
            return args[0].numbers.tolist()
        if func in {Tensor.__getitem__, Tensor.__setitem__} and isinstance(args[0], Away):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            place = tuple(torch.tensor(part).to(AWAY) if isinstance(part, list) else part for part in parts)
            args = (args[0], place if isinstance(args[1], tuple) else place[0], *args[2:])
        return func(*args, **kwargs)


class Elsewhere(TorchDispatchMode):
    """Run operations on `Away` tensors, and raise where devices mix.

    Attributes:
        sent: How many times each function of ours, FILE.FUNCTION, copied a tensor there.
        fetched: Likewise back to the CPU.
        read: How many times each read a number, or how many there are of something.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent, self.fetched, self.read = Counter[str](), Counter[str](), Counter[str]()
        self.from_python = FromPython(self.read)

    def __enter__(self) -> Elsewhere:
        """Begin."""
        self.from_python.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.from_python.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation where its tensors are."""
        kwargs, name = dict(kwargs or {}), func._schema.name
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        away = [each for each in given if isinstance(each, Away)]
        host = [each for each in given if not isinstance(each, Away)]
        device = kwargs.get("device")
        target = AWAY if away else torch.device("cpu")
        if device is not None:
            target = torch.device(device)
            kwargs["device"] = torch.device("cpu")
        if name in COPIES:
            source = args[1] if name == "aten::copy_" else args[0]
            target = (AWAY if isinstance(args[0], Away) else torch.device("cpu")) if device is None else target
            if isinstance(source, Away) != (target == AWAY):
                (self.sent if target == AWAY else self.fetched)[_find_caller()] += 1
        elif away and host:
            self._check(func, host, away)
        if target == AWAY and kwargs.get("generator") is not None:
            raise MixedDevicesError(f"{name} by a generator of the CPU, in {_find_caller()}")
        if name in READS and away:
            self.read[_find_caller()] += 1
            target = torch.device("cpu")
        inner_args, inner_kwargs = tree_map_only(Away, lambda each: each.numbers, (args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        if target != AWAY:
            return _same(func, args, kwargs, result)
        return _same(
            func, args, kwargs, tree_map(lambda each: Away(each) if isinstance(each, Tensor) else each, result)
        )

    def _check(self, func: Any, host: Sequence[Tensor], away: Sequence[Tensor]) -> None:
        """Raise an error where tensors of the CPU are among others, but for single numbers."""
        if torch.Tag.pointwise in func.tags and all(each.ndim == 0 for each in host):
            return
        shapes = f"{[tuple(each.shape) for each in host]} beside {[tuple(each.shape) for each in away]}"
        raise MixedDevicesError(f"{func._schema.name} of tensors of the CPU {shapes}, in {_find_caller()}")


class Fake(FakeTensorMode):
    """Torch's own rules, of tensors without numbers: whatever number is asked for is 0."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # those are on the CPU

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or do what is to be done."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _same(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return what an operation returns, and the tensors themselves that it writes to."""
    written = [
        kwargs.get(each.name, args[place] if place < len(args) else None)
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    returns = [each for each in func._schema.returns if each.alias_info is not None and each.alias_info.is_write]
    if not returns:
        return result
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _find_caller() -> str:
    """Return which function of ours is running, FILE.FUNCTION."""
    names = {"<genexpr>", "<listcomp>", "<dictcomp>"}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (not frame.f_code.co_filename.startswith(HOUSE) or frame.f_code.co_name in names):
        frame = frame.f_back
    return "a test" if frame is None else f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
