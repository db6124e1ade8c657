from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_wine
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from protonet import PrototypeNetwork, solve
from protonet.errors import InputError, InputTypeError
from protonet.fit import training_set
from protonet.fit.cross_validation import cross_validate, predict_held_out
from protonet.fit.networks import fit_selected_model
from protonet.fit.search import ModelSearch
from protonet.fit.solver import PARAM_LIMIT, fit_solution
from protonet.losses import class_means
from protonet.network import Encoder
from protonet.views.mlp import MLPFamily
from protonet.views.view import canonical_feature_order
from tests.strategies import LITTLE, accuracy, blobs, same_state, seeds, solve_with

Loader = Iterable[Any]


def loader(x: Tensor, y: Tensor, *, batch_size: int = 7, shuffle: bool = False, workers: int = 0) -> Loader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle, num_workers=workers)


#: A parameter limit that allows one hidden unit for eight features and five classes.
SMALL = {"param_limit": 30}


def solve_little(train: Loader, val: Loader | None = None, metadata: dict[str, Any] | None = None) -> PrototypeNetwork:
    return solve_with(train, val, {**SMALL, **(metadata or {})}, search=LITTLE)


@cache
def solved(seed: int) -> PrototypeNetwork:
    """Fit a network to `blobs`."""
    return solve_little([blobs(seed)])


@settings(max_examples=3)
@given(seed=seeds, batch_size=st.integers(1, 40), cut=st.integers(1, 29))
def test_order_batches_loaders_and_global_seed_have_no_effect(seed: int, batch_size: int, cut: int) -> None:
    x, y = blobs(0)
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    batches = loader(x[:cut], y[:cut], batch_size=batch_size, shuffle=True)
    assert same_state(solve_little(batches, loader(x[cut:], y[cut:])), solved(0))


def test_the_seed_has_no_effect_without_mlps() -> None:
    x, y = blobs(0, noise=1.5)
    search = LITTLE.without_family(MLPFamily)
    first, second = (fit_solution([(x, y)], search=search, seed=seed) for seed in (0, 1))
    assert same_state(first.network, second.network)
    assert torch.equal(predict_held_out(cross_validate(first)), predict_held_out(cross_validate(second)))


def test_the_order_of_many_columns_changes_rounding_alone() -> None:
    x, _ = blobs(0, dim=1000, noise=20.0)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    columns = torch.arange(1000)
    assert torch.equal(order[canonical_feature_order(x[:, order], columns)], canonical_feature_order(x, columns))


def test_the_order_of_columns_changes_rounding_alone() -> None:
    x, y = (torch.from_numpy(values) for values in load_wine(return_X_y=True))
    few = torch.cat([(y == label).nonzero().flatten()[:5] for label in range(3)])
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        first, second = (solve([(x[few][:, columns], y[few])])(x[:, columns]) for columns in (slice(None), order))
    torch.testing.assert_close(first.softmax(dim=1), second.softmax(dim=1), atol=1e-3, rtol=0)


def test_the_indices_of_classes_change_rounding_alone() -> None:
    x, y = (torch.from_numpy(values) for values in load_breast_cancer(return_X_y=True))
    rng = np.random.default_rng(5)
    few = torch.cat([torch.from_numpy(rng.permutation(np.flatnonzero(y == label))[:5]) for label in range(2)])
    with torch.no_grad():  # forests have ties, and an MLP has initial proxies for the classes
        first, second = (solve([(x[few], labels[few])])(x[::4]).softmax(dim=1) for labels in (y, 1 - y))
    torch.testing.assert_close(first, second.flip(1), atol=1e-3, rtol=0)


def test_global_state_is_unchanged() -> None:
    x, y = blobs(0)
    torch.manual_seed(5)
    before = (
        torch.get_rng_state(),
        np.random.get_state(legacy=False),  # noqa: NPY002 - the global state is what is tested
        random.getstate(),
        torch.get_num_threads(),
    )
    with torch.no_grad():
        network = solve_little(loader(x, y, shuffle=True), loader(x, y, shuffle=True))
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])  # noqa: NPY002
    assert random.getstate() == before[2]
    assert torch.get_num_threads() == before[3]
    with torch.inference_mode():
        assert same_state(solve_little([(x, y)], [(x, y)]), network)


@settings(max_examples=5)
@given(
    seed=seeds, limit=st.integers(0, 5000), dim=st.integers(1, 20), classes=st.integers(2, 6), rows=st.integers(1, 4)
)
def test_parameters_are_within_the_limit_and_encoder(seed: int, limit: int, dim: int, classes: int, rows: int) -> None:
    x, y = blobs(seed, dim=dim, classes=classes, rows=rows)
    metadata = {"param_limit": float(limit), "num_classes": classes, "input_dim": dim}
    network = solve_with([(x, y)], None, metadata, search=LITTLE.with_family(MLPFamily(step_counts=(3,))))
    count = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert count == network.count_parameters() <= limit
    assert count == sum(p.numel() for p in network.encoder.parameters())
    assert not network.training
    assert network(x).shape == (len(x), classes)


def test_any_real_type_and_shape() -> None:
    x, y = blobs(6)
    x = (4 * x).round()
    expected = solve_little([(x, y)])
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32):
        shaped = x.to(dtype).reshape(-1, 2, 1, 4)
        network = solve_little([(shaped, y[:, None].to(torch.int32))], None, {"input_dim": 8, "num_classes": 5})
        assert same_state(network, expected), dtype
        torch.testing.assert_close(network(shaped), network(x))


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])  # about 1e-12 and 1e12, without rounding the features
def test_the_unit_of_the_features_does_not_matter(scale: float) -> None:
    x, y = blobs(7)
    logits = solved(7)(x)
    torch.testing.assert_close(solve_little([(x * scale, y)])(x * scale), logits)


def test_degenerate_data_give_finite_logits() -> None:
    x, y = blobs(8)
    few = torch.tensor([0, 1, 2, 3, 4])
    first = torch.stack([(y == c).nonzero()[0, 0] for c in few])
    read_only = x.numpy()[::-1].copy()
    read_only.flags.writeable = False
    cases: list[tuple[Loader, Loader | None]] = [
        ([(x[y < 3], y[y < 3])], [(x[y >= 3], y[y >= 3])]),  # classes that occur only in val
        ([(x[y < 3], y[y < 3])], None),  # classes that never occur
        ([(x[first], few)], None),  # one sample a class
        ([(torch.cat([x, x[y == 0].repeat(9, 1)]), torch.cat([y, y[y == 0].repeat(9)]))], None),  # unequal
        ([(torch.cat([x, torch.ones(30, 2), x], dim=1), y)], []),  # constant and duplicated features
        ([(torch.zeros(30, 8), y)], None),  # nothing at all
        ([(torch.ones(30, 8), y)], None),
        (loader(x, y, workers=1), None),
        (((x[i : i + 1], y[i : i + 1]) for i in range(30)), None),  # a generator, read once
        ([(read_only, y.numpy()[::-1])], None),
    ]
    for train, val in cases:
        network = solve_little(train, val, {"num_classes": 5})
        assert isinstance(network.encoder, Encoder)
        logits = network(torch.randn(4, network.encoder.input_dim, generator=torch.Generator().manual_seed(0)))
        assert bool(torch.isfinite(logits).all())
        assert float(logits[:, network.has_samples].detach().abs().max()) < 100
    network = solve_little([(X, Y * 0 + 3)], None, {"num_classes": 5})
    assert network(X).argmax(dim=1).tolist() == [3] * len(X)


X, Y = blobs(0)


def test_argument_errors() -> None:
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("metadata", {"num_classes": 1}, InputError, r"`metadata\['num_classes'\]` must be a whole number >= 2"),
        ("metadata", {"param_limit": -1}, InputError, r"`metadata\['param_limit'\]` must be a finite number >= 0"),
        ("metadata", {"param_limit": math.nan}, InputError, r"`metadata\['param_limit'\]` must be a finite"),
        ("metadata", {"device": "nonsense"}, InputError, r"`metadata\['device'\]` must be a device of this machine"),
        ("metadata", [1], InputTypeError, "`metadata` must be a mapping or None; got list"),
        ("metadata", {"num_class": 3}, InputError, "only have keys .*; got 'num_class'. Did you mean 'num_classes'"),
        ("time_limit", -1, InputError, "`time_limit` must be a finite number >= 0; got -1"),
        ("progress", 5, InputTypeError, "`progress` must be a function of a stage and a share; got int"),
    ]
    for argument, value, error, message in cases:
        given: dict[str, Any] = {argument: value}
        with pytest.raises(error, match=f"^.*{message}"):
            solve([(X, Y)], **given)


def test_without_a_limit_the_network_is_that_of_the_documented_one() -> None:
    documented = solve_with((X, Y), None, {"param_limit": PARAM_LIMIT}, search=LITTLE)
    assert documented.count_parameters() > 0
    for metadata in (None, {}, {"param_limit": None}):
        assert same_state(solve_with((X, Y), None, metadata, search=LITTLE), documented)


@pytest.mark.parametrize("batch", [(X, Y), (X[:0], Y[:0])], ids=["rows", "empty batches"])
def test_a_loader_without_end_is_an_error(batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_set, "MAX_VALUES", 10_000)
    for arguments in ({"train_loader": repeat(batch)}, {"train_loader": [(X, Y)], "val_loader": repeat(batch)}):
        with pytest.raises(InputError, match=r"_loader` must have at most 10,000 values, .*check that the loader ends"):
            solve(**arguments)
    with pytest.raises(InputError, match=r"^`unlabelled` must have at most 10,000 values"):
        solve((X, Y), unlabelled=repeat(batch))


@pytest.mark.parametrize("offset", [1e9, 1e11])
def test_offsets_of_float64_features_are_subtracted_before_a_cast(offset: float) -> None:
    x = X.double() + offset
    network = solve((x, Y))
    assert accuracy(network(x), Y) > 0.9


def test_float64_features_whose_differences_would_be_lost_are_an_error() -> None:
    message = "^`features` must vary by more than 1e-12 of their mean; got a standard deviation of .* around 1e.14"
    with pytest.raises(InputError, match=message):
        solve((X.double() + 1e14, Y))


def test_the_number_of_parameters_depends_on_search_time_and_rows() -> None:
    few = fit_solution([(X, Y)]).network  # without a limit, few rows train no MLP
    assert few.count_parameters() == 0
    assert accuracy(few(X), Y) > 0.9
    search = replace(LITTLE, n_folds=3).with_family(MLPFamily(step_counts=(10, 30)))
    best = solve_with([(X, Y)], None, SMALL, search=search)
    assert 0 < best.count_parameters() <= SMALL["param_limit"]
    for rows in (1, 2, 6):  # the MLP is always there, and trained
        network = solve_little([blobs(4, rows=rows)])
        assert network.count_parameters() > 0
        (last,) = (value for name, value in network.encoder.named_parameters() if name.endswith("mlps.last"))
        assert bool((last != 0).any())
    hurried = solve([(X, Y)], time_limit=0)
    assert accuracy(hurried(X), Y) > 0.8
    many = torch.cat([Y * 0, torch.arange(1, 21)])  # where most classes have one sample the model stays simple
    x = torch.cat([X, torch.randn(20, 8, generator=torch.Generator().manual_seed(0))])
    assert solve([(x, many)]).count_parameters() == solve([(x, many)], time_limit=0).count_parameters()


def test_progress_is_reported_and_can_end_the_search() -> None:
    reported: list[tuple[str, float]] = []
    solve([(X, Y)], None, SMALL, progress=lambda *stage: reported.append(stage))
    stages = [*(kind.progress_name for kind in ModelSearch().families), "final fit", "done"]
    assert [stage for stage, _ in reported] == stages
    assert [fraction for _, fraction in reported][-2:] == [0.8, 1.0]
    assert [fraction for _, fraction in reported] == sorted(fraction for _, fraction in reported)

    def interrupt(stage: str, fraction: float) -> None:
        if stage == "forests":
            raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        solve([(X, Y)], progress=interrupt)
    assert torch.get_num_threads() == threads


def test_the_callers_default_dtype_does_not_matter() -> None:
    reference = solved(0)
    torch.set_default_dtype(torch.float64)
    try:
        assert same_state(solve_little([(X, Y)]), reference)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("extra", [0, 1, 20])
def test_without_parameters_the_network_is_raw_cosine(extra: int) -> None:
    y = torch.cat([torch.arange(10), torch.arange(extra) % 10])
    x = torch.randn(len(y), 6, generator=torch.Generator().manual_seed(0))
    network = solve([(x, y)], None, {"param_limit": 0})
    means = class_means(F.normalize(x, dim=1), y, 10)[0]
    cosines = F.cosine_similarity(x[:, None], means[None], dim=2)
    torch.testing.assert_close(network(x) * network.temperature, cosines)


@pytest.mark.parametrize("limit", [0, 30, 5000])
def test_selected_views_are_fitted_with_their_weights_and_each_source_once(limit: int) -> None:
    solution = fit_solution([(X, Y)], None, {"param_limit": limit}, search=LITTLE)
    encoder, choice = solution.network.encoder, solution.selected
    assert isinstance(encoder, Encoder)
    views = list(encoder.iterate_views())
    assert len(views) == len(choice.views)
    weights = torch.tensor([weight for _, weight in choice.views])
    given = torch.stack([part.sum() for part in encoder.weights.split([len(view.part_sizes) for view in views])])
    torch.testing.assert_close(given, weights / weights.sum())
    assert bool((encoder.weights > 0).all())
    read = {view.source for view in views if view.source is not None}
    sources = {item.source or item for item, _ in choice.views if not item.tags & {"forest", "transformer"}}
    assert len(encoder.list_input_maps()) == len(read) == len(sources)
    assert float(solution.network.temperature) == pytest.approx(choice.temperature)
    again = fit_selected_model(solution.training_set, choice)
    assert same_state(again, solution.network)


@pytest.mark.parametrize("weighted", [False, True])
def test_rare_classes_are_predicted_as_often_as_they_occur(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def sample(common: int, rare: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.tensor([0] * common + [1] * rare)
        return torch.randn(len(labels), 2, generator=generator) + 1.2 * labels[:, None], labels

    x, y = sample(180, 20)
    weights = torch.tensor([200 / 360, 200 / 40], dtype=torch.float64)[y] if weighted else None
    network = fit_solution([(x, y)], weights=weights).network
    with torch.no_grad():
        predicted = float(network(sample(1800, 200)[0]).softmax(dim=1)[:, 1].mean())
    if weighted:
        assert not network.offsets.any()
        assert predicted > 0.15
    else:
        assert abs(predicted - 0.1) < 0.03
