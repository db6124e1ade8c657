"""Columns that a representation reads: what they become, that a file can hold them, and that older files are read."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from protonet.errors import InputError
from protonet.representations.opening import open_representation, reopen
from protonet.representations.pictures.files import embed_pictures, open_typed
from protonet.representations.representation import Record, Representation
from protonet.tables.columns.embedded import WORDS, EmbeddedText
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.picture import VERSION, Picture
from protonet.tables.columns.text import Text
from protonet.views.view import Stored
from tests.representations.pictures.cases import write_folders

pytestmark = pytest.mark.usefixtures("own_cache")
CELLS = np.array(
    ["my card is lost", "where is my money", "", "the card came", "", "my money, where?", "lost money", "  "], object
)
GAPS = [2, 4, 7]
#: A network of pictures of another place, by the length of their names.
PICTURES = Record("net.onnx", "picture", 3, "a" * 64, "")


@pytest.fixture
def words() -> Representation:
    pytest.importorskip("wordllama", reason="it brings vectors of words")
    return open_representation("words")


@pytest.fixture
def pictures(tmp_path: Path) -> np.ndarray:
    pytest.importorskip("PIL", reason="it reads pictures")
    return np.array(sorted(map(str, write_folders(tmp_path / "pictures", each=3).rglob("*.*"))), object)


def measure_paths(paths: Sequence[Path]) -> np.ndarray:
    return np.array([[len(path.suffix), int(path.stem), 7] for path in paths], np.float32)


def restore(encoding: Encoding) -> Encoding:
    """Return an encoding as a file gives it again."""
    described, tensors = encoding.describe()
    return Encoding.restore(json.loads(json.dumps(described)), tensors)


def test_texts_become_their_embedding_and_their_words(words: Representation) -> None:
    column = EmbeddedText.fit(CELLS, words)
    x = column.encode(CELLS)
    width, there = words.record.width, np.setdiff1d(np.arange(len(CELLS)), GAPS)
    assert x.dtype == np.float32
    assert x.shape == (len(CELLS), len(column.parts)) == (len(CELLS), sum(column.blocks))
    embedded = x[there, :width].astype(np.float64)
    np.testing.assert_allclose(embedded.mean(axis=0), 0, atol=1e-6)
    assert embedded.var(axis=0).sum() == pytest.approx(1, abs=1e-5)
    rows = words.embed(CELLS[there].tolist())
    np.testing.assert_allclose(embedded, (rows - rows.mean(axis=0)) / column.embedded.scale, rtol=1e-4, atol=1e-6)
    assert not x[GAPS, :width].any()
    np.testing.assert_array_equal(x[:, width:], WORDS * Text.fit(CELLS).encode(CELLS))
    bare = EmbeddedText.fit(CELLS, words, words=Text.fit(CELLS[:0]))
    np.testing.assert_array_equal(bare.encode(CELLS), x[:, :width])
    assert bare.blocks == [width]
    assert column.tell().startswith("text by words (24143450), 256 numbers, and ")
    assert column.tell().endswith(" words and parts of words")
    assert bare.tell() == "text by words (24143450), 256 numbers"
    for few in (CELLS[:1], CELLS[2:3], CELLS[:0]):  # nothing varies
        assert np.isfinite(EmbeddedText.fit(few, words).encode(CELLS)).all()


def test_texts_come_back_from_a_file_to_the_bit(words: Representation) -> None:
    fitted = [EmbeddedText.fit(CELLS, words, words=each) for each in (None, Text.fit(CELLS[:0]))]
    encoding = Encoding((*fitted, Text.fit(CELLS)))
    x = encoding.encode([CELLS] * 3)
    restored = restore(encoding)
    assert restored.describe()[0] == encoding.describe()[0]
    column = restored.columns[0]
    assert isinstance(column, EmbeddedText)
    assert column.embedded.representation is None
    np.testing.assert_array_equal(restored.encode([CELLS] * 3), x)  # it is opened as it is needed
    np.testing.assert_array_equal(column.attach(lambda _: words, shown=False).encode(CELLS), fitted[0].encode(CELLS))
    assert [len(encoding.find_features(number)) for number in range(3)] == encoding.sizes
    for copied in (pickle.loads(pickle.dumps(fitted[0])), copy.deepcopy(fitted[0])):
        assert copied.embedded.representation is None
        np.testing.assert_array_equal(copied.encode(CELLS), fitted[0].encode(CELLS))
    assert len(pickle.dumps(fitted[1])) < 4 * words.record.width + 2000  # no network


def test_pictures_become_their_embedding_and_our_own_features(pictures: np.ndarray) -> None:
    representation = Representation(PICTURES, measure_paths)
    column = Picture.fit(pictures, representation)
    encoding = Encoding((column,))
    x = encoding.encode([pictures])
    rows = measure_paths(list(map(Path, pictures)))
    assert x[:, :3].var(axis=0).sum() == pytest.approx(1, abs=1e-5)
    assert column.embedded is not None
    np.testing.assert_allclose(x[:, :3], (rows - rows.mean(axis=0)) / column.embedded.scale, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(x[:, 3:], Picture().encode(pictures))
    assert encoding.encode([pictures[:0]]).shape == (0, x.shape[1])
    (restored,) = restore(encoding).columns
    assert isinstance(restored, Picture)
    np.testing.assert_array_equal(restored.attach(lambda _: representation, shown=False).encode(pictures), x)
    for copied in (restored, pickle.loads(pickle.dumps(column))):  # a file that nobody has named is not looked for
        with pytest.raises(InputError, match="Pass --representation FILE, where it is now"):
            copied.encode(pictures)
    alone = replace(column, sizes=(), side=0)
    (without,) = restore(Encoding((alone,))).columns
    assert isinstance(without, Picture)
    np.testing.assert_array_equal(without.attach(lambda _: representation, shown=False).encode(pictures), x[:, :3])


def test_pictures_of_an_older_file_are_what_its_network_gives(pictures: np.ndarray, tmp_path: Path) -> None:
    program = torch.export.export(
        nn.Flatten(), (torch.zeros(2, 3, 4, 4),), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    path = tmp_path / "net.pt2"
    torch.export.save(program, path)
    settings = open_typed(f"{path}:size=4,mean=0.5,std=0.2").preprocessing.describe()
    described = {"kind": "picture", "sizes": [48], "side": 0, "version": VERSION, "backbone": settings}
    (column,) = Encoding.restore([json.loads(json.dumps(described))], {}).columns
    assert isinstance(column, Picture)
    assert column.embedded is not None
    opened = reopen(column.embedded.record, [str(path)])
    x = column.attach(lambda _: opened, shown=False).encode(pictures)
    np.testing.assert_array_equal(x, embed_pictures(pictures.tolist(), path, size=4, mean=[0.5], std=[0.2]))
    again = restore(Encoding((column,))).columns[0]
    assert isinstance(again, Picture)
    np.testing.assert_array_equal(again.attach(lambda _: opened, shown=False).encode(pictures), x)
    for changes in ({"side": 64}, {"sizes": [47, 1]}, {"backbone": settings | {"std": [0.0] * 3}}):
        with pytest.raises(ValueError, match=r"backbone|std"):
            Encoding.restore([described | changes], {})


def test_words_of_an_older_file_are_counted_as_then() -> None:
    cells = np.array(["a new card", "Card, card!", "new carts", ""], object)
    # Of three to five letters, or whole; and two that were not counted then.
    parts = [" car", "ard", "card ", " card ", "cart", "new", "w", " ne", "ca", " a  new "]
    rng = np.random.default_rng(0)
    scales, basis, mean = (rng.random(shape).astype(np.float32) + 1 for shape in (len(parts), (len(parts), 2), 2))
    tensors = {"scales": scales, "basis": basis, "mean": mean}
    column = Text.restore(Stored({"grams": parts}, {name: torch.from_numpy(each) for name, each in tensors.items()}))
    assert not column.apart
    counts = np.zeros((len(cells), len(parts)))
    for row, cell in enumerate(cells):
        for word in re.findall(r"\w+", cell.lower()):
            spaced = f" {word} "
            found = [spaced, *(spaced[at : at + size] for size in (3, 4, 5) for at in range(len(spaced) - size + 1))]
            found = [each for place, each in enumerate(found) if place == 0 or each != spaced]
            for place, part in enumerate(parts):
                counts[row, place] += found.count(part)
    assert counts[:, -3:].sum() == 2  # " ne", of what is counted now and was not then
    x = np.where(counts > 0, 1 + np.vectorize(math.log)(np.maximum(counts, 1)), 0) * scales
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    expected = x / np.where(norms > 0, norms, 1) @ basis - mean
    np.testing.assert_allclose(column.encode(cells), expected, rtol=1e-5, atol=1e-6)
    again = restore(Encoding((column,))).columns[0]
    np.testing.assert_array_equal(again.encode(cells), column.encode(cells))


def test_what_is_no_column_is_refused(words: Representation) -> None:
    described, tensors = Encoding((EmbeddedText.fit(CELLS, words),)).describe()
    record = words.record.describe()
    spoiled: list[Any] = [{"representation": each} for each in (None, "words", {}, record | {"width": 7})]
    spoiled += [{"representation": record | {"takes": "picture"}}, {"kind": "picture"}, {"grams": [1]}, {"apart": 1}]
    spoiled += [{"scale": each} for each in (0.0, -1.0, math.inf, 1, None)]
    for change in spoiled:
        with pytest.raises(ValueError, match=r"\w"):
            Encoding.restore([described[0] | change], tensors)
    for name in tensors:
        with pytest.raises(ValueError, match=f"no tensor {name}"):
            Encoding.restore(described, {key: each for key, each in tensors.items() if key != name})
    picture = {"kind": "picture", "sizes": [], "side": 0, "version": VERSION} | described[0]
    with pytest.raises(ValueError, match="a column of pictures that takes none"):
        Encoding.restore([picture | {"kind": "picture"}], {"0.centre": torch.zeros(words.record.width)})
