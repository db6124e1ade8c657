"""Methods on features that are not normal about zero: none that is a default may fall far below prototypes."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.episodes.families import FAMILIES, SETTINGS, make_features, score_methods
from protonet.episodes.__main__ import DEFAULT_METHODS
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.methods import METHODS
from tests.analysis.conftest import read_cells

HELD = tuple(dict.fromkeys((*DEFAULT_METHODS, *(name for name, spec in METHODS.items() if spec.without_base))))


@pytest.mark.parametrize("setting", SETTINGS, ids=Setting.title)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_default_is_far_below_prototypes(family: str, setting: Setting) -> None:
    accuracy = {name: float(own.mean()) for name, own in score_methods(family, setting, HELD, 50).items()}
    assert min(accuracy.values()) > 0.9 * accuracy["protonet"], accuracy


def test_a_common_mean_costs_our_own_method_nothing_at_one_shot() -> None:
    accuracy = score_methods("shifted", SETTINGS[0], ("protonet", "adaptive"), 200)
    lead = accuracy["adaptive"] - accuracy["protonet"]
    assert float(lead.mean()) > -3 * float(lead.std()) / len(lead) ** 0.5  # it was 5 points below


def test_the_families_are_what_they_are_called() -> None:
    x = {family: make_features(family)[0].double() for family in FAMILIES}
    assert float(((x["skewed"] - x["skewed"].mean()) / x["skewed"].std()).pow(3).mean()) > 3
    assert float((x["heavy-tailed"].abs() > 6 * x["heavy-tailed"].abs().median()).double().mean()) > 0.01
    assert float(x["shifted"].mean() / x["shifted"].std()) > 20
    assert 0.8 < float((x["sparse"] == 0).double().mean()) < 0.95


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = str(tmp_path / "state.jsonl")
    assert main(["episode-families", "--episodes", "4", "--methods", "knn,baseline++", "--state", state]) == 0
    lines = read_cells(capsys.readouterr().out)
    assert [line[0] for line in lines[2:]] == ["protonet", "knn", "baseline++"]
    assert all(len(line) == 1 + len(FAMILIES) * len(SETTINGS) for line in lines)
    shifted = lines[0].index(next(cell for cell in lines[0] if "shifted, 5-way" in cell))
    assert lines[-1][shifted].startswith("**-")
