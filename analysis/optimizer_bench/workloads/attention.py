"""Graphs once more: attention to a few sampled neighbours, and convolutions of a whole small graph with few labels.

The graph is that of the functions of Python's standard library, see `gnn.load_graph`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, seed_0, shuffle, workload
from analysis.optimizer_bench.workloads.gnn import WORDS, load_graph, tell_modules

HEADS, WIDTH = 2, 16  #: The attention's: heads, and the features of each in the first layer.
SLOPE = 0.2  #: Of the scores below zero.
GAT_BATCH, GAT_VALIDATION = 16, 100

MODULES, LABELLED = 8, 6  #: The convolution's: modules, the largest ones, and labelled functions of each.
HIDDEN, DROPOUT = 16, 0.5


class Attention(nn.Module):
    """Each head's mean of a node and its neighbours, weighted by what a network of one layer makes of the pairs."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.features = nn.Linear(inputs, HEADS * width, bias=False)
        self.from_self = nn.Parameter(torch.empty(HEADS, width))
        self.from_near = nn.Parameter(torch.empty(HEADS, width))
        self.bias = nn.Parameter(torch.zeros(HEADS, width))
        for parameter in (self.features.weight, self.from_self, self.from_near):
            nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        """Map nodes (..., inputs) and their neighbours (..., k, inputs) to (..., heads, width)."""
        own = self.features(x).unflatten(-1, self.bias.shape)[..., None, :, :]  # (..., 1, heads, width)
        others = self.features(near).unflatten(-1, self.bias.shape)  # (..., k, heads, width)
        values = torch.cat((own, others), -3)  # (..., 1 + k, heads, width)
        scores = (own * self.from_self).sum(-1) + (values * self.from_near).sum(-1)  # (..., 1 + k, heads)
        weights = F.leaky_relu(scores, SLOPE).softmax(-2)
        return torch.add((weights[..., None] * values).sum(-3), self.bias)


class GAT(nn.Module):
    """Two layers of attention: the first one's heads side by side, the mean of the second one's.

    Source: P. Veličković et al. (2018), Graph attention networks, arXiv 1710.10903; here neighbours are sampled.
    """

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.first = Attention(inputs, WIDTH)
        self.second = Attention(HEADS * WIDTH, num_classes)

    def forward(self, x: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Map features of nodes (n, words), neighbours (n, k, words) and theirs to logits (n, num_classes)."""
        hidden, hidden_near = (F.elu(self.first(*pair)).flatten(-2) for pair in ((x, near), (near, far)))
        logits: Tensor = self.second(hidden, hidden_near).mean(-2)
        return logits


@workload
def gat() -> Task:
    """Tell a function's module by attention; the seed decides the neighbours drawn, too."""
    return tell_modules(GAT, size=GAT_BATCH, held_out=GAT_VALIDATION)


def load_modules() -> tuple[Tensor, Tensor, Tensor]:
    """Return the features (n, words) and modules (n,) of the largest modules' functions, and their edges (2, e)."""
    graph = load_graph()
    largest = graph.y.bincount().argsort(descending=True, stable=True)[:MODULES]
    kept = torch.isin(graph.y, largest)
    numbers = kept.cumsum(0) - 1  # of the nodes that are kept
    ends = torch.stack((torch.arange(len(graph.y)).repeat_interleave(graph.degree), graph.neighbours))
    edges = numbers[ends[:, kept[ends].all(0)]]
    return graph.x[kept], torch.searchsorted(largest.sort().values, graph.y[kept]), edges


def normalise(edges: Tensor, n: int) -> Tensor:
    """Return edges (2, e) as a sparse matrix (n, n), each divided by the root of its two ends' degrees."""
    degree = edges[0].bincount(minlength=n).float()
    return torch.sparse_coo_tensor(edges, degree[edges].prod(0).rsqrt(), (n, n), check_invariants=True).coalesce()


class GCN(nn.Module):
    """Two layers, each of which mixes what a linear map makes of the neighbours; dropout before both.

    Source: T. N. Kipf and M. Welling (2017), Semi-supervised classification with graph convolutional networks, arXiv
        1609.02907; here dropout takes a word, or a hidden feature, from all nodes at once.
    """

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, HIDDEN)
        self.second = nn.Linear(HIDDEN, num_classes)
        for layer in (self.first, self.second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, mixing: Tensor, scale: Tensor) -> Tensor:
        """Map features (n, inputs), a matrix (n, n) and dropout's factors (inputs + hidden,) to logits (n, classes)."""
        before, between = scale.split([x.shape[1], HIDDEN])
        hidden = (mixing @ self.first(x * before)).relu() * between  # (n, hidden)
        logits: Tensor = mixing @ self.second(hidden)
        return logits


@workload
def gcn() -> Task:
    """Tell modules from a few labelled functions, the whole graph in one batch; the seed decides what is dropped, too.

    The weights learn the labels by heart: the validation loss rises again, unless they decay fast.
    """
    x, y, edges = load_modules()
    mixing = normalise(edges, len(x))
    shuffled = torch.randperm(len(x), generator=seed_0())
    rank = F.one_hot(y[shuffled]).cumsum(0).gather(1, y[shuffled, None]).squeeze(1)  # of a node in its module, from 1
    train, validation = shuffled[rank <= LABELLED], shuffled[rank > LABELLED]

    def draw(nodes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        kept = torch.rand(WORDS + HIDDEN, generator=generator) >= DROPOUT
        return nodes, kept / (1 - DROPOUT)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nodes, scale = batch
        return F.cross_entropy(model(x, mixing, scale)[nodes], y[nodes])

    make = functools.partial(GCN, WORDS, MODULES)
    held_out = validation, torch.ones(WORDS + HIDDEN)
    return Task(make, loss, shuffle(train, len(train), draw), held_out)


WORKLOADS = {"gat": gat, "gcn": gcn}
