"""Models for the tests of files: every kind of view, fitted in milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from protonet import Encoder, PrototypeNetwork
from protonet.encoder import ResidualMLPs
from protonet.files.model import Model
from protonet.views.forest import ForestView, fit_forest
from protonet.views.linear import LinearView, fit_view
from protonet.views.radial import RADIAL_KINDS, RadialView, fit_radial
from tests.strategies import blobs


def make_network(*, learned: bool = True, first: float = 0.0) -> PrototypeNetwork:
    """Return a network of all kinds of views, three of which read one; the first has its own weight."""
    x, y = blobs(0)
    generator = torch.Generator().manual_seed(0)
    linear = {kind: fit_view(kind, x, y, 5) for kind in ("raw", "standardised", "whitened", "robust")}
    names = ("gaussian standardised", "laplacian standardised", "gaussian squashed")
    kinds = [kind for kind in RADIAL_KINDS if kind.name in names]
    radial = [fit_radial(kind, (2.0, 0.1), linear[kind.reads], x, y, 5) for kind in kinds]
    forest = fit_forest(x, y, 5, trees=7, generator=generator)
    views: list[LinearView | RadialView | ForestView] = [
        linear["raw"],
        linear["standardised"],
        *radial,
        forest,
        linear["whitened"],
    ]
    mlps = ResidualMLPs(2, 8, 3, 11, generator)
    torch.nn.init.normal_(mlps.last, generator=generator)
    weights = torch.tensor([first, *[1.0] * (len(views) - 1), *[0.5] * 2 * learned])
    encoder = Encoder(views, weights, learned=mlps if learned else None)
    network = PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=6, temperature=0.07)
    encoder.scale.fill_(1.5)
    network.set_prototypes(x, y)  # class 5 does not occur
    network.add_class(F.normalize(x[:3] + 1, dim=1))
    return network.eval()


def make_model(*, learned: bool = True, first: float = 0.0) -> Model:
    """Return a model with seven classes, eight columns, facts and held tensors."""
    classes = ("ant", "bee", "Käfer", "ждун", 'a "b",\nc', "", "new")
    columns = tuple(f"column {number}" for number in range(8))
    held = {"rows": torch.arange(6.0).reshape(2, 3).T, "labels": torch.tensor([1, 0]), "none": torch.zeros(0, 8)}
    facts = {"accuracy": [0.5, 0.75], "views": {"raw": 1.0}, "text": "ä\n"}
    return Model(make_network(learned=learned, first=first), classes, columns, facts, held)
