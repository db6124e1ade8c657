"""Synthetic families, the official data, drawn glyphs, and sets of pictures that are decoded once."""

from __future__ import annotations

import doctest
import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from scipy import stats
from torch import Tensor

from analysis.contest.trial import sample_official_data
from protonet.datasets import FAMILIES, Dataset, Split, load_benchmark, load_glyphs, pictures, sample_family, synthetic
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.datasets.glyphs import CLASS_FRACTION_OF_SIDE, get_alphabet, list_font_faces, split_by_alphabet
from tests.datasets.trees import draw_classes, make_folders, paint

TENSORS = ("train_x", "train_y", "val_x", "val_y", "test_x", "test_y")


def sample_small(name: str, seed: int = 0) -> Split:
    return sample_family(name, seed=seed, n_train=3, n_val=2, n_test=4, num_classes=5, dim=12)


def subtract_means(split: Split) -> Tensor:
    means = torch.stack([split.train_x[split.train_y == c].mean(0) for c in range(split.num_classes)])
    return (split.train_x - means[split.train_y]).double()


def score_cosine(support: Tensor, labels: Tensor, query: Tensor, truth: Tensor) -> float:
    means = torch.stack([support[labels == c].mean(0) for c in range(int(labels.max()) + 1)])
    prototypes = torch.nn.functional.normalize(means, dim=1)
    return float(((query @ prototypes.T).argmax(1) == truth).double().mean())


@pytest.mark.parametrize("name", FAMILIES)
class TestEveryFamily:
    def test_the_seed_and_the_sizes_of_a_split_determine_it(self, name: str) -> None:
        before = torch.get_rng_state()
        first, again, other = sample_small(name, 3), sample_small(name, 3), sample_small(name, 4)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(getattr(first, t), getattr(again, t)) for t in TENSORS)
        assert not any(torch.equal(getattr(first, t), getattr(other, t)) for t in TENSORS)
        large = sample_family(name, seed=3, n_train=9, n_val=0, n_test=4, num_classes=5, dim=12)
        assert torch.equal(first.test_x, large.test_x)
        assert tuple(large.val_x.shape) == (0, 12)

    def test_shapes_dtypes_counts(self, name: str) -> None:
        split = sample_small(name)
        for part, n in (("train", 3), ("val", 2), ("test", 4)):
            x, y = getattr(split, f"{part}_x"), getattr(split, f"{part}_y")
            assert (tuple(x.shape), x.dtype) == ((5 * n, 12), torch.float32)
            assert (tuple(y.shape), y.dtype) == ((5 * n,), torch.int64)
            assert torch.isfinite(x).all()
            assert int(y.min()) >= 0
            assert int(y.max()) < 5
            if name != "wrong_labels":
                assert torch.bincount(y).tolist() == [n] * 5
            assert not torch.equal(y, y.sort().values)


def test_isotropic_radius_and_noise() -> None:
    split = sample_family("isotropic", seed=0, n_train=4000, num_classes=3, dim=20)
    norms = torch.stack([split.train_x[split.train_y == c].mean(0).norm() for c in range(3)])
    torch.testing.assert_close(norms, torch.full((3,), 2.5), rtol=0, atol=5 * 0.4 / 4000**0.5)
    torch.testing.assert_close(split.noise_covariance, 0.16 * torch.eye(20, dtype=torch.float64))


def test_correlated_spectrum() -> None:
    covariance = sample_family("correlated", seed=0, n_train=1).noise_covariance
    assert covariance is not None
    spectrum = torch.linalg.eigvalsh(covariance).flip(0)
    ranks = torch.arange(1, 385, dtype=torch.float64)
    torch.testing.assert_close(spectrum / spectrum[0], ranks**-1.5, rtol=1e-8, atol=0)
    assert float(spectrum.mean()) == pytest.approx(20 * 0.16)
    off_diagonal = covariance - covariance.diagonal().diag()
    assert float(off_diagonal.abs().max()) > 1  # the basis is not the features' own


def test_nuisance_spectrum() -> None:
    for dim, n_nuisance in ((384, 32), (10, 5)):
        covariance = sample_family("nuisance", seed=0, n_train=1, num_classes=2, dim=dim).noise_covariance
        assert covariance is not None
        expected = torch.full((dim,), 0.16, dtype=torch.float64)
        expected[dim - n_nuisance :] = 16.0
        torch.testing.assert_close(torch.linalg.eigvalsh(covariance), expected)


def test_noise_has_the_stated_covariance() -> None:
    for name in ("isotropic", "correlated", "nuisance"):
        split = sample_family(name, seed=1, n_train=8000, num_classes=2, dim=10)
        assert split.noise_covariance is not None, name
        noise = subtract_means(split)
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(split.noise_covariance), noise.T, upper=False)
        identity = torch.eye(10, dtype=torch.float64)
        torch.testing.assert_close(torch.cov(whitened), identity, rtol=0, atol=5 * (2 / 16000) ** 0.5)


def test_subclusters_are_three() -> None:
    split = sample_family("subclusters", seed=0, n_train=3000, num_classes=2, dim=16)
    noise = subtract_means(split)
    for c in range(2):
        spectrum = torch.linalg.eigvalsh(torch.cov(noise[split.train_y == c].T)).flip(0)
        assert float(spectrum[1]) > 5 * 0.16  # three centres span a plane
        assert abs(float(spectrum[2:].mean()) - 0.16) < 5 * 0.16 * (2 / (3000 * 14)) ** 0.5


def test_warped_is_a_nonlinear_map_of_isotropic() -> None:
    plain, warped = (sample_family(name, seed=0) for name in ("isotropic", "warped"))
    assert torch.equal(plain.train_y, warped.train_y)
    design = torch.cat([plain.train_x, torch.ones(len(plain.train_x), 1)], dim=1).double()
    target = warped.train_x.double()
    residual = target - design @ torch.linalg.lstsq(design, target).solution
    assert 0.06 < float(residual.var() / target.var()) < 0.2  # a tenth, less what the fit has memorised

    covariance = torch.cov(subtract_means(warped).T)
    ridge = 0.05 * covariance.diagonal().mean() * torch.eye(384, dtype=torch.float64)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance + ridge)).T.float()
    raw = score_cosine(warped.train_x, warped.train_y, warped.test_x, warped.test_y)
    white = score_cosine(warped.train_x @ whiten, warped.train_y, warped.test_x @ whiten, warped.test_y)
    assert 0.4 < raw < 0.65
    assert white > raw + 0.15


def test_heavy_tails_are_student_t() -> None:
    noise = subtract_means(sample_family("heavy_tails", seed=0, n_train=8000, num_classes=2, dim=8))
    features = noise.flatten().numpy()
    assert stats.kstest(features, stats.t(df=3, scale=0.4).cdf).statistic < 0.015
    assert stats.kstest(features, stats.norm(scale=0.4 * 3**0.5).cdf).statistic > 0.05
    sizes = noise.abs().clamp(max=2)  # features of one row are independent: no common factor
    assert abs(float(torch.corrcoef(sizes.T)[0, 1])) < 5 / 16000**0.5


def test_class_noise_is_log_uniform() -> None:
    split = sample_family("class_noise", seed=0, n_train=60, num_classes=300, dim=16)
    noise = subtract_means(split)
    levels = torch.stack([noise[split.train_y == c].std() for c in range(300)]) * (60 / 59) ** 0.5
    assert 0.18 < float(levels.min()) < 0.22
    assert 0.74 < float(levels.max()) < 0.85
    assert stats.kstest(np.log2(levels.numpy() / 0.2) / 2, "uniform").pvalue > 0.01


def test_wrong_labels_have_the_stated_fraction() -> None:
    clean, wrong = (sample_family(name, seed=5, num_classes=50, dim=8) for name in ("isotropic", "wrong_labels"))
    assert all(torch.equal(getattr(clean, t), getattr(wrong, t)) for t in ("train_x", "val_x", "test_x", "test_y"))
    assert int((clean.train_y != wrong.train_y).sum()) == 80
    assert int((clean.val_y != wrong.val_y).sum()) == 20


def test_errors() -> None:
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"name": "easy"}, ValueError, "`name` must be one of isotropic, .*; got 'easy'"),
        ({"seed": -1}, ValueError, "`seed` must be a whole number >= 0; got -1"),
        ({"seed": "0"}, TypeError, "`seed` must be a whole number >= 0; got '0'"),
        ({"n_train": 0}, ValueError, "`n_train` must be a whole number >= 1; got 0"),
        ({"n_val": -1}, ValueError, "`n_val` must be a whole number >= 0; got -1"),
        ({"n_test": 0.5}, ValueError, "`n_test` must be a whole number >= 1; got 0.5"),
        ({"num_classes": 1}, ValueError, "`num_classes` must be a whole number >= 2; got 1"),
        ({"dim": 1}, ValueError, "`dim` must be a whole number >= 2; got 1"),
    ]
    for change, error, message in cases:
        with pytest.raises(error, match=f"^{message}"):
            sample_family(**({"name": "isotropic", "seed": 0} | change))  # type: ignore[arg-type]


def test_example_runs() -> None:
    assert doctest.testmod(synthetic) == doctest.TestResults(failed=0, attempted=2)


def test_official_cosine_is_the_published_figure() -> None:
    split = sample_official_data()
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    assert round(score_cosine(x, y, split.test_x, split.test_y), 4) == 0.9883


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


def test_an_image_depends_on_its_sample_alone(some: Dataset, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = load_glyphs(characters="xβ")
    assert torch.equal(rows_of(few, "β"), rows_of(some, "β")[::2])
    copies = rows_of(some, "x")
    assert len(copies.unique(dim=0)) == len(copies)
    (path,) = cache.iterdir()
    written = path.stat().st_mtime_ns
    assert torch.equal(load_glyphs(characters="βx").x, few.x)  # from the cache
    assert path.stat().st_mtime_ns == written
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
    for side, fraction in zip(SPLIT_SIDES, CLASS_FRACTION_OF_SIDE, strict=True):
        assert abs(sides.count(side) / len(sides) - fraction) < 0.1
        assert any(side in sides_of[name] for name in letters)


def test_errors_of_glyphs() -> None:
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"characters": "a"}, ValueError, "`characters` must hold at least 2 that 8 faces draw; got 1 of 1"),
        ({"characters": ""}, ValueError, "`characters` must hold at least 2"),
        ({"copies": 0}, ValueError, "`copies` must be a whole number >= 1; got 0"),
        ({"copies": "x"}, TypeError, "`copies` must be a whole number >= 1; got 'x'"),
    ]
    for change, error, message in cases:
        with pytest.raises(error, match=f"^{message}"):
            load_glyphs(**({"characters": "ab"} | change))  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "data")


def find(root: Path, size: int = 6) -> pictures.ImageSet:
    files, read = pictures.make_picture_layout(pictures.list_pictures_by_class(root))
    return pictures.ImageSet(cache_name="load_some", root=root, files=files, read_pictures=read, image_side=size)


def test_pixels_equal_pillows(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name, shape in (("a", (30, 40, 3)), ("b", (90, 70, 3))):
        (tmp_path / name).mkdir(parents=True)
        Image.fromarray(generator.integers(0, 256, shape, np.uint8)).save(tmp_path / name / "1.png")
    data = pictures.load_pictures(find(tmp_path), 12)
    assert (data.shape, data.class_names, data.y.tolist(), data.sides) == ((3, 12, 12), ("a", "b"), [0, 1], None)
    for row, name in zip(data.x, "ab", strict=True):
        picture = Image.open(tmp_path / name / "1.png").resize((12, 12), Image.Resampling.LANCZOS)
        assert row.reshape(3, 12, 12).permute(1, 2, 0).numpy().tolist() == np.asarray(picture).tolist()


def test_rows_are_mapped_and_scaled_where_they_are_read(root: Path, cache: Path) -> None:
    data = load_benchmark("mini-imagenet", root, size=8)
    assert data.memory_map is not None
    assert not data.has_float_array_in_memory
    rows = torch.tensor([13, 0, 13])
    assert torch.equal(data.get_rows(rows), data.x[rows].float() / 255)
    (saved,) = cache.iterdir()
    assert saved.name.startswith("mini_imagenet-8-")
    fox = data.select_classes([data.class_names.index("fox")])  # a copy in memory
    assert (fox.x.dtype, fox.shape, fox.memory_map) == (torch.uint8, (3, 8, 8), None)
    assert torch.equal(fox.get_rows(torch.arange(2)), data.get_rows(torch.arange(10, 12)))


def test_the_same_pictures_are_not_decoded_again(root: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = load_benchmark("mini-imagenet", root, size=8)
    (saved,) = cache.iterdir()
    written = saved.stat().st_mtime_ns
    again = load_benchmark("mini-imagenet", f"{root}/../data", size=8)
    assert saved.stat().st_mtime_ns == written
    assert torch.equal(first.x, again.x)
    assert (first.class_names, first.sides, first.y.tolist()) == (again.class_names, again.sides, again.y.tolist())
    Image.fromarray(paint("zz", 0)).save(root / "test" / "fox" / "fox0.png")
    changed = load_benchmark("mini-imagenet", root, size=8)  # in the same file of the cache
    assert [path.name for path in cache.iterdir()] == [saved.name]
    assert changed.get_rows(torch.tensor([10]))[0, 0] == ord("z") / 255
    os.utime(root / "val" / "dog" / "dog0.png", ns=(1, 1))
    assert torch.equal(load_benchmark("mini-imagenet", root, size=8).x, changed.x)
    (root / "val" / "dog" / "dog0.png").unlink()
    assert len(load_benchmark("mini-imagenet", root, size=8).y) == 13
    assert capsys.readouterr().err == ""


def test_a_damaged_cache_file_is_recomputed(root: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = load_benchmark("mini-imagenet", root, size=8).x.clone()
    (saved,) = cache.iterdir()
    np.savez(cache / "other.npz", x=np.zeros(3))
    for damaged in (saved.read_bytes()[:-200], (cache / "other.npz").read_bytes(), b""):
        saved.write_bytes(damaged)
        assert torch.equal(load_benchmark("mini-imagenet", root, size=8).x, expected)
        line = capsys.readouterr().err
        assert line.startswith(f"protonet: {saved} is made again: ")
        assert line.count("\n") == 1
    assert load_benchmark("mini-imagenet", root, size=8).memory_map is not None


def test_without_a_cache_rows_are_in_memory(root: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = load_benchmark("mini-imagenet", root, size=8)
    (saved,) = cache.iterdir()
    saved.unlink()
    cache.rmdir()
    cache.write_text("a file")
    result = load_benchmark("mini-imagenet", root, size=8)
    assert "is not kept: " in capsys.readouterr().err
    assert (result.memory_map, result.shape) == (None, (3, 8, 8))
    rows = torch.arange(14)
    assert torch.equal(result.get_rows(rows), expected.get_rows(rows))


def test_pictures_of_every_kind_are_opened(tmp_path: Path) -> None:
    pixels = paint("ab", 0, 4)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    for picture in (pixels, file.getvalue(), tmp_path / "a.png"):
        assert np.array_equal(np.asarray(pictures.open_picture(picture)), pixels)
    with pytest.raises(ValueError, match=r"^`root` must hold images that can be read; got one of a file of many \("):
        pictures.open_picture(b"nothing")
    with pytest.raises(ValueError, match=r"got .*absent\.png \(no such file\)"):
        pictures.open_picture(tmp_path / "absent.png")


def test_numeric_class_names_on_several_sides_get_the_sides_names() -> None:
    part = pictures.LabelledPictures([b"", b""], ["0", "a"], None)
    joined = pictures.join_sides([part, None, pictures.LabelledPictures([b""], ["0"], None)])
    assert joined == pictures.LabelledPictures([b"", b"", b""], ["base 0", "a", "novel 0"], ["base", "base", "novel"])


def test_errors_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match=r"^`root` must hold one folder per class; got .*data without any"):
        find(tmp_path / "data")
    draw_classes(tmp_path / "data", ["ant"])
    with pytest.raises(ValueError, match=r"^`root` must have at least 2 classes; got 1"):
        pictures.load_pictures(find(tmp_path / "data"))
    result = find(tmp_path / "data")
    for size, error in ((0, ValueError), ("x", TypeError)):
        with pytest.raises(error, match=r"^`size` must be a whole number >= 1"):
            pictures.load_pictures(result, size)  # type: ignore[arg-type]
    (tmp_path / "data" / "ant" / "ant0.png").unlink()
    with pytest.raises(ValueError, match=r"^`root` must hold its pictures; got no .*ant0\.png \(No such"):
        pictures.load_pictures(result)
