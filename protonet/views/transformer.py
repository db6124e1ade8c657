"""A small transformer over the cells of a table, pretrained on many other tables.

Labelled rows are encoded first, with a code for each class. They become prototypes, and keys and values of attention. A
new row attends to its own cells and to the labelled rows, and is embedded in the same space, where the nearest
prototype by cosine is its class. The first layers have a token for each cell and attend to columns and rows; the
others have one token for each row, and attend to rows alone. The weights were trained on synthetic and real tables
(`python -m analysis incontext`) and are constants: nothing is trained on a new table.

Source: prior-fitted networks, Mueller et al., "Transformers can do Bayesian inference" (2022); attention along rows and
columns as in Hollmann et al., "Accurate predictions on small data with a tabular foundation model" (2025); layers with
one token for each row as in Qu et al., "TabICL: a tabular foundation model for in-context learning" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.views.onnx_graph import OnnxGraph

DIM, N_CELL_LAYERS = 64, 4  #: Width of embeddings and of tokens of cells, and number of layers with a token per cell.
ROW_DIM, N_ROW_LAYERS = 128, 9  #: Width of tokens of rows, and number of layers with one token per row.
HEAD_DIM = 16  #: Width of an attention head.
N_LAYERS = N_CELL_LAYERS + N_ROW_LAYERS
N_CLASS_CODES = 10  #: Number of class codes. One more code is that of rows without a label.
N_CELL_CHANNELS = 11  #: Number of values that encode a cell; see `protonet.views.tabular_transformer.CellEncoder`.
RANK_CHANNEL = 1  #: Index of the rank of a cell among these values.
WAVE_FREQUENCIES = (0.5, 1.0, 2.0)  #: Frequencies of the sinusoidal encoding of the rank.

TransformerWeights = Mapping[str, Tensor]
KeysAndValues = tuple[Tensor, Tensor]


def _list_weight_shapes() -> dict[str, tuple[int, ...]]:
    """Compute the shape of each weight tensor by name, in the order in which `unpack_weights` expects them."""
    shapes: dict[str, tuple[int, ...]] = {
        "cell": (DIM, N_CELL_CHANNELS + 2 * len(WAVE_FREQUENCIES)),
        "cell_bias": (DIM,),
        "label": (DIM,),
        "codes": (N_CLASS_CODES + 1, DIM),
    }
    for layer in range(N_LAYERS):
        dim = DIM if layer < N_CELL_LAYERS else ROW_DIM
        parts: dict[str, tuple[int, ...]] = {"query": (dim, dim), "memory": (2 * dim, dim), "rows_out": (dim, dim)}
        parts |= {"up": (2 * dim, dim), "up_bias": (2 * dim,), "down": (dim, 2 * dim), "down_bias": (dim,)}
        parts |= {f"norm{index}{part}": (dim,) for index in (1, 2) for part in ("", "_bias")}
        if layer < N_CELL_LAYERS:
            parts |= {"columns": (3 * dim, dim), "columns_out": (dim, dim), "norm0": (dim,), "norm0_bias": (dim,)}
        shapes |= {f"{layer}.{name}": shape for name, shape in parts.items()}
    shapes |= {"row": (ROW_DIM, DIM), "row_codes": (N_CLASS_CODES + 1, ROW_DIM)}
    return shapes | {"norm": (ROW_DIM,), "norm_bias": (ROW_DIM,), "out": (DIM, ROW_DIM)}


WEIGHT_SHAPES = _list_weight_shapes()
#: The number of weights of the transformer.
WEIGHT_COUNT = sum(math.prod(shape) for shape in WEIGHT_SHAPES.values())


class EncodedContext(NamedTuple):
    """The encoding of the n labelled rows of one or more tables, to which new rows attend."""

    keys_and_values: tuple[KeysAndValues, ...]
    """For each layer, the keys and the values: both (tables, columns + 1, heads, n, HEAD_DIM), and both (tables, 1,
    heads, n, HEAD_DIM) from the last layer with a token per cell on."""
    prototypes: Tensor  #: (tables, N_CLASS_CODES, DIM): prototypes of unit norm; 0 for a class code without rows.


def unpack_weights(packed: Tensor) -> dict[str, Tensor]:
    """Split a tensor of ``WEIGHT_COUNT`` elements, of any shape and precision, into float32 weights by name."""
    parts = packed.float().flatten().split([math.prod(shape) for shape in WEIGHT_SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(WEIGHT_SHAPES.items(), parts, strict=True)}


def count_multiplications(columns: int, labelled: int) -> int:
    """Compute the number of multiplications that embed one row of a table.

    ``columns`` is the number of table columns, ``labelled`` the number of labelled rows that the row attends to.
    """

    def count_layer(dim: int) -> int:
        """Count multiplications of attention to labelled rows and feed-forward block for a token of width ``dim``."""
        return 6 * dim**2 + 2 * dim * labelled

    tokens = columns + 1
    cell_layer = 4 * DIM**2 + 2 * DIM * tokens + count_layer(DIM)
    cell = DIM * (N_CELL_CHANNELS + 2 * len(WAVE_FREQUENCIES)) + N_CELL_LAYERS * cell_layer
    return tokens * cell + 2 * DIM * ROW_DIM + N_ROW_LAYERS * count_layer(ROW_DIM)


def encode_labelled_rows(weights: TransformerWeights, cells: Tensor, codes: Tensor) -> EncodedContext:
    """Compute the encoding of labelled rows: prototypes, and the keys and values to which new rows attend.

    ``cells`` (tables, n, columns, N_CELL_CHANNELS) are float32; ``codes`` (tables, n) are those of the rows' classes.
    """
    h, attended = _embed_cells(weights, cells, codes), list[KeysAndValues]()
    for layer in range(N_LAYERS):
        h = _attend_or_widen_tokens(weights, layer, h, codes)
        attended.append(_compute_keys_and_values(weights, layer, h))
        h = _attend_to_labelled_rows(weights, layer, h, attended[-1])
    sums = one_hot(codes, N_CLASS_CODES, h.dtype).transpose(1, 2) @ _project_to_embeddings(weights, h)
    return EncodedContext(tuple(attended), F.normalize(sums, dim=2))


def embed_rows(weights: TransformerWeights, cells: Tensor, context: EncodedContext) -> Tensor:
    """Embed m rows without labels: (tables, m, DIM) of unit norm.

    ``cells`` are (tables, m, columns, N_CELL_CHANNELS) float32, or (1, m, ...) if all tables have the same rows.
    ``context`` is the encoding of the labelled rows.
    """
    codes = torch.full(cells.shape[:2], N_CLASS_CODES, device=cells.device)
    h = _embed_cells(weights, cells, codes)
    for layer, attended in enumerate(context.keys_and_values):
        h = _attend_to_labelled_rows(weights, layer, _attend_or_widen_tokens(weights, layer, h, codes), attended)
    return _project_to_embeddings(weights, h)


def one_hot(codes: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Encode codes (tables, rows) in [0, count) as one-hot vectors (tables, rows, count).

    Unlike ``torch.nn.functional.one_hot``, it can be captured in a CUDA graph.
    """
    return (codes[..., None] == torch.arange(count, device=codes.device)).to(dtype)


def _embed_codes(codes: Tensor, embeddings: Tensor) -> Tensor:
    """Look up the embedding of each class code: (tables, rows, 1, dim), by products, whose gradient is faster."""
    return (one_hot(codes, len(embeddings), embeddings.dtype) @ embeddings)[:, :, None]


def _embed_cells(weights: TransformerWeights, cells: Tensor, codes: Tensor) -> Tensor:
    """Compute the input tokens (tables, rows, columns + 1, DIM): one for the label, and one for each cell."""
    angle = 1.8 * cells[..., RANK_CHANNEL : RANK_CHANNEL + 1]
    waves = [
        wave(frequency * angle) * (angle != 0) for frequency in WAVE_FREQUENCIES for wave in (torch.sin, torch.cos)
    ]
    label = _embed_codes(codes, weights["codes"])
    embedded = F.linear(torch.cat([cells, *waves], dim=-1), weights["cell"], weights["cell_bias"])
    return torch.cat([label + weights["label"], embedded + label], dim=2)


def _attend_or_widen_tokens(weights: TransformerWeights, layer: int, h: Tensor, codes: Tensor) -> Tensor:
    """Compute the tokens h of a layer before they attend to labelled rows; cell layers first attend to columns."""
    if layer < N_CELL_LAYERS:
        return _attend_to_columns(weights, layer, h)
    if layer > N_CELL_LAYERS:
        return h
    return F.linear(h, weights["row"]) + _embed_codes(codes, weights["row_codes"])


def _attend_to_columns(weights: TransformerWeights, layer: int, h: Tensor) -> Tensor:
    """Apply self-attention among the tokens h (tables, rows, columns + 1, DIM) of a row; the last layer returns one."""
    tables, rows, columns, dim = h.shape
    z = F.linear(_layer_norm(weights, f"{layer}.norm0", h), weights[f"{layer}.columns"])
    q, k, v = z.view(tables * rows, columns, 3, dim // HEAD_DIM, HEAD_DIM).permute(2, 0, 3, 1, 4)
    if layer == N_CELL_LAYERS - 1:
        q, h = q[:, :, :1], h[:, :, :1]
    z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(h.shape)
    return h + F.linear(z, weights[f"{layer}.columns_out"])


def _compute_keys_and_values(weights: TransformerWeights, layer: int, h: Tensor) -> KeysAndValues:
    """Compute the attention keys and values of labelled rows in a layer, from tokens h (tables, rows, columns, dim)."""
    tables, rows, columns, dim = h.shape
    z = F.linear(_layer_norm(weights, f"{layer}.norm1", h), weights[f"{layer}.memory"])
    k, v = z.view(tables, rows, columns, 2, dim // HEAD_DIM, HEAD_DIM).permute(3, 0, 2, 4, 1, 5)
    return k, v


def _attend_to_labelled_rows(weights: TransformerWeights, layer: int, h: Tensor, attended: KeysAndValues) -> Tensor:
    """Apply attention of tokens h (1 or tables, rows, columns, dim) to labelled rows, then the feed-forward block."""
    tables, (_, rows, columns, dim) = len(attended[0]), h.shape
    k, v = (value.flatten(0, 1) for value in attended)
    q = F.linear(_layer_norm(weights, f"{layer}.norm1", h), weights[f"{layer}.query"])
    q = q.view(len(h), rows, columns, dim // HEAD_DIM, HEAD_DIM).expand(tables, -1, -1, -1, -1)
    q = q.permute(0, 2, 3, 1, 4).flatten(0, 1)
    z = F.scaled_dot_product_attention(q, k, v)  # (tables * columns, heads, rows, HEAD_DIM)
    z = z.view(tables, columns, dim // HEAD_DIM, rows, HEAD_DIM).permute(0, 3, 1, 2, 4)
    h = h + F.linear(z.reshape(tables, rows, columns, dim), weights[f"{layer}.rows_out"])
    z = F.linear(_layer_norm(weights, f"{layer}.norm2", h), weights[f"{layer}.up"], weights[f"{layer}.up_bias"])
    return h + F.linear(F.gelu(z, approximate="tanh"), weights[f"{layer}.down"], weights[f"{layer}.down_bias"])


def _project_to_embeddings(weights: TransformerWeights, h: Tensor) -> Tensor:
    """Project the tokens h (tables, rows, 1, ROW_DIM) to embeddings (tables, rows, DIM) of unit norm."""
    return F.normalize(F.linear(_layer_norm(weights, "norm", h[:, :, 0]), weights["out"]), dim=2)


def _layer_norm(weights: TransformerWeights, name: str, h: Tensor) -> Tensor:
    """Apply layer normalization to tokens h (..., dim), with the gain and bias of the given name in ``weights``."""
    return F.layer_norm(h, h.shape[-1:], weights[name], weights[f"{name}_bias"])


def add_to_graph(graph: OnnxGraph, weights: TransformerWeights, cells: str, context: EncodedContext, table: int) -> str:
    """Add `embed_rows` to an ONNX graph; return the name of the value with the embeddings (m, DIM).

    ``cells`` is the name of the value (m, columns, N_CELL_CHANNELS), and ``table`` an index in ``context``, which
    becomes constants.
    """

    def multiply(value: str, name: str) -> str:
        return graph.add("MatMul", value, weights[name].T)

    def layer_norm(name: str, value: str) -> str:
        return graph.add("LayerNormalization", value, *(weights[name + part] for part in ("", "_bias")))

    def attend(q: str, k: str | Tensor, v: str | Tensor) -> str:
        scores = graph.add("Mul", graph.add("MatMul", q, k), np.float32(HEAD_DIM**-0.5))
        return graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v)

    def gather(value: str, index: int, axis: int) -> str:
        return graph.add("Squeeze", graph.add("Gather", value, np.array([index]), axis=axis), np.array([axis]))

    columns = context.keys_and_values[0][0].shape[1]
    rank = graph.add("Gather", cells, np.array([RANK_CHANNEL]), axis=2)
    nonzero = graph.cast(graph.add("Abs", graph.add("Sign", rank)), "FLOAT")
    waves = [
        graph.add("Mul", nonzero, graph.add(wave, graph.add("Mul", rank, np.float32(1.8 * frequency))))
        for frequency in WAVE_FREQUENCIES
        for wave in ("Sin", "Cos")
    ]
    unknown = weights["codes"][N_CLASS_CODES]
    h = multiply(graph.add("Concat", cells, *waves, axis=2), "cell")
    h = graph.add("Add", h, weights["cell_bias"] + unknown)
    label = graph.add("Mul", graph.add("Gather", h, np.array([0]), axis=1), np.float32(0))
    label = graph.add("Add", label, weights["label"] + unknown)
    h = graph.add("Concat", label, h, axis=1)  # (m, columns, DIM)
    dim = DIM
    for layer, (keys, values) in enumerate(context.keys_and_values):
        if layer < N_CELL_LAYERS:
            z = multiply(layer_norm(f"{layer}.norm0", h), f"{layer}.columns")
            z = graph.add("Reshape", z, np.array([-1, columns, 3, dim // HEAD_DIM, HEAD_DIM]))
            q, k, v = (
                gather(graph.add("Transpose", z, perm=perm), part, 0)
                for part, perm in enumerate(([2, 0, 3, 1, 4], [2, 0, 3, 4, 1], [2, 0, 3, 1, 4]))
            )
            if layer == N_CELL_LAYERS - 1:
                columns = 1
                q, h = graph.add("Gather", q, np.array([0]), axis=2), graph.add("Gather", h, np.array([0]), axis=1)
            z = graph.add("Transpose", attend(q, k, v), perm=[0, 2, 1, 3])
            z = graph.add("Reshape", z, np.array([-1, columns, dim]))
            h = graph.add("Add", h, multiply(z, f"{layer}.columns_out"))
        elif layer == N_CELL_LAYERS:
            dim = ROW_DIM
            h = graph.add("Add", multiply(h, "row"), weights["row_codes"][N_CLASS_CODES])
        q = multiply(layer_norm(f"{layer}.norm1", h), f"{layer}.query")
        q = graph.add("Reshape", q, np.array([-1, columns, dim // HEAD_DIM, HEAD_DIM]))
        q = graph.add("Transpose", q, perm=[1, 2, 0, 3])  # (columns, heads, m, HEAD_DIM)
        z = attend(q, keys[table].transpose(2, 3), values[table])
        z = graph.add("Reshape", graph.add("Transpose", z, perm=[2, 0, 1, 3]), np.array([-1, columns, dim]))
        h = graph.add("Add", h, multiply(z, f"{layer}.rows_out"))
        z = graph.add("Add", multiply(layer_norm(f"{layer}.norm2", h), f"{layer}.up"), weights[f"{layer}.up_bias"])
        # GELU in the tanh approximation
        cube = graph.add("Mul", graph.add("Mul", z, z), graph.add("Mul", z, np.float32(0.044715)))
        tanh = graph.add("Tanh", graph.add("Mul", graph.add("Add", z, cube), np.float32(math.sqrt(2 / math.pi))))
        z = graph.add("Mul", graph.add("Mul", z, np.float32(0.5)), graph.add("Add", tanh, np.float32(1)))
        z = graph.add("Add", multiply(z, f"{layer}.down"), weights[f"{layer}.down_bias"])
        h = graph.add("Add", h, z)
    return multiply(layer_norm("norm", gather(h, 0, 1)), "out")
