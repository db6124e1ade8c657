"""Embedded text and picture columns: their features, and round trips through model files."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder
from protonet.embeddings.loading import load_encoder
from protonet.errors import InputError
from protonet.tables.columns.encoding import Encoding
from protonet.tables.columns.picture import Picture
from protonet.tables.columns.text import WORD_COMPONENTS_WEIGHT, EmbeddedText, Text
from tests.embeddings.cases import write_folders

pytestmark = pytest.mark.usefixtures("embedding_cache")
CELLS = np.array(
    ["my card is lost", "where is my money", "", "the card came", "", "my money, where?", "lost money", "  "], object
)
BLANK = [2, 4, 7]
#: The record of a stand-in for a network, which computes with file names.
PICTURES = EncoderRecord("net.onnx", "picture", 3, "a" * 64, "")


@pytest.fixture
def words() -> PretrainedEncoder:
    pytest.importorskip("wordllama", reason="it brings vectors of words")
    return load_encoder("words")


@pytest.fixture
def pictures(tmp_path: Path) -> np.ndarray:
    pytest.importorskip("PIL", reason="it reads pictures")
    return np.array(sorted(map(str, write_folders(tmp_path / "pictures", per_class=3).rglob("*.*"))), object)


def measure_paths(paths: Sequence[Path]) -> np.ndarray:
    return np.array([[len(path.suffix), int(path.stem), 7] for path in paths], np.float32)


def round_trip(encoding: Encoding) -> Encoding:
    """Return an encoding after a round trip through a model file."""
    described, tensors = encoding.describe_columns()
    return Encoding.restore(json.loads(json.dumps(described)), tensors)


def test_text_features_are_embedding_and_words(words: PretrainedEncoder) -> None:
    column = EmbeddedText.fit(CELLS, words)
    x = column.encode(CELLS)
    width, present = words.record.width, np.setdiff1d(np.arange(len(CELLS)), BLANK)
    assert x.dtype == np.float32
    assert x.shape == (len(CELLS), len(column.feature_name_suffixes)) == (len(CELLS), sum(column.feature_block_sizes))
    embedded = x[present, :width].astype(np.float64)
    np.testing.assert_allclose(embedded.mean(axis=0), 0, atol=1e-6)
    assert embedded.var(axis=0).sum() == pytest.approx(1, abs=1e-5)
    rows = words.embed(CELLS[present].tolist())
    np.testing.assert_allclose(embedded, (rows - rows.mean(axis=0)) / column.embedding.scale, rtol=1e-4, atol=1e-6)
    assert not x[BLANK, :width].any()
    np.testing.assert_array_equal(x[:, width:], WORD_COMPONENTS_WEIGHT * Text.fit(CELLS).encode(CELLS))
    bare = EmbeddedText.fit(CELLS, words, words=Text.fit(CELLS[:0]))
    np.testing.assert_array_equal(bare.encode(CELLS), x[:, :width])
    assert bare.feature_block_sizes == [width]
    assert column.summary().startswith("text by words (24143450), 256 numbers, and ")
    assert column.summary().endswith(" words and character n-grams")
    assert bare.summary() == "text by words (24143450), 256 numbers"
    assert np.isfinite(EmbeddedText.fit(CELLS[2:3], words).encode(CELLS)).all()  # nothing varies


def test_unread_texts_are_encoded_as_missing(words: PretrainedEncoder) -> None:
    column = EmbeddedText.fit(CELLS, words)
    unread = np.array(["", "😀", "这个包裹来得很晚", "...."], object)
    x = column.encode(unread)
    assert (x == x[0]).all()
    assert column.is_invalid(unread).tolist() == [False, True, True, True]
    assert not column.is_invalid(CELLS).any()


def test_texts_round_trip_bit_for_bit(words: PretrainedEncoder) -> None:
    fitted = [EmbeddedText.fit(CELLS, words, words=fitted_words) for fitted_words in (None, Text.fit(CELLS[:0]))]
    encoding = Encoding((*fitted, Text.fit(CELLS)))
    x = encoding.encode([CELLS] * 3)
    restored = round_trip(encoding)
    assert restored.describe_columns()[0] == encoding.describe_columns()[0]
    column = restored.columns[0]
    assert isinstance(column, EmbeddedText)
    assert column.embedding.encoder is None
    np.testing.assert_array_equal(restored.encode([CELLS] * 3), x)  # opened on demand
    np.testing.assert_array_equal(
        column.with_loaded_encoder(lambda _: words, show_progress=False).encode(CELLS), fitted[0].encode(CELLS)
    )
    assert [len(encoding.feature_range(index)) for index in range(3)] == encoding.n_features_per_column
    copied = pickle.loads(pickle.dumps(fitted[0]))
    assert copied.embedding.encoder is None  # no network
    np.testing.assert_array_equal(copied.encode(CELLS), fitted[0].encode(CELLS))


def test_picture_features_are_embedding_and_descriptors(pictures: np.ndarray) -> None:
    representation = PretrainedEncoder(PICTURES, measure_paths)
    column = Picture.fit(pictures, representation)
    encoding = Encoding((column,))
    x = encoding.encode([pictures])
    rows = measure_paths(list(map(Path, pictures)))
    assert x[:, :3].var(axis=0).sum() == pytest.approx(1, abs=1e-5)
    assert column.embedding is not None
    np.testing.assert_allclose(x[:, :3], (rows - rows.mean(axis=0)) / column.embedding.scale, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(x[:, 3:], Picture().encode(pictures))
    assert encoding.encode([pictures[:0]]).shape == (0, x.shape[1])
    (restored,) = round_trip(encoding).columns
    assert isinstance(restored, Picture)
    opened = restored.with_loaded_encoder(lambda _: representation, show_progress=False)
    np.testing.assert_array_equal(opened.encode(pictures), x)
    for copied in (restored, pickle.loads(pickle.dumps(column))):  # only files that the user named are opened again
        with pytest.raises(InputError, match="Pass --representation FILE, where it is now"):
            copied.encode(pictures)


def test_secondary_texts_are_tf_idf_rows_of_unit_norm() -> None:
    cells = np.array(["a new card", "Card, card!", "new carts", ""], object)
    # Three to five letters, or a word; the last three are not counted beside other columns.
    vocabulary = [" car", "ard", "card ", " card ", "cart", "new", "w", " ne", "ca", " a  new "]
    rng = np.random.default_rng(0)
    scales, basis, mean = (rng.random(shape).astype(np.float32) + 1 for shape in (10, (10, 2), 2))
    column = Text(tuple(vocabulary), scales, basis, mean, normalize_separately=False)
    counts = np.zeros((len(cells), len(vocabulary)))
    for row, cell in enumerate(cells):
        for word in re.findall(r"\w+", cell.lower()):
            spaced = f" {word} "
            grams = [spaced, *(spaced[at : at + size] for size in (3, 4, 5) for at in range(len(spaced) - size + 1))]
            grams = [gram for index, gram in enumerate(grams) if index == 0 or gram != spaced]
            for column_index, part in enumerate(vocabulary):
                counts[row, column_index] += grams.count(part)
    assert counts[:, -3:].sum() == 2  # only " ne"
    x = np.where(counts > 0, 1 + np.vectorize(math.log)(np.maximum(counts, 1)), 0) * scales
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    expected = x / np.where(norms > 0, norms, 1) @ basis - mean
    np.testing.assert_allclose(column.encode(cells), expected, rtol=1e-5, atol=1e-6)
    again = round_trip(Encoding((column,))).columns[0]
    np.testing.assert_array_equal(again.encode(cells), column.encode(cells))


def test_invalid_descriptions_are_refused(words: PretrainedEncoder) -> None:
    described, tensors = Encoding((EmbeddedText.fit(CELLS, words),)).describe_columns()
    record = words.record.to_dict()
    spoiled: list[Any] = [{"representation": value} for value in (None, "words", {}, record | {"width": 7})]
    spoiled += [{"representation": record | {"modality": "picture"}}, {"kind": "picture"}, {"grams": [1]}, {"apart": 1}]
    spoiled += [{"scale": value} for value in (0.0, -1.0, math.inf, 1, None)]
    for change in spoiled:
        with pytest.raises(ValueError, match=r"\w"):
            Encoding.restore([described[0] | change], tensors)
    for name in tensors:
        with pytest.raises(ValueError, match=f"no tensor {name}"):
            Encoding.restore(described, {key: tensor for key, tensor in tensors.items() if key != name})
    picture = described[0] | Picture().stored_values() | {"kind": "picture"}
    with pytest.raises(ValueError, match="does not take pictures"):
        Encoding.restore([picture], {"0.centre": torch.zeros(words.record.width)})
