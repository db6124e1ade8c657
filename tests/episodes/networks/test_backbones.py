from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from protonet.episodes.networks.backbones import (
    BatchNorm,
    DropBlock,
    ResidualBlock,
    embed_rows_in_batches,
    make_backbone,
    measure_batch_norm,
    use_support_statistics,
)
from protonet.episodes.samplers.batch import make_row_reader

COLOUR = "`dim` must be the square of a side of 16 pixels or more, or three times that"
REMEDY = r"Use the mlp, or square grey or RGB images\."


def make(name: str, dim: int, seed: int = 0) -> nn.Sequential:
    return make_backbone(name, dim, torch.Generator().manual_seed(seed))


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
    embedded = embed_rows_in_batches(encoder, make_row_reader(x), torch.arange(2500))
    torch.testing.assert_close(embedded, full)
    some = torch.tensor([2400, 3, 3])
    torch.testing.assert_close(embed_rows_in_batches(encoder, make_row_reader(x.double()), some), full[some])
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
    network = make_backbone(name, dim, torch.Generator().manual_seed(0), dropblock=dropblock)
    generator = torch.Generator().manual_seed(2)
    for layer in network.modules():
        if isinstance(layer, BatchNorm):  # as after training
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                assert tensor is not None
                tensor.data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return network


def normalize_batch(x: Tensor, layer: BatchNorm, statistics: Tensor | None = None) -> Tensor:
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
        network = make_backbone(name, dim, torch.Generator().manual_seed(0)).eval()
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
            assert isinstance(layer, BatchNorm)
            z = F.conv2d(z, convolution.weight, convolution.bias, padding=1)
            z = F.max_pool2d(normalize_batch(z, layer, z if training else None).relu(), 2)
        torch.testing.assert_close(network(x), z.flatten(1), atol=1e-4, rtol=1e-4)


def test_a_block_of_resnet12_equals_a_slow_block() -> None:
    block, x = make_used("resnet12", GREY)[1].eval(), rows(3, GREY).reshape(3, 1, 16, 16)
    assert isinstance(block, ResidualBlock)
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
        if isinstance(layer, BatchNorm):
            layer.measuring = True  # keeps averages in training mode, as torch's own
    update_bn(batches, slow)
    measure_batch_norm(network, iter(batches))
    assert not network.training
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, slow.state_dict()[name])


def test_statistics_are_taken_from_the_leading_rows() -> None:
    layer, x = make_used("conv4", GREY)[2].eval(), rows(7, 64 * 4).reshape(7, 64, 2, 2)
    assert isinstance(layer, BatchNorm)
    with use_support_statistics(layer, 3) as result:
        assert result
        torch.testing.assert_close(layer(x), normalize_batch(x, layer, x[:3]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer(x)[:5], layer(x[:5]))  # no row after the leading ones counts
    torch.testing.assert_close(layer(x), normalize_batch(x, layer), atol=1e-5, rtol=1e-4)
    with use_support_statistics(make_backbone("conv", 64, torch.Generator()), 3) as result:
        assert not result


def test_dropblock_equals_a_slow_loop() -> None:
    drop, x = DropBlock(0.2, 3).train(), 1 + rows(4, 2 * 49).reshape(4, 2, 7, 7)
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
