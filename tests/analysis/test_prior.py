from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.prior import study
from analysis.prior.study import collate, evaluate_prior, train_prior
from analysis.prior.tasks import (
    MAX_FEATURES,
    MAX_LABELLED,
    MAX_TEST_ROWS,
    TASK_FAMILIES,
    MeasuredTask,
    Task,
    draw_task,
    load_measured,
    measure_task,
    measure_views,
)
from protonet import InputError, solve
from protonet.fit.prior import WeightingPrior, deserialize_prior, serialize_prior
from protonet.fit.search import ModelSearch
from protonet.network import PrototypeNetwork


def make_task(seed: int, shots: int) -> Task:
    """Return two noisy classes that differ in one direction of four."""
    rng = np.random.default_rng(seed)
    y = np.repeat([0, 1], shots + 20)
    x = rng.normal(size=(len(y), 4)) + np.outer(2 * y - 1, [1.5, 0, 0, 0])
    train_rows = np.concatenate([np.arange(shots), np.arange(shots) + shots + 20])
    test = np.setdiff1d(np.arange(len(y)), train_rows)
    return Task(f"made {seed}", f"made {seed % 4}", x[train_rows], y[train_rows], None, x[test], y[test])


@pytest.mark.parametrize("family", TASK_FAMILIES)
def test_every_family_draws_finite_features_of_several_classes(family: object) -> None:
    assert callable(family)
    x, y = family(200, np.random.default_rng(0))
    again, _ = family(200, np.random.default_rng(0))
    np.testing.assert_array_equal(x, again)
    assert x.shape[0] == len(y) == 200
    assert np.isfinite(x).all()
    assert len(np.unique(y)) > 1


def test_a_task_is_the_same_whenever_it_is_drawn_and_within_bounds() -> None:
    for task_id in (1, 3, 8):
        task, again = draw_task(task_id), draw_task(task_id)
        np.testing.assert_array_equal(task.x, again.x)
        np.testing.assert_array_equal(task.test_y, again.test_y)
        assert set(task.test_y) <= set(task.y) == set(range(task.y.max() + 1))
        assert len(task.y) <= MAX_LABELLED
        assert len(task.test_y) <= MAX_TEST_ROWS
        assert task.x.shape[1] == task.test_x.shape[1] <= MAX_FEATURES


def test_measured_cosines_are_those_of_the_network_that_solve_fits() -> None:
    task = make_task(0, 5)
    arrays = measure_views(task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # first weights of another state may leave raw cosine alone
        prior = WeightingPrior().eval()
    network = solve((torch.from_numpy(task.x), torch.from_numpy(task.y)), effort=ModelSearch(prior=prior))
    assert isinstance(network, PrototypeNetwork)
    with torch.no_grad():
        logits = network(torch.from_numpy(task.test_x))
    judged = torch.from_numpy(arrays["judged"].astype(np.float32))
    assert judged.shape == (len(arrays["traits"]), 40, 2)
    # The network mixes some of the views: its logits are a positive combination of their cosines.
    solution = torch.linalg.lstsq(judged.flatten(1).T.double(), logits.flatten().double()[:, None]).solution
    residual = judged.flatten(1).T.double() @ solution - logits.flatten().double()[:, None]
    assert float(residual.abs().max()) < 0.02 * float(logits.abs().max())


def test_measured_tasks_are_written_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "00005.npz"
    assert measure_task((str(path), 5)) >= 0
    written = path.read_bytes()
    measure_task((str(path), 5))
    assert path.read_bytes() == written
    assert load_measured(path) is not None
    np.savez(tmp_path / "nothing.npz")
    assert load_measured(tmp_path / "nothing.npz") is None


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredTask]:
    """Return four measured tasks, two of them of one row per class."""
    path, measured = tmp_path_factory.mktemp("tasks") / "task.npz", []
    for seed in range(4):
        np.savez(path, **measure_views(make_task(seed, 1 + seed % 3)))  # type: ignore[arg-type]
        loaded = load_measured(path)
        assert loaded is not None
        measured.append(loaded)
    return measured


def test_priors_are_compared_on_families_that_they_were_not_trained_on(tasks: list[MeasuredTask]) -> None:
    some = [task._replace(family=f"synthetic {index // 2}") for index, task in enumerate(tasks * 2)]
    rows = study.compare(some, collate(some), epochs=2)
    start, learned, *_ = rows
    assert [row["prior"] for row in rows][:2] == ["what held-out rows suggest", "learned"]
    assert start["judged"]["gain"][0] == 0
    assert learned["judged"]["tasks"] + learned["unjudged"]["tasks"] == len(some)
    assert learned["judged"]["log_loss"] != start["judged"]["log_loss"]
    assert study.tabulate(rows).count("\n") == 2 + len(rows)


def test_training_lowers_the_loss_and_is_deterministic(tasks: list[MeasuredTask]) -> None:
    batch = collate(tasks)
    before, _ = evaluate_prior(WeightingPrior().eval(), batch)
    prior = train_prior(batch, epochs=20)
    after, right = evaluate_prior(prior, batch)
    assert float(after.mean()) < float(before.mean())
    assert bool(((right >= 0) & (right <= 1)).all())
    again = train_prior(batch, epochs=20)
    assert serialize_prior(again) == serialize_prior(prior)


def test_a_prior_that_leaves_a_data_set_out_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "LEFT_OUT_FOLDER", tmp_path)
    with pytest.raises(InputError, match="must have a prior"):
        study.load_left_out_prior("iris")
    (tmp_path / "iris").write_text(serialize_prior(WeightingPrior()))
    assert isinstance(study.load_left_out_prior("iris"), WeightingPrior)


def test_weights_are_written_as_a_module(tmp_path: Path) -> None:
    path = tmp_path / "numbers.py"
    study.write_prior(WeightingPrior(), path)
    scope: dict[str, tuple[str, ...]] = {}
    exec(path.read_text(encoding="utf-8"), scope)
    assert isinstance(deserialize_prior("".join(scope["NUMBERS"])), WeightingPrior)
    assert max(map(len, path.read_text().splitlines())) <= 120
