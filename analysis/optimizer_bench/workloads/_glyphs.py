"""Images that are offline wherever matplotlib is: characters in every face that it ships."""

from __future__ import annotations

import functools

from protonet.datasets.dataset import Dataset
from protonet.datasets.glyphs import load_glyphs


@functools.cache
def load_latin() -> Dataset:
    """Return ASCII to Latin Extended-A: some 310 classes, 7,400 rows of 28 * 28 grey values in [0, 1]."""
    return load_glyphs(characters=map(chr, range(0x21, 0x180)), copies=2)


@functools.cache
def load_ascii() -> Dataset:
    """Return ASCII alone, jittered more often: 94 classes, 6,800 rows of 28 * 28 grey values in [0, 1]."""
    return load_glyphs(characters=map(chr, range(0x21, 0x7F)), copies=6)
