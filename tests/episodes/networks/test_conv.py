from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from protonet.episodes.networks.backbones import (
    BatchNorm,
    DropBlock,
    Residual,
    lead_by,
    make_backbone,
    measure_statistics,
)

#: Features of a small image in RGB, and of a grey one.
RGB, GREY = 3 * 16 * 16, 16 * 16


def rows(n: int, dim: int, seed: int = 1) -> Tensor:
    return torch.rand(n, dim, generator=torch.Generator().manual_seed(seed))


def make(name: str, dim: int, dropblock: float = 0.0) -> nn.Sequential:
    network = make_backbone(name, dim, torch.Generator().manual_seed(0), dropblock=dropblock)
    generator = torch.Generator().manual_seed(2)
    for layer in network.modules():
        if isinstance(layer, BatchNorm):  # as after training
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                assert tensor is not None
                tensor.data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return network


def normalize(x: Tensor, layer: BatchNorm, statistics: Tensor | None = None) -> Tensor:
    mean, variance = layer.running_mean, layer.running_var
    if statistics is not None:
        mean, variance = statistics.mean(dim=(0, 2, 3)), statistics.var(dim=(0, 2, 3), correction=0)
    assert mean is not None
    assert variance is not None
    mean, variance, weight, bias = (item[:, None, None] for item in (mean, variance, layer.weight, layer.bias))
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def test_the_sizes_are_the_published_ones() -> None:
    for name, dim, size, embedding_dim in [
        ("conv4", 21_168, 113_088, 1600),
        ("conv4", 784, 111_936, 64),
        ("resnet12", 21_168, 12_424_320, 640),
    ]:
        network = make_backbone(name, dim, torch.Generator().manual_seed(0)).eval()
        assert sum(weight.numel() for weight in network.parameters()) == size
        with torch.no_grad():
            assert network(rows(1, dim)).shape == (1, embedding_dim)


def test_conv4_is_the_slow_one() -> None:
    for training in [True, False]:
        network, x = make("conv4", RGB).train(training), rows(4, RGB)
        z = x.reshape(4, 3, 16, 16)
        for index in range(4):
            convolution, layer = network[4 * index + 1], network[4 * index + 2]
            assert isinstance(convolution, nn.Conv2d)
            assert isinstance(layer, BatchNorm)
            z = F.conv2d(z, convolution.weight, convolution.bias, padding=1)
            z = F.max_pool2d(normalize(z, layer, z if training else None).relu(), 2)
        torch.testing.assert_close(network(x), z.flatten(1), atol=1e-4, rtol=1e-4)


def test_a_block_of_resnet12_is_the_slow_one() -> None:
    block, x = make("resnet12", GREY)[1].eval(), rows(3, GREY).reshape(3, 1, 16, 16)
    assert isinstance(block, Residual)
    layers, shortcut = list(block.path), list(block.shortcut)
    z = x
    for index in range(3):
        z = F.conv2d(z, layers[3 * index].weight, padding=1)  # type: ignore[arg-type]
        z = normalize(z, layers[3 * index + 1])  # type: ignore[arg-type]
        z = z if index == 2 else torch.where(z > 0, z, 0.1 * z)
    z = z + normalize(F.conv2d(x, shortcut[0].weight), shortcut[1])  # type: ignore[arg-type]
    slow = F.max_pool2d(torch.where(z > 0, z, 0.1 * z), 2)
    assert slow.shape == (3, 64, 8, 8)
    torch.testing.assert_close(block(x), slow, atol=1e-4, rtol=1e-4)


def test_measured_statistics_are_torchs() -> None:
    network, batches = make("conv4", GREY), [rows(5, GREY, 1), rows(5, GREY, 2)]
    slow = deepcopy(network)
    for layer in slow.modules():
        if isinstance(layer, BatchNorm):
            layer.measuring = True  # keeps averages in training mode, as torch's own
    update_bn(batches, slow)
    measure_statistics(network, iter(batches))
    assert not network.training
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, slow.state_dict()[name])
    again = deepcopy(network.state_dict())
    measure_statistics(network, batches)
    assert all(torch.equal(again[name], tensor) for name, tensor in network.state_dict().items())


def test_leading_rows_have_the_statistics() -> None:
    layer, x = make("conv4", GREY)[2].eval(), rows(7, 64 * 4).reshape(7, 64, 2, 2)
    assert isinstance(layer, BatchNorm)
    with lead_by(layer, 3) as result:
        assert result
        torch.testing.assert_close(layer(x), normalize(x, layer, x[:3]), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer(x)[:5], layer(x[:5]))  # no row after the leading ones counts
    torch.testing.assert_close(layer(x), normalize(x, layer), atol=1e-5, rtol=1e-4)
    with lead_by(make_backbone("conv", 64, torch.Generator()), 3) as result:
        assert not result


def test_dropblock_is_the_slow_one() -> None:
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
