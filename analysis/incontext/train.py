"""Training of the tabular transformer: an episode is a table, the loss is the cross-entropy of its new rows."""

from __future__ import annotations

import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from analysis.incontext.episodes import Episodes, mask_labelled_classes, sample_episodes
from analysis.incontext.real import load_real_tables
from protonet._io import write_atomically
from protonet.views.transformer import (
    N_CLASS_CODES,
    WEIGHT_COUNT,
    WEIGHT_SHAPES,
    TransformerWeights,
    embed_rows,
    encode_labelled_rows,
    one_hot,
    unpack_weights,
)

N_NEW_ROWS = 28  #: New rows of a training table.
CELLS_PER_STEP = {"cpu": 8_000, "cuda": 64_000}  #: Approximate number of cells of a step, by device.
#: Choices of table sizes; there are few, because a GPU compiles a training step for each size.
FEW_LABELLED, MANY_LABELLED = (2, 3, 4, 6, 8, 11, 16, 24), (6, 8, 11, 16, 24, 34, 48, 68, 96, 136, 180, 220)
COLUMN_CHOICES, ROWS_PER_CLASS_CHOICES = (2, 3, 4, 5, 7, 9, 12, 16, 22, 30, 42, 56), (1, 2, 3, 5, 8, 15, 25, 50)
WARMUP_STEPS, WEIGHT_DECAY, MAX_GRADIENT_NORM = 200, 0.01, 1.0
SAVE_INTERVAL_SECONDS = 120.0  #: Seconds between writes of the state.
#: Implementations of attention that need no compilation for a new shape.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sample_table_sizes(generator: torch.Generator, cells: int) -> tuple[int, int, int, int]:
    """Sample the numbers of tables, labelled rows, columns and rows per class of a step with about ``cells`` cells."""

    def choose(values: Sequence[int]) -> int:
        return values[int(torch.randint(len(values), (), generator=generator))]

    # Probability that the number of labelled rows is one of ``FEW_LABELLED``.
    few_labelled_probability = 0.35
    few = float(torch.rand((), generator=generator)) < few_labelled_probability
    n_labelled, columns = choose(FEW_LABELLED if few else MANY_LABELLED), choose(COLUMN_CHOICES)
    tables = max(2, round(cells / ((2 * n_labelled + N_NEW_ROWS) * (columns + 1))))
    return tables, n_labelled, columns, choose(ROWS_PER_CLASS_CHOICES)


class EpisodeDataset(Dataset[tuple[Episodes, int]]):
    """A map-style torch data set: the index of a training step gives its episodes of synthetic or real tables."""

    def __init__(self, seed: int, cells: int) -> None:
        self.seed, self.cells, self.real = seed, cells, load_real_tables("training")

    def __getitem__(self, step: int) -> tuple[Episodes, int]:
        """Sample the episodes of a step; return them and their number of labelled rows."""
        generator = torch.Generator().manual_seed(self.seed * 2**31 + step)
        tables, n_labelled, columns, min_class_rows = sample_table_sizes(generator, self.cells)
        episodes = None
        real_table_fraction = 0.3  # fraction of the steps on real tables
        # Fraction of the steps on real tables that have their numeric columns only.
        numeric_table_fraction = 0.3
        if float(torch.rand((), generator=generator)) < real_table_fraction:
            numeric = float(torch.rand((), generator=generator)) < numeric_table_fraction
            episodes = self.real.sample(generator, tables, n_labelled, N_NEW_ROWS, columns, numeric=numeric)
        if episodes is None:
            episodes = sample_episodes(generator, tables, n_labelled, N_NEW_ROWS, columns, min_class_rows)
        return episodes._replace(cells=episodes.cells.half()), n_labelled


class Muon(torch.optim.Optimizer):
    """The optimizer Muon: momentum whose matrices are orthogonalized, with steps scaled to the size of AdamW's.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the step size as in Liu et
    al., "Muon is scalable for LLM training" (2025).
    """

    def __init__(
        self, matrices: Iterable[Tensor], lr: Tensor, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of Muon on all matrices; matrices of the same shape are orthogonalized together."""
        del closure
        for group in self.param_groups:
            shapes = defaultdict[torch.Size, list[Tensor]](list)
            for matrix in group["params"]:
                shapes[matrix.shape].append(matrix)
            for (rows, columns), matrices in shapes.items():
                for matrix in matrices:
                    self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momenta = [self.state[matrix]["momentum"] for matrix in matrices]
                gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                blended = torch._foreach_lerp(gradients, momenta, group["momentum"])
                factor = 0.2 * math.sqrt(max(rows, columns)) * group["lr"]
                steps = (factor * orthogonalize(torch.stack(blended))).unbind()
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_sub_(matrices, steps)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Make matrices (count, rows, columns) nearly orthogonal: five Newton-Schulz steps bring singular values to 1."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (torch.linalg.matrix_norm(x)[:, None, None] + 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)) @ x
    orthogonal: Tensor = (x if wide else x.mT).float()
    return orthogonal


def compute_cosines(weights: TransformerWeights, episodes: Episodes, n_labelled: int) -> tuple[Tensor, Tensor]:
    """Compute the cosines of new rows to class prototypes, each (tables, new rows, classes).

    Prototypes are means of labelled rows, embedded with their class (first result) or without it (second result).
    The first ``n_labelled`` rows of each table are labelled.
    """
    cells, classes, _ = episodes
    with torch.autocast(cells.device.type, torch.bfloat16, enabled=cells.is_cuda), sdpa_kernel(ATTENTION_BACKENDS):
        memory = encode_labelled_rows(weights, cells[:, :n_labelled], classes[:, :n_labelled])
        read = embed_rows(weights, torch.cat([cells[:, n_labelled:], cells[:, :n_labelled]], dim=1), memory).float()
    new, again = read.split([cells.shape[1] - n_labelled, n_labelled], dim=1)
    sums = one_hot(classes[:, :n_labelled], N_CLASS_CODES, new.dtype).transpose(1, 2) @ again
    prototypes = F.normalize(sums, dim=2)
    return new @ memory.prototypes.float().transpose(1, 2), new @ prototypes.transpose(1, 2)


def compute_loss(weights: TransformerWeights, cosine_scale: Tensor, episodes: Episodes, n_labelled: int) -> Tensor:
    """Compute the mean cross-entropy of new rows whose class has a labelled row; logits are scaled cosines."""
    _, classes, known = episodes
    absent = ~mask_labelled_classes(classes, n_labelled)[:, None]
    truth = classes[:, n_labelled:].masked_fill(~known[:, n_labelled:], -100)
    logits = (cosine_scale * cosines for cosines in compute_cosines(weights, episodes, n_labelled))
    with_class, new = (F.cross_entropy(x.masked_fill(absent, -1e9).transpose(1, 2), truth) for x in logits)
    # Weight of the loss by prototypes of rows that are embedded with their class; the rest is by rows without class.
    labelled_prototype_loss_weight = 0.3
    return labelled_prototype_loss_weight * with_class + (1 - labelled_prototype_loss_weight) * new


class Trainer:
    """Training of the transformer, which can be saved and resumed.

    On a GPU, each step is a CUDA graph, captured when a size of tables first occurs: launching its thousands of small
    kernels one by one takes four times as long as they run. Steps are larger there, and in bfloat16.

    Args:
        max_tables: Total number of training tables.
        weights: (WEIGHT_COUNT,) initial weights, of an earlier run; None for random weights.
        device: The device of the training.
        jobs: Number of processes that sample tables; 0 to sample them in this process.
        seconds: Time limit, with which the learning rate falls; the result then depends on the speed of the machine.
    """

    def __init__(
        self,
        max_tables: int,
        weights: Tensor | None = None,
        *,
        device: str = "cpu",
        jobs: int = 0,
        seconds: float = math.inf,
    ) -> None:
        self.max_tables, self.tables, self.step = max_tables, 0, 0
        self.device, self.jobs, self.seconds = torch.device(device), jobs, seconds
        seed = 0 if weights is None else zlib.crc32(weights.numpy().tobytes())  # other tables than in the earlier run
        self.batches = EpisodeDataset(seed, CELLS_PER_STEP[self.device.type])
        generator = torch.Generator().manual_seed(seed)
        start = {name: _initialize_weight(name, shape, generator) for name, shape in WEIGHT_SHAPES.items()}
        start |= {} if weights is None else unpack_weights(weights)
        self.weights = {name: value.to(self.device, copy=True).requires_grad_() for name, value in start.items()}
        self.log_scale = torch.tensor(2.0, device=self.device, requires_grad=True)
        self.average = [value.detach().clone() for value in self.parameters]
        self.rate = torch.tensor(0.0, device=self.device)  #: The learning rate.
        hidden = [value for name, value in self.weights.items() if name[0].isdigit() or name == "row"]
        matrices = [value for value in hidden if value.ndim == 2]
        others = [value for value in self.parameters if all(value is not matrix for matrix in matrices)]
        on_gpu = self.device.type == "cuda"
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, self.rate, weight_decay=WEIGHT_DECAY),
            torch.optim.AdamW(others, self.rate, (0.9, 0.98), weight_decay=0.0, fused=True, capturable=on_gpu),
        ]
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Episodes, Tensor]] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that are trained: the transformer's weights and the logarithm of the scale of the cosines."""
        return [*self.weights.values(), self.log_scale]

    def train_step(self, episodes: Episodes, n_labelled: int, finished_fraction: float) -> Tensor:
        """Take a training step, given the finished fraction of the training, for the learning rate; return the loss."""
        max_learning_rate = 3e-3  # learning rate after the warmup; it then falls linearly to 0
        self.rate.fill_(max_learning_rate * min(1, (self.step + 1) / WARMUP_STEPS) * max(0.0, 1 - finished_fraction))
        loss = (self._replay_cuda_graph if self.device.type == "cuda" else self._update_weights)(episodes, n_labelled)
        self.step += 1
        self.tables += len(episodes.classes)
        # Weights are averaged over about this last fraction of the steps.
        averaged_step_fraction = 0.1
        with torch.no_grad():
            weight = min(1.0, (1 / averaged_step_fraction + 1) / (self.step + 10))
            torch._foreach_lerp_(self.average, self.parameters, weight)
        return loss

    def _update_weights(self, episodes: Episodes, n_labelled: int) -> Tensor:
        """Compute the loss and its gradient, and update the weights."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        episodes = episodes._replace(cells=episodes.cells.float())
        loss = compute_loss(self.weights, self.log_scale.exp(), episodes, n_labelled)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def _replay_cuda_graph(self, episodes: Episodes, n_labelled: int) -> Tensor:
        """Replay the CUDA graph of `_update_weights` for tables of this size; capture it for a new size."""
        size = (n_labelled, *episodes.cells.shape)
        if size not in self.graphs:
            static = Episodes(*(part.to(self.device) for part in episodes))
            if not self.graphs:  # allocations of the first step must not be in a graph
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self._update_weights(static, n_labelled)
                torch.cuda.current_stream().wait_stream(side)
                self.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="relaxed"):
                loss = self._update_weights(static, n_labelled)
            self.graphs[size] = graph, static, loss
        graph, static, loss = self.graphs[size]
        for old, new in zip(static, episodes, strict=True):
            old.copy_(new)
        graph.replay()
        return loss.clone()

    def train(self, path: Path, progress: Callable[[int, Tensor], None]) -> None:
        """Train to the end; the state is written to a path every `SAVE_INTERVAL_SECONDS` seconds and at the end."""
        started = saved = time.monotonic()
        loader = DataLoader(
            self.batches,
            batch_size=None,
            sampler=range(self.step, 2**31),
            num_workers=self.jobs,
            prefetch_factor=8 if self.jobs else None,
            worker_init_fn=_use_one_thread,
        )
        finished_fraction = self.tables / self.max_tables
        for episodes, n_labelled in loader if finished_fraction < 1 else ():
            before, loss = self.tables, self.train_step(episodes, n_labelled, finished_fraction)
            progress(self.tables - before, loss)
            now = time.monotonic()
            finished_fraction = max(self.tables / self.max_tables, (now - started) / self.seconds)
            if now - saved > SAVE_INTERVAL_SECONDS or finished_fraction >= 1:
                write_atomically(path, lambda file: torch.save(self.state_dict(), file))
                saved = now
            if finished_fraction >= 1:
                break

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training, from which `load_state_dict` resumes it."""
        return {
            "goal": self.max_tables,
            "tables": self.tables,
            "step": self.step,
            "values": [value.detach() for value in self.parameters],
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`, but not its total number of training tables (``max_tables``)."""
        self.tables, self.step = state["tables"], state["step"]
        with torch.no_grad():
            for values, stored in ((self.parameters, state["values"]), (self.average, state["average"])):
                torch._foreach_copy_(values, stored)
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
            for group in optimizer.param_groups:
                group["lr"] = self.rate

    def average_weights(self) -> Tensor:
        """Return the weights averaged over steps, (WEIGHT_COUNT,) float16, in the order of `unpack_weights`."""
        flat = torch.cat([mean.flatten() for mean in self.average[:-1]])
        assert len(flat) == WEIGHT_COUNT
        return flat.half().cpu()


def _use_one_thread(_: int) -> None:
    """Limit a worker process to one thread."""
    torch.set_num_threads(1)


def _initialize_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Sample the initial value of a weight, given its name and shape."""
    part = name.rpartition(".")[2]
    if part.startswith("norm"):
        value = torch.full(shape, float(not part.endswith("bias")))
    elif part in ("label", "codes", "row_codes"):
        value = 0.5 * torch.randn(shape, generator=generator)
    else:  # as torch.nn.Linear
        inputs = WEIGHT_SHAPES[name.removesuffix("_bias")][1]
        value = (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(inputs)
    return value
