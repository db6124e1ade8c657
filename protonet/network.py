"""PrototypeNetwork: an encoder, class prototypes in a buffer, cosine logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet._checks import check_features, check_int, check_labels, check_number, fail
from protonet.views.linear import CHUNK

#: Most numbers of embeddings that are made at a time, and most rows: they stay in the processor's cache.
NUMBERS_AT_ONCE, ROWS_AT_ONCE = 2**20, 1024


class PrototypeNetwork(nn.Module):
    """Classify by the cosine between a row's embedding and the class prototypes.

    All trainable parameters are the encoder's. Prototypes, the classes that have one, and the temperature are
    buffers: they travel with ``state_dict`` and ``.to`` and are never trained.

    Args:
        encoder: Maps (n, input_dim) to (n, embedding_dim). If it has a method ``normalize``, its output lies on
            its own sphere already and ``normalize`` brings averages back to it; otherwise rows are scaled to
            unit norm.
        embedding_dim: Width of the encoder's output, >= 1.
        num_classes: Number of classes, >= 1. None has a prototype yet: call ``set_prototypes``.
        temperature: > 0, divides the cosines.

    Raises:
        TypeError: A size or the temperature is not a number.
        ValueError: A size below 1, or a temperature that is not positive.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), with cosines as in
        Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
    """

    prototypes: Tensor
    seen: Tensor
    temperature: Tensor

    def __init__(self, encoder: nn.Module, *, embedding_dim: int, num_classes: int, temperature: float = 0.1) -> None:
        super().__init__()
        name = "PrototypeNetwork"
        embedding_dim = check_int(name, "embedding_dim", embedding_dim, low=1)
        num_classes = check_int(name, "num_classes", num_classes, low=1)
        temperature = check_number(name, "temperature", temperature, low=0, strict=True)
        self.encoder = encoder
        self.register_buffer("prototypes", torch.zeros(num_classes, embedding_dim, dtype=torch.float32))
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.bool))
        self.register_buffer("temperature", torch.tensor(temperature, dtype=torch.float32))

    def embed(self, x: Tensor) -> Tensor:
        """Return unit-norm embeddings (n, embedding_dim) of features (n, ...), of any real dtype."""
        return self._embed(self._flatten(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, num_classes), higher is likelier, each row's own whatever else is in the batch."""
        scaled = (self.prototypes / self.temperature).T
        count = min(ROWS_AT_ONCE, max(1, NUMBERS_AT_ONCE // len(scaled)))
        logits = torch.cat([self._embed(rows) @ scaled for rows in self._flatten(x).split(count)])
        return logits.masked_fill(~self.seen, torch.finfo(logits.dtype).min)

    def _flatten(self, x: Tensor) -> Tensor:
        """Return features (n, ...) as (n, input_dim) of the network's dtype."""
        width = self._input_dim
        if x.ndim < 2 or width not in {None, math.prod(x.shape[1:])}:
            remedy = "Pass rows of the features that the network was fitted to, x[None] for a single one."
            fail("PrototypeNetwork", "x", f"have shape (n, {width or 'dim'})", f"shape {tuple(x.shape)}", remedy)
        return x.flatten(1).to(self.prototypes.dtype)

    def _embed(self, x: Tensor) -> Tensor:
        """Return unit-norm embeddings (n, embedding_dim) of rows (n, input_dim)."""
        embedding: Tensor = self.encoder(x)
        return embedding if hasattr(self.encoder, "normalize") else F.normalize(embedding, dim=1)

    @torch.no_grad()
    def set_prototypes(self, features: Tensor, labels: Tensor) -> None:
        """Recompute every prototype from labelled samples, without training.

        Args:
            features: (n, ...) real, finite, n >= 1.
            labels: (n,) integers in [0, num_classes). A class that does not occur loses its prototype and is
                never predicted.

        Raises:
            TypeError: Not tensors, or labels that are not integers.
            ValueError: No row, non-finite features, or a label outside the range.
        """
        x = check_features("set_prototypes", "features", features, dim=self._input_dim)
        y = check_labels("set_prototypes", "labels", labels, n=len(x), num_classes=len(self.prototypes))
        if len(x) == 0:
            fail("set_prototypes", "features", "have at least one row", "none", "Pass labelled samples.")
        prototypes, seen = self._prototypes(x, y, len(self.prototypes))
        self.prototypes.copy_(prototypes)
        self.seen.copy_(seen)

    @torch.no_grad()
    def add_class(self, features: Tensor) -> int:
        """Extend the prototypes by one new class, without training.

        Args:
            features: (n, ...) real, finite, n >= 1 samples of the new class.

        Returns:
            The new class's label: the number of classes before the call.

        Raises:
            TypeError: Not a tensor.
            ValueError: No row, or non-finite features.
        """
        x = check_features("add_class", "features", features, dim=self._input_dim)
        if len(x) == 0:
            fail("add_class", "features", "have at least one row", "none", "Pass samples of the new class.")
        prototype, seen = self._prototypes(x, torch.zeros(len(x), dtype=torch.int64, device=x.device), 1)
        with torch.inference_mode(False):  # a buffer made in inference mode could never be used in training again
            self.prototypes = torch.cat([self.prototypes, prototype])
            self.seen = torch.cat([self.seen, seen])
        return len(self.prototypes) - 1

    @property
    def _input_dim(self) -> int | None:
        """Features a row, if the encoder tells."""
        return getattr(self.encoder, "input_dim", None)

    def count_parameters(self) -> int:
        """Return the number of trainable scalars: the encoder's."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def count_buffer_elements(self) -> int:
        """Return the number of scalars in buffers: prototypes, statistics, temperature."""
        return sum(b.numel() for b in self.buffers())

    def _prototypes(self, x: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Return prototypes (num_classes, embedding_dim) and which classes were seen (num_classes,)."""
        sums = self.prototypes.new_zeros(num_classes, self.prototypes.shape[1])
        for rows, labels in zip(x.split(CHUNK), y.to(sums.device).split(CHUNK), strict=True):
            sums.index_add_(0, labels, self.embed(rows.to(sums.device)))
        counts = torch.bincount(y, minlength=num_classes).to(sums.device)
        means = sums / counts.clamp_min(1)[:, None]
        normalize = getattr(self.encoder, "normalize", None)
        return F.normalize(means, dim=1) if normalize is None else normalize(means), counts > 0

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take over the number of classes of the stored prototypes before they are copied in."""
        stored = state_dict.get(prefix + "prototypes")
        if stored is not None and stored.shape[1:] == self.prototypes.shape[1:]:
            with torch.inference_mode(False):
                self.prototypes = self.prototypes.new_zeros(stored.shape)
                self.seen = self.seen.new_zeros(len(stored))
        super()._load_from_state_dict(state_dict, prefix, *args)
