"""Training of the transformer: an episode is a table, its loss that of new rows by the nearest prototype."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.incontext.episodes import Episodes, make_episodes, mask_seen
from analysis.incontext.real import Real
from protonet._io import write_atomically
from protonet.views.transformer import (
    CLASS_CODES,
    WEIGHT_COUNT,
    WEIGHT_SHAPES,
    TransformerWeights,
    embed_rows,
    encode_labelled_rows,
    unpack_weights,
)

CELLS, NEW = 8000, 28  #: Cells of a step, about, and new rows of a table.
RATE, WARM, FALL, DECAY = (
    4e-3,
    50,
    0.5,
    0.01,
)  #: Step size, warmup steps, fraction of steps with decay, and weight decay.
AGAIN = 1.2e-3  #: The step size of a run that begins with trained weights; it falls from the start.
WINDOW, CLIP = 0.1, 1.0  #: The weights are averaged over about this fraction of the steps so far.
REAL, NUMERIC = 0.4, 0.3  #: Fraction of the steps on real tables, and of these on their numeric columns alone.
#: Weight of the loss by prototypes of rows read with their class; the remainder is of rows read without it.
KNOWN_WEIGHT = 0.3
SAVE = 120.0  #: Seconds between states that are written.


def draw_size(generator: torch.Generator) -> tuple[int, int, int, int]:
    """Sample the numbers of tables, labelled rows and columns of a step, and the minimum rows per class."""

    def draw(low: float, high: float) -> int:
        return round(low * math.exp(math.log(high / low) * float(torch.rand((), generator=generator))))

    few = float(torch.rand((), generator=generator)) < 0.35
    labelled, columns = draw(2, 24) if few else draw(6, 220), draw(2, 56)
    tables = max(2, round(CELLS / ((2 * labelled + NEW) * (columns + 1))))
    return tables, labelled, columns, (1, 2, 3, 5, 8, 15, 25, 50)[int(torch.randint(8, (), generator=generator))]


def classify(weights: TransformerWeights, episodes: Episodes, labelled: int) -> tuple[Tensor, Tensor]:
    """Compute cosines (tables, new rows, CLASS_CODES) to prototypes, of rows embedded with and without their class."""
    cells, classes, _ = episodes
    memory = encode_labelled_rows(weights, cells[:, :labelled], classes[:, :labelled])
    read = embed_rows(weights, torch.cat([cells[:, labelled:], cells[:, :labelled]], dim=1), memory)
    new, again = read.split([cells.shape[1] - labelled, labelled], dim=1)
    hot = F.one_hot(classes[:, :labelled], CLASS_CODES).to(new)
    prototypes = F.normalize(hot.transpose(1, 2) @ again, dim=2)
    return new @ memory.prototypes.transpose(1, 2), new @ prototypes.transpose(1, 2)


def evaluate(weights: TransformerWeights, factor: Tensor, episodes: Episodes, labelled: int) -> tuple[Tensor, Tensor]:
    """Compute the loss and the accuracy on new rows whose class is known."""
    _, classes, known = episodes
    absent = ~mask_seen(classes, labelled)[:, None]
    truth = classes[:, labelled:].masked_fill(~known[:, labelled:], -100)
    logits = [(factor * cosines).masked_fill(absent, -1e9) for cosines in classify(weights, episodes, labelled)]
    with_class, new = (F.cross_entropy(part.transpose(1, 2), truth) for part in logits)
    right = (logits[1].argmax(dim=2) == truth)[known[:, labelled:]].float().mean()
    return KNOWN_WEIGHT * with_class + (1 - KNOWN_WEIGHT) * new, right


class Trainer:
    """A training run that can be saved and resumed without a change of its result.

    Args:
        goal: Tables that it sees in all.
        weights: (WEIGHT_COUNT,) to begin with, those of an earlier run; None for random ones.
    """

    def __init__(self, goal: int, weights: Tensor | None = None) -> None:
        self.goal, self.tables, self.step = goal, 0, 0
        seed = 0 if weights is None else zlib.crc32(weights.numpy().tobytes())  # other tables than before
        self.generator = torch.Generator().manual_seed(seed)
        self.real = Real("training")
        self.weights = {name: _start(name, shape, self.generator) for name, shape in WEIGHT_SHAPES.items()}
        self.rate, self.fall = (RATE, FALL) if weights is None else (AGAIN, 1.0)
        if weights is not None:
            for name, value in unpack_weights(weights).items():
                self.weights[name] = value.clone().requires_grad_()
        self.factor = torch.tensor(2.0, requires_grad=True)  #: Logarithm of what multiplies cosines.
        self.average = [value.detach().clone() for value in self.values]
        matrices = [value for name, value in self.weights.items() if name[0].isdigit() and value.ndim == 2]
        others = [value for value in self.values if all(value is not matrix for matrix in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    @property
    def values(self) -> list[Tensor]:
        """The trained parameters."""
        return [*self.weights.values(), self.factor]

    def advance(self) -> float:
        """Take a training step; return its loss."""
        size = draw_size(self.generator)
        count, labelled, columns, per_class = size
        episodes = None
        if float(torch.rand((), generator=self.generator)) < REAL:
            numeric = float(torch.rand((), generator=self.generator)) < NUMERIC
            episodes = self.real.draw(self.generator, count, labelled, NEW, columns, numeric=numeric)
        if episodes is None:
            episodes = make_episodes(self.generator, count, labelled, NEW, columns, per_class)
        left = max(0.0, 1 - self.tables / self.goal)
        rate = self.rate * min(1, (self.step + 1) / WARM) * min(1, left / self.fall)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss, _ = evaluate(self.weights, self.factor.exp(), episodes, labelled)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.values, CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.tables += count
        step_size = min(1.0, (1 / WINDOW + 1) / (self.step + 10))
        with torch.no_grad():
            for mean, value in zip(self.average, self.values, strict=True):
                mean.lerp_(value, step_size)
        return float(loss.detach())

    def run(self, path: Path, progress: Callable[[int, float], None]) -> None:
        """Train to the goal; the state is written every ``SAVE`` seconds and at the end."""
        saved = time.monotonic()
        while self.tables < self.goal:
            before, loss = self.tables, self.advance()
            progress(self.tables - before, loss)
            if time.monotonic() - saved > SAVE or self.tables >= self.goal:
                write_atomically(path, lambda file: torch.save(self.state(), file))
                saved = time.monotonic()

    def state(self) -> dict[str, Any]:
        """Collect all that the next step depends on."""
        return {
            "goal": self.goal,
            "tables": self.tables,
            "step": self.step,
            "generator": self.generator.get_state(),
            "values": [value.detach() for value in self.values],
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state, except its goal."""
        self.tables, self.step = state["tables"], state["step"]
        self.generator.set_state(state["generator"])
        with torch.no_grad():
            for value, stored in zip(self.values, state["values"], strict=True):
                value.copy_(stored)
        self.average = state["average"]
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)

    def flat_weights(self) -> Tensor:
        """Average the weights, flattened in the order of `unpack_weights`: (WEIGHT_COUNT,) float16."""
        flat = torch.cat([mean.flatten() for mean in self.average[:-1]])
        assert len(flat) == WEIGHT_COUNT
        return flat.half()


def _start(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Initialize a weight."""
    part = name.rpartition(".")[2]
    if part.startswith("norm"):
        value = torch.full(shape, float(not part.endswith("bias")))
    elif part in ("label", "codes"):
        value = 0.5 * torch.randn(shape, generator=generator)
    else:  # as torch.nn.Linear
        value = (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(_count_inputs(name, shape))
    return value.requires_grad_()


def _count_inputs(name: str, shape: tuple[int, ...]) -> int:
    """Get the fan-in of a matrix, or of the matrix of a bias."""
    return WEIGHT_SHAPES[name.removesuffix("_bias")][1] if len(shape) == 1 else shape[1]
