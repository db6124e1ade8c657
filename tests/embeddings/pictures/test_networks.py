"""Networks of timm, torchvision and open_clip: the libraries as oracles, and errors."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from protonet.embeddings.pictures.networks import load_extractor
from protonet.errors import MissingPackageError
from tests.embeddings.cases import draw

PICTURES = [draw("disc", 0, 60), draw("cross", 1, 300)]


@pytest.fixture(autouse=True)
def alone(offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


@pytest.fixture
def libraries() -> Any:
    """Import the three libraries; skip the test if one is missing."""
    result = [pytest.importorskip(name) for name in ("timm", "torchvision", "open_clip")]
    torch.manual_seed(0)
    return result


def save(network: nn.Module, path: Path) -> Path:
    """Write a network's weights, with statistics of batch normalisation that are not all 0 and 1."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), path)
    return path


def embed(backbone: str, **settings: Any) -> Tensor:
    extractor = load_extractor(backbone, **settings)
    return extractor.embed(torch.stack([extractor.preprocess(picture) for picture in PICTURES]))


@torch.no_grad()
def run(network: Callable[[Tensor], Tensor], transform: Callable[[Image.Image], Tensor]) -> Tensor:
    return network(torch.stack([transform(picture) for picture in PICTURES]))


def test_timm(libraries: Any, tmp_path: Path) -> None:
    timm, name = libraries[0], "resnet18"
    network = timm.create_model(name, pretrained=False)
    path = save(network, tmp_path / "w.pt")
    network.reset_classifier(0)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    expected = run(network.eval(), transform)
    assert torch.equal(embed(f"timm:{name}", weights=path), expected)
    torch.save({"state_dict": {f"module.{key}": item for key, item in network.state_dict().items()}}, path)
    assert torch.equal(embed(f"timm:{name}", weights=str(path)), expected)  # without its classifier, of several devices


def test_torchvision(libraries: Any, tmp_path: Path) -> None:
    torchvision, name = libraries[1], "mobilenet_v3_small"
    choice = torchvision.models.get_model_weights(name).DEFAULT
    network = torchvision.models.get_model(name, weights=None)
    path = save(network, tmp_path / "w.pt")
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(choice.url).name
    cached.parent.mkdir(parents=True)
    shutil.copy(path, cached)
    network.classifier[3] = nn.Identity()
    expected = run(network.eval(), choice.transforms())
    assert torch.equal(embed(f"torchvision:{name}", weights=path), expected)
    for text in (f"torchvision:{name}", f"torchvision:{name}:{choice.name}"):
        assert torch.equal(embed(text), expected)
        assert load_extractor(text).settings["tag"] == choice.name
    torch.save(network.state_dict(), path)  # without the classifier
    assert torch.equal(embed(f"torchvision:{name}", weights=path), expected)
    with pytest.raises(ValueError, match="must end in a linear classifier, to be left out; got squeezenet1_1"):
        load_extractor("torchvision:squeezenet1_1", weights=path)


def cache_hub(folder: Path, repository: str, name: str, content: dict[str, Tensor]) -> None:
    """Write a file into the hub's cache, as its client does."""
    from safetensors.torch import save_file

    home = folder / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "snapshots" / "0" / "").mkdir(parents=True)
    (home / "refs" / "main").write_text("0")
    save_file({key: value.contiguous() for key, value in content.items()}, home / "snapshots" / "0" / name)


def add_small_clip(open_clip: Any, folder: Path) -> str:
    """Register a small network in open_clip; return its name."""
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    content = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}
    (folder / "small-clip.json").write_text(json.dumps(content))
    open_clip.add_model_config(folder / "small-clip.json")
    return "small-clip"


def test_weights_in_the_hubs_cache(libraries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm, _, open_clip = libraries
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    network = timm.create_model("resnet18", pretrained=False).eval()
    settings = timm.get_pretrained_cfg("resnet18")
    cache_hub(tmp_path / "hub", settings.hf_hub_id, "model.safetensors", network.state_dict())
    network.reset_classifier(0)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    for text in ("timm:resnet18", f"timm:resnet18.{settings.tag}"):
        assert torch.equal(embed(text), run(network, transform))
    name = add_small_clip(open_clip, tmp_path)
    settings = {"hf_hub": "some/one/", "quick_gelu": True, "mean": (0.5, 0.4, 0.3), "std": (0.2,) * 3}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"tag": settings})
    small = open_clip.create_model(name, force_quick_gelu=True).eval()
    cache_hub(tmp_path / "hub", "some/one", "open_clip_model.safetensors", small.state_dict())
    transform = open_clip.image_transform(32, is_train=False, mean=settings["mean"], std=settings["std"])
    assert torch.equal(embed(f"open_clip:{name}:tag"), run(small.encode_image, transform))
    assert constants.HF_HUB_OFFLINE is False
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("timm:resnet1", r"`--backbone` must name a network of timm; got 'resnet1'\. Did you mean resnet\w+\?"),
        ("timm:resnet18", r"none of timm:resnet18; none are fetched here\. Fetch them once with python -c "),
        ("torchvision:resnt18", r"name a network of torchvision; got 'resnt18'\. Did you mean resnet18\?"),
        ("torchvision:resnet18:NO", r"name weights of IMAGENET1K_V1; got 'NO'"),
        ("open_clip:RN5", r"name a network of open_clip; got 'RN5'\. Did you mean RN50\?"),
        ("open_clip:RN50", r"name weights of openai, .*; got none for RN50\. Pass open_clip:RN50:TAG, or a file"),
        ("open_clip:RN50:cc12m", r"none of open_clip:RN50; none are fetched here\. Fetch .*pretrained='cc12m'"),
    ],
)
def test_unknown_networks_and_missing_weights_are_errors(libraries: Any, backbone: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^`backbone` must .*{message}") as caught:
        load_extractor(backbone)
    assert "\n" not in str(caught.value)


class Hostile:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it was run')",)


def test_weights_of_another_network_are_errors(libraries: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    for backbone in ("timm:resnet18", "torchvision:resnet18", "open_clip:RN50"):
        with pytest.raises(ValueError, match=r"no such file: .*absent\.pt"):
            load_extractor(backbone, weights=tmp_path / "absent.pt")
        torch.save({"w": Hostile()}, path)
        with pytest.raises(ValueError, match=r"`(weights|backbone)` must be a (file of tensors|network that can be)"):
            load_extractor(backbone, weights=path)
    for content, message in (
        ([1], r"be a file of tensors by name; got .*w\.pt of something else"),
        ({"conv1.weight": torch.zeros(1)}, r"have the weights of the network; got .*, where \d+ differ or are missing"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=rf"^`weights` must {message}"):
            load_extractor("torchvision:resnet18", weights=path)


@pytest.mark.parametrize("library", ["timm", "torchvision", "open_clip"])
def test_a_missing_library_is_an_error(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    message = rf"`{library}` must be installed\. Run pip install -e \"\.\[backbones\]\"\."
    with pytest.raises(MissingPackageError, match=message):
        load_extractor(f"{library}:resnet18")
