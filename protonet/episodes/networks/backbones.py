"""Backbones, the networks that embed rows, and heads, the modules that are trained together with a backbone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.episodes.names import BACKBONES
from protonet.episodes.networks.augmentation import infer_image_shape
from protonet.episodes.samplers.sampler import RowReader
from protonet.errors import raise_input_error

LEAKY_RELU_SLOPE = 0.1  #: Slope of the leaky ReLUs of ResNet-12.
#: The backbones for square images, with the smallest side of an image in pixels that each can process.
MIN_IMAGE_SIDES = {"conv": 8, "conv4": 16, "resnet12": 16}
EMBED_BATCH_SIZE = 1024  #: Rows that `embed_rows_in_batches` embeds at a time.


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose evaluation statistics are measured separately, not averaged during training.

    In training mode, mean and variance are computed from the batch. In evaluation mode, they are those that
    `measure_batch_norm_statistics` has stored: encoders are evaluated with averaged weights, whose statistics differ
    from running averages. If ``leading`` is set, both modes compute them from the first rows of a batch, an episode's
    support, so that no query affects another.

    Source: Ioffe and Szegedy (2015), https://arxiv.org/abs/1502.03167; statistics of the support: Bronskill et al.,
        "TaskNorm" (2020), sec. 3.2, MetaBN. https://arxiv.org/abs/2003.03284
    """

    leading = 0  #: The number of first rows of a batch that give mean and variance; 0 to use all rows as described.
    measuring = False  #: Whether `measure_batch_norm_statistics` is averaging the statistics of batches.

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the channels of feature maps (n, channels, height, width)."""
        if self.leading:
            variance, mean = torch.var_mean(x[: self.leading], dim=(0, 2, 3), correction=0)  # (channels,)
            scale = self.weight * (variance + self.eps).rsqrt()
            return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]
        if self.training and not self.measuring:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return super().forward(x)


@contextmanager
def use_support_statistics(encoder: nn.Module, n_rows: int) -> Iterator[bool]:
    """Compute the statistics of an encoder's batch normalisation from the first ``n_rows`` rows of each batch.

    A context manager, which restores the usual statistics on exit. Yields whether the encoder has batch normalisation.
    """
    layers = [layer for layer in encoder.modules() if isinstance(layer, BatchNorm)]
    for layer in layers:
        layer.leading = n_rows
    try:
        yield bool(layers)
    finally:
        for layer in layers:
            layer.leading = 0


@torch.no_grad()
def measure_batch_norm_statistics(encoder: nn.Module, batches: Iterable[Tensor]) -> None:
    """Measure the mean and variance that an encoder's batch normalisation uses in evaluation mode.

    Both are averaged over ``batches`` of rows (n, dim) on the encoder's device, and stored in the encoder, which is
    then in evaluation mode.

    Source: Wu and Johnson, "Rethinking 'Batch' in BatchNorm" (2021), sec. 3. https://arxiv.org/abs/2105.07576
    """
    encoder.eval()
    layers = [layer for layer in encoder.modules() if isinstance(layer, BatchNorm)]
    if not layers:
        return
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
        layer.measuring = True
    for rows in batches:
        encoder(rows)
    for layer in layers:
        layer.eval()
        layer.measuring = False


class DropBlock(nn.Module):
    """DropBlock, a dropout of squares: sets squares of feature maps to zero in training, and scales other pixels up.

    Args:
        rate: About the fraction of a feature map that is set to zero, in [0, 1).
        size: Pixels per side of a square; a smaller feature map is dropped as a whole.

    Source: Ghiasi, Lin and Le, "DropBlock" (2018), algorithm 1, https://arxiv.org/abs/1810.12890, with the rate of all
        steps; Lee et al., "MetaOptNet" (2019), whose code raises it from 0 over 40,000 batches.
    """

    def __init__(self, rate: float, size: int) -> None:
        super().__init__()
        self.rate, self.size = rate, size

    def forward(self, x: Tensor) -> Tensor:
        """Set squares of feature maps (n, channels, side, side) to zero; in evaluation mode, return ``x`` unchanged."""
        if not self.training or not self.rate:
            return x
        side = x.shape[3]
        size = min(self.size, side)
        n_positions = side - size + 1
        seed_rate = self.rate * (side / (size * n_positions)) ** 2  # probability that a square begins at a position
        seeds = (torch.rand_like(x[..., :n_positions, :n_positions]) < seed_rate).to(x.dtype)
        mask = 1 - F.max_pool2d(F.pad(seeds, [size - 1] * 4), size, stride=1)  # (n, channels, side, side)
        return x * mask * (mask.numel() / mask.sum().clamp_min(1))


class ResidualBlock(nn.Module):
    """A block of ResNet-12: three 3 x 3 convolutions, a 1 x 1 convolution as their shortcut, then max pooling by 2."""

    def __init__(self, before: int, channels: int, drop: DropBlock) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for layer in range(3):
            layers += [nn.Conv2d(channels if layer else before, channels, 3, padding=1, bias=False)]
            layers += [BatchNorm(channels), nn.LeakyReLU(LEAKY_RELU_SLOPE)]
        self.path = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, bias=False), BatchNorm(channels))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """Map feature maps (n, before, side, side) to feature maps (n, channels, side // 2, side // 2)."""
        pooled: Tensor = self.drop(F.max_pool2d(F.leaky_relu(self.path(x) + self.shortcut(x), LEAKY_RELU_SLOPE), 2))
        return pooled


def make_conv4(shape: tuple[int, int, int]) -> nn.Sequential:
    """Make Conv4, an untrained backbone of four convolutions.

    It maps flattened images of ``shape`` (channels, side, side) to embeddings (n, 64 * (side // 16)**2): 1600 features
    for 84 x 84 pixels.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), sec. 3.1.
        https://arxiv.org/abs/1703.05175
    """
    blocks: list[nn.Module] = []
    for before in (shape[0], 64, 64, 64):
        blocks += [nn.Conv2d(before, 64, 3, padding=1), BatchNorm(64), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Unflatten(1, shape), *blocks, nn.Flatten())


def make_resnet12(shape: tuple[int, int, int], dropblock: float) -> nn.Sequential:
    """Make ResNet-12, an untrained backbone of four residual blocks.

    It maps flattened images of ``shape`` (channels, side, side) to embeddings (n, 640). ``dropblock`` is the rate of
    dropout in the first two blocks and of DropBlock in the others.

    Source: Oreshkin, Rodríguez López and Lacoste, "TADAM" (2018), https://arxiv.org/abs/1805.10123, with the widths and
        rectifiers of Lee et al., "MetaOptNet" (2019), https://arxiv.org/abs/1904.03758, and the mean of the last
        feature maps.
    """
    dropblock_size = 5  # side of the squares that DropBlock drops, in pixels of the feature map
    drops = [DropBlock(dropblock, size) for size in (1, 1, dropblock_size, dropblock_size)]
    resnet12_channels = (64, 160, 320, 640)  # channels of the four blocks of ResNet-12
    blocks = map(ResidualBlock, (shape[0], *resnet12_channels), resnet12_channels, drops)
    return nn.Sequential(nn.Unflatten(1, shape), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make_backbone(
    name: str, dim: int, generator: torch.Generator, *, dropblock: float = 0.0, uniform: bool = False
) -> nn.Sequential:
    """Make an untrained backbone on the CPU, which maps rows (n, dim) to embeddings (n, embedding_dim) float32.

    In evaluation mode, the embedding of a row does not depend on other rows of the batch.

    Args:
        name: "mlp" for any rows, "conv" for square grey images, "conv4" or "resnet12" for square grey or RGB images.
        dim: Features of a row; those of an image are in the order of channels, rows and columns.
        generator: Draws the initial weights.
        dropblock: The rate of DropBlock in "resnet12", in [0, 1).
        uniform: Whether to draw weights and biases of a layer of n inputs uniformly from -n**-0.5 to n**-0.5, as torch
            does for layers of its own. He's weights are 2.4 times as large.

    Raises:
        InputError: The name is unknown, or no image that the backbone can process has ``dim`` features.

    Source: "conv" follows Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), sec. 3.1,
        https://arxiv.org/abs/1703.05175, with a stride in the first layer, for speed. Weights: He et al., "Delving deep
        into rectifiers" (2015), eq. 10, https://arxiv.org/abs/1502.01852. Normalisation: Wu and He, "Group
        normalization" (2018), https://arxiv.org/abs/1803.08494.
    """
    if name not in BACKBONES:
        raise_input_error("name", f"be one of {', '.join(BACKBONES)}", repr(name), "Pick one of them.")
    channels, side, _ = shape = infer_image_shape(dim) or (0, 0, 0)
    grey_only = name == "conv"
    if name in MIN_IMAGE_SIDES and (side < MIN_IMAGE_SIDES[name] or (grey_only and channels > 1)):
        constraint = f"be the square of a side of {MIN_IMAGE_SIDES[name]} pixels or more"
        constraint += "" if grey_only else ", or three times that"
        remedy = f"Use the mlp, or square {'grey' if grey_only else 'grey or RGB'} images."
        raise_input_error("dim", constraint, dim, remedy)
    makers = {
        "mlp": lambda: _make_mlp(dim),
        "conv": lambda: _make_conv(side),
        "conv4": lambda: make_conv4(shape),
        "resnet12": lambda: make_resnet12(shape, dropblock),
    }
    with torch.device("meta"):  # the default initial weights would come from the global generator
        backbone = makers[name]()
    backbone = backbone.to_empty(device="cpu")
    with torch.no_grad():
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                n_inputs = layer.weight[0].numel()
                if uniform:
                    for parameter in layer.parameters():
                        parameter.uniform_(-(n_inputs**-0.5), n_inputs**-0.5, generator=generator)
                    continue
                layer.weight.normal_(0, math.sqrt(2 / n_inputs), generator=generator)
                if layer.bias is not None:
                    layer.bias.zero_()
            elif isinstance(layer, nn.GroupNorm | nn.LayerNorm | BatchNorm):
                layer.reset_parameters()
    return backbone


def _make_mlp(dim: int) -> nn.Sequential:
    """Make an MLP that maps rows (n, dim) to embeddings (n, 128)."""
    first = nn.Linear(dim, 512, bias=False), nn.LayerNorm(512), nn.GELU()
    second = nn.Linear(512, 512, bias=False), nn.LayerNorm(512), nn.GELU()
    return nn.Sequential(*first, *second, nn.Linear(512, 128, bias=False))


def _make_conv(side: int) -> nn.Sequential:
    """Make four convolutions that map grey images (n, side * side) to embeddings: (n, 576) for a side of 28."""
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        *(nn.Conv2d(1, 32, 5, stride=2, padding=2, bias=False), nn.GroupNorm(8, 32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.Flatten()),
    )


@torch.no_grad()
def embed_rows_in_batches(encoder: nn.Module, read_rows: RowReader, rows: Tensor) -> Tensor:
    """Embed rows, which ``read_rows`` reads by their indices ``rows`` (n,) int64, in batches of ``EMBED_BATCH_SIZE``.

    Returns the embeddings (n, embedding_dim) float32, on the encoder's device.
    """
    device = next(encoder.parameters()).device
    return torch.cat([encoder(read_rows(chunk).to(device).float()) for chunk in rows.split(EMBED_BATCH_SIZE)])


class SetTransformer(nn.Module):
    """FEAT's transformer layer: self-attention with one head over the rows of a set, and dropout in training.

    Source: Ye, Hu, Zhan and Sha, "Few-shot learning via embedding adaptation with set-to-set functions" (2020), eqs. 6
        to 8, https://arxiv.org/abs/1812.03664, with the dropout of the authors' code.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.output, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.attention_dropout, self.output_dropout = nn.Dropout(0.1), nn.Dropout(0.5)

    def forward(self, sets: Tensor) -> Tensor:
        """Adapt the rows of each set to the other rows of the set; input and output are (sets, rows, dim)."""
        scores = self.query(sets) @ self.key(sets).transpose(1, 2) / math.sqrt(sets.shape[2])  # (sets, rows, rows)
        moved = self.output(self.attention_dropout(scores.softmax(dim=2)) @ self.value(sets))
        adapted: Tensor = self.norm(sets + self.output_dropout(moved))
        return adapted


class LinearHead(nn.Module):
    """The linear classifier of MAML and ANIL before its gradient steps on an episode: learned weights, or zeros.

    With ``n_way``, the initial weights are learned for each of ``n_way`` classes. With None, they are zero, for any
    number of classes in any order. Learned weights that all classes share would be equivalent to zeros, because they
    add a constant to all logits of a row. From zeros, the first gradient step changes only this layer, so that one step
    of MAML equals one of ANIL.

    Source: Finn, Abbeel and Levine, "Model-agnostic meta-learning for fast adaptation of deep networks" (2017), and its
        code, https://arxiv.org/abs/1703.03400; zero: Kao, Chiu and Chen, "MAML is a noisy contrastive learner in
        classification" (2022), sec. 3, https://arxiv.org/abs/2106.15367; shared: Ye and Chao, "How to train your MAML
        to excel in few-shot classification" (2022), sec. 5. https://arxiv.org/abs/2106.16245
    """

    def __init__(self, dim: int, n_way: int | None = None) -> None:
        super().__init__()
        self.n_way = n_way
        self.weight: Tensor
        self.bias: Tensor
        if n_way is None:
            self.register_buffer("weight", torch.zeros(1, dim), persistent=False)
            self.register_buffer("bias", torch.zeros(1), persistent=False)
        else:
            self.weight, self.bias = nn.Parameter(torch.zeros(n_way, dim)), nn.Parameter(torch.zeros(n_way))

    def make_initial_weights(self, n_way: int) -> dict[str, Tensor]:
        """Return the initial ``weight`` (n_way, dim) and ``bias`` (n_way,) of an episode's classifier, by name."""
        return {"weight": self.weight.expand(n_way, -1), "bias": self.bias.expand(n_way)}

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (n, dim) to logits (n, n_way)."""
        return nn.functional.linear(rows, self.weight, self.bias)


def make_head(objective: str, dim: int, generator: torch.Generator, *, n_way: int | None = None) -> nn.Module:
    """Make the untrained head of an objective: the module on top of the encoder that is trained with it.

    Weights are drawn from a normal distribution of variance 1 / dim; biases are 0.

    Args:
        objective: One of `protonet.episodes.names.OBJECTIVES`.
        dim: The number of features of an embedding.
        generator: Draws the weights.
        n_way: For MAML and ANIL the number of classes with learned initial weights; None for zeros, see `LinearHead`.

    Returns:
        A `SetTransformer` for "feat", a `LinearHead` for "maml" and "anil", and an identity for other objectives.
    """
    if objective in ("prototypes", "protonet"):
        return nn.Identity()
    with torch.device("meta"):  # the default initial weights would come from the global generator
        head = SetTransformer(dim) if objective == "feat" else LinearHead(dim, n_way)
    head = head.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1 / math.sqrt(dim), generator=generator)
            else:
                parameter.fill_(float(name == "norm.weight"))
        for buffer in head.buffers():
            buffer.zero_()
    return head
