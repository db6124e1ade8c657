from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from protonet.network import Encoder, split_weights
from protonet.views.linear import LinearSpec
from protonet.views.mlp import MLPView, ResidualMLPs
from protonet.views.view import TrainingRows, View
from tests.strategies import blobs

SCALINGS = ("raw", "centred", "whitened")


def make_encoder(weights: list[float], *, members: int = 2, seed: int = 0) -> Encoder:
    """Build an encoder of three linear views and a stack of MLPs; views of weight 0 are left out."""
    rows = TrainingRows(*blobs(seed), 5)
    linear = [LinearSpec(scaling).fit(rows) for scaling in SCALINGS]
    learned = ResidualMLPs(members, 8, 3, 12, torch.Generator().manual_seed(seed))
    torch.nn.init.normal_(learned.last, generator=torch.Generator().manual_seed(seed))
    views: list[View] = [*linear, MLPView.from_mlps(learned, linear[0].source)]
    used = [view for view, weight in zip(views, weights, strict=True) if weight]
    return Encoder(used, split_weights(used, [weight for weight in weights if weight]), origin=torch.zeros(8))


@pytest.mark.parametrize(
    ("weights", "fractions"),
    [
        ([0.2, 0.3, 0.1, 0.4], [0.2, 0.3, 0.1, 0.2, 0.2]),
        ([0.0, 0.5, 0.0, 0.5], [0.5, 0.25, 0.25]),
        ([0.0, 0.0, 0.0, 4.0], [0.75, 0.25]),  # a file may give the parts of a view unequal shares
        ([2.0, 0.0, 2.0, 0.0], [0.5, 0.5]),
    ],
)
def test_the_cosine_is_the_weighted_sum_of_the_parts_cosines(weights: list[float], fractions: list[float]) -> None:
    encoder = make_encoder(weights)
    encoder.weights.copy_(torch.tensor(fractions))
    x, _ = blobs(4)
    parts: list[torch.Tensor] = []
    for view in encoder.list_views():
        assert view.source is not None
        z = view.source(x)
        parts += list(view.mlps(z)) if isinstance(view, MLPView) else [view(z)]
    cosines = torch.stack([F.cosine_similarity(v[:, None], v[None, :], dim=2) for v in parts])
    embedding = encoder(x)
    assert embedding.shape[1] == encoder.embedding_dim
    torch.testing.assert_close(embedding @ embedding.T, torch.tensordot(torch.tensor(fractions), cosines, dims=1))


@pytest.mark.parametrize("members", [1, 2, 3])
def test_the_weight_of_a_view_is_divided_evenly_over_its_parts(members: int) -> None:
    weights = make_encoder([1.0, 0.0, 2.0, 3.0], members=members).weights
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, *[3 / members] * members]) / 6)
    assert weights.dtype == torch.float32


def test_normalize_scales_each_part_to_its_weight() -> None:
    encoder = make_encoder([0.2, 0.3, 0.1, 0.4])
    embedding = encoder(blobs(5)[0])
    torch.testing.assert_close(encoder.normalize(embedding * 3), embedding)
    mean = encoder.normalize(embedding.mean(dim=0, keepdim=True))
    norms = torch.stack([piece.norm() for piece in mean.split([8, 8, 9, 12, 12], dim=1)])
    torch.testing.assert_close(norms.square(), torch.tensor([0.2, 0.3, 0.1, 0.2, 0.2]))


def test_the_features_are_divided_by_their_scale() -> None:
    encoder, (x, _) = make_encoder([1.0, 1, 1, 1]), blobs(5)
    expected = encoder(x)
    encoder.scale.fill_(4.0)
    assert torch.equal(encoder(4 * x), expected)


def test_a_source_of_several_views_is_evaluated_and_listed_once() -> None:
    encoder, calls = make_encoder([1.0, 1, 1, 1]), []
    sources = encoder.list_sources()
    assert len(sources) == 3
    sources[0].register_forward_hook(lambda *_: calls.append(1))
    encoder(blobs(0)[0])
    assert len(calls) == 1
