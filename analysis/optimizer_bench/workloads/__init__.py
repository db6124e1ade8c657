"""The visible workloads: one file each, with one public ``build``."""

from __future__ import annotations

from analysis.optimizer_bench.workload import Build
from analysis.optimizer_bench.workloads import cnn, gnn, gpt, gru, prototype, recommender, vae, vit

WORKLOADS: dict[str, Build] = {
    "gpt": gpt.build,
    "gru": gru.build,
    "recommender": recommender.build,
    "cnn": cnn.build,
    "vit": vit.build,
    "vae": vae.build,
    "gnn": gnn.build,
    "prototype": prototype.build,
}
