"""Tabular transformer views: a slow transformer as an oracle, invariances, invalid files, and pretrained weights."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from scipy.stats import rankdata
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from protonet.selection.folds import Fold
from protonet.views import tabular_transformer
from protonet.views.evaluation import CandidateEvaluator, plan_encoder
from protonet.views.linear import LinearSpec
from protonet.views.tabular_transformer import (
    MAX_ABS_Z_SCORE,
    MAX_COLUMNS,
    MAX_CONTEXT_ROWS,
    N_NUMERIC_CHANNELS,
    RANK_SCALE,
    TABULAR_CELLS_PER_CHUNK,
    TABULAR_MAX_LABELLED_ROWS,
    CellEncoder,
    TabularTransformerConfig,
    TabularTransformerFamily,
    TabularTransformerSpec,
    TabularTransformerView,
    compute_weights_checksum,
    load_pretrained_weights,
)
from protonet.views.transformer import (
    DIM,
    HEAD_DIM,
    N_CELL_CHANNELS,
    N_CELL_LAYERS,
    N_CLASS_CODES,
    N_LAYERS,
    RANK_CHANNEL,
    WAVE_FREQUENCIES,
    WEIGHT_COUNT,
    TransformerWeights,
    count_multiplications,
    embed_rows,
    encode_labelled_rows,
    unpack_weights,
)
from protonet.views.view import TrainingRows
from tests.strategies import accuracy, blobs, seeds

#: A number, a number with an indicator of missing values, a category of three levels, and a number.
BLOCKS = torch.tensor([0, 1, 1, 2, 2, 2, 3])


def draw_table(seed: int, n: int = 24, classes: int = 3) -> TrainingRows:
    """Sample rows with informative columns of all types."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    indices = torch.randn(n, 3, generator=generator) + y[:, None]
    gap = (torch.rand(n, generator=generator) < 0.3).float()
    level = (y + (torch.rand(n, generator=generator) < 0.3)) % 3
    columns = [indices[:, :1], indices[:, 1:2], gap[:, None], F.one_hot(level, 3).float(), indices[:, 2:]]
    return TrainingRows(torch.cat(columns, dim=1), y, classes, column_indices=BLOCKS)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the attention of one query (dim,) to keys and values (n, dim), head by head."""
    parts = []
    for start in range(0, len(q), HEAD_DIM):
        part = slice(start, start + HEAD_DIM)
        scores = torch.stack([q[part] @ key[part] for key in k]) / math.sqrt(HEAD_DIM)
        parts.append(scores.softmax(dim=0) @ v[:, part])
    return torch.cat(parts)


def embed_slowly(
    weights: TransformerWeights, cells: Tensor, codes: list[int], memory: list[Tensor] | None
) -> list[Tensor]:
    """Embed rows (n, columns, N_CELL_CHANNELS) by loops; without a memory, the rows attend to themselves."""

    def norm(name: str, h: Tensor) -> Tensor:
        deviation = (h.var(dim=-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return (h - h.mean(dim=-1, keepdim=True)) / deviation * weights[name] + weights[f"{name}_bias"]

    rows = []
    for row, code in zip(cells, codes, strict=True):
        states = [weights["codes"][code] + weights["label"]]
        for cell in row:
            angle = 1.8 * cell[RANK_CHANNEL]
            waves = [
                wave(rate * angle) if angle != 0 else angle
                for rate in WAVE_FREQUENCIES
                for wave in (torch.sin, torch.cos)
            ]
            read = weights["cell"] @ torch.cat([cell, torch.stack(waves)]) + weights["cell_bias"]
            states.append(read + weights["codes"][code])
        rows.append(torch.stack(states))  # (columns + 1, DIM)
    for layer in range(N_LAYERS):
        w = {name.split(".")[1]: value for name, value in weights.items() if name.startswith(f"{layer}.")}
        if layer == N_CELL_LAYERS:  # from here on, the label tokens alone
            rows = [h[:1] @ weights["row"].T + weights["row_codes"][code] for h, code in zip(rows, codes, strict=True)]
        for index, h in enumerate(rows if layer < N_CELL_LAYERS else ()):
            q, k, v = (norm(f"{layer}.norm0", h) @ w["columns"].T).split(DIM, dim=1)
            rows[index] = h + torch.stack([attend(query, k, v) for query in q]) @ w["columns_out"].T
        normed = [norm(f"{layer}.norm1", h) for h in rows]
        looked_at = torch.stack(normed) if memory is None else memory[layer]  # (labelled, columns + 1, DIM)
        for index, h in enumerate(rows):
            used = []
            for column in range(h.shape[0]):
                k, v = (looked_at[:, column] @ w["memory"].T).chunk(2, dim=1)
                used.append(attend(w["query"] @ normed[index][column], k, v))
            z = h + torch.stack(used) @ w["rows_out"].T
            inner = F.gelu(norm(f"{layer}.norm2", z) @ w["up"].T + w["up_bias"], approximate="tanh")
            rows[index] = z + inner @ w["down"].T + w["down_bias"]
        if memory is None:
            MEMORIES.append(looked_at)
    ends = [weights["out"] @ norm("norm", h[0]) for h in rows]
    return [end / end.norm() for end in ends]


MEMORIES: list[Tensor] = []


def test_the_transformer_equals_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = unpack_weights(0.3 * torch.randn(WEIGHT_COUNT, generator=generator))
    cells, new = (torch.randn(n, 3, N_CELL_CHANNELS, generator=generator) for n in (5, 4))
    new[0, 1, RANK_CHANNEL] = 0  # no rank, no waves
    codes = [0, 3, 0, 7, 3]
    MEMORIES.clear()
    labelled = embed_slowly(weights, cells, codes, None)
    memory = encode_labelled_rows(weights, cells[None], torch.tensor([codes]))
    for code in range(N_CLASS_CODES):
        mean = sum((row for row, mine in zip(labelled, codes, strict=True) if mine == code), torch.zeros(DIM))
        torch.testing.assert_close(memory.prototypes[0, code], F.normalize(mean, dim=0), atol=1e-4, rtol=1e-3)
    expected = torch.stack(embed_slowly(weights, new, [N_CLASS_CODES] * 4, list(MEMORIES)))
    torch.testing.assert_close(embed_rows(weights, new[None], memory)[0], expected, atol=1e-4, rtol=1e-3)


@settings(max_examples=4)
@given(seed=seeds)
def test_embeddings_do_not_depend_on_order_class_indices_and_units(seed: int) -> None:
    rows, new = draw_table(seed), draw_table(seed + 1).features
    expected = TabularTransformerSpec().fit(rows)(new)
    generator = torch.Generator().manual_seed(seed)
    order, names = torch.randperm(24, generator=generator), torch.randperm(3, generator=generator)
    scale = torch.tensor([3.0, 0.5, 2.0, 5.0, 5.0, 5.0, 7.0])
    columns = torch.tensor([6, 5, 3, 4, 0, 1, 2])  # columns, and the levels of the category, in another order
    other_blocks = torch.tensor([0, 1, 1, 1, 2, 3, 3])
    for changed, read in (
        (rows.select(order), new),
        (replace(rows, labels=names[rows.labels]), new),
        (replace(rows, features=rows.features * scale + 1), new * scale + 1),
        (replace(rows, features=rows.features[:, columns], column_indices=other_blocks), new[:, columns]),
    ):
        torch.testing.assert_close(TabularTransformerSpec().fit(changed)(read), expected, atol=2e-4, rtol=1e-3)


@given(seed=seeds)
@example(seed=344)  # two values that count as equal
def test_cells_are_encoded_by_deviation_rank_and_level(seed: int) -> None:
    rows, new = draw_table(seed).features, draw_table(seed + 1).features
    cells = CellEncoder(rows, BLOCKS).encode(torch.cat([rows, new]))
    assert cells.shape == (48, 4, N_CELL_CHANNELS)
    for column, feature in ((0, 0), (1, 1), (3, 6)):
        values = rows[:, feature].numpy()
        z = (np.concatenate([values, new[:, feature].numpy()]) - values.mean()) / values.std()
        np.testing.assert_allclose(cells[:, column, 0], z.clip(-MAX_ABS_Z_SCORE, MAX_ABS_Z_SCORE), atol=1e-4)
        gaps = np.diff(np.sort(values), prepend=-np.inf)
        merged = np.sort(values)[np.maximum.accumulate(np.where(gaps > 1e-5, np.arange(24), 0))]
        ranks = rankdata(merged[np.argsort(np.argsort(values))])  # of values without differences by rounding
        ranks = RANK_SCALE * (2 * ranks - len(values) - 1) / len(values)
        np.testing.assert_allclose(cells[:24, column, 1], ranks, atol=1e-5)
    assert not cells[:, [0, 1, 3], N_NUMERIC_CHANNELS:].any()
    assert not cells[:, 2, :N_NUMERIC_CHANNELS].any()
    codes = cells[:24, 2, N_NUMERIC_CHANNELS:]
    torch.testing.assert_close(codes.mean(dim=0), torch.zeros(N_CELL_CHANNELS - N_NUMERIC_CHANNELS), atol=1e-5, rtol=0)
    level = rows[:, 3:6].argmax(dim=1)
    assert all(len(codes[level == item].unique(dim=0)) == 1 for item in level.unique())
    constant = CellEncoder(torch.ones(4, 1), torch.zeros(1, dtype=torch.int64)).encode(torch.tensor([[1.0], [2.0]]))
    assert constant[:, 0, 0].tolist() == [0.0, 0.0]  # the size of a constant column is not informative


def test_another_precision_encodes_the_context_again() -> None:
    rows = draw_table(0)
    view = TabularTransformerSpec().fit(rows)
    expected = view(rows.features)
    double = view.double()(rows.features.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), expected, atol=1e-5, rtol=0)
    assert torch.equal(view.float()(rows.features), expected)
    half = view.bfloat16()(rows.features.bfloat16())
    assert float(F.cosine_similarity(half.float(), expected).min()) > 0.95


def test_torch_exports_a_converted_view_before_its_first_use() -> None:
    rows = draw_table(0)
    view = TabularTransformerSpec().fit(rows)
    with torch.no_grad():
        program = torch.export.export(copy.deepcopy(view).float(), (rows.features,))
        torch.testing.assert_close(program.module()(rows.features), view(rows.features), atol=1e-5, rtol=0)


def test_an_empty_batch_a_copy_and_a_loaded_state_are_embedded() -> None:
    rows, others = draw_table(0), draw_table(1)
    view, other = TabularTransformerSpec().fit(rows), TabularTransformerSpec().fit(others)
    assert view(rows.features[:0]).shape == (0, DIM)
    expected = other(rows.features)
    assert torch.equal(copy.deepcopy(view)(rows.features), view(rows.features))
    view.load_state_dict(other.state_dict())
    assert torch.equal(view(rows.features), expected)


def test_the_context_is_a_part_of_many_rows_with_the_largest_weights() -> None:
    x, y = blobs(0, rows=1500, dim=8)
    rows, maximum = TrainingRows(x, y, 5), MAX_CONTEXT_ROWS
    thinned = TabularTransformerSpec().fit(rows)
    assert len(thinned.rows) == maximum
    assert thinned.classes.bincount().min() >= maximum // 5 - 1
    weights = torch.ones(len(y), dtype=torch.float64)
    weights[-maximum:] = 2.0
    assert torch.equal(TabularTransformerSpec().fit(replace(rows, weights=weights)).rows, x[-maximum:])
    fold = TabularTransformerSpec().fit(rows.select(torch.arange(len(y) * 2 // 3)))
    assert len(fold.rows) == round(maximum * 2 / 3)  # the same fraction of the rows
    view = TabularTransformerSpec().fit(TrainingRows(x[:60], y[:60], 5))
    x = x[: TABULAR_CELLS_PER_CHUNK // 16]
    full = view(x)
    assert full.shape == (len(x), DIM)
    torch.testing.assert_close(full[:5], view(x[:5]), atol=1e-5, rtol=0)  # in batches or not
    assert view.flops() == count_multiplications(8, 60)


def list_candidates(rows: TrainingRows, kind: TabularTransformerFamily) -> list[Any]:
    n = len(rows.labels)
    fold = Fold(torch.arange(n // 2), torch.arange(n // 2, n))
    evaluator = CandidateEvaluator(rows, [fold], plan_encoder(rows.features.shape[1], rows.num_classes, 0))
    return [candidate.spec for candidate in kind.candidates(evaluator)]


def test_the_transformer_is_a_candidate_for_tables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    table, kind = draw_table(0), TabularTransformerFamily()
    rows = replace(table, column_indices=torch.arange(table.features.shape[1]))
    assert list_candidates(rows, kind) == [TabularTransformerSpec()]
    wide = TrainingRows(torch.randn(8, MAX_COLUMNS + 1), torch.arange(8) % 2, 2)
    wide = replace(wide, column_indices=torch.arange(MAX_COLUMNS + 1))
    n = N_CLASS_CODES + 1
    many = replace(TrainingRows(*blobs(0, classes=n, rows=2)[:2], n), column_indices=torch.arange(8))
    numbers = replace(rows, column_indices=None)
    described = replace(rows, is_class_name=torch.zeros(24, dtype=torch.bool))
    weighed = replace(rows, weights=torch.arange(24) + 1.0)
    long = rows.select(torch.arange(24).repeat(TABULAR_MAX_LABELLED_ROWS // 24 + 1))
    for unusable in (wide, many, numbers, described, weighed, long):
        assert list_candidates(unusable, kind) == []
    monkeypatch.setattr(tabular_transformer, "load_pretrained_weights", lambda: None)  # the contest submission has none
    assert list_candidates(rows, kind) == []
    with pytest.raises(ValueError, match="of pretrained weights"):
        TabularTransformerSpec().fit(rows)


def test_the_pretrained_transformer_beats_random_weights() -> None:
    """One column of twelve determines the class by a threshold: pretraining detects it from a few rows."""
    lead = []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(220, 12, generator=generator).exp()  # skewed
        y = (x[:, seed % 12] > 1).long()
        rows = TrainingRows(x[:20], y[:20], 2)
        if len(rows.labels.unique()) < 2:
            continue
        right = []
        for view in (TabularTransformerSpec().fit(rows), LinearSpec("standardised").fit(rows)):
            z = F.normalize(view(x if view.source is None else view.source(x)), dim=1)
            prototypes = torch.stack([z[:20][y[:20] == item].mean(dim=0) for item in (0, 1)])
            right.append(accuracy(z[20:] @ F.normalize(prototypes, dim=1).T, y[20:]))
        lead.append(right[0] - right[1])
    error = float(np.std(lead) / math.sqrt(len(lead)))
    assert np.mean(lead) > 0.05 + 2 * error


@pytest.mark.parametrize("fault", ["class", "none", "order", "weights", "many", "first", "columns"])
def test_invalid_transformer_views_are_refused(fault: str) -> None:
    view = TabularTransformerSpec().fit(draw_table(0))
    tensors, config = dict(view.state_dict()), view.config.to_json()
    restored = TabularTransformerView(TabularTransformerConfig.from_json(config))
    restored.check(tensors)
    restored.load_state_dict(tensors)
    assert torch.equal(restored(view.rows), view(view.rows))
    change: dict[str, dict[str, Tensor]] = {
        "class": {"classes": tensors["classes"] - 1},
        "none": {"rows": tensors["rows"][:0], "classes": tensors["classes"][:0]},
        "order": {"blocks": tensors["blocks"].flip(0)},
        "weights": {},
        "columns": {"blocks": tensors["blocks"][:-1]},
        "many": {"rows": tensors["rows"].repeat(200, 1), "classes": tensors["classes"].repeat(200)},
        "first": {"blocks": tensors["blocks"] + 1},
    }
    changed = tensors | change[fault]
    config["rows"] = len(changed["rows"])
    config |= {"weights": {"checksum": 1}}.get(fault, {})
    with pytest.raises(ValueError, match=r"tabular transformer|columns|tensor|rows"):
        TabularTransformerView(TabularTransformerConfig.from_json(config)).check(changed)


def test_a_failed_trace_does_not_spoil_other_views() -> None:
    """Weights that are loaded while a network is traced must not be cached for other networks."""
    load_pretrained_weights.cache_clear()
    compute_weights_checksum.cache_clear()
    view, other = (TabularTransformerSpec().fit(draw_table(seed)) for seed in (0, 1))
    load_pretrained_weights.cache_clear()
    compute_weights_checksum.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):
        view(view.rows)
    assert torch.isfinite(other(other.rows)).all()
