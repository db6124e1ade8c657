"""Hypothesis strategies, small data sets and models with all kinds of views that several tests share."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from protonet import Encoder, PrototypeNetwork
from protonet.files.archive import CONFIG_ENTRY, TENSORS_ENTRY
from protonet.files.metadata import TrainingMetadata
from protonet.files.model import Model
from protonet.fit.search import (
    DEFAULT_SEARCH,
    FitProgress,
    ModelSearch,
    SelectedModel,
    evaluate_candidates,
    ignore_progress,
    select_model,
)
from protonet.fit.solver import PARAM_LIMIT, fit_solution
from protonet.network import split_weights
from protonet.selection.folds import Fold
from protonet.views.density import DensitySpec
from protonet.views.evaluation import CandidateEvaluator, EncoderPlan, plan_encoder
from protonet.views.fixed_convolution import FixedConvolutionFamily, FixedConvolutionSpec, KernelBank
from protonet.views.forest import ForestFamily, ForestSpec
from protonet.views.kernel_ridge import KERNEL_RIDGE_SPECS, KernelRidgeFamily, KernelRidgeSpec
from protonet.views.linear import LinearSpec
from protonet.views.mlp import MLPFamily, MLPView, ResidualMLPs
from protonet.views.tabular_transformer import TabularTransformerFamily, TabularTransformerSpec
from protonet.views.view import TrainingRows, View

seeds = st.integers(0, 2**31 - 1)
#: Number of examples of damaged tables in each test, such as PROTONET_FUZZ=10000.
EXAMPLES = int(os.environ.get("PROTONET_FUZZ", "40"))
#: A search with a few candidates of every kind of view, for tests of properties that hold for all kinds.
EVERY_KIND = (
    replace(ModelSearch(), n_folds=2)
    .with_family(KernelRidgeFamily(KERNEL_RIDGE_SPECS[1:2], (2.0,), (0.1,)))
    .with_family(FixedConvolutionFamily((0.1,)))
    .with_family(ForestFamily(10))
    .with_family(MLPFamily(max_n_sizes=1, step_counts=(10,)))
)
#: `EVERY_KIND` without the slowest kind, which takes a tenth of the time of a default fit.
LITTLE = EVERY_KIND.without_family(TabularTransformerFamily)
#: A search with linear views only, for tests that do not depend on accuracy.
PLAIN = (
    replace(ModelSearch(), n_folds=3)
    .without_family(KernelRidgeFamily)
    .without_family(ForestFamily)
    .without_family(TabularTransformerFamily)
    .without_family(MLPFamily)
)


def solve_with(
    train: Any,
    val: Any = None,
    metadata: dict[str, Any] | None = None,
    *,
    search: ModelSearch,
    progress: FitProgress = ignore_progress,
    **options: Any,
) -> PrototypeNetwork:
    """Fit a network as `protonet.solve` does, with another search space."""
    metadata = {"param_limit": PARAM_LIMIT} | {
        name: value for name, value in (metadata or {}).items() if value is not None
    }
    return fit_solution(train, val, metadata, progress=progress, search=search, **options).network


def blobs(seed: int, *, classes: int = 5, rows: int = 6, dim: int = 8, noise: float = 0.4) -> tuple[Tensor, Tensor]:
    """Draw shuffled Gaussian classes around random directions: features (n, dim) and labels (n,)."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(classes, dim, generator=generator), dim=1) * 2.5
    labels = torch.arange(classes).repeat_interleave(rows)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return centres[labels] + noise * torch.randn(len(labels), dim, generator=generator), labels


def unit_rows(n: int, dim: int = 4, seed: int = 0) -> Tensor:
    """Draw rows (n, dim) of unit norm in random directions."""
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Compute the fraction of rows of logits (n, num_classes) whose largest logit is that of their label (n,)."""
    return float((logits.argmax(dim=1) == labels).double().mean())


def make_noise_evaluator(held_out: int, reference: float) -> CandidateEvaluator:
    """Create an evaluator of 60 rows of noise in two classes, and of held-out rows with the same reference loss."""
    generator = torch.Generator().manual_seed(0)
    n = 60 + held_out
    x, y = torch.randn(n, 4, generator=generator), torch.arange(n) % 2
    fold = Fold(torch.arange(60), torch.arange(60, n))
    evaluator = CandidateEvaluator(TrainingRows(x, y, 2), [fold], plan_encoder(4, 2, 0))
    evaluator.best_losses = evaluator.best_linear_losses = torch.full((held_out,), reference, dtype=torch.float64)
    return evaluator


def select_views(
    rows: TrainingRows,
    plan: EncoderPlan,
    *,
    search: ModelSearch = DEFAULT_SEARCH,
    progress: FitProgress = ignore_progress,
) -> SelectedModel:
    """Select views, weights and temperature by cross-validation."""
    return select_model(evaluate_candidates(rows, plan, search, progress), plan, search)


def write_columns(path: Path, columns: dict[str, Any]) -> str:
    """Write columns to a CSV file, by name, and return its path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return str(path)


def load_wine_split() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Load the shuffled rows and classes of wine, and the indices of five rows of each class."""
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    return x, y, np.concatenate([np.flatnonzero(y == label)[:5] for label in range(3)])


def same_state(first: nn.Module, second: nn.Module) -> bool:
    """Test whether two networks have equal parameters and buffers, bit for bit."""
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def spoil(data: st.DataObject, described: Any, odd: st.SearchStrategy[Any]) -> None:
    """Replace one to three random values of a JSON value by odd or other ones, or remove them."""
    for _ in range(data.draw(st.integers(1, 3))):
        indices = list(_list_locations(described))
        (container, key), (other, name) = (data.draw(st.sampled_from(indices)) for _ in range(2))
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "copy"]))
        if action == "remove":
            del container[key]
        else:
            container[key] = copy.deepcopy(other[name] if action == "copy" else data.draw(odd))


def _list_locations(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each value in a JSON value."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from _list_locations(value)


def make_network(*, learned: bool = True, raw: bool = False) -> PrototypeNetwork:
    """Build a network with all kinds of views, of which three share a source.

    Args:
        learned: Whether to add learned views, which read the raw features.
        raw: Whether to add the raw features as a view.
    """
    x, y = blobs(0)
    rows = TrainingRows(x, y, 5)
    linear = {scaling: LinearSpec(scaling).fit(rows) for scaling in ("raw", "standardised", "whitened", "centred")}
    mapped = [
        KernelRidgeSpec(LinearSpec("standardised"), 2),
        KernelRidgeSpec(LinearSpec("centred"), 2),
        KernelRidgeSpec(LinearSpec("standardised"), 1),
    ]
    densities = [
        DensitySpec(LinearSpec("standardised"), per_row=True),
        DensitySpec(LinearSpec("whitened"), per_row=False),
    ]
    views: list[View] = [
        linear["standardised"],
        *(item.fit(rows, linear[item.source.scaling].source) for item in mapped),
        ForestSpec(7).fit(rows),
        linear["whitened"],
    ]
    if raw:
        views.insert(0, linear["raw"])
    if learned:
        generator = torch.Generator().manual_seed(0)
        mlps = ResidualMLPs(2, 8, 3, 11, generator)
        torch.nn.init.normal_(mlps.last, generator=generator)
        views.append(MLPView.from_mlps(mlps, linear["raw"].source))
    sizes = [(8, True), (8, False), (4, True)]
    patterns = [FixedConvolutionSpec(width, shifts, 0.1) for width, shifts in sizes]
    views += [item.fit(rows, KernelBank.fit(rows.features, item.line_width)) for item in patterns]
    views.append(TabularTransformerSpec().fit(rows))
    views += [item.fit(rows, linear[item.source.scaling].source) for item in densities]
    encoder = Encoder(views, split_weights(views, [1.0] * len(views)), origin=torch.zeros(8), scale=1.5)
    network = PrototypeNetwork(encoder, embedding_dim=encoder.embedding_dim, num_classes=6, temperature=0.07)
    network.set_prototypes(x, y)  # class 5 does not occur
    network.add_class(F.normalize(x[:3] + 1, dim=1))
    return network.eval()


def make_model(*, learned: bool = True, raw: bool = False) -> Model:
    """Build a model with seven classes, eight columns, metadata and tensors of held-out rows."""
    classes = ("ant", "bee", "Käfer", "ждун", 'a "b",\nc', "", "new")
    columns = tuple(f"column {index}" for index in range(8))
    held_out = {"rows": torch.arange(6.0).reshape(2, 3).T, "labels": torch.tensor([1, 0]), "none": torch.zeros(0, 8)}
    metadata = TrainingMetadata(label_column="ä\n", view_influences={"raw": 1.0}, sample_counts=(3,) * 7)
    return Model(
        network=make_network(learned=learned, raw=raw),
        classes=classes,
        columns=columns,
        metadata=metadata,
        update_state=held_out,
    )


def split_archive(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Read the config and the serialized tensors from the bytes of a model file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return json.loads(archive.read(CONFIG_ENTRY)), archive.read(TENSORS_ENTRY)


def join_archive(config: Any, tensors: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """Write a model file of a config, which may be any JSON value, and of serialized tensors; return its bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(CONFIG_ENTRY, json.dumps(config))
        archive.writestr(TENSORS_ENTRY, tensors)
    return buffer.getvalue()
