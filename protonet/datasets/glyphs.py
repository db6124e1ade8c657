"""Glyphs, a data set of printed characters: a class is a character, a row its image in one font face.

The data set resembles Omniglot, but needs no download. Some 3,000 letters, digits and symbols are in eight or more of
the DejaVu font faces that come with matplotlib. Each image is distorted by a small random affine map (jitter). The
classes are split by alphabet: all characters of an alphabet are on one side of the split.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from bisect import bisect
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from protonet._io import progress_bar
from protonet._validation import check_int
from protonet.datasets.dataset import SPLIT_SIDES, Dataset
from protonet.datasets.pictures import ImageSet, LabelledPictures, load_pictures
from protonet.errors import optional_packages, raise_input_error

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont


CLASS_FRACTION_OF_SIDE = (
    0.6,
    0.15,
    0.25,
)  #: The fraction of the classes on each side, in the order of ``SPLIT_SIDES``.
JITTER_SEED = 0  #: The seed of the jitter.
MIN_ALPHABET_SIZE = 20  #: Alphabets of fewer characters are pooled into one alphabet.
#: Alphabets of characters other than letters: the first code point of each range, and the alphabet of its characters.
SYMBOL_BLOCKS = [
    *((0x0000, "PUNCTUATION"), (0x0300, "SYMBOLS"), (0x2000, "PUNCTUATION"), (0x2070, "NUMBERS")),
    *((0x20A0, "SYMBOLS"), (0x2150, "NUMBERS"), (0x2190, "ARROWS"), (0x2200, "MATHEMATICAL")),
    *((0x2300, "TECHNICAL"), (0x2500, "BOXES"), (0x25A0, "SHAPES"), (0x2600, "SYMBOLS")),
    *((0x27C0, "MATHEMATICAL"), (0x27F0, "ARROWS"), (0x2800, "BRAILLE"), (0x2900, "ARROWS")),
    *((0x2980, "MATHEMATICAL"), (0x2B00, "ARROWS"), (0x2E00, "SYMBOLS")),
]
#: The version of the rendering. Increase it whenever images change, so that cached files are made again.
GLYPH_CACHE_VERSION = 1


class FontFace(NamedTuple):
    """A font file and the characters that it can draw."""

    path: Path  #: The font file.
    characters: frozenset[str]  #: The characters that the font has glyphs for.


#: Pixels per side of an image, as in MNIST and most uses of Omniglot.
IMAGE_SIDE = 28


def load_glyphs(*, characters: Iterable[str] | None = None, copies: int = 1) -> Dataset:
    """Load a data set of printed characters: images of each character in every font face that has it.

    Images are rendered at the first call and read from a cached file later. The cache is the folder
    ``$PROTONET_CACHE``; if this is not set, the folder ``protonet`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    A character is left out if its images are blank, or if it looks exactly like an earlier character (as Greek and
    Cyrillic A do). An image depends only on its character, font face and copy, not on other images.

    Args:
        characters: The classes to keep; None for all letters, numbers, punctuation and symbols.
        copies: Images per font face and character, >= 1, each distorted by another random affine map (jitter): up to 12
            degrees of rotation, 15 % of scale and shear, and 2 pixels of shift.

    Returns:
        A data set of rows of 28 * 28 grey values in [0, 1], ink being 1, with one class per character. The classes are
        split by alphabet (see `get_alphabet`): about 60 % are base, 15 % validation and 25 % novel classes, among
        letters as well as among other characters.

    Raises:
        MissingPackageError: matplotlib, Pillow or fontTools is missing; the message says how to install it.
        InputTypeError: ``copies`` is not a number.
        InputError: ``copies`` is below 1, or fewer than two characters are in enough font faces.
    """
    copies = check_int("copies", copies, low=1)
    faces = list_font_faces()
    counts = Counter(character for face in faces for character in face.characters)
    known = counts if characters is None else set(characters)
    min_font_faces = 8  # characters that fewer font faces have are left out
    chosen = sorted(c for c in known if counts[c] >= min_font_faces and unicodedata.category(c)[0] in "LNPS")

    def render() -> LabelledPictures:
        images, labels = _render_characters(chosen, faces, copies)
        names = list(dict.fromkeys(labels))
        if len(names) < 2:
            must, got = f"hold at least 2 that {min_font_faces} faces draw", f"{len(names)} of {len(set(known))}"
            raise_input_error("characters", must, got, "Pass more characters.")
        side_of = dict(zip(names, split_by_alphabet(names), strict=True))
        return LabelledPictures(images, labels).with_sides(side_of)

    paths = [face.path for face in faces]
    settings = json.dumps([GLYPH_CACHE_VERSION, chosen, copies, JITTER_SEED])
    variant = hashlib.sha256(settings.encode()).hexdigest()[:16]
    root, size = paths[0].parent, IMAGE_SIDE
    data = load_pictures(
        ImageSet(
            cache_name="glyphs",
            root=root,
            files=paths,
            read_pictures=render,
            image_side=size,
            is_grey=True,
            is_ink=True,
            cache_variant=variant,
        )
    )
    return data._replace(x=data.get_rows(torch.arange(len(data.y))), memory_map=None)


def get_alphabet(character: str) -> str:
    """Return a character's alphabet, such as "GREEK" (of a letter's Unicode name) or "ARROWS" (of its code point)."""
    if unicodedata.category(character)[0] == "L":
        return unicodedata.name(character, "SYMBOLS").split()[0]
    return SYMBOL_BLOCKS[bisect(SYMBOL_BLOCKS, (ord(character), "~")) - 1][1]


def split_by_alphabet(characters: Iterable[str]) -> tuple[str, ...]:
    """Split characters by alphabet; return the side of each character, one of ``SPLIT_SIDES``.

    Alphabets are assigned one after another, the largest first, each to the side that is farthest below its fraction.
    Letters and other characters are split separately, so that every side has both. All alphabets of fewer than
    ``MIN_ALPHABET_SIZE`` characters count as one alphabet.
    """
    names = [get_alphabet(character) for character in characters]
    counts = Counter(names)
    names = [name if counts[name] >= MIN_ALPHABET_SIZE else "SMALL" for name in names]
    counts = Counter(names)
    others = {"SMALL", *(name for _, name in SYMBOL_BLOCKS)}
    sides = {}
    for group in (counts.keys() - others, counts.keys() & others):
        total = sum(counts[name] for name in group)
        missing = {side: fraction * total for side, fraction in zip(SPLIT_SIDES, CLASS_FRACTION_OF_SIDE, strict=True)}
        for name in sorted(group, key=lambda name: (-counts[name], name)):
            sides[name] = max(missing, key=lambda side: missing[side])
            missing[sides[name]] -= counts[name]
    return tuple(sides[name] for name in names)


def list_font_faces() -> list[FontFace]:
    """List the DejaVu font faces that come with matplotlib, sorted by name."""
    with optional_packages():
        import matplotlib as mpl  # noqa: PLC0415 - optional
        from fontTools.ttLib import TTFont  # type: ignore[import-untyped]  # noqa: PLC0415
    faces = []
    for path in sorted(Path(mpl.get_data_path(), "fonts", "ttf").glob("DejaVu*.ttf")):
        with TTFont(path, lazy=True) as font:
            glyphs: dict[int, str] = font.getBestCmap() or {}
        faces.append(FontFace(path, frozenset(chr(code) for code, glyph in glyphs.items() if glyph != ".notdef")))
    return faces


#: Font size, in pixels of the canvas.
FONT_SIZE = 38


def _render_characters(
    characters: Iterable[str], faces: list[FontFace], copies: int
) -> tuple[list[np.ndarray], list[str]]:
    """Draw each character in every font face that has it; return distorted images (28, 28) uint8, and characters."""
    # A drawing is blank, and left out, if no pixel is above this value in [0, 255].
    min_ink_value = 127
    with optional_packages():
        from PIL import ImageFont  # noqa: PLC0415 - optional

    basic = ImageFont.Layout.BASIC  # the other engine depends on what is installed
    fonts = [(face, ImageFont.truetype(face.path, FONT_SIZE, layout_engine=basic)) for face in faces]
    seen: set[tuple[object, ...]] = set()
    images: list[np.ndarray] = []
    labels: list[str] = []
    for character in progress_bar(iterable=characters, desc="glyphs", unit="character", delay=2.0):
        drawn = [(face.path, _draw_character(character, font)) for face, font in fonts if character in face.characters]
        drawn = [(path, image) for path, image in drawn if np.asarray(image).max() > min_ink_value]
        look = (drawn[0][0], drawn[0][1].tobytes()) if drawn else None
        if look is None or look in seen:
            continue
        seen.add(look)
        for path, image in drawn:
            for copy in range(copies):
                entropy = [JITTER_SEED, copy, ord(character), *path.name.encode()]
                images.append(255 - _distort_image(image, np.random.default_rng(entropy)))
                labels.append(character)
    return images, labels


#: Pixels per side of the canvas that a character is drawn on. It is then reduced to ``image_side``.
CANVAS_SIDE = 56


def _draw_character(character: str, font: FreeTypeFont) -> Image:
    """Draw a character in white in the middle of a black canvas, in a smaller font size if it would not fit."""
    # The largest distance of ink from the centre of the canvas along an axis, in pixels. Larger characters are drawn in
    # a smaller font size.
    max_ink_distance = 25.0
    from PIL import Image, ImageDraw  # noqa: PLC0415 - optional

    side = CANVAS_SIDE
    reach = max(map(abs, font.getbbox(character, anchor="mm")))
    if reach > max_ink_distance:
        font = font.font_variant(size=FONT_SIZE * max_ink_distance / reach)
    image = Image.new("L", (side, side))
    ImageDraw.Draw(image).text((side / 2, side / 2), character, fill=255, font=font, anchor="mm")
    return image


def _distort_image(image: Image, generator: np.random.Generator) -> np.ndarray:
    """Distort the image of a character by a random affine map, and halve its size; return an array (28, 28) uint8."""
    # Largest rotation to either side, in radians.
    max_rotation_radians = np.pi / 15
    # Largest shear to either side.
    max_shear = 0.15
    # Largest scale factor along either axis; the smallest factor is 1 / 1.15.
    max_scale = 1.15
    # Largest shift along either axis, in pixels of the canvas.
    max_shift_pixels = 4
    from PIL.Image import Resampling, Transform  # noqa: PLC0415 - optional

    centre = CANVAS_SIDE / 2
    angle, shear = generator.uniform(-1, 1, 2) * (max_rotation_radians, max_shear)
    scale = max_scale ** generator.uniform(-1, 1, 2)  # (2,)
    shift = generator.uniform(-max_shift_pixels, max_shift_pixels, 2)  # (2,)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    inverse = rotation @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag(1 / scale)  # (2, 2): output to input
    offset = centre - inverse @ (centre + shift)  # (2,)
    coefficients = (*inverse[0].tolist(), float(offset[0]), *inverse[1].tolist(), float(offset[1]))
    warped = image.transform(image.size, Transform.AFFINE, coefficients, Resampling.BILINEAR)
    return np.asarray(warped.reduce(CANVAS_SIDE // IMAGE_SIDE), np.uint8)
