from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from protonet.episodes.evaluation.evaluate import EpisodeScores, evaluate, false_positive_rate, open_set_auroc
from protonet.episodes.methods.common import support_means
from protonet.episodes.methods.prototypes import protonet, protonet_cosine
from protonet.episodes.samplers.batch import Episodes, gather_episodes, make_row_reader, split_by_size
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.sampler import Sampler
from protonet.metrics import calibration_error
from protonet.sampling import index_classes

LABELS = torch.arange(240) % 8
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))[LABELS]
X = X + torch.randn(240, 6, generator=torch.Generator().manual_seed(1))
INDEX = index_classes(LABELS)
METHODS = {"euclidean": protonet, "cosine": protonet_cosine}
SETTINGS: list[Sampler] = [
    EpisodeConfig(way=(3, 3), shot=(2, 2), n_query=4),
    EpisodeConfig(way=(2, 5), shot=(1, 3), n_query=3, unequal=True, n_open_classes=2),
    EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=4, imbalance=2.0),
    FixedSplit(n_shot=2, n_training_rows=(20,) * 8),
]


def equal(a: dict[str, EpisodeScores], b: dict[str, EpisodeScores]) -> bool:
    return all(
        torch.equal(getattr(a[name], field).nan_to_num(-1), getattr(b[name], field).nan_to_num(-1))
        for name in a
        for field in vars(a[name])
    )


def area_slowly(scores: torch.Tensor, known: torch.Tensor, right: torch.Tensor) -> float:
    """Compute OSCR threshold by threshold: the area under the rate of right known queries over that of open queries."""
    points = [(0.0, 0.0)]
    for threshold in scores.unique().flip(0):
        selected = scores >= threshold
        points.append((float(selected[~known].double().mean()), float((selected & right)[known].double().mean())))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_to_a_slow_loop(setting: Sampler) -> None:
    scores = evaluate(X, INDEX, METHODS, setting, seed=3, n_episodes=9)
    confidences, hits = [], []
    for index in range(9):
        (part,) = split_by_size(setting.sample(INDEX, seed=3, first=index, n_episodes=1))
        logits = protonet(gather_episodes(make_row_reader(X), part))[0]
        known = part.query_labels[0] >= 0
        right = logits.argmax(dim=1) == part.query_labels[0]
        assert math.isclose(scores["euclidean"].accuracy[index], right[known].double().mean())
        for column, shots in enumerate(range(setting.shot[0], setting.shot[1] + 1)):
            chosen = part.query_shots[0] == shots
            expected = right[chosen].double().mean() if chosen.any() else torch.tensor(math.nan)
            result = scores["euclidean"].by_shot[index, column]
            assert torch.allclose(result, expected.double(), equal_nan=True)
        highest = logits.max(dim=1).values
        if not known.all():
            assert math.isclose(scores["euclidean"].auroc[index], roc_auc_score(known.numpy(), highest.numpy()))
            false, true, _ = roc_curve(known.numpy(), highest.numpy(), drop_intermediate=False)
            assert math.isclose(scores["euclidean"].fpr95[index], false[true >= 0.95].min())
            assert math.isclose(scores["euclidean"].oscr[index], area_slowly(highest, known, right), rel_tol=1e-9)
        else:
            element = scores["euclidean"]
            assert all(math.isnan(item[index]) for item in (element.auroc, element.fpr95, element.oscr))
        confidences += logits.softmax(dim=1).max(dim=1).values[known].tolist()
        hits += right[known].tolist()
    error = 0.0
    for position in range(15):
        inside = [i for i, c in enumerate(confidences) if position / 15 < c <= (position + 1) / 15]
        error += abs(sum(confidences[i] - hits[i] for i in inside)) / len(hits)
    assert math.isclose(calibration_error(scores["euclidean"].bins), error, rel_tol=1e-5)


def test_the_number_of_threads_does_not_matter_and_is_restored() -> None:
    threads = torch.get_num_threads()
    first = evaluate(X, INDEX, METHODS, SETTINGS[0], n_episodes=10)
    try:
        torch.set_num_threads(2)
        assert equal(first, evaluate(X, INDEX, METHODS, SETTINGS[0], n_episodes=10))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_method_may_use_gradients_and_overwrite_its_input() -> None:
    def fit_by_gradients(episodes: Episodes) -> torch.Tensor:
        prototypes = support_means(episodes).requires_grad_()
        logits = -torch.cdist(episodes.support, prototypes)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), episodes.support_labels.flatten())
        loss.backward()
        assert prototypes.grad is not None
        logits = -torch.cdist(episodes.query, prototypes - 0.1 * prototypes.grad)
        episodes.query.numpy()[:] = 0  # behind torch's back
        episodes.support.zero_()
        episodes.support_labels.zero_()
        return logits

    for setting in SETTINGS:
        both = evaluate(X, INDEX, {"mine": fit_by_gradients, **METHODS}, setting, n_episodes=20)
        assert both["mine"].accuracy.mean() > 0.4
        assert not both["mine"].accuracy.requires_grad
        alone = evaluate(X, INDEX, METHODS, setting, n_episodes=20)
        assert equal(alone, {name: both[name] for name in METHODS})


def test_wrong_outputs_of_a_method_are_refused() -> None:
    changes: list[tuple[Callable[[torch.Tensor], Any], str]] = [
        (lambda logits: logits[:, :-1], r"give logits of shape .*, \(\d+, 12, 3\) here; got \(\d+, 11, 3\) of own\."),
        (lambda logits: logits.argmax(dim=2), "give a tensor of floats; got torch.int64 of own"),
        (lambda _: None, "give a tensor of floats; got NoneType of own"),
        (lambda logits: logits / 0, "give finite logits; got others of own in episode 0"),
    ]
    for change, message in changes:
        own = {"own": lambda episodes, change=change: change(protonet(episodes))}
        with pytest.raises((ValueError, TypeError), match=f"^`method` must {message}"):
            evaluate(X, INDEX, own, SETTINGS[0], n_episodes=5)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^`classes` must have 32 rows .*; got class '0' with 30\."):
        evaluate(X, INDEX, METHODS, EpisodeConfig(way=(2, 2), n_query=31))

    def broken(episodes: Episodes) -> torch.Tensor:
        logits = protonet(episodes)
        logits[2:, 0, 0] = math.nan  # of the second batch, which begins with episode 1
        return logits

    with pytest.raises(ValueError, match="`method` must give finite logits; got others of bad in episode 3"):
        evaluate(X, INDEX, {"bad": broken}, SETTINGS[0], n_episodes=5)
    half = {"half": lambda episodes: protonet(episodes).half()}  # any floats will do
    assert evaluate(X, INDEX, half, SETTINGS[0], n_episodes=5)["half"].accuracy.mean() > 0.5
    for changes in ({"seed": -1}, {"n_episodes": 0}, {"target_half_width": -1.0}):
        (argument,) = changes
        with pytest.raises(ValueError, match=f"^`{argument}` must be a"):
            evaluate(X, INDEX, METHODS, SETTINGS[0], **changes)


def test_open_queries_at_the_threshold_are_counted_as_known() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert false_positive_rate(scores, 4).tolist() == [0.5, 1.0]
    twenty = torch.cat([torch.arange(20.0), torch.tensor([0.5])])[None]
    assert false_positive_rate(twenty, 20).tolist() == [0.0]  # 19 of 20 are 95 %
    assert false_positive_rate(twenty[:, 1:], 19).tolist() == [0.0]


def test_areas_under_curves_of_open_queries_equal_those_by_hand() -> None:
    """Ties count half; known queries that are classified wrongly do not count."""
    assert open_set_auroc(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2).tolist() == [0.875]
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert math.isclose(float(open_set_auroc(scores, 3, torch.tensor([[True, False, True]]))), 2 / 3)
    assert float(open_set_auroc(scores.flip(1), 3, torch.tensor([[True, True, True]]))) == 0.0
