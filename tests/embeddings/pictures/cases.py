"""Pictures for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw


def draw(kind: str, seed: int, side: int = 40) -> Image.Image:
    """Draw a disc or a cross, light on dark, somewhere."""
    rng = np.random.default_rng([seed, *kind.encode()])
    picture = Image.new("RGB", (side, side), tuple(rng.integers(0, 80, 3).tolist()))
    x, y = rng.integers(side // 3, 2 * side // 3, 2).tolist()
    radius, ink = side // 4, tuple(rng.integers(150, 255, 3).tolist())
    pen = ImageDraw.Draw(picture)
    if kind == "disc":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
    else:
        pen.line((x - radius, y, x + radius, y), fill=ink, width=4)
        pen.line((x, y - radius, x, y + radius), fill=ink, width=4)
    return picture


def write_folders(root: Path, *, per_class: int = 5, first: int = 0) -> Path:
    """Write a folder of discs, in JPEG, and one of crosses, in PNG."""
    for kind, suffix in (("disc", "jpg"), ("cross", "png")):
        (root / kind).mkdir(parents=True)
        for index in range(first, first + per_class):
            draw(kind, index).save(root / kind / f"{index}.{suffix}")
    return root
