"""`PrototypeNetwork`: an encoder, class prototypes in a buffer, and cosine logits. `Encoder`: concatenated views.

The output of a view has one or more parts, which are adjacent columns. Each part is scaled so that its norm is the
square root of its weight. The cosine of two embeddings then is the weighted sum of the cosines of their parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet._compat import disable_autocast, is_compiling
from protonet._validation import check_features, check_int, check_labels, check_number, check_weights
from protonet.errors import raise_input_error
from protonet.losses import MAX_CHUNK_ROWS, add_to_class_sums
from protonet.views.columns import ColumnSelection
from protonet.views.distances import batch_invariant_matmul
from protonet.views.onnx_graph import OnnxGraph
from protonet.views.view import InputMap, View

#: A mean of rows of unit norm whose norm is below this consists of rounding errors and counts as zero.
MIN_MEAN_NORM = 1e-6


def keep_float32(convert: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function for `torch.nn.Module._apply`, so that it does not convert the given tensors to half precision.

    Args:
        convert: The function that ``Module.to``, ``Module.half`` and the like apply to each tensor of a module.
        tensors: The tensors that keep at least float32. Other tensors are converted as before.
    """
    protected = {id(tensor): tensor for tensor in tensors}

    def apply(tensor: Tensor) -> Tensor:
        converted = convert(tensor)
        if id(tensor) not in protected or not converted.is_floating_point() or converted.element_size() >= 4:
            return converted
        converted = tensor.to(converted.device, torch.float32)
        protected[id(converted)] = converted  # a module with two parents is converted twice
        return converted

    return apply


class Encoder(nn.Module):
    """Map features to one embedding: the weighted concatenation of the outputs of several feature maps ("views").

    Views that are fitted in closed form hold buffers, and trained views hold parameters.

    Buffers keep at least float32, also after ``.half()`` or ``.bfloat16()``, and `forward` disables autocast: the
    scales of table columns differ by more than the range of half precision.

    Args:
        views: The views, at least one. Views that read the same map of the features share one `InputMap`.
        weights: (parts,) the weight of each part of each view, >= 0, summing to 1; see `split_weights`. A part is a
            block of output columns that is normalized by itself.
        origin: (input_dim,) values that are subtracted from the features; nonzero for columns far from 0.
        scale: Divisor > 0 of the centred features, so that large or small units of measurement do not overflow or
            underflow.
        columns: The features that views read, and their signs; None if views read all features.

    Weights, origin, scale and signs are stored in float32 buffers.
    """

    weights: Tensor
    origin: Tensor
    scale: Tensor
    columns: Tensor | None
    """(m,) int64: the features that views read; None for all."""
    signs: Tensor | None
    """(m,), 1 or -1: the factors of these features; None if views read all features."""

    def __init__(
        self,
        views: Sequence[View],
        weights: Tensor,
        *,
        origin: Tensor,
        scale: Tensor | float = 1.0,
        columns: ColumnSelection | None = None,
    ) -> None:
        super().__init__()
        sources = list(dict.fromkeys(view.source for view in views if view.source is not None))
        self.sources = nn.ModuleList(sources)  # loaded before the views, which derive constants from them
        self.views = nn.ModuleList(views)
        self.source_index = [None if view.source is None else sources.index(view.source) for view in views]
        self.input_dim = len(origin)
        self.sizes = [size for view in views for size in view.part_sizes]
        for name, value in (("weights", weights), ("origin", origin), ("scale", torch.as_tensor(scale))):
            self.register_buffer(name, value.to(torch.float32).clone())
        self.register_buffer("columns", None if columns is None else columns.indices.clone())
        self.register_buffer("signs", None if columns is None else columns.signs.clone())

    @property
    def embedding_dim(self) -> int:
        """Width of the embedding: the sum of the widths of the outputs of all views."""
        return sum(self.sizes)

    def list_input_maps(self) -> list[InputMap]:
        """List the distinct input maps of the views, in the order of the views."""
        return list(self.sources)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Compute embeddings (n, embedding_dim) of unit norm of features x (n, input_dim)."""
        with disable_autocast(x.device.type):
            return self._embed(x)

    def _embed(self, x: Tensor) -> Tensor:
        x = (x - self.origin).to(self.scale.dtype) / self.scale
        if self.columns is not None and self.signs is not None:
            x = x[:, self.columns] * self.signs
        mapped = [source(x) for source in self.sources]
        parts: list[Tensor] = []
        for view, index in zip(self.iterate_views(), self.source_index, strict=True):
            output = view(x if index is None else mapped[index])
            parts += output.split(view.part_sizes, dim=1) if len(view.part_sizes) > 1 else [output]
        return self._normalize_and_concatenate(parts)

    def normalize(self, embedding: Tensor) -> Tensor:
        """Normalize each part of rows (n, embedding_dim), such as class means, as `forward` normalizes embeddings.

        Each part, a block of columns, is scaled so that its norm is the square root of its weight. A part whose norm is
        nearly zero, such as the mean of opposite rows, becomes zero.
        """
        parts: list[Tensor] = []
        for part, size in zip(embedding.split(self.sizes, dim=1), self.weights.sqrt(), strict=True):
            norm = torch.linalg.vector_norm(part, dim=1, keepdim=True)
            parts.append(part.masked_fill(norm < MIN_MEAN_NORM * size, 0))
        return self._normalize_and_concatenate(parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Encoder:
        super()._apply(keep_float32(fn, self.buffers()), recurse)  # type: ignore[no-untyped-call]
        return self

    def add_to_graph(self, graph: OnnxGraph, features: str) -> str:
        """Add the encoder to an ONNX graph.

        Args:
            graph: The graph to which nodes are added.
            features: The name of the value with the features (n, input_dim).

        Returns:
            The name of the value with the embeddings (n, embedding_dim).
        """
        if bool(self.origin.any()):  # in that case, the features are float64
            features = graph.cast(graph.add("Sub", features, self.origin.double()), "FLOAT")
        x = graph.add("Div", features, self.scale)
        if self.columns is not None and self.signs is not None:
            x = graph.add("Mul", graph.add("Gather", x, self.columns, axis=1), self.signs)
        mapped = [source.add_to_graph(graph, x) for source in self.list_input_maps()]
        parts: list[str] = []
        for view, index in zip(self.iterate_views(), self.source_index, strict=True):
            parts += view.add_to_graph(graph, x if index is None else mapped[index])
        scaled = []
        for part, weight in zip(parts, self.weights.sqrt(), strict=True):
            norm = graph.add("Max", graph.add("ReduceL2", part, axes=[1]), np.float32(1e-12))
            scaled.append(graph.add("Mul", part, graph.add("Div", weight, norm)))
        return graph.add("Concat", *scaled, axis=1)

    def iterate_views(self) -> Iterator[View]:
        """Iterate over the views."""
        for view in self.views:
            assert isinstance(view, View)
            yield view

    def _normalize_and_concatenate(self, parts: Sequence[Tensor]) -> Tensor:
        """Scale each part (n, width) to norm sqrt(weight), and concatenate the parts: (n, embedding_dim)."""
        min_norm = max(1e-12, torch.finfo(parts[0].dtype).tiny)
        scaled = [
            part * (weight / torch.linalg.vector_norm(part, dim=1, keepdim=True).clamp_min(min_norm))
            for part, weight in zip(parts, self.weights.sqrt(), strict=True)
        ]
        return torch.cat(scaled, dim=1) if len(scaled) > 1 else scaled[0]


def split_weights(views: Sequence[View], weights: Sequence[float]) -> Tensor:
    """Compute the weight of each part of each view: (parts,) float32, summing to 1, for `Encoder`.

    The weight > 0 of a view is divided equally among the parts of its output, which are normalized separately.
    """
    pairs = zip(views, weights, strict=True)
    parts = [weight / len(view.part_sizes) for view, weight in pairs for _ in view.part_sizes]
    part_weights = torch.tensor(parts, dtype=torch.float32)
    return part_weights / part_weights.sum()


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

    Raises:
        InputTypeError: A size or the temperature is not a number.
        InputError: A size below 1, or a temperature that is not positive.

    Source: Snell, Swersky and Zemel, "Prototypical networks for few-shot learning" (2017), with cosines as in Gidaris
        and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), eq. 3.
    """

    prototypes: Tensor
    """(num_classes, embedding_dim), zero for a class without samples or whose embeddings sum to zero."""
    sums: Tensor
    """(num_classes, embedding_dim), the sum of the embeddings of each class's samples; float32 or float64."""
    counts: Tensor  #: (num_classes,) int64, the number of samples of each class.
    temperature: Tensor  #: 0-d float32, the divisor of the cosines.
    offsets: Tensor  #: (num_classes,) in nats, added to the logits; zero until `set_offsets` is called.

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

    def forward(self, x: Tensor, *, check: bool = False) -> Tensor:
        """Compute logits (n, num_classes). The logits of a row do not depend on the other rows of the batch.

        The logits of a row with NaN or infinity mean nothing. Most are NaN, whose argmax is class 0.

        Args:
            x: (n, ...) real features.
            check: Whether to raise an InputError if a value is NaN or infinite, which waits for the device.
        """
        if check:
            check_features("x", x, dim=self._input_dim)
        scaled, rows = (self.prototypes / self.temperature).T, self._flatten(x)

        def classify(rows: Tensor) -> Tensor:
            return self.mask_logits(batch_invariant_matmul(self._embed(rows), scaled) + self.offsets)

        if is_compiling():  # a loop over chunks would fix the number of rows
            return classify(rows)
        n_rows = min(CHUNK_ROWS, max(1, CHUNK_VALUES // len(scaled)))
        return torch.cat([classify(chunk) for chunk in rows.split(n_rows)])

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
        sums, counts = F.pad(self.sums, (0, 0, 0, n_new)), F.pad(self.counts, (0, n_new))
        self._add_samples_to_sums(sums, counts, features, labels, weights)

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
        """Validate samples, add their embeddings and rounded weights to class sums and counts, and set the results."""
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
        blocks = (self.embed(rows.to(sums.device)).to(sums.dtype) for rows in x.split(MAX_CHUNK_ROWS))
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
