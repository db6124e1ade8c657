"""The contest: trial, modules, draws, Bayes rules and baselines against oracles."""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.special import ive, logsumexp
from scipy.stats import multivariate_normal
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, LeaveOneOut, StratifiedKFold, cross_val_predict
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from analysis.__main__ import main
from analysis.contest import draws
from analysis.contest.trial import describe_versions, evaluate_submission
from analysis.contest.worker import evaluate_request, measure_peak_memory
from analysis.real_data.robustness import TUNED_BASELINES
from analysis.shared.baselines import BASELINES, INVERSE_PENALTIES, N_FOLDS, concat_train_and_val
from protonet import solve
from protonet.datasets import Split, sample_family
from solution.pack import ROOT
from tests.analysis.conftest import Made, read_cells
from tests.strategies import blobs

LINEAR = """
import json, numpy, torch

class Solution:
    def solve(self, train_loader, val_loader, metadata=None):
        batches = list(train_loader)
        facts = {
            "metadata": metadata,
            "seeds": [torch.initial_seed(), int(numpy.random.get_state()[1][0])],
            "batches": [len(y) for _, y in batches],
            "orders": [torch.cat([y for _, y in loader]).tolist() for loader in (batches, val_loader)],
        }
        model = torch.nn.Linear(6, 3)
        torch.nn.init.zeros_(model.weight)
        with torch.no_grad():
            model.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
        with open(__file__ + ".json", "w") as file:
            json.dump(facts, file)
        return model
"""


def sample_three(n_train: int = 50) -> Split:
    return sample_family("isotropic", seed=1, n_train=n_train, n_val=2, n_test=5, num_classes=3, dim=6)


def write_request(folder: Path, split: Split, **changes: object) -> dict[str, Any]:
    parts = {f"{part}_{side}": getattr(split, f"{part}_{side}") for part in ("train", "val", "test") for side in "xy"}
    np.savez(folder / "data.npz", **{name: tensor.numpy() for name, tensor in parts.items()})
    (folder / "solution.py").write_text(LINEAR)
    request = {"solution": str(folder / "solution.py"), "data": str(folder / "data.npz"), "metadata": None}
    return request | {"param_limit": 21.0, "baseline_accuracy": 0.2} | changes


def test_evaluator_follows_the_contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    split = sample_three()
    result = evaluate_request(write_request(tmp_path, split, metadata={"num_classes": 3}))
    facts = json.loads((tmp_path / "solution.py.json").read_text())
    assert facts["metadata"] == {"num_classes": 3}
    assert facts["seeds"] == [2025, 2025]
    assert facts["batches"] == [128, 22]
    assert facts["orders"][0] != split.train_y.tolist()
    assert sorted(facts["orders"][0]) == sorted(split.train_y.tolist())
    assert facts["orders"][1] == split.val_y.tolist()
    assert result["accuracy"] == float((split.test_y == 1).double().mean())
    assert result["parameters"] == 21
    assert result["score"] == pytest.approx((1 / 3 - 0.2) / 0.8 * 100)
    assert evaluate_request(write_request(tmp_path, split, param_limit=20.0))["score"] == 0
    assert evaluate_request(write_request(tmp_path, split, baseline_accuracy=0.9))["score"] == 0


def test_peak_memory_is_this_processs() -> None:
    memory = torch.ones(100 << 18)  # 100 MiB
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    assert 100 < measure_peak_memory() <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit * 1.01
    assert len(memory)


def test_failing_submission_sees_no_other_package(capfd: pytest.CaptureFixture[str]) -> None:
    submission = f"""
import sys
sys.path.append({str(ROOT)!r})
for name in ("scipy", "sklearn", "tqdm", "protonet"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
raise RuntimeError("the end")
"""
    message = "^`submission` must run in the contest's process; got exit code 1. Its traceback is above.$"
    with pytest.raises(ValueError, match=message):
        evaluate_submission(submission.encode(), sample_three())
    err = capfd.readouterr().err
    missing = [f"No module named '{name}'" for name in ("scipy", "sklearn", "tqdm", "protonet")]
    assert err.splitlines()[:4] == missing
    assert err.endswith("RuntimeError: the end\n")


def test_public_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["contest", "--config", "agentics", "--single-file", "--json", str(tmp_path / "new" / "out.json")]) == 0
    result = json.loads((tmp_path / "new" / "out.json").read_text())
    assert 0.3 < result["accuracy"] < 0.6
    assert result["parameters"] <= 500_000
    assert result["submission"] == "single file"
    line, versions = capsys.readouterr().out.splitlines()
    assert line.startswith(f"accuracy {result['accuracy']:.4f}  score ")
    assert versions.startswith(f"Python {result['python']}, torch {result['torch']}, numpy {result['numpy']}: ")


def test_versions_of_the_contest_are_named() -> None:
    assert describe_versions("3.12.1", "2.3.1+cu121") == "the contest's versions\n"
    for python, torch_version in (("3.11.7", "2.3.1"), ("3.12.1", "2.13.0+cpu"), ("3.12.1", "2.4.1")):
        assert describe_versions(python, torch_version).startswith("not the contest's versions")


def test_draws_of_every_limit_and_method(make_report: Callable[[str], Made]) -> None:
    rows = make_report("contest-draws").rows
    assert [(row["family"], row["limit"]) for row in rows] == [("isotropic", 0), ("class_noise", 0)]
    assert set(rows[0]["percent"]) == {draws.SOLVER_METHOD, "nearest_mean", "cosine", "mlp", "lda", "bayes"}
    assert set(rows[1]["percent"]) == {draws.SOLVER_METHOD, *draws.METHODS} - {draws.BAYES_METHOD}
    assert rows[0]["parameters"] == [0]
    split = sample_family("class_noise", seed=0, n_train=2, n_val=1, num_classes=4, dim=16)
    train, val = [(split.train_x, split.train_y)], [(split.val_x, split.val_y)]
    network = solve(train, val, {"num_classes": 4, "input_dim": 16, "param_limit": 0})
    accuracy = float((network(split.test_x).argmax(dim=1) == split.test_y).double().mean())
    assert rows[1]["percent"][draws.SOLVER_METHOD] == [100 * accuracy]
    assert rows[1]["parameters"] == [network.count_parameters()]
    assert draws._parse_shots("", "2+1,1+1,2+1") == [(2, 1), (1, 1)]


def test_statistics() -> None:
    accuracies = {"cosine": [0.5, 0.7], "lda": [0.9, 0.6], "bayes": [0.9, 0.9], draws.SOLVER_METHOD: [0.8, 0.9]}
    results = {
        draws.MethodRun("nuisance", 16, 4, seed, 128, 384, method, 9 if method == draws.SOLVER_METHOD else None): {
            "accuracy": accuracies[method][seed],
            "parameters": 1000 + seed,
            "seconds": 1.0,
        }
        for method in accuracies
        for seed in (0, 1)
    }
    header, _, row = read_cells(draws.tabulate(draws.summarise(results)))
    assert header[3:7] == ["ours", "Bayes", "gap to Bayes", "raw cosine"]
    assert header[7:] == ["shrunken LDA", "regret", "parameters", "seconds"]
    assert row == [
        *("nuisance", "16+4", "9", "85.00 ±5.00", "90.00 ±0.00", "+5.00 ±5.00"),
        *("60.00 (+25.00 ±5.00)", "75.00 (+10.00 ±20.00)", "-10.00 ±20.00", "1,000", "1.0"),
    ]


KAPPAS = torch.tensor([1e-9, 1e-4, 0.3, 0.999, 1, 1.5, 7, 50, 300, 2e3, 1e4, 1e5, 1e6]).double()


def sample_covariance(dim: int) -> Tensor:
    root = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    return 0.1 * root @ root.T + 0.05 * torch.eye(dim, dtype=torch.float64)


def sample_task(seed: int, dim: int, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return support, labels and queries around prototypes of norm 2.5, with any count a class."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, dtype=torch.float64, generator=generator)
    prototypes = 2.5 * torch.nn.functional.normalize(normal(len(counts), dim), dim=1)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    queries = torch.randint(len(counts), (60,), generator=generator)
    support = prototypes[labels] + 0.8 * normal(len(labels), dim)
    return support, labels, prototypes[queries] + 0.8 * normal(60, dim)


def test_the_integral_is_scipys_where_that_does_not_underflow() -> None:
    for dim in (2, 3, 5, 10, 61, 62, 63, 100, 384, 1000):
        order = dim / 2 - 1
        kappa = KAPPAS.numpy()
        scaled = ive(order, kappa)
        seen = scaled > 1e-250
        expected = np.log(scaled[seen]) + kappa[seen] - order * np.log(kappa[seen])
        result = draws.log_vmf_integral(KAPPAS, dim).numpy()[seen]
        assert seen.sum() >= 4, dim
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-10)


def test_the_integral_follows_the_recurrence() -> None:
    for dim in (4, 60, 61, 62, 63, 64, 384, 4000):
        higher = draws.log_vmf_integral(KAPPAS, dim + 2) + 2 * KAPPAS.log()
        same = draws.log_vmf_integral(KAPPAS, dim) + np.log(dim - 2)
        expected = draws.log_vmf_integral(KAPPAS, dim - 2)
        torch.testing.assert_close(torch.logaddexp(higher, same), expected, rtol=1e-13, atol=1e-10)


def test_brute_force_over_the_sphere() -> None:
    dim = 4
    support, labels, query = sample_task(dim, dim, [1, 4, 0, 2, 3])
    rng = np.random.default_rng(dim)
    centres = rng.normal(size=(40_000, dim))
    centres *= 2.5 / np.linalg.norm(centres, axis=1, keepdims=True)

    def log_likelihood(x: Tensor) -> Any:
        return -cdist(x.numpy(), centres, "sqeuclidean") / (2 * 0.8**2)  # (rows, centres)

    at_query = log_likelihood(query)
    scores = []
    for c in range(5):
        weight = log_likelihood(support[labels == c]).sum(axis=0)  # (centres,)
        scores.append(logsumexp(at_query + weight, axis=1) - logsumexp(weight))
    table = np.stack(scores, axis=1)  # (n_queries, classes)
    lead = np.diff(np.sort(table, axis=1)[:, -2:], axis=1)[:, 0]
    sure = lead > 0.05  # far beyond the error of the sampling
    result = draws.predict_bayes_sphere(support, labels, query, num_classes=5, noise=0.8).numpy()
    many = draws.predict_bayes_sphere(support, labels, query.repeat(20, 1), num_classes=5, noise=0.8)  # in chunks
    assert many.tolist() == [*result] * 20
    assert sure.mean() > 0.8
    assert set(table[sure].argmax(axis=1)) == set(range(5))
    np.testing.assert_array_equal(result[sure], table[sure].argmax(axis=1))


@pytest.mark.parametrize("isotropic", [True, False])
def test_slow_loop(isotropic: bool) -> None:
    dim, counts = 6, [1, 5, 0, 2]
    support, labels, query = sample_task(1, dim, counts)
    covariance = sample_covariance(dim)
    noise = 0.64 * np.eye(dim) if isotropic else covariance.numpy()
    prior = 2.5**2 / dim * np.eye(dim)
    scores = []
    for c, n in enumerate(counts):
        posterior = np.linalg.inv(np.linalg.inv(prior) + n * np.linalg.inv(noise))
        mean = posterior @ np.linalg.inv(noise) @ support[labels == c].sum(0).numpy()
        scores.append(multivariate_normal(mean, noise + posterior).logpdf(query.numpy()))
    expected = np.stack(scores, axis=1).argmax(axis=1)
    result = draws.predict_bayes_gaussian(support, labels, query, num_classes=4, covariance=torch.tensor(noise))
    assert set(expected) == set(range(4))
    np.testing.assert_array_equal(result.numpy(), expected)


def test_the_rule_is_that_of_the_noise() -> None:
    for name in ("isotropic", "correlated", "nuisance"):
        split = sample_family(name, seed=0, n_train=2, n_val=1, num_classes=10, dim=70)
        x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
        anisotropic = partial(draws.predict_bayes_gaussian, covariance=split.noise_covariance)  # type: ignore[arg-type]
        rule = draws.predict_bayes_sphere if name == "isotropic" else anisotropic
        assert torch.equal(draws.predict_bayes(split), rule(x, y, split.test_x, num_classes=10))
    with pytest.raises(ValueError, match=r"^`split` must know its noise_covariance; got"):
        draws.predict_bayes(sample_family("warped", seed=0, num_classes=2, dim=4))


def sample_draw(family: str = "isotropic", n_train: int = 4) -> Split:
    return sample_family(family, seed=3, n_train=n_train, n_val=2, num_classes=6, dim=10)


def run(split: Split, method: str) -> torch.Tensor:
    predicted = draws.predict_test_rows(split, method)
    assert predicted is not None
    return predicted


def arrays(seed: int, rows: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    x, y = blobs(seed, classes=classes, rows=rows)
    return x.double().numpy(), y.numpy()


def test_means_are_scikit_learns_and_the_slow_loop() -> None:
    split = sample_draw("subclusters")
    x, y = concat_train_and_val(split)
    expected = NearestCentroid().fit(x.numpy(), y.numpy()).predict(split.test_x.numpy())
    assert run(split, "nearest_mean").tolist() == expected.tolist()
    means = [x[y == c].mean(dim=0) for c in range(6)]
    cosines = [[torch.cosine_similarity(row, mean, dim=0) for mean in means] for row in split.test_x]
    assert run(split, "cosine").tolist() == np.argmax(cosines, axis=1).tolist()


def test_lda_is_the_closed_form() -> None:
    split = sample_draw("correlated", n_train=8)
    x, y = (part.double() if part.is_floating_point() else part for part in concat_train_and_val(split))
    means = torch.stack([x[y == c].mean(dim=0) for c in range(6)])
    residuals = x - means[y]
    sample = residuals.T @ residuals / len(x)
    target = sample.diagonal().mean() * torch.eye(10, dtype=torch.float64)
    spread = ((residuals[:, :, None] * residuals[:, None, :] - sample) ** 2).mean(dim=0).sum() / len(x)
    shrinkage = min(1.0, float(spread / ((sample - target) ** 2).sum()))
    weights = torch.linalg.solve((1 - shrinkage) * sample + shrinkage * target, means.T)
    scores = split.test_x.double() @ weights - (means * weights.T).sum(dim=1) / 2
    assert run(split, "lda").tolist() == scores.argmax(dim=1).tolist()


def test_logistic_is_scikit_learns_search() -> None:
    split = sample_draw("nuisance", n_train=8)
    x, y = (part.numpy() for part in concat_train_and_val(split))
    scaler = StandardScaler().fit(x)
    search = GridSearchCV(
        LogisticRegression(), {"C": INVERSE_PENALTIES}, cv=StratifiedKFold(N_FOLDS, shuffle=True, random_state=0)
    ).fit(scaler.transform(x), y)
    expected = search.predict(scaler.transform(split.test_x.numpy()))
    assert run(split, "logistic").tolist() == expected.tolist()


def test_kernel_ridge_has_the_best_settings_of_a_search_that_leaves_rows_out() -> None:
    split = sample_draw("nuisance", n_train=3)
    x, y = (part.numpy() for part in concat_train_and_val(split))
    scaler = StandardScaler().fit(x.astype(np.float64))
    rows, targets = scaler.transform(x.astype(np.float64)), np.eye(6)[y] - 1 / 6
    best, expected = -1, np.array([])
    for gamma, alpha in itertools.product((0.01, 0.1, 1.0), (1e-3, 1e-2, 1e-1, 1.0, 10.0)):
        model = KernelRidge(kernel="rbf", gamma=gamma, alpha=alpha)
        correct = (cross_val_predict(model, rows, targets, cv=LeaveOneOut()).argmax(axis=1) == y).sum()
        if correct > best:
            best, expected = correct, model.fit(rows, targets).predict(scaler.transform(split.test_x.numpy()))
    assert run(split, "kernel-ridge").tolist() == expected.argmax(axis=1).tolist()


def test_mlp_learns_from_train_alone_and_leaves_the_generator() -> None:
    split = sample_draw(n_train=8)
    before = torch.get_rng_state()
    predicted = run(split, "mlp")
    assert torch.equal(torch.get_rng_state(), before)
    assert float((predicted == split.test_y).double().mean()) > 0.8
    wrong = dataclasses.replace(split, val_y=(split.val_y + 1) % 6)
    assert torch.equal(predicted, run(wrong, "mlp"))


def test_one_sample_per_class() -> None:
    for name in draws.METHODS:
        split = sample_family("isotropic", seed=0, n_train=1, n_val=1, num_classes=3, dim=4)
        predicted = run(split, name)
        assert predicted.shape == split.test_y.shape, name
        assert predicted.dtype == torch.int64, name


@pytest.mark.parametrize("method", TUNED_BASELINES)
def test_every_tuned_baseline_learns_blobs(method: str) -> None:
    rows = 5
    x, y = arrays(0, rows + 20)
    order = np.argsort(y, kind="stable").reshape(3, -1)
    train, test = order[:, :rows].ravel(), order[:, rows:].ravel()
    predict = BASELINES[method].fit(x[train], y[train])
    assert (predict(x[test]).predicted == y[test]).mean() > 0.85
    far = predict(50 * x[test])  # probabilities themselves would be zero
    if method == "logistic":
        assert far.log_probabilities is not None
        assert np.isfinite(far.log_probabilities).all()
        assert (far.log_probabilities.argmax(1) == far.predicted).all()
        np.testing.assert_allclose(np.exp(far.log_probabilities).sum(1), 1)
