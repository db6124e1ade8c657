"""Fine-tuning: all layers of a pretrained network learn new classes, or the same ones from images that have changed.

Both networks are pretrained by AdamW when they are first asked for, in the same way whatever the seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, build, on_rows, seed_0, tell, workload
from analysis.optimizer_bench.workloads.data import PIXELS, SIDE, load_ascii, load_latin
from analysis.optimizer_bench.workloads.models import Skip

PEAK_RATE, PRETRAINING_BATCH = 3e-3, 64

FEATURES = 64
TRANSFER_STEPS, TRANSFER_ROWS, TRANSFER_VALIDATION, TRANSFER_BATCH = 400, 2_000, 200, 16

WIDTH, BOTTLENECK = 192, 16
NEARLY_NOTHING = 1e-3  #: The standard deviation of what an adapter's output starts with.
ADAPTER_STEPS, ADAPTER_ROWS, ADAPTER_VALIDATION, ADAPTER_BATCH = 600, 400, 300, 16
SLANT, INK, GRAIN = 0.35, 0.7, 0.15  #: How images change: a shear, a factor on their ink, the noise's deviation.


def pretrain(task: Task, steps: int) -> nn.Module:
    """Return a model that minimises a task's loss."""
    workload = build(task, 0)
    optimizer = torch.optim.AdamW(workload.model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, steps, cycle_momentum=False)
    for _ in range(steps):
        optimizer.zero_grad()
        workload.train_loss().backward()
        optimizer.step()
        schedule.step()
    return workload.model


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


@workload
def transfer() -> Task:
    """Tell Latin characters of odd numbers by a new head and all that was learnt on even ones."""
    data = load_latin()
    shuffled = torch.randperm(len(data.y), generator=seed_0())
    even, odd = (shuffled[data.y[shuffled] % 2 == remainder] for remainder in (0, 1))
    loss, half = tell(data.x, data.y // 2), data.num_classes // 2
    make_old = functools.partial(make_cnn, data.num_classes - half)
    old = pretrain(on_rows(make_old, loss, (even, even), PRETRAINING_BATCH), TRANSFER_STEPS)
    body = old.get_submodule("0").state_dict()

    def make() -> nn.Module:
        model = make_cnn(half)
        model[0].load_state_dict(body)
        return model

    validation, train, _ = odd.tensor_split([TRANSFER_VALIDATION, TRANSFER_VALIDATION + TRANSFER_ROWS])
    return on_rows(make, loss, (train, validation), TRANSFER_BATCH)


def make_adapter() -> nn.Module:
    """Make a narrow network beside a skip, that changes next to nothing at first.

    Source: N. Houlsby et al. (2019), Parameter-efficient transfer learning for NLP, arXiv 1902.00751; there the rest
        of the network is frozen.
    """
    down, up = nn.Linear(WIDTH, BOTTLENECK), nn.Linear(BOTTLENECK, WIDTH)
    nn.init.normal_(up.weight, std=NEARLY_NOTHING)
    nn.init.zeros_(up.bias)
    return Skip(down, nn.GELU(), up)


def make_adapted(num_classes: int, make_adapter: Callable[[], nn.Module]) -> nn.Sequential:
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
    return INK * slanted + GRAIN * torch.randn(images.shape, generator=seed_0())


@workload
def adapter() -> Task:
    """Tell characters whose images have changed, by new adapters and all that was learnt from the old images.

    The weights start close to good ones: large rates forget, and long training learns the few rows by heart.
    """
    data = load_ascii()
    rows = torch.randperm(len(data.y), generator=seed_0())
    seen, validation = rows[:-ADAPTER_VALIDATION], rows[-ADAPTER_VALIDATION:]
    make_old = functools.partial(make_adapted, data.num_classes, nn.Identity)
    old = pretrain(on_rows(make_old, tell(data.x, data.y), (seen, seen), PRETRAINING_BATCH), ADAPTER_STEPS)
    changed = torch.empty_like(data.x)
    changed[rows] = shift(data.x[rows])

    def make() -> nn.Module:
        model = make_adapted(data.num_classes, make_adapter)
        model.load_state_dict(old.state_dict(), strict=False)  # the adapters are new
        return model

    return on_rows(make, tell(changed, data.y), (rows[:ADAPTER_ROWS], validation), ADAPTER_BATCH)


WORKLOADS = {"transfer": transfer, "adapter": adapter}
