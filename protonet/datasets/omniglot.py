"""Omniglot: handwritten characters of 50 alphabets, 20 drawings each, read from the folders of its archives."""

from __future__ import annotations

from pathlib import Path

from protonet.datasets.dataset import Dataset
from protonet.datasets.pictures import ImageSet, ImageSource, Pictures, Rotated, load_pictures
from protonet.embeddings.pictures.images import list_folders, list_images
from protonet.errors import raise_input_error

BACKGROUND, EVALUATION = "images_background", "images_evaluation"
VALIDATION_FRACTION = 0.2  #: The least share of the background's characters that are for validation. Our own choice.


def load_omniglot(root: str | Path, *, size: int | None = None, rotations: bool = False) -> Dataset:
    """Load Omniglot: ``root/images_background/ALPHABET/character01/*.png`` and ``root/images_evaluation/...``.

    The background's alphabets are base, except for the last ones by name: as many of these as are needed for a fifth
    of its characters are for validation. The evaluation's alphabets are novel.

    Args:
        root: The folder with both folders, or with a folder ``omniglot-py`` that has them.
        size: Pixels per side to resize the drawings of 105 x 105 pixels to, >= 1; None for the 28 of the papers.
        rotations: Whether each character turned by 90, 180 and 270 degrees is a further class, on the character's side
            of the split: 6,492 classes instead of 1,623.

    Returns:
        As `protonet.datasets.pictures.load_pictures`, one channel, ink being 1, and classes "ALPHABET/characterNN",
        with "rot090" and so on behind it if they are turned.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: A folder is missing or has no characters, a character has no images, or a file is not an image.

    Source: Lake, Salakhutdinov and Tenenbaum, "Human-level concept learning through probabilistic program induction"
        (2015). https://github.com/brendenlake/omniglot. Rotations: Santoro et al., "Meta-learning with memory-augmented
        neural networks" (2016), sec. 4.1; Snell et al. (2017), sec. 3.1.
    """
    return load_pictures(locate_omniglot(root, rotations=rotations), size)


def locate_omniglot(root: str | Path, *, rotations: bool = False) -> ImageSet:
    """List Omniglot's drawings; arguments and errors are as in `load_omniglot`."""
    root = Path(root)
    home = root / "omniglot-py" if (root / "omniglot-py").is_dir() else root
    background, evaluation = (_list_characters(home / part) for part in (BACKGROUND, EVALUATION))
    side_of = dict.fromkeys(background, "base") | dict.fromkeys(evaluation, "novel")
    n_validation = 0
    for alphabet in sorted({folder.parent for folder in background}, reverse=True)[:-1]:
        if n_validation >= VALIDATION_FRACTION * len(background):
            break
        characters = [folder for folder in background if folder.parent == alphabet]
        side_of |= dict.fromkeys(characters, "validation")
        n_validation += len(characters)
    paths: list[Path] = []
    drawings: list[ImageSource] = []
    labels, sides = [], []
    for folder, side in side_of.items():
        images = list_images("root", folder)
        paths += images
        name = f"{folder.parent.name}/{folder.name}"
        for quarters in range(4 if rotations else 1):
            drawings += [Rotated(path, quarters) if quarters else path for path in images]
            labels += [f"{name} rot{90 * quarters:03}" if quarters else name] * len(images)
            sides += [side] * len(images)
    pictures = Pictures(drawings, labels, sides)
    variant = "rotations" if rotations else ""
    return ImageSet("load_omniglot", home, paths, lambda: pictures, size=28, grey=True, variant=variant)


def _list_characters(folder: Path) -> list[Path]:
    """List the folders of characters in a folder of alphabets; raise an InputError if there are none."""
    characters = [character for alphabet in list_folders(folder) for character in list_folders(alphabet)]
    if not characters:
        constraint = f"hold {BACKGROUND}/ALPHABET/CHARACTER/*.png and {EVALUATION}/... (or omniglot-py with both)"
        got = f"{folder} without characters" if folder.is_dir() else f"no folder {folder}"
        raise_input_error("root", constraint, got, "Unpack both archives of Omniglot there.")
    return characters
