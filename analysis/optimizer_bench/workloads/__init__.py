"""The visible workloads, by name: a function of a seed each."""

from __future__ import annotations

from analysis.optimizer_bench.workload import Build
from analysis.optimizer_bench.workloads import gnn, images, prototype, recommender, text

WORKLOADS: dict[str, Build] = {
    "gpt": text.build_gpt,
    "gru": text.build_gru,
    "recommender": recommender.build,
    "cnn": images.build_cnn,
    "vit": images.build_vit,
    "vae": images.build_vae,
    "gnn": gnn.build,
    "prototype": prototype.build,
}
