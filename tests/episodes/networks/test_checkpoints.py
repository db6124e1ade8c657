from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protonet.episodes.networks.backbones import make_backbone
from protonet.episodes.networks.checkpoints import (
    CHECKPOINT_FORMAT,
    CHECKPOINT_VERSION,
    load_encoder,
    load_trained_encoder,
    read_checkpoint,
    write_checkpoint,
)
from tests.episodes.meta_cases import make_plan

TENSORS = {"a": torch.arange(6.0).reshape(2, 3).T, "b.c": torch.tensor(7, dtype=torch.int64)}


def write(path: Path) -> Path:
    encoder = make_backbone("mlp", 8, torch.Generator().manual_seed(0))
    tensors = {f"best.{name}": tensor for name, tensor in encoder.state_dict().items()}
    write_checkpoint(path, tensors | TENSORS, {"plan": asdict(make_plan(dim=8))})
    return path


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, TENSORS, {"step": 3, "best": [1, 0.5]})
    tensors, metadata = read_checkpoint("path", path)
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert all(torch.equal(theirs, TENSORS[name]) for name, theirs in load_file(path).items())
    assert (metadata["step"], metadata["best"], metadata["version"]) == (3, [1, 0.5], CHECKPOINT_VERSION)
    assert list(tmp_path.iterdir()) == [path]


def test_load_encoder(tmp_path: Path) -> None:
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    encoder = load_encoder(write(tmp_path / "x.safetensors"), dim=8)
    assert torch.equal(encoder(x), make_backbone("mlp", 8, torch.Generator().manual_seed(0))(x))
    assert load_trained_encoder(tmp_path / "x.safetensors", torch.clone).plan == make_plan(dim=8)
    assert not encoder.training
    assert not encoder(x).requires_grad
    with pytest.raises(ValueError, match=r"^`path` must hold an encoder of 9 features per row; got 8\."):
        load_encoder(tmp_path / "x.safetensors", dim=9)


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    full = write(tmp_path / "whole").read_bytes()
    (tmp_path / "truncated").write_bytes(full[: len(full) // 2])
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no tensors in here, but some words")
    save_file(TENSORS | {"a": torch.zeros(1)}, tmp_path / "foreign")
    save_file({"a": torch.zeros(1)}, tmp_path / "other", {CHECKPOINT_FORMAT: '{"version": "2"}'})
    save_file({"a": torch.zeros(1)}, tmp_path / "list", {CHECKPOINT_FORMAT: "[1]"})
    for name in ("truncated", "empty", "text", "foreign", "other", "list", "missing", "."):
        with pytest.raises(ValueError, match=r"^`path` must be a checkpoint of .*; got /.*\) *\. Pass"):
            load_encoder(tmp_path / name)


def test_checkpoints_of_other_versions_are_refused(tmp_path: Path) -> None:
    for version in (CHECKPOINT_VERSION - 1, CHECKPOINT_VERSION + 1):
        header = {"version": version, "library": "9.0"}
        save_file({"a": torch.zeros(1)}, tmp_path / "new", {CHECKPOINT_FORMAT: json.dumps(header)})
        message = rf"be of version {CHECKPOINT_VERSION}; got .* of version {version}, by .*9\.0\."
        with pytest.raises(ValueError, match=message):
            read_checkpoint("path", tmp_path / "new")
