"""The prototype network's own training: episodes of Latin characters, judged on characters that it never saw."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.optimizer_bench.workload import Workload, initial_weights
from analysis.optimizer_bench.workloads.images import load_latin
from protonet.losses import episodic_loss
from protonet.sampling import index_classes, sample_episodes

WIDTH, EMBEDDING, TEMPERATURE = 192, 64, 0.1
HELD_OUT = 5  # every fifth character
N_WAY, N_SHOT, N_QUERY = 20, 1, 4
VALIDATION = 8  # episodes


def build(seed: int) -> Workload:
    """Build the workload; the seed decides the initial weights and the episodes."""
    data = load_latin()
    classes = torch.arange(data.num_classes)
    held_out = classes % HELD_OUT == 0
    index = index_classes(data.y)
    train = index.take(classes[~held_out])
    with initial_weights(seed):
        model = nn.Sequential(nn.Linear(data.x.shape[1], WIDTH), nn.GELU(), nn.Linear(WIDTH, EMBEDDING))
    generator = torch.Generator().manual_seed(seed)
    sizes = {"n_way": N_WAY, "n_shot": N_SHOT, "n_query": N_QUERY}
    fixed = torch.Generator().manual_seed(0)
    validation = sample_episodes(index.take(classes[held_out]), **sizes, n_episodes=VALIDATION, generator=fixed)

    def loss(episodes: Tensor) -> Tensor:
        embeddings = F.normalize(model(data.x[episodes]), dim=-1)  # (episodes, way, shot + query, embedding)
        return episodic_loss(embeddings, n_shot=N_SHOT, temperature=TEMPERATURE)

    def train_loss() -> Tensor:
        return loss(sample_episodes(train, **sizes, n_episodes=1, generator=generator))

    return Workload(model, train_loss, lambda: loss(validation))


WORKLOADS = {"prototype": build}
