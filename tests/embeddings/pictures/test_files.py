"""Backbones from two kinds of files and from callables: embeddings, errors, and the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protonet import InputError
from protonet.embeddings.pictures import files as backbones
from protonet.embeddings.pictures.files import embed_pictures, load_backbone
from protonet.embeddings.pictures.reading import read_pixels
from tests.embeddings.cases import write_folders

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("embedding_cache")


class Small(nn.Module):
    """A network that maps pictures (n, 3, 8, 8) to weighted means of 2 x 2 cells, (n, 12)."""

    def __init__(self, cells: int = 2) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(cells)

    def forward(self, x: Tensor) -> Tensor:
        """Embed."""
        pooled: Tensor = self.pool(x)
        return pooled.flatten(1) * torch.arange(1.0, 13.0)


def export(network: nn.Module, path: Path, *shape: int, fixed: bool = False, **output: str) -> Path:
    """Write a file of torch.export, for any number of pictures or a fixed one."""
    sizes = None if fixed else ({0: torch.export.Dim("n")},)
    program = torch.export.export(network.eval(), (torch.zeros(*shape),), dynamic_shapes=sizes)
    torch.export.save(program, path, extra_files=output or None)
    return path


def write_onnx(path: Path, shape: list[int | str], *, axes: list[int] | None = None, **output: str) -> Path:
    """Write an ONNX file that computes means of pictures over some axes."""
    import onnx
    from onnx import TensorProto, helper

    axes = axes or [2, 3]
    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)]
    constant = helper.make_tensor("axes", TensorProto.INT64, [len(axes)], axes)
    ends = (
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    graph = helper.make_graph(nodes, "means", *ends, [constant])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    helper.set_model_props(model, output)
    onnx.save(model, str(path))
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Small(), tmp_path_factory.mktemp("exported") / "net.pt2", 2, 3, 8, 8)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return sorted(write_folders(tmp_path / "pictures", per_class=3).rglob("*.*"))


def test_backbones_of_all_formats_give_the_same_embeddings(tmp_path: Path, paths: list[Path], exported: Path) -> None:
    pixels = torch.from_numpy(np.stack([read_pixels(path, 8, 8) for path in paths])).float() / 255
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    x = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    settings: dict[str, Any] = {"mean": mean, "std": std}
    for backbone in (exported, Small().eval()):
        options = settings | ({} if isinstance(backbone, Path) else {"size": 8})
        np.testing.assert_allclose(embed_pictures(paths, backbone, **options), Small()(x).numpy(), rtol=1e-5, atol=1e-6)
    onnx = write_onnx(tmp_path / "net.onnx", ["n", 3, 8, 8], mean="0.5, 0.4, 0.3", std="[0.2, 0.3, 0.4]")
    np.testing.assert_allclose(embed_pictures(paths, onnx), x.mean(dim=(2, 3)).numpy(), rtol=1e-5, atol=1e-6)
    loose = write_onnx(tmp_path / "loose.onnx", ["n", 3, "h", "w"], size="8", mean="0.5 0.4 0.3", std="1")
    result = load_backbone(loose).preprocessing
    assert (result.height, result.width, result.mean, result.std) == (8, 8, (0.5, 0.4, 0.3), (1.0, 1.0, 1.0))


def test_a_backbone_of_one_picture_at_a_time_gives_the_same(tmp_path: Path, paths: list[Path], exported: Path) -> None:
    single = export(Small(), tmp_path / "single.pt2", 1, 3, 8, 8, fixed=True)
    np.testing.assert_array_equal(embed_pictures(paths, single), embed_pictures(paths, exported))
    with pytest.raises(InputError, match="`paths` must name a picture"):
        embed_pictures([], lambda x: x, size=4)


def test_embeddings_are_cached_by_content_and_settings(
    tmp_path: Path, paths: list[Path], exported: Path, embedding_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    compute = backbones.Backbone._embed_files

    def count(self: Any, images: Any, **options: Any) -> Any:
        counted.append(len(images))
        return compute(self, images, **options)

    monkeypatch.setattr(backbones.Backbone, "_embed_files", count)
    first = embed_pictures([*paths, paths[0]], exported)
    assert counted == [6]
    assert len(list(embedding_cache.iterdir())) == 1
    np.testing.assert_array_equal(first[0], first[-1])
    copy = tmp_path / "copy.png"
    copy.write_bytes(paths[1].read_bytes())
    np.testing.assert_array_equal(embed_pictures([copy, *paths], exported), first[[1, 0, 1, 2, 3, 4, 5]])
    assert counted == [6]
    embed_pictures(paths, exported, mean=[0.5])
    assert counted == [6, 6]
    assert len(list(embedding_cache.iterdir())) == 2
    embed_pictures(paths, exported, cache=tmp_path / "other")
    assert counted == [6, 6, 6]
    assert len(list((tmp_path / "other").iterdir())) == 1


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ("none", {}, r"must be a file that ends in \.onnx or \.pt2"),
        ("text", {}, "must be a network that can be opened"),
        ("map", {}, r"must give an embedding \(n, width\) of n pictures; got \(1, 3, 8\)"),
        ("loose", {}, "`size` must say how large pictures have to be"),
        ("means", {"size": 9}, r"`size` must be what the backbone takes; got 9 x 9"),
        ("means", {"mean": [1.0, 2.0]}, "`mean` must be 3 finite numbers, or one"),
        ("means", {"std": [0.0]}, "`std` must be above 0"),
        ("five", {}, "must take pictures of 1 or 3 channels"),
        ("flat", {}, "must take pictures"),
    ],
)
def test_backbones_that_cannot_fit_are_refused(
    tmp_path: Path, made: str, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / f"{made}.onnx"
    if made == "text":
        path.write_text("no network")
    shapes: dict[str, list[int | str]] = {"map": ["n", 3, 8, 8], "loose": ["n", 3, "h", "w"], "means": ["n", 3, 8, 8]}
    shapes |= {"five": ["n", 5, 8, 8], "flat": ["n", 3, 8]}
    if made in shapes:
        write_onnx(path, shapes[made], axes=[3] if made == "map" else [2] if made == "flat" else None)
    with pytest.raises(InputError, match=message):
        load_backbone(path, **options)
