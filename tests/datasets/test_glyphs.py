"""Glyphs: the characters that are drawn, jitter that depends on the sample alone, sides, and the cache."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import ImageFont

from protonet.datasets import Dataset, load_glyphs
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.datasets.glyphs import SPLIT_SIDE_FRACTIONS, get_alphabet, list_font_faces, split_by_alphabet

SOME = "abcxyzαβγж≤⠿"


def rows_of(data: Dataset, character: str) -> torch.Tensor:
    return data.x[data.y == data.class_names.index(character)]


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTONET_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_glyphs(characters=SOME, copies=2)


def test_images(some: Dataset) -> None:
    assert some.class_names == tuple(sorted(SOME))
    assert (tuple(some.x.shape[1:]), some.x.dtype, some.y.dtype) == ((784,), torch.float32, torch.int64)
    assert (some.shape, some.memory_map) == ((1, 28, 28), None)
    assert float(some.x.min()) == 0
    assert 0.4 < float(some.x.amax(dim=1).min()) <= float(some.x.max()) <= 1  # none is blank
    assert float(some.x.mean()) < 0.3  # paper is 0
    faces = list_font_faces()
    for character, count in zip(some.class_names, torch.bincount(some.y).tolist(), strict=True):
        assert count == 2 * sum(character in face.characters for face in faces)


def test_faces_have_the_glyphs_that_they_claim() -> None:
    for face in list_font_faces()[:2]:
        font = ImageFont.truetype(face.path, 20)
        missing = bytes(font.getmask("\U0010ffff"))
        assert all(bytes(font.getmask(character)) != missing for character in SOME)
        assert "\U0010ffff" not in face.characters


def test_blanks_lookalikes_and_rare_characters_are_left_out() -> None:
    data = load_glyphs(characters="AB\N{GREEK CAPITAL LETTER ALPHA}\N{CYRILLIC CAPITAL LETTER A}C \u2003\u0301")
    assert data.class_names == ("A", "B", "C")
    arabic = "\N{ARABIC LETTER BEH}\N{ARABIC LETTER SEEN}"  # in few faces
    assert load_glyphs(characters="AB" + arabic).class_names == ("A", "B")
    assert load_glyphs(characters="AB" + arabic, min_faces=2).num_classes == 4


def test_an_image_depends_on_its_sample_alone(some: Dataset, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = load_glyphs(characters="xβ")
    assert torch.equal(rows_of(few, "β"), rows_of(some, "β")[::2])
    copies = rows_of(some, "x")
    assert len(copies.unique(dim=0)) == len(copies)
    (path,) = cache.iterdir()
    written = path.stat().st_mtime_ns
    assert torch.equal(load_glyphs(characters="βx").x, few.x)  # from the cache
    assert path.stat().st_mtime_ns == written
    assert not torch.equal(rows_of(load_glyphs(characters="xβ", seed=1), "β"), rows_of(few, "β"))
    assert len(list(cache.iterdir())) == 2
    assert capsys.readouterr().err == ""


def test_the_cache_is_in_the_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTONET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_glyphs(characters="ab")
    assert len(list((tmp_path / "xdg" / "protonet").iterdir())) == 1


def test_every_character_has_an_alphabet() -> None:
    letters = "aβж\N{GEORGIAN LETTER AN}\N{ARMENIAN SMALL LETTER AYB}\N{MODIFIER LETTER SMALL H}"
    assert [get_alphabet(c) for c in letters] == ["LATIN", "GREEK", "CYRILLIC", "GEORGIAN", "ARMENIAN", "MODIFIER"]
    others = "!\N{BULLET}\N{RIGHTWARDS ARROW}\N{N-ARY SUMMATION}\N{BRAILLE PATTERN DOTS-1}7"
    expected = ["PUNCTUATION", "PUNCTUATION", "ARROWS", "MATHEMATICAL", "BRAILLE", "PUNCTUATION"]
    assert [get_alphabet(c) for c in others] == expected


def test_alphabets_are_on_one_side_and_sides_have_their_fractions() -> None:
    serif = next(face for face in list_font_faces() if face.path.stem == "DejaVuSerif")
    characters = sorted(c for c in serif.characters if c.isprintable() and not c.isspace())
    sides = split_by_alphabet(characters)
    sides_of: dict[str, set[str]] = {}
    for character, side in zip(characters, sides, strict=True):
        sides_of.setdefault(get_alphabet(character), set()).add(side)
    assert {"LATIN", "GREEK", "CYRILLIC", "BRAILLE"} <= set(sides_of)
    letters = {name for name in sides_of if any(c.isalpha() and get_alphabet(c) == name for c in characters)}
    counts = Counter(map(get_alphabet, characters))
    small = [name for name in sides_of if counts[name] < 20]
    assert all(len(part) == 1 for part in sides_of.values())
    assert len(set.union(*(sides_of[name] for name in small))) == 1
    for side, fraction in zip(SPLIT_SIDES, SPLIT_SIDE_FRACTIONS, strict=True):
        assert abs(sides.count(side) / len(sides) - fraction) < 0.1
        assert any(side in sides_of[name] for name in letters)


def test_faces_of_further_fonts_are_rendered(tmp_path: Path) -> None:
    folder = tmp_path / "fonts" / "deeper"
    folder.mkdir(parents=True)
    plain = load_glyphs(characters="ab")
    shutil.copy(list_font_faces()[0].path, folder / "Mine.TTF")
    more = load_glyphs(characters="ab", fonts=tmp_path / "fonts")
    assert len(more.y) == len(plain.y) + 2
    assert torch.equal(rows_of(more, "a")[:-1], rows_of(plain, "a"))
    (folder / "bad.ttf").write_bytes(b"no font")
    with pytest.raises(ValueError, match=r"^`fonts` must hold fonts that can be read; got .*bad\.ttf"):
        load_glyphs(characters="ab", fonts=tmp_path / "fonts")
    with pytest.raises(ValueError, match="`fonts` must be a folder with TTF files"):
        load_glyphs(characters="ab", fonts=tmp_path / "absent")


def test_errors() -> None:
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"characters": "a"}, ValueError, "`characters` must hold at least 2 that 8 faces draw; got 1 of 1"),
        ({"characters": ""}, ValueError, "`characters` must hold at least 2"),
        ({"copies": 0}, ValueError, "`copies` must be a whole number >= 1; got 0"),
        ({"min_faces": 0}, ValueError, "`min_faces` must be a whole number >= 1; got 0"),
        ({"seed": -1}, ValueError, "`seed` must be a whole number >= 0; got -1"),
        ({"seed": "x"}, TypeError, "`seed` must be a whole number >= 0; got 'x'"),
    ]
    for change, error, message in cases:
        with pytest.raises(error, match=f"^{message}"):
            load_glyphs(**({"characters": "ab"} | change))  # type: ignore[arg-type]
