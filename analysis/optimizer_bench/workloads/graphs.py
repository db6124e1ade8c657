"""Graph networks that classify functions of Python's standard library by module.

Two functions are neighbours if the body of one contains the name of the other. Two networks use a few neighbours,
sampled for every batch; the third convolves a whole small graph with few labels.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench import workload

DEFINITION_PATTERN = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test"}  #: Folders whose content differs between machines.
N_WORD_FEATURES = 256  #: Number of features: whether a body has each of the most frequent words.
N_HEADS, LEAKY_RELU_SLOPE = 2, 0.2  #: Number of attention heads, and slope of negative attention scores.
#: Of the graph convolution: number of modules, the largest ones, and labelled functions of each.
N_MODULES, N_LABELLED_PER_MODULE = 8, 6
HIDDEN_WIDTH, DROPOUT = 16, 0.5


class FunctionGraph(NamedTuple):
    """A graph: the ``degree[i]`` neighbours of node i, itself included, begin at index ``first_neighbour[i]``."""

    x: Tensor  #: (n, words) float32: which words occur in each function.
    y: Tensor  #: (n,) int64: the module of each function.
    neighbours: Tensor  #: (edges,) int64: the neighbours of all nodes, node by node.
    first_neighbour: Tensor
    degree: Tensor

    def sample_neighbours(self, nodes: Tensor, generator: torch.Generator) -> Tensor:
        """Sample neighbours (..., fanout) of each of the nodes (...), with replacement."""
        n_sampled_neighbours = 5  # neighbours that are sampled for each node
        shape = *nodes.shape, n_sampled_neighbours
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)  # float32 could round up
        chosen = (uniform * self.degree[nodes][..., None]).long()
        return self.neighbours[self.first_neighbour[nodes][..., None] + chosen]


@functools.cache
def load_function_graph() -> FunctionGraph:
    """Load the graph of the functions in Python's standard library, in modules with enough functions."""
    names, bodies, labels = [], [], []
    module = 0
    library = Path(sysconfig.get_path("stdlib"))
    min_functions_per_module = 20  # smaller modules are left out
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if path.parent.name in EXCLUDED_FOLDERS:
            continue
        _, *pieces = DEFINITION_PATTERN.split(path.read_text(encoding="utf-8", errors="replace"))
        if len(pieces) // 2 >= min_functions_per_module:
            names += pieces[::2]
            bodies += [set(workload.WORD_PATTERN.findall(body)) for body in pieces[1::2]]
            labels += [module] * (len(pieces) // 2)
            module += 1
    nodes_of = defaultdict(set)
    for node, name in enumerate(names):
        nodes_of[name].add(node)
    adjacent = [{node} for node in range(len(names))]
    # Maximum number of functions with one name; more frequent names are uninformative.
    max_functions_per_name = 6
    for node, body in enumerate(bodies):
        for word in body & nodes_of.keys():
            if len(nodes_of[word]) <= max_functions_per_name:
                adjacent[node] |= nodes_of[word]
                for other in nodes_of[word]:
                    adjacent[other].add(node)
    counts = Counter(word for body in bodies for word in body)
    words = sorted(counts, key=lambda word: (-counts[word], word))[:N_WORD_FEATURES]
    x = np.array([[word in body for word in words] for body in bodies], np.float32)  # (n, words)
    degree = torch.tensor(list(map(len, adjacent)))
    neighbours = torch.tensor([other for near in adjacent for other in sorted(near)])
    return FunctionGraph(torch.from_numpy(x), torch.tensor(labels), neighbours, degree.cumsum(0) - degree, degree)


class GraphSageLayer(nn.Module):
    """GraphSAGE's layer: a linear map of a node plus a linear map of the mean of its neighbours.

    Source: Hamilton, Ying and Leskovec (2017), Inductive representation learning on large graphs, algorithms 1 and 2:
        GraphSAGE.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.others = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        """Map nodes (..., inputs) and their neighbours (..., fanout, inputs) to (..., outputs)."""
        return torch.add(self.own(x), self.others(near.mean(dim=-2)))


class GraphAttentionLayer(nn.Module):
    """Graph attention: for each head, a mean over a node and its neighbours, with weights from a one-layer network.

    Source: P. Veličković et al. (2018), Graph attention networks, arXiv 1710.10903; here neighbours are sampled.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.features = nn.Linear(inputs, N_HEADS * width, bias=False)
        self.from_self = nn.Parameter(torch.empty(N_HEADS, width))
        self.from_near = nn.Parameter(torch.empty(N_HEADS, width))
        self.bias = nn.Parameter(torch.zeros(N_HEADS, width))
        for parameter in (self.features.weight, self.from_self, self.from_near):
            nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        """Map nodes (..., inputs) and their neighbours (..., k, inputs) to (..., heads, width)."""
        node_features = self.features(x).unflatten(-1, self.bias.shape)[..., None, :, :]  # (..., 1, heads, width)
        others = self.features(near).unflatten(-1, self.bias.shape)  # (..., k, heads, width)
        values = torch.cat((node_features, others), -3)  # (..., 1 + k, heads, width)
        scores = (node_features * self.from_self).sum(-1) + (values * self.from_near).sum(-1)  # (..., 1 + k, heads)
        weights = F.leaky_relu(scores, LEAKY_RELU_SLOPE).softmax(-2)
        return torch.add((weights[..., None] * values).sum(-3), self.bias)


def make_module_task(
    make_model: Callable[[int], nn.Module],
    between: Callable[[Tensor], Tensor],
    finish: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    n_validation: int,
) -> workload.WorkloadTask:
    """Make the task of classifying functions by module, from their words and from sampled neighbours.

    ``make_model`` maps the number of classes to two layers on nodes and their neighbours; ``between`` is applied to the
    output of the first layer, and ``finish`` maps the output of the second layer to logits.
    """
    graph, generator = load_function_graph(), workload.make_seed_zero_generator()
    validation, train = torch.randperm(len(graph.x), generator=generator).tensor_split([n_validation])

    def sample_neighbourhood(nodes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        near = graph.sample_neighbours(nodes, generator)
        return nodes, near, graph.sample_neighbours(near, generator)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        (first, second), (x, near, far) = model.children(), (graph.x[nodes] for nodes in batch)
        logits = finish(second(between(first(x, near)), between(first(near, far))))
        return F.cross_entropy(logits, graph.y[batch[0]])

    model = functools.partial(make_model, int(graph.y.max()) + 1)
    stream = workload.shuffled_batches(train, batch_size, sample_neighbourhood)
    return workload.WorkloadTask(model, loss, stream, sample_neighbourhood(validation, generator))


@workload.make_workload_builder
def graph_sage() -> workload.WorkloadTask:
    """Classify functions by module with GraphSAGE; the seed determines the sampled neighbours, too."""

    def make_model(num_classes: int) -> nn.Module:
        return nn.ModuleList([GraphSageLayer(N_WORD_FEATURES, 64), GraphSageLayer(64, num_classes)])

    return make_module_task(make_model, torch.relu, lambda logits: logits, batch_size=48, n_validation=300)


@workload.make_workload_builder
def graph_attention_network() -> workload.WorkloadTask:
    """Classify functions by module with graph attention: heads are concatenated in layer 1, averaged in layer 2."""

    def make_model(num_classes: int) -> nn.Module:
        return nn.ModuleList([GraphAttentionLayer(N_WORD_FEATURES, 16), GraphAttentionLayer(N_HEADS * 16, num_classes)])

    def between(x: Tensor) -> Tensor:
        return F.elu(x).flatten(-2)

    return make_module_task(make_model, between, lambda logits: logits.mean(-2), batch_size=16, n_validation=100)


@workload.make_workload_builder
def graph_convolution_network() -> workload.WorkloadTask:
    """Classify functions by module with a graph convolutional network and few labels; the whole graph is a batch.

    Two layers average linear maps of the neighbours, with dropout before each, which the seed determines. The network
    overfits: the validation loss rises again, unless weight decay is strong.

    Source: T. N. Kipf and M. Welling (2017), Semi-supervised classification with graph convolutional networks, arXiv
        1609.02907; here dropout takes a word, or a hidden feature, from all nodes at once.
    """
    graph = load_function_graph()
    largest = graph.y.bincount().argsort(descending=True, stable=True)[:N_MODULES]
    among = torch.isin(graph.y, largest)
    x, y, indices = graph.x[among], torch.searchsorted(largest.sort().values, graph.y[among]), among.cumsum(0) - 1
    ends = torch.stack((torch.arange(len(graph.y)).repeat_interleave(graph.degree), graph.neighbours))
    edges = indices[ends[:, among[ends].all(0)]]  # (2, e)
    shares = edges[0].bincount(minlength=len(x)).float()[edges].prod(0).rsqrt()  # by the root of both degrees
    mixing = torch.sparse_coo_tensor(edges, shares, (len(x), len(x)), check_invariants=True).coalesce()
    shuffled = torch.randperm(len(x), generator=workload.make_seed_zero_generator())
    rank = F.one_hot(y[shuffled]).cumsum(0).gather(1, y[shuffled, None]).squeeze(1)  # of a node in its module, from 1
    train, validation = shuffled[rank <= N_LABELLED_PER_MODULE], shuffled[rank > N_LABELLED_PER_MODULE]

    def make_model() -> nn.Module:
        layers = [nn.Linear(N_WORD_FEATURES, HIDDEN_WIDTH), nn.Linear(HIDDEN_WIDTH, N_MODULES)]
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        return nn.ModuleList(layers)

    def sample_dropout(nodes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        stays = torch.rand(N_WORD_FEATURES + HIDDEN_WIDTH, generator=generator) >= DROPOUT
        return nodes, stays / (1 - DROPOUT)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (first, second), (nodes, scale) = model.children(), batch
        before, between = scale.split([N_WORD_FEATURES, HIDDEN_WIDTH])
        hidden = (mixing @ first(x * before)).relu() * between  # (n, hidden)
        return F.cross_entropy((mixing @ second(hidden))[nodes], y[nodes])

    held_out = validation, torch.ones(N_WORD_FEATURES + HIDDEN_WIDTH)
    batches = workload.shuffled_batches(train, len(train), sample_dropout)
    return workload.WorkloadTask(make_model, loss, batches, held_out)
