"""Backbones, augmentation of pictures, and files of encoders."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from scipy.ndimage import map_coordinates
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from protonet.episodes.networks import backbones, checkpoints
from protonet.episodes.networks.augmentation import (
    MAX_LOG_STRETCH,
    MAX_ROTATION_RADIANS,
    MAX_SHIFT,
    ROW_NOISE_STD,
    augment_rows,
    draw_affine_maps,
    infer_image_shape,
    warp_images,
)
from protonet.episodes.samplers.batch import make_row_reader
from tests.episodes.cases import make_plan

COLOUR = "`dim` must be the square of a side of 16 pixels or more, or three times that"
REMEDY = r"Use the mlp, or square grey or RGB images\."


def make(name: str, dim: int, seed: int = 0) -> nn.Sequential:
    return backbones.make_backbone(name, dim, torch.Generator().manual_seed(seed))


def rows(n: int, dim: int, seed: int = 1) -> Tensor:
    return torch.rand(n, dim, generator=torch.Generator().manual_seed(seed))


def test_conv_equals_a_slow_network() -> None:
    """The network has a stride of 2 in the first of four convolutions, statistics of eight groups, and two poolings."""
    backbone, x = make("conv", 64), rows(3, 64)
    z = x.reshape(3, 1, 8, 8)
    for layer, weight in enumerate(p for p in backbone.parameters() if p.ndim == 4):
        z = F.conv2d(z, weight, stride=1 if layer else 2, padding=weight.shape[2] // 2)
        groups = z.unflatten(1, (8, -1)).flatten(2)  # (rows, 8, numbers of a group)
        deviation = (groups.var(dim=2, correction=0, keepdim=True) + 1e-5).sqrt()
        z = ((groups - groups.mean(dim=2, keepdim=True)) / deviation).view_as(z)
        z = z if layer == 3 else z.relu()
        z = F.max_pool2d(z, 2) if layer in (1, 2) else z
    torch.testing.assert_close(backbone(x), z.flatten(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "dim"), [("mlp", 81), ("conv", 81), ("conv4", 768), ("resnet12", 768)])
def test_seeds_decide_weights_and_in_evaluation_a_row_does_not_see_the_others(name: str, dim: int) -> None:
    before = torch.get_rng_state()
    first, same, other = (make(name, dim, seed).eval() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    x, tolerance = rows(3, dim), 1e-4 if dim == 768 else 1e-5
    assert torch.equal(first(x), same(x))
    assert not torch.allclose(first(x), other(x))
    torch.testing.assert_close(first(x)[:1], first(x[:1]), atol=tolerance, rtol=tolerance)
    weights = torch.cat([p.flatten() * (p[0].numel() / 2) ** 0.5 for p in first.parameters() if p.ndim > 1])
    assert abs(float(weights.detach().std()) - 1) < 0.02


def test_embed_rows_in_chunks() -> None:
    encoder, x = make("mlp", 8), rows(2500, 8)
    full = encoder(x).detach()
    embedded = backbones.embed_rows_in_batches(encoder, make_row_reader(x), torch.arange(2500))
    torch.testing.assert_close(embedded, full)
    some = torch.tensor([2400, 3, 3])
    torch.testing.assert_close(backbones.embed_rows_in_batches(encoder, make_row_reader(x.double()), some), full[some])
    assert not embedded.requires_grad


def test_errors() -> None:
    for name, dim, message in [
        ("cnn", 64, r"`name` must be one of mlp, conv, conv4, resnet12; got 'cnn'\."),
        *(("conv", dim, rf"`dim` must be the square of a side of 8 pixels or more; got {dim}\.") for dim in (65, 49)),
        *((name, dim, rf"{COLOUR}; got {dim}\. {REMEDY}$") for name in ("conv4", "resnet12") for dim in (225, 640)),
    ]:
        with pytest.raises(ValueError, match=rf"^{message}"):
            make(name, dim)


RGB, GREY = 3 * 16 * 16, 16 * 16  #: The number of features of a small RGB image, and of a small grey image.


def make_used(name: str, dim: int, dropblock: float = 0.0) -> nn.Sequential:
    network = backbones.make_backbone(name, dim, torch.Generator().manual_seed(0), dropblock=dropblock)
    generator = torch.Generator().manual_seed(2)
    for layer in network.modules():
        if isinstance(layer, backbones.BatchNorm):  # as after training
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                assert tensor is not None
                tensor.data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return network


def normalize_batch(x: Tensor, layer: backbones.BatchNorm, statistics: Tensor | None = None) -> Tensor:
    mean, variance = layer.running_mean, layer.running_var
    if statistics is not None:
        mean, variance = statistics.mean(dim=(0, 2, 3)), statistics.var(dim=(0, 2, 3), correction=0)
    assert mean is not None
    assert variance is not None
    mean, variance, weight, bias = (item[:, None, None] for item in (mean, variance, layer.weight, layer.bias))
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def test_networks_have_the_published_sizes() -> None:
    for name, dim, size, embedding_dim in [
        ("conv4", 21_168, 113_088, 1600),
        ("conv4", 784, 111_936, 64),
        ("resnet12", 21_168, 12_424_320, 640),
    ]:
        network = backbones.make_backbone(name, dim, torch.Generator().manual_seed(0)).eval()
        assert sum(weight.numel() for weight in network.parameters()) == size
        with torch.no_grad():
            assert network(rows(1, dim)).shape == (1, embedding_dim)


def test_conv4_equals_a_slow_network() -> None:
    for training in [True, False]:
        network, x = make_used("conv4", RGB).train(training), rows(4, RGB)
        z = x.reshape(4, 3, 16, 16)
        for index in range(4):
            convolution, layer = network[4 * index + 1], network[4 * index + 2]
            assert isinstance(convolution, nn.Conv2d)
            assert isinstance(layer, backbones.BatchNorm)
            z = F.conv2d(z, convolution.weight, convolution.bias, padding=1)
            z = F.max_pool2d(normalize_batch(z, layer, z if training else None).relu(), 2)
        torch.testing.assert_close(network(x), z.flatten(1), atol=1e-4, rtol=1e-4)


def test_a_block_of_resnet12_equals_a_slow_block() -> None:
    block, x = make_used("resnet12", GREY)[1].eval(), rows(3, GREY).reshape(3, 1, 16, 16)
    assert isinstance(block, backbones.ResidualBlock)
    layers, shortcut = list(block.path), list(block.shortcut)
    z = x
    for index in range(3):
        z = F.conv2d(z, layers[3 * index].weight, padding=1)  # type: ignore[arg-type]
        z = normalize_batch(z, layers[3 * index + 1])  # type: ignore[arg-type]
        z = z if index == 2 else torch.where(z > 0, z, 0.1 * z)
    z = z + normalize_batch(F.conv2d(x, shortcut[0].weight), shortcut[1])  # type: ignore[arg-type]
    slow = F.max_pool2d(torch.where(z > 0, z, 0.1 * z), 2)
    assert slow.shape == (3, 64, 8, 8)
    torch.testing.assert_close(block(x), slow, atol=1e-4, rtol=1e-4)


def test_measured_statistics_equal_torchs() -> None:
    network, batches = make_used("conv4", GREY), [rows(5, GREY, 1), rows(5, GREY, 2)]
    slow = deepcopy(network)
    for layer in slow.modules():
        if isinstance(layer, backbones.BatchNorm):
            layer.measuring = True  # keeps averages in training mode, as torch's own
    update_bn(batches, slow)
    backbones.measure_batch_norm_statistics(network, iter(batches))
    assert not network.training
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, slow.state_dict()[name])


def test_statistics_are_taken_from_the_leading_rows() -> None:
    layer, x = make_used("conv4", GREY)[2].eval(), rows(7, 64 * 4).reshape(7, 64, 2, 2)
    assert isinstance(layer, backbones.BatchNorm)
    with backbones.use_support_statistics(layer, 3) as result:
        assert result
        torch.testing.assert_close(layer(x), normalize_batch(x, layer, x[:3]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer(x)[:5], layer(x[:5]))  # no row after the leading ones counts
    torch.testing.assert_close(layer(x), normalize_batch(x, layer), atol=1e-5, rtol=1e-4)
    with backbones.use_support_statistics(backbones.make_backbone("conv", 64, torch.Generator()), 3) as result:
        assert not result


def test_dropblock_equals_a_slow_loop() -> None:
    drop, x = backbones.DropBlock(0.2, 3).train(), 1 + rows(4, 2 * 49).reshape(4, 2, 7, 7)
    torch.manual_seed(0)
    dropped = drop(x)
    torch.manual_seed(0)
    seeds = torch.rand_like(x[..., :5, :5]) < 0.2 / 9 * 49 / 25
    saved = torch.ones_like(x)
    for n, c, i, j in seeds.nonzero().tolist():
        saved[n, c, i : i + 3, j : j + 3] = 0
    assert 0 < int((saved == 0).sum()) < saved.numel() / 2
    torch.testing.assert_close(dropped, x * saved * saved.numel() / saved.sum())


def test_a_training_step_changes_no_statistics() -> None:
    network = make_used("conv4", GREY).train()
    before = deepcopy(network.state_dict())
    network(rows(5, GREY)).sum().backward()
    assert all(torch.equal(before[name], after) for name, after in network.state_dict().items())


PIXELS = 9  #: The pixels per side of an image.


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def images(n: int, channels: int = 1) -> torch.Tensor:
    return torch.rand(n, channels * PIXELS * PIXELS, generator=generator())


def test_warped_images_equal_scipys() -> None:
    x, maps = images(6), draw_affine_maps(6, generator())
    centres = (2 * torch.arange(PIXELS).double() + 1) / PIXELS - 1
    down, right = torch.meshgrid(centres, centres, indexing="ij")
    for image, matrix, warped in zip(x, maps.double(), warp_images(x, maps), strict=True):
        source = matrix @ torch.stack([right, down, torch.ones_like(right)]).flatten(1)  # (2, pixels)
        positions = ((source + 1) * PIXELS - 1) / 2
        pixels = image.reshape(PIXELS, PIXELS).numpy()
        slow = map_coordinates(pixels, positions.flip(0).numpy(), order=1, mode="grid-constant")
        torch.testing.assert_close(warped, torch.from_numpy(slow).float(), atol=1e-5, rtol=0)


def test_the_channels_of_an_image_move_together() -> None:
    x, maps = images(5, channels=3), draw_affine_maps(5, generator(), flip=True)
    one_by_one = [warp_images(channel, maps) for channel in x.split(PIXELS * PIXELS, dim=1)]
    torch.testing.assert_close(warp_images(x, maps), torch.cat(one_by_one, dim=1))


def test_half_of_the_affine_maps_swap_left_and_right() -> None:
    plain, maps = draw_affine_maps(2000, generator()), draw_affine_maps(2000, generator(), flip=True)
    signs = maps[:, :, 0] / plain[:, :, 0]
    assert torch.equal(signs[:, 0], signs[:, 1])
    assert torch.equal(maps[:, :, 1:], plain[:, :, 1:])
    assert signs.abs().unique().tolist() == [1]
    assert abs(float(signs[:, 0].mean())) < 4 / math.sqrt(2000)


def test_the_shape_of_an_image_is_inferred_from_the_number_of_features() -> None:
    for dim, shape in [(784, (1, 28, 28)), (21168, (3, 84, 84)), (1, (1, 1, 1)), (3, (3, 1, 1)), (640, None)]:
        assert infer_image_shape(dim) == shape


@pytest.mark.parametrize("images_too", [True, False])
def test_a_row_is_augmented_alike_in_any_part_of_the_batch(images_too: bool) -> None:
    x = images(6)
    spread = None if images_too else torch.linspace(0, 2, PIXELS * PIXELS)
    full = augment_rows(x, spread, generator(), n=6)
    torch.testing.assert_close(augment_rows(x[2:5], spread, generator(), n=6, first=2), full[2:5])
    if spread is not None:
        assert torch.equal(full[:, 0], x[:, 0])  # a feature that is the same everywhere
        assert abs(float(((full - x)[:, 1:] / spread[1:]).std()) - ROW_NOISE_STD) < 0.03


def test_affine_maps_stay_within_the_recipe() -> None:
    maps = draw_affine_maps(5000, generator())
    assert float(maps[..., 2].abs().max()) <= MAX_SHIFT
    areas = torch.linalg.det(maps[..., :2]).log()
    assert 0.9 * 2 * MAX_LOG_STRETCH < float(areas.abs().max()) <= 2 * MAX_LOG_STRETCH + 1e-6
    turns = torch.atan2(maps[:, 1, 0], maps[:, 0, 0])
    limit = MAX_ROTATION_RADIANS
    assert 0.99 * limit < float(turns.abs().max()) <= limit + 1e-6
    assert abs(float(turns.mean())) < 4 * limit / math.sqrt(3 * 5000)


@pytest.mark.parametrize("channels", [1, 3])
def test_rgb_images_are_flipped_and_grey_ones_are_not(channels: int) -> None:
    x = images(20, channels)
    expected = warp_images(x, draw_affine_maps(20, generator(), flip=channels == 3))
    assert torch.equal(augment_rows(x, None, generator(), n=20), expected)


TENSORS = {"a": torch.arange(6.0).reshape(2, 3).T, "b.c": torch.tensor(7, dtype=torch.int64)}


def write(path: Path) -> Path:
    encoder = backbones.make_backbone("mlp", 8, torch.Generator().manual_seed(0))
    tensors = {f"best.{name}": tensor for name, tensor in encoder.state_dict().items()}
    checkpoints.write_checkpoint(path, tensors | TENSORS, {"plan": asdict(make_plan(dim=8))})
    return path


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    checkpoints.write_checkpoint(path, TENSORS, {"step": 3, "best": [1, 0.5]})
    tensors, metadata = checkpoints.read_checkpoint("path", path)
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert all(torch.equal(theirs, TENSORS[name]) for name, theirs in load_file(path).items())
    assert (metadata["step"], metadata["best"], metadata["version"]) == (3, [1, 0.5], checkpoints.CHECKPOINT_VERSION)
    assert list(tmp_path.iterdir()) == [path]


def test_load_encoder(tmp_path: Path) -> None:
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    encoder = checkpoints.load_trained_encoder(write(tmp_path / "x.safetensors"), dim=8).encoder
    assert torch.equal(encoder(x), backbones.make_backbone("mlp", 8, torch.Generator().manual_seed(0))(x))
    assert checkpoints.load_trained_encoder(tmp_path / "x.safetensors").plan == make_plan(dim=8)
    assert not encoder.training
    assert not encoder(x).requires_grad
    with pytest.raises(ValueError, match=r"^`path` must hold an encoder of 9 features per row; got 8\."):
        checkpoints.load_trained_encoder(tmp_path / "x.safetensors", dim=9)


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    full = write(tmp_path / "whole").read_bytes()
    (tmp_path / "truncated").write_bytes(full[: len(full) // 2])
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no tensors in here, but some words")
    save_file(TENSORS | {"a": torch.zeros(1)}, tmp_path / "foreign")
    save_file({"a": torch.zeros(1)}, tmp_path / "other", {checkpoints.CHECKPOINT_FORMAT: '{"version": "2"}'})
    save_file({"a": torch.zeros(1)}, tmp_path / "list", {checkpoints.CHECKPOINT_FORMAT: "[1]"})
    for name in ("truncated", "empty", "text", "foreign", "other", "list", "missing", "."):
        with pytest.raises(ValueError, match=r"^`path` must be a checkpoint of .*; got /.*\) *\. Pass"):
            checkpoints.load_trained_encoder(tmp_path / name)


def test_checkpoints_of_other_versions_are_refused(tmp_path: Path) -> None:
    for version in (checkpoints.CHECKPOINT_VERSION - 1, checkpoints.CHECKPOINT_VERSION + 1):
        header = {"version": version, "library": "9.0"}
        save_file({"a": torch.zeros(1)}, tmp_path / "new", {checkpoints.CHECKPOINT_FORMAT: json.dumps(header)})
        message = rf"be of version {checkpoints.CHECKPOINT_VERSION}; got .* of version {version}, by .*9\.0\."
        with pytest.raises(ValueError, match=message):
            checkpoints.read_checkpoint("path", tmp_path / "new")
