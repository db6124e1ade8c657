"""The study of pictures: its sets, its baselines and its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from analysis.pictures import sets, speed, study
from analysis.pictures.sets import OTHERS, TUNED, make_texture, write_set
from tests.analysis.conftest import Made


def test_no_set_is_on_both_sides() -> None:
    assert not TUNED.keys() & OTHERS.keys()
    for names in (sets.COLOUR_PHOTOGRAPHS, sets.GREY_PHOTOGRAPHS):
        assert not set(names["tuned"]) & set(names["other"])
    assert not set(sets.SHAPES) & set(sets.OTHER_SHAPES)
    assert not set(sets.TEXTURES) & set(sets.OTHER_TEXTURES)


def test_a_set_is_written_once_and_is_the_same_each_time(tmp_path: Path) -> None:
    found = write_set("hues", tmp_path)
    assert np.bincount(found.labels).tolist() == [sets.PER_CLASS] * 8
    before = [path.stat().st_mtime_ns for path in found.paths]
    write_set.cache_clear()
    assert [path.stat().st_mtime_ns for path in write_set("hues", tmp_path).paths] == before
    again = write_set("hues", tmp_path / "again")
    assert [path.read_bytes() for path in again.paths[::40]] == [path.read_bytes() for path in found.paths[::40]]


@pytest.mark.parametrize("name", [*sets.TEXTURES, *sets.OTHER_TEXTURES])
def test_textures_have_heights_that_vary(name: str) -> None:
    found = make_texture(name, np.random.default_rng(0))
    assert found.shape == (sets.MADE, sets.MADE)
    assert float(found.min()) >= -1e-9
    assert float(found.max()) <= 1 + 1e-9
    assert float(found.std()) > 0.1


def test_hog_sees_which_way_an_edge_runs(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(0, 255, 64), (64, 1)).astype(np.uint8)
    for name, pixels in (("along", ramp), ("across", ramp.T)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    along, across = (study.find_hog(tmp_path / f"{name}.png").reshape(4, 9, 49) for name in ("along", "across"))
    np.testing.assert_allclose(along[:, 0], 0.5, atol=1e-3)  # of four cells, that have no other edge
    assert set(across.argmax(axis=1).reshape(-1).tolist()) <= {4, 5}
    np.testing.assert_allclose(np.linalg.norm(across.reshape(36, -1), axis=0), 1, atol=1e-3)


def test_both_halves_have_their_table(make_report: Callable[[str], Made]) -> None:
    (row,) = make_report("pictures").rows
    assert all(0 <= accuracy <= 100 for own in row["percent"].values() for accuracy in own)
    percent = {"ours": [90.0, 90.0], "pixels": [50.0, 50.0], "hog": [40.0, 40.0]}
    rows: list[dict[str, object]] = [
        {"set": name, "shots": 2, "tuned": name == "hues", "percent": percent} for name in ("hues", "faces")
    ]
    said = study.tabulate(rows, 2)
    assert "| first | hues  | 2         | 90.00 ±0.00 | 50.00 ±0.00" in said
    assert "The other half, 1 row:" in said
    assert "+40.0" in said


def test_a_split_judges_no_picture_that_it_learns_from(tmp_path: Path) -> None:
    pictures = write_set("hues", tmp_path)
    chosen, judged = study.split(pictures, 5, 0)
    assert np.bincount(pictures.labels[chosen]).tolist() == [5] * 8
    assert np.bincount(pictures.labels[judged]).tolist() == [20] * 8
    assert not set(chosen.tolist()) & set(judged.tolist())


def test_the_speed_is_measured_on_pictures_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "BUILD", tmp_path)
    speed.write_pictures(4)
    assert {path.suffix for path in speed.list_files(4)} == {".png", ".jpg"}
    assert speed.measure(4, torch.get_num_threads())["seconds"] > 0
