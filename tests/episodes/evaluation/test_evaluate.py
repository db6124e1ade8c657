"""Scores equal slow loops; input does not reveal the queries' classes; results do not depend on the device."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from protonet.episodes.evaluation.evaluate import (
    EpisodeScores,
    evaluate,
    get_process_device,
    open_set_auroc,
    open_set_fpr95,
    predict_queries,
)
from protonet.episodes.methods import METHODS, Method
from protonet.episodes.methods.common import support_means
from protonet.episodes.methods.prototypes import protonet, protonet_cosine
from protonet.episodes.samplers.batch import Episodes, TrainedEncoder, gather_episodes, make_row_reader, split_by_size
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import Sampler
from protonet.metrics import calibration_error
from protonet.sampling import index_classes
from tests.emulated_device import AWAY, EmulatedDevice
from tests.episodes.cases import Command, make_plan, save_data

LABELS = torch.arange(240) % 8
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))[LABELS]
X = X + torch.randn(240, 6, generator=torch.Generator().manual_seed(1))
INDEX = index_classes(LABELS)
PROTOTYPES = {"euclidean": protonet, "cosine": protonet_cosine}
SETTINGS: list[Sampler] = [
    EpisodeConfig(way=(3, 3), shot=(2, 2), query=4),
    EpisodeConfig(way=(2, 5), shot=(1, 3), query=3, unequal=True, n_open_classes=2),
    EpisodeConfig(way=(3, 3), shot=(1, 2), query=4, imbalance=2.0),
    FixedSplit(shot=(2, 2), n_training_rows=(20,) * 8),
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
    scores = evaluate(X, INDEX, PROTOTYPES, setting, seed=3, episodes=9)
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
            result = scores["euclidean"].accuracy_by_shot[index, column]
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
    assert math.isclose(calibration_error(scores["euclidean"].confidence_bins), error, rel_tol=1e-5)


def test_the_number_of_threads_does_not_matter_and_is_restored() -> None:
    threads = torch.get_num_threads()
    first = evaluate(X, INDEX, PROTOTYPES, SETTINGS[0], episodes=10)
    try:
        torch.set_num_threads(2)
        assert equal(first, evaluate(X, INDEX, PROTOTYPES, SETTINGS[0], episodes=10))
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
        both = evaluate(X, INDEX, {"mine": fit_by_gradients, **PROTOTYPES}, setting, episodes=20)
        assert both["mine"].accuracy.mean() > 0.4
        assert not both["mine"].accuracy.requires_grad
        alone = evaluate(X, INDEX, PROTOTYPES, setting, episodes=20)
        assert equal(alone, {name: both[name] for name in PROTOTYPES})


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
            evaluate(X, INDEX, own, SETTINGS[0], episodes=5)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^`classes` must have 32 rows .*; got class '0' with 30\."):
        evaluate(X, INDEX, PROTOTYPES, EpisodeConfig(way=(2, 2), query=31))

    def broken(episodes: Episodes) -> torch.Tensor:
        logits = protonet(episodes)
        logits[2:, 0, 0] = math.nan  # of the second batch, which begins with episode 1
        return logits

    with pytest.raises(ValueError, match="`method` must give finite logits; got others of bad in episode 3"):
        evaluate(X, INDEX, {"bad": broken}, SETTINGS[0], episodes=5)
    half = {"half": lambda episodes: protonet(episodes).half()}  # any floats will do
    assert evaluate(X, INDEX, half, SETTINGS[0], episodes=5)["half"].accuracy.mean() > 0.5
    with pytest.raises(ValueError, match=r"^`seed` must be a"):
        evaluate(X, INDEX, PROTOTYPES, SETTINGS[0], seed=-1)
    with pytest.raises(ValueError, match=r"^`episodes` must be a"):
        evaluate(X, INDEX, PROTOTYPES, SETTINGS[0], episodes=0)


def test_open_queries_at_the_threshold_are_counted_as_known() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert open_set_fpr95(scores, 4).tolist() == [0.5, 1.0]
    twenty = torch.cat([torch.arange(20.0), torch.tensor([0.5])])[None]
    assert open_set_fpr95(twenty, 20).tolist() == [0.0]  # 19 of 20 are 95 %
    assert open_set_fpr95(twenty[:, 1:], 19).tolist() == [0.0]


def test_areas_under_curves_of_open_queries_equal_those_by_hand() -> None:
    """Ties count half; known queries that are classified wrongly do not count."""
    assert open_set_auroc(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2).tolist() == [0.875]
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert math.isclose(float(open_set_auroc(scores, 3, torch.tensor([[True, False, True]]))), 2 / 3)
    assert float(open_set_auroc(scores.flip(1), 3, torch.tensor([[True, True, True]]))) == 0.0


#: Rows sorted by class, as in most files. The first feature is the class, which spies read.
SORTED_LABELS = torch.arange(12).repeat_interleave(20)
SORTED_X = torch.stack([SORTED_LABELS.float(), torch.arange(240) / 240], dim=1)
SORTED_INDEX = index_classes(SORTED_LABELS)
PROTOCOLS: dict[str, Sampler] = {
    "balanced": EpisodeConfig((4, 4), (1, 2), query=5),
    "dirichlet": EpisodeConfig((2, 5), query=3, imbalance=2.0),
    "open": EpisodeConfig((3, 3), query=5, n_open_classes=2),
    "unlabelled": EpisodeConfig((3, 3), query=5, unlabelled=4, distractors=2),
    "fixed split": FixedSplit(shot=(2, 2), n_training_rows=(10,) * 12),
    "Meta-Dataset": MetaDataset(),
    "generalized": GeneralizedSampler(EpisodeConfig((3, 3), query=5), n_base_classes=4),
}


def knows_nothing(scores: EpisodeScores, chance: list[float]) -> bool:
    """Return whether accuracies equal those of chance, and AUROC of open classes 1/2, within five standard errors."""
    excess = scores.accuracy - sum(chance) / len(chance)
    known = [excess, *([scores.auroc - 0.5] if not scores.auroc.isnan().any() else [])]
    return all(abs(float(part.mean())) <= 5 * float(part.std()) / math.sqrt(len(part)) for part in known)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_positions_of_queries_do_not_reveal_classes(name: str) -> None:
    chance: list[float] = []

    def guess(episodes: Episodes) -> Tensor:
        """Guess that queries are sorted by class, in equal shares, and that earlier queries are more surely known."""
        n_episodes, n_queries = episodes.query.shape[:2]
        chance.extend([1 / episodes.n_way] * n_episodes)
        position = torch.arange(n_queries)
        hot = F.one_hot(position * episodes.n_way // n_queries, episodes.n_way)
        return (hot * (2 - position[:, None] / n_queries)).expand(n_episodes, -1, -1)

    scores = evaluate(SORTED_X, SORTED_INDEX, {"guess": guess}, PROTOCOLS[name], episodes=200)
    assert knows_nothing(scores["guess"], chance)


def test_row_indices_do_not_reveal_classes() -> None:
    def guess(episodes: Episodes) -> Tensor:
        """Guess the class of the support row whose index is nearest to the query's index."""
        trained = episodes.trained
        assert trained is not None
        assert trained.support_ids is not None
        assert trained.query_ids is not None
        support, query = trained.gather_inputs()
        assert torch.equal(support, episodes.support)
        assert torch.equal(query, episodes.query)
        for weight in trained.encoder.parameters():
            weight.data.zero_()  # of a copy
        distances = (trained.query_ids[:, :, None] - trained.support_ids[:, None]).abs().double()
        hot = F.one_hot(episodes.support_labels, episodes.n_way).bool()  # (episodes, n_support, n_way)
        return -distances[..., None].where(hot[:, None], 1e9).amin(dim=2)

    trained = TrainedEncoder(torch.nn.Linear(2, 2), torch.nn.Identity(), make_plan(), make_row_reader(SORTED_X))
    scores = evaluate(SORTED_X, SORTED_INDEX, {"guess": guess}, PROTOCOLS["balanced"], episodes=200, trained=trained)
    assert all(weight.any() for weight in trained.encoder.parameters())
    assert knows_nothing(scores["guess"], [1 / 4])


def test_unlabelled_rows_of_a_class_do_not_stand_together() -> None:
    fractions: list[Tensor] = []

    def spy(episodes: Episodes) -> Tensor:
        assert episodes.unlabelled is not None
        classes = episodes.unlabelled[..., 0]
        fractions.append((classes[:, 1:] == classes[:, :-1]).double().mean(dim=1))
        return METHODS["protonet"](episodes)

    evaluate(SORTED_X, SORTED_INDEX, {"spy": spy}, PROTOCOLS["unlabelled"], episodes=200)
    excess = torch.cat(fractions) - 3 / 19  # of 20 rows, 3 others are of a row's class
    assert abs(float(excess.mean())) < 5 * float(excess.std()) / math.sqrt(len(excess))


@pytest.mark.parametrize("name", ["open", "generalized"])
def test_a_wrapped_method_has_the_same_scores(name: str) -> None:
    """A wrapped method gets its queries in another order than a method of this library, but has the same scores."""
    noise = torch.randn(240, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = noise + SORTED_LABELS[:, None] / 3

    def wrapped(episodes: Episodes) -> Tensor:
        return METHODS["ridge"](episodes)

    methods: dict[str, Method] = {"ours": METHODS["ridge"], "wrapped": wrapped}
    scores = evaluate(x, SORTED_INDEX, methods, PROTOCOLS[name], episodes=70)
    for field, known in vars(scores["ours"]).items():
        assert torch.allclose(known, getattr(scores["wrapped"], field), equal_nan=True), field


@pytest.mark.parametrize("name", ["balanced", "Meta-Dataset"])
def test_the_order_of_queries_depends_on_the_episode_alone(name: str) -> None:
    """A method sees the same queries of an episode in the same order, whatever other episodes are in the batch."""
    seen: list[dict[float, Tensor]] = []

    def spy(episodes: Episodes) -> Tensor:
        seen[-1].update({float(query.sum()): query for query in episodes.query})
        return METHODS["protonet"](episodes)

    for done in (0, 1, 5):
        seen.append({})
        known = METHODS["protonet"]
        earlier = evaluate(SORTED_X, SORTED_INDEX, {"spy": known}, PROTOCOLS[name], episodes=done) if done else None
        evaluate(SORTED_X, SORTED_INDEX, {"spy": spy}, PROTOCOLS[name], episodes=20, earlier=earlier)
    for resumed in seen[1:]:
        assert resumed.keys() <= seen[0].keys()
        assert all(torch.equal(query, seen[0][key]) for key, query in resumed.items())


FEW = "--dataset tiny.npz --side novel --way 2 --query 2 --episodes 6"
LINES = {
    "plain": "--dataset tiny.npz --side all --way 3 --query 4 --episodes 6 --method protonet mine.py:own",
    "mapped, normalised": f"{FEW} --normalize cl2 --method simpleshot bd-cspn mine.py:own",
    "shots, open, shares": "--dataset tiny.npz --side all --way 2-4 --shot 1-2 --unequal --query 1 --n-open-classes 1 "
    "--imbalance 2 --unlabelled 2 --episodes 6 --method oslo semi-kmeans",
    "generalised": f"{FEW} --protocol generalized --method protonet",
    "encoder": f"{FEW} --encoder a.safetensors --method feat protonet finetune:steps=1 mine.py:own",
}
OWN = """
from protonet.episodes.methods.prototypes import protonet

def own(episodes):
    if episodes.base is not None:
        episodes.base.take(episodes.base.rows_by_class.row_indices)
    if episodes.trained is not None:
        episodes.trained.gather_inputs()
    return protonet(episodes)
"""


@pytest.mark.parametrize("name", LINES)
@pytest.mark.usefixtures("no_baseline")
def test_a_command_gives_the_same_on_another_device(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_data(tmp_path / "tiny.npz")
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    if name == "encoder":
        small = "--dataset tiny.npz --way 2 --query 2 --episodes-per-step 2 --steps 1 --backbone mlp --device cpu"
        command(f"train --objective feat {small} -o a.safetensors")
    expected = command(LINES[name], "--json here.json")
    with EmulatedDevice():
        result = command(LINES[name], f"--device {AWAY} --json there.json")
    assert result == expected
    here, there = (json.loads(Path(f"{item}.json").read_text(encoding="utf-8")) for item in ("here", "there"))
    assert there["settings"].pop("device") == str(AWAY)
    assert there == here


def test_a_device_that_the_machine_lacks_is_refused(command: Command) -> None:
    for device in ["abacus", "meta", "cuda:99"]:
        command.refuses(
            r"`--device` must be a device of this machine; got '.*' \(.*\)\. Pass 'cpu'\.", "--device", device
        )


def test_processes_of_a_machine_share_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(get_process_device(name)) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]


@pytest.mark.parametrize("shape", [(1, 300, 2000), (3, 100, 1501), (64, 5, 75)])
def test_predictions_in_blocks_equal_those_at_once_to_the_bit(shape: tuple[int, int, int]) -> None:
    logits = -(8 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).square()
    predicted, confidence, highest = predict_queries(logits.transpose(1, 2), shape[2] - 7)
    known = logits[..., : shape[2] - 7].contiguous()
    assert torch.equal(predicted, known.max(dim=1).indices)
    assert torch.equal(confidence, known.softmax(dim=1).amax(dim=1))
    assert torch.equal(highest, logits.amax(dim=1))
