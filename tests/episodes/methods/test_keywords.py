"""Settings of methods are read from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

import pytest
from torch import Tensor

from protonet.episodes.methods import METHODS
from protonet.episodes.methods.keywords import (
    Bound,
    describe_arguments,
    format_setting,
    list_method_settings,
    parse_method_settings,
    parse_source_section,
)
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import InputError

#: Settings that have no bounds.
UNBOUNDED = {"seed", "shift"}


def own(
    episodes: Episodes,
    *,
    pairs: tuple[int, int] = (1, 2),
    word: str = "a",
    needed: float,
    many: list[int] | int = 2,
    rows: Tensor | None = None,
) -> Tensor:
    """Do nothing.

    Args:
        episodes: Of any kind.
        pairs: Two numbers,
            on two lines.
        word: A word.
        needed: Values > 7 are slow.
        many: No text holds it.
        rows: Nor this.

    Returns:
        The queries.

    Source: A paper,
        on two lines.

    More.
    """
    return episodes.query


def test_every_setting_is_listed_and_described_and_a_default_as_text_is_the_default() -> None:
    for name in METHODS:
        function = METHODS[name].function
        keywords, parameters = list_method_settings(function), inspect.signature(function).parameters
        assert [keyword.parameter for keyword in keywords.values()] == list(parameters)[1:]
        assert parse_source_section(function)
        for key, keyword in keywords.items():
            assert keyword.description, key
            assert keyword.default == parameters[keyword.parameter].default
            if keyword.type not in (bool, str) and key not in UNBOUNDED:
                bounds = {str(keyword.bound), "[1, base classes]"}
                assert any(bound in keyword.description.lower() for bound in bounds), f"{key} of {name}"
        texts = {key: format_setting(keyword.default) for key, keyword in keywords.items()}
        defaults = {keyword.parameter: keyword.default for keyword in keywords.values()}
        assert parse_method_settings(name, function, texts) == defaults


def test_settings_of_a_function_of_the_user() -> None:
    keywords = list_method_settings(own)
    assert list(keywords) == ["pairs", "word", "needed"]
    assert keywords["pairs"].description == "Two numbers, on two lines."
    assert keywords["needed"].default is inspect.Parameter.empty
    assert [item.value_description for item in keywords.values()][1:] == ["a word", "a number"]
    assert parse_source_section(own) == "A paper, on two lines."
    assert describe_arguments(lambda: None) == {}
    assert list_method_settings(max) == {}  # has no signature

    def lost(episodes: Any, *, a: Missing = 1, b: float = 2.0) -> None:  # type: ignore[name-defined]  # noqa: F821
        del episodes, a, b

    assert {name: item.type for name, item in list_method_settings(lost).items()} == {"a": int, "b": float}
    texts = {"needed": "1e-3", "pairs": "4,5", "word": "b=c"}
    result = parse_method_settings("own", own, texts)
    assert list(result.items()) == [("pairs", (4, 5)), ("word", "b=c"), ("needed", 0.001)]


def test_errors() -> None:
    for method, texts, message in [
        ("tim", {"weight": "1"}, "must have settings of tim that exist; got 'weight'. There are weights, temperature"),
        ("protonet", {"a": "1"}, "got 'a', which has none"),
        ("tim", {"weights": "1,1"}, "must have settings of their kind, 3 numbers .*; got '1,1' for weights of tim"),
        ("tim", {"steps": "1.5"}, "a whole number; got '1.5' for steps of tim. Pass a whole number such as 1000"),
        ("tim", {"temperature": "nan"}, "a number; got 'nan'"),
        ("alpha-tim", {"alpha": "x"}, "a number or none; got 'x'"),
        ("distribution-calibration", {"n-nearest": "0"}, "must have settings within their bounds, >= 1 here; got '0'"),
        ("bd-cspn", {"paper": "1"}, "true or false; got '1'"),
    ]:
        with pytest.raises(InputError, match=f"^`method` .*{message}"):
            parse_method_settings(method, METHODS[method].function, texts)


def test_bounds_of_numbers_are_shown_and_checked() -> None:
    for bound, text, saved, broken in [
        (Bound(0.5, low_open=True), "> 0.5", "0.51", "0.5"),
        (Bound(1e-3), ">= 0.001", "0.001", "0.0009"),
        (Bound(-1, low_open=True), "> -1", "0", "-1"),
        (Bound(0.25, 0.75, high_open=True), "in [0.25, 0.75)", "0.25", "0.75"),
        (Bound(0, 1e3, low_open=True), "in (0, 1000]", "1000", "1000.1"),
    ]:

        def method(episodes: Episodes, *, rate: float = 0.6, pair: tuple[int, float] = (1, 1.0)) -> Tensor:
            raise NotImplementedError

        method.__annotations__ |= {"rate": Annotated[float, bound] | None, "pair": tuple[int, Annotated[float, bound]]}
        assert str(bound) == text
        assert parse_method_settings("own", method, {"rate": saved}) == {"rate": float(saved)}
        assert parse_method_settings("own", method, {"rate": "none"}) == {"rate": None}
        for texts in ({"rate": broken}, {"pair": f"1,{broken}"}):
            with pytest.raises(InputError, match="must have settings within their bounds, " + re.escape(text)):
                parse_method_settings("own", method, texts)
