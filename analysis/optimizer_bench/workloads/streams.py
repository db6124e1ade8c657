"""Workloads with streams of data: batches are sampled from a generative process, so that no row repeats.

Overfitting is impossible here: training and validation losses are limited by the number of steps alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import (
    RecurrentStates,
    ResidualLayers,
    WorkloadTask,
    make_convolutions,
    make_mlp,
    make_seed_zero_generator,
    make_transformer,
    make_workload_builder,
)
from analysis.optimizer_bench.workloads.sources import FACTOR_DIM, make_factor_tables, make_gpt, next_symbol_loss

#: Topics, symbols and length of texts; the topic determines the transition probabilities.
N_TOPICS, N_SYMBOLS, TEXT_LENGTH = 4, 64, 16
#: Petals of flowers, pixels per side, and standard deviation of the noise.
PETAL_COUNTS, FLOWER_SIDE, PETAL_NOISE_STD = range(2, 10), 20, 0.35
#: Nodes of graphs, edge probability, and the class of all larger distances.
N_NODES, EDGE_PROBABILITY, MAX_DISTANCE = 20, 0.09, 6
N_CONTEXT_POINTS, N_FUNCTION_INPUTS, N_PREDICTED = 12, 4, 6  #: Points and inputs of a function; predicted points.
N_USERS, N_ITEMS = 800, 500
N_TEACHER_INPUTS, N_TEACHER_CLASSES = 32, 10
N_CHORD_SAMPLES, N_WARMUP_SAMPLES = 16, 5  #: Samples of a chord, and samples before the first forecast in the loss.
N_SURFACE_INPUTS, N_SURFACE_WAVES = 3, 12  #: Coordinates of a surface, and number of waves in it.
#: Samples of a spring, samples before the first forecast, and cubic stiffness.
N_SPRING_SAMPLES, N_WARMUP_STEPS, CUBIC_STIFFNESS = 20, 4, 0.25
CARDS_PER_HAND, N_CARD_KINDS, N_CARD_FEATURES = 6, 6, 4  #: Cards in a hand, kinds of cards, numbers that encode a card.
#: Samples of a signal, jump probability, and standard deviation of the noise.
SIGNAL_LENGTH, JUMP_PROBABILITY, SIGNAL_NOISE = 64, 0.06, 0.4

SampleBatch = Callable[[int, torch.Generator], Any]  #: Samples a batch, given the number of rows.


def make_stream_task(
    make_model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    sample_batch: SampleBatch,
    batch_size: int,
    n_validation: int,
) -> WorkloadTask:
    """Make the task of batches that are newly sampled, with a fixed batch of ``n_validation`` validation rows."""

    def stream(generator: torch.Generator) -> Iterator[Any]:
        while True:
            yield sample_batch(batch_size, generator)

    validation_seed = 2**31  # seed of the validation batch, which no run uses
    validation = sample_batch(n_validation, torch.Generator().manual_seed(validation_seed))
    return WorkloadTask(make_model, loss, stream, validation)


@make_workload_builder
def topic_grammar_prediction() -> WorkloadTask:
    """Predict the next symbol of a text by a GPT: it depends on the previous two symbols and on the text's topic."""
    generator = make_seed_zero_generator()
    before, last, after = (torch.randn(N_SYMBOLS, 8, generator=generator) for _ in range(3))
    topics = torch.randn(N_TOPICS, 1, 1, 8, generator=generator)
    follows = (topics * before[:, None] + last) @ after.T  # (topics, symbols, symbols, symbols)
    probabilities = follows.softmax(-1).cumsum(-1)

    def sample_batch(n: int, generator: torch.Generator) -> Tensor:
        topics = torch.randint(N_TOPICS, (n,), generator=generator)
        text = [*torch.randint(N_SYMBOLS, (2, n), generator=generator)]
        for chance in torch.rand(TEXT_LENGTH - 1, n, 1, generator=generator):
            text.append((probabilities[topics, text[-2], text[-1], :-1] < chance).sum(1))
        return torch.stack(text, 1)  # (n, 1 + length)

    return make_stream_task(make_gpt, next_symbol_loss, sample_batch, 4, 48)


def batch_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the cross-entropy of a batch of rows and classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


@make_workload_builder
def petal_counting() -> WorkloadTask:
    """Count the petals of a drawn flower by convolutions."""

    def make_model() -> nn.Module:
        convolutions = make_convolutions(1, 12, 24, 32, stride=2)
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(288, len(PETAL_COUNTS)))

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(len(PETAL_COUNTS), (n,), generator=generator)
        turn, size, depth, right, down = torch.rand(5, n, 1, 1, generator=generator)
        axis = torch.linspace(-1, 1, FLOWER_SIDE)
        x, y = axis - 0.4 * (right - 0.5), axis[:, None] - 0.4 * (down - 0.5)
        angle = torch.atan2(y, x) * (kinds + PETAL_COUNTS[0])[:, None, None]
        edge = 1 + (0.2 + 0.3 * depth) * (angle + 2 * math.pi * turn).cos()
        flowers = torch.sigmoid(12 * ((0.4 + 0.3 * size) * edge - (x**2 + y**2).sqrt()))
        noise = torch.randn(n, FLOWER_SIDE, FLOWER_SIDE, generator=generator)
        return (flowers + PETAL_NOISE_STD * noise)[:, None], kinds

    return make_stream_task(make_model, batch_cross_entropy, sample_batch, 16, 256)


@make_workload_builder
def graph_distance() -> WorkloadTask:
    """Predict the distance, in edges, of a node from a marked node of a random graph, by means over neighbours."""

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        upper = (torch.rand(n, N_NODES, N_NODES, generator=generator) < EDGE_PROBABILITY).float().triu(1)
        edges = upper + upper.mT + torch.eye(N_NODES)  # (n, nodes, nodes), with self-loops
        reached = torch.eye(N_NODES)[0].expand(n, N_NODES)
        hops = torch.zeros(n, N_NODES, dtype=torch.int64)
        for _ in range(MAX_DISTANCE):
            hops += reached == 0
            reached = ((edges @ reached[..., None]).squeeze(2) > 0).float()
        return edges, hops

    def make_model() -> nn.Module:
        sizes = [1, 32, 32, 32, 32, 32]
        layers = [nn.Linear(2 * inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
        return nn.ModuleList([*layers, nn.Linear(32, 1 + MAX_DISTANCE)])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (*layers, head), (edges, hops) = model.children(), batch
        near = edges / edges.sum(2, keepdim=True)
        x = torch.eye(N_NODES)[0, :, None].expand(len(edges), N_NODES, 1)
        for layer in layers:
            x = layer(torch.cat((x, near @ x), 2)).relu()
        return F.cross_entropy(head(x).flatten(0, 1), hops.flatten())

    return make_stream_task(make_model, loss, sample_batch, 8, 128)


@make_workload_builder
def in_context_regression() -> WorkloadTask:
    """Predict values of a linear function in context by a transformer; each row is a new function.

    Source: S. Garg et al. (2022), What can transformers learn in-context?, arXiv 2208.01066.
    """

    def make_model() -> nn.Module:
        layers = nn.Linear(N_FUNCTION_INPUTS + 2, 48), make_transformer(48)
        return nn.Sequential(*layers, nn.LayerNorm(48), nn.Linear(48, 1), nn.Flatten())

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, N_CONTEXT_POINTS, N_FUNCTION_INPUTS, generator=generator)
        y = x @ torch.randn(n, N_FUNCTION_INPUTS, 1, generator=generator)
        y = y + 0.1 * torch.randn(y.shape, generator=generator)  # (n, points, 1)
        hidden = (torch.arange(N_CONTEXT_POINTS) >= N_CONTEXT_POINTS - N_PREDICTED).float()
        hidden = hidden[:, None].expand(y.shape)  # the last column says which values are hidden: there is 0
        return torch.cat((x, y * (1 - hidden), hidden), 2), y[:, -N_PREDICTED:, 0]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0])[:, -N_PREDICTED:], batch[1])

    return make_stream_task(make_model, loss, sample_batch, 8, 96)


@make_workload_builder
def user_item_preferences() -> WorkloadTask:
    """Predict whether a user likes an item; item frequencies are skewed.

    The logit is the dot product of a user's and an item's vector, plus their biases, as in the true model.
    """
    generator = make_seed_zero_generator()
    people, things = (torch.randn(count, FACTOR_DIM // 2, generator=generator) for count in (N_USERS, N_ITEMS))
    lean = torch.randn(N_ITEMS, generator=generator)

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        user = torch.randint(N_USERS, (n,), generator=generator)
        item = (N_ITEMS * torch.rand(n, generator=generator) ** 2).long()
        logits = (people[user] * things[item]).sum(1) + lean[item]
        return user, item, (torch.rand(n, generator=generator) < logits.sigmoid()).float()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        (of_user, of_item, user_bias, item_bias), (user, item, liked) = model.children(), batch
        logits = (of_user(user) * of_item(item)).sum(1) + (user_bias(user) + item_bias(item)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, liked)

    make_model = functools.partial(make_factor_tables, N_USERS, N_ITEMS, (N_USERS, N_ITEMS))
    return make_stream_task(make_model, loss, sample_batch, 256, 8192)


@make_workload_builder
def teacher_network() -> WorkloadTask:
    """Classify rows that are labelled by a network with random weights (the teacher)."""
    generator = make_seed_zero_generator()
    first = torch.randn(N_TEACHER_INPUTS, 24, generator=generator) / math.sqrt(N_TEACHER_INPUTS)
    second = torch.randn(24, N_TEACHER_CLASSES, generator=generator)

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, N_TEACHER_INPUTS, generator=generator) * torch.logspace(0.5, -0.5, N_TEACHER_INPUTS)
        chances = (2 * (2 * x @ first).sin() @ second).softmax(1)
        return x, chances.multinomial(1, generator=generator).squeeze(1)

    make_model = functools.partial(make_mlp, N_TEACHER_INPUTS, 96, 96, N_TEACHER_CLASSES)
    return make_stream_task(make_model, batch_cross_entropy, sample_batch, 64, 2048)


@make_workload_builder
def chord_forecasting() -> WorkloadTask:
    """Forecast the next sample of a chord by a GRU; the loss is the squared error from ``N_WARMUP_SAMPLES`` on."""

    def make_model() -> nn.Module:
        return nn.Sequential(RecurrentStates(nn.GRU(1, 48, batch_first=True)), nn.Linear(48, 1), nn.Flatten())

    def sample_batch(n: int, generator: torch.Generator) -> Tensor:  # two tones with a little noise
        pitch, phase, loudness = torch.rand(3, n, 2, 1, generator=generator)
        angles = (0.2 + 1.5 * pitch) * torch.arange(1 + N_CHORD_SAMPLES) + 2 * math.pi * phase  # (n, 2, 1 + samples)
        noise = torch.randn(n, 1 + N_CHORD_SAMPLES, generator=generator)
        return torch.add((loudness * angles.sin()).sum(1), noise, alpha=0.05)

    def loss(model: nn.Module, samples: Tensor) -> Tensor:
        return F.mse_loss(model(samples[:, :-1, None])[:, N_WARMUP_SAMPLES:], samples[:, 1 + N_WARMUP_SAMPLES :])

    return make_stream_task(make_model, loss, sample_batch, 16, 128)


@make_workload_builder
def piecewise_constant_denoising() -> WorkloadTask:
    """Remove noise from piecewise constant signals by convolutions; the loss is 100 times the mean squared error."""

    def make_model() -> nn.Module:
        convolve = functools.partial(nn.Conv1d, kernel_size=5, padding=2)
        middle = [ResidualLayers(nn.ReLU(), convolve(24, 24)) for _ in range(2)]
        return nn.Sequential(convolve(1, 24), *middle, nn.ReLU(), convolve(24, 1))

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        levels = torch.randn(n, SIGNAL_LENGTH, generator=generator)
        jumps = torch.rand(n, SIGNAL_LENGTH, generator=generator) < JUMP_PROBABILITY
        since = torch.where(jumps, torch.arange(SIGNAL_LENGTH), 0).cummax(1).values  # the last jump, or the start
        clean = levels.gather(1, since)[:, None]  # (n, 1, signal)
        return clean + SIGNAL_NOISE * torch.randn(clean.shape, generator=generator), clean

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 100 * F.mse_loss(model(batch[0]), batch[1])

    return make_stream_task(make_model, loss, sample_batch, 8, 128)


@make_workload_builder
def smooth_regression() -> WorkloadTask:
    """Fit a smooth function of a few coordinates, without noise; the minimum loss is 0."""
    generator = make_seed_zero_generator()
    waves = 2.5 * torch.randn(N_SURFACE_INPUTS, N_SURFACE_WAVES, generator=generator)
    phases = 2 * math.pi * torch.rand(N_SURFACE_WAVES, generator=generator)
    heights = torch.randn(N_SURFACE_WAVES, generator=generator) / math.sqrt(N_SURFACE_WAVES / 2)

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(n, N_SURFACE_INPUTS, generator=generator) - 1
        return x, (x @ waves + phases).sin() @ heights

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    make_model = functools.partial(make_mlp, N_SURFACE_INPUTS, 48, 48, 48, 1, activation=nn.Tanh)
    return make_stream_task(make_model, loss, sample_batch, 48, 512)


@make_workload_builder
def driven_spring() -> WorkloadTask:
    """Predict the position of a mass on a spring by an LSTM from the forces on it, without noise."""

    def make_model() -> nn.Module:
        return nn.Sequential(RecurrentStates(nn.LSTM(1, 40, batch_first=True)), nn.Linear(40, 1), nn.Flatten())

    def sample_batch(n: int, generator: torch.Generator) -> Tensor:
        pushes = torch.randn(n, N_SPRING_SAMPLES, generator=generator)
        position, speed = torch.zeros(2, n)
        positions = []
        for push in pushes.T:
            speed = 0.9 * speed + push - 0.5 * position - CUBIC_STIFFNESS * position**3 / (1 + position**2)
            position = position + 0.5 * speed
            positions.append(position)
        return torch.stack((pushes, torch.stack(positions, 1)), 2)  # (n, samples, 2)

    def loss(model: nn.Module, samples: Tensor) -> Tensor:
        pushes, positions = samples.unbind(2)
        return F.mse_loss(model(pushes[..., None])[:, N_WARMUP_STEPS:], positions[:, N_WARMUP_STEPS:])

    return make_stream_task(make_model, loss, sample_batch, 16, 128)


class DeepSetsOfCards(nn.Module):
    """A permutation-invariant network (deep sets): one MLP embeds each card, another maps the sum to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.card, self.hand = make_mlp(N_CARD_FEATURES, 48, 48), make_mlp(48, 48, 48, 1 + CARDS_PER_HAND)

    def forward(self, cards: Tensor) -> Tensor:
        """Map hands of cards (n, cards, numbers per card) to logits (n, 1 + cards)."""
        logits: Tensor = self.hand(self.card(cards).relu().sum(1))
        return logits


@make_workload_builder
def distinct_card_counting() -> WorkloadTask:
    """Count the different kinds of cards in a hand of cards; the minimum loss is 0."""
    numbers = torch.randn(N_CARD_KINDS, N_CARD_FEATURES, generator=make_seed_zero_generator())

    def sample_batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        cards = torch.randint(N_CARD_KINDS, (n, CARDS_PER_HAND), generator=generator)
        return numbers[cards], (F.one_hot(cards, N_CARD_KINDS).sum(1) > 0).sum(1)

    return make_stream_task(DeepSetsOfCards, batch_cross_entropy, sample_batch, 32, 512)
