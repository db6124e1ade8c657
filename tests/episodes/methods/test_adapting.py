"""Transductive methods that adapt prototypes, labels or layers to the queries equal slow loops and autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import kneighbors_graph
from torch import Tensor

from protonet.episodes.methods.clustering import bd_cspn, laplacian_shot, laplacian_shot_dirichlet, rectify_prototypes
from protonet.episodes.methods.tim import alpha_am, alpha_tim, tim, tim_adm, transductive_finetune
from tests.episodes.cases import agree, core_rows, cosines, make_centred_episodes, make_episodes, means_of, unit

Weights = tuple[float, float, float]


def rectify(support: Tensor, labels: Tensor, query: Tensor, *, paper: bool = False) -> tuple[Tensor, Tensor]:
    """Rectify one row at a time, as the published code or the paper does; return prototypes and shifted queries."""
    shifted, means = query + support.mean(dim=0) - query.mean(dim=0), means_of(support, labels)
    sums, masses = torch.zeros_like(means), [0.0] * len(means)
    for position, row in enumerate(torch.cat([support, shifted])):
        angles = 10 * cosines(row[None], means)[0]
        c = int(labels[position]) if paper and position < len(labels) else int(angles.argmax())
        weight = float(angles.exp()[c] if paper else angles.softmax(dim=0)[c])
        sums[c] += weight * row
        masses[c] += weight if paper else 1
    return torch.stack([sums[c] / mass if mass else means[c] for c, mass in enumerate(masses)]), shifted


def assign(unary: Tensor, query: Tensor) -> Tensor:
    """Run LaplacianShot's algorithm 1 query by query; return the assignments after 20 bound updates."""
    graph = torch.as_tensor(kneighbors_graph(query.numpy(), 2).toarray())
    assigned = (-unary).softmax(dim=1)
    for _ in range(20):
        assigned = torch.stack([(graph[p] @ assigned * 0.7 - unary[p]).softmax(dim=0) for p in range(len(query))])
    return assigned


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("shots", [(1, 1, 1, 1), (3, 1, 2, 4)])
def test_bd_cspn_and_laplacian_shot_equal_slow_loops(shots: tuple[int, ...], with_base: bool) -> None:
    episodes, centres = make_centred_episodes(shots, with_base=with_base)
    rectified = bd_cspn(episodes)
    shifted, plain = laplacian_shot(episodes).softmax(dim=2), laplacian_shot_dirichlet(episodes).softmax(dim=2)
    unshifted = laplacian_shot(episodes, shift=False).softmax(dim=2)
    papers = bd_cspn(episodes, paper=True).softmax(dim=2), laplacian_shot(episodes, paper=True).softmax(dim=2)
    for index, (support, labels, query, centre) in enumerate(zip(*core_rows(episodes), centres, strict=True)):
        rows, queries = unit(support, centre), unit(query, centre)
        prototypes, moved = rectify(rows, labels, queries)
        distances = torch.cdist(queries, prototypes).square()
        assert torch.equal(rectified[index].argmax(dim=1), distances.argmin(dim=1))
        assert torch.allclose(rectified[index].softmax(dim=1), (-distances / 0.2).softmax(dim=1))
        to_means = torch.cdist(queries, means_of(rows, labels)).square()
        assert torch.allclose(shifted[index], assign(torch.cdist(moved, prototypes).square(), queries), atol=1e-6)
        assert torch.allclose(unshifted[index], assign(distances, queries), atol=1e-6)
        assert torch.allclose(plain[index], assign(to_means, queries), atol=1e-6)
        prototypes, _ = rectify(rows, labels, queries, paper=True)
        assert torch.allclose(papers[0][index], (10 * cosines(queries, prototypes)).softmax(dim=1))
        distances = torch.cdist(queries, prototypes).square()
        assert torch.allclose(papers[1][index], assign(distances, queries), atol=1e-6)


def test_a_class_without_rows_keeps_its_mean() -> None:
    support = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]])
    episodes, _ = make_episodes(n_episodes=1, n_way=2, shots=(3, 2), n_queries=2, dim=2, dtype=torch.float32)
    labels = torch.tensor([[0, 0, 1, 1, 1]])
    case = replace(episodes, support=F.normalize(support, dim=2), support_labels=labels, query=support[:, :2])
    assert bool(bd_cspn(case).isfinite().all())
    same = replace(case, support=torch.ones_like(support))  # every row is labelled 0
    prototypes, _ = rectify_prototypes(same, torch.ones(1, 1, 2))
    assert torch.equal(prototypes[0, 1], torch.ones(2))


def test_a_query_is_no_neighbour_of_itself_and_may_have_few_or_none() -> None:
    episodes, _ = make_episodes(n_queries=1)
    assert torch.allclose(laplacian_shot(episodes), laplacian_shot(episodes, lambda_=0))
    episodes, _ = make_episodes(n_queries=3)
    assert torch.equal(laplacian_shot(episodes, n_neighbours=5), laplacian_shot(episodes, n_neighbours=2))


def entropy(p: Tensor, alpha: float) -> Tensor:
    return -(p * p.log()).sum(dim=-1) if alpha == 1 else (1 - (p**alpha).sum(dim=-1)) / (alpha - 1)


def lose(logits: Tensor, labels: Tensor, alpha: float, weights: Weights) -> Tensor:
    """Compute the loss of TIM, or of alpha-TIM, of the logits of support rows, then of queries."""
    p = logits[len(labels) :].softmax(dim=1)
    cross = F.cross_entropy(logits[: len(labels)], labels)
    marginal, conditional = entropy(p.mean(dim=0), alpha), entropy(p, alpha).mean()
    return weights[0] * cross - weights[1] * marginal + weights[2] * conditional


def descend(
    parameters: list[Tensor], classify: Callable[[], Tensor], labels: Tensor, steps: int, rate: float, weights: Weights,
    alpha: float = 1,
) -> Tensor:  # fmt: skip
    """Run torch's own Adam; return the queries' logits before and after the last step."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in range(steps):
        logits = classify()
        optimizer.zero_grad()
        lose(logits, labels, alpha, weights).backward()
        optimizer.step()
    return torch.stack([logits, classify()])[:, len(labels) :].detach()


def run_tim(support: Tensor, labels: Tensor, query: Tensor, weights: Weights, alpha: float, steps: int) -> Tensor:
    """Run TIM-GD as the paper writes it, on the features themselves; return the queries' probabilities."""
    rows, prototypes = unit(torch.cat([support, query])), means_of(unit(support), labels).requires_grad_()

    def classify() -> Tensor:
        return -7.5 * (rows[:, None] - prototypes).square().sum(dim=2)

    return descend([prototypes], classify, labels, steps, 1e-3, weights, alpha)[1].softmax(dim=1)


@pytest.mark.parametrize(
    ("method", "made", "weights", "alpha"),
    [
        (tim, {"dim": 100}, (0.1, 1.0, 0.1), 1),  # more features than rows
        (partial(tim, weights=(1.0, 1.0, 1.0)), {}, (1.0, 1.0, 1.0), 1),
        (partial(alpha_tim, alpha=0.5), {"n_queries": 12}, (1.0, 1.0, 1.0), 0.5),
        (alpha_tim, {"shots": (1, 1, 1, 1), "n_queries": 12}, (1.0, 1.0, 1.0), 2),
        (alpha_tim, {"n_queries": 12}, (1.0, 1.0, 1.0), 5),
    ],
)
def test_tim_is_autograd(method: Callable[..., Tensor], made: dict[str, int], weights: Weights, alpha: float) -> None:
    episodes, _ = make_episodes(noise=1.0, **made)  # type: ignore[arg-type]
    ours = method(episodes, learning_rate=1e-3, steps=30).softmax(dim=2)
    assert agree(ours, episodes, partial(run_tim, weights=weights, alpha=alpha, steps=30), atol=1e-6)
    assert not torch.allclose(ours, method(episodes, steps=0).softmax(dim=2), atol=1e-3)


def alternate(support: Tensor, labels: Tensor, query: Tensor, weights: Weights, steps: int, size: float) -> Tensor:
    """Run TIM-ADM's proposition 1 with the code's exponents, class by class; return the queries' probabilities."""
    cross, marginal, conditional = weights
    support, query = unit(support), unit(query)
    means = means_of(support, labels)

    def probabilities(rows: Tensor) -> Tensor:
        return torch.stack([(-7.5 * (row - means).square().sum(dim=1)).softmax(dim=0) for row in rows])

    for _ in range(steps):
        of_support, of_query = probabilities(support), probabilities(query)
        raised = of_query ** (1 + conditional)
        guess = raised / raised.sum(dim=0) ** (marginal / (1 + marginal))
        guess = guess / guess.sum(dim=1, keepdim=True)
        fraction, ratio = cross / (1 + conditional), len(support) / len(query)
        new = []
        for k in range(4):
            total, norm = torch.zeros_like(means[k]), 0.0
            for n, row in enumerate(support):
                member = float(labels[n] == k)
                total = total + fraction * (member * row + of_support[n, k] * (means[k] - row))
                norm += fraction * member
            for n, row in enumerate(query):
                total = total + ratio * (guess[n, k] * row + of_query[n, k] * (means[k] - row))
                norm += ratio * float(guess[n, k])
            new.append(means[k] + size * (total / norm - means[k]))
        means = torch.stack(new)
    return probabilities(query)


@pytest.mark.parametrize(
    ("steps", "size", "weights"), [(0, 1.0, (0.1, 1.0, 0.1)), (8, 1.0, (0.1, 1.0, 0.1)), (5, 0.3, (1.0, 0.5, 0.3))]
)
def test_tim_adm_equals_a_slow_loop(weights: Weights, steps: int, size: float) -> None:
    episodes, _ = make_episodes(noise=1.5)
    ours = tim_adm(episodes, weights=weights, steps=steps, step_size=size).softmax(dim=2)
    assert agree(ours, episodes, partial(alternate, weights=weights, steps=steps, size=size))


def spread_labels(nodes: Tensor, bandwidth: Tensor, weight: Tensor, k: int, propagation: float) -> Tensor:
    """Spread labels over AlphaAM's graph edge by edge, from the first four nodes, the centroids, to each node."""
    n = len(nodes)
    distances = ((nodes[:, None] - nodes).square().sum(dim=2) + 1e-16).sqrt() * (1 - torch.eye(n))
    distances = distances / distances.std()
    affinity = torch.zeros(n, n, dtype=torch.float64)
    for i in range(4, n):
        others = [j for j in range(n) if j != i]
        strength = torch.stack([(-distances[i, j] * bandwidth[i, j]).exp() for j in others])
        first = strength * torch.tensor([1.00001 if j < 4 else 1.0 for j in others])  # where a centroid is a row
        for position in first.argsort(descending=True)[:k].tolist():
            affinity[i, others[position]] = strength[position]
    graph = weight * (affinity + affinity.T) / 2
    degree = graph.sum(dim=1) + 1e-12
    graph = graph / degree.sqrt() / degree.sqrt()[:, None]
    reached: Tensor = torch.linalg.inv(torch.eye(n, dtype=torch.float64) - propagation * graph)[:, :4]
    return reached


def run_alpha_am(
    support: Tensor, labels: Tensor, query: Tensor, alpha: float, weights: Weights, k: int, propagation: float
) -> Tensor:
    """Run five rounds of AlphaAM's code, at a learning rate at which the rounds matter."""
    rows, means = unit(torch.cat([support, query])), means_of(unit(support), labels).requires_grad_()
    n = 4 + len(rows)
    bandwidth = torch.ones(n, n, dtype=torch.float64, requires_grad=True)
    weight = torch.full((n, n), propagation, dtype=torch.float64, requires_grad=True)

    def classify() -> Tensor:
        return 15 * spread_labels(torch.cat([means, rows]), bandwidth, weight, k, propagation)[4:]

    return descend([means, bandwidth, weight], classify, labels, 5, 1e-2, weights, alpha)[0]


@pytest.mark.parametrize(
    ("shots", "alpha", "weights"),
    [((3, 2, 2, 4), 2.0, (1.0, 1.0, 1.0)), ((5, 5, 5, 5), 5.0, (1.0, 10.0, 1.0)), ((2, 2, 1, 2), 1.0, (0.5, 1.0, 0.3))],
)
def test_alpha_am_equals_autograd(shots: tuple[int, ...], alpha: float, weights: Weights) -> None:
    episodes, _ = make_episodes(n_episodes=2, noise=1.0, shots=shots, n_queries=9)
    chosen = alpha if alpha == 1 else None
    ours = alpha_am(episodes, alpha=chosen, weights=weights, learning_rate=1e-2, steps=5)
    k, fraction = (10, 0.9) if sum(shots) >= 20 else (20, 0.8)
    slow = partial(run_alpha_am, alpha=alpha, weights=weights, k=min(k, sum(shots) + 12), propagation=fraction)
    assert agree(ours, episodes, slow, atol=1e-5)
    assert not torch.allclose(ours, alpha_am(episodes, alpha=chosen, weights=weights, steps=1), atol=1e-2)


def test_transformed_rows_do_not_depend_on_their_length_and_labels_may_not_spread() -> None:
    episodes, _ = make_episodes()
    longer = replace(episodes, support=9 * episodes.support, query=9 * episodes.query)
    assert torch.allclose(alpha_am(longer, plc=True, steps=3), alpha_am(episodes, plc=True, steps=3), atol=1e-4)
    assert not torch.allclose(alpha_am(longer, steps=3), alpha_am(episodes, plc=True, steps=3), atol=1e-2)
    assert not bool(alpha_am(episodes, spread=0.0, steps=1).any())


def test_fine_tuning_equals_autograd_and_lowers_the_entropy() -> None:
    def slow(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        layer = torch.nn.Linear(support.shape[1], 4, dtype=torch.float64)
        layer.load_state_dict({"weight": unit(means_of(unit(support), labels)), "bias": torch.zeros(4)})
        rows = unit(torch.cat([support, query]))
        return descend([*layer.parameters()], lambda: layer(rows) / 0.1, labels, 25, 1e-2, (1.0, 0.0, 1.0))[1]

    episodes, _ = make_episodes(noise=1.0)
    settings = {"temperature": 0.1, "learning_rate": 1e-2}
    logits = [transductive_finetune(episodes, **settings, steps=steps) for steps in (50, 25, 0)]
    assert agree(logits[1], episodes, slow)
    more, some, none = (float(entropy(part.softmax(dim=2), 1).mean()) for part in logits)
    assert more < some < none
