"""A workload: a model, a training loss that samples its batches, and a validation loss on a fixed set.

Most workloads are made from a task: functions that make the model, the loss of a batch and the stream of batches, and
the validation data. A training run gives a loss curve: the smoothed validation loss every few steps. The data and
layers that several workloads share are also here: fonts, photographs and Python's sources; small networks.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protonet.datasets import Dataset, load_glyphs
from protonet.errors import optional_packages

#: Steps between two validations, and the decay of the moving average of their losses.
STEPS_PER_VALIDATION, SMOOTHING_DECAY = 10, 0.8
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
IMAGE_SIDE, PIXELS_PER_IMAGE = 28, 28 * 28  #: Size of a picture of a character.
WORD_PATTERN = re.compile(r"[^\W\d]\w+")


class Workload(NamedTuple):
    """A training problem that optimizers are evaluated on: a model, its training loss and its validation loss."""

    model: nn.Module  #: In training mode; all of its parameters are trained.
    train_loss: Callable[[], Tensor]  #: Samples the next batch, and computes its loss, 0-d.
    val_loss: Callable[[], Tensor]
    """Computes the loss, 0-d, of a fixed validation set. Called without gradients, in evaluation mode."""


#: Builds a workload from a seed, which determines initial weights and the order of batches alone.
WorkloadBuilder = Callable[[int], Workload]
BatchStream = Callable[[torch.Generator], Iterator[Any]]  #: Yields batches without end.
AugmentBatch = Callable[[Tensor, torch.Generator], Any]  #: Makes a batch from its rows, with random changes.


@contextmanager
def seed_initial_weights(seed: int) -> Iterator[None]:
    """Seed torch's default initialization within the context; the global random state is restored on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class WorkloadTask(NamedTuple):
    """The parts of a workload that do not depend on its seed."""

    make_model: Callable[[], nn.Module]  #: Makes the model with random weights of torch's global generator.
    loss: Callable[[nn.Module, Any], Tensor]  #: Maps the model and a batch to the loss, 0-d.
    batch_stream: BatchStream
    validation_batch: Any  #: The validation batch.


def make_workload_builder(make_task: Callable[[], WorkloadTask]) -> WorkloadBuilder:
    """Decorate a function that makes a task, and is called once: the result builds a workload from a seed."""
    make_task_once = functools.cache(make_task)

    @functools.wraps(make_task)
    def build(seed: int) -> Workload:
        task = make_task_once()
        with seed_initial_weights(seed):
            model = task.make_model()
        batches = task.batch_stream(torch.Generator().manual_seed(seed))
        return Workload(model, lambda: task.loss(model, next(batches)), lambda: task.loss(model, task.validation_batch))

    return build


def shuffled_batches(rows: Tensor, batch_size: int, augment: AugmentBatch = lambda rows, _: rows) -> BatchStream:
    """Make a stream of shuffled batches of ``batch_size`` rows: a row occurs once per epoch, no batch is incomplete."""

    def stream(generator: torch.Generator) -> Iterator[Any]:
        while True:
            for batch in torch.randperm(len(rows), generator=generator).split(batch_size)[: len(rows) // batch_size]:
                yield augment(rows[batch], generator)

    return stream


def make_seed_zero_generator() -> torch.Generator:
    """Make the random generator for everything that does not depend on the workload's seed, such as validation data."""
    return torch.Generator().manual_seed(0)


def hold_out(rows: Tensor, n_validation: int) -> tuple[Tensor, Tensor]:
    """Shuffle rows (n, ...), and split them into training rows and ``n_validation`` validation rows."""
    order = torch.randperm(len(rows), generator=make_seed_zero_generator())
    validation, train = rows[order].tensor_split([n_validation])
    return train, validation


def make_row_task(
    make_model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    rows: tuple[Tensor, Tensor],
    batch_size: int,
    augment: AugmentBatch = lambda rows, _: rows,
) -> WorkloadTask:
    """Make a task from training and validation rows (n, ...); batches are ``batch_size`` shuffled training rows."""
    train, validation = rows
    stream = shuffled_batches(train, batch_size, augment)
    return WorkloadTask(make_model, loss, stream, augment(validation, make_seed_zero_generator()))


def make_classification_loss(x: Tensor, y: Tensor) -> Callable[[nn.Module, Tensor], Tensor]:
    """Make the cross-entropy of rows x (n, ...) with classes y (n,), a function of a model and row indices."""
    return lambda model, rows: F.cross_entropy(model(x[rows]), y[rows])


def make_classification_task(
    make_model: Callable[[int], nn.Module], data: Dataset, *, n_validation: int, batch_size: int
) -> WorkloadTask:
    """Make the task of classifying the rows of a data set by ``make_model(num_classes)``, with validation rows."""
    loss, rows = make_classification_loss(data.x, data.y), hold_out(torch.arange(len(data.y)), n_validation)
    return make_row_task(functools.partial(make_model, data.num_classes), loss, rows, batch_size)


class LossCurve(NamedTuple):
    """The validation losses of one training run, every few steps."""

    losses: list[float]
    """The bias-corrected moving average of the validation loss, after 0, ``STEPS_PER_VALIDATION``, 2
    ``STEPS_PER_VALIDATION`` ... steps."""
    diverged: bool = False  #: A training or validation loss was not finite, or there was an error; the run ended there.
    step_ms: float = 0.0  #: CPU milliseconds of one ``step()``.

    def first_step_below(self, target: float) -> int | None:
        """Return the first validated step whose smoothed loss is at most the target; None if there is none."""
        hits = (STEPS_PER_VALIDATION * index for index, loss in enumerate(self.losses) if index and loss <= target)
        return next(hits, None)


def train_workload(
    build: WorkloadBuilder,
    seed: int,
    make_optimizer: MakeOptimizer,
    *,
    max_steps: int,
    target: float = -math.inf,
    schedule: Callable[[int], float] | None = None,
    caught_errors: type[Exception] | tuple[()] = (),
) -> LossCurve:
    """Train a workload until its smoothed validation loss reaches a target, or for ``max_steps``.

    ``schedule`` maps a step, from 0 on, to the factor on learning rates; only baselines have one. Errors of the type
    ``caught_errors`` end the run as diverged, with a line on stderr.
    """
    workload = build(seed)
    losses: list[float] = []
    smoothed, weight, seconds, step, diverged = 0.0, 0.0, 0.0, 0, False
    try:
        optimizer = make_optimizer(workload.model.parameters())
        rates = [] if schedule is None else [group["lr"] for group in optimizer.param_groups]
        while True:
            if step % STEPS_PER_VALIDATION == 0:
                loss = compute_validation_loss(workload.model, workload.val_loss)
                if diverged := not math.isfinite(loss):
                    break
                if step:  # the loss before training would drag the average for twenty validations
                    smoothed = SMOOTHING_DECAY * smoothed + (1 - SMOOTHING_DECAY) * loss
                    weight = SMOOTHING_DECAY * weight + (1 - SMOOTHING_DECAY)
                    loss = smoothed / weight
                losses.append(loss)
                if step and loss <= target:
                    break
            if step == max_steps:
                break
            if schedule is not None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * schedule(step)
            optimizer.zero_grad(set_to_none=True)
            batch_loss = workload.train_loss()
            batch_loss.backward()
            if diverged := not math.isfinite(float(batch_loss.detach())):
                break
            started = time.process_time()
            optimizer.step()
            seconds += time.process_time() - started
            step += 1
    except caught_errors as error:
        print(f"{getattr(build, '__name__', 'workload')}, seed {seed}: {error!r}", file=sys.stderr)
        diverged = True
    return LossCurve(losses, diverged, round(1000 * seconds / max(1, step), 3))


def compute_validation_loss(model: nn.Module, val_loss: Callable[[], Tensor]) -> float:
    """Compute the validation loss of a model in evaluation mode, and set training mode again."""
    model.eval()
    with torch.no_grad():
        loss = float(val_loss())
    model.train()
    return loss


@functools.cache
def load_latin_glyphs() -> Dataset:
    """Load pictures of characters, from ASCII to Latin Extended-A: 7,400 rows of 28 * 28 grey values, 310 classes."""
    return load_glyphs(characters=map(chr, range(0x21, 0x180)), copies=2)


@functools.cache
def load_ascii_glyphs() -> Dataset:
    """Load pictures of ASCII characters with augmented copies: 94 classes, 6,800 rows of 28 * 28 grey values."""
    return load_glyphs(characters=map(chr, range(0x21, 0x7F)), copies=6)


def load_photograph(name: str = "china.jpg") -> Tensor:
    """Load a photograph of scikit-learn: levels 0 to 255, (height, width, 3) float32."""
    with optional_packages():
        from sklearn.datasets import load_sample_image  # noqa: PLC0415 - optional
    return torch.tensor(load_sample_image(name)).float()


def standardise(x: Tensor) -> Tensor:
    """Standardize each column of rows x (n, ...) to mean 0 and standard deviation 1."""
    return (x - x.mean(0)) / x.std(0)


@functools.cache
def read_stdlib_sources() -> tuple[dict[str, str], dict[str, str]]:
    """Read the source texts of the standard library's modules by file name: of training and of validation modules."""
    train, validation = dict[str, str](), dict[str, str]()
    # One module of the standard library in ten is for validation.
    validation_module_interval = 10
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        # The side of a module does not depend on the other modules of the Python version.
        side = train if zlib.crc32(path.name.encode()) % validation_module_interval else validation
        side[path.name] = path.read_text(encoding="utf-8")
    return train, validation


def join_stdlib_sources() -> list[str]:
    """Join the sources of `read_stdlib_sources` to a training text and a validation text."""
    return ["".join(modules.values()) for modules in read_stdlib_sources()]


def encode_ascii(text: str) -> Tensor:
    """Encode a text as ASCII codes (size,) int64; other characters become question marks."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def cut_windows(symbols: Tensor, length: int, n: int | None = None) -> Tensor:
    """Cut a sequence (size,) into windows (n, length) without overlap: all, or n windows at equal distances."""
    windows = symbols[: len(symbols) // length * length].view(-1, length)
    return windows if n is None else windows[torch.linspace(0, len(windows) - 1, n).long()]


class ResidualLayers(nn.Module):
    """A sequence of layers whose input is added to their output (residual connection)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to a tensor of the same shape."""
        return torch.add(x, self.layers(x))


class RecurrentStates(nn.Module):
    """A wrapper of a recurrent layer that returns the hidden states of all positions and no final state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, inputs) to (batch, length, width)."""
        states: Tensor = self.layer(x)[0]
        return states


class TokenEmbedding(nn.Module):
    """The sum of token embeddings and position embeddings."""

    def __init__(self, n_symbols: int, length: int, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(n_symbols, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols (batch, length) to (batch, length, width)."""
        return torch.add(self.symbols(symbols), self.positions.weight[: symbols.shape[1]])


def make_mlp(
    *sizes: int,
    linear: Callable[[int, int], nn.Module] = nn.Linear,
    norm: Callable[[int], nn.Module] | None = None,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Make linear layers from each size to the next, with an optional norm and an activation between them."""
    *hidden, last = itertools.pairwise(sizes)
    layers: list[nn.Module] = []
    for inputs, outputs in hidden:
        layers += [linear(inputs, outputs), activation()]
        if norm is not None:
            layers.insert(-1, norm(outputs))
    return nn.Sequential(*layers, linear(*last))


def make_convolutions(*channels: int, stride: int = 1, bias: bool = False) -> list[nn.Module]:
    """Make 3 x 3 convolutions from each number of channels to the next, each with a batch norm and a ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(channels):
        convolve = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        layers += [convolve, nn.BatchNorm2d(outputs), nn.ReLU()]
    return layers


def make_transformer(width: int) -> nn.Module:
    """Make two pre-norm transformer layers of four heads for inputs (batch, length, width), without dropout."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
