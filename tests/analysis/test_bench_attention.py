"""The bench's graph attention and graph convolution, against dense matrices."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads.attention import (
    GCN,
    HEADS,
    HIDDEN,
    LABELLED,
    MODULES,
    SLOPE,
    Attention,
    build_gcn,
    load_modules,
    normalise,
)
from analysis.optimizer_bench.workloads.gnn import WORDS, load_graph

#: A ring of six nodes, without the nodes themselves.
RING = torch.tensor([[(node - 1) % 6, (node + 1) % 6] for node in range(6)])


def test_attention_ignores_what_is_no_neighbour() -> None:
    with initial_weights(0):
        layer = Attention(5, 3)
        x = torch.randn(6, 5)
    values = layer.features(x).view(6, HEADS, 3)
    ends = [(values * part).sum(-1) for part in (layer.from_self, layer.from_near)]  # each (n, heads)
    scores = F.leaky_relu(ends[0][:, None] + ends[1][None], SLOPE)  # (n, n, heads)
    adjacent = torch.eye(6, dtype=torch.bool).scatter(1, RING, True)
    weights = scores.masked_fill(~adjacent[..., None], -torch.inf).softmax(1)
    torch.testing.assert_close(layer(x, x[RING]), torch.einsum("ijh,jhw->ihw", weights, values))


def test_attention_does_not_tell_neighbours_apart_by_their_order() -> None:
    with initial_weights(0):
        layer = Attention(5, 3)
        x = torch.randn(6, 5)
    torch.testing.assert_close(layer(x, x[RING]), layer(x, x[RING.flip(1)]))


def test_edges_are_those_of_the_whole_graph() -> None:
    graph = load_graph()
    x, y, edges = load_modules()
    degree = graph.y.bincount()
    largest = sorted(degree.tolist(), reverse=True)[:MODULES]
    assert sorted(y.bincount().tolist(), reverse=True) == largest
    kept = torch.isin(graph.y, degree.argsort(descending=True, stable=True)[:MODULES]).nonzero().squeeze(1)
    assert torch.equal(x, graph.x[kept])
    for node in (0, len(kept) // 2, len(kept) - 1):
        start, count = graph.start[kept[node]], graph.degree[kept[node]]
        near = graph.neighbours[start : start + count]
        assert kept[edges[1, edges[0] == node]].tolist() == near[torch.isin(near, kept)].tolist()


def test_convolution_divides_by_the_roots_of_degrees() -> None:
    _, _, edges = load_modules()
    n = int(edges.max()) + 1
    mixing = normalise(edges, n)
    roots = edges[0].bincount().float().sqrt()
    torch.testing.assert_close(mixing @ roots[:, None], roots[:, None])  # the leading eigenvector
    torch.testing.assert_close(mixing.T.coalesce(), mixing)


def test_a_convolution_is_that_of_the_dense_matrix() -> None:
    edges = torch.cat(
        (torch.arange(6).expand(2, -1), torch.stack((torch.arange(6)[:, None].expand(6, 2), RING)).flatten(1)), 1
    )
    dense = torch.zeros(6, 6).index_put(tuple(edges), torch.tensor(1 / 3))  # every degree is three
    with initial_weights(0):
        model, x = GCN(5, 4), torch.randn(6, 5)
    scale = torch.tensor([0.0, 2.0]).repeat((5 + HIDDEN + 1) // 2)[: 5 + HIDDEN]
    hidden = (dense @ model.first(x * scale[:5])).relu() * scale[5:]
    torch.testing.assert_close(model(x, normalise(edges, 6), scale), dense @ model.second(hidden))


def test_few_functions_are_labelled() -> None:
    _, y, _ = load_modules()
    assert len(y) / 20 > LABELLED * MODULES
    assert y.unique().tolist() == list(range(MODULES))
    assert (
        sum(weight.numel() for weight in build_gcn(0).model.parameters())
        == (WORDS + 1) * HIDDEN + (HIDDEN + 1) * MODULES
    )
