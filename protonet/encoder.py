"""The encoder: views side by side, one embedding.

The embedding is the concatenation of the views' parts, each at the square root of its weight in norm, so that the
cosine of two embeddings is the weighted sum of the parts' cosines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from protonet.views.view import Graph, Source, View

#: Norm below which a mean of unit rows has no direction: it is made of rounding errors.
NO_DIRECTION = 1e-6


def keep_float32(convert: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a conversion, as for `torch.nn.Module._apply`, that leaves some tensors in float32 at least."""
    kept = {id(tensor): tensor for tensor in tensors}

    def apply(tensor: Tensor) -> Tensor:
        converted = convert(tensor)
        if id(tensor) not in kept or not converted.is_floating_point() or converted.element_size() >= 4:
            return converted
        converted = tensor.to(converted.device, torch.float32)
        kept[id(converted)] = converted  # a module that two others share is converted twice
        return converted

    return apply


class Encoder(nn.Module):
    """Features to one embedding: closed-form views (buffers) and learned views (parameters).

    Buffers stay in float32 at least, also after ``.half()`` or ``.bfloat16()``, and autocast is off in `forward`:
    features of different columns differ in scale by more than half precision holds.

    Args:
        views: At least one. Those that read the same share one source.
        weights: (parts,) weight of the cosine of each part of each view, >= 0, summing to 1; see `share_weights`.
        origin: (input_dim,) what columns that lie far from 0 have in common: taken off first, in the precision of the
            features; 0 for all others.
        scale: 0-d or a number, > 0: the magnitude of what is left, divided out so that no unit over- or underflows.

    What is given is kept in float32 buffers.
    """

    weights: Tensor
    origin: Tensor
    scale: Tensor

    def __init__(self, views: Sequence[View], weights: Tensor, *, origin: Tensor, scale: Tensor | float = 1.0) -> None:
        super().__init__()
        sources = list(dict.fromkeys(view.source for view in views if view.source is not None))
        self.sources = nn.ModuleList(sources)  # before the views, which are loaded in turn and derive tensors from them
        self.views = nn.ModuleList(views)
        self.reads = [None if view.source is None else sources.index(view.source) for view in views]
        self.input_dim = len(origin)
        self.sizes = [size for view in views for size in view.sizes]
        for name, value in (("weights", weights), ("origin", origin), ("scale", torch.as_tensor(scale))):
            self.register_buffer(name, value.to(torch.float32).clone())

    @property
    def embedding_dim(self) -> int:
        """Width of the embedding: all views side by side."""
        return sum(self.sizes)

    def list_sources(self) -> list[Source]:
        """Return what the views read, each source once, in the order of the views."""
        return list(self.sources)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Embed features (n, input_dim) as unit rows (n, embedding_dim)."""
        device = x.device.type
        cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if cast else nullcontext():
            return self._embed(x)

    def _embed(self, x: Tensor) -> Tensor:
        x = (x - self.origin).to(self.scale.dtype) / self.scale
        read = [source(x) for source in self.sources]
        parts: list[Tensor] = []
        for view, number in zip(self.list_views(), self.reads, strict=True):
            rows = view(x if number is None else read[number])
            parts += rows.split(view.sizes, dim=1) if len(view.sizes) > 1 else [rows]
        return self._join(parts)

    def normalize(self, embedding: Tensor) -> Tensor:
        """Bring every part of each row (n, embedding_dim) back to its norm, as prototypes need.

        A part without a direction, such as the mean of a class whose rows cancel, becomes zero.
        """
        parts = embedding.split(self.sizes, dim=1)
        norms = [torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in parts]
        sizes = self.weights.sqrt()
        return self._join(
            [
                part.masked_fill(norm < NO_DIRECTION * size, 0)
                for part, norm, size in zip(parts, norms, sizes, strict=True)
            ]
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Encoder:
        super()._apply(keep_float32(fn, self.buffers()), recurse)  # type: ignore[no-untyped-call]
        return self

    def add_to_graph(self, graph: Graph, features: str) -> str:
        """Add the encoder to an ONNX graph, and return the name of the embedding."""
        if bool(self.origin.any()):  # then the features are float64
            features = graph.cast(graph.add("Sub", features, graph.array(self.origin.double())), "FLOAT")
        x = graph.add("Div", features, graph.array(self.scale))
        read = [source.add_to_graph(graph, x) for source in self.list_sources()]
        parts: list[str] = []
        for view, number in zip(self.list_views(), self.reads, strict=True):
            parts += view.add_to_graph(graph, x if number is None else read[number])
        scaled = []
        for part, weight in zip(parts, graph.array(self.weights), strict=True):
            norm = graph.add("Max", graph.add("ReduceL2", part, axes=[1]), np.float32(1e-12))
            scaled.append(graph.add("Mul", part, graph.add("Div", np.sqrt(weight), norm)))
        return graph.add("Concat", *scaled, axis=1)

    def matmul_shapes(self) -> list[tuple[int, int]]:
        """Return the shapes (in, out) of all matrices that one row is multiplied with, shared sources counted once."""
        costly: list[Source | View] = [*self.list_sources(), *self.list_views()]
        return [shape for module in costly for shape in module.matmul_shapes()]

    def list_views(self) -> Iterator[View]:
        """Yield the views in their order."""
        for view in self.views:
            assert isinstance(view, View)
            yield view

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate parts, each at norm sqrt(weight): (n, embedding_dim)."""
        least = max(1e-12, torch.finfo(parts[0].dtype).tiny)
        scaled = [
            part * (weight / torch.linalg.vector_norm(part, dim=1, keepdim=True).clamp_min(least))
            for part, weight in zip(parts, self.weights.sqrt(), strict=True)
        ]
        return torch.cat(scaled, dim=1) if len(scaled) > 1 else scaled[0]


def share_weights(views: Sequence[View], weights: Sequence[float]) -> Tensor:
    """Return the weight of each part (parts,) float32, summing to 1: those of a view share its weight > 0 evenly."""
    parts = [weight / len(view.sizes) for view, weight in zip(views, weights, strict=True) for _ in view.sizes]
    shares = torch.tensor(parts, dtype=torch.float32)
    return shares / shares.sum()
