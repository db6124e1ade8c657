"""Sources of rows: the data set that each text names, random splits by class, base rows and normalisation."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import zscore

from protonet.datasets import FAMILIES, Dataset, load_digits, split_classes
from protonet.episodes.features.sources import load_base_dataset, load_source, normalize_rows
from tests.datasets.test_published import make_omniglot
from tests.datasets.trees import make_csv as make_mini_imagenet
from tests.datasets.trees import make_folders


def make_classes(names: list[str]) -> Dataset:
    return Dataset(torch.eye(len(names)), torch.arange(len(names)), tuple(names))


@pytest.fixture(autouse=True)
def _(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_synthetic() -> None:
    data = load_source("synthetic:nuisance")
    assert (tuple(data.x.shape), data.num_classes, data.sides) == ((6400, 64), 64, None)
    assert int(torch.bincount(data.y).min()) >= 85  # wrong labels change the sizes a little
    assert torch.equal(load_source("synthetic:nuisance").x, data.x)


def test_names_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(load_source("digits").x, load_digits().x)
    monkeypatch.setattr("protonet.datasets.load_glyphs", lambda copies: make_classes(["a"] * copies))
    assert load_source("glyphs").num_classes == 3
    np.savez("a.npz", x=np.eye(8), y=list("abcdefgh"))
    data = load_source("a.npz", split_seed=3)
    assert (data.memory_map is not None, Counter(data.sides)) == (True, {"base": 5, "validation": 1, "novel": 2})
    Path("a.csv").write_text("label,v\nx,1\ny,2\n")
    assert load_source("a.csv").x.tolist() == [[1], [2]]
    Path("output.plk").write_bytes(pickle.dumps({0: [np.zeros(3)], 1: [np.ones(3)]}))
    assert load_source("output.plk").x.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert load_base_dataset("output.plk", dim=3).num_classes == 2
    for name, size in (("a", (3, 4)), ("b", (50, 40))):
        Path("images", name).mkdir(parents=True)
        Image.new("L", size).save(Path("images", name, "1.png"))
    assert load_source("images").x.shape == (2, 784)
    for kind, make in (("omniglot", make_omniglot), ("mini-imagenet", make_mini_imagenet)):
        Path(kind).mkdir()
        assert set(load_source(f"{kind}:{make(Path(kind))}").sides or ()) == {"base", "validation", "novel"}
    assert load_source("mini-imagenet:mini-imagenet", image_size=5).shape == (3, 5, 5)


def test_folders_in_colour(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "split")
    data = load_source(str(root))  # with a split
    assert (data.shape, data.x.dtype) == ((3, 84, 84), torch.uint8)
    assert set(data.sides or ()) == {"base", "validation", "novel"}
    data = load_source(str(root / "train"), image_size=6)
    assert (data.shape, data.sides, data.class_names) == ((3, 6, 6), None, ("ant", "bee", "cat"))
    grey = load_source(str(root / "train"))
    picture = Image.open(min((root / "train" / "ant").iterdir())).convert("L").resize((28, 28), Image.Resampling.BOX)
    assert (grey.shape, grey.x[0].tolist()) == ((1, 28, 28), np.asarray(picture).flatten().tolist())
    (root / "train" / "train").mkdir()  # classes of such names are no sides
    with pytest.raises(ValueError, match=r"have an image in every class; got none in .*train/train"):
        load_source(str(root / "train"))


def test_an_image_size_without_pictures_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`image_size` must come with pictures .*; got 84 for"):
        load_source("digits", image_size=84)
    with pytest.raises(ValueError, match=r"^`image_size` must be at most 1024; got 100000\. Pass a number"):
        load_source("cub:birds", image_size=100_000)


def test_split_seed(tmp_path: Path) -> None:
    np.savez(tmp_path / "split.npz", x=np.eye(8), y=np.arange(8), split=["base"] * 8)
    path = tmp_path / "split.npz"
    assert load_source(path).sides == ("base",) * 8
    with pytest.raises(ValueError, match=r"`split_seed` must be left out .*; got 3 for .*, which has 8 base classes"):
        load_source(path, split_seed=3)


def test_unknown_sources_are_refused() -> None:
    listed = r"be one of glyphs, digits, .*<root>, \*\.npz, \*\.npy, .*\*\.csv or a folder .*; got 'a/b/c'\. Pass"
    for text, message in (
        ("glyhps", r"`text` must be one of glyphs, .*; got 'glyhps'\. Did you mean glyphs\?"),
        ("omniglot:", r"`text` must .*Did you mean omniglot:<root>\?"),
        ("", r"`text` must be one of glyphs, digits, .*; got ''\. Pass a listed name"),
        ("a/b/c", f"`text` must {listed}"),
        ("synthetic:warpd", "`synthetic:` must be one of warped, isotropic, correlated, .*'warpd'.*mean warped"),
        ("synthetic:", f"must be one of {', '.join(FAMILIES)}; got ''"),
        ("absent.csv", "^no such file"),
    ):
        with pytest.raises(ValueError, match=message):
            load_source(text)


def test_random_splits_of_classes() -> None:
    """60 % of the classes are base, 15 % validation, 25 % novel, by seed and names alone; all are as often novel."""
    names = [f"c{c}" for c in range(20)]
    for n, expected in ((4, (1, 1, 2)), (5, (2, 1, 2)), (20, (12, 3, 5)), (100, (60, 15, 25))):
        counts = Counter(split_classes(make_classes([f"c{c}" for c in range(n)]), 0).sides)
        assert (counts["base"], counts["validation"], counts["novel"]) == expected
    other = split_classes(make_classes(names[::-1])._replace(sides=("base",) * 20), 7)
    assert split_classes(make_classes(names), 7).sides == (other.sides or ())[::-1]
    novel = torch.tensor([[side == "novel" for side in split_classes(make_classes(names), seed).sides or ()]
                          for seed in range(400)])  # fmt: skip
    assert float((novel.sum(dim=0) - 100).abs().max()) < 4 * (400 * 0.25 * 0.75) ** 0.5
    with pytest.raises(ValueError, match=r"^`data` must have at least 4 classes; got 3"):
        split_classes(make_classes(["a", "b", "c"]), 0)


ROWS = torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
MEAN = ROWS[:5].mean(dim=0)


def test_normalized_rows_equal_numpys() -> None:
    numpy = ROWS.numpy()
    assert np.allclose(normalize_rows(ROWS, "l2"), numpy / np.linalg.norm(numpy, axis=1, keepdims=True))
    centred = numpy - MEAN.numpy()
    assert np.allclose(normalize_rows(ROWS, "cl2", MEAN), centred / np.linalg.norm(centred, axis=1, keepdims=True))
    assert np.allclose(normalize_rows(ROWS, "z"), zscore(numpy, axis=1))


def test_rows_that_have_no_direction_become_zeros() -> None:
    for dtype in [torch.float32, torch.float64]:
        same = torch.full((2, 7), 0.1, dtype=dtype)
        assert torch.equal(normalize_rows(same, "z"), torch.zeros_like(same))
        assert torch.equal(normalize_rows(0 * same, "l2"), torch.zeros_like(same))
        assert torch.equal(normalize_rows(same, "cl2", same[0]), torch.zeros_like(same))
