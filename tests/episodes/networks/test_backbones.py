from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.signal import correlate
from torch import nn

from protonet.episodes.names import BACKBONES
from protonet.episodes.networks.backbones import embed_rows, make_backbone
from protonet.episodes.samplers.batch import make_row_reader

COLOUR = "`dim` must be the square of a side of 16 pixels or more, or three times that"
REMEDY = r"Use the mlp, or square grey or RGB images\."


def make(name: str, dim: int, seed: int = 0) -> nn.Sequential:
    return make_backbone(name, dim, torch.Generator().manual_seed(seed))


def rows(n: int, dim: int) -> torch.Tensor:
    return torch.rand(n, dim, generator=torch.Generator().manual_seed(1))


def normalize(x: np.ndarray, groups: int) -> np.ndarray:
    parts = x.reshape(groups, -1)
    parts = (parts - parts.mean(axis=1, keepdims=True)) / np.sqrt(parts.var(axis=1, keepdims=True) + 1e-5)
    result: np.ndarray = parts.reshape(x.shape)
    return result


def convolve(image: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    pad = weight.shape[2] // 2
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
    sums = [correlate(padded, kernels, mode="valid", method="direct")[0] for kernels in weight]
    return np.stack(sums)[:, ::stride, ::stride]


def pool(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2).max(axis=(2, 4))
    return result


def test_conv_is_the_slow_one() -> None:
    backbone, x = make("conv", 64), rows(1, 64)
    first, second, third, fourth = (p.detach().numpy() for p in backbone.parameters() if p.ndim == 4)
    for row, embedding in zip(x, backbone(x), strict=True):
        z = np.maximum(normalize(convolve(row.numpy().reshape(1, 8, 8), first, 2), 8), 0)
        z = pool(np.maximum(normalize(convolve(z, second, 1), 8), 0))
        z = pool(np.maximum(normalize(convolve(z, third, 1), 8), 0))
        slow = normalize(convolve(z, fourth, 1), 8).reshape(-1)
        torch.testing.assert_close(embedding.detach(), torch.from_numpy(slow).float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BACKBONES)
def test_in_evaluation_a_row_does_not_see_the_others(name: str) -> None:
    dim, tolerance = (768, 1e-4) if name in ("conv4", "resnet12") else (81, 1e-5)
    backbone, x = make(name, dim).eval(), rows(5, dim)
    alone = torch.cat([backbone(row[None]) for row in x])
    torch.testing.assert_close(backbone(x), alone, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", BACKBONES)
def test_same_seed_same_weights_and_no_global_state(name: str) -> None:
    before = torch.get_rng_state()
    dim = 256 if name in ("conv4", "resnet12") else 64
    first, same, other = make(name, dim).eval(), make(name, dim).eval(), make(name, dim, seed=1).eval()
    assert torch.equal(torch.get_rng_state(), before)
    x = rows(3, dim)
    assert torch.equal(first(x), same(x))
    assert not torch.allclose(first(x), other(x))
    weights = torch.cat([p.flatten() * (p[0].numel() / 2) ** 0.5 for p in first.parameters() if p.ndim > 1])
    assert abs(float(weights.detach().std()) - 1) < 0.02


def test_embed_rows_in_chunks() -> None:
    encoder, x = make("mlp", 8), rows(2500, 8)
    full = encoder(x).detach()
    embedded = embed_rows(encoder, make_row_reader(x), torch.arange(2500))
    torch.testing.assert_close(embedded, full)
    some = torch.tensor([2400, 3, 3])
    torch.testing.assert_close(embed_rows(encoder, make_row_reader(x.double()), some), full[some])
    assert not embedded.requires_grad


def test_errors() -> None:
    for name, dim, message in [
        ("cnn", 64, r"`name` must be one of mlp, conv, conv4, resnet12; got 'cnn'\."),
        *(("conv", dim, rf"`dim` must be the square of a side of 8 pixels or more; got {dim}\.") for dim in (65, 49)),
        *((name, dim, rf"{COLOUR}; got {dim}\. {REMEDY}$") for name in ("conv4", "resnet12") for dim in (225, 640)),
    ]:
        with pytest.raises(ValueError, match=rf"^{message}"):
            make(name, dim)
