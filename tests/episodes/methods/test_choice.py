"""The choice of methods by texts, and the settings that signatures and docstrings describe."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from protonet.episodes.__main__ import main
from protonet.episodes.methods import METHODS, MethodSpec
from protonet.episodes.methods.choice import (
    AvailableInputs,
    ChosenMethod,
    choose_method,
    choose_method_grid,
    choose_methods,
    format_methods,
    select_methods,
)
from protonet.episodes.methods.clustering import laplacian_shot
from protonet.episodes.methods.common import support_means
from protonet.episodes.methods.keywords import (
    Bound,
    Positive,
    describe_arguments,
    format_setting,
    list_method_settings,
    parse_method_settings,
    parse_source_section,
)
from protonet.episodes.methods.tim import tim, tim_adm, tim_dirichlet
from protonet.episodes.samplers.batch import Episodes
from protonet.errors import InputError
from tests.episodes.cases import make_episodes

MINE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import Tensor

NUMBER = 3

@dataclass
class Kept:
    name: str = "a"

def city_block(episodes, *, power: float = 1.0) -> Tensor:
    return -torch.cdist(episodes.query, episodes.support[:, :episodes.n_way], p=power)

def broken(episodes):
    raise KeyError("lost")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return path


def test_settings_reach_the_method() -> None:
    episodes, _ = make_episodes()
    result = choose_methods(["laplacian-shot:lambda=0.5:n-neighbours=3", "tim:steps=3:weights=1,1,1", "tim-adm"])
    assert list(result) == ["laplacian-shot:lambda=0.5:n_neighbours=3", "tim:weights=1,1,1:steps=3", "tim-adm"]
    logits = [method(episodes) for method in result.values()]
    assert torch.equal(logits[0], laplacian_shot(episodes, lambda_=0.5, n_neighbours=3))
    assert torch.equal(logits[1], tim(episodes, weights=(1, 1, 1), steps=3))
    assert torch.equal(logits[2], tim_adm(episodes))
    assert torch.equal(choose_method("tim:weights=1,1,1")(episodes), tim_dirichlet(episodes))

    assert list(choose_methods(["protonet", "tim:steps=1", "tim:steps=01"])) == ["protonet", "tim:steps=1"]


def test_a_plugin_and_its_errors(mine: Path) -> None:
    episodes, _ = make_episodes(shots=(1, 1, 1, 1))
    choice = choose_method(f"{mine}:city_block:power=2")
    assert (choice.name, choice.method_key) == (f"{mine}:city_block:power=2", f"{mine}:city_block")
    assert torch.equal(choice(episodes), -torch.cdist(episodes.query, episodes.support[:, :4], p=2.0))
    with pytest.raises(InputError, match=r"got KeyError of .*:broken: 'lost' \(mine.py, line 17\)") as caught:
        choose_method(f"{mine}:broken")(episodes)
    assert isinstance(caught.value.__cause__, KeyError)
    mine.write_text(MINE + "\n", encoding="utf-8")
    assert choose_method(f"{mine}:city_block").plugin_version != choice.plugin_version


def test_an_error_of_a_built_in_method_with_given_settings_is_one_line() -> None:
    def cracked(episodes: object, *, a: int = 0) -> torch.Tensor:
        raise RuntimeError(f"{a}")

    episodes, _ = make_episodes()
    with pytest.raises(RuntimeError, match=r"^0$"):  # a bug of ours
        ChosenMethod("x", "x", MethodSpec(cracked))(episodes)
    with pytest.raises(InputError, match="got RuntimeError of x:a=1: 1 "):
        ChosenMethod("x:a=1", "x", MethodSpec(cracked), {"a": 1})(episodes)
    with pytest.raises(InputError, match=r"^`base` must be known"):
        choose_method("distribution-calibration:spread=1")(episodes)


def test_plugins_that_cannot_be_used_are_refused(mine: Path) -> None:
    for content, text, message in [
        (MINE, "", r"must be a function of its file; got '.*mine.py'. It has Kept, city_block, broken"),
        (MINE, ":absent", r"must be a function of its file; got '.*mine.py:absent'"),
        (MINE, ":NUMBER", "must be a function from episodes to logits; got int of"),
        (MINE, ":city_block:power=x", "a number; got 'x' for power"),
        ("", ":f", "It has none"),
        ("1 / 0", ":f", r"be in a file that runs; got ZeroDivisionError of .*division by zero \(mine.py, line 1\)"),
        ("def f(:", ":f", r"got SyntaxError of .*\(mine.py, line 1\)\. "),
        ("raise SystemExit(3)", ":f", "got SystemExit of"),
    ]:
        mine.write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=message) as caught:
            choose_method(f"{mine}{text}")
        assert "\n" not in str(caught.value)


def test_errors() -> None:
    for text, message in [
        ("protonett", "`method` must be one of protonet, .*Did you mean protonet?"),
        ("absent.py:f", "must be in a file that exists; got absent.py"),
        ("tim:steps", "form name=value; got 'tim:steps'. Pass tim:name=value"),
        ("tim:steps=1:steps=2", "have each setting once"),
        ("", "must be one of protonet"),
    ]:
        with pytest.raises(InputError, match=message):
            choose_method(text)


def test_a_grid_names_a_method_for_each_combination() -> None:
    names = [choice.name for choice in choose_method_grid("laplacian-shot:lambda=0.1,1")]
    assert names == ["laplacian-shot:lambda=0.1", "laplacian-shot:lambda=1"]
    names = [choice.name for choice in choose_method_grid("tim:weights=1,1,1/0.1,1,0.1:steps=1,2")]
    assert names[1:3] == ["tim:weights=1,1,1:steps=2", "tim:weights=0.1,1,0.1:steps=1"]
    assert len(names) == 4
    for text in ("tim", "tim:steps=1", "tim:steps=1,01"):
        with pytest.raises(InputError, match="`tune` must name two values of a setting or more"):
            choose_method_grid(text)


def test_a_method_of_an_installed_package(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is a folder of metadata beside a module, as pip installs them."""
    info = mine.parent / "theirs-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.2\n", encoding="utf-8")
    points = "city = mine:city_block\nprotonet = mine:broken\nlost = absent_module:f\n"
    (info / "entry_points.txt").write_text(f"[protonet.methods]\n{points}", encoding="utf-8")
    monkeypatch.syspath_prepend(str(mine.parent))
    choice = choose_method("city:power=2")
    monkeypatch.delitem(sys.modules, "mine")
    assert (choice.name, choice.plugin_version) == ("city:power=2", "theirs 1.2")
    assert choose_method("protonet").spec is METHODS["protonet"]  # ours stay ours
    assert "city: of the installed mine:city_block" in format_methods()
    with pytest.raises(InputError, match="`method` must load; got ModuleNotFoundError of lost"):
        choose_method("lost")


def test_all_leaves_out_methods_of_other_objectives_and_other_ways() -> None:
    given: dict[str, Any] = {"n_base_classes": 2, "has_texts": True, "has_unlabelled": True, "has_feature_maps": True}
    available = AvailableInputs(objective="anil", head_n_way=2, way=(2, 2), has_base_class_means=False, **given)
    methods, notes = select_methods([], available, include_all=True)
    assert "Without an encoder of their objectives, feat, maml are left out." in notes
    assert methods.keys() == {name for name, spec in METHODS.items() if not spec.is_slow} - {"feat", "maml"}
    methods, notes = select_methods([], replace(available, way=(3, 3)), include_all=True)
    assert "The head of the encoder is for another number of classes: anil are left out." in notes
    assert "anil" not in methods


def nearest_corner(episodes: Episodes, *, power: Positive = 1.0) -> Tensor:
    """Classify by the largest difference of a feature to the class mean.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        power: > 0, of the distance.

    Returns:
        Logits (episodes, n_queries, n_way).

    Source: this test.
    """
    return -(torch.cdist(episodes.query, support_means(episodes), p=torch.inf) ** power)


def test_a_new_method_is_one_function_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METHODS, "nearest-corner", MethodSpec(nearest_corner, needs_only_means=True))
    assert main(["--list-methods"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} (" in listed for name in METHODS)
    assert "nearest-corner (inductive): Classify by the largest difference" in listed
    assert "\n  power: a number > 0, 1 by default\n      > 0, of the distance.\n" in listed
    assert "  lambda: a number >= 0, 0.7 by default; --tune tries 0.1 and 0.3 and 0.7 and 1.5\n" in listed
    few = ["--dataset", "digits", "--way", "2", "--episodes", "20", "--json", str(tmp_path / "out.json")]
    few += ["--split-seed", "0", "--protocol", "generalized", "--method"]
    assert main([*few, "nearest-corner", "nearest-corner:power=2", "protonet"]) == 0
    methods = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["methods"]
    assert methods["nearest-corner"]["accuracy"] == methods["nearest-corner:power=2"]["accuracy"] > 0.4
    assert main([*few, "nearest-corner:power=0"]) == 2
    assert "have settings within their bounds, > 0 here" in capsys.readouterr().err


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
        assert [keyword.parameter_name for keyword in keywords.values()] == list(parameters)[1:]
        assert parse_source_section(function)
        for key, keyword in keywords.items():
            assert keyword.description, key
            assert keyword.default == parameters[keyword.parameter_name].default
            if keyword.value_description not in {"true or false", "a word"} and key not in UNBOUNDED:
                bounds = {str(keyword.bound), "[1, base classes]"}
                assert any(bound in keyword.description.lower() for bound in bounds), f"{key} of {name}"
        texts = {key: format_setting(keyword.default) for key, keyword in keywords.items()}
        defaults = {keyword.parameter_name: keyword.default for keyword in keywords.values()}
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

    settings = list_method_settings(lost)
    assert [item.value_description for item in settings.values()] == ["a whole number", "a number"]
    assert list(settings) == ["a", "b"]
    texts = {"needed": "1e-3", "pairs": "4,5", "word": "b=c"}
    result = parse_method_settings("own", own, texts)
    assert list(result.items()) == [("pairs", (4, 5)), ("word", "b=c"), ("needed", 0.001)]


def test_errors_of_settings() -> None:
    for method, texts, message in [
        ("tim", {"weight": "1"}, "must have settings of tim that exist; got 'weight'. There are weights, temperature"),
        ("protonet", {"a": "1"}, "have no settings for protonet; got 'a'"),
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


def test_a_file_runs_once_until_it_changes(tmp_path: Path) -> None:
    """Several evaluations name the same plug-in, which may be slow to load."""
    path, log = tmp_path / "mine.py", tmp_path / "log"
    text = f"with open({str(log)!r}, 'a') as file:\n    file.write('x')\ndef own(episodes):\n    return episodes\n"
    for content, n_runs in ((text, 1), (text, 1), (f"{text}# changed\n", 2)):
        path.write_text(content, encoding="utf-8")
        choose_method(f"{path}:own")
        assert log.read_text(encoding="utf-8") == "x" * n_runs
    path.write_text(f"{text}raise ValueError\n", encoding="utf-8")
    for n_runs in (3, 4):  # a file that fails is run again
        with pytest.raises(ValueError, match="must be in a file that runs"):
            choose_method(f"{path}:own")
        assert log.read_text(encoding="utf-8") == "x" * n_runs
