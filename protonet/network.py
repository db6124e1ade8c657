"""PrototypeNetwork: an encoder, class prototypes in a buffer, cosine logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet._validation import check_features, check_int, check_labels, check_number, check_weights
from protonet.encoder import MIN_MEAN_NORM, keep_float32
from protonet.errors import raise_input_error
from protonet.losses import CHUNK_SIZE, add_to_class_sums
from protonet.views.distances import batch_invariant_matmul

#: Maximum numbers of embedding values and of rows that are computed at once, so that they fit in the cache.
CHUNK_VALUES, CHUNK_ROWS = 2**20, 1024
#: Types of features that are centred in float64, since their values may have more digits than float32 keeps.
HIGH_PRECISION_DTYPES = {torch.float64, torch.int32, torch.int64}


class PrototypeNetwork(nn.Module):
    """Classify rows by the cosine between their embedding and the class prototypes.

    All trainable parameters are the encoder's. Prototypes, class sums and counts, the temperature and the logit offsets
    are buffers: they are part of ``state_dict``, move with ``.to``, and are never trained.

    Args:
        encoder: A module that maps (n, input_dim) to (n, embedding_dim). If it has a method ``normalize``, its output
            must have unit norm, and class means are normalized by this method. Otherwise, the network scales the
            output and class means to unit norm.
        embedding_dim: Width of the encoder's output, >= 1.
        num_classes: Number of classes, >= 1. No class has a prototype before ``set_prototypes`` is called.
        temperature: Divisor of the cosines, > 0.

    Attributes:
        prototypes: (num_classes, embedding_dim), zero for a class without samples or whose embeddings sum to zero.
        sums: (num_classes, embedding_dim), the sum of the embeddings of each class's samples; float32 or float64.
        counts: (num_classes,) int64, the number of samples of each class.
        temperature: 0-d float32, the divisor of the cosines.
        offsets: (num_classes,) in nats, added to the logits; zero until `set_offsets` is called.

    Raises:
        InputTypeError: A size or the temperature is not a number.
        InputError: A size below 1, or a temperature that is not positive.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), with cosines as in Gidaris
        and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
    """

    prototypes: Tensor
    sums: Tensor
    counts: Tensor
    temperature: Tensor
    offsets: Tensor

    def __init__(self, encoder: nn.Module, *, embedding_dim: int, num_classes: int, temperature: float = 0.1) -> None:
        super().__init__()
        embedding_dim = check_int("embedding_dim", embedding_dim, low=1)
        num_classes = check_int("num_classes", num_classes, low=1)
        temperature = check_number("temperature", temperature, low=0, strict=True)
        self.encoder = encoder
        self.register_buffer("prototypes", torch.zeros(num_classes, embedding_dim, dtype=torch.float32))
        self.register_buffer("sums", torch.zeros(num_classes, embedding_dim, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("temperature", torch.tensor(temperature, dtype=torch.float32))
        self.register_buffer("offsets", torch.zeros(num_classes, dtype=torch.float32))

    @property
    def has_samples(self) -> Tensor:
        """Whether each class has samples: (num_classes,) bool. A class without samples is never predicted."""
        return self.counts > 0

    @property
    def has_zero_sum(self) -> Tensor:
        """Whether the embeddings of a class's samples cancel, that is, sum to zero: (num_classes,) bool.

        Such a class has samples but no prototype. It gets the lowest logit of all classes with samples, so that it is
        never predicted.
        """
        return self.has_samples & ~self.prototypes.any(dim=1)

    def embed(self, x: Tensor) -> Tensor:
        """Compute unit-norm embeddings (n, embedding_dim) of features (n, ...), of any real dtype."""
        return self._embed(self._flatten(x))

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (n, num_classes). The logits of a row do not depend on the other rows of the batch."""
        scaled, rows = (self.prototypes / self.temperature).T, self._flatten(x)

        def classify(rows: Tensor) -> Tensor:
            return self.mask_logits(batch_invariant_matmul(self._embed(rows), scaled) + self.offsets)

        if torch.compiler.is_compiling():  # a loop over chunks would fix the number of rows
            return classify(rows)
        return torch.cat(
            [classify(chunk) for chunk in rows.split(min(CHUNK_ROWS, max(1, CHUNK_VALUES // len(scaled))))]
        )

    def mask_logits(self, logits: Tensor) -> Tensor:
        """Lower the logits of classes without a prototype, so that they are never predicted; return (n, num_classes).

        The cosine to a missing prototype is 0, which would be the largest if all other cosines are negative. A class
        without samples gets the smallest number of the dtype. A class whose embeddings sum to zero gets a logit 1 below
        the minimum of 0 and the logits of all other classes, so that its log-loss is finite.
        """
        cancelled = self.has_zero_sum
        minimum = logits.masked_fill(~self.has_samples | cancelled, 0).amin(dim=1, keepdim=True)
        logits = torch.where(cancelled, minimum - 1, logits)
        return logits.masked_fill(~self.has_samples, torch.finfo(logits.dtype).min)

    @torch.no_grad()
    def set_prototypes(self, features: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Recompute every prototype from labelled samples, without training.

        Args:
            features: (n, ...) real, finite, n >= 1.
            labels: (n,) integers in [0, num_classes). A class without rows loses its prototype and is never predicted.
            weights: (n,) finite and > 0: the number of samples that each row counts as. If None, each row counts once.

        Raises:
            InputTypeError: Not tensors, or labels that are not integers.
            InputError: No row, non-finite features, a label outside the range, or a weight that is not positive.
        """
        self._add_samples_to_sums(torch.zeros_like(self.sums), torch.zeros_like(self.counts), features, labels, weights)

    @torch.no_grad()
    def add_samples(
        self, features: Tensor, labels: Tensor, *, num_classes: int | None = None, weights: Tensor | None = None
    ) -> None:
        """Add samples of known and of new classes, without training: prototypes change, the encoder does not.

        Args:
            features: (n, ...) real, finite, n >= 1.
            labels: (n,) integers in [0, num_classes).
            num_classes: Number of classes after the call, at least as many as before. If None, it does not change.
            weights: (n,) finite and > 0: the number of samples that each row counts as. If None, each row counts once.

        Raises:
            InputTypeError: Not tensors, or labels that are not integers.
            InputError: No row, non-finite features, a label outside the range, a weight that is not positive, or fewer
                classes than before.
        """
        before = len(self.counts)
        n_new = 0 if num_classes is None else check_int("num_classes", num_classes, low=before) - before
        self._add_samples_to_sums(
            F.pad(self.sums, (0, 0, 0, n_new)), F.pad(self.counts, (0, n_new)), features, labels, weights
        )

    def add_class(self, features: Tensor) -> int:
        """Add one new class, without training.

        Args:
            features: (n, ...) real, finite, n >= 1 samples of the new class.

        Returns:
            The new class's label: the number of classes before the call.

        Raises:
            InputTypeError: Not a tensor.
            InputError: No row, or non-finite features.
        """
        label = len(self.counts)
        x = check_features("features", features, dim=self._input_dim)
        self.add_samples(x, torch.full((len(x),), label, device=x.device), num_classes=label + 1)
        return label

    @torch.no_grad()
    def arrange_classes(self, order: Tensor) -> None:
        """Reorder the classes, append classes without samples, or drop classes.

        Args:
            order: int64, one entry for each class after the call: the index of the class before the call, or -1 for a
                new class without samples. Classes whose index does not occur are dropped.

        Raises:
            InputError: An index is out of range.
        """
        if len(order) and not -1 <= int(order.min()) <= int(order.max()) < len(self.counts):
            got = f"{int(order.min())} to {int(order.max())}"
            raise_input_error("order", f"be in [-1, {len(self.counts)})", got, "Pass indices of present classes.")
        offsets = F.pad(self.offsets, (0, 1))[order]  # the last entry, of index -1, is that of a class without samples
        self.set_sums(F.pad(self.sums, (0, 0, 0, 1))[order], F.pad(self.counts, (0, 1))[order])
        self.set_offsets(offsets)

    def count_parameters(self) -> int:
        """Count the trainable parameters, which are all in the encoder."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def count_buffer_elements(self) -> int:
        """Count the elements of all buffers in ``state_dict``: prototypes, and the statistics that encoders store."""
        stored = {id(value) for value in self.state_dict(keep_vars=True).values()}
        return sum(b.numel() for b in self.buffers() if id(b) in stored)

    @property
    def _input_dim(self) -> int | None:
        """Number of features per row, if the encoder declares it."""
        return getattr(self.encoder, "input_dim", None)

    def _flatten(self, x: Tensor) -> Tensor:
        """Flatten features (n, ...) to (n, input_dim), in the dtype that the encoder expects."""
        width = self._input_dim
        if x.ndim < 2 or width not in {None, math.prod(x.shape[1:])}:
            remedy = "Pass rows of the features that the network was fitted to, x[None] for a single one."
            raise_input_error("x", f"have shape (n, {width or 'dim'})", f"shape {tuple(x.shape)}", remedy)
        dtype = self.prototypes.dtype
        if hasattr(self.encoder, "origin"):
            dtype = torch.float64 if x.dtype in HIGH_PRECISION_DTYPES else torch.promote_types(dtype, torch.float32)
        return x.flatten(1).to(dtype)

    def _embed(self, x: Tensor) -> Tensor:
        """Compute unit-norm embeddings (n, embedding_dim) of rows (n, input_dim)."""
        embedding: Tensor = self.encoder(x).to(self.prototypes.dtype)
        return embedding if hasattr(self.encoder, "normalize") else F.normalize(embedding, dim=1)

    def _add_samples_to_sums(
        self, sums: Tensor, counts: Tensor, features: Tensor, labels: Tensor, weights: Tensor | None
    ) -> None:
        """Validate samples, add their embeddings to class sums and counts, and make the results the network's.

        Counts are integers: the summed weights of a class's samples are rounded, and at least 1.
        """
        x = check_features("features", features, dim=self._input_dim)
        y = check_labels("labels", labels, n=len(x), num_classes=len(counts)).to(sums.device)
        if len(x) == 0:
            raise_input_error("features", "have at least one row", "none", "Pass labelled samples.")
        added = torch.bincount(y, minlength=len(counts))
        if weights is not None:
            weights = check_weights("weights", weights, n=len(x)).to(sums.device)
            summed_weights = torch.bincount(y, weights, minlength=len(counts))
            added = torch.where(added > 0, summed_weights.round().clamp_min(1).to(added), 0)
            weights = weights * (added / summed_weights)[y]
        blocks = (self.embed(rows.to(sums.device)).to(sums.dtype) for rows in x.split(CHUNK_SIZE))
        self.set_sums(add_to_class_sums(sums.clone(), blocks, y, weights), counts + added)

    @torch.no_grad()
    def set_sums(self, sums: Tensor, counts: Tensor) -> None:
        """Replace the class sums and counts, and recompute the prototypes; the arguments are not validated.

        Args:
            sums: (num_classes, embedding_dim), of the dtype of the attribute ``sums``.
            counts: (num_classes,) int64.
        """
        normalize = getattr(self.encoder, "normalize", None)
        means = sums / counts.clamp_min(1)[:, None]
        if normalize is None:
            norms = torch.linalg.vector_norm(means, dim=1, keepdim=True)
            prototypes = F.normalize(means, dim=1).masked_fill(norms < MIN_MEAN_NORM, 0)
        else:
            prototypes = normalize(means)
        prototypes = prototypes.to(self.prototypes.dtype)
        with torch.inference_mode(False):  # a buffer made in inference mode could never be used in training again
            self.sums, self.counts, self.prototypes = sums.clone(), counts.clone(), prototypes.clone()
        self.set_offsets(F.pad(self.offsets, (0, len(counts) - len(self.offsets))))  # truncated or zero-padded

    @torch.no_grad()
    def set_offsets(self, offsets: Tensor) -> None:
        """Replace the offsets (num_classes,) that are added to the logits, in nats; the argument is not validated."""
        with torch.inference_mode(False):
            self.offsets = offsets.to(self.offsets).clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PrototypeNetwork:
        super()._apply(keep_float32(fn, [self.sums]), recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resize the buffers to the stored number of classes before they are loaded."""
        stored = state_dict.get(prefix + "prototypes")
        if stored is not None and stored.shape[1:] == self.prototypes.shape[1:]:
            with torch.inference_mode(False):
                self.prototypes, self.sums = (self.prototypes.new_zeros(stored.shape) for _ in range(2))
                self.counts = self.counts.new_zeros(len(stored))
                self.offsets = self.offsets.new_zeros(len(stored))
        super()._load_from_state_dict(state_dict, prefix, *args)
