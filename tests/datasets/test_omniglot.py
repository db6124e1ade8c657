"""Omniglot: ink, names and sides of a small copy are right, and each fault of a copy is reported in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from protonet.datasets import load_omniglot
from protonet.episodes.features.sources import load_source

BACKGROUND = {"Alpha": 4, "Beta": 3, "Gamma": 2, "Delta": 1}
EVALUATION = {"Omega": 2}


def make_tree(root: Path) -> Path:
    """Write two drawings of 105 x 105 pixels of 1 bit for each character; the height of the ink tells them apart."""
    index = 0
    for part, alphabets in (("images_background", BACKGROUND), ("images_evaluation", EVALUATION)):
        for alphabet, n_characters in alphabets.items():
            for character in range(1, n_characters + 1):
                folder = root / part / alphabet / f"character{character:02}"
                folder.mkdir(parents=True)
                for drawing in (1, 2):
                    index += 1
                    ink = np.zeros((105, 105), bool)
                    ink[: 4 * index, :15] = True
                    Image.fromarray(~ink).save(folder / f"{index:04}_{drawing:02}.png")
    return root


@pytest.mark.parametrize("home", ["", "omniglot-py"])
def test_rows_names_and_sides(tmp_path: Path, home: str) -> None:
    make_tree(tmp_path / home)
    data = load_omniglot(str(tmp_path), size=7)
    assert (tuple(data.x.shape), data.x.dtype, data.shape) == ((24, 49), torch.uint8, (1, 7, 7))
    x = data.get_rows(torch.arange(24))
    assert data.class_names[:3] == ("Alpha/character01", "Alpha/character02", "Alpha/character03")
    assert data.sides is not None
    side_of = {name.split("/")[0]: side for name, side in zip(data.class_names, data.sides, strict=True)}
    # Ten characters: the last alphabets up to two of them, whole.
    expected = {"Alpha": "base", "Beta": "base", "Delta": "base", "Gamma": "validation", "Omega": "novel"}
    assert side_of == expected
    for name, index in (("Alpha/character01", 1), ("Gamma/character02", 17), ("Omega/character02", 23)):
        first = x[data.y == data.class_names.index(name)][0].reshape(7, 7)
        inked = torch.tensor([min(1.0, max(0.0, (4 * index - 15 * row) / 15)) for row in range(7)])
        torch.testing.assert_close(first[:, 0], inked, rtol=0, atol=1.01 / 255)
        assert float(first[:, 1:].abs().max()) == 0  # paper


def test_rotations_are_classes(tmp_path: Path) -> None:
    make_tree(tmp_path)
    plain, data = load_omniglot(tmp_path, size=7), load_omniglot(tmp_path, size=7, rotations=True)
    assert data.num_classes == 4 * plain.num_classes
    assert plain.sides is not None
    assert data.sides is not None
    side_of = dict(zip(data.class_names, data.sides, strict=True))
    for c, name in enumerate(plain.class_names):
        drawings = plain.get_rows((plain.y == c).nonzero().flatten()).reshape(-1, 7, 7)
        for quarters in range(4):
            turned = f"{name} rot{90 * quarters:03}" if quarters else name
            assert side_of[turned] == plain.sides[c]
            rows = data.get_rows((data.y == data.class_names.index(turned)).nonzero().flatten()).reshape(-1, 7, 7)
            torch.testing.assert_close(rows, drawings.rot90(quarters, dims=(1, 2)), rtol=0, atol=1.01 / 255)
    assert torch.equal(load_omniglot(tmp_path, size=7).x, plain.x)  # each has a cached file of its own
    assert load_source(f"omniglot-rotations:{tmp_path}").num_classes == data.num_classes


def test_one_alphabet_is_base(tmp_path: Path) -> None:
    make_tree(tmp_path)
    for alphabet in ("Beta", "Gamma", "Delta"):
        (tmp_path / "images_background" / alphabet).rename(tmp_path / alphabet)
    assert load_omniglot(tmp_path).sides == ("base",) * 4 + ("novel",) * 2


def test_errors(tmp_path: Path) -> None:
    expected = r"^`root` must hold images_background/ALPHABET/CHARACTER/\*\.png and images_evaluation/"
    with pytest.raises(ValueError, match=rf"{expected}.*; got no folder .*images_background\."):
        load_omniglot(tmp_path)
    make_tree(tmp_path)
    (tmp_path / "images_evaluation" / "Omega").rename(tmp_path / "images_evaluation" / "Beta")
    message = r"`root` must keep every class on one side; got class Beta/character01 on base and novel"
    with pytest.raises(ValueError, match=message):
        load_omniglot(tmp_path)
    (tmp_path / "images_evaluation" / "Beta").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{expected}.*; got .*images_evaluation without characters\."):
        load_omniglot(tmp_path)
    (tmp_path / "images_evaluation" / "Omega" / "character01").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"have an image in every class; got none in .*Omega/character01\."):
        load_omniglot(tmp_path)
