"""The prototype network's own training: episodes of Latin characters, judged on characters that it never saw."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Task, seed_0, workload
from analysis.optimizer_bench.workloads.data import load_latin
from analysis.optimizer_bench.workloads.models import make_mlp
from protonet.losses import episodic_loss
from protonet.sampling import index_classes, sample_episodes

WIDTH, EMBEDDING, TEMPERATURE = 192, 64, 0.1
HELD_OUT = 5  #: Every fifth character.
EPISODE = {"n_way": 20, "n_shot": 1, "n_query": 4}
VALIDATION = 8  #: Episodes.


@workload
def prototype() -> Task:
    """Tell a few classes apart by the nearest mean of embeddings; the seed decides the episodes."""
    data = load_latin()
    classes = torch.arange(data.num_classes)
    index = index_classes(data.y)
    train, held_out = (index.take(classes[(classes % HELD_OUT == 0) == held]) for held in (False, True))

    def stream(generator: torch.Generator) -> Iterator[Tensor]:
        while True:
            yield sample_episodes(train, **EPISODE, n_episodes=1, generator=generator)

    def loss(model: nn.Module, episodes: Tensor) -> Tensor:
        embeddings = F.normalize(model(data.x[episodes]), dim=-1)  # (episodes, way, shot + query, embedding)
        return episodic_loss(embeddings, n_shot=EPISODE["n_shot"], temperature=TEMPERATURE)

    make = partial(make_mlp, data.x.shape[1], WIDTH, EMBEDDING, activation=nn.GELU)
    validation = sample_episodes(held_out, **EPISODE, n_episodes=VALIDATION, generator=seed_0())
    return Task(make, loss, stream, validation)


WORKLOADS = {"prototype": prototype}
