"""Fine-tuning: all layers of a pretrained network learn new classes, or the same ones from images that have changed.

Both networks are pretrained by AdamW when they are first asked for, in the same way whatever the seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Build, Workload, build_on_rows
from analysis.optimizer_bench.workloads.images import PIXELS, SIDE, load_ascii, load_latin
from protonet.datasets import Dataset

PEAK_RATE, PRETRAINING_BATCH = 3e-3, 64

FEATURES = 64
TRANSFER_STEPS, TRANSFER_ROWS, TRANSFER_VALIDATION, TRANSFER_BATCH = 400, 2_000, 200, 16

WIDTH, BOTTLENECK = 192, 16
NEARLY_NOTHING = 1e-3  #: The standard deviation of what an adapter's output starts with.
ADAPTER_STEPS, ADAPTER_ROWS, ADAPTER_VALIDATION, ADAPTER_BATCH = 600, 400, 300, 16
SLANT, INK, GRAIN = 0.35, 0.7, 0.15  #: How images change: a shear, a factor on their ink, the noise's deviation.


def classify(images: Tensor, classes: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return the loss, given a model and row numbers, of telling the classes (n,) of images (n, pixels)."""
    return lambda model, rows: F.cross_entropy(model(images[rows]), classes[rows])


def pretrain(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor], rows: Tensor, steps: int
) -> dict[str, Tensor]:
    """Return the weights that minimise a loss on rows."""
    workload = build_on_rows(make, loss, rows, rows, size=PRETRAINING_BATCH, seed=0)
    optimizer = torch.optim.AdamW(workload.model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, steps, cycle_momentum=False)
    for _ in range(steps):
        optimizer.zero_grad()
        workload.train_loss().backward()
        optimizer.step()
        schedule.step()
    return workload.model.state_dict()


def make_cnn(num_classes: int) -> nn.Sequential:
    """Make a body of two convolutions a linear layer and a norm, and a head."""
    body = nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * (SIDE // 4) ** 2, FEATURES),
        nn.LayerNorm(FEATURES),
    )
    return nn.Sequential(body, nn.Linear(FEATURES, num_classes))


def halve(data: Dataset) -> tuple[Tensor, Tensor]:
    """Return which rows are of characters of even and of odd numbers, each shuffled."""
    shuffled = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))
    odd = data.y[shuffled] % 2 == 1
    return shuffled[~odd], shuffled[odd]


@functools.cache
def load_body() -> dict[str, Tensor]:
    """Return the body's weights, that tell every other Latin character."""
    data = load_latin()
    loss = classify(data.x, data.y // 2)
    weights = pretrain(lambda: make_cnn((data.num_classes + 1) // 2), loss, halve(data)[0], TRANSFER_STEPS)
    return {name.removeprefix("0."): weight for name, weight in weights.items() if name.startswith("0.")}


def build_transfer(seed: int) -> Workload:
    """Tell the other characters by a new head and all that was learnt; the seed decides the head, too."""
    data = load_latin()

    def make() -> nn.Module:
        model = make_cnn(data.num_classes // 2)
        model[0].load_state_dict(load_body())
        return model

    validation, train, _ = halve(data)[1].tensor_split([TRANSFER_VALIDATION, TRANSFER_VALIDATION + TRANSFER_ROWS])
    return build_on_rows(make, classify(data.x, data.y // 2), train, validation, size=TRANSFER_BATCH, seed=seed)


class Adapter(nn.Module):
    """A narrow network beside a skip, that changes next to nothing at first.

    Source: N. Houlsby et al. (2019), Parameter-efficient transfer learning for NLP, arXiv 1902.00751; there the rest
        of the network is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, BOTTLENECK)
        self.up = nn.Linear(BOTTLENECK, WIDTH)
        nn.init.normal_(self.up.weight, std=NEARLY_NOTHING)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, width) to the same shape."""
        return torch.add(x, self.up(F.gelu(self.down(x))))


def make_mlp(num_classes: int, make_adapter: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    """Make two hidden layers, each with what ``make_adapter`` makes, and a head."""
    layers: list[nn.Module] = []
    for inputs in (PIXELS, WIDTH):
        layers += [nn.Linear(inputs, WIDTH), nn.GELU(), make_adapter()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, num_classes))


def shift(images: Tensor) -> Tensor:
    """Slant images (n, pixels), take ink from them and add noise, the same one whenever it is asked for."""
    shear = torch.tensor([[1, SLANT, 0], [0, 1, 0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(shear, [len(images), 1, SIDE, SIDE], align_corners=False)
    slanted = F.grid_sample(images.view(-1, 1, SIDE, SIDE), grid, align_corners=False).flatten(1)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return INK * slanted + GRAIN * noise


@functools.cache
def load_shifted() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return ASCII's images once they have changed, (n, pixels), in random order, their classes (n,), and weights.

    The weights were trained on the images as they were, but for the last ``ADAPTER_VALIDATION``.
    """
    data = load_ascii()
    shuffled = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))
    images, classes = data.x[shuffled], data.y[shuffled]
    seen = torch.arange(len(images) - ADAPTER_VALIDATION)
    weights = pretrain(lambda: make_mlp(data.num_classes), classify(images, classes), seen, ADAPTER_STEPS)
    return shift(images), classes, weights


def build_adapter(seed: int) -> Workload:
    """Tell characters whose images have changed, by new adapters and all that was learnt from the old images.

    The weights start close to good ones: large rates forget, and long training learns the few rows by heart.
    """
    images, classes, weights = load_shifted()

    def make() -> nn.Module:
        model = make_mlp(load_ascii().num_classes, Adapter)
        model.load_state_dict(weights, strict=False)  # the adapters are new
        return model

    rows = torch.arange(len(images))
    train, validation = rows[:ADAPTER_ROWS], rows[-ADAPTER_VALIDATION:]
    return build_on_rows(make, classify(images, classes), train, validation, size=ADAPTER_BATCH, seed=seed)


WORKLOADS: dict[str, Build] = {"transfer": build_transfer, "adapter": build_adapter}
