"""The encoder: the concatenation of several feature maps ("views") to one embedding.

The output of a view has one or more parts, which are adjacent columns. Each part is scaled so that its norm is the
square root of its weight. The cosine of two embeddings then is the weighted sum of the cosines of their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from protonet.views.view import OnnxGraph, Source, View

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
        views: The views, at least one. Views that read the same map of the features share one `Source`.
        weights: (parts,) the weight of each part of each view, >= 0, summing to 1; see `split_weights`. A part is a
            block of output columns that is normalized by itself.
        origin: (input_dim,) values that are subtracted from the features; nonzero for columns far from 0.
        scale: Divisor > 0 of the centred features, so that large or small units of measurement do not overflow or
            underflow.

    Weights, origin and scale are stored in float32 buffers.
    """

    weights: Tensor
    origin: Tensor
    scale: Tensor

    def __init__(self, views: Sequence[View], weights: Tensor, *, origin: Tensor, scale: Tensor | float = 1.0) -> None:
        super().__init__()
        sources = list(dict.fromkeys(view.source for view in views if view.source is not None))
        self.sources = nn.ModuleList(sources)  # loaded before the views, which derive constants from them
        self.views = nn.ModuleList(views)
        self.source_index = [None if view.source is None else sources.index(view.source) for view in views]
        self.input_dim = len(origin)
        self.sizes = [size for view in views for size in view.sizes]
        for name, value in (("weights", weights), ("origin", origin), ("scale", torch.as_tensor(scale))):
            self.register_buffer(name, value.to(torch.float32).clone())

    @property
    def embedding_dim(self) -> int:
        """Width of the embedding: the sum of the widths of the outputs of all views."""
        return sum(self.sizes)

    def list_sources(self) -> list[Source]:
        """List the distinct feature maps (`Source`) whose outputs the views read, in the order of the views."""
        return list(self.sources)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Compute embeddings (n, embedding_dim) of unit norm of features x (n, input_dim)."""
        device = x.device.type
        cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if cast else nullcontext():
            return self._embed(x)

    def _embed(self, x: Tensor) -> Tensor:
        x = (x - self.origin).to(self.scale.dtype) / self.scale
        mapped = [source(x) for source in self.sources]
        parts: list[Tensor] = []
        for view, index in zip(self.list_views(), self.source_index, strict=True):
            output = view(x if index is None else mapped[index])
            parts += output.split(view.sizes, dim=1) if len(view.sizes) > 1 else [output]
        return self._join(parts)

    def normalize(self, embedding: Tensor) -> Tensor:
        """Normalize rows (n, embedding_dim), such as class means, as embeddings are: part by part.

        Each part, a block of columns, is scaled so that its norm is the square root of its weight. A part whose norm is
        nearly zero, such as the mean of opposite rows, becomes zero.
        """
        parts: list[Tensor] = []
        for part, size in zip(embedding.split(self.sizes, dim=1), self.weights.sqrt(), strict=True):
            norm = torch.linalg.vector_norm(part, dim=1, keepdim=True)
            parts.append(part.masked_fill(norm < MIN_MEAN_NORM * size, 0))
        return self._join(parts)

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
            features = graph.cast(graph.add("Sub", features, graph.array(self.origin.double())), "FLOAT")
        x = graph.add("Div", features, graph.array(self.scale))
        mapped = [source.add_to_graph(graph, x) for source in self.list_sources()]
        parts: list[str] = []
        for view, index in zip(self.list_views(), self.source_index, strict=True):
            parts += view.add_to_graph(graph, x if index is None else mapped[index])
        scaled = []
        for part, weight in zip(parts, graph.array(self.weights), strict=True):
            norm = graph.add("Max", graph.add("ReduceL2", part, axes=[1]), np.float32(1e-12))
            scaled.append(graph.add("Mul", part, graph.add("Div", np.sqrt(weight), norm)))
        return graph.add("Concat", *scaled, axis=1)

    def list_views(self) -> Iterator[View]:
        """Iterate over the views."""
        for view in self.views:
            assert isinstance(view, View)
            yield view

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        """Scale each part (n, width) to a norm of the square root of its weight; concatenate: (n, embedding_dim)."""
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
    parts = [weight / len(view.sizes) for view, weight in zip(views, weights, strict=True) for _ in view.sizes]
    part_weights = torch.tensor(parts, dtype=torch.float32)
    return part_weights / part_weights.sum()
