"""Input checks and their one message form.

Every error that a caller can cause reads ``{function}: `{argument}` must {constraint}; got {value}. {remedy}``.
What lies deep raises it by `refuse`, without a name; the function, method or command that a person called names itself
by `as_typed`, and what is checked there raises it by `fail`. Only what needs torch imports it: a
command says what is wrong with its arguments without it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn, SupportsFloat, SupportsIndex, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor


#: What a terminal may obey: all control characters but tabs and the ends of lines.
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")
#: How a cell begins that a spreadsheet may take for a formula (the last four signs are wide), and what is a number.
_FORMULA = re.compile("[\\s']*[=+\\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[-+][\d.,' ]*\d[\d.,]*(?:[eE][-+]?\d+)?\s?%?")


class InputError(ValueError):
    """What a caller can mend: a value that is out of range, a file that does not fit."""

    fault: Fault | None = None  #: What the message is made of, where `refuse` or `fail` has raised it.


class InputTypeError(TypeError):
    """What a caller can mend: a value of another type than is asked for."""

    fault: Fault | None = None  #: As of an InputError.


class MissingPackageError(ImportError):
    """An optional package is not installed; the message says how to install it."""

    fault: Fault | None = None  #: As of an InputError.


Mendable = InputError | InputTypeError | MissingPackageError
MENDABLE = (InputError, InputTypeError, MissingPackageError)  #: The same, for ``except``.


class Fault(NamedTuple):
    """What must hold, what came, and what to do."""

    argument: str
    constraint: str
    got: object
    remedy: str
    function: str = ""  #: What a person called; "" until it names itself, by `as_typed` or `name_entry`.
    kind: type[Mendable] = InputError

    def make_error(self) -> Mendable:
        """Return the error that says so."""
        error = self.kind(describe(self.function, self.argument, self.constraint, self.got, self.remedy))
        error.fault = self._replace(got=str(self.got))  # text goes from process to process
        return error


def describe(function: str, argument: str, constraint: str, got: object, remedy: str) -> str:
    """Return the one message form, on one line."""
    entry = f"{function}: " if function else ""
    return show(" ".join(f"{entry}`{argument}` must {constraint}; got {got}. {remedy}".split()))


def show(name: object) -> str:
    """Return a name that came from outside as one line without control characters."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(name))


def clean(text: str) -> str:
    """Return a text that came from outside with escapes for control characters, but for tabs and the ends of lines."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def guard(cell: str) -> str:
    """Return a cell so that no spreadsheet takes it for a formula, and no terminal obeys it; numbers stay numbers.

    What may be a formula gets an apostrophe in front, which `unguard` takes off as we read it again.

    Source: OWASP, "CSV Injection", https://owasp.org/www-community/attacks/CSV_Injection
    """
    cell = clean(cell)
    return f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def unguard(cell: str) -> str:
    """Return a cell as it was before `guard`, control characters aside."""
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


def refuse(argument: str, constraint: str, got: object, remedy: str, *, kind: type[Mendable] = InputError) -> NoReturn:
    """Raise an error of what a caller can mend; the entry that was called names itself, by `as_typed`."""
    raise Fault(argument, constraint, got, remedy, kind=kind).make_error()


def fail(function: str, argument: str, constraint: str, got: object, remedy: str) -> NoReturn:
    """Raise an InputError at an entry, which its message names."""
    raise Fault(argument, constraint, got, remedy, function).make_error()


def fail_type(function: str, argument: str, constraint: str, got: object, remedy: str) -> NoReturn:
    """Raise an InputTypeError at an entry, which its message names."""
    raise Fault(argument, constraint, got, remedy, function, InputTypeError).make_error()


@contextmanager
def as_typed(function: str = "", **names: str) -> Iterator[None]:
    """Raise what `refuse` and `fail` raise in the name of what a person called, and of the arguments that they typed.

    It decorates functions, too.

    Args:
        function: What was called; "" leaves that to another entry above.
        **names: What was typed, by what the code calls it. Other arguments keep their names.
    """
    try:
        yield
    except MENDABLE as error:
        if error.fault is None:
            raise
        fault = error.fault
        argument = names.get(fault.argument, fault.argument)
        raise fault._replace(function=function or fault.function, argument=argument).make_error() from error.__cause__


def name_entry(error: Mendable, function: str) -> Mendable:
    """Return an error in the name of what was called, unless it has one."""
    if error.fault is None or error.fault.function:
        return error
    return error.fault._replace(function=function).make_error()


@contextmanager
def optional_packages(function: str, install: str = 'pip install "protonet[analysis]"') -> Iterator[None]:
    """Turn a missing package into a MissingPackageError of one line that names the command that installs it.

    Args:
        function: The entry that was called, or "" where that names itself.
        install: The command.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        got = "none of that name"
        fault = Fault(package, "be installed", got, f"Run {install}.", function, MissingPackageError)
        raise fault.make_error() from None


def find_version(package: str) -> str | None:
    """Return an installed package's version, or None where it is not installed."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_int(
    function: str, argument: str, value: object, *, low: int, high: int | None = None, remedy: str = ""
) -> int:
    """Return ``value`` as an int in [low, high]; whole floats pass (the contest's limit is 500000.0)."""
    bounds = f"be a whole number >= {low}" if high is None else f"be a whole number in [{low}, {high}]"
    remedy = remedy or f"Pass an int such as {low}."
    if isinstance(value, bool) or not isinstance(value, (SupportsIndex, SupportsFloat)):
        fail_type(function, argument, bounds, repr(value), remedy)
    if isinstance(value, SupportsIndex):
        whole = operator.index(value)
    else:
        number = float(value)
        if not math.isfinite(number) or number != math.floor(number):
            fail(function, argument, bounds, repr(value), remedy)
        whole = int(number)
    if whole < low or (high is not None and whole > high):
        fail(function, argument, bounds, repr(value), remedy)
    return whole


def check_number(
    function: str, argument: str, value: object, *, low: float, strict: bool = False, remedy: str = ""
) -> float:
    """Return ``value`` as a finite float, at least ``low`` (above it if ``strict``)."""
    bounds = f"be a finite number {'>' if strict else '>='} {low:g}"
    remedy = remedy or "Pass a finite float."
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        fail_type(function, argument, bounds, repr(value), remedy)
    number = float(value)
    if not math.isfinite(number) or number < low or (strict and number == low):
        fail(function, argument, bounds, repr(value), remedy)
    return number


def check_type(function: str, argument: str, value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Raise an InputTypeError unless ``value`` is of a type; ``name`` describes it in the message."""
    if not isinstance(value, kind):
        fail_type(function, argument, f"be {name}", type(value).__name__, "Pass another object.")


def check_device(function: str, argument: str, value: str | int | torch.device) -> torch.device:
    """Return a device by its name, once this machine has it and it stores numbers, which "meta" does not.

    Raises:
        InputError: It is none.
    """
    import torch  # noqa: PLC0415 - see above

    try:
        device = torch.device(value)
        torch.zeros(1, device=device).cpu()
    except (AssertionError, RuntimeError, TypeError) as error:
        got = f"{str(value)!r} ({str(error).splitlines()[0]})"
        fail(function, argument, "be a device of this machine", got, "Pass 'cpu'.")
    return device


def check_features(function: str, argument: str, value: object, *, dim: int | None = None) -> Tensor:
    """Return ``value`` as a finite 2-d floating tensor, flattening trailing axes.

    Args:
        function: The public function's name, for the message.
        argument: The argument's name, for the message.
        value: A tensor of shape (n, ...) of any real dtype.
        dim: The width that the flattened rows must have, if known.

    Returns:
        A tensor of shape (n, dim): float64 stays float64, everything else is float32.

    Raises:
        InputTypeError: Not a tensor, or complex.
        InputError: No row axis, another width, NaN or infinity.
    """
    import torch  # noqa: PLC0415 - see above

    if not isinstance(value, torch.Tensor):
        fail_type(function, argument, "be a tensor of shape (n, dim)", type(value).__name__, "Use torch.as_tensor.")
    if value.is_complex():
        fail_type(function, argument, "be real", str(value.dtype), "Split real and imaginary parts into columns.")
    if value.ndim < 2:
        remedy = "Add the missing axis, e.g. x[None] for a single row."
        fail(function, argument, "have shape (n, dim)", f"shape {tuple(value.shape)}", remedy)
    width = math.prod(value.shape[1:])
    rows = value.detach().reshape(value.shape[0], width)  # (n, dim)
    if dim is not None and width != dim:
        fail(function, argument, f"have {dim} features per row", f"{width}", "Flatten or select the same features.")
    if rows.dtype != torch.float64:
        rows = rows.to(torch.float32)
    bad = int((~torch.isfinite(rows)).any(dim=1).sum())
    if bad:
        remedy = "Drop or impute those rows."
        fail(function, argument, "be finite", f"NaN or infinity in {bad} of {len(rows)} rows", remedy)
    return rows


def check_weights(function: str, argument: str, value: object, *, n: int) -> Tensor:
    """Return ``value`` as float64 weights of shape (n,), each finite and > 0.

    Raises:
        InputTypeError: Not a tensor of numbers.
        InputError: Another count than n, or a weight that is not finite and positive.
    """
    import torch  # noqa: PLC0415 - see above

    if not isinstance(value, torch.Tensor) or value.is_complex():
        fail_type(function, argument, "be a tensor of numbers", type(value).__name__, "Use torch.as_tensor(weights).")
    weights = value.detach().reshape(-1).to(torch.float64)  # (n,)
    bad = int((~(torch.isfinite(weights) & (weights > 0))).sum())
    if len(weights) != n or bad:
        got = f"{bad} that are not" if bad else f"{len(weights)} of them"
        fail(function, argument, f"be {n} finite numbers > 0", got, "Leave rows without weight out.")
    return weights


def check_groups(function: str, argument: str, groups: Sequence[object], labels: Sequence[object]) -> None:
    """Raise an InputError if all rows of a class, two or more, are of one group: none of them could be held out.

    Args:
        function: The public function's name, for the message.
        argument: The argument's name, for the message.
        groups: (n,) of any kind that can be compared.
        labels: (n,) the same.
    """
    held: dict[object, set[object]] = {}
    size: dict[object, int] = {}
    for group, label in zip(groups, labels, strict=True):
        held.setdefault(label, set()).add(group)
        size[label] = size.get(label, 0) + 1
    for label, own in held.items():
        if len(own) == 1 and size[label] > 1:
            got = f"all {size[label]} rows of class {show(label)} in group {show(next(iter(own)))}"
            fail(function, argument, "hold no class whole", got, "Add another group of that class, or leave it out.")


def check_labels(function: str, argument: str, value: object, *, n: int, num_classes: int | None = None) -> Tensor:
    """Return ``value`` as int64 labels of shape (n,), each in [0, num_classes).

    Args:
        function: The public function's name, for the message.
        argument: The argument's name, for the message.
        value: A tensor of n integers, of shape (n,) or (n, 1); floats are rejected even when whole.
        n: The number of rows that the labels belong to.
        num_classes: The number of classes, if known.

    Returns:
        An int64 tensor of shape (n,).

    Raises:
        InputTypeError: Not a tensor of integers.
        InputError: Another count than n, or a label outside the range.
    """
    import torch  # noqa: PLC0415 - see above

    whole = "be a tensor of integer labels"
    if not isinstance(value, torch.Tensor):
        fail_type(function, argument, whole, type(value).__name__, "Use torch.as_tensor(labels).")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        fail_type(function, argument, whole, str(value.dtype), "Convert class ids with labels.long().")
    if value.numel() != n:
        fail(function, argument, f"have one label per row ({n})", f"{value.numel()}", "Pass a label for every row.")
    labels = value.detach().reshape(-1).to(torch.int64)  # (n,)
    high = "" if num_classes is None else f", {num_classes})"
    outside = labels < 0 if num_classes is None else (labels < 0) | (labels >= num_classes)
    if bool(outside.any()):
        worst = cast(int, labels[outside][0].item())
        span = "be >= 0" if num_classes is None else f"be in [0{high}"
        remedy = "Number the classes 0..num_classes-1."
        fail(function, argument, span, f"{worst} ({int(outside.sum())} such labels)", remedy)
    return labels
