"""What holds for every method, whatever it does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from protonet.episodes import methods
from protonet.episodes.draws.batch import Episodes, summarize_base, take_from
from protonet.episodes.methods import Method
from protonet.episodes.methods.alpha_am import alpha_am
from tests.episodes.cases import TRAINED, make_base, make_episodes, needing, texts_of

#: Fewer steps of what takes long. What the solver does with an episode, test_solver.py says.
METHODS: dict[str, Method] = methods.METHODS | {"alpha-am": partial(alpha_am, steps=20)}
METHODS.pop("solver")
for _name in TRAINED:  # of which each has a test of its own
    METHODS.pop(_name)
every = pytest.mark.parametrize("name", METHODS)
#: These draw random numbers for the support rows or the classes, which depend on their places.
DRAWN = {"distribution-calibration", "linear-finetune", "baseline++"}
in_any_order = pytest.mark.parametrize("name", sorted(METHODS.keys() - DRAWN))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def case(**changes: object) -> Episodes:
    return make_episodes(base=make_base(), **changes)[0]  # type: ignore[arg-type]


@every
def test_shape_dtype_and_probabilities(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        episodes = make_episodes(base=make_base(dtype=dtype), dtype=dtype)[0]
        logits = METHODS[name](episodes)
        assert logits.shape == (3, 10, 4)
        assert logits.dtype == dtype
        assert torch.isfinite(logits).all()


@every
def test_better_than_chance(name: str) -> None:
    dim = 200 if name == "paddle" else 12  # its distances have no temperature
    episodes, labels = make_episodes(n_episodes=8, shots=(3, 3, 3, 3), n_queries=24, dim=dim, base=make_base(dim=dim))
    right = (METHODS[name](episodes).argmax(dim=2) == labels).double().mean()
    assert right > 0.6  # of 4 classes


@every
def test_an_episode_does_not_depend_on_the_batch(name: str) -> None:
    episodes = case(n_episodes=4)
    together = METHODS[name](episodes)
    for number in (0, 3):
        only = slice(number, number + 1)
        support, labels, query, texts = (each[only] for each in (*episodes[:3], texts_of(episodes)))
        assert episodes.unlabelled is not None
        more = episodes.unlabelled[only]
        alone = Episodes(support, labels, query, episodes.n_way, episodes.base, texts, more)
        assert close(METHODS[name](alone)[0], together[number])


@every
def test_nothing_is_changed_or_kept(name: str) -> None:
    episodes = case()
    before = [each.clone() for each in episodes[:3]]
    state = torch.get_rng_state()
    first = METHODS[name](episodes)
    METHODS[name](case(seed=1))
    assert torch.equal(METHODS[name](episodes), first)
    assert all(torch.equal(old, new) for old, new in zip(before, episodes[:3], strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@every
def test_order_of_queries(name: str) -> None:
    episodes = case()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert close(METHODS[name](episodes._replace(query=episodes.query[:, order])), METHODS[name](episodes)[:, order])


@in_any_order
def test_order_of_support(name: str) -> None:
    episodes = case()
    order = torch.randperm(episodes.support.shape[1], generator=torch.Generator().manual_seed(0))
    changed = episodes._replace(support=episodes.support[:, order], support_labels=episodes.support_labels[:, order])
    assert close(METHODS[name](changed), METHODS[name](episodes))


@in_any_order
def test_names_of_classes(name: str) -> None:
    episodes = case()
    renamed = torch.tensor([2, 0, 3, 1])
    texts = texts_of(episodes)[:, renamed.argsort()]
    changed = METHODS[name](episodes._replace(support_labels=renamed[episodes.support_labels], texts=texts))
    assert close(changed[:, :, renamed], METHODS[name](episodes))


@pytest.mark.parametrize("name", [name for name in METHODS if not methods.METHODS[name].transductive])
def test_inductive_methods_see_one_query_at_a_time(name: str) -> None:
    episodes = case()
    fewer = episodes._replace(query=episodes.query[:, 3:5])
    assert close(METHODS[name](fewer), METHODS[name](episodes)[:, 3:5])


@pytest.mark.parametrize("name", [name for name, spec in methods.METHODS.items() if spec.transductive])
def test_transductive_methods_see_them_all(name: str) -> None:
    episodes = case(noise=1.0)
    moved = torch.cat([episodes.query[:, :5], episodes.query[:, 5:] + 3.0], dim=1)
    assert not close(METHODS[name](episodes._replace(query=moved))[:, :5], METHODS[name](episodes)[:, :5])


@every
@pytest.mark.parametrize("kind", ["constant", "zero", "twice", "single", "large", "small", "wide", "signed"])
def test_hard_features(name: str, kind: str) -> None:
    for dtype in (torch.float32, torch.float64):
        dim = 40 if kind == "wide" else 12
        shots = (1, 1, 1, 1) if kind == "single" else None
        episodes = make_episodes(base=make_base(dtype=dtype, dim=dim), dtype=dtype, shots=shots, dim=dim)[0]
        support, query = episodes.support, episodes.query
        if kind in ("constant", "zero"):
            support, query = (torch.full_like(rows, float(kind == "constant")) for rows in (support, query))
        elif kind == "twice":
            support = torch.cat([support[:, :1].expand(-1, 5, -1), support[:, 5:]], dim=1)
            query = support[:, :1].expand(-1, 10, -1)
        elif kind in ("large", "small"):
            factor = 1e4 if kind == "large" else 1e-4
            support, query = support * factor, query * factor
        elif kind == "signed":
            support, query = support - 1.0, query - 1.0
        logits = METHODS[name](episodes._replace(support=support, query=query, unlabelled=query))
        assert torch.isfinite(logits).all()


CHANGES = [(300.0, 0.0), (1e-3, 0.0), (1.0, -1.0), (1.0, 30.0)]
#: The paper's learning rate is far too high there, and its base classes' scale is not the supports'.
UNFIT = {("linear-finetune", (1.0, 30.0)), ("distribution-calibration", (300.0, 0.0))}


@pytest.mark.parametrize(("name", "change"), [(n, c) for n in METHODS for c in CHANGES if (n, c) not in UNFIT])
def test_float32_is_enough(name: str, change: tuple[float, float]) -> None:
    factor, offset = change
    predictions = []
    for dtype in (torch.float64, torch.float32):
        base = make_base(dim=40)
        x = factor * base.take(torch.arange(57)) + offset
        base = summarize_base(take_from(x.to(dtype)), base.by_class)
        episodes = make_episodes(n_episodes=8, dim=40, base=base)[0]
        support, query = ((factor * rows + offset).to(dtype) for rows in (episodes.support, episodes.query))
        own = episodes._replace(support=support, query=query, texts=texts_of(episodes).to(dtype), unlabelled=query)
        predictions.append(METHODS[name](own).argmax(dim=2))
    assert float((predictions[0] == predictions[1]).double().mean()) > 0.97


@pytest.mark.parametrize("name", [name for name, spec in methods.METHODS.items() if spec.uses_base])
def test_the_base_classes_matter(name: str) -> None:
    episodes = case()
    base = make_base(seed=5)
    assert not close(METHODS[name](episodes._replace(base=base)), METHODS[name](episodes))


@pytest.mark.parametrize("name", sorted(needing("base")))
def test_without_base_classes(name: str) -> None:
    with pytest.raises(ValueError, match="`base` must "):
        METHODS[name](case()._replace(base=None))
