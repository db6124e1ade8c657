"""A small transformer over the cells of a table, which has read many other tables.

Labelled rows are read first, with a code for each class; they become prototypes and a memory. A new row looks at its
own cells and at that memory, and ends in the same space, where the nearest prototype by cosine is its class. Its
numbers were learned on made tables (`python -m analysis incontext`) and are constants: nothing is trained on a problem.

Source: prior-fitted networks, Mueller et al., "Transformers can do Bayesian inference" (2022); cells that look along
rows and columns as in Hollmann et al., "Accurate predictions on small data with a tabular foundation model" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.views.view import Graph

DIM, LAYERS, HEADS = 64, 4, 4  #: Width, layers, heads of each attention.
CODES = 10  #: Classes that are told apart at a time; one more code stands for a row whose class is not known.
CHANNELS, WAVES = 11, (0.5, 1.0, 2.0)  #: Numbers of a cell, and the frequencies of its rank that are added.
RANK = 1  #: The channel of a cell that holds its rank.

Weights = Mapping[str, Tensor]
Attended = tuple[Tensor, Tensor]


def _list_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "cell": (DIM, CHANNELS + 2 * len(WAVES)),
        "cell_bias": (DIM,),
        "label": (DIM,),
        "codes": (CODES + 1, DIM),
    }
    for layer in range(LAYERS):
        matrices = {"columns": (3 * DIM, DIM), "columns_out": (DIM, DIM), "query": (DIM, DIM), "memory": (2 * DIM, DIM)}
        matrices |= {"rows_out": (DIM, DIM), "up": (2 * DIM, DIM), "down": (DIM, 2 * DIM)}
        vectors = {"up_bias": (2 * DIM,), "down_bias": (DIM,)}
        norms = {f"norm{place}{part}": (DIM,) for place in range(3) for part in ("", "_bias")}
        shapes |= {f"{layer}.{name}": shape for name, shape in {**matrices, **vectors, **norms}.items()}
    return shapes | {"norm": (DIM,), "norm_bias": (DIM,), "out": (DIM, DIM)}


SHAPES = _list_shapes()
#: How many numbers there are.
SIZE = sum(math.prod(shape) for shape in SHAPES.values())


class Memory(NamedTuple):
    """What is kept of labelled rows."""

    attended: tuple[Attended, ...]
    """Keys and values of each layer, (tables, columns + 1, heads, n, DIM / heads); in the last, of labels alone."""
    prototypes: Tensor  #: (tables, CODES, DIM) of unit norm; 0 for a code that no row has.


def unpack(numbers: Tensor) -> dict[str, Tensor]:
    """Return the weights by name, float32, of ``SIZE`` numbers of any shape and precision."""
    parts = numbers.float().flatten().split([math.prod(shape) for shape in SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def list_products(columns: int, labelled: int) -> list[tuple[int, int]]:
    """Return the shapes (in, out) of the matrices that a row of so many columns is multiplied with, memory included."""
    attention = [(DIM, columns + 1), (columns + 1, DIM), (DIM, labelled), (labelled, DIM)]
    layer = [(DIM, 3 * DIM), *[(DIM, DIM)] * 3, (DIM, 2 * DIM), (2 * DIM, DIM), *attention]
    cell = [(CHANNELS + 2 * len(WAVES), DIM), *layer * LAYERS]
    return [*cell * (columns + 1), (DIM, DIM)]


def memorise(weights: Weights, cells: Tensor, codes: Tensor) -> Memory:
    """Read labelled rows.

    Args:
        weights: From `unpack`.
        cells: (tables, n, columns, CHANNELS) float32.
        codes: (tables, n) int64 in [0, CODES): of the rows' classes.
    """
    h, attended = _enter(weights, cells, codes), list[Attended]()
    for layer in range(LAYERS):
        h = _attend_columns(weights, layer, h)
        attended.append(_remember(weights, layer, h))
        h = _finish(weights, layer, h, attended[-1])
    hot = F.one_hot(codes, CODES).to(h.dtype)  # (tables, n, CODES)
    return Memory(tuple(attended), F.normalize(hot.transpose(1, 2) @ _leave(weights, h), dim=2))


def embed(weights: Weights, cells: Tensor, memory: Memory) -> Tensor:
    """Return the embeddings (tables, m, DIM), of unit norm, of rows whose class is not known.

    Args:
        weights: From `unpack`.
        cells: (tables, m, columns, CHANNELS) float32.
        memory: Of the labelled rows of the same tables.
    """
    h = _enter(weights, cells, torch.full(cells.shape[:2], CODES, device=cells.device))
    for layer, attended in enumerate(memory.attended):
        h = _finish(weights, layer, _attend_columns(weights, layer, h), attended)
    return _leave(weights, h)


def _enter(weights: Weights, cells: Tensor, codes: Tensor) -> Tensor:
    """Return (tables, rows, columns + 1, DIM): of each row its label, and its cells, which are told the label, too."""
    angle = 1.8 * cells[..., RANK : RANK + 1]
    waves = [wave(rate * angle) * (angle != 0) for rate in WAVES for wave in (torch.sin, torch.cos)]
    label = weights["codes"][codes][:, :, None]
    read = F.linear(torch.cat([cells, *waves], dim=-1), weights["cell"], weights["cell_bias"])
    return torch.cat([label + weights["label"], read + label], dim=2)


def _attend_columns(weights: Weights, layer: int, h: Tensor) -> Tensor:
    """Let the cells of each row look at one another; in the last layer labels alone do, which are all that is left."""
    tables, rows, columns, _ = h.shape
    z = F.linear(_norm(weights, f"{layer}.norm0", h), weights[f"{layer}.columns"])
    q, k, v = z.view(tables * rows, columns, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
    if layer == LAYERS - 1:
        q, h = q[:, :, :1], h[:, :, :1]
    z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(h.shape)
    return h + F.linear(z, weights[f"{layer}.columns_out"])


def _remember(weights: Weights, layer: int, h: Tensor) -> Attended:
    """Return the keys and values of labelled rows."""
    tables, rows, columns, _ = h.shape
    z = F.linear(_norm(weights, f"{layer}.norm1", h), weights[f"{layer}.memory"])
    k, v = z.view(tables, rows, columns, 2, HEADS, DIM // HEADS).permute(3, 0, 2, 4, 1, 5)
    return k, v


def _finish(weights: Weights, layer: int, h: Tensor, attended: Attended) -> Tensor:
    """Let each cell look at those of labelled rows in its column, and then on its own."""
    tables, rows, columns, _ = h.shape
    k, v = (each.flatten(0, 1) for each in attended)
    q = F.linear(_norm(weights, f"{layer}.norm1", h), weights[f"{layer}.query"])
    q = q.view(tables, rows, columns, HEADS, DIM // HEADS).permute(0, 2, 3, 1, 4).flatten(0, 1)
    z = F.scaled_dot_product_attention(q, k, v)  # (tables * columns, heads, rows, DIM / heads)
    z = z.view(tables, columns, HEADS, rows, DIM // HEADS).permute(0, 3, 1, 2, 4).reshape(h.shape)
    h = h + F.linear(z, weights[f"{layer}.rows_out"])
    z = F.linear(_norm(weights, f"{layer}.norm2", h), weights[f"{layer}.up"], weights[f"{layer}.up_bias"])
    return h + F.linear(F.gelu(z, approximate="tanh"), weights[f"{layer}.down"], weights[f"{layer}.down_bias"])


def _leave(weights: Weights, h: Tensor) -> Tensor:
    """Return what the rows' labels have become, (tables, rows, DIM) of unit norm."""
    return F.normalize(F.linear(_norm(weights, "norm", h[:, :, 0]), weights["out"]), dim=2)


def _norm(weights: Weights, name: str, h: Tensor) -> Tensor:
    return F.layer_norm(h, (DIM,), weights[name], weights[f"{name}_bias"])


def add_to_graph(graph: Graph, weights: Weights, cells: str, memory: Memory, table: int) -> str:
    """Add `embed` to an ONNX graph, of rows' cells (m, columns, CHANNELS), and return the name of (m, DIM).

    Args:
        graph: Where to.
        weights: From `unpack`.
        cells: The value's name.
        memory: Of the labelled rows, which become constants.
        table: The one of the memory's tables.
    """

    def multiply(value: str, name: str) -> str:
        return graph.add("MatMul", value, graph.array(weights[name].T))

    def norm(name: str, value: str) -> str:
        return graph.add("LayerNormalization", value, *(graph.array(weights[name + part]) for part in ("", "_bias")))

    def attend(q: str, k: str | np.ndarray, v: str | np.ndarray) -> str:
        scores = graph.add("Mul", graph.add("MatMul", q, k), np.float32((DIM // HEADS) ** -0.5))
        return graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v)

    def take(value: str, place: int, axis: int) -> str:
        return graph.add("Squeeze", graph.add("Gather", value, np.array([place]), axis=axis), np.array([axis]))

    columns = memory.attended[0][0].shape[1]
    rank = graph.add("Gather", cells, np.array([RANK]), axis=2)
    there = graph.cast(graph.add("Abs", graph.add("Sign", rank)), "FLOAT")
    waves = [
        graph.add("Mul", there, graph.add(wave, graph.add("Mul", rank, np.float32(1.8 * rate))))
        for rate in WAVES
        for wave in ("Sin", "Cos")
    ]
    unknown = weights["codes"][CODES]
    h = multiply(graph.add("Concat", cells, *waves, axis=2), "cell")
    h = graph.add("Add", h, graph.array(weights["cell_bias"] + unknown))
    first = graph.add("Mul", graph.add("Gather", h, np.array([0]), axis=1), np.float32(0))
    first = graph.add("Add", first, graph.array(weights["label"] + unknown))
    h = graph.add("Concat", first, h, axis=1)  # (m, columns, DIM)
    for layer, (keys, values) in enumerate(memory.attended):
        z = multiply(norm(f"{layer}.norm0", h), f"{layer}.columns")
        z = graph.add("Reshape", z, np.array([-1, columns, 3, HEADS, DIM // HEADS]))
        q, k, v = (
            take(graph.add("Transpose", z, perm=perm), part, 0)
            for part, perm in enumerate(([2, 0, 3, 1, 4], [2, 0, 3, 4, 1], [2, 0, 3, 1, 4]))
        )
        if layer == LAYERS - 1:
            columns = 1
            q, h = graph.add("Gather", q, np.array([0]), axis=2), graph.add("Gather", h, np.array([0]), axis=1)
        z = graph.add("Transpose", attend(q, k, v), perm=[0, 2, 1, 3])
        z = graph.add("Reshape", z, np.array([-1, columns, DIM]))
        h = graph.add("Add", h, multiply(z, f"{layer}.columns_out"))
        q = multiply(norm(f"{layer}.norm1", h), f"{layer}.query")
        q = graph.add("Reshape", q, np.array([-1, columns, HEADS, DIM // HEADS]))
        q = graph.add("Transpose", q, perm=[1, 2, 0, 3])  # (columns, heads, m, DIM / heads)
        z = attend(q, graph.array(keys[table].transpose(2, 3)), graph.array(values[table]))
        z = graph.add("Reshape", graph.add("Transpose", z, perm=[2, 0, 1, 3]), np.array([-1, columns, DIM]))
        h = graph.add("Add", h, multiply(z, f"{layer}.rows_out"))
        z = graph.add(
            "Add", multiply(norm(f"{layer}.norm2", h), f"{layer}.up"), graph.array(weights[f"{layer}.up_bias"])
        )
        cube = graph.add("Mul", graph.add("Mul", z, z), graph.add("Mul", z, np.float32(0.044715)))
        bend = graph.add("Tanh", graph.add("Mul", graph.add("Add", z, cube), np.float32(math.sqrt(2 / math.pi))))
        z = graph.add("Mul", graph.add("Mul", z, np.float32(0.5)), graph.add("Add", bend, np.float32(1)))
        z = graph.add("Add", multiply(z, f"{layer}.down"), graph.array(weights[f"{layer}.down_bias"]))
        h = graph.add("Add", h, z)
    return multiply(norm("norm", take(h, 0, 1)), "out")
