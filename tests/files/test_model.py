"""Model files: loaded networks equal the saved ones, and invalid files give one-line errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from torch import nn

from protonet import PrototypeNetwork, solve
from protonet.errors import InputError, InputTypeError
from protonet.files import archive
from protonet.files.archive import CONFIG_ENTRY, FORMAT_VERSION, TENSORS_ENTRY, read_config
from protonet.files.metadata import TrainingMetadata
from protonet.files.model import Model, load_model, restore_network, save_model, serialize_network
from protonet.views import VIEW_FAMILIES
from tests.strategies import blobs, join_archive, make_model, make_network, same_state, split_archive, spoil

X, Y = blobs(0)
REFUSED = rf"`path` must be a model file of version {FORMAT_VERSION}; got [^\n]*\. Pass a file that [^\n]*\."


@pytest.mark.parametrize(("learned", "raw"), [(True, True), (False, False)])
def test_the_file_alone_gives_the_same_logits(tmp_path: Path, learned: bool, raw: bool) -> None:
    path, model = tmp_path / "x.safetensors", make_model(learned=learned, raw=raw)
    save_model(path, model)
    loaded = load_model(path)
    for rows in (X, X[:2], X[:1]):  # products of other sizes round in other ways
        assert torch.equal(loaded.network(rows), model.network(rows))
    assert same_state(loaded.network, model.network)
    assert loaded.network.count_parameters() == model.network.count_parameters()
    assert not loaded.network.training
    assert (loaded.classes, loaded.columns, loaded.metadata) == (model.classes, model.columns, model.metadata)
    assert loaded.update_state == {}
    held_out = load_model(path, for_update=True).update_state
    assert held_out.keys() == model.update_state.keys()
    assert all(torch.equal(held_out[name], tensor) for name, tensor in model.update_state.items())


def test_files_of_safetensors_can_be_read_by_other_programs(tmp_path: Path) -> None:
    path, model = tmp_path / "x.safetensors", make_model()
    save_model(path, model)
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("network.sums"), model.network.sums)
    assert read_config(path)["classes"] == list(model.classes)
    save_model(tmp_path / "x.protonet", load_model(path, for_update=True))
    save_model(tmp_path / "y.protonet", model)
    assert (tmp_path / "x.protonet").read_bytes() == (tmp_path / "y.protonet").read_bytes()
    content = path.read_bytes()
    for damaged in (content[:-1], content[:3000], b"\xff" * 4 + content[4:], content.replace(b'"version', b'"vorsion')):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=REFUSED):
            load_model(path)


def test_networks_of_solve(tmp_path: Path) -> None:
    network = solve([(X, Y)], None, {"param_limit": 30})
    network.set_offsets(torch.linspace(-1, 1, 5))
    save_model(tmp_path / "x", Model(network=network, classes=(3, 1, -4, 0, 2**40)))
    loaded = load_model(str(tmp_path / "x"))
    assert torch.equal(loaded.network(X), network(X))
    assert same_state(loaded.network, network)
    assert (loaded.classes, loaded.columns) == ((3, 1, -4, 0, 2**40), None)


def test_a_loaded_network_can_be_updated(tmp_path: Path) -> None:
    path, model = tmp_path / "x", make_model()
    with torch.inference_mode():
        save_model(path, model)
        loaded = load_model(path)
    assert loaded.network.add_class(X[:2]) == model.network.add_class(X[:2]) == 7
    loaded.network(X)[:, 7].sum().backward()
    assert torch.equal(loaded.network(X), model.network(X))
    with pytest.raises(InputError, match=r"^`model` must .* got one with classes that are not 8 different names\."):
        save_model(path, loaded)
    save_model(path, replace(loaded, classes=(*loaded.classes[:-1], "newer", "newest")))
    assert load_model(path).classes[-2:] == ("newer", "newest")


def test_files_are_reproducible_and_shared_tensors_stay_shared(tmp_path: Path) -> None:
    for name in "ab":
        save_model(tmp_path / name, make_model())
    save_model(tmp_path / "c", load_model(tmp_path / "a", for_update=True))
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1
    save_model(tmp_path / "x", make_model())
    views: Any = load_model(tmp_path / "x").network.encoder.views
    assert views[0].source is views[1].source is views[3].source
    _, tensors = split_archive((tmp_path / "x").read_bytes())
    names = [name for name in load(tensors) if name.endswith("shift")]
    assert sorted(names) == [f"network.encoder.sources.{index}.shift" for index in range(4)]


def broken() -> Iterator[tuple[Model, str]]:
    model = make_model()
    yield replace(model, classes=model.classes[:-1]), "classes that are not 7 different names"
    yield replace(model, classes=("a",) * 7), "classes that are not 7 different names"
    yield replace(model, classes=(True, 2, 3, 4, 5, 6, 7)), "classes that are not 7 different names"
    yield replace(model, classes=("\ud800", *model.classes[1:])), "surrogates not allowed"
    yield replace(model, columns=("a",)), "columns that are not 8 different names"
    yield replace(model, metadata=TrainingMetadata(time_limit=float("nan"))), "not JSON compliant"
    yield replace(model, metadata=TrainingMetadata(column_statistics={"a": torch.zeros(1)})), "not JSON serializable"
    yield replace(model, metadata=TrainingMetadata(label_column=3)), "an invalid entry label_column"  # type: ignore[arg-type]
    yield replace(model, metadata=TrainingMetadata(uninformative_counts=(0,) * 8)), "metadata of other classes"
    yield replace(model, update_state={"a": torch.tensor([torch.inf])}), "a tensor a that is not finite"
    yield replace(model, network=make_network().double()), "of another shape or type"
    network = make_network()
    network.sums[0, 0] = torch.nan
    yield replace(model, network=network), "a tensor sums that is not finite"
    network = make_network()
    network.counts[0] = -1
    yield replace(model, network=network), "counts below 0"


@pytest.mark.parametrize(("model", "reason"), list(broken()))
def test_a_model_that_could_not_be_read_again_is_an_error(tmp_path: Path, model: Model, reason: str) -> None:
    with pytest.raises(InputError, match=f"^`model` must be what can be read again; got one with .*{reason}"):
        save_model(tmp_path / "x", model)
    assert list(tmp_path.iterdir()) == []


def test_another_encoder_is_an_error(tmp_path: Path) -> None:
    network = PrototypeNetwork(nn.Linear(8, 3), embedding_dim=3, num_classes=2)
    with pytest.raises(InputTypeError, match=r"`model` must hold a network with a protonet\.Encoder; got Linear"):
        save_model(tmp_path / "x", Model(network=network, classes=("a", "b")))


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "whole", make_model())
    saved = (tmp_path / "whole").read_bytes()
    (tmp_path / "truncated").write_bytes(saved[: len(saved) // 2])
    (tmp_path / "longer").write_bytes(saved + b"\0")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no tensors in here, but some words")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    save_file({"a": torch.zeros(1)}, tmp_path / "other", {"protonet.episodes.train": "{}"})
    for name in ("truncated", "longer", "empty", "text", "foreign", "other", "."):
        with pytest.raises(InputError, match=f"^{REFUSED}$"):
            load_model(tmp_path / name)
    with pytest.raises(InputError, match=r"^no such file: .*missing$"):
        load_model(tmp_path / "missing")


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, FORMAT_VERSION - 1, -1])
def test_files_of_other_versions_are_refused_with_one_line(tmp_path: Path, version: int) -> None:
    (tmp_path / "other").write_bytes(join_archive({"version": version, "library": "9.0"}, b""))
    got = rf"[^\n]*other \(of version {version}, by protonet '9\.0'\)"
    reason = rf"{FORMAT_VERSION}; got {got}\. Update protonet, or fit it again\."
    with pytest.raises(InputError, match=rf"^`path` must be a model file of version {reason}$"):
        load_model(tmp_path / "other")
    save_file({"a": torch.zeros(1)}, tmp_path / "other", {"protonet": json.dumps({"version": version})})
    with pytest.raises(InputError, match=rf"of version {version}, by protonet None\)\. Update protonet"):
        load_model(tmp_path / "other")


def make_archive(*entries: tuple[str, bytes]) -> bytes:
    """Compress entries to a ZIP archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of duplicate names
        for name, content in entries:
            file.writestr(name, content)
    return buffer.getvalue()


def test_malicious_archives_are_refused_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "whole", make_model())
    config, tensors = split_archive((tmp_path / "whole").read_bytes())
    with monkeypatch.context() as patch:  # a bomb: the declared sizes are looked at before anything is decompressed
        patch.setitem(archive.MAX_ENTRY_SIZES, TENSORS_ENTRY, len(tensors) - 1)
        with pytest.raises(InputError, match="bytes, too many to read"):
            load_model(tmp_path / "whole")
    text = json.dumps(config).encode()
    cases = {
        "duplicate": make_archive((CONFIG_ENTRY, text), (CONFIG_ENTRY, text), (TENSORS_ENTRY, tensors)),
        "more": make_archive((CONFIG_ENTRY, text), (TENSORS_ENTRY, tensors), ("../evil", b"x")),
        "path": make_archive((f"../{CONFIG_ENTRY}", text), (TENSORS_ENTRY, tensors)),
        "fewer": make_archive((CONFIG_ENTRY, text)),
        "order": make_archive((TENSORS_ENTRY, tensors), (CONFIG_ENTRY, text)),
        "large": make_archive((CONFIG_ENTRY, text), (TENSORS_ENTRY, bytes(2**27))),
        "prefix": b"#!/bin/sh\n" + (tmp_path / "whole").read_bytes(),
        "comment": (tmp_path / "whole").read_bytes()[:-2] + b"\x01\x00x",
        "nan": join_archive(config | {"metadata": {"a": float("nan")}}, tensors),
        "list": join_archive([], tensors),
        "no version": join_archive({}, tensors),
        "no tensors": join_archive(config, b""),
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"^{REFUSED}$"):
            load_model(tmp_path / name)


def test_configs_round_trip_and_untrusted_ones_are_checked() -> None:
    network = make_network()
    structure, tensors = serialize_network(network)
    assert json.loads(json.dumps(structure)) == structure
    restored = restore_network(structure, tensors)
    assert torch.equal(restored(X), network(X))
    assert same_state(restored, network)
    again, parts = serialize_network(restored)
    assert again == structure
    assert parts.keys() == tensors.keys()
    kinds = [view["kind"] for view in structure["views"]]
    assert {*kinds} == {view.kind for _, view in VIEW_FAMILIES}
    for name in tensors:
        with pytest.raises(ValueError, match="no tensor"):
            restore_network(structure, {key: value for key, value in tensors.items() if key != name})


@cache
def describe_cached() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return serialize_network(make_network())


def test_an_invalid_config_is_an_error() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_dim": 0}, "tensors of other features or classes"),
        ({"input_dim": 8.0}, "no usable input_dim"),
        ({"input_dim": 9}, "tensors of other features or classes"),
        ({"classes": 0}, "tensors of other features or classes"),
        ({"sources": 5}, "no usable entry sources"),
        ({"sources": []}, "of an unknown source"),
        ({"sources": [{"kind": "cubic"}]}, "a source or view of an unknown kind"),
        ({"sources": [{"kind": "linear"}]}, "entries other than"),
        ({"sources": [{"kind": "kernel_bank", "input_dim": 8, "width": 3, "parts": 1}]}, "no integer number of lines"),
        ({"views": []}, "no view"),
        ({"views": [{"kind": "linear", "source": None, "bias": 0.0}]}, "with another source"),
        ({"views": [{"kind": "linear", "source": 0, "bias": 0}]}, "no usable entry bias"),
        ({"views": [{"kind": "linear", "source": 0, "bias": -1.0}]}, "an entry bias out of range"),
        ({"views": [{"kind": "linear", "source": 0, "bias": 0.0}]}, "a source for no view"),
    ]
    for change, message in cases:
        structure, tensors = describe_cached()
        with pytest.raises(ValueError, match=message):
            restore_network(structure | change, tensors)


def test_invalid_tensors_are_an_error() -> None:
    cases: list[tuple[str, Callable[[Any], torch.Tensor], str]] = [
        ("encoder.weights", lambda weights: -weights, "weights that do not sum to 1"),
        ("encoder.weights", lambda weights: weights[1:], "a tensor encoder.weights of another shape"),
        ("encoder.scale", lambda scale: 0 * scale, "a scale or temperature that is not positive"),
        ("temperature", lambda temperature: -temperature, "a scale or temperature that is not positive"),
        ("sums", lambda sums: sums[1:], "tensors of other features or classes"),
        ("sums", lambda sums: sums.half(), "a tensor sums of another shape or type"),
        ("counts", lambda counts: counts.float(), "a tensor counts of another shape or type"),
        ("encoder.sources.0.gain", lambda gain: gain[1:], "gain of another shape"),
        ("encoder.sources.1.shift", lambda shift: shift / 0, "shift that is not finite"),
        ("encoder.views.1.bandwidth", lambda bandwidth: -bandwidth, "a bandwidth that is not positive"),
        ("encoder.views.1.units", lambda units: units[:, 1:], "units of another shape"),
        ("encoder.views.4.feature", lambda feature: feature + 10**6, "feature out of range"),
        ("encoder.views.4.label", lambda label: label - 9, "label out of range"),
        ("encoder.views.4.threshold", lambda threshold: threshold.abs() / 0, "nodes that make no trees"),
        ("encoder.views.6.mlps.last", lambda last: last[:, :, :7], "last of another shape"),
        ("encoder.views.6.mlps.more", lambda _: torch.zeros(1), "tensors that belong to no part"),
    ]
    for name, change, message in cases:
        structure, tensors = describe_cached()
        with pytest.raises(ValueError, match=message):
            restore_network(structure, tensors | {name: change(tensors.get(name))})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x"
    save_model(path, make_model())
    return path.read_bytes()


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, -1e-320, float("nan"), float("inf")]),
    st.sampled_from(["", "a", "\ud800", "F64", "BOOL", "F4", "F8_E4M3", "C64", "kernel_ridge", "forest", "linear"]),
    st.sampled_from([[], {}, [0], [0, 0], [2**62, 0], [[]], {"kind": "forest"}]),
)
Mutate = Callable[[st.DataObject, bytes], bytes]


def mutate_config(data: st.DataObject, saved: bytes) -> bytes:
    config, tensors = split_archive(saved)
    spoil(data, config, odd)
    return join_archive(config, tensors)


def mutate_bytes(data: st.DataObject, saved: bytes) -> bytes:
    content = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, max(len(content) - 1, 0)))
        piece = data.draw(st.binary(max_size=9))
        length = data.draw(st.sampled_from([len(piece), len(piece), 0, 1, 8, len(content)]))  # mostly as long as it was
        content[index : index + length] = piece
    return bytes(content)


def mutate_tensors(data: st.DataObject, saved: bytes) -> bytes:
    config, content = split_archive(saved)
    tensors = load(content)
    name = data.draw(st.sampled_from(sorted(tensors)))
    flat = tensors[name].flatten()
    for index in data.draw(st.lists(st.integers(0, max(len(flat) - 1, 0)), max_size=5)):
        if len(flat):
            flat[index] = data.draw(
                st.sampled_from([0, -1, 1, 40, 30_000, float("nan"), float("inf")])
                if flat.is_floating_point()
                else st.sampled_from([0, 1, 2, 40, 30_000])
            )
    tensors[name] = flat.view(tensors[name].shape)
    return join_archive(config, save(tensors))


@pytest.mark.parametrize("mutate", [mutate_config, mutate_bytes, mutate_tensors])
@settings(max_examples=int(os.environ.get("FUZZ", "25")))  # FUZZ=3400 makes some 10,000 files
@given(data=st.data())
def test_mutated_files_give_a_network_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, saved: bytes, mutate: Mutate, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(mutate(data, saved))
    try:
        model = load_model(path, for_update=True)
    except InputError as error:
        message = str(error)
        assert re.fullmatch(rf"({REFUSED}|.* Update protonet, or fit it again\.)", message), message
        assert len(message) < 2000
        return
    assert model.network(torch.zeros(2, len(X[0]))).shape == (2, len(model.classes))
    save_model(path, model)


def test_a_flipped_bit_is_never_silent(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(saved)
    before = load_model(path).network(X)
    for index in np.random.default_rng(0).integers(0, 8 * len(saved), 20).tolist():
        content = bytearray(saved)
        content[index // 8] ^= 1 << index % 8
        path.write_bytes(content)
        with contextlib.suppress(InputError):
            assert torch.equal(load_model(path).network(X), before)
