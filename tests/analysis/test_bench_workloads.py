"""What every workload of the optimizer bench keeps to, and the arithmetic of those that have some of their own."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401 - its import draws from the global state
import torch
from scipy.sparse.csgraph import shortest_path
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, hold_out, initial_weights, shuffle, validate
from analysis.optimizer_bench.workloads import (
    ADDED,
    DRAWN,
    FAMILIES,
    FAMILY,
    KIND,
    ROLE,
    ROLES,
    STREAMED,
    STUDIED,
    VISIBLE,
    WORKLOADS,
    characters,
    draw,
    draw_streams,
    dynamics,
    graphs,
    sources,
    streams,
    words,
)
from analysis.optimizer_bench.workloads.data import cut_windows, load_latin, read_sources
from analysis.optimizer_bench.workloads.sources import LENGTH, TOKENS

BATCHES, STEPS, RATE = 2, 30, 3e-3
RATES = {"cnn": 1e-2}  #: AdamW's rate for what learns nothing in so few steps at ``RATE``.


def generate(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def take(workload: Workload) -> list[float]:
    """Return the first losses of a workload, whose weights do not move."""
    return [float(workload.train_loss().detach()) for _ in range(BATCHES)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_keeps_to_the_rules(name: str) -> None:
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    first, same, other = (WORKLOADS[name](seed) for seed in (0, 0, 1))
    weights = copy.deepcopy(first.model.state_dict())
    for key, value in same.model.state_dict().items():
        assert torch.equal(value, weights[key])
    assert any(not torch.equal(value, weights[key]) for key, value in other.model.state_dict().items())
    loss = validate(first.model, first.val_loss)
    assert np.isfinite(loss)
    losses = take(first)
    assert take(same) == losses
    other.model.load_state_dict(weights)
    assert take(other) != losses  # with the same weights: its batches are others
    for workload in (first, other):
        workload.model.load_state_dict(weights)  # batches may have moved buffers
        assert validate(workload.model, workload.val_loss) == loss
        assert workload.model.training
    optimizer = torch.optim.AdamW(first.model.parameters(), RATES.get(name, RATE))
    trained = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch_loss = first.train_loss()
        batch_loss.backward()
        optimizer.step()
        trained.append(float(batch_loss.detach()))
    assert all(parameter.grad is not None for parameter in first.model.parameters())
    early, late = np.mean(trained[:5]), np.mean(trained[-5:])
    assert late < early or validate(first.model, first.val_loss) < loss
    assert torch.equal(torch.get_rng_state(), states[0])
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]


def list_rows(batch: object) -> set[tuple[float, ...]]:
    """Return the rows of a stream's batch, of its tensors side by side."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    return {*map(tuple, torch.cat([part.flatten(1).double() for part in parts if part.ndim > 1], 1).tolist())}


DRAWS = [streams.write, streams.draw_petals, streams.draw_graphs, streams.draw_functions]
DRAWS += [streams.draw_pushes, streams.draw_hands]


@pytest.mark.parametrize("draw", DRAWS)
def test_rows_of_a_stream_never_come_again(draw: streams.Draw) -> None:
    generator = generate(3)
    batches = [list_rows(draw(20, source)) for source in (generator, generator, generate(streams.HELD_OUT))]
    assert [len(rows) for rows in batches] == [20] * 3
    assert len(set.union(*batches)) == 60


def test_texts_follow_their_grammar() -> None:
    texts = streams.write(4_000, generate())
    chances = F.pad(streams.make_grammar(), (1, 0)).diff(dim=3)
    torch.testing.assert_close(chances.sum(3), torch.ones(chances.shape[:3]))

    def rate(texts: torch.Tensor) -> float:
        """Return the mean logarithm of a symbol's chance, the topic being unknown."""
        of_topics = chances[:, texts[:, :-2], texts[:, 1:-1], texts[:, 2:]].double().log().sum(2)  # (topics, n)
        return of_topics.logsumexp(0).mean().item() / (streams.LENGTH - 1)

    assert rate(texts) > rate(texts[:, torch.randperm(texts.shape[1], generator=generate(1))]) + 1


def test_hops_are_the_shortest_paths() -> None:
    edges, hops = streams.draw_graphs(30, generate())
    for matrix, hop in zip(edges, hops, strict=True):
        expected = shortest_path(matrix.numpy(), unweighted=True, indices=0)
        assert hop.tolist() == [min(streams.MAX_DISTANCE, distance) for distance in expected]


def test_hidden_columns_of_a_linear_function_follow_from_the_known_ones() -> None:
    rows, hidden = streams.draw_functions(200, generate())
    x, y, masked = rows.double().split([streams.INPUTS, 1, 1], 2)
    known = streams.POINTS - streams.UNKNOWN
    assert (y[masked == 1] == 0).all()
    predicted = x[:, known:] @ torch.linalg.lstsq(x[:, :known], y[:, :known]).solution
    assert (predicted.squeeze(2) - hidden).square().median() < 0.05


def test_petals_are_counted_around_the_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLUR", 0.0)
    monkeypatch.setattr(streams, "SIDE", 100)
    images, kinds = streams.draw_petals(30, generate())
    axis = torch.linspace(-1, 1, 100)
    for image, kind in zip(images[:, 0], kinds.tolist(), strict=True):
        x, y = (image * axis).sum() / image.sum(), (image * axis[:, None]).sum() / image.sum()
        angles = torch.atan2(axis[:, None] - y, axis - x)
        ink = torch.stack(
            [(image * (angles * k).cos()).sum().hypot((image * (angles * k).sin()).sum()) for k in range(2, 10)]
        )
        assert int(ink.argmax()) == kind


def test_signals_jump_and_keep_their_level_between() -> None:
    noisy, clean = streams.draw_signals(2_000, generate())
    still = (clean.diff(dim=2) == 0).float().mean().item()
    assert abs(1 - still - streams.JUMPS) < 0.005
    assert abs((noisy - clean).std().item() - streams.HISS) < 0.005


def test_hands_are_labelled_by_the_kinds_of_cards_in_them() -> None:
    cards, kinds = streams.draw_hands(40, generate())
    assert kinds.tolist() == [len(hand.unique(dim=0)) for hand in cards]
    assert len(cards.flatten(0, 1).unique(dim=0)) == streams.KINDS


def test_a_weight_on_a_spring_moves_by_its_pushes_alone() -> None:
    pushes, positions = streams.draw_pushes(30, generate()).unbind(2)
    torch.testing.assert_close(positions[:, 0], 0.5 * pushes[:, 0])  # it begins at rest, in the middle
    speed, position = 2 * (positions[:, 1] - positions[:, 0]), positions[:, 0]
    bent = streams.STIFF * position**3 / (1 + position**2)
    torch.testing.assert_close(speed, 0.9 * pushes[:, 0] + pushes[:, 1] - 0.5 * position - bent)


def test_every_family_has_one_role_and_roles_are_what_was_drawn() -> None:
    assert sorted(family for families in ROLES.values() for family in families) == sorted(FAMILIES)
    assert len(WORKLOADS) == sum(map(len, FAMILIES.values()))
    assert ROLE.keys() == FAMILY.keys() == WORKLOADS.keys()
    assert all(FAMILY[name] in ROLES[role] for name, role in ROLE.items())
    tuning, validation, test = draw()
    assert sorted([*tuning, *validation, *test]) == sorted(DRAWN)
    assert ROLES["visible"] == [*VISIBLE]
    choosing, apart = draw_streams()
    assert sorted([*choosing, *apart]) == sorted(STREAMED)
    assert KIND.keys() == WORKLOADS.keys()
    roles = {"tuning": [*STUDIED, *tuning, *choosing, *ADDED], "validation": [*validation, *apart], "test": test}
    for role, families in roles.items():
        assert sorted(ROLES[role]) == sorted(families)


def test_rows_are_seen_once_before_any_again_and_those_held_out_never() -> None:
    train, validation = hold_out(torch.arange(20), 7)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(20))
    stream = shuffle(train, 4, lambda rows, generator: (rows, torch.rand(1, generator=generator)))(generate(3))
    batches = [next(stream)[0] for _ in range(6)]
    for epoch in (batches[:3], batches[3:]):
        assert len(torch.cat(epoch).unique()) == 12
        assert set(torch.cat(epoch).tolist()) < set(train.tolist())


def test_windows_of_text_do_not_overlap_and_modules_are_held_out() -> None:
    assert cut_windows(torch.arange(10), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut_windows(torch.arange(10), 2, 3).tolist() == [[0, 1], [4, 5], [8, 9]]
    train, validation = read_sources()
    assert not train.keys() & validation.keys()
    assert len(validation) > 10


def test_attention_is_to_neighbours_alone_whatever_their_order() -> None:
    ring = torch.tensor([[(node - 1) % 6, (node + 1) % 6] for node in range(6)])
    with initial_weights(0):
        layer, x = graphs.Attention(5, 3), torch.randn(6, 5)
    values = layer.features(x).view(6, graphs.HEADS, 3)
    ends = [(values * part).sum(-1) for part in (layer.from_self, layer.from_near)]  # each (n, heads)
    scores = F.leaky_relu(ends[0][:, None] + ends[1][None], graphs.SLOPE)  # (n, n, heads)
    adjacent = torch.eye(6, dtype=torch.bool).scatter(1, ring, True)
    weights = scores.masked_fill(~adjacent[..., None], -torch.inf).softmax(1)
    expected = torch.einsum("ijh,jhw->ihw", weights, values)
    for near in (ring, ring.flip(1)):
        torch.testing.assert_close(layer(x, x[near]), expected)


def test_convolution_divides_by_the_roots_of_degrees_of_the_full_graph() -> None:
    graph = graphs.load_graph()
    x, y, edges = graphs.load_modules()
    mixing = graphs.normalise(edges, len(x))
    roots = edges[0].bincount().float().sqrt()
    torch.testing.assert_close(mixing @ roots[:, None], roots[:, None])  # the leading eigenvector
    frequent = torch.isin(graph.y, graph.y.bincount().argsort(descending=True, stable=True)[: graphs.MODULES])
    assert torch.equal(x, graph.x[frequent])
    node = len(y) // 2
    of_graph = int(frequent.nonzero()[node])
    near = graph.neighbours[graph.start[of_graph] : graph.start[of_graph] + graph.degree[of_graph]]
    assert frequent.nonzero()[edges[1, edges[0] == node], 0].tolist() == near[frequent[near]].tolist()


def test_views_are_distinguished_from_all_others() -> None:
    embeddings = torch.randn(6, 4, generator=generate(), dtype=torch.float64)
    likes = (F.cosine_similarity(embeddings[:, None], embeddings, dim=2) / characters.TEMPERATURE).exp()
    fractions = [likes[i, (i + 3) % 6] / (likes[i].sum() - likes[i, i]) for i in range(6)]
    torch.testing.assert_close(characters.compare_views(embeddings), -torch.stack(fractions).log().mean())


def test_shapes_are_moments_of_the_ink() -> None:
    image = torch.zeros(28, 28)
    image[4, 10] = image[8, 10] = 0.5
    image[6, 7:14:6] = 0.25
    centres = torch.tensor([(4.0, 10.0)] * 2 + [(8.0, 10.0)] * 2 + [(6.0, 7.0), (6.0, 13.0)])
    (rows, both), (_, columns) = torch.cov(centres.T, correction=0).tolist()
    expected = torch.tensor([[1.5, *centres.mean(0).tolist(), rows, columns, both]])
    torch.testing.assert_close(characters.measure_shapes(image.view(1, -1)), expected)


def test_every_image_goes_through_the_likeliest_expert_alone() -> None:
    model = characters.experts(0).model
    assert isinstance(model, characters.Experts)
    images = load_latin().x[:20]
    with torch.no_grad():
        for image, expected in zip(images, model(images)[0], strict=True):
            x = model.stem(image)
            weights = model.gate(x).softmax(0)
            best = int(weights.argmax())
            x = x + weights[best] * (model.rise[best].T @ x).relu() @ model.fall[best]
            torch.testing.assert_close(model.head(x), expected, atol=1e-5, rtol=1e-4)


def test_wrong_labels_are_of_any_other_class() -> None:
    right = torch.arange(50_000) % 5
    spoilt = characters.spoil_labels(right, 5, generate())
    wrong = spoilt != right
    assert abs(wrong.float().mean().item() - characters.WRONG) < 0.01
    fractions = ((spoilt - right)[wrong] % 5).bincount(minlength=5) / wrong.sum()
    torch.testing.assert_close(fractions, torch.tensor([0, 0.25, 0.25, 0.25, 0.25]), atol=0.01, rtol=0)


def test_few_readings_of_the_hand_are_spoilt() -> None:
    angles = torch.zeros(3, 4)
    angles[1, 0] = angles[2, 2] = math.pi / 2  # the whole arm turned, and its second half
    torch.testing.assert_close(dynamics.reach(angles), torch.tensor([[4.0, 0.0], [0.0, 4.0], [2.0, 2.0]]))
    _, hands, readings = dynamics.draw_readings()
    spoilt = (readings != hands).all(1)
    assert torch.equal(spoilt, (readings != hands).any(1))
    assert abs(spoilt.float().mean().item() - dynamics.SPIKES) < 0.003
    assert abs(readings[spoilt].std().item() / dynamics.SPIKE - 1) < 0.1


def test_the_known_solution_solves_the_heat_equation_and_derivatives_are_those_of_autograd() -> None:
    points = torch.rand(20, 2, generator=generate(1), dtype=torch.float64).requires_grad_()
    model = dynamics.heat(0).model.double()
    jets = []
    for values in (model(points).squeeze(1), dynamics.solve_heat(points)):
        (first,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 1].sum(), points)
        jets.append(torch.stack([values, first[:, 0], first[:, 1], second[:, 1]]).detach())
    torch.testing.assert_close(dynamics.differentiate(model, points).detach(), jets[0])
    _, u_t, _, u_xx = jets[1]
    torch.testing.assert_close(u_t, dynamics.DIFFUSIVITY * u_xx)
    assert u_t.abs().max() > 0.1


def test_the_pendulums_keep_their_energy() -> None:
    angles, rates = dynamics.draw_trajectories().double().chunk(2, dim=2)  # (n, times, 2)
    stretched = (angles[..., 0] - angles[..., 1]) ** 2
    energy = (rates**2 / 2 - angles.cos()).sum(2) + dynamics.SPRING / 2 * stretched  # (n, times)
    torch.testing.assert_close(energy, energy[:, :1].expand_as(energy), atol=1e-4, rtol=1e-4)


def test_chaotic_series_solve_their_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = dynamics.simulate(9, 40)
    torch.testing.assert_close(coarse[5], torch.ones(40, dtype=torch.float64))  # at 1, growth balances decay
    monkeypatch.setattr(dynamics, "EULER", 0.05)
    torch.testing.assert_close(dynamics.simulate(9, 40), coarse, atol=0.03, rtol=0)


def test_the_state_space_model_is_a_recurrence() -> None:
    with initial_weights(0):
        model = characters.StateSpace().double()
    u = torch.randn(2, characters.CHANNELS, 40, generator=generate(), dtype=torch.float64)
    step = model.log_step.exp()
    turn = torch.exp(step * torch.complex(-model.log_decay.exp(), model.frequency))  # (channels, states)
    readout, state = torch.complex(*model.readout), torch.zeros(2, *turn.shape, dtype=torch.complex128)
    outputs = []
    for now in u.unbind(2):  # (n, channels)
        state = turn * state + (step.squeeze(1) * now)[..., None]
        outputs.append((readout * state).sum(2).real + model.through * now)
    torch.testing.assert_close(model(u), torch.stack(outputs, 2))


def test_kinds_of_characters() -> None:
    kinds = sources.label_characters("if é2 == 1:  # so\n    f('''a\nb''')\n")
    assert "".join(" ndsock"[kind] for kind in kinds) == "kk nn oo do  cccc     nossssssssso "


def test_embedding_tables_are_multiplied() -> None:
    ranker, embedding = words.make_factors(5, 7, (7,)), words.make_skip_gram()
    torch.nn.init.normal_([*ranker.parameters()][2])
    of_user, of_item, biases = ranker.parameters()
    scores = of_user @ of_item.T + biases.squeeze(1)  # (users, items)
    users, items, others = torch.tensor([0, 4, 2]), torch.tensor([1, 6, 0]), torch.tensor([3, 6, 5])
    torch.testing.assert_close(words.prefer(ranker, users, items, others), scores[users, items] - scores[users, others])
    centres, others = torch.tensor([3, 8]), torch.tensor([[1, 3, 5], [0, 2, 4]])
    of_centre, of_context = embedding.parameters()
    every = of_centre[centres] @ of_context.T  # (n, vocabulary)
    torch.testing.assert_close(words.match_words(embedding, centres, others), every.gather(1, others))


def test_predictors_of_the_next_byte_see_no_future() -> None:
    model = sources.gpt(0).model
    text = torch.arange(24).view(2, 12)
    changed = text.clone()
    changed[:, 7:] += 1
    assert (model(text) == model(changed)).all(-1).tolist() == [[True] * 7 + [False] * 5] * 2


def test_hidden_tokens_can_be_put_back_and_bert_ties_its_embeddings() -> None:
    windows = torch.randint(TOKENS, (50, 1 + LENGTH), generator=generate())
    tokens, positions, hidden = sources.hide_tokens(windows, generate(1))
    assert (tokens == sources.MASK).sum(1).eq(sources.MASKED).all()
    assert torch.equal(tokens.scatter(1, positions, hidden), windows)
    with initial_weights(0):
        model = sources.BERT()
    logits = model(tokens[:2], positions[:2])
    assert logits.shape == (2, sources.MASKED, TOKENS)  # the mask is never an answer
    logits.logsumexp(-1).sum().backward()
    assert model.embedding.symbols.weight.grad is not None
    assert model.embedding.symbols.weight.grad[:TOKENS].any(1).all()  # as weights of the output
