"""A vision transformer that tells ASCII characters apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, batches, initial_weights
from analysis.optimizer_bench.workloads._glyphs import load_ascii

SIDE, PATCH = 28, 7
PATCHES = (SIDE // PATCH) ** 2
WIDTH = 64
HEADS = 4
LAYERS = 2
BATCH = 16
VALIDATION = 200


class ViT(nn.Module):
    """Patches with learned positions, transformer layers with the norm first, the mean patch and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (n, 1, 28, 28) to logits (n, num_classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # (n, patches, width)
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(dim=1))
        return logits


def build(seed: int) -> Workload:
    """Build the workload; the seed moves the initial weights and the order of batches."""
    data = load_ascii()
    images = data.x.unflatten(1, (1, SIDE, SIDE))
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, train = shuffled[:VALIDATION], shuffled[VALIDATION:]
    with initial_weights(seed):
        model = ViT(data.num_classes)
    order = batches(len(train), BATCH, torch.Generator().manual_seed(seed))

    def loss(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(images[rows]), data.y[rows])

    return Workload(model, lambda: loss(train[next(order)]), lambda: loss(validation))
