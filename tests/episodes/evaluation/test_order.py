"""A method's input does not reveal the classes of the queries, by the order of rows or by their indices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.evaluation.evaluate import EpisodeScores, evaluate
from protonet.episodes.methods import METHODS, Method
from protonet.episodes.samplers.batch import Episodes, TrainedEncoder, make_row_reader
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import Sampler
from protonet.sampling import index_classes
from tests.episodes.meta_cases import make_plan

#: Rows sorted by class, as in most files. The first feature is the class, which spies read.
LABELS = torch.arange(12).repeat_interleave(20)
X = torch.stack([LABELS.float(), torch.arange(240) / 240], dim=1)
INDEX = index_classes(LABELS)
PROTOCOLS: dict[str, Sampler] = {
    "balanced": EpisodeConfig((4, 4), (1, 2), n_query=5),
    "dirichlet": EpisodeConfig((2, 5), n_query=3, imbalance=2.0),
    "open": EpisodeConfig((3, 3), n_query=5, n_open_classes=2),
    "unlabelled": EpisodeConfig((3, 3), n_query=5, n_unlabelled=4, n_distractors=2),
    "fixed split": FixedSplit(n_shot=2, n_training_rows=(10,) * 12),
    "Meta-Dataset": MetaDataset(),
    "generalized": GeneralizedSampler(EpisodeConfig((3, 3), n_query=5), n_base=4),
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

    scores = evaluate(X, INDEX, {"guess": guess}, PROTOCOLS[name], n_episodes=200)
    assert knows_nothing(scores["guess"], chance)


def test_row_indices_do_not_reveal_classes() -> None:
    def guess(episodes: Episodes) -> Tensor:
        """Guess the class of the support row whose index is nearest to the query's index."""
        trained = episodes.trained
        assert trained is not None
        assert trained.support is not None
        assert trained.query is not None
        support, query = trained.gather()
        assert torch.equal(support, episodes.support)
        assert torch.equal(query, episodes.query)
        for weight in trained.encoder.parameters():
            weight.data.zero_()  # of a copy
        distances = (trained.query[:, :, None] - trained.support[:, None]).abs().double()
        hot = F.one_hot(episodes.support_labels, episodes.n_way).bool()  # (episodes, n_support, n_way)
        return -distances[..., None].where(hot[:, None], 1e9).amin(dim=2)

    trained = TrainedEncoder(torch.nn.Linear(2, 2), torch.nn.Identity(), make_plan(), make_row_reader(X))
    scores = evaluate(X, INDEX, {"guess": guess}, PROTOCOLS["balanced"], n_episodes=200, trained=trained)
    assert all(weight.any() for weight in trained.encoder.parameters())
    assert knows_nothing(scores["guess"], [1 / 4])


def test_unlabelled_rows_of_a_class_do_not_stand_together() -> None:
    fractions: list[Tensor] = []

    def spy(episodes: Episodes) -> Tensor:
        assert episodes.unlabelled is not None
        classes = episodes.unlabelled[..., 0]
        fractions.append((classes[:, 1:] == classes[:, :-1]).double().mean(dim=1))
        return METHODS["protonet"](episodes)

    evaluate(X, INDEX, {"spy": spy}, PROTOCOLS["unlabelled"], n_episodes=200)
    excess = torch.cat(fractions) - 3 / 19  # of 20 rows, 3 others are of a row's class
    assert abs(float(excess.mean())) < 5 * float(excess.std()) / math.sqrt(len(excess))


@pytest.mark.parametrize("name", ["open", "generalized"])
def test_a_wrapped_method_has_the_same_scores(name: str) -> None:
    """A wrapped method gets its queries in another order than a method of this library, but has the same scores."""
    x = torch.randn(240, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + LABELS[:, None] / 3

    def wrapped(episodes: Episodes) -> Tensor:
        return METHODS["ridge"](episodes)

    methods: dict[str, Method] = {"ours": METHODS["ridge"], "wrapped": wrapped}
    scores = evaluate(x, INDEX, methods, PROTOCOLS[name], n_episodes=70)
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
        earlier = evaluate(X, INDEX, {"spy": known}, PROTOCOLS[name], n_episodes=done) if done else None
        evaluate(X, INDEX, {"spy": spy}, PROTOCOLS[name], n_episodes=20, earlier=earlier)
    for resumed in seen[1:]:
        assert resumed.keys() <= seen[0].keys()
        assert all(torch.equal(query, seen[0][key]) for key, query in resumed.items())
