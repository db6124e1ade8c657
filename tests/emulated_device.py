"""A simulated second device: tensors with real values that report another device, and a mode that rejects mixed ones.

`EmulatedDevice` computes real values, so that code goes through every branch. It is stricter than a GPU, for which
torch copies an index implicitly: each transfer between devices has to be explicit.
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import protonet

#: The device that these tensors report. Torch computes nothing on it, with or without a GPU.
AWAY = torch.device("meta")
#: Operations that read one value, for a branch: slow on a GPU, but allowed.
READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::_linalg_check_errors"}
COPIES = {"aten::_to_copy", "aten::copy_"}
LIBRARY = str(Path(protonet.__file__).parent)


class MixedDevicesError(RuntimeError):
    """An operation on tensors of two devices, or with a generator of another device."""


class Away(Tensor):
    """A tensor that reports the device ``AWAY`` and holds its values on the CPU."""

    host_values: Tensor

    @staticmethod
    def __new__(cls, host_values: Tensor) -> Away:
        """Wrap values, which other tensors may share."""
        made: Away = Tensor._make_wrapper_subclass(
            cls,
            host_values.size(),
            strides=host_values.stride(),
            storage_offset=host_values.storage_offset(),
            dtype=host_values.dtype,
            layout=host_values.layout,
            device=AWAY,
        )
        made.host_values = host_values
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Format the values as those of an `Away` tensor."""
        return f"Away({self.host_values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise an error: operations need an active `EmulatedDevice`."""
        raise MixedDevicesError(f"{func} outside of EmulatedDevice")


class FromPython(TorchFunctionMode):
    """Convert between Python values and tensors of a device by operations that `EmulatedDevice` intercepts."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Create tensors on the CPU, and copy them to the device."""
        kwargs = kwargs or {}
        if func in {torch.tensor, torch.as_tensor, Tensor.new_tensor}:
            device = kwargs.pop("device", args[0].device if func is Tensor.new_tensor else None)
            if func is Tensor.new_tensor:
                kwargs, args = {"dtype": args[0].dtype} | kwargs, args[1:]
            made = (torch.as_tensor if func is torch.as_tensor else torch.tensor)(*args, **kwargs)
            return made if device is None else made.to(device)
        if func is Tensor.tolist and isinstance(args[0], Away):
            return args[0].host_values.tolist()
        if func in {Tensor.__getitem__, Tensor.__setitem__} and isinstance(args[0], Away):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(part).to(AWAY) if isinstance(part, list) else part for part in parts)
            args = (args[0], index if isinstance(args[1], tuple) else index[0], *args[2:])
        return func(*args, **kwargs)


class EmulatedDevice(TorchDispatchMode):
    """Run operations on `Away` tensors, and raise an error for mixed devices.

    Attributes:
        sent: Number of copies to the device by each function of the library, FILE.FUNCTION.
        fetched: Number of copies back to the CPU, by function.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent, self.fetched = Counter[str](), Counter[str]()
        self.from_python = FromPython()

    def __enter__(self) -> EmulatedDevice:
        """Activate both modes."""
        self.from_python.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Deactivate both modes."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.from_python.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the device of its tensors."""
        kwargs, name = dict(kwargs or {}), func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        away = [tensor for tensor in tensors if isinstance(tensor, Away)]
        host = [tensor for tensor in tensors if not isinstance(tensor, Away)]
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
            target = torch.device("cpu")
        inner_args, inner_kwargs = tree_map_only(Away, lambda tensor: tensor.host_values, (args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        if target != AWAY:
            return _return_written(func, args, kwargs, result)
        wrapped = tree_map(lambda leaf: Away(leaf) if isinstance(leaf, Tensor) else leaf, result)
        return _return_written(func, args, kwargs, wrapped)

    def _check(self, func: Any, host: Sequence[Tensor], away: Sequence[Tensor]) -> None:
        """Raise an error if CPU tensors are mixed with others; scalars are allowed in pointwise operations."""
        if torch.Tag.pointwise in func.tags and all(tensor.ndim == 0 for tensor in host):
            return
        shapes = f"{[tuple(tensor.shape) for tensor in host]} beside {[tuple(tensor.shape) for tensor in away]}"
        raise MixedDevicesError(f"{func._schema.name} of tensors of the CPU {shapes}, in {_find_caller()}")


def _return_written(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Replace results of an in-place operation by the tensors that it writes to."""
    written = [
        kwargs.get(argument.name, args[position] if position < len(args) else None)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns = [value for value in func._schema.returns if value.alias_info is not None and value.alias_info.is_write]
    if not returns:
        return result
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _find_caller() -> str:
    """Locate the running function of the library, as FILE.FUNCTION."""
    names = {"<genexpr>", "<listcomp>", "<dictcomp>"}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (not frame.f_code.co_filename.startswith(LIBRARY) or frame.f_code.co_name in names):
        frame = frame.f_back
    return "a test" if frame is None else f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
