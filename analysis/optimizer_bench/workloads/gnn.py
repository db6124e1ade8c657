"""A graph network over the functions of Python's standard library: which module is each one from?

Two functions are neighbours if one's body holds the other's name. The network is GraphSAGE: each layer adds what it
makes of a node to what it makes of the mean of a few neighbours, drawn anew for every batch.

Source: Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs" (2017), algorithms 1 and 2.
"""

from __future__ import annotations

import functools
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, seed_0, shuffle, workload
from analysis.optimizer_bench.workloads.data import DEFINITION, SMALLEST, WORD

FOREIGN = {"site-packages", "dist-packages", "test"}  # not everywhere, or not the same
COMMON = 6  # functions of one name: a name that more share says nothing
WORDS = 256  # features: whether a body has each of the commonest words
FANOUT = 5  # neighbours drawn of each node
WIDTH, BATCH, VALIDATION = 64, 48, 300


class Graph(NamedTuple):
    """Nodes and their neighbours: node i's are ``neighbours[start[i] : start[i] + degree[i]]``, itself included."""

    x: Tensor
    y: Tensor
    neighbours: Tensor
    start: Tensor
    degree: Tensor

    def draw(self, nodes: Tensor, generator: torch.Generator) -> Tensor:
        """Draw neighbours (..., fanout) of nodes (...), with replacement."""
        uniform = torch.rand(*nodes.shape, FANOUT, generator=generator, dtype=torch.float64)  # float32 could round up
        return self.neighbours[self.start[nodes][..., None] + (uniform * self.degree[nodes][..., None]).long()]


@functools.cache
def load_graph() -> Graph:
    """Read the functions of all large enough modules."""
    names, bodies, labels = [], [], []
    module = 0
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if path.parent.name in FOREIGN:
            continue
        _, *pieces = DEFINITION.split(path.read_text(encoding="utf-8", errors="replace"))
        if len(pieces) // 2 >= SMALLEST:
            names += pieces[::2]
            bodies += [set(WORD.findall(body)) for body in pieces[1::2]]
            labels += [module] * (len(pieces) // 2)
            module += 1
    nodes_of = defaultdict(set)
    for node, name in enumerate(names):
        nodes_of[name].add(node)
    adjacent = [{node} for node in range(len(names))]
    for node, body in enumerate(bodies):
        for word in body & nodes_of.keys():
            if len(nodes_of[word]) <= COMMON:
                adjacent[node] |= nodes_of[word]
                for other in nodes_of[word]:
                    adjacent[other].add(node)
    counts = Counter(word for body in bodies for word in body)
    words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    x = np.array([[word in body for word in words] for body in bodies], np.float32)  # (n, words)
    degree = torch.tensor(list(map(len, adjacent)))
    neighbours = torch.tensor([other for near in adjacent for other in sorted(near)])
    return Graph(torch.from_numpy(x), torch.tensor(labels), neighbours, degree.cumsum(0) - degree, degree)


class Layer(nn.Module):
    """What a layer makes of a node, plus what it makes of the mean of its neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.others = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        """Map nodes (..., inputs) and their neighbours (..., fanout, inputs) to (..., outputs)."""
        return torch.add(self.own(x), self.others(near.mean(dim=-2)))


class GraphSAGE(nn.Module):
    """Two layers, the first of which sees the neighbours' neighbours."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.first = Layer(inputs, WIDTH)
        self.second = Layer(WIDTH, num_classes)

    def forward(self, x: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Map features of nodes (n, words), neighbours (n, fanout, words) and theirs to logits (n, num_classes)."""
        logits: Tensor = self.second(self.first(x, near).relu(), self.first(near, far).relu())
        return logits


def tell_modules(make: Callable[[int, int], nn.Module], *, size: int, held_out: int) -> Task:
    """Return the task of telling a function's module from it and from neighbours that are drawn.

    Args:
        make: Makes, of the numbers of features and classes, what maps nodes, neighbours and theirs to logits.
        size: Functions of a batch.
        held_out: Functions to validate on.
    """
    graph, generator = load_graph(), seed_0()
    validation, train = torch.randperm(len(graph.x), generator=generator).tensor_split([held_out])

    def draw(nodes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        near = graph.draw(nodes, generator)
        return nodes, near, graph.draw(near, generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(*(graph.x[nodes] for nodes in batch)), graph.y[batch[0]])

    model = functools.partial(make, WORDS, int(graph.y.max()) + 1)
    return Task(model, loss, shuffle(train, size, draw), draw(validation, generator))


@workload
def gnn() -> Task:
    """Tell a function's module by GraphSAGE; the seed decides the neighbours drawn, too."""
    return tell_modules(GraphSAGE, size=BATCH, held_out=VALIDATION)


WORKLOADS = {"gnn": gnn}
