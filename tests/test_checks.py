from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet import _checks
from protonet._checks import InputError, InputTypeError, MissingPackageError


@given(value=st.integers(0, 10**9))
def test_whole_numbers_pass_as_int_float_and_tensor(value: int) -> None:
    for form in (value, float(value), torch.tensor(value)):
        assert _checks.check_int("f", "a", form, low=0) == value


@pytest.mark.parametrize("value", [True, "3", None, [1]])
def test_what_is_no_number_is_a_type_error(value: object) -> None:
    with pytest.raises(InputTypeError, match=r"^f: `a` must be a whole number >= 0; got .*\. Pass an int such as 0\.$"):
        _checks.check_int("f", "a", value, low=0)
    with pytest.raises(InputTypeError, match=r"^f: `a` must be a finite number >= 0; got .*\. Pass a finite float\.$"):
        _checks.check_number("f", "a", value, low=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 1.5])
def test_what_is_not_whole_or_below_is_a_value_error(value: float) -> None:
    with pytest.raises(InputError, match="`a` must be a whole number"):
        _checks.check_int("f", "a", value, low=0)


def test_bounds() -> None:
    with pytest.raises(InputError, match=r"whole number in \[1, 3\]; got 4"):
        _checks.check_int("f", "a", 4, low=1, high=3)
    with pytest.raises(InputError, match="finite number > 0; got 0"):
        _checks.check_number("f", "a", 0, low=0, strict=True)
    assert _checks.check_number("f", "a", 0, low=0) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.float64])
def test_features_of_any_real_type_are_flattened(dtype: torch.dtype) -> None:
    rows = _checks.check_features("f", "x", torch.ones(2, 3, 4, dtype=dtype), dim=12)
    assert rows.shape == (2, 12)
    assert rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([[1.0]], InputTypeError, r"be a tensor of shape \(n, dim\); got list"),
        (torch.ones(2, 2, dtype=torch.complex64), InputTypeError, "be real"),
        (torch.ones(3), InputError, r"have shape \(n, dim\); got shape \(3,\)"),
        (torch.ones(2, 5), InputError, "have 4 features per row; got 5"),
        (torch.tensor([[0.0, 1, 2, torch.nan], [0, 0, 0, 0]]), InputError, "NaN or infinity in 1 of 2 rows"),
    ],
)
def test_features_errors(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _checks.check_features("f", "x", value, dim=4)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([0, 1], InputTypeError, "be a tensor of integer labels; got list"),
        (torch.tensor([0.0, 1.0]), InputTypeError, "be a tensor of integer labels; got torch.float32"),
        (torch.tensor([0, 1, 2]), InputError, r"have one label per row \(2\); got 3"),
        (torch.tensor([0, 4]), InputError, r"be in \[0, 3\); got 4 \(1 such labels\)"),
        (torch.tensor([-1, -1]), InputError, r"be in \[0, 3\); got -1 \(2 such labels\)"),
    ],
)
def test_labels_errors(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _checks.check_labels("f", "y", value, n=2, num_classes=3)


def test_what_a_caller_can_mend_is_of_python_s_kinds_and_of_ours() -> None:
    for fail, own, kind in ((_checks.fail, InputError, ValueError), (_checks.fail_type, InputTypeError, TypeError)):
        with pytest.raises(own, match=r"^f: `a` must be\ b; got c\. D\.$") as raised:
            fail("f", "a", "be\nb", "c", "D.")
        assert isinstance(raised.value, kind)
        assert type(raised.value) is own
    with (
        pytest.raises(MissingPackageError, match=r"^f: `none_such` must be installed; got .*Run pip install x\."),
        _checks.optional_packages("f", "pip install x"),
    ):
        import none_such.inside  # type: ignore[import-not-found]  # noqa: F401
    assert issubclass(MissingPackageError, ImportError)


def test_versions_are_those_of_the_installed_packages() -> None:
    assert _checks.find_version("torch") == torch.__version__
    assert _checks.find_version("none-such") is None


@pytest.mark.parametrize("kind", _checks.MENDABLE)
def test_what_lies_deep_names_no_entry_and_the_entry_names_itself(kind: type[_checks.Mendable]) -> None:
    def deep() -> None:
        _checks.refuse("a", "be good", 3, "Mend it.", kind=kind)

    with pytest.raises(_checks.MENDABLE, match=r"^`a` must be good; got 3\. Mend it\.$") as raised:
        deep()
    assert type(raised.value) is kind
    assert str(_checks.name_entry(raised.value, "cmd")) == "cmd: `a` must be good; got 3. Mend it."
    with pytest.raises(_checks.MENDABLE, match=r"^entry: `typed` must be good; got 3\. Mend it\.$") as raised:
        _checks.as_typed("entry")(_checks.as_typed(a="typed")(deep))()
    assert type(raised.value) is kind
    assert _checks.name_entry(raised.value, "cmd") is raised.value
    for error, told in ((kind("other"), "^other$"), (raised.value, "^command: `typed` must be good")):
        with pytest.raises(kind, match=told), _checks.as_typed("command", a="FILE"):
            raise error
