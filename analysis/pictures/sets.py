"""Sets of pictures in folders that can be had offline: digits, glyphs, faces, crops of photographs, and made ones.

Each is written once as a folder per class, in PNG, and read as a person's own would be. Photographs and textures come
with scikit-learn, matplotlib and scikit-image, whose files alone are read (``pip install --no-deps scikit-image``).
"""

from __future__ import annotations

import colorsys
import math
import shutil
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from protonet._checks import MissingPackageError, describe
from protonet.datasets import Dataset, load_digits, load_glyphs
from protonet.datasets.glyphs import find_faces

#: Pictures of a class: 20 to learn from, and the rest to be judged on.
PER_CLASS = 40
#: Pixels per side of a crop, and of a made picture.
CROP, MADE = 64, 48
Drawn = dict[str, list[Image.Image]]

COLOUR_PHOTOGRAPHS: dict[str, tuple[str, ...]] = {
    "tuned": (
        *("skimage:coffee.png", "skimage:chelsea.png", "sklearn:china.jpg", "skimage:ihc.png"),
        "skimage:retina.jpg",
    ),
    "other": (
        *("skimage:astronaut.png", "skimage:rocket.jpg", "sklearn:flower.jpg", "skimage:motorcycle_left.png"),
        *("skimage:hubble_deep_field.jpg", "matplotlib:grace_hopper.jpg"),
    ),
}
GREY_PHOTOGRAPHS = {
    "tuned": ("brick.png", "camera.png", "coins.png", "cell.png"),
    "other": ("grass.png", "gravel.png", "moon.png", "page.png", "text.png"),
}
FOLDERS = {
    "skimage": ("skimage", "data"),
    "sklearn": ("sklearn", "datasets", "images"),
    "matplotlib": ("matplotlib", "mpl-data", "sample_data"),
}


def open_photograph(name: str) -> Image.Image:
    """Open a photograph that a package ships, without importing it."""
    package, _, file = name.rpartition(":")
    package = package or "skimage"
    spec = find_spec(package)
    roots = [] if spec is None else spec.submodule_search_locations or []
    for root in roots:
        path = Path(root, *FOLDERS[package][1:], file)
        if path.exists():
            return Image.open(path)
    remedy = f"Run pip install --no-deps {package.replace('skimage', 'scikit-image')} (its pictures alone are read)."
    raise MissingPackageError(describe("open_photograph", package, "be installed", "no such file", remedy))


def cut(names: tuple[str, ...], side: int, *, mode: str) -> Drawn:
    """Cut each photograph into squares that do not overlap, in an order drawn at random; a class is a photograph."""
    found: Drawn = {}
    for name in names:
        picture = open_photograph(name).convert(mode)
        while min(picture.size) >= 640:
            picture = picture.reduce(2)
        own = side if (picture.width // side) * (picture.height // side) >= PER_CLASS // 2 + 10 else side // 2
        lines, columns = (range(0, size - own + 1, own) for size in (picture.height, picture.width))
        boxes = [(x, y) for y in lines for x in columns]
        order = np.random.default_rng(len(boxes)).permutation(len(boxes))[:PER_CLASS]
        crops = [picture.crop((*boxes[at], boxes[at][0] + own, boxes[at][1] + own)) for at in order]
        found[Path(name.rpartition(":")[2]).stem] = crops
    return found


def draw_rows(data: Dataset, classes: list[int], side: int, largest: float) -> Drawn:
    """Return rows of square grey pictures as pictures."""
    found: Drawn = {}
    for number in classes:
        rows = data.x[data.y == number]
        order = np.random.default_rng(number).permutation(len(rows))[:PER_CLASS]
        pixels = (rows[order].numpy().reshape(-1, side, side) * (255 / largest)).round().astype(np.uint8)
        found[f"{number:03d}"] = [Image.fromarray(each) for each in pixels]
    return found


def draw_digits() -> Drawn:
    """Return scikit-learn's digits, 8 x 8."""
    data = load_digits()
    return draw_rows(data, list(range(10)), 8, float(data.x.max()))


def draw_glyphs() -> Drawn:
    """Return fifteen letters in all faces of matplotlib, 28 x 28."""
    data = load_glyphs(characters=list(map(chr, range(0x3B1, 0x3CA))) + list(map(chr, range(0x561, 0x587))), copies=3)
    return draw_rows(data, list(range(0, data.num_classes, max(1, data.num_classes // 15)))[:15], 28, 1.0)


def draw_faces() -> Drawn:
    """Return faces of people, and what is none, 25 x 25 (scikit-image's part of "Labeled faces in the wild")."""
    spec = find_spec("skimage")
    paths = [Path(root, "data", "lfw_subset.npy") for root in (spec and spec.submodule_search_locations) or []]
    if not paths or not paths[0].exists():
        remedy = "Run pip install --no-deps scikit-image (its pictures alone are read)."
        raise MissingPackageError(describe("draw_faces", "skimage", "be installed", "no such file", remedy))
    rows = (np.load(paths[0]) * 255).round().astype(np.uint8)
    half = len(rows) // 2
    return {
        "face": [Image.fromarray(each) for each in rows[:half]],
        "no_face": [Image.fromarray(each) for each in rows[half:]],
    }


def draw_typefaces() -> Drawn:
    """Return words in eight typefaces, dark on light or light on dark; a class is a typeface."""
    found: Drawn = {}
    faces = [face.path for face in find_faces() if "Display" not in face.path.name][:8]
    for path in faces:
        random = np.random.default_rng([*path.name.encode()])
        found[path.stem] = []
        for _ in range(PER_CLASS):
            font = ImageFont.truetype(path, int(random.integers(14, 22)), layout_engine=ImageFont.Layout.BASIC)
            ground, ink = pick_two_colours(random)
            picture = Image.new("RGB", (MADE, MADE), ground)
            letters = "".join(chr(97 + each) for each in random.integers(0, 26, 6))
            for line in range(2):
                place = float(random.integers(-4, 4)), float(random.integers(0, 5) + 22 * line)
                ImageDraw.Draw(picture).text(place, letters[3 * line :][:5], fill=ink, font=font)
            found[path.stem].append(picture)
    return found


def pick_colour(random: np.random.Generator, hue: float | None = None) -> tuple[int, int, int]:
    """Return a colour, of a hue in [0, 1) if there is one."""
    hue = float(random.random()) if hue is None else hue
    found = colorsys.hsv_to_rgb(hue % 1, float(random.uniform(0.35, 1)), float(random.uniform(0.35, 1)))
    return tuple(round(255 * each) for each in found)  # type: ignore[return-value]


def pick_two_colours(random: np.random.Generator) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return two colours that can be told apart."""
    while True:
        one, other = pick_colour(random), pick_colour(random)
        if sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 150:
            return one, other


def add_noise(picture: Image.Image, random: np.random.Generator, size: float = 10.0) -> Image.Image:
    """Return a picture with noise, and a little light from one side."""
    pixels = np.asarray(picture, np.float64)
    slope = random.normal(0, 15, 2)
    rows, columns = np.mgrid[-1 : 1 : pixels.shape[0] * 1j, -1 : 1 : pixels.shape[1] * 1j]
    light = (slope[0] * rows + slope[1] * columns)[..., None]
    return Image.fromarray((pixels + light + random.normal(0, size, pixels.shape)).clip(0, 255).astype(np.uint8))


def make_outline(name: str, turn: float) -> list[tuple[float, float]]:
    """Return the corners of a shape of radius 1 about 0."""

    def ring(n: int, radii: list[float]) -> list[tuple[float, float]]:
        angles = [turn + 2 * math.pi * k / n for k in range(n)]
        return [
            (radii[k % len(radii)] * math.cos(angle), radii[k % len(radii)] * math.sin(angle))
            for k, angle in enumerate(angles)
        ]

    if name == "heart":
        t = np.linspace(0, 2 * math.pi, 40)
        x, y = np.sin(t) ** 3, -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)) / 16
        points = np.stack([x, y], axis=1) @ np.array(
            [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]
        )
        return [(float(a), float(b)) for a, b in points]
    if name == "moon":
        t = np.linspace(0.3 * math.pi, 1.7 * math.pi, 24)
        outer = [(math.cos(turn + a), math.sin(turn + a)) for a in t.tolist()]
        left, up = 0.45 * math.cos(turn), 0.45 * math.sin(turn)
        inner = [(left + 0.75 * math.cos(turn + a), up + 0.75 * math.sin(turn + a)) for a in t[::-1].tolist()]
        return outer + inner
    forms: dict[str, tuple[int, list[float]]] = {
        "circle": (48, [1.0]),
        "triangle": (3, [1.0]),
        "square": (4, [1.0]),
        "hexagon": (6, [1.0]),
        "star": (10, [1.0, 0.42]),
        "cross": (24, [1.0, 0.4, 0.4, 0.4, 0.4, 1.0]),
        "flower": (36, [1.0, 0.8, 0.5, 0.5, 0.5, 0.8]),
        "needle": (4, [1.0, 0.25]),
    }
    return ring(*forms[name])


def draw_shape(name: str, random: np.random.Generator, hue: float | None = None) -> Image.Image:
    """Draw a shape at any place, turn, size and colour, or of a hue, on a ground of another colour."""
    ground, ink = pick_two_colours(random)
    if hue is not None:
        ink = pick_colour(random, hue + float(random.normal(0, 0.02)))
        ground = pick_colour(random)
        while sum(abs(a - b) for a, b in zip(ink, ground, strict=True)) <= 120:
            ground = pick_colour(random)
    side = 2 * MADE
    picture = Image.new("RGB", (side, side), ground)
    radius = random.uniform(0.22, 0.4) * side
    x, y = random.uniform(radius, side - radius, 2)
    corners = [(x + radius * a, y + radius * b) for a, b in make_outline(name, float(random.uniform(0, 2 * math.pi)))]
    ImageDraw.Draw(picture).polygon(corners, fill=ink)
    return add_noise(picture.reduce(2), random)


def draw_shapes(names: tuple[str, ...]) -> Drawn:
    """Return shapes, of any colour."""
    return {
        name: [draw_shape(name, np.random.default_rng([*name.encode(), k])) for k in range(PER_CLASS)] for name in names
    }


def draw_coloured(names: tuple[str, ...], hues: dict[str, float]) -> Drawn:
    """Return shapes of some hues: a class is a shape and a hue."""
    found: Drawn = {}
    for name in names:
        for colour, hue in hues.items():
            key = f"{colour}_{name}"
            own = [draw_shape(name, np.random.default_rng([*key.encode(), k]), hue) for k in range(PER_CLASS)]
            found[key] = own
    return found


def draw_hues() -> Drawn:
    """Return any shape: the class is its hue alone, eight of them, a twelfth of the circle apart."""
    found: Drawn = {}
    names = ("circle", "square", "star", "flower")
    for number in range(8):
        hue = number / 12
        found[f"hue{number}"] = [
            draw_shape(names[k % 4], np.random.default_rng([7, number, k]), hue) for k in range(PER_CLASS)
        ]
    return found


def make_texture(name: str, random: np.random.Generator) -> np.ndarray:
    """Return the height (side, side), in [0, 1], of a texture, at any turn and of about one size."""
    side, turn = MADE, random.uniform(0, math.pi)
    y, x = np.mgrid[:side, :side].astype(float)
    u, v = x * math.cos(turn) + y * math.sin(turn), -x * math.sin(turn) + y * math.cos(turn)
    step, phase = random.uniform(5, 9), random.uniform(0, 10, 2)
    u, v = 2 * math.pi * (u + phase[0]) / step, 2 * math.pi * (v + phase[1]) / step
    noise = random.normal(size=(side, side))

    def smooth(radius: float) -> np.ndarray:
        raw = Image.fromarray(noise.astype(np.float32) * 40 + 128).convert("L")
        found = np.asarray(raw.filter(ImageFilter.GaussianBlur(radius)), float)
        scaled: np.ndarray = (found - found.min()) / max(1e-9, np.ptp(found))
        return scaled

    made: dict[str, Callable[[], np.ndarray]] = {
        "stripes": lambda: 0.5 + 0.5 * np.sin(u),
        "checks": lambda: 0.5 + 0.5 * np.sign(np.sin(u) * np.sin(v)),
        "dots": lambda: ((np.sin(u) * np.sin(v)) ** 2 > 0.55).astype(float),
        "waves": lambda: 0.5 + 0.5 * np.sin(u + 2 * np.sin(v / 2)),
        "clouds": lambda: smooth(3),
        "grain": lambda: smooth(0.7),
        "spots": lambda: (smooth(2) > 0.55).astype(float),
        "rings": lambda: 0.5 + 0.5 * np.sin(np.hypot(u - u.mean(), v - v.mean())),
        "weave": lambda: 0.5 + 0.25 * (np.sin(u) + np.sin(v)),
        "saw": lambda: (u / (2 * math.pi)) % 1,
        "lines": lambda: (np.sin(u) > 0.8).astype(float),
        "grid": lambda: np.maximum(np.sin(u) > 0.85, np.sin(v) > 0.85).astype(float),
    }
    return made[name]()


def draw_textures(names: tuple[str, ...]) -> Drawn:
    """Return textures between two colours, any ones."""
    found: Drawn = {}
    for name in names:
        found[name] = []
        for k in range(PER_CLASS):
            random = np.random.default_rng([*name.encode(), k])
            low, high = pick_two_colours(random)
            share = make_texture(name, random)[..., None]
            pixels = np.array(low) * (1 - share) + np.array(high) * share
            found[name].append(add_noise(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), random, 14))
    return found


SHAPES = ("circle", "triangle", "square", "star", "cross", "flower")
OTHER_SHAPES = ("hexagon", "heart", "moon", "needle")
TEXTURES = ("stripes", "checks", "dots", "clouds", "grain", "rings")
OTHER_TEXTURES = ("waves", "spots", "weave", "saw", "lines", "grid")

#: What settings were chosen on, ...
TUNED: dict[str, Callable[[], Drawn]] = {
    "glyphs": draw_glyphs,
    "photographs": partial(cut, COLOUR_PHOTOGRAPHS["tuned"], CROP, mode="RGB"),
    "surfaces": partial(cut, GREY_PHOTOGRAPHS["tuned"], CROP, mode="L"),
    "shapes": partial(draw_shapes, SHAPES),
    "textures": partial(draw_textures, TEXTURES),
    "hues": draw_hues,
}
#: ... and what they were not.
OTHERS: dict[str, Callable[[], Drawn]] = {
    "digits": draw_digits,
    "more-photographs": partial(cut, COLOUR_PHOTOGRAPHS["other"], CROP, mode="RGB"),
    "more-surfaces": partial(cut, GREY_PHOTOGRAPHS["other"], CROP, mode="L"),
    "coloured-shapes": partial(draw_coloured, OTHER_SHAPES, {"red": 0.0, "green": 0.35}),
    "more-textures": partial(draw_textures, OTHER_TEXTURES),
    "typefaces": draw_typefaces,
    "faces": draw_faces,
}
SETS = TUNED | OTHERS


class Pictures(NamedTuple):
    """A set on the disk."""

    paths: list[Path]
    labels: np.ndarray  #: (n,) int64.


@cache
def write_set(name: str, folder: Path) -> Pictures:
    """Write a set into a folder of its own, a folder per class, if it is not there yet; return its pictures."""
    root = folder / name
    if not (root / ".whole").exists():
        shutil.rmtree(root, ignore_errors=True)
        for own, pictures in SETS[name]().items():
            (root / own).mkdir(parents=True)
            for number, picture in enumerate(pictures):
                picture.save(root / own / f"{number:03d}.png")
        (root / ".whole").touch()
    classes = sorted(entry for entry in root.iterdir() if entry.is_dir())
    paths = [path for entry in classes for path in sorted(entry.iterdir())]
    return Pictures(paths, np.array([classes.index(path.parent) for path in paths]))
