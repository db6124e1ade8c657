from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS
from protonet.episodes.samplers.batch import make_row_reader, summarize_base_classes
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.sampler import RowPool
from protonet.errors import InputError
from protonet.sampling import ClassIndex, index_classes, list_class_rows
from tests.strategies import seeds

GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.arange(9).repeat_interleave(torch.tensor([11, 7, 12, *[9] * 6]))
X = torch.randn(9, 4, generator=GENERATOR)[LABELS] + 0.8 * torch.randn(len(LABELS), 4, generator=GENERATOR)


def join(
    labels: torch.Tensor, x: torch.Tensor, n_base: int, setting: EpisodeConfig
) -> tuple[GeneralizedSampler, RowPool, ClassIndex]:
    """Make generalized episodes of which the first classes are base; return them, their rows, and the base rows."""
    full, names = index_classes(labels), tuple("abcdefghi")
    base, novel = (full.select_classes(torch.arange(n_base)), full.select_classes(torch.arange(n_base, len(full.size))))
    learned, queries = GeneralizedSampler(setting).hold_out(base, names)
    means = summarize_base_classes(make_row_reader(x), learned).class_means
    of_novel, of_base = (RowPool(x, make_row_reader(x), index, index) for index in (novel, queries))
    sampler, pool = GeneralizedSampler(setting).join_base(of_novel, of_base, means)
    return sampler, pool, learned


KIND, POOL, LEARNED = join(LABELS, X, 3, EpisodeConfig(way=(2, 4), shot=(1, 3), n_query=3))
ROWS, INDEX, SOURCES = POOL.x, POOL.by_class, POOL.dataset_rows


def test_every_fifth_base_row_is_a_query_and_not_in_its_mean_and_no_row_is_lost() -> None:
    for part in range(3):
        mine = X[part == LABELS]
        is_query = torch.arange(len(mine)) % 5 == 4
        rows = ROWS[INDEX.start[part] : INDEX.start[part] + INDEX.size[part]]
        assert torch.allclose(rows[0], mine[~is_query].mean(dim=0), atol=1e-6)
        assert torch.equal(rows[1:], mine[is_query])
    assert torch.equal(ROWS[INDEX.start[3] :], X[LABELS >= 3])
    assert torch.equal(LABELS[SOURCES.rows[SOURCES.start]], torch.arange(9))
    assert torch.equal(X[SOURCES.rows[SOURCES.start[3] :]], ROWS[INDEX.start[3] :])
    for part, learned in enumerate(list_class_rows(LEARNED)):
        queries = list_class_rows(SOURCES)[part][1:]
        assert sorted(torch.cat([learned, queries]).tolist()) == LABELS.eq(part).nonzero().flatten().tolist()


@given(seed=seeds, first=st.integers(0, 10**9), n=st.integers(1, 4))
def test_base_classes_come_first_and_novel_ones_are_those_of_plain_episodes(seed: int, first: int, n: int) -> None:
    draw = KIND.sample(INDEX, seed=seed, first=first, n_episodes=n)
    novel = INDEX.select_classes(torch.arange(3, 9))
    plain = KIND.novel.sample(novel, seed=seed, first=first, n_episodes=n)
    assert torch.equal(draw.support[:, 3:], plain.support)
    assert torch.equal(draw.query[:, 3:, : plain.query.shape[2]], plain.query)
    assert (draw.support[:, :3, 0] == INDEX.start[:3]).all()
    assert (draw.support[:, :3, 1:] < 0).all()
    for part in range(3):
        is_query = draw.query[:, part]
        assert (is_query > INDEX.start[part]).sum() == n * min(3, int(INDEX.size[part]) - 1)
        assert (is_query < INDEX.start[part] + INDEX.size[part]).all()


def test_scores_equal_a_slow_loop() -> None:
    """The slow loop finds the nearest mean among base and novel classes, one query at a time."""
    scores = evaluate(ROWS, INDEX, {"protonet": METHODS["protonet"]}, KIND, seed=2, n_episodes=20)["protonet"]
    for position in range(20):
        draw = KIND.sample(INDEX, seed=2, first=position, n_episodes=1)
        supports = [part[part >= 0] for part in draw.support[0]]
        means = [ROWS[part].mean(dim=0) for part in supports if len(part)]
        right: dict[bool, list[bool]] = {True: [], False: []}
        for label, part in enumerate(draw.query[0]):
            for row in part[part >= 0]:
                nearest = min(range(len(means)), key=lambda c: float(torch.dist(ROWS[row], means[c])))
                right[label < 3].append(nearest == label)
        base, novel = (sum(right[side]) / len(right[side]) for side in (True, False))
        assert float(scores.base[position]) == pytest.approx(base)
        assert float(scores.novel[position]) == pytest.approx(novel)
        assert float(scores.harmonic[position]) == pytest.approx(
            2 * base * novel / (base + novel) if base + novel else 0
        )
        both = right[True] + right[False]
        assert float(scores.accuracy[position]) == pytest.approx(sum(both) / len(both))


def test_data_that_the_protocol_cannot_sample_are_refused() -> None:
    for kind, message in [
        (replace(KIND, n_base=0), "`n_base` must be classes of a mean and a query or more; got 0"),
        (replace(KIND, n_base=9), "`n_base` must be classes of a mean and a query or more; got 9"),
        (replace(KIND, novel=EpisodeConfig(way=(2, 7))), r"`way` must be at most the number of classes \(6\); got 7"),
    ]:
        with pytest.raises(InputError, match=message):
            kind.validate(INDEX, tuple("abcdefghi"))


def test_a_base_class_of_two_rows_has_a_mean_and_a_query() -> None:
    labels, x = torch.tensor([0, 0, 1, 1, 1]), torch.arange(10.0).reshape(5, 2)
    _, pool, _ = join(labels, x, 1, EpisodeConfig())
    assert torch.equal(pool.x[:2], x[:2])
    assert pool.by_class.size.tolist() == [2, 3]
    message = "`base classes` must have 2 rows, to learn from and to ask for; got class 'a'"
    with pytest.raises(InputError, match=message):
        join(labels[1:], x[1:], 1, EpisodeConfig())
