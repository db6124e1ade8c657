"""A small transformer over the cells of a table, pretrained on many other tables.

Labelled rows are encoded first, with a code for each class; they become prototypes and keys and values of attention. A
new row attends to its own cells and to the labelled rows, and is embedded in the same space, where the nearest
prototype by cosine is its class. The weights were trained on synthetic and real tables (`python -m analysis incontext`)
and are constants: nothing is trained on a new table.

Source: prior-fitted networks, Mueller et al., "Transformers can do Bayesian inference" (2022); attention along rows and
columns as in Hollmann et al., "Accurate predictions on small data with a tabular foundation model" (2025).
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

DIM, LAYERS, ATTENTION_HEADS = 64, 4, 4
CLASS_CODES = 10  #: Number of codes for classes; one more code means that the class is unknown.
CELL_CHANNELS = 11  #: Numbers that encode a cell, from `protonet.views.tabular_transformer.Cells`.
RANK_CHANNEL = 1  #: The channel that holds the rank.
WAVE_FREQUENCIES = (0.5, 1.0, 2.0)  #: Frequencies of the sinusoidal encoding of the rank.

TransformerWeights = Mapping[str, Tensor]
KeysAndValues = tuple[Tensor, Tensor]


def _list_shapes() -> dict[str, tuple[int, ...]]:
    """List the shape of each weight by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "cell": (DIM, CELL_CHANNELS + 2 * len(WAVE_FREQUENCIES)),
        "cell_bias": (DIM,),
        "label": (DIM,),
        "codes": (CLASS_CODES + 1, DIM),
    }
    for layer in range(LAYERS):
        matrices = {"columns": (3 * DIM, DIM), "columns_out": (DIM, DIM), "query": (DIM, DIM), "memory": (2 * DIM, DIM)}
        matrices |= {"rows_out": (DIM, DIM), "up": (2 * DIM, DIM), "down": (DIM, 2 * DIM)}
        vectors = {"up_bias": (2 * DIM,), "down_bias": (DIM,)}
        norms = {f"norm{index}{part}": (DIM,) for index in range(3) for part in ("", "_bias")}
        shapes |= {f"{layer}.{name}": shape for name, shape in {**matrices, **vectors, **norms}.items()}
    return shapes | {"norm": (DIM,), "norm_bias": (DIM,), "out": (DIM, DIM)}


WEIGHT_SHAPES = _list_shapes()
#: The number of weights.
WEIGHT_COUNT = sum(math.prod(shape) for shape in WEIGHT_SHAPES.values())


class Memory(NamedTuple):
    """The encoding of labelled rows."""

    attended: tuple[KeysAndValues, ...]
    """Keys and values of each layer, (tables, columns + 1, heads, n, DIM / heads); of labels alone in the last."""
    prototypes: Tensor  #: (tables, CLASS_CODES, DIM) of unit norm; 0 for a code without rows.


def unpack_weights(packed: Tensor) -> dict[str, Tensor]:
    """Split a tensor of ``WEIGHT_COUNT`` elements, of any shape and precision, into float32 weights by name."""
    parts = packed.float().flatten().split([math.prod(shape) for shape in WEIGHT_SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(WEIGHT_SHAPES.items(), parts, strict=True)}


def list_matmul_shapes(columns: int, labelled: int) -> list[tuple[int, int]]:
    """List the shapes (in, out) of the matrices that a row is multiplied with, including attention.

    Args:
        columns: The number of columns of the table.
        labelled: The number of labelled rows.
    """
    attention = [(DIM, columns + 1), (columns + 1, DIM), (DIM, labelled), (labelled, DIM)]
    layer = [(DIM, 3 * DIM), *[(DIM, DIM)] * 3, (DIM, 2 * DIM), (2 * DIM, DIM), *attention]
    cell = [(CELL_CHANNELS + 2 * len(WAVE_FREQUENCIES), DIM), *layer * LAYERS]
    return [*cell * (columns + 1), (DIM, DIM)]


def encode_labelled_rows(weights: TransformerWeights, cells: Tensor, codes: Tensor) -> Memory:
    """Encode labelled rows as prototypes, keys and values.

    Args:
        weights: From `unpack_weights`.
        cells: (tables, n, columns, CELL_CHANNELS) float32.
        codes: (tables, n) int64 in [0, CLASS_CODES): the codes of the rows' classes.
    """
    h, attended = _embed_cells(weights, cells, codes), list[KeysAndValues]()
    for layer in range(LAYERS):
        h = _attend_to_columns(weights, layer, h)
        attended.append(_compute_keys_and_values(weights, layer, h))
        h = _attend_to_labelled_rows(weights, layer, h, attended[-1])
    one_hot = F.one_hot(codes, CLASS_CODES).to(h.dtype)  # (tables, n, CLASS_CODES)
    return Memory(tuple(attended), F.normalize(one_hot.transpose(1, 2) @ _project(weights, h), dim=2))


def embed_rows(weights: TransformerWeights, cells: Tensor, memory: Memory) -> Tensor:
    """Embed rows of unknown class: (tables, m, DIM) of unit norm.

    Args:
        weights: From `unpack_weights`.
        cells: (tables, m, columns, CELL_CHANNELS) float32; (1, m, columns, CELL_CHANNELS) for the same rows in all.
        memory: The encoding of the labelled rows of the same tables.
    """
    h = _embed_cells(weights, cells, torch.full(cells.shape[:2], CLASS_CODES, device=cells.device))
    for layer, attended in enumerate(memory.attended):
        h = _attend_to_labelled_rows(weights, layer, _attend_to_columns(weights, layer, h), attended)
    return _project(weights, h)


def _embed_cells(weights: TransformerWeights, cells: Tensor, codes: Tensor) -> Tensor:
    """Compute the input tokens (tables, rows, columns + 1, DIM): a label token, and cells plus the label's code."""
    angle = 1.8 * cells[..., RANK_CHANNEL : RANK_CHANNEL + 1]
    waves = [
        wave(frequency * angle) * (angle != 0) for frequency in WAVE_FREQUENCIES for wave in (torch.sin, torch.cos)
    ]
    label = weights["codes"][codes][:, :, None]
    embedded = F.linear(torch.cat([cells, *waves], dim=-1), weights["cell"], weights["cell_bias"])
    return torch.cat([label + weights["label"], embedded + label], dim=2)


def _attend_to_columns(weights: TransformerWeights, layer: int, h: Tensor) -> Tensor:
    """Apply attention among the tokens of each row; the last layer computes the label token alone."""
    tables, rows, columns, _ = h.shape
    z = F.linear(_norm(weights, f"{layer}.norm0", h), weights[f"{layer}.columns"])
    q, k, v = z.view(tables * rows, columns, 3, ATTENTION_HEADS, DIM // ATTENTION_HEADS).permute(2, 0, 3, 1, 4)
    if layer == LAYERS - 1:
        q, h = q[:, :, :1], h[:, :, :1]
    z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(h.shape)
    return h + F.linear(z, weights[f"{layer}.columns_out"])


def _compute_keys_and_values(weights: TransformerWeights, layer: int, h: Tensor) -> KeysAndValues:
    """Compute the keys and values of labelled rows."""
    tables, rows, columns, _ = h.shape
    z = F.linear(_norm(weights, f"{layer}.norm1", h), weights[f"{layer}.memory"])
    k, v = z.view(tables, rows, columns, 2, ATTENTION_HEADS, DIM // ATTENTION_HEADS).permute(3, 0, 2, 4, 1, 5)
    return k, v


def _attend_to_labelled_rows(weights: TransformerWeights, layer: int, h: Tensor, attended: KeysAndValues) -> Tensor:
    """Apply attention of each token to the labelled rows in its column, and then the feed-forward block.

    Tokens h (1, rows, columns, DIM) are shared by all tables: their layers before the first attention run once.
    """
    tables, (_, rows, columns, _) = len(attended[0]), h.shape
    k, v = (value.flatten(0, 1) for value in attended)
    q = F.linear(_norm(weights, f"{layer}.norm1", h), weights[f"{layer}.query"])
    q = q.view(len(h), rows, columns, ATTENTION_HEADS, DIM // ATTENTION_HEADS).expand(tables, -1, -1, -1, -1)
    q = q.permute(0, 2, 3, 1, 4).flatten(0, 1)
    z = F.scaled_dot_product_attention(q, k, v)  # (tables * columns, heads, rows, DIM / heads)
    z = z.view(tables, columns, ATTENTION_HEADS, rows, DIM // ATTENTION_HEADS).permute(0, 3, 1, 2, 4)
    h = h + F.linear(z.reshape(tables, rows, columns, DIM), weights[f"{layer}.rows_out"])
    z = F.linear(_norm(weights, f"{layer}.norm2", h), weights[f"{layer}.up"], weights[f"{layer}.up_bias"])
    return h + F.linear(F.gelu(z, approximate="tanh"), weights[f"{layer}.down"], weights[f"{layer}.down_bias"])


def _project(weights: TransformerWeights, h: Tensor) -> Tensor:
    """Project the label tokens to embeddings (tables, rows, DIM) of unit norm."""
    return F.normalize(F.linear(_norm(weights, "norm", h[:, :, 0]), weights["out"]), dim=2)


def _norm(weights: TransformerWeights, name: str, h: Tensor) -> Tensor:
    return F.layer_norm(h, (DIM,), weights[name], weights[f"{name}_bias"])


def add_to_graph(graph: Graph, weights: TransformerWeights, cells: str, memory: Memory, table: int) -> str:
    """Add `embed_rows` to an ONNX graph, and return the name of the embeddings (m, DIM).

    Args:
        graph: The graph that is extended.
        weights: From `unpack_weights`.
        cells: The name of the value (m, columns, CELL_CHANNELS).
        memory: The encoding of the labelled rows, which becomes constants.
        table: The index of the table in the memory.
    """

    def multiply(value: str, name: str) -> str:
        return graph.add("MatMul", value, graph.array(weights[name].T))

    def norm(name: str, value: str) -> str:
        return graph.add("LayerNormalization", value, *(graph.array(weights[name + part]) for part in ("", "_bias")))

    def attend(q: str, k: str | np.ndarray, v: str | np.ndarray) -> str:
        scores = graph.add("Mul", graph.add("MatMul", q, k), np.float32((DIM // ATTENTION_HEADS) ** -0.5))
        return graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v)

    def take(value: str, index: int, axis: int) -> str:
        return graph.add("Squeeze", graph.add("Gather", value, np.array([index]), axis=axis), np.array([axis]))

    columns = memory.attended[0][0].shape[1]
    rank = graph.add("Gather", cells, np.array([RANK_CHANNEL]), axis=2)
    nonzero = graph.cast(graph.add("Abs", graph.add("Sign", rank)), "FLOAT")
    waves = [
        graph.add("Mul", nonzero, graph.add(wave, graph.add("Mul", rank, np.float32(1.8 * frequency))))
        for frequency in WAVE_FREQUENCIES
        for wave in ("Sin", "Cos")
    ]
    unknown = weights["codes"][CLASS_CODES]
    h = multiply(graph.add("Concat", cells, *waves, axis=2), "cell")
    h = graph.add("Add", h, graph.array(weights["cell_bias"] + unknown))
    label = graph.add("Mul", graph.add("Gather", h, np.array([0]), axis=1), np.float32(0))
    label = graph.add("Add", label, graph.array(weights["label"] + unknown))
    h = graph.add("Concat", label, h, axis=1)  # (m, columns, DIM)
    for layer, (keys, values) in enumerate(memory.attended):
        z = multiply(norm(f"{layer}.norm0", h), f"{layer}.columns")
        z = graph.add("Reshape", z, np.array([-1, columns, 3, ATTENTION_HEADS, DIM // ATTENTION_HEADS]))
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
        q = graph.add("Reshape", q, np.array([-1, columns, ATTENTION_HEADS, DIM // ATTENTION_HEADS]))
        q = graph.add("Transpose", q, perm=[1, 2, 0, 3])  # (columns, heads, m, DIM / heads)
        z = attend(q, graph.array(keys[table].transpose(2, 3)), graph.array(values[table]))
        z = graph.add("Reshape", graph.add("Transpose", z, perm=[2, 0, 1, 3]), np.array([-1, columns, DIM]))
        h = graph.add("Add", h, multiply(z, f"{layer}.rows_out"))
        z = graph.add(
            "Add", multiply(norm(f"{layer}.norm2", h), f"{layer}.up"), graph.array(weights[f"{layer}.up_bias"])
        )
        # GELU in the tanh approximation
        cube = graph.add("Mul", graph.add("Mul", z, z), graph.add("Mul", z, np.float32(0.044715)))
        tanh = graph.add("Tanh", graph.add("Mul", graph.add("Add", z, cube), np.float32(math.sqrt(2 / math.pi))))
        z = graph.add("Mul", graph.add("Mul", z, np.float32(0.5)), graph.add("Add", tanh, np.float32(1)))
        z = graph.add("Add", multiply(z, f"{layer}.down"), graph.array(weights[f"{layer}.down_bias"]))
        h = graph.add("Add", h, z)
    return multiply(norm("norm", take(h, 0, 1)), "out")
