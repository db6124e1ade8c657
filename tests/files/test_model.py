"""Model files: the same network again, and one line for whatever else is in a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from protonet import PrototypeNetwork, solve
from protonet.encoder import Encoder
from protonet.errors import InputError, InputTypeError
from protonet.files.header import DEFLATED, FORMAT, HELD, OLDEST, VERSION
from protonet.files.model import Model, describe_network, load_model, restore_network, save_model
from tests.model_cases import make_model, make_network
from tests.strategies import blobs, same_state, spoil

X, Y = blobs(0)
REFUSED = rf"`path` must be a model file of version {VERSION}; got [^\n]*\. Pass a file that [^\n]*\."


@pytest.mark.parametrize(("learned", "raw"), [(True, False), (True, True), (False, False), (False, True)])
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
    assert loaded.held == {}
    held = load_model(path, held=True).held
    assert held.keys() == model.held.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in model.held.items())


@pytest.mark.parametrize("limit", [0, 30])
def test_what_solve_gives(tmp_path: Path, limit: int) -> None:
    network = solve([(X, Y)], None, {"param_limit": limit}, effort="fast")
    save_model(tmp_path / "x", Model(network, (3, 1, -4, 0, 2**40), None, {}, {}))
    loaded = load_model(str(tmp_path / "x"))
    assert torch.equal(loaded.network(X), network(X))
    assert (loaded.classes, loaded.columns) == ((3, 1, -4, 0, 2**40), None)


def test_a_loaded_network_goes_on(tmp_path: Path) -> None:
    path, model = tmp_path / "x", make_model()
    with torch.inference_mode():
        save_model(path, model)
        loaded = load_model(path)
    assert loaded.network.add_class(X[:2]) == model.network.add_class(X[:2]) == 7
    loaded.network(X)[:, 7].sum().backward()
    assert torch.equal(loaded.network(X), model.network(X))
    with pytest.raises(InputError, match=r"^`model` must .* got one with classes that are not 8 different names\."):
        save_model(path, loaded)
    save_model(path, loaded._replace(classes=(*loaded.classes[:-1], "newer", "newest")))
    assert load_model(path).classes[-2:] == ("newer", "newest")


def test_the_same_model_gives_the_same_bytes_and_what_is_shared_stays_shared(tmp_path: Path) -> None:
    for name in "ab":
        save_model(tmp_path / name, make_model())
    save_model(tmp_path / "c", load_model(tmp_path / "a", held=True))
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1
    save_model(tmp_path / "x", make_model())
    views: Any = load_model(tmp_path / "x").network.encoder.views
    assert views[0].source is views[1].source is views[3].source
    names = [name for name in load_file(tmp_path / "x") if name.endswith("shift")]
    assert sorted(names) == [f"sources.{number}.shift" for number in range(4)]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    save_model(path, make_model())
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_model(path, make_model(learned=False))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def broken() -> Iterator[tuple[Model, str]]:
    model = make_model()
    yield model._replace(classes=model.classes[:-1]), "classes that are not 7 different names"
    yield model._replace(classes=("a",) * 7), "classes that are not 7 different names"
    yield model._replace(classes=(1, "2", 3, 4, 5, 6, 7)), "classes that are not 7 different names"  # type: ignore[arg-type]
    yield model._replace(classes=(True, 2, 3, 4, 5, 6, 7)), "classes that are not 7 different names"
    yield model._replace(classes=("\ud800", *model.classes[1:])), "surrogates not allowed"
    yield model._replace(columns=("a",)), "columns that are not 8 different names"
    yield model._replace(metadata={"a": float("nan")}), "not JSON compliant"
    yield model._replace(metadata={"a": torch.zeros(1)}), "not JSON serializable"
    yield model._replace(metadata=[]), "no metadata"  # type: ignore[arg-type]
    yield model._replace(held={"a": torch.tensor([torch.inf])}), "a tensor a that is not finite"
    yield model._replace(network=make_network().double()), "of another shape or type"
    network = make_network()
    network.sums[0, 0] = torch.nan
    yield model._replace(network=network), "a tensor sums that is not finite"
    network = make_network()
    network.counts[0] = -1
    yield model._replace(network=network), "sums of other classes than counts"


@pytest.mark.parametrize(("model", "reason"), list(broken()))
def test_a_model_that_could_not_be_read_again_is_an_error(tmp_path: Path, model: Model, reason: str) -> None:
    with pytest.raises(InputError, match=f"^`model` must be what can be read again; got one with .*{reason}"):
        save_model(tmp_path / "x", model)
    assert list(tmp_path.iterdir()) == []


def test_another_encoder_is_an_error(tmp_path: Path) -> None:
    network = PrototypeNetwork(nn.Linear(8, 3), embedding_dim=3, num_classes=2)
    with pytest.raises(InputTypeError, match=r"`model` must hold a network with a protonet\.Encoder; got Linear"):
        save_model(tmp_path / "x", Model(network, ("a", "b"), None, {}, {}))


def test_files_that_are_no_models(tmp_path: Path) -> None:
    save_model(tmp_path / "whole", make_model())
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "truncated").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "longer").write_bytes(whole + b"\0")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no tensors in here, but some words")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    save_file({"a": torch.zeros(1)}, tmp_path / "other", {"protonet.episodes.train": "{}"})
    for name in ("truncated", "longer", "empty", "text", "foreign", "other", "."):
        with pytest.raises(InputError, match=f"^{REFUSED}$"):
            load_model(tmp_path / name)
    with pytest.raises(InputError, match=r"^no such file: .*missing$"):
        load_model(tmp_path / "missing")


def test_whole_numbers_take_few_bytes_and_come_back(tmp_path: Path) -> None:
    held = {"few": torch.arange(9), "many": torch.arange(9) * 10_000, "huge": torch.arange(9) * 2**40}
    held["empty"] = torch.arange(0)
    path = tmp_path / "model"
    save_model(path, make_model()._replace(held=held))
    loaded = load_model(path, held=True).held
    assert all(torch.equal(loaded[name], held[name]) and loaded[name].dtype == torch.int64 for name in held)
    with safe_open(path, framework="pt") as file:
        stored = [file.get_tensor(HELD + name).dtype for name in held]
    assert stored == [torch.int16, torch.int32, torch.int64, torch.int64]


def test_a_long_header_is_compressed_and_a_damaged_one_told(tmp_path: Path) -> None:
    path, metadata = tmp_path / "model", {"long": list(range(9999))}
    save_model(path, make_model())
    before = path.stat().st_size
    save_model(path, make_model()._replace(metadata=metadata))
    assert path.stat().st_size < before + len(json.dumps(metadata)) / 1.5
    assert load_model(path).metadata == metadata
    for text in (DEFLATED + "abcd", DEFLATED + "?", "{"):
        save_file({"a": torch.zeros(1)}, path, {FORMAT: text})
        with pytest.raises(InputError, match=REFUSED):
            load_model(path)


@pytest.mark.parametrize(
    ("version", "remedy"), [(VERSION + 1, "Update protonet"), (OLDEST - 1, "Fit it again"), (-1, "Fit it again")]
)
def test_files_of_other_versions_are_refused_with_one_line(tmp_path: Path, version: int, remedy: str) -> None:
    header = {"version": version, "library": "9.0"}
    save_file({"a": torch.zeros(1)}, tmp_path / "other", {FORMAT: json.dumps(header)})
    reason = rf"{VERSION}; got [^\n]*other \(version {version}, by protonet '9\.0'\)\. {remedy}\."
    with pytest.raises(InputError, match=rf"^`path` must be a model file of version {reason}$"):
        load_model(tmp_path / "other")


def test_what_is_described_is_restored_and_trusts_nothing() -> None:
    network = make_network()
    structure, tensors = describe_network(network)
    assert json.loads(json.dumps(structure)) == structure
    restored = restore_network(structure, tensors)
    assert torch.equal(restored(X), network(X))
    assert same_state(restored, network)
    again, parts = describe_network(restored)
    assert again == structure
    assert parts.keys() == tensors.keys()
    kinds = [view["kind"] for view in structure["views"]]
    assert kinds == [
        "linear",
        "radial",
        "radial",
        "radial",
        "forest",
        "linear",
        "mlp",
        "patterns",
        "patterns",
        "patterns",
        "context",
    ]
    for name in tensors:
        with pytest.raises(ValueError, match="no tensor"):
            restore_network(structure, {key: value for key, value in tensors.items() if key != name})
    emptied = {name: tensor[:0] if ".stack." in name else tensor for name, tensor in tensors.items()}
    assert any(".stack." in name for name in emptied)
    with pytest.raises(ValueError, match="learned views without a member"):
        restore_network(structure, emptied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_dim": 0}, "an entry input_dim out of range"),
        ({"input_dim": 8.0}, "no usable entry input_dim"),
        ({"input_dim": 9}, "of another shape or type"),
        ({"sources": -1}, "an entry sources out of range"),
        ({"sources": 5}, "no tensor sources.4.shift"),
        ({"sources": "linear"}, "no usable entry sources"),
        ({"sources": [{"kind": "linear"}] * 3}, "an entry source out of range"),
        ({"sources": [{"kind": "linear"}] * 9}, "no tensor sources.4.shift"),
        ({"sources": [{"kind": "cubic"}]}, "a source of an unknown kind"),
        ({"sources": [{"kind": "patterns", "width": 3, "parts": 1}]}, "pictures of no whole number of lines"),
        ({"views": []}, "no view"),
        ({"views": [{"kind": "cubic"}]}, "a view of an unknown kind"),
        ({"views": ["linear"]}, "no usable entry kind"),
        ({"views": [{"kind": "linear", "source": None, "bias": 0.0}]}, "a view without a linear map"),
        ({"views": [{"kind": "linear", "source": 0, "bias": 0}]}, "no usable entry bias"),
        ({"views": [{"kind": "linear", "source": 0, "bias": -1.0}]}, "a bias coordinate out of range"),
        ({"views": [{"kind": "forest", "source": 0, "depth": 1, "classes": 5}]}, "a forest that reads a view"),
        ({"views": [{"kind": "radial", "source": 0, "norm": 3, "squash": True}]}, "an entry norm out of range"),
        ({"views": [{"kind": "radial", "source": 0, "norm": 2, "squash": 1}]}, "no usable entry squash"),
    ],
)
def test_a_description_of_no_network_is_an_error(change: dict[str, Any], message: str) -> None:
    structure, tensors = describe_network(make_network())
    with pytest.raises(ValueError, match=message):
        restore_network(structure | change, tensors)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weights", lambda weights: -weights, "weights that are no shares"),
        ("weights", lambda weights: 2 * weights, "weights that are no shares"),
        ("weights", lambda weights: weights[1:], "a tensor weights of another shape"),
        ("scale", lambda scale: 0 * scale, "a scale or temperature that is not positive"),
        ("temperature", lambda temperature: -temperature, "a scale or temperature that is not positive"),
        ("sums", lambda sums: sums[1:], "sums of other classes than counts"),
        ("sums", lambda sums: sums.double(), "a tensor sums of another shape or type"),
        ("counts", lambda counts: counts.float(), "a tensor counts of another shape or type"),
        ("sources.0.gain", lambda gain: gain[1:], "a tensor sources.0.gain of another shape"),
        ("sources.1.shift", lambda shift: shift / 0, "a tensor sources.1.shift that is not finite"),
        ("views.1.bandwidth", lambda bandwidth: -bandwidth, "a bandwidth that is not positive"),
        ("views.1.readout", lambda readout: readout[:, :0], "scores of no class"),
        ("views.1.units", lambda units: units[:, 1:], "a tensor views.1.units of another shape"),
        ("views.4.node", lambda node: node + 10**6, "a tensor node out of range"),
        ("views.4.node", lambda node: node[1:], "nodes that make no trees"),
        ("views.4.trees", lambda trees: 0 * trees, "nodes that make no trees"),
        ("views.4.threshold", lambda threshold: threshold / 0, "a tensor views.4.threshold that is not finite"),
        ("views.6.stack.last", lambda last: last[:, :, :7], "fewer dimensions than features"),
        ("views.6.stack.more", lambda _: torch.zeros(1), "tensors that belong to no view"),
    ],
)
def test_tensors_of_no_network_are_an_error(
    name: str, change: Callable[[torch.Tensor | None], torch.Tensor], message: str
) -> None:
    structure, tensors = describe_network(make_network())
    with pytest.raises(ValueError, match=message):
        restore_network(structure, tensors | {name: change(tensors.get(name))})


OLD_FORESTS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("child", lambda child: child + 10**6, "a tensor views.4.child out of range"),
    ("root", lambda root: root[:0], "a forest without trees"),
    ("threshold", lambda threshold: -threshold, "a tensor views.4.threshold that is not finite"),
]


def test_forests_of_older_files_are_read_and_trust_nothing() -> None:
    network = make_network()
    structure, tensors = describe_network(network)
    assert isinstance(network.encoder, Encoder)
    forest = list(network.encoder.list_views())[4].state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("views.4.")}
    tensors |= {f"views.4.{name}": tensor for name, tensor in forest.items()}
    assert torch.equal(restore_network(structure, tensors)(X), network(X))
    for name, change, message in OLD_FORESTS:
        with pytest.raises(ValueError, match=message):
            restore_network(structure, tensors | {f"views.4.{name}": change(forest[name])})


def test_held_tensors_are_left_on_the_disk(tmp_path: Path) -> None:
    model, path = make_model(), tmp_path / "x"
    save_model(path, model._replace(held={"a": torch.zeros(3)}))
    tensors = load_file(path) | {"held.a": torch.full((3,), torch.nan)}
    with path.open("rb") as file:
        text = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))["__metadata__"][FORMAT]
    save_file(tensors, path, {FORMAT: text})
    assert load_model(path).held == {}
    with pytest.raises(ValueError, match="damaged: a wrong checksum"):
        load_model(path, held=True)


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, our own entry parsed, and its data."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = {name: json.loads(text) for name, text in header["__metadata__"].items()}
    return header, content[8 + size :]


def join(header: dict[str, Any], data: bytes) -> bytes:
    """Return the file of such a header, signed anew, and data."""
    if isinstance(header.get("__metadata__"), dict):
        own = header["__metadata__"].get(FORMAT)
        if isinstance(own, dict):
            own.pop("checksum", None)
            own["checksum"] = hashlib.sha256(json.dumps(own).encode()).hexdigest()
        own = {name: json.dumps(value) for name, value in header["__metadata__"].items()}
        header = {**header, "__metadata__": own}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x"
    save_model(path, make_model())
    return path.read_bytes()


odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, -1e-320, float("nan"), float("inf")]),
    st.sampled_from(["", "a", "\ud800", "F64", "BOOL", "F4", "F8_E4M3", "C64", "radial", "forest", "linear"]),
    st.sampled_from([[], {}, [0], [0, 0], [2**62, 0], [[]], {"kind": "forest"}]),
)
Mutate = Callable[[st.DataObject, bytes], bytes]


def mutate_header(data: st.DataObject, whole: bytes) -> bytes:
    header, tensors = split(whole)
    spoil(data, header, odd)
    return join(header, tensors)


def mutate_bytes(data: st.DataObject, whole: bytes) -> bytes:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        piece = data.draw(st.binary(max_size=9))
        length = data.draw(st.sampled_from([len(piece), len(piece), 0, 1, 8, len(content)]))  # mostly as long as it was
        content[place : place + length] = piece
    return bytes(content)


def mutate_tensors(data: st.DataObject, whole: bytes) -> bytes:
    header, tensors = split(whole)
    content = bytearray(tensors)
    name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    first, last = header[name]["data_offsets"]
    width = 8 if header[name]["dtype"] == "I64" else 1 if header[name]["dtype"] == "BOOL" else 4
    for place in data.draw(st.lists(st.integers(0, max((last - first) // width - 1, 0)), max_size=5)):
        values = {8: [0, -1, 1, 40, 2**62, -(2**63)], 4: [0, -1, 2**30, 0x7F800000, 0x7F7FFFFF, 1], 1: [0, 1, 2, -1]}
        value = data.draw(st.sampled_from(values[width])).to_bytes(width, "little", signed=True)
        if first < last:
            content[first + place * width : first + (place + 1) * width] = value
    return join(header, bytes(content))


@pytest.mark.parametrize("mutate", [mutate_header, mutate_bytes, mutate_tensors])
@settings(max_examples=int(os.environ.get("FUZZ", "40")))  # FUZZ=3400 makes some 10,000 files
@given(data=st.data())
def test_what_is_mutated_gives_a_network_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, mutate: Mutate, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(mutate(data, whole))
    try:
        model = load_model(path, held=True)
    except InputError as error:
        message = str(error)
        assert re.fullmatch(rf"({REFUSED}|.* Update protonet\.|.* Fit it again\.)", message), message
        assert len(message) < 2000
        return
    assert model.network(torch.zeros(2, len(X[0]))).shape == (2, len(model.classes))
    save_model(path, model)


def test_a_flipped_bit_is_never_silent(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(whole)
    before = load_model(path, held=True).network(X)
    for place in np.random.default_rng(0).integers(0, 8 * len(whole), 200).tolist():
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            after = load_model(path, held=True).network(X)
        except InputError:
            continue
        assert torch.equal(after, before)
